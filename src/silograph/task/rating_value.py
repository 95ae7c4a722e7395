"""The task on ratings: the number that a user gives an item, with squared error.

n: nodes. C: clients. j: judged rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import NO_STATE, State, offsets, rows_of
from silograph.graph.block.block import ClientBlock, kinds, pairs_of
from silograph.graph.graph import LabelForm, Schema
from silograph.task.base import ClientValues, CountSpec
from silograph.task.counts import JudgedRows
from silograph.task.scores import (
    LOSS,
    PARTS,
    ClassScores,
    Part,
    Scores,
    metrics_of_labels,
    own_scores,
)

# --- Recall and NDCG of the items that a silo would recommend to its users -----------------------
#
# Candidates are the items of the user's silo without those that the user has rated in training.
# Relevant are those that the user has rated with `least` or more, in validation or in test. With k
# = 10, R relevant items of a user, and d(p) = 1 / log2(p + 1):
#
#     recall@k = relevant items among the first k / R
#     ndcg@k   = sum of d(p) over places p <= k of relevant items / sum of d(1), ..., d(min(R, k))
#
# Equal scores have no order, so both are means over all orders of equals (as
# `sklearn.metrics.ndcg_score` has it): models that know nothing of an item score many alike.
#
# n: rows. D: width of factors. I: items. P: relevant ratings. U: users that are ranked together.


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


SUMS = ("square", "absolute", "seen.square", "unseen.square")
NUMBERS = ("nodes", "seen.nodes", "unseen.nodes")


@dataclass(frozen=True)
class RatingTask:
    """Regression on one number a rating; NaN at users and items; see `Task`.

    A rating is unseen where its user or its item has no training rating at the client that holds
    it. Rankings count where they were asked for (`silograph.evaluation.evaluate`).
    """

    name: str = "rating"
    labels: LabelForm = "rating"
    primary: str = "rmse"
    columns: tuple[str, ...] = ("rmse", "rmse_seen", "rmse_unseen", "mae", LOSS)
    by_client: tuple[str, ...] = ("rmse", "mae")
    wide: bool = False
    classes: bool = False
    histograms: bool = False
    constant: str = "global mean"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scores."""
        return metrics_of_labels(self.labels)

    def outputs(self, schema: Schema) -> int:
        """Return 1."""
        del schema
        return 1

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the squared error of every rating, (n,); 0 where there is none."""
        known = ~torch.isnan(y)
        numbers = y.to(logits.dtype).nan_to_num(nan=0.0)
        return torch.where(known, logits[:, 0] - numbers, 0.0).square()

    def tally(self, rows: JudgedRows, *, val_histogram: bool = False) -> dict[str, Tensor]:
        """Return counts and sums by client, each (C,).

        For `val` and `test`: `*.nodes` int32 judged ratings, `*.seen.nodes` and `*.unseen.nodes`
        those of them whose users and items train, or do not; `*.loss`, `*.square`, `*.absolute`,
        `*.seen.square` and `*.unseen.square` float64 sums of losses and errors. Where nobody says
        which are seen, none count as either.

        Raises:
            ProtocolError: predictions or ratings that are not those of the rows.
        """
        del val_histogram  # numbers have no histograms
        _check(rows)
        error = rows.logits[:, 0].double() - rows.y.double()
        nobody = torch.zeros_like(rows.val)
        kinds = {"": ~nobody, "seen.": nobody, "unseen.": nobody}
        if rows.seen is not None:
            kinds |= {"seen.": rows.seen, "unseen.": ~rows.seen}
        fields: dict[str, Tensor] = {}
        for part, chosen in zip(PARTS, (rows.val, ~rows.val), strict=True):
            for kind, mask in kinds.items():
                which = chosen & mask
                count = torch.bincount(rows.group[which], minlength=rows.groups)
                fields[f"{part}.{kind}nodes"] = count.int()
                fields[f"{part}.{kind}square"] = rows.sum_by_client(error[which].square(), which)
            fields[f"{part}.absolute"] = rows.sum_by_client(error[chosen].abs(), chosen)
            fields[f"{part}.loss"] = fields[f"{part}.square"].clone()
        return fields

    def counts(self, outputs: int, *, val_histogram: bool = False) -> Mapping[str, CountSpec]:
        """Return what `tally` gives of one client."""
        del outputs, val_histogram
        specs: dict[str, CountSpec] = {}
        for part in PARTS:
            specs |= {f"{part}.{name}": CountSpec((), torch.int32, low=0) for name in NUMBERS}
            names = (*SUMS, "loss")
            specs |= {f"{part}.{name}": CountSpec((), torch.float64, low=0) for name in names}
        return specs

    def scores(self, counts: Mapping[str, Tensor], part: Part) -> Scores | None:
        """Return the scores of `val` or `test` over all ratings; None without any."""
        nodes = int(counts[f"{part}.nodes"].sum())
        if nodes == 0:
            return None
        own = [value for value in self.client_scores(counts, part)["rmse"] if value is not None]
        return Scores(
            {
                "rmse": _root_mean(counts, part, ""),
                "rmse_seen": _root_mean(counts, part, "seen."),
                "rmse_unseen": _root_mean(counts, part, "unseen."),
                "mae": float(counts[f"{part}.absolute"].sum()) / nodes,
                "rmse_client_mean": sum(own) / len(own),
                **ranking_scores(counts, part),
                **own_scores(self.labels, counts, part),
            }
        )

    def client_scores(self, counts: Mapping[str, Tensor], part: Part) -> dict[str, ClientValues]:
        """Return the scores of each client by itself."""
        nodes = counts[f"{part}.nodes"].long().tolist()
        square, absolute = (counts[f"{part}.{name}"].tolist() for name in ("square", "absolute"))
        return {
            "rmse": tuple(
                math.sqrt(s / n) if n else None for s, n in zip(square, nodes, strict=True)
            ),
            "mae": tuple(a / n if n else None for a, n in zip(absolute, nodes, strict=True)),
        }

    def class_scores(self, counts: Mapping[str, Tensor], part: Part) -> tuple[ClassScores, ...]:
        """There are no classes."""
        del counts, part
        return ()

    def decide(self, logits: Tensor) -> Tensor:
        """Return the predicted ratings, (n,)."""
        return logits[:, 0]

    def probabilities(self, logits: Tensor) -> None:
        """Return None: a number has no classes."""
        del logits

    def constant_logits(self, y: Tensor, outputs: int) -> Tensor:
        """Return the mean rating, (1,) float64."""
        del outputs
        return y.double().mean(dim=0, keepdim=True)


def _root_mean(counts: Mapping[str, Tensor], part: Part, kind: str) -> float | None:
    nodes = int(counts[f"{part}.{kind}nodes"].sum())
    return math.sqrt(float(counts[f"{part}.{kind}square"].sum()) / nodes) if nodes else None


def _check(rows: JudgedRows) -> None:
    """Raise `ProtocolError` unless every row has one prediction and one rating."""
    logits, y, count = rows.logits, rows.y, len(rows.group)
    if logits.shape != (count, 1) or not logits.is_floating_point():
        raise ProtocolError(
            f"expected predictions of {count} judged ratings, got {logits.dtype} of shape "
            f"{tuple(logits.shape)}"
        )
    if y.shape != (count,) or not y.is_floating_point() or len(rows.val) != count:
        raise ProtocolError(
            f"expected {count} ratings and masks to judge predictions by, got {y.dtype} of shape "
            f"{tuple(y.shape)} and {len(rows.val)} masks"
        )


RATING = RatingTask()
