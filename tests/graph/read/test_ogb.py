"""Laws of raw folders of the Open Graph Benchmark: what was written is what is read."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mistakes import raises_code
from silograph.core.errors import DataError
from silograph.graph.datasets import load, locate
from silograph.graph.graph import Graph
from silograph.graph.read.ogb import CLASSES, FOLDERS

N, F = 7, 3
KIND = {"ogbn-arxiv": "time", "ogbn-products": "sales_ranking"}
TABLES = ["ogbn-arxiv", "ogbn-products"]
SPLIT = {"train": [0, 3, 5], "valid": [1], "test": [6, 2]}  # node 4 has no part
Change = Callable[[Path], None]


def arrays() -> dict[str, np.ndarray]:
    """A directed graph with a loop, a repeated edge and one in both directions."""
    rng = np.random.default_rng(0)
    return {
        "edges": np.array([[0, 1], [1, 0], [2, 2], [5, 3], [5, 3], [6, 4]]),
        "x": rng.normal(size=(N, F)).round(6),
        "y": np.array([3, 0, 1, 1, 2, 39, 0]),
        "year": rng.integers(2000, 2021, N),
    }


def table(path: Path, rows: Any) -> None:
    """Write a table as the benchmark does: no header, no index, gzipped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = np.asarray(rows)
    lines = [",".join(map(str, row)) for row in rows.reshape(len(rows), -1).tolist()]
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))


def write_split(folder: Path, name: str) -> None:
    for part, nodes in SPLIT.items():
        table(folder / "split" / KIND[name] / f"{part}.csv.gz", nodes)


def write(folder: Path, name: str = "ogbn-arxiv") -> None:
    raw, given = folder / "raw", arrays()
    table(raw / "edge.csv.gz", given["edges"])
    table(raw / "node-feat.csv.gz", given["x"])
    table(raw / "node-label.csv.gz", given["y"])
    table(raw / "node_year.csv.gz", given["year"])
    table(raw / "num-node-list.csv.gz", [N])
    table(raw / "num-edge-list.csv.gz", [len(given["edges"])])
    write_split(folder, name)


def check(graph: Graph, name: str, y: list[int]) -> None:
    assert graph.name.lower() == name
    pairs = {(0, 1), (3, 5), (4, 6)}
    assert set(map(tuple, graph.edge_index.T.tolist())) == pairs | {(b, a) for a, b in pairs}
    assert graph.num_edges == 3
    assert isinstance(graph.x, torch.Tensor)
    assert graph.x.dtype == torch.float32
    assert (graph.x.numpy() == arrays()["x"].astype(np.float32)).all()
    assert graph.y.tolist() == y
    assert graph.num_classes == CLASSES[name]  # whatever labels there are
    assert graph.node_id.tolist() == list(range(N))
    assert graph.split is not None
    masks = (graph.split.train, graph.split.val, graph.split.test)
    for mask, nodes in zip(masks, SPLIT.values(), strict=True):
        assert mask.nonzero().flatten().tolist() == sorted(nodes)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home" / "work").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home" / "work")
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_the_graph(tmp_path: Path, name: str) -> None:
    folder = tmp_path / FOLDERS[name]
    write(folder, name)
    for source in (folder, folder / "raw", str(folder)):
        check(load(source), name, arrays()["y"].tolist())
    for given in (name, name.upper()):
        assert locate(given, data_dir=tmp_path) == folder
        check(load(given, data_dir=tmp_path), name, arrays()["y"].tolist())


def test_a_folder_of_another_name_counts_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "mine")
    table(tmp_path / "mine" / "raw" / "node-label.csv.gz", [0, 1, 2, 0, 1, 2, 0])
    monkeypatch.chdir(tmp_path)
    graph = load("mine")
    assert (graph.name, graph.num_classes) == ("mine", 3)
    monkeypatch.chdir(tmp_path / "mine" / "raw")
    assert load(Path("../raw")).name == "mine"


def test_the_nearer_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    write(near / "ogbn_arxiv")
    far.mkdir()
    np.savez(far / "ogbn-arxiv.npz", x=np.eye(2), edge_index=np.array([[0], [1]]), y=[0, 1])
    monkeypatch.setenv("SILOGRAPH_DATA", str(far))
    assert load("ogbn-arxiv").num_nodes == 2
    assert load("ogbn-arxiv", data_dir=near).num_nodes == N


def test_the_public_split_trains(tmp_path: Path) -> None:
    import silograph as sg

    write(tmp_path / "ogbn_arxiv")
    graph = load(tmp_path / "ogbn_arxiv")
    result = sg.run(graph, split="public", partition="random", clients=2, rounds=1, hidden=4)
    judged = result.test.server
    assert judged is not None
    assert judged.accuracy is not None


def test_tables_of_ones_own_come_before_raw(tmp_path: Path) -> None:
    (tmp_path / "mine" / "raw").mkdir(parents=True)
    (tmp_path / "mine" / "nodes.csv").write_text("id,label,a\n1,x,1\n2,y,2\n")
    (tmp_path / "mine" / "edges.csv").write_text("source,target\n1,2\n")
    assert load(tmp_path / "mine").num_nodes == 2


# --- what cannot be read ------------------------------------------------------------------------


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    with raises_code(DataError, "missing-file", path="ogbn-arxiv.npz or ogbn_arxiv/raw"):
        load("ogbn-arxiv", data_dir=tmp_path)


def rows(file: str, value: Any) -> Change:
    return lambda folder: table(folder / file, value)


def text(file: str, value: bytes) -> Change:
    return replaced(file, gzip.compress(value))


def gone(file: str) -> Change:
    return lambda folder: (folder / file).unlink()


def cut(file: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_bytes(path.read_bytes()[:-6])

    return change


def replaced(file: str, raw: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / file).write_bytes(raw)

    return change


def two_splits(folder: Path) -> None:
    table(folder / "split" / "random" / "train.csv.gz", [0])


X, Y, EDGE = "raw/node-feat.csv.gz", "raw/node-label.csv.gz", "raw/edge.csv.gz"
TEST, TRAIN = "split/time/test.csv.gz", "split/time/train.csv.gz"
TABLE = "expected a gzipped table of numbers of the Open Graph Benchmark, got"
WRONG: list[tuple[Change, str]] = [
    (gone(X), rf"node-feat\.csv\.gz: {TABLE} FileNotFoundError"),
    (gone("raw/num-edge-list.csv.gz"), rf"num-edge-list\.csv\.gz: {TABLE} FileNotFoundError"),
    (gone("split/time/valid.csv.gz"), rf"valid\.csv\.gz: {TABLE} FileNotFoundError"),
    (gone(TRAIN), r"split: expected one folder with train\.csv\.gz, .*, got 0 of them"),
    (two_splits, r"split: expected one folder with train\.csv\.gz, .*, got 2 of them"),
    (cut(X), rf"node-feat\.csv\.gz: {TABLE} EOFError"),
    (replaced(Y, b"0\n1\n"), rf"label\.csv\.gz: {TABLE} BadGzipFile"),
    (text(Y, b""), rf"node-label\.csv\.gz: {TABLE} UserWarning"),
    (text(EDGE, b"0,1\n1,x\n"), rf"edge\.csv\.gz: {TABLE} ValueError.*'x'"),
    (text(EDGE, b"0,1\n\n1,2.5\n"), rf"edge\.csv\.gz: {TABLE} .*'2\.5'"),
    (text(EDGE, b"0,1\n1,2,3\n"), rf"edge\.csv\.gz: {TABLE} ValueError"),
    (text(EDGE, b"0,1\n1,\xff\n"), rf"edge\.csv\.gz: {TABLE} "),
    (text(EDGE, b"0,1\n1," + b"9" * 30), rf"edge\.csv\.gz: {TABLE} "),
    (text(X, b"1,2\n1,\n"), rf"node-feat\.csv\.gz: {TABLE} ValueError"),
    (rows(EDGE, np.zeros((6, 3), int)), r"ogbn_arxiv: expected edge_index of shape \(2, E\)"),
    (rows(EDGE, [[0, 1]] * 5 + [[1, N]]), r"ogbn_arxiv: expected edges between nodes 0\.\.6, got"),
    (rows(EDGE, [[0, 1]] * 5), r"num-edge-list\.csv\.gz: expected 5, .* got 6"),
    (rows(X, np.ones((8, 2))), r"num-node-list\.csv\.gz: expected 8, .* got 7"),
    (rows(X, [[1e60, 2]] * N), r"ogbn_arxiv: expected finite features, got"),
    (text(X, b"1,2\n" * 6 + b"1,nan\n"), r"ogbn_arxiv: expected finite features, got 1 NaN"),
    (rows(Y, [0] * 6), r"ogbn_arxiv: expected y of shape \(7,\)"),
    (rows(Y, [0] * 6 + [40]), r"ogbn_arxiv: expected labels 0\.\.39, .*, got 40 at node 6"),
    (rows(Y, [0.5] * N), r"ogbn_arxiv: expected whole class numbers in y, got 0\.5"),
    (rows("raw/num-node-list.csv.gz", [3, 4]), r"num-node-list\.csv\.gz: expected 7, .* got 3 4"),
    (rows(TEST, [2, N]), r"test\.csv\.gz: expected one node of 0\.\.6 on each line, got .* to 7"),
    (rows(TEST, [2, 3]), r"ogbn_arxiv: expected disjoint masks, got node 3 in two of"),
    (rows(TEST, [[2, 6]]), r"test\.csv\.gz: expected one node of .*, got 2 columns"),
]


@pytest.mark.parametrize(("change", "match"), WRONG)
def test_folders_that_cannot_be_used(tmp_path: Path, change: Change, match: str) -> None:
    folder = tmp_path / "ogbn_arxiv"
    write(folder)
    change(folder)
    with pytest.raises(DataError, match=match) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_damaged_tables_are_a_graph_or_an_error(tmp_path: Path) -> None:
    write(tmp_path / "ogbn_arxiv")
    paths = sorted((tmp_path / "ogbn_arxiv").rglob("*.gz"))
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(120):
        path = paths[rng.integers(len(paths))]
        whole = path.read_bytes()
        raw = bytearray(gzip.decompress(whole))
        raw[rng.integers(len(raw))] = rng.choice(list(b'\x00",\n\r 0-9eEn.\xc3'))
        damaged = bytearray(gzip.compress(bytes(raw)))
        if rng.random() < 0.3:
            damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            assert load(tmp_path / "ogbn_arxiv").num_nodes == N
        except DataError as error:
            errors.append(str(error))
        path.write_bytes(whole)
    assert len(errors) > 40
    assert not any("\n" in error for error in errors)
