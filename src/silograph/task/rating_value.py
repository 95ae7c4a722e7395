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
from silograph.task.metric_table import LOSS, metrics_of_labels, own_scores
from silograph.task.scores import ALWAYS, PARTS, ClassScores, Part, ScoreRequest, Scores

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
    """Factors that rank items: the score of user u and item i is user_u . item_i + bias_i.

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
        """Return the factors that rank items; arguments as for `AnyModel.forward`."""


@dataclass(frozen=True, eq=False)
class _ClientItems:
    """The items of a client, and those that its users have rated in training.

    Attributes:
        place: (n,) int64 place of a row among the items.
        rated: (p,) int64 places of items with training ratings, sorted by user.
        off: (n + 1,) int64 offsets of each row's rated items.
        item: (I, D) and
        bias: (I,) float64 of the items.
    """

    place: Tensor
    trained_items: Tensor
    off: Tensor
    item: Tensor
    bias: Tensor


def ranking_counts(block: ClientBlock, factors: Factors, least: float) -> Tensor:
    """Return counts of rankings, (1, 6) float64: `FIELDS`, users and sums of recall and NDCG.

    Args:
        block: one client.
        factors: of its rows.
        least: the lowest rating that is relevant.

    Raises:
        ProtocolError: several clients.
    """
    if block.num_clients != 1:
        raise ProtocolError(f"expected a block of one client to rank, got {block.num_clients}")
    shelf = _client_items(block, factors)
    split = {"val": block.split.val, "test": block.split.test}
    counts = [_part_counts(block, factors, shelf, split[part], least) for part in PARTS]
    return torch.cat(counts)[None]


def _client_items(block: ClientBlock, factors: Factors) -> _ClientItems:
    pairs, items = pairs_of(block), kinds(block.x)[:, 1].nonzero()[:, 0]
    item_number = torch.full((len(block.y),), -1, device=items.device)
    item_number[items] = torch.arange(len(items), device=items.device)
    train = block.split.train[pairs.row]
    user, item = pairs.user[train], item_number[pairs.item[train]]
    order = user.argsort(stable=True)
    off = offsets(torch.bincount(user, minlength=len(block.y)))
    item_factors = factors.item[items].double(), factors.bias[items].double()
    return _ClientItems(item_number, item[order], off, *item_factors)


def _part_counts(
    block: ClientBlock, factors: Factors, shelf: _ClientItems, judged: Tensor, least: float
) -> Tensor:
    """Return users, and their recall and NDCG summed, (3,) float64."""
    pairs = pairs_of(block)
    relevant = judged[pairs.row] & (block.y[pairs.row] >= least)
    user, item = pairs.user[relevant], pairs.item[relevant]
    users = draw_users(block, user.unique())
    is_ranked = torch.isin(user, users)
    user, item = user[is_ranked], shelf.place[item[is_ranked]]
    number = torch.bincount(user, minlength=len(block.y))[user].double()
    hits, gain = _all_gains(factors.user, users, user, item, shelf)
    best = _discounts(user.device)[number.long().clamp(max=FIRST)]
    sums = [(hits / number).sum(), (gain / best).sum()]
    return torch.stack([shelf.bias.new_tensor(len(users)), *sums])


def draw_users(block: ClientBlock, users: Tensor) -> Tensor:
    """Return the rows of at most `MOST_USERS` of some users, the same ones in every round."""
    draws = Key.of(0).fold("ranked users").uniform(block.row_key[users])[:, 0]
    return users[draws.argsort()[:MOST_USERS]]


def _all_gains(
    factor: Tensor, users: Tensor, user: Tensor, item: Tensor, shelf: _ClientItems
) -> Tensor:
    """Return hits among the first k and discounts of relevant ratings, (2, P), in expectation.

    Args:
        factor: (n, D) of rows that are users.
        users: rows of the users that are ranked.
        user: (P,) rows of the users of the ratings.
        item: (P,) places of their items.
        shelf: items of the client.
    """
    user_number = users.new_empty(len(factor))
    user_number[users] = torch.arange(len(users), device=users.device)
    order = user_number[user].argsort(stable=True)
    off = offsets(torch.bincount(user_number[user], minlength=len(users)))
    size = max(1, AT_ONCE // max(1, len(shelf.bias)))
    gains = shelf.bias.new_zeros(2, len(user))
    for start in range(0, len(users), size):
        batch_users = users[start : start + size]
        rating_numbers = order[off[start] : off[start + len(batch_users)]]
        scores = _scores_of_users(factor[batch_users].double(), batch_users, shelf)
        gains[:, rating_numbers] = _gains_of_users(
            scores, user_number[user[rating_numbers]] - start, item[rating_numbers], size
        )
    return gains


def _scores_of_users(factor: Tensor, users: Tensor, shelf: _ClientItems) -> Tensor:
    """Return the scores of all items for some users, (U, I); -inf of what they rated in training.

    Args:
        factor: (U, D) float64 of the users.
        users: (U,) their rows.
        shelf: of the client.
    """
    scores = (factor @ shelf.item.T).add_(shelf.bias).nan_to_num_(nan=-torch.inf)
    user_numbers = torch.arange(len(users), device=users.device)
    rows_of_rated = user_numbers.repeat_interleave(shelf.off.diff()[users])
    scores[rows_of_rated, shelf.trained_items[rows_of(shelf.off, users)]] = -torch.inf
    return scores


def _gains_of_users(scores: Tensor, row: Tensor, item: Tensor, size: int) -> Tensor:
    """Do what `_all_gains` does for some users.

    The first k scores tell most; all items are counted only for scores that equal the k-th.

    Args:
        scores: (U, I) of `_scores_of_users`.
        row: (P,) number of each rating's user among these.
        item: (P,) places of their items.
        size: ratings whose items are counted at once.
    """
    own_scores = scores[row, item]
    best = scores.topk(min(FIRST, scores.shape[1])).values[row]
    first_place = (best > own_scores[:, None] + SAME).sum(dim=1)
    last_place = (best >= own_scores[:, None] - SAME).sum(dim=1)
    is_tied = ((last_place == FIRST) & (first_place < FIRST)).nonzero()[:, 0]
    for tied_part in is_tied.split(size):
        last_place[tied_part] = (scores[row[tied_part]] >= own_scores[tied_part, None] - SAME).sum(
            dim=1
        )
    last_counted, table = last_place.clamp(max=FIRST), _discounts(row.device)
    sums = torch.stack(
        [(last_counted - first_place).double(), table[last_counted] - table[first_place]]
    )
    return sums / (last_place - first_place).clamp(min=1)  # 0 where nothing is among the first k


def _discounts(device: torch.device) -> Tensor:
    """Return the sums of the first 0, ..., k discounts, (k + 1,) float64."""
    places = torch.arange(1, FIRST + 1, dtype=torch.float64, device=device)
    return torch.cat([places.new_zeros(1), (1 / (places + 1).log2()).cumsum(0)])


def ranking_specs() -> dict[str, CountSpec]:
    """Return the specs of a client's counts of rankings."""
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

    def loss(self, logits: Tensor, y: Tensor, class_weight: Tensor | None = None) -> Tensor:
        """Return the squared error of every rating, (n,); 0 where there is none."""
        del class_weight
        is_known = ~torch.isnan(y)
        numbers = y.to(logits.dtype).nan_to_num(nan=0.0)
        return torch.where(is_known, logits[:, 0] - numbers, 0.0).square()

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
        _check_rows(rows)
        error, groups = rows.logits[:, 0].double() - rows.y.double(), rows.groups
        square = error.square()

        def sums(values: Tensor, place: Tensor, each: int) -> Tensor:
            """Return sums of values (j,) by client and in `each` places of it, (C, each)."""
            zeros = values.new_zeros(groups * each)
            return zeros.index_add_(0, place, values).view(groups, each)

        place = 2 * rows.group + (~rows.val).long()  # of validation, then of testing
        count = torch.bincount(place, minlength=2 * groups).view(groups, 2)
        totals, absolute = sums(square, place, 2), sums(error.abs(), place, 2)
        # By part, of what is seen and what is not.
        known_count, known_square = count.new_zeros(groups, 2, 2), square.new_zeros(groups, 2, 2)
        if rows.seen is not None:
            place = 2 * place + (~rows.seen).long()
            known_count = torch.bincount(place, minlength=4 * groups).view(groups, 2, 2)
            known_square = sums(square, place, 4).view(groups, 2, 2)
        fields: dict[str, Tensor] = {}
        for number, part in enumerate(PARTS):
            fields[f"{part}.nodes"] = count[:, number].int()
            fields[f"{part}.square"] = totals[:, number].clone()
            for kind, name in enumerate(("seen", "unseen")):
                fields[f"{part}.{name}.nodes"] = known_count[:, number, kind].int()
                fields[f"{part}.{name}.square"] = known_square[:, number, kind].clone()
            fields[f"{part}.absolute"] = absolute[:, number].clone()
            fields[f"{part}.loss"] = totals[:, number].clone()
        return fields

    def counts(self, outputs: int, *, val_histogram: bool = False) -> Mapping[str, CountSpec]:
        """Return the specs of `tally` for one client."""
        del outputs, val_histogram
        specs: dict[str, CountSpec] = {}
        for part in PARTS:
            specs |= {f"{part}.{name}": CountSpec((), torch.int32, low=0) for name in NUMBERS}
            names = (*SUMS, "loss")
            specs |= {f"{part}.{name}": CountSpec((), torch.float64, low=0) for name in names}
        return specs

    def scores(
        self, counts: Mapping[str, Tensor], part: Part, request: ScoreRequest = ALWAYS
    ) -> Scores | None:
        """Return the scores of `val` or `test` over all ratings; None without any."""
        del request
        nodes = int(counts[f"{part}.nodes"].sum())
        if nodes == 0:
            return None
        client_rmse = [
            value for value in self.client_scores(counts, part)["rmse"] if value is not None
        ]
        return Scores(
            {
                "rmse": _root_mean(counts, part, ""),
                "rmse_seen": _root_mean(counts, part, "seen."),
                "rmse_unseen": _root_mean(counts, part, "unseen."),
                "mae": float(counts[f"{part}.absolute"].sum()) / nodes,
                "rmse_client_mean": sum(client_rmse) / len(client_rmse),
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


def _check_rows(rows: JudgedRows) -> None:
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
