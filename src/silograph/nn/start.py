"""Where clients start training: bases that they share, and weights or rows of their own on top.

Each weight of a start is one of these:

- a tensor in the model's shape, shared by all clients, or (C, ...) with a slice for each;
- a `Stacked` field: every client's own, as it was kept between rounds;
- a `Patched` field: each client has one of G bases, and may have rows of its own in it.

What training leaves (`Fitted.weights`) is such a start. Where features are sparse and the optimizer
is fresh, first weights that come from bases are trained as the rows of the features that occur at
a client; so one base for all costs what shared weights cost, and they are the same computation.

C: clients. F: features. D: width. U: used rows of the first weights.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from silograph.core.payload import Patched, Stacked, from_bases, owners
from silograph.graph.block.block import Rows, SparseRows
from silograph.nn.forward import ModelSizes

Start = Mapping[str, Tensor | Stacked | Patched]
StartFields = Mapping[str, Stacked | Patched]


def start_fields(model: ModelSizes, start: Start, clients: int) -> dict[str, Stacked | Patched]:
    """Return every weight as a field, in the model's order; shared tensors are a single base."""
    fields: dict[str, Stacked | Patched] = {}
    first: Tensor | None = None  # the base of all clients
    for name, shape in model.weight_shapes.items():
        w = start[name]
        if not isinstance(w, Tensor):
            fields[name] = w
        elif w.dim() > len(shape):
            fields[name] = Stacked(w)
        else:
            if first is None:
                first = torch.zeros(clients, dtype=torch.int64, device=w.device)
            fields[name] = from_bases(w[None], first)
    return fields


def whole(field: Stacked | Patched) -> Tensor:
    """Return a contiguous copy of the slices of all clients, (C, ...)."""
    if isinstance(field, Patched):
        return field.stacked().t.contiguous()  # strides of a base outlive the choice of rows
    return field.t.clone(memory_format=torch.contiguous_format)


def only_bases(field: Stacked | Patched) -> bool:
    """Whether no client has anything of its own in a weight."""
    return isinstance(field, Patched) and len(field.t) == 0


def joined_bases(fields: Sequence[Stacked | Patched]) -> tuple[Tensor, Tensor]:
    """Return all bases (G, ...) of M weights, and which of them each client has, (M, C) int64.

    There are none if a client has anything of its own in them.
    """
    bases, which, count = [], [], 0
    for field in fields:
        if not isinstance(field, Patched) or not only_bases(field):
            return field.t.new_empty(0, 0, 0), torch.empty(len(fields), 0, dtype=torch.int64)
        bases.append(field.base)
        which.append(field.which + count)
        count += len(field.base)
    return bases[0] if len(bases) == 1 else torch.cat(bases), torch.stack(which)


def starts_compact(model: ModelSizes, fields: StartFields, x: Rows) -> bool:
    """Whether the rows of used features say all of the first weights that the bases do not."""
    if not isinstance(x, SparseRows):
        return False
    return all(_is_compact(fields[name], x) for name in model.first_maps)


def _is_compact(field: Stacked | Patched, x: SparseRows) -> bool:
    if only_bases(field):
        return True
    used = x.used
    return (
        isinstance(field, Patched)
        and torch.equal(field.off, used.off)
        and torch.equal(field.index, used.feature)
    )


def used_rows(field: Stacked | Patched, x: Rows) -> Tensor:
    """Return a copy of the rows of first weights that are for used features, (U, D).

    Args:
        field: from which `starts_compact`.
        x: sparse features.
    """
    assert isinstance(x, SparseRows)  # see `starts_compact`
    assert isinstance(field, Patched)  # likewise
    if len(field.t):
        return field.t.clone(memory_format=torch.contiguous_format)
    if len(field.base) == 1:
        return field.base[0][x.used.feature]
    return field.base[field.which[owners(x.used.off)], x.used.feature]
