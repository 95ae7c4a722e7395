"""Workers as processes of this machine, which get calls and send reports through pipes."""

import os
import pickle
import struct
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

import numpy as np

from silograph.core.errors import ConfigError, mistake
from silograph.federation.workers.packing import Packed, pack

LENGTH = struct.Struct("<Q")


class LostWorkerError(Exception):
    """A worker has ended, or its machine has."""


def write_message(stream: IO[bytes], message: Packed) -> None:
    """Write a packed value; the reader knows where it ends."""
    parts = [memoryview(message.head), *(array.data for array in message.arrays)]
    stream.write(LENGTH.pack(len(parts)))
    for part in parts:
        stream.write(LENGTH.pack(part.nbytes))
        stream.write(part)
    stream.flush()


def read_message(stream: IO[bytes]) -> Packed:
    """Read a packed value.

    Raises:
        EOFError: the other end has closed the stream.
    """
    parts = []
    for _ in range(_read_length(stream)):
        part = np.empty(_read_length(stream), np.uint8)
        if part.nbytes and stream.readinto(part.data) != part.nbytes:  # type: ignore[attr-defined]
            raise EOFError
        parts.append(part)
    return Packed(parts[0].tobytes(), parts[1:])


def _read_length(stream: IO[bytes]) -> int:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    length: int = LENGTH.unpack(head)[0]
    return length


class Task:
    """A call of a method of a worker.

    Attributes:
        worker: number of the worker.
        report: packed; None until it is read.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.report: Packed | None = None


class WorkerProcess:
    """A process, and its method calls without an answer so far."""

    def __init__(self) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "silograph.federation.workers.process_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._open_tasks: deque[Task] = deque()

    def submit(self, task: Task, method: str, arguments: Sequence[Packed]) -> None:
        """Send the process a method call; if it has ended, `read` raises the error."""
        assert self.process.stdin is not None
        self._open_tasks.append(task)
        with suppress(BrokenPipeError):
            write_message(self.process.stdin, pack((method, len(arguments))))
            for argument in arguments:
                write_message(self.process.stdin, argument)

    def read(self, task: Task) -> Packed:
        """Return the report of a task, after those of all tasks before it."""
        assert self.process.stdout is not None
        while task.report is None:
            try:
                self._open_tasks[0].report = read_message(self.process.stdout)
            except EOFError:
                raise LostWorkerError(self.why_dead()) from None
            self._open_tasks.popleft()
        return task.report

    def why_dead(self) -> str:
        """Return how the process ended, and its last lines on standard error."""
        code = self.process.wait()
        self._errors.seek(0)
        last_lines = (self._errors.read().decode(errors="replace").split("\n") or [""])[-2:]
        last_words = " ".join(" ".join(last_lines).split())[-300:]
        cause = f"signal {-code} (9: out of memory, or killed)" if code < 0 else f"exit code {code}"
        return f"its process ended with {cause}" + (last_words and f": {last_words}")

    def stop(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class ProcessPool:
    """Processes of this machine, each with a worker.

    Args:
        size: number of workers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes = [WorkerProcess() for _ in range(size)]

    def share(self, value: Any) -> Packed:
        """Return a copy of a value, for `submit` to one or several workers.

        Raises:
            ConfigError: it holds code that another process cannot import.
        """
        try:
            packed = pack(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                "expected a run that other processes can import, got "
                f"{' '.join(str(error).split())}: name your code as FILE.py:NAME, use workers=1, "
                "or engine=ray",
                **mistake("conflicting-options", ["workers"]),
            ) from error
        return Packed(packed.head, [array.copy() for array in packed.arrays])

    def restart(self, worker: int) -> None:
        """Put a new process in the place of one that has ended."""
        self._processes[worker].stop()
        self._processes[worker] = WorkerProcess()

    def submit(self, worker: int, method: str, *arguments: Packed | Task) -> Task:
        """Call a method by `WorkerServer.handle`, which runs after those submitted before.

        Args:
            worker: its number.
            method: name of the method.
            arguments: what `share` or an earlier `submit` returned.

        Raises:
            LostWorkerError: a worker has ended that an argument comes from.
        """
        task = Task(worker)
        values = [self.report(a) if isinstance(a, Task) else a for a in arguments]
        self._processes[worker].submit(task, method, values)
        return task

    def report(self, task: Task) -> Packed:
        """Wait for a task and return its packed report.

        Raises:
            LostWorkerError: its worker has ended.
        """
        return self._processes[task.worker].read(task)

    def find_lost(self) -> list[int]:
        """Return the numbers of the workers that have ended."""
        return [n for n, each in enumerate(self._processes) if each.process.poll() is not None]

    def close(self) -> None:
        """End all workers at once."""
        for process in self._processes:
            process.stop()
