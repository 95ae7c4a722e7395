"""Recall and NDCG of the items that a silo would recommend to its users.

Candidates are the items of the user's silo without those that the user has rated in training.
Relevant are those that the user has rated with `least` or more, in validation or in test. With k
= 10, R relevant items of a user, and d(p) = 1 / log2(p + 1):

    recall@k = relevant items among the first k / R
    ndcg@k   = sum of d(p) over places p <= k of relevant items / sum of d(1), ..., d(min(R, k))

Equal scores have no order, so both are means over all orders of equals (as
`sklearn.metrics.ndcg_score` has it): models that know nothing of an item score many alike.

n: rows. D: width of factors. I: items. P: relevant ratings. U: users that are ranked together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import NO_STATE, State, offsets, rows_of
from silograph.graph.block.block import ClientBlock
from silograph.graph.block.pairs import kinds, pairs_of
from silograph.task.base import CountSpec
from silograph.task.scores import PARTS, Part

FIRST = 10  # k
MOST_USERS = 2000  # that a silo ranks items for, in validation and in test
AT_ONCE = 2**23  # scores: rows of so many users and items are worked out together
SAME = 1e-9  # scores that differ by less are equal: products round by where a row stands
USERS, RECALL, NDCG = "ranked", "recall", "ndcg"
COUNTED = (USERS, RECALL, NDCG)
FIELDS = tuple(f"{part}.{name}" for part in PARTS for name in COUNTED)


@dataclass(frozen=True, eq=False)
class Factors:
    """What orders items: the score of user u and item i is user_u . item_i + bias_i.

    The predicted rating is that and level_u, which all items of a user have in common.

    Attributes:
        user: (n, D), of rows that are users.
        item: (n, D), of rows that are items.
        bias: (n,), of rows that are items.
        level: (n,), of rows that are users.
    """

    user: Tensor
    item: Tensor
    bias: Tensor
    level: Tensor


@runtime_checkable
class RankingModel(Protocol):
    """A model that can order the items of one client for its users."""

    def factors(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Factors:
        """Return what orders items; arguments as for `AnyModel.forward`."""


@dataclass(frozen=True, eq=False)
class _Shelf:
    """The items of a client and what its users have rated in training.

    Attributes:
        place: (n,) int64 place of a row among the items.
        rated: (p,) int64 places of items with training ratings, sorted by user.
        off: (n + 1,) int64 which of them are whose.
        item: (I, D) and
        bias: (I,) float64 of the items.
    """

    place: Tensor
    rated: Tensor
    off: Tensor
    item: Tensor
    bias: Tensor


def ranking_counts(block: ClientBlock, factors: Factors, least: float) -> Tensor:
    """Return how well items are ranked, (1, 6) float64: `FIELDS`, users and sums over them.

    Args:
        block: one client.
        factors: of its rows.
        least: the lowest rating that is relevant.

    Raises:
        ProtocolError: several clients.
    """
    if block.num_clients != 1:
        raise ProtocolError(f"expected a block of one client to rank, got {block.num_clients}")
    shelf = _shelf(block, factors)
    split = {"val": block.split.val, "test": block.split.test}
    found = [_part_counts(block, factors, shelf, split[part], least) for part in PARTS]
    return torch.cat(found)[None]


def _shelf(block: ClientBlock, factors: Factors) -> _Shelf:
    pairs, items = pairs_of(block), kinds(block.x)[:, 1].nonzero()[:, 0]
    place = torch.full((len(block.y),), -1, device=items.device)
    place[items] = torch.arange(len(items), device=items.device)
    train = block.split.train[pairs.row]
    user, item = pairs.user[train], place[pairs.item[train]]
    order = user.argsort(stable=True)
    off = offsets(torch.bincount(user, minlength=len(block.y)))
    own = factors.item[items].double(), factors.bias[items].double()
    return _Shelf(place, item[order], off, *own)


def _part_counts(
    block: ClientBlock, factors: Factors, shelf: _Shelf, judged: Tensor, least: float
) -> Tensor:
    """Return users, and their recall and NDCG summed, (3,) float64."""
    pairs = pairs_of(block)
    relevant = judged[pairs.row] & (block.y[pairs.row] >= least)
    user, item = pairs.user[relevant], pairs.item[relevant]
    users = drawn_users(block, user.unique())
    chosen = torch.isin(user, users)
    user, item = user[chosen], shelf.place[item[chosen]]
    number = torch.bincount(user, minlength=len(block.y))[user].double()
    hit, gain = _all_gains(factors.user, users, user, item, shelf)
    best = _discounts(user.device)[number.long().clamp(max=FIRST)]
    sums = [(hit / number).sum(), (gain / best).sum()]
    return torch.stack([shelf.bias.new_tensor(len(users)), *sums])


def drawn_users(block: ClientBlock, users: Tensor) -> Tensor:
    """Return the rows of at most `MOST_USERS` of some users, the same ones in every round."""
    draws = Key.of(0).fold("ranked users").uniform(block.row_key[users])[:, 0]
    return users[draws.argsort()[:MOST_USERS]]


def _all_gains(factor: Tensor, users: Tensor, user: Tensor, item: Tensor, shelf: _Shelf) -> Tensor:
    """Return hits among the first k and discounts of relevant ratings, (2, P), in expectation.

    Args:
        factor: (n, D) of rows that are users.
        users: rows of the users that are ranked.
        user: (P,) rows of those who rated.
        item: (P,) places of what they rated.
        shelf: of the client.
    """
    place = users.new_empty(len(factor))
    place[users] = torch.arange(len(users), device=users.device)
    order = place[user].argsort(stable=True)
    off = offsets(torch.bincount(place[user], minlength=len(users)))
    size = max(1, AT_ONCE // max(1, len(shelf.bias)))
    gains = shelf.bias.new_zeros(2, len(user))
    for start in range(0, len(users), size):
        some = users[start : start + size]
        which = order[off[start] : off[start + len(some)]]
        scores = _scores(factor[some].double(), some, shelf)
        gains[:, which] = _gains(scores, place[user[which]] - start, item[which], size)
    return gains


def _scores(factor: Tensor, users: Tensor, shelf: _Shelf) -> Tensor:
    """Return the scores of all items for some users, (U, I); -inf of what they rated in training.

    Args:
        factor: (U, D) float64 of the users.
        users: (U,) their rows.
        shelf: of the client.
    """
    scores = (factor @ shelf.item.T).add_(shelf.bias).nan_to_num_(nan=-torch.inf)
    which = torch.arange(len(users), device=users.device)
    taken = which.repeat_interleave(shelf.off.diff()[users])
    scores[taken, shelf.rated[rows_of(shelf.off, users)]] = -torch.inf
    return scores


def _gains(scores: Tensor, row: Tensor, item: Tensor, size: int) -> Tensor:
    """Return what `_all_gains` does of some users.

    The first k scores tell most; all items are counted only for scores that equal the k-th.

    Args:
        scores: (U, I) of `_scores`.
        row: (P,) which of these users rated.
        item: (P,) places of what they rated.
        size: ratings whose items are counted at once.
    """
    own = scores[row, item]
    best = scores.topk(min(FIRST, scores.shape[1])).values[row]
    above = (best > own[:, None] + SAME).sum(dim=1)
    reach = (best >= own[:, None] - SAME).sum(dim=1)
    tied = ((reach == FIRST) & (above < FIRST)).nonzero()[:, 0]
    for some in tied.split(size):
        reach[some] = (scores[row[some]] >= own[some, None] - SAME).sum(dim=1)
    last, table = reach.clamp(max=FIRST), _discounts(row.device)
    found = torch.stack([(last - above).double(), table[last] - table[above]])
    return found / (reach - above).clamp(min=1)  # 0 where nothing is among the first k


def _discounts(device: torch.device) -> Tensor:
    """Return the sums of the first 0, ..., k discounts, (k + 1,) float64."""
    places = torch.arange(1, FIRST + 1, dtype=torch.float64, device=device)
    return torch.cat([places.new_zeros(1), (1 / (places + 1).log2()).cumsum(0)])


def ranking_specs() -> dict[str, CountSpec]:
    """Return what a client may report of its rankings."""
    return {name: CountSpec((), torch.float64, low=0, high=MOST_USERS) for name in FIELDS}


def ranking_scores(counts: Mapping[str, Tensor], part: Part) -> dict[str, float | None]:
    """Return recall and NDCG over all clients' users, None without any; none if no run ranks."""
    if f"{part}.{USERS}" not in counts:
        return {}
    users, recall, ndcg = (float(counts[f"{part}.{name}"].sum()) for name in COUNTED)
    return {
        f"recall@{FIRST}": recall / users if users else None,
        f"ndcg@{FIRST}": ndcg / users if users else None,
    }
