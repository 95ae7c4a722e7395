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

| accuracy | 5 clients | 10 clients | 20 clients |
|-|-|-|-|
| local, paper | 80.10 ± 0.76 | 77.43 ± 0.49 | 72.75 ± 0.89 |
| local | 81.41 ± 0.89 | 81.16 ± 0.36 | 80.36 ± 1.13 |
| fedavg, paper | 79.63 ± 4.37 | 72.06 ± 2.18 | 69.50 ± 3.58 |
| fedavg, server view | 78.12 ± 1.03 | 69.95 ± 9.22 | 58.80 ± 4.00 |
| fedavg, personalized view | 79.20 ± 2.41 | 78.73 ± 0.89 | 78.56 ± 1.13 |
| fedavg, no weight decay, server view | 82.91 ± 0.78 | 83.12 ± 0.74 | 81.55 ± 2.06 |
| fedopt, local SGD and server momentum | 84.09 ± 0.65 | 84.74 ± 0.57 | 84.44 ± 0.28 |

Local training and FedAvg were run by the protocol of FedGrAINS' table 1, and beside settings that
the paper leaves open. Local training is up to 8 points better than in the paper, and FedAvg
collapses with small clients because of a fresh local Adam with weight decay, which the
personalized view hides. Compare new methods with `fedopt`, and score FedAvg in the server view.

![Test accuracy with 5, 10 and 20 clients.](local_and_fedavg.svg)

## How it was measured

The paper is "FedGrAINS: Personalized subgraph federated learning with adaptive neighbor sampling".
As far as it says, the graph is the largest component of Cora (2,485 nodes), cut by METIS without
edges between clients and split 20/40/40. The model is a 2-layer GCN of width 128. Runs have 100
rounds of one full-batch epoch of Adam (rate .01) with all clients.

We chose dropout .5, weight decay 5e-4 and raw features. `local` keeps its Adam state, and `fedavg`
resets it each round. Figures are test accuracy in percent, averaged over clients, mean ± standard
deviation of three seeds. In parentheses is the difference from the paper's mean.

## All runs

<!-- table -->
<!-- table -->

## Differences of more than 1.5 points at 10 clients

**Local: ours 81.2, the paper 77.4.** No open setting explains it: all of them leave ours between
78.4 and 82.4. Only with a quarter of the training nodes does ours come near the paper's figure for
20 clients. The paper may have fewer training nodes or stop early; its text does not say.

**FedAvg: ours 70.0 ± 9.2, the paper 72.1 ± 2.2.** The means agree within their spread, which comes
from weight decay. The first step of a fresh Adam moves each weight by about the rate, whatever its
gradient. Words that occur at no node of a client have weight decay as their only gradient: 37 % of
the first layer with 10 clients, 54 % with 20 and 83 % with 100. Their weights are driven to 0 by
.01 a round. Keeping Adam's state helps in part (75.0), and row-normalized features make it worse.

**FedOpt** (local SGD of rate .5, 3 epochs, server momentum .9) is above every entry of the paper's
table with 10 and 20 clients, and level with the best with 5.

## Limits

The lines are from before there were compiled kernels, which draw dropout differently: `fedavg`
with 10 clients and seed 0 has 61.16 here, and 61.08 with them.

<!-- again -->
<!-- again -->

<!-- cells -->
<!-- cells -->

<!-- machine -->
<!-- machine -->
""",
)
