"""FedGrAINS with gate credit, on clean graphs and on graphs with random edges inside silos.

    python benchmarks/fedgrains/gate.py --data-dir ../shared/data --minutes 30

runs cells that `gate.jsonl` (or its packed form) does not hold yet, a seed of all before the next,
until the minutes are over; `--table` only prints the table, `--planted` that of the planted graph
of tests/sampling/test_fedgrains_gate.py. METIS cuts the clean graph into ten
silos. Then edges between drawn nodes of a silo are added: a share of the silo's own edges, the same
in all silos, or from none in the first to two for each real one in the last (`unlike`).
"""

import argparse
import importlib
import json
import lzma
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import silograph as sg
from silograph.core.key import Key
from silograph.experiment.terminal_table import markdown_table
from silograph.graph.csr import CSR
from silograph.graph.datasets import load
from silograph.graph.graph import Graph
from silograph.graph.partition.cuts import metis
from silograph.graph.partition.options import NoPartitionOptions

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"
LINES = HERE / "gate.jsonl"
SILOS, SEEDS, DATASETS = 10, (0, 1, 2), ("cora", "citeseer")
NOISES = ("0", "0.5", "1", "unlike")
RUN: dict[str, Any] = {
    "partition": "silo",
    "batch_size": 32,
    "rounds": 30,
    "eval_every": 2,
    "hidden": 64,
    "threads": 1,
    "progress": "none",
}
ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "keep_optimizer": True}
METHODS: dict[str, dict[str, Any]] = {
    "fedopt": {"method": "fedopt", "optimizer": "sgd", "lr": 0.1, "local_epochs": 1},
    "fedper": {"method": "fedper", **ADAM, "local_epochs": 1, "server_optimizer": "none"},
    "fedpub": {"method": "fedpub", **ADAM},
}
FLOW = {"neighbors.k": 32}
GATE = FLOW | {"neighbors.credit": "gate", "neighbors.score": "odds"}
WEIGHTED = {"neighbors.evaluate": "weighted"}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "all neighbors": ("full", {}),
    "DropEdge": ("drop_edge", {}),
    "uniform": ("fedgrains", FLOW | {"neighbors.policy": "uniform"}),
    "paper": (
        "fedgrains",
        FLOW
        | {
            "neighbors.credit": "balance",
            "neighbors.score": "probability",
            "neighbors.evaluate": "full",
        },
    ),
    "gate": ("fedgrains", GATE | {"neighbors.evaluate": "full"}),
    "gate, weighted": ("fedgrains", GATE | WEIGHTED),
    "untrained, weighted": ("fedgrains", FLOW | {"neighbors.policy": "untrained"} | WEIGHTED),
}
Row = dict[str, Any]


def cells() -> Iterator[tuple[int, str, str, str, str]]:
    """Yield seed, data set, noise, method and way of every cell, in their order."""
    yield from product(SEEDS, DATASETS, NOISES, METHODS, WAYS)


def in_silos(graph: Graph, seed: int) -> Graph:
    """Return the graph cut by METIS."""
    silo = metis(graph, SILOS, Key.of(seed), NoPartitionOptions())
    names = tuple(f"silo_{number}" for number in range(SILOS))
    return replace(graph, silo=silo, silo_names=names)


def with_random_edges(graph: Graph, noise: str, seed: int) -> Graph:
    """Return the graph with edges between drawn nodes of each silo."""
    assert graph.silo is not None  # see `in_silos`
    draws, n = torch.Generator().manual_seed(seed), graph.num_nodes
    row, column = graph.adj.row, graph.adj.indices.long()
    keys = [row * n + column]
    for number in range(SILOS):
        share = 2 * number / (SILOS - 1) if noise == "unlike" else float(noise)
        nodes = (graph.silo == number).nonzero()[:, 0]
        inside = (graph.silo[row] == number) & (graph.silo[column] == number)
        wanted = int(share * int(inside.sum()) / 2)
        ends = nodes[torch.randint(len(nodes), (2, 3 * wanted + 9), generator=draws)]
        low, high = ends.min(0).values, ends.max(0).values
        new = torch.unique((low * n + high)[low < high])
        new = new[~torch.isin(new, keys[0])]
        new = new[torch.randperm(len(new), generator=draws)[:wanted]]
        keys += [new, new % n * n + new // n]
    key = torch.unique(torch.cat(keys))
    return replace(graph, adj=CSR.from_pairs(key // n, key % n, (n, n)))


def run_cell(graph: Graph, seed: int, method: str, way: str) -> Row:
    """Return the scores of a run in the view that picks its round, and the last facts."""
    neighbors, options = WAYS[way]
    own = dict(METHODS[method])
    settings = {**RUN, **own, "neighbors": neighbors, "options": options, "seed": seed}
    result = sg.run(graph, **settings)
    view = "server" if method == "fedopt" else "personalized"
    scores = {
        name: getattr(views, view)["accuracy"]
        for name, views in (("val", result.val), ("test", result.test))
    }
    last = result.rounds[-1]
    facts = {name: last.get(f"fact_{name}") for name in ("mean_p", "score_range")}
    return scores | facts | {"best_round": result.best_round}


def done() -> list[Row]:
    """Return the finished cells."""
    packed = LINES.with_name(LINES.name + ".xz")
    text = lzma.decompress(packed.read_bytes()).decode() if packed.exists() else ""
    text += LINES.read_text() if LINES.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def run_missing(data_dir: str, minutes: float) -> None:
    """Run cells until the minutes are over."""
    names = ("seed", "dataset", "noise", "method", "way")
    finished = {tuple(row[name] for name in names) for row in done()}
    end = time.monotonic() + 60 * minutes
    for cell in cells():
        if cell in finished or time.monotonic() > end:
            continue
        seed, dataset, noise, method, way = cell
        graph = with_random_edges(in_silos(load(dataset, data_dir=data_dir), seed), noise, seed)
        row = dict(zip(names, cell, strict=True)) | run_cell(graph, seed, method, way)
        with LINES.open("a") as file:
            file.write(json.dumps(row) + "\n")


def table(rows: Sequence[Row]) -> str:
    """Return mean test accuracy less that of uniform draws, in points, and how many seeds."""
    head = ["data", "random edges", "method", "seeds", "uniform, %"]
    head += [way for way in WAYS if way != "uniform"]
    lines = []
    for dataset, noise, method in product(DATASETS, NOISES, METHODS):
        by_way: dict[str, dict[int, float]] = {way: {} for way in WAYS}
        for row in rows:
            if (row["dataset"], row["noise"], row["method"]) == (dataset, noise, method):
                by_way[row["way"]][row["seed"]] = 100 * row["test"]
        seeds = set.intersection(*(set(by_seed) for by_seed in by_way.values()))
        if not seeds:
            continue
        means = {way: mean(by_seed[s] for s in seeds) for way, by_seed in by_way.items()}
        line = [dataset, noise, method, str(len(seeds)), f"{means['uniform']:.1f}"]
        line += [f"{means[w] - means['uniform']:+.1f}" for w in WAYS if w != "uniform"]
        lines.append(line)
    return markdown_table(head, lines)


PLANTED: dict[str, dict[str, Any]] = {
    "uniform": {"policy": "uniform", "credit": "balance"},
    "paper": {"credit": "balance", "score": "probability"},
    "balance, odds": {"credit": "balance"},
    "gate, probability": {"score": "probability"},
    "gate, odds": {},
}


def planted_table() -> str:
    """Return the junk that is chosen and the accuracy on the planted graph, means of the seeds."""
    sys.path[:0] = [str(TESTS), str(TESTS / "sampling")]
    law = importlib.import_module("test_fedgrains_gate")
    lines = []
    for way, changes in PLANTED.items():
        figures = []
        for seed in SEEDS:
            block = law.planted(seed)
            sampler = replace(law.GATE, k=16, width=64, **changes)
            model, fitted = law.trained(block, sampler, seed)
            state = fitted.neighbors
            full, weighted = law.accuracies(block, model, sampler, fitted.tensors, state)
            figures.append((*law.share_of_junk(block, sampler, state), full, weighted))
        lines.append([way, *(f"{100 * mean(values):.0f}" for values in zip(*figures, strict=True))])
    head = ["way", "junk chosen, layer 2, %", "layer 1, %", "accuracy, full, %", "weighted, %"]
    return markdown_table(head, lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--planted", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table and not arguments.planted:
        run_missing(arguments.data_dir, arguments.minutes)
    print(planted_table() if arguments.planted else table(done()))
