"""Laws of dropped edges: a share of each client's internal ones, and nothing else."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from cuts import DISJOINT, OVERLAPPING
from mistakes import raises_code
from silograph.core.errors import PartitionError
from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock, make_block
from silograph.graph.graph import Graph, Split, subgraph
from silograph.graph.heterogeneity import describe
from silograph.graph.partition.partition import PARTITIONERS, Partition, make_partition

MakeGraph = Callable[..., Graph]
Edges = list[set[tuple[int, int]]]


def with_silos(graph: Graph) -> Graph:
    silo = torch.arange(graph.num_nodes) % 5
    return replace(graph, silo=silo, silo_names=tuple("abcde"))


def cut_of(graph: Graph, method: str, share: float, seed: int) -> Partition:
    given = {"part_share": 0.6, "share_mean": 0.5, "favored_classes": 1}
    names = [f.name for f in fields(PARTITIONERS[method].options)]
    own: dict[str, Any] = {name: given[name] for name in names if name in given}
    return make_partition(graph, method, clients=5, key=Key.of(seed), drop_edges=share, **own)


def block_of(graph: Graph, method: str, share: float, seed: int = 0) -> ClientBlock:
    cut = cut_of(graph, method, share, seed)
    train = torch.ones(graph.num_nodes, dtype=torch.bool)
    return make_block(graph, cut, Split(train, ~train, ~train))[0]


def internal(graph: Graph, method: str, share: float, seed: int = 0) -> Edges:
    """Return each client's internal edges as ordered pairs of node ids."""
    block = block_of(graph, method, share, seed)
    cut = cut_of(graph, method, 0.0, seed)
    name = graph.node_id[cut.copies.numpy()]
    found: Edges = [set() for _ in cut.ids]
    for a, b in zip(block.adj.row.tolist(), block.adj.indices.tolist(), strict=True):
        found[int(block.client[a])].add((int(name[a]), int(name[b])))
    return found


@pytest.mark.parametrize("method", DISJOINT | OVERLAPPING)
def test_each_client_loses_its_share_both_directions_together(
    make_graph: MakeGraph, method: str
) -> None:
    graph = with_silos(make_graph(60))
    whole, half, rest = (internal(graph, method, share) for share in (0, 0.5, 0.8))
    for all_edges, some, few in zip(whole, half, rest, strict=True):
        m = len(all_edges) // 2
        assert len(some) == 2 * (m - int(0.5 * m + 0.5))
        assert len(few) == 2 * (m - int(0.8 * m + 0.5))
        assert few <= some <= all_edges  # a larger share drops more of the same
        assert {(b, a) for a, b in some} == some
    assert internal(graph, method, 1.0) == [set() for _ in whole]


@pytest.mark.parametrize("method", DISJOINT | OVERLAPPING)
def test_cross_client_edges_stay(make_graph: MakeGraph, method: str) -> None:
    graph = with_silos(make_graph(60))
    before, after = (block_of(graph, method, share).halo for share in (0, 0.5))
    assert before.adj.nnz > 0
    assert torch.equal(before.adj.indptr, after.adj.indptr)
    assert torch.equal(before.adj.indices, after.adj.indices)
    assert torch.equal(before.boundary, after.boundary)


@pytest.mark.parametrize("method", ["random", "metis_overlapping"])
def test_renumbering_drops_the_same_edges(make_graph: MakeGraph, method: str) -> None:
    graph = make_graph(60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    assert internal(graph, method, 0.5) == internal(subgraph(graph, order), method, 0.5)
    assert internal(graph, "random", 0.5) != internal(graph, "random", 0.5, seed=1)


def test_clients_lose_their_copies_of_an_edge_each_for_themselves(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    how: dict[str, Any] = {"part_share": 1.0, "drop_edges": 0.5}
    cut = make_partition(graph, "metis_overlapping", clients=5, key=Key.of(0), **how)
    figures = describe(graph, cut)  # five copies of the whole graph
    half = graph.num_edges - int(0.5 * graph.num_edges + 0.5)
    assert figures.internal_edges.tolist() == [half] * 5
    # An edge is missing where all five have lost it: 1 in 32.
    mean = graph.num_edges / 32
    assert abs(figures.edges_cut - mean) < 5 * (mean * 31 / 32) ** 0.5
    assert figures.cross_edges.tolist() == [0] * 5


def test_dropped_edges_are_part_of_the_hash(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    cuts = [
        make_partition(graph, "random", clients=3, key=Key.of(0), drop_edges=s)
        for s in (0.0, 0.2, 0.5)
    ]
    plain = make_partition(graph, "random", clients=3, key=Key.of(0))
    assert cuts[0].hash == plain.hash
    assert len({cut.hash for cut in cuts}) == 3
    assert all(map(torch.equal, cuts[2].nodes, plain.nodes))


def test_a_graph_without_edges_loses_none(make_graph: MakeGraph) -> None:
    graph = make_graph(8)
    none = subgraph(graph, torch.tensor([0]))
    assert none.num_edges == 0
    cut = make_partition(none, "random", clients=1, key=Key.of(0), drop_edges=0.5)
    assert describe(none, cut).internal_edges.tolist() == [0]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(make_graph: MakeGraph, share: float) -> None:
    with raises_code(PartitionError, "option-value", option="drop_edges"):
        make_partition(make_graph(8), "random", clients=2, key=Key.of(0), drop_edges=share)


def test_dropped_edges_of_another_graph_are_refused(make_graph: MakeGraph) -> None:
    graph, other = make_graph(60, seed=0), make_graph(60, seed=1)
    cut = make_partition(graph, "random", clients=3, key=Key.of(0), drop_edges=0.5)
    train = torch.from_numpy(np.ones(60, bool))
    with pytest.raises(PartitionError, match=r"clients hold \d+ ends of edges, got \d+: cut this"):
        make_block(other, cut, Split(train, ~train, ~train))
