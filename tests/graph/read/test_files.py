"""Laws of files: what was written is what is read, and what is damaged is one `DataError`."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from mistakes import raises_code
from silograph.core.errors import DataError
from silograph.graph.csr import CSR
from silograph.graph.datasets import load
from silograph.graph.graph import Graph
from silograph.graph.read import contents, tables
from silograph.graph.read.arrays import from_arrays
from silograph.graph.read.csv import load_npz

SHARED = Path(__file__).parents[4] / "shared" / "data"


def assert_same(got: Graph, wanted: Graph) -> None:
    assert (got.edge_index == wanted.edge_index).all()
    assert type(got.x) is type(wanted.x)
    assert (dense(got) == dense(wanted)).all()
    assert got.y.tolist() == wanted.y.tolist()
    assert got.node_id.tolist() == wanted.node_id.tolist()
    for name in ("num_classes", "class_names", "silo_names", "name"):
        assert getattr(got, name) == getattr(wanted, name)
    assert (got.silo is None) == (wanted.silo is None)
    if got.silo is not None and wanted.silo is not None:
        assert got.silo.tolist() == wanted.silo.tolist()
    assert masks(got) == masks(wanted)


def dense(graph: Graph) -> np.ndarray:
    x = graph.x
    return np.asarray(x.scipy().toarray() if isinstance(x, CSR) else x.numpy())


def masks(graph: Graph) -> list[list[bool]] | None:
    split = graph.split
    return None if split is None else [m.tolist() for m in (split.train, split.val, split.test)]


def arrays(seed: int, n: int = 12) -> dict[str, Any]:
    """Return arguments of `from_arrays` for a random graph with everything in it."""
    rng = np.random.default_rng(seed)
    part = rng.integers(0, 4, n)
    return {
        "edge_index": rng.integers(0, n, (2, 20)),
        "x": (rng.random((n, 5)) * (rng.random((n, 5)) < 0.5)).astype(np.float32),
        "y": rng.integers(-1, 3, n),
        "num_classes": 4,
        "node_id": rng.permutation(n) * 10,
        "split": [part == which for which in range(3)],
        "silo": rng.integers(0, 2, n),
        "silo_names": ["north", "south"],
        "class_names": ["a", "b", "c", "d"],
    }


def stored(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays as an archive names them."""
    keys = ("train_mask", "val_mask", "test_mask")
    parts = {key: value for key, value in given.items() if key != "split"}
    return parts | dict(zip(keys, given["split"], strict=True))


# --- .npz ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("seed", range(3))
def test_a_saved_graph_comes_back(tmp_path: Path, save: Callable[..., None], seed: int) -> None:
    given = arrays(seed)
    save(tmp_path / "mine.npz", **stored(given), remark=np.array("ignored"))
    assert_same(load_npz(tmp_path / "mine.npz"), from_arrays(**given, name="mine"))


def test_the_three_arrays_of_a_user_are_enough(tmp_path: Path) -> None:
    given = {key: value for key, value in arrays(0).items() if key in ("edge_index", "x")}
    for y in (["dog", "cat", ""] * 4, [[0, 1], [1, -1]] * 6, [0.0, np.nan] * 6):
        np.savez(tmp_path / "mine.npz", **given, y=np.array(y))
        assert_same(load_npz(tmp_path / "mine.npz"), from_arrays(**given, y=y, name="mine"))


def sparse_parts(x: np.ndarray) -> dict[str, Any]:
    matrix = sp.csr_matrix(x)
    return {
        "x_data": matrix.data.astype(np.uint8),
        "x_indices": matrix.indices.astype(np.int16),
        "x_indptr": matrix.indptr,
        "x_shape": np.array(matrix.shape),
    }


def test_sparse_parts_and_unlabelled_nodes(tmp_path: Path) -> None:
    x = np.diag([1, 2, 3, 0])
    y = np.array([0, 1, 0, 1], dtype=np.int8)
    parts = sparse_parts(x) | {"edge_index": np.array([[0, 1], [1, 2]]), "y": y}
    np.savez(tmp_path / "s.npz", **parts, unlabelled=np.array([3], dtype=np.int32))
    graph = load_npz(tmp_path / "s.npz")
    assert isinstance(graph.x, CSR)
    wanted = from_arrays(
        edge_index=parts["edge_index"], x=sp.csr_matrix(x), y=[0, 1, 0, -1], name="s"
    )
    assert_same(graph, wanted)


def test_the_first_of_several_splits_is_taken(tmp_path: Path) -> None:
    given = arrays(0)
    first = given.pop("split")
    keys = ("train_masks", "val_masks", "test_masks")
    many: dict[str, Any] = {
        key: np.stack([mask, ~mask]) for key, mask in zip(keys, first, strict=True)
    }
    np.savez(tmp_path / "mine.npz", **given, **many)
    assert masks(load_npz(tmp_path / "mine.npz")) == [mask.tolist() for mask in first]


def test_attributes_become_one_hot_features_without_the_target(tmp_path: Path) -> None:
    codes = np.array([[1, 1, 200], [2, 2, 0], [0, 0, 700], [1, 2, 200]], dtype=np.int32)
    parts: dict[str, Any] = {
        "attributes": codes,
        "attribute_names": np.array(["status", "gender", "major"]),
        "edge_index": np.array([[0], [1]]),
        "y": codes[:, 1] - 1,
        "num_nodes": np.int64(4),
    }
    np.savez(tmp_path / "school.npz", **parts)
    graph = load_npz(tmp_path / "school.npz")
    # columns: status 1, status 2, major 200, major 700
    assert dense(graph).tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1], [1, 0, 1, 0]]
    assert graph.y.tolist() == [0, 1, -1, 1]


GOOD = stored(arrays(0))
SPARSE = {key: value for key, value in GOOD.items() if key != "x"} | sparse_parts(np.eye(12, 5))
CODES = {key: value for key, value in GOOD.items() if key != "x"} | {
    "attributes": np.ones((12, 2), dtype=np.int32),
    "attribute_names": np.array(["gender", "year"]),
}
NPZ_WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (GOOD, {"ratings": np.ones(3)}, "expected both ratings and trust of users, got one"),
    (GOOD, {"y": None}, r"expected keys edge_index, y and x \(or x_data.*got keys class_names"),
    (SPARSE, {"x_shape": None}, "expected keys edge_index, y and x"),
    (GOOD, {"y": np.array([{}, 1])}, r"expected 'y' to be an array .* \(ValueError\): damaged"),
    (GOOD, {"edge_index": np.array([[0], [12]])}, "mine.npz: expected edges between nodes 0..11"),
    (GOOD, {"num_nodes": 5}, "expected num_nodes 12, got 5"),
    (GOOD, {"num_classes": 0.5}, "expected num_classes to be one whole number, got float64"),
    (GOOD, {"silo_names": np.arange(2)}, "expected silo_names to be a list of words, got int64"),
    (GOOD, {"unlabelled": np.array([12])}, r"expected unlabelled nodes 0\.\.11, got others"),
    (GOOD, {"unlabelled": np.array([0.5])}, "unlabelled and y of integers, got float64 and int64"),
    (GOOD, {"test_mask": None}, r"all of train_mask, .*, got train_mask, val_mask"),
    (
        GOOD,
        {"train_mask": None, "val_mask": None, "test_mask": None}
        | {f"{part}_masks": np.ones(12, bool) for part in ("train", "val", "test")},
        r"train_masks, val_masks, test_masks of shape \(k, n\), got \(12,\), \(12,\), \(12,\)",
    ),
    (SPARSE, {"x_shape": np.array([12.0, 5.0])}, r"whole x_indices, .* got .* float64 \(2,\)"),
    (SPARSE, {"x_indptr": np.arange(3)}, "expected sound parts of a sparse x, got"),
    (SPARSE, {"x_indices": np.full(5, 9)}, "expected a sound sparse matrix in x, got one where"),
    (SPARSE, {"x_indices": np.full(5, -1)}, "expected a sound sparse matrix in x, got one where"),
    (SPARSE, {"x_indptr": np.r_[0, 5, np.arange(1, 12)[:10], 5]}, "expected a sound sparse matrix"),
    (CODES, {"attributes": np.ones((12, 3), int)}, r"attributes \(n, A\) .* got \(12, 3\)"),
    (CODES, {"attribute_names": np.array(["a", "year"])}, "expected one attribute 'gender'"),
]


def sparse_labels(**changes: Any) -> dict[str, Any]:
    """The archive with its labels as the parts of a sparse matrix of three bits."""
    bits = np.eye(12, 3, dtype=np.int8)
    parts = {key.replace("x_", "y_"): part for key, part in sparse_parts(bits).items()}
    return {key: value for key, value in GOOD.items() if key not in ("y", "num_classes")} | (
        parts | {"class_names": np.array(["a", "b", "c"])} | changes
    )


def test_sparse_label_bits_are_those_of_the_dense_matrix(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **sparse_labels())
    graph = load_npz(tmp_path / "mine.npz")
    assert (graph.y.numpy() == np.eye(12, 3)).all()
    assert (graph.task, graph.num_classes) == ("multilabel", 3)


NPZ_WRONG += [
    (sparse_labels(), {"y_shape": None}, "expected keys edge_index, y and x"),
    (sparse_labels(), {"y_data": np.full(3, 2)}, "a sparse y of label bits 0 and 1, .* with 2"),
    (sparse_labels(), {"y_indices": np.full(3, 9)}, "expected sound parts of a sparse y, got"),
    (
        sparse_labels(),
        {"y_shape": np.array([12, 10**9])},
        "expected y_shape of at most 65536 label bits, got 1000000000",
    ),
    (sparse_labels(), {"y_indptr": np.arange(3)}, "expected sound parts of a sparse y, got"),
    (
        sparse_labels(),
        {"y_indices": np.zeros(3, int), "y_indptr": np.r_[0, np.full(12, 3)]},
        "label bits 0 and 1, each once, got an entry twice",
    ),
]


def test_an_archive_may_have_no_features(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = {key: value for key, value in GOOD.items() if key != "x"}
    same = np.ones(GOOD["edge_index"].shape[1])
    np.savez(tmp_path / "mine.npz", **parts, edge_weight=same)
    assert load_npz(tmp_path / "mine.npz").num_features == 0
    assert not caplog.messages  # where all weights are the same, nothing is lost
    np.savez(tmp_path / "mine.npz", **parts, edge_attr=np.eye(len(same)))
    load_npz(tmp_path / "mine.npz")
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "values of edges (edge_attr) are not used"
    ]


@pytest.mark.filterwarnings("ignore:.*allow_pickle")
@pytest.mark.parametrize(("base", "changes", "match"), NPZ_WRONG)
def test_archives_that_cannot_be_used(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], match: str
) -> None:
    parts = {key: value for key, value in (base | changes).items() if value is not None}
    np.savez(tmp_path / "mine.npz", **parts)
    with pytest.raises(DataError, match=match) as caught:
        load_npz(tmp_path / "mine.npz")
    assert str(tmp_path / "mine.npz") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_archive(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    with raises_code(DataError, "missing-file"):
        load_npz(file)
    np.save(tmp_path / "one.npy", np.eye(3))
    np.savez(tmp_path / "whole.npz", **GOOD)
    whole = (tmp_path / "whole.npz").read_bytes()
    pickled = b"\x80\x04]\x94."
    table = b"id,label\n"
    for raw in (b"", whole[:200], pickled, table, (tmp_path / "one.npy").read_bytes()):
        file.write_bytes(raw)
        with pytest.raises(DataError, match=r"got none that can be read: empty, cut short"):
            load_npz(file)
    with raises_code(DataError, "missing-file"):
        load_npz(tmp_path)


def test_a_member_that_is_no_array(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "mine.npz", "w") as archive:
        for key in ("x", "y", "edge_index"):
            archive.writestr(key, b"text")
    with pytest.raises(DataError, match=r"expected 'edge_index' to be an array .* be read"):
        load_npz(tmp_path / "mine.npz")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("base", [GOOD, SPARSE, CODES], ids=["dense", "sparse", "codes"])
def test_damaged_archives_are_a_graph_or_an_error(
    tmp_path: Path, save: Callable[..., None], base: dict[str, Any]
) -> None:
    save(tmp_path / "whole.npz", **base)
    whole = (tmp_path / "whole.npz").read_bytes()
    rng = np.random.default_rng(0)
    errors = []
    for trial in range(250):
        raw = bytearray(whole)
        if trial % 5 == 0:
            raw = raw[: rng.integers(len(raw))]
        else:
            for place in rng.integers(0, len(raw), rng.integers(1, 6)):
                raw[place] = rng.integers(256)
        (tmp_path / "mine.npz").write_bytes(raw)
        try:
            assert load_npz(tmp_path / "mine.npz").num_nodes == 12
        except DataError as error:
            errors.append(str(error))
    assert len(errors) > 100
    assert not any("\n" in error for error in errors)


def damaged(part: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the array with bytes flipped, rows or axes lost, or another dtype."""
    match rng.integers(5):
        case 0:
            raw = bytearray(part.tobytes())
            raw[rng.integers(len(raw))] = rng.integers(100)  # a character, in words
            return np.frombuffer(bytes(raw), part.dtype).reshape(part.shape)
        case 1:
            return part.ravel()[: rng.integers(part.size + 1)]
        case 2:
            return part.astype(rng.choice(["U9", "f4", "u1", "?", "c8", "M8[s]"]), casting="unsafe")
        case 3:
            return np.concatenate([part.ravel()] * 2)
        case _:
            return np.resize(part, rng.integers(0, 14, rng.integers(0, 4)))


@pytest.mark.law(sample=6)
@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize("base", [GOOD, SPARSE, CODES], ids=["dense", "sparse", "codes"])
def test_damaged_parts_of_a_sound_archive_are_a_graph_or_an_error(
    tmp_path: Path, base: dict[str, Any]
) -> None:
    rng = np.random.default_rng(1)
    errors = []
    for _ in range(400):
        key = str(rng.choice(sorted(base)))
        try:
            changed = damaged(np.asarray(base[key]), rng)
        except ValueError:  # words are no numbers
            continue
        np.savez(tmp_path / "mine.npz", **(base | {key: changed}))
        try:
            graph = load_npz(tmp_path / "mine.npz")
        except DataError as error:
            errors.append(str(error))
        else:
            n = graph.num_nodes
            rows = graph.x.num_rows if isinstance(graph.x, CSR) else len(graph.x)
            assert len(graph.y) == len(graph.node_id) == rows == n
            assert graph.adj.scipy().shape == (n, n)
    assert len(errors) > 100
    assert not any("\n" in error for error in errors)


# --- real files ---------------------------------------------------------------------------------

# nodes, undirected edges, features, classes, silos, missing labels: as published
PUBLISHED = {
    "amazon_computers": (13752, 245861, 767, 10, 0, 0),
    "amazon_photo": (7650, 119081, 745, 8, 0, 0),
    "citation_domains": (23779, 38771, 6775, 5, 3, 0),
    "citeseer": (3327, 4552, 3703, 6, 0, 15),
    "coauthor_cs": (18333, 81894, 6805, 15, 0, 0),
    "cora": (2708, 5278, 1433, 7, 0, 0),
    "facebook100_20schools": (52662, 1820870, None, 2, 20, 4549),
    "minesweeper": (10000, 39402, 7, 2, 0, 0),
    "pubmed": (19717, 44324, 500, 3, 0, 0),
    "twitch": (36890, 492575, 3170, 2, 7, 0),
    "webkb": (877, 1388, 1703, 5, 4, 0),
}


def real(name: str) -> Path:
    path = SHARED / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    return path


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_real_files_have_their_published_counts(name: str) -> None:
    graph = load_npz(real(name))
    nodes, edges, features, classes, silos, missing = PUBLISHED[name]
    assert (graph.num_nodes, graph.num_edges) == (nodes, edges)
    assert features in (None, graph.num_features)
    assert (graph.num_classes, len(graph.silo_names)) == (classes, silos)
    assert int((~graph.labeled).sum()) == missing
    assert (graph.task == "multilabel") == (name == "citation_domains")
    wanted = {
        "cora": (140, 500, 1000),
        "citeseer": (120, 500, 1000),
        "pubmed": (60, 500, 1000),
        "minesweeper": (5000, 2500, 2500),
    }
    sizes = None if graph.split is None else tuple(sum(part) for part in masks(graph) or [])
    assert sizes == wanted.get(name)
    if graph.silo is not None:  # no edge crosses two silos
        a, b = graph.edge_index
        assert (graph.silo[a] == graph.silo[b]).all()


def test_no_feature_of_the_colleges_tells_the_gender() -> None:
    """Features are the codes of the other attributes, each a column, in the order of the file."""
    path = real("facebook100_20schools")
    graph = load_npz(path)
    with np.load(path) as file:
        names, codes, y = file["attribute_names"].tolist(), file["attributes"], file["y"]
    assert (graph.y.numpy() == y).all()
    assert (y == codes[:, names.index("gender")] - 1).all()
    others = codes[:, [name != "gender" for name in names]]
    counts = [len(np.unique(column[column > 0])) for column in others.T]
    assert isinstance(graph.x, CSR)
    assert graph.num_features == sum(counts)
    assert (graph.x.degree.numpy() == (others > 0).sum(axis=1)).all()
    starts = np.cumsum([0, *counts])
    for column, start, end in zip(others.T, starts, starts[1:], strict=False):
        values = np.unique(column[column > 0])
        part = graph.x.scipy()[:, start:end]
        assert (part @ values == column).all()


@pytest.mark.parametrize("name", ["ciao", "epinions"])
def test_recommendation_files_are_rating_graphs(name: str) -> None:
    graph = load_npz(real(name))
    assert isinstance(graph.x, torch.Tensor)
    users, items = graph.x.sum(dim=0).int().tolist()
    found = users, items, int(graph.labeled.sum())
    assert (
        found
        == {
            "ciao": (7_317, 104_957, 281_867),
            "epinions": (18_088, 261_649, 756_345),
        }[name]
    )


def bomb(path: Path, arrays: dict[str, int]) -> Path:
    """Write an archive of arrays of zeros, of so many bytes each; the file has a thousandth."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, size in arrays.items():
            with archive.open(f"{key}.npy", "w") as file:
                header = {"descr": "|u1", "fortran_order": False, "shape": (size,)}
                np.lib.format.write_array_header_1_0(file, header)
                for _ in range(size >> 20):
                    file.write(bytes(1 << 20))
    return path


def test_an_archive_is_measured_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("edge_index", "x", "y")
    path = bomb(tmp_path / "g.npz", dict.fromkeys(keys, 4 << 20) | {"unused": 64 << 20})
    assert path.stat().st_size < 1 << 20
    unpacked: list[str] = []
    monkeypatch.setattr(tables, "_array", lambda path, archive, key: unpacked.append(key))
    monkeypatch.setattr(tables, "memory_left", lambda: 12 << 20)
    line = r"g.npz: expected arrays of at most 12,582,912 bytes, .*, got 12,583,296 once unpacked"
    with pytest.raises(DataError, match=line):
        load(path)
    assert not unpacked
    monkeypatch.setattr(tables, "memory_left", lambda: 13 << 20)  # what is not read counts nothing
    tables.read_arrays(path, "a graph", lambda _: keys)
    assert unpacked == list(keys)


def test_an_archive_that_says_less_than_it_holds_is_cut(tmp_path: Path) -> None:
    """Zipfile reads as much as is declared, so a lie about the size costs no memory."""
    path = bomb(tmp_path / "g.npz", {"y": 4 << 20})
    with zipfile.ZipFile(path) as archive:
        size = archive.infolist()[0].file_size
    data = path.read_bytes().replace(size.to_bytes(4, "little"), (1 << 10).to_bytes(4, "little"))
    path.write_bytes(data)
    with pytest.raises(DataError, match="expected 'y' to be an array"):
        tables.read_arrays(path, "a graph", lambda _: ["y"])
    assert 1 << 28 < contents.memory_left() < 1 << 62


def test_a_table_alone_is_refused_and_names_the_folders_that_are_read(tmp_path: Path) -> None:
    table = tmp_path / "nodes.csv"
    table.write_text("id,label\nann,0\n")
    with pytest.raises(DataError, match=r"^expected an \.npz file or a folder, got ") as caught:
        load(str(table))
    assert str(caught.value).endswith(f"nodes.csv: give its folder, {tmp_path}")
    (tmp_path / "films.csv").write_text("user,item,rating\nann,tea,5\n")
    with pytest.raises(DataError, match=r"give the folder of nodes\.csv and .*sg\.ratings"):
        load(str(tmp_path / "films.csv"))
