"""Folding replies into a sum or a mean, client by client, without holding them all.

Every client's part is added in client order, with the same rounding whether it comes as one slice
or as the rows that differ from what the mean is taken around. So the result does not depend on how
clients are grouped into blocks, nor on whether a reply crossed a network (on a CPU: a GPU may add
in another order).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError, mistake
from silograph.core.payload import Field, Patched, Payload, Shared, Stacked, patched_problem
from silograph.federation.base import (
    ANSWERED,
    BY_CLIENT,
    Gather,
    Reduce,
    Sum,
    WeightedMean,
)
from silograph.federation.decoder import WHOLE, slices

COMPILED = (torch.float32, torch.float64)
CACHED = 2**16  # values that are added in one step
CACHED_ROWS = 2**12  # values of a total to which slices with bases are added together
LARGE = 2**20  # values of slices that are folded in one call
FEW = 2**12  # values of slices that NumPy adds faster than torch


class Fold:
    """Folds replies of blocks, in client order.

    Args:
        reduce: sum or mean.
        compiled: whether rows are added by the compiled kernel, to the same bits.
    """

    def __init__(self, reduce: Sum | WeightedMean, *, compiled: bool = False) -> None:
        self._reduce = reduce
        self._compiled = compiled
        self._around = reduce.around if isinstance(reduce, WeightedMean) else {}
        self._by = reduce.by if isinstance(reduce, WeightedMean) else None
        self._total: dict[str, Tensor] = {}
        self._weight = 0.0
        self._fields: set[str] | None = None

    @property
    def running(self) -> tuple[dict[str, Tensor], float, set[str] | None]:
        """Sums and weight so far, and the names of the fields of replies."""
        return self._total, self._weight, self._fields

    @running.setter
    def running(self, running: tuple[dict[str, Tensor], float, set[str] | None]) -> None:
        self._total, self._weight, self._fields = running

    def add(self, reply: Payload) -> None:
        """Add the reply of a block, one client after the other.

        Raises:
            ProtocolError: a field is neither `Stacked` nor `Patched`, the weights are missing or
                negative, or a place or a shape is not that of the other replies.
        """
        if not reply or (self._fields is not None and reply.keys() != self._fields):
            raise ProtocolError(
                f"expected the same fields from every block to reduce, got {sorted(reply)} after "
                f"{sorted(self._fields or ())}"
            )
        self._fields = set(reply)
        for name, field in reply.items():
            if not isinstance(field, Stacked | Patched):
                raise ProtocolError(
                    f"expected Stacked fields in a reply that is reduced, got "
                    f"{type(field).__name__} for {name!r}"
                )
        if self._by is None:
            first = next(iter(reply.values()))
            clients = len(first.which if isinstance(first, Patched) else first.t)
            weights = torch.ones(clients, dtype=torch.int64)
        else:
            by = reply.get(self._by)
            if not isinstance(by, Stacked) or not all(weight >= 0 for weight in by.t.tolist()):
                raise ProtocolError(
                    f"expected weights >= 0 in field {self._by!r} of the reply, got fields "
                    f"{sorted(reply)}"
                )
            weights = by.t
        for weight in weights.tolist():  # one at a time: grouping must not change the bits
            self._weight += weight
        for name, field in reply.items():
            match field:
                case Stacked(t):
                    self._add_slices(name, t, weights)
                case Patched():
                    self._add_patched(name, field, weights)

    def _total_of(self, name: str, like: Tensor, weights: Tensor) -> Tensor:
        """Return the sum so far, to add to in place; a mean of integers is a fraction."""
        if name in self._total:
            return self._total[name]
        dtype = like.dtype
        if name != self._by and not isinstance(self._reduce, Sum):
            dtype = torch.result_type(like, weights)
        if dtype is torch.bool:
            dtype = torch.int64
        total = self._total[name] = torch.zeros(like.shape, dtype=dtype, device=like.device)
        return total

    def _add_slices(self, name: str, t: Tensor, weights: Tensor) -> None:
        if len(t) == 0:
            return
        total = self._total_of(name, t[0], weights)
        alike = self._by is None or name == self._by
        if alike and not total.is_floating_point():  # exact in any order
            if t.shape[1:] != total.shape:
                raise ProtocolError(
                    f"expected slices of one shape from every client, got {tuple(t.shape[1:])} and "
                    f"{tuple(total.shape)}",
                    **mistake("field-out-of-bounds", name, "the sum over clients"),
                )
            if not _is_in_range(total, len(t) * _largest(t)):
                _check_range(total, t.double().abs().sum(0))
            total += t.sum(0, dtype=total.dtype)
            return
        around = self._around.get(name)
        factors = torch.ones_like(weights) if name == self._by else weights
        if self._compiled and total.dtype in COMPILED:
            from silograph.federation.fold_kernel import add_slices

            add_slices(*_arrays_to_add(total, t, around, factors))
            return
        if t.numel() <= FEW and total.dtype in COMPILED and total.is_cpu and t.is_cpu:
            _add_few(total, t, around, factors)
            return
        around = torch.zeros_like(total) if around is None else around.expand(total.shape)
        # Many small slices in one call; large ones one by one, as they are held twice meanwhile.
        few = max(1, LARGE // max(total.numel(), 1))
        for part, by in zip(t.split(few), factors.split(few), strict=True):
            index = torch.zeros(len(part), dtype=torch.int64, device=t.device)
            rows = part.reshape(len(part), -1)
            self._add_rows(total.view(1, -1), index, rows, around.reshape(1, -1), by)

    def _add_patched(self, name: str, field: Patched, weights: Tensor) -> None:
        """Add rows where the rest is what the mean is taken around, or 0; else whole slices."""
        around = self._around.get(name)
        is_zero = around is None and not _has_values(field.base)
        if is_zero:
            around = field.base[0]
        if around is not None:
            alike = field.base.shape[1:] == around.shape
            if alike and (is_zero or self._bases_equal(field, around, weights)):
                factors = weights.repeat_interleave(field.off.diff().to(weights.device))
                total = self._total_of(name, around, weights)
                width = math.prod(around.shape[1:])
                whole, base = (t.reshape(len(t), width) for t in (total, around))
                rows = field.t.reshape(len(field.t), width)
                self._add_rows(whole, field.index, rows, base, factors)
                return
        if self._compiled and self._add_patched_compiled(name, field, weights, around):
            return
        for position in range(len(weights)):
            whole = field.slice(position)[None]
            self._add_slices(name, whole, weights[position : position + 1])

    def _add_patched_compiled(
        self, name: str, field: Patched, weights: Tensor, around: Tensor | None
    ) -> bool:
        """Add slices without making them whole, to the same bits; False: that cannot be done."""
        like, width = field.base[0], math.prod(field.base.shape[2:])
        total = self._total_of(name, like, weights)
        shapes_agree = total.shape == like.shape and (around is None or around.shape == like.shape)
        one_dtype = total.dtype == like.dtype == field.t.dtype
        if not (shapes_agree and one_dtype and total.dtype in COMPILED):
            return False
        # Places come from many silos, and the kernel looks at no bounds.
        if problem := patched_problem(field, len(weights)):
            raise ProtocolError(f"expected {problem} for {name!r} in a reply that is reduced")
        from silograph.federation.fold_kernel import add_patched

        base = torch.zeros_like(total) if around is None else around.to(total.dtype)
        shapes = (len(like), width), (-1, len(like), width), (-1, width)
        return bool(
            add_patched(
                total.view(shapes[0]).numpy(),
                field.base.contiguous().view(shapes[1]).numpy(),
                field.which.numpy(),
                field.t.contiguous().view(shapes[2]).numpy(),
                field.index.numpy(),
                field.off.numpy(),
                base.contiguous().view(shapes[0]).numpy(),
                weights.to(total.dtype).numpy(),
                max(1, CACHED_ROWS // max(width, 1)),
            )
        )

    def _bases_equal(self, field: Patched, around: Tensor, weights: Tensor) -> bool:
        """Return whether the base of every client with a weight equals a tensor (R, ...)."""
        alike = self._equal(field.base, around)
        which, weight = field.which.cpu().numpy(), weights.cpu().numpy()
        return bool((alike[which] | (weight == 0)).all())

    def _equal(self, bases: Tensor, other: Tensor) -> np.ndarray:
        """Return which bases (G, R, ...) equal another (R, ...), (G,) bool."""
        if len(bases) == 1 and bases.data_ptr() == other.data_ptr():
            first, second = ((t.shape, t.stride(), t.dtype) for t in (bases[0], other))
            if first == second:  # the same memory
                return np.ones(1, bool)
        if not (self._compiled and bases.dtype is other.dtype and other.dtype in COMPILED):
            # In NumPy: torch takes several times as long to see whether all of many are true.
            same = (bases == other).cpu().numpy().reshape(len(bases), -1)
            return np.asarray(same.all(axis=1))
        from silograph.federation.fold_kernel import compare

        alike = np.empty(len(bases), bool)
        flat = bases.contiguous().numpy().reshape(len(bases), -1)
        compare(flat, other.contiguous().numpy().reshape(-1), alike)
        return alike

    def _add_rows(
        self, total: Tensor, index: Tensor, rows: Tensor, around: Tensor, factors: Tensor
    ) -> None:
        """total[index[i]] += (rows[i] - around[index[i]]) * factors[i], one i after the other.

        Weight 0 is out, even where a row is NaN.
        """
        if rows.shape[1:] != total.shape[1:] or around.shape != total.shape:
            raise ProtocolError(
                f"expected slices of one shape from every client, got {rows.shape[1]} and "
                f"{total.shape[1]} values"
            )
        # Places and weights come from many silos, and the kernel checks only the places.
        shape = (len(rows),)
        if index.shape != shape or factors.shape != shape or index.dtype is not torch.int64:
            raise ProtocolError(
                f"expected a place and a weight for each of {len(rows)} rows, got places "
                f"{index.dtype} {tuple(index.shape)} and weights {tuple(factors.shape)}"
            )
        if self._compiled and total.dtype in COMPILED:
            from silograph.federation.fold_kernel import add_rows

            parts = (total, index, *(t.to(total.dtype) for t in (rows, around, factors)))
            if not add_rows(*(t.contiguous().numpy() for t in parts)):
                _check_places(index[factors != 0], len(total))
            return
        index, factors = index.to(rows.device), factors.to(rows.device)  # weights may be elsewhere
        if not bool((factors != 0).all()):
            index, rows, factors = (t[factors != 0] for t in (index, rows, factors))
        _check_places(index, len(total))
        if not total.is_floating_point():
            most = int(factors.sum()) * (_largest(rows) + _largest(around))
            if not _is_in_range(total, most):
                change = (rows.double() - around[index]).mul_(factors[:, None]).abs_()
                _check_range(total, change.new_zeros(total.shape).index_add_(0, index, change))
        rows, around = rows.to(total.dtype), around.to(total.dtype)
        few = max(1, CACHED // max(rows.shape[1], 1))  # the rows in between stay in the cache
        for part, at, by in zip(
            rows.split(few), index.split(few), factors[:, None].split(few), strict=True
        ):
            change = (part - around[at]).mul_(by)
            total.index_add_(0, at, change)

    def result(self) -> dict[str, Shared]:
        """Return the folded reply; of a mean without any weight, only the weight: 0."""
        if self._by is None:
            return {name: Shared(t) for name, t in self._total.items()}
        if self._weight == 0:
            return {self._by: Shared(torch.zeros(()))}
        means = {name: t for name, t in self._total.items() if name == self._by}
        for name, total in self._total.items():
            around = self._around.get(name)
            if name == self._by:
                continue
            if around is None:
                means[name] = total / self._weight
                continue
            alike = around.shape == total.shape and around.dtype is total.dtype
            if not (self._compiled and alike and total.dtype in COMPILED):
                means[name] = around + total / self._weight
                continue
            means[name] = torch.empty_like(total)  # the same in memory that is written once
            weight, values = total.numpy().dtype.type(self._weight), means[name].numpy()
            np.divide(total.numpy(), weight, out=values)
            values += around.numpy()
        return {name: Shared(means[name]) for name in self._total}


def _largest(t: Tensor) -> int | float:
    """Return the largest absolute value of integers, exactly; infinity for other numbers."""
    if t.is_floating_point():
        return math.inf
    if t.numel() == 0:
        return 0
    values = t.cpu().numpy()  # torch takes several times as long for the few numbers of most
    return max(int(values.max()), -int(values.min()))


def _is_in_range(total: Tensor, change: int | float) -> bool:
    """Return whether no sum of integers wraps that changes by at most so much."""
    return _largest(total) + change <= torch.iinfo(total.dtype).max


def _check_range(total: Tensor, added: Tensor) -> None:
    """Raise `ProtocolError` where a sum of integers could leave the range of its dtype and wrap.

    Args:
        total: the sum so far.
        added: sum of the absolute values that are added to it, float64 of the same shape.
    """
    largest = float((total.double().abs() + added).amax()) if added.numel() else 0.0
    if largest >= torch.iinfo(total.dtype).max + 1:
        raise ProtocolError(
            f"expected a sum of integers over clients of at most {torch.iinfo(total.dtype).max:,} "
            f"in {total.dtype}, got one that may reach {largest:,.0f}: send a larger dtype",
            **mistake("field-out-of-bounds", "reply", "the sum over clients"),
        )


def _has_values(t: Tensor) -> bool:
    """Return whether not all of a tensor is 0; a look at its beginning mostly says so."""
    # In NumPy: torch takes several times as long to see whether any of many is not 0.
    return bool(t.flatten()[:64].any()) or bool(t.cpu().numpy().any())


def _check_places(index: Tensor, end: int) -> None:
    """Raise `ProtocolError` unless all places (k,) of rows are below `end`."""
    if len(index):
        least, most = (int(t) for t in index.aminmax())
        if least < 0 or most >= end:
            raise ProtocolError(f"expected places of rows in 0 to {end - 1}, got {least} to {most}")


def _add_few(total: Tensor, slices: Tensor, around: Tensor | None, factors: Tensor) -> None:
    """Do what the kernel `add_slices` does, to the same bits, in NumPy."""
    sums, values, base, by, has_weight = _arrays_to_add(total, slices, around, factors)
    terms = np.empty((1 + np.count_nonzero(has_weight), len(sums)), sums.dtype)
    terms[0] = sums
    with np.errstate(all="ignore"):  # as torch does
        np.subtract(values[has_weight], base if len(base) else 0, out=terms[1:])
        terms[1:] *= by[has_weight][:, None]
        sums[:] = np.add.accumulate(terms, axis=0)[-1]  # `sum` would add in pairs


def _arrays_to_add(
    total: Tensor, slices: Tensor, around: Tensor | None, factors: Tensor
) -> tuple[np.ndarray, ...]:
    """Return the arguments of `add_slices`, which checks no bounds, and which slices have a weight.

    The sums are the total's memory. Without `around` the base is empty, which means 0.

    Raises:
        ProtocolError: slices (k, ...) of another shape than the total, or another number of them
            than of factors (k,).
    """
    if slices.shape[1:] != total.shape:
        raise ProtocolError(
            f"expected slices of one shape from every client, got {tuple(slices.shape[1:])} and "
            f"{tuple(total.shape)}"
        )
    if factors.shape != slices.shape[:1]:
        raise ProtocolError(
            f"expected a place and a weight for each of {len(slices)} slices, got weights "
            f"{tuple(factors.shape)}"
        )
    by, sums = factors.cpu().numpy(), total.numpy().reshape(-1)
    base = sums[:0]
    if around is not None:
        base = around.cpu().expand(total.shape).numpy().reshape(-1)
    parts = slices.numpy().reshape(len(by), -1), base, by
    has_weight = by != 0  # weight 0 is out, even where a slice is NaN
    return sums, *(np.ascontiguousarray(part, sums.dtype) for part in parts), has_weight


# --- Reducing replies: fields that are folded, and fields that are gathered by client ------------
#
# C: clients of the federation.


class Running(NamedTuple):
    """What a reduction has come to, from which another process goes on.

    Attributes:
        totals: sum of each field that is folded.
        weight: sum of the weights.
        names: of the fields of replies; None before the first.
        by_client: gathered fields.
        answered: (C,) bool who has answered; None: nothing is gathered.
    """

    totals: Mapping[str, Tensor]
    weight: float
    names: set[str] | None
    by_client: Mapping[str, Tensor]
    answered: Tensor | None


class Reduction:
    """Reduces replies, added in client order, as `reduce` says.

    Args:
        reduce: sum, mean, or fields gathered by client.
        clients: C.
        compiled: see `Fold`.

    Attributes:
        takes_rows: whether replies may have runs of rows, which are decoded.
    """

    def __init__(self, reduce: Reduce, clients: int, *, compiled: bool = False) -> None:
        inner = reduce.fold if isinstance(reduce, Gather) else reduce
        self._fold = None if inner is None else Fold(inner, compiled=compiled)
        self._names = reduce.fields if isinstance(reduce, Gather) else ()
        self._clients = clients
        self._by_client: dict[str, Tensor] = {}
        self._answered = torch.zeros(clients, dtype=torch.bool) if self._names else None
        self._without = inner.without if isinstance(inner, WeightedMean) else ()
        self._decoder = inner.sent if isinstance(inner, WeightedMean) else WHOLE
        self.takes_rows = bool(self._decoder.known)
        if self.takes_rows:
            self._decoder.check(clients)

    @property
    def running(self) -> Running:
        """What was added so far."""
        fold = self._fold
        totals, weight, names = ({}, 0.0, None) if fold is None else fold.running
        return Running(totals, weight, names, self._by_client, self._answered)

    def resume(self, running: Running) -> None:
        """Go on from what the reduction of another process has come to, in its memory."""
        if self._fold is not None:
            self._fold.running = dict(running.totals), running.weight, running.names
        self._by_client, self._answered = dict(running.by_client), running.answered

    def add(
        self,
        reply: Payload,
        positions: Tensor,
        may_be_written: Callable[[Tensor], bool] = lambda _: True,
    ) -> None:
        """Add the reply of the clients at `positions` (k,) int64.

        Args:
            reply: theirs.
            positions: in the federation.
            may_be_written: whether the memory of a tensor may be written to later; else it is
                used without a copy where it has a slice for every client.

        Raises:
            ProtocolError: a field to gather is missing or has no slice for each client;
                or see `Fold.add`.
        """
        if self._decoder is not WHOLE:
            reply = self._decoder.whole(reply, positions)
        if self._fold is not None:
            self._fold.add({n: f for n, f in reply.items() if n not in self._without})
        if self._answered is None:
            return
        places = positions.cpu().numpy()
        for name in self._names:
            part = slices(name, reply)
            if len(part) == self._clients and not may_be_written(part):
                self._by_client[name] = part
                continue
            if name not in self._by_client:
                self._by_client[name] = part.new_zeros(self._clients, *part.shape[1:])
            into = self._by_client[name]
            is_plain = part.is_cpu and into.is_cpu and part.dtype is into.dtype
            if is_plain and part.shape == (len(places), *into.shape[1:]):
                # In NumPy: torch takes several times as long for the few numbers of most fields.
                into.numpy()[places] = part.numpy()
            else:
                into.index_copy_(0, positions.to(part.device), part)
        self._answered[positions] = True

    def result(self) -> dict[str, Field]:
        """Return the folded fields, and `by_client/NAME` (C, ...) of the gathered fields."""
        fields: dict[str, Field] = {} if self._fold is None else dict(self._fold.result())
        if self._answered is None:
            return fields
        by_client = {BY_CLIENT + name: Stacked(t) for name, t in self._by_client.items()}
        device = next((t.device for t in self._by_client.values()), self._answered.device)
        return {**fields, **by_client, ANSWERED: Stacked(self._answered.to(device))}
