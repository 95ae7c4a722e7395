"""GraphSAINT's subgraphs: how likely each is, and what is unbiased by which weights."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, State
from silograph.core.setting_values import NO_MINIMUM, RowMinimum
from silograph.exchange.passes import end, forward, gradients, logits_of
from silograph.federation.in_process import BlockState, InProcess
from silograph.federation.messages import to_payload
from silograph.graph.block.block import ClientBlock, Route, make_block, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.methods.graphsaint import (
    Sampler,
    draw,
    draw_probabilities,
    draw_subgraph,
    presample,
    walk,
    weighted_subgraph,
)
from silograph.nn.model import Model
from silograph.nn.reach import entries_among

KEY = Key.of(3)
EDGES = np.array([[0, 1, 0, 2, 3], [1, 2, 2, 3, 4]])  # a triangle with a tail; node 5 is alone
SAMPLERS: tuple[Sampler, ...] = ("node", "edge", "walk")
Blocks = tuple[ClientBlock, Route]
Outcomes = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class How:
    """Options of the method; a walk may have no step."""

    sampler: Sampler = "node"
    budget: int = 2
    walk_length: int = 2
    sample_coverage: int = 50
    normalize: bool = True


@dataclass(frozen=True)
class Config:
    model: Model
    options: How
    drawn: tuple[int, ...] = ()
    probabilities: tuple[Tensor, ...] = ()
    kernels: str = "torch"
    row_minimum: RowMinimum = NO_MINIMUM


def model_of(conv: str = "gcn", layers: int = 1) -> Model:
    return Model(conv, 4, 5, 3, layers, 0.0, "multiclass")


@pytest.fixture
def tiny() -> Blocks:
    numbers = np.random.default_rng(0)
    graph = Graph(
        adj=CSR.undirected(EDGES, 6),
        x=torch.from_numpy(numbers.normal(size=(6, 4)).astype(np.float32)),
        y=torch.tensor([0, 1, 2, 1, 0, 2]),
        num_classes=3,
        node_id=np.arange(6) * 5 + 2,
        name="tiny",
    )
    train = torch.tensor([True, False, True, True, False, True])
    return make_block(graph, whole(graph), Split(train, ~train, train & False), torch.float64)


def hits(block: ClientBlock, how: Any) -> list[tuple[frozenset[int], float]]:
    """What one draw hits, with its probability, written out by hand."""
    n, adjacent = len(block.row_key), block.adj.scipy().toarray()
    degree = adjacent.sum(1)
    if how.sampler == "node":
        mean = (adjacent + np.eye(n)) / (degree[:, None] + 1)  # D^-1 (A + I)
        p = (mean**2).sum(0)
        return [(frozenset({u}), p[u] / p.sum()) for u in range(n)]
    if how.sampler == "edge":
        either = {(u, v): 1 / degree[u] + 1 / degree[v] for u, v in EDGES.T.tolist()}
        return [(frozenset(e), p / sum(either.values())) for e, p in either.items()]
    walks: list[tuple[tuple[int, ...], float]] = [((v,), 1 / n) for v in range(n)]
    for _ in range(how.walk_length):
        walks = [
            ((*walk, int(u)), p / max(degree[walk[-1]], 1))
            for walk, p in walks
            for u in (adjacent[walk[-1]].nonzero()[0] if degree[walk[-1]] else walk[-1:])
        ]
    return [(frozenset(walk), p) for walk, p in walks]


def outcomes(block: ClientBlock, how: Any) -> Outcomes:
    """Every subgraph with its probability, by enumeration of all draws."""
    found: Outcomes = {}
    for draws in itertools.product(hits(block, how), repeat=how.budget):
        rows = tuple(sorted(frozenset().union(*(hit for hit, _ in draws))))
        found[rows] = found.get(rows, 0) + math.prod(p for _, p in draws)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    return found


def inclusion(block: ClientBlock, found: Outcomes) -> tuple[Tensor, Tensor]:
    """Probability of each row (n,), and of both ends of each entry of the adjacency (nnz,)."""
    n = len(block.row_key)
    both = torch.zeros(n, n, dtype=torch.float64)
    for rows, p in found.items():
        both[torch.tensor(rows)[:, None], torch.tensor(rows)] += p
    return both.diagonal(), both[block.adj.row, block.adj.indices.long()]


# --- how likely a subgraph is ---------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_chances_are_the_papers(tiny: Blocks, sampler: Sampler) -> None:
    """Of nodes the squared columns of A~, of edges 1 / deg(u) + 1 / deg(v), of roots all alike."""
    block, _ = tiny
    got = draw_probabilities(block, sampler)
    got = got / got.sum()
    one = hits(block, How(sampler, walk_length=0))
    if sampler == "edge":
        ends = zip(block.adj.row.tolist(), block.adj.indices.tolist(), strict=True)
        assert len(got) == 10  # either direction of an edge
        expected = [dict(one)[frozenset(pair)] / 2 for pair in ends]
    else:
        expected = [dict(one)[frozenset({u})] for u in range(6)]
    assert got.tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("sampler", ["node", "edge"])
def test_inclusion_has_a_closed_form(tiny: Blocks, sampler: Sampler) -> None:
    """1 - (1 - q)^budget, q what one draw hits."""
    block, _ = tiny
    how = How(sampler, budget=3)
    single, _ = inclusion(block, outcomes(block, how))
    one = hits(block, how)
    for v in range(6):
        q = sum(p for hit, p in one if v in hit)
        assert float(single[v]) == pytest.approx(1 - (1 - q) ** 3, abs=1e-12)


def test_a_walk_of_one_step_has_a_closed_form(tiny: Blocks) -> None:
    """A root, or the neighbor of one: (1 + sum of 1 / deg over neighbors) / n."""
    block, _ = tiny
    single, _ = inclusion(block, outcomes(block, How("walk", budget=1, walk_length=1)))
    degree = block.adj.degree.double().clamp(min=1)
    expected = (1 + block.adj.scipy().toarray() @ (1 / degree).numpy()) / 6
    np.testing.assert_allclose(single.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "how", [How("node"), How("edge"), How("walk", budget=1), How("walk", 2, 1)], ids=str
)
def test_subgraphs_are_drawn_as_often_as_they_should(tiny: Blocks, how: Any) -> None:
    block, _ = tiny
    expected, repeats = outcomes(block, how), 1500
    seen = dict.fromkeys(expected, 0)
    for number in range(repeats):
        seen[tuple(draw_subgraph(block, how, KEY.fold(number)).tolist())] += 1
    for rows, p in expected.items():
        spread = math.sqrt(repeats * p * (1 - p))
        assert abs(seen[rows] - repeats * p) < 5 * spread + 1, rows


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_subgraphs_do_not_depend_on_the_order_of_nodes(
    make_graph: Callable[..., Graph], sampler: Sampler
) -> None:
    graph = make_graph(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    where = torch.empty_like(order)
    where[order] = torch.arange(40)
    assert isinstance(graph.x, Tensor)
    moved = replace(
        graph,
        adj=CSR.from_pairs(where[graph.adj.row], where[graph.adj.indices.long()], (40, 40)),
        x=graph.x[order],
        y=graph.y[order],
        node_id=graph.node_id[order.numpy()],
    )
    none = torch.zeros(40, dtype=torch.bool)
    one, other = (make_block(g, whole(g), Split(none, none, none))[0] for g in (graph, moved))
    six: Any = How(sampler, 6)
    for number in range(5):
        plain, turned = (draw_subgraph(b, six, KEY.fold(number)) for b in (one, other))
        assert 1 < len(plain) < 30
        assert plain.tolist() == sorted(order[turned].tolist())


def test_a_walk_stays_where_there_is_no_way(tiny: Blocks) -> None:
    block, _ = tiny
    assert walk(block, torch.tensor([5]), 3, KEY).tolist() == [5, 5, 5, 5]
    root, step = walk(block, torch.tensor([4]), 1, KEY).tolist()
    assert (root, step) == (4, 3)


def test_edges_where_there_are_none(tiny: Blocks) -> None:
    block, route = tiny
    none = CSR.undirected(np.zeros((2, 0), dtype=np.int64), 6).to("cpu", torch.float64)
    cut = replace(block, adj=none), route
    fed = InProcess(Config(model_of(), How("edge")), *cut, 1)
    with pytest.raises(
        DataError,
        match="edges to draw from at every client, got none at uncut: use "
        "--option sampler=node or walk",
    ):
        fed.call(presample, {}, what=Kind.STATISTICS, key=KEY)
    for sampler in ("node", "walk"):
        fed = InProcess(Config(model_of(), How(sampler, 3)), *cut, 1)
        fed.call(presample, {}, what=Kind.STATISTICS, key=KEY)
        assert bool((fed.states()[0]["saint/nodes"].t > 0).all())


# --- what is unbiased -----------------------------------------------------------------------------


def take_drawn(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the subgraph that the test has drawn, with the exact probabilities."""
    rows, (single, joint) = torch.tensor(cfg.drawn), cfg.probabilities
    entries = entries_among(block.adj, rows)
    step = weighted_subgraph(block, rows, entries, single, joint[entries])
    return {**state, **to_payload(step)}, {}


def drawn(tiny: Blocks, cfg: Config) -> tuple[InProcess, Key]:
    """Return an engine that is about to run on the subgraph `cfg.drawn`."""
    fed, key = InProcess(cfg, *tiny, 1), KEY.fold(repr(cfg.drawn))
    fed.call(take_drawn, {}, what=Kind.CONTROL, key=key)
    return fed, key


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("how", [How("node", 3), How("edge"), How("walk", 2, 1)], ids=str)
@pytest.mark.parametrize("conv", ["gcn", "graphconv", "sage"])  # linear in the sum
def test_sums_of_a_drawn_node_are_unbiased(tiny: Blocks, conv: str, how: Any) -> None:
    """Of those that are drawn at all: the edge sampler misses nodes without edges."""
    model = model_of(conv)
    weights = model.init_weights(KEY, torch.float64)
    total = torch.zeros(6, 3, dtype=torch.float64)
    seen = torch.zeros(6, 1, dtype=torch.float64)
    found = outcomes(tiny[0], how)
    for rows, p in found.items():
        fed, key = drawn(tiny, Config(model, how, rows, inclusion(tiny[0], found)))
        forward(fed, model, weights, key)
        state = fed.states()[0]
        total[state["pass/rows"].t] += p * logits_of(model, state)
        seen[state["pass/rows"].t] += p
    fed = InProcess(Config(model, how), *tiny, 1)
    forward(fed, model, weights, KEY)
    expected = logits_of(model, fed.states()[0])
    can = seen[:, 0] > 0
    assert can.tolist() == [True] * 5 + [how.sampler != "edge"]
    torch.testing.assert_close((total / seen)[can], expected[can], rtol=0, atol=1e-12)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("how", [How("node", 3), How("walk", 2, 1)], ids=str)
def test_the_loss_and_its_gradient_are_unbiased(tiny: Blocks, how: Any) -> None:
    """Of a model whose rows do not hear each other, any depth: there the loss alone is drawn."""
    model = model_of("mlp", layers=3)
    weights = model.init_weights(KEY, torch.float64)
    expected, full = gradients(InProcess(Config(model, how), *tiny, 1), model, weights, KEY)
    loss, grads = 0.0, {name: torch.zeros_like(w) for name, w in weights.items()}
    found = outcomes(tiny[0], how)
    for rows, p in found.items():
        fed, key = drawn(tiny, Config(model, how, rows, inclusion(tiny[0], found)))
        some, mine = gradients(fed, model, weights, key, weighed=True)
        loss += p * (mine or 0.0)
        grads = {name: g + p * some[name] for name, g in grads.items()}
    assert loss == pytest.approx(full, abs=1e-12)
    for name, g in expected.items():
        torch.testing.assert_close(grads[name], g, rtol=0, atol=1e-12)


# --- what is drawn ahead --------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_subgraphs_are_counted_until_they_cover_the_graph(tiny: Blocks, sampler: Sampler) -> None:
    block, _ = tiny
    how: Any = How(sampler, sample_coverage=7)
    fed = InProcess(Config(model_of(), how), *tiny, 1)
    (steps,) = fed.call(presample, {}, what=Kind.STATISTICS, key=KEY)["steps"].t.tolist()
    state = fed.states()[0]
    nodes, edges = torch.zeros(6, dtype=torch.int64), torch.zeros(6, 6, dtype=torch.int64)
    number = 0
    while nodes.sum() < 7 * 6:
        rows = draw_subgraph(block, how, KEY.fold("presample", number))
        nodes[rows] += 1
        edges[rows[:, None], rows] += 1
        number += 1
    assert state["saint/subgraphs"].t.tolist() == [number]
    assert state["saint/nodes"].t.tolist() == nodes.tolist()
    expected = edges[block.adj.row, block.adj.indices.long()]
    assert state["saint/edges"].t.tolist() == expected.tolist()
    assert steps == round(6 * number / int(nodes.sum()))


def test_a_pass_has_at_least_one_step(tiny: Blocks) -> None:
    fed = InProcess(Config(model_of(), How("node", 200)), *tiny, 1)
    reply = fed.call(presample, {}, what=Kind.STATISTICS, key=KEY)
    assert reply["steps"].t.tolist() == [1]


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_counts_converge_to_the_probabilities(tiny: Blocks, sampler: Sampler) -> None:
    block, _ = tiny
    how = How(sampler, sample_coverage=600)
    fed = InProcess(Config(model_of(), how), *tiny, 1)
    fed.call(presample, {}, what=Kind.STATISTICS, key=KEY)
    state = fed.states()[0]
    number = float(state["saint/subgraphs"].t)
    assert number > 800
    for counts, p in zip(("nodes", "edges"), inclusion(block, outcomes(block, how)), strict=True):
        spread = (p * (1 - p) / number).sqrt()
        apart = (state[f"saint/{counts}"].t / number - p).abs()
        assert bool((apart <= 5 * spread + 2 / number).all())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("how", [How("node"), How("edge", 1), How("walk", 1, 1)], ids=str)
def test_weights_from_few_subgraphs_have_the_expectation_that_is_stated(
    tiny: Blocks, how: Any
) -> None:
    """All sequences of three subgraphs drawn ahead, then one that is trained on."""
    block, _ = tiny
    found, ahead = outcomes(block, how), 3
    single, joint = inclusion(block, found)
    row, column = block.adj.row, block.adj.indices.long()
    held = {rows: torch.zeros(6).double() for rows in found}
    for rows, one in held.items():
        one[list(rows)] = 1
    loss, message = torch.zeros(6).double(), torch.zeros(block.adj.nnz).double()
    for sequence in itertools.product(found, repeat=ahead):
        p = math.prod(found[rows] for rows in sequence)
        nodes = sum((held[rows] for rows in sequence), torch.zeros(6).double())
        both = sum((held[r][row] * held[r][column] for r in sequence), torch.zeros_like(message))
        loss += p * (ahead + 1) / (nodes + 1)
        message += p * (nodes[row] + 1) / (both + 1)
    can = single > 0
    expected = (1 - (1 - single) ** (ahead + 1)) / single
    torch.testing.assert_close(loss[can], expected[can], rtol=0, atol=1e-12)
    stated = 1 + (single[row] / joint - 1) * (1 - (1 - joint) ** ahead)
    torch.testing.assert_close(message[joint > 0], stated[joint > 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_step_reads_weights_off_the_counts(
    tiny: Blocks, sampler: Sampler, normalize: bool
) -> None:
    block, _ = tiny
    how: Any = How(sampler, sample_coverage=2, normalize=normalize)
    fed = InProcess(Config(model_of(), how), *tiny, 1)
    fed.call(presample, {}, what=Kind.STATISTICS, key=KEY)
    number, nodes, edges = (
        fed.states()[0][f"saint/{n}"].t for n in ("subgraphs", "nodes", "edges")
    )
    several = 0
    for step in range(8):
        fed.call(draw, {}, what=Kind.CONTROL, key=KEY.fold(step))
        state = fed.states()[0]
        rows = draw_subgraph(block, how, KEY.fold(step)).tolist()
        assert state["pass/rows"].t.tolist() == rows
        names = {name for name in state if name.startswith("pass/")}
        if not normalize:
            assert names == {"pass/rows", "pass/heard"}
            continue
        loss = [(int(number) + 1) / (int(nodes[v]) + 1) for v in rows]
        assert state["pass/loss"].t.tolist() == pytest.approx(loss, abs=1e-14)
        ends = zip(block.adj.row.tolist(), block.adj.indices.tolist(), edges.tolist(), strict=True)
        inner = [(int(nodes[v]) + 1) / (c + 1) for v, u, c in ends if v in rows and u in rows]
        assert state["pass/inner"].t.tolist() == pytest.approx(inner, abs=1e-14)
        several += len(inner)
        fed._host.states = [BlockState(len(fed.ids), end(state))]
    assert several or not normalize
