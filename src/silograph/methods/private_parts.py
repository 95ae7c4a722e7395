"""What clients keep to themselves from round to round, and that one bad round does not spoil it.

Moments of optimizers, masks, private layers, flow networks, tables of users, control variates.

C: clients.
"""

import math

import torch
from torch import Tensor

from silograph.core.payload import Ragged, Stacked, State, put, state_of, take_all
from silograph.nn.segment import segment_sum


def finite_or_old(new: State, old: State) -> State:
    """Return what clients keep to themselves; who got anything infinite or NaN keeps the old.

    Else one round's weights from a server, or a step too long, would spoil all later rounds.

    Args:
        new: fields of the state after training.
        old: the state before, with these fields.
    """
    # Adam's second moments are as finite as its first ones, of which they are the squares.
    looked = [
        f for n, f in new.items() if n.replace("first/", "second/", 1) not in new.keys() - {n}
    ]
    # A pass over moments costs some percent of a round: by client only where something is wrong.
    if all(math.isfinite(float(f.t.sum())) for f in looked):
        return new
    good = torch.stack([_is_finite(f) for f in looked]).all(0)
    bad = (~good).nonzero()[:, 0]
    before = state_of(take_all({name: old[name] for name in new}, bad))
    return {name: put(f, before[name], bad) for name, f in new.items()}


def _is_finite(field: Stacked | Ragged) -> Tensor:
    """Return for which clients all numbers of a field are finite, (C,) bool."""
    rows = field.t.isfinite()
    rows = rows.flatten(1).all(1) if rows.dim() > 1 else rows
    return segment_sum((~rows).long(), field.off) == 0 if isinstance(field, Ragged) else rows
