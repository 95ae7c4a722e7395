"""Places of rows: how clients count their slots and boundary rows, and how the federation does.

C: clients. k: places.
"""

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.payload import Payload, Ragged, offsets, owners
from silograph.federation.base import Op


def rows_in(reply: Payload, name: str, op: Op) -> Ragged:
    """Return the field of a reply that has rows; raise `ProtocolError` where there is none."""
    found = reply.get(name)
    if not isinstance(found, Ragged):
        raise ProtocolError(
            f"expected a Ragged field {name!r} in the reply of {op.__name__}, got {sorted(reply)}"
        )
    return found


def all_places(off: Tensor, members: Tensor) -> Tensor:
    """Return the places of all that belongs to the clients `members`, ascending."""
    keep = torch.zeros(len(off) - 1, dtype=torch.bool)
    keep[members] = True
    return keep[owners(off)].nonzero()[:, 0]


def places_in(reply: Payload, name: str, off: Tensor, members: Tensor, op: Op) -> Tensor:
    """Return places in the federation's order of places (k,) that clients name in their own."""
    field = rows_in(reply, name, op)
    own, runs = field.t.long().cpu(), field.off.diff().cpu()
    client = torch.repeat_interleave(members, runs)
    if len(own) and not bool(((own >= 0) & (own < off.diff()[client])).all()):
        raise ProtocolError(f"expected slots that exist from {op.__name__}, got others")
    return off[client] + own


def by_owner(places: Tensor, off: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places (k,) int32 as their owners count, and (C + 1,) how many each has."""
    owner = torch.searchsorted(off, places, right=True) - 1
    # A client without places has the offset of the next one, so the last match is the owner.
    runs = torch.bincount(owner, minlength=len(off) - 1)[members]
    return (places - off[owner]).int(), offsets(runs)
