"""Threads that the compiled kernels run in, each with a range of a block's clients."""

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

from silograph.core.numeric_state import flushes_subnormal_numbers
from silograph.graph.block.block import ClientBlock


@lru_cache(maxsize=1)
def _blas() -> tuple[Any, ...]:
    # What products in kernels call: it must be loaded to be found. Looking takes milliseconds.
    importlib.import_module("scipy.linalg.cython_blas")
    found = ThreadpoolController().lib_controllers
    return tuple(library for library in found if library.user_api == "blas")


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Inside, products in kernels take one thread; threadpoolctl's own form describes libraries."""
    before = [(library, library.num_threads) for library in _blas()]
    several = [(library, number) for library, number in before if number != 1]
    try:
        for library, _ in several:
            library.set_num_threads(1)
        yield
    finally:
        for library, number in several:
            library.set_num_threads(number)


@contextmanager
def flushed() -> Iterator[None]:
    """Inside, this thread takes subnormal numbers, those below the least normal one, for 0.

    Confident models have gradients of 1e-38 and below, whose squares fill Adam's moments with such
    numbers. A processor takes a hundred times as long for each (note 076). Threads that are made
    inside do the same for good.
    """
    if flushes_subnormal_numbers() or not torch.set_flush_denormal(True):
        yield
        return
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def share_out(block: ClientBlock, run: Callable[[int, int], None]) -> None:
    """Run ranges of clients, with about as many rows each, on torch's number of threads."""
    threads = min(torch.get_num_threads(), block.num_clients)

    def run_flushed(first: int, end: int) -> None:
        with flushed():
            run(first, end)

    with _one_thread_each():
        if threads == 1:
            run_flushed(0, block.num_clients)
            return
        goals = torch.linspace(0, float(block.off[-1]), threads + 1, dtype=torch.float64)
        ends = torch.searchsorted(block.off.double(), goals).tolist()
        ends[0], ends[-1] = 0, block.num_clients
        pool = ThreadPoolExecutor(threads)
        try:
            list(pool.map(run_flushed, ends[:-1], ends[1:]))
        except KeyboardInterrupt:  # a thread may wait for a kernel that is being compiled
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
