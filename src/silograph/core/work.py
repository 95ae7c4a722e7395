"""Counting floating-point operations where they happen, for each client apart.

The engine opens a meter around an op; layers, losses and optimizers report to it what they
compute, from shapes and numbers of stored entries. So only what is computed is counted, and not
rows that a block has dropped or gradients that are not needed.

A multiplication with an addition counts 2, any other operation on a value 1. Work of the backward
pass is reported by the forward operation whose gradient it is. docs/explanation/ledger.md has the
table.

The meter is a context variable: it is seen only inside the op that the engine runs, and what an op
returns does not depend on it.
"""

import ctypes
import gc
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from silograph.core.kinds import Kind

_METER: ContextVar["Meter | None"] = ContextVar("meter", default=None)


class WorkTotals(NamedTuple):
    """What the meter of C clients has come to.

    Attributes:
        own: (C,) float64 operations of each client.
        parts: (C,) float64 of each client for other purposes than the call's.
        executed: operations that are executed here, over clients and kinds; see `report_spared`.
    """

    own: np.ndarray
    parts: dict[Kind, np.ndarray]
    executed: float


class Meter:
    """Sums the work of C clients.

    Reports name a tensor of counts (rows or entries up to each client) and the operations for one
    of them; they are computed for each client only when the result is read.
    """

    def __init__(self, clients: int) -> None:
        self.apart: dict[Kind, Meter] = {}  # work for other purposes than the call's
        self._per_client = np.zeros(clients)  # (C,) float64
        self._same_for_all = 0.0
        self._spared = 0.0
        # By identity of the tensors, which are kept so that no other can take their place.
        self._runs: dict[tuple[int, int], tuple[Tensor, Tensor | None, float]] = {}

    def add_each(self, flops: float) -> None:
        """Add the same work for every client."""
        self._same_for_all += flops

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
        np.add.at(self._per_client, positions.cpu().numpy(), flops.cpu().numpy())

    def spare(self, flops: float) -> None:
        """Subtract operations of all clients together that are charged but not executed here."""
        self._spared += flops

    def add_meter(self, part: "Meter", times: int) -> None:
        """Add `times` times the work of another meter of the same clients, without its parts."""
        self._per_client += times * part._per_client
        self._same_for_all += times * part._same_for_all
        for off, starts, flops in part._runs.values():
            self.add_runs(off, starts, times * flops)

    def add_all(self, flops: Tensor) -> None:
        """Add work (C,) of all clients."""
        self._per_client += flops.cpu().numpy()

    def totals(self) -> WorkTotals:
        """Return the work so far."""
        own = self._per_client + self._same_for_all
        for off, starts, flops in self._runs.values():
            ends = off.cpu().numpy()
            if starts is not None:  # in NumPy: torch takes several times as long for few clients
                ends = starts.cpu().numpy()[ends]
            own += (ends[1:] - ends[:-1]) * flops
        parts = {kind: part.totals() for kind, part in self.apart.items()}
        executed = float(own.sum()) - self._spared + sum(part.executed for part in parts.values())
        return WorkTotals(own, {kind: part.own for kind, part in parts.items()}, executed)

    def of_clients(self, positions: Tensor) -> "Meter":
        """Return the work of the clients at `positions` (k,) alone; the others have done none."""
        own, places = Meter(len(positions)), positions.cpu().numpy()
        own._per_client, own._spared = self.totals()[0][places], self._spared
        own.apart = {kind: part.of_clients(positions) for kind, part in self.apart.items()}
        return own

    @property
    def flops(self) -> Tensor:
        """Floating-point operations of each client, (C,) float64."""
        return torch.from_numpy(self.totals().own)

    @property
    def spared(self) -> float:
        """Operations that are not executed here, all clients; those of parts are with the parts."""
        return self._spared

    def part(self, kind: Kind) -> "Meter":
        """Return the meter of work for another purpose."""
        if kind not in self.apart:
            self.apart[kind] = Meter(len(self._per_client))
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
    """Count work inside the block as that of the clients at `positions` (k,)."""
    outer = _METER.get()
    if outer is None:
        yield
        return
    with metered(len(positions)) as inner:
        yield
    outer.add_at(positions, inner.flops)
    outer.spare(inner.spared)
    for kind, part in inner.apart.items():
        outer.part(kind).add_at(positions, part.flops)
        outer.part(kind).spare(part.spared)


@contextmanager
def work_for(kind: Kind) -> Iterator[None]:
    """Count work inside the block for another purpose, such as evaluation within training."""
    outer = _METER.get()
    if outer is None:
        yield
        return
    token = _METER.set(outer.part(kind))
    try:
        yield
    finally:
        _METER.reset(token)


def report_each(flops: float, kind: Kind | None = None) -> None:
    """Report operations that every client of the block does.

    Args:
        flops: of each client.
        kind: `OPTIMIZER` for steps, apart from the gradients that they follow; None: of the call.
    """
    meter = _METER.get()
    if meter is not None:
        (meter if kind is None else meter.part(kind)).add_each(flops)


def report_clients(flops: Tensor, kind: Kind | None = None) -> None:
    """Report operations of each client, (C,) float64; `kind` as in `report_each`."""
    meter = _METER.get()
    if meter is not None:
        (meter if kind is None else meter.part(kind)).add_all(flops)


def report_meter(part: Meter, times: int) -> None:
    """Report `times` times the work that a meter has counted, without that of its parts."""
    meter = _METER.get()
    if meter is not None:
        meter.add_meter(part, times)


def report_spared(flops: float) -> None:
    """Report operations of the optimizer that clients are charged for but that are not executed.

    A silo by itself takes the steps of all its weights. Here clients that start from one model take
    those of rows that meet no data together, once.
    """
    meter = _METER.get()
    if meter is not None:
        meter.part(Kind.OPTIMIZER).spare(flops)


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
    """Let glibc keep up to 64 MB of freed memory instead of returning it after every step.

    Returned memory is mapped and zeroed again page by page: a quarter of a round in torch. glibc
    learns from the largest block that was ever freed (mallopt(3), M_MMAP_THRESHOLD and
    M_TRIM_THRESHOLD); other allocators are not affected.
    """
    torch.empty(LARGEST, dtype=torch.uint8)


class ReusedMemory:
    """Makes large arrays in the memory of an earlier one that nothing refers to any more.

    A block of clients has trained weights of about the same size in every call. As new memory
    they would be mapped and zeroed each time, for glibc keeps no block larger than `LARGEST`.
    Memory of the latest array alone is kept.
    """

    MOST_BYTES = 1 << 27  # larger arrays are freed
    MOST_WASTE = 1.25  # bytes of the memory for each of an array in it

    def __init__(self) -> None:
        self._latest = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array with any values, as `np.empty` does."""
        size = math.prod(shape) * dtype.itemsize
        if not LARGEST < size <= self.MOST_BYTES:
            return np.empty(shape, dtype)
        with self._lock:
            # An array in the memory, and any part of it, refers to the whole memory (`base`), and a
            # tensor of either to its array. So the count falls to 2 (the attribute, and the
            # argument of the call) when the last of them is gone.
            is_free = sys.getrefcount(self._latest) == 2
            if not is_free or not size <= self._latest.nbytes <= self.MOST_WASTE * size:
                self._latest = np.empty(0, np.uint8)  # freed before there is more
                self._latest = np.empty(size, np.uint8)
            whole: np.ndarray = self._latest[:size].view(dtype).reshape(shape)
        return whole

    def release(self) -> None:
        """Free the memory that is kept."""
        with self._lock:
            self._latest = np.empty(0, np.uint8)


REUSED_MEMORY = ReusedMemory()


def hand_back_freed_memory() -> None:
    """Return freed memory of this process to the system, where its allocator (glibc) can."""
    REUSED_MEMORY.release()
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # of another allocator, or another system
        return
