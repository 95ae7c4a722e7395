"""FedGrAINS' sampler in compiled kernels: what torch makes of the same draws, up to rounding."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runs import go, same_bits, weights_of
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import State
from silograph.core.work import metered
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.nn.backends import BACKENDS
from silograph.nn.correction import Proximal
from silograph.nn.fit import Fitted, Schedule, Training, TrainingInputs, whole_memory
from silograph.nn.flow import rule_of
from silograph.nn.mini_batches import Fanout
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam
from silograph.sampling.fedgrains import FedGrains

pytest.importorskip("numba")

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
FLOW = FedGrains(3, 2, alpha=50.0, lr=0.03, log_z_lr=0.2, width=6)


def fitted(
    name: str,
    block: ClientBlock,
    model: Model,
    sampler: FedGrains,
    state: State | None = None,
    **how: Any,
) -> tuple[Fitted, Any]:
    """What training with a backend leaves, and the work of it."""
    given = {"optimizer": Adam(0.05), "batch": 4, "epochs": 3, "corrections": ()}
    options: dict[str, Any] = given | how
    schedule = Schedule(options["epochs"], options["batch"], sampler)
    training = Training(model, options["optimizer"], schedule, options["corrections"])
    start = model.init_weights(Key.of(1), torch.float64)
    if state is None:
        state = sampler.init(block, model, Key.of(2))
    memory = None
    if how.get("keep"):
        clients = block.num_clients
        memory = training.optimizer.init({n: w.expand(clients, *w.shape) for n, w in start.items()})
    with metered(block.num_clients) as meter:
        found = BACKENDS[name].fit(training, TrainingInputs(block, start, memory, Key.of(3), state))
    return found, meter.totals()


def tensors(found: Fitted) -> dict[str, Tensor]:
    """All that training leaves."""
    own = {"loss": found.loss, "logits": found.logits, "steps": found.steps}
    drawing = {f"neighbors/{name}": f.t for name, f in found.neighbors.items()}
    return own | found.tensors | whole_memory(found.memory) | drawing


def agree(block: ClientBlock, model: Model, sampler: FedGrains, **how: Any) -> None:
    """Hold both backends to each other, work included."""
    (ours, work), (theirs, expected) = (
        fitted(name, block, model, sampler, **how) for name in ("compiled", "torch")
    )
    mine, other = tensors(ours), tensors(theirs)
    assert mine.keys() == other.keys()
    for name, t in other.items():
        torch.testing.assert_close(mine[name], t, rtol=1e-10, atol=1e-10)
    assert work[0].tolist() == expected[0].tolist()
    for kind, flops in expected[1].items():
        assert work[1][kind].tolist() == flops.tolist(), kind


def model_of(graph: Graph, conv: str, layers: int = 2, drop: float = 0.3, **more: Any) -> Model:
    return Model(conv, graph.num_features, 6, graph.num_classes, layers, drop, graph.task, **more)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("conv", ["gcn", "graphconv", "sage"])
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_both_backends_agree(
    make_graph: MakeGraph, cut_block: CutBlock, conv: str, sampled: bool, sparse: bool
) -> None:
    """Weights, losses, what models say, the networks with their moments, and the work of it."""
    graph = make_graph(60, sparse=sparse)
    block, _ = cut_block(graph, 4)
    agree(block, model_of(graph, conv), replace(FLOW, sampled_degrees=sampled))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("sampler", "how"),
    [
        ({"policy": "untrained"}, {}),
        ({"policy": "uniform", "sampled_degrees": True}, {}),
        ({"learns_z": False}, {}),
        ({"k": 1}, {"batch": None}),
        ({"k": 99}, {"optimizer": SGD(0.1, momentum=0.5)}),
        ({}, {"keep": True}),
        ({}, {"corrections": (Proximal(0.2),), "epochs": 2}),
        ({}, {"epochs": 0}),
        ({"credit": "gate"}, {}),
        ({"credit": "gate", "score": "odds", "sampled_degrees": True}, {"keep": True}),
        ({"score": "odds"}, {"batch": None}),
    ],
    ids=str,
)
def test_they_agree_however_clients_choose_and_train(
    make_graph: MakeGraph, cut_block: CutBlock, sampler: dict[str, Any], how: dict[str, Any]
) -> None:
    graph = make_graph(60, sparse=True)
    block, _ = cut_block(graph, 4)
    agree(block, model_of(graph, "gcn"), replace(FLOW, **sampler), **how)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize(
    ("model", "sampler"),
    [
        ({"conv": "gcn", "layers": 3, "head": "linear"}, {}),
        ({"conv": "sage", "layers": 3}, {"hops": 3, "sampled_degrees": True}),
        ({"conv": "gcn", "input_dropout": 0.4}, {}),
        ({"conv": "gcn", "layers": 1}, {"hops": 1}),
        ({"conv": "mlp"}, {}),
        ({"conv": "sage", "layers": 3}, {"hops": 3, "credit": "gate", "score": "odds"}),
        ({"conv": "gcn", "input_dropout": 0.4}, {"credit": "gate"}),
        ({"conv": "gcn", "layers": 3, "head": "linear"}, {"credit": "gate", "score": "odds"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("sparse", [True, False])
def test_they_agree_on_other_models(
    make_graph: MakeGraph,
    cut_block: CutBlock,
    model: dict[str, Any],
    sampler: dict[str, Any],
    sparse: bool,
) -> None:
    graph = make_graph(60, sparse=sparse)
    block, _ = cut_block(graph, 3)
    agree(block, model_of(graph, **model), replace(FLOW, **sampler))


@pytest.mark.parametrize("sampled", [True, False])
def test_they_agree_on_weighted_edges_and_clients_without_training_nodes(
    make_graph: MakeGraph, cut_block: CutBlock, sampled: bool
) -> None:
    graph = make_graph(60, sparse=True)
    there = graph.adj.row.double() + graph.adj.indices.double()
    weighted = replace(graph, adj=graph.adj.with_values(0.5 + there % 7))
    block, _ = cut_block(weighted, 4)
    train = block.split.train & (block.client != 2)
    block = replace(block, split=replace(block.split, train=train))
    agree(block, model_of(graph, "gcn"), replace(FLOW, sampled_degrees=sampled))


def test_what_clients_learned_is_gone_on_from(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    """A second call begins with the networks of the first, which stay as they are."""
    graph = make_graph(60, sparse=True)
    block, _ = cut_block(graph, 4)
    model = model_of(graph, "gcn")
    state = fitted("compiled", block, model, FLOW)[0].neighbors
    before = {name: f.t.clone() for name, f in state.items()}
    agree(block, model, FLOW, state=state)
    assert same_bits({name: f.t for name, f in state.items()}, before)
    after = fitted("compiled", block, model, FLOW, state=state)[0].neighbors
    assert not torch.equal(after["last"].t, before["last"])


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_a_first_step_is_balanced_exactly(
    make_graph: MakeGraph, cut_block: CutBlock, kernels: str
) -> None:
    """Adam would take a whole step along what rounding leaves of a balance of 0."""
    graph = make_graph(120, sparse=True)
    block, _ = cut_block(graph, 12)
    model, sampler = model_of(graph, "gcn"), FedGrains(3, 2, width=8)
    start = sampler.init(block, model, Key.of(2))
    found, _ = fitted(kernels, block, model, sampler, start, epochs=1, batch=None)
    assert found.neighbors["steps"].t.tolist() == [1] * 12
    assert bool((found.neighbors["log_z"].t != 0).all())
    assert torch.equal(found.neighbors["last"].t, start["last"].t)
    assert not found.neighbors["first/log_z"].t.any()


@pytest.mark.parametrize("sampled", [True, False])
def test_clients_have_the_same_bits_in_any_company(
    make_graph: MakeGraph, cut_block: CutBlock, sampled: bool
) -> None:
    graph = make_graph(60, sparse=True)
    block, _ = cut_block(graph, 4)
    model, sampler = model_of(graph, "gcn"), replace(FLOW, sampled_degrees=sampled)
    whole = tensors(fitted("compiled", block, model, sampler)[0])
    for positions in ([0, 2], [3, 1]):
        part = tensors(fitted("compiled", block.take(torch.tensor(positions)), model, sampler)[0])
        for name in ("loss", "0.bias", "1.weight", "neighbors/last", "neighbors/second/log_z"):
            assert torch.equal(part[name], whole[name][positions])


RUN: dict[str, Any] = {"rounds": 3, "batch_size": 4, "neighbors": "fedgrains"}


# Masks need a kernel of their own, which takes a quarter of a minute to compile.
WITH_MASKS = pytest.param("fedpub", marks=pytest.mark.slow)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("method", ["local", "fedavg", "fedprox", "fedper", "gcflplus", WITH_MASKS])
def test_runs_agree(make_graph: MakeGraph, method: str) -> None:
    """Scores, the ledger and what each method makes of it; masks of FED-PUB, too."""
    graph = make_graph(60, sparse=True)
    options = {"neighbors.k": 2, "neighbors.width": 6, "neighbors.alpha": 50.0}
    ours, theirs = (
        go(graph, method=method, options=options, kernels=kernels, **RUN)
        for kernels in ("auto", "torch")
    )
    assert ours.config.kernels == "compiled"
    for row, other in zip(ours.rounds, theirs.rounds, strict=True):
        assert row["train_loss"] == pytest.approx(other["train_loss"], abs=1e-8)
    records = [
        [(r.op, r.direction, r.bytes.tolist(), r.flops.tolist()) for r in found.ledger.records]
        for found in (ours, theirs)
    ]
    assert records[0] == records[1]


def test_threads_and_blocks_change_no_bit(make_graph: MakeGraph) -> None:
    graph = make_graph(60, sparse=True)
    options = {"options": {"neighbors.k": 2, "neighbors.width": 6}, "kernels": "compiled", **RUN}
    found = [
        weights_of(go(graph, **options | more)) for more in ({}, {"threads": 2}, {"block_size": 1})
    ]
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"hops": 1},
            "expected flow networks for 2 layers, got some for 1: they are of another model",
        ),
        (
            {"width": 5},
            "expected flow networks with 28 rows of 5 for the features of 4 clients and 27 other "
            "weights each, got (28, 6) and 32: they are of another graph or model",
        ),
        (
            {"hops": 3},
            "expected flow networks with 28 rows of 6 for the features of 4 clients and 38 other "
            "weights each, got (28, 6) and 32: they are of another graph or model",
        ),
    ],
    ids=str,
)
def test_networks_of_something_else_are_refused(
    make_graph: MakeGraph, cut_block: CutBlock, other: dict[str, Any], message: str
) -> None:
    graph = make_graph(60, sparse=False)
    block, _ = cut_block(graph, 4)
    model = model_of(graph, "gcn")
    state = FLOW.init(block, model, Key.of(2))
    with pytest.raises(ProtocolError) as caught:
        fitted("compiled", block, model, replace(FLOW, **other), state=state)
    assert str(caught.value) == message


def test_networks_of_another_precision_are_refused(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    block, _ = cut_block(make_graph(60), 4)
    model = model_of(make_graph(60), "gcn")
    state = {n: replace(f, t=f.t.float()) for n, f in FLOW.init(block, model, Key.of(2)).items()}
    with pytest.raises(ProtocolError) as caught:
        fitted("compiled", block, model, FLOW, state=state)
    assert str(caught.value) == "expected flow networks of torch.float64, got torch.float32"


class OwnDraw(FedGrains):
    """Draws in a way that no kernel knows."""


def test_what_is_derived_of_the_sampler_is_not_compiled() -> None:
    """Kernels would follow the rule, and not the draw of the derived class."""
    sampler = FedGrains(k=2, hops=2)
    assert rule_of(sampler) is sampler
    assert rule_of(OwnDraw(k=2, hops=2)) is None
    assert rule_of(Fanout((2, 2))) is None


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_the_plan_says_where_torch_draws(
    make_graph: MakeGraph, capsys: pytest.CaptureFixture[str], kernels: str
) -> None:
    run = {"neighbors": "fedgrains", "batch_size": 4, "rounds": 1, "kernels": kernels}
    go(make_graph(), progress="plain", **run)
    drawn = ", neighbors=fedgrains drawn in torch" if kernels == "torch" else ""
    assert f"{kernels} kernels{drawn}, " in capsys.readouterr().err
