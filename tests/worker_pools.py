"""Workers in this process, which tests can lose, and what a run leaves."""

from collections.abc import Callable
from typing import Any

import pytest

from silograph.federation.workers.packing import Packed, pack
from silograph.federation.workers.processes import LostWorkerError
from silograph.federation.workers.worker import WorkerServer


class Room:
    """A pool of workers in this process; what crosses is packed, as between processes.

    Args:
        size: number of workers.
        loses: whether the worker of a method is lost, by number and name of the method so far.
    """

    def __init__(self, size: int, loses: Callable[[int, str], bool] = lambda *_: False) -> None:
        self.size, self.methods, self.losses = size, 0, 0
        self._loses = loses
        self._servers: list[WorkerServer | None] = [WorkerServer() for _ in range(size)]

    def share(self, value: Any) -> Packed:
        packed = pack(value)
        return Packed(packed.head, [array.copy() for array in packed.arrays])

    def submit(self, worker: int, method: str, *arguments: Any) -> Packed:
        self.methods += 1
        server = self._servers[worker]
        if server is not None and self._loses(self.methods, method):
            self.losses += 1
            server = self._servers[worker] = None
        if server is None:
            raise LostWorkerError("a test")
        return server.handle(method, *arguments)

    def report(self, task: Packed) -> Packed:
        return task

    def find_lost(self) -> list[int]:
        return [number for number, server in enumerate(self._servers) if server is None]

    def restart(self, worker: int) -> None:
        self._servers[worker] = WorkerServer()

    def close(self) -> None:
        self._servers = []


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[Room]:
    """Let `workers=N` take workers in this process, which are listed."""
    made: list[Room] = []

    def make(size: int) -> Room:
        made.append(Room(size))
        return made[-1]

    monkeypatch.setattr("silograph.federation.workers.processes.ProcessPool", make)
    return made
