"""Who sees what happens at a server of silos: the log, the board of silos, the progress view."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from silograph.experiment.progress import Progress
from silograph.experiment.silos_progress import SilosProgress, show_silos
from silograph.federation.ledger import Ledger
from silograph.federation.session.events import Event, Report, What
from silograph.federation.session.status import Board


class Watch:
    """Passes on what happens, and tells of every round; a `Progress`.

    Args:
        rounds: of the run.
        board: of its silos; told of every event first.
        display: what a person sees.
    """

    def __init__(self, rounds: int, board: Board, display: SilosProgress) -> None:
        self._rounds = rounds
        self._board = board
        self._display = display
        self._ledger: Callable[[], Ledger] | None = None
        self._began = time.monotonic()

    def report(self, event: Event) -> None:
        """Pass an event on; what all frames so far have cost is added where it belongs."""
        if event.what in (What.ROUND, What.ENDED) and self._ledger is not None:
            event = replace(event, bytes=self._ledger().bytes)
        self._board.take(event)

    def follow(self, ledger: Callable[[], Ledger]) -> None:
        """Silos are there: their run has this ledger."""
        self._ledger = ledger

    def say(self, line: str) -> None:
        """Pass on a line for people."""
        self.report(Event(What.NOTE, note=line))

    def start(self, done: int) -> None:
        """Rounds begin, or go on after `done` of them."""
        self._began = time.monotonic()
        self._display.start(done)
        if done:
            self.report(Event(What.RESUMED, round=done, rounds=self._rounds))

    def update(self, done: int, metric: str) -> None:
        """A round is over."""
        now = time.monotonic()
        seconds, self._began = round(now - self._began, 6), now
        note = metric or None
        self.report(Event(What.ROUND, round=done, rounds=self._rounds, seconds=seconds, note=note))
        self._display.update(done, metric)


@contextmanager
def watching(
    rounds: int, names: Sequence[str], room: int, progress: str | Progress, report: Report
) -> Iterator[Watch]:
    """Show where silos stand inside the block.

    Args:
        rounds: of the run.
        names: of the silos, as far as they are known.
        room: silos of the run.
        progress: how to show it, or who is told of rounds.
        report: told of every event.
    """
    board = Board(names, room, report)
    with show_silos(progress, rounds, board) as display:
        yield Watch(rounds, board, display)
