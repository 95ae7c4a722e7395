"""Kernels are reported as they are compiled; their time is that of the outermost functions."""

import ast
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numba.core import event

import silograph
from remote_runs import setup_of
from runs import MakeGraph
from silograph.experiment.run import compile_kernels
from silograph.experiment.run.clock import TrainingClock
from silograph.experiment.run.progress import Silent, TrackerGroup
from silograph.experiment.run.result import Result
from silograph.experiment.run.run import first_snapshot, train
from silograph.methods import METHODS
from silograph.nn.kernels.arrays import LINE, PLAIN_NAMES, report_compiling


def compiles(name: str) -> AbstractContextManager[None]:
    """The event with which numba surrounds the compilation of a function."""
    function = SimpleNamespace(py_func=SimpleNamespace(__name__=name))
    return event.trigger_event("numba:compile", {"dispatcher": function})


def test_nested_functions_are_timed_once_and_kernels_are_counted() -> None:
    lines: list[str] = []
    with report_compiling(lines.append) as watch:
        assert watch.seconds == 0
        began = time.monotonic()
        with compiles("train"), compiles("forward"):
            time.sleep(0.02)
        whole = time.monotonic() - began
        assert 0.02 <= watch.seconds <= whole
        before = watch.seconds
        with compiles("predict"):
            time.sleep(0.01)
        assert watch.seconds >= before + 0.01
    expected = [LINE, "compiling kernel 1 (training) ...", "compiling kernel 2 (predictions) ..."]
    assert lines == expected
    assert watch.kernels == 2
    with compiles("untouched_rows_after"):
        pass
    assert lines == expected
    assert watch.seconds < whole + 1


DECORATORS = {"kernel", "kept_on_disk"}  # of functions that Python calls


def test_every_kernel_has_a_plain_name() -> None:
    found = {
        node.name
        for path in Path(silograph.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and DECORATORS & {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
    }
    assert found == PLAIN_NAMES.keys()


def test_the_lines_of_compiling_all_tell_of_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_optimizer(*_: object, **__: object) -> None:
        with compiles("untouched_rows_after"):
            pass

    monkeypatch.setattr(compile_kernels, "run", compile_optimizer)
    monkeypatch.setattr(compile_kernels, "_runs", lambda: [(None, {})])
    lines: list[str] = []
    assert compile_kernels.compile_kernels("float32", lines.append) == 1
    assert "this run" not in lines[0]
    assert lines[1:] == ["compiling kernel 1 (optimizer) ..."]


def test_a_result_says_what_went_into_compiling() -> None:
    told = Result._compiled
    assert told(type("R", (), {"compile_seconds": 0.0})()) == ""
    found = told(type("R", (), {"compile_seconds": 2.34})())
    assert found == " (and 2.3 s to compile kernels, once)"


class FakeTime:
    """A monotonic clock that only stands where it is put."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    for module in ("nn.kernels.arrays", "experiment.run.clock", "experiment.run.run"):
        monkeypatch.setattr(f"silograph.{module}.time", fake)
    return fake


def compile_something(fake_time: FakeTime) -> None:
    """Spend 20 seconds on loading a kernel and 80 on compiling another that it needs."""
    with event.trigger_event("numba:compiler_lock"), event.trigger_event("numba:compiler_lock"):
        fake_time.now += 20
        with compiles("train"):
            fake_time.now += 80


def test_seconds_of_training_have_no_first_use_of_kernels(fake_time: FakeTime) -> None:
    with report_compiling(lambda _: None) as watch:
        clock = TrainingClock(fake_time.now - 3, watch)
        fake_time.now += 2
        assert clock.seconds() == 5
        compile_something(fake_time)
        assert (clock.seconds(), watch.seconds, watch.warm_up_seconds) == (5, 80, 100)
        fake_time.now += 1
        assert clock.seconds() == 6


@pytest.mark.parametrize("is_first", [True, False])
def test_the_run_that_comes_first_takes_no_longer(
    make_graph: MakeGraph, fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Each round takes a second of training; the first one of a process compiles besides."""
    fedavg = METHODS["fedavg"]

    def train_a_second(fed: Any, cfg: Any, state: Any, t: int, key: Any) -> Any:
        if is_first and t == 1:
            compile_something(fake_time)
        fake_time.now += 1
        return fedavg.round(fed, cfg, state, t, key)

    method = replace(fedavg, name="a_second", round=train_a_second)
    setup = setup_of(make_graph(40), method, rounds=3, kernels="torch")
    monkeypatch.setattr(
        "silograph.experiment.run.run.watch_first_use",
        lambda *_: report_compiling(lambda _: None),
    )
    result = train(setup, None, Silent(), first_snapshot(setup), [], TrackerGroup(()))
    assert [row["seconds"] for row in result.rounds] == [1, 2, 3]
    assert result.seconds == 3
    assert result.compile_seconds == (80 if is_first else 0)
