"""Clients that start from the base of their cluster, with a mean a cluster: FedAvg in each of them.

G: clusters. C: clients.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from sessions import session
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Stacked, from_bases
from silograph.federation.base import Federation, Gather
from silograph.federation.in_process import InProcess
from silograph.federation.program import Program
from silograph.federation.session.message import ops_of, own_ops, with_ops
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods import (
    FEDAVG,
    LOCAL,
    Clients,
    Empty,
    LocalModel,
    Method,
    MethodConfig,
    NoOptions,
    Params,
    RoundReport,
    Server,
    ServerState,
    calls,
    each_as_base,
    op,
    program,
)
from silograph.methods.gcfl import ClusterModels, TrainedModels
from silograph.nn.backends import BACKENDS
from silograph.nn.fit import Schedule
from silograph.nn.mini_batches import Fanout
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam

Built = tuple[ClientBlock, Route]
HAVE_NUMBA = importlib.util.find_spec("numba") is not None
TIERS = pytest.mark.parametrize(
    "kernels",
    ["torch", pytest.param("compiled", marks=pytest.mark.skipif(not HAVE_NUMBA, reason="numba"))],
)
CLUSTERS = torch.tensor([0, 1, 1, 0, 1])
MEMBERS = torch.tensor([0, 3]), torch.tensor([1, 2, 4])
ROUNDS, KEY, FIRST = 3, Key.of(5), Key.of(9)
CASES: dict[str, dict[str, Any]] = {
    "sparse": {},
    "dense": {"sparse": False},
    "drawn": {"schedule": Schedule(1, batch_size=4, neighbors=Fanout((2, 1)))},
    "kept": {"keep_optimizer": True, "optimizer": SGD(0.1, 5e-4, 0.9)},
}


@op(Kind.WEIGHTS)
def train(
    clients: Clients[Any], state: Empty, request: ClusterModels
) -> tuple[Empty, TrainedModels]:
    """Train from the model of the client's cluster."""
    fitted = clients.fit(each_as_base(request.weights))
    return state, TrainedModels(**vars(LocalModel.of(fitted, clients.block)))


@op(Kind.CONTROL)
def begin(clients: Clients[Any], _state: Empty, _: Empty) -> tuple[Empty, Empty]:
    clients.begin()
    return Empty(), Empty()


@calls(begin)
def setup(server: Server[Any], weights: Params) -> ServerState:
    """All clusters start from the same weights."""
    server.call(begin, Empty())
    return ServerState(None, {name: torch.stack([w, w]) for name, w in weights.items()})


@calls(train)
def fit_round(server: Server[Any], state: ServerState) -> tuple[ServerState, RoundReport]:
    """One call to all clients, each with its cluster's base; a mean a cluster."""
    names = list(state.memory)
    models = ClusterModels({name: from_bases(w, CLUSTERS) for name, w in state.memory.items()})
    gather = Gather("nodes", *(f"weights/{name}" for name in names))
    reply = server.call(train, models, reduce=gather)
    nodes = reply["by_client/nodes"].t.double()
    share = torch.nn.functional.one_hot(CLUSTERS).double() * nodes[:, None]
    share = (share / share.sum(0)).T  # (G, C)
    new = {name: _mean(share, reply[f"by_client/weights/{name}"].t) for name in names}
    return ServerState(None, new), RoundReport(server.fed.ids, None)


def _mean(share: torch.Tensor, slices: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = torch.tensordot(share.to(slices.dtype), slices, dims=1)
    return mean


CLUSTERED = Method(
    name="clustered",
    title="a mean a cluster",
    reference="a law",
    options=NoOptions,
    **program(fit_round, setup=setup, server_model=False),
    evaluate=LOCAL.evaluate,
)


def config(graph: Graph, **changes: Any) -> MethodConfig:
    cfg = MethodConfig(
        model=Model("gcn", graph.num_features, 8, graph.num_classes, 2, 0.5, graph.task),
        optimizer=Adam(0.05, 5e-4),
        schedule=Schedule(2),
        keep_optimizer=False,
        participation=1.0,
        options=NoOptions(),
    )
    return replace(cfg, **changes)


def run(method: Method, cfg: MethodConfig, fed: Federation) -> ServerState:
    state = method.init(fed, cfg, cfg.model.init_weights(FIRST, torch.float64), KEY)
    for t in range(1, ROUNDS + 1):
        fed.start_round(t)
        state, _ = method.round(fed, cfg, state, t, KEY)
    return state


def built_of(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built], **changes: Any
) -> tuple[Built, MethodConfig]:
    graph = make_graph(60, sparse=changes.pop("sparse", True), features=12)
    return cut_block(graph, len(CLUSTERS)), config(graph, **changes)


@pytest.mark.law(sample=6)
@TIERS
@pytest.mark.parametrize("case", CASES)
def test_two_clusters_are_two_runs_of_fedavg(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., Built],
    kernels: str,
    case: str,
) -> None:
    (block, route), cfg = built_of(make_graph, cut_block, backend=BACKENDS[kernels], **CASES[case])
    for size in (5, 2):
        found = run(CLUSTERED, cfg, InProcess(cfg, block, route, size)).memory
        for cluster, members in enumerate(MEMBERS):
            part = InProcess(cfg, block.take(members), route, len(members))
            expected = run(FEDAVG, cfg, part).weights
            assert expected is not None
            for name, w in expected.items():
                torch.testing.assert_close(found[name][cluster], w, rtol=0, atol=1e-10)


@pytest.mark.law(sample=6)
@TIERS
def test_a_session_gives_the_bits_and_the_bytes_of_a_simulation(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Built], kernels: str
) -> None:
    """A silo gets its base only, and is held to a whole model as its inbox."""
    (block, route), cfg = built_of(make_graph, cut_block, backend=BACKENDS[kernels])
    calls = CLUSTERED.calls
    assert calls is not None
    agreed = Program(
        calls.setup(cfg, KEY), lambda t: calls.round(cfg, t, KEY), ROUNDS, calls.state(cfg)
    )
    ops = with_ops(own_ops(), ops_of(agreed))
    remote, _ = session(block, route, cfg, ops, program=agreed)
    fed = InProcess(cfg, block, route, 1)
    theirs, ours = run(CLUSTERED, cfg, fed).memory, run(CLUSTERED, cfg, remote).memory
    assert all(torch.equal(ours[name], w) for name, w in theirs.items())
    assert list(remote.ledger.records) == list(fed.ledger.records)
    alone = InProcess(cfg, block, route, 1)
    run(FEDAVG, cfg, alone)
    sent: Mapping[str, int] = alone.ledger.bytes_by_kind
    assert fed.ledger.bytes_by_kind == sent


def test_what_training_starts_from() -> None:
    """One of several bases, or a base for each: both are what was sent."""
    t, which = Key.of(0).matrix(2, 6).view(2, 3, 2), torch.tensor([1, 0])
    sent = {"b": Stacked(t), "c": from_bases(t, which)}
    start = each_as_base(sent)
    assert list(start) == ["b", "c"]
    assert start["c"] is sent["c"]
    each = start["b"]
    assert isinstance(each, Patched)
    assert torch.equal(each.stacked().t, t)
