"""Laws of raw folders of the Open Graph Benchmark: what was written is what is read."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from silograph.core.errors import DataError
from silograph.graph.datasets import load, locate
from silograph.graph.graph import Graph
from silograph.graph.read.ogb import CLASSES, FOLDERS

N, F = 7, 3
KIND = {"ogbn-arxiv": "time", "ogbn-products": "sales_ranking", "ogbn-papers100m": "time"}
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


def write_archives(folder: Path, **changes: Any) -> None:
    """Write the layout of papers100M; a label of NaN is not known."""
    given = arrays()
    y = given["y"].astype(np.float64)[:, None]
    y[4] = np.nan
    parts: dict[str, Any] = {
        "edge_index": given["edges"].T,
        "node_feat": given["x"].astype(np.float32),
        "node_year": given["year"][:, None],
        "num_nodes_list": np.array([N]),
        "num_edges_list": np.array([len(given["edges"])]),
        "node_label": y,
    }
    parts = {key: part for key, part in (parts | changes).items() if part is not None}
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    labels = {key: parts.pop(key) for key in ("node_label",) if key in parts}
    np.savez(folder / "raw" / "data.npz", **parts)
    np.savez(folder / "raw" / "node-label.npz", **labels)
    write_split(folder, "ogbn-papers100m")


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


def test_archives_are_the_graph(tmp_path: Path) -> None:
    folder = tmp_path / FOLDERS["ogbn-papers100m"]
    write_archives(folder)
    y = arrays()["y"].tolist()
    y[4] = -1
    for source in (folder, folder / "raw"):
        check(load(source), "ogbn-papers100m", y)
    check(load("ogbn-papers100M", data_dir=tmp_path), "ogbn-papers100m", y)


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
    with pytest.raises(DataError, match=r"ogbn-arxiv\.npz or ogbn_arxiv/raw in one of .*, got no"):
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
WRONG: list[tuple[Change, str]] = [
    (gone(X), r"node-feat\.csv\.gz: expected a table of the Open Graph Benchmark, got no such"),
    (gone("raw/num-edge-list.csv.gz"), r"num-edge-list\.csv\.gz: expected a table of the Open"),
    (gone("split/time/valid.csv.gz"), r"valid\.csv\.gz: expected a table .*, got no such file"),
    (gone(TRAIN), r"split: expected one folder with train\.csv\.gz, .*, got 0 of them"),
    (two_splits, r"split: expected one folder with train\.csv\.gz, .*, got 2 of them"),
    (cut(X), r"node-feat\.csv\.gz: expected a whole gzip file, got one cut short or damaged"),
    (
        replaced(Y, b"0\n1\n"),
        r"label\.csv\.gz: expected a whole gzip file, .*Not a gzipped",
    ),
    (text(Y, b""), r"node-label\.csv\.gz: expected lines of numbers, got none"),
    (text(EDGE, b"0,1\n1,x\n"), r"edge\.csv\.gz, line 2: expected numbers, 2 on a line, got '1,x'"),
    (text(EDGE, b"0,1\n\n1,2.5\n"), r"edge\.csv\.gz, line 3: .*, 2 on a line, got '1,2\.5'"),
    (text(EDGE, b"0,1\n1,2,3\n"), r"edge\.csv\.gz, line 2: .*, 2 on a line, got '1,2,3'"),
    (text(EDGE, b"0,1\n1,\xff\n"), r"edge\.csv\.gz, line 2: expected numbers, 2 on a line"),
    (text(EDGE, b"0,1\n1," + b"9" * 30), r"edge\.csv\.gz, line 2: expected numbers, 2 on a line"),
    (text(X, b"1,2\n1,\n"), r"node-feat\.csv\.gz, line 2: expected numbers, 2 on a line, got '1,'"),
    (rows(EDGE, np.zeros((6, 3), int)), r"edge\.csv\.gz, line 1: expected columns: 2, got 3"),
    (rows(EDGE, [[0, 1]] * 5 + [[1, N]]), r"edge\.csv\.gz, line 6: expected nodes 0\.\.6, got 1 a"),
    (rows(EDGE, [[0, 1]] * 5 + [[-1, 2]]), r"edge\.csv\.gz, line 6: .* 0\.\.6, got -1 and 2"),
    (rows(EDGE, [[0, 1]] * 5), r"edge\.csv\.gz: expected 6 lines, as num-edge-list\.csv\.gz .* 5"),
    (rows(X, np.ones((8, 2))), r"node-feat\.csv\.gz: expected 7 lines, as num-node-list.*, got 8"),
    (rows(X, [[1e60, 2]] * N), r"node-feat\.csv\.gz, line 1: expected finite numbers, got inf"),
    (text(X, b"1,2\n" * 6 + b"1,nan\n"), r"node-feat\.csv\.gz, line 7: .* finite .*, got nan"),
    (rows(Y, [0] * 6), r"node-label\.csv\.gz: expected 7 lines, as num-node-list\.csv\.gz says"),
    (
        rows(Y, [0] * 6 + [40]),
        r"label\.csv\.gz: expected labels 0\.\.39, .*, got 40 at node 6",
    ),
    (
        rows(Y, [0] * 6 + [-2]),
        r"label\.csv\.gz: expected labels 0\.\.39, .*, got -2 at node 6",
    ),
    (rows(Y, [0.5] * N), r"node-label\.csv\.gz: expected whole class numbers in y, got 0\.5"),
    (rows("raw/num-node-list.csv.gz", [3, 4]), r"num-node-list\.csv\.gz, line 2: .* 2 graphs"),
    (
        rows("raw/num-node-list.csv.gz", [[7, 7]]),
        r"node-list\.csv\.gz, line 1: expected columns: 1",
    ),
    (rows(TEST, [2, N]), r"test\.csv\.gz, line 2: expected nodes 0\.\.6, got 7"),
    (rows(TEST, [2, 3]), r"test\.csv\.gz, line 2: expected a node that is in no part yet, got 3"),
    (rows(TRAIN, [0, 3, 0]), r"train\.csv\.gz, line 3: expected a node that is in no part yet"),
    (rows(TEST, [[2, 6]]), r"test\.csv\.gz, line 1: expected columns: 1, got 2"),
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


NPZ_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"node_feat": None}, r"data\.npz: expected an array 'node_feat', got KeyError"),
    ({"node_label": np.array([[{}]])}, r"node-label\.npz: expected an array .* got ValueError"),
    ({"edge_index": np.ones((2, 3))}, r"'edge_index' to hold whole numbers on 2 axes, got float64"),
    ({"num_nodes_list": np.array(7)}, r"'num_nodes_list' to hold whole numbers on 1 axes, got"),
    ({"edge_index": np.array([[0, N]] * 3).T}, r"data\.npz: expected 6 edges, .* data\.npz says"),
    ({"edge_index": np.array([[0, N]] * 6).T}, r"data\.npz, edge 0: .* 0\.\.6, got 0 and 7"),
    ({"edge_index": np.ones((3, 6), int)}, r"data\.npz, edge 0: expected columns: 2, got 3"),
    ({"node_feat": np.full((N, 2), np.nan)}, r"data\.npz, node 0: expected finite numbers, got n"),
    ({"node_label": np.ones((3, 1))}, r"node-label\.npz: expected 7 nodes, as data\.npz says"),
    ({"node_label": np.full((N, 1), 172)}, r"node-label\.npz: expected labels 0\.\.171"),
]


@pytest.mark.filterwarnings("ignore:.*allow_pickle")
@pytest.mark.parametrize(("changes", "match"), NPZ_WRONG)
def test_archives_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    write_archives(tmp_path / "ogbn_papers100M", **changes)
    with pytest.raises(DataError, match=match) as caught:
        load("ogbn-papers100M", data_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_an_archive_that_is_absent(tmp_path: Path) -> None:
    write_archives(tmp_path / "ogbn_papers100M")
    (tmp_path / "ogbn_papers100M" / "raw" / "node-label.npz").unlink()
    with pytest.raises(DataError, match=r"node-label\.npz: expected an \.npz file, got no such"):
        load(tmp_path / "ogbn_papers100M")


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
