"""Who is near whom among the users and items of a client, for ConsisRec.

Neighbors of a user are the items that it rates in training, and users by trust, either way; those
of an item are its users, and items of which more than half of all users that rate either rate both.
Relations are the levels of a rating, trust, and shared users.

E: users and items of a client. R: ratings. e: entries.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.graph.block.block import ClientBlock
from silograph.graph.csr import CSR
from silograph.nn.doors import dtype_of
from silograph.nn.rating_graph import rating_graph

ALIKE = 0.5  # share of users that two items must have more of in common
COMPARED_AT_ONCE = 2**24  # pairs of items
MOST_COMPARED = 2**29  # pairs of items that a user has rated both, summed over users
MOST_SIMILAR = 2**26  # pairs of items that share users


@dataclass(frozen=True, eq=False)
class Neighborhood:
    """Who is near whom at one client, along what.

    Attributes:
        adj: (E, E) training ratings and trust, both ways, and pairs of items with shared users.
        relation: (e,) int64 of each entry: level of a rating, trust, or shared users, in turn.
        word: (E,) int64 word of the public key of each.
        train: mean number of neighbors of both ends of a training rating,
        all: and of any rating of the client.
    """

    adj: CSR
    relation: Tensor
    word: Tensor
    train: float
    all: float


def neighborhood(block: ClientBlock, levels: int) -> Neighborhood:
    """Return the neighbors in a block of one client, worked out once."""
    return block.once(("neighborhood", levels), Neighborhood, lambda: _made(block, levels))


def _made(block: ClientBlock, levels: int) -> Neighborhood:
    graph = rating_graph(block, dtype_of(block))
    train, count = block.split.train[graph.row], len(graph.slot)
    user, item, value = graph.user[train], graph.item[train], block.y[graph.row[train]].double()
    kind = _levels(value, levels)
    first, second = similar_items(user, item, count)
    rows = torch.cat([user, item, graph.trust[0], first])
    columns = torch.cat([item, user, graph.trust[1], second])
    order = torch.argsort(rows * count + columns)
    adj = CSR.from_pairs(rows[order].cpu(), columns[order].cpu(), (count, count))
    adj = adj.to(rows.device, dtype_of(block))
    relation = torch.cat(
        [
            kind,
            kind,
            kind.new_full((graph.trust.shape[1],), levels),
            kind.new_full((len(first),), levels + 1),
        ]
    )[order]
    both = (adj.degree[graph.user] + adj.degree[graph.item]).double()
    means = (float(t.mean()) if len(t) else 0.0 for t in (both[train], both))
    return Neighborhood(adj, relation, graph.word, *means)


def _levels(value: Tensor, levels: int) -> Tensor:
    """Return the nearest of equally distant levels, (R,) int64, from the lowest to the highest."""
    if not len(value):
        return torch.zeros(0, dtype=torch.int64, device=value.device)
    low, high = value.min(), value.max()
    width = torch.where(high > low, high - low, torch.ones_like(low))
    return ((value - low) / width * (levels - 1)).round().long()


def similar_items(user: Tensor, item: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return pairs of items, each in both directions, (s,) int64 twice.

    Of all users that have rated either item, more than half have rated both.

    Args:
        user: (R,) int64 user of each rating, below `count`.
        item: (R,) int64 its item, likewise; pairs are distinct.
        count: number of users and items.

    Raises:
        DataError: more than `MOST_COMPARED` to compare, or `MOST_SIMILAR` to join: single items of
            a user share it, so its n items are n^2 of both.
    """
    import numpy as np
    import scipy.sparse as sp

    places = item.cpu().numpy(), user.cpu().numpy()
    rated = sp.csr_matrix((np.ones(len(user), np.int32), places), shape=(count, count))
    number, by_user = np.diff(rated.indptr), rated.T.tocsr()
    compared = np.cumsum(rated @ np.diff(by_user.indptr).astype(np.int64))
    _check_pairs("compare", int(compared[-1]) if count else 0, MOST_COMPARED)
    found, total = [np.zeros((2, 0), np.int64)], 0
    ends = np.cumsum(parts_of(torch.from_numpy(np.diff(compared, prepend=0)), COMPARED_AT_ONCE))
    for start, end in pairwise([0, *ends.tolist()]):
        shared = (rated[start:end] @ by_user).tocoo()
        one, other = shared.row + start, shared.col
        either = number[one] + number[other] - shared.data
        some = (shared.data > ALIKE * either) & (one != other)
        total += int(some.sum())
        _check_pairs("join", total, MOST_SIMILAR)
        found.append(np.stack([one[some], other[some]]).astype(np.int64))
    first, second = torch.from_numpy(np.concatenate(found, axis=1)).to(user.device)
    return first, second


def _check_pairs(what: str, pairs: int, most: int) -> None:
    """Raise `DataError` for too many pairs of items; how many they are stays with the client."""
    if pairs > most:
        raise DataError(
            f"expected at most {most:,} pairs of items to {what} at a client of model consisrec, "
            "got more, as users rate so many items each: leave items out, or take another model"
        )


def parts_of(numbers: Tensor, most: int) -> list[int]:
    """Return sizes of consecutive parts whose numbers (R,) sum to about `most` or to one number."""
    return torch.bincount(numbers.cumsum(0) // max(most, 1)).tolist()
