"""Layer-wise importance sampling: sums by enumeration, and what clients of a block draw."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock, Route, make_block, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.nn.mini_batches import Drawn, Neighbors, Reached, edges_of
from silograph.sampling.layer_wise import FastGCN, Ladies

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
EDGES = [(0, 1), (0, 2), (0, 3), (1, 2), (3, 4), (4, 5)]  # node 6 has no neighbor
ROWS = [0, 4]  # reached


def small(make_graph: MakeGraph) -> ClientBlock:
    rows, cols = torch.tensor(EDGES + [(b, a) for a, b in EDGES]).T
    graph = replace(make_graph(7), adj=CSR.from_pairs(rows, cols, (7, 7)))
    everyone = torch.ones(7, dtype=torch.bool)
    block, _ = make_block(graph, whole(graph), Split(everyone, ~everyone, ~everyone), torch.float64)
    return block


def reached_by(rows: Tensor, off: Tensor) -> Reached:
    return Reached(rows, torch.zeros_like(rows), torch.arange(len(off) - 1), off)


def column_norms(block: ClientBlock, rows: list[int]) -> Tensor:
    """|A_hat[rows, u]|^2 without the diagonal, as a dense matrix has it."""
    adj = torch.zeros(7, 7, dtype=torch.float64)
    for a, b in EDGES:
        adj[a, b] = adj[b, a] = 1
    degree = adj.sum(1) + 1
    hat = adj / (degree[:, None] * degree[None, :]).sqrt()
    return hat[rows].square().sum(0)


def sums(block: ClientBlock, drawn: Drawn, receivers: int) -> Tensor:
    assert isinstance(block.x, Tensor)
    total = block.x.new_zeros(receivers, block.x.shape[1])
    return total.index_add_(0, drawn.position, drawn.share[:, None] * block.x[drawn.neighbor])


CASES: dict[str, tuple[Neighbors, list[int]]] = {
    "fastgcn": (FastGCN(2), list(range(7))),
    "ladies": (Ladies(2), ROWS),
}


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("name", CASES)
def test_the_expected_sum_by_enumeration(make_graph: MakeGraph, name: str) -> None:
    """Every pair of draws comes under some key; weighed by q(u) q(v) they give the full sum."""
    block, (sampler, among) = small(make_graph), CASES[name]
    norms = column_norms(block, among)
    q = norms / norms.sum()
    reached = reached_by(torch.tensor(ROWS), torch.tensor([0, len(ROWS)]))
    every = edges_of(block, reached.rows)
    found: dict[tuple[float, ...], Tensor] = {}
    for number in range(1500):
        drawn = sampler.draw(block, reached, 0, Key.of(number), {})
        times = torch.zeros(7, dtype=torch.float64)
        times[drawn.neighbor] = drawn.share * 2 * q[drawn.neighbor]  # how often each was drawn
        found[tuple(times.round().tolist())] = sums(block, drawn, len(ROWS))
        torch.testing.assert_close(times, times.round(), rtol=0, atol=1e-9)
    expected, seen = torch.zeros(len(ROWS), block.num_features, dtype=torch.float64), 0.0
    touched = set(every.neighbor.tolist())
    for pair in itertools.product([u for u in range(7) if q[u] > 0], repeat=2):
        times = torch.zeros(7, dtype=torch.float64)
        for u in pair:
            times[u] += u in touched  # others send to no row that was reached
        chance = float(q[pair[0]] * q[pair[1]])
        expected += chance * found[tuple(times.tolist())]
        seen += chance
    assert seen == pytest.approx(1)
    torch.testing.assert_close(expected, sums(block, every, len(ROWS)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_rows_come_as_often_as_they_weigh(make_graph: MakeGraph, name: str) -> None:
    block, (_, among) = small(make_graph), CASES[name]
    sampler: Neighbors = FastGCN(20000) if name == "fastgcn" else Ladies(20000)
    norms = column_norms(block, among)
    rows = torch.arange(7) if name == "fastgcn" else torch.tensor(ROWS)
    drawn = sampler.draw(block, reached_by(rows, torch.tensor([0, len(rows)])), 0, Key.of(1), {})
    # A share is how often a row came over how often it was to come.
    shares = dict(zip(drawn.neighbor.tolist(), drawn.share.tolist(), strict=True))
    assert set(shares) == set(norms.nonzero()[:, 0].tolist())
    assert all(abs(share - 1) < 0.1 for share in shares.values())


def test_fastgcn_draws_the_same_rows_for_all_and_ladies_neighbors_only(
    make_graph: MakeGraph,
) -> None:
    block = small(make_graph)
    reached = reached_by(torch.tensor([5]), torch.tensor([0, 1]))  # its only neighbor is 4
    for number in range(20):
        drawn = Ladies(3).draw(block, reached, 0, Key.of(number), {})
        assert drawn.neighbor.tolist() == [4]
        assert drawn.share.tolist() == [1.0]
    counts = [len(FastGCN(1).draw(block, reached, 0, Key.of(n), {}).share) for n in range(200)]
    assert 0 < Counter(counts)[1] < 100


def test_normalized_shares_sum_to_the_degree(make_graph: MakeGraph) -> None:
    block = small(make_graph)
    rows = torch.arange(7)
    reached = reached_by(rows, torch.tensor([0, 7]))
    drawn = Ladies(3, normalize=True).draw(block, reached, 0, Key.of(2), {})
    total = torch.zeros(7, dtype=torch.float64).index_add_(0, drawn.position, drawn.share)
    heard = torch.bincount(drawn.position, minlength=7) > 0
    assert 0 < heard.sum() < 7
    torch.testing.assert_close(total[heard], block.adj.degree[heard].double(), rtol=0, atol=1e-12)
    assert bool((total[~heard] == 0).all())


@pytest.mark.parametrize("sampler", [FastGCN(4), Ladies(4)], ids=lambda s: type(s).__name__)
def test_a_client_draws_the_same_in_any_block(
    make_graph: MakeGraph, cut_block: CutBlock, sampler: Neighbors
) -> None:
    block, _ = cut_block(make_graph(60), 4)
    rows = torch.arange(len(block.row_key))
    together = sampler.draw(block, reached_by(rows, block.off), 0, Key.of(5), {})
    for c in range(4):
        own = block.take(torch.tensor([c]))
        alone = sampler.draw(
            own, reached_by(torch.arange(len(own.row_key)), own.off), 0, Key.of(5), {}
        )
        mine, begin = block.client[together.neighbor] == c, int(block.off[c])
        assert torch.equal(together.neighbor[mine] - begin, alone.neighbor)
        assert torch.equal(together.position[mine] - begin, alone.position)
        assert torch.equal(together.share[mine], alone.share)
