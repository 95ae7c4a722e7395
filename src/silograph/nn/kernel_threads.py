"""Threads that the compiled kernels run in, each with a range of a block's clients."""

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from threadpoolctl import ThreadpoolController

from silograph.graph.block.block import ClientBlock


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    # What products in kernels call: it must be loaded to be found. Looking takes milliseconds.
    importlib.import_module("scipy.linalg.cython_blas")
    return ThreadpoolController()


def share_out(block: ClientBlock, run: Callable[[int, int], None]) -> None:
    """Run ranges of clients, with about as many rows each, on torch's number of threads."""
    threads = min(torch.get_num_threads(), block.num_clients)
    with _blas().limit(limits=1, user_api="blas"):
        if threads == 1:
            run(0, block.num_clients)
            return
        goals = torch.linspace(0, float(block.off[-1]), threads + 1, dtype=torch.float64)
        ends = torch.searchsorted(block.off.double(), goals).tolist()
        ends[0], ends[-1] = 0, block.num_clients
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, ends[:-1], ends[1:]))
