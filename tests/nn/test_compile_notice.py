"""Compiling is told once, and its time is that of the outermost functions."""

import time

from numba.core import event

from silograph.experiment.run.result import Result
from silograph.nn.kernels.compile_notice import LINE, told_of_compiling


def test_nested_functions_are_timed_once_and_told_once() -> None:
    lines: list[str] = []
    with told_of_compiling(lines.append) as watch:
        assert watch.seconds == 0
        began = time.monotonic()
        with event.trigger_event("numba:compile"), event.trigger_event("numba:compile"):
            time.sleep(0.02)
        whole = time.monotonic() - began
        assert 0.02 <= watch.seconds <= whole
        before = watch.seconds
        with event.trigger_event("numba:compile"):
            time.sleep(0.01)
        assert watch.seconds >= before + 0.01
    assert lines == [LINE]
    with event.trigger_event("numba:compile"):
        pass
    assert watch.seconds < whole + 1


def test_a_result_says_what_went_into_compiling() -> None:
    told = Result._compiled
    assert told(type("R", (), {"compile_seconds": 0.0})()) == ""
    found = told(type("R", (), {"compile_seconds": 2.34})())
    assert found == " (2.3 s of them to compile kernels, once)"
