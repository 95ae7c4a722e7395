"""The session engine: carries calls to silos over their streams, and drops silos that fail.

Silos compute at the same time; their answers are taken in client order, never in that of arrival,
so sums have the bits of the in-process engine with `block_size = 1`. The ledger is the same, too.

A silo that is gone, late, or answers anything but what was asked is dropped from the round, with a
line in the log that says why. Sums and means go on without it; counts of an evaluation that it owes
are 0. It attaches again between rounds, with its state of the last round that it saw whole. A round
that cannot go on without silos waits for them, and is done again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError, StateError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, State, take_all
from silograph.core.text import counted
from silograph.federation.account import Account
from silograph.federation.base import NOTHING, AwayError, Op, Reduce, decoder_of, positions_of
from silograph.federation.check import check_fields
from silograph.federation.course import Course
from silograph.federation.field_specs import extent_at_server
from silograph.federation.frame import RESULT, Envelope, count_sizes, encode, frames
from silograph.federation.gather import Reduction
from silograph.federation.ledger import Ledger, Record
from silograph.federation.program import BLANK
from silograph.federation.session.answers import (
    UNUSABLE,
    Answer,
    cause_of,
    check_update,
    check_work,
    joined,
    read_answer,
    unusable,
    update_norm,
)
from silograph.federation.session.events import Cause, Event, EventCallback, What, log_event
from silograph.federation.session.failures import Failures
from silograph.federation.session.limits import Limits, longest_reply
from silograph.federation.session.message import CallBody, Type, call_body, facts_body
from silograph.federation.session.names import name_of
from silograph.federation.session.peer import LostError, Peer
from silograph.federation.session.usual_update import UsualUpdates
from silograph.graph.block.halo import Route

PAUSE = 0.1  # seconds between two looks at who is back
TRIES = 3  # for how often a round is done again: silos may be gone because of it
NO_NODES: Mapping[str, Mapping[str, int]] = MappingProxyType({})
Returned = Callable[[], Mapping[str, Peer]]


class Session:
    """A federation of silos.

    Args:
        peers: the silos by name in the order of every sum, all attached and ready for calls.
        route: who answers for each halo slot.
        ops: by qualified name.
        course: what the run does, call by call; silos know it, too, and replies are held to it.
        dtype: of floating point values in the run.
        limits: how many silos a call needs, and how long it waits for them.
        compiled: fold replies with the compiled kernel, to the same bits.
        returned: the silos that attached again since it was last asked, ready for calls.
        report: told of what happens.
        nodes: of each silo, by TRAIN, VAL, TEST, ROWS and EDGES, as it has reported them.
    """

    def __init__(
        self,
        peers: Mapping[str, Peer],
        route: Route,
        ops: Mapping[str, Op],
        course: Course,
        *,
        dtype: torch.dtype,
        limits: Limits,
        compiled: bool = False,
        returned: Returned = dict,
        report: EventCallback = log_event,
        nodes: Mapping[str, Mapping[str, int]] = NO_NODES,
    ) -> None:
        self._ids = tuple(peers)
        self._peers = dict(peers)
        self._route = route
        self._ops = ops
        self._course = course
        known = enumerate(nodes.get(name, {}) for name in self._ids)
        self._extents = [extent_at_server(route, c, dtype, of_it) for c, of_it in known]
        self._most_work = [limits.most_work(nodes.get(name, {})) for name in self._ids]
        self._failures = Failures(limits.failures)
        self._limits = limits
        self._compiled = compiled
        self._returned = returned
        self._report = report
        self._usual = UsualUpdates()
        self._account = Account(len(self._ids))
        self._round = 0
        self._begun = 0  # records before this round
        self._tries = 0  # of this round, besides the first
        self._called = dict.fromkeys(self._ids, BLANK)  # the last round with a call to a silo
        self._seen = dict.fromkeys(self._ids, BLANK)  # the same, of those that it saw whole
        self._spent = dict.fromkeys(self._ids, 0.0)  # seconds that each has taken in this round

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
        """Silos that calls go on without."""
        return tuple(name for name in self._ids if name not in self._peers)

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why silos are left out for good, by their names."""
        return self._failures.left_out

    @property
    def ledger(self) -> Ledger:
        """What every call cost."""
        return self._account.ledger

    @property
    def executed(self) -> None:
        """Nothing: silos report the work that they are charged for."""

    def start_round(self, number: int) -> None:
        """Say that the calls from here on belong to this round; silos that are back take part."""
        for name in self._peers:
            self._seen[name] = max(self._seen[name], self._called[name])
        if number != self._round:
            self._tries = 0
        self._course.go_to(number - 1)
        self._round = number
        self._begun = len(self.ledger)
        self._usual.begin_round()
        self._spent = dict.fromkeys(self._ids, 0.0)
        self._account.start_round(number)
        for name, peer in self._returned().items():
            self._attach(name, peer)

    def states(self) -> Sequence[State]:
        """Return nothing: silos keep their states."""
        return ()

    @property
    def remembered(self) -> Mapping[str, Any]:
        """The usual updates."""
        return self._usual.told

    def keep(self, number: int, committed: Sequence[int]) -> None:
        """Have the silos write down their state of a round; see `Federation.keep`."""
        numbers = dict.fromkeys(self._peers, number)
        self._drop_all(Type.KEEP, self._tell(Type.KEEP, numbers, committed=committed))
        if len(self._peers) < self._limits.least:
            there, least = len(self._peers), self._limits.least
            wanted = f"at least {counted(least, 'silo')} to write round {number} down"
            line = f"expected {wanted}, got {there}; "
            raise self._failures.lacking(line, self.away, least - there, len(self._ids))
        self._seen |= dict.fromkeys(self._peers, number)

    def hand_over(self, number: int, weights: Payload) -> int:
        """Send all silos the best round, and what they get of its weights; see `Engine`."""
        for name, peer in self._returned().items():
            self._attach(name, peer)
        fields = self._course.result_of(weights)
        frame = encode(Envelope(RESULT, Kind.WEIGHTS, number, 0), fields, 0)
        for peer in self._peers.values():
            peer.send(Type.RESULT, frame)
        for peer in self._peers.values():
            try:
                peer.answer(Type.DONE, self._limits.seconds)
            except LostError as error:
                self._report(Event(What.WITHOUT, peer.name, reason=str(error)))
        return len(frame) * len(self._peers)

    def restore(
        self,
        number: int,
        states: Sequence[State],
        records: Sequence[Record],
        remembered: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Have the silos go on from their state of a round, and the ledger from its records."""
        del states  # silos have them
        self._account = Account(len(self._ids), records)
        self._usual = UsualUpdates(remembered)
        self._course.go_to(number)
        self._seen = dict.fromkeys(self._ids, number)
        self._called = dict(self._seen)
        for name, error in self._tell(Type.LOAD, self._seen).items():
            kind = StateError if error.cause is Cause.REFUSED else ProtocolError
            raise kind(f"expected {name} to go on, got: {error}")

    def rejoin(self, away: AwayError) -> None:
        """Wait for silos that the round lacks, and bring all back to where it began.

        Raises:
            ProtocolError: they do not come back, or without the state that they had.
        """
        self._tries += 1
        if not self._limits.patience or self._tries > TRIES:
            raise away
        until = time.monotonic() + self._limits.patience
        for name in away.names:
            self._report(Event(What.WAITING, name, self._round, seconds=self._limits.patience))
        while not self._are_back(away):
            if time.monotonic() > until:
                raise ProtocolError(f"{away}; not back within {self._limits.patience:g} s")
            time.sleep(PAUSE)
        self._account = Account(len(self._ids), self.ledger.records[: self._begun])
        self._usual.begin_again()
        self._course.go_to(self._round - 1)
        self._called = dict(self._seen)
        self._spent = dict.fromkeys(self._ids, 0.0)
        self._drop_all(Type.LOAD, self._tell(Type.LOAD, self._seen))

    def _are_back(self, away: AwayError) -> bool:
        """Whether enough silos are; raise `ProtocolError` where they cannot be any more."""
        for name, peer in self._returned().items():
            self._attach(name, peer)
        there = sum(name in self._peers for name in away.names)
        self._failures.check_back(away.names, away.needed - there)
        return there >= away.needed

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The silos that are attached."""
        return self._peers

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
        rows = rows or bool(decoder_of(reduce).known)
        name = name_of(self._ops, op)
        envelope = self._account.open(op.__name__, what)
        positions = positions_of(self._ids, to)
        agreed, after = self._course.find(self._round, op, what, key)
        self._course.go_on(self._round, after)
        where = f"inbox of {op.__name__}"
        check_fields(inbox, len(positions), where, shared=True, patched=True)

        def most(place: int) -> int:
            asked_of = take_all(inbox, torch.tensor([place])) if agreed.rows else {}
            return longest_reply(agreed, asked_of, self._extents[int(positions[place])])

        asked = self._send(envelope, name, inbox, positions, key, most, rows=rows)

        def read(place: int, peer: Peer) -> Answer:
            answer = read_answer(place, self._answer(peer, Type.REPLY), envelope, reduce, rows=rows)
            asked_of = take_all(inbox, torch.tensor([place]))
            agreed.check_reply(asked_of, answer.reply, self._extents[int(positions[place])])
            position = int(positions[place])
            decoder_of(reduce).check_rows(answer.reply, position)
            bound = self._most_work[position]
            check_work(answer.meter, peer.took, None if bound is None else bound.of(asked_of))
            norm = update_norm(answer.reply, asked_of, reduce, position)
            check_update(norm, self._limits.update_norm)
            return replace(answer, update=norm)

        answers = self._hear(envelope, asked, reduce, read)
        if lacking and not answers:
            return {}
        if len(answers) < len(positions) and not lacking:
            summable = reduce is not None or (what is Kind.EVALUATION and not rows)
            self._check_enough(op, [a.place for a in answers], positions, summable=summable)
        places = torch.tensor([answer.place for answer in answers], dtype=torch.int64)
        up = np.array([answer.size for answer in answers])
        scores = np.array([int(count_sizes(answer.reply, 1)[0]) for answer in answers])
        meters = [answer.meter for answer in answers]
        self._account.up(envelope, positions[places], up, scores, meters)
        if reduce is None:
            return joined(answers, len(positions))
        reduction = Reduction(reduce, len(self._ids), compiled=self._compiled)
        for answer in answers:
            reduction.add(answer.reply, positions[answer.place : answer.place + 1])
        return reduction.result()

    def _send(
        self,
        envelope: Envelope,
        name: str,
        inbox: Payload,
        positions: Tensor,
        key: Key,
        most: Callable[[int], int],
        *,
        rows: bool,
    ) -> list[tuple[int, Peer]]:
        """Send a call to those of `positions` that are there; return them with their places.

        `most`: bytes that an answer may have, by the place of who answers.
        """
        asked: list[tuple[int, Peer]] = []
        sizes = []
        for place, frame in enumerate(frames(envelope, inbox, len(positions))):
            peer = self._peers.get(self._ids[int(positions[place])])
            if peer is not None:
                self._asks(peer, envelope.op, len(frame))
                body = call_body(CallBody(name, key, rows, frame))
                peer.send(Type.CALL, body, most(place))
                self._called[peer.name] = self._round
                asked.append((place, peer))
                sizes.append(len(frame))
        places = torch.tensor([place for place, _ in asked], dtype=torch.int64)
        self._account.down(envelope, positions[places], np.array(sizes, dtype=np.int64))
        return asked

    def _hear(
        self,
        envelope: Envelope,
        asked: Sequence[tuple[int, Peer]],
        reduce: Reduce | None,
        read: Callable[[int, Peer], Answer],
    ) -> list[Answer]:
        """Return the usable answers in client order; drop who has none."""
        heard: list[Answer] = []
        peers = dict(asked)
        for place, peer in asked:
            try:
                heard.append(read(place, peer))
            except ProtocolError as error:  # lost, or no reply
                self._drop(peer, envelope.op, str(error), cause_of(error))
        bad = unusable(heard, reduce, self._usual.of(envelope.op))
        for place, cause in bad.items():
            reason = f"expected a reply of {envelope.op}, got one with {UNUSABLE[cause]}"
            self._drop(peers[place], envelope.op, reason, cause)
        usable = [answer for answer in heard if answer.place not in bad]
        self._usual.add(envelope.op, [answer.update for answer in usable])
        return usable

    def _answer(self, peer: Peer, kind: Type) -> bytes | memoryview:
        """Return a silo's answer; raise `LostError` where there is none in time."""
        seconds = self._limits.seconds
        left = None if seconds is None else seconds - self._spent[peer.name]
        try:
            body = peer.answer(kind, left)
        except LostError as error:
            if error.cause is not Cause.LATE:
                raise
            line = f"expected its answers of a round within {seconds:g} s, got too few"
            raise LostError(line, Cause.LATE) from None
        self._spent[peer.name] += peer.took
        return body

    def _check_enough(
        self, op: Op, places: Sequence[int], positions: Tensor, *, summable: bool
    ) -> None:
        """Raise `ProtocolError` where a call cannot go on without the silos that are missing."""
        here = set(places)
        names = [self._ids[p] for i, p in enumerate(positions.tolist()) if i not in here]
        if not summable:
            raise self._failures.of_call(op.__name__, names, len(self._ids))
        least = min(self._limits.least, len(positions))
        if len(places) < least:
            wanted = f"at least {counted(least, 'silo')} to answer {op.__name__}"
            line = f"expected {wanted}, got {len(places)}; "
            raise self._failures.lacking(line, names, least - len(places), len(self._ids))

    def _asks(self, peer: Peer, op: str, size: int | None = None) -> None:
        self._report(Event(What.ASKED, peer.name, self._round, op=op, bytes=size))

    def _drop(self, peer: Peer, op: str, reason: str, cause: Cause) -> None:
        event = Event(What.DROPPED, peer.name, self._round, op=op, cause=cause, reason=reason)
        self._report(event)
        del self._peers[peer.name]
        last = self._failures.add(peer.name, reason, cause)
        if last is not None:
            self._report(Event(What.LEFT_OUT, peer.name, self._round, reason=last))
        if cause is Cause.GONE:
            peer.close()
        else:
            peer.dismiss(reason)

    def _attach(self, name: str, peer: Peer) -> None:
        """Take a silo in again, with its state of the last round that it saw whole."""
        if name in self.left_out:
            peer.dismiss(self.left_out[name])
            return
        number = self._seen[name]
        try:
            peer.ask(Type.LOAD, {"round": number}, self._limits.seconds)
        except LostError as error:
            self._report(Event(What.UNFIT, name, self._round, reason=str(error)))
            self._failures.unfit(name, str(error), error.cause)
            peer.dismiss(str(error))
            return
        self._report(Event(What.RETURNED, name, number))
        self._peers[name] = peer
        self._called[name] = number
        self._failures.back(name)

    def _tell(
        self, kind: Type, numbers: Mapping[str, int], **facts: Sequence[int]
    ) -> dict[str, LostError]:
        """Tell all silos something of a round, at the same time; return who did not do it."""
        failed = {}
        for name, peer in self._peers.items():
            self._asks(peer, kind.name.lower())
            peer.send(kind, facts_body({"round": numbers[name], **facts}))
        for name, peer in self._peers.items():
            try:
                self._answer(peer, Type.DONE)
            except LostError as error:
                failed[name] = error
        return failed

    def _drop_all(self, kind: Type, failed: Mapping[str, LostError]) -> None:
        for name, error in failed.items():
            self._drop(self._peers[name], kind.name.lower(), str(error), error.cause)
