"""One silo as the server sees it: numbered messages out, their answers in."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from silograph.core.errors import FrameError, ProtocolError
from silograph.core.text import printable
from silograph.federation.session.chunks import SHORT
from silograph.federation.session.events import Cause
from silograph.federation.session.message import Message, Type, facts_body, pack, unpack


class LostError(ProtocolError):
    """A silo is gone, late, or said something that is no answer; it says why in one line."""

    def __init__(self, line: str, cause: Cause = Cause.GARBAGE) -> None:
        super().__init__(line)
        self.cause = cause


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
        """Hand over a message whose answer has at most so many bytes; never waits."""

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

    def send(self, kind: Type, body: bytes, most: int = SHORT) -> None:
        """Send the next message; `most`: bytes that its answer may have."""
        self._sequence += 1
        self._sent = time.monotonic()
        self._link.send(pack(Message(kind, self._token, self._sequence, body)), most)

    def answer(self, kind: Type, seconds: float | None) -> bytes | memoryview:
        """Return the body of the answer to the last message.

        Args:
            kind: the type it must have.
            seconds: how long it may take from the sending; None is as long as the stream is there.

        Raises:
            LostError: there is none, it is none, or the silo refused.
        """
        left = None if seconds is None else max(0.0, self._sent + seconds - time.monotonic())
        arrived = self._link.receive(left)
        self.took = arrived.at - self._sent
        try:
            message = unpack(arrived.data)
            if message.token != self._token:
                raise FrameError("expected an answer of this run, got one of another")
            if message.sequence != self._sequence:
                raise FrameError(
                    f"expected the answer to message {self._sequence}, got one to "
                    f"{message.sequence}"
                )
            if message.type is Type.REFUSED:
                raise LostError(one_line(message.facts().get("reason")), Cause.REFUSED)
            if message.type is not kind:
                raise FrameError(f"expected {kind.name}, got {message.type.name}")
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
        """Tell the silo why it does not take part any more, and end the stream."""
        self.send(Type.DISMISSED, facts_body({"reason": reason}))
        self.close()


def one_line(text: object) -> str:
    """Return what a silo says as one printable line of at most 300 characters."""
    return printable(" ".join(str(text).split()))[:300]
