"""One silo as the server sees it: numbered messages out, their answers in."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from silograph.core.errors import FrameError, ProtocolError
from silograph.core.payload import Payload, State
from silograph.core.text import printable
from silograph.federation.field_specs import Extent
from silograph.federation.frame import RESULT
from silograph.federation.program import Call, Program, calls_of, frame_bound
from silograph.federation.session.events import Cause
from silograph.federation.session.message import (
    MAX_FACTS,
    MAX_MESSAGE_BYTES,
    Message,
    Type,
    facts_body,
    pack,
    read_message,
)
from silograph.federation.session.wire import SHORT


class LostError(ProtocolError):
    """A silo is gone, late, or sent an invalid answer; the message is one line.

    Attributes:
        cause: why.
        facts: that the silo has sent with a refusal.
    """

    def __init__(
        self,
        line: str,
        cause: Cause = Cause.GARBAGE,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(line)
        self.cause, self.facts = cause, dict(facts or {})


class Arrived(NamedTuple):
    """A message of a silo.

    Attributes:
        data: its bytes.
        at: when it came, by `time.monotonic`.
    """

    data: bytes | bytearray
    at: float


class Link(Protocol):
    """A stream to one silo."""

    def send(self, data: bytes, most: int) -> None:
        """Queue a message whose answer has at most `most` bytes; never waits."""

    def receive(self, seconds: float | None) -> Arrived:
        """Return the next message.

        Raises:
            LostError: the stream is closed, or nothing came in time.
        """

    def close(self) -> None:
        """End the stream."""


class Peer:
    """A silo that is attached.

    Args:
        name: of the client.
        link: its stream.
        token: of the run.
    """

    def __init__(self, name: str, link: Link, token: bytes) -> None:
        self.name = name
        self._link = link
        self._token = token
        self._sequence = 0
        self._sent = 0.0
        self.took = 0.0  # seconds from the last message to its answer

    def send(self, kind: Type, body: bytes, most: int = SHORT, frame: bytes = b"") -> None:
        """Send the next message.

        Args:
            kind: its type.
            body: its body, or the part of it before the frame.
            most: bytes that the answer may have.
            frame: the last part of the body.
        """
        self._sequence += 1
        self._sent = time.monotonic()
        self._link.send(pack(Message(kind, self._token, self._sequence, body), frame), most)

    def answer(self, kind: Type, seconds: float | None) -> bytes | memoryview:
        """Return the body of the answer to the last message.

        Args:
            kind: the type it must have.
            seconds: how long it may take from the sending; None is as long as the stream is there.

        Raises:
            LostError: there is none, it is none, or the silo refused.
        """
        remaining = None if seconds is None else max(0.0, self._sent + seconds - time.monotonic())
        received = self._link.receive(remaining)
        self.took = received.at - self._sent
        try:
            message = read_message(received.data, self._token, self._sequence)
            if message.type is Type.REFUSED:
                facts = message.facts()
                raise LostError(one_line(facts.get("reason")), Cause.REFUSED, facts)
            message.check_type(kind)
        except FrameError as error:
            raise LostError(str(error)) from None
        return message.body

    def ask(
        self, kind: Type, facts: Mapping[str, Any], seconds: float | None, answer: Type = Type.DONE
    ) -> bytes | memoryview:
        """Send a message of facts and return the body of its answer; see `answer`."""
        self.send(kind, facts_body(facts))
        return self.answer(answer, seconds)

    def close(self) -> None:
        """End the stream."""
        self._link.close()

    def dismiss(self, reason: str) -> None:
        """Send the silo the reason why it is dropped, and end the stream."""
        self.send(Type.DISMISSED, facts_body({"reason": reason}))
        self.close()


def one_line(text: object) -> str:
    """Return text from a silo as one printable line of at most 300 characters."""
    return printable(" ".join(str(text).split()))[:300]


# --- How long a session waits, for how many silos, and how long messages may be ------------------


AROUND = 2**12  # bytes around a frame: header, name of the op, work by kind
MOST_HELLO = 2**28  # bytes: tags of some five million edges to other silos


@dataclass(frozen=True)
class WorkBound:
    """The most floating-point operations of a call at a silo.

    Attributes:
        fixed: of any call.
        per_number: besides, for each number that the call brings.
    """

    fixed: float
    per_number: float = 0.0

    def of(self, inbox: Payload) -> float:
        """Return the bound of a call with an inbox."""
        return self.fixed + self.per_number * sum(field.t.numel() for field in inbox.values())


@dataclass(frozen=True)
class Limits:
    """Limits of a session: how many silos it needs, how long it waits, and what it accepts.

    Attributes:
        least: silos without which a call fails.
        seconds: how long a silo may take over its answers of a round, those of others not counted;
            None is as long as the stream is there.
        patience: seconds for which a round that cannot go on waits for silos to attach again.
        failures: unusable answers after which a silo is left out for good; None: it never is.
        update_norm: largest Euclidean norm of the update of a silo; None is any.
        secure: whether the server learns sums over silos only (`silograph.federation.secure`).
        most_work: operations of a call at a silo of so many nodes, rows and edges; None is any.
    """

    least: int
    seconds: float | None = None
    patience: float = 0.0
    failures: int | None = None
    update_norm: float | None = None
    secure: bool = False
    most_work: Callable[[Mapping[str, int]], WorkBound | None] = lambda _: None


def longest_reply(call: Call, inbox: Payload, extent: Extent) -> int:
    """Return the most bytes that the reply to an inbox of one client can have as a message."""
    return _around(frame_bound(call.op.__name__, call.reply_specs, extent, {"inbox": inbox}).most)


class LongestCall:
    """The most bytes that the server's messages can have at a silo.

    Args:
        program: of the run.
        extent: of the silo.
    """

    def __init__(self, program: Program, extent: Extent) -> None:
        self._program = program
        self._extent = extent
        result = frame_bound(RESULT, program.result, extent).most
        self._most = max(MAX_FACTS, _around(result))
        self._seen: set[int] = set()

    def most(self, size: int, number: int, state: State) -> int:
        """Return the bytes that a message may have, of which `size` are announced.

        Frames are as long in most rounds: those of a round are looked at where a message is longer
        than any before may have been.

        Args:
            size: of the message.
            number: of the last round that the silo was called in.
            state: of the silo.
        """
        for t in (number, number + 1):
            if size > self._most and t not in self._seen and 0 <= t <= self._program.rounds:
                self._seen = {*self._seen, t} if t > number else {t}
                self._most = max(self._most, *self._sizes(t, state))
        return self._most

    def _sizes(self, number: int, state: State) -> Iterator[int]:
        yield SHORT
        others = {"state": state}
        for call in calls_of(self._program.steps(number)):
            yield _around(
                frame_bound(call.op.__name__, call.inbox_specs, self._extent, others).most
            )


def _around(frame: int | None) -> int:
    """Return the bytes of a message with a frame, of unknown length if None."""
    most = MAX_MESSAGE_BYTES if frame is None else min(frame + AROUND, MAX_MESSAGE_BYTES)
    return max(SHORT, most)
