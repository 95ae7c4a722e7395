"""Fields that travel as rows of a base, where both ends know which rows these are.

A client says once which rows of a tensor it uses, those of features that occur at its nodes, say.
From then on messages hold these rows only, without their numbers: to the client as a `Ragged` field
of the inbox, back as one of the reply (`silograph.federation.decoder`). So a frame has its true
size, and no number of a row is there to be wrong. Specs count the rows by what was said:
`rows="state/NAME"`.

C: clients. k: rows that they use. R: rows of the base.
"""

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.payload import Patched, Ragged, Stacked, owners


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
        wanted, got = (f.off.diff().tolist()[:9] for f in (known, rows))
        raise ProtocolError(
            f"expected {wanted} rows of shape {tuple(bases.shape[2:])}, which clients said they "
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
