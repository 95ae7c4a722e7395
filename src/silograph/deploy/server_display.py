"""Progress of a federation of silos: the rounds, and where each silo stands."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from silograph.core.text import counted
from silograph.experiment.run.progress import Pace, Plain, Progress, Silent, round_bar
from silograph.federation.session.status import AWAY, Board, SiloState, Standing, counts

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
    """Told of every round, and before them where the run goes on."""

    def start(self, done: int) -> None:
        """Show that silos are there, and `done` rounds were over before."""


class RoundsOnly:
    """Passes rounds on to who has no use for silos."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self, done: int) -> None:
        """Do nothing."""

    def update(self, done: int, metric: str) -> None:
        """Pass a round on."""
        self._progress.update(done, metric)


class PlainSilos:
    """Prints about ten lines over a run; they name silos that are not there."""

    def __init__(self, total: int, board: Board) -> None:
        self._total = total
        self._board = board
        self._plain = Plain(total, 0)

    def start(self, done: int) -> None:
        """Begin to count after `done` rounds."""
        self._plain = Plain(self._total, done)

    def update(self, done: int, metric: str) -> None:
        """Print a line now and then."""
        words = (metric, missing(self._board.standings(), self._board.room))
        self._plain.update(done, "  ".join(w for w in words if w))


class LiveSilos:
    """What a terminal shows; rich draws it as it is at the moment."""

    def __init__(self, total: int, board: Board) -> None:
        self._board = board
        self._bar = round_bar()
        self._pace = Pace(total)
        self._task = self._bar.add_task("", total=total, left="", metric="waiting for silos")

    def start(self, done: int) -> None:
        """Show that silos are there, and `done` rounds were over before."""
        self._bar.update(self._task, completed=done, metric="first round")

    def update(self, done: int, metric: str) -> None:
        """Show that `done` rounds are over, and the current metric."""
        self._bar.update(self._task, completed=done, left=self._pace.left(done), metric=metric)

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
    found = counts(standings, room)
    return [(f"{number} {state}", state) for state, number in found.items() if number]


def missing(standings: Mapping[str, Standing], room: int) -> str:
    """Return which silos do not take part, in a few words; nothing where all do."""
    names = [name for name, s in standings.items() if s.state in (SiloState.WAITING, *AWAY)]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{room - len(names)} of {counted(room, 'silo')}, without {', '.join(names[:3])}{more}"


def chosen(standings: Mapping[str, Standing], now: float) -> list[str]:
    """Return the silos that have a line: all, or with many of them those that are not fine."""
    if len(standings) <= MOST_ROWS:
        return list(standings)
    found = counts(standings, len(standings))
    few = found[SiloState.WORKING] < found[SiloState.CONNECTED]

    def is_fine(s: Standing) -> bool:
        slow = few and now - s.since >= SLOW_SECONDS
        return s.state is SiloState.CONNECTED or (s.state is SiloState.WORKING and not slow)

    worst = sorted(standings.items(), key=lambda item: -list(SiloState).index(item[1].state))
    return [name for name, s in worst if not is_fine(s)]


def row_of(standing: Standing, now: float) -> tuple[str, str]:
    """Return for how long a silo has stood where it does, and what there is to say."""
    gone = now - standing.since
    seconds = f"{gone:.0f} s" if gone >= SHOWN_SECONDS else ""
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

    names = chosen(standings, now)
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
    """Yield a display on standard error: `live`, `plain` or `none`, or who is told of rounds."""
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
