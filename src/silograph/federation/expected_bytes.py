"""What calls will cost, known before they are made: frames are as long as their fields say."""

import math
from collections.abc import Mapping

import torch

from silograph.core.kinds import Kind
from silograph.core.payload import Field, Ragged
from silograph.federation.field_specs import Extent, FieldSpec, FieldSpecs
from silograph.federation.frame import DIMENSION, FIELD, HEADER
from silograph.federation.program import Steps, counted_calls


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
