"""Long messages travel as chunks, so that nothing is received that is not announced and allowed.

A message of at most `CHUNK` bytes travels as it is. Of a longer one its length goes before it:

    lead     magic "SGL1" · length of the message u64
    chunks   `CHUNK` bytes each, the last one what is left

gRPC refuses what is longer than a chunk by its first bytes. So an end that claims a long message
costs nothing, and one that sends it costs what it has sent, up to what the reader allows.
"""

import struct
from collections.abc import Callable, Iterable, Iterator

from silograph.core.errors import FrameError

CHUNK = 2**21  # bytes: in chunks of 64 KiB a message takes three times as long
SHORT = 2**16  # bytes of any message that has no frame: greetings, rounds, what was done
LEAD = struct.Struct("<4sQ")
MAGIC = b"SGL1"


def cut(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Yield messages as they travel."""
    for data in messages:
        if len(data) <= CHUNK:
            yield data
            continue
        yield LEAD.pack(MAGIC, len(data))
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]


def whole(chunks: Iterator[bytes], most: Callable[[int], int]) -> Iterator[bytes | bytearray]:
    """Yield the messages of what has travelled.

    Args:
        chunks: as they arrive.
        most: bytes of the longest message that is taken, given those of one that is not short.

    Raises:
        FrameError: a message that is longer, or chunks that are none.
    """
    for data in chunks:
        leads = len(data) == LEAD.size and data[:4] == MAGIC
        size = LEAD.unpack(data)[1] if leads else len(data)
        if size > SHORT and size > (limit := most(size)):
            raise FrameError(f"expected a message of at most {limit:,} bytes, got {size:,}")
        yield _joined(chunks, size) if leads else data


def _joined(chunks: Iterator[bytes], size: int) -> bytearray:
    """Return the message of the next chunks."""
    found = bytearray()
    while len(found) < size:
        part = next(chunks, b"")
        expected = min(CHUNK, size - len(found))
        if len(part) != expected:
            raise FrameError(f"expected a chunk of {expected} bytes, got {len(part)}")
        found += part
    return found
