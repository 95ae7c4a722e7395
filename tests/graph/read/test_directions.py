"""Every reader keeps the directions that it sees, none where a file says that there are none."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data

import silograph as sg
from silograph.graph.graph import Graph, with_directions

EDGES = [(0, 1), (1, 0), (1, 2), (3, 2), (3, 0)]
WEIGHTS = [2.0, 4.0, 0.5, 1.0, 3.0]
N = 5
Y = [0, 1, 0, 1, 0]
Pairs = dict[tuple[int, int], float]
DIRECTED: Pairs = dict(zip(EDGES, WEIGHTS, strict=True))


def ways(graph: Graph) -> Pairs:
    weight = with_directions(graph, symmetric=True).edge_weight
    assert weight is not None
    pairs = zip(*graph.edge_index.tolist(), weight[:, 0].tolist(), strict=True)
    return {(a, b): w for a, b, w in pairs if not math.isnan(w)}


def digraph(kind: Any) -> Any:
    net = kind()
    for node in range(N):
        net.add_node(node, label=Y[node], y=Y[node], size=float(node))
    net.add_weighted_edges_from([(a, b, w) for (a, b), w in DIRECTED.items()])
    return net


def tables(folder: Path) -> Path:
    (folder / "nodes.csv").write_text(
        "id,label,f\n" + "".join(f"{i},{y},{i / 2}\n" for i, y in enumerate(Y))
    )
    rows = "".join(f"{a},{b},{w}\n" for (a, b), w in DIRECTED.items())
    (folder / "edges.csv").write_text("source,target,weight\n" + rows)
    return folder


def edge_list(folder: Path) -> Path:
    tables(folder)
    (folder / "links.txt").write_text("# a list\n" + "".join(f"{a} {b}\n" for a, b in EDGES))
    return folder / "links.txt"


def matrix(folder: Path) -> Path:
    tables(folder)
    entries = sp.coo_matrix((WEIGHTS, tuple(np.array(EDGES).T)), shape=(N, N))
    scipy.io.mmwrite(folder / "a.mtx", entries, symmetry="general")
    return folder / "a.mtx"


def archive(folder: Path) -> Path:
    np.savez(folder / "g.npz", edge_index=np.array(EDGES).T, edge_weight=WEIGHTS, y=Y)
    return folder / "g.npz"


def ogb(folder: Path) -> Path:
    raw, split = folder / "some_graph/raw", folder / "some_graph/split/time"
    raw.mkdir(parents=True)
    split.mkdir(parents=True)
    arrays = {"node-feat": np.eye(N), "edge": EDGES, "node-label": np.array(Y)[:, None]}
    arrays |= {"num-node-list": [[N]], "num-edge-list": [[len(EDGES)]]}
    for name, values in arrays.items():
        with gzip.open(raw / f"{name}.csv.gz", "wt") as file:
            np.savetxt(file, np.array(values), fmt="%g", delimiter=",")
    for part, nodes in (("train", [0, 1]), ("valid", [2]), ("test", [3, 4])):
        with gzip.open(split / f"{part}.csv.gz", "wt") as file:
            np.savetxt(file, nodes, fmt="%d")
    return folder / "some_graph"


def written(write: Callable[..., Any], name: str, kind: Any) -> Callable[[Path], Path]:
    def write_to(folder: Path) -> Path:
        write(digraph(kind), folder / name)
        return folder / name

    return write_to


FILES = {
    "tables": tables,
    "list": edge_list,
    "mtx": matrix,
    "npz": archive,
    "ogb": ogb,
    "graphml": written(nx.write_graphml, "g.graphml", nx.DiGraph),
    "gml": written(nx.write_gml, "g.gml", nx.DiGraph),
    "gexf": written(nx.write_gexf, "g.gexf", nx.DiGraph),
}
UNWEIGHTED = ("list", "ogb")


@pytest.mark.parametrize("kind", FILES)
def test_files(tmp_path: Path, kind: str) -> None:
    graph = sg.load(FILES[kind](tmp_path))
    assert graph.is_directed
    assert ways(graph) == (dict.fromkeys(EDGES, 1.0) if kind in UNWEIGHTED else DIRECTED)


@pytest.mark.parametrize("kind", ["graphml", "gml", "gexf", "mtx"])
def test_files_that_say_that_edges_have_no_directions(tmp_path: Path, kind: str) -> None:
    if kind == "mtx":
        tables(tmp_path)
        entries = sp.coo_matrix((WEIGHTS, tuple(np.array(EDGES).T)), shape=(N, N))
        scipy.io.mmwrite(tmp_path / "g.mtx", entries + entries.T, symmetry="symmetric")
    else:
        write = getattr(nx, f"write_{kind}")
        written(write, f"g.{kind}", nx.Graph)(tmp_path)
    assert sg.load(tmp_path / f"g.{kind}").directed_weight is None


def test_graphs_in_memory() -> None:
    data = Data(
        edge_index=torch.tensor(EDGES).T,
        edge_weight=torch.tensor(WEIGHTS),
        y=torch.tensor(Y),
        x=torch.eye(N),
    )
    assert ways(sg.from_pyg(data)) == DIRECTED
    assert ways(sg.from_networkx(digraph(nx.DiGraph))) == DIRECTED
    assert sg.from_networkx(digraph(nx.Graph)).directed_weight is None
    both = torch.cat([data.edge_index, data.edge_index.flip(0)], dim=1)
    symmetric = Data(edge_index=both, y=data.y, x=data.x)
    assert not sg.from_pyg(symmetric).is_directed
    clients = sg.from_pyg([data, symmetric], repeated_edges="last")
    pairs = ways(clients)
    assert {edge: w for edge, w in pairs.items() if edge[0] < N} == DIRECTED
    shifted = {(a + N, b + N) for a, b in both.T.tolist()}
    assert {edge for edge in pairs if edge[0] >= N} == shifted
    assert {pairs[edge] for edge in shifted} == {1.0}


def test_a_list_has_no_directions_if_each_edge_is_in_both() -> None:
    edges = np.array([[0, 1, 1, 2], [1, 0, 2, 1]])
    for weight, is_directed in ((None, False), ([2, 2, 3, 3], False), ([2, 2, 3, 4], True)):
        graph = sg.from_arrays(edge_index=edges, edge_weight=weight, y=Y)
        assert graph.is_directed is is_directed
    looped = np.array([[0, 1, 2], [1, 0, 2]])
    assert not sg.from_arrays(edge_index=looped, y=Y).is_directed
    assert not sg.from_arrays(edge_index=np.zeros((2, 0)), y=Y).is_directed


@given(st.lists(st.tuples(*[st.integers(0, N - 1)] * 2, st.integers(1, 3)), max_size=12))
def test_repeated_edges_are_combined_in_each_direction(rows: list[tuple[int, int, int]]) -> None:
    """By the rule, in plain words."""
    edges = np.array([row[:2] for row in rows], dtype=np.int64).reshape(-1, 2).T
    listed: dict[tuple[int, int], list[int]] = {}
    for a, b, weight in rows:
        if a != b:
            listed.setdefault((a, b), []).append(weight)
    rules: dict[Any, Callable[[list[int]], float]] = {
        "mean": lambda w: sum(w) / len(w),
        "sum": sum,
        "count": len,
        "first": lambda w: w[0],
        "last": lambda w: w[-1],
    }
    weights = [row[2] for row in rows]
    for rule, combine in rules.items():
        graph = sg.from_arrays(edge_index=edges, edge_weight=weights, y=Y, repeated_edges=rule)
        expected = {edge: combine(w) for edge, w in listed.items()}
        symmetric = all(expected.get((b, a)) == w for (a, b), w in expected.items())
        assert graph.is_directed is not symmetric
        assert ways(graph) == pytest.approx(expected)
