"""Counting floating-point operations where they happen, for each client apart.

The engine opens a meter around an op; layers, losses and optimizers report to it what they
compute, from shapes and numbers of stored entries. So what is never computed is never counted:
rows that a block has dropped, gradients that nobody asks for.

A multiplication with an addition counts 2, any other operation on a value 1. Work of the backward
pass is reported by the forward operation whose gradient it is. The table is in docs/ledger.md.

The meter is a context variable: it is seen only inside the op that the engine runs, and what an op
returns does not depend on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_METER: ContextVar["Meter | None"] = ContextVar("meter", default=None)


class Meter:
    """Sums the work of C clients: `flops` (C,) float64."""

    def __init__(self, clients: int) -> None:
        self.flops = torch.zeros(clients, dtype=torch.float64)

    def add(self, flops: Tensor | float) -> None:
        """Add work (C,), or the same for every client."""
        self.flops += flops


@contextmanager
def metered(clients: int) -> Iterator[Meter]:
    """Open a meter for an op that runs on a block of C clients."""
    meter = Meter(clients)
    token = _METER.set(meter)
    try:
        yield meter
    finally:
        _METER.reset(token)


@contextmanager
def work_of(positions: Tensor) -> Iterator[None]:
    """Inside, work is that of the clients at `positions` (k,) of the block."""
    outer = _METER.get()
    if outer is None:
        yield
        return
    with metered(len(positions)) as inner:
        yield
    outer.flops[positions.cpu()] += inner.flops


def report_work(flops: Tensor | float) -> None:
    """Report floating-point operations, (C,) or the same number for every client."""
    meter = _METER.get()
    if meter is not None:
        meter.add(flops.cpu() if isinstance(flops, Tensor) else flops)


def is_metered() -> bool:
    """Whether anybody counts; lets callers skip working the numbers out."""
    return _METER.get() is not None
