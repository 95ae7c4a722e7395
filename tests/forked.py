"""`python -m MODULE` and `python -c CODE` as processes that have the imports behind them.

Imports are most of the time of a short command. The laws of a command hold for it as for one that
is started anew; one test of each kind starts real ones.
"""

import io
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from processes import FORKS

Stream = int | IO[Any] | None
REAL = subprocess.Popen


def _main(
    streams: list[Connection], folder: str, environment: dict[str, str], words: list[str]
) -> None:
    """Be what Python makes of the words."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    kind, what, *sys.argv[1:] = words
    if kind == "-c":
        exec(what, {"__name__": "__main__"})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


class Forked:
    """What silograph and its examples use of `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        *,
        text: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start `command`: this Python, `-m` or `-c`, what of it, and arguments."""
        ours: list[Any] = []
        theirs: list[Connection] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            end = None
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                other, mine = (read, write) if number == 0 else (write, read)
                end = open(mine, "rb" if number else "wb", buffering=-1)  # noqa: SIM115
                end = io.TextIOWrapper(end) if text else end  # type: ignore[assignment]
            elif stream == subprocess.DEVNULL:
                other = os.open(os.devnull, os.O_RDWR)
            elif isinstance(stream, int) or stream is None:
                other = os.dup(number if stream is None else stream)
            else:
                other = os.dup(stream.fileno())
            theirs.append(Connection(other))
            ours.append(end)
        self.stdin, self.stdout, self.stderr = ours
        self._output: dict[str, Any] = {}
        given = theirs, os.getcwd(), dict(os.environ if env is None else env), list(command[1:])
        self._process = FORKS.Process(target=_main, args=given)
        self._process.start()
        self.args = command
        for connection in theirs:
            connection.close()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self._process.exitcode

    def communicate(self, _: None = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Wait for the end; returns what is said in pipes, which is little where there are two."""
        for name, pipe in (("stdout", self.stdout), ("stderr", self.stderr)):
            if pipe is not None and not pipe.closed:  # it may be called again after a timeout
                self._output[name] = pipe.read()
                pipe.close()
        self.wait(timeout)
        return self._output.get("stdout"), self._output.get("stderr")

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def completed(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run what ends by itself and says little."""
    process = Forked(command, None, subprocess.PIPE, subprocess.PIPE, text=True)
    out, err = process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def popen(command: Sequence[str], **how: Any) -> Any:
    """Start a module of silograph forked, and anything else as `subprocess.Popen` does."""
    forks = list(command[:2]) == [sys.executable, "-m"]
    return Forked(command, **how) if forks else REAL(command, **how)
