"""Figures of a run with silos, for a monitoring system."""

import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from silograph.core.errors import ConfigError, mistake
from silograph.core.resolved_config import ResolvedConfig
from silograph.deploy.display import SilosProgress, show_silos
from silograph.experiment.result_files import Row
from silograph.experiment.run.progress import Progress, RunFacts
from silograph.experiment.run.result import VIEWS, Result
from silograph.experiment.run.setup import versions
from silograph.federation.ledger import Ledger
from silograph.federation.session.events import Board, Cause, Event, SiloState, What
from silograph.federation.session.wire import join_address, split_address

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# --- A port where a monitoring system reads figures as OpenMetrics text --------------------------


CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PATH = "/metrics"
HOST = "127.0.0.1"
SECONDS = 10.0  # for a client to send its request


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of `PORT`, which is of this machine only, or `HOST:PORT`.

    >>> address_of("9100"), address_of("0.0.0.0:9100")
    (('127.0.0.1', 9100), ('0.0.0.0', 9100))

    Raises:
        ConfigError: it is neither.
    """
    try:
        return split_address(text if ":" in text else f"{HOST}:{text}", "metrics")
    except ConfigError:
        raise ConfigError(
            f"metrics: expected PORT or HOST:PORT, got {text!r}",
            **mistake("option-value", "metrics", text),
        ) from None


@contextmanager
def serve_metrics(text: Callable[[], bytes], address: str) -> Iterator[str]:
    """Answer GET /metrics inside the block; yield where, as HOST:PORT.

    Args:
        text: makes the answer.
        address: PORT or HOST:PORT; port 0 takes a free one.

    Raises:
        ConfigError: the address is none or not free.
    """
    host, port = address_of(address)
    try:
        server = _Server((host, port), text)
    except OSError as error:
        line = f"metrics: expected a free address, got {address}: {error.strerror}"
        raise ConfigError(line, **mistake("option-value", "metrics", address)) from None
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield join_address(host, server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingTCPServer):
    allow_reuse_address = True  # of a server that has ended; one that listens keeps it
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], text: Callable[[], bytes]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.text = text
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a reader that hangs up in the middle is no concern of the run."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SECONDS
    server_version = "silograph"
    sys_version = ""

    def handle_one_request(self) -> None:
        """Answer one request of any method."""
        self.raw_requestline = self.rfile.readline(65537)
        self.close_connection = True
        if self.raw_requestline and self.parse_request():
            is_metrics_request = self.command == "GET" and urlsplit(self.path).path == PATH
            body = self.server.text() if is_metrics_request else b""
            self.send_response(200 if is_metrics_request else 404)
            self.send_header("Content-Type", CONTENT_TYPE if is_metrics_request else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Figures:
    """Counts events for monitoring; also a `Tracker`, for the validation scores."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Begin to count; `clock` returns seconds since 1970."""
        self._began = clock()
        self._lock = threading.Lock()
        self._board: Board | None = None
        self._ledger: Callable[[], Ledger] | None = None
        self._counted_ledger: Ledger | None = None
        self._records = 0  # of it that have been counted
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._rounds = 0
        self._planned = 0
        self._seen: Counter[What] = Counter()
        self._drops: Counter[Cause] = Counter()
        self._calls: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self._row: Row = {}

    def follow(self, board: Board, rounds: int) -> None:
        """Also export the states of a board's silos, and the number of rounds."""
        self._board, self._planned = board, rounds

    def add_up(self, ledger: Callable[[], Ledger]) -> None:
        """Also export the bytes of a ledger."""
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

    def text(self) -> bytes:
        """Return all figures as OpenMetrics text."""
        from prometheus_client.openmetrics.exposition import generate_latest

        with self._lock:
            text: bytes = generate_latest(self)
        return text

    def collect(self) -> "Iterator[Metric]":
        """Yield all figures as families of metrics, for `generate_latest`."""
        from prometheus_client import core

        yield core.InfoMetricFamily(
            "silograph_build", "What runs here.", {"version": versions()["silograph"]}
        )
        yield core.GaugeMetricFamily(
            "silograph_start_time",
            "When the server started, in seconds since 1970.",
            self._began,
            unit="seconds",
        )
        yield core.CounterMetricFamily("silograph_rounds", "Rounds that are over.", self._rounds)
        yield core.GaugeMetricFamily(
            "silograph_rounds_planned", "Rounds that the run has at most.", self._planned
        )
        exchanged = core.CounterMetricFamily(
            "silograph_exchanged",
            "Bytes of frames, as in the ledger; down is from the server to silos.",
            labels=("direction", "kind"),
            unit="bytes",
        )
        self._count_bytes()
        for direction_and_kind, size in sorted(self._bytes.items()):
            exchanged.add_metric(direction_and_kind, size)
        yield exchanged
        yield from self._collect_silos()
        drops = core.CounterMetricFamily(
            "silograph_drops", "Times that a round went on without a silo.", labels=("cause",)
        )
        for cause in Cause:
            drops.add_metric((str(cause),), self._drops[cause])
        yield drops
        for name, what, help_text in (
            ("returns", What.RETURNED, "Times that a silo took part again."),
            ("refusals", What.REFUSED, "Times that a silo was not let in."),
            ("strangers", What.STRANGER, "Streams that were no silo's."),
            ("discarded_answers", What.DISCARDED, "Answers that came too late."),
        ):
            yield core.CounterMetricFamily(f"silograph_{name}", help_text, self._seen[what])
        scores = core.GaugeMetricFamily(
            "silograph_validation_score",
            "Validation scores of the last round that was judged.",
            labels=("view", "score"),
        )
        for name, value in self._row.items():
            for view in VIEWS:
                if name.startswith(f"val_{view}_") and value is not None:
                    scores.add_metric((view, name.removeprefix(f"val_{view}_")), float(value))
        yield scores

    def _count_bytes(self) -> None:
        """Add the bytes of the records that the ledger has got since the last time."""
        ledger = None if self._ledger is None else self._ledger()
        if ledger is not self._counted_ledger:  # the run continues from records of before
            self._counted_ledger, self._records = ledger, 0
            self._bytes.clear()
        if ledger is not None:
            new = ledger.since(self._records)
            self._records += len(new)
            for record in new:
                self._bytes[record.direction, str(record.what)] += int(record.bytes.sum())

    def _collect_silos(self) -> "Iterator[Metric]":
        """Yield how many silos there are, what each does, and how long each took to answer."""
        from prometheus_client import core

        board = self._board
        yield core.GaugeMetricFamily(
            "silograph_silos_expected", "Silos of the run.", 0 if board is None else board.room
        )
        states = core.StateSetMetricFamily(
            "silograph_silo_state", "What each silo does.", labels=("silo",)
        )
        for silo, standing in ({} if board is None else board.standings()).items():
            states.add_metric((silo,), {str(state): standing.state is state for state in SiloState})
        yield states
        calls = core.SummaryMetricFamily(
            "silograph_call", "Time from a call to its answer.", labels=("silo",), unit="seconds"
        )
        for silo, (number, seconds) in self._calls.items():
            calls.add_metric((silo,), int(number), seconds)
        yield calls


# --- monitoring ----------------------------------------------------------------------------------
# What a server shows of its run: log and metrics, which the board feeds, and the display.


class RunMonitor:
    """Forwards events to log and metrics, and reports every round; a `Progress`.

    Args:
        rounds: of the run.
        board: of its silos; receives every event first.
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
        """Forward an event, with the bytes of all frames so far where it is about a round."""
        if event.what in (What.ROUND, What.ENDED, What.STOPPED) and self._ledger is not None:
            event = replace(event, bytes=self._ledger().bytes)
        self._board.take(event)

    def follow(self, ledger: Callable[[], Ledger]) -> None:
        """Use the ledger of the run, once all silos are there."""
        self._ledger = ledger
        self._figures.add_up(ledger)

    def say(self, line: str) -> None:
        """Pass on a line for people."""
        self.report(Event(What.NOTE, note=line))

    def start(self, rounds_done: int) -> None:
        """Rounds begin, or go on after `rounds_done` of them."""
        self._began = time.monotonic()
        self._display.start(rounds_done)
        if rounds_done:
            self.report(Event(What.RESUMED, round=rounds_done, rounds=self._rounds))

    def update(self, rounds_done: int, metric: str) -> None:
        """A round is over."""
        now = time.monotonic()
        seconds, self._began = round(now - self._began, 6), now
        note = metric or None
        self.report(
            Event(What.ROUND, round=rounds_done, rounds=self._rounds, seconds=seconds, note=note)
        )
        self._display.update(rounds_done, metric)


@contextmanager
def monitor_run(
    rounds: int, board: Board, progress: str | Progress, figures: Figures, metrics: str | None
) -> Iterator[RunMonitor]:
    """Show where silos stand inside the block.

    Args:
        rounds: of the run.
        board: of its silos.
        progress: how to show it, or an object whose `update` is called after every round.
        figures: counts the events of the board.
        metrics: PORT or HOST:PORT where figures are read; None: nowhere.

    Raises:
        ConfigError: that is no address, or not free.
    """
    figures.follow(board, rounds)
    port = nullcontext() if metrics is None else serve_metrics(figures.text, metrics)
    with port as address, show_silos(progress, rounds, board) as display:
        if address is not None:
            board.take(Event(What.METRICS, address=address))
        yield RunMonitor(rounds, board, display, figures)
