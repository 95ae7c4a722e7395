"""What a run calls at its clients, known before it begins: ops, their order and their fields.

A silo derives the program from the config that it has agreed to and does nothing else, whoever asks
(`silograph.federation.course`). The server derives the same one and holds replies to it. A method
declares its part as `Calls`; `silograph.experiment.resolve.run_program` puts the program of a run
together.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import RECEIVED, Kind
from silograph.core.payload import Payload, Ragged, State
from silograph.federation.base import Op
from silograph.federation.field_specs import Extent, FieldSpecs, check_against

BLANK = -1  # the round before set-up, which is round 0: the state is empty


@dataclass(frozen=True, eq=False)
class Call:
    """A call of the program.

    Attributes:
        op: what is called.
        what: kind of the call.
        key: of its draws.
        takes: fields of the inbox.
        gives: fields of the reply.
        problem: says of an inbox and its reply, of declared fields both, what numbers of the reply
            cannot be together, or None.
    """

    op: Op
    what: Kind
    key: Key
    takes: FieldSpecs = field(default_factory=dict)
    gives: FieldSpecs = field(default_factory=dict)
    problem: Callable[[Payload, Payload], str | None] | None = None

    @property
    def scores_inbox(self) -> bool:
        """Whether the weights of the inbox are scored before clients train from them."""
        return any(name.startswith(RECEIVED) for name in self.gives)

    @property
    def rows(self) -> bool:
        """Whether the reply has rows of single nodes."""
        return any(spec.form is Ragged for spec in self.gives.values())

    def check_inbox(self, inbox: Payload, extent: Extent, state: State) -> None:
        """Raise `ProtocolError` unless an inbox is what the call takes, in finite numbers.

        Args:
            inbox: what came.
            extent: of the clients.
            state: theirs.
        """
        where = f"inbox of {self.op.__name__}"
        check_against(inbox, self.takes, extent, where, others={"state": state}, finite=True)

    def check_reply(
        self, inbox: Payload, reply: Payload, extent: Extent, *, own: bool = False
    ) -> None:
        """Raise `ProtocolError` unless the reply to an inbox is what the call gives.

        NaN passes: that of a client without weight counts for nothing, and where all have it
        training has diverged.

        Args:
            inbox: what was sent.
            reply: what came, or is to be sent.
            extent: of the clients.
            own: whether this end has made the reply: then its shapes are checked, no values.
        """
        where = f"reply of {self.op.__name__}"
        check_against(reply, self.gives, extent, where, others={"inbox": inbox}, values=not own)
        problem = None if own or self.problem is None else self.problem(inbox, reply)
        if problem is not None:
            raise ProtocolError(f"expected {problem} in {where}")


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
    """What remains of the steps once those of a `Closing` were begun: the run has no later call."""


@dataclass(frozen=True, eq=False, init=False)
class Either:
    """One of several ways to go on: that of clients that ask, say, or that of who only answers.

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
    found: Steps = ()
    for number in reversed(range(most)):
        found = Maybe((steps(number), found))
    return found


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
    """What a method calls; the arguments are those of its `init` and `round`.

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
    """Which rules a client can hold its server to, on the weights that it scores.

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
    """What a whole run calls.

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
            raise ProtocolError(f"expected a round up to {self.rounds}, got {number}")

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
    """Whether nothing has to follow."""
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


def possible(steps: Steps) -> Iterator[tuple[Call, Steps]]:
    """Yield each call that may come next, and what follows it."""
    match steps:
        case Call():
            yield steps, ()
        case Maybe(inner):
            yield from possible(inner)
        case Closing(inner):
            for call, rest in possible(inner):
                yield call, (rest, Over())
        case Over():
            return
        case Either():
            for way in steps.ways:
                yield from possible(way)
        case Repeat(inner, most):
            for call, rest in possible(inner) if most else ():
                yield call, (rest, Repeat(inner, most - 1))
        case _:
            for place, step in enumerate(steps):
                for call, rest in possible(step):
                    yield call, (rest, *steps[place + 1 :])
                if not can_end(step):
                    return
