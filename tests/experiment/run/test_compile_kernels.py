"""`silograph compile`: what it has compiled no run compiles again."""

from collections.abc import Callable

import pytest

pytest.importorskip("numba")

from commands import Capture
from runs import MakeGraph, go
from silograph.cli import run_app
from silograph.experiment.run import compile_kernels as preparing
from silograph.experiment.run.compile_kernels import compile_kernels


def test_the_command_compiles_for_each_precision_once(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def compile_two(dtype: str, tell: Callable[[str], None]) -> int:
        tell(f"compiling for {dtype}")
        return 2

    monkeypatch.setattr(preparing, "compile_kernels", compile_two)
    flags = ["--dtype", "float64", "--dtype", "float32", "--dtype", "float64"]
    assert run_app(["compile", *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out == "float64: 2 kernels compiled\nfloat32: 2 kernels compiled\n"
    assert printed.err == "compiling for float64\ncompiling for float32\n"
    assert run_app(["compile", "--dtype", "int8"]) == 2
    assert capsys.readouterr().err == "error: --dtype must be float32 or float64, got 'int8'\n"


@pytest.mark.slow  # compiles every kernel
@pytest.mark.timeout(1800)
def test_later_runs_compile_nothing(make_graph: MakeGraph) -> None:
    compile_kernels("float64", lambda _: None)
    lines: list[str] = []
    assert compile_kernels("float64", lines.append) == 0
    assert lines == []
    for options in ({"method": "fedprox"}, {"model": "sage", "fanout": "2,2", "batch_size": 4}):
        result = go(make_graph(sparse=True), **{"kernels": "compiled", **options})
        assert result.compile_seconds == 0
