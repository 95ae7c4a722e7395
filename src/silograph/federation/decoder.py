"""What clients send of a tensor, turned into whole tensors and into changes.

A field of a reply holds the tensor itself; or its change as small numbers
(`silograph.federation.decoder`), with scales in a field of their own; or only the rows that a
client uses (`silograph.federation.decoder`), of the tensor or of its change. Means, users'
aggregators and the checks of what a silo sends all read replies through the same decoder.

C: clients of the federation. k: rows that they use. R: rows of a tensor.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from silograph.core.errors import ProtocolError
from silograph.core.payload import Field, Patched, Payload, Ragged, Stacked, owners, take

# --- Fields that travel as rows of a base, where both ends know which rows these are -------------
#
# A client says once which rows of a tensor it uses, those of features that occur at its nodes,
# say. From then on messages hold these rows only, without their numbers: to the client as a
# `Ragged` field of the inbox, back as one of the reply (`silograph.federation.decoder`). So a
# frame has its true size, and no number of a row is there to be wrong. Specs take the
# number of rows from the state: `rows="state/NAME"`.
#
# C: clients. k: rows that they use. R: rows of the base.


def rows_for(base: Tensor, known: Ragged) -> Ragged:
    """Return the rows (k, ...) of a base (R, ...) that clients use, by their numbers (k,)."""
    return Ragged(base[known.t.long().to(base.device)], known.off)


def onto(base: Tensor, rows: Ragged, known: Ragged, which: Tensor | None = None) -> Patched:
    """Return slices (C, R, ...) that are a base (R, ...) except in the rows that clients use.

    Args:
        base: the same for all; with `which` one of several, (G, R, ...).
        rows: of the clients.
        known: their numbers.
        which: (C,) int64 base of each client.

    Raises:
        ProtocolError: other numbers of rows than clients use, or rows of another shape.
    """
    alike = rows.off.shape == known.off.shape and torch.equal(rows.off.cpu(), known.off.cpu())
    bases = base[None] if which is None else base
    if not alike or rows.t.shape[1:] != bases.shape[2:]:
        expected, got = (f.off.diff().tolist()[:9] for f in (known, rows))
        raise ProtocolError(
            f"expected {expected} rows of shape {tuple(bases.shape[2:])}, which clients said they "
            f"use, got {got} of {tuple(rows.t.shape[1:])}"
        )
    if which is None:
        which = torch.zeros(len(known.off) - 1, dtype=torch.int64)
    return Patched(bases, which, rows.t, known.t.long(), known.off)


def rows_from(field: Stacked | Patched, known: Ragged) -> Ragged:
    """Return the rows (k, ...) that clients use of slices (C, R, ...)."""
    index = known.t.long()
    if isinstance(field, Stacked):
        return Ragged(field.t[owners(known.off), index], known.off)
    if torch.equal(field.off, known.off) and torch.equal(field.index, index):
        return Ragged(field.t, known.off)
    parts = index.split(known.off.diff().tolist())
    return Ragged(torch.cat([field.slice(c)[part] for c, part in enumerate(parts)]), known.off)


# --- Floating point numbers as float16, or as bytes or half bytes with a scale for each row ------
#
# k: rows. D: width of a row.


LEVELS = 127  # of a row that is sent as bytes, on either side of 0
HALF_LEVELS = 7  # as half bytes
ZERO = 8  # a half byte that stands for 0
# Dtypes of numbers with scales (uint8: pairs of half bytes), and how far from 0 a number may be:
# -128 and -8 are never sent from here, but may come.
SCALED = {torch.int8: 128, torch.uint8: 8}
LARGEST = 2.0**120  # scale: times its levels it is finite
LARGEST_HALF = 65504.0  # of float16


def as_bytes(x: Tensor, most: int = LEVELS) -> tuple[Tensor, Tensor]:
    """Return rows (..., D) as whole numbers from -most to most, int8, and scales (...) float32.

    A row is its numbers times its scale, to within half a scale in each entry. The scale of a row
    that is not finite is not finite, either, or the largest.
    """
    scale = (x.abs().amax(-1).double() / most).clamp(max=LARGEST).float()
    levels = x.double() / scale.double().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return levels.round().clamp(-most, most).nan_to_num(0.0).to(torch.int8), scale


def as_half_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (..., D) as whole numbers from -7 to 7, two in a byte, and scales (...) float32.

    The bytes are (..., (D + 1) // 2) uint8: 8 more than number 2 i in the low half of byte i, 8
    more than the next one in the high half; 8 where there is none.
    """
    numbers, scale = as_bytes(x, HALF_LEVELS)
    halves = pad(numbers + ZERO, (0, numbers.shape[-1] % 2), value=ZERO).to(torch.uint8)
    return halves[..., 0::2] | halves[..., 1::2] << 4, scale


def as_halves(x: Tensor) -> Tensor:
    """Return float16 numbers, the largest that there are for what is larger."""
    return x.clamp(-LARGEST_HALF, LARGEST_HALF).half()


def packed_width(dtype: torch.dtype, width: int) -> int:
    """Return how many entries a row of so many small numbers has on its way."""
    return (width + 1) // 2 if dtype is torch.uint8 else width


def unpacked(t: Tensor, width: int) -> Tensor:
    """Return rows (..., D) of small numbers, half bytes as int8.

    Args:
        t: rows as they were sent, (..., `packed_width`).
        width: D.

    Raises:
        ProtocolError: rows of another width.
    """
    expected = packed_width(t.dtype, width)
    if t.shape[-1] != expected:
        raise ProtocolError(
            f"expected {expected} entries for a row of {width} numbers, got {t.shape[-1]}"
        )
    if t.dtype is not torch.uint8:
        return t
    return torch.stack((t & 15, t >> 4), -1).flatten(-2)[..., :width].to(torch.int8) - ZERO


def from_small(t: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return numbers (..., D) of a dtype from `as_halves`, or from bytes with their scales."""
    numbers = t.to(dtype)
    return numbers if scale is None else numbers * scale.to(dtype)[..., None]


SCALE = "scale/"  # begins the name of a field with the scales of another


@dataclass(frozen=True)
class Decoder:
    """Describes how fields of replies are decoded; by default they hold whole tensors.

    Attributes:
        bases: tensors of which replies hold changes, as float16, or as int8 or pairs of half bytes
            (uint8) with a float32 scale for each row in the field `SCALE` and the name.
        known: row numbers (k,), a run for every client of the federation, of fields of which
            replies hold these rows only, as `Ragged` fields.
        others: what the other rows of fields in `known` are, (R, ...) by name.
        steps: field (C,) with how many steps clients have taken, where the other rows depend on it.
        after: the other rows of a field after so many steps, in place of `others`.
        shares: by names of fields that hold changes of rows, each times its share, the field with
            the shares (C, rows), 0 for rows that did not change.
    """

    bases: Mapping[str, Tensor] = field(default_factory=dict)
    known: Mapping[str, Ragged] = field(default_factory=dict)
    others: Mapping[str, Tensor] = field(default_factory=dict)
    steps: str = ""
    after: Callable[[str, int], Tensor] | None = None
    shares: Mapping[str, str] = field(default_factory=dict)

    def check(self, clients: int) -> None:
        """Raise `ProtocolError` unless the decoder fits a federation of `clients` clients."""
        for name, row_numbers in self.known.items():
            if name not in self.others or len(row_numbers.off) != clients + 1:
                raise ProtocolError(
                    f"expected what {name!r} is taken around, and its rows of {clients} clients, "
                    f"got {sorted(self.others)} and rows of {len(row_numbers.off) - 1}"
                )

    def check_rows(self, reply: Payload, position: int) -> None:
        """Raise `ProtocolError` for other numbers of rows than the client at `position` uses."""
        for name, row_numbers in self.known.items():
            expected = int(row_numbers.off[position + 1] - row_numbers.off[position])
            for part in (n for n in (name, f"{SCALE}{name}") if n in reply):
                if len(reply[part].t) != expected:
                    raise ProtocolError(
                        f"expected {expected} rows for {part!r}, which the client said it uses, "
                        f"got {len(reply[part].t)}"
                    )

    def is_scale(self, name: str) -> bool:
        """Return whether a field holds the scales of another."""
        return name.startswith(SCALE) and name.removeprefix(SCALE) in self.bases

    def most_levels(self, name: str, reply: Payload) -> int:
        """Return the largest number that a scale in this field may multiply."""
        return SCALED[reply[name.removeprefix(SCALE)].t.dtype]

    def whole(self, reply: Payload, positions: Tensor) -> dict[str, Field]:
        """Return the reply of the clients at `positions` (k,) int64 with whole tensors.

        Raises:
            ProtocolError: bytes without scales, rows of another width, or other numbers of rows
                than clients use.
        """
        if not self.bases and not self.known:
            return dict(reply)
        return {n: self._decode_field(n, reply, positions) for n in reply if not self.is_scale(n)}

    def change(
        self, name: str, reply: Payload, start: Field | None, position: int
    ) -> Tensor | None:
        """Return by how much one client has changed what it sends of a field, in float64.

        Args:
            name: of the field.
            reply: the client's.
            start: what it was sent of the field in this call; None: rows are compared with what
                they are without the client's data.
            position: of the client in the federation.

        Returns:
            None: what it began with is unknown.
        """
        new = only_slice(reply[name])
        if name in self.shares and self.shares[name] in reply:
            share = only_slice(reply[self.shares[name]]).unsqueeze(-1).clamp(min=0)
            return torch.where(new != 0, new.double() / share, 0.0)  # of no share: infinite
        if name in self.bases:
            scale, new = reply.get(f"{SCALE}{name}"), unpacked(new, self.bases[name].shape[-1])
            return from_small(new, None if scale is None else only_slice(scale), torch.float64)
        old = self.start_of(name, reply, start, position)
        if old is None:
            return None
        if not (new.is_cpu and old.is_cpu):
            return new.double() - old.double().to(new.device)
        # The same in one pass: torch makes two copies in float64 first.
        return torch.from_numpy(
            np.subtract(new.detach().numpy(), old.detach().numpy(), dtype=np.float64)
        )

    def start_of(
        self, name: str, reply: Payload, start: Field | None, position: int
    ) -> Tensor | None:
        """Return the tensor from which one client has started, of a field that it sends whole.

        The arguments are those of `change`. None: it is unknown, or has another shape.
        """
        old = self.others.get(name) if start is None else only_slice(start)
        if start is None and old is not None and name in self.known:
            old = old[take(self.known[name], torch.tensor([position])).t.long()]
        return None if old is None or old.shape != only_slice(reply[name]).shape else old

    def holds_changes(self, name: str, reply: Payload) -> bool:
        """Return whether a field of a reply holds the change of a tensor, not its new values."""
        return name in self.bases or (name in self.shares and self.shares[name] in reply)

    def _decode_field(self, name: str, reply: Payload, positions: Tensor) -> Field:
        sent, base = reply[name], self.bases.get(name)
        row_numbers = take(self.known[name], positions) if name in self.known else None
        if base is not None:
            sent = _apply_change(base, sent, reply.get(f"{SCALE}{name}"), row_numbers)
        if not isinstance(row_numbers, Ragged) or not isinstance(sent, Ragged):
            return sent
        if self.after is None:
            return onto(self.others[name], sent, row_numbers)
        steps, which = torch.unique(slices(self.steps, reply), return_inverse=True)
        after = [self.after(name, count) for count in steps.tolist()]
        return onto(torch.stack(after), sent, row_numbers, which)


WHOLE = Decoder()


def _apply_change(
    base: Tensor, sent: Field, scale: Field | None, row_numbers: Field | None
) -> Field:
    """Return what a base (R, ...) has become by changes; `row_numbers`: which rows they are of."""
    if (sent.t.dtype in SCALED) is (scale is None):
        raise ProtocolError(
            f"expected scales with changes as int8 or uint8 and with no others, got {sent.t.dtype}"
        )
    width = base.shape[-1]
    scales = None if scale is None else scale.t
    if isinstance(sent, Patched):
        bases = scale.base if isinstance(scale, Patched) else None
        whole = base + from_small(unpacked(sent.base, width), bases, base.dtype)
        rows = base[sent.index] + from_small(unpacked(sent.t, width), scales, base.dtype)
        return dataclasses.replace(sent, base=whole, t=rows)
    change = from_small(unpacked(sent.t, width), scales, base.dtype)
    if not isinstance(sent, Ragged):
        return Stacked(base + change)
    assert isinstance(row_numbers, Ragged)  # a Ragged field is of known rows
    if not torch.equal(row_numbers.off, sent.off.to(row_numbers.off.device)):
        raise ProtocolError(
            f"expected changes of {row_numbers.off.diff().tolist()[:9]} rows, which clients said "
            f"they use, got {sent.off.diff().tolist()[:9]}"
        )
    return Ragged(base[row_numbers.t.long()] + change, sent.off)


def slices(name: str, reply: Payload) -> Tensor:
    """Return the slices (k, ...) of a field.

    Raises:
        ProtocolError: it is missing, or has no slice for each client.
    """
    field = reply.get(name)
    if isinstance(field, Patched):
        field = field.stacked()
    if not isinstance(field, Stacked):
        what = "none" if field is None else type(field).__name__
        raise ProtocolError(
            f"expected a Stacked field {name!r} in a reply to gather it, got {what}"
        )
    return field.t


def only_slice(sent: Field) -> Tensor:
    """Return the tensor of a field of exactly one client."""
    if isinstance(sent, Patched):
        return sent.slice(0)
    return sent.t[0] if isinstance(sent, Stacked) else sent.t
