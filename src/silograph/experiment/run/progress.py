"""Progress of long work: a live line on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from silograph.core.resolved_config import ResolvedConfig

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from silograph.graph.generated.generate import ProgressCallback

PLAIN_LINES = 10  # a run prints about this many plain lines


@runtime_checkable
class Progress(Protocol):
    """Told of every round."""

    def update(self, done: int, metric: str) -> None:
        """Show that `done` rounds are over, and the current metric."""


class Silent:
    """Shows nothing."""

    def update(self, done: int, metric: str) -> None:
        """Do nothing."""


class Plain:
    """Prints about ten lines over a run."""

    def __init__(self, total: int, done: int) -> None:
        self._total = total
        self._first = done
        self._pace = Pace(total)

    def update(self, done: int, metric: str) -> None:
        """Print a line now and then."""
        step = -(-self._total // PLAIN_LINES)  # rounded up
        left = self._pace.left(done)
        if done == self._first + 1 or done % step == 0 or done == self._total:
            words = (f"round {done}/{self._total}", left, metric)
            print("  ".join(w for w in words if w), file=sys.stderr, flush=True)  # noqa: T201


class Pace:
    """Tells how long the rounds to come will take, by those since the first one.

    The first one tells nothing: kernels may be compiled in it, and data loaded.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._began: tuple[int, float] | None = None  # the first round told of, and when

    def left(self, done: int) -> str:
        """Return the time left in words, once `done` rounds are over; nothing while not known."""
        now = time.monotonic()
        if self._began is None:
            self._began = done, now
        first, start = self._began
        if done == self._total:
            return "0 s left"
        if done == first:
            return ""
        return f"{(now - start) / (done - first) * (self._total - done):.0f} s left"


@contextmanager
def show_progress(total: int, mode: str | Progress, done: int = 0) -> Iterator[Progress]:
    """Yield a progress display: `live`, `plain` or `none`; it goes to standard error.

    Args:
        total: rounds of the run.
        mode: how to show them, or who is told of them.
        done: rounds that were over before.
    """
    if not isinstance(mode, str):
        yield mode
    elif mode == "none":
        yield Silent()
    elif mode == "plain":
        yield Plain(total, done)
    else:
        with _live(total, done) as live:
            yield live


def round_bar() -> "Bar":
    """Return an empty line of rounds, as a terminal shows it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),  # what the other columns leave
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[metric]}"),
    )
    return Bar(*columns, console=Console(stderr=True), expand=True)


@contextmanager
def _live(total: int, first: int) -> Iterator[Progress]:
    with round_bar() as bar:
        task = bar.add_task("", total=total, completed=first, left="", metric="first round")
        pace = Pace(total)

        class Live:
            def update(self, done: int, metric: str) -> None:
                bar.update(task, completed=done, left=pace.left(done), metric=metric)

        yield Live()


def best_mode() -> str:
    """Return `live` when standard error is a terminal, else `plain`."""
    return "live" if sys.stderr.isatty() else "plain"


def generating(progress: str | Progress) -> "ProgressCallback | None":
    """Return what tells, on standard error, that a graph is being generated."""
    shown: dict[str, int] = {}  # percent, by what is being made

    def report(what: str, share: float) -> None:
        percent = int(100 * share)
        if what not in shown:
            print(what, file=sys.stderr, flush=True)  # noqa: T201
        elif progress == "live" and percent > shown[what]:
            end = "\n" if percent == 100 else ""
            print(f"\r{percent:3d} %", end=end, file=sys.stderr, flush=True)  # noqa: T201
        shown[what] = percent

    return report if isinstance(progress, str) and progress != "none" else None


UNSAID_SAMPLERS = ("full", "fanout")  # every backend draws them


def planned(config: ResolvedConfig) -> str:
    """Return the plan in words."""
    threads = "1 thread" if config.threads == 1 else f"{config.threads} threads"
    clients = "client" if config.block_size == 1 else "clients"
    in_torch = config.kernels == "torch" and config.neighbors not in UNSAID_SAMPLERS
    drawn = f", neighbors={config.neighbors} drawn in torch" if in_torch else ""
    return f"{config.kernels} kernels{drawn}, {config.block_size} {clients} at once, {threads}"
