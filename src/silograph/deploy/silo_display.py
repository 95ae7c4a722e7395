"""What a terminal shows of a silo that takes part in a run: one line."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from silograph.core.text import counted
from silograph.experiment.report.figures import size_text
from silograph.federation.session.events import Event, EventCallback, What, both, log_event

if TYPE_CHECKING:
    from rich.text import Text

WORDS = {
    What.ATTACHED: "connected",
    What.ASKED: "working",
    What.ANSWERED: "connected",
    What.DISMISSED: "dropped",
    What.LOST: "tries to connect",
    What.STOPPED: "waits for the server",
    What.ENDED: "the run is over",
}


@dataclass(frozen=True)
class Seen:
    """What a silo has seen of a run.

    Attributes:
        state: what it does.
        round: the last one.
        op: the last one.
        calls: that it has answered.
        down: bytes of the frames of calls.
        up: bytes of those of answers.
    """

    state: str = "connecting"
    round: int = 0
    op: str = ""
    calls: int = 0
    down: int = 0
    up: int = 0


def seen_after(before: Seen, event: Event) -> Seen:
    """Return what a silo has seen after an event."""
    now = replace(before, state=WORDS.get(event.what, before.state))
    size = event.bytes or 0
    match event.what:
        case What.ASKED:
            down = before.down + size
            return replace(now, round=event.round or 0, op=event.op or "", down=down)
        case What.ANSWERED:
            return replace(now, calls=before.calls + 1, up=before.up + size)
        case _:
            return now


class SiloLine:
    """Draws what a silo has seen; takes events from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._seen = Seen()

    def take(self, event: Event) -> None:
        """Take in an event."""
        with self._lock:
            self._seen = seen_after(self._seen, event)

    def __rich__(self) -> "Text":
        """Return the line."""
        from rich.text import Text

        seen = self._seen
        words = [self._name, seen.state]
        if seen.calls:
            words += [f"round {seen.round}", counted(seen.calls, "call")]
            words += [f"{size_text(seen.down)} in", f"{size_text(seen.up)} out"]
        words += [seen.op] if seen.state == "working" else []
        return Text("  ".join(words), overflow="ellipsis", no_wrap=True)


@contextmanager
def show_silo(mode: str, name: str) -> Iterator[EventCallback]:
    """Yield what a silo reports to: the log and, with `live`, a line on standard error."""
    if mode != "live":
        yield log_event
        return
    from rich.console import Console
    from rich.live import Live

    line = SiloLine(name)
    with Live(line, console=Console(stderr=True), refresh_per_second=4):
        yield both(line.take, log_event)
