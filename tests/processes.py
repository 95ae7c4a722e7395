"""Processes of this machine, and commands of silograph as processes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def children_of(process: int | str) -> set[str]:
    """Processes that one has started and that are still there."""
    found: set[str] = set()
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        found |= set(task.read_text().split())
    return found


def children() -> set[str]:
    """Those of this process."""
    return children_of("self")


def is_running(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # one that nobody has waited for


def is_listened_to(address: str) -> bool:
    """Whether somebody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    with socket.socket() as end:
        return end.connect_ex((host, int(port))) == 0


class Command:
    """A command of silograph as a process; what it says on standard error is in `log`."""

    def __init__(self, log: Path, *words: object) -> None:
        temporary = log.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        self.log = log
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "silograph", *map(str, words)],
                env={**os.environ, "TMPDIR": str(temporary)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    def said(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait() == -signal.SIGKILL

    def ends_well(self) -> None:
        assert self.process.wait(timeout=120) == 0, self.said()
