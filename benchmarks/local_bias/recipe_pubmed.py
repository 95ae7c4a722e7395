"""PubMed in 8 silos: global training beside tables 2 and 5 of its paper.

Zhang, Luo, Feng, Liu, Zhou and Zheng, "Tackling the local bias in federated graph learning", 2021:
PubMed, split 18,217 / 500 / 1,000 (table 4), 8 silos cut at random, 2 layers of 128, dropout .2,
Adam with the rate from {.1, .01, .001} that validation picks, 200 epochs, 5,000 drawn nodes.
"""

import statistics
from functools import cache
from itertools import product
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Cell, Line
from silograph.study.paired_tests import paired_test
from silograph.study.reproduce import (
    Curves,
    Page,
    Recipe,
    StudyLines,
    beside,
    cell,
    spread,
)

SEEDS, RATES = (0, 1, 2, 3, 4), (0.01, 0.1, 0.001)
PROTOCOL: dict[str, Any] = {
    "dataset": "pubmed",
    "largest_component": False,
    "normalize": "none",
    "split": "full",
    "partition": "random",
    "clients": 8,
    "layers": 2,
    "hidden": 128,
    "dropout": 0.2,
    "rounds": 200,
    "local_epochs": 1,
    "optimizer": "adam",
    "weight_decay": 0.0,
    "eval_every": 2,
}
DRAWN = {"sample": 5000, "rows": "drawn", "weigh_loss": False}
ALL: dict[str, Any] = {"method": "label_guided", "keep_optimizer": True}
GUIDED = ALL | {"options": DRAWN | {"normalize": "paper"}}
CONDITIONAL = ALL | {"options": DRAWN | {"normalize": "conditional"}}
# What runs, and the micro F1 of the paper where it has the same (tables 2 and 5).
HALF: dict[str, Any] = {"dropout": 0.5}
BNS: dict[str, Any] = {"method": "bns", "keep_optimizer": True, "options": {"rate": 0.1}}
CORRECTED: dict[str, Any] = {
    "method": "llcg",
    "keep_optimizer": True,
    "options": {"correction_steps": 5},
}
SAINT: dict[str, Any] = {"method": "graphsaint", "keep_optimizer": True}
VARIANTS: dict[str, tuple[dict[str, Any], float | None]] = {
    "centralized, GCN": ({"method": "centralized", "keep_optimizer": True}, 87.80),
    "centralized, GraphConv": (
        {"method": "centralized", "keep_optimizer": True, "model": "graphconv"},
        90.50,
    ),
    "centralized, GraphSAGE, fan-out 10": (
        {
            "method": "centralized",
            "keep_optimizer": True,
            "model": "sage",
            "fanout": "10,10",
            "batch_size": 5000,
        },
        90.10,
    ),
    "centralized, GraphSAINT, walks": (
        SAINT | {"options": {"sampler": "walk", "budget": 2000}},
        89.20,
    ),
    "centralized, GraphSAINT, nodes": (
        SAINT | {"options": {"sampler": "node", "budget": 6000}},
        None,
    ),
    "centralized, GraphSAINT, edges": (
        SAINT | {"options": {"sampler": "edge", "budget": 3000}},
        None,
    ),
    "FedAvg, GCN": ({"method": "fedavg", "keep_optimizer": False}, 87.70),
    "FedAvg, GCN, Adam kept": ({"method": "fedavg", "keep_optimizer": True}, 87.70),
    "FedAvg, GCN, a fifth of the neighbors collected": (
        {"method": "fedavg", "keep_optimizer": False, "collect": 0.2},
        None,
    ),
    "LLCG, GCN, the server holds all": ({"method": "llcg", "keep_optimizer": False}, 89.20),
    "LLCG, GCN, the server holds all, Adam kept": (
        {"method": "llcg", "keep_optimizer": True},
        89.20,
    ),
    "LLCG, GCN, the server holds a tenth": (
        {"method": "llcg", "keep_optimizer": False, "options": {"server_share": 0.1}},
        None,
    ),
    "FedSage+, GraphSAGE, Adam kept": (
        {
            "method": "fedsageplus",
            "keep_optimizer": True,
            "model": "sage",
            "options": {"generator_epochs": 100},
        },
        89.05,
    ),
    "CAGNET, GCN": ({"method": "cagnet", "keep_optimizer": True}, 88.20),
    "BNS-GCN, rate .1": (BNS, 90.20),
    "global, GCN, all nodes": (ALL, 87.60),
    "global, GCN, drawn, not normalized": (ALL | {"options": DRAWN | {"normalize": "none"}}, 89.70),
    "global, GCN, drawn": (GUIDED, 89.90),
    "global, GCN, drawn, conditional": (CONDITIONAL, None),
    "global, GCN, 10,000 drawn, conditional": (
        ALL | {"options": DRAWN | {"sample": 10000, "normalize": "conditional"}},
        None,
    ),
    "global, GraphConv, drawn": (GUIDED | {"model": "graphconv"}, 90.70),
    "global, GraphConv, drawn, conditional": (CONDITIONAL | {"model": "graphconv"}, None),
    "global, GraphConv, all nodes": (ALL | {"model": "graphconv"}, None),
    # The paper gives one dropout, .2, and no backbone of its baselines' own papers.
    "centralized, GCN, dropout .5": (
        {"method": "centralized", "keep_optimizer": True, "dropout": 0.5},
        87.80,
    ),
    "FedAvg, GCN, dropout .5": ({"method": "fedavg", "keep_optimizer": False, **HALF}, 87.70),
    "global, GCN, all nodes, dropout .5": (ALL | HALF, 87.60),
    "global, GCN, drawn, dropout .5": (GUIDED | HALF, 89.90),
    "global, GCN, drawn, conditional, dropout .5": (CONDITIONAL | HALF, None),
    "global, GCN, 10,000 drawn, conditional, dropout .5": (
        ALL | HALF | {"options": DRAWN | {"sample": 10000, "normalize": "conditional"}},
        None,
    ),
    "BNS-GCN, GraphSAGE, rate .1": (BNS | {"model": "sage"}, 90.20),
    "BNS-GCN, GraphSAGE, rate .1, dropout .5": (BNS | HALF | {"model": "sage"}, 90.20),
    "LLCG, GraphSAGE, Adam kept, 5 corrections": (CORRECTED | {"model": "sage"}, 89.20),
    "LLCG, GraphSAGE, Adam kept, 5 corrections, dropout .5": (
        CORRECTED | HALF | {"model": "sage"},
        89.20,
    ),
}
SHOWN = (
    "centralized, GCN",
    "FedAvg, GCN",
    "FedAvg, GCN, Adam kept",
    "LLCG, GCN, the server holds all",
    "BNS-GCN, rate .1",
    "global, GCN, drawn",
    "global, GCN, drawn, conditional",
)


@cache
def cell_of(variant: str, rate: float, seed: int) -> Cell:
    """Return a cell."""
    labels: dict[str, Scalar] = {"variant": variant, "lr": rate, "seed": seed}
    own, _ = VARIANTS[variant]
    return cell(labels, **PROTOCOL | {"model": "gcn"} | own, lr=rate, seed=seed)


def rate_of(found: StudyLines, variant: str) -> float | None:
    """Return the rate with the best validation accuracy at seed 0; None until all have run."""
    lines = {rate: found.any(cell_of(variant, rate, SEEDS[0])) for rate in RATES}
    if any(line is None for line in lines.values()):
        return None
    scores = {rate: _validation(line) for rate, line in lines.items() if line is not None}
    return max(scores, key=lambda rate: scores[rate])


def _validation(line: Line) -> float:
    if "error" in line:  # it diverged
        return -1.0
    accuracy: float = line["val"][line["judge"]]["accuracy"]
    return accuracy


def cells(found: StudyLines) -> list[Cell]:
    """Return every rate at seed 0, then the other seeds at the rate that validation picks."""
    first = [cell_of(v, rate, SEEDS[0]) for rate, v in product(RATES, VARIANTS)]
    rates = {variant: rate_of(found, variant) for variant in VARIANTS}
    rest = [
        cell_of(variant, rate, seed)
        for seed, (variant, rate) in product(SEEDS[1:], rates.items())
        if rate is not None
    ]
    return first + rest


def values(found: StudyLines, variant: str) -> tuple[list[float], list[Line]]:
    """Return test micro F1 at the best round of all seeds that have run, and their lines."""
    rate = rate_of(found, variant)
    if rate is None:
        return [], []
    lines = found.scored([cell_of(variant, rate, seed) for seed in SEEDS])
    return [line["test"][line["judge"]]["f1_micro"] for line in lines], lines


def last_of(lines: list[Line]) -> list[float]:
    """Return test micro F1 after the last round, which is accuracy: each node has one class."""
    return [line["curve"]["test"][-1] for line in lines]


def beyond(found: StudyLines) -> str:
    """Return how far each variant is above centralized GCN of its dropout, paired over seeds."""
    rows = []
    for variant, (own, _) in VARIANTS.items():
        reference = "centralized, GCN" + (", dropout .5" if "dropout" in own else "")
        ours, theirs = values(found, variant)[1], values(found, reference)[1]
        if variant == reference or not len(ours) == len(theirs) == len(SEEDS):
            continue
        cells = [_paired(_best_of(ours), _best_of(theirs)), _paired(last_of(ours), last_of(theirs))]
        rows.append([variant, reference, *cells])
    return markdown_table(["training", "beside", "best validation round", "last round"], rows)


def _best_of(lines: list[Line]) -> list[float]:
    return [line["test"][line["judge"]]["f1_micro"] for line in lines]


def _paired(ours: list[float], theirs: list[float]) -> str:
    """Return the mean difference in points with the p-value of Student's paired test."""
    result = paired_test(ours, theirs)
    p = "" if result.p is None else f" (p = {result.p:.3f})"
    return "-" if result.mean is None else f"{100 * result.mean:+.2f}{p}"


def table(found: StudyLines) -> str:
    """Return micro F1 beside the paper's, that of the uncut graph, and what a round costs."""
    rows = []
    for variant, (_, paper) in VARIANTS.items():
        scores, lines = values(found, variant)
        rate = rate_of(found, variant)
        text = spread(scores) if paper is None else beside(scores, paper)
        uncut = spread([line["test"]["uncut"]["f1_micro"] for line in lines])
        published = "-" if paper is None else f"{paper:.2f}"
        costs = ["-", "-"]
        if lines:
            sizes = [sum(_training(line).values()) / line["rounds"] / 1e6 for line in lines]
            work = [line["flops"] / line["rounds"] / 1e9 for line in lines]
            costs = [f"{statistics.mean(sizes):.2f}", f"{statistics.mean(work):.2f}"]
        chosen = "-" if rate is None else f"{rate:g}"
        last = spread(last_of(lines))
        rows.append([variant, chosen, str(len(scores)), text, last, published, uncut, *costs])
    header = ["training", "lr", "seeds", "best validation round", "last round", "paper", "uncut"]
    header += ["MB a round"]
    header += ["GFLOP a round"]
    return markdown_table(header, rows)


def _training(line: Line) -> dict[str, int]:
    kinds: dict[str, int] = line["bytes"]["by_kind"]
    return {kind: size for kind, size in kinds.items() if kind != "evaluation"}


def curves(found: StudyLines) -> Curves:
    """Return validation accuracy against rounds at seed 0; all variants would hide each other."""
    lines = {}
    for variant in SHOWN:
        _, found_lines = values(found, variant)
        if found_lines:
            curve = found_lines[0]["curve"]
            lines[variant] = (curve["round"], [100 * v for v in curve["val"]])
    title = "PubMed, 8 silos: validation accuracy, seed 0"
    return Curves(title, "rounds", "%", lines, bottom=80)


def page(found: StudyLines) -> Page:
    """Return the page."""
    return Page({"table": table(found), "beyond": beyond(found)}, {"pubmed.svg": curves(found)})


RECIPE = Recipe(
    name="local_bias/pubmed",
    title="global training beside tables 2 and 5 of its paper (PubMed, 8 silos)",
    cells=cells,
    page=page,
    text="""\
# Global training on PubMed, 8 silos

<!-- table -->
<!-- table -->

## How it was measured

Micro F1 in percent on the 1,000 public test nodes, at the round and learning rate that the 500
public validation nodes pick (the rate at seed 0 for all seeds); all other nodes train. Mean ±
standard deviation over seeds, in parentheses the difference from the paper; then the same
after the last round. Global training is judged with sums over all silos' neighbors, FedAvg and LLCG
through each silo's own graph; *uncut* is the same model on the uncut graph. Bytes are those of
training, evaluation left out; work is that of all silos, evaluation included. FedAvg and LLCG
build Adam anew in every round, as many papers do, or keep it. A round is a pass over the graph:
one step; of GraphSAGE and GraphSAINT as many smaller ones as cover it.

## Beside centralized training

Points of micro F1 above centralized GCN of the same dropout, mean over seeds, with the p-value of
Student's paired test. All seeds share the 1,000 test nodes, whose own standard error is about one
point; the test speaks of seeds, not of other nodes.

<!-- beyond -->
<!-- beyond -->

![Validation accuracy by round.](pubmed.svg)

<!-- again -->
<!-- again -->
""",
)
