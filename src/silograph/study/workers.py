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
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from silograph.experiment.run.setup import versions
from silograph.graph.graph import Graph
from silograph.study.cells import Cell, Line, run_cell
from silograph.study.graph_file import write_graph
from silograph.study.progress import StudyProgress


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
