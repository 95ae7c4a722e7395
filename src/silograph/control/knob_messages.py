"""Knobs on their way to clients: fields of an inbox, and what silos hold them to.

C: clients of the federation. k: clients of a call.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from silograph.control.base import knobs_of
from silograph.core.payload import Field, Shared, Stacked
from silograph.federation.base import positions_of
from silograph.federation.field_specs import FieldSpec, FieldSpecs

PREFIX = "knobs/"


def knob_fields(
    knobs: Mapping[str, Tensor], ids: Sequence[str], to: Sequence[str] | None = None
) -> dict[str, Field]:
    """Return the fields `knobs/NAME` of an inbox: shared, or a value for each called client.

    Args:
        knobs: values of a round, () or (C,).
        ids: of the federation.
        to: clients that are called; all by default.
    """
    at = positions_of(ids, to)
    return {PREFIX + n: Stacked(t[at]) if t.dim() else Shared(t) for n, t in knobs.items()}


def knob_specs(
    options: Any, *, moved: bool = True, names: Collection[str] | None = None
) -> FieldSpecs:
    """Return the specs of these fields, with the ranges that the options declare.

    Args:
        options: of the method.
        moved: whether anything moves the knobs; if not, clients take the options' values alone.
        names: of the knobs that are sent; all by default.
    """
    return {
        PREFIX + knob.name: FieldSpec(
            Stacked if knob.by_client else Shared,
            (),
            knob.dtype,
            low=knob.low if moved else knob.start,
            high=knob.high if moved else knob.start,
        )
        for knob in knobs_of(options, names)
    }
