"""A chain of lines: whatever is changed in it is found, and the line is named."""

import io
import random
from hashlib import blake2b
from typing import Any

import pytest

from silograph.federation.session.audit import (
    MOST_LINE,
    NO_LINE,
    AuditReading,
    line_of,
    read_audit,
)

FACTS: list[dict[str, Any]] = [
    {"time": "t0", "event": "hello", "run": "a", "digest": "d", "times": 1, "bytes": 40},
    {"time": "t1", "event": "agreed", "run": "a", "method": "fedavg", "rounds": 2},
    {"time": "t2", "event": "answered", "run": "a", "round": 0, "kind": "control", "bytes": 7},
    {"time": "t3", "event": "answered", "run": "a", "round": 1, "kind": "weights", "bytes": 90},
    {"time": "t4", "event": "refused", "run": "a", "reason": "no \u00e9\n", "times": 3},
    {"time": "t5", "event": "answered", "run": "a", "round": 2, "kind": "weights", "bytes": 91},
    {"time": "t6", "event": "ended", "run": "a", "reason": None},
    {"time": "t7", "event": "agreed", "run": "b", "method": "local", "rounds": 9},
]


def lines() -> list[bytes]:
    found, former = [], NO_LINE
    for facts in FACTS:
        line, former = line_of(facts, former)
        found.append(line)
    return found


def read(data: bytes, *looked_for: str) -> AuditReading:
    return read_audit(io.BytesIO(data), looked_for)


def broken_at(data: bytes) -> int | None:
    broken = read(data).broken
    return None if broken is None else broken.line


def test_what_a_whole_file_says() -> None:
    found = read(b"".join(lines()))
    assert found.broken is None
    assert found.lines == len(FACTS)
    a, b = found.runs
    assert (a.run, a.agreements, a.calls) == ("a", 1, {"control": 1, "weights": 2})
    assert a.bytes == {"control": 7, "hello": 40, "weights": 181}
    assert (a.sent, a.rounds, a.refused, len(a.refusals)) == (228, (0, 2), 3, 1)
    assert a.ended is not None
    assert a.agreed is not None
    assert a.agreed.facts["method"] == "fedavg"
    assert (b.agreements, b.calls, b.rounds, b.ended) == (1, {}, None, None)
    assert read(b"").lines == 0
    assert read(b"").head == NO_LINE


def test_every_changed_byte_is_found_in_its_line() -> None:
    """All bytes, each with one flipped bit; ends of lines, too."""
    whole, rng = b"".join(lines()), random.Random(0)
    starts = [sum(map(len, lines()[:n])) for n in range(len(FACTS) + 1)]
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << rng.randrange(8)
        line = next(n for n, start in enumerate(starts) if place < start)
        assert broken_at(bytes(data)) == line, (place, whole[place : place + 1])


def test_lines_that_are_missing_moved_or_repeated_are_found() -> None:
    whole = lines()
    for n in range(len(whole) - 1):
        assert broken_at(b"".join(whole[:n] + whole[n + 1 :])) == n + 1
        assert broken_at(b"".join([*whole[: n + 1], *whole[n:]])) == n + 2
        for m in range(n + 1, len(whole)):
            swapped = list(whole)
            swapped[n], swapped[m] = whole[m], whole[n]
            assert broken_at(b"".join(swapped)) == n + 1


def test_a_file_that_is_cut_inside_a_line_is_torn() -> None:
    whole = b"".join(lines())
    ends = {sum(map(len, lines()[:n])) for n in range(len(FACTS) + 1)}
    for size in range(len(whole)):
        broken = read(whole[:size]).broken
        assert (broken is None) == (size in ends)
        if broken is not None:
            assert broken.is_torn
            assert broken.whole == max(end for end in ends if end <= size)


def test_lines_that_are_missing_at_the_end_are_found_by_a_noted_hash_only() -> None:
    whole = b"".join(lines())
    head = read(whole).head
    short = b"".join(lines()[:-2])
    assert read(short).broken is None
    assert read(short, head).noted == {}
    assert read(whole, head).noted == {head: len(FACTS)}
    earlier = read(short).head
    assert read(whole, earlier, head).noted == {earlier: len(FACTS) - 2, head: len(FACTS)}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"x\n", "line 1: expected a line that ends with its hash, got another"),
        (b"x" * MOST_LINE + b"\n", "line 1: expected a line that ends with its hash, got another"),
        (b"x", "line 1: expected a whole line, got 1 bytes without an end"),
        (line_of({"event": "agreed", "run": ["a"]}, NO_LINE)[0], "line 1: expected what silograph"),
        (line_of({"event": "answered", "run": "a"}, NO_LINE)[0], "line 1: expected what silograph"),
        (line_of({"event": "new"}, "1" * 64)[0], "line 1: expected the hash of the line before"),
    ],
    ids=str,
)
def test_what_is_no_audit_file(data: bytes, says: str) -> None:
    assert str(read(data).broken).startswith(says)


def test_a_line_that_is_no_object_is_refused() -> None:
    body = b'{"former": 1,,'
    data = body + f', "hash": "{blake2b(body, digest_size=32).hexdigest()}"}}\n'.encode()
    assert str(read(data).broken) == "line 1: expected a JSON object, got something else"
