"""Lines of a silo's audit file: each has the hash of the line before it and its own.

A line is one JSON object. Its first key, `former`, is the hash of the line before (64 zeros in the
first line). Its last one, `hash`, is the BLAKE2b of all bytes of the line in front of that key. So
a changed byte, a line that is missing in between, and two lines that were swapped are found. Lines
that are missing at the end are not: nothing inside a file can tell that it once was longer.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any, BinaryIO

from silograph.core.errors import SilographError
from silograph.core.kinds import Kind

NO_LINE = "0" * 64  # what the first line has in place of the hash of the one before
MOST_LINE = 2**22  # bytes
_END = re.compile(rb', "hash": "([0-9a-f]{64})"\}\n')
_END_BYTES = len(', "hash": ""}\n') + 64


class BrokenChainError(SilographError, ValueError):
    """A line of an audit file is not as it was written.

    Attributes:
        line: its number, from 1.
        is_torn: whether it is the last one and its end is missing, as after a crash.
        is_older: whether it is the first one, and as an earlier version wrote it.
        whole: bytes of the lines before it.
    """

    def __init__(
        self, line: int, reason: str, whole: int, *, is_torn: bool = False, is_older: bool = False
    ) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.is_torn = is_torn
        self.is_older = is_older
        self.whole = whole


@dataclass(frozen=True, eq=False)
class AuditEntry:
    """A line that is whole.

    Attributes:
        line: its number, from 1.
        facts: what it says.
        hash: its own.
    """

    line: int
    facts: Mapping[str, Any]
    hash: str


def line_of(facts: Mapping[str, Any], former: str) -> tuple[bytes, str]:
    """Return the bytes of the next line and its hash.

    Args:
        facts: what it says.
        former: hash of the line before.
    """
    return chained(json.dumps(facts, allow_nan=False)[1:-1], former)


def chained(told: str, former: str) -> tuple[bytes, str]:
    """Return the bytes of the next line and its hash.

    That is BLAKE2b of 256 bits (RFC 7693), in hexadecimal: `b2sum -l 256`. SHA-256 is faster over
    long data, but OpenSSL looks it up and sets it up for each line.

    Args:
        told: what it says, as the inside of a JSON object.
        former: hash of the line before.
    """
    line, own = with_hash(f'{{"former": "{former}", {told}'.encode())
    return line, own.decode()


def with_hash(body: bytes) -> tuple[bytes, bytes]:
    """Return a line whose hash is still missing with it, and the hash."""
    own = blake2b(body, digest_size=32).hexdigest().encode()
    return b'%b, "hash": "%b"}\n' % (body, own), own


def entries_of(file: BinaryIO) -> Iterator[AuditEntry]:
    """Yield the lines of an audit file, each once it is checked.

    Raises:
        BrokenChainError: names the first line that is not as it was written.
    """
    former, line, whole = NO_LINE, 0, 0
    while data := file.readline(MOST_LINE):
        line += 1
        if not data.endswith(b"\n") and len(data) < MOST_LINE:
            reason = f"expected a whole line, got {len(data)} bytes without an end"
            raise BrokenChainError(line, reason, whole, is_torn=True)
        facts, own = _read(data, former, line, whole)
        yield AuditEntry(line, facts, own)
        former, whole = own, whole + len(data)


def _read(data: bytes, former: str, line: int, whole: int) -> tuple[dict[str, Any], str]:
    """Return what a line says and its hash, once both are checked."""
    end = _END.fullmatch(data, max(0, len(data) - _END_BYTES))
    if end is None:
        raise BrokenChainError(line, "expected a line that ends with its hash, got another", whole)
    body, own = data[: end.start()], end[1].decode()
    if former == NO_LINE and sha256(body).hexdigest() == own:
        reason = (
            "expected a line whose hash is BLAKE2b, got a whole one with SHA-256: silograph "
            "0.1.0.dev0 wrote it, before lines named the version"
        )
        raise BrokenChainError(line, reason, whole, is_older=True)
    if blake2b(body, digest_size=32).hexdigest() != own:
        reason = "expected the bytes that its hash was made of, got others"
        raise BrokenChainError(line, reason, whole)
    try:
        facts = json.loads(body + b"}")
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise BrokenChainError(line, "expected a JSON object, got something else", whole)
    if facts.get("former") != former:
        reason = "expected the hash of the line before it, got another: one is missing, or moved"
        raise BrokenChainError(line, reason, whole)
    return facts, own


@dataclass(frozen=True, eq=False)
class AuditedRun:
    """What an audit file says of one run.

    Attributes:
        run: what names it.
        agreed: the first entry of its agreement; None where the silo agreed to nothing.
        agreements: how often the silo agreed to it: once more after each restart.
        calls: answered, by kind.
        bytes: sent in them, by kind, and those of the hello under `hello`.
        rounds: first and last round of a call; None without a call.
        repeats: rounds that were begun again.
        refusals: what was refused, or failed; one entry may stand for many.
        refused: how many they were.
        ended: the entry that calls it over, else its last one of an end; None where it has none, as
            after a crash.
    """

    run: str
    agreed: AuditEntry | None
    agreements: int
    calls: Mapping[str, int]
    bytes: Mapping[str, int]
    rounds: tuple[int, int] | None
    repeats: int
    refusals: Sequence[AuditEntry]
    refused: int
    ended: AuditEntry | None

    @property
    def sent(self) -> int:
        """Bytes of all frames that left."""
        return sum(self.bytes.values())


def _count(found: object) -> int:
    """Return a number of bytes, rounds or entries; raise `ValueError` for anything else."""
    if not isinstance(found, int) or not 0 <= found < 2**63:
        raise ValueError(found)
    return found


class RunCounts:
    """Adds up the entries of one run."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.agreed: AuditEntry | None = None
        self.ended: AuditEntry | None = None
        self.agreements = 0
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.rounds: tuple[int, int] | None = None
        self.repeats = 0
        self.refusals: list[AuditEntry] = []
        self.refused = 0

    def add(self, entry: AuditEntry) -> None:
        """Take in an entry."""
        facts = entry.facts
        match facts.get("event"):
            case "hello":
                self.bytes["hello"] += _count(facts["bytes"])
            case "agreed":
                self.agreed, self.ended = self.agreed or entry, None
                self.agreements += 1
            case "answered":
                number, kind = _count(facts["round"]), str(facts["kind"])
                self.calls[kind] += 1
                scores = _count(facts.get("scores", 0))
                self.bytes[kind] += _count(facts["bytes"]) - scores
                if scores:
                    self.bytes[str(Kind.EVALUATION)] += scores
                self.repeats += "begins" in facts and number <= (self.rounds or (0, -1))[1]
                first, last = self.rounds or (number, number)
                self.rounds = min(first, number), max(last, number)
            case "refused":
                self.refused += _count(facts["times"])
                self.refusals.append(entry)
            case "ended":
                self.refused += _count(facts.get("refusals_without_a_line", 0))
                is_over = self.ended is not None and self.ended.facts.get("reason") is None
                self.ended = self.ended if is_over else entry  # whoever shows itself after that

    def summary(self) -> AuditedRun:
        """Return what they come to."""
        return AuditedRun(
            self.run,
            self.agreed,
            self.agreements,
            dict(sorted(self.calls.items())),
            dict(sorted(self.bytes.items())),
            self.rounds,
            self.repeats,
            tuple(self.refusals),
            self.refused,
            self.ended,
        )


@dataclass(frozen=True, eq=False)
class AuditReading:
    """What an audit file says, up to its end or to where it is broken.

    Attributes:
        lines: that are whole.
        head: hash of the last of them.
        runs: in the order in which they begin.
        broken: what is wrong with the line after them; None: they are all.
        noted: line whose hash is the one that was looked for; None: no such line.
    """

    lines: int
    head: str
    runs: Sequence[AuditedRun]
    broken: BrokenChainError | None
    noted: int | None


def read_audit(file: BinaryIO, looked_for: str | None = None) -> AuditReading:
    """Return what an audit file says; it takes no more memory the longer the file is.

    Args:
        file: to read from.
        looked_for: the hash of a line that somebody has noted.
    """
    found: dict[str, RunCounts] = {}
    lines, head, noted, broken = 0, NO_LINE, None, None
    try:
        for entry in entries_of(file):
            _add(found, entry)
            lines, head = entry.line, entry.hash
            noted = entry.line if entry.hash == looked_for else noted
    except BrokenChainError as error:
        broken = error
    return AuditReading(lines, head, [c.summary() for c in found.values()], broken, noted)


def _add(found: dict[str, RunCounts], entry: AuditEntry) -> None:
    """Add an entry to what is known of its run."""
    run = entry.facts.get("run")
    if run is None:
        return
    try:
        if run not in found:
            found[run] = RunCounts(run)
        found[run].add(entry)
    except (KeyError, TypeError, ValueError):
        reason = "expected what silograph writes in an audit file, got other fields"
        raise BrokenChainError(entry.line, reason, 0) from None
