"""Progress of a federation, at the server (rounds, and where each silo is) and at a silo."""

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Protocol

from silograph.core.errors import ConfigError, mistake, reword_error, unknown
from silograph.core.files import opens_private
from silograph.core.text import count_of, printable
from silograph.experiment.report.reading import size_text
from silograph.experiment.run.progress import Pace, Plain, Progress, Silent, round_bar
from silograph.federation.session.events import (
    AWAY,
    FIELDS,
    Board,
    Event,
    EventCallback,
    SiloState,
    Standing,
    What,
    both,
    counts,
    log_event,
)

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text


MOST_ROWS = 12  # silos that have a line of their own; with more of them, those that are not fine
MOST_NAME = 24  # columns of a name
SHOWN_SECONDS = 1.0  # shorter than that is not worth a number that changes all the time
SLOW_SECONDS = 10.0  # a silo that works for longer than that and most others has a line, too
STYLES = {
    SiloState.WAITING: "dim",
    SiloState.CONNECTED: "green",
    SiloState.WORKING: "cyan",
    SiloState.LATE: "yellow",
    SiloState.DROPPED: "red",
}


class SilosProgress(Progress, Protocol):
    """Called once before the first round, and after every round."""

    def start(self, done: int) -> None:
        """Show that silos are there, and `done` rounds were over before."""


class RoundsOnly:
    """Forwards rounds to a `Progress` that does not show silos."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self, rounds_done: int) -> None:
        """Do nothing."""

    def update(self, rounds_done: int, metric: str) -> None:
        """Forward a round."""
        self._progress.update(rounds_done, metric)


class PlainSilos:
    """Prints about ten lines over a run; they name silos that are not there."""

    def __init__(self, total: int, board: Board) -> None:
        self._total = total
        self._board = board
        self._plain = Plain(total, 0)

    def start(self, rounds_done: int) -> None:
        """Begin to count after `rounds_done` rounds."""
        self._plain = Plain(self._total, rounds_done)

    def update(self, rounds_done: int, metric: str) -> None:
        """Print a line now and then."""
        words = (metric, describe_missing_silos(self._board.standings(), self._board.room))
        self._plain.update(rounds_done, "  ".join(w for w in words if w))


class LiveSilos:
    """The live display of a terminal; rich draws its current state."""

    def __init__(self, total: int, board: Board) -> None:
        self._board = board
        self._bar = round_bar()
        self._pace = Pace(total)
        self._task = self._bar.add_task("", total=total, left="", metric="waiting for silos")

    def start(self, rounds_done: int) -> None:
        """Show that silos are there, and `rounds_done` rounds were over before."""
        self._bar.update(self._task, completed=rounds_done, metric="first round")

    def update(self, rounds_done: int, metric: str) -> None:
        """Show that `rounds_done` rounds are over, and the current metric."""
        self._bar.update(
            self._task, completed=rounds_done, left=self._pace.left(rounds_done), metric=metric
        )

    def __rich__(self) -> "Group":
        """Return the rounds, the silos' counts, and a line for each of them that needs one."""
        from rich.console import Group
        from rich.text import Text

        standings = self._board.standings()
        head = Text("silos ", overflow="ellipsis", no_wrap=True)
        for number, (text, state) in enumerate(summary(standings, self._board.room)):
            head.append(", " if number else "")
            head.append(text, style=STYLES[state])
        return Group(self._bar.get_renderable(), head, *_lines(standings, self._board.clock()))


def summary(standings: Mapping[str, Standing], room: int) -> list[tuple[str, SiloState]]:
    """Return how many silos are in each state that there is, in words."""
    count_by_state = counts(standings, room)
    return [(f"{number} {state}", state) for state, number in count_by_state.items() if number]


def describe_missing_silos(standings: Mapping[str, Standing], room: int) -> str:
    """Return which silos do not take part, in a few words; nothing where all do."""
    names = [name for name, s in standings.items() if s.state in (SiloState.WAITING, *AWAY)]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{room - len(names)} of {count_of(room, 'silo')}, without {', '.join(names[:3])}{more}"


def silos_with_a_line(standings: Mapping[str, Standing], now: float) -> list[str]:
    """Return the silos that have a line: all, or with many of them those that are not fine."""
    if len(standings) <= MOST_ROWS:
        return list(standings)
    count_by_state = counts(standings, len(standings))
    has_few_working = count_by_state[SiloState.WORKING] < count_by_state[SiloState.CONNECTED]

    def is_fine(s: Standing) -> bool:
        slow = has_few_working and now - s.since >= SLOW_SECONDS
        return s.state is SiloState.CONNECTED or (s.state is SiloState.WORKING and not slow)

    worst = sorted(standings.items(), key=lambda item: -list(SiloState).index(item[1].state))
    return [name for name, s in worst if not is_fine(s)]


def row_of(standing: Standing, now: float) -> tuple[str, str]:
    """Return for how long a silo has been in its state, and details of the state."""
    elapsed = now - standing.since
    seconds = f"{elapsed:.0f} s" if elapsed >= SHOWN_SECONDS else ""
    match standing.state:
        case SiloState.WORKING:
            return seconds, standing.op or ""
        case SiloState.LATE | SiloState.DROPPED:
            return seconds, f"round {standing.round}: {standing.reason}"
        case SiloState.WAITING if standing.reason is not None:
            return seconds, "back; takes part from the next round on"
        case _:
            return "", ""


def cut(name: str) -> str:
    """Return a name without the end of a long one."""
    return name if len(name) <= MOST_NAME else name[: MOST_NAME - 1] + "…"


def _lines(standings: Mapping[str, Standing], now: float) -> "Iterator[Text]":
    """Yield a line a silo; only what there is to say may be cut off by a narrow terminal."""
    from rich.text import Text

    names = silos_with_a_line(standings, now)
    width = max((len(cut(name)) for name in names[:MOST_ROWS]), default=0)
    for name in names[:MOST_ROWS]:
        state = standings[name].state
        seconds, text = row_of(standings[name], now)
        line = Text(f"  {cut(name):<{width}}  ", overflow="ellipsis", no_wrap=True)
        line.append(f"{state:<9}", style=STYLES[state])
        line.append(f"  {seconds:>6}  {text}".rstrip())
        yield line
    if len(names) > MOST_ROWS:
        yield Text(f"  and {len(names) - MOST_ROWS} more", style="dim")


@contextmanager
def show_silos(mode: str | Progress, total: int, board: Board) -> Iterator[SilosProgress]:
    """Yield a display on standard error: `live`, `plain` or `none`, or wrap a `Progress`."""
    if not isinstance(mode, str):
        yield RoundsOnly(mode)
    elif mode == "live":
        from rich.console import Console
        from rich.live import Live

        view = LiveSilos(total, board)
        with Live(view, console=Console(stderr=True), refresh_per_second=4):
            yield view
    else:
        yield PlainSilos(total, board) if mode == "plain" else RoundsOnly(Silent())


# --- What a terminal shows of a silo that takes part in a run: one line --------------------------


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
class SiloActivity:
    """What a silo has done in a run.

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


def activity_after(before: SiloActivity, event: Event) -> SiloActivity:
    """Return a silo's activity after an event."""
    after = replace(before, state=WORDS.get(event.what, before.state))
    size = event.bytes or 0
    match event.what:
        case What.ASKED:
            down = before.down + size
            return replace(after, round=event.round or 0, op=event.op or "", down=down)
        case What.ANSWERED:
            return replace(after, calls=before.calls + 1, up=before.up + size)
        case _:
            return after


class SiloLine:
    """Draws the activity of a silo; accepts events from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._seen = SiloActivity()

    def take(self, event: Event) -> None:
        """Take in an event."""
        with self._lock:
            self._seen = activity_after(self._seen, event)

    def __rich__(self) -> "Text":
        """Return the line."""
        from rich.text import Text

        seen = self._seen
        words = [self._name, seen.state]
        if seen.calls:
            words += [f"round {seen.round}", count_of(seen.calls, "call")]
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


# --- Logs of the command line: lines for people on standard error, JSON lines in a file ----------
#
# Silograph itself logs under `silograph` and configures nothing; whoever uses it as a library adds
# handlers of their own, such as a `FileHandler` with `JsonLines`.


LOG = logging.getLogger("silograph")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
TIME_COLUMNS = len("2026-01-31 12:00:00 ")
TOLD_ELSEWHERE = (What.ROUND, What.ENDED)  # by the progress, and by the last line of a command


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC), level, event, message, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when.replace("+00:00", "Z"), "level": record.levelname.lower()}
        line["event"] = vars(record).get("event", str(What.NOTE))
        line["message"] = record.getMessage()
        line |= {name: vars(record)[name] for name in FIELDS if name in vars(record)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class LogLine(logging.Formatter):
    """Time and message on one line; a traceback below."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging calls it
        """Return time and message."""
        return printable(super().formatMessage(record))


class ForPeople(logging.Handler):
    """Lines on standard error as it is at the moment: a live view moves down for them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LogLine("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        self.addFilter(lambda record: vars(record).get("event") not in TOLD_ELSEWHERE)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line at once, so that lines of threads do not mix."""
        message, *traceback = map(printable, self.format(record).split("\n"))
        try:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
        except (OSError, ValueError):  # no terminal: programs read whole lines
            lines = [message]
        else:
            lines = wrap(
                message,
                max(width, 40),
                subsequent_indent=" " * TIME_COLUMNS,
                break_long_words=False,  # a path or an address stays in one piece
                break_on_hyphens=False,
            )
        sys.stderr.write("".join(line + "\n" for line in (*lines, *traceback)))
        sys.stderr.flush()


class ToFile(WatchedFileHandler):
    """Appends to a file for its owner only, for a silo's log may name its nodes.

    It is opened anew where it has been rotated; a full disk ends it.
    """

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return os.fdopen(opens_private(self.baseFilename, flags), "a", encoding=self.encoding)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging calls it
        """Say once that no more is written; the run goes on."""
        error = sys.exc_info()[1]
        LOG.removeHandler(self)
        LOG.warning("nothing more is written to %s: %s", self.baseFilename, error)


@contextmanager
def logging_to(file: Path | None, level: str = "info") -> Iterator[None]:
    """Log for people inside the block, and to a file as JSON lines if there is one.

    Args:
        file: that lines are added to.
        level: debug, info or warning: the least that is logged.

    Raises:
        ConfigError: another level, or a file that cannot be written.
    """
    if level not in LEVELS:
        error = unknown("level", level, LEVELS)
        raise reword_error(error, f"log_level: {error}", ConfigError)
    handlers: list[logging.Handler] = [ForPeople()]
    if file is not None:
        try:
            handlers.append(ToFile(file, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"expected a log to write at {file}, got: {error.strerror}",
                **mistake("unwritable-path", file),
            ) from None
        handlers[-1].setFormatter(JsonLines())
    before = LOG.level
    LOG.setLevel(LEVELS[level])
    for handler in handlers:
        LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.setLevel(before)
        for handler in handlers:
            LOG.removeHandler(handler)
            handler.close()
