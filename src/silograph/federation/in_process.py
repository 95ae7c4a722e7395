"""The in-process engine: all clients in this process, in blocks of `block_size`."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Field,
    Payload,
    Shared,
    State,
    concatenate,
    put,
    state_of,
    take_all,
)
from silograph.core.work import metered
from silograph.federation.base import Fold, Op, Reduce, positions_of
from silograph.federation.frame import Envelope, decode, encode, frame_sizes
from silograph.federation.ledger import Direction, Ledger, Record
from silograph.graph.block import ClientBlock
from silograph.graph.halo import Route


class InProcess:
    """Runs ops on blocks of clients in this process.

    Args:
        cfg: what every op is given as its first argument.
        clients: all clients as one block.
        route: who answers for each halo slot.
        block_size: most clients in one block; results do not depend on it beyond rounding.
        strict: send every payload through `encode` and `decode`, as a network would. Otherwise
            nothing is encoded, and sizes come from shapes; results and ledger are the same.
    """

    def __init__(
        self,
        cfg: Any,
        clients: ClientBlock,
        route: Route,
        block_size: int,
        *,
        strict: bool = False,
    ) -> None:
        self._cfg = cfg
        self._ids = clients.ids
        self._route = route
        self._strict = strict
        everyone = torch.arange(clients.num_clients)
        self._members = everyone.split(block_size)
        whole = block_size >= clients.num_clients
        self._blocks = [clients] if whole else [clients.take(part) for part in self._members]
        self._states: list[State] = [{} for _ in self._blocks]
        self._ledger = Ledger(clients.num_clients)
        self._round = 0
        self._step = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the clients."""
        return self._ids

    @property
    def route(self) -> Route:
        """Who answers for each halo slot."""
        return self._route

    @property
    def ledger(self) -> Ledger:
        """What every call cost."""
        return self._ledger

    def start_round(self, number: int) -> None:
        """Say that the calls from here on belong to this round."""
        self._round, self._step = number, 0

    def states(self) -> Sequence[State]:
        """Return the state of each block, for a checkpoint."""
        return tuple(self._states)

    def restore(self, states: Sequence[State], records: Sequence[Record]) -> None:
        """Go on from the states of a checkpoint and the records up to it."""
        self._states = list(states)
        self._ledger = Ledger(len(self._ids), records)

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
        start = time.perf_counter()
        self._step += 1
        envelope = Envelope(op.__name__, what, self._round, self._step)
        positions = positions_of(self._ids, to)
        self._record(envelope, "down", positions, frame_sizes(op.__name__, inbox, len(positions)))
        device = self._blocks[0].off.device
        fold = Fold(reduce) if reduce is not None else None
        replies: list[Payload] = []
        sizes: list[np.ndarray] = []
        flops: list[Tensor] = []
        for index, members in enumerate(self._members):
            called = torch.isin(positions, members)
            if not bool(called.any()):
                continue
            local = (positions[called] - members[0]).to(device)
            mine = called.nonzero()[:, 0].to(device)
            part = self._carried(envelope, take_all(inbox, mine), len(local))
            with metered(len(local)) as meter:
                reply = self._run(index, op, part, local, key)
            sizes.append(frame_sizes(op.__name__, reply, len(local)))
            flops.append(meter.flops)
            reply = self._carried(envelope, reply, len(local))
            if fold is not None:
                fold.add(reply)
            else:
                replies.append(reply)
        work = torch.cat(flops).numpy()
        self._record(envelope, "up", positions, np.concatenate(sizes), work)
        self._ledger.seconds.append(time.perf_counter() - start)
        return fold.result() if fold is not None else _joined(replies)

    def _record(
        self,
        envelope: Envelope,
        direction: Direction,
        positions: Tensor,
        sizes: np.ndarray,
        flops: np.ndarray | None = None,
    ) -> None:
        self._ledger.append(
            Record(
                round=envelope.round,
                step=envelope.step,
                op=envelope.op,
                what=envelope.kind,
                direction=direction,
                clients=positions.numpy(),
                bytes=sizes,
                flops=np.zeros(len(sizes)) if flops is None else flops,
            )
        )

    def _carried(self, envelope: Envelope, payload: Payload, clients: int) -> Payload:
        """Return the payload as it arrives: in strict mode, what is left of it after the wire."""
        if not self._strict:
            return payload
        device = self._blocks[0].off.device
        frames = [encode(envelope, payload, position) for position in range(clients)]
        arrived = [decode(frame)[1] for frame in frames]
        return {
            name: _to(concatenate([part[name] for part in arrived]), device) for name in arrived[0]
        }

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


def _to(field: Field, device: torch.device) -> Field:
    if device.type == "cpu":
        return field
    if isinstance(field, Shared):
        return Shared(field.t.to(device))
    moved = state_of({"": field})[""]
    return type(moved)(*(t.to(device) for t in vars(moved).values()))
