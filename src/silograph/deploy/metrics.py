"""Figures of a run with silos, for a monitoring system."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from silograph.core.resolved_config import ResolvedConfig
from silograph.deploy.openmetrics import Family, Sample, counter, exposition, single
from silograph.experiment.result_files import Row
from silograph.experiment.run.result import VIEWS, Result
from silograph.experiment.run.setup import versions
from silograph.experiment.run.trackers import RunFacts
from silograph.federation.ledger import Ledger
from silograph.federation.session.events import Cause, Event, What
from silograph.federation.session.status import Board, SiloState


class Figures:
    """Counts what happens; a `Tracker`, too, for what rounds were judged by."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Begin to count; `clock` tells seconds since 1970."""
        self._began = clock()
        self._lock = threading.Lock()
        self._board: Board | None = None
        self._ledger: Callable[[], Ledger] | None = None
        self._counted: Ledger | None = None
        self._records = 0  # of it that have been counted
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._rounds = 0
        self._planned = 0
        self._seen: Counter[What] = Counter()
        self._drops: Counter[Cause] = Counter()
        self._calls: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self._row: Row = {}

    def follow(self, board: Board, rounds: int) -> None:
        """Tell where the silos of a board stand, too, and of how many rounds."""
        self._board, self._planned = board, rounds

    def add_up(self, ledger: Callable[[], Ledger]) -> None:
        """Tell the bytes of a ledger, too."""
        self._ledger = ledger

    def take(self, event: Event) -> None:
        """Count an event."""
        with self._lock:
            self._seen[event.what] += 1
            if event.what is What.DROPPED and event.cause is not None:
                self._drops[event.cause] += 1
            if event.what is What.ANSWERED and event.seconds is not None:
                calls = self._calls[event.silo or ""]
                calls[0] += 1
                calls[1] += event.seconds
            if event.what in (What.ROUND, What.RESUMED):
                self._rounds = event.round or 0

    def begin(self, config: ResolvedConfig, facts: RunFacts) -> None:
        """Remember how many rounds there will be at most."""
        self._planned, self._rounds = config.rounds, facts.done

    def round(self, row: Row) -> None:
        """Remember the last round that was judged."""
        self._row = row

    def end(self, result: Result) -> None:
        """Do nothing: the port is closed in a moment."""

    def text(self) -> str:
        """Return all figures as OpenMetrics text."""
        with self._lock:
            return exposition(self._families())

    def _families(self) -> Iterator[Family]:
        about = Sample(1, {"version": versions()["silograph"]}, "_info")
        yield Family("silograph_build", "info", "What runs here.", (about,))
        began = "When the server started, in seconds since 1970."
        yield single("silograph_start_time_seconds", "gauge", began, self._began, "seconds")
        yield single("silograph_rounds", "counter", "Rounds that are over.", self._rounds)
        most = "Rounds that the run has at most."
        yield single("silograph_rounds_planned", "gauge", most, self._planned)
        yield self._exchanged()
        yield from self._silos()
        drops = {str(cause): self._drops[cause] for cause in Cause}
        yield counter(
            "silograph_drops", "Times that a round went on without a silo.", drops, "cause"
        )
        for name, what, told in (
            ("returns", What.RETURNED, "Times that a silo took part again."),
            ("refusals", What.REFUSED, "Times that a silo was not let in."),
            ("strangers", What.STRANGER, "Streams that were no silo's."),
            ("discarded_answers", What.DISCARDED, "Answers that came too late."),
        ):
            yield single(f"silograph_{name}", "counter", told, self._seen[what])
        yield self._judged()

    def _exchanged(self) -> Family:
        ledger = None if self._ledger is None else self._ledger()
        if ledger is not self._counted:  # the run goes on from records of before
            self._counted, self._records = ledger, 0
            self._bytes.clear()
        if ledger is not None:
            new = ledger.since(self._records)
            self._records += len(new)
            for record in new:
                self._bytes[record.direction, str(record.what)] += int(record.bytes.sum())
        samples = tuple(
            Sample(size, {"direction": direction, "kind": kind}, "_total")
            for (direction, kind), size in sorted(self._bytes.items())
        )
        told = "Bytes of frames, as in the ledger; down is from the server to silos."
        return Family("silograph_exchanged_bytes", "counter", told, samples, "bytes")

    def _silos(self) -> Iterator[Family]:
        board = self._board
        standings = {} if board is None else board.standings()
        room = 0 if board is None else board.room
        yield single("silograph_silos_expected", "gauge", "Silos of the run.", room)
        name = "silograph_silo_state"
        samples = tuple(
            Sample(int(s.state is state), {"silo": silo, name: str(state)})
            for silo, s in standings.items()
            for state in SiloState
        )
        yield Family(name, "stateset", "What each silo does.", samples)
        calls = tuple(
            Sample(value, {"silo": silo}, suffix)
            for silo, values in self._calls.items()
            for suffix, value in zip(("_count", "_sum"), values, strict=True)
        )
        told = "Time from a call to its answer."
        yield Family("silograph_call_seconds", "summary", told, calls, "seconds")

    def _judged(self) -> Family:
        found = tuple(
            Sample(float(value), {"view": view, "score": name.removeprefix(start)})
            for view in VIEWS
            for start in (f"val_{view}_",)
            for name, value in self._row.items()
            if name.startswith(start) and value is not None
        )
        told = "Validation scores of the last round that was judged."
        return Family("silograph_validation_score", "gauge", told, found)
