"""Laws of shards: runs that read clients from files leave the bits of runs on the graph."""

import csv
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from mistakes import raises_code
from rating_graphs import rating_graph
from runs import (
    FAST,
    MakeGraph,
    dying,
    files_of,
    little_work,
    run_until,
    same_bits,
    some_of,
    weights_of,
)
from silograph import shard
from silograph.cli import run_app
from silograph.federation import in_process
from silograph.graph.graph import Graph
from silograph.graph.silos.shards import MANIFEST, ROUTE, ShardedClients, Shards, read_shards
from silograph.methods import METHODS
from worker_pools import Room, rooms

__all__ = ["rooms"]
CUT: dict[str, Any] = {"clients": 5, "partition": "random", "split": "0.4/0.3/0.3"}
CUT |= {"dtype": "float64"}
RUN: dict[str, Any] = {**FAST, "block_size": 2, "kernels": "torch"}
SETTINGS: dict[str, dict[str, Any]] = {
    "standardized": {"normalize": "standard"},
    "rows": {"normalize": "row"},
    "constant": {"features": "onehot-degree"},
    "seeds": {"seed": 3, "split_seed": 4, "partition_seed": 5},
    "dropped": {"drop_edges": True},
    "float32": {"dtype": "float32"},
}


def run_on(shards: Shards, folder: Path, **options: Any) -> sg.Result:
    """Run on shards, with the options of data left to them."""
    own = {name: v for name, v in (RUN | options).items() if name not in CUT}
    return sg.run(shards.clients.folder, **own, out=str(folder))


def training_of(folder: Path) -> dict[str, Any]:
    """What training leaves; the uncut view and the constant baseline need the whole graph."""
    files = files_of(folder)
    result, clients = files.pop("result"), csv.DictReader(files.pop("clients").splitlines())
    rows = [{name: v for name, v in row.items() if "uncut" not in name} for row in clients]
    return (
        files
        | {"clients": rows}
        | {
            part: {view: s for view, s in result[part].items() if view != "uncut"}
            for part in ("val", "test")
        }
    )


def check_equal(
    graph: Graph, folder: Path, cut: dict[str, Any], *engines: dict[str, Any], **options: Any
) -> None:
    """Assert that runs on shards leave what a run on the graph leaves."""
    shards = shard(graph, **CUT | cut, out=str(folder / "shards"))
    sg.run(graph, **RUN | options | CUT | cut, out=str(folder / "here"))
    seed = {"seed": cut["seed"]} if "seed" in cut else {}
    for number, engine in enumerate(engines or ({},)):
        run_on(shards, folder / str(number), **options | seed | engine)
        assert training_of(folder / str(number)) == training_of(folder / "here")


@pytest.mark.law(sample=4)
@pytest.mark.parametrize("method", [n for n, m in METHODS.items() if not m.setting.uncut])
def test_every_method(
    make_graph: MakeGraph,
    rooms: list[Room],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
) -> None:
    """With less memory than the files take, and at workers."""
    monkeypatch.setattr(in_process, "SHARD_BYTES", 1)
    if METHODS[method].setting.held(METHODS[method].options()) is not None:
        pytest.skip("the server holds a part of the graph")
    options = {"method": method, **some_of(method, 0.6), **little_work(method)}
    check_equal(make_graph(), tmp_path, {}, {}, {"workers": 2, "keep_every": 2}, **options)
    assert rooms


@pytest.mark.law(sample=2)
@pytest.mark.parametrize(
    ("method", "model"),
    [("fedacs", "rating_gcn"), ("fedmf", "rating_mf"), ("fedgnn", "rating_gat")],
)
def test_ratings(tmp_path: Path, method: str, model: str) -> None:
    own = {"pseudo": 20, "clip": 0.1} if method == "fedgnn" else {}
    check_equal(rating_graph(), tmp_path, {}, method=method, model=model, options=own)


@pytest.mark.law(sample=2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_data(make_graph: MakeGraph, tmp_path: Path, setting: str) -> None:
    check_equal(make_graph(), tmp_path, SETTINGS[setting])


def test_sparse_features_and_weights_of_edges(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph(sparse=True)
    weight = torch.arange(graph.adj.nnz).double()
    weighted = replace(graph, edge_weight=weight + weight[graph.adj.by_column])  # symmetric
    check_equal(weighted, tmp_path, {"edge_weights": "scale"})


def test_a_run_is_resumed(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, rooms: list[Room], tmp_path: Path
) -> None:
    shards = shard(make_graph(), **CUT, out=str(tmp_path / "shards"))
    own = {name: v for name, v in RUN.items() if name not in CUT} | {"method": "fedper"}
    run_on(shards, tmp_path / "whole", method="fedper")
    folder = str(shards.clients.folder)
    run_until(monkeypatch, folder, 3, tmp_path / "cut", **own)
    with dying(monkeypatch, 4):
        sg.resume(tmp_path / "cut", engine={"workers": 2})
    sg.resume(tmp_path / "cut")
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
    assert rooms


def test_the_process_of_the_command_reads_no_client(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers are processes, in which nothing is replaced."""
    shards = shard(make_graph(), **CUT, out=str(tmp_path / "shards"))
    run_on(shards, tmp_path / "here")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(ShardedClients, "read", refuse)
    run_on(shards, tmp_path / "there", workers=2)
    assert files_of(tmp_path / "there") == files_of(tmp_path / "here")


def test_a_run_may_name_the_cut_that_its_shards_have(make_graph: MakeGraph, tmp_path: Path) -> None:
    shards = shard(make_graph(), **CUT, out=str(tmp_path / "shards"))
    folder = str(shards.clients.folder)
    plain, named = sg.run(folder, rounds=1), sg.run(folder, rounds=1, partition="random")
    assert same_bits(weights_of(named), weights_of(plain))


def test_what_is_refused(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph()
    shards = shard(graph, **CUT, out=str(tmp_path / "shards"))
    folder = shards.clients.folder
    refused: dict[str, Any] = {"clients": 4, "partition": "louvain", "features": "degree"}
    refused |= {"normalize": "row", "drop_edges": True, "split_seed": 8}
    for name, value in refused.items():
        with raises_code(sg.ConfigError, "unread-option", option=name):
            sg.run(folder, **{name: value})
    for options in ({"method": "centralized"}, {"local_bias": True}, {"class_weight": "balanced"}):
        with raises_code(sg.ConfigError, "conflicting-options"):
            sg.run(folder, **options)
    with raises_code(sg.DataError, "wrong-format"):
        sg.load(folder)
    with raises_code(sg.ConfigError, "existing-output"):
        shard(graph, **CUT, out=str(folder))
    with raises_code(sg.ConfigError, "missing-option", option="out"):
        shard(graph, **CUT)
    for name, value in (
        ("method", "centralized"),
        ("class_weight", "balanced"),
        ("local_bias", True),
        ("normalize", "standard_client"),
    ):
        with raises_code(sg.ConfigError, "conflicting-options", options=[name]):
            shard(graph, **CUT | {name: value}, out=str(tmp_path / "other"))
    with raises_code(sg.ConfigError, "option-value", option="dataset"):
        shard(folder, out=str(tmp_path / "other"))
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


@pytest.mark.parametrize("harm", ["changed", "shorter", "missing"])
@pytest.mark.parametrize("name", ["000002.safetensors", ROUTE, MANIFEST])
def test_damaged_files_are_named(
    make_graph: MakeGraph, tmp_path: Path, name: str, harm: str
) -> None:
    shards = shard(make_graph(), **CUT, out=str(tmp_path / "shards"))
    path = shards.clients.folder / name
    data, generator = path.read_bytes(), random.Random(name)
    if harm == "changed":
        place = generator.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    elif harm == "shorter":
        path.write_bytes(data[: generator.randrange(len(data))])
    else:
        path.unlink()
    code = "damaged-file" if harm != "missing" else "missing-file"
    if harm == "missing" and name == MANIFEST:  # a folder of anything
        return
    with raises_code(sg.DataError, code, path=str(path)):
        run_on(shards, tmp_path / "run")
    assert not (tmp_path / "run").exists() or name != MANIFEST


def test_a_manifest_names_files_of_its_folder_only(make_graph: MakeGraph, tmp_path: Path) -> None:
    from silograph.graph.silos.shards import _digest

    shards = shard(make_graph(), **CUT, out=str(tmp_path / "shards"))
    path = shards.clients.folder / MANIFEST
    contents = json.loads(path.read_text())
    del contents["digest"]
    contents["files"][1]["name"] = "../secret"
    path.write_text(json.dumps({"digest": _digest(json.dumps(contents))} | contents))
    with raises_code(sg.DataError, "damaged-file", path=str(path)):
        run_on(shards, tmp_path / "run")


def test_the_command_writes_what_the_function_writes(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--clients", "3", "--partition", "random", "--normalize", "row"]
    assert run_app(["shard", "digits", *words, "--out", "a"]) == 0
    shard("digits", clients=3, partition="random", normalize="row", out="b")
    assert {p.name: p.read_bytes() for p in Path("a").iterdir()} == {
        p.name: p.read_bytes() for p in Path("b").iterdir()
    }
    shards = read_shards("a")
    assert torch.equal(shards.clients.read().off, shards.clients.off)
    assert run_app(["run", "a", "--rounds", "1", "--hidden", "4", "--out", "r"]) == 0
    assert run_app(["report", "r"]) == 0
