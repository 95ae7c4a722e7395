"""Cells of FedGrAINS' tables 1 to 3: methods, samplers and controls under one protocol.

"FedGrAINS: Personalized subgraph federated learning with adaptive neighbor sampling": mean and
standard deviation over three runs, in percent. The protocol is that of FED-PUB's published code,
which the paper follows as far as it says.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from silograph.core.config import Scalar
from silograph.experiment.markdown import markdown_table
from silograph.study.cells import Cell, Line
from silograph.study.reproduce.recipe import Found, beside, cell, spread

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
    "fedper": {"method": "fedper", "options": {"private": 1}},
    "gcflplus": {
        "method": "gcflplus",
        "options": {"epsilon1": 1.0, "epsilon2": 2.0, "warmup": 20, "sequence": 5},
    },
    "fedpub": {
        "method": "fedpub",
        "options": {
            "scale": 3.0,
            "l1": 1e-3,
            "proximal": 1e-3,
            "masks": True,
            "communities": 5,
        },
    },
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
SHOWN = {
    "": "",
    "batches": ", batches of 32",
    "fedgrains": " + FedGrAINS",
    "uniform": " + uniform top-k",
    "untrained": " + untrained network",
}


@dataclass(frozen=True)
class Place:
    """Where a cell stands in the paper's tables."""

    scenario: str
    dataset: str
    clients: int


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
    run = merged(PROTOCOL, ROUNDS[place.dataset], METHODS[method], SAMPLERS[sampler])
    where = {"dataset": place.dataset, "partition": PARTITION[place.scenario]}
    return cell(labels, **run, **where, clients=place.clients, seed=seed)


def all_cells(places: Sequence[Place]) -> list[Cell]:
    """Return the cells of some places, place after place, base after base."""
    order = product(places, METHODS, SEEDS, SAMPLERS)
    return [cell_of(place, method, sampler, seed) for place, method, seed, sampler in order]


def accuracy(line: Line) -> float:
    """Return the clients' mean test accuracy of their own models, at the best round."""
    value: float = line["test"]["personalized"]["accuracy_client_mean"]
    return value


def by_seed(found: Found, place: Place, method: str, sampler: str) -> dict[int, float]:
    """Return the accuracies of the seeds that have run."""
    values = {}
    for seed in SEEDS:
        lines = found.scored([cell_of(place, method, sampler, seed)])
        if lines:
            values[seed] = accuracy(lines[0])
    return values


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """Return the mean difference over seeds in points, with its standard error; - for none."""
    each = [100 * (ours[seed] - theirs[seed]) for seed in ours if seed in theirs]
    if not each:
        return "-"
    mean = f"{statistics.mean(each):+.2f}"
    if len(each) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(each) / len(each) ** 0.5:.2f}"


def scores(found: Found, place: Place, printed: Printed) -> str:
    """Return the table of one place: accuracies, and what FedGrAINS adds to each control."""
    rows = []
    for method, sampler in product(METHODS, SAMPLERS):
        values = by_seed(found, place, method, sampler)
        paper = printed.get((method, sampler), {}).get((place.dataset, place.clients))
        text = spread(list(values.values()))
        if paper is not None:
            text = beside(list(values.values()), paper)
        ours = by_seed(found, place, method, "fedgrains")
        gain = "" if sampler == "fedgrains" else paired(ours, values)
        shown = "" if paper is None else f"{paper:.2f}"
        rows.append([f"{method}{SHOWN[sampler]}", shown, text, gain])
    return markdown_table(["run", "paper", "ours", "FedGrAINS less this, paired"], rows)
