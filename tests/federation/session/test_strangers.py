"""Strangers, and silos that speak unasked: none holds the server up or fills its memory."""

import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from sessions import TOKEN
from silograph.core.errors import ConfigError
from silograph.federation.session.events import (
    MOST_OF_ADDRESS,
    MOST_STRANGERS,
    Event,
    StrangerLimit,
    What,
)
from silograph.federation.session.hub import (
    LONGEST_HANDSHAKE,
    PROTOCOL,
    UNREAD,
    Hub,
    Joined,
    StreamLink,
)
from silograph.federation.session.identity import Register, SiloKey, make_certificates, signed_text
from silograph.federation.session.message import NO_TOKEN, Message, Type, facts_body, pack, unpack
from silograph.federation.session.peer import LostError
from streams import joined, refusal


def test_names_that_are_none(hubs: Any, raws: Any, caplog: pytest.LogCaptureFixture) -> None:
    hub, key = hubs(Register(None, 2)), SiloKey.new()
    for name, shown in (("\ud800", "?"), (["a"], "something else"), ("x" * 999, "x" * 80)):
        raw = raws(hub)
        raw.say(Type.HELLO, name=name, key=key.public.hex(), protocol=PROTOCOL)
        raw.hear()
        raw.say(Type.PROOF, TOKEN, signature="")
        assert refusal(raw.hear()) == f"expected a silo's name, got {shown!r}"
        assert f"refused {shown}" in caplog.records[-1].getMessage()


def test_what_a_stranger_hears_is_short(hubs: Any, raws: Any) -> None:
    hub = hubs(Register(None, 2))
    others: tuple[Any, ...] = ("long " * 9999, [[[]]])
    for protocol in others:
        said = refusal(raws(hub).greet("north", SiloKey.new(), protocol=protocol))
        assert said.startswith("expected protocol 3, got ")
        assert len(said) <= 300


def test_a_greeting_that_is_too_long_is_not_read(
    hubs: Any, raws: Any, caplog: pytest.LogCaptureFixture
) -> None:
    silo = raws(hubs(Register(None, 2)))
    silo.out.put(bytes(LONGEST_HANDSHAKE + 1))
    assert list(silo.call) == []
    assert (
        f"expected a message of the handshake of at most {LONGEST_HANDSHAKE} bytes, got"
        in caplog.text
    )


class Context:
    """gRPC's side of a stream that nobody reads: it ends when it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.cancel = self.cancelled.set

    def peer(self) -> str:
        return "nobody"


def requests_of(
    answers: "SimpleQueue[bytes]", name: str, key: SiloKey
) -> Iterator[bytes]:  # what a silo says, once it has heard the challenge
    def packed(kind: Type, token: bytes, **facts: Any) -> bytes:
        return pack(Message(kind, token, 0, facts_body(facts)))

    yield packed(Type.HELLO, NO_TOKEN, name=name, key=key.public.hex(), protocol=PROTOCOL)
    nonce = bytes.fromhex(unpack(answers.get()).facts()["nonce"])
    signature = key.sign(signed_text(TOKEN, nonce, name, "")).hex()
    yield packed(Type.PROOF, TOKEN, signature=signature, host="")


@pytest.mark.parametrize(
    ("name", "last"),
    [(None, Type.CHALLENGE), ("stranger", Type.REFUSED), ("north", Type.WELCOME)],
)
def test_a_greeting_is_over_in_time(
    hubs: Any, monkeypatch: pytest.MonkeyPatch, name: str | None, last: Type
) -> None:
    """Its stream is cancelled where it hangs, in any of the server's messages."""
    monkeypatch.setattr("silograph.federation.session.hub.HANDSHAKE_SECONDS", 0.05)
    hub, context, answers = hubs(Register(("north",), 2)), Context(), SimpleQueue[bytes]()
    stream = hub._attach(requests_of(answers, name or "north", SiloKey.new()), context)
    answers.put(next(stream))
    said = Type.CHALLENGE if name is None else unpack(next(stream)).type
    assert said is last
    assert context.cancelled.wait(600)
    stream.close()


def test_a_greeting_that_went_well_is_not_cancelled(
    hubs: Any, raws: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[threading.Timer] = []

    def timer(*given: Any) -> threading.Timer:
        timers.append(threading.Timer(*given))
        return timers[-1]

    monkeypatch.setattr("silograph.federation.session.hub.Timer", timer)
    hub = hubs(Register(None, 2))
    silo = raws(hub)
    assert silo.greet("north", SiloKey.new()).type is Type.WELCOME
    found = joined(hub)
    found.link.send(b"down", 0)
    assert next(silo.call) == b"down"  # so the server is past its greeting
    assert timers[-1].finished.is_set()


def test_a_stream_that_hangs_is_cancelled_for_the_next_one_of_its_silo(hubs: Any) -> None:
    hub, key, contexts = hubs(Register(None, 2)), SiloKey.new(), (Context(), Context())
    for context in contexts:
        answers = SimpleQueue[bytes]()
        stream = hub._attach(requests_of(answers, "north", key), context)
        answers.put(next(stream))
        assert unpack(next(stream)).type is Type.WELCOME
        stream.close()
    assert [context.cancelled.is_set() for context in contexts] == [True, False]
    assert [silo.name for silo in hub.returned()] == ["north"]


def test_streams_of_one_silo_are_told_of_in_their_order(hubs: Any, raws: Any) -> None:
    hub = hubs(Register(None, 2))

    class Guarded(SimpleQueue[Joined]):
        def put(self, *given: Any) -> None:
            assert hub._lock.locked()
            super().put(*given)

    hub._joined = Guarded()
    assert raws(hub).greet("north", SiloKey.new()).type is Type.WELCOME
    assert joined(hub).name == "north"


def test_a_silo_may_attach_while_the_server_stops_listening(hubs: Any) -> None:
    hub, ended = hubs(Register(None, 2)), list[str]()

    class Link:
        def close(self) -> None:
            ended.append("one")
            hub._streams[f"another {len(ended)}"] = Link(), None

    hub._streams["north"] = Link(), None
    hub.close()
    assert ended == ["one"]


def test_a_silo_that_speaks_unasked_is_ended_and_little_of_it_kept() -> None:
    read: list[int] = []

    def endless() -> Iterator[bytes]:
        for number in itertools.count():
            read.append(number)
            yield b"%d" % number

    link = StreamLink(lambda size, late: None)
    link.pump(endless())
    assert read == [*range(UNREAD + 1)]
    assert list(link.pending_messages()) == []  # which ends the stream
    assert [link.receive(1.0).data for _ in range(UNREAD)] == [b"0", b"1"]
    for _ in range(2):
        with pytest.raises(LostError, match="it is gone"):
            link.receive(1.0)


def test_nothing_is_kept_of_what_comes_after_the_end() -> None:
    link = StreamLink(lambda size, late: None)
    link.close()
    link.pump(iter([b"late"] * 9))
    with pytest.raises(LostError, match="it is gone"):
        link.receive(1.0)


def test_what_is_no_certificate(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_certificates(tmp_path / name, ["127.0.0.1"])
    chain, key, other = (
        (tmp_path / file).read_bytes() for file in ("a/server.pem", "a/server.key", "b/server.key")
    )
    locked = load_pem_private_key(key, None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")
    )
    for pair, says in (
        ((b"none", key), r"expected the server's certificate \(PEM\), got something else"),
        ((chain, b"none"), r"expected the key of .* \(PEM, no password\), got something else"),
        ((chain, locked), r"expected the key of .* \(PEM, no password\), got something else"),
        ((chain, other), r"expected the key of the server's certificate, got another"),
    ):
        with pytest.raises(ConfigError, match=says):
            Hub("127.0.0.1:0", Register(None, 2), TOKEN, pair, room=2)


def test_what_strangers_send_is_short_and_printable_in_the_log(
    hubs: Any, raws: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hub = hubs(Register(None, 2))
    for name in ("x" * 50_000, "\x1b[2J\nINFO forged line" * 100):
        raws(hub).greet(name, SiloKey.new())
    lines = [message for message in caplog.messages if message.startswith("refused ")]
    assert len(lines) == 2
    assert all(len(line) < 500 and line.isprintable() for line in lines)


def stranger(address: str) -> Event:
    return Event(What.STRANGER, address=address, reason="no")


def test_strangers_cause_a_bounded_number_of_lines() -> None:
    heard: list[Event] = []
    limit = StrangerLimit(heard.append, window=3600)
    silo = Event(What.ATTACHED, "north")
    for port in range(100):
        limit(stranger(f"ipv4:10.0.0.1:{port}"))
        limit(silo)
    assert heard.count(silo) == 100
    assert sum(event.what is What.STRANGER for event in heard) == MOST_OF_ADDRESS
    for host in range(1000):
        limit(Event(What.REFUSED, "x", address=f"ipv4:10.0.{host}.1:1", reason="no"))
    listed = [event for event in heard if event.what in (What.STRANGER, What.REFUSED)]
    assert len(listed) == MOST_STRANGERS
    limit.close()
    assert str(heard[-1]) == (
        f"{1100 - MOST_STRANGERS:,} more streams of strangers in 3600 s: not listed one by one"
    )
    assert heard[-1].level == logging.WARNING
    limit.close()
    assert sum(event.what is What.UNLISTED for event in heard) == 1


def test_the_number_of_unlisted_strangers_is_reported_when_the_window_ends() -> None:
    """Also where no other event follows; then a new window begins."""
    heard: SimpleQueue[Event] = SimpleQueue()
    limit = StrangerLimit(heard.put, window=0.01)
    for _ in range(2):
        while True:
            limit(stranger("ipv4:10.0.0.1:1"))
            if heard.get(timeout=60).what is What.UNLISTED:
                break
