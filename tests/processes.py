"""Processes of this machine, and commands of silograph as processes."""

import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing import forkserver
from pathlib import Path

import unsynced  # noqa: F401  in every process that is forked


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


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "silograph.deploy.server",
        "silograph.deploy.silo",
        "silograph.cli",
        "silograph.nn.kernels.training",
    ]
)


def begin_forks() -> None:
    """Start the process that commands are forked from, so that none spends its life importing."""
    forkserver.ensure_running()


def _command(log: str, folder: str, temporary: str, words: list[str]) -> None:
    """Be a command of silograph."""
    for number, path in enumerate((os.devnull, os.devnull, log)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), number)
    os.chdir(folder)
    os.environ["TMPDIR"] = temporary
    sys.argv = ["silograph", *words]
    from silograph.cli import main

    main()


class Command:
    """A command of silograph as a process; what it says on standard error is in `log`."""

    def __init__(self, log: Path, *words: object) -> None:
        temporary = log.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        self.log = log
        log.touch()
        told = str(log), os.getcwd(), str(temporary), [str(word) for word in words]
        self.process = FORKS.Process(target=_command, args=told)
        self.process.start()

    def said(self) -> str:
        return self.log.read_text()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float = 120) -> int | None:
        self.process.join(timeout)
        assert self.process.exitcode is not None, self.said()
        return self.process.exitcode

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def ends_well(self) -> None:
        assert self.wait() == 0, self.said()
