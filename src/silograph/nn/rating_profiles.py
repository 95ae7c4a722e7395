"""Ratings from biases, and from what profiles of users and items say of their errors.

    r_ui = mean + b_u + b_i + z_u . a + z_i . c + (z_u * z_i) w,    z = perceptron(profile)

Mean and biases are those of `silograph.nn.rating_factors`, solved by each client for itself, with
sums of other clients for users and items that they share (`silograph.exchange.shared_biases`). A
profile says how much its bias is worth, from sums over one and two hops of the client's graph: the
number of ratings, their mean and spread, the same of the neighbors, and biases of trusted users.
Only the perceptrons' weights and a, c, w travel; they are the same for all users and items, so
there are no tables, and users and items that the client has not seen in training have a profile,
too. a, c and w begin at 0: the first prediction is that of the biases, and what is learned is a
correction.

Biases are fitted to the ratings that they would be corrected for, so errors on training ratings are
too small and tell nothing. So every training rating is predicted from biases and profiles of the
other folds of the client's training ratings (stacking; Wolpert, "Stacked generalization", Neural
Networks 1992). Predictions use all training ratings.

The model is ours, for want of a published one that beats the biases on the data of FedACS.

E: users and items of the client. F: figures of a profile. K: folds. O: width. R: ratings.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import NO_STATE, State
from silograph.core.text import state_of_fields
from silograph.core.work import report_each
from silograph.graph.block.block import ClientBlock, SharedSums, kinds, pairs_of
from silograph.graph.graph import LabelForm
from silograph.nn.conv import Params, glorot
from silograph.nn.fit import LOSS_FLOPS, Fitted, Training, TrainingInputs, dtype_of
from silograph.nn.forward import NO_TABLES, dropped
from silograph.nn.rating_factors import solved_biases
from silograph.nn.rating_steps import (
    at_nodes,
    at_ratings,
    fit_pairs,
    one_client,
    require_one_client,
)
from silograph.task.rating_value import Factors

FEATURES = 2  # what says whether a node is a user or an item
PROFILE = 11  # F
TURNS = 60  # of biases, see `solved_biases`: what is left to solve is far below the noise
SIDES = ("user", "item")


@dataclass(frozen=True, eq=False)
class Profiles:
    """Inputs of predictions: for each fold from the ratings of all others, last from all ratings.

    Attributes:
        user: (p,) int64 user of each rating of the block, among users and items.
        item: (p,) int64 its item.
        fold: (p,) int64 its fold; K of ratings that do not train.
        mean: (K + 1,) of training ratings.
        bias: (K + 1, E).
        x: (K + 1, E, F) profiles.
    """

    user: Tensor
    item: Tensor
    fold: Tensor
    mean: Tensor
    bias: Tensor
    x: Tensor


@dataclass(frozen=True)
class RatingProfiles:
    """The shape of the model.

    Attributes:
        hidden: O of every layer of the perceptrons, or of each.
        layers: number of their layers.
        dropout: probability with which an entry between two layers is dropped in training.
        damping: penalty on squared biases.
        folds: K.
        shared: whose biases are those of all clients' ratings where several have them; see
            `RatingBiases`.
        min_silos: least number of clients with training ratings of a shared user or item.
    """

    hidden: int | tuple[int, ...]
    layers: int
    dropout: float
    damping: float
    folds: int
    shared: Literal["none", "items", "all"] = "none"
    min_silos: int = 2

    features = FEATURES
    outputs = 1
    task: LabelForm = dataclasses.field(default="rating", init=False)
    noun = "model rating_profiles"
    staged = None
    single_client_only = True  # clients are few and large
    meets_all = False
    solved_flops = 0
    first_maps = ()
    source = None
    table_widths = NO_TABLES

    __getstate__ = state_of_fields

    @property
    def widths(self) -> list[int]:
        """Widths of the profiles and of every layer."""
        hidden = (self.hidden,) * self.layers if isinstance(self.hidden, int) else self.hidden
        return [PROFILE, *hidden]

    @cached_property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, shared form."""
        shapes: dict[str, tuple[int, ...]] = {}
        for side in SIDES:
            for number, (inputs, outputs) in enumerate(itertools.pairwise(self.widths)):
                shapes[f"{side}.{number}.weight"] = inputs, outputs
                shapes[f"{side}.{number}.bias"] = (outputs,)
            shapes[f"{side}.head"] = self.widths[-1], 1
        return MappingProxyType({**shapes, "both.head": (self.widths[-1], 1)})

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return Glorot weights, zero biases and zero heads; drawn in float64."""
        weights: Params = {}
        for name, shape in self.weight_shapes.items():
            is_drawn = name.endswith(".weight")
            weights[name] = glorot(key.fold(name), *shape) if is_drawn else torch.zeros(shape)
        return {name: w.to(dtype) for name, w in weights.items()}

    def first_tables(self, block: ClientBlock, key: Key) -> State:
        """There are no tables: profiles follow from a client's ratings."""
        del block, key
        return NO_STATE

    def forward(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Tensor:
        """Return predictions (n, 1) of one client, 0 at users and items."""
        del tables
        row, client_weights = pairs_of(require_one_client(block)).row, one_client(self, weights)
        profiles = profiles_of(self, block)
        all_folds = torch.full_like(row, self.folds)
        report_each(self.flops(block, len(row), passes=1))
        predictions = self._predict(
            client_weights, profiles, torch.arange(len(row), device=row.device), all_folds, None
        )
        return at_ratings(block, row, predictions)

    def factors(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Factors:
        """Return the factors that rank the items of one client; see `RankingModel`."""
        del tables
        client_weights, profiles = (
            one_client(self, weights),
            profiles_of(self, require_one_client(block)),
        )
        x, bias = profiles.x[-1], profiles.bias[-1]
        user, item = (self._perceptron(client_weights, side, x, None) for side in SIDES)
        item_scores = bias + (item @ client_weights["item.head"])[:, 0]
        user_level = profiles.mean[-1] + bias + (user @ client_weights["user.head"])[:, 0]
        factor_parts = (user * client_weights["both.head"][:, 0], item, item_scores, user_level)
        return Factors(*(at_nodes(block, part) for part in factor_parts))

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train one client on its training ratings."""
        return fit_pairs(self, training, inputs)

    def predict_pairs(
        self, p: Mapping[str, Tensor], block: ClientBlock, pair: Tensor, key: Key | None
    ) -> Tensor:
        """Return predictions of ratings in a step from their other folds; see `PairModel`."""
        profiles = profiles_of(self, block)
        return self._predict(p, profiles, pair, profiles.fold[pair], key)

    def flops(self, block: ClientBlock, ratings: int, *, passes: int) -> float:
        """Return the operations of a pass; see `PairModel`."""
        del block
        maps = sum(2 * a * b + 2 * b for a, b in itertools.pairwise(self.widths))
        flops_of_rating = 2 * maps + 7 * self.widths[-1] + 5
        return float(ratings * (passes * flops_of_rating + (passes > 1) * LOSS_FLOPS))

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values."""
        return {"kind": "profiles", **dataclasses.asdict(self)}

    def _predict(
        self,
        p: Mapping[str, Tensor],
        profiles: Profiles,
        pair: Tensor,
        fold: Tensor,
        key: Key | None,
    ) -> Tensor:
        """Return predictions (R, 1) of ratings from the profiles of their folds."""
        ends = {"user": profiles.user[pair], "item": profiles.item[pair]}
        z = {
            side: self._perceptron(
                p, side, profiles.x[fold, end], None if key is None else (key, pair)
            )
            for side, end in ends.items()
        }
        base = profiles.mean[fold] + sum(profiles.bias[fold, end] for end in ends.values())
        learned = [z[side] @ p[f"{side}.head"] for side in SIDES]
        return base[:, None] + sum(learned) + (z["user"] * z["item"]) @ p["both.head"]

    def _perceptron(
        self, p: Mapping[str, Tensor], side: str, x: Tensor, drop: tuple[Key, Tensor] | None
    ) -> Tensor:
        """Return the outputs (R, O) of a perceptron for profiles (R, F)."""
        for number in range(self.layers):
            if number and self.dropout and drop is not None:
                key, rows = drop
                x = dropped(x, self.dropout, rows, key.fold(side, number))
            x = x @ p[f"{side}.{number}.weight"] + p[f"{side}.{number}.bias"]
            x = x.relu() if number < self.layers - 1 else x
        return x


def profiles_of(model: RatingProfiles, block: ClientBlock) -> Profiles:
    """Return the profiles of a block of one client, worked out once."""
    name = ("profiles", model.damping, model.folds, dtype_of(block))
    return block.once(name, Profiles, lambda: _build_profiles(model, block))


def _build_profiles(model: RatingProfiles, block: ClientBlock) -> Profiles:
    kind, pairs = kinds(block.x), pairs_of(block)
    entity = (kind > 0).any(dim=1)
    entity_number = entity.long().cumsum(0) - 1
    user, item, count = entity_number[pairs.user], entity_number[pairs.item], int(entity.sum())
    is_trust = entity[block.adj.row] & entity[block.adj.indices.long()]
    trust = (
        entity_number[block.adj.row[is_trust]],
        entity_number[block.adj.indices[is_trust].long()],
    )
    draw = Key.of(0).fold("folds of ratings").uniform(block.row_key[pairs.row])[:, 0]
    train = block.split.train[pairs.row]
    fold = torch.where(train, (draw * model.folds).long(), model.folds)
    value = block.y[pairs.row].double()
    shared = block.shared
    if shared is not None:
        shared = SharedSums(shared.mean, shared.total[entity], shared.number[entity])
    means, biases, xs = [], [], []
    for left_out in range(model.folds + 1):
        in_other_folds = train & (fold != left_out)
        mean, bias, x = _compute_profile(
            user[in_other_folds],
            item[in_other_folds],
            value[in_other_folds],
            trust,
            count,
            model.damping,
            shared,
        )
        means.append(mean)
        biases.append(bias)
        xs.append(x)
    dtype = dtype_of(block)
    stacks = (torch.stack(parts).to(dtype) for parts in (means, biases, xs))
    return Profiles(user, item, fold, *stacks)


def _compute_profile(
    user: Tensor,
    item: Tensor,
    value: Tensor,
    trust: tuple[Tensor, Tensor],
    count: int,
    damping: float,
    shared: SharedSums | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (), biases (E,) and profiles (E, F) of some ratings, float64.

    Args:
        user: (R,) int64 user of each rating.
        item: (R,) int64 its item.
        value: (R,) float64.
        trust: (t,) int64 users and whom they trust.
        count: E.
        damping: penalty on squared biases; the number of ratings that all ends are alike for.
        shared: what other clients have of the users and items (E,).
    """
    mean = value.sum() / max(len(value), 1) if shared is None else shared.mean
    shared_sums = None if shared is None else (shared.total, shared.number)
    bias = solved_biases(user, item, value - mean, count, damping, TURNS, shared_sums)
    ends, others = torch.cat([user, item]), torch.cat([item, user])
    residual = (value - mean).repeat(2)
    error = (residual - bias[ends] - bias[others]).square()
    number = torch.bincount(ends, minlength=count).double()

    def total(at: Tensor, values: Tensor) -> Tensor:
        return values.new_zeros(count).index_add_(0, at, values)

    def mean_of_neighbors(values: Tensor) -> Tensor:
        return total(ends, values[others]) / number.clamp(min=1)

    raw_bias = total(ends, residual) / (number + damping)
    mean_error = error.sum() / max(len(error), 1)
    spread = (total(ends, error) + damping * mean_error) / (number + damping)
    known = number if shared is None else number + shared.number
    size = known.log1p() / 3  # most numbers are below 3 then, as the other figures
    truster, trustee = trust
    is_rated = (number[trustee] > 0).double()
    trusted = total(truster, bias[trustee] * is_rated) / (total(truster, is_rated) + damping)
    friends = torch.bincount(truster, minlength=count).double().log1p() / 3
    neighbor_bias = mean_of_neighbors(bias)
    figures = [
        bias,
        raw_bias,
        size,
        spread,
        neighbor_bias,
        mean_of_neighbors(raw_bias),
        mean_of_neighbors(size),
        mean_of_neighbors(spread),
    ]
    return (
        mean,
        bias,
        torch.stack([*figures, mean_of_neighbors(neighbor_bias), trusted, friends], dim=1),
    )
