"""Kernels free all memory that they allocate, and drop every reference to arrays that they get."""

import importlib
from typing import Any

import pytest

pytest.importorskip("numba")

from rating_graphs import rating_graph
from runs import FAST, MakeGraph, go
from silograph.experiment.run.run import run

RUNTIME: Any = importlib.import_module("numba.core.runtime.nrt")
STATISTICS: Any = importlib.import_module("numba.core.runtime._nrt_python")
KINDS: dict[str, dict[str, Any]] = {
    "whole graphs": {},
    "two matrices a layer": {"model": "graphconv", "dropout": 0.5},
    "batches of drawn neighbors": {"batch_size": 3, "fanout": "2,2", "weight_decay": 0.01},
    "chosen neighbors": {"neighbors": "fedgrains", "batch_size": 3},
    "masks": {"method": "fedpub"},
    "stored rows": {"method": "fedais"},
}


def references() -> tuple[int, int]:
    """Return how many allocations, and references to arrays, are left."""
    stats = RUNTIME.rtsys.get_allocation_stats()
    return stats.alloc - stats.free, stats.mi_alloc - stats.mi_free


@pytest.fixture(autouse=True)
def counted() -> None:
    STATISTICS.memsys_enable_stats()


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_training_leaves_no_references(make_graph: MakeGraph, options: dict[str, Any]) -> None:
    before = references()
    result = go(make_graph(), **{"kernels": "compiled", "rounds": 2, **options})
    assert result.config.kernels == "compiled"
    assert references() == before
    assert RUNTIME.rtsys.get_allocation_stats().mi_alloc > 0


def test_training_on_ratings_leaves_no_references() -> None:
    before = references()
    ratings: dict[str, Any] = {"model": "rating_gcn", "layers": 2, "split": "0.6/0.2/0.2"}
    run(rating_graph(), **FAST | ratings | {"kernels": "compiled", "rounds": 1, "clients": 2})
    assert references() == before
