"""Small disks that can be filled and made read-only; tests that need one are left out otherwise."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A file system in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Leave no room at all."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    def free(self) -> None:
        """Give the room back."""
        (self.path / "filler").unlink()

    def make_read_only(self) -> None:
        """Let nobody write any more, not even root."""
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[Disk]:
    """Mount a disk of some bytes; skip the test where this is not allowed."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        pytest.skip("needs mount")
    if done.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
