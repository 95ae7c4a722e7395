"""Laws of FedGrAINS' gate credit: what it follows, what it learns, and weighted evaluation."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mistakes import raises_code
from runs import go, rows_of
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.payload import State
from silograph.graph.block.block import ClientBlock, Route, make_block, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.nn.backends import BACKENDS
from silograph.nn.conv import internal_messages
from silograph.nn.fit import Fitted, Schedule, Training, TrainingInputs
from silograph.nn.forward import Pass, forward_pass
from silograph.nn.mini_batches import Drawn, Reached, Signal, sampled_pass
from silograph.nn.model import Model
from silograph.nn.optim import Adam
from silograph.sampling.fedgrains import LEAST_RANGE, FedGrains
from silograph.sampling.neighbors import DropEdge

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
GATE = FedGrains(3, 2, width=6, credit="gate", score="odds", weighs=True, sampled_degrees=True)
LEGIT, JUNK, CLASSES = 140, 160, 4


def planted(seed: int) -> ClientBlock:
    """A client whose training nodes have as many junk neighbors as good ones.

    Good neighbors have the node's class. Junk has features of random classes, twice as large, and
    one feature that says so.
    """
    draws, n = torch.Generator().manual_seed(seed), LEGIT + JUNK
    y, ends = torch.arange(n) % CLASSES, []
    for v in range(LEGIT):
        alike = (y[:LEGIT] == y[v]).nonzero()[:, 0]
        alike = alike[alike != v]
        good = alike[torch.randperm(len(alike), generator=draws)[:3]]
        junk = LEGIT + torch.randperm(JUNK, generator=draws)[:6]
        ends += [(v, int(u)) for u in (*good, *junk)]
    rows, cols = torch.tensor(ends).T
    key = torch.unique(torch.cat([rows * n + cols, cols * n + rows]))
    x = torch.randn(n, CLASSES + 1, generator=draws)
    x[torch.arange(n), y] += 1
    x[LEGIT:] = 2 * torch.randn(JUNK, CLASSES + 1, generator=draws)
    x[:, -1] = (torch.arange(n) >= LEGIT).float()
    adj = CSR.from_pairs(key // n, key % n, (n, n))
    graph = Graph(adj=adj, x=x, y=y, num_classes=CLASSES, node_id=np.arange(n))
    train = torch.arange(n) < LEGIT // 2
    test = ~train & (torch.arange(n) < LEGIT)
    return make_block(graph, whole(graph), Split(train, test, test), torch.float64)[0]


def share_of_junk(block: ClientBlock, sampler: FedGrains, state: State) -> list[float]:
    """The share of junk among the nodes chosen in each hop, over the batches of an epoch."""
    chosen: list[list[Tensor]] = [[], []]
    for number, seeds in enumerate(block.split.train.nonzero()[:, 0].split(16)):
        off = torch.tensor([0, len(seeds)])
        both = (True, True)
        key = Key.of(number)
        _, draws = sampled_pass(block, block.x, seeds, off, sampler, key, both, state)
        for hop, (reached, drawn) in enumerate(draws):
            chosen[hop].append(drawn.neighbor[~torch.isin(drawn.neighbor, reached.rows)].unique())
    return [float((torch.cat(rows) >= LEGIT).double().mean()) for rows in chosen]


def trained(block: ClientBlock, sampler: FedGrains, seed: int) -> tuple[Model, Fitted]:
    """A GCN and the sampler after 120 epochs of local training."""
    model = Model("gcn", block.num_features, 16, CLASSES, 2, 0.0, "multiclass")
    weights = model.init_weights(Key.of(1), torch.float64)
    start = sampler.init(block, model, Key.of(seed))
    compiled = importlib.util.find_spec("numba") is not None
    training = Training(model, Adam(0.01), Schedule(120, 16, sampler))
    inputs = TrainingInputs(block, weights, None, Key.of(seed), start)
    return model, BACKENDS["compiled" if compiled else "torch"].fit(training, inputs)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_sampler_learns_from_the_loss_of_a_model(seed: int) -> None:
    """Trained with the model by local training alone, it leaves most of the junk aside."""
    block = planted(seed)
    sampler = replace(GATE, k=16, width=64, lr=1e-3)
    model, fitted = trained(block, sampler, seed)
    start = sampler.init(block, model, Key.of(seed))
    uniform = share_of_junk(block, replace(sampler, policy="uniform"), {})
    learned = share_of_junk(block, sampler, fitted.neighbors)
    assert min(uniform) > 0.4
    assert all(ours < 0.6 * theirs for ours, theirs in zip(learned, uniform, strict=True))
    full, weighed = accuracies(block, model, sampler, fitted.tensors, fitted.neighbors)
    assert weighed > full
    # A shift of all logits changes no draw, so nothing moves it.
    assert torch.equal(fitted.neighbors["last_bias"].t, start["last_bias"].t)


def accuracies(
    block: ClientBlock, model: Model, sampler: FedGrains, weights: dict[str, Tensor], state: State
) -> list[float]:
    """Test accuracy with all messages alike, and with messages weighted by their p, if any are."""
    messages = sampler.messages(block, (True, True), state)
    messages = (internal_messages(block, torch.float64),) * 2 if messages is None else messages
    with torch.no_grad():
        inputs = Pass(block.x, messages, (block.row_key,) * 2)
        both = model.forward(weights, block), forward_pass(model, weights, inputs, None)
    test = block.split.test
    return [float((t.argmax(1) == block.y)[test].double().mean()) for t in both]


def drawn_for(
    block: ClientBlock, sampler: FedGrains, state: State, seeds: Tensor
) -> tuple[Pass, tuple[tuple[Reached, Drawn], ...]]:
    off = torch.tensor([0, len(seeds)])
    key = Key.of(3)
    return sampled_pass(block, block.x, seeds, off, sampler, key, (True, True), state)


@pytest.mark.parametrize("conv", ["gcn", "sage", "gin", "gat"])
def test_credit_is_the_slope_of_the_loss_at_a_gate(make_graph: MakeGraph, conv: str) -> None:
    """Of each chosen node in each hop, by differences; also where attention reads what is sent."""
    graph = make_graph(30, sparse=False)
    train = torch.arange(30) < 12
    block, _ = make_block(graph, whole(graph), Split(train, ~train, ~train), torch.float64)
    model = Model(conv, graph.num_features, 6, graph.num_classes, 2, 0.0, graph.task)
    weights = model.init_weights(Key.of(1), torch.float64)
    inputs, draws = drawn_for(block, GATE, GATE.init(block, model, Key.of(2)), torch.arange(4))

    def loss(messages: tuple[Any, ...]) -> Tensor:
        logits = forward_pass(model, weights, replace(inputs, messages=messages), None)
        return torch.nn.functional.cross_entropy(logits, block.y[:4])

    gates = [drawn.gate for _, drawn in draws if drawn.gate is not None]
    slopes = torch.autograd.grad(loss(inputs.messages), gates)
    for hop, (_, drawn) in enumerate(draws):
        number, chosen = 1 - hop, drawn.trace["candidate"][drawn.trace["is_chosen"]]
        assert len(chosen) == 3
        for v in chosen.tolist():
            both = []
            for step in (-1e-6, 1e-6):
                nudged = list(inputs.messages)
                moved = drawn.gate.detach().clone() if drawn.gate is not None else torch.ones(0)
                moved[v] += step
                assert nudged[number].gate is not None
                nudged[number] = replace(nudged[number], gate=gate_of(inputs, number, block, moved))
                both.append(float(loss(tuple(nudged)).detach()))
            slope = (both[1] - both[0]) / 2e-6
            assert float(slopes[hop][v]) == pytest.approx(slope, abs=1e-7)


def gate_of(inputs: Pass, number: int, block: ClientBlock, gate: Tensor) -> Tensor:
    """The gate (n,) of the rows that enter a stage; rows are known by their keys."""
    place = {int(key): row for row, key in enumerate(block.row_key)}
    return gate[[place[int(key)] for key in inputs.row_key[number]]]


@pytest.mark.parametrize("score", ["odds", "probability"])
def test_a_step_raises_the_scores_of_what_helps(make_graph: MakeGraph, score: Any) -> None:
    """What is descended is the sum of scores times credits, less their mean, by Adam."""
    graph = make_graph(30, sparse=False)
    train = torch.arange(30) < 12
    block, _ = make_block(graph, whole(graph), Split(train, ~train, ~train), torch.float64)
    model = Model("gcn", graph.num_features, 6, graph.num_classes, 2, 0.0, graph.task)
    sampler = replace(GATE, score=score, lr=1e-4)
    state = sampler.init(block, model, Key.of(2))
    _, draws = drawn_for(block, sampler, state, torch.arange(4))
    credit = Key.of(7).matrix(2, 30)
    signal = Signal(torch.tensor([0]), draws, torch.ones(1), Key.of(0), False, tuple(credit))
    after = sampler.learn(block, state, signal)
    _, again = drawn_for(block, sampler, after, torch.arange(4))
    change = 0.0
    for hop in range(2):
        (_, before), (_, later) = draws[hop], again[hop]
        chosen = before.trace["is_chosen"]
        own = credit[hop][before.trace["candidate"][chosen]]
        if torch.equal(before.trace["candidate"], later.trace["candidate"]):
            difference = (later.trace["score"] - before.trace["score"]).detach()
            change += float(((own - own.mean()) * difference[chosen]).sum())
    assert change < 0
    assert torch.equal(after["last_bias"].t, state["last_bias"].t) == (score == "odds")


@pytest.mark.parametrize("sparse", [True, False])
def test_scores_of_neighbors_are_those_of_a_batch_of_one(
    make_graph: MakeGraph, cut_block: CutBlock, sparse: bool
) -> None:
    """The closed form for stars and the draw of each node's own batch: the same logits."""
    graph = make_graph(40, sparse=sparse)
    block, _ = cut_block(graph, 3)
    model = Model("gcn", graph.num_features, 6, graph.num_classes, 2, 0.0, graph.task)
    state = dict(GATE.init(block, model, Key.of(2)))
    state["bias"] = replace(state["bias"], t=state["bias"].t + 0.2)
    logits = GATE._logits_of_neighbors(block, state, 0)
    for u in range(40):
        edges = (block.adj.row == u).nonzero()[:, 0]
        if not len(edges):
            continue
        clients, off = block.client[[u]], torch.tensor([0, 1])
        reached = Reached(torch.tensor([u]), torch.tensor([0]), clients, off)
        trace = GATE.draw(block, reached, 0, Key.of(1), state).trace
        by_row = dict(zip(trace["candidate"].tolist(), trace["score"].tolist(), strict=True))
        expected = [by_row[int(v)] for v in block.adj.indices[edges]]
        assert logits[edges].tolist() == pytest.approx(expected, abs=1e-10)


def test_weighted_evaluation_counts_each_message_by_its_p(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    """A GCN of dense matrices with p in place of ones, by sums of p or by degrees of the graph."""
    graph = make_graph(40)
    block, _ = cut_block(graph, 3)
    model = Model("gcn", graph.num_features, 6, graph.num_classes, 2, 0.0, graph.task)
    weights = model.init_weights(Key.of(1), torch.float64)
    x = block.x if isinstance(block.x, Tensor) else block.x.csr.tensor.to_dense()
    for sampled in (True, False):
        sampler = replace(GATE, sampled_degrees=sampled)
        state = sampler.init(block, model, Key.of(2))
        messages = sampler.messages(block, (True, True), state)
        assert messages is not None
        h = x
        for layer in (0, 1):
            p = sampler._logits_of_neighbors(block, state, 1 - layer).sigmoid()
            among = block.adj.with_values(p).tensor.to_dense()
            degree = 1 + (among if sampled else (among > 0).double()).sum(1)
            operator = (among + torch.eye(40).double()) / torch.outer(degree, degree).sqrt()
            h = operator @ h @ weights[f"{layer}.weight"] + weights[f"{layer}.bias"]
            h = torch.relu(h) if layer == 0 else h
        embeddings = forward_pass(
            model, weights, Pass(block.x, messages, (block.row_key,) * 2), None
        )
        torch.testing.assert_close(embeddings, h, rtol=0, atol=1e-10)
    assert replace(GATE, weighs=False).messages(block, (True, True), state) is None
    assert DropEdge(0.5).messages(block, (True, True), {}) is None


RUN: dict[str, Any] = {"rounds": 2, "batch_size": 4, "neighbors": "fedgrains"}
OWN = {"neighbors.k": 2, "neighbors.width": 6}
LEARNS = OWN | {"neighbors.credit": "gate", "neighbors.score": "odds"}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["fedavg", "local", "fedper", "fedpub", "gcflplus", "scaffold"])
def test_facts_of_each_round(make_graph: MakeGraph, method: str) -> None:
    """Mean p and the range of scores, of all methods whose clients train on batches."""
    more: dict[str, Any] = {"communities": 1} if method == "fedpub" else {}
    how: dict[str, Any] = {"optimizer": "sgd"} if method == "scaffold" else {}
    how["kernels"] = "torch"  # compiled, masks with this sampler are a kernel of their own
    result = go(make_graph(60), method=method, options=OWN | more, **RUN, **how)
    for row in result.rounds:
        mean_p, score_range = row["fact_mean_p"], row["fact_score_range"]
        assert mean_p is not None
        assert score_range is not None
        assert 0 < mean_p < 1
        assert score_range > 0
    chance = {"neighbors.k": 2, "neighbors.policy": "uniform"} | more
    row = go(make_graph(60), method=method, options=chance, **RUN, **how).rounds[-1]
    assert "fact_mean_p" not in row


def test_facts_are_means_over_clients_by_training_nodes(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    graph = make_graph(60)
    block, _ = cut_block(graph, 4)
    model = Model("gcn", graph.num_features, 6, graph.num_classes, 2, 0.0, graph.task)
    state = GATE.init(block, model, Key.of(2))
    facts = GATE.facts(block, state)
    for client in range(4):
        mine = block.client[block.adj.row] == client
        by_hop = [GATE._logits_of_neighbors(block, state, hop)[mine] for hop in (0, 1)]
        p = torch.stack([logit.sigmoid().mean() for logit in by_hop]).mean()
        spans = torch.stack([logit.max() - logit.min() for logit in by_hop]).mean()
        assert float(facts["mean_p"][client]) == pytest.approx(float(p))
        assert float(facts["score_range"][client]) == pytest.approx(float(spans))


def test_one_line_warns_of_a_range_that_chooses_nothing() -> None:
    note = replace(GATE, credit="balance", score="probability").note({"score_range": [2.0, 0.12]})
    assert note == (
        "fedgrains draws nearly uniformly: log p spans 0.12, beside Gumbel noise of deviation "
        "1.28; neighbors.credit=gate learns"
    )
    assert GATE.note({"score_range": [0.1, LEAST_RANGE]}) is None
    assert GATE.note({}) is None
    assert replace(GATE, policy="untrained").note({"score_range": [0.1]}) is None


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedpub"])
def test_weighted_scores_differ_and_blocks_change_none(make_graph: MakeGraph, method: str) -> None:
    more: dict[str, Any] = {"communities": 1} if method == "fedpub" else {}
    options = LEARNS | more | {"neighbors.evaluate": "weighted", "neighbors.lr": 0.1}
    per_block_size = [
        rows_of(go(make_graph(60), method=method, options=options, kernels="torch", **RUN, **each))
        for each in ({}, {"block_size": 1})
    ]
    for ours, theirs in zip(*per_block_size, strict=True):
        for name in ("val_personalized_loss", "fact_mean_p", "fact_score_range"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-9)
    full = options | {"neighbors.evaluate": "full"}
    other = rows_of(go(make_graph(60), method=method, options=full, kernels="torch", **RUN))
    assert per_block_size[0] != other


def test_the_balance_has_options_that_gates_do_not_read(make_graph: MakeGraph) -> None:
    with raises_code(ConfigError, "unread-option", option="neighbors.alpha", part="fedgrains"):
        go(make_graph(), method="fedavg", options=LEARNS | {"neighbors.alpha": 3.0}, **RUN)
