"""How a silo attaches: it connects out, proves its key, and answers until the run is over.

When the stream breaks it connects again, with its state, for as long as it has patience.
"""

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import grpc

from silograph.core.errors import ConfigError, FrameError, ProtocolError
from silograph.federation.session.events import Event, EventCallback, What
from silograph.federation.session.hub import PROTOCOL
from silograph.federation.session.identity import SiloKey, signed_text
from silograph.federation.session.message import (
    NO_TOKEN,
    Message,
    Type,
    facts_body,
    pack,
    read_message,
    unpack,
)
from silograph.federation.session.peer import one_line
from silograph.federation.session.responder import Responder
from silograph.federation.session.wire import (
    OPTIONS,
    PATH,
    SHORT,
    check_plaintext,
    cut,
    split_address,
    whole,
)

UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification", "not in peer certificate")
# What gRPC says of a stream that failed, and the same for people; the first that fits counts.
EXPLANATIONS = {
    "Connection refused": "nothing listens there",
    "errors resolving": "no machine has this name",
    "WRONG_VERSION_NUMBER": "the server answers without TLS",
    "Hostname Verification": "the certificate is for another name",
    "not in peer certificate": "the certificate is for another name",
    "has expired": "the certificate has expired",
    "CERTIFICATE_VERIFY_FAILED": "the certificate is one that --ca does not vouch for",
    "Expected SETTINGS": "what answers there is no server of silograph",
    "UNIMPLEMENTED": "what answers there is no server of silograph",
    "Socket closed": "the connection was closed",
    "reset by peer": "the connection was closed",
    "RST_STREAM": "the connection was closed",
    "GOAWAY": "the connection was closed",
    "ping timeout": "no sign of life of the server",
    "unreachable": "the address cannot be reached",
    "timed out": "no answer",
    "RESOURCE_EXHAUSTED": "a message is longer than allowed",
    "CANCELLED": "the server has ended the stream",
}
# What gRPC adds to these says more: why a certificate is refused, how long a message was.
DETAILED = ("CERTIFICATE_VERIFY_FAILED", "RESOURCE_EXHAUSTED")
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between attempts to connect
INTERRUPTED = "the server was interrupted"
LAST_SECONDS = 10.0  # for which a server may leave the stream open after the silo's last word
MOST_RUNS = 1000  # of a process, until it agrees to one: it shows itself in each, and logs it
LONGEST_WAIT = 10 * 365 * 86400  # seconds: a longer one has no end that is worth a date


@dataclass(frozen=True, eq=False)
class Attaching:
    """Settings for attaching a silo to a server.

    Attributes:
        name: of the silo.
        key: its own.
        facts: its versions and data, for the server.
        server: HOST:PORT.
        roots: certificates that the server's must come from, PEM; None is without TLS, to this
            machine only.
        make_worker: makes the worker of a run from its token.
        patience: seconds for which it tries to reach a server that does not answer.
        report: gets the events.
        waits: whether it waits for a server that was stopped, as after a crash.
        process: identifies this process among others with the same key.
    """

    name: str
    key: SiloKey
    facts: Mapping[str, Any]
    server: str
    roots: bytes | None
    make_worker: Callable[[bytes], Responder]
    patience: float
    report: EventCallback
    waits: bool = True
    process: str = field(default_factory=lambda: secrets.token_hex(8))


def take_part(silo: Attaching) -> str:
    """Serve one run and return why it ended.

    Raises:
        ConfigError: the server refused the silo, or could not be reached for too long.
    """
    last = _Attempt(None, NO_TOKEN, is_attached=False, reason="")
    pause, since = SHORTEST_PAUSE, time.monotonic()
    runs = 0
    while True:
        token = last.token
        last = _attempt(silo, last.worker, last.token)
        worker = last.worker
        runs += last.token != token
        if runs > MOST_RUNS:
            raise ConfigError(
                f"expected a run at {silo.server}, got {MOST_RUNS:,} that the silo could not agree "
                "to: start it again to go on"
            )
        if worker is not None and worker.ended is not None:
            return worker.ended
        stopped = worker is not None and worker.stopped
        if stopped and not silo.waits:
            return INTERRUPTED
        if last.is_attached:  # patience is for the time without a stream
            pause, since = SHORTEST_PAUSE, time.monotonic()
        if time.monotonic() - since > silo.patience:
            raise ConfigError(
                f"expected a server at {silo.server} within {silo.patience:g} s, got: {last.reason}"
            )
        if pause == SHORTEST_PAUSE:
            what, reason = (What.STOPPED, None) if stopped else (What.LOST, last.reason)
            about = Event(what, silo.name, address=silo.server, reason=reason)
            moment = format_deadline(time.time(), silo.patience)
            silo.report(replace(about, seconds=silo.patience, note=moment))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


@dataclass(frozen=True, eq=False)
class _Attempt:
    """The result of one stream to the server.

    Attributes:
        worker: of the run, None before there was one.
        token: of the run.
        is_attached: whether the silo was attached.
        reason: why the stream ended.
    """

    worker: Responder | None
    token: bytes
    is_attached: bool
    reason: str


def _attempt(silo: Attaching, worker: Responder | None, token: bytes) -> _Attempt:
    """Attach and answer until the stream ends; raise `ConfigError` if a retry cannot help."""
    is_attached = False
    with _channel(silo) as channel:
        stream = _Stream(channel)
        try:
            server_token = stream.do_handshake(silo)
            if worker is None or server_token != token:
                if worker is not None and worker.has_agreed:
                    raise ConfigError(
                        f"expected the run that this silo has agreed to at {silo.server}, got "
                        "another one: start the silo again to take part in that"
                    )
                worker, token = silo.make_worker(server_token), server_token
            worker.attach()
            silo.report(Event(What.ATTACHED, silo.name, address=silo.server))
            is_attached = True
            stream.answer(worker, silo)
            reason = "the server ended the stream"
        except grpc.RpcError as error:
            technical, reason = _reason(error)
            if any(text in technical for text in UNTRUSTED):
                raise ConfigError(
                    f"expected {silo.server} to have a certificate that --ca vouches for, got: "
                    f"{reason}"
                ) from None
            if not is_attached:
                reason += _hint(technical, secure=silo.roots is not None)
        except ProtocolError as error:  # of a stream that cannot be trusted any more
            reason = str(error)
        finally:
            stream.close()
    return _Attempt(worker, token, is_attached, reason)


def format_deadline(now: float, seconds: float) -> str | None:
    """Return the local time at the end of a wait, None if it is very far away."""
    if not math.isfinite(seconds) or seconds > LONGEST_WAIT:
        return None
    return time.strftime("until %Y-%m-%d %H:%M:%S", time.localtime(now + seconds))


class _Stream:
    """One stream to the server."""

    def __init__(self, channel: Any) -> None:
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._call = channel.stream_stream(PATH)(cut(iter(self._outgoing.get, None)))
        self._most: Callable[[int], int] = lambda _: SHORT
        self._messages = whole(self._call, lambda size: self._most(size))

    def do_handshake(self, silo: Attaching) -> bytes:
        """Do the handshake: identify the silo, prove it, and return the token of the run."""
        facts = {"protocol": PROTOCOL, "name": silo.name, "key": silo.key.public.hex()}
        facts["process"] = silo.process
        self._send(Type.HELLO, NO_TOKEN, {**silo.facts, **facts})
        challenge = self._take(Type.CHALLENGE, None)
        try:
            nonce = bytes.fromhex(str(challenge.facts()["nonce"]))
        except (KeyError, ValueError):
            raise FrameError("expected a nonce to sign, got none") from None
        host = "" if silo.roots is None else split_address(silo.server, "server")[0]
        text = signed_text(challenge.token, nonce, silo.name, host)
        proof = {"signature": silo.key.sign(text).hex(), "host": host}
        self._send(Type.PROOF, challenge.token, proof)
        self._take(Type.WELCOME, challenge.token)
        return challenge.token

    def answer(self, worker: Responder, silo: Attaching) -> None:
        """Answer messages until the stream ends."""
        self._most = worker.most
        for data in self._messages:
            answer = worker.answer(data)
            self._outgoing.put(answer)
            if worker.ended is not None:
                # Close this half of the stream, and wait for the server's half, but not long.
                self._outgoing.put(None)
                timer = threading.Timer(LAST_SECONDS, self._call.cancel)
                timer.daemon = True
                timer.start()
            if not self._call.is_active() and worker.ended is None:
                silo.report(Event(What.DISCARDED, silo.name, bytes=len(answer)))

    def close(self) -> None:
        """End the stream."""
        self._outgoing.put(None)
        self._call.cancel()

    def _send(self, kind: Type, token: bytes, facts: Mapping[str, Any]) -> None:
        self._outgoing.put(pack(Message(kind, token, 0, facts_body(facts))))

    def _take(self, kind: Type, token: bytes | None) -> Message:
        """Return the next message of the handshake; `token`: of the run, once it is known."""
        data = next(self._messages, None)
        if data is None:
            raise FrameError(f"expected {kind.name}, got the end of the stream")
        message = unpack(data) if token is None else read_message(data, token, 0)
        if message.type is Type.REFUSED:
            raise ConfigError(f"the server refused: {one_line(message.facts().get('reason'))}")
        message.check_type(kind)
        return message


def _channel(silo: Attaching) -> Any:
    host, _ = split_address(silo.server, "server")
    if silo.roots is None:
        check_plaintext(host)
        return grpc.insecure_channel(silo.server, options=OPTIONS)
    secure = grpc.ssl_channel_credentials(root_certificates=silo.roots)
    return grpc.secure_channel(silo.server, secure, options=OPTIONS)


def _hint(technical: str, *, secure: bool) -> str:
    """Return a hint if one end seems to use TLS and the other does not."""
    if secure and "WRONG_VERSION_NUMBER" in technical:
        return "; see whether the server was started with --insecure"
    if not secure and "Socket closed" in technical:
        return "; see whether the server speaks TLS: --ca in place of --insecure"
    return ""


def _reason(error: grpc.RpcError) -> tuple[str, str]:
    """Return the code and message of a gRPC error as one line, and the same for people."""
    code = getattr(error, "code", lambda: None)()
    name = "lost" if code is None else str(code.name)
    technical = one_line(f"{name}: {getattr(error, 'details', lambda: '')()}")
    known = next((words for words in EXPLANATIONS if words in technical), None)
    if known is None:
        return technical, technical
    detail = technical.partition(known)[2].strip(" :") if known in DETAILED else ""
    detail = detail.removesuffix(": OK")  # of another layer
    return technical, EXPLANATIONS[known] + (f" ({detail})" if detail else "")
