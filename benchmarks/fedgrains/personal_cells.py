"""Cells of FedGrAINS' tables 1 to 3: methods, samplers and controls under one protocol.

"FedGrAINS: Personalized subgraph federated learning with adaptive neighbor sampling": mean and
standard deviation over three runs, in percent. The protocol is that of FED-PUB's published code,
which the paper follows as far as it says.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Cell, Line
from silograph.study.reproduce import StudyLines, beside, cell, spread

SEEDS = (0, 1, 2)
# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = {
    "largest_component": True,
    "normalize": "row",
    "split": "0.2/0.4/0.4",
    "participation": 1.0,
    "model": "gcn",
    "head": "linear",
    "layers": 3,
    "hidden": 128,
    "dropout": 0.5,
    "optimizer": "adam",
    "lr": 0.01,
    "weight_decay": 1e-6,
    "momentum": 0.0,
    "keep_optimizer": True,
}
ROUNDS = {name: {"rounds": 100, "local_epochs": 1} for name in ("cora", "citeseer", "pubmed")}
ROUNDS |= {
    name: {"rounds": 200, "local_epochs": 3} for name in ("amazon_computers", "amazon_photo")
}
NAMES = {
    "cora": "Cora",
    "citeseer": "CiteSeer",
    "pubmed": "PubMed",
    "amazon_computers": "Computers",
    "amazon_photo": "Photo",
}
CLIENTS = {"disjoint": (5, 10, 20), "overlapping": (10, 30, 50)}
PARTITION = {"disjoint": "metis", "overlapping": "metis_overlapping"}
METHODS: dict[str, dict[str, Any]] = {
    "local": {"method": "local"},
    "fedavg": {"method": "fedavg"},
    "fedper": {"method": "fedper", "server_optimizer": "none", "options": {"private": 1}},
    "gcflplus": {
        "method": "gcflplus",
        "options": {"epsilon1": 1.0, "epsilon2": 2.0, "warmup": 20, "sequence": 5},
    },
    "fedpub": {
        "method": "fedpub",
        "options": {
            "scale": 3.0,
            # The published code adds both penalties to the loss from detached copies of the weights
            # (`state_dict()`): they have no gradient, so it trains without them.
            "l1": 0.0,
            "proximal": 0.0,
            "masks": True,
            "communities": 5,
        },
    },
}
# What the paper compares with, but puts no sampler on.
SAGE: dict[str, dict[str, Any]] = {
    "fedsageplus": {
        "method": "fedsageplus",
        "server_optimizer": "none",
        "options": {
            "hidden": 0.5,
            # Steps on all of a client's nodes; its paper has epochs of several batches. Of 20, 100
            # and 300, validation on Cora with 10 clients picks the last (65.9, 70.1, 76.9).
            "generator_epochs": 300,
            "cross_epochs": 5,
            "generator_lr": 0.01,
            "generator_width": 128,
            "most": 5,
            "feature_weight": 1.0,
        },
    }
}
# Rows without a sampler: `SAGE`, and FED-PUB with the penalties of its paper: 1e-3 weighs both.
ALONE: dict[str, dict[str, Any]] = SAGE | {
    "fedpub, penalties as printed": {
        "method": "fedpub",
        "options": METHODS["fedpub"]["options"] | {"l1": 1e-3, "proximal": 1e-3},
    }
}
BATCH = 32
CHOICE: dict[str, Scalar] = {
    "neighbors.k": 32,
    "neighbors.alpha": 1e5,
    "neighbors.lr": 1e-3,
    "neighbors.log_z": "learned",
    "neighbors.log_z_lr": 0.1,
    "neighbors.degrees": "sampled",
    "neighbors.policy": "trained",
    "neighbors.width": 128,
}
# What a method's steps sum over; `batches` takes FedGrAINS' batches and all neighbors.
SAMPLERS: dict[str, dict[str, Any]] = {
    "": {},
    "batches": {"batch_size": BATCH},
    "fedgrains": {"batch_size": BATCH, "neighbors": "fedgrains", "options": CHOICE},
    "uniform": {
        "batch_size": BATCH,
        "neighbors": "fedgrains",
        "options": CHOICE | {"neighbors.policy": "uniform"},
    },
    "untrained": {
        "batch_size": BATCH,
        "neighbors": "fedgrains",
        "options": CHOICE | {"neighbors.policy": "untrained"},
    },
}
# Random drops of half, with FedGrAINS' batches; on Cora with 10 clients alone.
DROPS: dict[str, dict[str, Any]] = {
    name: {"batch_size": BATCH, "neighbors": name, "options": {f"neighbors.{option}": 0.5}}
    for name, option in (("drop_edge", "drop"), ("drop_node", "drop"), ("bernoulli", "keep"))
}
DECIDING = ("", "fedgrains", "uniform")
SHOWN = {
    "": "",
    "batches": ", batches of 32",
    "fedgrains": " + FedGrAINS",
    "uniform": " + uniform top-k",
    "untrained": " + untrained network",
    "drop_edge": " + DropEdge",
    "drop_node": " + DropNode",
    "bernoulli": " + dropped messages",
}


@dataclass(frozen=True)
class Place:
    """Where a cell stands in the paper's tables."""

    scenario: str
    dataset: str
    clients: int


WITH_DROPS = Place("disjoint", "cora", 10)
# The paper's tables 1 and 2, by method (with and without FedGrAINS), dataset and clients.
Printed = dict[tuple[str, str], dict[tuple[str, int], float]]


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run, those of several parts together."""
    options = {k: v for part in parts for k, v in part.get("options", {}).items()}
    found = {k: v for part in parts for k, v in part.items()}
    return found | ({"options": options} if options else {})


@cache
def cell_of(place: Place, method: str, sampler: str, seed: int) -> Cell:
    """Return a cell."""
    labels: dict[str, Scalar] = {
        "scenario": place.scenario,
        "dataset": place.dataset,
        "clients": place.clients,
        "method": method,
        "sampler": sampler,
        "seed": seed,
    }
    drawn = (SAMPLERS | DROPS)[sampler]
    run = merged(PROTOCOL, ROUNDS[place.dataset], (METHODS | ALONE)[method], drawn)
    where = {"dataset": place.dataset, "partition": PARTITION[place.scenario]}
    return cell(labels, **run, **where, clients=place.clients, seed=seed)


def all_cells(places: Sequence[Place]) -> list[Cell]:
    """Return the cells of some places, in each the ones that decide first: see `in_order`."""
    order = [*in_order(METHODS), *((name, "", seed) for seed, name in product(SEEDS, ALONE))]
    drops = [(name, drop, seed) for seed, name, drop in product(SEEDS, METHODS, DROPS)]
    return [
        cell_of(place, *rest)
        for place in places
        for rest in (*order, *(drops if place == WITH_DROPS else ()))
    ]


def in_order(methods: Iterable[str]) -> list[tuple[str, str, int]]:
    """Return method, sampler and seed of one place's cells, those that decide first.

    A claim needs a method alone, with FedGrAINS, and with uniform draws; one seed of all methods
    comes before the next seed, and the other controls come last.
    """
    names = list(methods)
    decide = product(SEEDS, names, DECIDING)
    rest = product(SEEDS, names, [s for s in SAMPLERS if s not in DECIDING])
    return [(name, sampler, seed) for seed, name, sampler in (*decide, *rest)]


def accuracy(line: Line) -> float:
    """Return the clients' mean test accuracy of their own models, at the best round."""
    value: float = line["test"]["personalized"]["accuracy_client_mean"]
    return value


def each_best(line: Line) -> float | None:
    """Return it with each client's round chosen by this client; None in lines of old."""
    found = line.get("each_best")
    return None if found is None else found["test"]["accuracy_client_mean"]


def at_last(line: Line) -> float | None:
    """Return it after the last round."""
    value: float | None = line.get("last", {}).get("test_personalized_accuracy_client_mean")
    return value


def at_server(line: Line) -> float | None:
    """Return the clients' mean test accuracy of the server's model, None where there is none."""
    found = line["test"].get("server")
    return None if found is None else found["accuracy_client_mean"]


# Other readings of a run, by the head of their column.
READINGS: dict[str, Callable[[Line], float | None]] = {
    "each client's round": each_best,
    "last round": at_last,
    "server": at_server,
}


def lines_of(found: StudyLines, place: Place, method: str, sampler: str) -> dict[int, Line]:
    """Return the lines of the seeds that have run."""
    lines = {s: found.scored([cell_of(place, method, sampler, s)]) for s in SEEDS}
    return {seed: line[0] for seed, line in lines.items() if line}


def by_seed(found: StudyLines, place: Place, method: str, sampler: str) -> dict[int, float]:
    """Return the accuracies of the seeds that have run."""
    return {s: accuracy(line) for s, line in lines_of(found, place, method, sampler).items()}


def readings(lines: Iterable[Line]) -> list[str]:
    """Return entries of a table: the columns of `READINGS`."""
    known = list(lines)
    columns = ([read(line) for line in known] for read in READINGS.values())
    return [spread([value for value in column if value is not None]) for column in columns]


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """Return the mean difference over seeds in points, with its standard error; - for none."""
    each = [100 * (ours[seed] - theirs[seed]) for seed in ours if seed in theirs]
    if not each:
        return "-"
    mean = f"{statistics.mean(each):+.2f}"
    if len(each) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(each) / len(each) ** 0.5:.2f}"


def scores(found: StudyLines, place: Place, printed: Printed) -> str:
    """Return the table of one place: accuracies, and what FedGrAINS adds to each control."""
    rows = []
    for method, sampler in (*product(METHODS, SAMPLERS | DROPS), *((name, "") for name in ALONE)):
        lines = lines_of(found, place, method, sampler)
        paper = printed.get((method, sampler), {}).get((place.dataset, place.clients))
        if not lines and paper is None:
            continue
        values = {seed: accuracy(line) for seed, line in lines.items()}
        text = spread(list(values.values()))
        if paper is not None:
            text = beside(list(values.values()), paper)
        ours = by_seed(found, place, method, "fedgrains")
        gain = "" if sampler == "fedgrains" else paired(ours, values)
        shown = "" if paper is None else f"{paper:.2f}"
        name = f"{method}{SHOWN[sampler]}"
        rows.append([name, shown, text, gain, seeds_text(lines), *readings(lines.values())])
    heads = ["run", "paper", "ours", "FedGrAINS less this, paired", "seeds", *READINGS]
    return markdown_table(heads, rows)


def seeds_text(lines: Mapping[int, Line]) -> str:
    """Return how many seeds have run."""
    return str(len(lines) or "")
