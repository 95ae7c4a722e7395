"""Damaged frames and messages: each is refused as such, or is another one that is whole.

What is accepted must say the same bytes when it is encoded again, so nothing is misread.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
import torch

from silograph.core.errors import FrameError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Ragged, Shared, Stacked
from silograph.core.work import Meter
from silograph.federation.frame import Envelope, decode, encode
from silograph.federation.session.message import (
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
MOST_BYTES = 2**20  # that a frame of a few hundred bytes may become
NUMBERS = (0, 1, 255, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


def honest_frames() -> list[bytes]:
    """Frames of every form and of several dtypes, empty ones among them."""
    off = torch.tensor([0, 2])
    payloads: list[Mapping[str, Field]] = [
        {},
        {"weights/0.weight": Shared(torch.arange(6.0).reshape(2, 3))},
        {"nodes": Stacked(torch.tensor([7])), "loss": Stacked(torch.tensor([0.5]).double())},
        {"rows": Ragged(torch.ones(2, 4, dtype=torch.float16), off), "t": Shared(torch.tensor(3))},
        {"slot": Ragged(torch.tensor([1, 5], dtype=torch.int32), off)},
        {"mask": Shared(torch.tensor([True, False])), "none": Shared(torch.zeros(0, 3))},
    ]
    kinds = [*Kind][: len(payloads)]
    return [
        encode(Envelope("train", kind, number, 1), payload, 0)
        for number, (kind, payload) in enumerate(zip(kinds, payloads, strict=True))
    ]


def honest_messages() -> list[bytes]:
    """Messages of every type."""
    frames = honest_frames()
    call = call_body(CallBody("a.train", Key.of(5), True, memoryview(frames[1])))
    bodies = {
        Type.CALL: call,
        Type.REPLY: reply_body(Kind.WEIGHTS, Meter(1), frames[2]),
        Type.EXPLAIN: explain_body({"silo": "a", "other": "b"}, [bytes(16), bytes(range(16))]),
        Type.JOINED: frames[4],
        Type.RESULT: frames[1],
    }
    plain = facts_body({"round": 3, "committed": [1, 2], "nonce": "00" * 32})
    return [pack(Message(kind, TOKEN, 1 + kind, bodies.get(kind, plain))) for kind in Type]


def damaged(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Return bytes with one to three damages."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if data:
                bit = rng.randrange(8 * len(data))
                data = (
                    data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
                )
            case 1:
                data = data[:place]
            case 2:
                data = data[:place] + rng.randbytes(rng.randrange(1, 9)) + data[place:]
            case 3:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(NUMBERS) % 256**size
                data = data[:place] + number.to_bytes(size, "little") + data[place + size :]
            case 4:
                other = rng.choice(others)
                data = data[:place] + other[rng.randrange(len(other)) :]
            case 5:
                data = data[:place] + data[place + rng.randrange(1, 9) :]
            case _:
                data = rng.randbytes(rng.randrange(80))
    return data


def read_frame(data: bytes) -> None:
    """Read a frame; what is accepted is the bytes of what was read."""
    envelope, payload = decode(data)
    assert sum(field.t.nbytes for field in payload.values()) <= max(MOST_BYTES, len(data))
    assert encode(envelope, payload, 0) == data


def read_message_and_body(data: bytes) -> None:
    """Read a message and its body as its receiver does."""
    message = unpack(data)
    assert pack(message) == data
    match message.type:
        case Type.CALL:
            call = read_call(message.body)
            assert call_body(call) == bytes(message.body)
            decode(call.frame)
        case Type.REPLY:
            _, frame = read_reply(message.body)
            decode(frame)
        case Type.EXPLAIN:
            read_explain(message.body)
        case Type.JOINED | Type.RESULT:
            decode(message.body)
        case _:
            message.facts()


def fuzz(read: Callable[[bytes], None], honest: list[bytes], cases: int, seed: int) -> Counter[str]:
    """Read so many damaged inputs, and return what came of them."""
    rng, outcomes = random.Random(seed), Counter[str]()
    for _ in range(cases):
        data = damaged(rng.choice(honest), honest, rng)
        try:
            read(data)
        except FrameError:
            outcomes["refused"] += 1
        else:
            outcomes["whole"] += 1
    return outcomes


READERS = {
    "frames": (read_frame, honest_frames),
    "messages": (read_message_and_body, honest_messages),
}


@pytest.mark.parametrize("what", READERS)
def test_honest_ones_are_read(what: str) -> None:
    read, honest = READERS[what]
    for data in honest():
        read(data)


@pytest.mark.parametrize("what", READERS)
def test_damaged_ones_are_refused_or_whole(what: str) -> None:
    read, honest = READERS[what]
    outcomes = fuzz(read, honest(), 3000, seed=0)
    assert outcomes["refused"] > 1000


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("what", READERS)
def test_a_million_damaged_ones_are_refused_or_whole(what: str, seed: int) -> None:
    read, honest = READERS[what]
    outcomes = fuzz(read, honest(), 250_000, seed)
    assert outcomes["refused"] > 100_000
