"""Laws of a study's file and of its cells: nothing is lost, nothing is run twice."""

import io
import json
import lzma
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import save
from mistakes import raises_code
from runs import FAST, MakeGraph, outcome
from silograph.core.config import RunConfig, make_config
from silograph.core.errors import ConfigError
from silograph.experiment.run.run import run
from silograph.graph.graph import Graph, Split, fingerprint
from silograph.graph.read.ratings import ratings
from silograph.study.cells import Cell, Line, digest_of, run_cell, settings_of_cell
from silograph.study.study import (
    ExecutionOptions,
    StudyFile,
    check_processes,
    pack,
    packed_path,
    read_lines,
    run_missing_cells,
)
from silograph.study.workers import (
    StudyProgress,
    Worker,
    outcome_of,
    read_graph,
    show_study,
    write_graph,
)

HERE = ExecutionOptions(processes=0)
SHORT = FAST | {"rounds": 2}
SMALL = RunConfig(clients=3, partition="random", rounds=2, hidden=4, split="0.4/0.3/0.3")


def cell(graph: Graph | None = None, **changes: Any) -> Cell:
    config = make_config(vars(SMALL) | changes)
    return Cell({"method": config.method, "seed": config.seed}, config, graph)


def without_time(line: Line) -> Line:
    return {k: v for k, v in line.items() if k not in ("seconds", "peak_memory_bytes")}


# --- identity -------------------------------------------------------------------------------------


def test_what_decides_a_result_decides_the_digest() -> None:
    known = cell().digest
    same: list[dict[str, Any]] = [
        {"out": "x", "checkpoint_every": 7, "data_dir": "/d"},
        {"partition_seed": 0, "lr": 0.02, "optimizer": "sgd"},  # as they are resolved
        {"options": {"server_beta1": 0.9}},
    ]
    other: list[dict[str, Any]] = [
        {"seed": 1},
        {"rounds": 3},
        {"method": "fedavg"},
        {"options": {"server_beta1": 0.8}},
        {"dataset": "cora"},
        {"threads": 2},
    ]
    assert all(cell(**changes).digest == known for changes in same)
    digests = {cell(**changes).digest for changes in other}
    assert len(digests | {known}) == len(other) + 1


def test_the_number_of_clients_is_written_out() -> None:
    assert settings_of_cell(RunConfig())["clients"] == 10
    assert settings_of_cell(RunConfig(partition="silo"))["clients"] is None


def test_a_key_that_came_later_has_its_default() -> None:
    line = cell().start
    known = digest_of(line)
    del line["config"]["normalize"]
    del line["config"]["options"]["server_optimizer.server_beta2"]
    assert digest_of(line) == known
    line["config"]["method"] = "gone"  # nothing is known of its options
    assert digest_of(line) != known


def test_a_graph_is_known_by_what_it_holds(make_graph: MakeGraph, work: Path) -> None:
    here = cell(make_graph()).start
    assert here["graph"] == fingerprint(make_graph())
    assert digest_of(here) != cell(make_graph(seed=1)).digest
    file = cell(dataset="g.npz").digest
    assert file == cell(dataset=str(work / "g.npz")).digest
    save("g.npz", make_graph(seed=1))
    assert cell(dataset="g.npz").digest != file
    assert cell(dataset="no.npz").start["graph"] is None


METHOD = """from dataclasses import replace
from silograph.methods import FEDAVG
Net = replace(FEDAVG, name="own")
"""


@pytest.mark.parametrize(("part", "source"), [("model", "Net = None\n"), ("method", METHOD)])
def test_what_users_wrote_is_known_by_its_source(tmp_path: Path, part: str, source: str) -> None:
    """Else a line of the file as it was would stand for what it has become."""
    path = tmp_path / "mine.py"
    path.write_text(source, encoding="utf-8")
    own: dict[str, Any] = {part: f"{path}:Net", "hidden": 128}  # a module decides its own
    before = cell(**own).digest
    assert digest_of(json.loads(json.dumps(cell(**own).start))) == before
    path.write_text(source + "# something else\n", encoding="utf-8")
    assert cell(**own).digest != before
    path.unlink()
    with pytest.raises(ConfigError, match=r"expected to import .*mine\.py, got.* No such file"):
        _ = cell(**own).digest


# --- one cell -------------------------------------------------------------------------------------


def test_a_line_is_what_the_run_gives(make_graph: MakeGraph) -> None:
    graph, config = make_graph(), make_config(SHORT)
    result = run(graph, **SHORT)
    line = json.loads(
        json.dumps(run_cell(Cell({}, config, graph)))
    )  # as it comes back from the file
    told = outcome(result)
    del told["bytes"]["handed_over"]  # after the run, which a study does not compare
    for view, scores in told["test"].items():
        assert {k: line["test"][view][k] for k in scores} == scores
    for key in ("best_round", "stopped", "bytes", "flops", "clients"):
        assert line[key] == told[key]
    assert line["rounds"] == 2
    assert line["judge"] == "server"
    assert line["partition"] == result.partition_hash
    assert line["last"]["test_server_accuracy"] == result.rounds[-1]["test_server_accuracy"]
    curve = [row["val_server_accuracy"] for row in result.rounds]
    assert line["curve"]["val"] == [round(float(v or 0), 5) for v in curve]
    assert line["curve"]["bytes"] == [row["bytes"] for row in result.rounds]


def test_test_scores_can_be_kept_back(make_graph: MakeGraph) -> None:
    line = run_cell(Cell({}, make_config(SHORT), make_graph()), test=False)
    assert "test" not in json.dumps(line)
    assert line["val"]["server"]["accuracy"] is not None


def test_an_error_is_a_line(make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    line = run_cell(Cell({}, make_config(SHORT | {"clients": 61}), make_graph()))
    assert line["error"] == "clients: expected 1 to 60 (one node each at least), got 61"
    assert line["kind"] == "PartitionError"

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("a\nbug")

    monkeypatch.setattr("silograph.study.cells.run", broken)
    assert run_cell(Cell({}, make_config(SHORT)))["error"] == r"KeyError: 'a\nbug'"


def test_peak_memory_is_not_told_where_it_cannot_be(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silograph.study.cells._reset_peak_memory", lambda: False)
    assert run_cell(Cell({}, make_config(SHORT), make_graph()))["peak_memory_bytes"] is None


@pytest.mark.parametrize("sparse", [False, True])
def test_a_graph_is_handed_over_whole(make_graph: MakeGraph, tmp_path: Path, sparse: bool) -> None:
    graph = make_graph(sparse=sparse, missing=0.2)
    part = torch.arange(60) % 3
    graph = replace(
        graph,
        split=Split(part == 0, part == 1, part == 2),
        silo=part,
        silo_names=("a", "b", "c"),
        class_names=("x", "y", "z"),
        node_id=graph.node_id.astype(str),
    )
    rated = ratings([["a", "x", 0.5], ["b", "x", 1]], scale=(0, 2), categories=["p", "q"])
    for each in (graph, replace(make_graph(multilabel=True), name="other"), rated):
        write_graph(tmp_path / "g.npz", each)
        back = read_graph(tmp_path / "g.npz")
        assert fingerprint(back) == fingerprint(each)
        for name in ("name", "silo_names", "class_names", "scale"):
            assert getattr(back, name) == getattr(each, name)
        assert (back.silo is None) == (each.silo is None)
        assert back.silo is None or torch.equal(back.silo, part)


# --- the file -------------------------------------------------------------------------------------


def some_line(seed: int) -> Line:
    return cell(seed=seed).start | {"error": "no ± more", "kind": "TrainingError"}


def test_a_line_that_was_cut_off_is_dropped_and_no_other(tmp_path: Path) -> None:
    """The file as a kill may leave it, cut somewhere in its last line."""
    path = tmp_path / "s.jsonl"
    with StudyFile(path) as file:
        for seed in (0, 1):
            file.add(some_line(seed))
    text = path.read_bytes()
    first = text.index(b"\n") + 1
    for size in [0, *range(first, len(text) - 3, 61), *range(len(text) - 3, len(text) + 1)]:
        path.write_bytes(text[:size])
        whole = 0 if size == 0 else 1 + (size >= len(text) - 1)  # only the newline is missing
        assert len(read_lines(path)) == whole
        with StudyFile(path) as file:
            assert [line["config"]["seed"] for line in file.lines] == [0, 1][:whole]
            file.add(some_line(2))
        assert [line["config"]["seed"] for line in read_lines(path)] == [*[0, 1][:whole], 2]
        assert path.read_bytes().count(b"\n") == whole + 1


def test_packed_lines_come_before_those_that_are_not(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    for seed in (0, 1, 2):
        with StudyFile(path) as file:
            file.add(some_line(seed))
        pack(path)
        assert not path.exists()
    with StudyFile(path) as file:
        file.add(some_line(3))
        assert file.find_line(digest_of(some_line(1))) == some_line(1)
    assert read_lines(path) == [some_line(seed) for seed in range(4)]
    unpacked = path.read_bytes()
    pack(path)
    path.write_bytes(unpacked)  # as a process leaves it that ends in between
    pack(path)
    assert read_lines(path) == [some_line(seed) for seed in range(4)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-20], r"expected packed lines in .*s\.jsonl\.xz, got: .*: restore the"),
        (lambda _: b"text", r"expected packed lines in .*s\.jsonl\.xz, got: .*: restore the"),
        (lambda _: lzma.compress(b"nonsense\n"), r"the JSON of a cell in line 1 of .*s\.jsonl\.xz"),
        (lambda _: lzma.compress(bytes(9001)), r"expected at most 9,000 bytes of lines in .*\.xz"),
    ],
)
def test_packed_lines_that_are_damaged_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, message: str
) -> None:
    path = tmp_path / "s.jsonl"
    with StudyFile(path) as file:
        file.add(some_line(0))
    pack(path)
    monkeypatch.setattr("silograph.study.study.MOST_PACKED", 9000)
    packed = packed_path(path)
    packed.write_bytes(damage(packed.read_bytes()))
    for read in (StudyFile, read_lines):
        with pytest.raises(ConfigError, match=message):
            read(path)


def test_the_latest_line_of_a_cell_counts(tmp_path: Path) -> None:
    with StudyFile(tmp_path / "s.jsonl") as file:
        file.add(some_line(0))
        file.add(some_line(0) | {"error": "later"})
        found = file.find_line(digest_of(some_line(0)))
        assert found is not None
        assert found["error"] == "later"
        assert file.find_line(digest_of(some_line(1))) is None


@pytest.mark.parametrize(
    "text", ["nonsense", "[]", '{"a": 1}', '{"config": {}, "labels": {}, "results": 1}']
)
def test_an_unreadable_line_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(f"{json.dumps(some_line(0))}\n\n{text}\n", encoding="utf-8")
    before = path.read_bytes()
    for read in (StudyFile, read_lines):
        with pytest.raises(
            ConfigError, match=r"expected the JSON of a cell in line 3 of .*s\.jsonl"
        ):
            read(path)
    assert path.read_bytes() == before
    path.write_text("", encoding="utf-8")
    StudyFile(path).close()  # nobody holds the file that could not be read


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with StudyFile(path), raises_code(ConfigError, "folder-in-use"):
        StudyFile(path)
    StudyFile(path).close()
    with raises_code(ConfigError, "unwritable-path"):
        StudyFile(path / "x")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "s.jsonl", os.write
    with StudyFile(path) as file:
        file.add(some_line(0))
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda to, text: real(to, text[:20]))
            with pytest.raises(OSError, match="No space left"):
                file.add(some_line(1))
        assert path.read_bytes() == before
        file.add(some_line(1))
        assert len(read_lines(path)) == 2


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "no.jsonl") == []


# --- running --------------------------------------------------------------------------------------


def test_only_what_is_missing_runs(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, seen = make_graph(), []
    cells = [cell(graph, seed=seed) for seed in range(3)]
    with StudyFile(tmp_path / "s.jsonl") as file:
        assert run_missing_cells(cells[:2], file, HERE, 2).ran == 2
    with StudyFile(tmp_path / "s.jsonl") as file:
        tally = run_missing_cells(cells, file, HERE, 3, lambda c, _: seen.append(c.config.seed))
        assert (tally.ran, tally.failed) == (1, 0)
        assert [line["config"]["seed"] for line in file.lines] == [0, 1, 2]
    assert seen == [0, 1, 2]


def test_a_failed_cell_is_counted_and_tried_again_unless_it_diverges(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    graph = make_graph()
    cells = [cell(graph, clients=61), cell(graph), cell(graph, lr=1e30, method="fedavg")]
    with StudyFile(tmp_path / "s.jsonl") as file:
        tally = run_missing_cells(cells, file, HERE, 3)
        assert (tally.ran, tally.failed) == (3, 2)
        assert file.lines[2]["kind"] == "TrainingError"
        tally = run_missing_cells(cells, file, HERE, 3)
        assert (tally.ran, tally.failed) == (1, 2)
        assert len(file.lines) == 4


def test_time_is_up(make_graph: MakeGraph) -> None:
    with StudyFile(None) as file:
        assert (
            run_missing_cells([cell(make_graph())], file, replace(HERE, deadline=0.0), 1).ran == 0
        )


def test_cells_are_read_when_there_is_room(make_graph: MakeGraph) -> None:
    """A source may look at what has ended: the second cell is made of the first one's line."""
    ended: list[Line] = []

    def source() -> Iterator[Cell]:
        yield cell(make_graph())
        yield cell(make_graph(), seed=ended[0]["best_round"])

    with StudyFile(None) as file:
        run_missing_cells(source(), file, HERE, 2, lambda _, line: ended.append(line))
    assert len(ended) == 2


@pytest.mark.usefixtures("forked")
def test_processes_give_the_same_and_one_may_die(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, real = make_graph(), Worker.give
    killed: list[Any] = []
    cells = [cell(graph, seed=seed) for seed in range(3)]
    with StudyFile(None) as here:
        run_missing_cells(cells, here, HERE, 3)

    def give(self: Worker, job: Any, path: str | None) -> None:
        if not killed:  # before it can have read the job
            killed.append(job)
            self._process.kill()
            self._process.wait()
        real(self, job, path)

    monkeypatch.setattr(Worker, "give", give)
    with StudyFile(tmp_path / "s.jsonl") as there:
        how = ExecutionOptions(processes=1, runs=tmp_path / "runs")
        tally = run_missing_cells(cells, there, how, 3)
        assert (tally.ran, tally.failed) == (3, 1)
        assert there.lines[0]["error"] == (
            "expected the process of the cell to live, got signal 9 (9: out of memory, or killed)"
        )
        run_missing_cells(cells, there, how, 3)
        for each in cells:
            ours, theirs = (f.find_line(each.digest) for f in (here, there))
            assert ours is not None
            assert theirs is not None
            assert without_time(ours) == without_time(theirs)
    folders = sorted(path.name[:9] for path in (tmp_path / "runs").iterdir())
    assert folders == ["fedopt-0-", "fedopt-1-", "fedopt-2-"]


def test_the_number_of_processes() -> None:
    cores = len(os.sched_getaffinity(0))
    assert check_processes(None, 1) == cores
    assert check_processes(None, 10 * cores) == 1
    assert check_processes(0, 1) == 0
    for wrong in (-1, True, 1.5):
        with raises_code(ConfigError, "option-value", option="processes"):
            check_processes(wrong, 1)  # type: ignore[arg-type]


# --- progress -------------------------------------------------------------------------------------


def test_what_progress_says(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"val": {"server": {"accuracy": 0.5}}, "judge": "server", "best_round": 3, "seconds": 2}
    with show_study("plain", 3) as display:
        display.count_skipped()
        display.start_cell(running := cell())
        assert display.waiting == 1
        assert display.seconds_left() is None
        display.round(running, 1, "val accuracy 0.4")
        display.finish_cell(running, line)
    head, _, what = capsys.readouterr().err.partition(": ")
    assert head.startswith("cells 2/3 done, ")
    assert what == "fedopt, seed 0: val accuracy 0.5000, best round 3, 2.0 s\n"
    assert outcome_of({"error": "why"}) == "failed: why"
    assert outcome_of(line | {"val": {"server": None}}).startswith("val accuracy -, ")


def test_the_time_left_is_that_of_cells_like_those_that_ran() -> None:
    """Cells of 100 rounds: 20 s until the first, which reads the graph, then 1 s each."""
    now = [0.0]
    display = StudyProgress(4, clock=lambda: now[0])
    first, second, third, _ = cells = [cell(seed=seed, rounds=100) for seed in range(4)]
    display.start_cell(first)
    now[0] = 20.0
    display.round(first, 1, "")
    assert display.seconds_left() is None  # one round says nothing of the pace
    now[0] = 30.0
    display.round(first, 11, "")
    assert display.seconds_left() == 89 + 3 * (30 + 89)
    now[0] = 32.0
    assert display.seconds_left() == 87 + 3 * (32 + 87)  # the pace is that of told rounds
    now[0] = 119.0
    display.finish_cell(first, {})
    assert display.seconds_left() == 3 * 119
    display.start_cell(second)
    display.start_cell(third)
    now[0] = 129.0
    assert display.seconds_left() == (2 * 109 + 119) / 2  # two at once
    display.round(second, 1, "")
    display.round(third, 1, "")
    now[0] = 139.0
    display.round(second, 2, "")
    assert display.seconds_left() == 98 * 10  # the slow one ends last
    display.finish_cell(third, {})
    display.finish_cell(second, {})
    assert display.waiting == len(cells) - 3


def test_the_live_view_fits_its_lines() -> None:
    from rich.console import Console

    console = Console(width=80, record=True, file=io.StringIO())
    display = StudyProgress(3)
    running = cell()
    display.start_cell(running)
    console.print(display)
    display.round(running, 1, "val accuracy 0.4  " + "x" * 80)
    display.start_cell(other := cell(seed=1))
    display.finish_cell(other, {"error": "why"})
    console.print(display)
    text = console.export_text()
    assert "fedopt, seed 0  first round" in text
    assert "fedopt, seed 0  round 1/2  val accuracy 0.4" in text
    assert "cells 1/3 done, 1 running, 1 waiting, 1 failed, " in text
    assert all(len(row) <= 80 for row in text.splitlines())
