"""Laws of `from_arrays`, `from_pyg` and `from_networkx`: what comes in is what the graph holds."""

import warnings
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silograph.core.errors import DataError
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.graph.read.arrays import from_arrays
from silograph.graph.read.in_memory import from_networkx, from_pyg

with warnings.catch_warnings():  # torch_geometric scripts modules while it is imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch_geometric.data import Data, HeteroData

N = 4
EDGES = np.array([[0, 1, 2], [1, 2, 3]])
X = np.array([[1.0, 0.0], [0.0, 2.0], [0.5, 0.0], [0.0, 0.0]])
Y = np.array([0, 1, 1, 0])


def build(**changes: Any) -> Graph:
    """Return the path 0-1-2-3, with changed arguments."""
    return from_arrays(**({"edge_index": EDGES, "x": X, "y": Y} | changes))


def dense(graph: Graph) -> np.ndarray:
    x = graph.x
    return np.asarray(x.scipy().toarray() if isinstance(x, CSR) else x.numpy())


def mask(*nodes: int) -> np.ndarray:
    return np.isin(np.arange(N), nodes)


# --- edges --------------------------------------------------------------------------------------


@st.composite
def edge_lists(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    n = draw(st.integers(1, 12))
    node = st.integers(0, n - 1)
    return n, draw(st.lists(st.tuples(node, node), max_size=40))


@given(edge_lists())
@settings(max_examples=60)
def test_edges_become_undirected_without_loops_or_repeats(
    case: tuple[int, list[tuple[int, int]]],
) -> None:
    n, pairs = case
    graph = from_arrays(
        edge_index=np.array(pairs, dtype=np.int32).reshape(-1, 2).T, x=np.eye(n), y=[0] * n
    )
    wanted = {frozenset(pair) for pair in pairs if pair[0] != pair[1]}
    assert graph.num_edges == len(wanted)
    assert {frozenset(pair) for pair in graph.edge_index.T.tolist()} == wanted
    adjacency = graph.adj.scipy(np.int64).toarray()
    assert (adjacency == adjacency.T).all()
    assert adjacency.max(initial=0) <= 1
    assert graph.adj.values is None


@given(edge_lists(), st.randoms(use_true_random=False))
def test_relabelled_nodes_give_the_relabelled_graph(
    case: tuple[int, list[tuple[int, int]]], random: Any
) -> None:
    n, pairs = case
    order = np.array(random.sample(range(n), n))  # new row i holds old row order[i]
    place = np.argsort(order)
    edges = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    x, y = np.arange(n * 2.0).reshape(n, 2), np.arange(n) % 3
    old = from_arrays(edge_index=edges, x=x, y=y, num_classes=3)
    new = from_arrays(edge_index=place[edges], x=x[order], y=y[order], num_classes=3, node_id=order)
    assert (new.adj.scipy().toarray() == old.adj.scipy().toarray()[order][:, order]).all()
    assert (dense(new) == dense(old)[new.node_id]).all()
    assert (new.y == old.y[torch.from_numpy(new.node_id)]).all()


@pytest.mark.parametrize("edges", [[[], []], np.zeros((2, 0), np.int64), torch.zeros(2, 0)])
def test_a_graph_may_have_no_edges(edges: Any) -> None:
    assert build(edge_index=edges).num_edges == 0


# --- features -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        X,
        X.tolist(),
        X.astype(np.float16),
        X.astype(">f8"),
        torch.tensor(X, requires_grad=True),
        torch.tensor(X, dtype=torch.bfloat16),
        torch.tensor(X).to_sparse(1),
    ],
)
def test_dense_features_become_float32(x: Any) -> None:
    graph = build(x=x)
    assert isinstance(graph.x, torch.Tensor)
    assert graph.x.dtype == torch.float32
    assert (dense(graph) == X).all()


def _doubled() -> "sp.coo_matrix[Any]":
    """Every entry in two halves."""
    half = sp.coo_matrix(X / 2)
    row, col = np.tile(half.row, 2), np.tile(half.col, 2)
    return sp.coo_matrix((np.tile(half.data, 2), (row, col)), shape=X.shape)


@pytest.mark.parametrize(
    "x",
    [
        sp.csr_matrix(X),
        sp.csc_array(X),
        _doubled(),
        CSR.from_scipy(sp.csr_matrix(X)),
        torch.tensor(X).to_sparse(),
    ],
)
def test_sparse_features_stay_sparse(x: Any) -> None:
    graph = build(x=x)
    assert isinstance(graph.x, CSR)
    assert graph.x.nnz == 3
    assert graph.x.values is not None
    assert graph.x.values.dtype == torch.float32
    assert (dense(graph) == X).all()


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed_torch_features_stay_sparse(layout: torch.layout) -> None:
    graph = build(x=torch.tensor(X).to_sparse(layout=layout))
    assert isinstance(graph.x, CSR)
    assert (dense(graph) == X).all()


def test_a_csr_without_values_has_ones() -> None:
    ones = CSR.from_scipy(sp.csr_matrix(X), ones=True)
    assert (dense(build(x=ones)) == (X > 0)).all()


def test_the_graph_shares_no_memory_with_its_arguments() -> None:
    x, y, ids, own = X.astype(np.float32), Y.copy(), np.arange(N), mask(0)
    graph = build(x=x, y=y, node_id=ids, split=[own, mask(1), mask(2)])
    for array in (x, y, ids, own):
        array[:] = 0
    assert (dense(graph) == X).all()
    assert graph.y.tolist() == Y.tolist()
    assert graph.node_id.tolist() == [0, 1, 2, 3]
    assert graph.split is not None
    assert graph.split.train.tolist() == [True, False, False, False]


# --- keys, splits, silos ------------------------------------------------------------------------


def test_node_ids_are_integers_or_strings() -> None:
    assert build().node_id.tolist() == [0, 1, 2, 3]
    assert build(node_id=torch.tensor([9, 7, 8, 6])).node_id.dtype == np.int64
    names = build(node_id=np.array(["d", "c", "b", "a"], dtype=object)).node_id
    assert names.tolist() == ["d", "c", "b", "a"]
    assert names.dtype.kind == "U"


def test_a_split_comes_as_split_or_as_masks() -> None:
    masks = [mask(0), mask(1), mask(2, 3)]
    of_masks = build(split=masks).split
    as_split = build(split=Split(*(torch.from_numpy(part) for part in masks))).split
    for split in (of_masks, as_split):
        assert split is not None
        for got, wanted in zip((split.train, split.val, split.test), masks, strict=True):
            assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("silo", "silo_names", "index", "names"),
    [
        ([5, 3, 5, 10], (), [1, 0, 1, 2], ("3", "5", "10")),
        (["b", "a", "b", "a"], (), [1, 0, 1, 0], ("a", "b")),
        (["b", "a", "b", "a"], ("b", "c", "a"), [0, 2, 0, 2], ("b", "c", "a")),
        (torch.tensor([0, 1, 1, 0]), ("x", "y"), [0, 1, 1, 0], ("x", "y")),
    ],
)
def test_silos_are_numbered(
    silo: Any, silo_names: tuple[str, ...], index: list[int], names: tuple[str, ...]
) -> None:
    graph = build(silo=silo, silo_names=silo_names)
    assert graph.silo is not None
    assert graph.silo.tolist() == index
    assert graph.silo_names == names


# --- errors -------------------------------------------------------------------------------------


def _unsound() -> "sp.csr_matrix[Any]":
    matrix = sp.csr_matrix(X)
    matrix.indices[0] = 7
    return matrix


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"edge_index": [[0, 1, 9], [1, 4, 0]]}, r"nodes 0\.\.3, got edge 1 from 1 to 4 \(2 such"),
    ({"edge_index": [[0], [-1]]}, r"nodes 0\.\.3, got edge 0 from 0 to -1"),
    ({"edge_index": EDGES.T}, r"shape \(2, E\), got \(3, 2\): transpose it"),
    ({"edge_index": [0, 1]}, r"shape \(2, E\), got \(2,\): one column an edge"),
    ({"edge_index": EDGES / 2}, r"expected integers in edge_index, got dtype float64"),
    ({"edge_index": [[0, 1], [1]]}, r"expected edge_index to be one array .* got list"),
    ({"edge_index": torch.eye(2).to_sparse()}, r"expected edge_index to be one array"),
    (
        {"x": np.where(X == 2, np.nan, X)},
        r"got 1 NaN or infinite in x as float32, .* node 1, feature 1",
    ),
    ({"x": sp.csr_matrix(np.where(X == 2, np.inf, X))}, r"NaN or infinite .* node 1, feature 1"),
    ({"x": X * 1e300}, r"got 3 NaN or infinite in x as float32, the first at node 0, feature 0"),
    ({"x": X[:, 0]}, r"expected x of shape \(n, F\) with 1 <= F < 2\^31, got \(4,\)"),
    ({"x": sp.csr_matrix((4, 2**40))}, r"with 1 <= F < 2\^31, got \(4, 1099511627776\)"),
    ({"x": X[:, :0]}, r"expected x of shape \(n, F\) with 1 <= F < 2\^31, got \(4, 0\)"),
    ({"x": X[:0]}, r"at least one node, got x of shape \(0, 2\): the graph is empty"),
    ({"x": X.astype(str)}, r"expected numbers in x, got dtype <U32: code words as numbers"),
    ({"x": _unsound()}, r"expected a sound sparse matrix in x"),
    ({"class_names": ["a", "a"]}, r"expected class_names to be distinct names, got \['a', 'a'\]"),
    ({"silo": Y, "silo_names": "ab"}, r"expected silo_names to be distinct names, got 'ab'"),
    ({"node_id": [1, 2, 2, 3]}, r"expected unique node ids, got 2 2 times"),
    ({"node_id": ["a", "b", "b", "b"]}, r"expected unique node ids, got 'b' 3 times"),
    ({"node_id": [1, 2, 3]}, r"expected node_id of shape \(4,\), got \(3,\)"),
    ({"node_id": [0.0, 1.0, 2.0, 3.0]}, r"integers or strings in node_id, got dtype float64"),
    ({"split": [mask(0), mask(1)]}, r"expected three masks \(train, val, test\) as split, got 2"),
    ({"split": [mask(0), mask(1), mask(2)[:3]]}, r"test mask of shape \(4,\) .* got \(3,\)"),
    ({"split": [mask(0), Y, mask(2)]}, r"val mask .* dtype bool, got \(4,\) and int64"),
    ({"split": [mask(0, 1), mask(1), mask(2)]}, r"disjoint masks, got node 1 in two of"),
    ({"silo": [0, 1]}, r"expected silo of shape \(4,\), .* got \(2,\)"),
    ({"silo": ["a", "", "a", "a"]}, r"or an empty word: say of each node"),
    ({"silo": [0.0] * 4}, r"expected silo of shape \(4,\), .* of dtype float64"),
    ({"silo_names": ["a"]}, r"expected silo beside silo_names, got None"),
    ({"silo": [0, 1, 2, 0], "silo_names": ["a", "b"]}, r"silo 0\.\.1 .* at node 2: name every"),
    ({"silo": list("abca"), "silo_names": ["a", "b"]}, r"silo 0\.\.1 .* at node 2: name every"),
]


@pytest.mark.parametrize(("changes", "match"), WRONG)
def test_what_cannot_be_used_is_one_line(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        build(**changes)
    assert "\n" not in str(caught.value)


# --- PyG ----------------------------------------------------------------------------------------


def test_pyg_data_is_the_graph_of_its_arrays() -> None:
    data = Data(x=torch.tensor(X), edge_index=torch.tensor(EDGES), y=torch.tensor(Y))
    assert from_pyg(data).split is None
    data.train_mask, data.val_mask, data.test_mask = (torch.from_numpy(mask(i)) for i in range(3))
    graph = from_pyg(data, name="mine", node_id=list("abcd"), silo=[0, 0, 1, 1])
    wanted = build()
    assert (graph.edge_index == wanted.edge_index).all()
    assert (dense(graph) == X).all()
    assert graph.y.tolist() == Y.tolist()
    assert graph.split is not None
    assert graph.split.val.tolist() == mask(1).tolist()
    assert (graph.name, graph.silo_names) == ("mine", ("0", "1"))
    assert graph.node_id.tolist() == list("abcd")


def test_pyg_takes_sparse_features_and_label_bits() -> None:
    bits = torch.tensor([[1.0, 0], [0, 1], [1, 1], [0, 0]])
    x = torch.tensor(X).to_sparse()
    graph = from_pyg(Data(x=x, edge_index=torch.tensor(EDGES), y=bits))
    assert isinstance(graph.x, CSR)
    assert graph.y.tolist() == bits.tolist()


def test_pyg_data_that_lacks_a_part_is_refused() -> None:
    whole = {"x": torch.tensor(X), "edge_index": torch.tensor(EDGES), "y": torch.tensor(Y)}
    for key in ("edge_index", "y"):
        part = Data(**{name: value for name, value in whole.items() if name != key})
        with pytest.raises(DataError, match=rf"expected data\.{key}, got None"):
            from_pyg(part)
    with pytest.raises(DataError, match=r"got no val_mask: add it \(all False will do\)"):
        from_pyg(Data(**whole, train_mask=mask(0), test_mask=mask(1)))
    columns = torch.zeros(N, 10, dtype=torch.bool)
    with pytest.raises(DataError, match=r"train mask of shape \(4,\) .* got \(4, 10\)"):
        from_pyg(Data(**whole, train_mask=columns, val_mask=columns, test_mask=columns))
    with pytest.raises(DataError, match=r"expected a torch_geometric.data.Data, got HeteroData"):
        from_pyg(HeteroData())


# --- networkx -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nx.Graph, nx.DiGraph, nx.MultiGraph])
def test_networkx_nodes_keep_their_names(kind: Any) -> None:
    graph = kind()
    parts = ["train", "val", "test", ""]
    for name, x, y, part in zip("dcba", X, ["p", None, "q", "p"], parts, strict=True):
        graph.add_node(name, x=x, y=y, part=part, home="north" if name < "c" else "south")
    graph.add_edges_from([("d", "c"), ("c", "d"), ("c", "b"), ("b", "a"), ("a", "a")])
    made = from_networkx(graph, silo="home", split="part", name="letters")
    assert made.node_id.tolist() == list("dcba")
    assert (made.edge_index == build().edge_index).all()
    assert (dense(made) == X).all()
    assert (made.y.tolist(), made.class_names) == ([0, -1, 1, 0], ("p", "q"))
    assert made.silo is not None
    assert (made.silo.tolist(), made.silo_names) == ([1, 1, 0, 0], ("north", "south"))
    assert made.split is not None
    assert made.split.train.tolist() == mask(0).tolist()


def test_networkx_numbers_stay_numbers_and_other_names_become_strings() -> None:
    graph: Any = nx.Graph([(np.int64(7), 3)])
    graph.add_nodes_from([7, 3], x=1.5, y=0)
    assert from_networkx(graph).node_id.tolist() == [7, 3]
    board: Any = nx.grid_2d_graph(1, 2)
    board.add_nodes_from([(0, 0), (0, 1)], f=[1, 2])
    board.add_node((0, 1), bits=[1, 0])
    made = from_networkx(board, x="f", y="bits")
    assert made.node_id.tolist() == ["(0, 0)", "(0, 1)"]
    assert made.y.tolist() == [[-1, -1], [1, 0]]


def test_networkx_graphs_that_cannot_be_used() -> None:
    graph: Any = nx.Graph([(0, 1)])
    graph.nodes[1]["x"] = [1, 2]
    with pytest.raises(DataError, match="expected attribute 'x' on every node, got none on node 0"):
        from_networkx(graph)
    graph.add_nodes_from([(0, {"x": [1, 2]}), (1, {"x": [1]})], y=0, home="a")
    with pytest.raises(DataError, match="expected 2 numbers in attribute 'x' of node 1"):
        from_networkx(graph)
    graph.add_node(1, x=[3, 4], part="training")
    with pytest.raises(DataError, match="split of node 1 to be train, val, test or empty, got 'tr"):
        from_networkx(graph, split="part")
    graph.add_node(2, x=[3, 4])
    with pytest.raises(DataError, match="attribute 'home' on every node, got none on node 2"):
        from_networkx(graph, silo="home")
    with pytest.raises(DataError, match="expected a networkx graph, got dict"):
        from_networkx({})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"got x of shape \(0, 1\): the graph is empty"):
        from_networkx(nx.Graph())


def test_names_of_features_are_one_a_column() -> None:
    with pytest.raises(DataError, match="expected 2 feature_names, one a column, got 1"):
        from_arrays(edge_index=[[0], [1]], x=np.eye(2), y=[0, 1], feature_names=["a"])
