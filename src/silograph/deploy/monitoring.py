"""Who sees what happens at a server of silos: log and figures by way of the board, and the view."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from silograph.deploy.metrics import Figures
from silograph.deploy.openmetrics import serving
from silograph.deploy.server_display import SilosProgress, show_silos
from silograph.experiment.run.progress import Progress
from silograph.federation.ledger import Ledger
from silograph.federation.session.events import Event, What
from silograph.federation.session.status import Board


class Watch:
    """Passes on what happens, and tells of every round; a `Progress`.

    Args:
        rounds: of the run.
        board: of its silos; told of every event first.
        display: what a person sees.
        figures: what a monitoring system sees.
    """

    def __init__(self, rounds: int, board: Board, display: SilosProgress, figures: Figures) -> None:
        self._rounds = rounds
        self._board = board
        self._display = display
        self._figures = figures
        self._ledger: Callable[[], Ledger] | None = None
        self._began = time.monotonic()

    def report(self, event: Event) -> None:
        """Pass an event on; what all frames so far have cost is added where it belongs."""
        if event.what in (What.ROUND, What.ENDED, What.STOPPED) and self._ledger is not None:
            event = replace(event, bytes=self._ledger().bytes)
        self._board.take(event)

    def follow(self, ledger: Callable[[], Ledger]) -> None:
        """Silos are there: their run has this ledger."""
        self._ledger = ledger
        self._figures.add_up(ledger)

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
    rounds: int, board: Board, progress: str | Progress, figures: Figures, metrics: str | None
) -> Iterator[Watch]:
    """Show where silos stand inside the block.

    Args:
        rounds: of the run.
        board: of its silos.
        progress: how to show it, or who is told of rounds.
        figures: told of every event by the board.
        metrics: PORT or HOST:PORT where figures are read; None: nowhere.

    Raises:
        ConfigError: that is no address, or not free.
    """
    figures.follow(board, rounds)
    port = nullcontext() if metrics is None else serving(figures.text, metrics)
    with port as address, show_silos(progress, rounds, board) as display:
        if address is not None:
            board.take(Event(What.METRICS, address=address))
        yield Watch(rounds, board, display, figures)
