"""PubMed: local bias and F1 by the number of silos, and where silos favor classes.

Zhang, Luo, Feng, Liu, Zhou and Zheng, "Tackling the local bias in federated graph learning", 2021,
section 4.2: 4 to 32 silos cut at random; 8 silos each of which favors a class, ten times as likely;
the sample size. Tables and plots; the paper has plots only.
"""

import statistics
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Cell, Line
from silograph.study.reproduce import (
    Curves,
    Page,
    Recipe,
    StudyLines,
    cell,
    scores_of,
    spread,
)

sys.path.insert(0, str(Path(__file__).parent))

from recipe_pubmed import ALL, DRAWN, PROTOCOL

SEEDS, CLIENTS, SAMPLES = (0, 1, 2), (4, 8, 16, 32), (1000, 2500, 5000, 10000)
SHARED: dict[str, Any] = PROTOCOL | {
    "model": "gcn",
    "lr": 0.01,
    "local_bias": True,
    "eval_every": 5,
}
FEDAVG: dict[str, Any] = {"method": "fedavg", "keep_optimizer": False}
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": FEDAVG,
    "FedAvg, Adam kept": FEDAVG | {"keep_optimizer": True},
    "FedAvg, a fifth collected": FEDAVG | {"collect": 0.2},
    "global, drawn": ALL | {"options": DRAWN | {"normalize": "paper"}},
    "global, drawn, conditional": ALL | {"options": DRAWN | {"normalize": "conditional"}},
    "global, all nodes": ALL,
}
SKEWED: dict[str, Any] = {"partition": "class_biased", "favored_classes": 1, "favor": 10.0}
# What the cells of a row of the tables have in common, by its name.
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"{clients} silos": {"clients": clients} for clients in CLIENTS},
    "8 silos, each favors a class": {"clients": 8, **SKEWED},
}
Score = Callable[[Line], float]


@cache
def cell_of(setting: str, method: str, seed: int) -> Cell:
    """Return a cell."""
    labels: dict[str, Scalar] = {"setting": setting, "method": method, "seed": seed}
    return cell(labels, **SHARED | SETTINGS[setting] | METHODS[method], seed=seed)


@cache
def sample_of(sample: int, seed: int) -> Cell:
    """Return a cell of the table of sample sizes."""
    labels: dict[str, Scalar] = {"setting": "8 silos", "sample": sample, "seed": seed}
    options = DRAWN | {"normalize": "conditional", "sample": sample}
    return cell(labels, **SHARED | {"clients": 8} | ALL | {"options": options}, seed=seed)


def cells(found: StudyLines) -> list[Cell]:
    """Return all cells, one seed after the other."""
    del found
    every = []
    for seed in SEEDS:
        every += [cell_of(*place, seed) for place in product(SETTINGS, METHODS)]
        every += [sample_of(sample, seed) for sample in SAMPLES]
    return list({one.digest: one for one in every}.values())


def f1(line: Line) -> float:
    """Return test micro F1 at the best round."""
    score: float = line["test"][line["judge"]]["f1_micro"]
    return score


def last_f1(line: Line) -> float:
    """Return test micro F1 of the last round, which is accuracy: each node has one class."""
    return scores_of([line], last=True)[0]


def bias(line: Line) -> float:
    """Return the local bias after the last round."""
    distance: float = line["local_bias"]
    return distance


def plain(values: list[float]) -> str:
    """Return mean ± standard deviation of distances."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.3f}"


def lines_of(found: StudyLines, setting: str, method: str) -> list[Line]:
    """Return the lines of all seeds that have run."""
    return found.scored([cell_of(setting, method, seed) for seed in SEEDS])


def table(found: StudyLines, score: Score, text: Callable[[list[float]], str]) -> str:
    """Return a score by setting and method."""
    rows = [
        [setting, *(text([score(x) for x in lines_of(found, setting, m)]) for m in METHODS)]
        for setting in SETTINGS
    ]
    return markdown_table(["cut", *METHODS], rows)


def samples(found: StudyLines) -> str:
    """Return F1, bytes and work by sample size, all with conditional normalization."""
    rows = []
    for sample in (*SAMPLES, None):
        if sample is None:
            lines = lines_of(found, "8 silos", "global, all nodes")
        else:
            lines = found.scored([sample_of(sample, seed) for seed in SEEDS])
        costs = ["-", "-"]
        if lines:
            size = statistics.mean(_training(line) / line["rounds"] / 1e6 for line in lines)
            work = statistics.mean(line["flops"] / line["rounds"] / 1e9 for line in lines)
            costs = [f"{size:.2f}", f"{work:.2f}"]
        name = "all 19,717" if sample is None else f"{sample:,}"
        scores = [spread([score(line) for line in lines]) for score in (f1, last_f1)]
        rows.append([name, *scores, plain([bias(line) for line in lines]), *costs])
    header = ["nodes drawn", "micro F1, best validation", "micro F1, last round", "local bias"]
    return markdown_table([*header, "MB a round", "GFLOP a round"], rows)


def _training(line: Line) -> int:
    kinds: dict[str, int] = line["bytes"]["by_kind"]
    return sum(size for kind, size in kinds.items() if kind != "evaluation")


def by_clients(found: StudyLines, score: Score, title: str, axis: str, factor: float) -> Curves:
    """Return a score against the number of silos."""
    lines, errors = {}, {}
    for method in METHODS:
        points = []
        for clients in CLIENTS:
            values = [factor * score(x) for x in lines_of(found, f"{clients} silos", method)]
            if values:
                points.append((clients, statistics.mean(values), _deviation(values)))
        if points:
            x, y, error = (list(column) for column in zip(*points, strict=True))
            lines[method], errors[method] = (x, y), error
    return Curves(title, "silos", axis, lines, errors, markers=True)


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def convergence(found: StudyLines, setting: str) -> Curves:
    """Return validation accuracy against rounds at seed 0."""
    lines = {}
    for method in METHODS:
        for line in lines_of(found, setting, method)[:1]:
            curve = line["curve"]
            lines[method] = (curve["round"], [100 * v for v in curve["val"]])
    return Curves(f"{setting}: validation accuracy, seed 0", "rounds", "%", lines)


def page(found: StudyLines) -> Page:
    """Return the page."""
    sections = {
        "f1": table(found, f1, spread),
        "f1 last": table(found, last_f1, spread),
        "bias": table(found, bias, plain),
        "samples": samples(found),
    }
    plots = {
        "clients_f1.svg": by_clients(found, f1, "PubMed: micro F1", "%", 100),
        "clients_bias.svg": by_clients(found, bias, "PubMed: local bias", "distance", 1),
        "clients_skewed.svg": convergence(found, "8 silos, each favors a class"),
    }
    return Page(sections, plots)


RECIPE = Recipe(
    name="local_bias/clients",
    title="local bias and F1 by the number of silos, and where silos favor classes (PubMed)",
    cells=cells,
    page=page,
    text="""\
# Local bias on PubMed

<!-- bias -->
<!-- bias -->

The table shows local bias, the mean distance of a node's logits from those of a centralized GCN
with the same first weights and draws, on PubMed by the number of silos. FedAvg's bias grows with
silos from 2.6 to 3.5, that of global training on all nodes is 0 but for rounding, and that of
drawn nodes does not grow. Use global training (`label_guided`) where silos favor classes, where
FedAvg's bias is up to 35 and its F1 falls by 1.6 points.

## How it was measured

The centralized GCN trains as many epochs (200) with the same optimizer, Adam with rate .01. Micro
F1 is in percent on the 1,000 public test nodes. Cells have the mean ± the standard deviation over
seeds.

![Local bias by the number of silos.](clients_bias.svg)

The controls are two centralized GCN of the same setting that differ only in their dropout draws,
or only in their initial weights (`python benchmarks/local_bias/controls.py --data-dir DIR`).
FedAvg's bias, and that of drawn nodes, is 5 to 13 times as large.

<!-- controls -->
<!-- controls -->

## Micro F1

At the best validation round:

<!-- f1 -->
<!-- f1 -->

After the last round:

<!-- f1 last -->
<!-- f1 last -->

![Micro F1 by the number of silos.](clients_f1.svg)

Drawn nodes with conditional normalization are above all nodes, which is centralized GCN, by .2 to
1 point in every cut. So they move the model as far as FedAvg's missing edges do, but to a better
place.

![Validation accuracy by round where silos favor classes, with seed 0.](clients_skewed.svg)

## How many nodes are drawn

8 silos, conditional normalization. Bytes without evaluation; work with it.

<!-- samples -->
<!-- samples -->

## Limits

- With the learning rate that validation picks, drawn nodes are no longer ahead of all nodes
  ([pubmed.md](pubmed.md)).
- The bias of global training does not fall with silos, as the paper says of its method.
- Where silos favor classes, FedAvg's bias depends on the cut: 9, 35 and 16 at the three seeds, and
  2.6, 28 and 3.7 with Adam kept. The plot shows seed 0, the mildest. F1 falls by .1 points for all
  nodes; the paper has 10 points for FedAvg.

<!-- again -->
<!-- again -->

<!-- cells -->
<!-- cells -->

<!-- machine -->
<!-- machine -->
""",
)
