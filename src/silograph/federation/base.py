"""What a method sees of a federation: `call`, and reductions that the engine folds.

A method is a server program. It calls named client ops: pure module-level functions

    op(cfg, block, state, inbox, key) -> (state, reply)

that act on a block of C >= 1 clients. Between calls a client's state stays where the client is.
Nothing else crosses: no closure, no global, no object.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, State
from silograph.federation.ledger import Ledger
from silograph.graph.block import ClientBlock
from silograph.graph.halo import Route

Op = Callable[[Any, ClientBlock, State, Payload, Key], tuple[State, Payload]]


@dataclass(frozen=True)
class WeightedMean:
    """Mean of every field over clients, weighted by the field `by` (C,), which is summed.

    A client of weight 0 takes no part, whatever it sent. If none has a weight, the result has
    the field `by` only.
    """

    by: str


@dataclass(frozen=True)
class Sum:
    """Sum of every field over clients."""


Reduce = WeightedMean | Sum


class Federation(Protocol):
    """An engine: it knows the clients and carries calls to them."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the clients; their order is the order of every sum."""

    @property
    def route(self) -> Route:
        """Who answers for each halo slot."""

    @property
    def ledger(self) -> Ledger:
        """What every call cost."""

    def start_round(self, number: int) -> None:
        """Say that the calls from here on belong to this round; 0 is before the first."""

    def call(
        self,
        op: Op,
        inbox: Payload,
        *,
        what: Kind,
        key: Key,
        to: Sequence[str] | None = None,
        reduce: Reduce | None = None,
    ) -> Payload:
        """Run `op` at the clients `to` (all by default, in client order) and return the replies.

        Args:
            op: module-level function.
            inbox: what the clients get; `Stacked` and `Ragged` fields have a part for each
                client of `to`.
            what: declared content of the call, both ways.
            key: key of the op's draws.
            to: ids, in the federation's order.
            reduce: how the replies are folded; the result then has `Shared` fields.

        Raises:
            ProtocolError: unknown, repeated or unordered ids, or a reply that breaks the rules.
        """


class Fold:
    """Folds replies client by client, in client order, so that blocks of any size agree."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._total: dict[str, Tensor] = {}
        self._weight = 0.0
        self._fields: set[str] | None = None

    def add(self, reply: Payload) -> None:
        """Add the reply of a block, one client after the other.

        Raises:
            ProtocolError: a field is not `Stacked`, or the weights are missing or negative.
        """
        fields: dict[str, Tensor] = {}
        if not reply or (self._fields is not None and reply.keys() != self._fields):
            raise ProtocolError(
                f"expected the same fields from every block to reduce, got {sorted(reply)} after "
                f"{sorted(self._fields or ())}"
            )
        self._fields = set(reply)
        for name, field in reply.items():
            if not isinstance(field, Stacked):
                raise ProtocolError(
                    f"expected Stacked fields in a reply that is reduced, got "
                    f"{type(field).__name__} for {name!r}"
                )
            fields[name] = field.t
        for position, weight in enumerate(self._weights(fields)):
            if weight != 0:
                self._weight += weight
                for name, t in fields.items():
                    self._fold(name, t[position], weight)

    def _weights(self, fields: dict[str, Tensor]) -> list[float] | list[int]:
        match self._reduce:
            case Sum():
                return [1] * len(next(iter(fields.values())))
            case WeightedMean(by):
                if by not in fields or not bool((fields[by] >= 0).all()):
                    raise ProtocolError(
                        f"expected weights >= 0 in field {by!r} of the reply, got fields "
                        f"{sorted(fields)}"
                    )
                weights: list[float] | list[int] = fields[by].tolist()
                return weights

    def _fold(self, name: str, t: Tensor, weight: float) -> None:
        by = self._reduce.by if isinstance(self._reduce, WeightedMean) else None
        factor = 1 if name == by else weight
        if name in self._total:
            self._total[name].add_(t, alpha=factor)
        else:
            self._total[name] = t * factor

    def result(self) -> dict[str, Shared]:
        """Return the folded reply; of a mean without any weight, only the weight: 0."""
        match self._reduce:
            case Sum():
                return {name: Shared(t) for name, t in self._total.items()}
            case WeightedMean(by) if not self._total:
                return {by: Shared(torch.zeros(()))}
            case WeightedMean(by):
                return {
                    name: Shared(t if name == by else t / self._weight)
                    for name, t in self._total.items()
                }


def positions_of(ids: Sequence[str], to: Sequence[str] | None) -> Tensor:
    """Return the positions (k,) int64 of the clients `to` among `ids`.

    Raises:
        ProtocolError: ids that are unknown, repeated, or not in the federation's order.
    """
    if to is None:
        return torch.arange(len(ids))
    place = {name: position for position, name in enumerate(ids)}
    missing = [name for name in to if name not in place]
    if missing:
        raise ProtocolError(f"expected clients of this federation, got {missing[0]!r}")
    positions = [place[name] for name in to]
    if not positions or any(a >= b for a, b in itertools.pairwise(positions)):
        raise ProtocolError(
            f"expected at least one client, each once and in the federation's order, got {list(to)}"
        )
    return torch.tensor(positions)
