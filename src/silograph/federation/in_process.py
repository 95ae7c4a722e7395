"""The in-process engine: all clients in this process, in blocks of `block_size`."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Field,
    Patched,
    Payload,
    Stacked,
    State,
    concatenate,
    join,
    join_in_order,
    moved,
    take_all,
)
from silograph.core.work import Meter, metered, work_of
from silograph.federation.account import Account
from silograph.federation.base import (
    NOTHING,
    AwayError,
    Op,
    Reduce,
    decoder_of,
    is_overwritten,
    is_read,
    overwrites_nothing,
    positions_of,
)
from silograph.federation.block_state import BlockState
from silograph.federation.called_blocks import CalledBlocks
from silograph.federation.check import check_fields, run_op
from silograph.federation.frame import RESULT, Envelope, count_sizes, decode, encode, frame_sizes
from silograph.federation.gather import Reduction
from silograph.federation.ledger import Ledger, Record
from silograph.federation.per_client import per_client
from silograph.graph.block.block import ClientBlock
from silograph.graph.block.halo import Route


class _Called(NamedTuple):
    """The clients of one block that a call goes to.

    Attributes:
        block: its number.
        positions: (k,) int64, of the clients in the federation.
        among: (k,) int64, which of the clients of the call they are.
        local: (k,) int64, of the clients in the block.
    """

    block: int
    positions: Tensor
    among: Tensor
    local: Tensor


class _Order(NamedTuple):
    """What a call asks of clients.

    Attributes:
        op: what they run.
        key: of its draws.
        rows: whether replies may be `Ragged`.
        number: of the round.
    """

    op: Op
    key: Key
    rows: bool
    number: int


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
        members = everyone.split(block_size)
        self._starts = torch.tensor([0, *itertools.accumulate(map(len, members))])
        whole = block_size >= clients.num_clients
        blocks = [clients] if whole else [clients.take(part) for part in members]
        self._device = clients.off.device
        self._blocks = [CalledBlocks(block) for block in blocks]
        self._positions = everyone
        self._everyone = self._called(everyone)
        self._states = [BlockState(block.num_clients) for block in blocks]
        self._account = Account(clients.num_clients)

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the clients."""
        return self._ids

    @property
    def route(self) -> Route:
        """Who answers for each halo slot."""
        return self._route

    @property
    def away(self) -> tuple[str, ...]:
        """Return nobody: all clients are here."""
        return ()

    @property
    def left_out(self) -> Mapping[str, str]:
        """Nobody: clients of this process do not fail alone."""
        return {}

    @property
    def ledger(self) -> Ledger:
        """What every call cost."""
        return self._account.ledger

    @property
    def executed(self) -> float:
        """Operations executed since this engine began, of all clients."""
        return self._account.executed

    def start_round(self, number: int) -> None:
        """Say that the calls from here on belong to this round."""
        self._account.start_round(number)

    def states(self) -> Sequence[State]:
        """Return the state of each block, for a checkpoint."""
        return tuple(state.for_others() for state in self._states)

    def keep(self, number: int, committed: Sequence[int]) -> None:
        """Do nothing: the server's checkpoint holds all states."""

    def hand_over(self, number: int, weights: Payload) -> int:
        """Return the bytes that silos of their own would get."""
        del number
        return int(frame_sizes(RESULT, weights, len(self._ids)).sum())

    @property
    def remembered(self) -> Mapping[str, Any]:
        """Nothing besides."""
        return {}

    def restore(
        self,
        number: int,
        states: Sequence[State],
        records: Sequence[Record],
        remembered: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Go on from the states of a checkpoint and the records up to it."""
        del number, remembered  # the first call of a round says which it is
        blocks = zip(self._blocks, states, strict=True)
        self._states = [BlockState(block.all.num_clients, state) for block, state in blocks]
        self._account = Account(len(self._ids), records)

    def rejoin(self, away: AwayError) -> None:
        """Raise what came: nobody comes back to one process."""
        raise away

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
        lacking: bool = False,
    ) -> Payload:
        """Run `op` at the clients `to`; see `Federation.call`."""
        del lacking  # nobody is away
        rows = rows or bool(decoder_of(reduce).known)
        op = per_client(op) if self._one_by_one else op
        envelope = self._account.open(op.__name__, what)
        order = _Order(op, key, rows, envelope.round)
        positions = self._positions if to is None else positions_of(self._ids, to)
        size, where = positions.numel(), f"inbox of {op.__name__}"
        check_fields(inbox, size, where, shared=True, patched=True)
        self._account.down(envelope, positions, frame_sizes(op.__name__, inbox, size))
        device = self._device
        if device.type != "cpu":
            inbox = {name: moved(field, device) for name, field in inbox.items()}  # places are here
        fold = None
        if reduce is not None:
            fold = Reduction(reduce, len(self._ids), compiled=self._compiled)
        replies: list[Payload] = []
        sizes: list[np.ndarray] = []
        counts: list[np.ndarray] = []
        meters: list[Meter] = []
        blocks = self._everyone if size == len(self._ids) else self._called(positions)
        for called in blocks:
            clients, local = called.local.numel(), called.local
            shared = len(blocks) == 1 and overwrites_nothing(op)
            part = inbox if shared else take_all(inbox, called.among)
            part = self._carried(envelope, part, clients)
            with metered(clients) as meter:
                reply = self._run_block(called.block, order, part, local)
            sizes.append(frame_sizes(op.__name__, reply, clients))
            counts.append(count_sizes(reply, clients))
            meters.append(meter)
            reply = self._carried(envelope, reply, clients)
            if fold is not None:
                fold.add(reply, called.positions, self._states[called.block].holds)
            else:
                replies.append(reply)
            del reply  # `join` frees what it has copied
        up, scores = np.concatenate(sizes), np.concatenate(counts)
        self._account.up(envelope, positions, up, scores, meters)
        if fold is not None:
            return fold.result()
        if len(replies) == 1 and not self._strict:
            return _apart(replies[0], self._states[called.block])
        return join(replies)

    def _called(self, positions: Tensor) -> list[_Called]:
        """Return the clients of each block among those at `positions` (k,) int64, ascending."""
        places, device = torch.arange(len(positions)), self._device
        ends = torch.searchsorted(positions, self._starts).tolist()
        return [
            _Called(
                block=number,
                positions=positions[a:b],
                among=places[a:b].to(device),
                local=(positions[a:b] - self._starts[number]).to(device),
            )
            for number, (a, b) in enumerate(itertools.pairwise(ends))
            if a < b
        ]

    def _carried(self, envelope: Envelope, payload: Payload, clients: int) -> Payload:
        """Return the payload as it arrives: in strict mode, what is left of it after the wire."""
        if not self._strict:
            return payload
        device = self._device
        frames = [encode(envelope, payload, position) for position in range(clients)]
        arrived = [decode(frame)[1] for frame in frames]
        joined = {name: concatenate([part[name] for part in arrived]) for name in arrived[0]}
        return {name: moved(_as_sent(payload[name], f), device) for name, f in joined.items()}

    def _run_block(self, index: int, order: _Order, inbox: Payload, local: Tensor) -> Payload:
        """Run an op at the clients `local` (k,) of one block: all, or those with the same state."""
        groups = self._states[index].groups(local)
        if len(groups) == 1:
            return self._run(index, order, inbox, local)
        replies = []
        for group in groups:
            place = torch.searchsorted(local, group)
            with work_of(place):
                part = take_all(inbox, place)
                replies.append(self._run(index, order, part, group))
        return join_in_order(replies, torch.cat(groups).argsort())

    def _run(self, index: int, order: _Order, inbox: Payload, local: Tensor) -> Payload:
        """Run an op at the clients `local` (k,) of one block and put their state back."""
        block, state = self._blocks[index].take(local), self._states[index]
        whole, written = block is self._blocks[index].all, partial(is_overwritten, order.op)
        old = state.all_for(written) if whole else state.take(local, partial(is_read, order.op))
        new, reply = run_op(
            order.op,
            self._cfg,
            block,
            old,
            inbox,
            order.key,
            rows=order.rows,
            number=order.number,
            given_up=True,  # parts are copies, and blocks make their own
        )
        if whole:
            state.replace(new, written)
        else:
            state.put(old, new, local, written)
        return reply


def _apart(reply: Payload, state: BlockState) -> dict[str, Field]:
    """Return the reply of one block in memory that calls do not write to.

    Rows of a whole block are large, so they are copied only where the clients keep them, too.
    """
    return {
        name: concatenate([field]) if isinstance(field, Patched) or state.holds(field.t) else field
        for name, field in reply.items()
    }


def _as_sent(sent: Field, arrived: Field) -> Field:
    """Return what arrived in the form that the op gave it: frames carry `Patched` slices whole."""
    if isinstance(sent, Patched) and isinstance(arrived, Stacked):
        return sent.like(Stacked(arrived.t.to(sent.t.device)))
    return arrived
