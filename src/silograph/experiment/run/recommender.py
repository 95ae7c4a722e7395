"""What recommends a silo's items to its users: a file that stays with the silo.

A run's weights alone predict no rating: what is known of users and items is in tables, biases and
profiles that never leave their silo. So a silo keeps, beside the model, what these and the weights
of the best round come to: a rating of user u and item i is level_u + bias_i + user_u . item_i.

A user whom the silo does not know gets its popular items: those of the highest mean of what the
model predicts for the silo's users. Such a recommendation is marked as `popular`.

U: users. I: items. D: width. R: ratings of the silo.
"""

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import safetensors.torch
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from silograph.core.errors import ConfigError, DataError, mistake, unknown
from silograph.core.files import check_new_file, check_regular, to_text, write_atomic
from silograph.core.numeric_state import standard_numerics
from silograph.core.payload import fields_under, state_of, take_all
from silograph.core.text import count_of
from silograph.evaluation.evaluate import TABLES
from silograph.exchange.collect import local_graph
from silograph.experiment.resolve.data import clients_block
from silograph.experiment.resolve.resolve import DTYPES
from silograph.experiment.result_files import (
    ABOUT,
    RECOMMENDER,
    RECOMMENDERS,
    REPORT,
    check_model_file,
    file_of,
    names_of_clients,
)
from silograph.experiment.run.result import Result
from silograph.experiment.run.setup import Setup
from silograph.graph.block.block import ClientBlock, kinds, pairs_of
from silograph.graph.read.tables import pyarrow
from silograph.task.rating_value import Factors, RankingModel

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
        return [(item, rating) for item, rating, _ in self.best_items(user, top)]

    def best_items(self, user: str, top: int) -> list[tuple[str, float, float]]:
        """Return item, rating on the scale and score of `recommend`, best first."""
        row = self._place("user", user)
        ratings = self._ratings(row)
        ratings[self.rated[self.rated[:, 0] == row, 1]] = -torch.inf
        return self._highest(ratings, top)

    def popular_items(self, top: int) -> list[tuple[str, float, float]]:
        """Return the items of the highest mean rating, best first, with rating and score.

        These are for users whom the silo does not know. Means are those that the model predicts
        over the silo's users; equals come in the items' order.
        """
        return self._highest(self.item_means, top)

    def mean_of(self, item: str) -> tuple[float, float]:
        """Return the mean rating of an item over the silo's users, on the scale and as a score.

        Raises:
            DataError: the silo has no such item.
        """
        mean = self.item_means[self._place("item", item)]
        return self._clip_to_scale(mean), float(mean)

    def knows(self, user: str) -> bool:
        """Return whether the silo has a user of this id."""
        return user in self._places["user"]

    @cached_property
    def item_means(self) -> Tensor:
        """Mean of what the model predicts for each item over the silo's users, (I,)."""
        return self.level.mean() + self.bias + self.item @ self.user.mean(dim=0)

    @standard_numerics()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file, whole or not at all, that only its owner may read."""
        tensors_by_name = {name: getattr(self, name) for name in _TENSORS}
        tensors = {name: t.detach().cpu().clone() for name, t in tensors_by_name.items()}
        about = json.dumps({"users": self.users, "items": self.items, "scale": self.scale})
        data = safetensors.torch.save(tensors, {FORMAT: about})
        write_atomic(Path(path), data, private=True)

    def _highest(self, scores: Tensor, top: int) -> list[tuple[str, float, float]]:
        order = scores.argsort(descending=True, stable=True)[:top].tolist()
        return [
            (self.items[i], self._clip_to_scale(scores[i]), float(scores[i]))
            for i in order
            if scores[i] > -torch.inf
        ]

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


def client_recommenders(result: Result, setup: Setup) -> dict[str, Recommender]:
    """Return the recommender of each client of a simulation that is over, by its name.

    There are none where the task is another one, the model ranks nothing, or one client trained on
    all ratings; and of a model with tables, which the process has of the last round only, where
    another round was the best one.
    """
    model, cut = setup.method_config.model, setup.simulated
    is_last = result.best_round == result.rounds[-1]["round"]
    if (
        not isinstance(model, RankingModel)
        or cut is None
        or setup.federation.ids != cut.partition.ids
        or (model.table_widths and not is_last)
    ):
        return {}
    block, _ = clients_block(cut, DTYPES[setup.config.dtype])
    size = setup.config.block_size
    assert size is not None  # written out
    keys = cut.graph.node_id[cut.partition.copies]
    ends, recommenders = block.off.tolist(), {}
    states = [
        {name: type(f)(*(t.cpu() for t in vars(f).values())) for name, f in state.items()}
        for state in setup.federation.states()
    ]
    for number, client in enumerate(cut.partition.ids):
        trained = result.models.get(client, result.model)
        if trained is None:
            continue
        in_block, position = divmod(number, size)
        state = state_of(take_all(states[in_block], torch.tensor([position])))
        graph = local_graph(block.take(torch.tensor([number])), state)
        weights = {name: w.cpu() for name, w in trained.weights.items()}
        with torch.no_grad():
            factors = model.factors(weights, graph, tables=fields_under(TABLES, state))
        own_keys = keys[ends[number] : ends[number + 1]].tolist()
        recommenders[client] = make_recommender(factors, graph, own_keys, cut.graph.scale)
    return recommenders


# --- Recommendations for all users of a silo, as a table -----------------------------------------


MODEL, POPULAR = "model", "popular"  # what a recommendation comes from
COLUMNS = ("user", "rank", "item", "rating", "score", "source")


@standard_numerics()
def recommend_all(
    recommender: Recommender, top: int
) -> list[tuple[str, int, str, float, float, str]]:
    """Return rows of `COLUMNS`: the best items of every user, and last those of unknown users.

    The rows of unknown users have no user, and the source `popular`.
    """
    rows = [
        (user, rank, *item, MODEL)
        for user in recommender.users
        for rank, item in enumerate(recommender.best_items(user, top), 1)
    ]
    popular = enumerate(recommender.popular_items(top), 1)
    return [*rows, *(("", rank, *item, POPULAR) for rank, item in popular)]


def write_recommendations(
    recommenders: Mapping[str | None, Recommender], top: int, out: Path
) -> int:
    """Write the recommendations of all users to a new file; return the number of users.

    The file is CSV, or Parquet where its name ends so. Only its owner may read it.

    Args:
        recommenders: by client, whose names are the first column; without it where the one name is
            None.
        top: number of items for each user.
        out: the file.

    Raises:
        ConfigError: the file exists, or its folder does not.
        DataError: it is to be Parquet, and pyarrow is not installed.
    """
    check_new_file(out)
    has_names = None not in recommenders
    header = ("client", *COLUMNS) if has_names else COLUMNS
    rows = [
        (name, *row) if has_names else row
        for name, recommender in recommenders.items()
        for row in recommend_all(recommender, top)
    ]
    if out.suffix == ".parquet":
        arrow, parquet = pyarrow(out)
        columns = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))
        buffer = io.BytesIO()
        parquet.write_table(arrow.table(columns), buffer)
        write_atomic(out, buffer.getvalue(), private=True)
    else:
        write_atomic(out, to_text([header, *rows]), private=True)
    return sum(len(recommender.users) for recommender in recommenders.values())


def client_names(run: Path) -> list[str]:
    """Return the clients of a simulation's result folder; none for that of a silo."""
    return names_of_clients(run) if (run / ABOUT).exists() else []


def client_file(run: Path, client: str | None) -> Path:
    """Return the recommender's file of a client in a simulation's result folder.

    Raises:
        ConfigError: no client is named, or there is none of that name.
        DataError: the run has no recommenders.
    """
    names = client_names(run)
    if not (run / RECOMMENDERS).is_dir():
        raise DataError(
            f"expected recommenders of clients in {run}, got none: they are written when a run on "
            "ratings ends whose model ranks items. A model with tables has them only where the "
            "best round was the last one, and real silos keep their own",
            **mistake("missing-file", run / RECOMMENDERS),
        )
    if client is None:
        raise ConfigError(
            f"expected the name of a client for {run}, a run of {count_of(len(names), 'client')}, "
            f"got none: use --client {names[0]}, or another name of its clients.csv, or --all",
            **mistake("missing-option", "client"),
        )
    if client not in names:
        raise unknown("client", client, names)
    return run / RECOMMENDERS / file_of(names.index(client), client)


def recommender_file(run: Path, client: str | None = None) -> Path:
    """Return the recommender's file of a silo's result folder, or of a client of a simulation.

    Raises:
        ConfigError: a client is named where there is one silo, or none where there are several.
        DataError: there is no file: the folder is of a run of another task, or of a server.
    """
    if (run / ABOUT).exists():
        return client_file(run, client)
    if client is not None:
        raise ConfigError(
            f"expected no client for {run}, which is of one silo, got {client!r}: leave --client "
            "out",
            **mistake("unread-option", "client", str(run)),
        )
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
            "name the folder of a run in its results",
            **mistake("wrong-format", run),
        )
    if not (run / REPORT).exists():
        kind = "which is of no run: name a folder in a silo's results"
    raise DataError(
        f"expected the result folder of a silo with ratings, got {run}, {kind}",
        **mistake("wrong-format", run),
    )


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
            f"expected a recommender at {where}, got: {error}: give the result folder of a silo",
            **mistake("wrong-format", where),
        ) from None
    try:
        saved = json.loads(about[FORMAT])
        users, items = (_IDS.validate_python(saved[name]) for name in ("users", "items"))
        scale = _SCALE.validate_python(saved.get("scale"))
        recommender = Recommender(users, items, *(tensors[name] for name in _TENSORS))
        recommender = replace(recommender, scale=scale)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise DataError(
            f"expected a {FORMAT!r} in {where}, got something else",
            **mistake("wrong-format", where),
        ) from None
    if not _is_consistent(recommender):
        raise DataError(
            f"expected figures for {len(recommender.users)} users in {where}, got others",
            **mistake("damaged-file", where),
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
