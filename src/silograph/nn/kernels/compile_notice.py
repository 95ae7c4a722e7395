"""Telling the user what the first run on a machine waits for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event

LINE = "compiling the kernels, once for this machine and precision: about a minute ..."


class _Teller(event.Listener):
    """Says once that something is compiled; what comes from the cache on disk is not."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._told = tell, False

    def on_start(self, event: event.Event) -> None:
        """Note that a function starts to be compiled."""
        del event
        if not self._told:
            self._told = True
            self._tell(LINE)

    def on_end(self, event: event.Event) -> None:
        """Do nothing."""


@contextmanager
def told_of_compiling(tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, `tell` hears when kernels have to be compiled."""
    with event.install_listener("numba:compile", _Teller(tell)):
        yield
