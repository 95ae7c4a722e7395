"""Silos that exist outside the file: web pages of four universities.

Shows: a graph with a silo column; `partition="silo"`, one client for each silo, with its name;
what federation gives them over training alone, seen by the same view of both.

Uses the data set `webkb` where `sg.load` finds it (docs/reference/datasets.md), else a small
graph with a silo column made here, which says nothing about universities.
"""

import numpy as np

import silograph as sg


def small_graph() -> sg.Graph:
    """Return 240 nodes in 4 silos of unequal size; no edge crosses two silos."""
    rng = np.random.default_rng(0)
    silo = np.repeat(np.arange(4), [120, 60, 40, 20])
    y = rng.integers(0, 3, 240)
    a, b = rng.integers(0, 240, (2, 12000))
    kept = (silo[a] == silo[b]) & (rng.random(12000) < np.where(y[a] == y[b], 0.5, 0.1))
    return sg.from_arrays(
        edge_index=np.stack([a[kept], b[kept]]),
        x=np.eye(3)[y] + rng.normal(size=(240, 3)),
        y=y,
        silo=silo,
        silo_names=["north", "east", "south", "west"],
        name="small",
    )


try:
    graph = sg.load("webkb")
except sg.DataError:
    graph = small_graph()
print(graph)
assert graph.silo is not None
for number, name in enumerate(graph.silo_names):
    print(f"{name:>12}: {int((graph.silo == number).sum())} nodes")

for method in ("local", "fedopt"):
    result = sg.run(graph, method=method, partition="silo", rounds=20, hidden=32)
    scores = result.test.personalized
    assert scores is not None
    print(f"{method:>8}: accuracy {scores.accuracy:.4f}, {result.bytes / 1e6:.2f} MB")
