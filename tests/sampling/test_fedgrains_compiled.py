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
from silograph.graph.block.block import ClientBlock
from silograph.graph.block.halo import Route
from silograph.graph.graph import Graph
from silograph.nn.backends import BACKENDS
from silograph.nn.correction import Proximal
from silograph.nn.fit import Fitted, Schedule, Training, TrainingInputs
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
    options = {"optimizer": Adam(0.05), "batch": 4, "epochs": 3, "corrections": ()} | how
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
    return found, meter.summed()


def tensors(found: Fitted) -> dict[str, Tensor]:
    """All that training leaves."""
    own = {"loss": found.loss, "logits": found.logits, "steps": found.steps}
    drawing = {f"neighbors/{name}": f.t for name, f in found.neighbors.items()}
    return own | found.tensors | found.memory | drawing


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
    ],
    ids=str,
)
def test_they_agree_however_clients_choose_and_train(
    make_graph: MakeGraph, cut_block: CutBlock, sampler: dict[str, Any], how: dict[str, Any]
) -> None:
    graph = make_graph(60, sparse=True)
    block, _ = cut_block(graph, 4)
    agree(block, model_of(graph, "gcn"), replace(FLOW, **sampler), **how)
