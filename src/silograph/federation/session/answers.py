"""Answers of silos to one call: what can be used of them, and all of them together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from silograph.core.errors import ProtocolError
from silograph.core.payload import Field, Payload, Ragged, Stacked, join
from silograph.core.work import Meter
from silograph.federation.base import Reduce, WeightedMean, fold_of
from silograph.federation.check import check_fields
from silograph.federation.frame import Envelope, decode
from silograph.federation.session.events import Cause
from silograph.federation.session.message import read_reply
from silograph.federation.session.peer import LostError


@dataclass(frozen=True, eq=False)
class Answer:
    """What one silo answered.

    Attributes:
        place: of the silo in the call.
        reply: one client's.
        form: names, kinds and shapes of its fields, which all silos have alike.
        size: bytes of the frame.
        meter: its work.
    """

    place: int
    reply: Payload
    form: tuple[tuple[object, ...], ...]
    size: int
    meter: Meter


def read_answer(
    place: int, body: bytes, sent: Envelope, reduce: Reduce | None, *, rows: bool
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


def unusable(answers: Sequence[Answer], reduce: Reduce | None) -> dict[int, Cause]:
    """Return why answers cannot be used, by their places.

    Where most have one form, others are wrong; where two forms are as many, nobody knows who is.
    """
    forms = Counter(answer.form for answer in answers)
    usual = [form for form, n in forms.items() if n == max(forms.values())]
    odd = [a.place for a in answers if len(usual) > 1 or a.form != usual[0]]
    wild = [a.place for a in answers if not _is_finite(a.reply, reduce)]
    if len(wild) == len(answers):  # then it is training that diverged
        wild = []
    return dict.fromkeys(wild, Cause.NOT_FINITE) | dict.fromkeys(odd, Cause.UNLIKE)


def _is_finite(reply: Payload, reduce: Reduce | None) -> bool:
    """Whether all numbers of a reply are; one without weight may hold anything."""
    mean = fold_of(reduce)
    if isinstance(mean, WeightedMean) and mean.by in reply and not reply[mean.by].t.any():
        return True
    return all(bool(f.t.isfinite().all()) for f in reply.values() if f.t.is_floating_point())


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
