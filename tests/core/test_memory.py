"""Freed memory goes back to the system when it is asked for."""

import ctypes
import mmap
import sys

import pytest
import torch

from silograph.core.work import hand_back_freed_memory, keep_freed_memory

SIZE = 2 << 20


def resident(starts: list[int]) -> float:
    """The share of pages in main memory, of those that lie within `SIZE` bytes from each start.

    Not the process's total, which falls when the system takes back pages that are long unused.
    """
    mincore, page, there, count = ctypes.CDLL(None).mincore, mmap.PAGESIZE, 0, 0
    for start in starts:
        first = -(-start // page)
        pages = (start + SIZE) // page - first
        found = (ctypes.c_ubyte * pages)()
        if mincore(ctypes.c_void_p(first * page), ctypes.c_size_t(pages * page), found) == 0:
            there += sum(byte & 1 for byte in found)
        count += pages
    return there / count


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps freed memory")
def test_what_was_freed_between_held_arrays_is_handed_back() -> None:
    keep_freed_memory()
    hand_back_freed_memory()  # what earlier tests have freed
    arrays = [torch.ones(SIZE, dtype=torch.uint8) for _ in range(100)]
    held = arrays[::10]
    freed = [a.data_ptr() for number, a in enumerate(arrays) if number % 10]
    del arrays
    assert resident(freed) > 0.7
    hand_back_freed_memory()
    assert resident(freed) < 0.2
    assert all(int(each.sum()) == SIZE for each in held)


def test_where_nothing_can_be_handed_back_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: None) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", no_library)
    hand_back_freed_memory()
