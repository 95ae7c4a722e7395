"""How far FedAvg's scores spread over ten seeds, and over the views of one run, on Cora."""

import statistics
from functools import cache
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Cell
from silograph.study.reproduce import Page, Recipe, StudyLines, cell, spread

SEEDS = range(10)
# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = {
    "dataset": "cora",
    "largest_component": True,
    "partition": "metis",
    "split": "0.2/0.4/0.4",
    "normalize": "none",
    "participation": 1.0,
    "model": "gcn",
    "layers": 2,
    "hidden": 128,
    "dropout": 0.5,
    "method": "fedavg",
    "rounds": 100,
    "local_epochs": 1,
    "optimizer": "adam",
    "lr": 0.01,
    "keep_optimizer": False,
}
ROWS = {
    "10 clients": {"clients": 10, "weight_decay": 5e-4},
    "10 clients, no weight decay": {"clients": 10, "weight_decay": 0.0},
    "20 clients": {"clients": 20, "weight_decay": 5e-4},
    "100 clients": {"clients": 100, "weight_decay": 5e-4},
}
VIEWS = ("server", "uncut", "personalized")
SCORE = "accuracy_client_mean"


@cache
def cell_of(row: str, seed: int) -> Cell:
    """Return a cell."""
    labels: dict[str, Scalar] = {"run": row, "seed": seed}
    return cell(labels, **PROTOCOL | ROWS[row], seed=seed)


def cells(found: StudyLines) -> list[Cell]:
    """Return all cells, one row after the other."""
    del found
    return [cell_of(row, seed) for row in ROWS for seed in SEEDS]


def ends(values: list[float]) -> str:
    """Return mean ± standard deviation and the least and the greatest value, in percent."""
    if len(values) < 2:
        return spread(values, 1)
    return f"{spread(values, 1)} ({100 * min(values):.1f} to {100 * max(values):.1f})"


def page(found: StudyLines) -> Page:
    """Return the page."""
    rows = []
    for row in ROWS:
        lines = found.scored([cell_of(row, seed) for seed in SEEDS])
        best = [[line["test"][view][SCORE] for line in lines] for view in VIEWS]
        last = [[line["last"][f"test_{view}_{SCORE}"] for line in lines] for view in VIEWS[::2]]
        gaps = [100 * (own - server) for server, own in zip(best[0], best[2], strict=True)]
        between = f"{statistics.mean(gaps):.1f} ({max(gaps):.1f})" if gaps else "-"
        rows.append([row, str(len(lines)), *map(ends, best), *map(ends, last), between])
    heads = [*VIEWS, *(f"{view}, last round" for view in VIEWS[::2])]
    heads.append("from server to personalized: mean (most)")
    return Page({"table": markdown_table(["", "seeds", *heads], rows)})


RECIPE = Recipe(
    name="defaults/spread",
    title="how far FedAvg's scores spread over seeds and views (Cora)",
    cells=cells,
    page=page,
    text="""\
# FedAvg over ten seeds and three views

<!-- table -->
<!-- table -->

FedAvg with local Adam was trained on Cora with ten seeds and scored in three views: the server's
model, the same model on the uncut graph, and the clients' own models. With 10 clients, the
server's model has between 60.8 and 80.3, and the clients' own models are 9 points higher (17 with
20 clients). Read FedAvg in the server view, use several seeds, and turn weight decay off if you
train with local Adam.

## How it was measured

The graph is the largest component of Cora, cut by METIS and split 20/40/40. The model is a 2-layer
GCN of width 128 with dropout .5. Clients use Adam with rate .01, which is reset in each of 100
rounds, and weight decay 5e-4 except where noted. Figures are test accuracy in percent, averaged
over clients (mean ± standard deviation, lowest to highest). A seed draws cut, split, weights and
dropout.

## Limits

- All splits are of one graph and overlap. A mean is therefore less certain than its standard
  deviation suggests.
- The row of 100 clients has one seed.

<!-- again -->
<!-- again -->

<!-- cells -->
<!-- cells -->

<!-- machine -->
<!-- machine -->
""",
)
