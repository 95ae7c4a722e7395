"""Frames: size = length, decode(encode(p)) = p, and nothing but a frame is taken for one."""

import contextlib
import os
import random
import tracemalloc
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silograph.core.errors import FrameError
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Ragged, Shared, Stacked, take_all
from silograph.federation import frame as frames
from silograph.federation.frame import (
    DTYPES,
    HEADER,
    MAX_FIELDS,
    Envelope,
    decode,
    encode,
    frame_sizes,
)

ENVELOPE = Envelope("train", Kind.WEIGHTS, 3, 7)
MUTATIONS = int(os.environ.get("SILOGRAPH_FUZZ", "40000"))


@st.composite
def tensors(draw: st.DrawFn, first: int | None = None) -> torch.Tensor:
    """Any bits of any dtype and shape, NaN payloads, infinities and empty arrays included."""
    dtype = np.dtype(draw(st.sampled_from(list(DTYPES.values()))))
    dims = st.lists(st.integers(0, 4), max_size=3)
    shape = tuple(draw(dims)) if first is None else (first, *draw(dims))
    count = int(np.prod(shape, dtype=int))
    if dtype == np.dtype(bool):
        return torch.from_numpy(draw(hnp.arrays(bool, shape)))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    return torch.from_numpy(np.frombuffer(raw, dtype).reshape(shape).copy())


@st.composite
def payloads(draw: st.DrawFn) -> tuple[int, dict[str, Field]]:
    clients = draw(st.integers(1, 4))
    names = draw(st.lists(st.text(max_size=12), max_size=4, unique=True))
    payload: dict[str, Field] = {}
    for name in names:
        match draw(st.sampled_from(["shared", "stacked", "ragged"])):
            case "shared":
                payload[name] = Shared(draw(tensors()))
            case "stacked":
                payload[name] = Stacked(draw(tensors(clients)))
            case _:
                lengths = draw(st.lists(st.integers(0, 3), min_size=clients, max_size=clients))
                off = torch.tensor([0, *np.cumsum(lengths)])
                payload[name] = Ragged(draw(tensors(sum(lengths))), off)
    return clients, payload


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().numpy().tobytes()


def assert_same_bits(a: dict[str, Field], b: dict[str, Field]) -> None:
    assert list(a) == list(b)
    for name, field in a.items():
        other = b[name]
        assert type(field) is type(other)
        assert field.t.dtype == other.t.dtype
        assert field.t.shape == other.t.shape
        assert bits(field.t) == bits(other.t)
        if isinstance(field, Ragged) and isinstance(other, Ragged):
            assert field.off.tolist() == other.off.tolist()


@settings(max_examples=100)
@given(payloads(), st.text(max_size=20), st.sampled_from(Kind), st.integers(0, 2**32 - 1))
def test_size_and_round_trip(
    drawn: tuple[int, dict[str, Field]], op: str, kind: Kind, number: int
) -> None:
    clients, payload = drawn
    envelope = Envelope(op, kind, number, number // 2)
    sizes = frame_sizes(op, payload, clients)
    assert sizes.dtype == np.int64
    for position in range(clients):
        data = encode(envelope, payload, position)
        assert len(data) == sizes[position]
        back, fields = decode(data)
        assert back == envelope
        assert_same_bits(fields, take_all(payload, torch.tensor([position])))


def test_size_by_hand() -> None:
    """17 bytes header, 5 of "train"; one field: 5 head, 1 name, 2 x 8 dimensions, 6 x 4 values."""
    assert HEADER.size == 17
    payload = {"w": Stacked(torch.zeros(2, 2, 3))}
    assert frame_sizes("train", payload, 2).tolist() == [17 + 5 + 5 + 1 + 16 + 24] * 2


def test_strided_tensors_travel_in_c_order() -> None:
    t = torch.arange(6.0).reshape(2, 3).T
    _, fields = decode(encode(ENVELOPE, {"w": Shared(t)}, 0))
    assert torch.equal(fields["w"].t, t)


def test_decoded_values_can_be_written_to() -> None:
    data = encode(ENVELOPE, {"w": Shared(torch.zeros(3))}, 0)
    _, fields = decode(data)
    fields["w"].t.add_(1)
    assert decode(data)[1]["w"].t.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (
            {"w": Shared(torch.zeros(1, dtype=torch.complex64))},
            r"expected a dtype .*complex64",
        ),
        ({"n" * 256: Shared(torch.zeros(1))}, "a name of at most 255 bytes"),
        ({"w": Shared(torch.zeros([1] * 9))}, "at most 8 dimensions, got 'w' with 9"),
        (
            {str(i): Shared(torch.zeros(())) for i in range(MAX_FIELDS + 1)},
            "expected at most 4096 fields, got 4097",
        ),
    ],
)
def test_what_frames_cannot_carry(payload: dict[str, Field], message: str) -> None:
    with pytest.raises(FrameError, match=message):
        encode(ENVELOPE, payload, 0)


def example() -> bytes:
    payload: dict[str, Field] = {
        "a": Shared(torch.arange(4, dtype=torch.int32)),
        "b": Ragged(torch.ones(2, 2), torch.tensor([0, 2])),
        "flag": Shared(torch.tensor([True, False])),
    }
    return encode(ENVELOPE, payload, 0)


def patched(at: int, new: bytes) -> bytes:
    data = example()
    return data[:at] + new + data[at + len(new) :]


FIRST_FIELD = 17 + 5  # after the header and "train"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected 17 more bytes of the header, got 0: cut short"),
        (patched(0, b"NOPE"), "expected a frame that starts with b'SGF1', got b'NOPE'"),
        (patched(4, b"\xff"), "expected a known kind and at most 4096 fields, got 255"),
        (patched(7, b"\xff\xff"), "expected a known kind and at most 4096 fields, got 0 and 65535"),
        (patched(17, b"\xff"), "expected UTF-8 in the op's name, got other bytes"),
        (patched(FIRST_FIELD, b"\x09"), "expected a known form, dtype and at most 8 dimensions"),
        (patched(FIRST_FIELD + 1, b"\x63"), "expected a known form, dtype"),
        (patched(FIRST_FIELD + 2, b"\x09"), "expected a known form, dtype"),
        (patched(FIRST_FIELD + 3, b"\xff\x7f"), "expected a name of at most 255 bytes, got 32767"),
        (patched(FIRST_FIELD + 5, b"\xc3"), "expected UTF-8 in a name"),
        (patched(FIRST_FIELD + 5, b"b"), "expected every field once, got a repeated name"),
        (patched(FIRST_FIELD + 6, b"\xff" * 8), "expected at most 1099511627776 values in 'a'"),
        (patched(FIRST_FIELD + 6, b"\x05"), "bytes of values by the header, got"),
        (example() + b"\x00", "expected 34 bytes of values by the header, got 35"),
        (example()[:-1], "expected 34 bytes of values by the header, got 33"),
        (example()[:-2] + b"\x02\x00", "expected bytes 0 and 1 in the bool field 'flag'"),
    ],
)
def test_what_is_no_frame(data: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        decode(data)


def test_ragged_fields_have_rows() -> None:
    data = encode(ENVELOPE, {"r": Shared(torch.tensor(1.0))}, 0)
    with pytest.raises(FrameError, match="expected rows in the ragged field 'r', got a scalar"):
        decode(data[:FIRST_FIELD] + b"\x02" + data[FIRST_FIELD + 1 :])


def test_frames_over_the_maximum_are_refused_unread() -> None:
    with pytest.raises(FrameError, match="expected a frame of at most 10 bytes, got"):
        decode(example(), max_bytes=10)


@settings(max_examples=150)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode(data)
    with pytest.raises(FrameError):
        decode(frames.MAGIC + data[: 20 + len(data) % 200])


def mutate(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 8))):
        where = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if where < len(data):
                data[where] ^= 1 << rng.randrange(8)
            case 1:
                del data[where:]
            case 2:
                data[where:where] = rng.randbytes(rng.randrange(1, 9))
            case 3:
                data[where : where + 8] = rng.choice((b"\xff", b"\x00", b"\x7f")) * 8
            case _:
                data[where:where] = data[max(0, where - 12) : where]
        if not data:
            break
    return bytes(data)


def fuzz(rounds: int, seed: int) -> tuple[int, int]:
    """Return how many mutated frames were refused and how many decoded, and the peak of memory."""
    rng = random.Random(seed)
    seeds: list[bytes] = [example()]
    for shape in ((), (0, 3), (5,), (2, 3, 4)):
        kinds: dict[str, Any] = {f"f{n}": Shared(torch.zeros(shape)) for n in range(3)}
        seeds.append(encode(ENVELOPE, kinds, 0))
    refused = decoded = 0
    for _ in range(rounds):
        data = mutate(bytearray(rng.choice(seeds)), rng)
        try:
            envelope, fields = decode(data)
        except FrameError:
            refused += 1
        else:  # what is taken for a frame is one: it encodes back to the same bytes
            assert encode(envelope, fields, 0) == data
            decoded += 1
    return refused, decoded


def test_mutated_frames_are_refused_or_exact() -> None:
    refused, decoded = fuzz(MUTATIONS, seed=1)
    assert refused + decoded == MUTATIONS
    assert decoded > 0


@pytest.mark.slow
def test_a_million_mutated_frames() -> None:
    assert sum(fuzz(10**6, seed=2)) == 10**6


def test_memory_stays_below_twice_the_frame() -> None:
    """Whatever a header claims: claims of 2^40 values cost nothing."""
    big = encode(ENVELOPE, {"w": Shared(torch.zeros(2**20))}, 0)
    lying = big[: FIRST_FIELD + 6] + (2**39).to_bytes(8, "little") + big[FIRST_FIELD + 14 :]
    for data, limit in ((big, 2 * len(big)), (lying, 10**5)):
        tracemalloc.start()
        with contextlib.suppress(FrameError):
            decode(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < limit
