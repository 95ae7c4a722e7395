"""What calls will cost, known before they are made: frames are as long as their fields say."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

import torch

from silograph.core.kinds import RECEIVED, Kind
from silograph.core.payload import Field, Ragged
from silograph.federation.field_specs import Extent, FieldSpec, FieldSpecs
from silograph.federation.frame import DIMENSION, FIELD, HEADER
from silograph.federation.program import Call, Closing, Either, Maybe, Over, Repeat, Steps

NO_ROWS: Mapping[str, int] = MappingProxyType({})
NOTHING: Mapping[str, Mapping[str, Field | FieldSpec]] = MappingProxyType({})
MOST_DEPTH = 8  # fields whose rows are counted by those of another one, one after the other


def bytes_of_steps(steps: Steps, dtype: torch.dtype) -> int | None:
    """Return the bytes of all calls of some steps at one client, evaluation apart.

    Of calls that may be left out or repeated it is the most that they can cost. None if unknown,
    as the number of rows of a field depends on the client's nodes or on an op.

    Args:
        steps: of a round.
        dtype: of floating point values in the run.
    """
    unknown_extent = Extent(1, dtype, {})
    directions = sent_sizes(steps, unknown_extent, {}), received_sizes(steps, unknown_extent, {})
    training_sizes = (
        size for sizes in directions for kind, size in sizes.items() if kind != Kind.EVALUATION
    )
    return sum(training_sizes, ZERO).most


def bytes_of_frame(
    op: str, specs: FieldSpecs, dtype: torch.dtype, rows: Mapping[str, int] = NO_ROWS
) -> int | None:
    """Return the bytes of one client's frame of fields as they are declared, None if unknown.

    Args:
        op: its name.
        specs: of the fields.
        dtype: of floating point values in the run.
        rows: of fields that have rows, by name, where they are known.
    """
    size = HEADER.size + len(op.encode())
    for name, spec in specs.items():
        has_rows = spec.form is Ragged
        if None in spec.shape or (has_rows and name not in rows):
            return None
        values = math.prod(n or 0 for n in spec.shape) * (rows[name] if has_rows else 1)
        size += FIELD.size + len(name.encode()) + DIMENSION.size * (len(spec.shape) + has_rows)
        size += values * (spec.dtype or dtype).itemsize
    return size


@dataclass(frozen=True)
class SizeBound:
    """Bounds of a number of bytes.

    Attributes:
        least: that it takes in any case.
        most: that it can take; None if unknown.
    """

    least: int = 0
    most: int | None = 0

    def __add__(self, other: "SizeBound") -> "SizeBound":
        """Return the bound of both together."""
        most = None if self.most is None or other.most is None else self.most + other.most
        return SizeBound(self.least + other.least, most)

    def times(self, most: int) -> "SizeBound":
        """Return the bound of 0 to `most` repetitions."""
        return SizeBound(0, None if self.most is None else self.most * most)

    def either(self, other: "SizeBound") -> "SizeBound":
        """Return the bound of one of the two."""
        is_bounded = self.most is not None and other.most is not None
        most = max(self.most or 0, other.most or 0) if is_bounded else None
        return SizeBound(min(self.least, other.least), most)


ZERO = SizeBound()
SizesByKind = Mapping[Kind, SizeBound]


def sent_sizes(steps: Steps, extent: Extent, state: FieldSpecs) -> SizesByKind:
    """Return what one client sends in some steps, by kind of the reply; scores are evaluation.

    Args:
        steps: of a round.
        extent: of that client.
        state: what its state holds; see `Program`.
    """

    def by_kind(call: Call) -> SizesByKind:
        scores = {n: spec for n, spec in call.reply_specs.items() if n.startswith(RECEIVED)}
        others = {n: spec for n, spec in call.reply_specs.items() if n not in scores}
        sizes = {call.reply_kind: _bound_of(call, others, extent, state)}
        if scores:
            whole, without_score = (
                _bound_of(call, call.reply_specs, extent, state),
                sizes[call.reply_kind],
            )
            is_bounded = whole.most is not None and without_score.most is not None
            most = (whole.most or 0) - (without_score.most or 0) if is_bounded else None
            score = SizeBound(whole.least - without_score.least, most)
            sizes[Kind.EVALUATION] = sizes.get(Kind.EVALUATION, ZERO) + score
        return sizes

    return _sizes(steps, by_kind)


def received_sizes(steps: Steps, extent: Extent, state: FieldSpecs) -> SizesByKind:
    """Return bytes that a client receives in some steps; see `sent_sizes`."""
    return _sizes(steps, lambda call: {call.what: _bound_of(call, call.inbox_specs, extent, state)})


def _bound_of(call: Call, specs: FieldSpecs, extent: Extent, state: FieldSpecs) -> SizeBound:
    others = {"inbox": call.inbox_specs, "state": state}
    return frame_bound(call.op.__name__, specs, extent, others)


def _sizes(steps: Steps, of_call: Callable[[Call], SizesByKind]) -> SizesByKind:
    match steps:
        case Call():
            return of_call(steps)
        case Maybe(inner) | Closing(inner):
            return {kind: size.times(1) for kind, size in _sizes(inner, of_call).items()}
        case Over():
            return {}
        case Repeat(inner, most):
            return {kind: size.times(most) for kind, size in _sizes(inner, of_call).items()}
        case Either():
            return _merged([_sizes(way, of_call) for way in steps.ways], SizeBound.either)
        case _:
            return _merged([_sizes(step, of_call) for step in steps], SizeBound.__add__)


def _merged(
    parts: Sequence[SizesByKind], join: Callable[[SizeBound, SizeBound], SizeBound]
) -> SizesByKind:
    kinds = dict.fromkeys(kind for part in parts for kind in part)
    return {kind: reduce(join, [part.get(kind, ZERO) for part in parts]) for kind in kinds}


def frame_bound(
    op: str,
    specs: FieldSpecs,
    extent: Extent,
    others: Mapping[str, Mapping[str, Field | FieldSpec]] = NOTHING,
) -> SizeBound:
    """Return how long one client's frame of declared fields can be.

    Args:
        op: name of the op.
        specs: of the fields.
        extent: of that client.
        others: what their rows may be counted by besides, the `inbox` and the `state`: fields
            that are there, or their specs; see `field_specs.check_against`.
    """
    by = {"own": specs, "marked": specs, **others}
    rows = {n: _row_bound(spec, extent, by) for n, spec in specs.items() if spec.form is Ragged}
    most = {n: size.most for n, size in rows.items() if size.most is not None}
    least = bytes_of_frame(op, specs, extent.dtype, {n: size.least for n, size in rows.items()})
    return SizeBound(least or 0, bytes_of_frame(op, specs, extent.dtype, most))


def _row_bound(
    spec: FieldSpec,
    extent: Extent,
    others: Mapping[str, Mapping[str, Field | FieldSpec]],
    depth: int = 0,
) -> SizeBound:
    """Return how many rows one client's part of a field can have."""
    group, _, name = spec.rows.partition("/")
    bound = SizeBound(0, None)
    other = others.get(group, {}).get(name)
    if not name and group in extent.rows:
        bound = SizeBound(extent.rows[group][0], extent.rows[group][0])
    elif isinstance(other, Ragged):
        bound = SizeBound(int(other.off[-1]), int(other.off[-1]))
    elif isinstance(other, FieldSpec) and depth < MOST_DEPTH:
        bound = _row_bound(other, extent, others, depth + 1)
    return SizeBound(0, bound.most) if spec.fewer or group == "marked" else bound
