"""Cells in processes of their own: started fresh, told by lines of JSON, ended with this process.

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
    x = arrays.get("x")
    return Graph(
        adj=CSR(arrays["indptr"], arrays["indices"], None, num_nodes),
        x=_sparse(arrays, int(parts["x_cols"])) if x is None else x,
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
        columns={n.removeprefix(COLUMN): t for n, t in arrays.items() if n.startswith(COLUMN)},
        scale=_pair(arrays["scale"].tolist()) if "scale" in arrays else None,
    )


def _pair(values: list[float]) -> tuple[float, float]:
    low, high = values
    return low, high


def _sparse(arrays: dict[str, Tensor], num_cols: int) -> CSR:
    return CSR(arrays["x_indptr"], arrays["x_indices"], arrays["x_values"], num_cols)


# --- Progress of a study: cells done, running and waiting; a live view or plain lines ------------


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


@dataclass(frozen=True, eq=False)
class Job:
    """A cell that is to be run.

    Attributes:
        cell: the cell.
        folder: its result folder, None for none.
        test: whether test scores are told.
    """

    cell: Cell
    folder: str | None
    test: bool


Outcomes = Generator[tuple[Job, Line], None, None]


@dataclass(frozen=True, eq=False)
class RoundsOf:
    """Tells a study's progress of the rounds of one cell."""

    cell: Cell
    display: StudyProgress

    def update(self, done: int, metric: str) -> None:
        """Tell that `done` rounds are over."""
        self.display.round(self.cell, done, metric)


def run_here(jobs: Iterator[Job], processes: int, display: StudyProgress) -> Outcomes:
    """Run jobs one after the other in this process; yield each with what came of it."""
    del processes
    for job in jobs:
        display.started(job.cell)
        cell, rounds = job.cell, RoundsOf(job.cell, display)
        yield job, run_cell(cell, folder=job.folder, progress=rounds, test=job.test)


class Worker:
    """A process that runs one job after the other."""

    def __init__(self, events: "SimpleQueue[tuple[Worker, Any]]") -> None:
        """Start the process; what it says goes into `events`, None when it has ended."""
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
        with suppress(ValueError):  # cut off in the middle: the end is told below
            for text in self._process.stdout:
                events.put((self, json.loads(text)))
        events.put((self, None))

    def give(self, job: Job, graph: str | None) -> None:
        """Have a job run; a process that is dead already says so through its end."""
        self.job = job
        config = {k: v for k, v in asdict(job.cell.config).items() if v is not None}
        told = {"config": config, "graph": graph, "folder": job.folder, "test": job.test}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()

    def why_dead(self) -> str:
        """Return how the process ended, and the last it said."""
        code = self._process.wait()
        self._errors.seek(0)
        said = (self._errors.read().decode(errors="replace").split("\n") or [""])[-2:]
        last = " ".join(" ".join(said).split())[-300:]
        how = f"signal {-code} (9: out of memory, or killed)" if code < 0 else f"exit code {code}"
        return f"expected the process of the cell to live, got {how}" + (last and f": {last}")

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
    """Run jobs, so many at a time, in processes; yield each as it ends, with what came of it.

    The next job is read when a process is free, after the consumer has had the last outcome.
    """
    events: SimpleQueue[tuple[Worker, Any]] = SimpleQueue()
    free: list[Worker] = []
    busy: set[Worker] = set()
    with tempfile.TemporaryDirectory(prefix="silograph-") as folder:
        graphs = _Graphs(Path(folder))
        try:
            while True:
                while len(busy) < processes and (job := next(jobs, None)) is not None:
                    worker = free.pop() if free else Worker(events)
                    busy.add(worker)
                    display.started(job.cell)
                    worker.give(job, graphs.path(job.cell.graph))
                if not busy:
                    return
                worker, said = events.get()
                job = worker.job
                if said is not None and "round" in said:
                    assert job is not None  # rounds are of a job
                    display.round(job.cell, said["round"], said["metric"])
                    continue
                if said is None:
                    outcome = _died(worker)
                else:
                    outcome = said["line"]
                    free.append(worker)
                if worker in busy:
                    busy.remove(worker)
                    assert job is not None
                    yield job, outcome
                elif said is None and worker in free:
                    free.remove(worker)
        finally:
            for worker in (*free, *busy):
                worker.stop()


def _died(worker: Worker) -> Line:
    outcome = {"error": worker.why_dead(), "kind": "ProcessDied", "versions": versions()}
    worker.stop()
    return outcome


class _Graphs:
    """Graphs in memory as files, each written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[int, str] = {}

    def path(self, graph: Graph | None) -> str | None:
        """Return the file of a graph; None for None."""
        if graph is None:
            return None
        if id(graph) not in self._written:
            path = self._folder / f"{len(self._written)}.npz"
            write_graph(path, graph)
            self._written[id(graph)] = str(path)
        return self._written[id(graph)]
