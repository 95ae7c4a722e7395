"""The same run on a GPU: equal up to rounding in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import silograph as sg
from silograph.graph.graph import Graph
from silograph.methods import METHODS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("steps", [{}, {"batch_size": 4, "fanout": "2,1"}], ids=["full", "drawn"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_on_cuda(
    make_graph: Callable[..., Graph], method: str, sparse: bool, steps: dict[str, Any]
) -> None:
    graph = make_graph(sparse=sparse)
    cpu, cuda = (
        sg.run(
            graph,
            method=method,
            clients=5,
            partition="random",
            participation=0.6,
            block_size=3,
            rounds=4,
            dtype="float64",
            device=device,
            **steps,
        )
        for device in ("cpu", "cuda")
    )
    assert list(cpu.ledger.records) == list(cuda.ledger.records)
    if cpu.model is not None and cuda.model is not None:
        for name, w in cpu.model.weights.items():
            torch.testing.assert_close(cuda.model.weights[name].cpu(), w, rtol=0, atol=1e-10)
