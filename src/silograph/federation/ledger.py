"""The ledger: what every call cost, in bytes and in floating-point operations, by client.

Each call leaves two records, `down` (server to clients) and `up`. Bytes are the lengths of the
frames (`silograph.federation.frame`), one frame for each client and direction; a broadcast counts
once for each recipient. Work is counted where it happens (`silograph.core.work`) and stands in the
`up` record; work for another purpose than the call's, evaluation within training or steps of the
optimizer, has an `up` record of its own kind without bytes. Seconds are no part of it: they never
repeat.

C: clients of the federation. k: clients of a call.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from silograph.core.errors import CheckpointError
from silograph.core.kinds import Kind
from silograph.core.work import WorkTotals
from silograph.federation.frame import Envelope
from silograph.federation.secure.sizes import SumSizes

Direction = Literal["down", "up"]

MOST_CLIENTS = 10**7  # of one call, in a line that is read
# What a damaged line raises; huge and nested values the last two.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, eq=False)
class Record:
    """One direction of one call.

    Attributes:
        round: 0 before the first round.
        step: number of the call within its round, from 1.
        op: name of the op.
        what: declared content.
        direction: `down` or `up`.
        clients: (k,) int64 positions of the clients called.
        bytes: (k,) int64 length of each client's frame.
        flops: (k,) float64 floating-point operations; zeros in `down`.
    """

    round: int
    step: int
    op: str
    what: Kind
    direction: Direction
    clients: np.ndarray
    bytes: np.ndarray
    flops: np.ndarray

    def __eq__(self, other: object) -> bool:
        """Equal in every field; seconds are no part of a record."""
        return isinstance(other, Record) and self.to_line() == other.to_line()

    __hash__ = None  # type: ignore[assignment]

    def to_line(self) -> str:
        """Return the record as one line of JSON."""
        values = (self.clients, self.bytes, self.flops)
        names = ("clients", "bytes", "flops")
        return json.dumps(
            {
                "round": self.round,
                "step": self.step,
                "op": self.op,
                "what": str(self.what),
                "direction": self.direction,
                **{name: _pack(v) for name, v in zip(names, values, strict=True)},
            }
        )

    @staticmethod
    def from_line(line: str) -> "Record":
        """Return the record of a line.

        Raises:
            CheckpointError: the line is no record.
        """
        try:
            fields: dict[str, Any] = json.loads(line)
            clients = _unpack(fields.pop("clients"), np.int64)
            sizes = _unpack(fields.pop("bytes"), np.int64)
            flops = _unpack(fields.pop("flops"), np.float64)
            what = Kind(fields.pop("what"))
            if not (len(clients) == len(sizes) == len(flops) and _are_sound(**fields)):
                raise ValueError("fields that no record has")
            return Record(what=what, clients=clients, bytes=sizes, flops=flops, **fields)
        except _DAMAGE as error:
            raise CheckpointError(f"expected a record of the ledger, got {line[:80]!r}") from error


def _pack(values: np.ndarray) -> dict[str, Any] | list[Any]:
    """Equal values or consecutive numbers take a few characters instead of k."""
    packed: list[Any] = values.tolist()  # lists compare faster than short arrays
    size, first = len(packed), packed[0] if packed else None
    if size > 1 and packed.count(first) == size:
        return {"all": first, "times": size}
    if size > 1 and isinstance(first, int) and packed == list(range(first, first + size)):
        return {"from": first, "times": size}
    return packed


def _are_sound(round: object, step: object, op: object, direction: object) -> bool:
    """Whether the plain fields of a line are of their types."""
    counts = all(type(number) is int and number >= 0 for number in (round, step))
    return counts and isinstance(op, str) and direction in ("down", "up")


def _unpack(packed: dict[str, Any] | list[Any], dtype: type) -> np.ndarray:
    if isinstance(packed, list):
        values: np.ndarray = np.array(packed, dtype=dtype)
        if values.ndim != 1:
            raise ValueError("a list of lists")
        return values
    if not 0 <= packed["times"] <= MOST_CLIENTS:  # else a line could ask for any memory
        raise ValueError(f"{packed['times']} clients")
    if "all" in packed:
        return np.full(packed["times"], packed["all"], dtype=dtype)
    return np.arange(packed["from"], packed["from"] + packed["times"], dtype=dtype)


class _Store:
    """Stores copies of arrays one after the other in blocks of memory.

    Each in memory of its own, they would split what is free, and the large arrays of the next call
    would no longer fit: label-guided training on PubMed grew by 6 to 12 MB a round.

    Calls of one round are like those of the next. So a recent array is reused.
    """

    BLOCK = 1 << 20  # bytes
    LATELY = 256  # arrays that are compared
    SHORT = 1 << 13  # bytes; longer arrays are not compared with recent ones

    def __init__(self) -> None:
        self._block = np.empty(0, dtype=np.uint8)
        self._used = 0
        self._recent: dict[tuple[str, bytes], tuple[np.ndarray, float]] = {}

    def copy(self, values: np.ndarray) -> tuple[np.ndarray, float]:
        """Return a copy, read-only, and its sum."""
        size, is_short = values.nbytes, values.nbytes <= self.SHORT
        name = values.dtype.char, values.tobytes() if is_short else b""
        if is_short and name in self._recent:
            return self._recent[name]
        if self._used + size > len(self._block):
            self._block = np.empty(max(self.BLOCK, size), dtype=np.uint8)
            self._used = 0
        copy = self._block[self._used : self._used + size].view(values.dtype)
        copy[:] = values
        copy.flags.writeable = False
        self._used += -(-size // 8) * 8  # so that the next one is aligned, too
        result = copy, values.sum().item()
        if is_short:
            if len(self._recent) == self.LATELY:
                self._recent.clear()
            self._recent[name] = result
        return result


class Ledger:
    """An append-only list of records, with running totals."""

    def __init__(self, clients: int, records: Iterable[Record] = ()) -> None:
        """Start from the records of an earlier part of the run, if any."""
        self._clients = clients
        self._records: list[Record] = []
        self._store = _Store()
        self._by_kind: dict[Kind, int] = defaultdict(int)
        self._flops: dict[Kind, float] = defaultdict(float)
        for record in records:
            self.append(record)

    def append(self, record: Record) -> None:
        """Add a record."""
        clients, _ = self._store.copy(record.clients)
        sizes, size = self._store.copy(record.bytes)
        work, flops = self._store.copy(record.flops)
        plain = record.round, record.step, record.op, record.what, record.direction
        self._records.append(Record(*plain, clients, sizes, work))
        self._by_kind[record.what] += int(size)
        self._flops[record.what] += float(flops)

    @property
    def records(self) -> Sequence[Record]:
        """All records, in the order of the calls."""
        return tuple(self._records)

    def since(self, number: int) -> Sequence[Record]:
        """Return the records from `number` on."""
        return self._records[number:]

    def __len__(self) -> int:
        """Number of records."""
        return len(self._records)

    @property
    def bytes(self) -> int:
        """Bytes of all frames, both directions."""
        return sum(self._by_kind.values())

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of each kind that occurred, both directions."""
        return {str(kind): size for kind, size in sorted(self._by_kind.items()) if size}

    @property
    def flops(self) -> float:
        """Floating-point operations of all clients."""
        return sum(self._flops.values())

    @property
    def flops_by_part(self) -> dict[str, float]:
        """The same by what they are for: training, steps of the optimizer, evaluation."""
        optimizer, evaluation = self._flops[Kind.OPTIMIZER], self._flops[Kind.EVALUATION]
        training = self.flops - optimizer - evaluation
        return {"training": training, "optimizer": optimizer, "evaluation": evaluation}

    def by_client(self) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes (C,) int64 and floating-point operations (C,) float64 of each client."""
        sizes = np.zeros(self._clients, dtype=np.int64)
        flops = np.zeros(self._clients, dtype=np.float64)
        for record in self._records:
            sizes[record.clients] += record.bytes
            flops[record.clients] += record.flops
        return sizes, flops


# --- The virtual clock: what a run would take at clients of given speeds and links ---------------
#
# It is a model and no measurement: a pure function of the ledger, so a seed gives one time, on
# every machine and engine. A client needs for a call
#
#     work / speed + (bytes down + bytes up) / bandwidth + latency
#
# and a call takes as long as its slowest client; calls follow each other. What is left out: the
# server's own work, links that are shared, clients that are slower at some times than at others,
# and everything for evaluation, which a run does to be looked at.
#
# C: clients.


@dataclass(frozen=True, eq=False)
class VirtualClock:
    """Speeds and links of all clients.

    Attributes:
        speed: (C,) float64 floating-point operations a second.
        bandwidth: (C,) float64 bytes a second, both directions together.
        latency: (C,) float64 seconds for each call.
    """

    speed: np.ndarray
    bandwidth: np.ndarray
    latency: np.ndarray

    def seconds(self, records: Iterable[Record]) -> float:
        """Return the virtual seconds of calls, one after the other."""
        return float(sum(call.max() for call in self._calls(records)))

    def by_client(self, records: Iterable[Record]) -> np.ndarray:
        """Return the virtual seconds that each client takes by itself, (C,) float64."""
        total = np.zeros(len(self.speed))
        for call in self._calls(records):
            total += call
        return total

    def _calls(self, records: Iterable[Record]) -> Iterator[np.ndarray]:
        """Yield the seconds of each client in every call, (C,)."""
        training = (record for record in records if record.what is not Kind.EVALUATION)
        for _, call in itertools.groupby(training, lambda record: (record.round, record.step)):
            work, sizes = np.zeros(len(self.speed)), np.zeros(len(self.speed))
            is_called = np.zeros(len(self.speed), dtype=bool)
            for record in call:
                work[record.clients] += record.flops
                sizes[record.clients] += record.bytes
                is_called[record.clients] = True
            yield work / self.speed + sizes / self.bandwidth + is_called * self.latency


def records_of_last_round(ledger: Ledger, t: int) -> Sequence[Record]:
    """Return the records of a round, which is the ledger's last; none if it made no call."""
    number = len(ledger)
    while number and ledger.since(number - 1)[0].round == t:
        number -= 1
    return ledger.since(number)


# --- What every engine does around a call: number it, and write down what it cost ----------------


class Account:
    """Numbers calls and keeps the ledger.

    Args:
        clients: C, all clients of the federation.
        records: of an earlier part of the run.

    Attributes:
        ledger: what calls cost each client.
        executed: operations that were executed here, of all clients, without those of `records`.
    """

    def __init__(self, clients: int, records: Iterable[Record] = ()) -> None:
        self.ledger = Ledger(clients, records)
        self.executed = 0.0
        self._round = 0
        self._step = 0

    def start_round(self, number: int) -> None:
        """Assign the calls from here on to this round."""
        self._round, self._step = number, 0

    def open(self, op: str, what: Kind) -> Envelope:
        """Return the envelope of the next call."""
        self._step += 1
        return Envelope(op, what, self._round, self._step)

    def down(self, envelope: Envelope, positions: Tensor, sizes: np.ndarray) -> None:
        """Record the frames sent to the clients at `positions` (k,); `sizes`: (k,) bytes."""
        clients = positions.numpy()
        about = envelope.round, envelope.step, envelope.op, envelope.kind
        self.ledger.append(Record(*about, "down", clients, sizes, np.zeros(clients.shape)))

    def up(
        self,
        envelope: Envelope,
        positions: Tensor,
        sizes: np.ndarray,
        counts: np.ndarray,
        works: Sequence[WorkTotals],
    ) -> None:
        """Record the replies and the work of a call.

        Args:
            envelope: of the replies, whose kind may be another than that of the call.
            positions: (k,) of the clients that replied.
            sizes: (k,) bytes of their frames.
            counts: (k,) bytes of them that are scores of the received weights: evaluation, whatever
                the kind of the call.
            works: of runs of clients, in their order.
        """
        clients = positions.numpy()
        self.executed += sum(work.executed for work in works)
        own_work = works[0].own if len(works) == 1 else np.concatenate([w.own for w in works])
        call = envelope.round, envelope.step, envelope.op
        kinds = {kind for work in works for kind in work.parts}
        if counts.any():
            kinds.add(Kind.EVALUATION)
            sizes = sizes - counts
        self.ledger.append(Record(*call, envelope.kind, "up", clients, sizes, own_work))
        for kind in sorted(kinds):
            parts = [work.parts.get(kind, np.zeros(len(work.own))) for work in works]
            size = counts if kind == Kind.EVALUATION else np.zeros(clients.shape, np.int64)
            self.ledger.append(Record(*call, kind, "up", clients, size, np.concatenate(parts)))

    def up_summed(
        self,
        envelope: Envelope,
        positions: Tensor,
        names: Sequence[str],
        values: int,
        works: Sequence[WorkTotals],
    ) -> None:
        """Record the messages of a secure sum in which nobody vanishes.

        Args:
            envelope: of the replies.
            positions: (k,) of the clients.
            names: theirs.
            values: of each reply.
            works: of runs of clients, in their order.
        """
        sizes, count = SumSizes(envelope.op, names, values), len(names)
        none = np.zeros(count, dtype=np.int64)
        self.up(envelope, positions, sizes.of_each(sizes.masked, count), none, works)
        for kind, down, up in (
            (Kind.KEYS, sizes.keys_down, sizes.keys_up),
            (Kind.SHARES, sizes.shares_down, sizes.shares_up),
            (Kind.MASKS, sizes.masks_down, sizes.masks_up),
        ):
            self.down(replace(envelope, kind=kind), positions, sizes.of_each(down, count))
            self.answered(replace(envelope, kind=kind), positions, sizes.of_each(up, count))

    def answered(self, envelope: Envelope, positions: Tensor, sizes: np.ndarray) -> None:
        """Record frames sent by the clients at `positions` (k,) that took no work of theirs."""
        clients = positions.numpy()
        about = envelope.round, envelope.step, envelope.op, envelope.kind
        self.ledger.append(Record(*about, "up", clients, sizes, np.zeros(clients.shape)))
