"""The pairs of a rating graph: which rows are ratings, whose, and of what.

n: rows. p: ratings among them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.graph.csr import CSR


@dataclass(frozen=True, eq=False)
class Pairs:
    """The ratings among rows.

    Attributes:
        row: (p,) int64 row of each rating, ascending.
        user: (p,) int64 row of its user.
        item: (p,) int64 row of its item.
    """

    row: Tensor
    user: Tensor
    item: Tensor


def rating_sizes(x: Tensor) -> dict[str, int]:
    """Return how many users, items and ratings rows (n, 2) of kinds are."""
    users, items = (int(kind.sum()) for kind in x.T)
    return {"users": users, "items": items, "ratings": len(x) - users - items}


def pairs_among(x: Tensor, adj: CSR) -> Pairs:
    """Return the ratings among rows.

    Args:
        x: (n, 2) whether a row is a user or an item; ratings are neither.
        adj: (n, n) edges; a rating has those to its user and its item.

    Raises:
        ProtocolError: a rating without a user or an item, or with several.
    """
    row = (x == 0).all(dim=1).nonzero()[:, 0]
    first = adj.indptr[row].long()
    whole = bool((adj.indptr[row + 1] - adj.indptr[row] == 2).all())
    if whole:
        one, other = adj.indices[first].long(), adj.indices[first + 1].long()
        swapped = x[other, 0] == 1
        user, item = torch.where(swapped, other, one), torch.where(swapped, one, other)
        whole = bool((x[user, 0] == 1).all() & (x[item, 1] == 1).all())
    if not whole:
        raise ProtocolError("expected edges from each rating to its user and its item, got others")
    return Pairs(row, user, item)
