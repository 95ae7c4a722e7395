"""Ctrl-C and SIGTERM end a command at once while a kernel is being compiled."""

import ast
import os
import signal
import subprocess
import sys
import threading
from _thread import interrupt_main
from collections.abc import Iterator
from pathlib import Path

import pytest

import silograph
from silograph.core.compiling import is_compiling, run_interruptible


def test_work_returns_or_raises_from_its_own_thread() -> None:
    main = threading.get_ident()
    assert run_interruptible(threading.get_ident) != main
    nested = run_interruptible(
        lambda: (threading.get_ident(), run_interruptible(threading.get_ident))
    )
    assert nested[0] == nested[1] != main
    with pytest.raises(MemoryError, match="too large"):
        run_interruptible(fail)
    assert not is_compiling()


def fail() -> None:
    raise MemoryError("too large")


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Have the signal on, which is off in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_wait_and_not_the_work() -> None:
    done, seen = threading.Event(), threading.Event()

    def work() -> None:
        interrupt_main()
        done.wait(60)
        seen.set()

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work)
    assert is_compiling()
    assert not seen.is_set()
    done.set()
    assert seen.wait(60)


SLOW = """
import ast
import os
import signal
import time

from silograph import cli
from silograph.core.compiling import run_interruptible

def compile_slowly(**_):
    run_interruptible(lambda: (print("compiling", flush=True), time.sleep(600)))

# A test suite in the background of a shell has the signal switched off, for children too.
signal.signal(signal.SIGINT, signal.default_int_handler)
cli.command_line = lambda: compile_slowly
cli.main()
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_compiles_ends_at_once(sent: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    process.send_signal(sent)
    _, errors = process.communicate(timeout=200)  # less than what the work takes
    assert (process.returncode, errors) == (130, "interrupted\n")


def test_every_function_kept_on_disk_is_safe_for_many_processes() -> None:
    """Numba by itself mixes up the files of two processes that save one function at once."""
    unsafe = [
        f"{path.name}: {node.name}"
        for path in Path(silograph.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any("cache=True" in ast.unparse(made) for made in node.decorator_list)
        and not any(ast.unparse(made) == "kept_on_disk" for made in node.decorator_list)
    ]
    assert unsafe == []


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_processes_that_compile_one_function_for_two_types_keep_both(
    tmp_path: Path, each: int
) -> None:
    """Each later process runs the code of its own types, with or without another one for them."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in range(2):  # compiles, then reads what is kept
        made = [
            subprocess.Popen([sys.executable, "-c", ADD, dtype], env=environment)
            for dtype in ("float32", "float64") * each
        ]
        assert {process.wait(120) for process in made} == {0}
    assert len(list(tmp_path.rglob("*.nbc"))) == 2


ADD = """
import sys
import numpy as np
from silograph.federation.fold_kernel import add_slices
ones = np.ones((1, 3), sys.argv[1])
total = ones[0].copy()
add_slices(total, ones, np.zeros_like(total), np.ones(1, total.dtype), np.ones(1, bool))
assert total.dtype == sys.argv[1] and (total == 2).all(), total
"""
