"""What recommends a silo's items to its users: a file that stays with the silo.

A run's weights alone predict no rating: what is known of users and items is in tables, biases and
profiles that never leave their silo. So a silo keeps, beside the model, what these and the weights
of the best round come to: a rating of user u and item i is level_u + bias_i + user_u . item_i.

U: users. I: items. D: width. R: ratings of the silo.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import safetensors.torch
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.files import check_regular, write_atomic
from silograph.core.numeric_state import standard_numerics
from silograph.experiment.result_files import ABOUT, RECOMMENDER, REPORT, check_model_file
from silograph.graph.block.block import ClientBlock, kinds, pairs_of
from silograph.task.rating_value import Factors

FORMAT = "silograph recommender 1"


@dataclass(frozen=True, eq=False, repr=False)
class Recommender:
    """Predicted ratings of a silo's users and items.

    Attributes:
        users: (U) ids.
        items: (I) ids.
        user: (U, D).
        item: (I, D).
        level: (U,).
        bias: (I,).
        rated: (R, 2) int64 places of user and item of the silo's own ratings.
        scale: least and largest rating of the silo: what is shown is not beyond; None: unknown.
    """

    users: tuple[str, ...]
    items: tuple[str, ...]
    user: Tensor
    item: Tensor
    level: Tensor
    bias: Tensor
    rated: Tensor
    scale: tuple[float, float] | None = None

    @standard_numerics()
    def predict(self, user: str, item: str) -> float:
        """Return the predicted rating of an item, on the scale of ratings.

        Raises:
            DataError: the silo has no such user or item.
        """
        row = self._place("user", user)
        column = self._place("item", item)
        return self._clip_to_scale(self._ratings(row)[column])

    @standard_numerics()
    def score(self, user: str, item: str) -> float:
        """Return what the model says of an item, which may be beyond the scale of ratings.

        Raises:
            DataError: the silo has no such user or item.
        """
        return float(self._ratings(self._place("user", user))[self._place("item", item)])

    @standard_numerics()
    def recommend(self, user: str, top: int = 10) -> list[tuple[str, float]]:
        """Return the items that a user would rate highest, best first, with predicted ratings.

        Items that the user has rated at the silo are left out; equals come in the items' order.
        Ratings are on the scale; the order is that of the model, which tells items beyond it apart.

        Raises:
            DataError: the silo has no such user.
        """
        row = self._place("user", user)
        ratings = self._ratings(row)
        ratings[self.rated[self.rated[:, 0] == row, 1]] = -torch.inf
        order = ratings.argsort(descending=True, stable=True)[:top].tolist()
        return [
            (self.items[i], self._clip_to_scale(ratings[i]))
            for i in order
            if ratings[i] > -torch.inf
        ]

    @standard_numerics()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file, whole or not at all, that only its owner may read."""
        tensors_by_name = {name: getattr(self, name) for name in _TENSORS}
        tensors = {name: t.detach().cpu().clone() for name, t in tensors_by_name.items()}
        about = json.dumps({"users": self.users, "items": self.items, "scale": self.scale})
        data = safetensors.torch.save(tensors, {FORMAT: about})
        write_atomic(Path(path), data, private=True)

    def _clip_to_scale(self, rating: Tensor) -> float:
        return float(rating if self.scale is None else rating.clamp(*self.scale))

    def _ratings(self, row: int) -> Tensor:
        return self.level[row] + self.bias + self.item @ self.user[row]

    def _place(self, what: str, name: str) -> int:
        places = self._places[what]
        if name not in places:
            raise DataError(
                f"expected one of the {len(places)} {what}s of this silo, got {what} {name!r}: "
                "give an id as in its table of ratings"
            )
        return places[name]

    @cached_property
    def _places(self) -> dict[str, dict[str, int]]:
        ids = {"user": self.users, "item": self.items}
        return {what: {name: i for i, name in enumerate(names)} for what, names in ids.items()}


_TENSORS = ("user", "item", "level", "bias", "rated")
_IDS: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])
_SCALE: TypeAdapter[tuple[float, float] | None] = TypeAdapter(tuple[float, float] | None)


def make_recommender(
    factors: Factors,
    block: ClientBlock,
    keys: Sequence[str],
    scale: tuple[float, float] | None = None,
) -> Recommender:
    """Return the recommender of a silo.

    Args:
        factors: of its rows.
        block: the silo.
        keys: of its rows; users and items as `u:ID` and `i:ID`, as `sg.ratings` names them.
        scale: least and largest rating.
    """
    users, items = (kinds(block.x)[:, side].nonzero()[:, 0].cpu() for side in (0, 1))
    pairs, place = pairs_of(block), torch.full((len(block.y),), -1)
    for rows in (users, items):
        place[rows] = torch.arange(len(rows))
    rated = torch.stack([place[pairs.user.cpu()], place[pairs.item.cpu()]], dim=1)
    names = [tuple(keys[row].partition(":")[2] for row in rows.tolist()) for rows in (users, items)]
    user, item, bias, level = (
        t.cpu() for t in (factors.user, factors.item, factors.bias, factors.level)
    )
    return Recommender(
        users=names[0],
        items=names[1],
        user=user[users],
        item=item[items],
        level=level[users],
        bias=bias[items],
        rated=rated,
        scale=scale,
    )


def recommender_file(run: Path) -> Path:
    """Return the recommender's file of a silo's result folder.

    Raises:
        DataError: there is none: the folder is of a simulation, or of a run of another task.
    """
    if not run.is_dir():
        return run
    if (run / RECOMMENDER).exists():
        return run / RECOMMENDER
    kind = (
        "of a run of labels of nodes or of model consisrec, which ranks nothing, or of a silo that "
        "took no part in its best round"
    )
    if (run / "silo.toml").exists() and not (run / REPORT).exists():
        raise DataError(
            f"expected the result folder of a silo with ratings, got {run}, a silo's own data: "
            "name the folder of a run in its results"
        )
    if (run / ABOUT).exists():
        kind = (
            "of a run of one process or server: users' tables stay with the silos, so train with "
            "`silograph server` and `silograph silo`, and name a silo's folder"
        )
    elif not (run / REPORT).exists():
        kind = "which is of no run: name a folder in a silo's results"
    raise DataError(f"expected the result folder of a silo with ratings, got {run}, {kind}")


@standard_numerics()
def load_recommender(path: str | os.PathLike[str]) -> Recommender:
    """Return the recommender of a file that `Recommender.save` wrote.

    Raises:
        DataError: the file is missing, damaged, or holds something else.
    """
    where = os.fspath(path)
    check_regular(path)
    check_model_file(Path(path))
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"expected a recommender at {where}, got: {error}: give the result folder of a silo"
        ) from None
    try:
        saved = json.loads(about[FORMAT])
        users, items = (_IDS.validate_python(saved[name]) for name in ("users", "items"))
        scale = _SCALE.validate_python(saved.get("scale"))
        recommender = Recommender(users, items, *(tensors[name] for name in _TENSORS))
        recommender = replace(recommender, scale=scale)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise DataError(f"expected a {FORMAT!r} in {where}, got something else") from None
    if not _is_consistent(recommender):
        raise DataError(
            f"expected figures for {len(recommender.users)} users in {where}, got others"
        )
    return recommender


def _is_consistent(recommender: Recommender) -> bool:
    """Whether ids are distinct, and figures finite and of the shapes that the ids say."""
    users, items = len(recommender.users), len(recommender.items)
    floats = (recommender.user, recommender.item, recommender.level, recommender.bias)
    low, high = recommender.scale or (0.0, 1.0)
    return (
        -math.inf < low < high < math.inf
        and len({*recommender.users}) == users
        and len({*recommender.items}) == items
        and all(t.is_floating_point() and bool(t.isfinite().all()) for t in floats)
        and len({t.dtype for t in floats}) == 1
        and recommender.user.dim() == 2
        and recommender.user.shape[0] == users
        and recommender.item.shape == (items, recommender.user.shape[1])
        and recommender.level.shape == (users,)
        and recommender.bias.shape == (items,)
        and recommender.rated.dtype is torch.int64
        and recommender.rated.dim() == 2
        and recommender.rated.shape[1] == 2
        and bool((recommender.rated >= 0).all())
        and bool((recommender.rated < torch.tensor([users, items])).all())
    )
