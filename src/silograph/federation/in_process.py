"""The in-process engine: all clients in this process, in blocks of `block_size`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Field,
    Patched,
    Payload,
    Shared,
    Stacked,
    State,
    concatenate,
    join,
    put,
    state_of,
    take_all,
)
from silograph.core.work import Meter, metered
from silograph.federation.base import Op, Reduce, positions_of
from silograph.federation.check import check_fields
from silograph.federation.fold import Fold
from silograph.federation.frame import Envelope, decode, encode, frame_sizes
from silograph.federation.ledger import Direction, Ledger, Record
from silograph.federation.lift import per_client
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
        compiled: fold replies with the compiled kernel, to the same bits.
        one_by_one: whether ops are written for one client: then blocks run them by `per_client`.
    """

    def __init__(
        self,
        cfg: Any,
        clients: ClientBlock,
        route: Route,
        block_size: int,
        *,
        strict: bool = False,
        compiled: bool = False,
        one_by_one: bool = False,
    ) -> None:
        self._cfg = cfg
        self._one_by_one = one_by_one
        self._ids = clients.ids
        self._route = route
        self._strict = strict
        self._compiled = compiled
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
        rows: bool = False,
    ) -> Payload:
        """Run `op` at the clients `to`; see `Federation.call`."""
        op = per_client(op) if self._one_by_one else op
        self._step += 1
        envelope = Envelope(op.__name__, what, self._round, self._step)
        positions = positions_of(self._ids, to)
        check_fields(inbox, len(positions), f"inbox of {op.__name__}", shared=True)
        self._record(envelope, "down", positions, frame_sizes(op.__name__, inbox, len(positions)))
        everyone = len(positions) == len(self._ids)
        device = self._blocks[0].off.device
        fold = Fold(reduce, compiled=self._compiled) if reduce is not None else None
        replies: list[Payload] = []
        sizes: list[np.ndarray] = []
        meters: list[Meter] = []
        for index, members in enumerate(self._members):
            called = torch.isin(positions, members)
            if not bool(called.any()):
                continue
            local = (positions[called] - members[0]).to(device)
            mine = called.nonzero()[:, 0].to(device)
            part = self._carried(envelope, take_all(inbox, mine), len(local))
            with metered(len(local)) as meter:
                reply = self._run(index, op, part, local, key, everyone=everyone, rows=rows)
            sizes.append(frame_sizes(op.__name__, reply, len(local)))
            meters.append(meter)
            reply = self._carried(envelope, reply, len(local))
            if fold is not None:
                fold.add(reply)
            else:
                replies.append(reply)
        work = torch.cat([meter.flops for meter in meters]).numpy()
        self._record(envelope, "up", positions, np.concatenate(sizes), work)
        for kind in sorted({kind for meter in meters for kind in meter.apart}):
            apart = torch.cat([meter.part(kind).flops for meter in meters]).numpy()
            self._record(replace(envelope, kind=kind), "up", positions, None, apart)
        return fold.result() if fold is not None else join(replies)

    def _record(
        self,
        envelope: Envelope,
        direction: Direction,
        positions: Tensor,
        sizes: np.ndarray | None,
        flops: np.ndarray | None = None,
    ) -> None:
        zeros = np.zeros(len(positions))
        self._ledger.append(
            Record(
                round=envelope.round,
                step=envelope.step,
                op=envelope.op,
                what=envelope.kind,
                direction=direction,
                clients=positions.numpy(),
                bytes=zeros.astype(np.int64) if sizes is None else sizes,
                flops=zeros if flops is None else flops,
            )
        )

    def _carried(self, envelope: Envelope, payload: Payload, clients: int) -> Payload:
        """Return the payload as it arrives: in strict mode, what is left of it after the wire."""
        if not self._strict:
            return payload
        device = self._blocks[0].off.device
        frames = [encode(envelope, payload, position) for position in range(clients)]
        arrived = [decode(frame)[1] for frame in frames]
        joined = {name: concatenate([part[name] for part in arrived]) for name in arrived[0]}
        return {name: _to(_as_sent(payload[name], f), device) for name, f in joined.items()}

    def _run(
        self,
        index: int,
        op: Op,
        inbox: Payload,
        local: Tensor,
        key: Key,
        *,
        everyone: bool,
        rows: bool,
    ) -> Payload:
        """Run `op` at the clients `local` (k,) of one block and put their state back."""
        block, state = self._blocks[index], self._states[index]
        whole = len(local) == block.num_clients
        old = state if whole else state_of(take_all(state, local))
        new, reply = op(self._cfg, block if whole else block.take(local), old, inbox, key)
        check_fields(reply, len(local), f"reply of {op.__name__}", patched=True, rows=rows)
        check_fields(new, len(local), f"state after {op.__name__}")
        if not everyone and new.keys() != state.keys():
            raise ProtocolError(
                f"expected state fields {sorted(state)} after {op.__name__}, got {sorted(new)}: "
                "state fields are created by a call to all clients"
            )
        if whole:
            self._states[index] = new
        else:
            self._states[index] = {name: put(state[name], new[name], local) for name in state}
        return reply


def _as_sent(sent: Field, arrived: Field) -> Field:
    """Return what arrived in the form that the op gave it: frames carry `Patched` slices whole."""
    if isinstance(sent, Patched) and isinstance(arrived, Stacked):
        return sent.like(Stacked(arrived.t.to(sent.t.device)))
    return arrived


def _to(field: Field, device: torch.device) -> Field:
    if device.type == "cpu" or isinstance(field, Patched):
        return field
    if isinstance(field, Shared):
        return Shared(field.t.to(device))
    moved = state_of({"": field})[""]
    return type(moved)(*(t.to(device) for t in vars(moved).values()))
