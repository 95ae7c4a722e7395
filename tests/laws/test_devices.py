"""The same run on a GPU, and on a device that is pretended: equal up to rounding in float64."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pretended import pretended_device
from rating_graphs import rating_graph
from runs import MakeGraph, run_until, some_of
from silograph.experiment.run.result import Result
from silograph.experiment.run.run import resume, run
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silograph.nn.conv import Params

SHORT: dict[str, Any] = {
    "clients": 5,
    "partition": "random",
    "block_size": 3,
    "rounds": 4,
    "dtype": "float64",
    "kernels": "torch",
}

# Methods whose steps all silos take together draw by options of their own, not by batches.
DRAWN: dict[str, dict[str, Any]] = {
    "label_guided": {"sample": 30, "normalize": "conditional"},
    "bns": {"rate": 0.4},
    "cagnet": {},
    "fedgraph": {"kappa": 4, "keep_1": 0.5},
    "graphsaint": {"budget": 10, "sample_coverage": 3},
}
# Parts that draw, store or send in ways of their own.
PARTS: dict[str, dict[str, Any]] = {
    **{
        name: {"method": "fedpub", "neighbors": name, "batch_size": 4}
        for name in ("bernoulli", "fastgcn", "ladies", "drop_edge", "drop_node")
    },
    "fedgrains": {
        "method": "fedavg",
        "neighbors": "fedgrains",
        "batch_size": 4,
        "options": {"neighbors.k": 3},
    },
    "rows as bytes": {"method": "fedais", "options": {"sent": "int8", "batches": 3}},
    "rows that moved": {"method": "fedais", "options": {"moved": 0.01, "batches": 3}},
    "stored rows": {"method": "fedais", "options": {"owners": "stored", "batches": 3}},
    "unbiased": {"method": "fedais", "options": {"unbiased": True, "batches": 3}},
    "weights as bytes": {"method": "fedavg", "weights_as": "int8"},
    "weights as half bytes": {"method": "fedavg", "weights_as": "int4"},
    "kept optimizers": {"method": "fedper", "keep_optimizer": True},
    **{
        s: {"method": "fedavg", "selector": s}
        for s in ("harmony", "oort", "power_of_choice", "ucb")
    },
    **{a: {"method": "fedavg", "aggregator": a} for a in ("median", "trimmed_mean")},
    **{m: {"method": "fedavg", "model": m} for m in ("appnp", "gat", "gin", "graphconv", "mlp")},
    "an agent": {"method": "fedgraph", "options": {"policy": "ddpg"}, "speeds": "1,2"},
    "a bound's interval": {"method": "fedais", "options": {"interval": "bound"}},
    "ratings": {"method": "fedmf", "model": "rating_mf", "options": {"embedding": 3}},
    **{
        f"ratings, {m}": {"method": "fesog", "model": m, "options": {"clip": 0.1, "noise": 0.01}}
        for m in ("rating_gcn", "rating_gat", "consisrec")
    },
}
OF_RATINGS = {part for part in PARTS if part.startswith("ratings")}

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def steps_of(method: str, *, drawn: bool) -> dict[str, Any]:
    if METHODS[method].evaluate.all_silos:
        return {"options": DRAWN[method] if drawn else {}}
    some = some_of(method, 0.6)
    if METHODS[method].evaluate.crosses:  # these draw both themselves
        return some | {"options": {"drawn": 2, "batches": 3} if drawn else {}}
    return some | ({"batch_size": 4, "fanout": "2,1"} if drawn else {})


def run_on(device: str, graph: Graph, **options: Any) -> Result:
    return run(graph, **SHORT, device=device, **options)


def of_all(result: Result) -> dict[str, Params]:
    """The server's model and the clients' own."""
    models = dict(result.models) | ({} if result.model is None else {"": result.model})
    return {name: model.weights for name, model in models.items()}


def check_same(
    graph: Graph, device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """The CPU's run is that of a device, where the run dies in round 3 and goes on."""
    cpu = run_on("cpu", graph, **options)
    run_until(monkeypatch, graph, 3, folder, **SHORT, device=device, **options)
    there = resume(folder, graph=graph)
    assert there.stopped == "all 4 rounds"
    assert list(cpu.ledger.records) == list(there.ledger.records)
    found, expected = of_all(there), of_all(cpu)
    assert found.keys() == expected.keys()
    for owner, weights in expected.items():
        for name, w in weights.items():
            assert found[owner][name].device.type == device
            torch.testing.assert_close(found[owner][name].cpu(), w, rtol=0, atol=1e-10)


def graph_for(part: str, make_graph: MakeGraph, *, sparse: bool) -> Graph:
    return rating_graph() if part in OF_RATINGS else make_graph(sparse=sparse)


@pytest.mark.law(sample=120)
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_on_a_pretended_device(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    sparse: bool,
    drawn: bool,
) -> None:
    graph, steps = make_graph(sparse=sparse), steps_of(method, drawn=drawn)
    with pretended_device(monkeypatch) as device:
        check_same(graph, device, tmp_path / "cut", monkeypatch, method=method, **steps)


@pytest.mark.law(sample=60)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_parts_are_the_same_on_a_pretended_device(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, sparse: bool
) -> None:
    graph = graph_for(part, make_graph, sparse=sparse)
    with pretended_device(monkeypatch) as device:
        check_same(graph, device, tmp_path / "cut", monkeypatch, **PARTS[part])


def test_a_pretended_device_takes_no_tensor_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_device(monkeypatch) as device:
        there, here = torch.ones(3, device=device), torch.ones(3)
        places = torch.zeros(3, dtype=torch.int64, device=device)
        assert there.device.type == device
        assert (there + 1).cpu().tolist() == [2, 2, 2]
        assert there[torch.tensor([0, 2])].cpu().tolist() == [1, 1]
        mixes = (there.__add__, there.mul_, places.__eq__)
        for mixed in (*(partial(mix, here) for mix in mixes), partial(here.__getitem__, places)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                mixed()
        with pytest.raises(TypeError, match="can't convert pretended device type tensor to numpy"):
            there.numpy()


@on_cuda
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_on_cuda(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    sparse: bool,
    drawn: bool,
) -> None:
    graph, steps = make_graph(sparse=sparse), steps_of(method, drawn=drawn)
    check_same(graph, "cuda", tmp_path / "cut", monkeypatch, method=method, **steps)


@on_cuda
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_parts_are_the_same_on_cuda(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, sparse: bool
) -> None:
    graph = graph_for(part, make_graph, sparse=sparse)
    check_same(graph, "cuda", tmp_path / "cut", monkeypatch, **PARTS[part])
