"""The session engine: carries calls to silos over their streams, and drops silos that fail.

Silos compute at the same time; their answers are taken in client order, never in that of arrival,
so sums have the bits of the in-process engine with `block_size = 1`. The ledger is the same, too.

A silo that is gone, late, or answers anything but what was asked is dropped from the round, with a
line in the log that says why. Sums and means go on without it; counts of an evaluation that it owes
are 0. It attaches again between rounds, with its state of the last round that it saw whole. A round
that cannot go on without silos waits for them, and is done again.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import CheckpointError, ProtocolError, StateError, mistake, reword_error
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Payload, Ragged, Stacked, State, join, take_all
from silograph.core.text import count_of
from silograph.core.work import Meter
from silograph.federation.base import (
    NOTHING,
    AwayError,
    Op,
    Reduce,
    WeightedMean,
    decoder_of,
    fold_of,
    positions_of,
)
from silograph.federation.check import check_fields
from silograph.federation.decoder import only_slice
from silograph.federation.field_specs import extent_at_server
from silograph.federation.fold import Reduction
from silograph.federation.frame import (
    RESULT,
    Envelope,
    count_sizes,
    decode_with_form,
    encode,
    frames,
)
from silograph.federation.ledger import Account, Ledger, Record
from silograph.federation.program import BLANK, Call, Course
from silograph.federation.secure.sizes import digest_of_names
from silograph.federation.secure.sums import (
    LEAST_SILOS,
    Layout,
    SumError,
    check_silos,
    layout_of_specs,
    weights_field,
)
from silograph.federation.secure.totals import check_reply_of_sum
from silograph.federation.session.events import Cause, Event, EventCallback, What, log_event
from silograph.federation.session.message import (
    CallBody,
    Type,
    call_body,
    facts_body,
    is_library,
    name_of,
    read_reply,
)
from silograph.federation.session.peer import Limits, LostError, Peer, longest_reply
from silograph.federation.state_files import StateFile
from silograph.graph.block.block import Route

if TYPE_CHECKING:
    from silograph.federation.session.summed_call import SummedCall

# --- failures ------------------------------------------------------------------------------------
# Why silos are absent, how often their answers could not be used, and which are left out.


# A stream that ends and a slow silo are no lies: silos come back from both.
COUNTED = (Cause.GARBAGE, Cause.NOT_FINITE, Cause.REFUSED)


class Failures:
    """Records why silos are absent, and counts their failures.

    Args:
        most: after so many a silo is left out for good; None: it never is.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()
        self._left_out: dict[str, str] = {}
        self._reasons: dict[str, str] = {}  # by absent silo
        self._lost_silos: set[str] = set()  # those of them that may come back

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why silos are left out for good, by their names."""
        return self._left_out

    def add(self, name: str, reason: str, cause: Cause) -> str | None:
        """Record that a silo was dropped; return why it is left out from here on, if it is."""
        self._reasons[name] = reason
        if cause is Cause.GONE:
            self._lost_silos.add(name)
        self._counts[name] += cause in COUNTED
        if self._most is None or self._counts[name] < self._most or name in self._left_out:
            return None
        self._reasons[name] = self._left_out[name] = (
            f"left out after {self._most} failures, the last one: {reason}"
        )
        return self._left_out[name]

    def mark_unfit(self, name: str, reason: str, cause: Cause) -> None:
        """Record that a silo is back, but cannot take part."""
        if cause is not Cause.GONE:
            self._reasons[name] = reason
            self._lost_silos.discard(name)

    def mark_back(self, name: str) -> None:
        """Record that a silo takes part again."""
        self._reasons.pop(name, None)
        self._lost_silos.discard(name)

    def check_back(self, names: Sequence[str], min_back: int) -> None:
        """Raise `ProtocolError` if fewer than `min_back` of the silos may still come back."""
        if (back := sum(name in self._lost_silos for name in names)) < min_back:
            reasons = "; ".join(f"{n}: {self._reasons[n]}" for n in names if n in self._reasons)
            raise ProtocolError(
                f"expected silos to come back with their states, got {reasons}",
                **mistake("too-few-silos", min_back, back, list(names)),
            )

    def missing_silos_error(
        self,
        line: str,
        names: Sequence[str],
        expected: int,
        got: int,
        clients: int,
        *,
        summable: bool = True,
    ) -> ProtocolError:
        """Return the error for silos that are missing.

        Args:
            line: what was expected, for the message.
            names: of the silos that are missing.
            expected: number of silos that must be there.
            got: number of those that are.
            clients: number of silos of the run.
            summable: whether the run can go on without some of its silos.
        """
        line += "; ".join(f"{name}: {self._reasons.get(name, 'not there')}" for name in names)
        lost_silos = [name for name in names if name in self._lost_silos]
        fields = mistake("too-few-silos", expected, got, list(names))
        if len(lost_silos) >= expected - got:
            return AwayError(line, lost_silos, expected - got, **fields)
        failed = [name for name in names if name not in self._lost_silos]
        return ProtocolError(
            line + advise_on_resume(failed, clients - len(failed), summable=summable), **fields
        )


def advise_on_resume(names: Sequence[str], others: int, *, summable: bool) -> str:
    """Return how to continue a run that stops because silos have failed.

    Args:
        names: of the silos that do not come back by themselves.
        others: silos that are left.
        summable: whether the run can go on without some of its silos.
    """
    if not names:
        return ""
    who = " and ".join(names)
    if not summable or not others:
        return f"; every silo is needed here: mend {who}, then resume the run with --resume"
    return f"; to resume the run without {who}: --resume with --least {others}"


# --- The usual norm of updates: what silos' updates are held to, a thousand times ----------------


FAR_UPDATE = 1e3  # times the usual norm of updates, and 1
UPDATES = "usual_updates"
FIRST_CALLS = 3  # of an op, with updates of several silos: what is usual is settled then


@dataclass(frozen=True)
class UsualUpdate:
    """The largest median norm of the first calls of an op.

    Updates shrink while training goes on, and those of a silo that has learned its nodes by heart
    are all but 0; so what was usual once stays so. It is settled by the first calls: a later
    majority that lies cannot lift it, nor updates that grow because a lie has spoiled the model.

    Who has the majority in the first calls has it: more than half of the silos can lift the norm in
    one of them, and half can hold it down in all of them, but no bound is below `FAR_UPDATE`.

    Attributes:
        norm: so far.
        calls: that it is from; what a silo alone says is usual for no later call.
    """

    norm: float = 0.0
    calls: int = 0

    def most(self, norms: Iterable[float | None]) -> float:
        """Return the largest norm that an update of a call may have, from those of all of it."""
        usual = self.norm
        if self.calls < FIRST_CALLS:
            usual = max(usual, _median(_finite(norms)))
        return FAR_UPDATE * max(1.0, usual)

    def after(self, norms: Iterable[float | None]) -> "UsualUpdate":
        """Return what is usual after a call with updates of such norms."""
        finite_norms = _finite(norms)
        if self.calls >= FIRST_CALLS or len(finite_norms) < 2:
            return self
        return UsualUpdate(max(self.norm, _median(finite_norms)), self.calls + 1)


NONE_USUAL = UsualUpdate()


def _finite(norms: Iterable[float | None]) -> list[float]:
    return [norm for norm in norms if norm is not None and math.isfinite(norm)]


def _median(norms: list[float]) -> float:
    return statistics.median_low(norms) if norms else 0.0


class UsualUpdates:
    """The usual updates of a run by op, of which a round that is done again leaves no trace.

    Args:
        facts: from a checkpoint, see `to_facts`.

    Raises:
        CheckpointError: facts that `to_facts` does not make; they may lack it.
    """

    def __init__(self, facts: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._by_op = _read(facts)
        self._before = dict(self._by_op)

    @property
    def to_facts(self) -> dict[str, Any]:
        """Norm and calls by op as plain values, for a checkpoint."""
        return {UPDATES: {op: [each.norm, each.calls] for op, each in self._by_op.items()}}

    def begin_round(self) -> None:
        """Save the present values as those from before the round."""
        self._before = dict(self._by_op)

    def begin_again(self) -> None:
        """Restore the values from before the round."""
        self._by_op = dict(self._before)

    def of(self, op: str) -> UsualUpdate:
        """Return what is usual of an op."""
        return self._by_op.get(op, NONE_USUAL)

    def add(self, op: str, norms: Iterable[float | None]) -> None:
        """Add the norms of the usable updates of a call."""
        after = self.of(op).after(norms)
        if after.calls:
            self._by_op[op] = after


def _read(facts: Mapping[str, Any]) -> dict[str, UsualUpdate]:
    try:
        usual = {op: UsualUpdate(norm, calls) for op, (norm, calls) in facts[UPDATES].items()}
    except KeyError:
        return {}
    except (AttributeError, TypeError, ValueError):
        usual = {"": NONE_USUAL}
    if not all(map(_is_valid, usual.values())):
        raise CheckpointError(
            "expected the usual norm of updates by op in the checkpoint, got something else: it is "
            "damaged; begin a new run"
        )
    return usual


def _is_valid(update: UsualUpdate) -> bool:
    norm, calls = update.norm, update.calls
    has_valid_count = type(calls) is int and 0 < calls <= FIRST_CALLS
    return has_valid_count and type(norm) is float and math.isfinite(norm) and norm >= 0


# --- Answers of silos to one call: what can be used of them, and all of them together ------------


MOST_RATE = 1e16  # floating-point operations a second: more than a rack of accelerators does
LEAST_SECONDS = 1.0
MOST_SUMMED = 1e9  # clients
FAR = 1e6  # times the largest weight of most clients, and of 1
WEIGHTS = "weights/"
UNUSABLE = {
    Cause.UNLIKE: "fields unlike those of the others",
    Cause.NOT_FINITE: "NaN or infinity, or numbers far beyond those of the others",
}


@dataclass(frozen=True, eq=False)
class Answer:
    """What one silo answered.

    Attributes:
        place: of the silo in the call.
        reply: one client's.
        form: names, kinds and shapes of its fields, which all silos have alike.
        size: bytes of the frame.
        meter: its work.
        update: see `measure_update`.
        largest: largest absolute value of fields by name, as far as it is known; infinite if a
            field has NaN or infinity.
    """

    place: int
    reply: Payload
    form: tuple[tuple[object, ...], ...]
    size: int
    meter: Meter
    update: float | None = None
    largest: Mapping[str, float] = field(default_factory=dict)


def read_answer(
    place: int, body: bytes | memoryview, sent: Envelope, reduce: Reduce | None, *, rows: bool
) -> Answer:
    """Return the answer of a REPLY; raise `ProtocolError` where it is none to this call."""
    meter, frame = read_reply(body)
    envelope, reply, form = decode_with_form(frame)
    if envelope != sent:
        raise ProtocolError(f"expected a reply of {sent.op}, got one of {envelope.op}")
    check_fields(reply, 1, f"reply of {sent.op}", rows=rows)
    mean = fold_of(reduce)
    weight = reply.get(mean.by) if isinstance(mean, WeightedMean) else None
    if weight is not None and bool((weight.t < 0).any()):
        raise ProtocolError(f"expected a weight of at least 0 from {sent.op}, got less")
    return Answer(place, reply, form, len(frame), meter)


def check_work(meter: Meter, seconds: float, most: float | None = None) -> None:
    """Raise `ProtocolError` for more work than fits into the seconds, or into such a call.

    Args:
        meter: of a reply.
        seconds: that the silo has taken.
        most: operations that a call can take; None if unknown.
    """
    flops = sum(float(each.totals().own.sum()) for each in (meter, *meter.apart.values()))
    if most is not None and flops > most:
        raise ProtocolError(
            f"expected work of at most {most:.4g} operations, by the model and the rows and edges "
            f"reported at first, got {flops:.4g}"
        )
    if flops > MOST_RATE * max(seconds, LEAST_SECONDS):
        raise ProtocolError(
            f"expected work of at most {MOST_RATE:g} operations a second, got {flops:g} in "
            f"{seconds:.3g} s"
        )


def measure_update(
    reply: Payload, sent: Payload, reduce: Reduce | None, position: int, *, compiled: bool = False
) -> tuple[float | None, dict[str, float]]:
    """Return the Euclidean norm of the change of weights in a reply, and the largest new weights.

    Args:
        reply: one client's.
        sent: the message that it answers.
        reduce: how replies are folded, and read.
        position: of the client in the federation.
        compiled: measure weights with the compiled kernel.

    Returns:
        The norm; None where the reply has no weight in the mean, or no weights that were sent. The
        largest absolute value of fields, by name, as far as the kernel has measured them.
    """
    mean, decoder = fold_of(reduce), decoder_of(reduce)
    if isinstance(mean, WeightedMean) and mean.by in reply and not reply[mean.by].t.any():
        return None, {}
    norms: list[float] = []
    largest: dict[str, float] = {}
    for name in (n for n in reply if n.startswith(WEIGHTS)):
        if compiled and not decoder.holds_changes(name, reply):
            start = decoder.start_of(name, reply, sent.get(name), position)
            new = only_slice(reply[name])
            if start is not None and start.dtype is new.dtype and new.dtype in BITS:
                norm, largest[name] = _measure_change(new, start)
                norms.append(norm)
                continue
        change = decoder.change(name, reply, sent.get(name), position)
        if change is not None:
            norms.append(float(torch.linalg.vector_norm(change, dtype=torch.float64)))
    return (math.hypot(*norms) if norms else None), largest


# Integers with as many bits as floating point numbers.
BITS: dict[torch.dtype, type[np.int32 | np.int64]] = {
    torch.float32: np.int32,
    torch.float64: np.int64,
}


def _measure_change(new: Tensor, old: Tensor) -> tuple[float, float]:
    """Return the norm of new - old, and the largest absolute value of `new` (see `Answer.largest`).

    The kernel takes one pass over both tensors, where NumPy takes four.
    """
    from silograph.federation.fold_kernel import measure_change

    values, bits = new.numpy().reshape(-1), BITS[new.dtype]
    mask = bits(np.iinfo(bits).max)
    squares, most = measure_change(values, old.cpu().numpy().reshape(-1), values.view(bits), mask)
    size = float(bits(most).view(values.dtype))
    return math.sqrt(squares), size if math.isfinite(size) else math.inf


def find_unusable(
    answers: Sequence[Answer], reduce: Reduce | None, usual: UsualUpdate = NONE_USUAL
) -> dict[int, Cause]:
    """Return why answers cannot be used, by their places.

    Where most have one form, others are wrong; where two forms are as many, nobody knows who is.
    Numbers are wrong where they are not finite or would make sums infinite; rows, and weights of
    which a mean is taken, also where they are far beyond those of most others, for one such client
    ends the run or overflows at those who are handed its rows. So are updates of weights, which
    would add up over rounds.

    Args:
        answers: to one call.
        reduce: how they are folded.
        usual: norm of updates, from calls before.
    """
    forms = Counter(answer.form for answer in answers)
    common = [form for form, n in forms.items() if n == max(forms.values())]
    different_form = [a.place for a in answers if len(common) > 1 or a.form != common[0]]
    sizes = [_sizes(a.reply, reduce, a.largest) for a in answers]
    usual_size = statistics.median_low([weights for _, weights in sizes]) if sizes else 0.0
    most = FAR * max(1.0, usual_size)
    farthest = usual.most(a.update for a in answers)
    wild = [
        a.place
        for a, (share, weights) in zip(answers, sizes, strict=True)
        if not (share <= 1 and weights <= most and (a.update or 0.0) <= farthest)
    ]
    # All of them: it is training that diverged. But rows that are not folded go on to others, who
    # would refuse them and be named for it, even if all who were asked have agreed to send such;
    # and rows of one silo alone are its own.
    rows = any(isinstance(f, Ragged) for a in answers for f in a.reply.values())
    is_dropped = rows and (reduce is None or len(answers) == 1)
    if len(wild) == len(answers) and not is_dropped:
        wild = []
    return dict.fromkeys(wild, Cause.NOT_FINITE) | dict.fromkeys(different_form, Cause.UNLIKE)


def _sizes(
    reply: Payload, reduce: Reduce | None, largest: Mapping[str, float]
) -> tuple[float, float]:
    """Return the size of the largest number of a reply: of all, and of rows and averaged weights.

    The first is a share of what is summed without overflow. Infinite: NaN, or infinity. A scale
    counts as the largest number that it gives. A reply without weight may hold anything.

    Args:
        reply: one client's.
        reduce: how replies are folded, and read.
        largest: of fields that are measured already, see `Answer`.
    """
    mean = fold_of(reduce)
    averaged, decoder = isinstance(mean, WeightedMean), decoder_of(reduce)
    if isinstance(mean, WeightedMean) and mean.by in reply and not reply[mean.by].t.any():
        return 0.0, 0.0
    share = weights = 0.0
    for name, value in reply.items():
        if not value.t.is_floating_point() or not value.t.numel():
            continue
        size = _largest_number(value.t) if name not in largest else largest[name]
        scales = decoder.is_scale(name)
        size *= decoder.most_levels(name, reply) if scales else 1
        share = max(share, size / _summable(value.t.dtype))
        if isinstance(value, Ragged) or scales or (averaged and name.startswith(WEIGHTS)):
            weights = max(weights, size)
    return share, weights


def _largest_number(t: Tensor) -> float:
    """Return the largest absolute value of numbers; infinity if there is NaN or infinity."""
    values = t.numpy()  # torch takes several times as long for the few numbers of most fields
    low, high = float(values.min()), float(values.max())
    return max(-low, high) if math.isfinite(low) and math.isfinite(high) else math.inf


@lru_cache
def _summable(dtype: torch.dtype) -> float:
    """Return the largest number of which as many can be summed as there may be clients."""
    most = torch.finfo(dtype).max
    return most if dtype is torch.float16 else most / MOST_SUMMED


def _score_sizes(answers: Sequence[Answer], *, rows: bool) -> np.ndarray:
    """Return the bytes of scores in each of k answers, (k,) int64; equal if there are no rows."""
    measured = answers if rows else answers[:1]
    sizes = [int(count_sizes(answer.reply, 1)[0]) for answer in measured]
    return np.array(sizes if rows else sizes * len(answers))


def join_replies(answers: Sequence[Answer], clients: int) -> dict[str, Field]:
    """Return the replies joined; a silo without an answer has counts of 0 and no rows."""
    replies = {answer.place: answer.reply for answer in answers}
    zeros: dict[str, Field] = {
        name: Ragged(f.t[:0], torch.zeros(2, dtype=torch.int64))
        if isinstance(f, Ragged)
        else Stacked(torch.zeros_like(f.t))
        for name, f in answers[0].reply.items()
    }
    if len(replies) == clients:
        return join([replies[place] for place in range(clients)])
    return join([replies.get(place, zeros) for place in range(clients)])


def _complaint_of(error: ProtocolError) -> str | frozenset[str] | None:
    """Return which silo a refusal in a secure sum blames, or which silos an earlier sum had."""
    if not isinstance(error, LostError):
        return None
    silo, revealed = error.facts.get("silo"), error.facts.get("revealed")
    if isinstance(silo, str) and silo:
        return silo
    if isinstance(revealed, list) and all(isinstance(name, str) for name in revealed):
        return frozenset(revealed)
    return None


PAUSE = 0.1  # seconds between two looks at who is back
READ_TOGETHER = 8  # answers that are waited for before they are decoded and checked
TRIES = 3  # for how often a round is done again: silos may be gone because of it
NO_NODES: Mapping[str, Mapping[str, int]] = MappingProxyType({})
Returned = Callable[[], Mapping[str, Peer]]
Result = TypeVar("Result")


class Session:
    """A federation of silos.

    Args:
        peers: the silos by name in the order of every sum, all attached and ready for calls.
        route: who answers for each halo slot.
        ops: by qualified name.
        course: what the run does, call by call; silos know it, too, and replies are held to it.
        dtype: of floating point values in the run.
        limits: how many silos a call needs, and how long it waits for them.
        compiled: fold replies with the compiled kernel, to the same bits.
        returned: the silos that attached again since it was last asked, ready for calls.
        report: told of what happens.
        nodes: of each silo, by TRAIN, VAL, TEST, ROWS and EDGES, as it has reported them.
    """

    def __init__(
        self,
        peers: Mapping[str, Peer],
        route: Route,
        ops: Mapping[str, Op],
        course: Course,
        *,
        dtype: torch.dtype,
        limits: Limits,
        compiled: bool = False,
        returned: Returned = dict,
        report: EventCallback = log_event,
        nodes: Mapping[str, Mapping[str, int]] = NO_NODES,
    ) -> None:
        self.ids = tuple(peers)
        self.peers = dict(peers)  # those that are attached
        self.route = route
        self.executed = None  # silos report their work themselves
        self._ops = ops
        self._course = course
        known_nodes = enumerate(nodes.get(name, {}) for name in self.ids)
        self._extents = [extent_at_server(route, c, dtype, of_it) for c, of_it in known_nodes]
        self._most_work = [limits.most_work(nodes.get(name, {})) for name in self.ids]
        self._failures = Failures(limits.failures)
        self._limits = limits
        self._compiled = compiled
        self._returned = returned
        self._report = report
        self._usual = UsualUpdates()
        self._account = Account(len(self.ids))
        self._round = 0
        self._first_record = 0  # of this round, in the ledger
        self._tries = 0  # of this round, besides the first
        self._last_called = dict.fromkeys(self.ids, BLANK)  # the last round with a call to a silo
        self._last_whole = dict.fromkeys(self.ids, BLANK)  # the same, of those that it saw whole
        self._seconds_spent = dict.fromkeys(self.ids, 0.0)  # by each in this round
        self._unmasked: dict[Envelope, list[frozenset[str]]] = {}  # silos of this round's sums

    @property
    def away(self) -> tuple[str, ...]:
        """Silos that calls go on without."""
        return tuple(name for name in self.ids if name not in self.peers)

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why silos are left out for good, by their names."""
        return self._failures.left_out

    @property
    def ledger(self) -> Ledger:
        """What every call cost."""
        return self._account.ledger

    def start_round(self, number: int) -> None:
        """Assign the calls from here on to this round; silos that are back take part."""
        for name in self.peers:
            self._last_whole[name] = max(self._last_whole[name], self._last_called[name])
        if number != self._round:
            self._tries = 0
            self._unmasked.clear()
        self._course.jump_to(number - 1)
        self._round = number
        self._first_record = len(self.ledger)
        self._usual.begin_round()
        self._seconds_spent = dict.fromkeys(self.ids, 0.0)
        self._account.start_round(number)
        self._attach_returned()

    def write_states(self, folder: Path, number: int) -> None:
        """Do nothing: silos keep their own states."""

    def states(self) -> Sequence[State]:
        """Return nothing: silos keep their states."""
        return ()

    @property
    def remembered(self) -> Mapping[str, Any]:
        """The usual updates."""
        return self._usual.to_facts

    def keep(self, number: int, committed: Sequence[int]) -> None:
        """Have the silos write down their state of a round; see `Federation.keep`."""
        numbers = dict.fromkeys(self.peers, number)
        self._request_or_drop(Type.KEEP, numbers, committed=committed)
        if len(self.peers) < self._limits.least:
            num_attached, least = len(self.peers), self._limits.least
            requirement = f"at least {count_of(least, 'silo')} to write round {number} down"
            line = f"expected {requirement}, got {num_attached}; "
            raise self._failures.missing_silos_error(
                line, self.away, least, num_attached, len(self.ids)
            )
        self._last_whole |= dict.fromkeys(self.peers, number)

    def hand_over(self, number: int, weights: Payload) -> int:
        """Send all silos the best round, and what they get of its weights; see `Engine`.

        A silo whose stream ends meanwhile gets it when it is back, within the server's patience.
        """
        self._attach_returned()
        fields = self._course.result_of(weights)
        frame = encode(Envelope(RESULT, Kind.WEIGHTS, number, 0), fields, 0)
        names, deadline = list(self.peers), time.monotonic() + self._limits.patience
        lost = self._send_result(names, frame)
        for name in lost:
            self._report(Event(What.AWAITED, name, seconds=self._limits.patience))
        while lost and time.monotonic() < deadline:
            time.sleep(PAUSE)
            self._attach_returned()
            if back := [name for name in lost if name in self.peers]:
                lost = {name: why for name, why in lost.items() if name not in back}
                lost |= self._send_result(back, frame)
        for name, reason in lost.items():
            self._report(Event(What.WITHOUT, name, reason=reason))
        return len(frame) * len(names)

    def _send_result(self, names: Sequence[str], frame: bytes) -> dict[str, str]:
        """Send attached silos the result; return the reasons of those whose streams ended."""
        for name in names:
            self.peers[name].send(Type.RESULT, frame)
        lost = {}
        for name in names:
            try:
                self.peers[name].answer(Type.DONE, self._limits.seconds)
            except LostError as error:
                if error.cause is Cause.GONE:
                    lost[name] = str(error)
                    self.peers.pop(name).close()
                else:
                    self._report(Event(What.WITHOUT, name, reason=str(error)))
        return lost

    def restore(
        self,
        number: int,
        states: Sequence[State | StateFile],
        records: Sequence[Record],
        remembered: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Have the silos load their state of a round, and restore the ledger from its records."""
        del states  # silos have them
        self._account = Account(len(self.ids), records)
        self._usual = UsualUpdates(remembered)
        self._course.jump_to(number)
        self._last_whole = dict.fromkeys(self.ids, number)
        self._last_called = dict(self._last_whole)
        failed = self._request_from_all(Type.LOAD, self._last_whole)
        gone = {name for name, error in failed.items() if error.cause is Cause.GONE}
        for name in gone:
            self._report(Event(What.WAITING, name, number, seconds=self._limits.patience))
            self.peers.pop(name).close()
        deadline = time.monotonic() + self._limits.patience
        while not gone <= self.peers.keys() and time.monotonic() < deadline:
            time.sleep(PAUSE)
            self._attach_returned()  # with the state of this round
        for name, error in failed.items():
            if name not in gone or name not in self.peers:
                kind = StateError if error.cause is Cause.REFUSED else ProtocolError
                raise kind(f"expected {name} to go on, got: {error}")

    def rejoin(self, away: AwayError) -> None:
        """Wait for silos that the round lacks, and bring all back to where it began.

        Raises:
            ProtocolError: they do not come back, or without the state that they had.
        """
        self._tries += 1
        if not self._limits.patience or self._tries > TRIES:
            raise away
        deadline = time.monotonic() + self._limits.patience
        for name in away.names:
            self._report(Event(What.WAITING, name, self._round, seconds=self._limits.patience))
        while not self._are_back(away):
            if time.monotonic() > deadline:
                raise reword_error(
                    away, f"{away}; not back within {self._limits.patience:g} s", ProtocolError
                )
            time.sleep(PAUSE)
        self._account = Account(len(self.ids), self.ledger.records[: self._first_record])
        self._usual.begin_again()
        self._course.jump_to(self._round - 1)
        self._last_called = dict(self._last_whole)
        self._seconds_spent = dict.fromkeys(self.ids, 0.0)
        self._request_or_drop(Type.LOAD, self._last_whole)

    def close(self) -> None:
        """Do nothing: streams are closed by whoever has opened them."""

    def _are_back(self, away: AwayError) -> bool:
        """Whether enough silos are back; raise `ProtocolError` if that is no longer possible."""
        self._attach_returned()
        num_back = sum(name in self.peers for name in away.names)
        self._failures.check_back(away.names, away.needed - num_back)
        return num_back >= away.needed

    def call(
        self,
        op: Op,
        inbox: Payload,
        *,
        what: Kind,
        key: Key,
        to: Sequence[str] | None = None,
        reduce: Reduce | None = None,
        rows: bool = False,
        allow_missing: bool = False,
    ) -> Payload:
        """Run `op` at the clients `to`; see `Federation.call`."""
        rows = rows or bool(decoder_of(reduce).known)
        name = name_of(self._ops, op)
        envelope = self._account.open(op.__name__, what)
        answer_envelope = replace(envelope, kind=op.__dict__.get("reply_kind", what))
        positions = positions_of(self.ids, to)
        agreed_call, after = self._course.find(self._round, op, what, key)
        self._course.advance(self._round, after)
        where = f"inbox of {op.__name__}"
        check_fields(inbox, len(positions), where, shared=True)

        # 1. Send the call to all attached clients, with a bound of each answer's length.
        most = self._longest_replies(agreed_call, inbox, positions)

        layout = self._layout_of_sum(agreed_call, reduce, op, len(positions), rows=rows)
        called_peers = self._send(
            envelope,
            name,
            inbox,
            positions,
            key,
            most,
            rows=rows,
            by=None if layout is None else layout.by,
        )
        if layout is not None:
            return self._add_up(
                agreed_call, inbox, answer_envelope, layout, positions, called_peers
            )

        # 2. Read the answers in client order; a reply that breaks a rule drops its client.
        def read(place: int, peer: Peer, body: bytes | memoryview) -> Answer:
            answer = read_answer(place, body, answer_envelope, reduce, rows=rows)
            request = take_all(inbox, torch.tensor([place]))
            agreed_call.check_reply(request, answer.reply, self._extents[int(positions[place])])
            position = int(positions[place])
            decoder_of(reduce).check_rows(answer.reply, position)
            bound = self._most_work[position]
            check_work(answer.meter, peer.took, None if bound is None else bound.of(request))
            norm, largest = measure_update(
                answer.reply, request, reduce, position, compiled=self._compiled
            )
            max_norm = self._limits.update_norm
            if norm is not None and max_norm is not None and not norm <= max_norm:
                raise ProtocolError(
                    f"expected an update of norm {max_norm:g} at most, got {norm:.6g}"
                )
            return replace(answer, update=norm, largest=largest)

        answers = self._collect_answers(envelope, called_peers, reduce, read)
        # 3. Stop, unless the call can continue with the answers there are.
        if allow_missing and not answers:
            return {}
        if len(answers) < len(positions) and not allow_missing:
            summable = reduce is not None or (what is Kind.EVALUATION and not rows)
            self._check_enough(op, [a.place for a in answers], positions, summable=summable)
        # 4. Record bytes and work in the ledger, and reduce the replies.
        places = torch.tensor([answer.place for answer in answers], dtype=torch.int64)
        up = np.array([answer.size for answer in answers])
        scores = _score_sizes(answers, rows=rows)
        works = [answer.meter.totals() for answer in answers]
        self._account.up(answer_envelope, positions[places], up, scores, works)
        if reduce is None:
            return join_replies(answers, len(positions))
        reduction = Reduction(reduce, len(self.ids), compiled=self._compiled)
        for answer in answers:
            reduction.add(answer.reply, positions[answer.place : answer.place + 1])
        return reduction.result()

    def _longest_replies(
        self, call: Call, inbox: Payload, positions: Tensor
    ) -> Callable[[int], int]:
        """Return the most bytes that a reply may have, as a function of its place in the call."""
        if not call.rows:  # then replies of all clients have the same length
            longest = longest_reply(call, {}, self._extents[0])
            return lambda _: longest

        def most(place: int) -> int:
            request = take_all(inbox, torch.tensor([place]))
            return longest_reply(call, request, self._extents[int(positions[place])])

        return most

    def _layout_of_sum(
        self, call: Call, reduce: Reduce | None, op: Op, called: int, *, rows: bool
    ) -> Layout | None:
        """Return the layout of replies that are summed securely, None where none are."""
        if not self._limits.secure or rows or not call.reply_specs:
            return None
        check_silos(called, op.__name__)
        by, dtype = weights_field(reduce, op.__name__), self._extents[0].dtype
        return layout_of_specs(call.reply_specs, call.reply_kind, by, len(self.ids), dtype)

    def _add_up(
        self,
        agreed_call: Call,
        inbox: Payload,
        answer: Envelope,
        layout: Layout,
        positions: Tensor,
        called_peers: Sequence[tuple[int, Peer]],
    ) -> dict[str, Field]:
        """Return the secure sum of the replies of silos; drop those that fail in a step.

        Raises:
            ProtocolError: too few silos are left, one has spoiled the sum, or it breaks a bound of
                the call.
        """
        from silograph.federation.session.summed_call import SummedCall  # needs cryptography

        op, peers = agreed_call.op, {peer.name: peer for _, peer in called_peers}
        earlier = self._unmasked.setdefault(answer, [])
        call = SummedCall(answer, layout, tuple(peers), earlier)
        for name, peer in peers.items():
            try:
                check_work(call.take_keys(name, self._answer(peer, Type.REPLY)), peer.took)
            except ProtocolError as error:
                self._drop_for(peer, answer.op, error)
        for step in (Type.SHARE, Type.MASK, Type.CONFIRM, Type.UNMASK):
            names = [name for name in call.silos_in(step) if name in self.peers]
            if step in (Type.MASK, Type.CONFIRM):
                names = self._choose_summed(names, step, call)
            self._check_summable(op, names, positions, call)
            if step is Type.UNMASK:
                self._check_spoiled(call.check_holders, answer.op)
                earlier[:] = [s for s in earlier if s != set(call.present)]
                earlier.append(frozenset(call.present))
            for name in names:
                peers[name].send(step, call.request(step, name), call.most)
            failed: dict[str, ProtocolError] = {}
            for name in names:
                try:
                    call.take(step, name, self._answer(peers[name], Type.SUMMED))
                except ProtocolError as error:
                    failed[name] = error
            self._drop_failed(failed, answer, call)
        self._check_summable(op, call.revealed, positions, call)
        result = self._check_spoiled(call.result, answer.op)
        call.record(self._account, {name: place for place, name in enumerate(self.ids)})
        # What contradicts itself in one reply may not in a sum; silograph's own ops are known.
        problem = agreed_call.problem if is_library(op) else None
        silos, specs = len(call.present), agreed_call.reply_specs
        check_reply_of_sum(result, specs, layout.by, silos, problem, inbox)
        return dict(result)

    def _choose_summed(self, names: list[str], step: Type, call: "SummedCall") -> list[str]:
        """Return whose values are added up: of the same values silos unmask sums of one set.

        Raises:
            ProtocolError: silos of an earlier sum of the call are missing; `AwayError` where they
                may return.
        """
        there = names if step is Type.MASK else call.present
        allowed = call.allowed(there)
        if allowed and step is Type.MASK:
            return allowed
        if allowed == there:
            return names
        earlier = call.nearest_earlier(there)
        back = earlier & set(there)
        line = (
            f"expected the {len(earlier)} silos of an earlier sum of this call again, because "
            f"silos unmask no other sum of the same values, got {len(back)} of them; "
        )
        missing = [name for name in self.ids if name in earlier - back]
        raise self._failures.missing_silos_error(
            line, missing, len(earlier), len(back), len(self.ids), summable=False
        )

    def _check_spoiled(self, check: Callable[[], Result], op: str) -> Result:
        """Return what a check of a secure sum returns; drop the silo that it names.

        Raises:
            AwayError: a silo has spoiled the sum.
        """
        try:
            return check()
        except SumError as error:
            name = str(error.fields["silo"])
            line = f"{error}: the round is done again"
            if name in self.peers:
                self._drop_for(self.peers[name], op, error)
                line += f" without {name}"
            elif name:
                raise
            raise AwayError(line, (), 0, code=error.code, **error.fields) from error

    def _drop_failed(
        self, failed: Mapping[str, ProtocolError], answer: Envelope, call: "SummedCall"
    ) -> None:
        """Drop silos that fail in a step; those that refuse for another one's fault stay.

        Who is at fault is what more silos say than may lie.

        Raises:
            AwayError: the round has to be done again, without a silo or with other silos.
        """
        complaints = {name: _complaint_of(error) for name, error in failed.items()}
        counts = Counter(c for c in complaints.values() if c is not None)
        believed = next((c for c, count in counts.items() if count > call.tolerance), None)
        for name, error in failed.items():
            if believed is None or complaints[name] != believed:
                self._drop_for(self.peers[name], answer.op, error)
        if believed is None:
            return
        error = next(e for name, e in failed.items() if complaints[name] == believed)
        who, line = "", f"{error}: the round is done again"
        if isinstance(believed, str):
            who, line = believed, f"{line} without {believed}"
            if who in self.peers:
                self._drop_for(self.peers[who], answer.op, error)
        else:
            earlier = self._unmasked[answer]
            if not call.revealed:  # silos refuse these at the last step
                earlier[:] = [silos for silos in earlier if silos != set(call.present)]
            earlier[:] = [*(silos for silos in earlier if silos != believed), believed]
        raise AwayError(line, (), 0, **mistake("secure-sum", who))

    def _drop_for(self, peer: Peer, op: str, error: ProtocolError) -> None:
        """Drop a silo for what its answer was."""
        cause = Cause.GARBAGE
        if isinstance(error, LostError) and error.facts.get("silo") != peer.name:
            cause = error.cause
        self._drop(peer, op, str(error), cause)

    def _check_summable(
        self, op: Op, names: Sequence[str], positions: Tensor, call: "SummedCall"
    ) -> None:
        """Raise `ProtocolError` where too few silos are left to go on with a secure sum."""
        own_least = max(min(self._limits.least, len(positions)), LEAST_SILOS)
        least = max(own_least, call.threshold if names else 0)
        if own_least <= len(names) < least:
            line = (
                f"expected {least} silos to the end of a secure sum of {op.__name__}, got "
                f"{len(names)}: the round is done again"
            )
            raise AwayError(line, (), 0, **mistake("too-few-silos", least, len(names), []))
        if len(names) < least:
            called = [self.ids[p] for p in positions.tolist()]
            missing = [name for name in called if name not in names]
            requirement = f"at least {count_of(least, 'silo')} to answer {op.__name__}"
            line = f"expected {requirement}, got {len(names)}; "
            raise self._failures.missing_silos_error(
                line, missing, least, len(names), len(self.ids)
            )

    def _send(
        self,
        envelope: Envelope,
        name: str,
        inbox: Payload,
        positions: Tensor,
        key: Key,
        most: Callable[[int], int],
        *,
        rows: bool,
        by: str | None = None,
    ) -> list[tuple[int, Peer]]:
        """Send a call to the attached silos among `positions`; return them with their places.

        `most`: bytes that an answer may have, by the place of who answers; `by`: see `CallBody`.
        """
        called_peers: list[tuple[int, Peer]] = []
        sizes = []
        names = [self.ids[position] for position in positions.tolist()]
        called = b"" if by is None else digest_of_names([n for n in names if n in self.peers])
        head = call_body(CallBody(name, key, rows, b"", by, called))
        for place, frame in enumerate(frames(envelope, inbox, len(positions))):
            peer = self.peers.get(names[place])
            if peer is not None:
                about = Event(What.ASKED, peer.name, self._round, op=envelope.op, bytes=len(frame))
                self._report(about)
                peer.send(Type.CALL, head, most(place), frame)
                self._last_called[peer.name] = self._round
                called_peers.append((place, peer))
                sizes.append(len(frame))
        places = torch.tensor([place for place, _ in called_peers], dtype=torch.int64)
        self._account.down(envelope, positions[places], np.array(sizes, dtype=np.int64))
        return called_peers

    def _collect_answers(
        self,
        envelope: Envelope,
        called_peers: Sequence[tuple[int, Peer]],
        reduce: Reduce | None,
        read: Callable[[int, Peer, bytes | memoryview], Answer],
    ) -> list[Answer]:
        """Return the usable answers in client order; drop the silos without one."""
        answers: list[Answer] = []
        peers = dict(called_peers)

        def drop(peer: Peer, error: ProtocolError) -> None:  # lost, or no reply
            cause = error.cause if isinstance(error, LostError) else Cause.GARBAGE
            self._drop(peer, envelope.op, str(error), cause)

        # Several answers are waited for, and are then read one after the other. Waiting evicts code
        # from the processor's caches, and the next read takes several times as long.
        for first in range(0, len(called_peers), READ_TOGETHER):
            bodies: list[tuple[int, Peer, bytes | memoryview]] = []
            for place, peer in called_peers[first : first + READ_TOGETHER]:
                try:
                    bodies.append((place, peer, self._answer(peer, Type.REPLY)))
                except LostError as error:
                    drop(peer, error)
            for place, peer, body in bodies:
                try:
                    answers.append(read(place, peer, body))
                except ProtocolError as error:
                    drop(peer, error)
        bad = find_unusable(answers, reduce, self._usual.of(envelope.op))
        for place, cause in bad.items():
            reason = f"expected a reply of {envelope.op}, got one with {UNUSABLE[cause]}"
            self._drop(peers[place], envelope.op, reason, cause)
        usable = [answer for answer in answers if answer.place not in bad]
        self._usual.add(envelope.op, [answer.update for answer in usable])
        return usable

    def _answer(self, peer: Peer, kind: Type) -> bytes | memoryview:
        """Return a silo's answer; raise `LostError` where there is none in time."""
        seconds = self._limits.seconds
        remaining = None if seconds is None else seconds - self._seconds_spent[peer.name]
        try:
            body = peer.answer(kind, remaining)
        except LostError as error:
            if error.cause is not Cause.LATE:
                raise
            line = f"expected its answers of a round within {seconds:g} s, got too few"
            raise LostError(line, Cause.LATE) from None
        self._seconds_spent[peer.name] += peer.took
        return body

    def _check_enough(
        self, op: Op, places: Sequence[int], positions: Tensor, *, summable: bool
    ) -> None:
        """Raise `ProtocolError` where a call cannot go on without the silos that are missing."""
        answered = set(places)
        names = [self.ids[p] for i, p in enumerate(positions.tolist()) if i not in answered]
        if not summable:
            line = (
                f"expected all silos to answer {op.__name__}, whose replies are no sums, got none "
            )
            raise self._failures.missing_silos_error(
                f"{line}from ", names, len(positions), len(places), len(self.ids), summable=False
            )
        least = min(self._limits.least, len(positions))
        if len(places) < least:
            requirement = f"at least {count_of(least, 'silo')} to answer {op.__name__}"
            line = f"expected {requirement}, got {len(places)}; "
            raise self._failures.missing_silos_error(line, names, least, len(places), len(self.ids))

    def _drop(self, peer: Peer, op: str, reason: str, cause: Cause) -> None:
        event = Event(What.DROPPED, peer.name, self._round, op=op, cause=cause, reason=reason)
        self._report(event)
        del self.peers[peer.name]
        last = self._failures.add(peer.name, reason, cause)
        if last is not None:
            self._report(Event(What.LEFT_OUT, peer.name, self._round, reason=last))
        if cause is Cause.GONE:
            peer.close()
        else:
            peer.dismiss(reason)

    def _attach_returned(self) -> None:
        """Admit silos that are back, each with its state of the last round that it saw whole."""
        for name, peer in self._returned().items():
            if name in self.left_out:
                peer.dismiss(self.left_out[name])
                continue
            number = self._last_whole[name]
            try:
                peer.ask(Type.LOAD, {"round": number}, self._limits.seconds)
            except LostError as error:
                self._report(Event(What.UNFIT, name, self._round, reason=str(error)))
                self._failures.mark_unfit(name, str(error), error.cause)
                peer.dismiss(str(error))
                continue
            self._report(Event(What.RETURNED, name, number))
            self.peers[name] = peer
            self._last_called[name] = number
            self._failures.mark_back(name)

    def _request_from_all(
        self, kind: Type, numbers: Mapping[str, int], **facts: Sequence[int]
    ) -> dict[str, LostError]:
        """Send all silos a request about a round at the same time; return the failures by silo."""
        failed = {}
        for name, peer in self.peers.items():
            self._report(Event(What.ASKED, name, self._round, op=kind.name.lower()))
            peer.send(kind, facts_body({"round": numbers[name], **facts}))
        for name, peer in self.peers.items():
            try:
                self._answer(peer, Type.DONE)
            except LostError as error:
                failed[name] = error
        return failed

    def _request_or_drop(
        self, kind: Type, numbers: Mapping[str, int], **facts: Sequence[int]
    ) -> None:
        """Send all silos a request about a round; drop those that do not do it."""
        failed = self._request_from_all(kind, numbers, **facts)
        for name, error in failed.items():
            self._drop(self.peers[name], kind.name.lower(), str(error), error.cause)
