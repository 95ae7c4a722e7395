"""Messages around frames: what goes in comes out, and nothing else is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silograph.core.errors import FrameError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.work import Meter
from silograph.federation.session.message import (
    HEADER,
    MAX_FACTS,
    METER,
    CallBody,
    Message,
    Type,
    call_body,
    explain_body,
    facts_body,
    pack,
    read_call,
    read_explain,
    read_reply,
    reply_body,
    unpack,
)

TOKEN = bytes(range(16))


@given(
    st.sampled_from(list(Type)),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=99),
)
def test_messages_survive(kind: Type, token: bytes, sequence: int, body: bytes) -> None:
    message = Message(kind, token, sequence, body)
    assert unpack(pack(message)) == message


@given(st.text(max_size=50), st.integers(0, 2**64 - 1), st.booleans(), st.binary())
def test_calls_survive(op: str, key: int, rows: bool, frame: bytes) -> None:
    call = CallBody(op, Key(key), rows, frame)
    assert read_call(call_body(call)) == call


@given(st.lists(st.floats(0, 1e300), min_size=3, max_size=3), st.binary())
def test_work_survives(flops: list[float], frame: bytes) -> None:
    meter = Meter(1)
    meter.add_each(flops[0])
    meter.part(Kind.EVALUATION).add_each(flops[1])
    meter.part(Kind.WEIGHTS).add_each(flops[2])  # apart, though it is the call's own kind
    again, rest = read_reply(reply_body(Kind.WEIGHTS, meter, frame))
    assert rest == frame
    assert again.flops.tolist() == [flops[0]]
    assert {kind: part.flops.tolist() for kind, part in again.apart.items()} == {
        Kind.EVALUATION: [flops[1]],
        Kind.WEIGHTS: [flops[2]],
    }


@given(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=9))
def test_edges_to_explain_survive(tags: list[bytes]) -> None:
    assert read_explain(explain_body({"a": 1}, tags)) == ({"a": 1}, tuple(tags))


@pytest.mark.parametrize(
    "body",
    [b"", b"12", explain_body({}, []), explain_body({}, [bytes(15)]), b"\xff" * 4 + bytes(99)],
)
def test_what_is_no_edge_to_explain(body: bytes) -> None:
    with pytest.raises(FrameError, match=f"expected edges to explain, got {len(body)} bytes"):
        read_explain(body)


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("silograph.federation.session.message.MAX_MESSAGE_BYTES", 99)
    pack(Message(Type.CALL, TOKEN, 1, bytes(70)))
    with pytest.raises(
        FrameError,
        match=r"expected a message of at most 99 bytes, got 100: take smaller layers \(.*\), or",
    ):
        pack(Message(Type.CALL, TOKEN, 1, bytes(71)))


@given(st.binary(max_size=200))
def test_anything_else_is_refused_and_nothing_breaks(data: bytes) -> None:
    for read in (unpack, read_call, read_reply, read_explain):
        try:
            read(data)
        except FrameError:
            continue
        assert read is not unpack or data.startswith(b"SGM1")


@given(st.integers(0, HEADER.size * 8 - 1))
def test_a_flipped_bit_of_the_header_is_seen(bit: int) -> None:
    data = bytearray(pack(Message(Type.CALL, TOKEN, 5, b"x")))
    data[bit // 8] ^= 1 << bit % 8
    try:
        message = unpack(bytes(data))
    except FrameError:
        return
    assert (message.type, message.token, message.sequence) != (Type.CALL, TOKEN, 5)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"SGM1", "expected a message of 29 to"),
        (b"XXXX" + bytes(30), "expected a message that starts with b'SGM1', got b'XXXX'"),
        (b"SGM1\x99" + bytes(30), "expected a known type of message, got 153"),
    ],
)
def test_what_is_no_message(data: bytes, says: str) -> None:
    with pytest.raises(FrameError, match=says):
        unpack(data)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"12345", "expected a call, got 5 bytes: cut short"),
        (bytes(8) + b"\x09" + bytes(2), "expected a call, got flags 9"),
        (bytes(8) + b"\x00\x05\x00abc", "expected a call, got flags 0 and a name of 5 bytes"),
        (bytes(8) + b"\x00\x01\x00\xff", "expected UTF-8 in the name of an op"),
    ],
)
def test_what_is_no_call(body: bytes, says: str) -> None:
    with pytest.raises(FrameError, match=says):
        read_call(body)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "expected a reply, got 0 bytes and 0 meters"),
        (b"\x02" + bytes(9), "expected a reply, got 10 bytes and 2 meters"),
        (b"\x01" + METER.pack(200, 1.0), "expected the work of a known kind, got 1.0 of 200"),
        (b"\x01" + METER.pack(0, -1.0), "expected the work of a known kind, got -1.0 of 0"),
        (b"\x01" + METER.pack(0, float("nan")), "expected the work of a known kind, got nan of 0"),
        (b"\x01" + METER.pack(0, 1.7e308), "expected the work of a known kind, got 1.7e.308 of 0"),
    ],
)
def test_what_is_no_reply(body: bytes, says: str) -> None:
    with pytest.raises(FrameError, match=says):
        read_reply(body)


def test_what_is_no_object_of_facts() -> None:
    assert Message(Type.HELLO, TOKEN, 0, facts_body({"a": 1})).facts() == {"a": 1}
    for body in (b"[]", b"{", b"\xff", b"[" * 9999):
        with pytest.raises(FrameError, match="expected a JSON object in a HELLO message"):
            Message(Type.HELLO, TOKEN, 0, body).facts()
    with pytest.raises(FrameError, match=f"expected at most {MAX_FACTS} bytes of facts"):
        Message(Type.HELLO, TOKEN, 0, bytes(MAX_FACTS + 1)).facts()
