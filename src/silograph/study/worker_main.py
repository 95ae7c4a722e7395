"""The process of a cell: reads jobs from standard input, says rounds and outcomes on its output.

It ends when its input does, in the middle of a run too: no worker outlives the study.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the study, which ends its workers

import json  # noqa: E402 - an interrupt during the imports would print a traceback
import os  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from queue import SimpleQueue  # noqa: E402
from typing import IO, Any  # noqa: E402

PAUSE = 0.1  # seconds between two rounds that are reported


class RoundWriter:
    """Says the rounds of a run, not more often than somebody could read."""

    def __init__(self, output: IO[str]) -> None:
        """Say them to `output`."""
        self._output = output
        self._last = 0.0

    def update(self, rounds_done: int, metric: str) -> None:
        """Say that `rounds_done` rounds are over."""
        now = time.monotonic()
        if now - self._last >= PAUSE:
            self._last = now
            say(self._output, {"round": rounds_done, "metric": metric})


def say(output: IO[str], message: dict[str, Any]) -> None:
    """Write one line of JSON."""
    output.write(json.dumps(message) + "\n")
    output.flush()


def listen(jobs: "SimpleQueue[str]") -> None:
    """Pass jobs on; end the process when nobody is left to hear of them."""
    for text in sys.stdin:
        jobs.put(text)
    os._exit(0)


def work(job: dict[str, Any], output: IO[str]) -> None:
    """Run one job and say what came of it."""
    from silograph.core.config import make_config
    from silograph.study.cells import Cell, run_cell
    from silograph.study.workers import read_graph

    graph = None if job["graph"] is None else read_graph(job["graph"])
    cell = Cell({}, make_config(job["config"]), graph)
    line = run_cell(cell, folder=job["folder"], progress=RoundWriter(output), test=job["test"])
    say(output, {"line": line})


def main() -> None:
    """Run jobs until the input ends."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a user's method prints must not look like an outcome
    jobs: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=listen, args=(jobs,), daemon=True).start()
    while True:
        work(json.loads(jobs.get()), output)


if __name__ == "__main__":
    main()
