"""Compilation that Ctrl-C and SIGTERM can leave.

Python handles a signal between two instructions of its main thread. LLVM optimizes a kernel for
many seconds within one instruction, and an exception inside a callback of LLVM or inside numba may
get lost. So kernels are compiled in a thread of their own, for which the main thread waits.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F")
NAME = "silograph-compiler"


def is_compiling() -> bool:
    """Return whether a kernel is being compiled; nothing can stop that but the process's end."""
    return any(thread.name == NAME for thread in threading.enumerate())


def run_interruptible(work: Callable[[], T]) -> T:
    """Return what `work` returns or raises; an interrupt of the main thread ends the wait at once.

    The work goes on then. A process that ends waits for it, unless it ends by `os._exit`.
    """
    if threading.current_thread().name == NAME:  # a kernel that needs another one
        return work()
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=NAME).start()
    return outcome.result()


def interruptible(function: F) -> F:
    """Return a function that numba has made, after letting it compile in a thread of its own."""
    dispatcher: Any = function
    compiles = dispatcher.compile
    dispatcher.compile = lambda signature: run_interruptible(lambda: compiles(signature))
    return function
