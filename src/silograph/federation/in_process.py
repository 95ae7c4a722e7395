"""The in-process engine: all clients in this process, in blocks of `block_size`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Field,
    Payload,
    State,
    concatenate,
    put,
    state_of,
    take_all,
)
from silograph.federation.base import Fold, Op, Reduce, positions_of
from silograph.graph.block import ClientBlock
from silograph.graph.halo import Route


class InProcess:
    """Runs ops on blocks of clients in this process.

    Args:
        cfg: what every op is given as its first argument.
        clients: all clients as one block.
        route: who answers for each halo slot.
        block_size: most clients in one block; results do not depend on it beyond rounding.
    """

    def __init__(self, cfg: Any, clients: ClientBlock, route: Route, block_size: int) -> None:
        self._cfg = cfg
        self._ids = clients.ids
        self._route = route
        everyone = torch.arange(clients.num_clients)
        self._members = everyone.split(block_size)
        whole = block_size >= clients.num_clients
        self._blocks = [clients] if whole else [clients.take(part) for part in self._members]
        self._states: list[State] = [{} for _ in self._blocks]

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the clients."""
        return self._ids

    @property
    def route(self) -> Route:
        """Who answers for each halo slot."""
        return self._route

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
        """Run `op` at the clients `to`; see `Federation.call`."""
        del what  # declared for the ledger, which counts bytes by kind
        positions = positions_of(self._ids, to)
        fold = Fold(reduce) if reduce is not None else None
        replies: list[Payload] = []
        for index, members in enumerate(self._members):
            called = torch.isin(positions, members)
            if not bool(called.any()):
                continue
            local = positions[called] - members[0]
            reply = self._run(index, op, take_all(inbox, called.nonzero()[:, 0]), local, key)
            if fold is not None:
                fold.add(reply)
            else:
                replies.append(reply)
        if fold is not None:
            return fold.result()
        return _joined(replies)

    def _run(self, index: int, op: Op, inbox: Payload, local: Tensor, key: Key) -> Payload:
        """Run `op` at the clients `local` (k,) of one block and put their state back."""
        block, state = self._blocks[index], self._states[index]
        if len(local) == block.num_clients:
            self._states[index], reply = op(self._cfg, block, state, inbox, key)
            return reply
        old = state_of(take_all(state, local))
        new, reply = op(self._cfg, block.take(local), old, inbox, key)
        if new.keys() != state.keys():
            raise ProtocolError(
                f"expected state fields {sorted(state)} after {op.__name__}, got {sorted(new)}: "
                "state fields are created by a call to all clients"
            )
        self._states[index] = {name: put(state[name], new[name], local) for name in state}
        return reply


def _joined(replies: list[Payload]) -> dict[str, Field]:
    return {name: concatenate([reply[name] for reply in replies]) for name in replies[0]}
