"""Laws of subgraphs along sampled edges: their bounds, and gradients against single passes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import block_of, planted_graph
from silograph.core.key import Key
from silograph.core.payload import offsets
from silograph.federation.privacy.updates import CLIP_UNITS, clip_to_grid
from silograph.graph.block.block import ClientBlock
from silograph.graph.csr import CSR
from silograph.nn.bounded_subgraphs import (
    gradients_by_node,
    most_changed_subgraphs,
    most_nodes_within,
    sample_bounded_edges,
    subgraphs_of,
)
from silograph.nn.model import Model
from silograph.task.registry import task_of

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3))  # K, r
CLIP = 0.5


def random_edges(seed: int, n: int = 24) -> tuple[CSR, torch.Tensor]:
    """Return a graph with hubs, and keys of its rows."""
    rng = np.random.default_rng(seed)
    chance = rng.random(n) ** 3
    upper = np.triu(rng.random((n, n)) < chance[:, None] + chance[None, :], 1)
    pairs = (torch.from_numpy(part) for part in np.nonzero(upper | upper.T))
    rows, columns = pairs
    row_key = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, n))
    return CSR.from_pairs(rows, columns, (n, n)), row_key


def without_edges_of(adj: CSR, node: int) -> CSR:
    row, column = adj.row, adj.indices.long()
    stays = (row != node) & (column != node)
    values = None if adj.values is None else adj.values[stays]
    return CSR.from_pairs(row[stays], column[stays], (adj.num_rows, adj.num_cols), values)


def subgraph_texts(edges: CSR, hops: int) -> list[tuple[frozenset[int], frozenset[object]]]:
    """Return nodes and edges of the subgraph of every node."""
    every = subgraphs_of(edges, torch.arange(edges.num_rows), hops)
    texts = list[tuple[frozenset[int], frozenset[object]]]()
    for start, end in zip(every.off.tolist(), every.off.tolist()[1:], strict=False):
        first, last = int(every.adj.indptr[start]), int(every.adj.indptr[end])
        pairs = zip(every.adj.row[first:last], every.adj.indices[first:last].long(), strict=True)
        own = frozenset((int(every.rows[a]), int(every.rows[b])) for a, b in pairs)
        texts.append((frozenset(every.rows[start:end].tolist()), own))
    return texts


def by_hand(edges: CSR, node: int, hops: int) -> tuple[frozenset[int], frozenset[object]]:
    """Return the same of one node by sets."""
    neighbors = [set[int]() for _ in range(edges.num_rows)]
    for a, b in zip(edges.row.tolist(), edges.indices.tolist(), strict=True):
        neighbors[a].add(b)
    nodes, pairs = {node}, set[object]()
    for _ in range(hops):
        pairs |= {pair for a in nodes for b in neighbors[a] for pair in ((a, b), (b, a))}
        nodes |= {b for a in nodes for b in neighbors[a]}
    return frozenset(nodes), frozenset(pairs)


@given(SEEDS, SHAPES)
def test_a_node_has_few_sampled_edges_and_is_in_few_subgraphs(
    seed: int, shape: tuple[int, int]
) -> None:
    (degree, hops), (adj, row_key) = shape, random_edges(seed)
    edges = sample_bounded_edges(adj, row_key, degree, Key.of(seed))
    dense, sampled = (matrix.scipy().toarray() != 0 for matrix in (adj, edges))
    assert (sampled == sampled.T).all()
    assert not (sampled & ~dense).any()
    assert sampled.sum(1).max(initial=0) <= degree
    few = dense.sum(1) <= degree
    assert (sampled == dense)[np.ix_(few, few)].all()  # nothing is left out between such nodes
    texts = subgraph_texts(edges, hops)
    assert texts == [by_hand(edges, node, hops) for node in range(adj.num_rows)]
    counts = np.bincount([node for nodes, _ in texts for node in nodes])
    assert counts.max() <= most_nodes_within(degree, hops)


@given(SEEDS, SHAPES)
def test_a_node_changes_few_subgraphs(seed: int, shape: tuple[int, int]) -> None:
    """Whatever the degrees of other nodes; see the header of `silograph.nn.bounded_subgraphs`."""
    (degree, hops), (adj, row_key) = shape, random_edges(seed)
    key = Key.of(seed)
    before = subgraph_texts(sample_bounded_edges(adj, row_key, degree, key), hops)
    for node in (adj.degree <= degree).nonzero()[:, 0].tolist():
        edges = sample_bounded_edges(without_edges_of(adj, node), row_key, degree, key)
        after = subgraph_texts(edges, hops)
        changed = {t for t, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}
        assert len(changed | {node}) <= most_changed_subgraphs(degree, hops)


def test_the_bound_is_nearly_reached() -> None:
    """A node whose neighbors sample another edge each once it is gone: 2 K + 1 subgraphs of one."""
    degree, worst = 2, 0
    for seed in range(300):
        adj, row_key = random_edges(seed, 12)
        key = Key.of(seed)
        before = subgraph_texts(sample_bounded_edges(adj, row_key, degree, key), 1)
        for node in (adj.degree <= degree).nonzero()[:, 0].tolist():
            edges = sample_bounded_edges(without_edges_of(adj, node), row_key, degree, key)
            pairs = zip(before, subgraph_texts(edges, 1), strict=True)
            worst = max(worst, sum(old != new for old, new in pairs))
    assert most_nodes_within(degree, 1) < worst <= most_changed_subgraphs(degree, 1)


def case(conv: str, *, sparse: bool = False, drop: float = 0.0) -> tuple[Model, ClientBlock]:
    block, _ = block_of(planted_graph(50, sparse=sparse), 2)
    return Model(conv, 7, 5, outputs=3, layers=2, dropout=drop, task="multiclass"), block


@pytest.mark.parametrize("conv", ["gcn", "sage"])
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_those_of_single_passes(conv: str, sparse: bool) -> None:
    """The oracle passes over all rows along the edges of one subgraph at a time."""
    model, block = case(conv, sparse=sparse)
    key, weights = Key.of(3), model.init_weights(Key.of(4), torch.float64)
    edges = sample_bounded_edges(block.adj, block.row_key, 2, key.fold("edges"))
    rows = [gradients for gradients, _ in gradients_by_node(model, weights, block, 2, key)]
    gradients = torch.cat(rows)
    assert len(gradients) == int(block.num_train.sum())
    nodes = block.split.train.nonzero()[:, 0]
    clipped = clip_to_grid(gradients.numpy(), CLIP)
    for number, node in enumerate(nodes.tolist()):
        _, pairs = by_hand(edges, node, 2)
        ends = sorted(pairs)  # type: ignore[type-var]
        a, b = torch.tensor(ends, dtype=torch.int64).reshape(-1, 2).T
        ones = torch.ones(len(ends), dtype=torch.float64)
        adj = CSR.from_pairs(a, b, (block.adj.num_rows, block.adj.num_cols), ones)
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        logits = model.forward(leaves, replace(block, adj=adj))[node][None]
        loss = task_of(model.task).loss(logits, block.y[node][None]).sum()
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*leaves.values()])])
        torch.testing.assert_close(gradients[number], expected)
        scaled = expected * min(1.0, CLIP / float(expected.norm())) / CLIP * CLIP_UNITS
        assert np.abs(clipped[number] - scaled.numpy()).max() <= 1.5


def test_subgraphs_do_not_depend_on_their_number_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, block = case("gcn", drop=0.5)
    weights, key = model.init_weights(Key.of(4), torch.float64), Key.of(3)
    whole = list(gradients_by_node(model, weights, block, 2, key))
    monkeypatch.setattr("silograph.nn.bounded_subgraphs.MOST_VALUES", 1)
    single = list(gradients_by_node(model, weights, block, 2, key))
    assert len(whole) == 1 < len(single)
    torch.testing.assert_close(torch.cat([g for g, _ in single]), whole[0][0])
    assert torch.equal(torch.cat([owner for _, owner in single]), whole[0][1])


def total_of(model: Model, block: ClientBlock, degree: int, key: Key) -> np.ndarray:
    weights = model.init_weights(Key.of(4), torch.float64)
    parts = gradients_by_node(model, weights, block, degree, key)
    rows: np.ndarray = sum(clip_to_grid(g.numpy(), CLIP).sum(0) for g, _ in parts)
    return rows


def without(block: ClientBlock, node: int) -> ClientBlock:
    """Return the block without a node: no edges, no features, no label to learn."""
    assert isinstance(block.x, torch.Tensor)
    x, train = block.x.clone(), block.split.train.clone()
    x[node], train[node] = 0, False
    return replace(
        block,
        x=x,
        adj=without_edges_of(block.adj, node),
        split=replace(block.split, train=train),
        off=offsets(block.off.diff()),
    )


@pytest.mark.parametrize("degree", [1, 3, 6])
def test_one_node_moves_the_sum_by_at_most_the_sensitivity(degree: int) -> None:
    model, block = case("gcn", drop=0.5)
    key = Key.of(5)
    before, largest = total_of(model, block, degree, key), 0.0
    for node in range(block.adj.num_rows):
        if int(block.adj.degree[node]) <= degree:
            other = without(block, node)
            changed = most_changed_subgraphs(degree, 2)
        else:  # its edges stay
            assert isinstance(block.x, torch.Tensor)
            x = block.x.clone()
            x[node] = 100 * torch.randn(x.shape[1], dtype=x.dtype)
            other, changed = replace(block, x=x), most_nodes_within(degree, 2)
        moved = np.linalg.norm(before - total_of(model, other, degree, key))
        assert moved <= 2 * changed * CLIP_UNITS
        largest = max(largest, float(moved))
    assert largest > CLIP_UNITS / 4


@pytest.mark.parametrize("hops", range(1, 5))
@pytest.mark.parametrize("degree", range(1, 8))
def test_the_bound_is_that_of_a_tree(degree: int, hops: int) -> None:
    """The root has K children, all others K - 1: no graph of degree K has more within r hops."""
    level, count = 1, 1
    for depth in range(hops):
        level *= degree - (depth > 0)
        count += level
    assert most_nodes_within(degree, hops) == count
    assert most_changed_subgraphs(degree, hops) == 2 * count - 1
    if degree > 1:  # the bound of the paper, for edges with directions
        assert count <= (degree ** (hops + 1) - 1) // (degree - 1)


def test_more_edges_or_hops_change_more() -> None:
    bounds = [[most_changed_subgraphs(degree, hops) for hops in (1, 2, 3)] for degree in (2, 3, 4)]
    for row, next_row in pairwise(bounds):
        assert all(a < b for a, b in zip(row, next_row, strict=True))
        assert row == sorted(set(row))
