"""Silos as processes that signals hit; see `silo_process`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forked import Forked


class Victim:
    """A process that takes part as a silo, as it is told to, and can be stopped in an op."""

    def __init__(self) -> None:
        command, pipe = [sys.executable, "-m", "silo_process"], subprocess.PIPE
        self.process = Forked(command, stdin=pipe, stdout=pipe, text=True)

    def take_part(
        self,
        address: str,
        folder: Path,
        hang: int,
        ca: Path | None = None,
        code: Sequence[Path] = (),
    ) -> None:
        self.hears("ready")
        told = {"address": address, "folder": str(folder), "hang": hang, "code": [*map(str, code)]}
        if ca is not None:
            told["ca"] = str(ca)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()

    def hears(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == line + "\n"

    def signal(self, number: int) -> None:
        """Send a signal; after SIGKILL the process has ended, and holds no lock, when this ends."""
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
