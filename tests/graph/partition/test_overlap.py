"""Laws of cuts whose clients hold copies of the same nodes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cuts import OVERLAPPING
from silograph.core.errors import ConfigError, PartitionError
from silograph.core.key import Key
from silograph.core.payload import owners
from silograph.graph.block.block import make_block
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import draw_split

MakeGraph = Callable[..., Graph]


def cut(graph: Graph, method: str, clients: int = 10, **options: Any) -> Partition:
    return make_partition(graph, method, clients=clients, key=Key.of(4), **options)


@pytest.mark.parametrize("method", OVERLAPPING)
def test_every_client_gets_a_node_and_owners_hold_what_they_own(
    make_graph: MakeGraph, method: str
) -> None:
    for n in (10, 13, 60):
        partition = cut(make_graph(n), method)
        assert len(partition.nodes) == 10
        assert all(len(part) for part in partition.nodes)
        held = torch.zeros(n, dtype=torch.bool)
        held[partition.copies] = True
        assert torch.equal(partition.owner >= 0, held)
        for client, part in enumerate(partition.nodes):
            assert set((partition.owner == client).nonzero()[:, 0].tolist()) <= set(part.tolist())


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_clients_are_drawn_from_the_parts_of_the_disjoint_cut(
    make_graph: MakeGraph, share: float
) -> None:
    graph = make_graph(75)
    parts = make_partition(graph, "metis", clients=3, key=Key.of(4)).nodes
    drawn = cut(graph, "metis_overlapping", 12, clients_per_part=4, part_share=share)
    for client, nodes in enumerate(drawn.nodes):
        part = parts[client // 4]
        assert set(nodes.tolist()) <= set(part.tolist())
        assert len(nodes) == int(share * len(part) + 0.5)
    distinct = {tuple(nodes.tolist()) for nodes in drawn.nodes}
    assert len(distinct) == (3 if share == 1 else 12)


def test_five_halves_hold_31_of_32_nodes_and_share_their_work(make_graph: MakeGraph) -> None:
    graph = make_graph(640)
    drawn = cut(graph, "metis_overlapping")
    assert all(159 <= len(part) <= 161 for part in drawn.nodes)
    lost = int((drawn.owner < 0).sum())
    assert abs(lost - 640 / 32) < 5 * (640 * 31) ** 0.5 / 32  # five standard deviations
    owned = torch.bincount(drawn.owner[drawn.owner >= 0], minlength=10)
    assert (owned.double() - 62).abs().max() < 5 * (62 * 0.8) ** 0.5


@pytest.mark.parametrize(("mean", "variance", "sizes"), [(0.25, 0, {15}), (1, 0, {60})])
def test_shares_without_variance_are_the_mean(
    make_graph: MakeGraph, mean: float, variance: float, sizes: set[int]
) -> None:
    drawn = cut(make_graph(60), "shares", share_mean=mean, share_variance=variance)
    assert {len(part) for part in drawn.nodes} == sizes


def test_shares_follow_a_clipped_normal_distribution(make_graph: MakeGraph) -> None:
    graph = make_graph(100)
    sizes = [len(part) for part in cut(graph, "shares", 100, share_variance=100).nodes]
    assert set(sizes) <= {5, 100} | set(range(6, 100))
    assert sizes.count(5) > 30  # about half of the draws are below .05, the others above 1
    assert sizes.count(100) > 30
    near = [len(part) for part in cut(graph, "shares", 100, share_variance=0.01).nodes]
    assert sum(near) / 100 == pytest.approx(80, abs=5)
    assert min(near) >= 30


def test_shares_of_some_classes(make_graph: MakeGraph) -> None:
    """All of the nodes of two classes each; over many clients every class is drawn alike often."""
    graph = make_graph(60)
    labels, sizes = graph.y.unique(), torch.bincount(graph.y)
    drawn = cut(graph, "shares", 60, share_mean=1.0, share_variance=0.0, share_classes=2)
    seen = torch.zeros(len(sizes))
    for nodes in drawn.nodes:
        found = graph.y[nodes].unique()
        assert len(found) == 2
        assert len(nodes) == int(sizes[found].sum())
        seen[found] += 1
    expected = 60 * 2 / len(labels)
    assert (seen[labels] - expected).abs().max() < 5 * expected**0.5
    half = cut(graph, "shares", 5, share_mean=0.5, share_variance=0.0, share_classes=1)
    for nodes in half.nodes:
        (label,) = graph.y[nodes].unique()
        assert len(nodes) == int(0.5 * int(sizes[label]) + 0.5)


@pytest.mark.parametrize(
    ("method", "clients", "options", "message"),
    [
        ("shares", 3, {"share_classes": 9}, "at most . share_classes, as many classes .* got 9"),
        ("metis_overlapping", 12, {}, "multiple of clients_per_part .* got 12 clients at 5 a part"),
        (
            "metis_overlapping",
            10,
            {"clients_per_part": 0},
            "clients_per_part: input should be .*, got 0",
        ),
        (
            "metis_overlapping",
            10,
            {"part_share": 0.0},
            "part_share: input should be greater than 0, got 0.0",
        ),
        ("metis_overlapping", 10, {"part_share": float("nan")}, "got nan"),
        ("shares", 3, {"share_mean": 1.5}, "share_mean: input should be less than .*, got 1.5"),
        (
            "shares",
            3,
            {"share_variance": -1.0},
            "share_variance: input should be greater .*, got -1",
        ),
        ("shares", 3, {"share_variance": float("inf")}, "got inf"),
    ],
)
def test_refusals(
    make_graph: MakeGraph, method: str, clients: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, PartitionError), match=message):
        cut(make_graph(30), method, clients, **options)


@pytest.mark.parametrize(
    ("owner", "right"),
    [([0, 0, 1, 1, -1], 3), ([0, 0, 1, 2, -1], 4), ([0, 0, 1, -1, -1], 3), ([0, 0, 1], -1)],
)
def test_an_owner_that_does_not_hold_its_node_is_refused(owner: list[int], right: int) -> None:
    nodes = (torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([3]))
    owned = [0, 1, 1, 2, -1]
    first = Partition(("a", "b", "c"), nodes, 5, "hand")
    other = Partition(("a", "b", "c"), nodes, 5, "hand", chosen_owner=torch.tensor(owned))
    assert other.owner.tolist() == owned != first.owner.tolist()
    assert other.hash != first.hash
    if right == 4:  # node 1 answered for by its other holder is as good
        Partition(("a", "b", "c"), nodes, 5, "hand", chosen_owner=torch.tensor(owner))
        return
    with pytest.raises(PartitionError, match=f"got {right} nodes with an owner that holds them"):
        Partition(("a", "b", "c"), nodes, 5, "hand", chosen_owner=torch.tensor(owner))


@pytest.mark.parametrize("method", OVERLAPPING)
def test_all_copies_of_a_node_have_one_role(make_graph: MakeGraph, method: str) -> None:
    graph = make_graph(80)
    partition = cut(graph, method)
    split = draw_split(graph, partition, ratios=(0.4, 0.3, 0.3), key=Key.of(1))
    block, _ = make_block(graph, partition, split)
    assert len(partition.copies) > len(partition.copies.unique())
    for ours, mask in ((block.split.train, split.train), (block.split.test, split.test)):
        assert torch.equal(ours, mask[partition.copies])
    roles = torch.stack([split.train, split.val, split.test]).sum(dim=0)
    assert torch.equal(roles == 1, partition.owner >= 0)  # a role each, and none for the rest


@pytest.mark.parametrize("method", OVERLAPPING)
def test_a_slot_is_answered_by_the_drawn_owner(make_graph: MakeGraph, method: str) -> None:
    graph = make_graph(80)
    share = {"shares": "share_mean", "metis_overlapping": "part_share"}[method]
    own: dict[str, Any] = {share: 0.3}
    partition = cut(graph, method, **own)
    split = draw_split(graph, partition, ratios=(0.4, 0.3, 0.3), key=Key.of(1))
    block, route = make_block(graph, partition, split)
    rows = block.halo.boundary[route.target]
    asker = owners(block.halo.off)
    assert len(rows) > 100
    node = partition.copies[rows]
    assert torch.equal(block.client[rows], partition.owner[node])
    held = [set(part.tolist()) for part in partition.nodes]
    pairs = list(zip(asker.tolist(), node.tolist(), strict=True))
    assert not any(wanted in held[client] for client, wanted in pairs)
    first = Partition(partition.ids, partition.nodes, 80, "hand").owner
    assert not torch.equal(first[node], partition.owner[node])  # else the law says nothing new
