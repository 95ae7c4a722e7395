"""Laws of FedProx: the loop over clients, FedAvg at mu = 0, and where a strong pull leads."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import silograph as sg
from mistakes import raises_code
from plain import dense_client, sgd_steps
from runs import MakeGraph, go, of, outcome, rows_of, same_bits
from silograph.core.key import Key
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods.base import MethodConfig
from silograph.methods.fedprox import FEDPROX, FedProxOptions, corrections
from silograph.nn.backends import BACKENDS
from silograph.nn.conv import Params
from silograph.nn.correction import Proximal
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import SGD

Built = tuple[ClientBlock, Route]
HAVE_NUMBA = importlib.util.find_spec("numba") is not None
TIERS = pytest.mark.parametrize(
    "kernels",
    ["torch", pytest.param("compiled", marks=pytest.mark.skipif(not HAVE_NUMBA, reason="numba"))],
)
ROUNDS, LR, DECAY, MU, STEPS = 3, 0.3, 5e-3, 0.4, 4


def config(graph: Graph, kernels: str) -> MethodConfig:
    return MethodConfig(
        model=Model("gcn", graph.num_features, 8, graph.num_classes, 2, 0.0, graph.task),
        optimizer=SGD(LR, DECAY),
        schedule=Schedule(STEPS),
        keep_optimizer=False,
        participation=1.0,
        options=FedProxOptions(mu=MU),
        backend=BACKENDS[kernels],
        corrections=corrections(FedProxOptions(mu=MU)),
    )


@pytest.mark.law(sample=6)
@TIERS
@pytest.mark.parametrize("sparse", [True, False])
def test_fedprox_is_the_loop_over_clients(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., Built],
    kernels: str,
    sparse: bool,
) -> None:
    graph = make_graph(50, sparse=sparse, features=12)
    cfg, (block, route) = config(graph, kernels), cut_block(graph, 3)
    weights = cfg.model.init_weights(Key.of(9), torch.float64)
    fed = InProcess(cfg, block, route, 3, compiled=cfg.backend.compiled)
    state = FEDPROX.init(fed, cfg, weights, Key.of(5))
    for t in range(1, ROUNDS + 1):
        state, _ = FEDPROX.round(fed, cfg, state, t, Key.of(5))
        weights = round_by_hand(block, weights)
    assert state.weights is not None
    for name, w in weights.items():
        torch.testing.assert_close(state.weights[name], w, rtol=0, atol=1e-10)


def round_by_hand(block: ClientBlock, start: Params) -> Params:
    share = block.num_train.double() / block.num_train.sum()

    def pulled(name: str, grad: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return grad + MU * (w - start[name])

    trained = [
        sgd_steps(dense_client(block, c), start, steps=STEPS, lr=LR, decay=DECAY, change=pulled)
        for c in range(block.num_clients)
    ]
    return {k: sum(p * w[k] for p, w in zip(share, trained, strict=True)) for k in start}


def test_without_a_pull_there_is_no_correction() -> None:
    assert corrections(FedProxOptions(mu=0.0)) == ()
    assert corrections(FedProxOptions(mu=0.5)) == (Proximal(0.5),)


@pytest.mark.law(sample=6)
@TIERS
@pytest.mark.parametrize("steps", [{}, {"batch_size": 4, "fanout": "2,1"}], ids=["full", "drawn"])
def test_without_a_pull_it_is_fedavg_bit_for_bit(
    make_graph: MakeGraph, kernels: str, steps: dict[str, Any]
) -> None:
    graph, options = make_graph(sparse=True), {"kernels": kernels, "local_epochs": 3, **steps}
    fedavg = go(graph, method="fedavg", **options)
    fedprox = go(graph, method="fedprox", options={"mu": 0.0}, **options)
    assert same_bits(of(fedprox), of(fedavg))
    assert rows_of(fedprox) == rows_of(fedavg)
    assert outcome(fedprox) == outcome(fedavg) | {"method": "fedprox"}


@pytest.mark.law(sample=6)
@TIERS
def test_one_step_feels_no_pull(make_graph: MakeGraph, kernels: str) -> None:
    """At the start the pull is 0; so only local epochs of two and more differ from FedAvg."""
    graph = make_graph()
    for epochs, same in ((1, True), (2, False)):
        fedavg, fedprox = (
            go(graph, method=m, options=o, local_epochs=epochs, kernels=kernels)
            for m, o in (("fedavg", {}), ("fedprox", {"mu": 1.0}))
        )
        assert same_bits(of(fedprox), of(fedavg)) == same


@pytest.mark.law(sample=6)
@TIERS
def test_a_stronger_pull_keeps_clients_nearer(make_graph: MakeGraph, kernels: str) -> None:
    """One round of SGD, from mu = 0 to mu = 1 / lr, where every step starts from w_t again."""
    graph = make_graph()
    options: dict[str, Any] = {
        "kernels": kernels, "rounds": 1, "optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0,
        "local_epochs": 8, "dropout": 0.0,
    }  # fmt: skip
    start = go(graph, method="fedavg", **options | {"lr": 1e-300})
    moved = []
    for mu in (0.0, 1.0, 5.0, 10.0):
        w = of(go(graph, method="fedprox", options={"mu": mu}, **options))
        moved.append(sum(float((w[k] - s).square().sum()) for k, s in of(start).items()))
    assert moved == sorted(moved, reverse=True)


def test_a_negative_pull_is_refused(make_graph: MakeGraph) -> None:
    with raises_code(sg.ConfigError, "option-value", option="mu", got=-1.0):
        go(make_graph(), method="fedprox", options={"mu": -1.0})


def test_pulls_belong_to_the_config(make_graph: Callable[..., Graph]) -> None:
    cfg = config(make_graph(), "torch")
    assert cfg.training.corrections == (Proximal(MU),)
    assert replace(cfg, corrections=()).training.corrections == ()
