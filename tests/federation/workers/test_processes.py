"""Workers as processes: killed in the middle of a run, and gone when their engine is."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from processes import children, children_of, is_running
from runs import FAST, MakeGraph, outcome, rows_of
from silograph.federation.workers import processes
from silograph.federation.workers.processes import ProcessPool

RUN: dict[str, Any] = {**FAST, "method": "scaffold", "block_size": 2, "kernels": "torch"}
LONG = """
import silograph as sg
class Shown:
    def update(self, rounds_done, metric):
        print("round", rounds_done, flush=True)
options = dict(clients=4, partition="random", hidden=8, kernels="torch", workers=2)
sg.run("digits", rounds=100_000, progress=Shown(), **options)
"""
PATIENCE = 60.0  # seconds for what takes a second on a machine that is not busy


class Killer:
    """Kills a worker of a run after some rounds."""

    def __init__(self, pools: list[ProcessPool], rounds: set[int]) -> None:
        self._pools, self._rounds = pools, rounds

    def update(self, rounds_done: int, metric: str) -> None:
        if rounds_done in self._rounds:
            victim = self._pools[0]._processes[rounds_done % 2]
            victim.process.kill()


def test_a_killed_worker_changes_nothing(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[ProcessPool] = []

    class Seen(ProcessPool):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            pools.append(self)

    monkeypatch.setattr(processes, "ProcessPool", Seen)
    before = children()
    options = RUN | {"rounds": 6}
    here = sg.run(make_graph(), **options)
    killer = Killer(pools, {2, 3})
    there = sg.run(make_graph(), **options, workers=2, keep_every=4, progress=killer)
    ours, theirs = outcome(there), outcome(here)
    assert {n: v for n, v in ours.items() if n != "config"} == {
        n: v for n, v in theirs.items() if n != "config"
    }
    assert rows_of(there) == rows_of(here)
    assert there.ledger.records == here.ledger.records
    assert children() == before


@contextmanager
def running(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", set[str]]]:
    """A process that runs a simulation at two workers, and these."""
    script = tmp_path / "long.py"
    script.write_text(LONG, encoding="utf-8")
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen([sys.executable, str(script)], stdout=log, stderr=log) as process,
    ):
        try:
            deadline = time.monotonic() + 2 * PATIENCE
            while b"round 2" not in (tmp_path / "log").read_bytes():
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
            yield process, children_of(process.pid)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_workers_end_with_their_engine(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path) as (process, workers):
        assert len(workers) == 2
        os.kill(process.pid, number)
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None or any(is_running(int(worker)) for worker in workers):
            assert time.monotonic() < deadline
            time.sleep(0.05)
