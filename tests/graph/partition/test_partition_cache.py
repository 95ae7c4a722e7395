"""The cache of METIS' parts: the same cut with it and without, whatever is in its folder."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pymetis
import pytest
import torch

from silograph.graph.graph import Graph
from silograph.graph.partition import partition_cache
from silograph.graph.partition.partition import make_partition
from silograph.graph.partition.partition_cache import HASH_BYTES, partition_folder

MakeGraph = Callable[..., Graph]
NODES = 60


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, in which graphs of all sizes are stored."""
    monkeypatch.setenv("SILOGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr(partition_cache, "MIN_ENTRIES", 0)
    return tmp_path / "partitions"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parts of every call of METIS."""
    seen: list[int] = []
    part_graph: Any = pymetis.part_graph

    def count(parts: int, *values: object, **options: object) -> object:
        seen.append(parts)
        return part_graph(parts, *values, **options)

    monkeypatch.setattr(pymetis, "part_graph", count)
    return seen


def cut(graph: Graph, clients: int = 9, key: int = 0) -> str:
    return make_partition(graph, "metis", clients=clients, key=key).hash


def test_metis_runs_once(
    make_graph: MakeGraph, folder: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(NODES)
    first = cut(graph)
    assert [cut(graph), cut(graph)] == [first, first]
    assert calls == [9]
    monkeypatch.setattr(partition_cache, "MIN_ENTRIES", graph.adj.nnz + 1)
    assert cut(graph) == first
    assert calls == [9, 9]


def test_everything_that_decides_the_parts_counts(
    make_graph: MakeGraph, folder: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(NODES)
    cut(graph)
    fewer = replace(graph, adj=make_graph(NODES, seed=1).adj)
    others = [fewer, replace(graph, node_id=graph.node_id[::-1].copy())]
    for other in others:
        cut(other)
    cut(graph, clients=10)
    cut(graph, key=1)
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0")
    cut(graph)
    assert len(calls) == len(list(folder.iterdir())) == 6
    cut(replace(graph, x=torch.zeros(NODES, 1), y=graph.y.flip(0)))  # METIS sees neither
    assert len(calls) == 6


def damage_cut_off(content: bytes) -> bytes:
    return content[:-1]


def damage_bit(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def damage_hash(content: bytes) -> bytes:
    return b"\0" + content[1:]


def damage_part(content: bytes) -> bytes:
    """A part that there is not, under a hash that is right."""
    data = np.full((len(content) - HASH_BYTES) // 4, 9, "<i4").tobytes()
    return partition_cache._hash(data) + data


@pytest.mark.parametrize(
    "damage", [damage_cut_off, damage_bit, damage_hash, damage_part, lambda _content: b""]
)
def test_a_damaged_file_is_written_again(
    make_graph: MakeGraph,
    folder: Path,
    calls: list[int],
    damage: Callable[[bytes], bytes],
) -> None:
    graph = make_graph(NODES)
    first = cut(graph)
    (path,) = folder.iterdir()
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert cut(graph) == first
    assert len(calls) == 2
    assert path.read_bytes() == content
    assert cut(graph) == first
    assert len(calls) == 2


def test_a_folder_that_cannot_be_written_costs_only_time(
    make_graph: MakeGraph, folder: Path, calls: list[int]
) -> None:
    folder.write_text("no folder")
    graph = make_graph(NODES)
    assert cut(graph) == cut(graph)
    assert len(calls) == 2
    folder.unlink()
    first = cut(graph)
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()
    assert cut(graph) == first


def test_threads_that_cut_at_once_leave_one_whole_file(make_graph: MakeGraph, folder: Path) -> None:
    graph, hashes = make_graph(NODES), list[str]()
    threads = [threading.Thread(target=lambda: hashes.append(cut(graph))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hashes) == 8
    assert len(set(hashes)) == 1
    assert [path.suffix for path in folder.iterdir()] == [".metis"]


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SILOGRAPH_CACHE", "off")
    assert partition_folder() is None
    monkeypatch.setenv("SILOGRAPH_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert partition_folder() == tmp_path / "partitions"
    monkeypatch.delenv("SILOGRAPH_CACHE")
    assert partition_folder() == tmp_path / "xdg" / "silograph" / "partitions"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert partition_folder() == tmp_path / "home" / ".cache" / "silograph" / "partitions"
