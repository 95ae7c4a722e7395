"""Freed memory goes back to the system when it is asked for."""

import sys
from pathlib import Path

import pytest
import torch

from silograph.core.memory import hand_back_freed_memory, keep_freed_memory


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps freed memory")
def test_what_was_freed_between_held_arrays_is_handed_back() -> None:
    keep_freed_memory()
    hand_back_freed_memory()  # what earlier tests have freed
    begun = resident()
    arrays = [torch.ones(2 << 20, dtype=torch.uint8) for _ in range(100)]
    held = arrays[::10]
    del arrays
    kept = resident() - begun
    hand_back_freed_memory()
    left = resident() - begun
    assert kept > 150e6
    assert left < 60e6
    assert all(int(each.sum()) == 2 << 20 for each in held)


def test_where_nothing_can_be_handed_back_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: None) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", no_library)
    hand_back_freed_memory()
