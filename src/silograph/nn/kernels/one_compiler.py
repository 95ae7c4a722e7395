"""Processes that start together compile a kernel once: one does, the others wait and read it."""

import fcntl
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from silograph.core.interruptible import run_interruptible


def one_at_a_time(compiles: Callable[[Any], Any], cache: Path, name: str) -> Callable[[Any], Any]:
    """Return a function that compiles as `compiles` does, in one process at a time.

    Other kernels, and the same for other types, are compiled side by side. A process that dies
    leaves the lock to the next one.

    Args:
        compiles: compiles for a signature, unless `cache` has its code.
        cache: the folder of compiled code; where it cannot be written, nobody waits.
        name: of the kernel and its version.
    """

    def alone(signature: Any) -> Any:
        types = hashlib.sha256(str(signature).encode()).hexdigest()[:16]
        lock = cache / f"{name}.{types}.lock"
        return run_interruptible(lambda: _locked(lock, lambda: compiles(signature)))

    return alone


def saved_alone(saves: Callable[[Any, Any], None], lock: Path) -> Callable[[Any, Any], None]:
    """Return a function that saves code as `saves` does, in one process at a time.

    numba lists the code of a function for all types in one index, which it reads, numbers the new
    file after, and replaces: of two processes that save for two types at once one would be lost,
    or take the other's file.

    Args:
        saves: saves the code for a signature.
        lock: a file of this function alone; where it cannot be written, nobody waits.
    """
    return lambda signature, code: _locked(lock, lambda: saves(signature, code))


def _locked(path: Path, work: Callable[[], Any]) -> Any:
    """Return what some work returns that one process does at a time."""
    try:
        lock = path.open("wb")
    except OSError:
        return work()
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return work()
