"""Messages and states: flat mappings from names to tensors with a client dimension.

A field of a payload is `Shared` (one tensor for all clients), `Stacked` (one slice a client)
or `Ragged` (a run of rows a client). A client's state has the last two only. There is no other
way to send anything to a client or back: scalars are tensors, too.

A message or a state may also have `Patched` fields: `Stacked` ones, held in less memory. They
travel as `Stacked` ones, a whole slice to or from each client.

C: clients in the block. n_c: rows of client c.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError

Element = TypeVar("Element")
LARGE = 1 << 24  # bytes of parts together that are not joined in one go
LONG_RUN = 32  # rows of a client from which on copying its run is faster than gathering its rows


@dataclass(frozen=True, eq=False)
class Shared:
    """One tensor, the same for every client of the block."""

    t: Tensor


@dataclass(frozen=True, eq=False)
class Stacked:
    """One slice a client: (C, ...)."""

    t: Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """A run of rows a client: t (sum of n_c, ...), off (C + 1,) int64; c has off[c]:off[c + 1]."""

    t: Tensor
    off: Tensor

    def take(self, positions: Tensor) -> "Ragged":
        """Return the runs of the clients at `positions` (k,) int64."""
        lengths = self.off.diff()[positions]
        return Ragged(runs_at(self.t, self.off, positions), offsets(lengths))

    def is_equal(self, other: "Ragged") -> bool:
        """Return whether both have equal rows of one dtype, and equal runs."""
        has_equal_rows = self.t.dtype is other.t.dtype and torch.equal(self.t, other.t)
        return has_equal_rows and torch.equal(self.off, other.off)


@dataclass(frozen=True, eq=False)
class Patched:
    """A slice (R, ...) a client that is one of G bases except in some rows.

    Attributes:
        base: (G, R, ...).
        which: (C,) int64 base of each client.
        t: (U, ...) rows of all clients that differ.
        index: (U,) int64 where they belong in the base, each once for a client.
        off: (C + 1,) int64; client c has t[off[c]:off[c + 1]].
    """

    base: Tensor
    which: Tensor
    t: Tensor
    index: Tensor
    off: Tensor

    def slice(self, position: int) -> Tensor:
        """Return the whole slice (R, ...) of one client."""
        whole = self.base[int(self.which[position])].clone()
        run = slice(int(self.off[position]), int(self.off[position + 1]))
        whole[self.index[run]] = self.t[run]
        return whole

    def stacked(self) -> Stacked:
        """Return the same as a `Stacked` field."""
        whole = self.base[self.which]
        if len(self.t):
            whole[owners(self.off), self.index] = self.t
        return Stacked(whole)

    def like(self, whole: Stacked) -> "Patched":
        """Return slices (C, R, ...) that have the bases of this field in this form."""
        return replace(self, t=whole.t[owners(self.off), self.index])


def from_bases(bases: Tensor, which: Tensor) -> Patched | Stacked:
    """Return the field whose slice of every client is one of G bases.

    Args:
        bases: (G, ...).
        which: (C,) int64 base of each client.
    """
    if bases.dim() == 1:  # slices without rows
        return Stacked(bases[which])
    off = torch.zeros(len(which) + 1, dtype=torch.int64, device=which.device)
    return Patched(bases, which, bases.new_empty(0, *bases.shape[2:]), off[:0], off)


def patched_problem(field: Patched, clients: int) -> str | None:
    """Return what is wrong with a patched field, or None: kernels that read its rows check nothing.

    The text has the form "EXPECTED, got VALUE", for a message.
    """
    if field.base.dim() < 2:
        return f"bases (G, R, ...), got shape {tuple(field.base.shape)}"
    ends, rows = field.off.tolist(), len(field.t)
    if len(field.which) != clients or len(ends) != clients + 1:
        return f"a part for each of {clients} clients, got {len(field.which)}"
    if ends[0] != 0 or ends[-1] != rows or len(field.index) != rows:
        return f"runs of {rows} rows, got offsets {ends[:9]} and {len(field.index)} places"
    if ends != sorted(ends):
        return f"ascending offsets, got {ends[:9]}"
    if field.t.shape[1:] != field.base.shape[2:]:
        return f"rows as those of the base, got shapes {tuple(field.t.shape)}"
    for name, t, size in (
        ("place", field.index, field.base.shape[1]),
        ("base", field.which, len(field.base)),
    ):
        least, most = (int(end) for end in t.aminmax()) if len(t) else (0, 0)
        if len(t) and not 0 <= least <= most < size:
            return f"every {name} below {size}, got {least} to {most}"
    for what, t in (("which", field.which), ("index", field.index), ("off", field.off)):
        if t.dtype is not torch.int64:
            return f"{what} of int64, got {t.dtype}"
    return None


Field = Shared | Stacked | Ragged | Patched
Payload = Mapping[str, Field]
StateField = Stacked | Ragged | Patched
State = Mapping[str, StateField]
NO_STATE: State = MappingProxyType({})


def offsets(lengths: Tensor) -> Tensor:
    """Return (k + 1,) offsets of k runs with these lengths (k,)."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the concatenation of start, start + 1, ..., start + length - 1 of every run."""
    shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return torch.arange(len(shift), device=starts.device) + shift


def rows_of(off: Tensor, positions: Tensor) -> Tensor:
    """Return the row numbers of the clients at `positions` (k,) int64, in that order."""
    return ranges(off[positions], off[positions + 1] - off[positions])


def runs_at(t: Tensor, off: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of t (n, ...) of the clients at `positions` (k,) int64, in that order.

    Long runs on a CPU are copied as they stand; for short ones, places are worked out first.

    Args:
        t: rows of all clients.
        off: (C + 1,) int64; client c has t[off[c]:off[c + 1]].
        positions: of clients.
    """
    if t.device.type != "cpu" or len(t) < LONG_RUN * (len(off) - 1) or len(positions) == 0:
        return t.index_select(0, rows_of(off, positions))
    ends = torch.stack([off[positions], off[positions + 1]], dim=1).tolist()
    whole = t.numpy()
    return torch.from_numpy(np.concatenate([whole[a:b] for a, b in ends]))


def owners(off: Tensor) -> Tensor:
    """Return which client every row belongs to, (n,) int64."""
    if off.device.type != "cpu":
        return torch.repeat_interleave(off.diff())
    ends = off.numpy()  # torch takes three times as long for few clients
    return torch.from_numpy(np.arange(len(ends) - 1).repeat(ends[1:] - ends[:-1]))


def stable_order(values: Tensor) -> Tensor:
    """Return the order (n,) int64 that sorts values (n,); equal values keep their order."""
    if values.is_cpu:  # NumPy takes a quarter of torch's time for values that are almost sorted
        return torch.from_numpy(values.numpy().argsort(kind="stable"))
    return values.argsort(stable=True)


def copied(field: StateField) -> StateField:
    """Return a field in memory of its own, contiguous whatever the strides were."""
    own = replace(field, t=field.t.clone(memory_format=torch.contiguous_format))
    if isinstance(own, Patched):
        own = replace(own, base=own.base.clone(memory_format=torch.contiguous_format))
    return own


def take(field: Field, positions: Tensor) -> Field:
    """Return the part of a field that belongs to the clients at `positions` (k,) int64."""
    match field:
        case Shared():
            return field
        case Stacked():
            return Stacked(field.t[positions])
        case Ragged():
            return field.take(positions)
        case Patched(base, which, t, index, off):
            lengths = off.diff()[positions]
            rows, places = runs_at(t, off, positions), runs_at(index, off, positions)
            return Patched(base, which[positions], rows, places, offsets(lengths))


def take_all(payload: Mapping[str, Field], positions: Tensor) -> dict[str, Field]:
    """Return `take` of every field."""
    return {name: take(field, positions) for name, field in payload.items()}


def spread(field: Field, positions: Tensor, clients: int) -> Field:
    """Return a field of the clients at `positions` (k,) as one of all C; others have no rows.

    Raises:
        ProtocolError: it has a slice for each client, so others would have none.
    """
    if isinstance(field, Shared):
        return field
    if not isinstance(field, Ragged):
        raise ProtocolError(f"expected Shared or Ragged fields, got {type(field).__name__}")
    lengths = field.off.new_zeros(clients).index_copy_(0, positions, field.off.diff())
    return Ragged(field.t, offsets(lengths))


def drop_idle_clients(reply: Mapping[str, Field], positions: Tensor) -> dict[str, Field]:
    """Undo `spread`: keep the clients at `positions` (k,) int64, ascending.

    Rows are not copied where only these clients have any.
    """

    def part(field: Field) -> Field:
        if isinstance(field, Ragged):
            off = offsets(field.off.diff()[positions])
            if int(off[-1]) == len(field.t):
                return Ragged(field.t, off)
        return take(field, positions)

    return {name: part(field) for name, field in reply.items()}


def concatenate(fields: list[Field]) -> Field:
    """Join the parts of one field along the clients; `Shared` parts must be one and the same.

    The list may be empty afterwards (see `rows_joined`).
    """
    first = fields[0]
    if any(type(field) is not type(first) for field in fields):
        raise ProtocolError(
            "expected one kind of field from every block, got "
            + ", ".join(sorted({type(field).__name__ for field in fields}))
        )
    match first:
        case Shared():
            return first
        case Stacked():
            del first
            return Stacked(rows_joined(fields))
        case Ragged():
            del first
            lengths = [field.off.diff() for field in fields if isinstance(field, Ragged)]
            return Ragged(rows_joined(fields), offsets(torch.cat(lengths)))
        case Patched():
            return concatenate([f.stacked() for f in fields if isinstance(f, Patched)])


def rows_joined(fields: list[Field]) -> Tensor:
    """Concatenate the fields' tensors, as `torch.cat` does.

    Large parts are taken off the list, and so freed, as they are copied: a machine has room for
    the rows of all halo slots once, perhaps not twice.
    """
    tensors = [field.t for field in fields]
    shape, dtype, device = tensors[0].shape[1:], tensors[0].dtype, tensors[0].device
    alike = all(t.shape[1:] == shape and t.dtype == dtype for t in tensors)
    if not alike or device.type != "cpu" or sum(t.nbytes for t in tensors) < LARGE:
        return torch.cat(tensors)
    end = sum(map(len, tensors))
    joined = torch.empty(end, *shape, dtype=dtype)
    del tensors
    while fields:
        part = fields.pop().t
        joined[end - len(part) : end] = part
        end -= len(part)
    return joined


def put(into: StateField, part: StateField, positions: Tensor) -> StateField:
    """Return `into` with the clients at `positions` (k,) replaced by those of `part`.

    Of a `Stacked` and a `Patched` one it is `Stacked`.
    """
    if {type(into), type(part)} == {Stacked, Patched}:
        into, part = (f.stacked() if isinstance(f, Patched) else f for f in (into, part))
    if isinstance(into, Stacked) and isinstance(part, Stacked):
        return Stacked(into.t.index_copy(0, positions, part.t))
    if isinstance(into, Ragged | Patched) and type(part) is type(into):
        clients = len(into.off) - 1
        source = torch.arange(clients, device=positions.device)
        source[positions] = torch.arange(len(positions), device=positions.device) + clients
        if isinstance(into, Patched) and isinstance(part, Patched):
            return _without_unused_bases(_patched_in_order([into, part], source))
        replaced = take(concatenate([into, part]), source)
        assert isinstance(replaced, Ragged)  # take keeps the type
        return replaced
    raise ProtocolError(
        f"expected state of type {type(into).__name__}, got {type(part).__name__}: "
        "an op must keep the type of a state field"
    )


def dense(field: Field) -> Tensor:
    """Return the tensor of a field, that of a `Patched` one whole: (C, R, ...)."""
    return field.stacked().t if isinstance(field, Patched) else field.t


def stack(tensors: Mapping[str, Tensor]) -> dict[str, Stacked]:
    """Return tensors (C, ...) of clients as fields, by name."""
    return {name: Stacked(t) for name, t in tensors.items()}


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under names `prefix/name`."""
    return {f"{prefix}/{name}": t for name, t in tensors.items()}


def fields_under(prefix: str, values: Mapping[str, Element]) -> dict[str, Element]:
    """Return the values under names `prefix/name`, by name."""
    start = f"{prefix}/"
    return {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}


def tensors_under(prefix: str, fields: Mapping[str, Field]) -> dict[str, Tensor]:
    """Return the tensors of the fields `prefix/name`, by name; those of `Patched` ones whole."""
    return {name: dense(field) for name, field in fields_under(prefix, fields).items()}


def join(parts: list[Payload]) -> dict[str, Field]:
    """Join payloads of blocks along the clients; all must have the same fields.

    The list is empty afterwards, so that rows are freed as they are copied.

    Raises:
        ProtocolError: the blocks disagree on the fields.
    """
    remaining, names = [dict(part) for part in parts], list(parts[0])
    parts.clear()
    others = next((list(part) for part in remaining if part.keys() != remaining[0].keys()), None)
    if others is not None:
        raise ProtocolError(
            f"expected the same fields from every block, got {sorted(names)} and {sorted(others)}"
        )
    return {name: concatenate([part.pop(name) for part in remaining]) for name in names}


def join_in_order(parts: Sequence[Mapping[str, Field]], order: Tensor) -> dict[str, Field]:
    """Join payloads of groups of clients, and put the clients in another order.

    Unlike `join` it keeps `Patched` fields as they are.

    Args:
        parts: of the groups; all must have the same fields.
        order: (C,) int64; client c of the result is client order[c] of the groups one by one.

    Raises:
        ProtocolError: the groups disagree on the fields.
    """
    patched = {name for name, f in parts[0].items() if isinstance(f, Patched)}
    patched_fields: dict[str, Field] = {}
    for name in patched:
        fields = [field for part in parts if isinstance(field := part.get(name), Patched)]
        if len(fields) == len(parts):
            patched_fields[name] = _patched_in_order(fields, order)
    other_parts: list[Payload] = [
        {
            n: f.stacked() if isinstance(f, Patched) else f
            for n, f in p.items()
            if n not in patched_fields
        }
        for p in parts
    ]
    return take_all(join(other_parts), order) | patched_fields


def _patched_in_order(fields: Sequence[Patched], order: Tensor) -> Patched:
    """Return fields with bases of one shape as one field; see `join_in_order`."""
    shift = offsets(torch.tensor([len(field.base) for field in fields]))[:-1].tolist()
    which = torch.cat([field.which + by for field, by in zip(fields, shift, strict=True)])
    lengths = torch.cat([field.off.diff() for field in fields])
    t, index = torch.cat([f.t for f in fields]), torch.cat([f.index for f in fields])
    off = offsets(lengths)
    return Patched(
        base=torch.cat([field.base for field in fields]),
        which=which[order],
        t=runs_at(t, off, order),
        index=runs_at(index, off, order),
        off=offsets(lengths[order]),
    )


def _without_unused_bases(field: Patched) -> Patched:
    """Return a field with only those bases that a client has."""
    used, which = field.which.unique(return_inverse=True)
    if len(used) == len(field.base):
        return field
    return replace(field, base=field.base[used], which=which)


def state_of(payload: Mapping[str, Field]) -> dict[str, StateField]:
    """Return the payload as state; raise `ProtocolError` where a field is `Shared`."""
    state: dict[str, StateField] = {}
    for name, field in payload.items():
        if isinstance(field, Shared):
            raise ProtocolError(
                f"expected a Stacked or Ragged state field {name!r}, got {type(field).__name__}: "
                "state belongs to one client each"
            )
        state[name] = field
    return state


AnyField = TypeVar("AnyField", bound=Field)


def moved(field: AnyField, device: torch.device) -> AnyField:
    """Return a field on another device."""
    if device.type == "cpu":
        return field
    return type(field)(*(t.to(device) for t in vars(field).values()))
