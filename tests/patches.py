"""Fields given as bases with patches, drawn at random, next to the dense form by definition.

C: clients. G: bases. R: rows of a slice. U: rows that differ.
"""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from silograph.core.payload import Patched

TAILS: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 2))


@dataclass(frozen=True, eq=False)
class Drawn:
    """A field and what it means, (C, R, ...)."""

    field: Patched
    dense: Tensor


def patched(
    bases: Tensor, which: list[int], patches: list[dict[int, Tensor]]
) -> tuple[Patched, Tensor]:
    """Return the field of clients with these bases and rows by place, and its dense form."""
    dense = torch.stack([bases[g] for g in which])
    for c, rows in enumerate(patches):
        for r, row in rows.items():
            dense[c, r] = row
    index = [r for rows in patches for r in rows]
    t = [row for rows in patches for row in rows.values()]
    field = Patched(
        base=bases,
        which=torch.tensor(which),
        t=torch.stack(t) if t else bases.new_empty(0, *bases.shape[2:]),
        index=torch.tensor(index, dtype=torch.int64),
        off=torch.tensor([0, *np.cumsum([len(rows) for rows in patches])]),
    )
    return field, dense


@st.composite
def drawn(
    draw: st.DrawFn,
    tails: tuple[tuple[int, ...], ...] = TAILS,
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.int32),
) -> Drawn:
    """Draw a field of 1 to 5 clients over 1 to 3 bases of 1 to 5 rows."""
    clients, rows = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    shape = draw(st.integers(1, 3)), rows, *draw(st.sampled_from(tails))
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    bases = torch.from_numpy(99 * rng.normal(size=shape)).to(dtype)
    which = rng.integers(0, shape[0], clients).tolist()
    places = [rng.permutation(rows)[: rng.integers(0, rows + 1)].tolist() for _ in which]
    values = torch.from_numpy(99 * rng.normal(size=(clients, *shape[1:]))).to(dtype)
    patches = [{r: values[c, r] for r in mine} for c, mine in enumerate(places)]
    return Drawn(*patched(bases, which, patches))
