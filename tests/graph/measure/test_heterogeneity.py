"""Measures of graphs and clients, held against closed forms, networkx and loops."""

import math
from itertools import combinations

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silograph.graph import heterogeneity
from silograph.graph.csr import CSR
from silograph.graph.heterogeneity import degree_distances, label_distances, local_clustering


def test_label_distances_by_hand() -> None:
    # Disjoint labels: sqrt(ln 2). Equal shares: 0. One against half: sqrt(.2158).
    labels = torch.tensor([[3, 0], [0, 5], [0, 0], [1, 1], [2, 2]])
    far, half = math.sqrt(math.log(2)), 0.46450140402
    expected = [far, half, half, half, half, 0]  # the third row has no labels
    assert label_distances(labels) == pytest.approx(expected, abs=1e-7)
    assert len(label_distances(labels[:1])) == len(label_distances(labels[1:3])) == 0


def test_degree_distances_by_hand() -> None:
    client = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    degree = torch.tensor([1, 2, 5, 5, 2, 1, 1])
    half = math.sqrt(1 - math.sqrt(1 / 2))  # all of one degree against half of it
    expected = [1, 0, half, 1, 1, half]  # 0-1, 0-2, 0-3, 1-2, 1-3, 2-3
    assert degree_distances(client, degree, 4) == pytest.approx(expected, abs=1e-7)
    assert len(degree_distances(client[:2], degree[:2], 1)) == 0


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), min_size=2, max_size=5))
def test_degree_distances_agree_with_a_loop(degrees: list[list[int]]) -> None:
    shares = [np.bincount(row, minlength=6) / len(row) for row in degrees]
    expected = [
        np.linalg.norm(np.sqrt(p) - np.sqrt(q)) / math.sqrt(2) for p, q in combinations(shares, 2)
    ]
    client = torch.repeat_interleave(
        torch.arange(len(degrees)), torch.tensor([len(row) for row in degrees])
    )
    degree = torch.tensor([d for row in degrees for d in row])
    assert degree_distances(client, degree, len(degrees)) == pytest.approx(expected, abs=1e-7)


def matrix_of(graph: "nx.Graph[int]") -> CSR:
    return CSR.from_scipy(nx.to_scipy_sparse_array(graph, nodelist=range(len(graph))), ones=True)


@pytest.mark.parametrize("wedges", [1, 40, 1 << 24])  # a row at a time, a few, all
def test_clustering_agrees_with_networkx(monkeypatch: pytest.MonkeyPatch, wedges: int) -> None:
    monkeypatch.setattr(heterogeneity, "WEDGES", wedges)
    for seed in range(3):
        graph = nx.gnp_random_graph(40, 0.2, seed=seed)
        graph.remove_edges_from(list(graph.edges(7)))  # a node without neighbors
        expected = [nx.clustering(graph, node) for node in range(40)]
        assert local_clustering(matrix_of(graph)).tolist() == pytest.approx(expected)


def test_clustering_by_hand() -> None:
    assert local_clustering(matrix_of(nx.complete_graph(5))).tolist() == [1.0] * 5
    assert local_clustering(matrix_of(nx.star_graph(4))).tolist() == [0.0] * 5
    # A triangle 0 1 2 with a tail 2-3: node 2 has one of three pairs.
    tail: nx.Graph[int] = nx.Graph([(0, 1), (1, 2), (0, 2), (2, 3)])
    assert local_clustering(matrix_of(tail)).tolist() == pytest.approx([1, 1, 1 / 3, 0])
