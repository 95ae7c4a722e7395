"""How far a run is in its program: which call may come next, and what must come before others.

Both ends keep a course. A silo does what comes next in it and nothing else, whoever asks.
"""

from collections import Counter

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, State
from silograph.federation.base import Op
from silograph.federation.field_specs import Extent, check_against
from silograph.federation.program import BLANK, Call, Program, Steps, can_end, is_over, possible

MOST_PASSED = 1000  # rounds in a row without a call to a client: each is looked at
MOST_TIMES = 8  # that a round is begun: the first, and those in which it is done again


class Course:
    """How far a run is in its program; both ends keep one.

    Args:
        program: of the run.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._round = BLANK
        self._rest: Steps = ()
        self._back = False  # brought back to a state: the others may have gone on meanwhile
        self._broken = False  # a call of the round has failed
        self._begun: Counter[int] = Counter()
        self._closed: int | None = None  # the round after which the last model was scored

    def check_number(self, number: int) -> None:
        """Raise `ProtocolError` where the run has no such round."""
        self.program.check_number(number)

    def go_to(self, number: int) -> None:
        """Take a round as whole: what follows is a later one.

        The next one, or one after it, if the others have gone on without this client meanwhile.
        """
        self.check_number(number)
        self._round, self._rest, self._back, self._broken = number, (), True, False

    @property
    def is_whole(self) -> bool:
        """Whether no call of the round has to come any more."""
        return not self._broken and can_end(self._rest)

    def break_off(self) -> None:
        """Take a call that was made as failed: only `go_to` leads on from here."""
        self._broken = True

    def _check_unbroken(self) -> None:
        if self._broken:
            raise ProtocolError(
                f"expected LOAD after a call of round {self._round} that has failed, got another"
            )

    def check_whole(self) -> None:
        """Raise `ProtocolError` where calls of the round are still to come."""
        self._check_unbroken()
        if not can_end(self._rest):
            raise ProtocolError(f"expected {_names(self._rest)} before round {self._round} is over")

    def check_state(self, state: State, extent: Extent, *, own: bool = False) -> None:
        """Raise `ProtocolError` unless a state is one that a round leaves behind.

        Args:
            state: of the clients.
            extent: of them.
            own: whether this process has made it: then shapes are checked, no values.
        """
        where = "the state of a round"
        check_against(state, self.program.state, extent, where, finite=not own, values=not own)

    def result_of(self, fields: Payload) -> Payload:
        """Return what clients get of the server's weights, as agreed."""
        return {name: fields[name] for name in self.program.result}

    def check_result(self, number: int, fields: Payload, extent: Extent) -> None:
        """Raise `ProtocolError` unless the server may send this as the result of the run."""
        self.check_whole()
        if self._round < 1:
            raise ProtocolError("expected a round before the result of the run, got none")
        if not 0 < number <= self.program.rounds:
            raise ProtocolError(
                f"expected a best round from 1 to {self.program.rounds}, got {number}"
            )
        check_against(fields, self.program.result, extent, "the result of the run", finite=True)
        self._check_may_be_over(number)

    def _check_may_be_over(self, number: int) -> None:
        """Raise `ProtocolError` for a round that cannot be over without calls to this client.

        One that was brought back to a state may have been away in any number of rounds. Of others
        only so many are looked at, as the server chooses how many there are.
        """
        last = self._round if self._back else min(number, self._round + MOST_PASSED)
        for between in range(self._round + 1, last + 1):
            if not can_end(self.program.steps(between)):
                raise ProtocolError(
                    f"expected calls of round {between} before the result of the run, got round "
                    f"{number} as the best one"
                )

    def find(self, number: int, op: Op, what: Kind, key: Key) -> tuple[Call, Steps]:
        """Return the next call as the program has it, and what follows it; see `go_on`.

        Raises:
            ProtocolError: the program has another one here.
        """
        self._check_unbroken()
        rest = self._rest if number == self._round else self._entered(number)
        found = [(c, after) for c, after in possible(rest) if c.op is op and c.what == what]
        for call, after in found:
            if call.key == key:
                return call, after
        if found:
            raise ProtocolError(
                f"expected {op.__name__} with the key that the config's seed gives, got another"
            )
        raise ProtocolError(
            f"expected {_names(rest)} in round {number}, as agreed, got {_name(op, what)}"
        )

    def _entered(self, number: int) -> Steps:
        """Return the steps of a later round, once those before it may be over."""
        steps = self.program.steps(number)
        if self._closed is not None and number > self._closed:
            raise ProtocolError(
                f"expected no call after the closing evaluation of round {self._closed}, got one "
                f"of round {number}: start the silo again to go on"
            )
        if number < self._round:
            raise ProtocolError(f"expected round {self._round} or a later one, got {number}")
        self.check_whole()
        if self._back:
            return steps
        if number - self._round > MOST_PASSED:
            raise ProtocolError(
                f"expected one of the next {MOST_PASSED} rounds after {self._round}, got {number}"
            )
        for between in range(self._round + 1, number):
            if not can_end(self.program.steps(between)):
                raise ProtocolError(f"expected calls of round {between}, got one of {number}")
        return steps

    def closes(self, number: int, after: Steps) -> bool:
        """Return whether no later round may follow a call, by its round and what follows it."""
        return number == self.program.rounds or is_over(after)

    def go_on(self, number: int, after: Steps) -> bool:
        """Take a call of a round as made; return whether the round begins with it.

        Raises:
            ProtocolError: the round was begun too often.
        """
        begins = number != self._round
        if begins:
            if self._begun[number] == MOST_TIMES:
                raise ProtocolError(
                    f"expected round {number} at most {MOST_TIMES} times, got it once more: start "
                    "the silo again to go on"
                )
            self._begun[number] += 1
        self._round, self._rest, self._back = number, after, False
        if is_over(after):
            self._closed = number
        return begins


def _names(steps: Steps) -> str:
    """Return what may come next, for a message."""
    names = [_name(call.op, call.what) for call, _ in possible(steps)]
    return " or ".join([*names, *["the next round"] * can_end(steps)])


def _name(op: Op, what: Kind) -> str:
    return f"{op.__module__.rpartition('.')[2]}.{op.__name__} ({what.value})"
