"""A silo's record of what left it: lines are added and never changed (`audit_chain`).

A line is handed to the system before what it tells of leaves, so a killed process has told less
than its file says, never more. Lines are forced to the disk when a run is agreed to, when a round
is over and at the end; a machine that loses power may lose the lines of one round, which is done
again then.

A server cannot fill the disk: of what can be repeated without end (refusals, hellos) the first 16
have a line each, then the 32nd, the 64th and so on, each of which says for how many it stands. And
once the file has `MOST_FILE` bytes nothing leaves any more, until it is moved away.

A line of a call is made between two trainings, which have driven all other code out of the caches:
there code that is called once costs some ten times what it costs in a loop. So such a line is a
kept text with the call's numbers in it, and its making calls little.
"""

import fcntl
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from silograph.core.errors import (
    ConfigError,
    FrameError,
    PolicyError,
    ProtocolError,
    SilographError,
    mistake,
)
from silograph.core.kinds import RECEIVED, Kind
from silograph.core.payload import Payload
from silograph.core.text import count_of
from silograph.federation.frame import Envelope, count_sizes
from silograph.federation.privacy.budget import BudgetUse
from silograph.federation.program import BLANK
from silograph.federation.session.peer import one_line

if TYPE_CHECKING:
    from silograph.federation.session.signed_heads import HeadSigner, SignedHead

# --- Lines of a silo's audit file: each has the hash of the line before it and its own -----------
#
# A line is one JSON object. Its first key, `former`, is the hash of the line before (64 zeros in
# the first line). Its last one, `hash`, is the BLAKE2b of all bytes of the line in front of that
# key. So a changed byte, a line that is missing in between, and two lines that were swapped are
# found. Lines that are missing at the end are not: nothing inside a file can tell that it once
# was longer.


NO_LINE = "0" * 64  # what the first line has in place of the hash of the one before
MOST_LINE = 2**22  # bytes
_END = re.compile(rb', "hash": "([0-9a-f]{64})"\}\n')
_END_BYTES = len(', "hash": ""}\n') + 64


class BrokenChainError(SilographError, ValueError):
    """A line of an audit file was changed after it was written.

    Attributes:
        line: its number, from 1.
        is_torn: whether it is the last one and its end is missing, as after a crash.
        whole: bytes of the lines before it.
    """

    def __init__(self, line: int, reason: str, whole: int, *, is_torn: bool = False) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.is_torn = is_torn
        self.whole = whole


@dataclass(frozen=True, eq=False)
class AuditEntry:
    """A line that is whole.

    Attributes:
        line: its number, from 1.
        facts: its content.
        hash: its own.
    """

    line: int
    facts: Mapping[str, Any]
    hash: str


def line_of(facts: Mapping[str, Any], former: str) -> tuple[bytes, str]:
    """Return the bytes of the next line, and its hash.

    That is BLAKE2b of 256 bits (RFC 7693), in hexadecimal: `b2sum -l 256`. SHA-256 is faster over
    long data, but OpenSSL looks it up and sets it up for each line.

    Args:
        facts: its content.
        former: hash of the line before.
    """
    members = json.dumps(facts, allow_nan=False)[1:-1]
    line, own = with_hash(f'{{"former": "{former}", {members}'.encode())
    return line, own.decode()


def with_hash(body: bytes) -> tuple[bytes, bytes]:
    """Complete a line with its hash; return it and the hash."""
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
    """Return the content of a line and its hash, both checked."""
    end = _END.fullmatch(data, max(0, len(data) - _END_BYTES))
    if end is None:
        raise BrokenChainError(line, "expected a line that ends with its hash, got another", whole)
    body, own = data[: end.start()], end[1].decode()
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


@dataclass(eq=False)
class AuditedRun:
    """The entries of one run in an audit file, summed up.

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
        spent: what the run has cost of the privacy budget; None: nothing was charged.
        budget: line of the last charge, and what all runs had cost then of the silo's budget; None:
            it has none.
        ended: the entry that calls it over, else its last one of an end; None where it has none, as
            after a crash.
    """

    run: str
    agreed: AuditEntry | None = None
    agreements: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    rounds: tuple[int, int] | None = None
    repeats: int = 0
    refusals: list[AuditEntry] = field(default_factory=list)
    refused: int = 0
    spent: Mapping[str, Any] | None = None
    budget: tuple[int, BudgetUse] | None = None
    ended: AuditEntry | None = None

    @property
    def sent(self) -> int:
        """Bytes of all frames that left."""
        return self.bytes.total()

    def add(self, entry: AuditEntry) -> None:
        """Add an entry; raise `KeyError`, `TypeError` or `ValueError` if it has other fields."""
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
            case "charged":
                self.spent = {
                    "unit": str(facts["unit"]),
                    "epsilon": float(facts["epsilon"]),
                    "delta": float(facts["delta"]),
                    "releases": _count(facts["releases"]),
                }
                if "budget" in facts:
                    self.budget = entry.line, BudgetUse(**facts["budget"])
            case "refused":
                self.refused += _count(facts["times"])
                self.refusals.append(entry)
            case "ended":
                self.refused += _count(facts.get("refusals_without_a_line", 0))
                is_over = self.ended is not None and self.ended.facts.get("reason") is None
                self.ended = self.ended if is_over else entry  # whoever shows itself after that


def _count(value: object) -> int:
    """Return a number of bytes, rounds or entries; raise `ValueError` for anything else."""
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(value)
    return value


@dataclass(frozen=True, eq=False)
class AuditReading:
    """The contents of an audit file, up to its end or to a broken line.

    Attributes:
        lines: that are whole.
        head: hash of the last of them.
        runs: in the order in which they begin.
        broken: what is wrong with the line after them; None: they are all.
        noted: numbers of lines by their hash, of those in `noted_hashes`.
        signed: signed heads, by the number of the line that follows the head.
        heads: of other silos' audits, as signed by them.
    """

    lines: int
    head: str
    runs: Sequence[AuditedRun]
    broken: BrokenChainError | None
    noted: Mapping[str, int]
    signed: Mapping[int, "SignedHead"]
    heads: Sequence["SignedHead"]

    @property
    def budget(self) -> BudgetUse | None:
        """What all runs had cost of the silo's privacy budget at the last charge."""
        uses = [run.budget for run in self.runs if run.budget is not None]
        return max(uses, key=lambda use: use[0])[1] if uses else None


def read_audit(file: BinaryIO, noted_hashes: Collection[str] = ()) -> AuditReading:
    """Read an audit file; the memory does not depend on the number of calls in it.

    Args:
        file: to read from.
        noted_hashes: hashes of lines that others have noted.
    """
    runs: dict[str, AuditedRun] = {}
    lines, head, damage = 0, NO_LINE, None
    noted: dict[str, int] = {}
    signed: dict[int, SignedHead] = {}
    heads: list[SignedHead] = []
    try:
        for entry in entries_of(file):
            if entry.facts.get("event") in ("signed", "heads"):
                try:
                    own, others = _signed_heads(entry, head)
                except (FrameError, AttributeError):
                    reason = "expected the signature of the line before it, got another"
                    raise BrokenChainError(entry.line, reason, 0) from None
                signed |= own
                heads += others
            run = entry.facts.get("run")
            if run is not None:
                try:
                    runs.setdefault(run, AuditedRun(run)).add(entry)
                except (KeyError, TypeError, ValueError):
                    reason = "expected what silograph writes in an audit file, got other fields"
                    raise BrokenChainError(entry.line, reason, 0) from None
            lines, head = entry.line, entry.hash
            if entry.hash in noted_hashes:
                noted[entry.hash] = entry.line
    except BrokenChainError as error:
        damage = error
    return AuditReading(lines, head, list(runs.values()), damage, noted, signed, heads)


def _signed_heads(
    entry: AuditEntry, former: str
) -> tuple[dict[int, "SignedHead"], list["SignedHead"]]:
    """Return the signed head of a line by its number, and those of other silos in it.

    Raises:
        FrameError: a signature is wrong, or not of the line before.
    """
    from silograph.federation.session.signed_heads import SignedHead

    if entry.facts["event"] == "heads":
        return {}, [SignedHead.of(each) for each in entry.facts["heads"].values()]
    signed = SignedHead.of(entry.facts)
    if signed.head != former or not signed.is_valid:
        raise FrameError("expected the signature of the line before it, got another")
    return {entry.line: signed}, []


AUDIT = "audit.jsonl"
MOST_FILE = 2**30  # bytes: some two million calls
MARGIN = 2**20  # bytes for why and how a run ends, once it is full
MOST_HEADS = 16  # lines of signed heads of a process that its server asks for
WRITTEN_OUT = 16  # lines alike; of those after them one for each power of two
NOT_AGREED = "over before this silo agreed to it in this process"
STATES_STAY = "over without a result that has this silo's own part: its states stay"


class Audit:
    """Adds lines to an audit file; without a file it only counts.

    Args:
        file: descriptor to append to; None writes nothing.
        about: facts of every agreement: the server, its authority, the policy's digest.
        runs: that the file has already.
        head: hash of its last line.
        size: its bytes.
    """

    def __init__(
        self,
        file: int | None = None,
        about: Mapping[str, str] | None = None,
        runs: Mapping[str, AuditedRun] | None = None,
        head: str = NO_LINE,
        size: int = 0,
    ) -> None:
        self._file = file
        self._is_torn = False
        self.about = dict(about or {})
        self.runs = dict(runs or {})
        self._head = head.encode()
        self._size = size
        self._second, self._date = -1, b""  # of the last line
        self._num_seen: Counter[str] = Counter()  # by event, of what is folded
        self._num_listed: Counter[str] = Counter()
        self.agreed_run: RunAudit | None = None  # a process takes part in one run
        self.hello_run: RunAudit | None = None  # to which a hello went last
        self.strays: Counter[str] = Counter()  # bytes of hellos to runs that nothing came of
        self._bytes: Counter[str] = Counter()  # by event, not yet in a line
        self.signer: HeadSigner | None = None  # signs heads, where there is a key

    @property
    def charged(self) -> Mapping[str, Mapping[str, Any]]:
        """What runs had cost of the privacy budget when this process began, by run."""
        return {each.run: each.spent for each in self.runs.values() if each.spent is not None}

    def of_run(self, run: str) -> "RunAudit":
        """Return the record of one run."""
        return RunAudit(self, run, self.runs.get(run))

    def to_end(self, take_part: Callable[[], str | None]) -> str | None:
        """Take part in a run, record how that ended, and return why it failed, if it did."""
        try:
            reason = take_part()
        except BaseException as error:
            with suppress(PolicyError):
                self._end(one_line(error) or type(error).__name__)
            raise
        self._end(reason)
        return reason

    def _end(self, reason: str | None) -> None:
        run = self.agreed_run or self.hello_run
        if run is not None:
            run.record_end(reason)

    def add(self, event: str, facts: Mapping[str, Any], *, force: bool = False) -> None:
        """Add a line; with `force` it is on the disk when this returns.

        Raises:
            PolicyError: it cannot be written, and so what it tells of must not leave.
        """
        moment = time.time_ns() // 10**6
        self._begin_second(moment // 1000)
        when = f"{self._date.decode()}.{moment % 1000:03}Z"
        line, own = line_of({"time": when, "event": event, **facts}, self.head)
        self._write(event, line, own.encode())
        if force:
            self.force()

    def add_call(self, form: bytes, numbers: tuple[int, ...]) -> None:
        """Add the line of a call; see `add`.

        Args:
            form: of calls alike, see `_form`.
            numbers: of this one, in the form's order.
        """
        moment = time.time_ns() // 10**6
        second = moment // 1000
        if second != self._second:
            self._begin_second(second)
        body = form % (self._head, self._date, moment - 1000 * second, *numbers)
        self._write("answered", *with_hash(body))

    def _write(self, event: str, line: bytes, own: bytes) -> None:
        """Append a line whose hash is `own`."""
        size = self._size + len(line)
        if self._is_torn:
            raise _unwritable("its last line could not be written")
        if self._file is not None:
            if size > MOST_FILE + MARGIN * (event in ("refused", "ended", "signed")):
                raise PolicyError(full_file(AUDIT))
            try:
                wrote = os.write(self._file, line)
            except OSError as error:
                raise _unwritable(error.strerror) from None
            if wrote < len(line):  # cut the part off
                try:
                    os.ftruncate(self._file, self._size)
                except OSError:  # the next start says that the end is torn: nothing may follow it
                    self._file, self._is_torn = None, True
                raise _unwritable("No space left on device")
        self._head, self._size = own, size

    @property
    def head(self) -> str:
        """Hash of the last line."""
        return self._head.decode()

    def _begin_second(self, second: int) -> None:
        """Format the time of day without thousandths, once a second."""
        self._second = second
        self._date = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode()

    def force(self) -> None:
        """Wait until all lines are on the disk."""
        if self._file is None:
            return
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise _unwritable(error.strerror) from None

    def fold(self, event: str, facts: Mapping[str, Any], size: int = 0) -> None:
        """Add a line for an event that a server can repeat, or count it for a later line."""
        self._num_seen[event] += 1
        self._bytes[event] += size
        occurrences = self._num_seen[event]
        if occurrences <= WRITTEN_OUT or occurrences & (occurrences - 1) == 0:
            times = occurrences - self._num_listed[event]
            sizes = {"bytes": self._bytes[event]} if size else {}
            self.add(event, {**facts, "times": times, **sizes})
            self._num_listed[event], self._bytes[event] = occurrences, 0

    def add_signature(self, run: str) -> Mapping[str, Any]:
        """Sign the head in a line of its own, and return the signed head; empty without a key."""
        if self.signer is None:
            return {}
        signed = self.signer.sign(self.head).to_facts()
        self.add("signed", {"run": run, **signed}, force=True)
        return signed

    def count_unlisted(self, event: str) -> int:
        """Return the number of folded events that are in no line yet."""
        return self._num_seen[event] - self._num_listed[event]


class RunAudit:
    """Records one run.

    Args:
        audit: the silo's.
        run: what names the run.
        before: what the file has of it, from an earlier process.
    """

    def __init__(self, audit: Audit, run: str, before: AuditedRun | None = None) -> None:
        self._audit = audit
        self._run = run
        self._before = before
        self._sent = 0 if before is None else before.sent
        self._repeats = 0 if before is None else before.repeats
        self._last = BLANK if before is None or before.rounds is None else before.rounds[1]
        self._calls = 0
        self._bytes = 0
        self._open: str | None = NOT_AGREED  # why it may go on, though its server calls it over
        self._num_heads = 0
        self.hello = 0  # bytes of hellos of this process

    @property
    def run(self) -> str:
        """Public name of the run."""
        return self._run

    @property
    def charged(self) -> Mapping[str, Mapping[str, Any]]:
        """See `Audit.charged`."""
        return self._audit.charged

    @property
    def others(self) -> tuple[int, int]:
        """How many other runs the silo has agreed to: of anybody, and of this server.

        Host and authority name a server; its port may differ.
        """
        audit = self._audit
        agreements = [
            each.agreed.facts
            for name, each in audit.runs.items()
            if name != self._run and each.agreed is not None
        ]
        return len(agreements), [_server(each) for each in agreements].count(_server(audit.about))

    @property
    def sent(self) -> int:
        """Bytes that have left in this run, and in hellos to others that nothing came of.

        Else a server could ask for hellos without end, each in a run of another name.
        """
        others = sum(size for run, size in self._audit.strays.items() if run != self._run)
        return self._sent + others

    def repeats_with(self, number: int) -> int:
        """Return how many rounds have been done again once this one has begun, also by others."""
        return self._repeats + (number <= self._last)

    def check_again(self, digest: str) -> None:
        """Raise `ProtocolError` for a run of a name that was another one's, or of one that is over.

        Else a server could have any number of runs under one name, and they would count as one.

        Args:
            digest: of the config that the silo is asked to agree to.
        """
        before = self._before
        if before is None or before.agreed is None:
            return
        if before.agreed.facts.get("config") != digest:
            raise ProtocolError(
                "expected the config that this silo agreed to in this run before, got another one: "
                "a server gives each run a name of its own"
            )
        if before.ended is not None and before.ended.facts.get("reason") is None:
            raise ProtocolError(
                "expected a run that is not over, got one that this silo has seen the end of: "
                "begin a new run"
            )

    def record_hello(self, frame: bytes) -> None:
        """Record a hello that is about to leave."""
        facts = {"run": self._run, "digest": digest_of(frame)}
        self._audit.fold("hello", facts, len(frame))
        self._audit.hello_run = self
        self._audit.strays[self._run] += len(frame)
        self.hello += len(frame)
        self._sent += len(frame)
        self._bytes += len(frame)

    def record_agreement(self, facts: Mapping[str, Any]) -> None:
        """Record an agreement; it is on the disk when this returns."""
        self._audit.add("agreed", {"run": self._run, **facts, **self._audit.about}, force=True)
        self._audit.add_signature(self._run)
        self._audit.agreed_run = self
        self._audit.strays.pop(self._run, None)
        self._open = None

    def record_reply(
        self, envelope: Envelope, reply: Payload, frame: bytes, *, begins: bool = False
    ) -> None:
        """Record a reply that is about to leave; `begins`: it is the first one of its round."""
        number, size = envelope.round, len(frame)
        form = _form(self._run, envelope.op, envelope.kind, begins, tuple(reply))
        sizes = [field.t.nbytes for field in reply.values()]
        scores = int(count_sizes(reply, 1)[0])
        numbers = (number, size, scores) if scores else (number, size)
        self._audit.add_call(form, (*numbers, *sizes))
        if begins:
            self._repeats += number <= self._last
        if number > self._last:
            self._last = number
        self._calls += 1
        self._sent += size
        self._bytes += size

    def record_charge(self, facts: Mapping[str, Any]) -> None:
        """Record what a reply costs of the privacy budget; it is on the disk when this returns."""
        self._audit.add("charged", {"run": self._run, **facts}, force=True)

    def record_refusal(self, reason: str) -> None:
        """Record a refusal or a failure."""
        self._audit.fold("refused", {"run": self._run, "reason": reason})

    def sign_head(self) -> Mapping[str, Any]:
        """Sign the head so far, and return it as values of JSON.

        Raises:
            ProtocolError: this process has signed often enough, or has no key.
        """
        self._count_heads()
        signed = self._audit.add_signature(self._run)
        if not signed:
            raise ProtocolError("expected an audit that is signed, got none")
        return signed

    def record_heads(self, heads: Mapping[str, Mapping[str, Any]]) -> None:
        """Write down the signed heads of other silos' audits, by silo."""
        self._count_heads()
        self._audit.add("heads", {"run": self._run, "heads": heads}, force=True)

    def _count_heads(self) -> None:
        """Count lines of heads, which a server could cause without end."""
        self._num_heads += 1
        if self._num_heads > MOST_HEADS:
            raise ProtocolError(
                f"expected at most {MOST_HEADS} requests for heads of audits, got more"
            )

    def states_stay(self) -> None:
        """Record that the run may continue although its server has ended it."""
        self._open = STATES_STAY

    def round_over(self) -> None:
        """Wait until the lines of a round are on the disk."""
        self._audit.force()

    def record_end(self, reason: str | None) -> None:
        """Record the end of this process's part in the run.

        Args:
            reason: why the run failed; None where its server has called it over. Only that of a run
                whose result is kept stands in the line as null: nobody can go on with it.
        """
        reason = self._open if reason is None else reason
        counts = {"calls": self._calls, "bytes": self._bytes}
        if num_unlisted := self._audit.count_unlisted("refused"):
            counts["refusals_without_a_line"] = num_unlisted
        self._audit.add("ended", {"run": self._run, "reason": reason, **counts}, force=True)
        self._audit.add_signature(self._run)


def _server(facts: Mapping[str, Any]) -> tuple[str, object]:
    return str(facts.get("server")).rpartition(":")[0], facts.get("authority")


def digest_of(data: bytes) -> str:
    """Return a SHA-256 in hexadecimal."""
    return sha256(data).hexdigest()


@lru_cache(1024)
def _form(run: str, op: str, kind: str, begins: bool, names: tuple[str, ...]) -> bytes:
    """Return the line of calls alike but for its hash.

    It has places for the hash of the line before, the second, its thousandths, the round, the bytes
    of the frame, those of its scores if it has any, and those of each field.
    """
    run, op, kind, *number_fields = (
        json.dumps(text).replace("%", "%%") for text in (run, op, kind, *names)
    )
    first = ', "begins": true' if begins else ""
    scores = ', "scores": %d' if any(name.startswith(RECEIVED) for name in names) else ""
    fields = ", ".join(f"{name}: %d" for name in number_fields)
    return (
        '{"former": "%b", "time": "%b.%03dZ", "event": "answered", '
        f'"run": {run}, "round": %d{first}, '
        f'"op": {op}, "kind": {kind}, "bytes": %d{scores}, "fields": {{{fields}}}'
    ).encode()


def _unwritable(reason: str | None) -> PolicyError:
    return PolicyError(
        f"expected to write down in {AUDIT} what leaves, got: {reason}: nothing more is sent; make "
        "room and start the silo again"
    )


def full_file(name: str) -> str:
    """Return the message for a file that has reached its largest size."""
    return (
        f"expected at most {MOST_FILE:,} bytes in {name}, got as many: nothing more is sent; move "
        "the file away, the next start begins a new one"
    )


# --- An audit file on the disk: begun or continued, by one process -------------------------------


@contextmanager
def open_audit(path: Path | None, about: Mapping[str, str]) -> Iterator[tuple[Audit, str]]:
    """Continue an audit file, or begin it, and say how; no other process can meanwhile.

    Args:
        path: of the file; None only counts, and says nothing.
        about: facts of every agreement: the server, its authority, the policy's digest.

    Raises:
        ConfigError: the file cannot be written, is held by another process, or was changed.
    """
    if path is None:
        yield Audit(about=about), ""
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"expected to write {path}, got: {error.strerror}", **mistake("unwritable-path", path)
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # a pipe would never be read to its end
            raise ConfigError(
                f"expected a file at {path}, got something else", **mistake("wrong-format", path)
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"expected one process that writes {path}, got another one: stop it first",
                **mistake("folder-in-use", path),
            ) from None
        yield _continued(path, file, about)
    finally:
        os.close(file)


def _continued(path: Path, file: int, about: Mapping[str, str]) -> tuple[Audit, str]:
    """Continue after the last complete line; an incomplete line at the end is cut off."""
    with os.fdopen(os.dup(file), "rb") as reader:
        reader.seek(0)
        reading = read_audit(reader)
    damage, size = reading.broken, os.fstat(file).st_size
    if damage is not None and not damage.is_torn:
        raise ConfigError(
            f"expected {path} as this silo wrote it, got other contents in {damage}: keep it and "
            "move it away, the next start begins a new one (docs/how_to/read_the_audit.md)",
            **mistake("damaged-file", path),
        )
    torn_bytes = 0 if damage is None else size - damage.whole
    if size - torn_bytes >= MOST_FILE:
        raise ConfigError(full_file(str(path)))
    if torn_bytes:
        os.ftruncate(file, size - torn_bytes)
    runs = {run.run: run for run in reading.runs}
    audit = Audit(file, about, runs, reading.head, size - torn_bytes)
    note = f"{path} has {count_of(reading.lines, 'line')}, each as it was written"
    if torn_bytes:
        audit.add("torn", {"line": reading.lines + 1, "bytes": torn_bytes}, force=True)
        note += (
            f"; {count_of(torn_bytes, 'byte')} of a line without an end were cut off, "
            "and a line says so"
        )
    return audit, note
