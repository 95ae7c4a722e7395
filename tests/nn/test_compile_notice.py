"""Kernels are reported as they are compiled; their time is that of the outermost functions."""

import time
from contextlib import AbstractContextManager
from types import SimpleNamespace

from numba.core import event

from silograph.experiment.run.result import Result
from silograph.nn.kernels.compile_notice import LINE, told_of_compiling


def compiles(name: str) -> AbstractContextManager[None]:
    """The event with which numba surrounds the compilation of a function."""
    function = SimpleNamespace(py_func=SimpleNamespace(__name__=name))
    return event.trigger_event("numba:compile", {"dispatcher": function})


def test_nested_functions_are_timed_once_and_kernels_are_counted() -> None:
    lines: list[str] = []
    with told_of_compiling(lines.append) as watch:
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
    expected = [LINE, "compiling kernel 1: train ...", "compiling kernel 2: predict ..."]
    assert lines == expected
    assert watch.kernels == 2
    with compiles("rest"):
        pass
    assert lines == expected
    assert watch.seconds < whole + 1


def test_a_result_says_what_went_into_compiling() -> None:
    told = Result._compiled
    assert told(type("R", (), {"compile_seconds": 0.0})()) == ""
    found = told(type("R", (), {"compile_seconds": 2.34})())
    assert found == " (2.3 s of them to compile kernels, once)"
