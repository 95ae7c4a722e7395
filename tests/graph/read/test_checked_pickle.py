"""Whatever a folder of data sets holds: nothing that its files name is ever run."""

import os
import pickle
import pickletools
import re
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from silograph.core.errors import DataError
from silograph.graph.datasets import load
from silograph.graph.read.checked_pickle import check_arrays, check_kept

SRC = Path(__file__).parents[3] / "src"


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def planetoid(raw: Path) -> None:
    """Write raw files of six training nodes, 510 others with labels and ten of the test set."""
    raw.mkdir(parents=True)
    x = sp.csr_matrix(np.eye(520, 7, dtype=np.float32))
    onehot = np.eye(2, dtype=np.int32)[np.arange(520) % 2]
    graph = defaultdict(list, {i: [(i - 1) % 520, (i + 1) % 520] for i in range(520)})
    parts = {"x": x[:6], "tx": x[510:], "allx": x[:510], "graph": graph}
    parts |= {"y": onehot[:6], "ty": onehot[510:], "ally": onehot[:510]}
    for part, value in parts.items():
        (raw / f"ind.cora.{part}").write_bytes(pickle.dumps(value, protocol=2))
    (raw / "ind.cora.test.index").write_text("\n".join(map(str, range(510, 520))) + "\n")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # no cora.npz is near here
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)
    planetoid(tmp_path / "Cora" / "raw")
    return tmp_path


@pytest.mark.parametrize("part", ["x", "tx", "allx", "y", "ty", "ally", "graph"])
def test_a_raw_file_that_names_code_is_refused(data: Path, part: str) -> None:
    (data / "Cora" / "raw" / f"ind.cora.{part}").write_bytes(pickle.dumps(Touch(data / "ran")))
    with pytest.raises(
        DataError, match=rf"ind.cora.{part}: expected a pickle of numbers alone, got .*mkdir"
    ) as caught:
        load("cora", data_dir=data)
    assert "\n" not in str(caught.value)
    assert not (data / "ran").exists()
    assert not list((data / "Cora").glob("processed/*"))


@pytest.mark.parametrize("name", ["data.pt", "pre_transform.pt", "pre_filter.pt"])
@pytest.mark.parametrize("old", [False, True])
def test_what_a_loader_has_kept_names_no_code(data: Path, name: str, old: bool) -> None:
    load("cora", data_dir=data)
    kept = data / "Cora" / "processed" / name
    assert kept.exists()
    torch.save(Touch(data / "ran"), kept, _use_new_zipfile_serialization=not old)
    with pytest.raises(
        DataError, match=rf"{name}: expected tensors alone, got .*: delete the folder"
    ):
        load("cora", data_dir=data)
    assert not (data / "ran").exists()


def test_raw_and_kept_files_are_one_graph(data: Path) -> None:
    first, again = load("cora", data_dir=data), load("cora", data_dir=data)
    assert first.num_nodes == again.num_nodes == 520
    assert torch.equal(first.adj.indices, again.adj.indices)


def test_files_of_python_2_are_read(tmp_path: Path) -> None:
    """Those of Planetoid name classes by the modules of Python 2 and of old numpy and scipy."""
    graph = defaultdict(list, {0: [1], 1: [0]})
    old = pickle.dumps(graph, protocol=2)
    assert {"__builtin__ list", "collections defaultdict"} == {
        arg for op, arg, _ in pickletools.genops(old) if op.name == "GLOBAL"
    }
    (tmp_path / "graph").write_bytes(old)
    check_arrays(tmp_path / "graph")
    matrix = pickle.dumps(sp.csr_matrix(np.eye(3, dtype=np.float32)), protocol=2)
    matrix = re.sub(rb"cscipy\.sparse\._csr\n", b"cscipy.sparse.csr\n", matrix)
    matrix = re.sub(rb"cnumpy\._core\.multiarray\n", b"cnumpy.core.multiarray\n", matrix)
    (tmp_path / "x").write_bytes(matrix)
    with pytest.warns(DeprecationWarning, match="scipy.sparse.csr"):
        check_arrays(tmp_path / "x")


def unsound() -> dict[str, Any]:
    """Values that name nothing foreign, and would still do harm."""
    beyond, methods, words = (sp.csr_matrix(np.eye(3)) for _ in range(3))
    beyond.indices = beyond.indices + 10**6
    vars(methods)["check_format"] = defaultdict
    vars(words)["data"] = np.array(["a", "b", "c"])
    objects = np.empty(2, dtype=object)
    return {
        "indices beyond the matrix": beyond,
        "a method as an attribute": methods,
        "words": words,
        "objects": objects,
        "a list": [1, 2],
        "a class": list,
    }


@pytest.mark.parametrize("what", list(unsound()))
def test_unsound_values_are_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps(unsound()[what]))
    with pytest.raises(DataError, match="x: expected a pickle of numbers alone, got"):
        check_arrays(tmp_path / "x")


def test_text_in_other_encodings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"c_codecs\nencode\n(Va\nVutf-8\ntR.")
    with pytest.raises(DataError, match="text in utf-8"):
        check_arrays(tmp_path / "x")


def test_a_damaged_kept_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(DataError, match=r"data.pt: expected tensors alone, got"):
        check_kept(tmp_path / "data.pt")


def test_an_archive_with_objects_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is one of a loader of torch_geometric: numpy reads objects only where told to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SILOGRAPH_DATA", raising=False)
    raw = tmp_path / "Photo" / "raw"
    raw.mkdir(parents=True)
    objects = np.empty(1, dtype=object)
    objects[0] = Touch(tmp_path / "ran")
    names = ("adj", "attr")
    keys = [f"{name}_{part}" for name in names for part in ("data", "indices", "indptr", "shape")]
    arrays: dict[str, Any] = dict.fromkeys([*keys, "labels"], objects)
    np.savez(raw / "amazon_electronics_photo.npz", **arrays)
    with pytest.raises(DataError, match="Object arrays cannot be loaded"):
        load("amazon_photo", data_dir=tmp_path)
    assert not (tmp_path / "ran").exists()
    assert zipfile.is_zipfile(raw / "amazon_electronics_photo.npz")


def test_no_other_door_leads_to_pickle() -> None:
    """Of all code: `torch.load` reads weights only, numpy no objects, and nothing unpickles."""
    door = SRC / "silograph" / "graph" / "read" / "checked_pickle.py"
    # Between a simulation and its own workers, processes that one user has started.
    workers = SRC / "silograph" / "federation" / "workers"
    for path in SRC.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path != door and path.parent != workers:
            assert "workers.packing" not in text
            assert not re.search(
                r"^\s*(import|from) (pickle|shelve|marshal|dill|joblib)", text, re.M
            )
        for call in re.findall(r"torch\.load\([^\n]*", text):
            assert "weights_only=True" in call, path
        for call in re.findall(r"np\.load\([^\n]*", text):
            assert "allow_pickle=False" in call, path
