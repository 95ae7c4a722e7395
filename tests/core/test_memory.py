"""Freed memory goes back to the system when it is asked for; large blocks are used again."""

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from silograph.core.work import ReusedMemory, hand_back_freed_memory, keep_freed_memory

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


LARGE = (20_000, 1000)  # float32: 80 MB


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    memory, dtype = ReusedMemory(), np.dtype(np.float32)
    first = memory.empty(LARGE, dtype)
    start = first.ctypes.data
    del first
    again = memory.empty((19_000, 1000), dtype)  # nearly as large
    assert again.ctypes.data == start
    assert again.shape == (19_000, 1000)
    assert again.dtype == dtype
    del again
    smaller = memory.empty((9_000, 1000), dtype)  # most of the memory would be idle
    assert smaller.base is not None
    assert smaller.base.nbytes == smaller.nbytes
    memory.release()
    small = memory.empty((2, 3), dtype)  # the allocator itself keeps small blocks
    assert small.base is None


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array,
        lambda array: array[1:, 5],
        lambda array: array.reshape(-1)[-3:].view(np.int32),
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_numpy(array[2]).view(10, -1)[3],
        lambda array: torch.from_numpy(array).numpy().T[1:],
        lambda array: memoryview(array)[1:],
        lambda array: torch.from_numpy(array).untyped_storage(),
    ],
)
def test_memory_is_not_used_again_while_any_part_of_an_array_is_held(
    keep: Callable[[np.ndarray], object],
) -> None:
    memory, dtype = ReusedMemory(), np.dtype(np.float32)
    array = memory.empty(LARGE, dtype)
    start, end = array.ctypes.data, array.ctypes.data + array.nbytes
    held = keep(array)
    del array
    other = memory.empty(LARGE, dtype)
    assert not start <= other.ctypes.data < end
    del held, other
    latest = memory.empty(LARGE, dtype).ctypes.data
    assert memory.empty(LARGE, dtype).ctypes.data == latest


def test_threads_never_share_reused_memory() -> None:
    memory, dtype, mixed = ReusedMemory(), np.dtype(np.int64), list[int]()

    def work(number: int) -> None:
        for _ in range(20):
            array = memory.empty((5_000, 1000), dtype)
            array[::100] = number
            if (array[::100] != number).any():
                mixed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mixed == []
