"""All clients in one process: their blocks with the states, and the in-process engine.

A `BlockHost` runs ops at blocks. The in-process engine has one; workers have one each
(`silograph.federation.workers`).
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
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
    Ragged,
    Shared,
    Stacked,
    State,
    StateField,
    concatenate,
    copied,
    drop_idle_clients,
    join,
    join_in_order,
    moved,
    offsets,
    ranges,
    rows_of,
    spread,
    state_of,
    take_all,
)
from silograph.core.work import WorkTotals, metered, work_of
from silograph.federation.base import (
    ALL_NAMES,
    NOTHING,
    AwayError,
    Op,
    Reduce,
    context,
    failure,
    is_self_explanatory,
    per_client,
    positions_of,
)
from silograph.federation.check import (
    HAS,
    check_alike,
    check_fields,
    check_results,
    of_round,
    step_of,
)
from silograph.federation.fold import Reduction
from silograph.federation.frame import (
    RESULT,
    Envelope,
    count_sizes,
    decode,
    encode,
    frame_sizes,
)
from silograph.federation.ledger import Account, Ledger, Record
from silograph.federation.privacy.release import SimulatedNoise
from silograph.federation.privacy.updates import UpdatePrivacy
from silograph.federation.secure.sums import SecureFold, weights_field
from silograph.federation.state_files import StateFile, read_state
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.silos.shards import ShardedClients

# --- Blocks of called clients, cached for later calls to the same clients ------------------------


class CalledBlocks:
    """Cuts blocks of some clients from a block, and caches the latest.

    Methods call the same clients several times in a round, and some selectors call them in turn.
    Cached blocks have together at most as many clients as the block itself, so they take at most
    as much memory again.

    Args:
        clients: all clients: as a block, or in files, which are read when they are needed.

    Attributes:
        num_clients: C, all of them.
        device: where they compute.
        num_bytes: of their files, whose memory `release` frees; 0 of a block.
    """

    def __init__(self, clients: ClientBlock | ShardedClients) -> None:
        self.num_clients, self.device = clients.num_clients, clients.off.device
        self._clients, self._is_verified = clients, False
        self._block = clients if isinstance(clients, ClientBlock) else None
        self.num_bytes = clients.num_bytes if isinstance(clients, ShardedClients) else 0
        self._recent_blocks: OrderedDict[tuple[int, ...], ClientBlock] = OrderedDict()

    @property
    def all(self) -> ClientBlock:
        """All clients.

        Raises:
            DataError: a file is missing or damaged.
        """
        if self._block is None:
            assert isinstance(self._clients, ShardedClients)  # a block is never released
            self._block = self._clients.read(verify=not self._is_verified)
            self._is_verified = True
        return self._block

    def release(self) -> None:
        """Free the memory of clients that are in files."""
        if isinstance(self._clients, ShardedClients):
            self._block = None
            self._recent_blocks.clear()

    def take(self, positions: Tensor) -> ClientBlock:
        """Return the block of the clients at `positions` (k,) int64, ascending."""
        if len(positions) == self.num_clients:
            return self.all
        name = tuple(positions.tolist())
        if name not in self._recent_blocks:
            self._recent_blocks[name] = self.all.called(positions)
        self._recent_blocks.move_to_end(name)
        while sum(map(len, self._recent_blocks)) > self.num_clients:
            self._recent_blocks.popitem(last=False)
        return self._recent_blocks[name]


# --- partial field -------------------------------------------------------------------------------
# A state field that some clients of a block have and others do not, or whose runs change length.
#
# C: clients of the block. k: clients of a call.


SPARE = 1.5  # room that is made for later rows, as a multiple of the rows there are


class PartialField:
    """Holds one run of rows for each client that has the field; a slice is a run of one row.

    Writing a client's rows moves nobody else's: a run that has outgrown its place gets another one,
    and rows are copied only when there is no more room, which grows by half each time.

    Args:
        clients: C.
        like: a field of this form, dtype and shape.
    """

    def __init__(self, clients: int, like: Stacked | Ragged) -> None:
        device = like.t.device
        self.empty: Stacked | Ragged = Stacked(like.t[:0])
        if isinstance(like, Ragged):
            self.empty = Ragged(like.t[:0], like.off[:1] * 0)
        self.has = torch.zeros(clients, dtype=torch.bool, device=device)
        self._start = torch.zeros(clients, dtype=torch.int64, device=device)
        self._count = torch.zeros_like(self._start)
        self._room = torch.zeros_like(self._start)
        self._rows = like.t.new_empty(0, *like.t.shape[1:])
        self._used = 0

    def take(self, positions: Tensor) -> Stacked | Ragged:
        """Return a copy of the rows of the clients at `positions` (k,); all must have the field."""
        counts = self._count[positions]
        rows = self._rows[ranges(self._start[positions], counts)]
        if isinstance(self.empty, Stacked):
            return Stacked(rows)
        return Ragged(rows, offsets(counts))

    def whole(self) -> Stacked | Ragged:
        """Return a copy of the rows of all clients that have the field, in client order."""
        return self.take(self.has.nonzero()[:, 0])

    def put(self, part: Stacked | Ragged, positions: Tensor) -> None:
        """Replace or create the rows of the clients at `positions` (k,)."""
        counts = part.off.diff() if isinstance(part, Ragged) else torch.ones_like(positions)
        grows = counts > self._room[positions]
        self.has[positions], self._count[positions] = True, counts
        if bool(grows.any()):
            self._make_room(positions[grows], counts[grows])
        places = ranges(self._start[positions], counts)
        self._rows.index_copy_(0, places, part.t)

    def drop(self, positions: Tensor) -> None:
        """Remove the field of the clients at `positions` (k,)."""
        self.has[positions] = False
        self._count[positions] = 0
        self._room[positions] = 0

    def _make_room(self, positions: Tensor, counts: Tensor) -> None:
        """Reserve `counts` (k,) rows for the clients at `positions` (k,)."""
        self._room[positions] = 0  # their old rows are replaced
        need = int(counts.sum())
        if self._used + need > len(self._rows):
            self._rebuild(need)
        self._start[positions] = self._used + offsets(counts)[:-1]
        self._room[positions] = counts
        self._used += need

    def _rebuild(self, need: int) -> None:
        """Copy the rows in use, without gaps, into memory with room for `need` more rows."""
        live = torch.minimum(self._room, self._count)
        places = ranges(self._start, live)
        size = int(SPARE * (len(places) + need)) if len(places) else need
        rows = self._rows.new_empty(size, *self._rows.shape[1:])
        rows[: len(places)] = self._rows[places]
        self._start, self._room = offsets(live)[:-1], live
        self._rows, self._used = rows, len(places)


# --- The state of a block's clients, which calls to some of them change in place -----------------
#
# C: clients of the block. k: clients of a call.


class BlockState:
    """Holds the state of C clients.

    A call to some of them copies their part only, and writes back the fields that it changed. It
    writes into memory that nobody else has: a field that came from outside (from an op, which may
    hold the same tensor elsewhere, or from a checkpoint) is copied before it is first written to.

    A call to some clients may create fields and drop them. An op never sees clients of which only
    some have a field: `groups` keeps them apart, as if each were a block of its own.

    Args:
        clients: C.
        fields: as `export` returned them; none at first.
    """

    def __init__(self, clients: int, fields: State | None = None) -> None:
        self._clients = clients
        restored = fields or {}
        self._partial: dict[str, PartialField] = {}
        for name, mask in restored.items():
            if name.startswith(HAS):
                own = name.removeprefix(HAS)
                like = _one_form(restored[own])
                self._partial[own] = partial_field = PartialField(clients, like)
                partial_field.put(like, mask.t.nonzero()[:, 0])
        self._fields = {
            name: f
            for name, f in restored.items()
            if name not in self._partial and not name.startswith(HAS)
        }
        self._own: set[str] = set()  # fields whose memory nobody else has

    def all(self, overwrites: tuple[str, ...] = ()) -> State:
        """Return the state of all clients, for a call to all; what that returns goes to `replace`.

        All of them must have the same fields (see `groups`).

        Args:
            overwrites: how the names of fields begin that the call writes to.
        """
        for name in list(self._partial):
            partial_field = self._partial.pop(name)
            if bool(partial_field.has.any()):
                self._fields[name] = partial_field.whole()
                self._own.add(name)
        for name, field in list(self._fields.items()) if overwrites else ():
            if name.startswith(overwrites):
                self._make_own(name, field)
        return dict(self._fields)

    def export(self) -> State:
        """Return the state of all clients for good: later calls leave it as it is.

        A field that only k clients have has their k slices or runs, and beside it stands a (C,)
        bool field, `HAS` and its name, that says who they are.
        """
        self._own.clear()
        state = dict(self._fields)
        for name, partial_field in self._partial.items():
            if bool(partial_field.has.any()):
                state[name] = partial_field.whole()
                if not bool(partial_field.has.all()):
                    state[HAS + name] = Stacked(partial_field.has.clone())
        return state

    def holds(self, t: Tensor) -> bool:
        """Return whether a field of all clients lies in the memory of a tensor."""
        memory = t.untyped_storage().data_ptr()
        return any(f.t.untyped_storage().data_ptr() == memory for f in self._fields.values())

    @property
    def is_alike(self) -> bool:
        """Whether all clients surely have the same fields."""
        return not self._partial

    def groups(self, positions: Tensor) -> list[Tensor]:
        """Return the clients at `positions` (k,) int64 in groups that have the same fields."""
        groups = [positions]
        for partial_field in self._partial.values():
            parts = ((partial_field.has[g], g) for g in groups)
            groups = [g[mask] for has, g in parts for mask in (has, ~has) if bool(mask.any())]
        return groups

    def take(self, positions: Tensor, reads: tuple[str, ...] = ALL_NAMES) -> State:
        """Return a copy of the state of the clients at `positions` (k,) int64, one group.

        `reads`: how the names of its fields begin.
        """
        fields = {name: field for name, field in self._fields.items() if name.startswith(reads)}
        state = state_of(take_all(fields, positions))
        for name, partial_field in self._partial.items():
            if name.startswith(reads) and bool(partial_field.has[positions[0]]):
                state[name] = partial_field.take(positions)
        return state

    def replace(self, new: State, overwrites: tuple[str, ...] = ()) -> None:
        """Replace the state by what a call to all returned, which `overwrites` such fields."""
        own = {
            name
            for name in new
            if (overwrites and name.startswith(overwrites))
            or (name in self._own and new[name] is self._fields[name])
        }
        if own:
            holders = Counter(f.t.untyped_storage().data_ptr() for f in new.values())
            own = {name for name in own if holders[new[name].t.untyped_storage().data_ptr()] == 1}
        self._own = own
        self._fields = dict(new)

    def put(
        self,
        old: State,
        new: State,
        positions: Tensor,
        overwrites: tuple[str, ...] = (),
    ) -> None:
        """Store the state that a call to the clients at `positions` (k,) int64 returned.

        Args:
            old: what `take` gave it.
            new: the same fields, but for those that the call has created or dropped.
            positions: of the clients.
            overwrites: how the names of fields begin whose input the call may have overwritten.

        Raises:
            ProtocolError: a field is of another type or dtype, or has slices or rows of another
                shape, than the call was given or other clients have; then nothing is changed.
        """
        changed = [n for n in new if new[n] is not old.get(n) or n.startswith(overwrites)]
        for name in changed:
            template = (
                self._partial[name].empty if name in self._partial else self._fields.get(name)
            )
            if template is not None:
                check_alike(name, template, new[name])
        for name in changed:
            self._put(name, new[name], positions)
        for name in old.keys() - new.keys():
            self._as_partial(name, old[name]).drop(positions)

    def _put(self, name: str, part: StateField, positions: Tensor) -> None:
        whole = self._fields.get(name)
        if isinstance(whole, Patched) and isinstance(part, Patched):
            places = rows_of(whole.off, positions)
            if torch.equal(whole.index[places], part.index):
                self._put_patched(name, whole, part, positions)
                return
        part = _one_form(part)
        if isinstance(whole, Patched):
            whole = self._fields[name] = whole.stacked()
            self._own.add(name)
        places = positions
        if isinstance(whole, Ragged) and isinstance(part, Ragged):
            alike = bool((whole.off.diff()[positions] == part.off.diff()).all())
            places = rows_of(whole.off, positions)
            whole = whole if alike else None
        if whole is None:
            self._as_partial(name, part).put(part, positions)
            return
        self._make_own(name, whole).t.index_copy_(0, places, part.t)

    def _put_patched(self, name: str, whole: Patched, part: Patched, positions: Tensor) -> None:
        """Store rows in their places, and bases in places that no client needs any more."""
        own = self._make_own(name, whole)
        assert isinstance(own, Patched)
        own.t.index_copy_(0, rows_of(own.off, positions), part.t)
        which = own.which.clone()
        which[positions] = -1
        in_use = which[which >= 0].unique()
        base, wanted = own.base, part.which.unique()
        is_free = torch.ones(len(base), dtype=torch.bool, device=base.device)
        is_free[in_use] = False
        free = is_free.nonzero()[:, 0]
        if len(free) < len(wanted):
            more = base.new_empty(len(wanted) - len(free), *base.shape[1:])
            free = torch.cat([free, len(base) + torch.arange(len(more), device=free.device)])
            base = torch.cat([base, more])
        base[free[: len(wanted)]] = part.base[wanted]
        which[positions] = free[torch.searchsorted(wanted, part.which)]
        self._fields[name] = replace(own, base=base, which=which)

    def _make_own(self, name: str, field: StateField) -> StateField:
        """Return a field of all clients in memory that nobody else has."""
        if name not in self._own:
            field = self._fields[name] = copied(field)
            self._own.add(name)
        return field

    def _as_partial(self, name: str, like: StateField) -> PartialField:
        """Return a field as one that some clients may lack, or whose runs may change."""
        if name not in self._partial:
            self._partial[name] = PartialField(self._clients, _one_form(like))
            whole = self._fields.pop(name, None)
            self._own.discard(name)
            if whole is not None:
                all_positions = torch.arange(self._clients, device=like.t.device)
                self._partial[name].put(_one_form(whole), all_positions)
        return self._partial[name]


def _one_form(field: StateField) -> Stacked | Ragged:
    """Return a field in which each client has memory of its own: a `Patched` one as slices."""
    return field.stacked() if isinstance(field, Patched) else field


# --- Running ops at blocks ------------------------------------------------------------------------
#
# k: clients of a call in one block.


class OpCall(NamedTuple):
    """What every block of a call runs.

    Attributes:
        op: the op.
        envelope: of the messages to clients.
        answer: envelope of the replies, whose kind may be another.
        key: of the op's draws.
        rows: whether replies may be `Ragged`.
    """

    op: Op
    envelope: Envelope
    answer: Envelope
    key: Key
    rows: bool


class ReplyCost(NamedTuple):
    """What the reply of some clients costs.

    Attributes:
        sizes: (k,) int64 bytes of their frames.
        counts: (k,) int64 bytes of them that are scores of the received weights.
        work: of the clients.
    """

    sizes: np.ndarray
    counts: np.ndarray
    work: WorkTotals


SHARD_BYTES = 2**30  # of files whose blocks stay in memory between calls, at each host


class BlockHost:
    """Blocks of clients with their states.

    Args:
        cfg: first argument of every op.
        blocks: the clients, none of them twice; those in files are read when they are called.
        strict: send every payload through `encode` and `decode`, as a network would.
        single_client_only: whether ops are written for one client: blocks then run them by
            `per_client`.

    Attributes:
        blocks: the blocks, each with those of its clients that were called lately.
        states: of the clients of each block.
    """

    def __init__(
        self,
        cfg: Any,
        blocks: Sequence[ClientBlock | ShardedClients],
        *,
        strict: bool,
        single_client_only: bool,
    ) -> None:
        self._cfg = cfg
        self._round, self._cfg_of_round = 0, of_round(cfg, 0)
        self._strict, self._single_client_ops = strict, single_client_only
        self.blocks = [CalledBlocks(block) for block in blocks]
        self.states = [BlockState(block.num_clients) for block in blocks]
        self._in_memory: OrderedDict[int, int] = OrderedDict()  # bytes of blocks of files

    def start_round(self, number: int) -> None:
        """Give ops the config of this round from here on."""
        self._round, self._cfg_of_round = number, of_round(self._cfg, number)

    def export(self) -> tuple[State, ...]:
        """Return the state of each block for good: later calls leave it as it is."""
        return tuple(state.export() for state in self.states)

    def restore(self, states: Sequence[State | StateFile]) -> None:
        """Restore exported states, also from files.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        self.states = []
        for block, state in zip(self.blocks, states, strict=True):
            if isinstance(state, StateFile):
                state = {n: moved(f, block.device) for n, f in read_state(state).items()}
            self.states.append(BlockState(block.num_clients, state))

    def run(
        self, call: OpCall, number: int, clients: Tensor, inbox: Payload
    ) -> tuple[Payload, ReplyCost]:
        """Run an op at some clients of a block; return their reply and its cost.

        Clients with other fields in their state are called apart.

        Args:
            call: the op and what all its clients share.
            number: of the block.
            clients: (k,) int64 positions in the block, ascending.
            inbox: theirs.

        Raises:
            ProtocolError: the op broke a rule.
            OpError: it failed.
        """
        op = per_client(call.op) if self._single_client_ops else call.op
        reads, overwrites = op.__dict__.get("reads", ALL_NAMES), op.__dict__.get("overwrites", ())
        state, blocks, size = self.states[number], self.blocks[number], len(clients)
        if self._strict:
            inbox = self._send_over_wire(call.envelope, inbox, size)
        self._make_room(number)
        called, everyone = clients, blocks.num_clients
        if "idle_without_rows" in op.__dict__ and size < everyone and state.is_alike:
            # The others get no rows, so they do nothing: no state has to be copied for the call.
            called = torch.arange(everyone, device=clients.device)
            inbox = {name: spread(field, clients, everyone) for name, field in inbox.items()}
        groups, parts = state.groups(called), list[Payload]()
        is_alone = len(groups) == 1
        with metered(len(called)) as meter:
            for group in groups:
                is_whole = len(group) == everyone
                place = group if is_alone else torch.searchsorted(called, group)
                own_inbox = inbox if is_alone else take_all(inbox, place)
                old = state.all(overwrites) if is_whole else state.take(group, reads)
                # It may overwrite them: parts are copies, and blocks make their own.
                readable = {n: f for n, f in old.items() if n.startswith(reads)}
                block, cfg = blocks.take(group), self._cfg_of_round
                try:
                    step = step_of(op, cfg, block, readable, own_inbox, call.key)
                    with nullcontext() if is_alone else work_of(place):
                        new, reply = step[2](*step[0](*step[1]))
                except Exception as error:
                    if is_self_explanatory(error):
                        error.add_note(context(op, self._round, block, old, own_inbox))
                        raise
                    raise failure(op, self._round, block, old, own_inbox, error) from error
                new = check_results(op, len(group), old, new, reply, rows=call.rows)
                parts.append(reply)
                if is_whole:
                    state.replace(new, overwrites)
                else:
                    state.put(old, new, group, overwrites)
                del old, new
        if not is_alone:
            reply = join_in_order(parts, torch.cat(groups).argsort())
        if called is not clients:
            reply, meter = drop_idle_clients(reply, clients), meter.of_clients(clients)
        sizes, counts = frame_sizes(op.__name__, reply, size), count_sizes(reply, size)
        cost = ReplyCost(sizes, counts, meter.totals())
        if self._strict:
            reply = self._send_over_wire(call.answer, reply, size)
        return reply, cost

    def _make_room(self, number: int) -> None:
        """Release blocks of files, those first that were called longest ago, for one of them."""
        if size := self.blocks[number].num_bytes:
            self._in_memory[number] = size
            self._in_memory.move_to_end(number)
            while sum(self._in_memory.values()) > SHARD_BYTES and len(self._in_memory) > 1:
                self.blocks[self._in_memory.popitem(last=False)[0]].release()

    def _send_over_wire(self, envelope: Envelope, payload: Payload, clients: int) -> Payload:
        """Return the payload as the other end of a network gets it, encoded and decoded."""
        device = self.blocks[0].device
        frames = [encode(envelope, payload, position) for position in range(clients)]
        decoded = [decode(frame)[1] for frame in frames]
        joined = {name: concatenate([part[name] for part in decoded]) for name in decoded[0]}
        return {name: moved(_in_form_of_op(payload[name], f), device) for name, f in joined.items()}


def _in_form_of_op(sent: Field, received: Field) -> Field:
    """Return a received field as `Patched` if the op sent it so: frames carry it whole."""
    if isinstance(sent, Patched) and isinstance(received, Stacked):
        return sent.like(Stacked(received.t.to(sent.t.device)))
    return received


# --- The engine ----------------------------------------------------------------------------------


class _CalledClients(NamedTuple):
    """The clients of one block that a call goes to.

    Attributes:
        block: its number.
        positions: (k,) int64, of the clients in the federation.
        places_in_call: (k,) int64, which of the clients of the call they are.
        local: (k,) int64, of the clients in the block.
    """

    block: int
    positions: Tensor
    places_in_call: Tensor
    local: Tensor


class InProcess:
    """Runs ops on blocks of clients in this process.

    Args:
        cfg: first argument of every op.
        clients: all clients as one block, or in files.
        route: owner of each halo slot.
        block_size: most clients in one block; results do not depend on it beyond rounding.
        strict: send every payload through `encode` and `decode`, as a network would. Otherwise
            nothing is encoded, and sizes come from shapes; results and ledger are the same.
        compiled: fold replies with the compiled kernel, to the same bits.
        single_client_only: whether ops are written for one client: blocks then run them by
            `per_client`.
        secure: whether the server learns sums over clients only (`silograph.federation.secure`).
        privacy: noise of clients' updates; None: without differential privacy.

    Attributes:
        ids: names of the clients.
        route: who answers for each halo slot.
        away: names of absent clients: none, because all clients run in this process.
        left_out: clients that were left out, and why: none, because a failure ends the whole run.
        remembered: what an engine wants to find again after a resume: nothing.
    """

    def __init__(
        self,
        cfg: Any,
        clients: ClientBlock | ShardedClients,
        route: Route,
        block_size: int,
        *,
        strict: bool = False,
        compiled: bool = False,
        single_client_only: bool = False,
        secure: bool = False,
        privacy: UpdatePrivacy | None = None,
    ) -> None:
        self._noise = None if privacy is None else SimulatedNoise(privacy, secure=secure)
        self.ids, self.route, self.away = clients.ids, route, tuple[str, ...]()
        self.left_out, self.remembered = dict[str, str](), dict[str, Any]()
        self._strict, self._compiled, self._secure = strict, compiled, secure
        all_positions = torch.arange(clients.num_clients)
        members = all_positions.split(block_size)
        self._starts = torch.tensor([0, *itertools.accumulate(map(len, members))])
        whole = block_size >= clients.num_clients
        blocks: list[ClientBlock | ShardedClients] = [clients]
        if not whole:
            blocks = [clients.take(part) for part in members]
        self._device = clients.off.device
        self._host = BlockHost(cfg, blocks, strict=strict, single_client_only=single_client_only)
        self._positions = all_positions
        self._all_clients = self._select_clients(all_positions)
        self._account = Account(clients.num_clients)

    @property
    def ledger(self) -> Ledger:
        """What every call cost."""
        return self._account.ledger

    @property
    def executed(self) -> float:
        """Operations executed since this engine began, of all clients."""
        return self._account.executed

    def start_round(self, number: int) -> None:
        """Assign the calls from here on to this round."""
        self._account.start_round(number)
        self._host.start_round(number)

    def states(self) -> Sequence[State]:
        """Return the state of each block, for a checkpoint."""
        return self._host.export()

    def write_states(self, folder: Path, number: int) -> None:
        """Do nothing: the states are in this process, and go into the server's checkpoint."""

    def keep(self, number: int, committed: Sequence[int]) -> None:
        """Do nothing: the server's checkpoint already holds the state of every client."""

    def hand_over(self, number: int, weights: Payload) -> int:
        """Return the bytes that silos of their own would get."""
        del number
        return int(frame_sizes(RESULT, weights, len(self.ids)).sum())

    def restore(
        self,
        number: int,
        states: Sequence[State | StateFile],
        records: Sequence[Record],
        remembered: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Restore the states of a checkpoint and the ledger records up to it."""
        del number, remembered  # the first call of a round says which it is
        self._host.restore(states)
        self._host.start_round(0)
        self._account = Account(len(self.ids), records)

    def rejoin(self, away: AwayError) -> None:
        """Raise `away` again: clients of this process cannot come back."""
        raise away

    def close(self) -> None:
        """Do nothing: nothing was started."""

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
        allow_missing: bool = False,
    ) -> Payload:
        """Run `op` at the clients `to`; see `Federation.call`."""
        del allow_missing  # clients of this process are never away
        # 1. Send the inbox.
        envelope, positions, inbox = self._send(op, inbox, what, to)
        reply_kind = op.__dict__.get("reply_kind", what)
        answer_envelope = envelope if reply_kind is what else replace(envelope, kind=reply_kind)
        fold = self._reduction(reduce, answer_envelope, len(positions), rows=rows)
        takes_rows = rows or (fold is not None and fold.takes_rows)
        op_call = OpCall(op, envelope, answer_envelope, key, takes_rows)
        # 2. Run the op at each block, count what it costs, and fold its reply.
        replies, costs = list[Payload](), list[ReplyCost]()
        is_to_all = len(positions) == len(self.ids)
        targets = self._all_clients if is_to_all else self._select_clients(positions)
        for target in targets:
            part = inbox
            if len(targets) > 1:
                part = take_all(inbox, target.places_in_call)
            elif op.__dict__.get("overwrites"):  # it may keep what it gets, and write to it
                part = {n: f if isinstance(f, Shared) else copied(f) for n, f in inbox.items()}
            reply, cost = self._host.run(op_call, target.block, target.local, part)
            costs.append(cost)
            if self._noise is not None:
                names = [self.ids[position] for position in target.positions.tolist()]
                called, kind = len(positions), answer_envelope.kind
                reply = self._noise.release(op, kind, reply, names, key, called)
            state = self._host.states[target.block]
            if fold is not None:
                fold.add(reply, target.positions, state.holds)
            else:
                replies.append(self._checked_single(reply, op, rows=rows))
            del reply  # `join` frees what it has copied
        # 3. Record the costs.
        self._record_replies(answer_envelope, positions, costs, fold)
        if fold is not None:
            return fold.result()
        if len(replies) > 1 or self._strict:
            return join(replies)
        return _detach_from_state(replies[0], state)

    def _reduction(
        self, reduce: Reduce | None, answer: Envelope, called: int, *, rows: bool
    ) -> Reduction | SecureFold | None:
        """Return what folds the replies of a call to so many clients; None: nothing does."""
        if self._secure and not rows and reduce is not None:
            clients = len(self.ids)
            return SecureFold(reduce, answer.op, answer.kind, clients=clients, called=called)
        if reduce is None:
            return None
        return Reduction(reduce, len(self.ids), compiled=self._compiled)

    def _checked_single(self, reply: Payload, op: Op, *, rows: bool) -> Payload:
        """Return replies; raise `ProtocolError` where the server may learn sums only."""
        if self._secure and reply and not rows:
            weights_field(None, op.__name__)
        return reply

    def _record_replies(
        self,
        answer: Envelope,
        positions: Tensor,
        costs: Sequence[ReplyCost],
        fold: Reduction | SecureFold | None,
    ) -> None:
        """Record the replies of a call in the ledger."""
        works = [cost.work for cost in costs]
        if isinstance(fold, SecureFold):
            names = [self.ids[position] for position in positions.tolist()]
            self._account.up_summed(answer, positions, names, fold.size, works)
            return
        sizes, counts = (np.concatenate([cost[k] for cost in costs]) for k in (0, 1))
        self._account.up(answer, positions, sizes, counts, works)

    def _send(
        self, op: Op, inbox: Payload, what: Kind, to: Sequence[str] | None
    ) -> tuple[Envelope, Tensor, Payload]:
        """Check an inbox and count its bytes; return envelope, positions (k,), and what arrives."""
        positions = self._positions if to in (None, self.ids) else positions_of(self.ids, to)
        size, where = len(positions), f"inbox of {op.__name__}"
        envelope = self._account.open(op.__name__, what)
        check_fields(inbox, size, where, shared=True)
        self._account.down(envelope, positions, frame_sizes(op.__name__, inbox, size))
        if self._device.type != "cpu":
            inbox = {name: moved(field, self._device) for name, field in inbox.items()}
        return envelope, positions, inbox

    def _select_clients(self, positions: Tensor) -> list[_CalledClients]:
        """Return the clients of each block among those at `positions` (k,) int64, ascending."""
        places, device = torch.arange(len(positions)), self._device
        ends = torch.searchsorted(positions, self._starts).tolist()
        return [
            _CalledClients(
                block=number,
                positions=positions[a:b],
                places_in_call=places[a:b].to(device),
                local=(positions[a:b] - self._starts[number]).to(device),
            )
            for number, (a, b) in enumerate(itertools.pairwise(ends))
            if a < b
        ]


def _detach_from_state(reply: Payload, state: BlockState) -> dict[str, Field]:
    """Return the reply of one block in memory that calls do not write to.

    Rows of a whole block are large, so they are copied only where the clients keep them, too.
    """
    return {
        name: concatenate([field]) if isinstance(field, Patched) or state.holds(field.t) else field
        for name, field in reply.items()
    }
