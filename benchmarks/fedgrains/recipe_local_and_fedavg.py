"""Local only and FedAvg beside table 1 of FedGrAINS, on Cora cut by METIS.

"FedGrAINS: Personalized subgraph federated learning with adaptive neighbor sampling", table 1,
Cora, disjoint: mean and standard deviation over three runs, in percent.
"""

import statistics
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Cell, Line
from silograph.study.reproduce import (
    Curves,
    Page,
    Recipe,
    StudyLines,
    beside,
    cell,
    spread,
)

CLIENTS, SEEDS = (5, 10, 20), (0, 1, 2)
PAPER = {  # table 1, rows Local and FedAvg
    "local": {5: (80.10, 0.76), 10: (77.43, 0.49), 20: (72.75, 0.89)},
    "fedavg": {5: (79.63, 4.37), 10: (72.06, 2.18), 20: (69.50, 3.58)},
}
VIEWS = {"local": "personalized", "fedavg": "server"}  # that stand beside the paper's
# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = {
    "dataset": "cora",
    "largest_component": True,
    "normalize": "none",
    "split": "0.2/0.4/0.4",
    "partition": "metis",
    "participation": 1.0,
    "model": "gcn",
    "layers": 2,
    "hidden": 128,
    "dropout": 0.5,
    "rounds": 100,
    "local_epochs": 1,
    "optimizer": "adam",
    "lr": 0.01,
    "weight_decay": 5e-4,
    "momentum": 0.0,
}
LOCAL: dict[str, Any] = {"method": "local", "keep_optimizer": True}
FEDAVG: dict[str, Any] = {"method": "fedavg", "keep_optimizer": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "local": LOCAL,
    "local, no weight decay": LOCAL | {"weight_decay": 0.0},
    "local, Adam rebuilt each round": LOCAL | {"keep_optimizer": False},
    "local, features divided by row sums": LOCAL | {"normalize": "row"},
    "local, 3 layers": LOCAL | {"layers": 3},
    "local, GraphSAGE": LOCAL | {"model": "sage"},
    "local, training share 10 %": LOCAL | {"split": "0.1/0.4/0.4"},
    "local, training share 5 %": LOCAL | {"split": "0.05/0.4/0.4"},
    "fedavg": FEDAVG,
    "fedavg, no weight decay": FEDAVG | {"weight_decay": 0.0},
    "fedavg, Adam kept": FEDAVG | {"keep_optimizer": True},
    "fedavg, features divided by row sums": FEDAVG | {"normalize": "row"},
    "fedopt, local SGD and server momentum": {
        "method": "fedopt",
        "keep_optimizer": False,
        "optimizer": "sgd",
        "lr": 0.5,
        "local_epochs": 3,
        "server_optimizer": "momentum",
        "options": {"server_lr": 1.0, "server_momentum": 0.9},
    },
}
DRAWN = ("local", "fedavg", "fedavg, no weight decay", "fedopt, local SGD and server momentum")


@cache
def cell_of(variant: str, clients: int, seed: int) -> Cell:
    """Return a cell."""
    labels: dict[str, Scalar] = {"variant": variant, "clients": clients, "seed": seed}
    return cell(labels, **PROTOCOL | VARIANTS[variant], clients=clients, seed=seed)


def cells(found: StudyLines) -> list[Cell]:
    """Return all cells, one seed of every variant after the other."""
    del found
    return [cell_of(variant, k, seed) for seed, k, variant in product(SEEDS, CLIENTS, VARIANTS)]


def value(line: Line, when: str, view: str) -> float | None:
    """Return the clients' mean test accuracy: at the `best` round by validation, or the `last`."""
    if when == "last":
        last: float | None = line["last"].get(f"test_{view}_accuracy_client_mean")
        return last
    scores = line["test"].get(view)
    return None if scores is None else scores["accuracy_client_mean"]


def values(found: StudyLines, variant: str, clients: int, when: str, view: str) -> list[float]:
    """Return the accuracies of all seeds that have run and have the view."""
    lines = found.scored([cell_of(variant, clients, seed) for seed in SEEDS])
    accuracies = (value(line, when, view) for line in lines)
    return [a for a in accuracies if a is not None]


def text(found: StudyLines, variant: str, clients: int, when: str, view: str) -> str:
    """Return a table's entry; beside the paper's where that judges the same."""
    here = values(found, variant, clients, when, view)
    if variant in PAPER and view == VIEWS[variant]:
        return beside(here, PAPER[variant][clients][0])
    return spread(here)


def table(found: StudyLines) -> str:
    """Return the table."""
    rows: list[list[str]] = []
    for variant in VARIANTS:
        if variant in PAPER:
            paper = (PAPER[variant][k] for k in CLIENTS)
            figures = [f"**{mean:.2f} ± {std:.2f}**" for mean, std in paper]
            rows.append([f"**{variant}, paper**", "", *figures])
        for view, when in product(("server", "personalized"), ("best", "last")):
            texts = [text(found, variant, k, when, view) for k in CLIENTS]
            if set(texts) != {"-"}:
                label = "best by validation" if when == "best" else "last round"
                rows.append([variant, f"{view}, {label}", *texts])
    return markdown_table(["run", "view", *(f"{k} clients" for k in CLIENTS)], rows)


def curves(found: StudyLines) -> Curves:
    """Return accuracy by the number of clients, ours and the paper's."""
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    errors: dict[str, Sequence[float]] = {}
    for name, figures in PAPER.items():
        lines[f"{name}, paper"] = (CLIENTS, [mean for mean, _ in figures.values()])
        errors[f"{name}, paper"] = [std for _, std in figures.values()]
    for name in DRAWN:
        view = "personalized" if name == "local" else "server"
        by_clients = {k: values(found, name, k, "best", view) for k in CLIENTS}
        whole = {k: a for k, a in by_clients.items() if len(a) == len(SEEDS)}
        lines[name] = (list(whole), [100 * statistics.mean(a) for a in whole.values()])
        errors[name] = [100 * statistics.stdev(a) for a in whole.values()]
    title = "Cora, METIS: test accuracy, mean over clients"
    return Curves(title, "clients", "%", lines, errors, markers=True)


def page(found: StudyLines) -> Page:
    """Return the page."""
    return Page({"table": table(found)}, {"local_and_fedavg.svg": curves(found)})


RECIPE = Recipe(
    name="fedgrains/local_and_fedavg",
    title="local only and FedAvg beside FedGrAINS' table 1 (Cora, METIS, disjoint)",
    cells=cells,
    page=page,
    text="""\
# Local only and FedAvg beside FedGrAINS' table 1 (Cora, METIS, disjoint)

Accuracy in percent on test nodes, mean over clients, three seeds, mean ± standard deviation; in
parentheses the difference from the paper's mean.

![Test accuracy with 5, 10 and 20 clients, ours and the paper's.](local_and_fedavg.svg)

<!-- again -->
<!-- again -->

<!-- table -->
<!-- table -->
""",
)
