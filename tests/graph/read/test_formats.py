"""Laws of files that people have: whichever format a graph is in, it is the same graph."""

import bz2
import gzip
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

from mistakes import raises_code
from silograph.core.errors import ConfigError, DataError
from silograph.graph.datasets import load
from silograph.graph.graph import Graph, fingerprint
from silograph.graph.read import contents, tables
from silograph.graph.read.csv import from_csv
from silograph.graph.read.ratings import ratings
from silograph.graph.silos.read import read_silo
from silograph.study.cells import file_hash

COLUMNS = "label=kind"
IDS = ("7", "9", "12", "30", "31")
NODES = [(key, row / 4 + 0.5, row * 3, "ab"[row % 2]) for row, key in enumerate(IDS)]
EDGES = [("7", "9", 0.5), ("9", "12", 2.0), ("12", "30", 1.25), ("30", "7", 3.0), ("31", "9", 1.0)]


def mark(value: object, decimal: str) -> str:
    return str(value).replace(".", decimal) if isinstance(value, float) else str(value)


def text(header: Sequence[str], rows: Sequence[Sequence[Any]], separator: str, dec: str) -> str:
    lines = [header, *([mark(cell, dec) for cell in row] for row in rows)]
    return "".join(separator.join(line) + "\n" for line in lines)


def write_tables(
    folder: Path, separator: str = ",", decimal: str = ".", ending: str = ".csv"
) -> Path:
    """Write nodes and edges; returns the folder."""
    folder.mkdir(exist_ok=True)
    for stem, header, rows in (
        ("nodes", ["id", "age", "visits", "kind"], NODES),
        ("edges", ["source", "target", "weight"], EDGES),
    ):
        raw = text(header, rows, separator, decimal).encode()
        (folder / f"{stem}{ending}").write_bytes(gzip.compress(raw) if "gz" in ending else raw)
    return folder


def in_networkx() -> Any:
    graph: Any = nx.Graph()
    for key, age, visits, kind in NODES:
        graph.add_node(key, age=age, visits=visits, kind=kind)
    graph.add_weighted_edges_from(EDGES)
    return graph


def written(write: Callable[[Any, Path], Any], name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write(in_networkx(), folder / name)
        return folder / name

    return make


def packed(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def pack(folder: Path) -> Path:
        path = make(folder)
        target = path.with_name(f"{path.name}.gz")
        target.write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        return target

    return pack


def list_of_edges(name: str, separator: str, head: str = "") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_tables(folder)
        rows = (f"{a}{separator}{b}{separator}{w}\n" for a, b, w in EDGES)
        (folder / name).write_text(head + "".join(rows))
        return folder / name

    return make


def matrix(folder: Path) -> Path:
    write_tables(folder)
    (folder / "edges.csv").unlink()
    dense = np.zeros((len(IDS), len(IDS)))
    for a, b, weight in EDGES:
        dense[IDS.index(a), IDS.index(b)] = weight
    scipy.io.mmwrite(folder / "edges.mtx", sp.coo_matrix(dense))
    return folder / "edges.mtx"


def symmetric_matrix(folder: Path) -> Path:
    path = matrix(folder)
    full: Any = scipy.io.mmread(path)
    scipy.io.mmwrite(path, full + full.T, symmetry="symmetric")
    return path


def parquet(folder: Path) -> Path:
    arrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    nodes = dict(zip(("id", "age", "visits", "kind"), zip(*NODES, strict=True), strict=True))
    edges = dict(zip(("source", "target", "weight"), zip(*EDGES, strict=True), strict=True))
    for stem, columns in (("nodes", nodes), ("edges", edges)):
        table = arrow.table({name: list(cells) for name, cells in columns.items()})
        files.write_table(table, folder / f"{stem}.parquet")
    return folder


def npz(folder: Path) -> Path:
    for stem, names, rows in (
        ("nodes", ("id", "age", "visits", "kind"), NODES),
        ("edges", ("source", "target", "weight"), EDGES),
    ):
        arrays: dict[str, Any] = {
            name: np.array([row[place] for row in rows]) for place, name in enumerate(names)
        }
        np.savez(folder / f"{stem}.npz", **arrays)
    return folder


SNAP = "# Undirected graph\n# FromNodeId\tToNodeId\n\n"
FORMATS: dict[str, Callable[[Path], Path]] = {
    "semicolons and decimal commas": lambda path: write_tables(path, ";", ","),
    "semicolons": lambda path: write_tables(path, ";"),
    "tabs": lambda path: write_tables(path, "\t"),
    "tabs and decimal commas": lambda path: write_tables(path, "\t", ","),
    "bars": lambda path: write_tables(path, "|"),
    "tsv": lambda path: write_tables(path, "\t", ending=".tsv"),
    "csv.gz": lambda path: write_tables(path, ending=".csv.gz"),
    "tsv.gz": lambda path: write_tables(path, "\t", ",", ending=".tsv.gz"),
    "parquet": parquet,
    "npz": npz,
    "GraphML": written(nx.write_graphml, "a.graphml"),
    "GraphML, packed": packed(written(nx.write_graphml, "a.graphml")),
    "GEXF": written(nx.write_gexf, "a.gexf"),
    "GEXF, packed": packed(written(nx.write_gexf, "a.gexf")),
    "GML": written(nx.write_gml, "a.gml"),
    "GML, packed": packed(written(nx.write_gml, "a.gml")),
    "SNAP": list_of_edges("snap.txt", "\t", SNAP),
    "SNAP, packed": packed(list_of_edges("snap.txt", " ", SNAP)),
    "edges": list_of_edges("a.edges", "  ", "% from to\n"),
    "edgelist": list_of_edges("a.edgelist", " "),
    "MatrixMarket": matrix,
    "MatrixMarket, packed": packed(matrix),
    "MatrixMarket, symmetric": symmetric_matrix,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_one_graph_gives_the_same_graph(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = load(write_tables(tmp_path / "a"), columns=COLUMNS)
    path = FORMATS[name](tmp_path / "b")
    is_list = path.name.split(".")[1:2] in (["txt"], ["edges"], ["edgelist"])
    graph = load(path, columns=COLUMNS + ",weight=column_3" * is_list)
    assert fingerprint(graph) == fingerprint(expected)
    assert graph.class_names == expected.class_names
    assert graph.feature_names == expected.feature_names == ("age", "visits")
    assert graph.name == ("b" if path.is_dir() else path.name.split(".")[0])
    assert file_hash(path) is not None


def test_a_folder_may_hold_a_list_of_edges(tmp_path: Path) -> None:
    expected = load(write_tables(tmp_path), columns=COLUMNS)
    (tmp_path / "edges.csv").unlink()
    (tmp_path / "edges.txt").write_text(SNAP + "".join(f"{a} {b} {w}\n" for a, b, w in EDGES))
    graph = load(tmp_path, columns=f"{COLUMNS},weight=column_3")
    assert fingerprint(graph) == fingerprint(expected)
    with_header = text(["source", "target", "weight"], EDGES, ",", ".")
    (tmp_path / "edges.txt").write_text(with_header)  # a table that is called so
    assert fingerprint(load(tmp_path, columns=COLUMNS)) == fingerprint(expected)


def test_the_nodes_beside_a_list_count_for_what_is_finished(tmp_path: Path) -> None:
    path = list_of_edges("snap.txt", "\t")(tmp_path)
    before = file_hash(path)
    (tmp_path / "nodes.csv").write_text("id,kind\n7,a\n9,b\n12,a\n30,a\n31,b\n")
    assert file_hash(path) != before


@pytest.mark.parametrize("name", ["SNAP", "MatrixMarket"])
def test_lists_of_edges_without_nodes_have_no_labels(name: str, tmp_path: Path) -> None:
    path = FORMATS[name](tmp_path)
    (tmp_path / "nodes.csv").unlink()
    with pytest.raises(DataError, match=r"got none: put nodes\.csv with columns id and label into"):
        load(path)
    graph = load(path, with_labels=False)  # as nodes to predict on
    assert (graph.num_nodes, graph.num_edges, graph.num_features) == (5, 5, 0)
    assert not graph.labeled.any()


def test_silos_tables_may_be_packed_or_have_other_separators(tmp_path: Path) -> None:
    parts = {
        "nodes": "id,label\n1,0\n2,1\n",
        "features": "id,a\n1,0.5\n2,1.5\n",
        "edges": "source,target\n1,2\n",
        "cross_edges": "own,silo,remote\n",
    }
    silos = []
    for name in ("plain", "packed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "silo.toml").write_text('name = "n"\nfeatures = 1\nclasses = 2\n')
        for stem, cells in parts.items():
            if name == "plain":
                (folder / f"{stem}.csv").write_text(cells)
            else:
                raw = cells.replace(",", ";").replace(".", ",").encode()
                (folder / f"{stem}.csv.gz").write_bytes(gzip.compress(raw))
        silos.append(read_silo(folder))
    assert fingerprint(silos[0].graph) == fingerprint(silos[1].graph)


RATINGS = [(1, 10, 5, 978300760), (1, 20, 3, 978300761), (2, 10, 1, 978300762)]


def test_ratings_of_movielens(tmp_path: Path) -> None:
    rows = [[str(cell) for cell in row] for row in RATINGS]
    (tmp_path / "a").mkdir()
    plain = tmp_path / "a" / "ratings.csv"
    plain.write_text(text(["user", "item", "rating", "time"], RATINGS, ",", "."))
    raw = "".join("::".join(row) + "\n" for row in rows).encode()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "ratings.dat").write_bytes(raw)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "u.dat.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "ratings.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    expected = fingerprint(ratings(plain))
    for path in ("a", "a/ratings.csv", "b", "b/ratings.dat", "c/u.dat.gz", "d"):
        assert fingerprint(load(tmp_path / path)) == expected, path
    (tmp_path / "movies.dat").write_text("1::Toy Story (1995)::Animation|Comedy::x::y\n")
    with pytest.raises(DataError, match=r"line 1: expected ratings user::item::rating::time, got"):
        load(tmp_path / "movies.dat")


# --- What is unclear or damaged is one line ------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "line"),
    [
        ("id;x;kind\n1;1,234;a\n2;2,500;b\n", r"line 2, column 'x': expected a number whose comma"),
        ("id;x;z;kind\n1;0,5;1.5;a\n2;1;2;b\n", r"line 2, column 'z': expected a decimal comma"),
        ("id;x;kind\n1;1.234,5;a\n2;2;b\n", r"line 2, column 'x': expected a finite number"),
        ("id\tx\tkind\n1\t2024-02-11\ta\n2\t3\tb\n", r"write dates and times as a number"),
    ],
)
def test_numbers_that_may_mean_two_things_are_refused(
    nodes: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "nodes.csv").write_text(nodes)
    (tmp_path / "edges.csv").write_text("source,target\n1,2\n")
    with pytest.raises(DataError, match=line) as caught:
        load(tmp_path, columns=COLUMNS)
    assert "\n" not in str(caught.value)


def test_keys_with_commas_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("id;x;kind\n1,5;0,5;a\n2,5;1,5;b\n")
    (tmp_path / "edges.csv").write_text("source;target\n1,5;2,5\n")
    graph = load(tmp_path, columns=COLUMNS)
    assert graph.node_id.tolist() == ["1,5", "2,5"]
    assert graph.x.tolist() == [[0.5], [1.5]]  # type: ignore[union-attr]


def test_names_with_other_separators_are_read_by_the_one_that_fits(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("id,a|b,kind\n1,2,x\n2,3,y\n")
    (tmp_path / "edges.csv").write_text("source;target, of both\n1;2\n")
    graph = load(tmp_path, columns=COLUMNS)
    assert graph.feature_names == ("a|b",)
    assert graph.num_edges == 1


GRAPHML = '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">'


def laughs(kind: str) -> bytes:
    entities = "".join(f'<!ENTITY l{level} "{f"&l{level - 1};" * 10}">' for level in range(1, 12))
    return (
        f'<?xml version="1.0"?>\n<!DOCTYPE {kind} [<!ENTITY l0 "lol">{entities}]>'
        f"<{kind}>&l11;</{kind}>"
    ).encode()


DAMAGED: list[tuple[str, bytes, str]] = [
    ("a.graphml", laughs("graphml"), r"line 2: expected a GraphML file without a document type"),
    ("a.gexf", laughs("gexf"), r"line 2: expected a GEXF file without a document type"),
    (
        "a.graphml",
        b'<!DOCTYPE g [<!ENTITY x SYSTEM "file:///etc/passwd">]><graphml>&x;</graphml>',
        r"line 1: expected a GraphML file without a document type",
    ),
    ("a.graphml.gz", gzip.compress(laughs("graphml"), mtime=0), r"without a document type"),
    ("a.graphml", b"", r"a\.graphml, line 1: expected a GraphML file, got no element found"),
    ("a.graphml", GRAPHML.encode() + b"\n<graph", r"a\.graphml.*line 2"),
    ("a.graphml", b"<other/>", r"expected a GraphML file"),
    ("a.graphml", f"{GRAPHML}<graph/></graphml>".encode(), r"expected at least one node"),
    ("a.gexf", b"PK\x03\x04", r"a\.gexf, line 1: expected a GEXF file, got not well-formed"),
    ("a.gexf", b"<gexf/>", r"expected a GEXF file"),
    ("a.gml", b"graph [\n node [ id 1 label 2 ]\n oops\n]", r"expected a GML file.*\(4, 1\)"),
    ("a.gml", b"graph [" * 5000, r"expected a GML file"),
    ("a.gml", b"\xff\xfe", r"expected a GML file.*ASCII"),
    ("a.gml.gz", gzip.compress(b"graph [ ]", mtime=0)[:-5], r"packed by gzip, got a damaged file"),
    ("a.txt", b"", r"a\.txt: expected a list of edges, got none"),
    ("a.txt", b"# nothing\n", r"a\.txt: expected a list of edges, got none"),
    ("a.txt", b"1 2\n3\n", r"a\.txt, line 2: expected two node ids"),
    ("a.txt", b"1 2\n3 4 5\n", r"a\.txt, line 2: expected 2 cells, as on the first line, got 3"),
    ("a.edgelist", b"1 2 {'weight': 3}\n", r"a\.edgelist, line 1: expected two node ids"),
    ("a.edges", b"1 2\n\xff 3\n", r"a\.edges, line 2: expected text in UTF-8"),
    ("a.mtx", b"", r"a\.mtx, line 1: expected a square sparse matrix.* Missing banner"),
    (
        "a.mtx",
        b"%%MatrixMarket matrix coordinate pattern general\n3 3 2\n2 1\n3 x\n",
        r"a\.mtx, line 4: expected a square sparse matrix.*Invalid integer",
    ),
    (
        "a.mtx",
        b"%%MatrixMarket matrix coordinate pattern general\n3 3 99999999999\n2 1\n",
        r"bytes that cannot hold 99,999,999,999 entries",
    ),
    (
        "a.mtx",
        b"%%MatrixMarket matrix coordinate pattern general\n9999999999999 9999999999999 1\n2 1\n",
        r"got 9,999,999,999,999 rows, for which there is too little free memory",
    ),
    (
        "a.mtx",
        b"%%MatrixMarket matrix coordinate pattern general\n2 3 1\n2 1\n",
        r"got 2 rows and 3 columns",
    ),
    ("a.mtx", b"%%MatrixMarket matrix array real general\n1 1\n1\n", r"got a dense one"),
    (
        "a.mtx",
        b"%%MatrixMarket matrix coordinate complex general\n2 2 1\n2 1 1 1\n",
        r"got complex values",
    ),
    ("ratings.dat", b"", r"expected ratings user::item::rating::time, got none"),
    ("ratings.dat", b"1::2::5::9\n1::2\n", r"ratings\.dat, line 2: expected ratings user::item"),
    ("ratings.csv.gz", b"\x1f\x8b\x08garbage", r"packed by gzip, got a damaged file"),
    ("a.graphml.bz2", bz2.compress(b"a"), r"expected"),
]


@pytest.mark.parametrize(("name", "raw", "line"), DAMAGED)
def test_damaged_and_hostile_files_are_one_line(
    name: str, raw: bytes, line: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=line) as caught:
        load(tmp_path / name, with_labels=False)
    assert "\n" not in str(caught.value)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("name", ["a.graphml.gz", "a.gml.gz", "a.txt.gz", "a.mtx.gz", "u.dat.gz"])
def test_what_is_packed_takes_no_more_memory_than_there_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b" " * (300 << 20), 1))  # 300 MB of 1 MB
    monkeypatch.setattr(contents, "memory_left", lambda: 100 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"of at most [\d,]+ bytes, .* got more once unpacked: use"):
        load(tmp_path / name, with_labels=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_large_files_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tables(tmp_path)
    monkeypatch.setattr(contents, "memory_left", lambda: 500)
    with pytest.raises(DataError, match=r"nodes\.csv: expected a CSV file of at most 50 bytes, as"):
        load(tmp_path, columns=COLUMNS)


def test_parquet_files_that_say_too_much_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet(tmp_path)
    monkeypatch.setattr(tables, "memory_left", lambda: 500)
    with pytest.raises(DataError, match=r"got 5 rows of 4 columns, about [\d,]+ bytes: use"):
        load(tmp_path, columns=COLUMNS)


def test_a_matrix_has_the_nodes_of_the_table_in_their_order(tmp_path: Path) -> None:
    path = matrix(tmp_path)
    (tmp_path / "nodes.csv").write_text("id,kind\n2,a\n1,b\n3,a\n4,a\n5,a\n")
    with pytest.raises(DataError, match=r"in the order of the rows of edges\.mtx, got ids from 1"):
        load(path, columns=COLUMNS)
    (tmp_path / "nodes.csv").write_text("id,kind\n2,a\n1,b\n")
    with pytest.raises(DataError, match=r"as many rows as nodes\.csv has nodes, 2, got 5"):
        load(path, columns=COLUMNS)


# --- Attributes and columns ----------------------------------------------------------------------


def test_attributes_without_a_name_are_labels_or_features(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph: Any = nx.Graph([("a", "b"), ("b", "c")])
    for row, node in enumerate("abc"):
        graph.nodes[node].update(label="xyx"[row], size=row + 0.5, town=f"t{row}", split="train")
    nx.write_graphml(graph, tmp_path / "a.graphml")
    read = load(tmp_path / "a.graphml")
    assert read.feature_names == ("size",)
    assert read.class_names == ("x", "y")
    assert read.split is not None
    assert "a.graphml: columns are not used: town" in caplog.text
    for row, node in enumerate("abc"):  # a name that is drawn, and no class
        graph.nodes[node]["label"] = f"name {row}"
    nx.write_graphml(graph, tmp_path / "a.graphml")
    with pytest.raises(DataError, match=r"labels, got attributes label, size, .* --columns label="):
        load(tmp_path / "a.graphml")
    with raises_code(ConfigError, "unknown-name", what="column", got="source"):
        load(tmp_path / "a.graphml", columns="source=a")
    with raises_code(DataError, "missing-column", column="kin"):
        load(tmp_path / "a.graphml", columns="label=kin")


def test_features_may_be_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tables(tmp_path)
    for columns in ("label=kind,features=visits", {"label": "kind", "features": ["visits"]}):
        graph: Graph = load(tmp_path, columns=columns)
        assert graph.feature_names == ("visits",)
    assert "nodes.csv: columns are not used: age" in caplog.text
    tables: dict[str, Any] = {"nodes": tmp_path / "nodes.csv", "edges": tmp_path / "edges.csv"}
    assert from_csv(**tables, label="kind", features=["visits", "age"]).feature_names == (
        "visits",
        "age",
    )
    assert from_csv(**tables, label="kind", features=[]).num_features == 0
    for features in (["age", "age"], ["kind"], ["agee"]):
        with pytest.raises(DataError, match=r"expected (features that are distinct|a column)"):
            from_csv(**tables, label="kind", features=features)


def test_gml_without_labels_of_nodes_has_their_ids(tmp_path: Path) -> None:
    nodes = "".join(f"node [ id {i} kind {i % 2} ] " for i in (5, 7, 9))
    edges = "edge [ source 5 target 7 ] edge [ source 7 target 9 ]"
    (tmp_path / "a.gml").write_text(f"graph [ {nodes} {edges} ]")
    graph = load(tmp_path / "a.gml", columns=COLUMNS)
    assert graph.node_id.tolist() == [5, 7, 9]
    assert graph.num_edges == 2
