"""Ratings of Ciao and Epinions: what predicts without any federation, and what FedACS adds.

The paper's targets of RMSE are above those of the mean, so its bytes to a target say little; see
the page.
"""

import statistics
from collections.abc import Sequence
from functools import cache
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.report.reading import size_text
from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Cell, Line
from silograph.study.reproduce import Page, Recipe, StudyLines, cell

DATASETS = {"ciao": (0, 1, 2), "epinions": (0, 1, 2)}  # seeds of the rows without training
TRAINED = ("ciao",)
SEEDS = (0,)  # of what trains
# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = {
    "clients": 10,
    "partition": "category",
    "split": "0.8/0.1/0.1",
    "largest_component": False,
    "normalize": "none",
    "optimizer": "adam",
    "lr": 0.01,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "keep_optimizer": False,
    "hidden": 32,
    "layers": 2,
    "dropout": 0.0,
}
CUT: dict[str, Scalar] = {"partition.column": "category", "partition.spread": "average"}
BIASES: dict[str, Scalar] = {"model.damping": 5.0, "model.terms": "biases"}
GCN = {"model": "rating_gcn", "rounds": 20, "local_epochs": 5, "weight_decay": 5e-4}
# What the page calls a row: the fields, the options, and the view that is told.
Row = tuple[dict[str, Any], dict[str, Scalar], str]
SOLVED: dict[str, Any] = {"model": "rating_biases", "rounds": 1, "local_epochs": 1}
WITHOUT: dict[str, Row] = {
    "global mean": (SOLVED | {"method": "centralized"}, BIASES | {"model.terms": "mean"}, "server"),
    "silo mean": (SOLVED | {"method": "local"}, BIASES | {"model.terms": "mean"}, "personalized"),
    "biases in each silo": (SOLVED | {"method": "fedavg"}, BIASES, "server"),
    "biases of all ratings": (SOLVED | {"method": "fedavg"}, BIASES, "uncut"),
}
WIDTH: dict[str, Scalar] = {"model.embedding": 64}
TRAINING: dict[str, Row] = {
    "`local`": (GCN | {"method": "local"}, WIDTH, "personalized"),
    "`fedavg`, all clients": (GCN | {"method": "fedavg", "selector": "all"}, WIDTH, "server"),
    "`fedavg`, half of the clients, uniform": (
        GCN | {"method": "fedavg", "selector": "uniform"},
        WIDTH | {"selector.participation": 0.5},
        "server",
    ),
    "FedACS (`fedavg`, `ucb`)": (GCN | {"method": "fedavg", "selector": "ucb"}, WIDTH, "server"),
}
PAPER = {"ciao": 1.039, "epinions": 1.169}


@cache
def cell_of(dataset: str, name: str, seed: int) -> Cell:
    """Return a cell."""
    own, options, _ = (WITHOUT | TRAINING)[name]
    labels: dict[str, Scalar] = {"dataset": dataset, "row": name, "seed": seed}
    return cell(labels, **PROTOCOL | own, dataset=dataset, seed=seed, options=CUT | options)


def cells(found: StudyLines) -> list[Cell]:
    """Return all cells."""
    del found
    trained = [cell_of(d, row, s) for d in TRAINED for row in TRAINING for s in SEEDS]
    return [*floor(), *trained]


def floor() -> list[Cell]:
    """Return the cells of what needs no training."""
    solved = [cell_of(d, row, s) for d, seeds in DATASETS.items() for row in WITHOUT for s in seeds]
    return list({each.digest: each for each in solved}.values())  # two rows are views of one run


def shown(values: Sequence[float]) -> str:
    """Return mean and sample standard deviation, - for nothing."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.4f}"


def scores(lines: Sequence[Line], view: str, metric: str) -> str:
    """Return a test score of runs, in a view."""
    found = [line["test"][view][metric] for line in lines if line["test"][view]]
    return shown([value for value in found if value is not None])


def last_rmse(lines: Sequence[Line], view: str) -> str:
    """Return the test RMSE of the last round of runs, in a view."""
    return shown([line["last"][f"test_{view}_rmse"] for line in lines])


def without_training(found: StudyLines) -> str:
    """Return the table of what needs no training."""
    head = ["RMSE", *(f"{d} {part}" for d in DATASETS for part in ("all", "seen", "unseen"))]
    rows = []
    for name, (_, _, view) in WITHOUT.items():
        row = [name]
        for d, seeds in DATASETS.items():
            lines = found.scored([cell_of(d, name, s) for s in seeds])
            row += [scores(lines, view, m) for m in ("rmse", "rmse_seen", "rmse_unseen")]
        rows.append(row)
    paper = [cell for d in DATASETS for cell in (f"{PAPER[d]:.3f}", "", "")]
    return markdown_table(head, [*rows, ["FedACS, in the paper", *paper]])


def training(found: StudyLines) -> str:
    """Return the table of what trains."""
    head = ["Ciao", "RMSE", "RMSE, last round", "seen", "unseen", "MAE", "bytes of weights"]
    rows = []
    for name, (_, _, view) in TRAINING.items():
        lines = found.scored([cell_of("ciao", name, s) for s in SEEDS])
        sizes = [line["bytes"]["by_kind"].get("weights", 0) for line in lines]
        size = size_text(round(statistics.mean(sizes))) if sizes else "-"
        rmse, *told = (scores(lines, view, m) for m in ("rmse", "rmse_seen", "rmse_unseen", "mae"))
        rows.append([name, rmse, last_rmse(lines, view), *told, size])
    return markdown_table(head, rows)


def page(found: StudyLines) -> Page:
    """Return the page."""
    return Page({"without": without_training(found), "training": training(found)})


RECIPE = Recipe(
    name="fedacs/ratings",
    title="ratings of Ciao and Epinions: biases without any federation, and FedACS",
    cells=cells,
    page=page,
    text="""\
# Ratings of Ciao and Epinions

<!-- without -->
<!-- without -->

These predictions need no training and send nothing, and are measured by test RMSE on two data
sets. Biases that each silo solves for itself are far ahead of the FedACS paper, whose RMSE is that
of predicting the mean on Epinions and a little better on Ciao. Compare any method for ratings with
these rows first, and do not use targets of RMSE that the mean reaches.

## How it was measured

Data are cut into 10 clients by category (2 to 3 categories each) and split 8:1:1. Users are those
that occur in a statement of trust. Figures are test RMSE, mean ± standard deviation over three
seeds. Biases have damping 5, which was not tuned.

The paper's targets for bytes (2 to 1.1 on Ciao, 1.3 on Epinions) are above the RMSE of the mean,
so "70.7 % fewer bytes to 1.3" measures nothing. Clients have whole categories, so a federation can
add little through shared users.

## With training

The model is the paper's GCN with 2 layers of width 32 (paper: 5) and embeddings of 64. Clients use
Adam of rate .01, reset each round (paper: SGD), weight decay 5e-4, and 5 local epochs in 20
rounds. Embeddings and biases stay with the clients.

<!-- training -->
<!-- training -->

## Limits

- The runs with training have one seed and one setting, which was not tuned. They do not rank
  methods.
- The trained model has biases, too. Where it is behind the first table, it overfits or has not
  converged.
- See also other models ([tables.md](tables.md)), selectors ([selection.md](selection.md)), models
  ahead of the biases ([profiles.md](profiles.md)), and CPU and memory
  ([round_cost.md](round_cost.md)).

<!-- again -->
<!-- again -->

<!-- cells -->
<!-- cells -->

<!-- machine -->
<!-- machine -->
""",
)
