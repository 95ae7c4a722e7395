"""The cells of FedGraph's figures: graphs, methods, clocks, and shapes of federation and model."""

import statistics
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product
from typing import Any

from silograph.core.config import Scalar
from silograph.study.cells import Cell, Line
from silograph.study.reproduce import StudyLines, cell

SEEDS = (0, 1, 2)
DATASETS = ("cora", "citeseer", "pubmed")
SLOW = "one slow link"
CLOCKS = {
    "equal": {"speeds": "equal", "links": "10:0.05"},
    "lognormal": {"speeds": "lognormal", "links": "10:0.05"},
    SLOW: {"speeds": "equal", "links": ",".join(["0.5:0.2", *["10:0.05"] * 19])},
}
# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = {
    "clients": 20,
    "partition": "shares",
    "normalize": "none",
    "participation": 1.0,
    "model": "gcn",
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
}
ALL = {"kappa": 1024, "keep_1": 1.0, "keep_2": 1.0}
HALF = {"kappa": 256, "keep_1": 0.5, "keep_2": 0.5}
OURS, FULL, SAGE, FASTGCN = "FedGraph, half", "full batch", "GraphSAGE", "FastGCN"
EVERYWHERE, NOWHERE = "allShare, half", "nonShare, half"
FEDGRAPH: dict[str, Any] = {"method": "fedgraph", "server_optimizer": "none"}
METHODS: dict[str, dict[str, Any]] = {
    OURS: FEDGRAPH | {"options": {**HALF, "share": "hidden"}},
    EVERYWHERE: FEDGRAPH | {"options": {**HALF, "share": "all"}},
    NOWHERE: FEDGRAPH | {"options": {**HALF, "share": "none"}},
    FULL: FEDGRAPH | {"options": {**ALL, "share": "hidden"}},
    SAGE: {"method": "fedavg", "batch_size": 256, "fanout": "25,10"},
    FASTGCN: {
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
    "FedAvg, features of 20 % fetched": {"method": "fedavg", "collect": 0.2},
    "label-guided": {"method": "label_guided"},
    "BNS, 10 %": {"method": "bns", "options": {"rate": 0.1}},
}
BASELINES = (FULL, SAGE, FASTGCN, "FedAvg", "FedOpt")
IN_ALL = (OURS, EVERYWHERE, NOWHERE, *BASELINES)
PAPERS = (OURS, FULL, SAGE, FASTGCN)  # of its figures 7 to 9 and 12
FETCHED = "FedAvg, features of 20 % fetched"

# Shapes differ from the plain one in what stands here; global training knows no copies of nodes.
PLAIN = ""
VARIANCES = {"variance .5": 0.5, "variance 1": 1.0}
DEPTHS = {"3 layers": 3, "4 layers": 4}
CLASSES, METIS, MANY = "2 classes each", "METIS", "50 clients"
SHAPES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    **{name: {"share_variance": variance} for name, variance in VARIANCES.items()},
    **{name: {"layers": layers} for name, layers in DEPTHS.items()},
    CLASSES: {"share_classes": 2},
    METIS: {"partition": "metis"},
    MANY: {"clients": 50},
}
ROWS = {
    (PLAIN, "equal"): (*IN_ALL, FETCHED),
    (PLAIN, "lognormal"): IN_ALL,
    (PLAIN, SLOW): (*PAPERS, NOWHERE, "FedAvg"),
    **{(name, "equal"): PAPERS for name in VARIANCES},
    **{(name, "equal"): (OURS, FULL) for name in DEPTHS},
    (CLASSES, "equal"): (*PAPERS, NOWHERE, "FedAvg"),
    (MANY, "equal"): PAPERS,
    (METIS, "equal"): (*PAPERS, NOWHERE, "FedAvg", "FedOpt", FETCHED, "label-guided", "BNS, 10 %"),
}


@cache
def cell_of(dataset: str, method: str, clock: str, seed: int, shape: str = PLAIN) -> Cell:
    """Return a cell."""
    labels: dict[str, Scalar] = {"dataset": dataset, "method": method, "clock": clock, "seed": seed}
    labels |= {"shape": shape} if shape else {}
    own = {"dataset": dataset, "seed": seed, **CLOCKS[clock]}
    return cell(labels, **PROTOCOL | METHODS[method] | SHAPES[shape] | own)


def cells(found: StudyLines) -> list[Cell]:
    """Return all cells: the first seed of Cora first, in every shape."""
    del found
    return [
        cell_of(dataset, method, clock, seed, shape)
        for seed, dataset in product(SEEDS, DATASETS)
        for (shape, clock), methods in ROWS.items()
        for method in methods
    ]


def lines_of(
    found: StudyLines, dataset: str, method: str, clock: str = "equal", shape: str = PLAIN
) -> list[Line]:
    """Return the lines of all seeds that have run."""
    return found.scored([cell_of(dataset, method, clock, seed, shape) for seed in SEEDS])


def by_shape(found: StudyLines, method: str, shapes: Iterable[str]) -> dict[str, list[Line]]:
    """Return the lines on Cora of those seeds that ran in every one of these shapes that ran."""
    every = {shape: lines_of(found, "cora", method, "equal", shape) for shape in shapes}
    known = {shape: lines for shape, lines in every.items() if lines}
    seeds = [{line["labels"]["seed"] for line in lines} for lines in known.values()]
    common = set.intersection(*seeds) if seeds else set()
    return {
        shape: [line for line in lines if line["labels"]["seed"] in common]
        for shape, lines in known.items()
    }


def curve_of(line: Line) -> tuple[list[float], list[float]]:
    """Return validation scores by round, and the virtual seconds so far."""
    return line["curve"]["val"], line["curve"]["virtual_seconds"]


def time_to(line: Line, goal: float) -> float | None:
    """Return the virtual seconds until a validation score; None if it was not reached."""
    return next((s for score, s in zip(*curve_of(line), strict=True) if score >= goal), None)


def best_baseline(
    found: StudyLines, dataset: str, clock: str = "equal", shape: str = PLAIN
) -> list[Line]:
    """Return the lines of the baseline with the best validation score, a mean over its seeds.

    Those that have run with the most seeds are compared; no lines if none has run.
    """
    names = [method for method in BASELINES if method in ROWS[shape, clock]]
    every = [lines_of(found, dataset, method, clock, shape) for method in names]
    return max(every, key=lambda lines: (len(lines), sum(map(reached, lines))))


def seed_of(line: Line) -> int:
    """Return the seed of a run."""
    seed: int = line["labels"]["seed"]
    return seed


def reached(line: Line) -> float:
    """Return the best validation score of a run."""
    return max(curve_of(line)[0])


def goals_of(
    found: StudyLines, dataset: str, clock: str = "equal", shape: str = PLAIN
) -> dict[int, float]:
    """Return the best baseline's validation score minus a point, by seed: splits differ by seed."""
    lines = best_baseline(found, dataset, clock, shape)
    return {seed_of(line): reached(line) - 0.01 for line in lines}


def mean_time(lines: Iterable[Line], goals: Mapping[int, float]) -> str:
    """Return the mean virtual seconds to the goals of lines' seeds, or how many reached theirs."""
    times = [time_to(line, goals[seed_of(line)]) for line in lines if seed_of(line) in goals]
    got = [t for t in times if t is not None]
    if len(got) < len(times):
        return f"{len(got)} of {len(times)}"
    return f"{statistics.mean(got):.1f}" if got else "-"


def scores(line: Line) -> tuple[float, float]:
    """Return the test accuracy of the best validation round, and that of the last round."""
    judge = line["judge"]
    return line["test"][judge]["accuracy"], line["last"][f"test_{judge}_accuracy"]
