"""Whether totals can be those of so many silos, by the bounds of single replies.

Single replies stay masked, so a silo that breaks a bound is seen in the sum alone, if at all, and
nobody can tell which silo it was.
"""

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from silograph.core.errors import ProtocolError, mistake
from silograph.core.payload import Field, Payload, Stacked
from silograph.federation.field_specs import FieldSpecs
from silograph.federation.secure.fixed_point import MOST_WEIGHT
from silograph.federation.secure.sums import Layout, total_of_field

SLACK = 1e-6  # relative, and absolute beside sums of floats that are rounded
HISTOGRAM = "histogram"  # counts that a silo may leave out although it sends the others


def _impossible(name: str, expected: str, got: float) -> ProtocolError:
    return ProtocolError(
        f"expected a sum of {name!r} {expected}, got {got:g}: some silo has sent masked values "
        "beyond their bounds, and nobody can tell which",
        **mistake("field-out-of-bounds", name, "secure aggregation"),
    )


def check_bounds(total: np.ndarray, layout: Layout, silos: int) -> None:
    """Raise `ProtocolError` for a total (n,) uint64 that `silos` vectors in bounds cannot have."""
    weight = float(silos)
    if layout.by:
        weight = float(total_of_field(total, layout, layout.by))
        if not 0 <= weight <= silos * MOST_WEIGHT:
            raise _impossible(layout.by, f"from 0 to {silos * MOST_WEIGHT:g}", weight)
    for field in layout.fields:
        if field.name == layout.by:
            continue
        most = field.form.bound * (weight if field.form.is_weighted else silos)
        values = total_of_field(total, layout, field.name)
        largest = float(np.abs(values.astype(np.float64)).max(initial=0))
        if not largest <= most * (1 + SLACK) + SLACK * silos:
            raise _impossible(field.name, f"of at most {most:g}", largest)


def check_reply_of_sum(
    reply: Mapping[str, Field],
    specs: FieldSpecs,
    by: str,
    silos: int,
    problem: Callable[[Payload, Payload], str | None] | None,
    inbox: Payload,
) -> None:
    """Raise `ProtocolError` for sums or means that replies with these specs cannot have.

    Args:
        reply: sums or means by field.
        specs: of the fields of each silo's reply.
        by: field with the weights of a mean; "" of a sum.
        silos: number of replies.
        problem: finds numbers of a reply that contradict each other, and holds for sums as well.
        inbox: what was sent.
    """
    for name, field in reply.items():
        spec, factor = specs[name], 1 if by and name != by else silos
        slack = SLACK * factor if field.t.is_floating_point() else 0.0
        low, high = _extremes(field.t)
        if spec.low is not None and low < factor * spec.low - slack * (1 + abs(spec.low)):
            raise _impossible(name, f"from {factor * spec.low:g}", low)
        if spec.high is not None and high > factor * spec.high + slack * (1 + abs(spec.high)):
            raise _impossible(name, f"up to {factor * spec.high:g}", high)
    if by or problem is None:
        return
    like_one = {n: Stacked(f.t[None]) for n, f in reply.items() if not n.endswith(HISTOGRAM)}
    line = problem(inbox, like_one)
    if line is not None:
        raise ProtocolError(
            f"expected {line}, in a sum over silos: some silo has sent wrong counts, and nobody "
            "can tell which",
            **mistake("field-out-of-bounds", None, "secure aggregation"),
        )


def _extremes(t: Tensor) -> tuple[float, float]:
    return (float(t.min()), float(t.max())) if t.numel() else (0.0, 0.0)
