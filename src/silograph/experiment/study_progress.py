"""Progress of a study: cells done, running and waiting; a live view or plain lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from silograph.experiment.cells import Cell, Line

if TYPE_CHECKING:
    from rich.console import Group


class StudyProgress:
    """Counts cells and says where the study is; rich draws it as it is at the moment."""

    def __init__(self, total: int, say: Callable[[str], None] | None = None) -> None:
        """Start with so many cells in all.

        Args:
            total: number of cells, as far as it is known.
            say: told a line when a cell ends, None for nobody.
        """
        self.total = total
        self.before = self.ran = self.failed = 0
        self.running: dict[Cell, tuple[int, str]] = {}  # round and metric
        self._say = say
        self._start = time.monotonic()

    def skipped(self) -> None:
        """Count a cell that had run before."""
        self.before += 1

    def started(self, cell: Cell) -> None:
        """Count a cell among those that run."""
        self.running[cell] = (0, "")

    def round(self, cell: Cell, done: int, metric: str) -> None:
        """Remember that `done` rounds of a cell are over."""
        self.running[cell] = (done, metric)

    def finished(self, cell: Cell, line: Line) -> None:
        """Count a cell that has run."""
        self.running.pop(cell, None)
        self.ran += 1
        self.failed += "error" in line
        if self._say is not None:
            self._say(f"{self.head()}: {cell.name}: {outcome_of(line)}")

    @property
    def waiting(self) -> int:
        """Cells that have not started."""
        return max(0, self.total - self.before - self.ran - len(self.running))

    def seconds_left(self) -> float | None:
        """Return the seconds to the end at the pace so far; None before there is one."""
        parts = sum(done / cell.config.rounds for cell, (done, _) in self.running.items())
        over = self.ran + parts
        left = self.waiting + len(self.running) - parts
        return None if over == 0 else (time.monotonic() - self._start) / over * left

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
        for cell, (done, metric) in list(self.running.items()):
            where = f"round {done}/{cell.config.rounds}" if done else "first round"
            text = f"  {cell.name}  {where}  {metric}"
            lines.append(Text(text, style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*lines)


def outcome_of(line: Line) -> str:
    """Return what came of a cell in a few words, without test scores."""
    if "error" in line:
        return f"failed: {line['error']}"
    scores: Any = line["val"][line["judge"]]
    accuracy = None if scores is None else scores["accuracy"]
    shown = "-" if accuracy is None else f"{accuracy:.4f}"
    return f"val accuracy {shown}, best round {line['best_round']}, {line['seconds']:.1f} s"


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
        yield StudyProgress(total, _print if mode == "plain" else None)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
