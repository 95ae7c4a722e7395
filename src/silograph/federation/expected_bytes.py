"""What calls will cost, known before they are made: frames are as long as their fields say."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

import torch

from silograph.core.kinds import Kind
from silograph.core.payload import Field, Ragged, Shared, Stacked
from silograph.federation.field_specs import Extent, FieldSpec, FieldSpecs
from silograph.federation.frame import DIMENSION, FIELD, HEADER, frame_sizes
from silograph.federation.program import Call, Either, Maybe, Repeat, Steps, counted_calls

NO_ROWS: Mapping[str, int] = MappingProxyType({})
MOST_DEPTH = 8  # fields whose rows are counted by those of another one, one after the other


def bytes_of_steps(steps: Steps, dtype: torch.dtype) -> int | None:
    """Return the bytes of all calls of some steps at one client, evaluation apart.

    Of calls that may be left out or repeated it is the most that they can cost. None: a field has
    as many rows as a client's nodes or as an op chooses, so nobody knows before.

    Args:
        steps: of a round.
        dtype: of floating point values in the run.
    """
    nobody = Extent(1, dtype, {})
    sizes = [
        (times, most_of_frame(call.op.__name__, specs, nobody))
        for call, times in counted_calls(steps)
        if call.what is not Kind.EVALUATION
        for specs in (call.takes, call.gives)
    ]
    known = [times * size for times, size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


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
    fields = {name: _empty(spec, dtype, rows.get(name)) for name, spec in specs.items()}
    known = {name: field for name, field in fields.items() if field is not None}
    return int(frame_sizes(op, known, 1)[0]) if len(known) == len(fields) else None


def _empty(spec: FieldSpec, dtype: torch.dtype, rows: int | None) -> Field | None:
    """Return a field of the declared shape without memory behind it."""
    shape = [size for size in spec.shape if size is not None]
    if len(shape) < len(spec.shape) or (spec.form is Ragged and rows is None):
        return None
    lead = {Shared: [], Stacked: [1], Ragged: [rows or 0]}[spec.form]
    found = torch.empty([*lead, *shape], dtype=spec.dtype or dtype, device="meta")
    if spec.form is Ragged:
        return Ragged(found, torch.tensor([0, len(found)]))
    return Stacked(found) if spec.form is Stacked else Shared(found)


@dataclass(frozen=True)
class SizeBound:
    """How many bytes something takes.

    Attributes:
        least: that it takes in any case.
        most: that it can take; None is not known before.
    """

    least: int = 0
    most: int | None = 0

    def __add__(self, other: "SizeBound") -> "SizeBound":
        """Return the bound of both together."""
        most = None if self.most is None or other.most is None else self.most + other.most
        return SizeBound(self.least + other.least, most)

    def times(self, most: int) -> "SizeBound":
        """Return the bound of what is done 0 to `most` times."""
        return SizeBound(0, None if self.most is None else self.most * most)

    def either(self, other: "SizeBound") -> "SizeBound":
        """Return the bound of one of the two."""
        known = self.most is not None and other.most is not None
        most = max(self.most or 0, other.most or 0) if known else None
        return SizeBound(min(self.least, other.least), most)


ZERO = SizeBound()
SizesByKind = Mapping[Kind, SizeBound]


def sent_sizes(steps: Steps, extent: Extent, state: FieldSpecs) -> SizesByKind:
    """Return what one client sends in some steps, by kind of the call.

    Args:
        steps: of a round.
        extent: of that client.
        state: what its state holds; see `Program`.
    """
    return _sizes(
        steps, lambda call: frame_bound(call.op.__name__, call.gives, call, extent, state)
    )


def received_sizes(steps: Steps, extent: Extent, state: FieldSpecs) -> SizesByKind:
    """Return what one client is sent in some steps; see `sent_sizes`."""
    return _sizes(
        steps, lambda call: frame_bound(call.op.__name__, call.takes, call, extent, state)
    )


def _sizes(steps: Steps, of_call: Callable[[Call], SizeBound]) -> SizesByKind:
    match steps:
        case Call():
            return {steps.what: of_call(steps)}
        case Maybe(inner):
            return {kind: size.times(1) for kind, size in _sizes(inner, of_call).items()}
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
    op: str, specs: FieldSpecs, call: Call, extent: Extent, state: FieldSpecs
) -> SizeBound:
    """Return how long one client's frame of declared fields can be; see `sent_sizes`."""
    others = {"own": specs, "marked": specs, "inbox": call.takes, "state": state}
    rows = {n: _row_bound(spec, extent, others) for n, spec in specs.items() if spec.form is Ragged}
    most = {n: size.most for n, size in rows.items() if size.most is not None}
    least = bytes_of_frame(op, specs, extent.dtype, {n: size.least for n, size in rows.items()})
    return SizeBound(least or 0, bytes_of_frame(op, specs, extent.dtype, most))


def _row_bound(
    spec: FieldSpec, extent: Extent, others: Mapping[str, FieldSpecs], depth: int = 0
) -> SizeBound:
    """Return how many rows one client's part of a field can have."""
    group, _, name = spec.rows.partition("/")
    found = SizeBound(0, None)
    if not name and group in extent.rows:
        found = SizeBound(extent.rows[group][0], extent.rows[group][0])
    elif name in others.get(group, {}) and depth < MOST_DEPTH:
        found = _row_bound(others[group][name], extent, others, depth + 1)
    return SizeBound(0, found.most) if spec.fewer or group == "marked" else found


def most_of_frame(
    op: str,
    specs: FieldSpecs,
    extent: Extent,
    others: Mapping[str, Mapping[str, Field]] | None = None,
) -> int | None:
    """Return the most bytes that one client's frame of declared fields can have, None if unknown.

    Args:
        op: name of the op.
        specs: of the fields.
        extent: of that client.
        others: see `field_specs.check_against`.
    """
    size = HEADER.size + len(op.encode())
    for name, spec in specs.items():
        rows = 1 if spec.form is not Ragged else _most_rows(spec, specs, extent, others or {})
        if rows is None or None in spec.shape:
            return None
        each = math.prod(n or 0 for n in spec.shape) * (spec.dtype or extent.dtype).itemsize
        dimensions = len(spec.shape) + (spec.form is Ragged)
        size += FIELD.size + len(name.encode()) + DIMENSION.size * dimensions + rows * each
    return size


def _most_rows(
    spec: FieldSpec,
    specs: FieldSpecs,
    extent: Extent,
    others: Mapping[str, Mapping[str, Field]],
) -> int | None:
    """Return the most rows that a client can have, None where nobody knows."""
    group, _, name = spec.rows.partition("/")
    if not name:
        rows = extent.rows.get(group)
        return None if rows is None else int(rows[0])
    if group in ("own", "marked"):
        counted = specs[name]
        return _most_rows(counted, specs, extent, others) if counted.rows != spec.rows else None
    other = others.get(group, {}).get(name)
    return int(other.off[-1]) if isinstance(other, Ragged) else None
