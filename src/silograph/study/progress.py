"""Progress of a study: cells done, running and waiting; a live view or plain lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from silograph.study.cells import Cell, Line, metric_in
from silograph.task.metric_table import METRICS

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Running:
    """A cell that runs; times in seconds.

    Attributes:
        began: when it started.
        first: the first round that was told, and when; None before it.
        last: the latest.
        metric: what was told with it.
    """

    began: float
    first: tuple[int, float] | None = None
    last: tuple[int, float] = (0, 0.0)
    metric: str = ""

    def left(self, rounds: int, now: float) -> float | None:
        """Return the seconds to its end by its own rounds; None before there are two."""
        if self.first is None or self.last[0] <= self.first[0]:
            return None
        (a, start), (b, end) = self.first, self.last
        return max(0.0, (end - start) / (b - a) * (rounds - b) - (now - end))


class StudyProgress:
    """Counts cells and says where the study is; rich draws it as it is at the moment."""

    def __init__(
        self,
        total: int,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with so many cells in all.

        Args:
            total: number of cells, as far as it is known.
            say: told a line when a cell ends, None for nobody.
            clock: tells seconds.
        """
        self.total = total
        self.before = self.ran = self.failed = 0
        self.running: dict[Cell, Running] = {}
        self._say = say
        self._clock = clock
        self._spans: list[float] = []  # seconds of the cells that have run
        self._at_once = 1

    def skipped(self) -> None:
        """Count a cell that had run before."""
        self.before += 1

    def started(self, cell: Cell) -> None:
        """Count a cell among those that run."""
        self.running[cell] = Running(self._clock())
        self._at_once = max(self._at_once, len(self.running))

    def round(self, cell: Cell, done: int, metric: str) -> None:
        """Remember that `done` rounds of a cell are over."""
        before, now = self.running[cell], (done, self._clock())
        first = before.first or now
        self.running[cell] = replace(before, first=first, last=now, metric=metric)

    def finished(self, cell: Cell, line: Line) -> None:
        """Count a cell that has run."""
        self._spans.append(self._clock() - self.running.pop(cell).began)
        self.ran += 1
        self.failed += "error" in line
        if self._say is not None:
            self._say(f"{self.head()}: {cell.name}: {outcome_of(line)}")

    @property
    def waiting(self) -> int:
        """Cells that have not started."""
        return max(0, self.total - self.before - self.ran - len(self.running))

    def seconds_left(self) -> float | None:
        """Return the seconds to the end; None before anything is known of it.

        A cell that runs goes on as its rounds have gone, one that waits takes what others took.
        """
        now = self._clock()
        known = [(now - r.began, r.left(c.config.rounds, now)) for c, r in [*self.running.items()]]
        spans = self._spans or [gone + left for gone, left in known if left is not None]
        if not spans:
            return None
        usual = sum(spans) / len(spans)
        left = [max(0.0, usual - gone) if own is None else own for gone, own in known]
        together = (sum(left) + self.waiting * usual) / self._at_once
        return max([together, *left])

    def head(self) -> str:
        """Return the counts and the time left."""
        left = self.seconds_left()
        words = [
            f"cells {self.before + self.ran}/{self.total} done",
            f"{len(self.running)} running",
            f"{self.waiting} waiting",
        ]
        words += [f"{self.failed} failed"] if self.failed else []
        words += [] if left is None else [f"{left:.0f} s left"]
        return ", ".join(words)

    def __rich__(self) -> "Group":
        """Return the counts, and one line for each cell that runs."""
        from rich.console import Group
        from rich.text import Text

        lines = [Text(self.head(), overflow="ellipsis", no_wrap=True)]
        for cell, now in list(self.running.items()):
            done = now.last[0]
            where = f"round {done}/{cell.config.rounds}" if done else "first round"
            text = f"  {cell.name}  {where}  {now.metric}"
            lines.append(Text(text, style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*lines)


def outcome_of(line: Line) -> str:
    """Return what came of a cell in a few words, without test scores."""
    if "error" in line:
        return f"failed: {line['error']}"
    scores: Any = line["val"][line["judge"]]
    metric = metric_in([line]) or METRICS["accuracy"]
    shown = metric.text(None if scores is None else scores[metric.name])
    return f"val {metric.title} {shown}, best round {line['best_round']}, {line['seconds']:.1f} s"


@contextmanager
def show_study(mode: str, total: int) -> Iterator[StudyProgress]:
    """Yield a display on standard error: `live`, `plain` or `none`."""
    if mode == "live":
        from rich.console import Console
        from rich.live import Live

        view = StudyProgress(total)
        with Live(view, console=Console(stderr=True), refresh_per_second=4, transient=True):
            yield view
    else:
        yield StudyProgress(total, say if mode == "plain" else None)


def say(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201
