"""Laws of SCAFFOLD: the loop over clients, what c is, where it leads, and what it sends."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from plain import dense_client, sgd_steps
from runs import MakeGraph, go, of
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.payload import Stacked, tensors_under
from silograph.federation.frame import DIMENSION, FIELD, HEADER
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods.base import MethodConfig, ServerState
from silograph.methods.fedavg import FEDAVG
from silograph.methods.scaffold import SCAFFOLD, ScaffoldOptions, variate_change
from silograph.nn.backends import TORCH
from silograph.nn.conv import Params
from silograph.nn.correction import Shift
from silograph.nn.fit import Fitted, Schedule, TrainingInputs
from silograph.nn.mini_batches import Fanout
from silograph.nn.model import Model
from silograph.nn.optim import SGD

Built = tuple[ClientBlock, Route]
ROUNDS, LR, DECAY, STEPS, SERVER_LR = 3, 0.3, 5e-3, 4, 0.7
KEY = Key.of(5)


def shape(graph: Graph, layers: int = 2, dropout: float = 0.0) -> Model:
    return Model("gcn", graph.num_features, 8, graph.num_classes, layers, dropout, graph.task)


def config(graph: Graph, **changes: Any) -> MethodConfig:
    cfg = MethodConfig(
        model=shape(graph),
        optimizer=SGD(LR, DECAY),
        schedule=Schedule(STEPS),
        keep_optimizer=False,
        participation=1.0,
        options=ScaffoldOptions(),
    )
    return replace(cfg, **changes)


def begin(cfg: MethodConfig, built: Built, block_size: int = 5) -> tuple[InProcess, ServerState]:
    fed = InProcess(cfg, *built, block_size)
    return fed, SCAFFOLD.init(fed, cfg, cfg.model.init_weights(Key.of(9), torch.float64), KEY)


def variates(fed: InProcess) -> Params:
    """Those of all clients, (C, ...)."""
    parts = [tensors_under("variates", state) for state in fed.states()]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("participation", [1.0, 0.67])
@pytest.mark.parametrize("sparse", [True, False])
def test_scaffold_is_the_loop_over_clients(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., Built],
    sparse: bool,
    participation: float,
) -> None:
    """Algorithm 1 of the paper with option II; means are weighted by training nodes."""
    graph = make_graph(50, sparse=sparse, features=12)
    cfg = config(graph, participation=participation, options=ScaffoldOptions(SERVER_LR))
    block, route = cut_block(graph, 3)
    fed, state = begin(cfg, (block, route))
    assert state.weights is not None
    x, c = dict(state.weights), {k: torch.zeros_like(w) for k, w in state.weights.items()}
    own = [dict(c) for _ in fed.ids]
    nodes = block.num_train.double()
    for t in range(1, ROUNDS + 1):
        state, report = SCAFFOLD.round(fed, cfg, state, t, KEY)
        chosen = [fed.ids.index(name) for name in report.participants]
        assert len(chosen) == round(participation * 3)
        ended, new = {}, {}
        for i in chosen:

            def corrected(
                name: str, grad: Tensor, _: Tensor, c: Params = c, own: Params = own[i]
            ) -> Tensor:
                return grad + c[name] - own[name]

            data = dense_client(block, i)
            ended[i] = sgd_steps(data, x, steps=STEPS, lr=LR, decay=DECAY, change=corrected)
            new[i] = {k: own[i][k] - c[k] + (x[k] - ended[i][k]) / (STEPS * LR) for k in x}
        held = nodes[chosen].sum()
        for k in x:
            mean = sum((nodes[i] * ended[i][k] for i in chosen), torch.zeros(())) / held
            change = sum((nodes[i] * (new[i][k] - own[i][k]) for i in chosen), torch.zeros(()))
            x = {**x, k: x[k] + SERVER_LR * (mean - x[k])}
            c = {**c, k: c[k] + held / nodes.sum() * (change / held)}
        own = [new.get(i, own[i]) for i in range(3)]
    for k, w in x.items():
        assert state.weights is not None
        torch.testing.assert_close(state.weights[k], w, rtol=0, atol=1e-10)
        torch.testing.assert_close(state.memory[f"variates/{k}"], c[k], rtol=0, atol=1e-10)
        ours = torch.stack([part[k] for part in own])
        torch.testing.assert_close(variates(fed)[k], ours, rtol=0, atol=1e-10)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize(
    "schedule", [Schedule(2), Schedule(2, batch_size=3, neighbors=Fanout((2, 2)))]
)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_common_variate_is_the_mean_of_all(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., Built],
    participation: float,
    schedule: Schedule,
) -> None:
    """After any number of rounds; a client without training nodes has none."""
    graph = make_graph(50)
    block, route = cut_block(graph, 5)
    train = block.split.train & (block.client != 2)
    block = replace(block, split=replace(block.split, train=train))
    model = shape(graph, dropout=0.5)
    cfg = config(graph, model=model, participation=participation, schedule=schedule)
    fed, state = begin(cfg, (block, route), 2)
    share = block.num_train.double() / block.num_train.sum()
    chosen: set[str] = set()
    for t in range(1, 6):
        state, report = SCAFFOLD.round(fed, cfg, state, t, KEY)
        chosen |= set(report.participants)
        trained = [i for i, client in enumerate(fed.ids) if client in chosen]
        for name, own in variates(fed).items():
            mean = torch.einsum("c,c...->...", share, own)
            torch.testing.assert_close(state.memory[f"variates/{name}"], mean, rtol=0, atol=1e-10)
            assert not own[2].any()
            seen = [i for i in trained if i != 2]
            assert own.flatten(1).any(1).nonzero()[:, 0].tolist() == seen


def test_a_variate_is_the_mean_gradient_of_the_clients_own_steps(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built]
) -> None:
    """Clients differ in the number of steps: K_i is each client's own."""
    graph = make_graph(50)
    block, route = cut_block(graph, 3)
    schedule = Schedule(2, batch_size=3)
    cfg = config(graph, schedule=schedule)
    fed, state = begin(cfg, (block, route))
    for t in (1, 2):
        before, server = variates(fed), state
        assert server.weights is not None
        common = {k: server.memory[f"variates/{k}"] for k in server.weights}
        shift = Shift({k: common[k] - c for k, c in before.items()})
        training = replace(cfg.training, corrections=(shift,))
        fitted = TORCH.fit(
            training, TrainingInputs(block, server.weights, None, KEY.fold("train", t))
        )
        state, _ = SCAFFOLD.round(fed, cfg, state, t, KEY)
        steps = 2 * ((block.num_train + 2) // 3)
        assert torch.equal(fitted.steps, steps)
        assert len(steps.unique()) > 1
        for name, own in variates(fed).items():
            per = steps.double().view(-1, *[1] * (own.dim() - 1))
            path = (server.weights[name] - fitted.weights[name].t) / (per * LR)
            expected = before[name] - common[name] + path
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rounds", [1, 4])
def test_where_there_is_nothing_to_correct_it_is_fedavg(make_graph: MakeGraph, rounds: int) -> None:
    """In the first round all variates are 0; with one client c = c_1 in every round."""
    clients = 4 if rounds == 1 else 1
    options: dict[str, Any] = {
        "rounds": rounds, "clients": clients, "optimizer": "sgd", "lr": 0.3, "local_epochs": 3,
        "kernels": "torch",
    }  # fmt: skip
    ours, theirs = (go(make_graph(), method=m, **options) for m in ("scaffold", "fedavg"))
    for name, w in of(theirs).items():
        torch.testing.assert_close(of(ours)[name], w, rtol=0, atol=1e-12)
    assert ours.bytes > theirs.bytes


def test_clients_agree_on_where_the_gradient_of_all_is_zero(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built]
) -> None:
    """FedAvg with many local steps stops elsewhere; weight decay is a part of the loss."""
    graph = make_graph(60, features=4)
    block, route = cut_block(graph, 3)
    steps = SGD(0.5, 0.05), Schedule(10)
    cfg = config(graph, model=shape(graph, layers=1), optimizer=steps[0], schedule=steps[1])
    left = {}
    for method in (FEDAVG, SCAFFOLD):
        own = replace(cfg, options=method.options())
        fed = InProcess(own, block, route, 3)
        state = method.init(fed, own, cfg.model.init_weights(Key.of(9), torch.float64), KEY)
        for t in range(1, 81):
            state, _ = method.round(fed, own, state, t, KEY)
        assert state.weights is not None
        left[method.name] = gradient(cfg, block, state.weights)
    assert left["scaffold"] < 1e-8 < 1e-4 < left["fedavg"]


def gradient(cfg: MethodConfig, block: ClientBlock, weights: Params) -> float:
    """Largest entry of the gradient of the loss of all training nodes, with decay."""
    training = replace(cfg.training, optimizer=SGD(1.0, 0.05), schedule=Schedule(1))
    moved = TORCH.fit(training, TrainingInputs(block, weights, None, KEY)).weights
    share = block.num_train.double() / block.num_train.sum()
    grads = [w - torch.einsum("c,c...->...", share, moved[k].t) for k, w in weights.items()]
    return max(float(g.abs().max()) for g in grads)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_bytes_are_the_closed_form(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built], participation: float
) -> None:
    """Each round: weights and variates to m clients; the same, nodes and loss back."""
    graph = make_graph(40)
    cfg = config(graph, participation=participation)
    fed, state = begin(cfg, cut_block(graph, 5))
    calls = 0
    for t in range(1, ROUNDS + 1):
        fed.start_round(t)
        state, report = SCAFFOLD.round(fed, cfg, state, t, KEY)
        calls += len(report.participants)
    f, h, k = graph.num_features, 8, graph.num_classes
    shapes = {"0.weight": (f, h), "0.bias": (h,), "1.weight": (h, k), "1.bias": (k,)}
    model = sum(
        FIELD.size
        + len(f"{prefix}/{name}")
        + DIMENSION.size * len(shape)
        + 8 * torch.Size(shape).numel()
        for prefix in ("weights", "variates")
        for name, shape in shapes.items()
    )
    head, nodes = HEADER.size + len("train_corrected"), FIELD.size + len("nodes") + 8
    loss = FIELD.size + len("loss") + 8
    assert fed.ledger.bytes_by_kind["weights"] == calls * (2 * (head + model) + nodes + loss)
    start = HEADER.size + len("begin_variates")
    assert fed.ledger.bytes_by_kind["control"] == 5 * (2 * start + nodes)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("factor", ["1e-5", "1e-9", "1e-30", "1e-310"])
def test_variates_outlive_a_rate_that_vanishes(
    make_graph: MakeGraph, dtype: str, factor: str
) -> None:
    """A path of steps below the rounding of 1 tells no gradient; weights and scores stay finite.

    Round 2 has the rate times the factor, round 4 its cube. Weights of size 1 move by less than
    the rounding of a few of them from round 3 on, so nothing that a variate holds may show there.
    """
    run = partial(go, make_graph(60), method="scaffold", dtype=dtype, lr=0.3, clients=3)
    run = partial(run, rounds=4, lr_schedule=f"step:1:{factor}")
    found = run()
    weights = of(found)
    assert all(bool(w.isfinite().all()) for w in weights.values())
    two = of(run(rounds=2))
    assert max(float((weights[name] - w).abs().max()) for name, w in two.items()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_variate_is_renewed_down_to_the_rounding_of_one(dtype: torch.dtype) -> None:
    """At eta = eps it is, below it is not: the oracle is the formula."""
    eps = torch.finfo(dtype).eps
    start, common = {"w": torch.zeros(2, dtype=dtype)}, {"w": torch.ones(2, dtype=dtype)}
    steps = torch.tensor([4, 0])
    ended = torch.full((2, 2), -8 * eps, dtype=dtype)  # 2 eps a step
    fitted = Fitted({"w": Stacked(ended)}, {}, torch.zeros(2), torch.zeros(0), steps)
    at = variate_change(SGD(eps, 0.0), start, common, fitted)["w"]
    assert at.tolist() == [[1.0, 1.0], [0.0, 0.0]]  # 8 eps / (4 eps) - 1
    below = variate_change(SGD(eps * 0.99, 0.0), start, common, fitted)["w"]
    assert below.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"optimizer": "adam"}, "adam with momentum=0.0"),
        ({"momentum": 0.5}, "sgd with momentum=0.5"),
    ],
)
def test_steps_that_hide_the_gradient_are_refused(
    make_graph: MakeGraph, options: dict[str, Any], got: str
) -> None:
    message = f"^expected optimizer=sgd without momentum for method scaffold, got optimizer={got}"
    with pytest.raises(ConfigError, match=message):
        go(make_graph(), method="scaffold", **options)
    with pytest.raises(ConfigError, match="correction Shift is not compiled; use kernels=torch"):
        go(make_graph(), method="scaffold", kernels="compiled")


def test_a_missing_shift_is_none() -> None:
    grads = {"a": torch.ones(2, 3), "b": torch.ones(2)}
    found = Shift({"b": torch.tensor([1.0, 2.0])})(grads, {}, {})
    assert torch.equal(found["a"], grads["a"])
    assert found["b"].tolist() == [2.0, 3.0]
    assert Shift({"b": torch.arange(3)}).of(torch.tensor([2])).by["b"].tolist() == [2]
