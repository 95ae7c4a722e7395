"""Progress of compilation: which kernel the first run on a machine waits for, and how long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event

LINE = "compiling kernels that this run needs, once for this machine: up to a minute ..."


class CompileWatch(event.Listener):
    """Reports each kernel that is compiled; what comes from the cache on disk is not.

    Attributes:
        seconds: that compiling has taken so far.
        kernels: number of kernels compiled so far, the current one included.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.seconds = 0.0
        self.kernels = 0
        self._tell = tell
        self._inside, self._began = 0, 0.0  # a kernel's compilation has those that it calls inside

    def on_start(self, event: event.Event) -> None:
        """Report a kernel that starts to be compiled."""
        if not self._inside:
            if not self.kernels:
                self._tell(LINE)
            self.kernels += 1
            self._tell(f"compiling kernel {self.kernels}: {name_of(event)} ...")
            self._began = time.monotonic()
        self._inside += 1

    def on_end(self, event: event.Event) -> None:
        """Add the time of a function that no other one needed."""
        del event
        self._inside -= 1
        if not self._inside:
            self.seconds += time.monotonic() - self._began


def name_of(event: event.Event) -> str:
    """Return the name of the function that an event is about."""
    return str((event.data or {})["dispatcher"].py_func.__name__)


@contextmanager
def told_of_compiling(tell: Callable[[str], None]) -> Iterator[CompileWatch]:
    """Inside, `tell` hears when kernels have to be compiled; yields how long that has taken."""
    watch = CompileWatch(tell)
    with event.install_listener("numba:compile", watch):
        yield watch
