"""Reducing replies: fields that are folded, and fields that are kept by client.

C: clients of the federation.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from silograph.core.payload import Field, Payload, Stacked
from silograph.federation.base import (
    ANSWERED,
    BY_CLIENT,
    Gather,
    Reduce,
    WeightedMean,
    decoder_of,
    fold_of,
)
from silograph.federation.decoder import slices
from silograph.federation.fold import Fold


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
        self._found: dict[str, Tensor] = {}
        self._answered = torch.zeros(clients, dtype=torch.bool) if self._names else None
        self._without = inner.without if isinstance(inner, WeightedMean) else ()
        self._decoder = decoder_of(reduce)
        self._decoder.check(clients)

    def add(
        self,
        reply: Payload,
        positions: Tensor,
        held: Callable[[Tensor], bool] = lambda _: True,
    ) -> None:
        """Add the reply of the clients at `positions` (k,) int64.

        Args:
            reply: theirs.
            positions: in the federation.
            held: whether somebody may write to the memory of a tensor later; else it is kept where
                it has a slice for every client.

        Raises:
            ProtocolError: a field that is to be kept is missing or has no slice for each client;
                or see `Fold.add`.
        """
        reply = self._decoder.whole(reply, positions)
        if self._fold is not None:
            self._fold.add({n: f for n, f in reply.items() if n not in self._without})
        if self._answered is None:
            return
        for name in self._names:
            part = slices(name, reply)
            if len(part) == self._clients and not held(part):
                self._found[name] = part
                continue
            if name not in self._found:
                self._found[name] = part.new_zeros(self._clients, *part.shape[1:])
            self._found[name].index_copy_(0, positions.to(part.device), part)
        self._answered[positions] = True

    def result(self) -> dict[str, Field]:
        """Return the folded fields, and `by_client/NAME` (C, ...) of what is kept."""
        found: dict[str, Field] = {} if self._fold is None else dict(self._fold.result())
        if self._answered is None:
            return found
        kept = {BY_CLIENT + name: Stacked(t) for name, t in self._found.items()}
        beside = next((t.device for t in self._found.values()), self._answered.device)
        return {**found, **kept, ANSWERED: Stacked(self._answered.to(beside))}
