"""Validation scores of the rules for weights of edges, on weights of three kinds.

    PYTHONPATH=tests python benchmarks/models/edge_weights.py

prints the table of `edge_weights.md`. Nothing is downloaded; it takes a few minutes of one core.
"""

import logging
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import silograph as sg
from bank_graphs import bank_graph
from silograph.experiment.terminal_table import markdown_table
from silograph.graph.graph import Graph

RULES = ("ignore", "use", "scale", "log")
MODELS = ("gcn", "graphconv")
SEEDS = (0, 1, 2)
SHARED: Mapping[str, Any] = {
    "method": "fedopt",
    "clients": 3,
    "rounds": 20,
    "kernels": "torch",
    "hidden": 16,
    "split": "0.3/0.4/0.3",
}


def planted_graph(kind: str) -> Graph:
    """Return 600 nodes of 4 classes with 2,400 edges, half of them inside a class.

    Args:
        kind: `helpful`: edges inside a class weigh 3.3 times as much; `noise`: log-normal weights
            that mean nothing.
    """
    rng = np.random.default_rng(0)
    y = np.arange(600) % 4
    source, target = rng.integers(0, 600, (2, 2400))
    for edge in np.flatnonzero(rng.random(len(source)) < 0.33):
        target[edge] = rng.choice(np.flatnonzero(y == y[source[edge]]))
    apart = source != target
    source, target = source[apart], target[apart]
    weight = rng.lognormal(0, 1, len(source))
    if kind != "noise":
        center = np.where(y[source] == y[target], 0.6, -0.6)
        weight = rng.lognormal(center, 0.5)
    return sg.from_arrays(
        edge_index=np.stack([source, target]),
        edge_weight=weight,
        x=rng.normal(size=(600, 8)) + 0.8 * np.eye(8)[y],
        y=y,
        name=kind,
    )


def score(graph: Graph, model: str, rule: str) -> str:
    """Return mean and deviation over seeds of the validation score of the server's model."""
    own: dict[str, Any] = {"partition": "random", "metric": "accuracy"}
    if graph.name == "banks":
        own = {"partition": "silo", "metric": "auc"}
    values = []
    for seed in SEEDS:
        options = {**SHARED, **own, "model": model, "edge_weights": rule, "seed": seed}
        scores = sg.run(graph, **options).val.server
        assert scores is not None
        values.append(float(getattr(scores, own["metric"]) or 0.0))
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def main() -> None:
    """Print the table."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    graphs = [planted_graph("helpful"), planted_graph("noise"), bank_graph()]
    rows = []
    for graph in graphs:
        for model in MODELS:
            rows.append([graph.name, model, *(score(graph, model, rule) for rule in RULES)])
            print(*rows[-1], flush=True)
        rows.append([graph.name, "sage", score(graph, "sage", "ignore"), "", "", ""])
        print(*rows[-1], flush=True)
    print(markdown_table(["weights", "model", *RULES], rows))


if __name__ == "__main__":
    main()
