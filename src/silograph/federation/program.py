"""The program of a run, fixed before it begins: ops, their order and their fields.

A silo derives the program from the config that it has agreed to and does nothing else, whoever asks
(`silograph.federation.program`). The server derives the same one and holds replies to it. A method
declares its part as `Calls`; `silograph.experiment.resolve.run_program` puts the program of a run
together.
"""

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import torch

from silograph.core.errors import PolicyError, ProtocolError, mistake
from silograph.core.key import Key
from silograph.core.kinds import RECEIVED, Kind
from silograph.core.payload import Field, Payload, Ragged, State
from silograph.core.text import count_of
from silograph.federation.base import Op, reply_kind
from silograph.federation.field_specs import Extent, FieldSpec, FieldSpecs, check_against
from silograph.federation.frame import DIMENSION, FIELD, HEADER

BLANK = -1  # the round before set-up, which is round 0: the state is empty


@dataclass(frozen=True, eq=False)
class Call:
    """A call of the program.

    Attributes:
        op: what is called.
        what: kind of the call.
        key: of its draws.
        inbox_specs: fields of the inbox.
        reply_specs: fields of the reply.
        problem: given an inbox and its reply, both with the declared fields, returns which numbers
            of the reply contradict each other, or None.
    """

    op: Op
    what: Kind
    key: Key
    inbox_specs: FieldSpecs = field(default_factory=dict)
    reply_specs: FieldSpecs = field(default_factory=dict)
    problem: Callable[[Payload, Payload], str | None] | None = None

    @property
    def reply_kind(self) -> Kind:
        """Kind of the reply."""
        return reply_kind(self.op, self.what)

    @property
    def scores_inbox(self) -> bool:
        """Whether the weights of the inbox are scored before clients train from them."""
        return any(name.startswith(RECEIVED) for name in self.reply_specs)

    @property
    def rows(self) -> bool:
        """Whether the reply has rows of single nodes."""
        return any(spec.form is Ragged for spec in self.reply_specs.values())

    def check_inbox(self, inbox: Payload, extent: Extent, state: State) -> None:
        """Raise `ProtocolError` unless an inbox has the call's fields, with finite numbers.

        Args:
            inbox: what came.
            extent: of the clients.
            state: theirs.
        """
        where = f"inbox of {self.op.__name__}"
        check_against(inbox, self.inbox_specs, extent, where, others={"state": state}, finite=True)

    def check_reply(
        self, inbox: Payload, reply: Payload, extent: Extent, *, own: bool = False
    ) -> None:
        """Raise `ProtocolError` unless the reply to an inbox has the fields of the call.

        NaN passes: that of a client without weight counts for nothing, and where all have it
        training has diverged.

        Args:
            inbox: what was sent.
            reply: what came, or is to be sent.
            extent: of the clients.
            own: whether this end has made the reply: then its shapes are checked, no values.
        """
        where = f"reply of {self.op.__name__}"
        check_against(
            reply, self.reply_specs, extent, where, others={"inbox": inbox}, values=not own
        )
        problem = None if own or self.problem is None else self.problem(inbox, reply)
        if problem is not None:
            raise ProtocolError(
                f"expected {problem} in {where}", **mistake("field-out-of-bounds", None, where)
            )


@dataclass(frozen=True, eq=False)
class Maybe:
    """Steps that may be left out, all of them: those of clients that are selected, for example.

    They must not begin with the call that may follow them: then nobody could tell which it is.
    """

    steps: "Steps"


@dataclass(frozen=True, eq=False)
class Closing:
    """Steps that end the run: they may be left out, and nothing follows them.

    The last model is scored by them, which no later round trains from.
    """

    steps: "Steps"


@dataclass(frozen=True)
class Over:
    """Marks that the steps of a `Closing` have begun: the run has no later call."""


@dataclass(frozen=True, eq=False, init=False)
class Either:
    """One of several continuations: that of clients that ask, say, or of those that only answer.

    No two of them may begin with the same call: then nobody could tell which it is.
    """

    ways: "tuple[Steps, ...]"

    def __init__(self, *ways: "Steps") -> None:
        object.__setattr__(self, "ways", ways)


@dataclass(frozen=True, eq=False)
class Repeat:
    """The same steps again and again, 0 to `most` times; however many, it takes no more memory."""

    steps: "Steps"
    most: int


Steps = Call | Maybe | Closing | Over | Either | Repeat | tuple["Steps", ...]


def up_to(most: int, steps: Callable[[int], Steps]) -> Steps:
    """Return steps that are made again as often as a knob says: 0 to `most` times, in order.

    Args:
        most: by the knob's declared range.
        steps: of one time, by its number from 0; keys or ops must tell them apart.
    """
    steps_left: Steps = ()
    for number in reversed(range(most)):
        steps_left = Maybe((steps(number), steps_left))
    return steps_left


@dataclass(frozen=True)
class OtherNetwork:
    """A network besides the model that ops of a method train: what bounds their work.

    Attributes:
        shapes: of its weights, by name.
        steps: that one call takes at most.
        made: rows that it makes for each row at most; the model meets these, too.
    """

    shapes: Mapping[str, tuple[int, ...]]
    steps: int
    made: int = 0


@dataclass(frozen=True)
class AlikeRounds:
    """`Calls.round` of a method whose rounds make the same calls, but for their keys.

    Attributes:
        steps: the calls of any round, as `Calls.round`.
    """

    steps: Callable[[Any, int, Key], Steps]

    def __call__(self, cfg: Any, t: int, key: Key) -> Steps:
        """Return the calls of a round."""
        return self.steps(cfg, t, key)


@dataclass(frozen=True)
class Calls:
    """The calls of a method; the arguments are those of its `init` and `round`.

    Attributes:
        setup: the calls of `Method.init`.
        round: the calls of `Method.round`, given the number of the round; `AlikeRounds` where
            that changes nothing.
        state: what a client's state holds between rounds.
        server_model: whether the server has a model, which clients score; a function of the
            method's config where its options decide.
        other_network: what ops train besides the model, a function of the method's config; None:
            nothing.
    """

    setup: Callable[[Any, Key], Steps]
    round: Callable[[Any, int, Key], Steps]
    state: Callable[[Any], FieldSpecs]
    server_model: bool | Callable[[Any], bool] = True
    other_network: Callable[[Any], OtherNetwork] | None = None

    def scores_server(self, cfg: Any) -> bool:
        """Return whether clients score a model of the server's."""
        return self.server_model(cfg) if callable(self.server_model) else self.server_model


@dataclass(frozen=True)
class ScoringRules:
    """Rules of the weights that a client scores, which it can enforce against its server.

    Attributes:
        next_trains: whether the weights that are sent to be scored are those that the next round
            trains from.
        bounded: whether a client scores no model but those that it trains from, and the last ones.
        closing: how many models it scores at most when the run is over, which no round trains from.
        in_setup: how many models set-up has it score.
        in_rounds: how many different models all rounds have it score at most; None: any number.
    """

    next_trains: bool = False
    bounded: bool = False
    closing: int = 1
    in_setup: int = 0
    in_rounds: int | None = None


@dataclass(frozen=True)
class Program:
    """The calls of a whole run.

    Attributes:
        setup: round 0.
        round: steps of a round by its number, from 1.
        rounds: how many there are.
        state: what a client's state holds between rounds.
        result: what clients get when the run is over; it is no call, and not in the ledger.
        scoring: what clients check of the weights that they score.
    """

    setup: Steps
    round: Callable[[int], Steps]
    rounds: int
    state: FieldSpecs
    result: FieldSpecs = field(default_factory=dict)
    scoring: ScoringRules = ScoringRules()

    def check_number(self, number: int) -> None:
        """Raise `ProtocolError` where there is no such round."""
        if not BLANK <= number <= self.rounds:
            raise ProtocolError(
                f"expected a round up to {self.rounds}, got {number}",
                **mistake("call-not-agreed", number),
            )

    def steps(self, number: int) -> Steps:
        """Return the steps of a round; BLANK has none.

        Raises:
            ProtocolError: there is no such round.
        """
        self.check_number(number)
        if number == BLANK:
            return ()
        return self.setup if number == 0 else self.round(number)


def calls_of(steps: Steps) -> Iterator[Call]:
    """Yield all calls that steps may make, in order; what is repeated once."""
    match steps:
        case Call():
            yield steps
        case Maybe(inner) | Closing(inner):
            yield from calls_of(inner)
        case Over():
            return
        case Either():
            yield from calls_of(steps.ways)
        case Repeat(inner, most):
            yield from calls_of(inner) if most else ()
        case _:
            for step in steps:
                yield from calls_of(step)


def can_end(steps: Steps) -> bool:
    """Whether the steps can end here without a further call."""
    match steps:
        case Call():
            return False
        case Maybe() | Repeat() | Closing() | Over():
            return True
        case Either():
            return any(map(can_end, steps.ways))
        case _:
            return all(map(can_end, steps))


def is_certain(steps: Steps, is_wanted: Callable[[Call], bool]) -> bool:
    """Whether at least one call of a kind must be made before the steps can end."""
    match steps:
        case Call():
            return is_wanted(steps)
        case Maybe() | Repeat() | Closing() | Over():
            return False
        case Either():
            return all(is_certain(way, is_wanted) for way in steps.ways)
        case _:
            return any(is_certain(step, is_wanted) for step in steps)


def is_over(steps: Steps) -> bool:
    """Whether a `Closing` was begun before these steps, which remain of a round."""
    return isinstance(steps, Over) or (isinstance(steps, tuple) and any(map(is_over, steps)))


def possible_calls(steps: Steps) -> Iterator[tuple[Call, Steps]]:
    """Yield each call that may come next, and what follows it."""
    match steps:
        case Call():
            yield steps, ()
        case Maybe(inner):
            yield from possible_calls(inner)
        case Closing(inner):
            for call, remaining in possible_calls(inner):
                yield call, (remaining, Over())
        case Over():
            return
        case Either():
            for way in steps.ways:
                yield from possible_calls(way)
        case Repeat(inner, most):
            for call, remaining in possible_calls(inner) if most else ():
                yield call, (remaining, Repeat(inner, most - 1))
        case _:
            for place, step in enumerate(steps):
                for call, remaining in possible_calls(step):
                    yield call, (remaining, *steps[place + 1 :])
                if not can_end(step):
                    return


# --- course --------------------------------------------------------------------------------------
# The position of a run in its program: which call may come next, and which must precede others.
#
# Both ends keep a course. A silo does what comes next in it and nothing else, whoever asks.


MOST_PASSED = 1000  # rounds in a row without a call to a client: each is looked at
MOST_TIMES = 8  # that a round is begun: the first, and those in which it is done again


class Course:
    """The position of a run in its program; both ends keep one.

    Args:
        program: of the run.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._round = BLANK
        self._remaining: Steps = ()
        self._is_restored = False  # by LOAD: the others may have done further rounds meanwhile
        self._has_failed_call = False  # in this round
        self._num_begun: Counter[int] = Counter()
        self._closed: int | None = None  # the round after which the last model was scored

    def check_number(self, number: int) -> None:
        """Raise `ProtocolError` where the run has no such round."""
        self.program.check_number(number)

    def jump_to(self, number: int) -> None:
        """Take a round as complete: the next call belongs to a later one.

        It is the next round, or one after it if the others continued without this client.
        """
        self.check_number(number)
        self._round, self._remaining, self._is_restored, self._has_failed_call = (
            number,
            (),
            True,
            False,
        )

    @property
    def is_whole(self) -> bool:
        """Whether no call of the round has to come any more."""
        return not self._has_failed_call and can_end(self._remaining)

    def mark_failed(self) -> None:
        """Mark the latest call as failed: only `jump_to` can continue from here."""
        self._has_failed_call = True

    def _check_no_failed_call(self) -> None:
        if self._has_failed_call:
            raise ProtocolError(
                f"expected LOAD after a call of round {self._round} that has failed, got another",
                **mistake("call-not-agreed", self._round),
            )

    def check_whole(self) -> None:
        """Raise `ProtocolError` where calls of the round are still to come."""
        self._check_no_failed_call()
        if not can_end(self._remaining):
            raise ProtocolError(
                f"expected {_names(self._remaining)} before round {self._round} is over",
                **mistake("call-not-agreed", self._round),
            )

    def check_state(self, state: State, extent: Extent, *, own: bool = False) -> None:
        """Raise `ProtocolError` unless a state is valid at the end of a round.

        Args:
            state: of the clients.
            extent: of them.
            own: whether this process has made it: then shapes are checked, no values.
        """
        where = "the state of a round"
        check_against(state, self.program.state, extent, where, finite=not own, values=not own)

    def result_of(self, fields: Payload) -> Payload:
        """Return those of the server's weights that clients get as the result."""
        return {name: fields[name] for name in self.program.result}

    def check_result(self, number: int, fields: Payload, extent: Extent) -> None:
        """Raise `ProtocolError` unless the server may send this as the result of the run."""
        self.check_whole()
        if self._round < 1:
            raise ProtocolError(
                "expected a round before the result of the run, got none",
                **mistake("call-not-agreed", number),
            )
        if not 0 < number <= self.program.rounds:
            raise ProtocolError(
                f"expected a best round from 1 to {self.program.rounds}, got {number}",
                **mistake("call-not-agreed", number),
            )
        check_against(fields, self.program.result, extent, "the result of the run", finite=True)
        self._check_may_be_over(number)

    def _check_may_be_over(self, number: int) -> None:
        """Raise `ProtocolError` for a round that cannot be over without calls to this client.

        One that was brought back to a state may have been away in any number of rounds. Of others
        only so many are looked at, as the server chooses how many there are.
        """
        last = self._round if self._is_restored else min(number, self._round + MOST_PASSED)
        for between in range(self._round + 1, last + 1):
            if not can_end(self.program.steps(between)):
                raise ProtocolError(
                    f"expected calls of round {between} before the result of the run, got round "
                    f"{number} as the best one",
                    **mistake("call-not-agreed", number),
                )

    def find(self, number: int, op: Op, what: Kind, key: Key) -> tuple[Call, Steps]:
        """Find the next call in the program, and the steps after it; see `advance`.

        Raises:
            ProtocolError: the program has another call here.
        """
        self._check_no_failed_call()
        remaining = self._remaining if number == self._round else self._steps_of_round(number)
        matches = [
            (c, after) for c, after in possible_calls(remaining) if c.op is op and c.what == what
        ]
        for call, after in matches:
            if call.key == key:
                return call, after
        if matches:
            raise ProtocolError(
                f"expected {op.__name__} with the key that the config's seed gives, got another",
                **mistake("call-not-agreed", number),
            )
        raise ProtocolError(
            f"expected {_names(remaining)} in round {number}, as agreed, got {_name(op, what)}",
            **mistake("call-not-agreed", number),
        )

    def _steps_of_round(self, number: int) -> Steps:
        """Return the steps of a later round, once those before it may be over."""
        steps = self.program.steps(number)
        if self._closed is not None and number > self._closed:
            raise ProtocolError(
                f"expected no call after the closing evaluation of round {self._closed}, got one "
                f"of round {number}: start the silo again to go on",
                **mistake("call-not-agreed", number),
            )
        if number < self._round:
            raise ProtocolError(
                f"expected round {self._round} or a later one, got {number}",
                **mistake("call-not-agreed", number),
            )
        self.check_whole()
        if self._is_restored:
            return steps
        if number - self._round > MOST_PASSED:
            raise ProtocolError(
                f"expected one of the next {MOST_PASSED} rounds after {self._round}, got {number}",
                **mistake("call-not-agreed", number),
            )
        for between in range(self._round + 1, number):
            if not can_end(self.program.steps(between)):
                raise ProtocolError(
                    f"expected calls of round {between}, got one of {number}",
                    **mistake("call-not-agreed", number),
                )
        return steps

    def closes(self, number: int, after: Steps) -> bool:
        """Return whether no later round may follow a call, by its round and what follows it."""
        return number == self.program.rounds or is_over(after)

    def advance(self, number: int, after: Steps) -> bool:
        """Advance past a call of a round; return whether the round begins with it.

        Raises:
            ProtocolError: the round was begun too often.
        """
        begins = number != self._round
        if begins:
            if self._num_begun[number] == MOST_TIMES:
                raise ProtocolError(
                    f"expected round {number} at most {MOST_TIMES} times, got it once more: start "
                    "the silo again to go on",
                    **mistake("call-not-agreed", number),
                )
            self._num_begun[number] += 1
        self._round, self._remaining, self._is_restored = number, after, False
        if is_over(after):
            self._closed = number
        return begins


def _names(steps: Steps) -> str:
    """Return what may come next, for a message."""
    names = [_name(call.op, call.what) for call, _ in possible_calls(steps)]
    return " or ".join([*names, *["the next round"] * can_end(steps)])


def _name(op: Op, what: Kind) -> str:
    return f"{op.__module__.rpartition('.')[2]}.{op.__name__} ({what.value})"


# --- What a silo checks of the weights that it is sent to score ----------------------------------
#
# Scores say something about the labels of test nodes. A server that had arbitrary weights scored,
# as often as it likes, could find these labels out. So a silo compares the weights of the
# messages, whatever the server says of them:
#
# 1. Where the model of a round is sent to be scored, a client that trains in the next round must
#    train from the same weights.
# 2. The calls that close the run score one model, which no round trains from. It is two with
#    `evaluate_clients=participants`, where all clients score the best model in the end, too.
# 3. A silo scores at most as many different models as there are different weights that it has
#    trained from, and at most as many as the run has rounds. Those that the run is closed with
#    come on top, and one more where set-up scores the first model.
#
# The first rule is left out after a LOAD, since the rounds between may have gone on without the
# silo, or are repeated without another one. The others hold always, however often rounds are
# repeated: the same weights again count once. All of it is remembered while the silo's process
# runs.
#
# Where a client scores models that others train from (`evaluate_clients=all` with partial
# participation) it cannot check the last two rules, nor the first one if models are scored on
# receipt. A silo's policy decides whether it agrees to such a run.


WEIGHTS = "weights/", "scale/weights/"  # begin the names of weights as they travel


@dataclass(frozen=True)
class _Scored:
    """Weights that were sent to be scored.

    Attributes:
        number: the round.
        digest: of the weights.
    """

    number: int
    digest: bytes


class ScoredWeights:
    """Digests of the weights that a silo has scored and of those that it has trained from.

    Args:
        rules: which rules the run's program allows to check.
    """

    def __init__(self, rules: ScoringRules) -> None:
        self._rules = rules
        self._scored: set[bytes] = set()
        self._trained: set[bytes] = set()
        self._closing: set[bytes] = set()  # that were scored by closing calls only
        self._next: _Scored | None = None  # what the next training has to start from
        self._key = secrets.token_bytes(16)  # of `digest`

    def digest(self, inbox: Mapping[str, Field]) -> bytes | None:
        """Return a digest of the weights in a message; None: it has none.

        It is GMAC (NIST SP 800-38D), in a fraction of the time of SHA-256. Its key and the digests
        never leave this object, so a server cannot construct two models with the same digest.
        Without the package `cryptography` it is SHA-256.
        """
        weights = {name: field for name, field in inbox.items() if name.startswith(WEIGHTS)}
        if not weights:
            return None
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError:  # real silos have it; sessions in one process may not
            return digest_of_fields(weights)
        digest = Cipher(algorithms.AES(self._key), modes.GCM(bytes(12))).encryptor()
        for part in _parts_of(weights):
            digest.authenticate_additional_data(part)
        digest.finalize()
        return digest.tag

    def check(self, call: Call, number: int, digest: bytes | None, *, closes: bool = False) -> None:
        """Raise `PolicyError` where weights are scored, or trained from, that may not be.

        Args:
            call: of the program.
            number: of the round.
            digest: of the weights in the message, see `digest`.
            closes: whether no later round may follow the call (`Course.closes`).
        """
        if digest is None:
            return
        evaluates = call.what is Kind.EVALUATION
        if not evaluates:
            self._check_start(number, digest)
        if (evaluates or call.scores_inbox) and self._rules.bounded:
            trained = self._trained if evaluates else self._trained | {digest}
            self._check_scored(number, digest, len(trained), closes=evaluates and closes)

    def _check_start(self, number: int, digest: bytes) -> None:
        """Raise `PolicyError` where a round trains from other weights than were scored before."""
        last = self._next
        if last is None or number != last.number + 1 or not self._rules.next_trains:
            return
        if digest != last.digest:
            raise PolicyError(
                f"expected round {number} to train from the weights that were scored after "
                f"round {last.number}, got other weights: the silo leaves the run"
            )

    def _check_scored(self, number: int, digest: bytes, trained: int, *, closes: bool) -> None:
        """Raise `PolicyError` for a further model to score where there may be no more of them."""
        if digest in self._scored:
            return
        rules = self._rules
        if closes and len(self._closing) >= rules.closing:
            raise PolicyError(
                f"expected {count_of(rules.closing, 'model')} to be scored when the run is over, "
                f"got one more in round {number}: the silo leaves the run; start it again to go on"
            )
        rounds = trained if rules.in_rounds is None else min(trained, rules.in_rounds)
        most = rounds + rules.closing + rules.in_setup
        if len(self._scored) >= most:
            raise PolicyError(
                f"expected at most {count_of(most, 'model')} to be scored after training from "
                f"{trained} different ones, got one more in round {number}: the silo leaves the "
                "run; start it again to go on"
            )

    def record(
        self, call: Call, number: int, digest: bytes | None, *, closes: bool = False
    ) -> None:
        """Remember a call that was answered; the arguments are those of `check`."""
        if digest is None:
            return
        if call.what is Kind.EVALUATION:
            if closes and digest not in self._scored:
                self._closing.add(digest)
            self._scored.add(digest)
            self._next = _Scored(number, digest)
        else:
            self._trained.add(digest)
            self._next = None
            if call.scores_inbox:
                self._scored.add(digest)

    def forget_last(self) -> None:
        """Allow that the next training starts from other weights than those scored last."""
        self._next = None


def digest_of_fields(fields: Mapping[str, Field]) -> bytes:
    """Return a digest (32 bytes) of fields.

    It is SHA-256, which processors have instructions for: half the time of BLAKE2b.
    """
    digest = sha256()
    for part in _parts_of(fields):
        digest.update(part)
    return digest.digest()


def _parts_of(fields: Mapping[str, Field]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of fields, sorted by name: name, dtype, shape and values of each tensor."""
    for name in sorted(fields):
        values = fields[name]
        parts = (values.t, values.off) if isinstance(values, Ragged) else (values.t,)
        for t in parts:
            yield f"{name} {t.dtype} {tuple(t.shape)} ".encode()
            yield t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


# --- What calls will cost: frames are as long as their fields say ---------------------------------


NO_ROWS: Mapping[str, int] = MappingProxyType({})
NOTHING: Mapping[str, Mapping[str, Field | FieldSpec]] = MappingProxyType({})
MOST_DEPTH = 8  # fields whose rows are counted by those of another one, one after the other


def bytes_of_steps(steps: Steps, dtype: torch.dtype) -> int | None:
    """Return the bytes of all calls of some steps at one client, evaluation apart.

    Of calls that may be left out or repeated it is the most that they can cost. None if unknown,
    as the number of rows of a field depends on the client's nodes or on an op.

    Args:
        steps: of a round.
        dtype: of floating point values in the run.
    """
    unknown_extent = Extent(1, dtype, {})
    directions = sent_sizes(steps, unknown_extent, {}), received_sizes(steps, unknown_extent, {})
    training_sizes = (
        size for sizes in directions for kind, size in sizes.items() if kind != Kind.EVALUATION
    )
    return sum(training_sizes, ZERO).most


def bytes_of_frame(
    op: str, specs: FieldSpecs, dtype: torch.dtype, rows: Mapping[str, int] = NO_ROWS
) -> int | None:
    """Return the bytes of one client's frame of fields as they are declared, None if unknown.

    Args:
        op: its name.
        specs: of the fields.
        dtype: of floating point values in the run.
        rows: of fields that have rows, by name, where they are known.
    """
    size = HEADER.size + len(op.encode())
    for name, spec in specs.items():
        has_rows = spec.form is Ragged
        if None in spec.shape or (has_rows and name not in rows):
            return None
        values = math.prod(n or 0 for n in spec.shape) * (rows[name] if has_rows else 1)
        size += FIELD.size + len(name.encode()) + DIMENSION.size * (len(spec.shape) + has_rows)
        size += values * (spec.dtype or dtype).itemsize
    return size


@dataclass(frozen=True)
class SizeBound:
    """Bounds of a number of bytes.

    Attributes:
        least: that it takes in any case.
        most: that it can take; None if unknown.
    """

    least: int = 0
    most: int | None = 0

    def __add__(self, other: "SizeBound") -> "SizeBound":
        """Return the bound of both together."""
        most = None if self.most is None or other.most is None else self.most + other.most
        return SizeBound(self.least + other.least, most)

    def times(self, most: int) -> "SizeBound":
        """Return the bound of 0 to `most` repetitions."""
        return SizeBound(0, None if self.most is None else self.most * most)

    def either(self, other: "SizeBound") -> "SizeBound":
        """Return the bound of one of the two."""
        is_bounded = self.most is not None and other.most is not None
        most = max(self.most or 0, other.most or 0) if is_bounded else None
        return SizeBound(min(self.least, other.least), most)


ZERO = SizeBound()
SizesByKind = Mapping[Kind, SizeBound]


def sent_sizes(steps: Steps, extent: Extent, state: FieldSpecs) -> SizesByKind:
    """Return what one client sends in some steps, by kind of the reply; scores are evaluation.

    Args:
        steps: of a round.
        extent: of that client.
        state: what its state holds; see `Program`.
    """

    def by_kind(call: Call) -> SizesByKind:
        scores = {n: spec for n, spec in call.reply_specs.items() if n.startswith(RECEIVED)}
        others = {n: spec for n, spec in call.reply_specs.items() if n not in scores}
        sizes = {call.reply_kind: _bound_of(call, others, extent, state)}
        if scores:
            whole, without_score = (
                _bound_of(call, call.reply_specs, extent, state),
                sizes[call.reply_kind],
            )
            is_bounded = whole.most is not None and without_score.most is not None
            most = (whole.most or 0) - (without_score.most or 0) if is_bounded else None
            score = SizeBound(whole.least - without_score.least, most)
            sizes[Kind.EVALUATION] = sizes.get(Kind.EVALUATION, ZERO) + score
        return sizes

    return _sizes(steps, by_kind)


def received_sizes(steps: Steps, extent: Extent, state: FieldSpecs) -> SizesByKind:
    """Return bytes that a client receives in some steps; see `sent_sizes`."""
    return _sizes(steps, lambda call: {call.what: _bound_of(call, call.inbox_specs, extent, state)})


def _bound_of(call: Call, specs: FieldSpecs, extent: Extent, state: FieldSpecs) -> SizeBound:
    others = {"inbox": call.inbox_specs, "state": state}
    return frame_bound(call.op.__name__, specs, extent, others)


def _sizes(steps: Steps, of_call: Callable[[Call], SizesByKind]) -> SizesByKind:
    match steps:
        case Call():
            return of_call(steps)
        case Maybe(inner) | Closing(inner):
            return {kind: size.times(1) for kind, size in _sizes(inner, of_call).items()}
        case Over():
            return {}
        case Repeat(inner, most):
            return {kind: size.times(most) for kind, size in _sizes(inner, of_call).items()}
        case Either():
            return _merged([_sizes(way, of_call) for way in steps.ways], SizeBound.either)
        case _:
            return _merged([_sizes(step, of_call) for step in steps], SizeBound.__add__)


def _merged(
    parts: Sequence[SizesByKind], join: Callable[[SizeBound, SizeBound], SizeBound]
) -> SizesByKind:
    kinds = dict.fromkeys(kind for part in parts for kind in part)
    return {kind: reduce(join, [part.get(kind, ZERO) for part in parts]) for kind in kinds}


def frame_bound(
    op: str,
    specs: FieldSpecs,
    extent: Extent,
    others: Mapping[str, Mapping[str, Field | FieldSpec]] = NOTHING,
) -> SizeBound:
    """Return how long one client's frame of declared fields can be.

    Args:
        op: name of the op.
        specs: of the fields.
        extent: of that client.
        others: what their rows may be counted by besides, the `inbox` and the `state`: fields
            that are there, or their specs; see `field_specs.check_against`.
    """
    by = {"own": specs, "marked": specs, **others}
    rows = {n: _row_bound(spec, extent, by) for n, spec in specs.items() if spec.form is Ragged}
    most = {n: size.most for n, size in rows.items() if size.most is not None}
    least = bytes_of_frame(op, specs, extent.dtype, {n: size.least for n, size in rows.items()})
    return SizeBound(least or 0, bytes_of_frame(op, specs, extent.dtype, most))


def _row_bound(
    spec: FieldSpec,
    extent: Extent,
    others: Mapping[str, Mapping[str, Field | FieldSpec]],
    depth: int = 0,
) -> SizeBound:
    """Return how many rows one client's part of a field can have."""
    group, _, name = spec.rows.partition("/")
    bound = SizeBound(0, None)
    other = others.get(group, {}).get(name)
    if not name and group in extent.rows:
        bound = SizeBound(extent.rows[group][0], extent.rows[group][0])
    elif isinstance(other, Ragged):
        bound = SizeBound(int(other.off[-1]), int(other.off[-1]))
    elif isinstance(other, FieldSpec) and depth < MOST_DEPTH:
        bound = _row_bound(other, extent, others, depth + 1)
    return SizeBound(0, bound.most) if spec.fewer or group == "marked" else bound
