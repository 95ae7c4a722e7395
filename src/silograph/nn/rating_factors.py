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
from silograph.core.payload import NO_STATE, Ragged, Stacked, State
from silograph.core.text import state_of_fields
from silograph.core.work import report_each, report_rows
from silograph.graph.block.block import ClientBlock, pairs_of
from silograph.graph.graph import LabelForm
from silograph.nn.conv import Params
from silograph.nn.fit import (
    LOSS_FLOPS,
    Fitted,
    Training,
    TrainingInputs,
    dtype_of,
    start_fields,
    whole,
)
from silograph.nn.forward import NO_TABLES
from silograph.nn.rating_steps import (
    RatingGraph,
    TorchPasses,
    at_nodes,
    at_ratings,
    draw_table,
    fit_pairs,
    rating_graph,
    require_one_client,
    values_of,
)
from silograph.nn.segment import segment_sum
from silograph.nn.shared_items import BIAS, EMBEDDING, ends, item_shape
from silograph.task.rating_value import Factors

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
    single_client_only = True  # clients are few and large
    meets_all = False
    solved_flops = 0
    first_maps = ()
    source = None

    __getstate__ = state_of_fields

    @property
    def noun(self) -> str:
        """The model's name in messages."""
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
        tables = {name: draw_table(block, key.fold(name), width) for name, width in widths}
        return {**tables, BIAS: Ragged(0 * tables[BIAS].t, tables[BIAS].off)}

    def forward(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Tensor:
        """Return predictions (n, 1) of one client, 0 at users and items.

        Raises:
            ProtocolError: several clients, or not the tables of this one.
        """
        graph = rating_graph(require_one_client(block), dtype_of(block))
        values = values_of(self, weights, block, tables)
        report_each(self.flops(block, len(graph.row), passes=1))
        predictions = self._predict_pairs(values, graph, graph.user, graph.item)
        return at_ratings(block, graph.row, predictions)

    def factors(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Factors:
        """Return the factors that rank the items of one client; see `RankingModel`."""
        graph = rating_graph(require_one_client(block), dtype_of(block))
        values = values_of(self, weights, block, tables)
        h, bias = ends(values, graph)
        nodes = at_nodes(block, h)
        biases = at_nodes(block, bias[:, 0] * (self.terms == "biases"))
        return Factors(nodes, nodes, biases, biases + graph.mean + values[LEVEL])

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train one client on its training ratings."""
        extra_loss = None if self.social == "rating_mf" or not self.weight else self._social_loss
        passes = TorchPasses(self, require_one_client(inputs.block), extra_loss)
        return fit_pairs(self, training, inputs, passes)

    def predict_pairs(
        self, p: Mapping[str, Tensor], block: ClientBlock, pair: Tensor, key: Key | None
    ) -> Tensor:
        """Return predictions of ratings in a step; see `PairModel`."""
        del key
        graph = rating_graph(block, dtype_of(block))
        return self._predict_pairs(p, graph, graph.user[pair], graph.item[pair])

    def flops(self, block: ClientBlock, ratings: int, *, passes: int) -> float:
        """Return the operations of a pass; see `PairModel`."""
        num_trusted = rating_graph(block, dtype_of(block)).trust.shape[1] * (passes > 1)
        flops_of_pair = 2 * self.embedding + 4
        social = 0 if self.social == "rating_mf" or not self.weight else num_trusted * flops_of_pair
        loss = (passes > 1) * LOSS_FLOPS * ratings
        return float(passes * (ratings * flops_of_pair + social) + loss)

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values."""
        return {"kind": "factors", **dataclasses.asdict(self)}

    def _predict_pairs(
        self, p: Mapping[str, Tensor], graph: RatingGraph, user: Tensor, item: Tensor
    ) -> Tensor:
        """Return predictions (R, 1) of pairs, from weights and tables."""
        h, bias = ends(p, graph)
        total = (h.index_select(0, user) * h.index_select(0, item)).sum(dim=1, keepdim=True)
        if self.terms == "biases":
            total = total + bias.index_select(0, user) + bias.index_select(0, item)
        return graph.mean + total + p[LEVEL]

    def _social_loss(self, p: Mapping[str, Tensor], block: ClientBlock) -> Tensor:
        """Return the social term of the loss, s / n T."""
        graph = rating_graph(block, dtype_of(block))
        user, other = graph.trust
        x = p[EMBEDDING].index_select(0, graph.slot[user])
        if self.social == "sorec":
            degree = torch.bincount(user, minlength=len(graph.slot)).to(x.dtype)
            expected = (degree[other] / (degree[user] + degree[other])).sqrt()
            z = p[TRUSTED].index_select(0, graph.slot[other])
            total = (expected - (x * z).sum(dim=1).sigmoid()).square().sum()
        else:
            y = p[EMBEDDING].index_select(0, graph.slot[other])
            total = (likeness(block).to(x.dtype) * (x - y).square().sum(dim=1)).sum() / 2
        return self.weight * total / block.num_train[0]


def likeness(block: ClientBlock) -> Tensor:
    """Return the similarity of users with those they trust, (s,) float64 in [0, 1], cached.

    That is (1 + Pearson) / 2 over the items that both have rated in training, and 1/2 where these
    are fewer than two or one of the users rates them all alike.
    """
    return block.once("likeness", Tensor, lambda: _compute_likeness(block))


def _compute_likeness(block: ClientBlock) -> Tensor:
    import numpy as np
    import scipy.sparse as sp

    graph = rating_graph(require_one_client(block), dtype_of(block))
    train = block.split.train[graph.row]
    value = block.y[graph.row[train]].double().cpu().numpy() - graph.mean
    position = graph.user[train].cpu().numpy(), graph.item[train].cpu().numpy()
    size = (len(graph.slot), len(graph.slot))
    rated = sp.csr_matrix((np.ones(len(value)), position), shape=size)
    first, second = (sp.csr_matrix((value**k, position), shape=size) for k in (1, 2))
    user, other = graph.trust.cpu().numpy()

    def total(a: Any, b: Any) -> Any:
        return np.asarray(a[user].multiply(b[other]).sum(axis=1)).ravel()

    n = total(rated, rated).clip(min=1)
    a, b = total(first, rated), total(rated, first)
    spread = (total(second, rated) - a**2 / n) * (total(rated, second) - b**2 / n)
    is_defined = spread > 1e-9  # below that a user rates the shared items alike
    pearson = (total(first, first) - a * b / n) / np.sqrt(np.where(is_defined, spread, 1.0))
    likenesses = (1 + np.where(is_defined, pearson, 0.0).clip(-1, 1)) / 2
    return torch.from_numpy(likenesses).to(graph.slot.device)


# --- rating biases -------------------------------------------------------------------------------
# What a model of ratings must be compared with: a silo's mean, and biases of users and items.
#
#     r_ui = mean + b_u + b_i,   min over b of sum (r_ui - mean - b_u - b_i)^2 + damping * sum b^2
#
# Koren, Bell and Volinsky, "Matrix factorization techniques for recommender systems", Computer
# 2009, section on biases. Each client solves it for its own training ratings, whatever the
# optimizer; nothing that was learned is sent. Users and items without a training rating have bias
# 0.
#
# The minimum is found by turns, exact in the biases of users, then of items (Gauss-Seidel). Each
# client's is its own, so blocks change nothing. On the uncut graph it is that of all ratings.
#
# n: rows. C: clients.


OFFSET = "offset"  # a weight, as a model has some: added to all predictions, and always 0
TURNS = 300  # d / (d + damping) a turn for d ratings of a user or item at most
PER_TURN = 4.0  # operations for each row


@dataclass(frozen=True)
class RatingBiases:
    """The mean of a client's ratings, with or without biases.

    Attributes:
        damping: penalty on squared biases.
        terms: what is added to the mean: `biases`, or nothing: `mean`.
        shared: whose biases are those of all clients' ratings where several have them: nobody's,
            those of items, or of users, too (`silograph.exchange.shared_biases`).
        min_silos: least number of clients with training ratings of a shared user or item.
    """

    damping: float
    terms: Literal["biases", "mean"] = "biases"
    shared: Literal["none", "items", "all"] = "none"
    min_silos: int = 2

    features = FEATURES
    outputs = 1
    task: LabelForm = dataclasses.field(default="rating", init=False)
    noun = "model rating_biases"
    staged = None
    single_client_only = True  # clients are few and large
    meets_all = False
    solved_flops = PER_TURN * TURNS
    first_maps = ()
    source = None
    table_widths = NO_TABLES

    __getstate__ = state_of_fields

    @property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, shared form."""
        return MappingProxyType({OFFSET: (1,)})

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return zero."""
        del key
        return {OFFSET: torch.zeros(1, dtype=dtype)}

    def first_tables(self, block: ClientBlock, key: Key) -> State:
        """There are no tables: biases follow from a client's ratings."""
        del block, key
        return NO_STATE

    def forward(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Tensor:
        """Return predictions (n, 1), 0 at users and items."""
        del tables
        offset, pairs = weights[OFFSET], pairs_of(block)
        mean, bias = self._solve_once(block)
        client = block.client[pairs.row]
        client_offset = offset[client, 0] if offset.dim() == 2 else offset[0]
        out = offset.new_zeros(len(block.y), 1)
        predictions = mean[client] + bias[pairs.user] + bias[pairs.item]
        out[pairs.row, 0] = predictions.to(out.dtype) + client_offset
        return out

    def factors(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Factors:
        """Return the biases of items, which order them for all users alike."""
        del tables
        offset, (mean, bias) = weights[OFFSET], self._solve_once(block)
        client_offset = offset[block.client, 0] if offset.dim() == 2 else offset[0]
        bias, mean = bias.to(offset.dtype), mean.to(offset.dtype)
        no_factors = bias.new_zeros(len(bias), 0)
        return Factors(no_factors, no_factors, bias, mean[block.client] + bias + client_offset)

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Solve for every client; weights and what the optimizer keeps stay as they are."""
        del training
        block, start = inputs.block, inputs.start
        fields = start_fields(self, start, block.num_clients)
        offset = whole(fields[OFFSET])
        logits = self.forward({OFFSET: offset}, block)
        train = block.split.train
        error = torch.where(train, logits[:, 0] - block.y.nan_to_num(), 0.0)
        loss = segment_sum(error.square(), block.off) / block.num_train.clamp(min=1)
        steps = (block.num_train > 0).long().cpu()
        return Fitted(
            {OFFSET: Stacked(offset)},
            dict(inputs.memory or {}),
            loss.to(logits.dtype),
            logits,
            steps,
        )

    def described(self) -> dict[str, Any]:
        """Return the options as plain values."""
        return {"kind": "biases", **dataclasses.asdict(self)}

    def _solve_once(self, block: ClientBlock) -> tuple[Tensor, Tensor]:
        """Return `biases`, worked out once."""
        turns = TURNS if self.terms == "biases" else 0
        name = ("biases", self.damping, turns)
        return block.once(name, tuple, lambda: biases(block, self.damping, turns))


def biases(block: ClientBlock, damping: float, turns: int = TURNS) -> tuple[Tensor, Tensor]:
    """Return means of the clients' training ratings, (C,), and biases of rows, (n,), float64."""
    pairs = pairs_of(block)
    train = block.split.train[pairs.row]
    row, user, item = (t[train] for t in (pairs.row, pairs.user, pairs.item))
    value, client = block.y[row].double(), block.client[row]
    total = torch.zeros(block.num_clients, dtype=torch.float64, device=value.device)
    mean = total.index_add(0, client, value) / block.num_train.clamp(min=1)
    others = None
    if block.shared is not None and turns:
        mean = block.shared.mean.to(mean).expand(block.num_clients)
        others = block.shared.total, block.shared.number
    residual = value - mean[client]
    report_rows(block.off, PER_TURN * turns)
    return mean, solved_biases(user, item, residual, len(block.y), damping, turns, others)


def solved_biases(
    user: Tensor,
    item: Tensor,
    residual: Tensor,
    count: int,
    damping: float,
    turns: int = TURNS,
    others: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the biases of users and items, (count,) float64, from ratings less their mean.

    Args:
        user: (R,) int64 user of each rating, below `count`.
        item: (R,) int64 its item, likewise.
        residual: (R,) float64 the rating, less the mean.
        count: number of ends.
        damping: penalty on squared biases.
        turns: of the solution.
        others: sums and numbers (count,) of residuals that other clients have of the ends, less the
            biases of their other ends; None: there are none.
    """
    bias = torch.zeros(count, dtype=torch.float64, device=residual.device)
    total = torch.bincount(torch.cat([user, item]), minlength=count) + damping
    first_sums = torch.zeros_like(bias)
    if others is not None:
        first_sums, total = others[0], total + others[1]
        bias = first_sums / total  # stays where the client has no rating of its own
    for _ in range(turns):
        for ids, other_ids in ((user, item), (item, user)):
            sums = first_sums.index_add(0, ids, residual - bias[other_ids])
            bias[ids] = (sums / total)[ids]
    return bias
