"""What calls will cost, known before they are made: frames are as long as their fields say."""

import torch

from silograph.core.kinds import Kind
from silograph.core.payload import Field, Shared, Stacked
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.federation.frame import frame_sizes
from silograph.federation.program import Steps, counted_calls


def bytes_of_steps(steps: Steps, dtype: torch.dtype) -> int | None:
    """Return the bytes of all calls of some steps at one client, evaluation apart.

    Of calls that may be left out or repeated it is the most that they can cost. None: a field has
    as many rows as a client's nodes or as an op chooses, so nobody knows before.

    Args:
        steps: of a round.
        dtype: of floating point values in the run.
    """
    sizes = [
        (times, bytes_of_frame(call.op.__name__, specs, dtype))
        for call, times in counted_calls(steps)
        if call.what is not Kind.EVALUATION
        for specs in (call.takes, call.gives)
    ]
    known = [times * size for times, size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def bytes_of_frame(op: str, specs: FieldSpecs, dtype: torch.dtype) -> int | None:
    """Return the bytes of one client's frame of fields as they are declared, None if unknown."""
    fields = {name: _empty(spec, dtype) for name, spec in specs.items()}
    known = {name: field for name, field in fields.items() if field is not None}
    return int(frame_sizes(op, known, 1)[0]) if len(known) == len(fields) else None


def _empty(spec: FieldSpec, dtype: torch.dtype) -> Field | None:
    """Return a field of the declared shape without memory behind it."""
    shape = [size for size in spec.shape if size is not None]
    if spec.form not in (Shared, Stacked) or len(shape) < len(spec.shape):
        return None
    lead = [1] if spec.form is Stacked else []
    found = torch.empty(lead + shape, dtype=spec.dtype or dtype, device="meta")
    return Stacked(found) if spec.form is Stacked else Shared(found)
