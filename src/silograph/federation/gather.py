"""Reducing replies: fields that are folded, and fields that are kept by client.

C: clients of the federation.
"""

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.payload import Field, Patched, Payload, Ragged, Stacked, take
from silograph.federation.base import (
    ANSWERED,
    BY_CLIENT,
    Gather,
    Reduce,
    WeightedMean,
    fold_of,
    known_of,
)
from silograph.federation.fold import Fold
from silograph.federation.known_rows import onto


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
        self._base = inner.around if isinstance(inner, WeightedMean) else {}
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
        reply = {name: self._whole(name, field, positions) for name, field in reply.items()}
        if self._fold is not None:
            self._fold.add(reply)
        for name in self._names:
            self._parts[name].append(_slices(name, reply))
        self._positions.append(positions)

    def _whole(self, name: str, field: Field, positions: Tensor) -> Field:
        """Return a field that holds rows of what both ends know as one of whole slices."""
        if name not in self._known or not isinstance(field, Ragged):
            return field
        mine = take(self._known[name], positions)
        assert isinstance(mine, Ragged)  # take keeps the type
        return onto(self._base[name], field, mine)

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
