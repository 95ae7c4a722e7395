"""Every mistake in a silo's folder is one line that names file, line and how to mend it."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mistakes import raises_code
from silo_folders import NORTH, TOML, folder
from silograph.core.errors import DataError, install_command
from silograph.graph.silos.read import read_silo, read_silos

SPARSE = TOML + "sparse = true\n"
INTEGER = TOML + 'keys = "integer"\n'
BITS = TOML + 'task = "multilabel"\n'
BAD_WEIGHTS: list[tuple[str, dict[str, str | None]]] = [
    (
        f"{table}.csv, line 2, column 'weight': expected a weight from 0 to 3.4e38 (float32) or "
        f"nothing, got {cell!r}",
        {f"{table}.csv": f"{head},weight\n{row},{cell}\n"},
    )
    for table, head, row in (
        ("edges", "source,target", "a,b"),
        ("cross_edges", "own,silo,remote", "a,south,k"),
    )
    for cell in ("-1", "nan", "inf", "1e300", "heavy")
]
MISTAKES: list[tuple[str, dict[str, str | None]]] = [
    # silo.toml
    (
        "silo.toml: expected what the tables mean, got No such file or directory: see "
        "docs/reference/silo_folder.md",
        {"silo.toml": None},
    ),
    ("silo.toml: expected TOML, got: ", {"silo.toml": "name = north\n"}),
    (
        "silo.toml: expected name, features and classes, got no features: add a line such as "
        "features = 12",
        {"silo.toml": 'name = "north"\nclasses = 2\n'},
    ),
    (
        "silo.toml: unknown key in silo.toml 'classs': did you mean 'classes'?",
        {"silo.toml": TOML + "classs = 3\n"},
    ),
    (
        "silo.toml: features: input should be greater than or equal to 0, got -1",
        {"silo.toml": TOML.replace("= 2", "= -1")},
    ),
    (
        "silo.toml: partition_hash: input should be a valid string, got 3 (silo.toml)",
        {"silo.toml": TOML + "partition_hash = 3\n"},
    ),
    (
        "silo.toml: partition_hash: string should match pattern '^[0-9a-f]{16}$', got 'abc'",
        {"silo.toml": TOML + 'partition_hash = "abc"\n'},
    ),
    (
        "silo.toml: unknown column under [columns] 'ident': did you mean 'id'?",
        {"silo.toml": TOML + '[columns]\nident = "key"\n'},
    ),
    (
        "silo.toml: expected distinct names as classes, got ['cat', 'cat']",
        {"silo.toml": TOML.replace("dog", "cat")},
    ),
    # which files
    (
        "expected one of nodes.csv, nodes.tsv, nodes.csv.gz, nodes.tsv.gz, nodes.npz, "
        "nodes.parquet in HERE, got none: one with the header line alone will do for no rows",
        {"nodes.csv": None},
    ),
    (
        "expected one of edges.csv, edges.tsv, edges.csv.gz, edges.tsv.gz, edges.npz, "
        "edges.parquet in HERE, got edges.csv and edges.npz: keep one of them",
        {"edges.npz": "x"},
    ),
    # nodes
    (
        "nodes.csv, line 1: unknown column 'lable': did you mean 'label'? "
        "(rename it, say so under [columns] of silo.toml, or drop it)",
        {"nodes.csv": "id,lable\na,cat\n"},
    ),
    (
        "nodes.csv, line 1: expected a column 'id', got columns label: rename one, or say so under "
        "[columns] of silo.toml",
        {"nodes.csv": "label\ncat\n"},
    ),
    ("nodes.csv: expected at least one node, got none", {"nodes.csv": "id\n"}),
    (
        "nodes.csv, line 3, column 'id': expected a key, got '': every node needs one",
        {"nodes.csv": "id,label\na,cat\n,dog\n"},
    ),
    (
        "nodes.csv, line 4, column 'id': expected a key not yet on line 2, got 'a': drop one of "
        "them",
        {"nodes.csv": "id\na\nb\na\n"},
    ),
    (
        "nodes.csv, line 3, column 'id': expected a key written as a 64-bit integer, got '07': or "
        'keys = "text" in silo.toml',
        {"silo.toml": INTEGER, "nodes.csv": "id\n7\n07\n"},
    ),
    (
        "nodes.csv, line 2, column 'id': expected a key written as a 64-bit integer, got 'a': or",
        {"silo.toml": INTEGER},
    ),
    (
        "nodes.csv, line 4, column 'label': expected a label of cat, dog or nothing, got 'cow': "
        "name it in classes of silo.toml, too",
        {"nodes.csv": NORTH["nodes.csv"].replace("dog", "cow")},
    ),
    (
        "nodes.csv, line 2, column 'label': expected a label of 0, 1, 2 or nothing, got '3': name",
        {"silo.toml": 'name = "n"\nfeatures = 2\nclasses = 3\n', "nodes.csv": "id,label\na,3\n"},
    ),
    (
        "nodes.csv, line 2, column 'label_1': expected a label of 0, 1 or nothing, got '2'",
        {"silo.toml": BITS, "nodes.csv": "id,label_0,label_1\na,1,2\n"},
    ),
    (
        "nodes.csv, line 1: expected a column 'label_1', got columns id, label_0: rename one, or",
        {"silo.toml": BITS, "nodes.csv": "id,label_0\na,1\n"},
    ),
    (
        "nodes.csv, line 2, column 'split': expected train or val or test or nothing, got 'trian'",
        {"nodes.csv": NORTH["nodes.csv"].replace("train", "trian")},
    ),
    # features
    (
        "features.csv, line 3: expected 3 cells, as in the header, got 2",
        {"features.csv": "id,size,age\na,1,2\nb,1\n"},
    ),
    (
        "features.csv, line 1: expected 2 columns of features besides 'id', as silo.toml says, got "
        "1: add or drop columns, or correct silo.toml",
        {"features.csv": "id,size\na,1\nb,1\nc,1\n"},
    ),
    (
        "features.csv, line 3, column 'age': expected a finite number (float32), got 'nan'",
        {"features.csv": NORTH["features.csv"].replace("0.5,0", "0.5,nan")},
    ),
    (
        "features.csv, line 2, column 'size': expected a finite number (float32), got 'big'",
        {"features.csv": NORTH["features.csv"].replace("a,1", "a,big")},
    ),
    (
        "features.csv, line 4, column 'id': expected a key of nodes, got 'd': add the node, or "
        "drop the row",
        {"features.csv": NORTH["features.csv"].replace("c,", "d,")},
    ),
    (
        "features.csv, line 4, column 'id': expected a key not yet on line 2, got 'a': drop one",
        {"features.csv": NORTH["features.csv"].replace("c,", "a,")},
    ),
    (
        "features.csv: expected features of every node, got none of 'c': add a row",
        {"features.csv": "id,size,age\na,1,2\nb,0.5,0\n"},
    ),
    (
        "features.csv, line 1: expected a column 'id', got columns key, size, age: rename one, or "
        "say so under",
        {"features.csv": NORTH["features.csv"].replace("id", "key")},
    ),
    # sparse features
    (
        "features.csv, line 1: unknown column 'size'; ",
        {"silo.toml": SPARSE},
    ),
    (
        "features.csv, line 1: expected a column 'value', got columns id, feature: rename one, or",
        {"silo.toml": SPARSE, "features.csv": "id,feature\na,1\n"},
    ),
    (
        "features.csv, line 2, column 'id': expected a key of nodes, got 'd': add the node, or",
        {"silo.toml": SPARSE, "features.csv": "id,feature,value\nd,1,1\n"},
    ),
    (
        "features.csv, line 2, column 'feature': expected a feature 0..1, got '2': correct it, or "
        "features in silo.toml",
        {"silo.toml": SPARSE, "features.csv": "id,feature,value\na,2,1\n"},
    ),
    (
        "features.csv, line 2, column 'feature': expected a feature 0..1, got '-1': correct it, or",
        {"silo.toml": SPARSE, "features.csv": "id,feature,value\na,-1,1\n"},
    ),
    (
        "features.csv, line 3, column 'feature': expected a feature of 'a' not yet on line 2, got "
        "'1': drop one of them",
        {"silo.toml": SPARSE, "features.csv": "id,feature,value\na,1,1\na,1,2\n"},
    ),
    (
        "features.csv, line 2, column 'value': expected a finite number (float32), got '1e99'",
        {"silo.toml": SPARSE, "features.csv": "id,feature,value\na,1,1e99\n"},
    ),
    # edges
    (
        "edges.csv, line 1: unknown column 'kind'; ",
        {"edges.csv": "source,target,kind\na,b,1\n"},
    ),
    *BAD_WEIGHTS,
    (
        "edges.csv, line 1: expected a column 'target', got columns source: rename one, or",
        {"edges.csv": "source\na\n"},
    ),
    (
        "edges.csv, line 2, column 'target': expected a key of nodes, got 'x': add the node, or "
        "drop the edge",
        {"edges.csv": "source,target\na,x\n"},
    ),
    (
        "edges.csv, line 3, column 'target': expected another node, got 'b': drop the edge to "
        "itself",
        {"edges.csv": "source,target\na,b\nb,b\n"},
    ),
    (
        "edges.csv, line 4, column 'target': expected an edge not yet on line 2, got 'b': drop one",
        {"edges.csv": "source,target\na,b\nb,a\na,b\n"},
    ),
    # cross-silo edges
    (
        "cross_edges.csv, line 1: unknown column 'remoted': did you mean 'remote'?",
        {"cross_edges.csv": "own,silo,remoted\na,south,k\n"},
    ),
    (
        "cross_edges.csv, line 2, column 'own': expected a key of nodes, got 'x': add the node, or",
        {"cross_edges.csv": "own,silo,remote\nx,south,k\n"},
    ),
    (
        "cross_edges.csv, line 2, column 'silo': expected the name of another silo, got 'north': "
        "list the edge in edges",
        {"cross_edges.csv": "own,silo,remote\na,north,b\n"},
    ),
    (
        "cross_edges.csv, line 2, column 'silo': expected a silo and a key there, got '': fill the",
        {"cross_edges.csv": "own,silo,remote\na,,k\n"},
    ),
    (
        "cross_edges.csv, line 2, column 'remote': expected a silo and a key there, got '': fill",
        {"cross_edges.csv": "own,silo,remote\na,south,\n"},
    ),
    (
        "cross_edges.csv, line 4, column 'remote': expected an edge not yet on line 2, got 'k': "
        "drop one of them",
        {"cross_edges.csv": "own,silo,remote\na,south,k\nb,south,k\na,south,k\n"},
    ),
]


@pytest.mark.parametrize(("line", "changes"), MISTAKES, ids=[line[:90] for line, _ in MISTAKES])
def test_a_mistake_is_one_line(tmp_path: Path, line: str, changes: dict[str, str | None]) -> None:
    path = folder(tmp_path / "north", NORTH | changes)
    with pytest.raises(DataError) as caught:
        read_silo(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.replace(f"{path}/", "").replace(str(path), "HERE").startswith(line)


def npz(path: Path, stem: str, **arrays: Any) -> Path:
    """North's folder with one table as arrays."""
    folder(path, {k: v for k, v in NORTH.items() if not k.startswith(f"{stem}.")})
    np.savez(path / f"{stem}.npz", **arrays)
    return path


X = np.ones((3, 2))
ARRAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("nodes.npz: expected 'id' of shape (n,), numbers or words, got (2, 1) of ", "nodes",
     {"id": np.array([["a"], ["b"]])}),
    ("nodes.npz: expected columns of one length, got id 2, label 1", "nodes",
     {"id": np.array(["a", "b"]), "label": np.array(["cat"])}),
    ("nodes.npz: expected 'id' to be an array of numbers or words, got one that cannot be", "nodes",
     {"id": np.array(["a", None])}),
    ("nodes.npz: unknown column 'lable': did you mean 'label'?", "nodes",
     {"id": np.array(["a"]), "lable": np.array(["cat"])}),
    ("nodes.npz, row 1, column 'label': expected a label of cat, dog or nothing, got '3': ",
     "nodes", {"id": np.array(["a", "b", "c"]), "label": np.array([np.nan, 3, 1])}),
    ("edges.npz, row 0, column 'target': expected a key of nodes, got 'z': ", "edges",
     {"source": np.array(["a"]), "target": np.array(["z"])}),
    ("features.npz: expected x, as sparse = false in silo.toml says, got x_data: write these, or",
     "features", {"x_data": X}),
    ("features.npz: expected features of shape (3, 2), by nodes and silo.toml, got (3, 3): one row "
     "a node, or correct silo.toml", "features", {"x": np.ones((3, 3))}),
    ("features.npz: expected features of shape (3, 2), by nodes and silo.toml, got (2, 2): ",
     "features", {"x": np.ones((2, 2))}),
    ("features.npz: expected finite features, got 1 NaN or infinite in x as float32, the first at "
     "node 2, feature 1: ",
     "features", {"x": np.where(np.arange(6).reshape(3, 2) == 5, np.nan, X)}),
    ("features.npz: expected numbers in x, got dtype <U1: ", "features",
     {"x": np.array([["a", "b"]] * 3)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "stem", "arrays"), ARRAYS, ids=[line[:60] for line, _, _ in ARRAYS]
)
def test_a_mistake_in_arrays_is_one_line(
    tmp_path: Path, line: str, stem: str, arrays: dict[str, Any]
) -> None:
    path = npz(tmp_path / "north", stem, **arrays)
    with pytest.raises(DataError, match="^" + re.escape(f"{path}/{line}")):
        read_silo(path)


def test_sparse_arrays_that_cannot_be_a_matrix(tmp_path: Path) -> None:
    parts = {"x_data": np.ones(1), "x_indices": np.zeros(1, int), "x_shape": np.array([3, 2])}
    path = npz(tmp_path / "north", "features", **parts, x_indptr=np.array([0, 1]))
    folder(path, {"silo.toml": SPARSE})
    with pytest.raises(DataError, match="^" + re.escape(f"{path}/features.npz: expected sound")):
        read_silo(path)


def test_damaged_archives(tmp_path: Path) -> None:
    path = folder(tmp_path / "north", NORTH | {"edges.csv": None, "edges.npz": "no archive"})
    with pytest.raises(DataError, match=r"edges\.npz: expected an \.npz file with a column an arr"):
        read_silo(path)


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "north", NORTH | {"edges.csv": None, "edges.parquet": "x"})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        DataError,
        match=r"edges\.parquet: expected pyarrow for Parquet, got no such package: "
        rf"{re.escape(install_command('parquet'))}, or use CSV or \.npz files$",
    ):
        read_silo(path)


def test_parquet_that_cannot_be_used(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="Parquet is an extra")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder(tmp_path / "north", NORTH | {"edges.csv": None, "edges.parquet": "x"})
    with pytest.raises(DataError, match=r"edges\.parquet: expected a Parquet file, got: "):
        read_silo(path)
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["b"])]
    parquet.write_table(
        pa.table(columns, names=["source", "target", "target"]), path / "edges.parquet"
    )
    with pytest.raises(DataError, match=r"edges\.parquet: expected a Parquet file, got: Multiple "):
        read_silo(path)
    parquet.write_table(pa.table(columns[:1], names=["source"]), path / "edges.parquet")
    with pytest.raises(DataError, match=r"edges\.parquet: expected a column 'target', got columns"):
        read_silo(path)


def test_numbers_with_holes_stay_whole_in_parquet(tmp_path: Path) -> None:
    """Pandas writes integers with holes as floats."""
    pa = pytest.importorskip("pyarrow", reason="Parquet is an extra")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder(tmp_path / "north", NORTH | {"nodes.csv": None})
    folder(path, {"silo.toml": 'name = "north"\nfeatures = 2\nclasses = 3\n'})
    table = pa.table({"id": ["a", "b", "c"], "label": pa.array([2.0, None, float("nan")])})
    parquet.write_table(table, path / "nodes.parquet")
    assert read_silo(path).y.tolist() == [2, -1, -1]


def test_folders_of_silos_that_cannot_be_used(tmp_path: Path) -> None:
    def refused(line: str) -> None:
        with pytest.raises(DataError) as caught:
            read_silos(tmp_path)
        assert str(caught.value).replace(f"{tmp_path}/", "").startswith(line)

    with raises_code(DataError, "missing-file"):
        read_silo(tmp_path / "x")
    refused("expected a folder with a folder for each silo, each with a silo.toml, got ")
    folder(tmp_path / "n", NORTH)
    folder(tmp_path / "s", NORTH)
    folder(tmp_path / "no silo", {})
    refused("s/silo.toml: expected a name of its own, got 'north', as in n/silo.toml: rename one")
    order = tmp_path / "federation.toml"
    for text in (
        "silos = []",
        "silos = 'n'",
        "silos = [1]",
        "name = 'x'",
        "silos = ['n']\nname = 1",
    ):
        order.write_text(text)
        refused('federation.toml: expected silos = ["FOLDER", ...] and a text as name, got {')
    order.write_text("silo = ['n']")
    refused("federation.toml: unknown key 'silo': did you mean 'silos'?")
    order.write_text("silos = ['n', 'm']")
    refused("expected the folder of a silo, got m: no such folder")
    order.write_text("silos = ['n']")
    assert read_silos(tmp_path).ids == ("north",)
