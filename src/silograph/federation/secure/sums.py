"""Replies as one vector of the ring, and the sum of these as the reply of all silos.

A reply that is summed, or of which a mean is taken, has its fields one after the other, each value
in fixed point (`silograph.federation.secure.fixed_point`). A mean is the sum of the values times
the silo's weight, divided by the sum of the weights. Integer sums have no order, so every engine
gets the same bits, whatever its blocks.

C: clients of a block. n: values of a reply.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError, mistake
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Patched, Payload, Shared, Stacked
from silograph.federation.base import Gather, Reduce, Sum, WeightedMean
from silograph.federation.field_specs import FieldSpecs
from silograph.federation.secure.fixed_point import FixedPoint, decode, encode, fixed_point_of

LEAST_SILOS = 2  # in a sum; that of one silo would show its values


class SumError(ProtocolError):
    """A step of a sum that cannot be taken; its field `silo` says whose message is wrong."""

    def __init__(self, line: str, silo: str = "") -> None:
        super().__init__(line, **mistake("secure-sum", silo))


@dataclass(frozen=True)
class SecureSums:
    """What silos agree to in a run with secure aggregation.

    Attributes:
        silos: number of silos of the run.
        least: fewest silos in a sum.
        secret: that silos share and the server does not know, by which they prove that public keys
            are theirs; None: they cannot.
        needs_proofs: whether the silo refuses keys without such a proof.
    """

    silos: int
    least: int
    secret: bytes | None = None
    needs_proofs: bool = False


@dataclass(frozen=True)
class SummedField:
    """A field of a reply that is summed.

    Attributes:
        name: of it.
        shape: of one silo's slice.
        dtype: of its values.
        form: how they are encoded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    form: FixedPoint

    @property
    def size(self) -> int:
        """How many numbers of the ring it takes."""
        return math.prod(self.shape) * self.form.limbs


@dataclass(frozen=True)
class Layout:
    """What the vector of a reply holds, in order.

    Attributes:
        fields: by name, sorted.
        by: field with the weights of a mean; "" of a sum.
    """

    fields: tuple[SummedField, ...]
    by: str

    @property
    def size(self) -> int:
        """N."""
        return sum(field.size for field in self.fields)


def weights_field(reduce: Reduce | None, op: str) -> str:
    """Return the field by which a mean is weighted, "" for a sum.

    Raises:
        ProtocolError: the server would read replies of single silos.
    """
    if isinstance(reduce, Sum):
        return ""
    if isinstance(reduce, WeightedMean) and not (reduce.sent.bases or reduce.sent.known):
        return reduce.by
    how = "by silo" if reduce is None or isinstance(reduce, Gather) else "in another form"
    raise ProtocolError(
        f"expected replies of {op} that are summed, for secure_aggregation, got replies that the "
        f"server reads {how}: leave secure_aggregation out, or what needs these replies"
    )


def layout_of(
    parts: Mapping[str, tuple[Sequence[int], torch.dtype]], kind: Kind, by: str, clients: int
) -> Layout:
    """Return the layout of replies with fields of these shapes and dtypes.

    Args:
        parts: shape and dtype of one silo's slice, by name.
        kind: of the replies.
        by: field with the weights of a mean; "" of a sum.
        clients: all clients of the federation.

    Raises:
        ProtocolError: the field with the weights is missing, or no number for each silo.
    """
    if by and (by not in parts or tuple(parts[by][0]) != ()):
        raise ProtocolError(f"expected a number {by!r} in a reply of which a mean is taken")
    fields = []
    for name, (shape, dtype) in sorted(parts.items()):
        is_weighted = bool(by) and name != by
        form = fixed_point_of(
            kind, is_float=dtype.is_floating_point, is_weighted=is_weighted, clients=clients
        )
        fields.append(SummedField(name, tuple(shape), dtype, form))
    return Layout(tuple(fields), by)


def layout_of_reply(reply: Payload, kind: Kind, by: str, clients: int) -> Layout:
    """Return the layout of a reply.

    Raises:
        ProtocolError: a field has rows, or none.
    """
    parts = {}
    for name, field in reply.items():
        if not isinstance(field, Stacked | Patched):
            raise ProtocolError(
                f"expected Stacked fields in a reply that is reduced, got {type(field).__name__} "
                f"for {name!r}"
            )
        like = field.base if isinstance(field, Patched) else field.t
        parts[name] = (tuple(like.shape[1:]), field.t.dtype)
    return layout_of(parts, kind, by, clients)


def layout_of_specs(
    specs: FieldSpecs, kind: Kind, by: str, clients: int, dtype: torch.dtype
) -> Layout:
    """Return the layout of replies that both ends have agreed on; `dtype`: of floats in the run.

    Raises:
        ProtocolError: a field whose size is not agreed.
    """
    parts = {}
    for name, spec in specs.items():
        if spec.form is not Stacked or None in spec.shape:
            raise ProtocolError(
                f"expected fields of a fixed size for secure_aggregation, got {name!r}: leave "
                "secure_aggregation out"
            )
        parts[name] = (tuple(n or 0 for n in spec.shape), spec.dtype or dtype)
    return layout_of(parts, kind, by, clients)


def vector_of(reply: Payload, position: int, layout: Layout) -> np.ndarray:
    """Return the values (n,) uint64 of the client at `position`.

    Raises:
        ProtocolError: a value beyond its bound, or a negative weight.
    """
    weight = 1.0
    if layout.by:
        weight = float(_slice(reply[layout.by], position))
        if not weight >= 0:
            raise ProtocolError(f"expected weights >= 0 in {layout.by!r}, got {weight:g}")
    parts = [
        encode(_slice(reply[field.name], position).numpy(), field.form, weight, field.name).ravel()
        for field in layout.fields
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def _slice(field: Field, position: int) -> Tensor:
    """Return one client's slice, on the CPU."""
    part = field.slice(position) if isinstance(field, Patched) else field.t[position]
    return part.detach().cpu().contiguous()


def total_of_field(total: np.ndarray, layout: Layout, name: str) -> np.ndarray:
    """Return the sums of a field: int64 of integers, else float64."""
    start = 0
    for field in layout.fields:
        if field.name == name:
            limbs = () if field.form.limbs == 1 else (field.form.limbs,)
            part = total[start : start + field.size].reshape((*field.shape, *limbs))
            return decode(part, field.form)
        start += field.size
    raise KeyError(name)


def reply_of_total(total: np.ndarray, layout: Layout) -> dict[str, Shared]:
    """Return the summed reply; of a mean without any weight, only the weight: 0.

    Raises:
        ProtocolError: a sum of integers that their dtype cannot have.
    """
    sums = {field.name: total_of_field(total, layout, field.name) for field in layout.fields}
    if not layout.by:
        return {f.name: Shared(_tensor(sums[f.name], f.dtype, f.name)) for f in layout.fields}
    weight = float(sums[layout.by])
    if weight == 0:
        return {layout.by: Shared(torch.zeros(()))}
    means = {}
    for field in layout.fields:
        if field.name == layout.by:
            means[field.name] = Shared(_tensor(sums[field.name], field.dtype, field.name))
            continue
        dtype = field.dtype if field.dtype.is_floating_point else torch.get_default_dtype()
        means[field.name] = Shared(_tensor(sums[field.name] / weight, dtype, field.name))
    return means


def _tensor(values: np.ndarray, dtype: torch.dtype, name: str) -> Tensor:
    dtype = torch.int64 if dtype is torch.bool else dtype
    if not dtype.is_floating_point and values.size:
        info = torch.iinfo(dtype)
        if not info.min <= int(values.min()) <= int(values.max()) <= info.max:
            raise ProtocolError(
                f"expected a sum of {name!r} within {dtype}, got {int(values.max()):,}: use fewer "
                "silos, or counts of a wider dtype",
                **mistake("field-out-of-bounds", name, "secure aggregation"),
            )
    return torch.from_numpy(np.array(values)).to(dtype)


class SecureFold:
    """Adds up the replies of blocks of clients in one process, as masked sums would.

    Masks cancel in the sum, so nothing is masked here.

    Args:
        reduce: how replies are reduced.
        op: name of the op, for errors.
        kind: of the replies.
        clients: all clients of the federation.
        called: clients of the call.

    Raises:
        ProtocolError: the server would read single replies, or fewer than `LEAST_SILOS` are called.
    """

    def __init__(
        self, reduce: Reduce | None, op: str, kind: Kind, *, clients: int, called: int
    ) -> None:
        self._by, self._kind, self._clients = weights_field(reduce, op), kind, clients
        check_silos(called, op)
        self._layout: Layout | None = None
        self._total = np.zeros(0, np.uint64)

    @property
    def size(self) -> int:
        """Values of a reply, once there was one."""
        return 0 if self._layout is None else self._layout.size

    @property
    def takes_rows(self) -> bool:
        """Whether replies may have runs of rows: never."""
        return False

    def add(
        self,
        reply: Payload,
        positions: Tensor | None = None,
        may_be_written: Callable[[Tensor], bool] | None = None,
    ) -> None:
        """Add the reply of a block; arguments as for `Reduction.add`.

        Raises:
            ProtocolError: fields unlike those of other replies, or values beyond their bounds.
        """
        del positions, may_be_written  # nothing is kept
        layout = layout_of_reply(reply, self._kind, self._by, self._clients)
        if self._layout is None:
            self._layout, self._total = layout, np.zeros(layout.size, np.uint64)
        if layout != self._layout:
            raise ProtocolError("expected the same fields from every block to reduce, got others")
        first = next(iter(reply.values()), None)
        count = 0 if first is None else len(first.which if isinstance(first, Patched) else first.t)
        for position in range(count):
            self._total += vector_of(reply, position, layout)

    def result(self) -> dict[str, Field]:
        """Return the reduced reply."""
        return {} if self._layout is None else dict(reply_of_total(self._total, self._layout))


def check_silos(called: int, op: str, least: int = LEAST_SILOS) -> None:
    """Raise `ProtocolError` for a sum over fewer silos than may be revealed."""
    if called < least:
        raise ProtocolError(
            f"expected at least {least} clients in every sum for secure_aggregation, got {called} "
            f"in {op}: let more clients train in a round, or leave secure_aggregation out"
        )
