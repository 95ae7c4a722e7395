"""Reddit2, Yelp and AmazonProducts: torch_geometric's loaders on small files in the raw format."""

import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from silograph.core.errors import DataError
from silograph.graph.datasets import load
from silograph.graph.graph import Graph

with warnings.catch_warnings():  # torch_geometric scripts modules while it is imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch_geometric.datasets import AmazonProducts, Reddit2, Yelp

LOADERS = {"reddit2": Reddit2, "yelp": Yelp, "amazon_products": AmazonProducts}
NAMES = sorted(LOADERS)
N = 8
ROLE = {"tr": [0, 1, 2, 5], "va": [3, 7], "te": [4, 6]}
Files = dict[str, Any]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder without data, and no network."""
    (tmp_path / "home" / "work").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home" / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)
    for loader in LOADERS.values():
        monkeypatch.setattr(loader, "download", offline)


def offline(_: Any) -> None:
    raise OSError("no route to host")


def contents(name: str) -> Files:
    """What the four raw files hold: a graph stored in both directions, with one loop."""
    rng = np.random.default_rng(len(name))
    upper = np.triu(rng.random((N, N)) < 0.4, 1)
    bits = rng.integers(0, 2, (N, 3)).tolist()
    return {
        "adj": sp.csr_matrix((upper | upper.T | (np.arange(N) == 5)).astype(np.float32)),
        "x": rng.normal(size=(N, 4)),  # float64, as published
        "y": [i % 3 for i in range(N)] if name == "reddit2" else bits,
        "role": ROLE,
    }


def write(raw: Path, files: Files) -> None:
    """Write the raw files as GraphSAINT publishes them."""
    raw.mkdir(parents=True, exist_ok=True)
    adj = files["adj"]
    parts = {key: getattr(adj, key) for key in ("data", "indices", "indptr", "shape")}
    np.savez(raw / "adj_full.npz", **parts)
    np.save(raw / "feats.npy", files["x"])
    by_node = files["y"] if isinstance(files["y"], dict) else dict(enumerate(files["y"]))
    (raw / "class_map.json").write_text(json.dumps(by_node))  # keys become words
    (raw / "role.json").write_text(json.dumps(files["role"]))


def raw_of(root: Path, name: str) -> Path:
    return root.joinpath(LOADERS[name].__name__, "raw")


def check(graph: Graph, name: str, files: Files) -> None:
    adj = files["adj"].toarray() != 0
    np.fill_diagonal(adj, False)
    assert (graph.adj.scipy(bool).toarray() == (adj | adj.T)).all()
    assert isinstance(graph.x, torch.Tensor)
    assert graph.x.dtype == torch.float32
    assert (graph.x.numpy() == files["x"].astype(np.float32)).all()
    assert graph.y.tolist() == files["y"]
    assert (graph.name, graph.num_classes) == (name, 3)
    assert graph.task == ("multiclass" if name == "reddit2" else "multilabel")
    assert graph.split is not None
    masks = (graph.split.train, graph.split.val, graph.split.test)
    for mask, part in zip(masks, ("tr", "va", "te"), strict=True):
        assert mask.nonzero().flatten().tolist() == ROLE[part]


@pytest.mark.parametrize("name", NAMES)
def test_raw_files_are_the_graph(tmp_path: Path, name: str) -> None:
    files = contents(name)
    write(raw_of(tmp_path, name), files)
    for _ in range(2):  # from the raw files, then from what the loader kept
        check(load(name, data_dir=tmp_path), name, files)
    assert load(LOADERS[name].__name__, data_dir=tmp_path).name == name  # PyG's own name


@pytest.mark.parametrize("name", NAMES)
def test_a_public_split_trains(tmp_path: Path, name: str) -> None:
    import silograph as sg

    write(raw_of(tmp_path, name), contents(name))
    graph = load(name, data_dir=tmp_path)
    result = sg.run(graph, split="public", partition="random", clients=2, rounds=1, hidden=4)
    judged = result.test.server
    assert judged is not None
    assert judged.accuracy is not None


def test_labels_that_no_file_tells_are_missing(tmp_path: Path) -> None:
    files = contents("reddit2")
    write(raw_of(tmp_path, "reddit2"), files | {"y": {i: i % 3 for i in range(N - 1)}})
    assert load("reddit2", data_dir=tmp_path).y.tolist() == [*files["y"][:-1], -1]


@pytest.mark.parametrize("name", NAMES)
def test_a_download_comes_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files, folder = contents(name), raw_of(tmp_path, name).parent

    def half(dataset: Any) -> None:
        write(Path(dataset.raw_dir), files)
        (Path(dataset.raw_dir) / "role.json").unlink()
        raise OSError("connection lost")

    def whole(dataset: Any) -> None:
        write(Path(dataset.raw_dir), files)

    monkeypatch.setattr(LOADERS[name], "download", half)
    with pytest.raises(DataError, match=rf"{name} into .*raw, got OSError: connection lost"):
        load(name, data_dir=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"home"}
    folder.joinpath("raw").mkdir(parents=True)  # as an interrupted loader of its own leaves it
    monkeypatch.setattr(LOADERS[name], "download", whole)
    check(load(name, data_dir=tmp_path), name, files)
    monkeypatch.setattr(LOADERS[name], "download", offline)
    check(load(name, data_dir=tmp_path), name, files)  # kept where the others are
    assert {path.name for path in tmp_path.iterdir()} == {"home", folder.name}


def test_a_download_that_another_process_made_first_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = contents("reddit2"), contents("yelp") | {"y": [0] * N}

    def slow(dataset: Any) -> None:
        write(Path(dataset.raw_dir), mine)
        write(raw_of(tmp_path, "reddit2"), other)

    monkeypatch.setattr(Reddit2, "download", slow)
    assert load("reddit2", data_dir=tmp_path).y.tolist() == [0] * N
    assert {path.name for path in tmp_path.iterdir()} == {"home", "Reddit2"}


def _cut(raw: Path) -> None:
    path = raw / "adj_full.npz"
    path.write_bytes(path.read_bytes()[:300])


def _lose(raw: Path) -> None:
    (raw / "role.json").unlink()  # is downloaded, or not


def _edit(**changes: Any) -> Callable[[Path], None]:
    return lambda raw: write(raw, contents("yelp") | changes)


WRONG: list[tuple[Callable[[Path], None], str]] = [
    (_lose, r"download yelp into .*Yelp/raw, got OSError: no route"),
    (_cut, r"download yelp into .*Yelp/raw, got BadZipFile"),
    (
        _edit(adj=sp.csr_matrix(([1.0], ([2], [9])), shape=(N, N + 2))),
        r"Yelp/raw: expected edges between nodes 0\.\.7, got edge 0 from 2 to 9",
    ),
    (_edit(x=np.full((N, 2), np.nan)), r"Yelp/raw: expected finite features, .* at node 0"),
    (_edit(x=np.ones((N - 1, 2))), r"download yelp into .*raw, got IndexError"),
    (_edit(y=[[0, 1, 2]] * N), r"Yelp/raw: expected labels 0\.\.1, .*, got 2 at node 0"),
    (_edit(y=[[0, 1]] * (N - 1)), r"download yelp into .*raw, got TypeError"),
    (_edit(role=ROLE | {"te": [4, 0]}), r"Yelp/raw: expected disjoint masks, got node 0 in two"),
    (_edit(role=ROLE | {"te": [N]}), r"download yelp into .*raw, got IndexError"),
    (_edit(role={"tr": [0]}), r"download yelp into .*raw, got KeyError: 'va'"),
]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # numpy's, of a cut archive
@pytest.mark.parametrize(("damage", "match"), WRONG)
def test_raw_files_that_cannot_be_used(
    tmp_path: Path, damage: Callable[[Path], None], match: str
) -> None:
    raw = raw_of(tmp_path, "yelp")
    write(raw, contents("yelp"))
    damage(raw)
    before = sorted(raw.parent.rglob("*"))
    with pytest.raises(DataError, match=match) as caught:
        load("yelp", data_dir=tmp_path)
    assert "\n" not in str(caught.value)
    del caught
    gc.collect()  # now, while the warning is ignored
    assert sorted(raw.parent.rglob("*")) == before  # nothing processed from damaged files
    write(raw, contents("yelp"))
    check(load("yelp", data_dir=tmp_path), "yelp", contents("yelp"))
