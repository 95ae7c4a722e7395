"""Laws of inputs that cannot be used: one line says what they are and what to do."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from silograph.core.errors import ConfigError, DataError
from silograph.graph.datasets import load
from silograph.graph.read.arrays import from_arrays
from silograph.graph.read.csv import from_csv
from silograph.graph.read.in_memory import from_networkx, from_pyg
from silograph.graph.read.ratings import ratings
from silograph.graph.read.tables import OTHER_FORMATS

E = torch.tensor([[0, 1], [1, 2]])


def data(**changes: Any) -> Data:
    given: dict[str, Any] = {"x": torch.eye(3), "edge_index": E, "y": torch.arange(3)}
    return Data(**{name: part for name, part in (given | changes).items() if part is not None})


@pytest.mark.parametrize("ending", OTHER_FORMATS)
def test_files_of_other_formats_are_named(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine{ending}"
    path.write_bytes(b"whatever")
    for read in (load, ratings):
        with pytest.raises(DataError) as caught:
            read(path)
        line = str(caught.value)
        assert OTHER_FORMATS[ending].replace("PATH", repr(str(path))) in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b"id,a;label,b\n1,0;0,0\n", "got commas and semicolons, each of which"),
        (b"1::2::5::978300760\n", "got double colons as MovieLens has: name the file ratings.dat"),
        (b"# Directed graph\n# FromNodeId\tToNodeId\n0\t1\n", "got a remark as SNAP lists"),
        (gzip.compress(b"id,label\n1,0\n", mtime=0)[:-9], "packed by gzip, got a damaged file"),
        (b"PAR1....", "got a Parquet file: let its name end with .parquet"),
        (b"PK\x03\x04....", "got an archive or workbook: save it as CSV"),
    ],
)
def test_tables_of_another_form_are_named(raw: bytes, line: str, tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_bytes(raw)
    (tmp_path / "edges.csv").write_text("source,target\n")
    (tmp_path / "ratings.csv").write_bytes(raw)
    calls: list[Callable[[], Any]] = [
        lambda: load(tmp_path),
        lambda: from_csv(nodes=tmp_path / "nodes.csv", edges=tmp_path / "edges.csv"),
        lambda: ratings(tmp_path / "ratings.csv"),
    ]
    for call in calls:
        with pytest.raises(DataError, match=line) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_folders_say_which_tables_they_have(tmp_path: Path) -> None:
    (tmp_path / "accounts.csv").write_text("account_id,fraud\n")
    (tmp_path / "transfers.csv").write_text("from,to\n")
    with pytest.raises(DataError, match=r"which has accounts.csv, transfers.csv: rename them, or"):
        load(tmp_path)
    (tmp_path / "raw_files").mkdir()
    (tmp_path / "raw_files" / "accounts.csv.gz").write_bytes(gzip.compress(b"a"))
    with pytest.raises(DataError, match=r"which has accounts.csv.gz: rename them, or use"):
        load(tmp_path / "raw_files")


def test_columns_may_be_a_dict(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("key,red,blue\n1,0,1\n2,1,1\n")
    (tmp_path / "edges.csv").write_text("source,target\n1,2\n")
    graph = load(tmp_path, columns={"id": "key", "label": ["red", "blue"]})
    assert (graph.node_id.tolist(), graph.class_names) == ([1, 2], ("red", "blue"))
    wrong: list[tuple[Any, str]] = [
        ({"key": "id"}, "columns: "),
        ({"id": 3}, "columns: expected a column for id, got 3"),
        (["id"], "columns: expected a text such as"),
    ]
    for columns, line in wrong:
        with pytest.raises(ConfigError, match=line):
            load(tmp_path, columns=columns)


# --- PyG ------------------------------------------------------------------------------------------


def test_heterogeneous_data_are_named_with_their_kinds() -> None:
    several = HeteroData()
    several["paper"].x = torch.eye(3)
    with pytest.raises(DataError, match=r"several kinds of nodes \(paper\): silograph reads one"):
        from_pyg(several)


@pytest.mark.parametrize("lacks", [{}, {"x": None}])
def test_a_number_of_nodes_that_does_not_fit_is_refused(lacks: dict[str, Any]) -> None:
    assert from_pyg(data(num_nodes=3, **lacks)).num_nodes == 3
    with pytest.raises(DataError, match=r"expected data.num_nodes 3, the rows of ., got 70"):
        from_pyg(data(num_nodes=70, **lacks))


def test_other_fields_are_said_to_be_unused(caplog: pytest.LogCaptureFixture) -> None:
    from_pyg(data())
    assert not caplog.records
    given = data(pos=torch.eye(3), batch=torch.zeros(3).long(), stopping_mask=torch.ones(3).bool())
    from_pyg(given, name="mine")
    assert "mine: fields of the Data are not used: pos, batch, stopping_mask" in caplog.text


def test_sparse_adjacency_is_named() -> None:
    with pytest.raises(DataError, match="leave the transform ToSparseTensor out"):
        from_pyg(data(edge_index=None, adj_t=torch.eye(3)))


def test_one_hot_classes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    y = np.eye(3)[np.arange(12) % 3]
    assert from_arrays(x=np.ones((12, 1)), y=y, edge_index=[[], []]).task == "multilabel"
    assert "for classes pass y.argmax(1)" in caplog.text


# --- networkx -------------------------------------------------------------------------------------


def people() -> Any:
    graph: Any = nx.Graph()
    for row, name in enumerate("abc"):
        graph.add_node(name, age=30 + row, income=str(1000.5 * row), club=f"k{row % 2}")
    graph.add_edge("a", "b", weight=None)
    return graph


def test_several_attributes_are_features() -> None:
    graph = from_networkx(people(), x=["age", "income"], y="club")
    assert graph.x.tolist() == [[30, 0], [31, 1000.5], [32, 2001]]  # type: ignore[union-attr]
    assert graph.feature_names == ("age", "income")
    assert graph.edge_weight is None
    with pytest.raises(DataError, match=r"attribute 'club' of node 'a': expected a number, got 'k"):
        from_networkx(people(), x=["age", "club"], y="club")
    with pytest.raises(DataError, match=r"expected attribute 'size' on every node"):
        from_networkx(people(), x=["size"], y="club")


def test_attributes_that_may_be_meant_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert from_networkx(people(), y="club").num_features == 0
    assert "use from_networkx(graph, x=['age'])" in caplog.text
    with pytest.raises(DataError, match=r"attribute 'y' with labels, got attributes age, club, in"):
        from_networkx(people())


def test_graphml_files_are_read_by_networkx(tmp_path: Path) -> None:
    nx.write_graphml(people_without_weights(), tmp_path / "a.graphml")
    graph = from_networkx(nx.read_graphml(tmp_path / "a.graphml"), x=["age", "income"], y="club")
    assert graph.x.tolist() == [[30, 0], [31, 1000.5], [32, 2001]]  # type: ignore[union-attr]


def people_without_weights() -> Any:
    graph = people()
    graph.edges["a", "b"].clear()
    return graph
