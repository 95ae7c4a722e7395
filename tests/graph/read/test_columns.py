"""Laws of columns, over all readers: no value, key or missing mark changes on the way in."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import silograph as sg
from every_reader import (
    NAMED_READERS,
    READERS,
    NodeTable,
    Reader,
    dense,
    numeric_table,
    write_silo,
)
from mistakes import raises_code
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, DataError
from silograph.core.run_file import read_toml, write_toml
from silograph.graph.datasets import load, source_of
from silograph.graph.graph import Graph, fingerprint
from silograph.graph.read.arrays import from_arrays
from silograph.graph.read.columns import missing_values
from silograph.graph.read.csv import from_csv
from silograph.graph.read.ratings import ratings
from silograph.graph.silos.read import read_silo

every_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)
SECONDS = [1_700_000_000.25 + 0.5 * row for row in range(12)]  # one value in float32
CENTS = [16_777_217 + row for row in range(12)]  # the first whole numbers that float32 lacks
TINY = [1 + 1e-12 * row for row in range(12)]


@every_reader
@pytest.mark.parametrize("column", [SECONDS, CENTS, TINY], ids=["seconds", "cents", "tiny"])
def test_features_keep_every_value(read: Reader, column: list[float], tmp_path: Path) -> None:
    table = numeric_table({"plain": [row / 4 for row in range(12)], "exact": column})
    graph = read(tmp_path, table)
    assert dense(graph.x).dtype == torch.float64
    assert dense(graph.x).tolist() == table.x.tolist()


@every_reader
def test_features_are_float32_where_that_is_exact(read: Reader, tmp_path: Path) -> None:
    narrow = np.random.default_rng(0).normal(size=(2, 12)).astype(np.float32)
    table = numeric_table({"a": narrow[0].tolist(), "b": narrow[1].tolist()})
    graph = read(tmp_path, table)
    assert dense(graph.x).dtype == torch.float32
    assert dense(graph.x).tolist() == narrow.T.tolist()


@every_reader
def test_a_row_has_the_same_values_among_any_others(read: Reader, tmp_path: Path) -> None:
    column = [0.1, *SECONDS[1:6], 1 / 3, 7.0, 0.5]
    (tmp_path / "all").mkdir()
    among_all = dense(read(tmp_path / "all", numeric_table({"a": column})).x)
    for first in (0, 3, 6):
        (tmp_path / str(first)).mkdir()
        some = numeric_table({"a": column[first : first + 3]})
        alone = dense(read(tmp_path / str(first), some).x)
        assert alone.double().tolist() == among_all[first : first + 3].double().tolist()


# --- row numbers ----------------------------------------------------------------------------------

by_name = pytest.mark.parametrize("read", NAMED_READERS.values(), ids=NAMED_READERS)
FEATURES = {"age": [4.0, 2.0, 9.0, 1.0], "size": [1.0, 0.0, 1.0, 0.5]}


@by_name
@pytest.mark.parametrize("name", ["", "Unnamed: 0", "index", "rownames", "row.names", "X"])
@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [1, 2, 3, 4], [2, 0, 3, 1]])
def test_row_numbers_are_left_out_with_one_line(
    read: Reader, name: str, numbers: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = read(tmp_path, numeric_table({name: numbers, **FEATURES}))
    assert graph.feature_names == ("age", "size")
    assert dense(graph.x).tolist() == numeric_table(FEATURES).x.tolist()
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"column left out as row numbers: {name!r}" in line


@by_name
@pytest.mark.parametrize("name", ["row", "number", "Index", "level_1", "id2"])
def test_columns_that_a_user_may_mean_stay(read: Reader, name: str, tmp_path: Path) -> None:
    table = numeric_table({name: [0, 1, 2, 3], **FEATURES})
    assert read(tmp_path, table).feature_names == (name, "age", "size")


@by_name
def test_an_index_of_other_numbers_stays(read: Reader, tmp_path: Path) -> None:
    prices = [104.5, 99.0, 101.0, 98.0]
    table = NodeTable({"Index": prices, **FEATURES}, [0, 1, 0, 1], list("abcd"))
    assert read(tmp_path, table).feature_names == ("Index", "age", "size")


@every_reader
def test_a_feature_that_counts_the_rows_is_named(
    read: Reader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A matrix has no header, so that only its numbers can tell."""
    graph = read(tmp_path, numeric_table({"a": [0.5] * 12, "b": list(range(12))}))
    assert graph.num_features == 2
    said = [record.getMessage() for record in caplog.records]
    sparse = not isinstance(graph.x, torch.Tensor)
    assert sparse or any("numbers the rows of the data" in line for line in said), said


def test_a_named_row_number_column_is_used_where_the_user_says_so(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("index,label,a\n0,0,1\n1,1,2\n")
    (tmp_path / "edges.csv").write_text(",from,to\n0,0,1\n")
    graph = from_csv(nodes=tmp_path / "nodes.csv", edges=tmp_path / "edges.csv", id="index")
    assert (graph.node_id.tolist(), graph.num_edges) == ([0, 1], 1)


def test_ratings_have_no_row_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text(",user,item,rating,shop\n0,a,x,3,s\n1,b,x,4,t\n")
    graph = ratings(path)
    assert list(graph.columns) == ["shop"]
    assert "column left out as row numbers: ''" in caplog.text


# --- keys -----------------------------------------------------------------------------------------

KEYS: dict[str, list[Any]] = {
    "unsigned": [2**63 + 1, 2**63 + 2, 2**64 - 1, 7],
    "signed": [-5, 2**63 - 1, 0, 12],
    "words": ["007", "1.0", "NA", "a"],
}


@every_reader
@pytest.mark.parametrize("ids", KEYS.values(), ids=KEYS)
def test_keys_are_exactly_the_users(read: Reader, ids: list[Any], tmp_path: Path) -> None:
    if read is READERS["ogb"]:
        pytest.skip("nodes of that format have no keys")
    graph = read(tmp_path, NodeTable(FEATURES, [0, 1, 0, 1], ids))
    assert graph.node_id.tolist() == ids
    assert set(map(tuple, graph.edge_index.T.tolist())) >= {(0, 1), (2, 3)}


def test_integers_beyond_64_bits_are_kept_as_text() -> None:
    ids = [2**64, 2**64 + 1, -3]
    graph = from_arrays(x=np.eye(3), y=[0, 1, 0], edge_index=[[0], [1]], node_id=ids)
    assert graph.node_id.tolist() == [str(number) for number in ids]


def test_ids_of_users_are_exact_beside_numbers() -> None:
    graph = ratings([[2**63 + 1, 2**53 + 1, 3.5], [2**63 + 2, 2**53 + 1, 4]])
    users = [f"u:{2**63 + 1}", f"u:{2**63 + 2}"]
    assert graph.node_id.tolist()[:3] == [*users, f"i:{2**53 + 1}"]


def test_labels_of_64_bits_are_one_line() -> None:
    labels = np.array([2**64 - 1, 0, 1, 2], dtype=np.uint64)
    with pytest.raises(DataError, match="got 18446744073709551615: pass codes as words"):
        from_arrays(x=np.eye(4), y=labels, edge_index=[[0], [1]])


# --- missing values -------------------------------------------------------------------------------

MARKS = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "<NA>", "#N/A", "n/a"]
Labels = Callable[[list[Any]], list[int]]


@pytest.fixture
def labels_by(tmp_path: Path) -> dict[str, Labels]:
    """Readers of labels alone; every one of them takes words."""

    def arrays(labels: list[Any]) -> list[int]:
        cells = np.empty(len(labels), dtype=object)
        cells[:] = labels
        x = np.zeros((len(labels), 1))
        return from_arrays(x=x, y=cells, edge_index=[[], []]).y.tolist()

    def through(reader: str) -> Labels:
        def read(labels: list[Any]) -> list[int]:
            table = NodeTable({"a": [0.5] * len(labels)}, labels, list(range(len(labels))))
            (folder := tmp_path / reader).mkdir()
            return READERS[reader](folder, table).y.tolist()

        return read

    found = {name: through(name) for name in ("csv", "networkx", "npz")}
    return {"arrays": arrays, **found}


@pytest.mark.parametrize("reader", ["arrays", "csv", "networkx", "npz"])
@pytest.mark.parametrize("mark", MARKS)
def test_one_rule_for_missing_labels_among_words(
    labels_by: dict[str, Labels], reader: str, mark: str
) -> None:
    assert labels_by[reader](["cat", mark, "dog", "cat"]) == [0, -1, 1, 0]


@pytest.mark.parametrize("mark", MARKS)
def test_one_rule_for_missing_labels_among_numbers(labels_by: dict[str, Labels], mark: str) -> None:
    assert labels_by["csv"](["1", mark, "0", "2"]) == [1, -1, 0, 2]
    assert labels_by["arrays"]([1, mark, 0, 2]) == [1, -1, 0, 2]
    assert labels_by["networkx"]([1, mark, 0, 2]) == [1, -1, 0, 2]


@every_reader
@pytest.mark.parametrize("missing", [math.nan])
def test_missing_features_are_one_line(read: Reader, missing: float, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, numeric_table({"a": [1.0, missing, 2.0, 3.0]}))
    assert "finite" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_missing_values_may_be_declared(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("id,label,a\n0,-9,1\n1,unknown,2\n2,1,3\n3,0,4\n")
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n")
    files: dict[str, Any] = {"nodes": tmp_path / "nodes.csv", "edges": tmp_path / "edges.csv"}
    assert from_csv(**files, na_values=["-9", "unknown"]).y.tolist() == [-1, -1, 1, 0]
    arrays: dict[str, Any] = {"x": np.eye(4), "y": [-9, -9, 1, 0], "edge_index": [[], []]}
    assert from_arrays(**arrays, na_values=[-9]).y.tolist() == [-1, -1, 1, 0]
    with pytest.raises(DataError, match="expected finite features, got 12 NaN"):
        from_arrays(**arrays, na_values=[-9, 0])
    assert from_arrays(**arrays, na_values="-9").y.tolist() == [-1, -1, 1, 0]
    assert from_csv(**files, na_values="-9,unknown").y.tolist() == [-1, -1, 1, 0]
    assert load(tmp_path, na_values="-9,unknown").y.tolist() == [-1, -1, 1, 0]
    wrong: Any
    for wrong, line in (
        (3, "expected a list of words or numbers"),
        ("[true]", "or numbers, got T"),
    ):
        with pytest.raises(DataError, match=f"na_values: .*{line}"):
            from_arrays(**arrays, na_values=wrong)


@pytest.mark.parametrize(
    "words", [["a, b"], ["a, b", "-9"], ["-9", "?"], ['["x"]'], ["[x"], [], [""], ["é", 'a"', "["]]
)
def test_declared_missing_values_survive_a_run_file(words: list[str], tmp_path: Path) -> None:
    config = make_config({"na_values": words})
    assert isinstance(config.na_values, str)
    (tmp_path / "run.toml").write_text(write_toml(config))
    again = make_config(read_toml(tmp_path / "run.toml"))
    assert missing_values(again.na_values or ()) == missing_values(words)
    written = tmp_path / "list.toml"
    written.write_text(f"na_values = {json.dumps(words, ensure_ascii=False)}\n")
    assert make_config(read_toml(written)).na_values == config.na_values


def test_a_missing_value_may_have_a_comma_everywhere(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text('id,label,a\n0,"no, thanks",1\n1,no,2\n2,yes,3\n')
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n")
    given: Any
    for given in (["no, thanks"], '["no, thanks"]'):
        graph = source_of(make_config({"dataset": str(tmp_path), "na_values": given})).read(1.0)
        assert isinstance(graph, Graph)
        assert (graph.y.tolist(), graph.class_names) == ([-1, 0, 1], ("no", "yes"))
        assert fingerprint(load(tmp_path, na_values=given)) == fingerprint(graph)


def test_a_word_that_is_named_as_a_class_is_one() -> None:
    arrays: dict[str, Any] = {"x": np.eye(3), "edge_index": [[], []], "y": ["EU", "NA", ""]}
    graph = from_arrays(**arrays, class_names=["EU", "NA"])
    assert graph.y.tolist() == [0, 1, -1]


def test_a_word_that_may_be_a_class_is_named(caplog: pytest.LogCaptureFixture) -> None:
    from_arrays(x=np.eye(3), edge_index=[[], []], y=["EU", "NA", "ASIA"])
    assert "'NA' counts as missing (1 node)" in caplog.text


def test_runs_silos_and_datasets_declare_missing_values(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("id,label,a\n0,gone,1\n1,1,2\n2,1,3\n3,0,4\n")
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n")
    assert load(tmp_path, na_values=["gone"]).y.tolist() == [-1, 1, 1, 0]
    config = make_config({"dataset": str(tmp_path), "na_values": ["gone", -9]})
    assert config.na_values == "gone,-9"
    graph = source_of(config).read(1.0)
    assert isinstance(graph, Graph)
    assert graph.y.tolist() == [-1, 1, 1, 0]
    with raises_code(ConfigError, "unread-option", option="na_values", part="in memory"):
        sg.run(graph, na_values="gone")
    with raises_code(ConfigError, "unread-option", option="na_values", part="digits"):
        load("digits", na_values=["gone"])


@pytest.mark.parametrize("format", ["csv", "npz", "parquet"])
def test_silos_have_the_same_missing_labels(format: str, tmp_path: Path) -> None:
    table = NodeTable(FEATURES, ["cat", "NA", "gone", "cat"], list("abcd"))
    write_silo(tmp_path, table, format)
    toml = (tmp_path / "silo.toml").read_text()
    toml = toml.replace("['NA', 'cat', 'gone']", '["cat"]') + 'na_values = ["gone", -9]\n'
    (tmp_path / "silo.toml").write_text(toml)
    assert read_silo(tmp_path).y.tolist() == [0, -1, -1, 0]


def test_masked_cells_are_missing() -> None:
    """In arrays of `numpy.ma`, whose hidden values mean nothing."""
    edges, x = np.array([[0, 1], [1, 2]]), np.eye(3)
    y = np.ma.array([0, 1, 1], mask=[False, False, True])
    assert from_arrays(edge_index=edges, x=x, y=y).y.tolist() == [0, 1, -1]
    words = np.ma.array(["cat", "dog", "cat"], mask=[False, False, True])
    assert from_arrays(edge_index=edges, x=x, y=words).y.tolist() == [0, 1, -1]
    assert from_arrays(edge_index=edges, x=x, y=np.ma.array([0, 1, 1])).y.tolist() == [0, 1, 1]
    hidden = np.ma.array(x, mask=np.eye(3, dtype=bool))
    with pytest.raises(DataError, match="expected finite features, got 3 NaN"):
        from_arrays(edge_index=edges, x=hidden, y=[0, 1, 0])
