"""Progress of compilation: which kernel the first run on a machine waits for, and how long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event

LINE = "compiling kernels that this run needs, once for this machine: up to a minute ..."
LINE_FOR_ALL = "compiling kernels for later runs, once for this machine: some minutes ..."
# What the kernels do, by the names of their functions; `predict` is that of two.
PLAIN_NAMES = {
    "train": "training",
    "train_flow": "training with chosen neighbors",
    "train_stored": "training with stored rows",
    "predict": "predictions",
    "rest": "optimizer",
    "finish": "layers of ratings",
    "finish_back": "gradients of ratings",
    "loss_gradient": "loss of ratings",
    "tally": "scores",
    "add_rows": "sums of rows",
    "add_slices": "sums of weights",
    "to_mean": "means of weights",
    "compare": "comparison of weights",
    "compiled_loop": "selection of clients",
}
# The second event spans a compilation, or the loading of one from the cache, for each signature.
COMPILE, COMPILER_LOCK = "numba:compile", "numba:compiler_lock"


class CompileWatch(event.Listener):
    """Reports each kernel that is compiled; what comes from the cache on disk is not.

    Attributes:
        seconds: that compiling has taken so far.
        warm_up_seconds: that compiling, or loading from the cache on disk, has taken so far.
        kernels: number of kernels compiled so far, the current one included.
    """

    def __init__(self, tell: Callable[[str], None], first_line: str) -> None:
        self.seconds = 0.0
        self.warm_up_seconds = 0.0
        self.kernels = 0
        self._tell, self._first_line = tell, first_line
        # A kernel's compilation has those that it calls inside.
        self._inside = {COMPILE: 0, COMPILER_LOCK: 0}
        self._began = {COMPILE: 0.0, COMPILER_LOCK: 0.0}

    def on_start(self, event: event.Event) -> None:
        """Report a kernel that starts to be compiled, and note when it is compiled or loaded."""
        if not self._inside[event.kind]:
            if event.kind == COMPILE:
                if not self.kernels:
                    self._tell(self._first_line)
                self.kernels += 1
                self._tell(f"compiling kernel {self.kernels} ({name_of(event)}) ...")
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
    """Return what the function does that an event is about."""
    name = str((event.data or {})["dispatcher"].py_func.__name__)
    return PLAIN_NAMES.get(name, name)


@contextmanager
def told_of_compiling(
    tell: Callable[[str], None], first_line: str = LINE
) -> Iterator[CompileWatch]:
    """Inside, `tell` hears when kernels have to be compiled; yields how long that has taken."""
    watch = CompileWatch(tell, first_line)
    with event.install_listener(COMPILE, watch), event.install_listener(COMPILER_LOCK, watch):
        yield watch
