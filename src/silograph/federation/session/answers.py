"""Answers of silos to one call: what can be used of them, and all of them together."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from silograph.core.errors import ProtocolError
from silograph.core.payload import Field, Payload, Ragged, Stacked, join
from silograph.core.work import Meter
from silograph.federation.base import Reduce, WeightedMean, decoder_of, fold_of
from silograph.federation.check import check_fields
from silograph.federation.frame import Envelope, decode
from silograph.federation.session.events import Cause
from silograph.federation.session.message import read_reply
from silograph.federation.session.peer import LostError
from silograph.federation.session.usual_update import NONE_USUAL, UsualUpdate

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
        update: see `update_norm`.
    """

    place: int
    reply: Payload
    form: tuple[tuple[object, ...], ...]
    size: int
    meter: Meter
    update: float | None = None


def read_answer(
    place: int, body: bytes | memoryview, sent: Envelope, reduce: Reduce | None, *, rows: bool
) -> Answer:
    """Return the answer of a REPLY; raise `ProtocolError` where it is none to this call."""
    meter, frame = read_reply(body)
    envelope, reply = decode(frame)
    if envelope != sent:
        raise ProtocolError(f"expected a reply of {sent.op}, got one of {envelope.op}")
    check_fields(reply, 1, f"reply of {sent.op}", rows=rows)
    mean = fold_of(reduce)
    weight = reply.get(mean.by) if isinstance(mean, WeightedMean) else None
    if weight is not None and bool((weight.t < 0).any()):
        raise ProtocolError(f"expected a weight of at least 0 from {sent.op}, got less")
    form = tuple((name, type(f), f.t.dtype, *f.t.shape[1:]) for name, f in sorted(reply.items()))
    return Answer(place, reply, form, len(frame), meter)


def check_work(meter: Meter, seconds: float, most: float | None = None) -> None:
    """Raise `ProtocolError` for work that nobody does in so many seconds, or for such a call.

    Args:
        meter: of a reply.
        seconds: that the silo has taken.
        most: operations that a call can be; None is not known.
    """
    flops = sum(float(each.flops.sum()) for each in (meter, *meter.apart.values()))
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


def update_norm(
    reply: Payload, sent: Payload, reduce: Reduce | None, position: int
) -> float | None:
    """Return the Euclidean norm of what a reply changes of the weights that were sent.

    None where it has no weight in the mean, or its weights answer none of the same message.

    Args:
        reply: one client's.
        sent: what it answers.
        reduce: how replies are folded, and read.
        position: of the client in the federation.
    """
    mean, decoder = fold_of(reduce), decoder_of(reduce)
    if isinstance(mean, WeightedMean) and mean.by in reply and not reply[mean.by].t.any():
        return None
    named = (n for n in reply if n.startswith(WEIGHTS))
    changes = [decoder.change(name, reply, sent.get(name), position) for name in named]
    norms = [
        float(torch.linalg.vector_norm(change, dtype=torch.float64))
        for change in changes
        if change is not None
    ]
    return math.hypot(*norms) if norms else None


def check_update(norm: float | None, most: float | None) -> None:
    """Raise `ProtocolError` for an update of a larger norm than `most`; None is any."""
    if norm is not None and most is not None and not norm <= most:
        raise ProtocolError(f"expected an update of norm {most:g} at most, got {norm:.6g}")


def unusable(
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
    odd = [a.place for a in answers if len(common) > 1 or a.form != common[0]]
    sizes = [_sizes(a.reply, reduce) for a in answers]
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
    go_on = rows and (reduce is None or len(answers) == 1)
    if len(wild) == len(answers) and not go_on:
        wild = []
    return dict.fromkeys(wild, Cause.NOT_FINITE) | dict.fromkeys(odd, Cause.UNLIKE)


def _sizes(reply: Payload, reduce: Reduce | None) -> tuple[float, float]:
    """Return how large the numbers of a reply are: of all, and of rows and averaged weights.

    The first is a share of what is summed without overflow. Infinite: NaN, or infinity. A scale
    counts as the largest number that it gives. A reply without weight may hold anything.
    """
    mean = fold_of(reduce)
    averaged, decoder = isinstance(mean, WeightedMean), decoder_of(reduce)
    if isinstance(mean, WeightedMean) and mean.by in reply and not reply[mean.by].t.any():
        return 0.0, 0.0
    share = weights = 0.0
    for name, field in reply.items():
        if not field.t.is_floating_point() or not field.t.numel():
            continue
        low, high = (float(t) for t in field.t.aminmax())
        size = max(-low, high) if math.isfinite(low) and math.isfinite(high) else math.inf
        scales = decoder.is_scale(name)
        size *= decoder.most_levels(name, reply) if scales else 1
        share = max(share, size / _summable(field.t.dtype))
        if isinstance(field, Ragged) or scales or (averaged and name.startswith(WEIGHTS)):
            weights = max(weights, size)
    return share, weights


@lru_cache
def _summable(dtype: torch.dtype) -> float:
    """Return the largest number of which as many can be summed as there may be clients."""
    most = torch.finfo(dtype).max
    return most if dtype is torch.float16 else most / MOST_SUMMED


def joined(answers: Sequence[Answer], clients: int) -> dict[str, Field]:
    """Return the replies joined; who is missing has counted nothing and has no rows."""
    found = {answer.place: answer.reply for answer in answers}
    zeros: dict[str, Field] = {
        name: Ragged(f.t[:0], torch.zeros(2, dtype=torch.int64))
        if isinstance(f, Ragged)
        else Stacked(torch.zeros_like(f.t))
        for name, f in answers[0].reply.items()
    }
    if len(found) == clients:
        return join([found[place] for place in range(clients)])
    return join([found.get(place, zeros) for place in range(clients)])


def cause_of(error: ProtocolError) -> Cause:
    """Return why an answer cannot be used."""
    return error.cause if isinstance(error, LostError) else Cause.GARBAGE
