"""Matrix factorization of ratings, plain or with trust: the models of FedMF, SoRec and SoReg.

    r_ui = mean + b_u + b_i + x_u . y_i + level,    loss = mean of squared errors + s / n T

with n training ratings of the client and T one of these, sums over statements of trust (u, v), each
in both directions, both users at the client:

    rating_mf   0
    sorec       sum (sqrt(d_v / (d_u + d_v)) - g(x_u . z_v))^2, d: statements, g: logistic function
    soreg       sum likeness_uv |x_u - x_v|^2 / 2, likeness: (1 + Pearson) / 2 over shared items

Koren, Bell and Volinsky, "Matrix factorization techniques for recommender systems", Computer 2009.
Ma, Yang, Lyu and King, "SoRec: Social recommendation using probabilistic matrix factorization",
CIKM 2008, eq. 9. Ma, Zhou, Liu, Lyu and King, "Recommender systems with social regularization",
WSDM 2011, eq. 13 (individual-based).

Penalties on squared factors are the optimizer's weight decay. What we changed: mean and biases, as
without them both are behind the mean (`terms=mean` has none); SoRec predicts ratings without g;
trust has no direction; users without two shared items that differ have likeness 1/2.

Embeddings (x, y, z) and biases are tables that stay with the client; with `items` those of items
are shared rows instead (`silograph.nn.shared_items`), which methods that send rows average.

E: users and items of a client. D: width. R: ratings in a step. s: statements.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import NO_STATE, Ragged, State
from silograph.core.pickling import state_of_fields
from silograph.core.work import report_each
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import LabelForm
from silograph.nn.conv import Params
from silograph.nn.doors import dtype_of
from silograph.nn.rating_graph import RatingGraph, rating_graph
from silograph.nn.rating_steps import (
    TorchPasses,
    alone,
    at_nodes,
    at_ratings,
    drawn_table,
    fit_pairs,
    values_of,
)
from silograph.nn.schedule import Fitted, Training, TrainingInputs
from silograph.nn.shared_items import BIAS, EMBEDDING, ends, item_shape
from silograph.nn.steps import LOSS_FLOPS
from silograph.task.ranking import Factors

Social = Literal["rating_mf", "sorec", "soreg"]
LEVEL, TRUSTED = "level", "trusted"  # the weight that always travels; the table of z
FEATURES = 2  # what says whether a node is a user or an item


@dataclass(frozen=True)
class RatingFactors:
    """The shape of a factorization.

    Attributes:
        social: what trust adds: nothing (`rating_mf`), or the term of `sorec` or `soreg`.
        embedding: D.
        terms: what is added to the mean besides x . y: `biases`, or nothing: `mean`.
        items: rows of items that travel; 0: they stay with the client.
        weight: s, of the social term.
    """

    social: Social
    embedding: int
    terms: Literal["biases", "mean"] = "biases"
    items: int = 0
    weight: float = 0.0

    features = FEATURES
    outputs = 1
    task: LabelForm = dataclasses.field(default="rating", init=False)
    staged = None
    one_by_one = True  # clients are few and large
    meets_all = False
    solved_flops = 0
    first_maps = ()
    source = None

    __getstate__ = state_of_fields

    @property
    def noun(self) -> str:
        """Its name."""
        return f"model {self.social}"

    @property
    def table_widths(self) -> Mapping[str, int]:
        """Columns of the tables that a client keeps."""
        trusted = {TRUSTED: self.embedding} if self.social == "sorec" else {}
        return {EMBEDDING: self.embedding, BIAS: 1, **trusted}

    @cached_property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, shared form."""
        return MappingProxyType({LEVEL: (1,), **item_shape(self.items, self.embedding)})

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return zeros."""
        del key
        return {name: torch.zeros(shape, dtype=dtype) for name, shape in self.weight_shapes.items()}

    def first_tables(self, block: ClientBlock, key: Key) -> dict[str, Ragged]:
        """Return factors drawn from +-1/sqrt(D), and biases of 0; rows of the unseen are 0."""
        widths = self.table_widths.items()
        found = {name: drawn_table(block, key.fold(name), width) for name, width in widths}
        return {**found, BIAS: Ragged(0 * found[BIAS].t, found[BIAS].off)}

    def forward(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Tensor:
        """Return predictions (n, 1) of one client, 0 at users and items.

        Raises:
            ProtocolError: several clients, or not the tables of this one.
        """
        graph = rating_graph(alone(block), dtype_of(block))
        values = values_of(self, weights, block, tables)
        report_each(self.flops(block, len(graph.row), passes=1))
        found = self._ratings(values, graph, graph.user, graph.item)
        return at_ratings(block, graph.row, found)

    def factors(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Factors:
        """Return what orders the items of one client; see `RankingModel`."""
        graph = rating_graph(alone(block), dtype_of(block))
        values = values_of(self, weights, block, tables)
        h, bias = ends(values, graph)
        nodes = at_nodes(block, h)
        biases = at_nodes(block, bias[:, 0] * (self.terms == "biases"))
        return Factors(nodes, nodes, biases, biases + graph.mean + values[LEVEL])

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train one client on its training ratings."""
        added = None if self.social == "rating_mf" or not self.weight else self._social
        passes = TorchPasses(self, alone(inputs.block), added)
        return fit_pairs(self, training, inputs, passes)

    def said(
        self, p: Mapping[str, Tensor], block: ClientBlock, pair: Tensor, key: Key | None
    ) -> Tensor:
        """Return what is predicted of ratings in a step; see `PairModel`."""
        del key
        graph = rating_graph(block, dtype_of(block))
        return self._ratings(p, graph, graph.user[pair], graph.item[pair])

    def flops(self, block: ClientBlock, ratings: int, *, passes: int) -> float:
        """Return the operations of a pass; see `PairModel`."""
        told = rating_graph(block, dtype_of(block)).trust.shape[1] * (passes > 1)
        each = 2 * self.embedding + 4
        social = 0 if self.social == "rating_mf" or not self.weight else told * each
        loss = (passes > 1) * LOSS_FLOPS * ratings
        return float(passes * (ratings * each + social) + loss)

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values."""
        return {"kind": "factors", **dataclasses.asdict(self)}

    def _ratings(
        self, p: Mapping[str, Tensor], graph: RatingGraph, user: Tensor, item: Tensor
    ) -> Tensor:
        """Return predictions (R, 1) of pairs, from weights and tables."""
        h, bias = ends(p, graph)
        both = (h.index_select(0, user) * h.index_select(0, item)).sum(dim=1, keepdim=True)
        if self.terms == "biases":
            both = both + bias.index_select(0, user) + bias.index_select(0, item)
        return graph.mean + both + p[LEVEL]

    def _social(self, p: Mapping[str, Tensor], block: ClientBlock) -> Tensor:
        """Return s / n T."""
        graph = rating_graph(block, dtype_of(block))
        user, other = graph.trust
        x = p[EMBEDDING].index_select(0, graph.slot[user])
        if self.social == "sorec":
            degree = torch.bincount(user, minlength=len(graph.slot)).to(x.dtype)
            wanted = (degree[other] / (degree[user] + degree[other])).sqrt()
            z = p[TRUSTED].index_select(0, graph.slot[other])
            total = (wanted - (x * z).sum(dim=1).sigmoid()).square().sum()
        else:
            y = p[EMBEDDING].index_select(0, graph.slot[other])
            total = (likeness(block).to(x.dtype) * (x - y).square().sum(dim=1)).sum() / 2
        return self.weight * total / block.num_train[0]


def likeness(block: ClientBlock) -> Tensor:
    """Return how alike users rate whom they trust, (s,) float64 in [0, 1], worked out once.

    That is (1 + Pearson) / 2 over the items that both have rated in training, and 1/2 where these
    are fewer than two or one of the users rates them all alike.
    """
    return block.once("likeness", Tensor, lambda: _likeness(block))


def _likeness(block: ClientBlock) -> Tensor:
    import numpy as np
    import scipy.sparse as sp

    graph = rating_graph(alone(block), dtype_of(block))
    train = block.split.train[graph.row]
    value = block.y[graph.row[train]].double().cpu().numpy() - graph.mean
    place = graph.user[train].cpu().numpy(), graph.item[train].cpu().numpy()
    size = (len(graph.slot), len(graph.slot))
    rated = sp.csr_matrix((np.ones(len(value)), place), shape=size)
    first, second = (sp.csr_matrix((value**k, place), shape=size) for k in (1, 2))
    user, other = graph.trust.cpu().numpy()

    def total(a: Any, b: Any) -> Any:
        return np.asarray(a[user].multiply(b[other]).sum(axis=1)).ravel()

    n = total(rated, rated).clip(min=1)
    a, b = total(first, rated), total(rated, first)
    spread = (total(second, rated) - a**2 / n) * (total(rated, second) - b**2 / n)
    some = spread > 1e-9  # below that a user rates the shared items alike
    pearson = (total(first, first) - a * b / n) / np.sqrt(np.where(some, spread, 1.0))
    found = (1 + np.where(some, pearson, 0.0).clip(-1, 1)) / 2
    return torch.from_numpy(found).to(graph.slot.device)
