"""A resumed run equals the uninterrupted one bit for bit, however it was stopped."""

import csv
import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import silograph as sg
from forked import completed
from mistakes import raises_code
from remote_runs import setup_of
from runs import dying, files_of, little_work, run_until, some_of
from silograph.core.errors import CheckpointError, ConfigError
from silograph.evaluation.scoring import personal
from silograph.experiment.run import run as loop
from silograph.experiment.run.result import Result
from silograph.experiment.run.result_folder import ResultFolder
from silograph.experiment.run.run import first_snapshot
from silograph.experiment.run.setup import Setup
from silograph.experiment.run.snapshot import identity, to_checkpoint
from silograph.graph.graph import Graph, Split, fingerprint
from silograph.methods import METHODS

KINDS_OF_STATE = ("fedavg", "fedopt", "scaffold", "label_guided")
KILLS = 1  # a method; the slow suite has 30
OPTIONS: dict[str, Any] = {
    "method": "fedavg",
    "clients": 5,
    "partition": "random",
    "rounds": 6,
    "hidden": 8,
    "checkpoint_every": 1,
}


def kill_and_compare(methods: Sequence[str], tmp_path: Path, kills: int, seed: int) -> None:
    words = [",".join(methods), str(tmp_path), str(kills), str(seed)]
    done = completed([sys.executable, "-m", "killing", *words])
    assert done.returncode == 0, done.stderr
    for method, line in zip(methods, done.stdout.splitlines(), strict=True):
        runs, landed = map(int, line.split())
        assert landed >= kills
        expected = files_of(tmp_path / method / "reference")
        for number in range(runs):
            assert files_of(tmp_path / method / str(number)) == expected


def test_killed_at_random_instants(tmp_path: Path) -> None:
    """One method for each kind of state that is kept; the slow test below has all."""
    kill_and_compare(KINDS_OF_STATE, tmp_path, KILLS, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_thirty_times(method: str, tmp_path: Path) -> None:
    kill_and_compare([method], tmp_path, 30, seed=2)


@pytest.mark.law(sample=12)
@pytest.mark.parametrize("every", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("method", METHODS)
def test_resumed_in_every_round(
    make_graph: Callable[..., Graph],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    every: int,
) -> None:
    """One run dies in every round, each time after it was resumed from its last checkpoint."""
    graph, out = make_graph(), tmp_path / "cut"
    options = {"method": method, "checkpoint_every": every, **some_of(method, 0.6)}
    options |= little_work(method)
    sg.run(graph, **OPTIONS | options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 1, out, **OPTIONS | options)
    for last in range(2, OPTIONS["rounds"] + 1):
        with dying(monkeypatch, last):
            sg.resume(out, graph=graph)
        assert not (out / "result.json").exists()
    sg.resume(out, graph=graph)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["fedais", "fedpub", "gcflplus"])
def test_killed_after_the_last_checkpoint(
    make_graph: Callable[..., Graph],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """What the last round has told of clients comes from the checkpoint then."""
    options = OPTIONS | {"method": method, "keep_optimizer": True}
    sg.run(make_graph(), **options, out=str(tmp_path / "whole"))

    def die(*_: Any) -> Result:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_result", die)
        with pytest.raises(KeyboardInterrupt):
            sg.run(make_graph(), **options, out=str(tmp_path / "cut"))
    sg.resume(tmp_path / "cut", graph=make_graph())
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_resumed_once_from_every_round(
    make_graph: Callable[..., Graph],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    every: int,
) -> None:
    """Runs that die in one round each, and that are resumed once from the checkpoint before it."""
    graph = make_graph()
    options = {"method": method, "checkpoint_every": every, **some_of(method, 0.6)}
    sg.run(graph, **OPTIONS | options, out=str(tmp_path / "whole"))
    expected = files_of(tmp_path / "whole")
    for last in range(1, OPTIONS["rounds"] + 1):
        out = tmp_path / str(last)
        run_until(monkeypatch, graph, last, out, **OPTIONS | options)
        assert not (out / "result.json").exists()
        sg.resume(out, graph=graph)
        assert files_of(out) == expected


def test_result_objects_are_equal_too(
    make_graph: Callable[..., Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph()
    whole = sg.run(graph, **OPTIONS, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 4, tmp_path / "cut", **OPTIONS)
    resumed = sg.resume(tmp_path / "cut", graph=graph)
    assert_equal(resumed, whole)
    assert_equal(sg.resume(tmp_path / "cut", graph=graph), whole)  # complete: worked out again


def assert_equal(a: Result, b: Result) -> None:
    assert (a.test, a.val, a.best_round, a.stopped) == (b.test, b.val, b.best_round, b.stopped)
    assert a.model is not None
    assert b.model is not None
    assert all(torch.equal(w, b.model.weights[k]) for k, w in a.model.weights.items())
    assert list(a.ledger.records) == list(b.ledger.records)
    assert len(a.rounds) == len(b.rounds)
    for row, other in zip(a.rounds, b.rounds, strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}


@pytest.fixture
def stopped(
    make_graph: Callable[..., Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Graph, dict[str, Any]]:
    """A run that died in round 5, its graph, and what it should have left."""
    graph = make_graph()
    sg.run(graph, **OPTIONS, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 5, tmp_path / "cut", **OPTIONS)
    return tmp_path / "cut", graph, files_of(tmp_path / "whole")


def checkpoint(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"round-{number:09d}.checkpoint"


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_checkpoint_falls_back_and_says_so(
    stopped: tuple[Path, Graph, dict[str, Any]], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, graph, expected = stopped
    newest = checkpoint(folder, 4)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes({"cut": bytes(data[:-5]), "flip": bytes(data), "empty": b""}[damage])
    with caplog.at_level(logging.WARNING, logger="silograph"):
        sg.resume(folder, graph=graph)
    assert "round-000000004.checkpoint cannot be used" in caplog.text
    assert "going on from round 3" in caplog.text
    assert files_of(folder) == expected


def test_damaged_best_weights_fall_back(
    make_graph: Callable[..., Graph],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The weights of the best round stand in a file of their own once another round follows."""
    graph, options = make_graph(), {"rounds": 40, "lr": 0.05}
    sg.run(graph, **OPTIONS | options, out=str(tmp_path / "whole"))
    rounds = list(csv.DictReader((tmp_path / "whole" / "rounds.csv").read_text().splitlines()))
    keys = [(float(r["val_server_accuracy"]), -float(r["val_server_loss"])) for r in rounds]
    best = [max(range(t + 1), key=lambda i: (keys[i], -i)) + 1 for t in range(len(keys))]
    # The first round whose best was found two rounds before, and which is followed by others.
    last = next(t for t in range(3, 40) if best[t - 2] == t - 1 and best[t - 1] == t - 1)
    run_until(monkeypatch, graph, last + 1, tmp_path / "cut", **OPTIONS | options)
    weights = tmp_path / "cut" / "checkpoints" / f"best-{last - 1:09d}.checkpoint"
    weights.write_bytes(weights.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, logger="silograph"):
        sg.resume(tmp_path / "cut", graph=graph)
    assert f"round-{last:09d}.checkpoint cannot be used" in caplog.text
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
    caplog.clear()
    sg.resume(tmp_path / "cut", graph=graph)  # what was damaged has been written again
    assert caplog.text == ""


def test_no_whole_checkpoint_left(stopped: tuple[Path, Graph, dict[str, Any]]) -> None:
    folder, graph, _ = stopped
    for number in (3, 4):
        checkpoint(folder, number).write_bytes(b"x")
    with raises_code(CheckpointError, "missing-checkpoint"):
        sg.resume(folder, graph=graph)


def test_killed_before_the_first_checkpoint(
    make_graph: Callable[..., Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph()
    sg.run(graph, **OPTIONS, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 1, tmp_path / "cut", **OPTIONS)
    sg.resume(tmp_path / "cut", graph=graph)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_another_config_is_refused(stopped: tuple[Path, Graph, dict[str, Any]]) -> None:
    folder, graph, _ = stopped
    config = folder / "config.toml"
    assert "\nlr = 0.01\n" in config.read_text().partition("[defaults]")[2]  # it was not given
    config.write_text("lr = 0.02\n" + config.read_text())
    with raises_code(CheckpointError, "foreign-checkpoint", what="config lr"):
        sg.resume(folder, graph=graph)


def test_another_graph_is_refused(stopped: tuple[Path, Graph, dict[str, Any]]) -> None:
    folder, graph, _ = stopped
    assert isinstance(graph.x, torch.Tensor)
    with raises_code(CheckpointError, "foreign-checkpoint", what="graph"):
        sg.resume(folder, graph=replace(graph, x=graph.x + 1))


def test_another_version_is_refused(
    stopped: tuple[Path, Graph, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from silograph.experiment.run.setup import versions

    folder, graph, _ = stopped
    newer = versions() | {"silograph": "99"}
    monkeypatch.setattr("silograph.experiment.run.snapshot.versions", lambda: newer)
    with raises_code(CheckpointError, "foreign-checkpoint", what="silograph"):
        sg.resume(folder, graph=graph)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", ["rounds.csv", "ledger.jsonl"])
def test_a_file_that_lost_its_end_falls_back(
    stopped: tuple[Path, Graph, dict[str, Any]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, graph, expected = stopped
    path = folder / name
    path.write_bytes(path.read_bytes()[:-10])
    with caplog.at_level(logging.WARNING, logger="silograph"):
        sg.resume(folder, graph=graph)
    assert f"round-000000004.checkpoint cannot be used: {name} has" in caplog.text
    assert files_of(folder) == expected


def test_files_that_lost_more_are_refused(stopped: tuple[Path, Graph, dict[str, Any]]) -> None:
    folder, graph, _ = stopped
    (folder / "rounds.csv").write_text("")
    with pytest.raises(CheckpointError, match=r"rounds.csv has 0 bytes, fewer than the \d+"):
        sg.resume(folder, graph=graph)
    assert (folder / "ledger.jsonl").stat().st_size > 0  # nothing was cut


def test_a_checkpoint_of_another_run_is_refused(
    stopped: tuple[Path, Graph, dict[str, Any]], tmp_path: Path
) -> None:
    folder, graph, _ = stopped
    sg.run(graph, **OPTIONS, seed=7, out=str(tmp_path / "other"))
    for number in (3, 4):
        checkpoint(folder, number).unlink()
    foreign = checkpoint(tmp_path / "other", 6)
    checkpoint(folder, 6).write_bytes(foreign.read_bytes())
    with pytest.raises(CheckpointError, match="it belongs to another run"):
        sg.resume(folder, graph=graph)


def test_a_damaged_run_json_is_refused(stopped: tuple[Path, Graph, dict[str, Any]]) -> None:
    folder, graph, _ = stopped
    (folder / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"expected what the run was in .*run.json, got"):
        sg.resume(folder, graph=graph)


def test_a_graph_from_memory_has_to_be_given(stopped: tuple[Path, Graph, dict[str, Any]]) -> None:
    with raises_code(ConfigError, "part-not-saved", part="graph"):
        sg.resume(stopped[0])


def test_a_complete_run_without_checkpoints_is_left_alone(
    make_graph: Callable[..., Graph], tmp_path: Path
) -> None:
    graph, out = make_graph(), tmp_path / "run"
    sg.run(graph, **OPTIONS | {"checkpoint_every": 0}, out=str(out))
    before = files_of(out)
    with raises_code(ConfigError, "completed-run"):
        sg.resume(out, graph=graph)
    assert files_of(out) == before


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("last", [1, 4])  # before the first checkpoint, and after
def test_a_run_from_before_a_field_goes_on(
    make_graph: Callable[..., Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """The default of a field that came later says how things were."""

    def older(setup: Setup) -> dict[str, str]:
        return {k: v for k, v in identity(setup).items() if k != "config drop_edges"}

    graph, out = make_graph(), tmp_path / "cut"
    sg.run(graph, **OPTIONS, out=str(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr("silograph.experiment.run.result_folder.identity", older)
        run_until(patch, graph, last, out, **OPTIONS)
    text = (out / "config.toml").read_text(encoding="utf-8")
    (out / "config.toml").write_text(text.replace("drop_edges = 0.0\n", "drop_edges = 0.1\n"))
    with raises_code(CheckpointError, "foreign-checkpoint", what="config drop_edges"):
        sg.resume(out, graph=graph)
    (out / "config.toml").write_text(text.replace("drop_edges = 0.0\n", ""), encoding="utf-8")
    sg.resume(out, graph=graph)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_another_graph_is_refused_before_the_first_checkpoint(
    make_graph: Callable[..., Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_until(monkeypatch, make_graph(), 1, tmp_path / "cut", **OPTIONS)
    with raises_code(CheckpointError, "foreign-checkpoint", what="graph"):
        sg.resume(tmp_path / "cut", graph=make_graph(seed=1))


def test_a_method_judged_by_own_models_keeps_its_server_model(
    make_graph: Callable[..., Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As methods with personalized models do: the best round is another than the server's."""
    own = replace(METHODS["fedavg"], evaluate=personal())
    monkeypatch.setitem(METHODS, "fedavg", own)
    graph = make_graph()
    sg.run(graph, **OPTIONS, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 5, tmp_path / "cut", **OPTIONS)
    sg.resume(tmp_path / "cut", graph=graph)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_what_is_no_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with raises_code(ConfigError, "missing-file"):
            sg.resume(folder)


def test_two_processes_cannot_write_one_run(stopped: tuple[Path, Graph, dict[str, Any]]) -> None:
    folder, graph, _ = stopped
    holder = ResultFolder(folder)
    with raises_code(ConfigError, "folder-in-use"):
        sg.resume(folder, graph=graph)
    holder.close()
    sg.resume(folder, graph=graph)


def test_no_checkpoints_on_request(make_graph: Callable[..., Graph], tmp_path: Path) -> None:
    out = tmp_path / "run"
    sg.run(make_graph(), **OPTIONS | {"checkpoint_every": 0}, out=str(out))
    assert not (out / "checkpoints").exists()
    assert (out / "ledger.jsonl").stat().st_size > 0


def test_fingerprints_tell_graphs_apart(make_graph: Callable[..., Graph]) -> None:
    graph = make_graph(sparse=True)
    other = make_graph(sparse=True, seed=1)
    assert fingerprint(graph) == fingerprint(make_graph(sparse=True))
    for change in (
        {"x": other.x},
        {"y": (graph.y + 1) % 3},
        {"adj": other.adj},
        {"node_id": graph.node_id + 1},
        {"num_classes": 9},
        {"split": Split(graph.y == 0, graph.y == 1, graph.y == 2)},
    ):
        assert fingerprint(replace(graph, **change)) != fingerprint(graph)


@pytest.mark.parametrize(
    ("every", "number", "idle", "took", "due"),
    [
        (None, 3, 9.9, 1.0, False),
        (None, 3, 10.0, 1.0, True),
        (None, 3, 0.0, 0.0, True),  # the first of a process
        (None, 6, 0.0, 1.0, True),  # the last
        (2, 3, 99.0, 1.0, False),
        (2, 4, 0.0, 1.0, True),
        (0, 6, 99.0, 0.0, False),
    ],
)
def test_when_a_checkpoint_is_due(
    make_graph: Callable[..., Graph],
    monkeypatch: pytest.MonkeyPatch,
    every: int | None,
    number: int,
    idle: float,
    took: float,
    due: bool,
) -> None:
    """By default writing takes a tenth of the time at most, after the first and the last one."""
    setup = setup_of(make_graph(), METHODS["fedavg"], rounds=6, checkpoint_every=every)
    at = replace(first_snapshot(setup), round=number)
    writer = loop.CheckpointWriter(setup, None)
    writer._last, writer._seconds = -idle, took
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: 0.0))
    assert writer._is_due(at) is due


def test_checkpoints_by_the_clock(
    make_graph: Callable[..., Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second passes at each look at the clock, so that a checkpoint takes one."""
    now = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(now)))
    options = {**OPTIONS, "rounds": 40, "checkpoint_every": None}
    written: list[int] = []
    make = to_checkpoint

    def noted(setup: Any, snapshot: Any, *rest: Any) -> Any:
        written.append(snapshot.round)
        return make(setup, snapshot, *rest)

    monkeypatch.setattr(loop, "to_checkpoint", noted)
    sg.run(make_graph(), **options, out=str(tmp_path / "run"))
    assert written == [1, 11, 21, 31, 40]  # one look a round, and ten times what one takes
