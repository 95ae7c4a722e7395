"""Counting floating-point operations where they happen, for each client apart.

The engine opens a meter around an op; layers, losses and optimizers report to it what they
compute, from shapes and numbers of stored entries. So what is never computed is never counted:
rows that a block has dropped, gradients that nobody asks for.

A multiplication with an addition counts 2, any other operation on a value 1. Work of the backward
pass is reported by the forward operation whose gradient it is. The table is in docs/ledger.md.

The meter is a context variable: it is seen only inside the op that the engine runs, and what an op
returns does not depend on it.
"""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from silograph.core.kinds import Kind

_METER: ContextVar["Meter | None"] = ContextVar("meter", default=None)


class Meter:
    """Sums the work of C clients.

    Reports name a tensor of counts (rows or entries up to each client) and the operations for one
    of them; they are only added up, and worked out for each client when somebody asks.
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self.apart: dict[Kind, Meter] = {}  # work for another purpose than the call's
        self._fixed: np.ndarray | None = None  # (C,) float64, once there is any
        self._each = 0.0
        self._spared = 0.0
        # By identity of the tensors, which are kept so that no other can take their place.
        self._runs: dict[tuple[int, int], tuple[Tensor, Tensor | None, float]] = {}

    def add_each(self, flops: float) -> None:
        """Add the same work for every client."""
        self._each += flops

    def add_runs(self, off: Tensor, starts: Tensor | None, flops: float) -> None:
        """Add `flops` for each row off[c]:off[c + 1], or each entry of those rows.

        Args:
            off: (C + 1,) rows of each client.
            starts: (n + 1,) entries before each row, or None to count rows.
            flops: operations for one of them.
        """
        key = (id(off), id(starts))
        before = self._runs[key][2] if key in self._runs else 0.0
        self._runs[key] = (off, starts, before + flops)

    def add_at(self, positions: Tensor, flops: Tensor) -> None:
        """Add work (k,) of the clients at `positions` (k,)."""
        np.add.at(self._own(), positions.cpu().numpy(), flops.cpu().numpy())

    def spare(self, flops: float) -> None:
        """Say that this much of the work, of all clients together, is not executed here."""
        self._spared += flops

    def add_all(self, flops: Tensor) -> None:
        """Add work (C,) of all clients."""
        self._own()[:] += flops.cpu().numpy()

    def _own(self) -> np.ndarray:
        """Return the work that is known for each client, to be added to."""
        if self._fixed is None:
            self._fixed = np.zeros(self._clients)
        return self._fixed

    def summed(self) -> tuple[np.ndarray, dict[Kind, np.ndarray], float]:
        """Return the work of each client, that for other purposes, and what is executed here of it.

        Work is (C,) float64. What is executed is that of all clients and kinds together; see
        `report_spared`.
        """
        own, apart = self._total(), {kind: part.summed() for kind, part in self.apart.items()}
        executed = float(own.sum()) - self._spared + sum(done for _, _, done in apart.values())
        return own, {kind: flops for kind, (flops, _, _) in apart.items()}, executed

    @property
    def flops(self) -> Tensor:
        """Floating-point operations of each client, (C,) float64."""
        return torch.from_numpy(self._total())

    def _total(self) -> np.ndarray:
        total = np.full(self._clients, self._each)
        if self._fixed is not None:
            total += self._fixed
        for off, starts, flops in self._runs.values():
            counts = off.diff() if starts is None else starts[off].diff()
            total += counts.cpu().double().numpy() * flops
        return total

    @property
    def spared(self) -> float:
        """Operations that are not executed here, all clients; those of parts are with the parts."""
        return self._spared

    def part(self, kind: Kind) -> "Meter":
        """Return the meter of work for another purpose."""
        if kind not in self.apart:
            self.apart[kind] = Meter(self._clients)
        return self.apart[kind]


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
    outer.add_at(positions, inner.flops)
    outer.spare(inner.spared)
    for kind, apart in inner.apart.items():
        outer.part(kind).add_at(positions, apart.flops)
        outer.part(kind).spare(apart.spared)


@contextmanager
def work_for(kind: Kind) -> Iterator[None]:
    """Inside, work is for another purpose than the call's: evaluation within training, say."""
    outer = _METER.get()
    if outer is None:
        yield
        return
    token = _METER.set(outer.part(kind))
    try:
        yield
    finally:
        _METER.reset(token)


def report_each(flops: float) -> None:
    """Report operations that every client of the block does."""
    meter = _METER.get()
    if meter is not None:
        meter.add_each(flops)


def report_clients(flops: Tensor) -> None:
    """Report operations of each client, (C,) float64."""
    meter = _METER.get()
    if meter is not None:
        meter.add_all(flops)


def report_steps(flops: Tensor | float) -> None:
    """Report steps of the optimizer, apart from the gradients that they follow.

    Args:
        flops: operations of each client, (C,) float64; a number: every client does as many.
    """
    with work_for(Kind.OPTIMIZER):
        report_clients(flops) if isinstance(flops, Tensor) else report_each(flops)


def report_spared(flops: float) -> None:
    """Report operations of the optimizer that clients are charged for, and nobody executes here.

    A silo by itself takes the steps of all its weights. Here clients that start from one model take
    those of rows that meet no data together, once.
    """
    with work_for(Kind.OPTIMIZER):
        meter = _METER.get()
        if meter is not None:
            meter.spare(flops)


def report_rows(off: Tensor, flops: float) -> None:
    """Report operations for each row of the clients, rows off[c]:off[c + 1] of client c."""
    meter = _METER.get()
    if meter is not None:
        meter.add_runs(off, None, flops)


def report_entries(starts: Tensor, off: Tensor, flops: float) -> None:
    """Report operations for each stored entry of the clients' rows, entry numbers `starts`."""
    meter = _METER.get()
    if meter is not None:
        meter.add_runs(off, starts, flops)


# --- Memory that arrays of one step leave to those of the next -----------------------------------


LARGEST = (32 << 20) - (1 << 13)  # bytes, just below the most that glibc learns from


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MB of freed memory instead of handing it back after every step.

    What is handed back comes again page by page, zeroed: a quarter of a round in torch. glibc
    learns from the largest block that was ever freed (mallopt(3), M_MMAP_THRESHOLD and
    M_TRIM_THRESHOLD); other allocators are not affected.
    """
    torch.empty(LARGEST, dtype=torch.uint8)


def hand_back_freed_memory() -> None:
    """Give the system what this process has freed, where its allocator (glibc) can."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # of another allocator, or another system
        return
