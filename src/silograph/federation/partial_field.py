"""A state field that some clients of a block have and others do not, or whose runs change length.

C: clients of the block. k: clients of a call.
"""

import torch
from torch import Tensor

from silograph.core.payload import Ragged, Stacked, offsets, ranges

SPARE = 1.5  # room that is made for later rows, as a multiple of the rows there are


class PartialField:
    """Holds one run of rows for each client that has the field; a slice is a run of one row.

    Writing a client's rows moves nobody else's: a run that has outgrown its place gets another one,
    and rows are copied only when there is no more room, which grows by half each time.

    Args:
        clients: C.
        like: a field of this form, dtype and shape.
    """

    def __init__(self, clients: int, like: Stacked | Ragged) -> None:
        device = like.t.device
        self.empty: Stacked | Ragged = Stacked(like.t[:0])
        if isinstance(like, Ragged):
            self.empty = Ragged(like.t[:0], like.off[:1] * 0)
        self.has = torch.zeros(clients, dtype=torch.bool, device=device)
        self._start = torch.zeros(clients, dtype=torch.int64, device=device)
        self._count = torch.zeros_like(self._start)
        self._room = torch.zeros_like(self._start)
        self._rows = like.t.new_empty(0, *like.t.shape[1:])
        self._used = 0

    def take(self, positions: Tensor) -> Stacked | Ragged:
        """Return a copy of what the clients at `positions` (k,) have; all must have the field."""
        counts = self._count[positions]
        rows = self._rows[ranges(self._start[positions], counts)]
        if isinstance(self.empty, Stacked):
            return Stacked(rows)
        return Ragged(rows, offsets(counts))

    def whole(self) -> Stacked | Ragged:
        """Return a copy of what all who have the field have, in the order of the clients."""
        return self.take(self.has.nonzero()[:, 0])

    def put(self, part: Stacked | Ragged, positions: Tensor) -> None:
        """Replace or create what the clients at `positions` (k,) have."""
        counts = part.off.diff() if isinstance(part, Ragged) else torch.ones_like(positions)
        grows = counts > self._room[positions]
        self.has[positions], self._count[positions] = True, counts
        if bool(grows.any()):
            self._make_room(positions[grows], counts[grows])
        places = ranges(self._start[positions], counts)
        self._rows.index_copy_(0, places, part.t)

    def drop(self, positions: Tensor) -> None:
        """Take the field from the clients at `positions` (k,)."""
        self.has[positions] = False
        self._count[positions] = 0
        self._room[positions] = 0

    def _make_room(self, positions: Tensor, counts: Tensor) -> None:
        """Give the clients at `positions` (k,) places for `counts` (k,) rows."""
        self._room[positions] = 0  # what was there is written anew
        need = int(counts.sum())
        if self._used + need > len(self._rows):
            self._rebuild(need)
        self._start[positions] = self._used + offsets(counts)[:-1]
        self._room[positions] = counts
        self._used += need

    def _rebuild(self, need: int) -> None:
        """Copy the rows that count one after the other into memory with more room."""
        live = torch.minimum(self._room, self._count)
        places = ranges(self._start, live)
        size = int(SPARE * (len(places) + need)) if len(places) else need
        rows = self._rows.new_empty(size, *self._rows.shape[1:])
        rows[: len(places)] = self._rows[places]
        self._start, self._room = offsets(live)[:-1], live
        self._rows, self._used = rows, len(places)
