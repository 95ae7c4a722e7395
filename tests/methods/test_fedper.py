"""Laws of FedPer: the loop over clients, FedAvg with nothing private, what travels and stays."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import silograph as sg
from plain import dense_client, sgd_steps
from runs import (
    FAST,
    MakeGraph,
    assert_close,
    go,
    outcome,
    rows_of,
    run_until,
    same_bits,
    weights_of,
)
from silograph.core.key import Key
from silograph.core.payload import tensors_under
from silograph.evaluation.scoring import personal
from silograph.experiment.run.run import resume
from silograph.federation.frame import DIMENSION, FIELD, HEADER
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods import FEDAVG, FEDPER, MethodConfig, Params
from silograph.methods.fedper import FedPerOptions, split
from silograph.nn.backends import BACKENDS
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import SGD

Built = tuple[ClientBlock, Route]
HAVE_NUMBA = importlib.util.find_spec("numba") is not None
TIERS = pytest.mark.parametrize(
    "kernels",
    ["torch", pytest.param("compiled", marks=pytest.mark.skipif(not HAVE_NUMBA, reason="numba"))],
)
AVERAGE = replace(FEDAVG, name="average", evaluate=personal())
CLIENTS, ROUNDS = 3, 3
STEP: dict[str, Any] = {"steps": 2, "lr": 0.3, "decay": 5e-3}
KEY = Key.of(5)


def config(graph: Graph, **changes: Any) -> MethodConfig[FedPerOptions]:
    cfg = MethodConfig(
        model=Model("gcn", graph.num_features, 8, graph.num_classes, 2, 0.0, graph.task),
        optimizer=SGD(STEP["lr"], STEP["decay"]),
        schedule=Schedule(STEP["steps"]),
        keep_optimizer=False,
        participation=1.0,
        options=FedPerOptions(),
    )
    return replace(cfg, **changes)


@pytest.mark.law(sample=3)
@TIERS
@pytest.mark.parametrize("participation", [1.0, 0.67])
@pytest.mark.parametrize("sparse", [True, False])
def test_fedper_is_the_loop_over_clients(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., Built],
    kernels: str,
    sparse: bool,
    participation: float,
) -> None:
    """The first layer is averaged by training nodes; each client's last one goes on by itself."""
    graph = make_graph(50, sparse=sparse, features=12)
    cfg = config(graph, backend=BACKENDS[kernels], participation=participation)
    block, route = cut_block(graph, CLIENTS)
    fed = InProcess(cfg, block, route, CLIENTS)
    weights = cfg.model.init_weights(Key.of(9), torch.float64)
    state = FEDPER.init(fed, cfg, weights, KEY)
    base, last = split(weights, 1)
    own: list[Params] = [dict(last) for _ in fed.ids]
    for t in range(1, ROUNDS + 1):
        state, report = FEDPER.round(fed, cfg, state, t, KEY)
        chosen = [fed.ids.index(name) for name in report.participants]
        assert len(chosen) == round(participation * CLIENTS)
        ended = {
            c: sgd_steps(dense_client(block, c), base | own[c], **STEP, change=lambda _, g, w: g)
            for c in chosen
        }
        share = block.num_train[chosen].double() / block.num_train[chosen].sum()
        for c in chosen:
            own[c] = split(ended[c], 1)[1]
        for k in base:
            base[k] = torch.tensordot(share, torch.stack([ended[c][k] for c in chosen]), dims=1)
    assert state.weights is None
    kept = tensors_under("private", fed.states()[0])
    assert state.memory.keys() == base.keys()
    assert kept.keys() == last.keys()
    for k, w in base.items():
        torch.testing.assert_close(state.memory[k], w, rtol=0, atol=1e-10)
    for k, found in kept.items():
        ours = torch.stack([mine[k] for mine in own])
        torch.testing.assert_close(found, ours, rtol=0, atol=1e-10)


STEPS_OF: dict[str, dict[str, Any]] = {
    "full": {"local_epochs": 3},
    "drawn": {"batch_size": 4, "fanout": "2,1", "participation": 0.6},
    "kept": {"keep_optimizer": True, "optimizer": "sgd", "momentum": 0.9},
}


@pytest.mark.law(sample=6)
@TIERS
@pytest.mark.parametrize("steps", STEPS_OF)
def test_with_nothing_private_it_is_fedavg_bit_for_bit(
    make_graph: MakeGraph, kernels: str, steps: str
) -> None:
    """All but the bytes of the ops' names; FedAvg is scored as FedPer is."""
    graph = make_graph(sparse=True)
    options: dict[str, Any] = {"optimizer": "adam", "local_epochs": 1, "server_optimizer": "none"}
    options |= {"kernels": kernels, **STEPS_OF[steps]}
    fedavg = go(graph, method=AVERAGE, **options)
    fedper = go(graph, method="fedper", options={"private": 0}, **options)
    assert same_bits(weights_of(fedper), weights_of(fedavg))
    assert weights_of(fedper) is not None
    for ours, theirs in zip(rows_of(fedper), rows_of(fedavg), strict=True):
        assert ours | {"bytes": 0} == theirs | {"bytes": 0}
    a, b = ({**outcome(result), "method": "", "bytes": 0} for result in (fedper, fedavg))
    assert a == b


@pytest.mark.law(sample=4)
@pytest.mark.skipif(not HAVE_NUMBA, reason="numba")
@pytest.mark.parametrize("model", ["gcn", "sage"])
@pytest.mark.parametrize("steps", STEPS_OF)
def test_tiers_agree(make_graph: MakeGraph, model: str, steps: str) -> None:
    graph = make_graph(60, features=12, sparse=True)
    options: dict[str, Any] = {"method": "fedper", "model": model, "layers": 3, **STEPS_OF[steps]}
    if "fanout" in options:
        options["fanout"] = "2,1,1"
    ours, theirs = (go(graph, kernels=kernels, **options) for kernels in ("compiled", "torch"))
    assert_close(ours, theirs, 1e-10)
    assert list(ours.ledger.records) == list(theirs.ledger.records)


def frame_bytes(op: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """Length of a frame of float64 fields; `nodes` is of int64, as long."""
    fields = (
        FIELD.size + len(name) + DIMENSION.size * len(shape) + 8 * torch.Size(shape).numel()
        for name, shape in shapes.items()
    )
    return HEADER.size + len(op) + sum(fields)


@pytest.mark.parametrize("private", [1, 2])
def test_only_the_base_travels(make_graph: MakeGraph, private: int) -> None:
    """Once the private layers to all clients; then a round's weights are those of the base."""
    graph = make_graph()
    result = go(graph, method="fedper", layers=3, options={"private": private}, participation=0.5)
    sizes = graph.num_features, 8, graph.num_classes, 3
    shapes = Model("gcn", *sizes, 0.5, "multiclass").weight_shapes
    base, own = split(shapes, private)
    sent = {f"weights/{name}": shape for name, shape in base.items()}
    down = frame_bytes("train_private", sent)
    up = frame_bytes("train_private", sent | {"nodes": (), "loss": ()})
    first = frame_bytes("begin_private", {f"private/{name}": s for name, s in own.items()})
    first += frame_bytes("begin_private", {})
    asked = [r for r in result.ledger.records if (r.op, r.direction) == ("train_private", "down")]
    calls = sum(len(record.clients) for record in asked)
    assert calls == 4 * 2
    assert result.ledger.bytes_by_kind["weights"] == 4 * first + calls * (down + up)
    assert result.ledger.bytes_by_kind.keys() == {"weights", "evaluation"}


def test_there_is_no_model_without_private_layers(make_graph: MakeGraph) -> None:
    result = go(make_graph(), method="fedper")
    assert (result.model, result.test.server, result.test.uncut) == (None, None, None)
    assert result.test.personalized is not None
    assert all(row["val_server_accuracy"] is None for row in result.rounds)


def test_a_resumed_run_leaves_the_same_models(
    make_graph: MakeGraph, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that has not trained by the best round has zeros in its base."""
    options = {"method": "fedper", "layers": 3, "participation": 0.3}
    straight = go(make_graph(), **options)
    run_until(monkeypatch, make_graph(), 3, tmp_path / "cut", **FAST | options)
    again = resume(tmp_path / "cut", graph=make_graph())
    zeros = []
    for name, model in straight.models.items():
        assert same_bits(model.weights, again.models[name].weights)
        zeros.append(not bool(model.weights["0.weight"].any()))
    assert len(zeros) == 4
    assert any(zeros)


def test_clients_that_are_not_called_keep_what_they_have(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built]
) -> None:
    graph = make_graph(50)
    cfg = config(graph, participation=0.34)
    block, route = cut_block(graph, CLIENTS)
    fed = InProcess(cfg, block, route, CLIENTS)
    state = FEDPER.init(fed, cfg, cfg.model.init_weights(Key.of(9), torch.float64), KEY)
    for t in range(1, ROUNDS + 1):
        before = {k: w.clone() for k, w in tensors_under("private", fed.states()[0]).items()}
        state, report = FEDPER.round(fed, cfg, state, t, KEY)
        for k, w in tensors_under("private", fed.states()[0]).items():
            same = [torch.equal(w[c], before[k][c]) for c in range(CLIENTS)]
            assert same == [name not in report.participants for name in fed.ids]


class Net(nn.Module):
    """A part without weights between two with some."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 6), nn.ReLU(), nn.Linear(6, 4))
        self.act = nn.ReLU()
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        found: Tensor = self.head(self.act(self.body(x)))
        return found


OWN_MODULE = {k: v for k, v in FAST.items() if k != "hidden"} | {"method": "fedper", "model": Net}


def test_the_last_part_of_a_module_is_private(make_graph: MakeGraph) -> None:
    graph = make_graph()
    many, one = (sg.run(graph, **OWN_MODULE, block_size=size) for size in (4, 1))
    assert rows_of(many) == rows_of(one)
    own = HEADER.size + len("begin_private") + 2 * FIELD.size + 3 * DIMENSION.size
    own += len("private/head.weightprivate/head.bias") + 8 * (4 * 3 + 3)
    first = next(r for r in many.ledger.records if r.op == "begin_private")
    assert first.bytes.tolist() == [own] * 4


def test_layers_without_weights_do_not_count(make_graph: MakeGraph) -> None:
    """APPNP's hops have none: the last layer is that of its MLP."""
    model = Model("appnp", 7, 8, 3, 2, 0.5, "multiclass", hops=3, teleport=0.1)
    assert [name.partition(".")[0] for name in split(model.weight_shapes, 1)[1]] == ["1", "1"]
    go(make_graph(), method="fedper", model="appnp", rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"options": {"private": 2}},
            "option private: expected less than the number of layers, 2, got 2: nothing would "
            "be shared; use method local for clients that train alone",
        ),
        (
            {"options": {"private": -1}},
            "private: input should be greater than or equal to 0, got -1",
        ),
        ({"options": {"private": 0.5}}, "private: input should be a valid integer, got 0.5"),
        (
            {"layers": 1},
            "option private: expected less than the number of layers, 1, got 1: nothing would be "
            "shared; use method local for clients that train alone",
        ),
    ],
)
def test_mistakes(make_graph: MakeGraph, options: dict[str, Any], message: str) -> None:
    with pytest.raises(sg.ConfigError) as caught:
        go(make_graph(), method="fedper", **options)
    assert str(caught.value).startswith(message)
