"""The figures of a cut, held against loops over nodes, edges and pairs of clients."""

import math
from dataclasses import replace
from itertools import combinations

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from rating_graphs import rating_graph
from silograph.core.errors import DataError
from silograph.core.key import Key
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Graph, Split
from silograph.graph.heterogeneity import MOST_PAIRED, describe, edge_homophily
from silograph.graph.partition.partition import Partition, make_partition


def graph_of(edges: list[tuple[int, int]], y: list[int] | list[list[int]], classes: int) -> Graph:
    ends = torch.tensor([*edges, *((b, a) for a, b in edges)], dtype=torch.int64).view(-1, 2)
    return Graph(
        adj=CSR.from_pairs(ends[:, 0], ends[:, 1], (len(y), len(y))),
        x=torch.zeros(len(y), 1),
        y=torch.tensor(y),
        num_classes=classes,
        node_id=np.arange(len(y)),
    )


@st.composite
def cut_graphs(draw: st.DrawFn) -> tuple[Graph, Partition]:
    """Return a small graph and clients that may overlap or leave nodes out."""
    nodes = draw(st.integers(1, 12))
    pairs = list(combinations(range(nodes), 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    y = draw(st.lists(st.integers(MISSING, 2), min_size=nodes, max_size=nodes))
    held = draw(st.lists(st.sets(st.integers(0, nodes - 1), min_size=1), min_size=1, max_size=4))
    return graph_of(edges, y, 3), Partition(
        tuple(f"c{number}" for number in range(len(held))),
        tuple(torch.tensor(sorted(part)) for part in held),
        nodes,
        "hand",
    )


def reference_distance(rows: list[list[int]], power: int = 1) -> float:
    pairs = [(p, q) for p, q in combinations(rows, 2) if sum(p) and sum(q)]
    distances = [jensenshannon(p, q) ** power for p, q in pairs]
    return float(np.mean(distances)) if distances else math.nan


@settings(max_examples=60)
@given(cut_graphs())
def test_figures_agree_with_loops(drawn: tuple[Graph, Partition]) -> None:
    graph, partition = drawn
    figures = describe(graph, partition, clustering=True)
    assert figures.clustering is not None
    held = [set(part.tolist()) for part in partition.nodes]
    anyone = set().union(*held)
    full: nx.Graph[int] = nx.Graph(zip(*graph.edge_index.tolist(), strict=True))
    full.add_nodes_from(range(graph.num_nodes))
    degrees: list[np.ndarray] = []
    for client, mine in enumerate(held):
        crossing = [(a, b) for a in mine for b in full[a] if b not in mine and b in anyone]
        assert figures.nodes[client] == len(mine)
        assert figures.internal_edges[client] == full.subgraph(mine).number_of_edges()
        assert figures.cross_edges[client] == len(crossing)
        assert figures.halo[client] == len({b for _, b in crossing})
        local = full.subgraph(mine)
        assert figures.clustering[client] == pytest.approx(nx.average_clustering(local))
        degrees.append(np.bincount([d for _, d in local.degree], minlength=12) / len(mine))
        owners = [next(c for c, part in enumerate(held) if b in part) for _, b in crossing]
        assert figures.between is not None
        expected_row = [owners.count(other) for other in range(len(held))]
        assert figures.between[client].tolist() == expected_row
        labels = [int(graph.y[node]) for node in mine]
        assert figures.labels[client].tolist() == [labels.count(k) for k in range(3)]
    lost = sum(not any({a, b} <= mine for mine in held) for a, b in full.edges)
    assert figures.edges_cut == lost
    assert figures.num_edges == full.number_of_edges()
    assert figures.label_distance == pytest.approx(
        reference_distance(figures.labels.tolist()), nan_ok=True, abs=1e-7
    )
    assert figures.label_divergence == pytest.approx(
        reference_distance(figures.labels.tolist(), power=2), nan_ok=True, abs=1e-7
    )
    apart = [np.linalg.norm(np.sqrt(p) - np.sqrt(q)) for p, q in combinations(degrees, 2)]
    hellinger = float(np.mean(apart)) / math.sqrt(2) if apart else math.nan
    assert figures.degree_distance == pytest.approx(hellinger, nan_ok=True, abs=1e-7)
    assert figures.uncut_clustering == pytest.approx(nx.average_clustering(full))
    assert figures.nodes_held == len(anyone)
    assert figures.copies == pytest.approx(sum(map(len, held)) / len(anyone))
    known = [e for e in full.edges if min(int(graph.y[e[0]]), int(graph.y[e[1]])) >= 0]
    same = [e for e in known if graph.y[e[0]] == graph.y[e[1]]]
    expected = len(same) / len(known) if known else math.nan
    assert figures.homophily == pytest.approx(expected, nan_ok=True)


def overlapping() -> tuple[Graph, Partition]:
    # A path 0-1-2-3-4-5; a holds 0 1 2, b holds 2 3, nobody holds 4, c holds 5 and 1.
    graph = graph_of([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], [0, 0, 1, 1, 0, MISSING], 2)
    held = (torch.tensor([0, 1, 2]), torch.tensor([2, 3]), torch.tensor([1, 5]))
    return graph, Partition(("a", "b", "c"), held, 6, "hand")


def test_an_overlapping_cut_by_hand() -> None:
    graph, partition = overlapping()
    train = torch.tensor([True, False, True, False, True, False])
    figures = describe(graph, partition, Split(train, ~train, torch.zeros_like(train)))
    assert figures.clients == 3
    assert (figures.num_nodes, figures.nodes_held, figures.copies) == (6, 5, 7 / 5)
    assert figures.clustering is None
    assert figures.totals()["uncut_clustering"] is None
    assert figures.nodes.tolist() == [3, 2, 2]
    assert figures.internal_edges.tolist() == [2, 1, 0]
    # a lacks 3; b lacks 1, and 4 which nobody could send; c lacks 0 and 2 of node 1, and 4.
    assert figures.cross_edges.tolist() == [1, 1, 2]
    assert figures.halo.tolist() == [1, 1, 2]
    assert figures.labels.tolist() == [[2, 1], [0, 2], [1, 0]]
    assert figures.edges_cut == 2  # 3-4 and 4-5
    assert figures.cut_share == pytest.approx(2 / 5)
    assert figures.homophily == pytest.approx(2 / 4)  # 4-5 has no label; 0-1 and 2-3 agree
    assert figures.train is not None
    assert figures.val is not None
    assert figures.test is not None
    assert figures.train.tolist() == [2, 1, 0]
    assert figures.val.tolist() == [1, 1, 2]
    assert figures.test.tolist() == [0, 0, 0]


def test_edges_between_many_clients_are_not_counted_by_pairs() -> None:
    nodes = MOST_PAIRED + 1
    graph = graph_of([(n, n + 1) for n in range(nodes - 1)], [0] * nodes, 1)
    for clients in (MOST_PAIRED, MOST_PAIRED + 1):
        cut = make_partition(graph, "random", clients=clients, key=Key.of(0))
        assert (describe(graph, cut).between is None) == (clients > MOST_PAIRED)


def test_figures_of_a_split_are_left_out_without_one() -> None:
    figures = describe(*overlapping())
    assert (figures.train, figures.val, figures.test) == (None, None, None)


def test_multilabel_figures_by_hand() -> None:
    # 0-1 share 1 of 2 bits, 1-2 none of 2, 2-3 is unlabelled, 0-4: 0 of 2, 4-5 both empty.
    bits = [[1, 1], [1, 0], [0, 1], [MISSING, MISSING], [0, 0], [0, MISSING]]
    graph = graph_of([(0, 1), (1, 2), (2, 3), (0, 4), (4, 5)], bits, 2)
    assert edge_homophily(graph) == pytest.approx((0.5 + 0 + 0 + 1) / 4)
    held = (torch.tensor([0, 1]), torch.tensor([2, 3, 4, 5]))
    figures = describe(graph, Partition(("a", "b"), held, 6, "hand"))
    assert figures.labels.tolist() == [[2, 1], [0, 1]]


def test_a_graph_without_edges_has_figures() -> None:
    graph = graph_of([], [0, 1, 1], 2)
    figures = describe(graph, Partition(("a",), (torch.arange(3),), 3, "hand"))
    assert (figures.edges_cut, figures.cut_share) == (0, 0.0)
    assert figures.halo.tolist() == figures.cross_edges.tolist() == [0]
    assert math.isnan(figures.homophily)
    assert math.isnan(figures.label_distance)


def test_a_partition_of_another_graph_is_refused() -> None:
    graph, partition = overlapping()
    with pytest.raises(DataError, match="of this graph's 6 nodes, got one of 7"):
        describe(graph, replace(partition, num_nodes=7))


def test_a_thousand_clients_have_sizes_and_edges_that_add_up() -> None:
    nodes, edges = 2700, 5300  # the size of Cora
    ends = np.random.default_rng(0).integers(0, nodes, (edges, 2))
    pairs = sorted({(min(a, b), max(a, b)) for a, b in ends.tolist() if a != b})
    graph = graph_of(pairs, [number % 7 for number in range(nodes)], 7)
    partition = make_partition(graph, "random", clients=1000, key=Key.of(0))
    rows = describe(graph, partition).client_rows()
    assert len(rows) == 1000
    assert sum(int(row["nodes"]) for row in rows) == nodes
    home = partition.owner
    inside = sum(bool(home[a] == home[b]) for a, b in pairs)
    assert sum(int(row["internal_edges"]) for row in rows) == inside


def test_users_and_items_of_several_clients_are_counted() -> None:
    graph = rating_graph()
    partition = make_partition(graph, "category", clients=3, key=Key.of(1))
    totals = describe(graph, partition).totals()
    held = [{str(graph.node_id[n]) for n in nodes.tolist()} for nodes in partition.nodes]
    several = {key for a, b in ((0, 1), (0, 2), (1, 2)) for key in held[a] & held[b]}
    assert totals["shared_users"] == sum(key.startswith("u:") for key in several) > 0
    assert totals["shared_items"] == sum(key.startswith("i:") for key in several) == 0
