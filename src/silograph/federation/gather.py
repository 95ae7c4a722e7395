"""Reducing replies: fields that are folded, and fields that are kept by client.

C: clients of the federation.
"""

from dataclasses import replace

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.payload import Field, Patched, Payload, Ragged, Stacked, take
from silograph.federation.base import (
    ANSWERED,
    BY_CLIENT,
    SCALE,
    Gather,
    Reduce,
    WeightedMean,
    fold_of,
    known_of,
)
from silograph.federation.fold import Fold
from silograph.federation.known_rows import onto
from silograph.federation.small_numbers import from_small


class Reduction:
    """Takes replies in client order, and returns what `reduce` makes of them.

    Args:
        reduce: sum, mean, or what is kept by client.
        clients: C.
        compiled: see `Fold`.
    """

    def __init__(self, reduce: Reduce, clients: int, *, compiled: bool = False) -> None:
        inner = fold_of(reduce)
        self._fold = None if inner is None else Fold(inner, compiled=compiled)
        self._names = reduce.fields if isinstance(reduce, Gather) else ()
        self._clients = clients
        self._parts: dict[str, list[Tensor]] = {name: [] for name in self._names}
        self._positions: list[Tensor] = []
        self._known = known_of(reduce)
        self._mean = inner if isinstance(inner, WeightedMean) else WeightedMean("")
        self._base = self._mean.around
        for name, known in self._known.items():
            if name not in self._base or len(known.off) != clients + 1:
                raise ProtocolError(
                    f"expected what {name!r} is taken around, and its rows of {clients} clients, "
                    f"got {sorted(self._base)} and rows of {len(known.off) - 1}"
                )

    def add(self, reply: Payload, positions: Tensor) -> None:
        """Add the reply of the clients at `positions` (k,) int64.

        Raises:
            ProtocolError: a field that is to be kept is missing or has no slice for each client;
                or see `Fold.add`.
        """
        scales = {f"{SCALE}{name}" for name in self._mean.changes}
        reply = {name: self._whole(name, reply, positions) for name in reply if name not in scales}
        if self._fold is not None:
            self._fold.add(reply)
        for name in self._names:
            self._parts[name].append(_slices(name, reply))
        self._positions.append(positions)

    def _whole(self, name: str, reply: Payload, positions: Tensor) -> Field:
        """Return a field as one of whole slices: changes added, rows among those both ends know."""
        field, base = reply[name], self._mean.changes.get(name)
        mine = take(self._known[name], positions) if name in self._known else None
        if base is not None:
            field = _changed(base, field, reply.get(f"{SCALE}{name}"), mine)
        if not isinstance(mine, Ragged) or not isinstance(field, Ragged):
            return field
        if self._mean.after is None:
            return onto(self._base[name], field, mine)
        steps, which = torch.unique(_slices(self._mean.steps, reply), return_inverse=True)
        after = [self._mean.after(name, count) for count in steps.tolist()]
        return onto(torch.stack(after), field, mine, which)

    def result(self) -> dict[str, Field]:
        """Return the folded fields, and `by_client/NAME` (C, ...) of what is kept."""
        found: dict[str, Field] = {} if self._fold is None else dict(self._fold.result())
        if not self._names:
            return found
        positions = torch.cat(self._positions)
        for name in self._names:
            t = torch.cat(self._parts[name])
            whole = t.new_zeros(self._clients, *t.shape[1:])
            found[BY_CLIENT + name] = Stacked(whole.index_copy_(0, positions.to(t.device), t))
        answered = torch.zeros(self._clients, dtype=torch.bool)
        answered[positions] = True
        return {**found, ANSWERED: Stacked(answered)}


def _changed(base: Tensor, field: Field, scale: Field | None, mine: Field | None) -> Field:
    """Return what a base (R, ...) has become by changes; `mine`: which rows they are of.

    Raises:
        ProtocolError: bytes without scales, or other numbers of rows than clients use.
    """
    if (field.t.dtype is torch.int8) is (scale is None):
        raise ProtocolError(
            f"expected scales with changes as int8 and with no others, got {field.t.dtype}"
        )
    scales = None if scale is None else scale.t
    if isinstance(field, Patched):
        bases = scale.base if isinstance(scale, Patched) else None
        whole = base + from_small(field.base, bases, base.dtype)
        rows = base[field.index] + from_small(field.t, scales, base.dtype)
        return replace(field, base=whole, t=rows)
    change = from_small(field.t, scales, base.dtype)
    if not isinstance(field, Ragged):
        return Stacked(base + change)
    assert isinstance(mine, Ragged)  # a Ragged field is of known rows
    if not torch.equal(mine.off, field.off.to(mine.off.device)):
        raise ProtocolError(
            f"expected changes of {mine.off.diff().tolist()[:9]} rows, which clients said they "
            f"use, got {field.off.diff().tolist()[:9]}"
        )
    return Ragged(base[mine.t.long()] + change, field.off)


def _slices(name: str, reply: Payload) -> Tensor:
    """Return the slices (k, ...) of a field."""
    field = reply.get(name)
    if isinstance(field, Patched):
        field = field.stacked()
    if not isinstance(field, Stacked):
        what = "none" if field is None else type(field).__name__
        raise ProtocolError(
            f"expected a Stacked field {name!r} in a reply to gather it, got {what}"
        )
    return field.t
