"""Laws of CSV tables: they are the graph of their columns, and an error names line and column."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import silograph as sg
from mistakes import raises_code
from silograph.core.errors import ConfigError, DataError, SilographError
from silograph.graph.datasets import load
from silograph.graph.graph import Graph
from silograph.graph.read.arrays import from_arrays
from silograph.graph.read.csv import from_csv

NODES = "id,label,a,b\n10,0,1,2\n20,1,0.5,0\n30,,3,-1e-3\n"
EDGES = "source,target\n10,20\n20,30\n"


def read(tmp_path: Path, nodes: str = NODES, edges: str = EDGES, **options: object) -> Graph:
    (tmp_path / "nodes.csv").write_text(nodes, encoding="utf-8")
    (tmp_path / "edges.csv").write_text(edges, encoding="utf-8")
    files: dict[str, Any] = {"nodes": tmp_path / "nodes.csv", "edges": str(tmp_path / "edges.csv")}
    return from_csv(**files, **options)  # type: ignore[arg-type]


def contents(graph: Graph) -> tuple[object, ...]:
    split = graph.split
    return (
        graph.edge_index.tolist(),
        graph.x.tolist() if not hasattr(graph.x, "indptr") else None,
        graph.y.tolist(),
        graph.num_classes,
        graph.node_id.tolist(),
        graph.silo_names,
        None if graph.silo is None else graph.silo.tolist(),
        None if split is None else [p.tolist() for p in (split.train, split.val, split.test)],
        graph.class_names,
        graph.name,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("words", [False, True])
def test_written_tables_are_the_graph_of_the_arrays(tmp_path: Path, seed: int, words: bool) -> None:
    rng = np.random.default_rng(seed)
    n = 15
    x = rng.normal(size=(n, 3)).astype(np.float32)
    y = rng.integers(-1, 3, n)
    y[:3] = range(3)
    part = rng.integers(0, 4, n)
    home = rng.choice(["north", "south, by the sea"], n)
    edges = rng.integers(0, n, (2, 30))
    keys = [f"é{i}" if words else str(i * 7) for i in rng.permutation(n)]
    labels = [("p", "q", "r", "")[c] if words else ("0", "1", "2", "")[c] for c in y]
    with (tmp_path / "n.csv").open("w", newline="", encoding="utf-8-sig") as file:
        rows = csv.writer(file)
        rows.writerow(["f0", "silo", "id", "split", "f1", "label", "f2"])
        for i in range(n):
            word = ("train", "val", "test", "")[part[i]]
            a, b, c = x[i].tolist()
            rows.writerow([a, home[i], keys[i], word, b, labels[i], c])
    with (tmp_path / "e.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("from", "to"), *((keys[a], keys[b]) for a, b in edges.T)])
    graph = from_csv(nodes=tmp_path / "n.csv", edges=tmp_path / "e.csv", name="mine")
    wanted = from_arrays(
        edge_index=edges,
        x=x,
        y=labels if words else y,
        node_id=keys if words else [int(key) for key in keys],
        split=[part == which for which in range(3)],
        silo=home,
        name="mine",
    )
    assert contents(graph) == contents(wanted)


def test_the_name_is_that_of_the_nodes_file(tmp_path: Path) -> None:
    assert read(tmp_path).name == "nodes"
    assert read(tmp_path, name="mine").name == "mine"


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    nodes = "key,kind,a,home\nx,p,1,N\ny,q,2,S\n"
    edges = "weight,to,from\n1,x,y\n"
    graph = read(
        tmp_path, nodes, edges, id="key", label="kind", silo="home", source="from", target="to"
    )
    assert graph.node_id.tolist() == ["x", "y"]
    assert (graph.class_names, graph.silo_names) == (("p", "q"), ("N", "S"))
    assert graph.edge_index.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("ids", [["007", "8"], ["1.0", "2"], ["9" * 30, "2"], ["+1", "2"]])
def test_ids_that_an_integer_would_not_write_alike_stay_strings(
    tmp_path: Path, ids: list[str]
) -> None:
    a, b = ids
    graph = read(tmp_path, f"id,label,a\n{a},0,1\n{b},1,2\n", f"source,target\n{a},{b}\n")
    assert graph.node_id.tolist() == ids


def test_labels_may_be_whole_floats_as_spreadsheets_write_them(tmp_path: Path) -> None:
    graph = read(tmp_path, "id,label,a\n1,1.0,1\n2,nan,1\n3,0.0,1\n4,-1,1\n", "source,target\n")
    assert graph.y.tolist() == [1, -1, 0, -1]
    assert graph.num_edges == 0


def test_several_label_columns_are_a_multilabel_task(tmp_path: Path) -> None:
    nodes = "id,red,blue,a\n1,0,1,5\n2,,1,6\n3,,,7\n"
    graph = read(tmp_path, nodes, "source,target\n1,2\n", label=["red", "blue"])
    assert graph.y.tolist() == [[0, 1], [-1, 1], [-1, -1]]
    assert (graph.task, graph.class_names) == ("multilabel", ("red", "blue"))
    assert graph.num_features == 1
    assert read(tmp_path, label=["label"]).y.tolist() == [0, 1, -1]


def test_an_empty_split_column_is_no_split(tmp_path: Path) -> None:
    nodes = "id,label,a,split\n10,0,1,\n20,1,2,\n30,1,2,\n"
    assert read(tmp_path, nodes).split is None


def test_nodes_without_feature_columns_have_no_features(tmp_path: Path) -> None:
    graph = read(tmp_path, "id,label\n10,1\n20,2\n30,3\n")
    assert (graph.num_features, graph.class_names) == (0, ("1", "2", "3"))


RENAMED = ("key,red,blue,a,home\n1,0,1,5,n\n2,1,1,6,s\n", "from,to,since\n1,2,3\n")
NAMED = "id=key,label=red+blue,silo=home,source=from,target=to"


def test_columns_are_named_for_a_folder(tmp_path: Path) -> None:
    for file, text in zip(("nodes.csv", "edges.csv"), RENAMED, strict=True):
        (tmp_path / file).write_text(text)
    graph = load(tmp_path, columns=NAMED)
    assert (graph.class_names, graph.silo_names) == (("red", "blue"), ("n", "s"))
    assert (graph.num_features, graph.num_edges) == (1, 1)
    result = sg.run(tmp_path, columns=NAMED, partition="silo", split="1/0/0", rounds=1, hidden=2)
    assert result.cut is not None
    assert result.cut.graph.num_classes == 2


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ("id", "columns: expected NAME=COLUMN,..., each once, got 'id'"),
        ("id=", "columns: expected NAME=COLUMN"),
        ("id=a,id=b", "each once, got 'id=a,id=b'"),
        ("idd=key", "columns: unknown column"),
        ("id=nope", "expected a column 'nope', got columns key, red"),
    ],
)
def test_names_of_columns_that_cannot_be_used(tmp_path: Path, columns: str, match: str) -> None:
    for file, text in zip(("nodes.csv", "edges.csv"), RENAMED, strict=True):
        (tmp_path / file).write_text(text)
    with pytest.raises(SilographError, match=match) as caught:
        load(tmp_path, columns=columns)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="give its folder, "):
        load(tmp_path / "nodes.csv", columns="id=key")
    with raises_code(ConfigError, "unknown-name", what="dataset", got="nowhere"):
        load("nowhere", columns="id=key", rating_scale=(1, 9))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"expected a folder with nodes\.csv and edges\.csv, w"):
        load(tmp_path / "empty", columns="id=key", rating_scale=(1, 9))
    for name in ("digits", "generated:reddit"):
        with raises_code(ConfigError, "unread-option", option="columns"):
            load(name, columns="id=key")
    with raises_code(ConfigError, "unread-option", option="columns", part="in memory"):
        sg.run(load("digits"), columns="id=key")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"label": "lable"}, r"nodes\.csv, line 1: .* 'lable', got .*: did you mean 'label'\?$"),
        ({"label": ["kind", "lable"]}, r"'lable', got columns id, label, .*: did you mean 'label'"),
        ({"id": "idd"}, r"column 'idd', .*: did you mean 'id'\?$"),
        ({"silo": "knd"}, r"column 'knd', .*: did you mean 'kind'\?$"),
        ({"source": "sorce"}, r"edges\.csv, line 1: .* 'sorce', .*: did you mean 'source'\?$"),
        ({"target": "end"}, r"column 'end', .*: rename one, or name yours in the call"),
        ({"weight": "wieght"}, r"edges\.csv, line 1: .* 'wieght', .*: did you mean 'weight'\?$"),
    ],
)
@pytest.mark.parametrize("edges", [EDGES, "source,target,weight\n10,20,1\n"])
def test_a_misspelled_column_is_named_before_features_are_read(
    tmp_path: Path, options: dict[str, object], match: str, edges: str
) -> None:
    if "weight" in options and edges == EDGES:
        match = "column 'wieght', got columns source, target: "
    with pytest.raises(DataError, match=match):
        read(tmp_path, "id,label,kind\n10,cat,a\n20,dog,b\n30,cat,b\n", edges, **options)


def test_further_columns_of_edges_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(tmp_path, edges="source,target,weight,since\n10,20,0.5,7\n20,30,2,8\n")
    assert caplog.messages == [f"{tmp_path / 'edges.csv'}: values of edges (since) are not used"]


WRONG = [
    ("id,label,a\n1,0,x\n", EDGES, r"line 2, column 'a': expected a finite .* got 'x': columns"),
    (
        "id,label,a\n1,0,1\n\n2,0,\n",
        EDGES,
        r"line 4, column 'a': expected a finite number \(float32\), got ''",
    ),
    (
        "id,label,a\n1,0,2024-02-11\n2,0,7\n3,0,NA\n4,0,2024-02-11T08:30:00Z\n",
        EDGES,
        r"got '2024-02-11': write dates and times as a number, .*, or use silograph prepare$",
    ),
    (
        "id,label,a\n1,0,8:30\n2,0,11.2.2024\n3,0,02/11/24 08:30:00\n",
        EDGES,
        r"got '8:30': write dates and times as a number, .*, or use silograph prepare$",
    ),
    ("id,label,a\n1,0,2024-02-11\n2,0,later\n", EDGES, r"got '2024-02-11': columns without"),
    ("id,label,a\n1,0,inf\n2,0,2024-02-11\n", EDGES, r"got 'inf': columns without"),
    ("id,label,a\n1,0,192.168.1.1\n", EDGES, r"got '192.168.1.1': columns without"),
    (
        "id,label,a\n1,0,np.float64(1700000040.0099)\n2,0,np.int64(7)\n",
        EDGES,
        r"got 'np\.float64\(.*\)': written by repr of NumPy 2: save numbers, not their repr$",
    ),
    (
        "id,value,a\n1,np.float64(1.5),1\n",
        EDGES,
        r"column 'value': expected a number or nothing, got .*: written by repr of NumPy 2",
    ),
    (
        "id,label,a\n1,0,nan\n",
        EDGES,
        r"line 2, column 'a': expected a finite number \(float32\), got 'nan'",
    ),
    ("id,label,a\n1,0,1e300\n", EDGES, r"line 2, column 'a': expected a finite .* got '1e300'"),
    ("id,label,a\n1,1.5,1\n", EDGES, r"line 2, column 'label': expected a class .* got '1.5'"),
    ("id,label,a\n1,-2,1\n", EDGES, r"line 2, column 'label': expected a class number from 0"),
    ("id,label,a\n1,0,1\n1,0,1\n", EDGES, r"line 3, column 'id': .* not yet on line 2, got '1'"),
    ("id,label,a\n,0,1\n", EDGES, r"line 2, column 'id': expected a node id, got ''"),
    ("id,label,a\n", EDGES, r"nodes.csv: expected at least one node below the header, got none"),
    ("", EDGES, r"nodes.csv: expected a header line, got an empty file"),
    ("id,label,a,a\n", EDGES, r"line 1: expected distinct columns, got id, label, a, a"),
    ("id,label,a\n1,0\n", EDGES, r"line 2: expected 3 cells, as in the header, got 2"),
    ("key,label,a\n1,0,1\n", EDGES, r"line 1: expected a column 'id', got columns key, label, a"),
    ("id,kind,a\n1,0,1\n", "a,b\n", r"line 1: expected a column 'label', got columns id, kind"),
    ("id,label,a\n1,,1\n", "a,b\n", r"nodes.csv: expected at least one known label in y"),
    ("id,label,a,silo\n1,0,1,\n", "a,b\n", r"line 2, column 'silo': expected a name, got ''"),
    (
        "id,label,a,split\n1,0,1,dev\n",
        "a,b\n",
        r"line 2, column 'split': expected train or val or test or nothing, got 'dev'",
    ),
    (NODES, "source,target\n10,20\n99,10\n", r"edges.csv, line 3, column 'source': .* got '99'"),
    (NODES, "a,b\n10,99\n", r"edges.csv, line 2, column 'b': expected an id of nodes.csv, .*'99'"),
    (
        NODES,
        "source,target\n10,99\n98,99\n97,10\n10,20\n",
        r"line 3, column 'source': expected an id of nodes.csv, got '98': drop the 3 rows with "
        r"such an end, or list them in cross_edges of a silo \(docs/reference/silo_folder.md\)$",
    ),
    (NODES, "a,b\n10,99\n", r"column 'b': .* got '99': drop the 1 row with such an end, or list"),
    (NODES, "10,20\n20,30\n", r"line 1: expected a header, got an edge between nodes '10'"),
    (NODES, "a,b,c\n10,20,30\n", r"edges.csv, line 1: expected a column 'source'"),
    (NODES, 'source,target\n10,"20\n', r"edges.csv, line 2: expected comma separated text, got"),
]


@pytest.mark.parametrize(("nodes", "edges", "match"), WRONG)
def test_tables_that_cannot_be_used(tmp_path: Path, nodes: str, edges: str, match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read(tmp_path, nodes, edges)
    assert "\n" not in str(caught.value)


def test_label_bits_name_line_and_column(tmp_path: Path) -> None:
    nodes = "id,red,blue,a\n1,0,1,5\n2,0,2,5\n"
    with raises_code(DataError, "bad-cell", row=3, column="blue", got="2"):
        read(tmp_path, nodes, "source,target\n", label=["red", "blue"])


def test_files_that_are_absent_or_no_text(tmp_path: Path) -> None:
    file = tmp_path / "nodes.csv"
    with raises_code(DataError, "missing-file"):
        from_csv(nodes=file, edges=file)
    with pytest.raises(DataError, match=r"expected a CSV file, got Is a directory"):
        from_csv(nodes=tmp_path, edges=file)
    file.write_bytes(b"id,label,a\n1,0,1\n2,\xff,1\n")
    with pytest.raises(
        DataError, match=r"nodes\.csv, line 3: expected text in UTF-8, got byte 0xff"
    ):
        from_csv(nodes=file, edges=file)


def test_damaged_tables_are_a_graph_or_an_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    errors = []
    for trial in range(300):
        texts = [bytearray(NODES.encode()), bytearray(EDGES.encode())]
        text = texts[trial % 2]
        for place in rng.integers(0, len(text), rng.integers(1, 4)):
            text[place] = rng.choice(list(b'\x00",\n\r 0-9eEn\xc3\xa9'))
        for name, raw in zip(("nodes.csv", "edges.csv"), texts, strict=True):
            (tmp_path / name).write_bytes(raw)
        try:
            from_csv(nodes=tmp_path / "nodes.csv", edges=tmp_path / "edges.csv")
        except DataError as error:
            errors.append(str(error))
    assert len(errors) > 100
    assert not any("\n" in error for error in errors)


def test_a_word_among_class_names_is_never_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "nodes.csv").write_text("id,label,a\n1,EU,1\n2,NA,2\n3,,3\n4,AS,4\n")
    (tmp_path / "edges.csv").write_text("source,target\n1,2\n")
    files: dict[str, Any] = {"nodes": tmp_path / "nodes.csv", "edges": tmp_path / "edges.csv"}
    usual = from_csv(**files)
    assert (usual.y.tolist(), usual.class_names) == ([1, -1, -1, 0], ("AS", "EU"))
    assert "labels: 'NA' counts as missing (1 node), as in pandas: rename it" in caplog.text
    caplog.clear()
    named = from_csv(**files, class_names=["NA", "EU", "AS"])
    assert (named.y.tolist(), named.class_names) == ([1, 0, -1, 2], ("NA", "EU", "AS"))
    assert not caplog.text
    with pytest.raises(DataError, match="expected labels among the words NA, EU, got 'AS' at node"):
        from_csv(**files, class_names=["NA", "EU"])
