"""The same run on a GPU: equal up to rounding in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import silograph as sg
from silograph.experiment.run.result import Result
from silograph.graph.graph import Graph
from silograph.methods import METHODS

# Methods whose steps all silos take together draw by options of their own, not by batches.
DRAWN: dict[str, dict[str, Any]] = {
    "label_guided": {"sample": 30, "normalize": "conditional"},
    "bns": {"rate": 0.4},
    "cagnet": {},
    "fedgraph": {"kappa": 4, "keep_1": 0.5},
    "graphsaint": {"budget": 10, "sample_coverage": 3},
}


def steps_of(method: str, *, drawn: bool) -> dict[str, Any]:
    if METHODS[method].evaluate.all_silos:
        return {"options": DRAWN[method] if drawn else {}}
    if METHODS[method].evaluate.crosses:  # these draw both themselves
        return {"participation": 0.6, "options": {"drawn": 2, "batches": 3} if drawn else {}}
    some = {"participation": 0.6} if METHODS[method].needs.selector == "uniform" else {}
    return some | ({"batch_size": 4, "fanout": "2,1"} if drawn else {})


def run_on(device: str, graph: Graph, method: str, *, drawn: bool) -> Result:
    return sg.run(
        graph,
        method=method,
        clients=5,
        partition="random",
        block_size=3,
        rounds=4,
        dtype="float64",
        device=device,
        **steps_of(method, drawn=drawn),
    )


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_asked_of_a_gpu_runs(
    make_graph: Callable[..., Graph], method: str, drawn: bool
) -> None:
    result = run_on("cpu", make_graph(), method, drawn=drawn)
    assert result.stopped == "all 4 rounds"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_on_cuda(
    make_graph: Callable[..., Graph], method: str, sparse: bool, drawn: bool
) -> None:
    graph = make_graph(sparse=sparse)
    cpu, cuda = (run_on(device, graph, method, drawn=drawn) for device in ("cpu", "cuda"))
    assert list(cpu.ledger.records) == list(cuda.ledger.records)
    if cpu.model is not None and cuda.model is not None:
        for name, w in cpu.model.weights.items():
            torch.testing.assert_close(cuda.model.weights[name].cpu(), w, rtol=0, atol=1e-10)
