"""Laws of runs on PyG data, lists of them and networkx graphs: those of the graph that they are."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import silograph as sg
from mistakes import raises_code
from runs import FAST, go, of, rows_of, same_bits
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, subgraph
from silograph.graph.read.in_memory import from_pyg

MakeGraph = Callable[..., Graph]
CLIENTS: dict[str, Any] = {k: v for k, v in FAST.items() if k not in ("clients", "partition")}


CLIENTS_FEW: dict[str, Any] = {"clients": 3, "rounds": 1, "hidden": 4}
PARTS = ("train", "val", "test")


def dense(graph: Graph) -> np.ndarray:
    x = graph.x
    return x.scipy().toarray() if isinstance(x, CSR) else x.numpy()


def data_of(graph: Graph, **more: Any) -> Data:
    x = graph.x.tensor if isinstance(graph.x, CSR) else graph.x
    return Data(x=x, edge_index=graph.edge_index, y=graph.y, **more)


def plain(graph: Graph) -> Graph:
    """The graph with nodes named 0..n-1, as PyG has them."""
    return sg.from_arrays(edge_index=graph.edge_index, x=graph.x, y=graph.y)


def test_pyg_data_and_networkx_graphs_run_as_they_are(make_graph: MakeGraph) -> None:
    graph = make_graph()
    assert isinstance(graph.x, torch.Tensor)
    theirs = go(plain(graph), rounds=2)
    social: Any = nx.Graph()
    for node in range(60):
        social.add_node(node, x=graph.x[node].numpy(), y=int(graph.y[node]))
    social.add_edges_from(graph.edge_index.T.tolist())
    for given in (data_of(graph), social):
        ours = go(given, rounds=2)
        assert same_bits(of(ours), of(theirs))
        assert rows_of(ours) == rows_of(theirs)
    table = sg.compare(data_of(graph), methods=["local"], seeds=1, processes=0, **CLIENTS_FEW)
    assert not table.failed


@pytest.mark.parametrize("sparse", [False, True])
def test_a_list_of_data_is_one_client_each(make_graph: MakeGraph, sparse: bool) -> None:
    graph = make_graph(sparse=sparse)
    parts = [subgraph(graph, torch.arange(k, 60, 3)) for k in range(3)]
    ours = sg.run([data_of(part) for part in parts], **{**CLIENTS, "rounds": 2})
    assert ours.cut is not None
    assert ours.cut.partition.ids == ("client_00", "client_01", "client_02")
    assert ours.config.partition == "silo"
    for part, nodes in zip(parts, ours.cut.partition.nodes, strict=True):
        mine = subgraph(ours.cut.graph, nodes)
        assert torch.equal(mine.edge_index, part.edge_index)
        assert torch.equal(mine.y, part.y)
        assert (dense(mine) == dense(part)).all()
    joined = from_pyg([data_of(part) for part in parts])
    assert joined.num_edges == sum(part.num_edges for part in parts)  # none between clients
    theirs = sg.run(joined, **{**CLIENTS, "rounds": 2, "partition": "silo"})
    assert same_bits(of(ours), of(theirs))


def test_clients_number_their_classes_together_and_keep_their_masks(make_graph: MakeGraph) -> None:
    edges = torch.tensor([[0], [1]])
    masks = {f"{part}_mask": torch.tensor([part == "train"] * 2) for part in PARTS}
    one = Data(x=torch.eye(2), edge_index=edges, y=torch.tensor([1, 3]), **masks)
    other = Data(x=torch.eye(2), edge_index=edges, y=torch.tensor([2, 3]), **masks)
    graph = from_pyg([one, other], silo_names=["north", "south"])
    assert graph.y.tolist() == [0, 2, 1, 2]
    assert (graph.class_names, graph.silo_names) == (("1", "2", "3"), ("north", "south"))
    assert graph.split is not None
    assert graph.split.train.all()
    values = [Data(x=d.x, edge_index=edges, y=torch.tensor([0.5, 1.0])) for d in (one, other)]
    assert from_pyg(values).task == "node_value"


def test_weights_of_edges_are_read_and_other_values_reported_once(
    make_graph: MakeGraph, caplog: pytest.LogCaptureFixture
) -> None:
    graph = make_graph()
    low, high = graph.edge_index.min(dim=0).values, graph.edge_index.max(dim=0).values
    weight = (low * 100 + high) / 7  # alike in both directions
    both = {"edge_weight": weight, "edge_attr": weight[:, None] - 9}
    three = from_pyg([data_of(graph, **both), data_of(graph), data_of(graph, **both)], name="mine")
    assert caplog.messages == ["mine: values of edges (edge_attr) are not used"]
    expected = torch.cat([weight.float(), torch.ones(len(weight)), weight.float()])
    assert three.edge_weight is not None
    assert torch.equal(three.edge_weight.float(), expected)
    assert from_pyg(data_of(graph, edge_weight=torch.ones(len(weight)))).edge_weight is None
    single = from_pyg(data_of(graph, edge_attr=weight[:, None])).edge_weight
    assert single is not None
    assert torch.equal(single.float(), weight.float())
    weighted: Any = nx.Graph()
    weighted.add_edge(0, 1, weight=2)
    weighted.add_edge(1, 2)
    for node in weighted:
        weighted.nodes[node]["y"] = node % 2
    social = sg.from_networkx(weighted, name="social").edge_weight
    assert social is not None
    assert social.tolist() == [2, 2, 1, 1]
    assert len(caplog.messages) == 1


def test_whole_numbers_of_edges_are_kinds_and_no_weights(
    make_graph: MakeGraph, caplog: pytest.LogCaptureFixture
) -> None:
    """A bond or relation of kind 0 would be an edge of weight 0."""
    graph = make_graph()
    kinds = graph.edge_index.sum(dim=0) % 4
    for values in (kinds, kinds[:, None]):
        assert from_pyg(data_of(graph, edge_attr=values), name="mine").edge_weight is None
    assert caplog.messages == ["mine: values of edges (edge_attr) are not used"] * 2
    named = from_pyg(data_of(graph, edge_weight=kinds)).edge_weight
    assert named is not None
    assert torch.equal(named, kinds.double())


def bad_lists(graph: Graph) -> list[tuple[Any, str]]:
    good, x = data_of(graph), torch.zeros(60, 3)
    half = torch.full((graph.adj.nnz,), 0.5)
    bare = Data(edge_index=graph.edge_index, y=graph.y)
    return [
        ([], "expected a Graph, or the name or path of one, got list: see sg.from_arrays"),
        ([good, 3], "Data 1 of the list: expected a torch_geometric.data.Data, got int"),
        ([good, Data(x=x)], r"Data 1 of the list: expected data\.edge_index, got None"),
        (
            [good, data_of(graph, edge_attr=half), data_of(graph, edge_attr=-half)],
            r"Data 2 of the list: expected edge_attr of one floating point number >= 0 an edge, as",
        ),
        ([good, bare], r"Data 1 of the list: expected features as in Data 0 \(7\), got 0"),
        (
            [good, Data(x=x.to_sparse(), edge_index=graph.edge_index, y=graph.y)],
            r"Data 1 of the list: expected features as in Data 0 \(7\), got 3",
        ),
        (
            [good, Data(x=x, edge_index=torch.tensor([[0], [99]]), y=graph.y)],
            r"Data 1 of the list: expected edges between nodes 0\.\.59, got edge 0 from 0 to 99",
        ),
        (
            [good, data_of(graph, **{f"{p}_mask": graph.y == i for i, p in enumerate(PARTS)})],
            r"Data 1 of the list: expected masks as in Data 0 \(False\), got True",
        ),
        (HeteroData(), "expected a torch_geometric.data.Data, got HeteroData"),
        (5, "expected a Graph, or the name or path of one, got int"),
        (np.zeros(3), "or the name or path of one, got ndarray: see sg.from_arrays"),
    ]


def test_what_cannot_be_a_graph_is_one_line(make_graph: MakeGraph) -> None:
    for given, match in bad_lists(make_graph()):
        with pytest.raises(sg.DataError, match=match) as caught:
            sg.run(given, **CLIENTS)
        assert "\n" not in str(caught.value)
    good = data_of(make_graph())
    with raises_code(sg.ConfigError, "unread-option", option="partition", part="list of clients"):
        sg.run([good], **{**CLIENTS, "partition": "metis"})
    with pytest.raises(sg.DataError, match="at least one Data in the list of clients, got none"):
        from_pyg([])
    with pytest.raises(sg.DataError, match="expected no silo beside a list of Data"):
        from_pyg([good], silo=[0])
    with pytest.raises(sg.DataError, match="a name for each of 1 clients, got 2 silo_names"):
        from_pyg([good], silo_names=["a", "b"])


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_table_in_memory_says_how_its_columns_become_a_graph(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    frame = type("DataFrame", (), {"__module__": f"{package}.core.frame"})
    match = r"got DataFrame: write .*sg\.from_csv\(nodes=.*sg\.from_arrays: x=table\[\[\.\.\.\]\]"
    with pytest.raises(sg.DataError, match=match) as caught:
        sg.run(frame())
    assert "\n" not in str(caught.value)
