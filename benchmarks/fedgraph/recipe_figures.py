"""FedGraph beside full batches, GraphSAGE and FastGCN: accuracy against virtual time, and sharing.

The paper's setting: each client draws a share of all nodes, normal with mean .8; hidden 16, dropout
.5, Adam .01, batches of 256. Rates are fixed here; the agent has a page of its own.
"""

from functools import cache
from itertools import product
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.markdown import markdown_table
from silograph.study.cells import Cell, Line
from silograph.study.reproduce.recipe import Found, Page, Recipe, cell, spread

SEEDS = (0, 1, 2)
DATASETS = ("cora", "citeseer", "pubmed")
CLOCKS = {"equal": "equal", "lognormal": "lognormal"}
# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = {
    "clients": 20,
    "partition": "shares",
    "normalize": "none",
    "participation": 1.0,
    "layers": 2,
    "hidden": 16,
    "dropout": 0.5,
    "rounds": 100,
    "local_epochs": 1,
    "optimizer": "adam",
    "lr": 0.01,
    "weight_decay": 5e-4,
    "keep_optimizer": True,
    "kernels": "torch",
    "links": "10:0.05",
}
ALL = {"kappa": 1024, "keep_1": 1.0, "keep_2": 1.0}
HALF = {"kappa": 256, "keep_1": 0.5, "keep_2": 0.5}
METHODS: dict[str, dict[str, Any]] = {
    "FedGraph, half": {"method": "fedgraph", "options": {**HALF, "share": "hidden"}},
    "allShare, half": {"method": "fedgraph", "options": {**HALF, "share": "all"}},
    "nonShare, half": {"method": "fedgraph", "options": {**HALF, "share": "none"}},
    "full batch": {"method": "fedgraph", "options": {**ALL, "share": "hidden"}},
    "GraphSAGE": {"method": "fedavg", "batch_size": 256, "fanout": "25,10"},
    "FastGCN": {
        "method": "fedavg",
        "batch_size": 256,
        "neighbors": "fastgcn",
        "options": {"neighbors.size": 256},
    },
    "FedAvg": {"method": "fedavg"},
    "FedOpt": {
        "method": "fedopt",
        "optimizer": "sgd",
        "lr": 0.1,
        "keep_optimizer": False,
        "options": {"server_relative_tau": 0.1},
    },
}
BASELINES = ("full batch", "GraphSAGE", "FastGCN", "FedAvg", "FedOpt")


@cache
def cell_of(dataset: str, method: str, clock: str, seed: int) -> Cell:
    """Return a cell."""
    labels: dict[str, Scalar] = {"dataset": dataset, "method": method, "clock": clock, "seed": seed}
    own = {"dataset": dataset, "speeds": CLOCKS[clock], "seed": seed}
    return cell(labels, **PROTOCOL | METHODS[method] | own)


def cells(found: Found) -> list[Cell]:
    """Return all cells, the first seed of Cora first."""
    del found
    places = product(CLOCKS, SEEDS, DATASETS, METHODS)
    return [cell_of(dataset, method, clock, seed) for clock, seed, dataset, method in places]


def lines_of(found: Found, dataset: str, method: str, clock: str) -> list[Line]:
    """Return the lines of all seeds that have run."""
    return found.scored([cell_of(dataset, method, clock, seed) for seed in SEEDS])


def curve_of(line: Line) -> tuple[list[float], list[float]]:
    """Return validation scores by round, and the virtual seconds so far."""
    return line["curve"]["val"], line["curve"]["virtual_seconds"]


def time_to(line: Line, goal: float) -> float | None:
    """Return the virtual seconds until a validation score; None if it was not reached."""
    return next((s for score, s in zip(*curve_of(line), strict=True) if score >= goal), None)


def goal_of(found: Found, dataset: str, clock: str) -> float:
    """Return the best baseline's validation score, mean over its seeds, minus a point."""
    best = [
        [max(curve_of(line)[0]) for line in lines_of(found, dataset, method, clock)]
        for method in BASELINES
    ]
    return max((sum(scores) / len(scores) for scores in best if scores), default=1.0) - 0.01


def table(found: Found) -> str:
    """Return scores and costs by graph, clock and method."""
    rows = []
    for dataset, clock, method in product(DATASETS, CLOCKS, METHODS):
        lines, goal = lines_of(found, dataset, method, clock), goal_of(found, dataset, clock)
        if not lines:
            continue
        scores = [line["test"][line["judge"]]["accuracy"] for line in lines]
        times = [time_to(line, goal) for line in lines]
        reached = [t for t in times if t is not None]
        until = f"{sum(reached) / len(reached):.1f}" if len(reached) == len(times) else "-"
        costs = [(line["bytes"]["total"] / 1e6, line["flops"] / 1e9) for line in lines]
        mega, giga = (sum(values) / len(lines) for values in zip(*costs, strict=True))
        total = sum(curve_of(line)[1][-1] for line in lines) / len(lines)
        cost = [f"{total:.1f}", f"{mega:.0f}", f"{giga:.0f}"]
        rows.append(
            [
                dataset,
                clock,
                method,
                str(len(lines)),
                spread(scores, 1),
                f"{goal:.3f}",
                until,
                *cost,
            ]
        )
    head = ["graph", "clock", "method", "seeds", "test", "goal", "virtual s to it", "virtual s"]
    return markdown_table([*head, "MB", "GFlop"], rows)


def page(found: Found) -> Page:
    """Return the table."""
    return Page({"scores": table(found)})


TEXT = """# FedGraph with fixed rates

`silograph reproduce fedgraph/figures` makes this page; `--only dataset=cora` runs Cora
only. The paper (Chen et al., 2022) gives curves, no tables: on Cora 75 % after 5 s for FedGraph
and after more than 10 s for the others, about 10 points less without sharing.

20 clients, each with a share of all nodes (mean .8), 100 rounds of one iteration, Adam .01. Scores
are test accuracies at the best validation round, in the `server` view: FedGraph's nodes are seen
with halo rows of the layers that it shares, those of the others through their own client's graph.
The goal is the best validation score of full batches, GraphSAGE, FastGCN, FedAvg and FedOpt, minus
a point. Links have 10 MB/s and 0.05 s for each call; a round of FedGraph makes five calls, one of
FedAvg one.

<!-- scores -->

<!-- scores -->
"""

RECIPE = Recipe(
    "fedgraph/figures",
    "FedGraph at fixed rates beside full batches, GraphSAGE and FastGCN",
    cells,
    page,
    TEXT,
)
