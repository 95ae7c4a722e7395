"""Laws of runs on silos' own data: those of a cut graph give the numbers of the run on the cut."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import silograph as sg
from commands import Capture
from mistakes import raises_code
from runs import FAST, go, outcome, rows_of, run_until
from silo_folders import NORTH, SOUTH, folder, same
from silograph.cli import run_app
from silograph.core.config import RunConfig
from silograph.core.run_file import read_toml
from silograph.deploy.demo import export_silos
from silograph.experiment.run.setup import Setup
from silograph.graph.datasets import load
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silograph.study.cells import Cell

MakeGraph = Callable[..., Graph]
CUT: dict[str, Any] = {"clients": 4, "partition": "random", "split": "0.4/0.3/0.3"}
SILOS: dict[str, Any] = {"clients": None, "partition": "silo", "rounds": 2}


@pytest.fixture
def exported(work: Path) -> Path:
    """The folder with the silos of the graph of 60 nodes."""
    export_silos(RunConfig(dataset="g.npz", **CUT), "silos")
    return work / "silos"


def on_silos(data: Any, **options: Any) -> sg.Result:
    values = {k: v for k, v in (FAST | SILOS | options).items() if v is not None}
    return sg.run(data, **values)


def numbers(result: sg.Result) -> dict[str, Any]:
    """The final result without the names of what it was run on."""
    return {k: v for k, v in outcome(result).items() if k not in ("dataset", "partition")}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_the_folders_is_the_run_on_the_cut(
    exported: Path, setups: list[Setup], method: str
) -> None:
    ours = on_silos(str(exported), method=method)
    theirs = go(load("g.npz"), method=method, rounds=2)
    assert numbers(ours) == numbers(theirs)
    assert rows_of(ours) == rows_of(theirs)
    assert ours.client_accuracy == theirs.client_accuracy
    assert list(ours.ledger.records) == list(theirs.ledger.records)
    if ours.model is not None and theirs.model is not None:
        same(tuple(ours.model.weights.items()), tuple(theirs.model.weights.items()))
    assert (ours.config.partition, ours.config.clients) == ("silo", 4)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("sparse", "multilabel", "options"),
    [
        (True, False, {"normalize": "row"}),
        (False, True, {"dtype": "float32", "block_size": 1}),
        (True, True, {"split": "public"}),
        (True, False, {"features": "degree"}),
        (False, False, {"features": "constant"}),
        (False, True, {"features": "onehot-degree", "normalize": "row"}),
    ],
)
def test_whatever_the_features_and_labels(
    work: Path, make_graph: MakeGraph, sparse: bool, multilabel: bool, options: dict[str, Any]
) -> None:
    graph = make_graph(60, sparse=sparse, multilabel=multilabel, missing=0.2)
    cut = go(graph, rounds=1).cut
    assert cut is not None
    sg.write_silos("silos", graph, cut.partition, cut.split)
    if options.get("split") == "public":
        graph = replace(graph, split=cut.split)
    options = options | {"method": "label_guided"}
    ours, theirs = on_silos("silos", **options), go(graph, rounds=2, **options)
    assert numbers(ours) == numbers(theirs)
    assert rows_of(ours) == rows_of(theirs)


def test_keys_that_are_words_leave_the_joined_graph_in_another_order(
    work: Path, make_graph: MakeGraph
) -> None:
    """Then the uncut view is the same to rounding; training and the other views are bit for bit."""
    graph = make_graph(60)
    graph = replace(graph, node_id=np.array([f"n{i * 7 % 60}" for i in range(60)]))
    cut = go(graph, rounds=1).cut
    assert cut is not None
    sg.write_silos("silos", graph, cut.partition, cut.split)
    for method in ("fedavg", "label_guided"):
        ours, theirs = on_silos("silos", method=method), go(graph, rounds=2, method=method)
        assert rows_of(ours) == rows_of(theirs)
        assert ours.test.server == theirs.test.server
        assert ours.test.uncut is not None
        assert theirs.test.uncut is not None
        assert ours.test.uncut.accuracy == theirs.test.uncut.accuracy
        assert ours.test.uncut.loss == pytest.approx(theirs.test.uncut.loss, rel=1e-10)


def test_silos_in_memory(exported: Path) -> None:
    silos = sg.read_silos(exported)
    assert numbers(on_silos(silos)) == numbers(on_silos(exported))
    assert on_silos(silos, out="run").config.dataset == "g"
    again = sg.resume("run", graph=silos)
    assert outcome(again) == outcome(on_silos(silos))


def test_a_run_goes_on_with_the_same_data_only(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {k: v for k, v in (FAST | SILOS).items() if v is not None}
    run_until(monkeypatch, "silos", 2, Path("died"), **options)
    whole = on_silos("silos", out="whole")
    assert outcome(sg.resume("died")) == outcome(whole)
    given = read_toml("whole/config.toml")
    assert (given["dataset"], given["partition"]) == (str(exported), "silo")
    edges = exported / "client_01" / "cross_edges.csv"
    lines = edges.read_text().splitlines()
    assert len(lines) > 2  # the same edges in another order: other slots
    edges.write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    with raises_code(sg.CheckpointError, "foreign-checkpoint", what="silos"):
        sg.resume("whole")


MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {"partition": "random"},
        r"^partition: expected none with silos, got random: they are cut alrea",
    ),
    ({"clients": 3}, r"^clients: expected 4, one for each silo, got 3: leave clients out$"),
    ({"drop_edges": 0.1}, r"^expected silos' data as they are, got drop_edges=0.1: nobody holds "),
    ({"largest_component": True}, r"^expected silos' data as they are, got largest_component=True"),
    ({"scale": 2.0}, r"^scale: expected 1 with silos, got 2.0: only generated graphs have another"),
    ({"split": "1/0"}, r"^split: expected 'public', 'full' or train/val/test such as"),
]


@pytest.mark.parametrize(("options", "line"), MISTAKES)
def test_options_that_cut(exported: Path, options: dict[str, Any], line: str) -> None:
    with pytest.raises(sg.ConfigError, match=line):
        on_silos("silos", **options)


def test_silos_without_anything_to_train_on(work: Path) -> None:
    for name, files in {"north": NORTH, "south": SOUTH}.items():
        nodes = files["nodes.csv"].replace("train", "val")
        folder(work / "pair" / name, files | {"nodes.csv": nodes})
    with raises_code(sg.DataError, "no-training-nodes"):
        on_silos("pair", split="public")


def test_silos_that_disagree_start_no_run(work: Path, capsys: Capture) -> None:
    for name, files in {"north": NORTH, "south": SOUTH}.items():
        folder(work / "pair" / name, files)
    (work / "pair" / "south" / "cross_edges.csv").write_text("own,silo,remote\nk1,north,a\n")
    assert run_app(["run", "pair", "--out", "result", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("error: expected both owners of a cross-silo edge to")
    assert not Path("result").exists()


def test_folders_of_silos_are_no_graph(exported: Path) -> None:
    for path in ("silos", "silos/client_00"):
        with pytest.raises(
            sg.DataError, match=r"^expected one graph, got silos.*, which holds silo"
        ):
            sg.load(path)


def test_a_comparison_knows_silos_by_all_their_files(exported: Path) -> None:
    def digest() -> str:
        return Cell({}, RunConfig(dataset="silos", partition="silo")).digest

    before = digest()
    assert before == digest()
    (exported / "client_00" / "key.pem").write_text("a silo's own")
    assert before == digest()
    features = exported / "client_02" / "features.csv"
    features.write_text(features.read_text() + "\n")
    assert before != digest()
    silos: Any = sg.read_silos("silos")
    for several in (lambda: sg.compare(silos, methods=["local"]), lambda: sg.tune(silos)):
        with pytest.raises(sg.ConfigError, match=r"^expected the path of the silos' folder for s"):
            several()
    found = sg.compare("silos", methods=["local"], seeds=2, rounds=1, hidden=4, processes=0)
    assert {line["clients"] for line in found.lines if line} == {4}
