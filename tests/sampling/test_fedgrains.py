"""Laws of FedGrAINS' sampler: the flow network's choices, its loss and steps by hand."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from remote_runs import setup_of
from runs import FAST, files_of, go, kept_in, rows_of, run_until, same_bits, weights_of
from sessions import session
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.payload import State, tensors_under
from silograph.experiment.resolve.run_request import Own
from silograph.experiment.run.run import first_snapshot
from silograph.federation.in_process import InProcess
from silograph.federation.program import Program
from silograph.federation.session.message import own_ops
from silograph.graph.block.block import ClientBlock, Route, make_block, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.methods import FEDAVG, METHODS, MethodConfig, NoOptions
from silograph.nn.backends import BACKENDS
from silograph.nn.fit import Schedule, Training, TrainingInputs
from silograph.nn.mini_batches import FULL, Drawn, Neighbors, Reached, Signal, sampled_pass
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Adam
from silograph.sampling.fedgrains import MOST_ALPHA, FedGrains, FedGrainsOptions, log_forward, top_k
from silograph.sampling.neighbors import NEIGHBORS, Depth
from silograph.study.tune import chosen_ranges, part_options

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
Draws = tuple[tuple[Reached, Drawn], ...]
EDGES = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 4), (2, 4), (3, 5), (4, 5)]
STAR = [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]
NETWORK = ("features", "indicator", "bias", "last", "last_bias")


def small(make_graph: MakeGraph, edges: Sequence[tuple[int, int]], *, sparse: bool) -> ClientBlock:
    """One client with 6 nodes, of which the first is in training."""
    rows, cols = torch.tensor([*edges, *((b, a) for a, b in edges)]).T
    graph = replace(make_graph(6, sparse=sparse), adj=CSR.from_pairs(rows, cols, (6, 6)))
    train = torch.arange(6) < 1
    block, _ = make_block(graph, whole(graph), Split(train, ~train, ~train), torch.float64)
    return block


def draws_of(
    sampler: Neighbors, block: ClientBlock, key: Key, state: State, hops: int = 2
) -> Draws:
    """What is drawn for the first node."""
    seeds, off = torch.tensor([0]), torch.tensor([0, 1])
    return sampled_pass(block, block.x, seeds, off, sampler, key, (True,) * hops, state)[1]


def dense(block: ClientBlock) -> Tensor:
    """The features, (n, F)."""
    if isinstance(block.x, Tensor):
        return block.x
    return block.x.csr.tensor.to_dense()


def weights_of_network(block: ClientBlock, state: State) -> dict[str, Tensor]:
    """The flow network of the only client, features that do not occur as zeros."""
    found = {name: state[name].t for name in NETWORK}
    if not isinstance(block.x, Tensor):
        whole_rows = found["features"].new_zeros(block.num_features, found["features"].shape[1])
        whole_rows[block.x.used.feature] = found["features"]
        found["features"] = whole_rows
    return {name: w.clone().requires_grad_() for name, w in found.items()}


def log_p_by_hand(
    block: ClientBlock, chosen: Mapping[int, int], picked: set[int], hop: int, w: dict[str, Tensor]
) -> tuple[Tensor, list[int]]:
    """Return log P_F of picking nodes, and the candidates, as section 3.1 has it.

    Args:
        block: the only client.
        chosen: the layer of every node chosen so far.
        picked: of the candidates.
        hop: of this draw, from 0.
        w: the flow network.
    """
    adj = block.adj.tensor.to_dense()
    candidates = [v for v in range(6) if v not in chosen and any(adj[u, v] for u in chosen)]
    layer = dict(chosen) | dict.fromkeys(candidates, hop + 1)
    rows = sorted(layer)
    among = torch.tensor(
        [[float((a in chosen or b in chosen) and adj[a, b] > 0) for b in rows] for a in rows]
    ).double() + torch.eye(len(rows))
    scale = among.sum(1).rsqrt()
    operator = scale[:, None] * among * scale
    first = dense(block)[rows] @ w["features"] + w["indicator"][0][[layer[v] for v in rows]]
    hidden = torch.relu(operator @ first + w["bias"][0])
    logit = (operator @ hidden @ w["last"][0].T + w["last_bias"][0])[:, 0]
    each = [
        torch.nn.functional.logsigmoid(logit[rows.index(v)] * (1 if v in picked else -1))
        for v in candidates
    ]
    return sum(each, torch.zeros(())), candidates


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("learns_z", [True, False])
def test_the_balance_of_every_choice_by_hand(
    make_graph: MakeGraph, learns_z: bool, sparse: bool
) -> None:
    """All pairs of k-subsets of two layers: log P_F, the loss, and a step of torch's Adam on it."""
    block = small(make_graph, EDGES, sparse=sparse)
    sampler = FedGrains(2, 2, alpha=3.0, lr=0.05, learns_z=learns_z, log_z_lr=0.2, width=5)
    model = Model("gcn", block.num_features, 4, 3, 2, 0.0, "multiclass")
    start = dict(sampler.init(block, model, Key.of(1)))
    start["bias"] = replace(start["bias"], t=start["bias"].t + 0.3)
    seen: set[tuple[Any, ...]] = set()
    for number in range(60):
        draws = draws_of(sampler, block, Key.of(number), start)
        path, layer = [], {0: 0}
        w = weights_of_network(block, start)
        total = torch.zeros((), dtype=torch.float64)
        for hop, (reached, drawn) in enumerate(draws):
            assert set(reached.rows.tolist()) == set(layer)
            picked = set(drawn.neighbor.tolist()) - set(layer)
            one, candidates = log_p_by_hand(block, layer, picked, hop, w)
            assert len(picked) == min(2, len(candidates))
            torch.testing.assert_close(drawn.trace["log_p"][0], one, rtol=0, atol=1e-10)
            total = total + one
            layer |= dict.fromkeys(picked, hop + 1)
            path.append(frozenset(picked))
        if tuple(path) in seen:
            continue
        seen.add(tuple(path))
        loss = torch.tensor([0.7 + 0.01 * number], dtype=torch.float64)
        state = sampler.learn(block, start, Signal(torch.tensor([0]), draws, loss, Key.of(0)))
        z = (-(loss + total.detach() / 3.0)).requires_grad_()
        balance = total + 3.0 * loss + (3.0 * z if learns_z else 0)
        groups = [{"params": [*w.values()], "lr": 0.05}, {"params": [z], "lr": 0.2}]
        # A first step that is balanced moves nothing: look at the gradient of a second one.
        if learns_z:
            assert all(torch.equal(state[n].t, start[n].t) for n in NETWORK)
            torch.testing.assert_close(state["log_z"].t, z.detach(), rtol=0, atol=1e-12)
            continue
        optimizer = torch.optim.Adam(groups[:1])
        balance.square().sum().backward()
        optimizer.step()
        for name, found in weights_of_network(block, state).items():
            torch.testing.assert_close(found, w[name], rtol=0, atol=1e-10)
    # Of three neighbors of node 0 two are chosen; then two of those that are left.
    first = {step[0] for step in seen}
    assert first == {frozenset(pair) for pair in itertools.combinations((1, 2, 3), 2)}


@pytest.mark.parametrize("learns_z", [True, False])
def test_steps_are_those_of_adam_on_the_balance(make_graph: MakeGraph, *, learns_z: bool) -> None:
    """Three steps: with a learned log Z the first is balanced; a constant one is 0 in all of them.

    From the second step on Adam goes by how large a balance is, not by its sign alone.
    """
    block = small(make_graph, EDGES, sparse=False)
    sampler = FedGrains(2, 1, alpha=3.0, lr=0.05, learns_z=learns_z, log_z_lr=0.2, width=5)
    model = Model("gcn", block.num_features, 4, 3, 1, 0.0, "multiclass")
    state = sampler.init(block, model, Key.of(1))
    w = weights_of_network(block, state)
    z = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    groups = [{"params": [*w.values()], "lr": 0.05}, {"params": [z], "lr": 0.2}]
    optimizer = torch.optim.Adam(groups[: 1 + learns_z])
    for number, value in enumerate((0.9, 0.4, 0.6)):
        draws = draws_of(sampler, block, Key.of(number), state, hops=1)
        loss = torch.tensor([value], dtype=torch.float64)
        state = sampler.learn(block, state, Signal(torch.tensor([0]), draws, loss, Key.of(0)))
        picked = set(draws[0][1].neighbor.tolist())
        total, _ = log_p_by_hand(block, {0: 0}, picked, 0, w)
        if learns_z and number == 0:
            z.data[:] = -(loss + total.detach() / 3.0)
        optimizer.zero_grad()
        (3.0 * z + total + 3.0 * loss).square().sum().backward()
        optimizer.step()
    if learns_z:
        torch.testing.assert_close(state["log_z"].t, z.detach(), rtol=0, atol=1e-10)
    assert float(state["steps"].t) == 3
    for name, found in weights_of_network(block, state).items():
        torch.testing.assert_close(found, w[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("learns_z", [True, False])
def test_the_size_of_a_balance_is_its_closed_form(make_graph: MakeGraph, *, learns_z: bool) -> None:
    """A network of zeros chooses 2 of 5 with log P_F = -5 log 2; its rate of 0 keeps it there.

    So with losses of 1 and 0.4 the balance is -5 log 2 + alpha L in both steps if log Z is 0, and
    0 and then alpha (0.4 - 1) if it is learned, when z takes Adam's step of that. The gradient by
    the last bias is the balance times 2 d log P_F / d b = 2 (2 / 2 - 3 / 2) = -1, and a tenth of
    it enters Adam's first moment.
    """
    block, alpha, b = small(make_graph, STAR, sparse=False), 1e5, 5 * math.log(2)
    sampler = FedGrains(2, 1, alpha=alpha, lr=0.0, learns_z=learns_z, log_z_lr=0.1, width=5)
    model = Model("gcn", block.num_features, 4, 3, 1, 0.0, "multiclass")
    start = sampler.init(block, model, Key.of(1))
    state: State = {name: replace(f, t=torch.zeros_like(f.t)) for name, f in start.items()}
    moment, levels = 0.0, list[float]()
    balances = (0.0, -0.6 * alpha) if learns_z else (alpha - b, 0.4 * alpha - b)
    for number, (loss, balance) in enumerate(zip((1.0, 0.4), balances, strict=True)):
        draws = draws_of(sampler, block, Key.of(number), state, hops=1)
        signal = Signal(
            torch.tensor([0]), draws, torch.tensor([loss], dtype=torch.float64), Key.of(0)
        )
        state = sampler.learn(block, state, signal)
        moment = 0.9 * moment - 0.1 * balance
        assert float(state["first/last_bias"].t) == pytest.approx(moment, rel=1e-9)
        levels += [float(state["log_z"].t)] if learns_z else []
    assert ("log_z" in state) is learns_z
    if learns_z:
        step = 0.1 * (0.1 / (1 - 0.9**2)) / math.sqrt(0.001 / (1 - 0.999**2))
        assert levels == pytest.approx([b / alpha - 1, b / alpha - 1 + step], rel=1e-6)


def test_a_first_step_that_is_balanced_moves_nothing(make_graph: MakeGraph) -> None:
    """In float32 and with the paper's alpha, too: rounding leaves up to 1e-2 of the balance."""
    block = make_block_in(torch.float32, small(make_graph, EDGES, sparse=False))
    sampler = FedGrains(2, 2, width=5)
    model = Model("gcn", block.num_features, 4, 3, 2, 0.0, "multiclass")
    start = sampler.init(block, model, Key.of(1))
    for number in range(40):
        draws, loss = draws_of(sampler, block, Key.of(number), start), 1 + 0.013 * number
        signal = Signal(torch.tensor([0]), draws, torch.tensor([loss]), Key.of(0))
        state = sampler.learn(block, start, signal)
        assert all(torch.equal(state[name].t, start[name].t) for name in NETWORK)
        log_p = sum(float(drawn.trace["log_p"].detach()) for _, drawn in draws)
        assert float(state["log_z"].t) == pytest.approx(-loss - log_p / sampler.alpha, abs=1e-6)
        assert float(state["steps"].t) == 1


@pytest.mark.parametrize("sparse", [True, False])
def test_steps_in_place_have_the_same_bits(make_graph: MakeGraph, sparse: bool) -> None:
    """`own` lets a step write where it reads; without it, what was given stays as it was."""
    block = small(make_graph, EDGES, sparse=sparse)
    sampler = FedGrains(2, 2, alpha=3.0, lr=0.05, log_z_lr=0.2, width=5)
    model = Model("gcn", block.num_features, 4, 3, 2, 0.0, "multiclass")
    apart: State = sampler.init(block, model, Key.of(1))
    mine: State = {name: replace(f, t=f.t.clone()) for name, f in apart.items()}
    for number, value in enumerate((0.9, 0.4, 0.6)):
        loss, found = torch.tensor([value], dtype=torch.float64), []
        before = {name: f.t.clone() for name, f in apart.items()}
        for state, own in ((apart, False), (mine, True)):
            draws = draws_of(sampler, block, Key.of(number), state)
            signal = Signal(torch.tensor([0]), draws, loss, Key.of(0), own)
            found.append(sampler.learn(block, state, signal))
        assert same_bits({name: f.t for name, f in apart.items()}, before)
        assert all(found[1][name].t is f.t for name, f in mine.items())
        apart, mine = found
        assert same_bits(*({name: f.t for name, f in state.items()} for state in found))
        assert not same_bits({name: f.t for name, f in apart.items()}, before)


def conditional(weight: Sequence[float], k: int) -> dict[frozenset[int], float]:
    """Probability of each k-subset, in proportion to the product of its members' weights."""
    each = {
        frozenset(s): math.prod(weight[i] for i in s)
        for s in itertools.combinations(range(len(weight)), k)
    }
    return {s: p / sum(each.values()) for s, p in each.items()}


def test_an_additive_reward_is_learned(make_graph: MakeGraph) -> None:
    """One layer, log R = sum of what chosen nodes are worth: the balance trains to zero."""
    block = small(make_graph, STAR, sparse=False)
    block = replace(block, x=torch.eye(6, dtype=torch.float64))
    worth, sampler = torch.tensor([0.0, 1.5, 0.2, -1.0, 0.8, -0.3]), FedGrains(2, 1, alpha=1.0)
    sampler = replace(sampler, lr=0.01, log_z_lr=0.01, width=32)
    model = Model("gcn", 6, 4, 3, 1, 0.0, "multiclass")
    state = sampler.init(block, model, Key.of(1))
    for number in range(800):
        if number == 600:
            sampler = replace(sampler, lr=0.001, log_z_lr=0.001)
        draws = draws_of(sampler, block, Key.of(number), state, hops=1)
        loss = -worth[draws[0][1].neighbor].sum()[None].double()
        state = sampler.learn(block, state, Signal(torch.tensor([0]), draws, loss, Key.of(0)))
    w = weights_of_network(block, state)
    found: dict[frozenset[int], float] = {}
    for pair in itertools.combinations(range(1, 6), 2):
        log_p, _ = log_p_by_hand(block, {0: 0}, set(pair), 0, w)
        balance = float(state["log_z"].t + log_p.detach()) - float(worth[list(pair)].sum())
        assert abs(balance) < 0.02
        found[frozenset(i - 1 for i in pair)] = math.exp(float(log_p.detach()))
    reward = conditional([math.exp(v) for v in worth[1:].tolist()], 2)
    total = sum(found.values())
    assert sum(abs(p / total - reward[s]) for s, p in found.items()) / 2 < 0.02


def plackett_luce(p: Sequence[float], k: int) -> dict[frozenset[int], float]:
    """Probability of each k-subset if one after the other is drawn in proportion to p."""
    found: dict[frozenset[int], float] = {}
    for order in itertools.permutations(range(len(p)), k):
        left, chance = sum(p), 1.0
        for i in order:
            chance, left = chance * p[i] / left, left - p[i]
        found[frozenset(order)] = found.get(frozenset(order), 0.0) + chance
    return found


def test_choices_are_plackett_luce(make_graph: MakeGraph) -> None:
    block, sampler = small(make_graph, STAR, sparse=True), FedGrains(2, 1, width=6)
    model = Model("gcn", block.num_features, 4, 3, 1, 0.0, "multiclass")
    state = dict(sampler.init(block, model, Key.of(1)))
    state["last"] = replace(state["last"], t=20 * state["last"].t)
    # So that p is .2 to .9: where all are small, draws by p and by odds would be the same.
    state["last_bias"] = replace(state["last_bias"], t=state["last_bias"].t - 10)
    w, draws = weights_of_network(block, state), 1000
    chance = [
        float(torch.exp(log_p_by_hand(block, {0: 0}, {v}, 0, w)[0].detach())) for v in range(1, 6)
    ]
    without = float(torch.exp(log_p_by_hand(block, {0: 0}, set(), 0, w)[0].detach()))
    odds = [c / without for c in chance]
    exact = plackett_luce([o / (1 + o) for o in odds], 2)
    assert max(exact.values()) > 1.5 * min(exact.values())
    by_odds = plackett_luce(odds, 2)
    assert max(abs(by_odds[s] - p) for s, p in exact.items()) > 0.1
    count = dict.fromkeys(exact, 0)
    for number in range(draws):
        neighbor = draws_of(sampler, block, Key.of(number), state, hops=1)[0][1].neighbor
        count[frozenset(v - 1 for v in neighbor.tolist())] += 1
    for s, p in exact.items():
        assert abs(count[s] / draws - p) < 4 * (p * (1 - p) / draws) ** 0.5


def test_k_of_each_client() -> None:
    score, off = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0]), torch.tensor([0, 3, 3, 5])
    assert top_k(score, off, 1).tolist() == [True, False, False, True, False]
    assert top_k(score, off, 2).tolist() == [True, False, True, True, True]
    assert top_k(score[:0], torch.zeros(3, dtype=torch.int64), 2).tolist() == []
    logit = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5], dtype=torch.float64)
    chosen = torch.tensor([True, False, True, False, True])
    p = logit.sigmoid()
    by_hand = [p[0] * (1 - p[1]) * p[2], torch.tensor(1.0), (1 - p[3]) * p[4]]
    found = log_forward(logit, chosen, off).exp()
    torch.testing.assert_close(found, torch.stack([t.double() for t in by_hand]))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("conv", ["gcn", "sage", "gin", "gat"])
def test_choosing_all_is_no_sampler(make_graph: MakeGraph, cut_block: CutBlock, conv: str) -> None:
    """Full degrees, k as large as there are candidates: the weights after steps, 1e-10."""
    graph = make_graph(60, sparse=True)
    block, _ = cut_block(graph, 4)
    model = Model(conv, graph.num_features, 6, graph.num_classes, 2, 0.3, graph.task)
    start = model.init_weights(Key.of(1), torch.float64)
    sampler = FedGrains(99, 2, width=6)
    ours, theirs = (
        BACKENDS["torch"].fit(
            Training(model, Adam(0.05), Schedule(2, 3, each)),
            TrainingInputs(block, start, None, Key.of(3), each.init(block, model, Key.of(0))),
        )
        for each in (sampler, FULL)
    )
    for name, w in theirs.tensors.items():
        torch.testing.assert_close(ours.tensors[name], w, rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=0, atol=1e-10)


def test_sampled_degrees_are_those_of_what_was_chosen(make_graph: MakeGraph) -> None:
    block = small(make_graph, EDGES, sparse=False)
    sampler = FedGrains(2, 2, sampled_degrees=True, policy="uniform")
    for reached, drawn in draws_of(sampler, block, Key.of(3), {}):
        among = torch.zeros(6, 6)
        among[reached.rows[drawn.position], drawn.neighbor] = 1
        among = torch.maximum(among, among.T)
        assert drawn.degree is not None
        touched = torch.cat([reached.rows, drawn.neighbor]).unique()
        assert torch.equal(drawn.degree[touched], among.sum(1)[touched].double())


RUN: dict[str, Any] = {
    "rounds": 3,
    "batch_size": 4,
    "participation": 0.6,
    "neighbors": "fedgrains",
    "kernels": "torch",
}
OWN = {"neighbors.k": 2, "neighbors.width": 6}


BASES = ["local", "gcflplus", "fedopt", "fedper", "fedpub", "fedprox", "fedavg"]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", BASES)
def test_bytes_are_those_of_the_base(make_graph: MakeGraph, name: str) -> None:
    """Record by record: of the flow network two figures travel, with each reply of training."""
    graph, base = make_graph(60), {"communities": 1} if name == "fedpub" else {}
    ours = go(graph, method=name, options=base | OWN, **RUN).ledger.records
    theirs = go(graph, method=name, options=base, **RUN | {"neighbors": "full"}).ledger.records
    assert len(ours) == len(theirs)
    figures = set()
    for mine, other in zip(ours, theirs, strict=True):
        places = (mine.op, mine.direction, mine.clients.tolist())
        assert places == (other.op, other.direction, other.clients.tolist())
        more = set((mine.bytes - other.bytes).tolist())
        if mine.op.startswith("train") and mine.direction == "up":
            figures |= more
        else:
            assert more <= {0}
    figures -= {0}  # of the scores in the same replies
    assert len(figures) == 1
    assert 0 < figures.pop() < 64


def test_the_network_is_learned_by_those_who_take_part(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    """Steps of each client are counted; the others keep their network, bit for bit."""
    graph = make_graph(60, sparse=True)
    block, route = cut_block(graph, 5)
    cfg = config(graph, participation=0.4)
    fed = InProcess(cfg, block, route, 5)
    state = FEDAVG.init(fed, cfg, cfg.model.init_weights(Key.of(9), torch.float64), Key.of(5))
    taken = torch.zeros(5)
    batches = -(-block.num_train // 4)
    for t in range(1, 4):
        before = {
            name: field.clone()
            for name, field in tensors_under("neighbors", fed.states()[0]).items()
        }
        state, report = FEDAVG.round(fed, cfg, state, t, Key.of(5))
        here = torch.tensor([name in report.participants for name in fed.ids])
        taken += here * batches
        after = tensors_under("neighbors", fed.states()[0])
        assert after["steps"].tolist() == taken.tolist()
        same = (after["last"] == before["last"]).flatten(1).all(1)
        assert same.tolist() == [not h for h in here.tolist()] or t == 1


def config(graph: Graph, **changes: Any) -> MethodConfig:
    cfg = MethodConfig(
        model=Model("gcn", graph.num_features, 8, graph.num_classes, 2, 0.5, graph.task),
        optimizer=SGD(0.1),
        schedule=Schedule(1, 4, FedGrains(5, 2, width=6)),
        keep_optimizer=False,
        participation=1.0,
        options=NoOptions(),
    )
    return replace(cfg, **changes)


def test_a_session_has_the_bits_of_a_simulation(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    graph = make_graph(60, sparse=True)
    block, route = cut_block(graph, 3)
    cfg, key = config(graph), Key.of(5)
    calls = FEDAVG.calls
    assert calls is not None
    agreed = Program(calls.setup(cfg, key), lambda t: calls.round(cfg, t, key), 3, calls.state(cfg))
    remote, _ = session(block, route, cfg, own_ops(), program=agreed)
    found = []
    for fed in (remote, InProcess(cfg, block, route, 1)):
        state = FEDAVG.init(fed, cfg, cfg.model.init_weights(Key.of(9), torch.float64), key)
        for t in range(1, 4):
            fed.start_round(t)
            state, _ = FEDAVG.round(fed, cfg, state, t, key)
        found.append((state.weights, list(fed.ledger.records)))
    assert same_bits(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def first_network(graph: Graph, method: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """What clients hold of the sampler before the first round, as `kept_in` names it."""
    given = {n: v for n, v in options.items() if n != "method"}
    setup = setup_of(graph, METHODS[method], **given, block_size=5)
    first_snapshot(setup)
    (state,) = setup.federation.states()
    return {f"{name}/t": t for name, t in tensors_under("neighbors", state).items()}


@pytest.mark.law(sample=24)
@pytest.mark.parametrize(
    ("method", "kernels", "log_z"),
    [
        ("fedavg", "torch", "constant"),
        ("fedavg", "compiled", "learned"),
        ("fedpub", "torch", "learned"),
        ("fedper", "compiled", "gate"),
        ("fedavg", "torch", "gate"),
    ],
)
def test_a_run_that_died_has_every_bit_of_the_networks_again(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kernels: str,
    log_z: str,
) -> None:
    """Fewer are chosen than there are, so that a network that was lost would show in all."""
    if kernels == "compiled":
        pytest.importorskip("numba")
    graph, rounds = make_graph(100), 5
    own: dict[str, Any] = {**OWN, "neighbors.lr": 0.5}
    if log_z == "gate":
        own |= {"neighbors.credit": "gate", "neighbors.score": "odds"}
        own["neighbors.evaluate"] = "weighted"
    else:
        own["neighbors.log_z"] = log_z
    own |= {"communities": 1} if method == "fedpub" else {}
    options = {"method": method, **RUN, "rounds": rounds, "clients": 5, "kernels": kernels}
    options |= {"options": own, "local_epochs": 3}
    straight = go(graph, **options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, rounds - 1, tmp_path / "cut", **FAST | options)
    sg.resume(tmp_path / "cut", graph=graph)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
    ours, theirs = (kept_in(tmp_path / n, rounds, "neighbors") for n in ("cut", "whole"))
    assert same_bits(ours, theirs)
    start, taken = first_network(graph, method, options), theirs["steps/t"]
    learned = (*NETWORK, *(["log_z"] * (log_z == "learned")))
    names = [f"{kind}{name}/t" for kind in ("", "first/", "second/") for name in learned]
    assert {*names, "steps/t"} == {name for name in theirs if not name.endswith("/off")}
    assert int((taken > 1).sum()) > 3  # of five clients: the first step may be balanced already
    for name in names:
        moved = (theirs[name] != start[name]).view(5, -1).any(1)
        if log_z != "gate":
            assert torch.equal(moved, taken > 1), name
        elif "last_bias" in name:  # a shift of all logits changes no draw
            assert not moved.any()
        else:
            assert bool(moved[taken > 1].all()), name
    control = go(graph, **options | {"options": dropped(own) | {"neighbors.policy": "untrained"}})
    assert rows_of(straight) != rows_of(control)


def dropped(own: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those that only a network in training reads."""
    only_trained = ("neighbors.lr", "neighbors.log_z", "neighbors.credit")
    return {n: v for n, v in own.items() if n not in only_trained}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("policy", ["untrained", "uniform"])
def test_the_controls_differ_from_the_trained_sampler(make_graph: MakeGraph, policy: str) -> None:
    graph = make_graph(60)
    runs = {"method": "fedavg", **RUN, "local_epochs": 5}
    ours = go(graph, options=OWN | {"neighbors.lr": 0.5, "neighbors.log_z": "constant"}, **runs)
    own = {n: v for n, v in OWN.items() if (policy, n) != ("uniform", "neighbors.width")}
    control, again = (
        go(graph, options=own | {"neighbors.policy": policy}, **runs) for _ in range(2)
    )
    assert not same_bits(weights_of(ours), weights_of(control))
    assert same_bits(weights_of(again), weights_of(control))


@pytest.mark.law(sample=24)
@pytest.mark.parametrize(
    "changes",
    [
        {"collect": 0.5},
        {"model": "appnp", "hops": 3},
        {"model": "gat", "layers": 3},
        {"head": "linear", "layers": 3, "batch_size": None},
        {"dtype": "float32", "block_size": 2},
        {"keep_optimizer": True, "method": "local", "participation": 1.0},
        {"method": "scaffold", "optimizer": "sgd"},
        {"method": "fedpub", "options": OWN | {"communities": 1}},
        {"method": "gcflplus"},
    ],
    ids=str,
)
@pytest.mark.parametrize("sparse", [True, False])
def test_it_goes_with_other_parts(
    make_graph: MakeGraph, changes: dict[str, Any], sparse: bool
) -> None:
    """In blocks of one client as in one of all, and over as many layers as the model sums."""
    options = {"method": "fedavg", "options": OWN, **RUN, "rounds": 2, **changes}
    graph = make_graph(60, sparse=sparse)
    whole_block = go(graph, **options)
    single = go(graph, **options | {"block_size": 1})
    tolerance = 1e-4 if changes.get("dtype") == "float32" else 1e-9
    for ours, theirs in zip(whole_block.rounds, single.rounds, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=tolerance)


def test_a_module_of_ones_own_is_refused(make_graph: MakeGraph) -> None:
    class Net(torch.nn.Module):
        def __init__(self, features: int, outputs: int) -> None:
            super().__init__()
            self.map = torch.nn.Linear(features, outputs)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            out: Tensor = self.map(x)
            return out

    options = {k: v for k, v in FAST.items() if k != "hidden"}
    for name in ("fedgrains", "drop_edge", "drop_node"):
        with pytest.raises(ConfigError) as caught:
            sg.run(make_graph(), **options | {"neighbors": name, "model": Net})
        line = f"expected neighbors with silograph's own models only, got neighbors={name} with"
        assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"fanout": "3"},
            "fanout: neighbors fedgrains has no such option, but neighbors fanout has it: leave it "
            "out, or set neighbors=fanout",
        ),
        (
            {"options": {"neighbors.k": 0}},
            "k: input should be greater than or equal to 1, got 0 (options of fedgrains)",
        ),
    ],
)
def test_mistakes(make_graph: MakeGraph, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        go(make_graph(), neighbors="fedgrains", method="fedavg", **given)
    assert str(caught.value) == message


def test_alpha_has_a_largest_value(make_graph: MakeGraph) -> None:
    """Beyond it log Z would stand still in float32, and then the network be NaN, unnoticed."""
    own = {"neighbors.alpha": 1e20}
    with pytest.raises(ConfigError) as caught:
        go(make_graph(), neighbors="fedgrains", method="fedavg", options=own)
    line = "alpha: input should be less than or equal to 100000000, got 1e+20 (options of "
    assert str(caught.value) == line + "fedgrains)"
    block = small(make_graph, EDGES, sparse=False)
    block = make_block_in(torch.float32, block)
    sampler = FedGrains(2, 2, alpha=MOST_ALPHA, width=5)
    model = Model("gcn", block.num_features, 4, 3, 2, 0.0, "multiclass")
    state: State = sampler.init(block, model, Key.of(1))
    for number in range(4):
        draws = draws_of(sampler, block, Key.of(number), state)
        signal = Signal(torch.tensor([0]), draws, torch.tensor([1.0 + number]), Key.of(0))
        state = sampler.learn(block, state, signal)
    assert all(bool(f.t.isfinite().all()) for f in state.values())


def make_block_in(dtype: torch.dtype, block: ClientBlock) -> ClientBlock:
    """The block with values of a dtype."""
    assert isinstance(block.x, Tensor)
    assert block.adj.values is not None
    adj = replace(block.adj, values=block.adj.values.to(dtype))
    return replace(block, x=block.x.to(dtype), adj=adj)


def test_each_option_reaches_the_sampler() -> None:
    """By value, and each alone changes what is made."""
    make, depth = NEIGHBORS["fedgrains"].make, Depth(3, "layer")
    usual = make(FedGrainsOptions(), depth)
    assert usual == FedGrains(32, 3, 1e5, 1e-3, True, 0.1, True, "trained", 128)
    for option, expected in (
        ({"k": 7}, {"k": 7}),
        ({"alpha": 2.0}, {"alpha": 2.0}),
        ({"lr": 0.5}, {"lr": 0.5}),
        ({"log_z": "constant"}, {"learns_z": False}),
        ({"log_z_lr": 0.25}, {"log_z_lr": 0.25}),
        ({"degrees": "full"}, {"sampled_degrees": False}),
        ({"policy": "uniform"}, {"policy": "uniform"}),
        ({"width": 9}, {"width": 9}),
    ):
        made = make(FedGrainsOptions(**option), depth)
        assert made == replace(usual, **expected)
        assert made != usual


def test_its_options_can_be_tuned() -> None:
    fields = part_options(make_config({"neighbors": "fedgrains"}), Own())
    names = [f"neighbors.{name}" for name in ("k", "alpha", "lr", "log_z", "degrees")]
    assert set(chosen_ranges(METHODS["fedavg"], names, {}, (), fields)) == set(names)
