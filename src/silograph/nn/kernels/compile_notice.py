"""Telling the user what the first run on a machine waits for, and how long it has taken."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event

LINE = "compiling kernels that this run needs, once for this machine: up to a minute ..."


class CompileWatch(event.Listener):
    """Says once that something is compiled; what comes from the cache on disk is not.

    Attributes:
        seconds: that compiling has taken so far.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.seconds = 0.0
        self._tell, self._told = tell, False
        self._inside, self._began = 0, 0.0  # a kernel's compilation has those that it calls inside

    def on_start(self, event: event.Event) -> None:
        """Note that a function starts to be compiled."""
        del event
        if not self._told:
            self._told = True
            self._tell(LINE)
        if not self._inside:
            self._began = time.monotonic()
        self._inside += 1

    def on_end(self, event: event.Event) -> None:
        """Add the time of a function that no other one needed."""
        del event
        self._inside -= 1
        if not self._inside:
            self.seconds += time.monotonic() - self._began


@contextmanager
def told_of_compiling(tell: Callable[[str], None]) -> Iterator[CompileWatch]:
    """Inside, `tell` hears when kernels have to be compiled; yields how long that has taken."""
    watch = CompileWatch(tell)
    with event.install_listener("numba:compile", watch):
        yield watch
