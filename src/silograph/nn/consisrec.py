"""ConsisRec: embeddings of a user and an item from drawn neighbors that are consistent with both.

Yang, Liu, Dou, Ma and Yu, "ConsisRec: Enhancing GNN for social recommendation via consistent
neighbor aggregation", SIGIR 2021. For a user u and an item t with embeddings x:

    q   = relu((x_u, x_t) W_q + b_q)                          query
    p_i = exp(-|q - x_i|^2) / sum over neighbors              chance of a neighbor in each draw
    a_i = exp((x_i, e_i) w) / sum over drawn neighbors        attention, e_i: vector of the relation
    h_v = relu((x_v, sum of a_i x_i) W + b)   for v = u and v = t
    r   = mean + b_u + b_t + h_u . h_t + level                `terms=none`: the paper's h_u . h_t

Neighbors of a user are the items that it rates in training, and users by trust, either way; those
of an item are its users, and items of which more than half of all users that rate either rate both.
Relations are the levels of a rating, trust, and shared users. Of d neighbors max(1, sampled d) are
drawn without replacement, by one draw a neighbor (Gumbel): top keys log p + noise are such a draw
(Kool, van Hoof and Welling, "Stochastic beams and where to find them", ICML 2019).

No gradient passes a draw, and the query does nothing else, so it stays as it began but for decay:
so it is in the paper's equations, and in its authors' code. As there, one layer, b_q and b (without
which a user or item that nobody knows has no embedding at all), a rating that is predicted in
training is a relation, too, and scores are of drawn neighbors: here always the same for a rating.

What we changed: mean, biases and level are added, without which it is far behind the mean at first;
the loss is the squared error instead of its root. Where paper and code differ, this is the paper:
squared distances, one query for both ends, relu, w trained. Trust and shared users have a vector
each, where the code has one for both. No embedding serves all ratings, so it ranks nothing.

E: users and items of a client. D: width. R: ratings in a step. e: entries. d: neighbors of R pairs.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from silograph.core.errors import DataError
from silograph.core.key import Key, mix_words
from silograph.core.payload import NO_STATE, Ragged, State, offsets, owners, ranges
from silograph.core.text import state_of_fields
from silograph.core.work import report_each
from silograph.graph.block.block import ClientBlock
from silograph.graph.csr import CSR
from silograph.graph.graph import LabelForm
from silograph.nn.conv import Params, glorot
from silograph.nn.fit import LOSS_FLOPS, Fitted, Training, TrainingInputs, dtype_of
from silograph.nn.rating_steps import (
    at_ratings,
    draw_table,
    fit_pairs,
    rating_graph,
    require_one_client,
    values_of,
)
from silograph.nn.segment import edge_dots, edge_product
from silograph.nn.shared_items import BIAS, EMBEDDING

# --- Who is near whom among the users and items of a client, for ConsisRec -----------------------
#
# Neighbors of a user are the items that it rates in training, and users by trust, either way;
# those of an item are its users, and items of which more than half of all users that rate either
# rate both. Relations are the levels of a rating, trust, and shared users.
#
# E: users and items of a client. R: ratings. e: entries.


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
    return block.once(
        ("neighborhood", levels), Neighborhood, lambda: _build_neighborhood(block, levels)
    )


def _build_neighborhood(block: ClientBlock, levels: int) -> Neighborhood:
    graph = rating_graph(block, dtype_of(block))
    train, count = block.split.train[graph.row], len(graph.slot)
    user, item, value = graph.user[train], graph.item[train], block.y[graph.row[train]].double()
    kind = _nearest_levels(value, levels)
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


def _nearest_levels(value: Tensor, levels: int) -> Tensor:
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

    positions = item.cpu().numpy(), user.cpu().numpy()
    rated = sp.csr_matrix((np.ones(len(user), np.int32), positions), shape=(count, count))
    number, by_user = np.diff(rated.indptr), rated.T.tocsr()
    compared = np.cumsum(rated @ np.diff(by_user.indptr).astype(np.int64))
    _check_pairs("compare", int(compared[-1]) if count else 0, MOST_COMPARED)
    pairs, total = [np.zeros((2, 0), np.int64)], 0
    ends = np.cumsum(
        sizes_of_parts(torch.from_numpy(np.diff(compared, prepend=0)), COMPARED_AT_ONCE)
    )
    for start, end in pairwise([0, *ends.tolist()]):
        shared = (rated[start:end] @ by_user).tocoo()
        item_number, other = shared.row + start, shared.col
        num_either = number[item_number] + number[other] - shared.data
        is_similar = (shared.data > ALIKE * num_either) & (item_number != other)
        total += int(is_similar.sum())
        _check_pairs("join", total, MOST_SIMILAR)
        pairs.append(np.stack([item_number[is_similar], other[is_similar]]).astype(np.int64))
    first, second = torch.from_numpy(np.concatenate(pairs, axis=1)).to(user.device)
    return first, second


def _check_pairs(what: str, pairs: int, most: int) -> None:
    """Raise `DataError` for too many pairs of items; how many they are stays with the client."""
    if pairs > most:
        raise DataError(
            f"expected at most {most:,} pairs of items to {what} at a client of model consisrec, "
            "got more, as users rate so many items each: leave items out, or take another model"
        )


def sizes_of_parts(numbers: Tensor, most: int) -> list[int]:
    """Return sizes of consecutive parts whose numbers (R,) sum to about `most` or to one number."""
    return torch.bincount(numbers.cumsum(0) // max(most, 1)).tolist()


FEATURES = 2  # what says whether a node is a user or an item
SCORED_AT_ONCE = 2**20  # neighbors, and numbers of pairs, that are scored together
OWN_ROWS = 4  # rows that a pair has itself: both ends' embeddings and what they become
DRAWN_AT_ONCE = 2**22  # neighbors that a step holds: about 1.2 GB in float64
MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 but its sign
PER_NEIGHBOR = 8  # operations besides those on its vector: draw, or softmax


@dataclass(frozen=True)
class ConsisRec:
    """The shape of the model.

    Attributes:
        embedding: D.
        terms: what is added to h_u . h_t: `biases`, the `mean` alone, or `none`.
        sampled: share of the neighbors that are drawn.
        levels: number of vectors for ratings, from the lowest to the highest that trains.
    """

    embedding: int
    terms: Literal["biases", "mean", "none"] = "biases"
    sampled: float = 0.3
    levels: int = 5

    features = FEATURES
    outputs = 1
    task: LabelForm = dataclasses.field(default="rating", init=False)
    noun = "model consisrec"
    staged = None
    single_client_only = True  # clients are few and large
    meets_all = True  # a rating, the neighbors of both its ends
    solved_flops = 0
    first_maps = ()
    source = None

    __getstate__ = state_of_fields

    @property
    def table_widths(self) -> Mapping[str, int]:
        """Columns of the tables that a client keeps."""
        return {EMBEDDING: self.embedding, BIAS: 1}

    @cached_property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, shared form."""
        d = self.embedding
        maps = {"query.weight": (2 * d, d), "layer.weight": (2 * d, d)}
        biases = {"query.bias": (d,), "layer.bias": (d,), "level": (1,)}
        vectors = {"attention": (2 * d, 1), "relation": (self.levels + 2, d)}
        return MappingProxyType({**maps, **biases, **vectors})

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return Glorot weights and zero biases; drawn in float64."""
        return {
            name: (glorot(key.fold(name), *shape) if len(shape) == 2 else torch.zeros(shape)).to(
                dtype
            )
            for name, shape in self.weight_shapes.items()
        }

    def first_tables(self, block: ClientBlock, key: Key) -> dict[str, Ragged]:
        """Return embeddings drawn from +-1/sqrt(D), and biases of 0; rows of the unseen are 0."""
        table = draw_table(block, key, self.embedding)
        return {EMBEDDING: table, BIAS: Ragged(table.t.new_zeros(len(table.t), 1), table.off)}

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
        degree = neighborhood(block, self.levels).adj.degree
        own_size = OWN_ROWS * self.embedding  # numbers of a pair besides those of its neighbors
        sizes = sizes_of_parts(degree[graph.user] + degree[graph.item] + own_size, SCORED_AT_ONCE)
        pairs = torch.arange(len(graph.row), device=graph.row.device).split(sizes)
        key = Key.of(0).fold("neighbors")
        parts = [self.predict_pairs(values, block, pair, key) for pair in pairs]
        predictions = torch.cat(parts) if parts else values["level"].new_zeros(0, 1)
        return at_ratings(block, graph.row, predictions)

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train one client; a step holds `DRAWN_AT_ONCE` drawn neighbors, however many it draws.

        Nor does it hold their embeddings, so memory for them does not depend on the width. A step
        that draws more goes through its ratings in parts, and draws the same again on the way back.

        Raises:
            DataError: too many items that share users.
        """
        return fit_pairs(self, training, inputs)

    def predict_pairs(
        self, p: Mapping[str, Tensor], block: ClientBlock, pair: Tensor, key: Key | None
    ) -> Tensor:
        """Return predictions of ratings in a step; see `PairModel`."""
        assert key is not None  # a step has one, and `forward` its own
        graph, all_neighbors = (
            rating_graph(block, dtype_of(block)),
            neighborhood(block, self.levels),
        )
        ends = (graph.user[pair], graph.item[pair])
        number = sum(_num_drawn(all_neighbors.adj.degree[end], self.sampled) for end in ends)
        assert isinstance(number, Tensor)
        sizes = sizes_of_parts(number, DRAWN_AT_ONCE)
        if len(sizes) < 2:
            return self._predict_part(p, block, pair, key)
        # Its draws are those of the key and the rating, so they are the same on the way back.
        parts = [
            checkpoint(
                self._predict_part,
                p,
                block,
                part,
                key,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for part in pair.split(sizes)
        ]
        return torch.cat(parts)

    def _predict_part(
        self, p: Mapping[str, Tensor], block: ClientBlock, pair: Tensor, key: Key
    ) -> Tensor:
        """Return predictions (R, 1) of ratings (R,) whose drawn neighbors fit in memory."""
        graph, all_neighbors = (
            rating_graph(block, dtype_of(block)),
            neighborhood(block, self.levels),
        )
        user, item = graph.user[pair], graph.item[pair]
        x = p[EMBEDDING].index_select(0, graph.slot)
        embeddings = [x.index_select(0, end) for end in (user, item)]
        query = (torch.cat(embeddings, dim=1) @ p["query.weight"] + p["query.bias"]).relu()
        counter = block.row_key[graph.row[pair]]
        h = []
        for end, own_embedding in zip((user, item), embeddings, strict=True):
            with torch.no_grad():
                drawn_edges = draw_neighbors(
                    all_neighbors, x, query, end, counter, self.sampled, key
                )
            neighbor_mean = attentive_mean(p, x, drawn_edges, all_neighbors.relation)
            inputs = torch.cat([own_embedding, neighbor_mean], dim=1)
            h.append((inputs @ p["layer.weight"] + p["layer.bias"]).relu())
        predictions = (h[0] * h[1]).sum(dim=1, keepdim=True)
        if self.terms == "none":
            return predictions
        if self.terms == "biases":
            bias = p[BIAS].index_select(0, graph.slot)
            predictions = predictions + bias.index_select(0, user) + bias.index_select(0, item)
        return graph.mean + predictions + p["level"]

    def flops(self, block: ClientBlock, ratings: int, *, passes: int) -> float:
        """Return the operations of a pass; see `PairModel`.

        Neighbors are those of a mean rating, so that the sum over an epoch is exact; the query and
        the draws have no way back.
        """
        all_neighbors, d = neighborhood(block, self.levels), self.embedding
        neighbors = ratings * (all_neighbors.train if passes > 1 else all_neighbors.all)
        flops_of_neighbor = 2 * d + PER_NEIGHBOR
        drawn_flops = passes * self.sampled * neighbors * flops_of_neighbor
        own_flops = ratings * (4 * d * d + passes * (8 * d * d + 2 * d + 4))
        nodes = passes * all_neighbors.adj.num_rows * 2 * d
        return float(
            neighbors * flops_of_neighbor
            + drawn_flops
            + own_flops
            + nodes
            + (passes > 1) * LOSS_FLOPS * ratings
        )

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values."""
        return {"kind": "consisrec", **dataclasses.asdict(self)}


@dataclass(frozen=True, eq=False)
class DrawnNeighbors:
    """Which neighbors some users or items have drawn.

    Attributes:
        adj: (R, E) whom each has drawn.
        entry: (s,) int64 where they stand in the neighborhood.
    """

    adj: CSR
    entry: Tensor


def draw_neighbors(
    near: Neighborhood,
    x: Tensor,
    query: Tensor,
    end: Tensor,
    counter: Tensor,
    sampled: float,
    key: Key,
) -> DrawnNeighbors:
    """Return drawn neighbors of users or items.

    Args:
        near: all neighbors.
        x: (E, D) embeddings.
        query: (R, D) of each pair.
        end: (R,) int64 its user, or its item.
        counter: (R,) int64 counter of the draws for it.
        sampled: share of the neighbors that are drawn, one at least.
        key: of the draws.
    """
    degree = near.adj.degree[end]
    number = _num_drawn(degree, sampled)
    sizes = sizes_of_parts(degree, SCORED_AT_ONCE)
    square = x.square().sum(dim=1)
    split = zip(*(t.split(sizes) for t in (query, end, counter, number)), strict=True)
    parts = [
        _draw_entries(near, x, square, q, v, c, part_number, key) for q, v, c, part_number in split
    ]
    entry = torch.cat(parts) if parts else number
    indices, indptr = near.adj.indices[entry], offsets(number)
    return DrawnNeighbors(CSR(indptr.to(indices.dtype), indices, None, len(x)), entry)


def _draw_entries(
    all_neighbors: Neighborhood,
    x: Tensor,
    square: Tensor,
    query: Tensor,
    end: Tensor,
    counter: Tensor,
    number: Tensor,
    key: Key,
) -> Tensor:
    """Draw `number` (R,) neighbors each; return their positions in the neighborhood, (s,) int64."""
    degree = all_neighbors.adj.degree[end]
    off = offsets(degree)
    entry, owner = ranges(all_neighbors.adj.indptr[end].long(), degree), owners(off)
    indices = all_neighbors.adj.indices[entry]
    other, indptr = indices.long(), off.to(indices.dtype)
    # |q|^2 is that of all neighbors of a pair, so it changes no chance.
    score = 2 * edge_dots(CSR(indptr, indices, None, len(x)), query, x)
    score = score.double() - square[other]
    rows = mix_words(counter ^ all_neighbors.word[end])[owner] ^ all_neighbors.word[other]
    noisy_score = score - (-key.uniform(rows)[:, 0].log()).log()
    is_drawn = torch.zeros_like(owner, dtype=torch.bool)
    rank = torch.arange(len(owner), device=owner.device) - off[owner]
    is_drawn[_largest_first(owner, noisy_score)] = rank < number[owner]
    return entry[is_drawn]


def _largest_first(owner: Tensor, value: Tensor) -> Tensor:
    """Return the order by owner (e,) int64, below 2^31, and then by descending value, (e,) int64.

    One sort of whole numbers takes a third of the CPU of two sorts, by value and by owner. Values
    (e,) are compared in float32, where those within 6e-8 of each other, relatively, may be ties:
    these stay in their order.
    """
    bits = value.float().view(torch.int32)
    ascending = torch.where(bits < 0, bits ^ MAGNITUDE, bits)  # whole numbers in the same order
    return ((owner << 32) - ascending).argsort(stable=True)


def _num_drawn(degree: Tensor, sampled: float) -> Tensor:
    """Return how many neighbors are drawn of each degree (R,), (R,) int64."""
    return (sampled * degree.double()).long().clamp(min=1).minimum(degree)


def attentive_mean(
    p: Mapping[str, Tensor], x: Tensor, drawn: DrawnNeighbors, relation: Tensor
) -> Tensor:
    """Return the attentive means of drawn neighbors' embeddings, (R, D); 0 without any.

    Args:
        p: `attention` (2 D, 1) and `relation`, a vector (D,) for each.
        x: (E, D) embeddings.
        drawn: of R users or items.
        relation: (e,) int64 of each entry of the neighborhood.
    """
    sender_weights, relation_weights = p["attention"].split(x.shape[1])
    logits = (x @ sender_weights).index_select(0, drawn.adj.indices.long())
    logits = logits + (p["relation"] @ relation_weights).index_select(0, relation[drawn.entry])
    rows = drawn.adj.row
    largest = logits.detach().new_full((drawn.adj.num_rows, 1), -torch.inf)
    largest.scatter_reduce_(0, rows[:, None], logits.detach(), "amax")  # it cancels
    weight = (logits - largest.index_select(0, rows)).exp()
    total = weight.new_zeros(drawn.adj.num_rows, 1).index_add(0, rows, weight)
    share = weight / total.index_select(0, rows)
    return edge_product(drawn.adj, share, x[:, None]).squeeze(1)
