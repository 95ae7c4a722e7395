"""Ctrl-C and SIGTERM end a command at once while a kernel is being compiled."""

import signal
import subprocess
import sys
import threading
from _thread import interrupt_main
from collections.abc import Iterator

import pytest

from silograph.core.interruptible import interruptible, is_compiling, run_interruptible


class Dispatcher:
    """What numba makes of a function, as far as it is used."""

    def compile(self, signature: str) -> str:
        return f"{signature} in {threading.current_thread().name}"


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
    assert interruptible(Dispatcher()).compile("float32") == "float32 in silograph-compiler"


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
import signal
import time

from silograph import cli
from silograph.core.interruptible import run_interruptible

def compile_slowly(**_):
    run_interruptible(lambda: (print("compiling", flush=True), time.sleep(600)))

# A test suite in the background of a shell has the signal switched off, for children too.
signal.signal(signal.SIGINT, signal.default_int_handler)
cli.app = compile_slowly
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
