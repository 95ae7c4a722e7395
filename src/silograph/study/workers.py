"""Cells in processes of their own, which receive jobs as JSON lines and end with this process.

A worker gets configs and paths, never code or pickled objects. A graph in memory goes through a
file of plain arrays.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from silograph.experiment.run.setup import versions
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.study.cells import Cell, Line, metric_in, run_cell
from silograph.task.metric_table import METRICS

if TYPE_CHECKING:
    from rich.console import Group


# --- A graph in memory, handed to another process as a file of plain arrays ----------------------


SPLIT = ("train", "val", "test")
COLUMN = "column:"  # begins the names of what else is known of nodes


def write_graph(path: Path, graph: Graph) -> None:
    """Write every field of a graph; nothing is pickled."""
    x = graph.x
    parts: dict[str, Any] = {
        "indptr": graph.adj.indptr.numpy(),
        "indices": graph.adj.indices.numpy(),
        "y": graph.y.numpy(),
        "num_classes": graph.num_classes,
        "node_id": graph.node_id,
        "name": graph.name,
        "silo_names": np.array(graph.silo_names, dtype=np.str_),
        "class_names": np.array(graph.class_names, dtype=np.str_),
        "feature_names": np.array(graph.feature_names, dtype=np.str_),
    }
    parts |= {COLUMN + name: column.numpy() for name, column in graph.columns.items()}
    if isinstance(x, Tensor):
        parts["x"] = x.numpy()
    else:
        assert x.values is not None  # features always carry values
        parts |= {"x_indptr": x.indptr.numpy(), "x_indices": x.indices.numpy()}
        parts |= {"x_values": x.values.numpy(), "x_cols": x.num_cols}
    if graph.edge_weight is not None:
        parts["edge_weight"] = graph.edge_weight.numpy()
    if graph.directed_weight is not None:
        parts["directed_weight"] = graph.directed_weight.numpy()
    if graph.scale is not None:
        parts["scale"] = np.array(graph.scale)
    if graph.silo is not None:
        parts["silo"] = graph.silo.numpy()
    if graph.split is not None:
        parts |= {name: getattr(graph.split, name).numpy() for name in SPLIT}
    np.savez(path, allow_pickle=False, **parts)


def read_graph(path: str | Path) -> Graph:
    """Return the graph that `write_graph` wrote."""
    with np.load(path, allow_pickle=False) as archive:
        parts = {name: archive[name] for name in archive.files}
    arrays = {n: torch.from_numpy(a) for n, a in parts.items() if a.ndim and a.dtype.kind in "bif"}
    num_nodes = len(arrays["indptr"]) - 1
    x: Tensor | CSR
    if "x" in arrays:
        x = arrays["x"]
    else:
        num_cols = int(parts["x_cols"])
        x = CSR(arrays["x_indptr"], arrays["x_indices"], arrays["x_values"], num_cols)
    scale = None
    if "scale" in arrays:
        low, high = arrays["scale"].tolist()
        scale = (low, high)
    return Graph(
        adj=CSR(arrays["indptr"], arrays["indices"], None, num_nodes),
        x=x,
        y=arrays["y"],
        num_classes=int(parts["num_classes"]),
        node_id=parts["node_id"],
        name=str(parts["name"]),
        split=Split(*(arrays[name] for name in SPLIT)) if "train" in arrays else None,
        silo=arrays.get("silo"),
        silo_names=tuple(parts["silo_names"].tolist()),
        class_names=tuple(parts["class_names"].tolist()),
        feature_names=tuple(parts["feature_names"].tolist()),
        edge_weight=arrays.get("edge_weight"),
        directed_weight=arrays.get("directed_weight"),
        columns={n.removeprefix(COLUMN): t for n, t in arrays.items() if n.startswith(COLUMN)},
        scale=scale,
    )


# --- Progress of a study: cells done, running and waiting; a live view or plain lines ------------


@dataclass(frozen=True)
class Running:
    """A cell that runs; times in seconds.

    Attributes:
        began: when it started.
        first: the first round that was reported, and when; None before it.
        last: the latest.
        metric: text of the metric in it.
    """

    began: float
    first: tuple[int, float] | None = None
    last: tuple[int, float] = (0, 0.0)
    metric: str = ""

    def estimate_seconds_left(self, rounds: int, now: float) -> float | None:
        """Return the seconds to its end by its own rounds; None before there are two."""
        if self.first is None or self.last[0] <= self.first[0]:
            return None
        (first_round, first_time), (last_round, last_time) = self.first, self.last
        return max(
            0.0,
            (last_time - first_time) / (last_round - first_round) * (rounds - last_round)
            - (now - last_time),
        )


class StudyProgress:
    """Counts cells and estimates the time left; rich draws its current state."""

    def __init__(
        self,
        total: int,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with so many cells in all.

        Args:
            total: number of cells, as far as it is known.
            say: called with a line when a cell ends, or None.
            clock: returns seconds.
        """
        self.total = total
        self.before = self.ran = self.failed = 0
        self.running: dict[Cell, Running] = {}
        self._say = say
        self._clock = clock
        self._spans: list[float] = []  # seconds of the cells that have run
        self._at_once = 1

    def count_skipped(self) -> None:
        """Count a cell that had run before."""
        self.before += 1

    def start_cell(self, cell: Cell) -> None:
        """Count a cell among those that run."""
        self.running[cell] = Running(self._clock())
        self._at_once = max(self._at_once, len(self.running))

    def round(self, cell: Cell, rounds_done: int, metric: str) -> None:
        """Remember that `rounds_done` rounds of a cell are over."""
        previous, now = self.running[cell], (rounds_done, self._clock())
        first = previous.first or now
        self.running[cell] = replace(previous, first=first, last=now, metric=metric)

    def finish_cell(self, cell: Cell, line: Line) -> None:
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

        A running cell is extrapolated from its own rounds, a waiting one takes the mean of others.
        """
        now = self._clock()
        times_by_cell = [
            (now - r.began, r.estimate_seconds_left(c.config.rounds, now))
            for c, r in [*self.running.items()]
        ]
        spans = self._spans or [
            elapsed + remaining for elapsed, remaining in times_by_cell if remaining is not None
        ]
        if not spans:
            return None
        mean_span = sum(spans) / len(spans)
        remaining = [
            max(0.0, mean_span - elapsed) if estimate is None else estimate
            for elapsed, estimate in times_by_cell
        ]
        shared_estimate = (sum(remaining) + self.waiting * mean_span) / self._at_once
        return max([shared_estimate, *remaining])

    def head(self) -> str:
        """Return the counts and the time left."""
        seconds_left = self.seconds_left()
        words = [
            f"cells {self.before + self.ran}/{self.total} done",
            f"{len(self.running)} running",
            f"{self.waiting} waiting",
        ]
        words += [f"{self.failed} failed"] if self.failed else []
        words += [] if seconds_left is None else [f"{seconds_left:.0f} s left"]
        return ", ".join(words)

    def __rich__(self) -> "Group":
        """Return the counts, and one line for each cell that runs."""
        from rich.console import Group
        from rich.text import Text

        lines = [Text(self.head(), overflow="ellipsis", no_wrap=True)]
        for cell, now in list(self.running.items()):
            rounds_done = now.last[0]
            round_text = (
                f"round {rounds_done}/{cell.config.rounds}" if rounds_done else "first round"
            )
            text = f"  {cell.name}  {round_text}  {now.metric}"
            lines.append(Text(text, style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*lines)


def outcome_of(line: Line) -> str:
    """Return the outcome of a cell in a few words, without test scores."""
    if "error" in line:
        return f"failed: {line['error']}"
    scores: Any = line["val"][line["judge"]]
    metric = metric_in([line]) or METRICS["accuracy"]
    score_text = metric.text(None if scores is None else scores[metric.name])
    return (
        f"val {metric.title} {score_text}, best round {line['best_round']}, {line['seconds']:.1f} s"
    )


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


@dataclass(frozen=True, eq=False)
class Job:
    """A cell that is to be run.

    Attributes:
        cell: the cell.
        folder: its result folder, None for none.
        test: whether test scores are returned.
    """

    cell: Cell
    folder: str | None
    test: bool


Outcomes = Generator[tuple[Job, Line], None, None]


@dataclass(frozen=True, eq=False)
class RoundsOf:
    """Reports the rounds of one cell to the progress of a study."""

    cell: Cell
    display: StudyProgress

    def update(self, rounds_done: int, metric: str) -> None:
        """Tell that `rounds_done` rounds are over."""
        self.display.round(self.cell, rounds_done, metric)


def run_here(jobs: Iterator[Job], processes: int, display: StudyProgress) -> Outcomes:
    """Run jobs one after the other in this process; yield each with its outcome."""
    del processes
    for job in jobs:
        display.start_cell(job.cell)
        cell, rounds = job.cell, RoundsOf(job.cell, display)
        yield job, run_cell(cell, folder=job.folder, progress=rounds, test=job.test)


class Worker:
    """A process that runs one job after the other."""

    def __init__(self, events: "SimpleQueue[tuple[Worker, Any]]") -> None:
        """Start the process; its messages go into `events`, and None when it has ended."""
        self.job: Job | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "silograph.study.worker_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._reader = threading.Thread(target=self._read, args=(events,), daemon=True)
        self._reader.start()

    def _read(self, events: "SimpleQueue[tuple[Worker, Any]]") -> None:
        assert self._process.stdout is not None
        with suppress(ValueError):  # cut off in the middle: the end is reported below
            for text in self._process.stdout:
                events.put((self, json.loads(text)))
        events.put((self, None))

    def give(self, job: Job, graph: str | None) -> None:
        """Send a job; if the process is dead already, its end is in `events`."""
        self.job = job
        config = {k: v for k, v in asdict(job.cell.config).items() if v is not None}
        message = {"config": config, "graph": graph, "folder": job.folder, "test": job.test}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def why_dead(self) -> str:
        """Return how the process ended, and its last lines on standard error."""
        code = self._process.wait()
        self._errors.seek(0)
        last_lines = (self._errors.read().decode(errors="replace").split("\n") or [""])[-2:]
        last_words = " ".join(" ".join(last_lines).split())[-300:]
        cause = f"signal {-code} (9: out of memory, or killed)" if code < 0 else f"exit code {code}"
        return f"expected the process of the cell to live, got {cause}" + (
            last_words and f": {last_words}"
        )

    def stop(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def run_in_processes(jobs: Iterator[Job], processes: int, display: StudyProgress) -> Outcomes:
    """Run jobs, so many at a time, in processes; yield each as it ends, with its outcome.

    The next job is read when a process is free, after the consumer has had the last outcome.
    """
    events: SimpleQueue[tuple[Worker, Any]] = SimpleQueue()
    free: list[Worker] = []
    busy: set[Worker] = set()
    with tempfile.TemporaryDirectory(prefix="silograph-") as folder:
        path_by_graph: dict[int, str] = {}  # files of graphs in memory, each written once

        def path_of(graph: Graph | None) -> str | None:
            if graph is not None and id(graph) not in path_by_graph:
                path = Path(folder, f"{len(path_by_graph)}.npz")
                write_graph(path, graph)
                path_by_graph[id(graph)] = str(path)
            return None if graph is None else path_by_graph[id(graph)]

        try:
            while True:
                while len(busy) < processes and (job := next(jobs, None)) is not None:
                    worker = free.pop() if free else Worker(events)
                    busy.add(worker)
                    display.start_cell(job.cell)
                    worker.give(job, path_of(job.cell.graph))
                if not busy:
                    return
                worker, message = events.get()
                job = worker.job
                if message is not None and "round" in message:
                    assert job is not None  # rounds are of a job
                    display.round(job.cell, message["round"], message["metric"])
                    continue
                if message is None:
                    error = worker.why_dead()
                    outcome = {"error": error, "kind": "ProcessDied", "versions": versions()}
                    worker.stop()
                else:
                    outcome = message["line"]
                    free.append(worker)
                if worker in busy:
                    busy.remove(worker)
                    assert job is not None
                    yield job, outcome
                elif message is None and worker in free:
                    free.remove(worker)
        finally:
            for worker in (*free, *busy):
                worker.stop()
