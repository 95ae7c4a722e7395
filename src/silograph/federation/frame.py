"""Frames: the bytes of one client's part of a payload, and their number without making them.

A frame is what travels between the server and one client in one direction:

    header   magic "SGF1" · kind u8 · op length u16 · fields u16 · round u32 · step u32
    op       UTF-8
    fields   for each, by name: form u8 · dtype u8 · dimensions u8 · name length u16 · name ·
             each dimension u64
    buffers  for each, in the same order: raw little-endian values, C order, nothing between

Numbers are little-endian and of fixed width, so the size of a frame is a function of the op's
name and of the fields' names, dtypes and shapes. There is no pickle and no JSON: whatever is
not exactly this is refused before anything is allocated for it.
"""

import itertools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import FrameError
from silograph.core.kinds import RECEIVED, Kind
from silograph.core.payload import Field, Patched, Payload, Ragged, Shared, Stacked

MAGIC = b"SGF1"
HEADER = struct.Struct("<4sBHHII")
FIELD = struct.Struct("<BBBH")
DIMENSION = struct.Struct("<Q")
KINDS = tuple(Kind)
RESULT = "result"  # what a frame with a run's result has in place of an op's name
FORMS: tuple[type[Field], ...] = (Shared, Stacked, Ragged)
DTYPES = {
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.float16: "<f2",
    torch.int8: "<i1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.uint8: "<u1",
    torch.bool: "|b1",
}
_DTYPE_LIST = tuple(DTYPES)
_NUMPY_DTYPES = {dtype: np.dtype(code) for dtype, code in DTYPES.items()}
MAX_DIMENSIONS = 8
MAX_NAME = 255
MAX_FIELDS = 4096
MAX_ELEMENTS = 2**40
MOST_CACHED = 2**14  # bytes of the longest heads of a frame that are cached
MAX_FRAME_BYTES = 2**31  # default of the largest frame that is decoded, in bytes


@dataclass(frozen=True)
class Envelope:
    """What a frame says about itself besides its fields."""

    op: str
    kind: Kind
    round: int
    step: int


def _part(field: Field, position: int) -> np.ndarray:
    """Return what travels for the client at `position`; in NumPy, as most fields are short."""
    values = (field.slice(position) if isinstance(field, Patched) else field.t).detach()
    array: np.ndarray = (values if values.is_cpu else values.cpu()).numpy()
    if isinstance(field, Stacked):
        array = array[position : position + 1].reshape(array.shape[1:])
    elif isinstance(field, Ragged):
        array = array[int(field.off[position]) : int(field.off[position + 1])]
    return array if array.flags.c_contiguous else array.copy()


def frame_sizes(op: str, payload: Payload, clients: int) -> np.ndarray:
    """Return the length of each client's frame without making it, (C,) int64 bytes.

    Args:
        op: name of the op.
        payload: fields for C clients.
        clients: C, at least 1.
    """
    size = HEADER.size + len(op.encode())
    rows: np.ndarray | None = None  # bytes of each client's own numbers of rows
    for name, field in payload.items():
        t = field.base if isinstance(field, Patched) else field.t  # a Patched one travels whole
        dims = t.dim()
        if isinstance(field, Shared):
            size += t.nbytes
        elif isinstance(field, Ragged):
            ends = field.off.cpu().numpy()
            counts = (ends[1:] - ends[:-1]) * (t.element_size() * math.prod(t.shape[1:]))
            rows = counts if rows is None else rows + counts
        else:
            dims -= 1
            size += t.nbytes // max(t.size(0), 1)
        size += FIELD.size + len(name.encode()) + DIMENSION.size * dims
    return np.full(clients, size, dtype=np.int64) if rows is None else rows + size


def count_sizes(payload: Payload, clients: int) -> np.ndarray:
    """Return the bytes of each client's scores of the weights that it received, (C,) int64."""
    counts = {name: field for name, field in payload.items() if name.startswith(RECEIVED)}
    if not counts:
        return np.zeros(clients, dtype=np.int64)
    return frame_sizes("", counts, clients) - HEADER.size


def encode(envelope: Envelope, payload: Payload, position: int) -> bytes:
    """Return the frame of the client at `position` of a payload.

    Raises:
        FrameError: a name, dtype or shape that frames cannot carry.
    """
    if len(payload) > MAX_FIELDS:
        raise FrameError(f"expected at most {MAX_FIELDS} fields, got {len(payload)}")
    op = envelope.op.encode()
    head = [
        HEADER.pack(
            MAGIC,
            KINDS.index(envelope.kind),
            len(op),
            len(payload),
            envelope.round,
            envelope.step,
        ),
        op,
    ]
    buffers: list[memoryview] = []
    for name, field in payload.items():
        dtype = field.t.dtype
        if dtype not in DTYPES:
            raise FrameError(f"expected a dtype that frames carry in {name!r}, got {dtype}")
        values = _part(field, position)
        kind = Stacked if isinstance(field, Patched) else type(field)
        head.append(_pack_head(name, FORMS.index(kind), dtype, values.shape))
        buffers.append(values.astype(_NUMPY_DTYPES[dtype], copy=False).data)
    return b"".join((*head, *buffers))


@lru_cache(maxsize=1024)  # heads are the same in most rounds
def _pack_head(name: str, form: int, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the head of a field; raise `FrameError` for one that frames cannot carry."""
    encoded = name.encode()
    if len(encoded) > MAX_NAME or len(shape) > MAX_DIMENSIONS:
        raise FrameError(
            f"expected a name of at most {MAX_NAME} bytes and at most {MAX_DIMENSIONS} "
            f"dimensions, got {name!r} with {len(shape)}"
        )
    numbers = form, _DTYPE_LIST.index(dtype), len(shape), len(encoded)
    return FIELD.pack(*numbers) + encoded + struct.pack(f"<{len(shape)}Q", *shape)


def frames(envelope: Envelope, payload: Payload, clients: int) -> Iterator[bytes]:
    """Yield each client's frame; one for all is encoded once."""
    if all(isinstance(field, Shared) for field in payload.values()):
        yield from itertools.repeat(encode(envelope, payload, 0), clients)
        return
    for position in range(clients):
        yield encode(envelope, payload, position)


class _Reader:
    """Reads from a buffer and never past its end."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = memoryview(data)
        self.at = 0

    def take(self, size: int, what: str) -> memoryview:
        """Return the next `size` bytes."""
        if size > len(self.data) - self.at:
            raise FrameError(
                f"expected {size} more bytes of {what}, got {len(self.data) - self.at}: cut short"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def text(self, size: int, what: str) -> str:
        """Return the next `size` bytes as UTF-8."""
        try:
            return bytes(self.take(size, what)).decode()
        except UnicodeDecodeError:
            raise FrameError(f"expected UTF-8 in {what}, got other bytes") from None


class _FieldHead(NamedTuple):
    name: str
    form: type[Field]
    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int  # bytes of its values


def _field_head(reader: _Reader) -> _FieldHead:
    form, dtype, dims, length = FIELD.unpack(reader.take(FIELD.size, "a field"))
    if form >= len(FORMS) or dtype >= len(_DTYPE_LIST) or dims > MAX_DIMENSIONS:
        raise FrameError(
            f"expected a known form, dtype and at most {MAX_DIMENSIONS} dimensions, got "
            f"{form}, {dtype}, {dims}"
        )
    if length > MAX_NAME:
        raise FrameError(f"expected a name of at most {MAX_NAME} bytes, got {length}")
    name = reader.text(length, "a name")
    raw = reader.take(DIMENSION.size * dims, "a shape")
    shape = struct.unpack(f"<{dims}Q", raw)
    if math.prod([n or 1 for n in shape]) > MAX_ELEMENTS:  # empty arrays have a shape, too
        raise FrameError(f"expected at most {MAX_ELEMENTS} values in {name!r}, got shape {shape}")
    if FORMS[form] is Ragged and dims == 0:
        raise FrameError(f"expected rows in the ragged field {name!r}, got a scalar")
    kind = _DTYPE_LIST[dtype]
    return _FieldHead(name, FORMS[form], kind, shape, math.prod(shape) * kind.itemsize)


def _values(head: _FieldHead, raw: memoryview) -> Tensor:
    # A copy, because tensors on a read-only buffer could be written to.
    shape = (1, *head.shape) if head.form is Stacked else head.shape
    array = np.frombuffer(raw, dtype=_NUMPY_DTYPES[head.dtype]).reshape(shape).copy()
    if head.dtype is torch.bool and array.view(np.uint8).max(initial=0) > 1:
        raise FrameError(f"expected bytes 0 and 1 in the bool field {head.name!r}, got others")
    return torch.from_numpy(array)


def _field(head: _FieldHead, t: Tensor) -> Field:
    if head.form is Shared:
        return Shared(t)
    if head.form is Stacked:
        return Stacked(t)
    return Ragged(t, torch.tensor([0, len(t)]))


class _Layout(NamedTuple):
    """The heads of all fields of a frame; `form` is that of `decode_with_form`."""

    heads: tuple[_FieldHead, ...]
    size: int  # bytes of all values
    form: tuple[tuple[object, ...], ...]


def _read_layout(data: bytes, count: int) -> _Layout:
    """Parse the heads of `count` fields; raise `FrameError` if that is impossible."""
    reader = _Reader(data)
    heads = tuple(_field_head(reader) for _ in range(count))
    if len({head.name for head in heads}) < count:
        raise FrameError("expected every field once, got a repeated name")
    form = sorted(
        (head.name, head.form, head.dtype, *head.shape[head.form is not Stacked :])
        for head in heads
    )
    return _Layout(heads, sum(head.size for head in heads), tuple(form))


_cached_layout = lru_cache(maxsize=64)(_read_layout)  # heads are the same in most rounds


def _layout(data: memoryview, count: int) -> tuple[_Layout, int]:
    """Return the layout of `count` fields, whose heads are first in data, and the heads' length."""
    # Find the end of the heads, which are the key of the cache. Too short data fail when parsed.
    end = 0
    for _ in range(count):
        if end + FIELD.size > len(data):
            break
        _, _, dims, length = FIELD.unpack_from(data, end)
        end += FIELD.size + length + DIMENSION.size * dims
    heads = bytes(data[:end])
    return (_cached_layout if len(heads) <= MOST_CACHED else _read_layout)(heads, count), end


def decode(
    data: bytes | memoryview, max_bytes: int = MAX_FRAME_BYTES
) -> tuple[Envelope, dict[str, Field]]:
    """Return what a frame says, as the payload of one client.

    Memory stays below twice the length of the frame, whatever its header claims.

    Raises:
        FrameError: anything but a whole, exact frame of at most `max_bytes` bytes.
    """
    return decode_with_form(data, max_bytes)[:2]


def decode_with_form(
    data: bytes | memoryview, max_bytes: int = MAX_FRAME_BYTES
) -> tuple[Envelope, dict[str, Field], tuple[tuple[object, ...], ...]]:
    """Do the same as `decode`, and also return the name, kind, dtype and shape of every field.

    These are sorted by name. Shapes are without the number of rows of a `Ragged` field, and without
    the first dimension of a `Shared` one, so that replies of several clients to one op are equal.
    """
    if len(data) > max_bytes:
        raise FrameError(f"expected a frame of at most {max_bytes} bytes, got {len(data)}")
    reader = _Reader(data)
    magic, kind, length, count, round_, step = HEADER.unpack(reader.take(HEADER.size, "the header"))
    if magic != MAGIC:
        raise FrameError(f"expected a frame that starts with {MAGIC!r}, got {magic!r}")
    if kind >= len(KINDS) or count > MAX_FIELDS:
        raise FrameError(
            f"expected a known kind and at most {MAX_FIELDS} fields, got {kind} and {count}"
        )
    op = reader.text(length, "the op's name")
    layout, size = _layout(reader.data[reader.at :], count)
    at = reader.at + size
    if layout.size != len(data) - at:
        raise FrameError(
            f"expected {layout.size} bytes of values by the header, got {len(data) - at}"
        )
    payload: dict[str, Field] = {}
    for head in layout.heads:
        payload[head.name] = _field(head, _values(head, reader.data[at : at + head.size]))
        at += head.size
    return Envelope(op, KINDS[kind], round_, step), payload, layout.form
