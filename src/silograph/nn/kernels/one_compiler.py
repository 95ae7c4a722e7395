"""Processes that start together compile a kernel once: one does, the others wait and read it."""

import fcntl
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
        try:
            lock = (cache / f"{name}.{types}.lock").open("wb")
        except OSError:
            return compiles(signature)
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compiles(signature)

    return alone
