"""Compiles the kernels that runs need before the first run, as on an image for many machines.

Each kernel is compiled by a run that needs it, on a graph of a few nodes. So the types of arrays
are those of runs, whatever these come to be.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp

from silograph.experiment.run.run import run
from silograph.graph.graph import Graph
from silograph.graph.read.arrays import from_arrays
from silograph.graph.read.ratings import ratings
from silograph.nn.kernels.arrays import LINE_FOR_ALL, report_compiling

NODES, USERS, ITEMS = 24, 4, 6
PRECISIONS = ("float32", "float64")
SMALL: dict[str, Any] = {
    "clients": 2,
    "rounds": 2,
    "hidden": 4,
    "kernels": "compiled",
    "split": "0.5/0.25/0.25",
    "weight_decay": 0.01,
}
# What a run does whose kernels are its own.
OF_LABELS: dict[str, dict[str, Any]] = {
    "training on a client's nodes": {"method": "fedavg"},
    "clustered clients": {"method": "gcfl"},
    "batches of drawn neighbors": {"method": "fedavg", "batch_size": 4, "fanout": "2,2"},
    "masks": {"method": "fedpub"},
    "masks and batches": {"method": "fedpub", "batch_size": 4, "fanout": "2,2"},
    "drawn neighbors": {"method": "fedavg", "neighbors": "fedgrains"},
    "selected clients": {"method": "fedavg", "selector": "harmony"},
}
# One of its kernels is called only with sparse features, as of words.
OF_WORDS: dict[str, Any] = {"method": "fedais"}
OF_RATINGS: dict[str, Any] = {"model": "rating_gcn", "method": "fedavg", "layers": 2}


def compile_kernels(dtype: str, report: Callable[[str], None]) -> int:
    """Compile all kernels for one precision and return how many were not on disk yet.

    Args:
        dtype: of weights and features in training, one of `PRECISIONS`.
        report: called with a line for each kernel that is compiled.

    Raises:
        ConfigError: numba is not installed, or there is no folder that it may write to.
    """
    with report_compiling(report, LINE_FOR_ALL) as watch:
        for graph, options in _runs():
            run(graph, **{**SMALL, **options, "dtype": dtype})
    return watch.kernels


def _runs() -> Iterator[tuple[Graph, dict[str, Any]]]:
    """Yield a graph and options of each run."""
    numbers = np.arange(NODES)
    ring = np.stack([numbers, (numbers + 1) % NODES])
    graph = from_arrays(edge_index=ring, x=np.eye(NODES)[:, :4] + 1.0, y=numbers % 2)
    for options in OF_LABELS.values():
        yield graph, {"partition": "random", **options}
    words = from_arrays(edge_index=ring, x=sp.csr_matrix(np.eye(NODES)), y=numbers % 2)
    yield words, {"partition": "random", **OF_WORDS}
    pairs = [(user, item) for user in range(USERS) for item in range(ITEMS)]
    table = np.array([(user, item, 1 + (user + item) % 5) for user, item in pairs], dtype=float)
    yield ratings(table), {"partition": "random", **OF_RATINGS}
