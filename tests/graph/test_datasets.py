"""Laws of `load`: names, aliases, folders and paths lead to one graph, or to one line of error."""

import pickle
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from mistakes import raises_code
from silograph.core.errors import ConfigError, DataError
from silograph.graph.csr import CSR
from silograph.graph.datasets import ALIASES, DATASETS, load, locate

with warnings.catch_warnings():  # torch_geometric scripts modules while it is imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch_geometric.datasets import (
        Amazon,
        AmazonProducts,
        Coauthor,
        Planetoid,
        Reddit2,
        Yelp,
    )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a working folder without any data, and no network."""
    work = tmp_path / "home" / "work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)

    def offline(_: Any) -> None:
        raise OSError("no route\nto host")

    for loader in (Planetoid, Amazon, Coauthor, Reddit2, Yelp, AmazonProducts):
        monkeypatch.setattr(loader, "download", offline)
    return tmp_path / "home"


def write(folder: Path, name: str, nodes: int) -> Path:
    """Write a graph that is told from others by its number of nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.npz"
    edges = np.array([[0], [1]])
    np.savez(path, x=np.eye(nodes), edge_index=edges, y=np.arange(nodes) % 2)
    return path


# --- where a name is looked for -----------------------------------------------------------------


def test_the_nearer_folder_wins(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home / "shared" / "data", "cora", 3)
    assert load("cora").num_nodes == 3
    write(tmp_path / "variable", "cora", 4)
    monkeypatch.setenv("SILOGRAPH_DATA", str(tmp_path / "variable"))
    assert load("cora").num_nodes == 4
    write(tmp_path / "given", "cora", 5)
    graph = load("cora", data_dir=tmp_path / "given")
    assert (graph.num_nodes, graph.name) == (5, "cora")


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_aliases_and_case_name_the_same_file(tmp_path: Path, alias: str) -> None:
    write(tmp_path, ALIASES[alias], 6)
    for name in (alias, alias.upper(), ALIASES[alias].title()):
        assert load(name, data_dir=tmp_path).name == ALIASES[alias]


def test_a_file_of_ones_own_is_a_name_too(tmp_path: Path) -> None:
    write(tmp_path, "MyGraph", 7)
    assert load("MyGraph", data_dir=str(tmp_path)).num_nodes == 7


def test_every_name_is_described_and_every_alias_is_a_name() -> None:
    assert set(ALIASES.values()) <= DATASETS.keys()
    assert all(text and "\n" not in text for text in DATASETS.values())
    assert list(DATASETS) == sorted(DATASETS)


def test_where_a_name_was_found(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locate("cora") is None
    assert locate("digits") is None
    shared = write(home / "shared" / "data", "amazon_photo", 3)
    for name in ("photo", "Photo", "amazon_photo"):
        found = locate(name)
        assert found is not None
        assert found.resolve() == shared
    variable = write(tmp_path / "variable", "amazon_photo", 4)
    monkeypatch.setenv("SILOGRAPH_DATA", str(tmp_path / "variable"))
    assert locate("photo") == variable
    given = write(tmp_path / "given", "photo", 5)
    write(tmp_path / "given", "amazon_photo", 6)
    assert locate("photo", data_dir=tmp_path / "given") == given  # as it is written, first
    assert locate("~/x.npz") == home / "x.npz"  # whether it is there or not


# --- paths --------------------------------------------------------------------------------------


def test_a_path_works_wherever_a_name_does(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "mine", 3)
    for name in (path, str(path)):
        assert load(name).name == "mine"
    monkeypatch.chdir(tmp_path)
    for text in ("mine.npz", "./mine.npz"):
        assert load(text).num_nodes == 3
    write(home, "mine", 4)
    assert load("~/mine.npz").num_nodes == 4


def test_a_folder_with_two_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "nodes.csv").write_text("id,label,a\n1,x,1\n2,y,2\n")
    (folder / "edges.csv").write_text("source,target\n1,2\n")
    monkeypatch.chdir(tmp_path)
    for name in (folder, str(folder), "mine", "mine/"):
        graph = load(name)
        assert (graph.name, graph.num_edges, graph.class_names) == ("mine", 1, ("x", "y"))


def test_a_folder_does_not_hide_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("digits").num_nodes == 1797


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("crora", "unknown dataset 'crora': did you mean 'cora'"),
        ("CORE", "unknown dataset 'CORE': did you mean 'cora'"),
        ("", "unknown dataset ''"),
    ],
)
def test_an_unknown_name_names_the_nearest(name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(name)


@pytest.mark.parametrize("given", [3, None, b"digits", ["digits"], np.eye(2)])
def test_what_is_neither_name_nor_path(given: Any) -> None:
    message = f"expected the name or path of a graph, got {type(given).__name__}"
    for function in (load, locate):
        with pytest.raises(DataError, match=message):
            function(given)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    for name in ("cora.npz", "data/cora", tmp_path / "cora", "cora.parquet", "Cora.XLSX"):
        with raises_code(DataError, "missing-file"):
            load(name)
    with pytest.raises(
        DataError,
        match=r"folder with nodes\.csv and edges\.csv, with ratings\.csv \(or \.csv\.gz, \.tsv, "
        r"\.npz or \.parquet\), or one",
    ):
        load(tmp_path)
    (tmp_path / "nodes.csv").write_text("id,label,a\n")
    with pytest.raises(DataError, match=r"got .*nodes\.csv: give its folder, "):
        load(tmp_path / "nodes.csv")
    (tmp_path / "people.csv").write_text("id,label,a\n")
    with pytest.raises(DataError, match=r"use sg\.from_csv\(nodes=\.\.\., edges=\.\.\.\)"):
        load(tmp_path / "people.csv")
    (tmp_path / "notes.txt").write_text("cora")
    with pytest.raises(DataError, match=r"notes\.txt, line 1: expected two node ids"):
        load(tmp_path / "notes.txt")


def test_folders_that_are_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_code(DataError, "missing-file"):
        load("digits", data_dir=tmp_path / "nowhere")
    monkeypatch.setenv("SILOGRAPH_DATA", str(tmp_path / "nowhere"))
    with raises_code(DataError, "missing-file"):
        load("digits")


def test_a_dataset_without_a_loader_says_where_its_file_belongs(tmp_path: Path) -> None:
    with raises_code(DataError, "missing-file", path="twitch.npz"):
        load("twitch", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["cora", "photo", "physics", "reddit2", "Yelp", "AmazonProducts"])
def test_a_failed_download_is_one_line(tmp_path: Path, name: str) -> None:
    full = ALIASES.get(name.lower(), name.lower())
    with pytest.raises(
        DataError, match=rf"download {full} into .*raw, got OSError: no route to host: put {full}"
    ) as caught:
        load(name, data_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"home"}  # of the fixture


# --- the loaders of torch_geometric, on small raw files ------------------------------------------


def write_planetoid(raw: Path, name: str) -> np.ndarray:
    """Write 520 nodes: 6 train, 500 may choose, the last 10 judge, the test words shuffled.

    Returns:
        x (520, 3) as it is stored for nodes 0..519.
    """
    raw.mkdir(parents=True)
    n, test = 520, np.arange(510, 520)
    x = np.zeros((n, 3), dtype=np.float32)
    x[np.arange(n), np.arange(n) % 3] = 1
    onehot = np.eye(2, dtype=np.int32)[np.arange(n) % 2]
    order = test[::-1]  # row i of tx belongs to node order[i]
    graph = defaultdict(list, {i: [(i + 1) % n, i] for i in range(n)})
    graph[0].append(1)  # a repeat, beside the loops
    parts: dict[str, Any] = {
        "x": sp.csr_matrix(x[:6]),
        "tx": sp.csr_matrix(x[order]),
        "allx": sp.csr_matrix(x[:510]),
        "y": onehot[:6],
        "ty": onehot[order],
        "ally": onehot[:510],
        "graph": graph,
    }
    for part, value in parts.items():
        (raw / f"ind.{name}.{part}").write_bytes(pickle.dumps(value))
    (raw / f"ind.{name}.test.index").write_text("\n".join(map(str, order)) + "\n")
    return x


@pytest.mark.parametrize(("name", "folder"), [("cora", "Cora"), ("pubmed", "PubMed")])
def test_planetoid_raw_files(tmp_path: Path, name: str, folder: str) -> None:
    x = write_planetoid(tmp_path / folder / "raw", name)
    for _ in range(2):  # from the raw files, then from what the loader kept
        graph = load(name, data_dir=tmp_path)
        assert (graph.name, graph.num_nodes, graph.num_edges) == (name, 520, 520)
        assert isinstance(graph.x, CSR)
        assert (graph.x.scipy().toarray() == x).all()
        assert graph.y.tolist() == [i % 2 for i in range(520)]
        assert graph.split is not None
        sizes = [int(m.sum()) for m in (graph.split.train, graph.split.val, graph.split.test)]
        assert sizes == [6, 500, 10]


def test_nodes_without_words_in_citeseer_are_missing(tmp_path: Path) -> None:
    raw = tmp_path / "CiteSeer" / "raw"
    write_planetoid(raw, "citeseer")
    # Node 512 is in the graph, yet neither in the test index nor in tx and ty.
    index = [i for i in range(510, 520) if i != 512]
    (raw / "ind.citeseer.test.index").write_text("\n".join(map(str, index)) + "\n")
    onehot = np.eye(2, dtype=np.int32)
    for part, rows in (
        ("tx", np.eye(3, dtype=np.float32)[np.zeros(9, int)]),
        ("ty", onehot[[1] * 9]),
    ):
        value = sp.csr_matrix(rows) if part == "tx" else rows
        (raw / f"ind.citeseer.{part}").write_bytes(pickle.dumps(value))
    graph = load("citeseer", data_dir=tmp_path)
    assert graph.y[510:].tolist() == [1, 1, -1, 1, 1, 1, 1, 1, 1, 1]
    assert int((graph.y == -1).sum()) == 1
    assert graph.num_classes == 2


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("photo", "Photo/raw/amazon_electronics_photo.npz"),
        ("amazon_computers", "Computers/raw/amazon_electronics_computers.npz"),
        ("CS", "CS/raw/ms_academic_cs.npz"),
        ("coauthor_physics", "Physics/raw/ms_academic_phy.npz"),
    ],
)
def test_amazon_and_coauthor_raw_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    words = sp.csr_matrix(np.array([[2.0, 0], [0, 1], [1, 1]], dtype=np.float32))
    links = sp.csr_matrix(np.array([[1.0, 1, 0], [0, 0, 1], [0, 1, 0]], dtype=np.float32))
    parts = {
        f"{kind}_{part}": getattr(matrix, part)
        for kind, matrix in (("attr", words), ("adj", links))
        for part in ("data", "indices", "indptr", "shape")
    }
    np.savez(path, **parts, labels=np.array([0, 1, 1]))
    monkeypatch.setenv("SILOGRAPH_DATA", str(tmp_path))
    graph = load(name)
    assert isinstance(graph.x, CSR)
    assert graph.x.scipy().toarray().tolist() == [[1, 0], [0, 1], [1, 1]]  # words, not counts
    assert graph.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert (graph.y.tolist(), graph.num_classes) == ([0, 1, 1], 2)
    assert graph.name == ALIASES.get(name.lower(), name.lower())


def test_without_a_folder_the_loader_keeps_its_files_at_home(home: Path) -> None:
    write_planetoid(home / ".cache" / "silograph" / "Cora" / "raw", "cora")
    assert load("cora").num_nodes == 520


def test_damaged_raw_files_are_one_line(tmp_path: Path) -> None:
    write_planetoid(tmp_path / "Cora" / "raw", "cora")
    (tmp_path / "Cora" / "raw" / "ind.cora.allx").write_bytes(b"\x80")
    with pytest.raises(DataError, match=r"raw: ind.cora.allx: expected a pickle of numbers"):
        load("cora", data_dir=tmp_path)


# --- digits -------------------------------------------------------------------------------------


def test_digits_are_joined_to_their_nearest() -> None:
    graph = load("Digits")
    assert (graph.name, graph.num_classes) == ("digits", 10)
    assert graph.class_names == tuple("0123456789")
    assert isinstance(graph.x, torch.Tensor)
    assert graph.x.shape == (1797, 64)
    assert (float(graph.x.min()), float(graph.x.max())) == (0, 1)
    assert int(graph.adj.degree.min()) >= 8
    # Oracle: of every node, no stranger is nearer than the 8th of its neighbors.
    distance = torch.cdist(graph.x[:50].double(), graph.x.double())
    for node in range(50):
        eighth = distance[node].sort().values[8]
        nearer = (distance[node] < eighth - 1e-9).nonzero().flatten().tolist()
        row = graph.edge_index[1][graph.edge_index[0] == node].tolist()
        assert set(nearer) - {node} <= set(row)
    a, b = graph.edge_index
    assert (graph.y[a] == graph.y[b]).float().mean() > 0.9
