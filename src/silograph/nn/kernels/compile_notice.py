"""Progress of compilation: which kernel the first run on a machine waits for, and how long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event

LINE = "compiling kernels that this run needs, once for this machine: up to a minute ..."
# The second event spans a compilation, or the loading of one from the cache, for each signature.
COMPILE, COMPILER_LOCK = "numba:compile", "numba:compiler_lock"


class CompileWatch(event.Listener):
    """Reports each kernel that is compiled; what comes from the cache on disk is not.

    Attributes:
        seconds: that compiling has taken so far.
        warm_up_seconds: that compiling, or loading from the cache on disk, has taken so far.
        kernels: number of kernels compiled so far, the current one included.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.seconds = 0.0
        self.warm_up_seconds = 0.0
        self.kernels = 0
        self._tell = tell
        # A kernel's compilation has those that it calls inside.
        self._inside = {COMPILE: 0, COMPILER_LOCK: 0}
        self._began = {COMPILE: 0.0, COMPILER_LOCK: 0.0}

    def on_start(self, event: event.Event) -> None:
        """Report a kernel that starts to be compiled, and note when it is compiled or loaded."""
        if not self._inside[event.kind]:
            if event.kind == COMPILE:
                if not self.kernels:
                    self._tell(LINE)
                self.kernels += 1
                self._tell(f"compiling kernel {self.kernels}: {name_of(event)} ...")
            self._began[event.kind] = time.monotonic()
        self._inside[event.kind] += 1

    def on_end(self, event: event.Event) -> None:
        """Add the time of a function that no other one needed."""
        self._inside[event.kind] -= 1
        if self._inside[event.kind]:
            return
        passed = time.monotonic() - self._began[event.kind]
        if event.kind == COMPILE:
            self.seconds += passed
        else:
            self.warm_up_seconds += passed


def name_of(event: event.Event) -> str:
    """Return the name of the function that an event is about."""
    return str((event.data or {})["dispatcher"].py_func.__name__)


@contextmanager
def told_of_compiling(tell: Callable[[str], None]) -> Iterator[CompileWatch]:
    """Inside, `tell` hears when kernels have to be compiled; yields how long that has taken."""
    watch = CompileWatch(tell)
    with event.install_listener(COMPILE, watch), event.install_listener(COMPILER_LOCK, watch):
        yield watch
