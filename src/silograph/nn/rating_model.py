"""Models of ratings: embeddings and biases that stay with the client, and convolutions that travel.

    z_v = row of v in the client's table of embeddings
    h   = convolutions of z along ratings and trust, each with the edge's transition probabilities
    r   = mean of the client's training ratings + b_u + b_i + (h_u * h_i) w + c

The two convolutions are those of Hongli Xu, Xianjun Gao, Jianchun Liu, Qianpiao Ma and Liusheng
Huang, "FedACS: An adaptive client selection framework for communication-efficient federated graph
learning", IEEE TMC 2025, as far as it says; the head is ours, as the paper names none. w and
c begin at 0, as biases do, so that the first prediction is the client's mean.

Only weights (convolutions, w and c) are sent. Tables hold a row for each user and item with a
training rating at the client, and one each for all other users and items, which no step moves.

E: users and items of the client. O: width of a layer. t: rows of a table. R: ratings in a step.
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
from torch.nn.functional import leaky_relu

from silograph.core.key import Key
from silograph.core.payload import NO_STATE, Ragged, State
from silograph.core.text import state_of_fields
from silograph.core.work import report_each
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import LabelForm
from silograph.nn.conv import SLOPE, Params, glorot
from silograph.nn.fit import LOSS_FLOPS, Fitted, Training, TrainingInputs, dtype_of
from silograph.nn.forward import dropped
from silograph.nn.rating_steps import (
    RatingGraph,
    at_nodes,
    at_ratings,
    draw_table,
    fit_pairs,
    rating_graph,
    require_one_client,
    values_of,
)
from silograph.nn.segment import edge_product, sparse_product
from silograph.nn.shared_items import BIAS, EMBEDDING, ITEMS, ends, item_shape
from silograph.task.rating_value import Factors

RatingConv = Literal["rating_gcn", "rating_gat"]
HEAD_WEIGHT, HEAD_BIAS = "head.weight", "head.bias"
FEATURES = 2  # what says whether a node is a user or an item


@dataclass(frozen=True)
class RatingModel:
    """The shape of a model of ratings.

    Attributes:
        conv: `rating_gcn` or `rating_gat`.
        hidden: O of every layer, or of each.
        layers: number of convolutions.
        embedding: width of the table of embeddings.
        dropout: probability with which an entry between two layers is dropped in training.
        items: rows of items that travel in place of tables (`silograph.nn.shared_items`); 0: none.
        heads: attention heads of `rating_gat`, side by side in O.
    """

    conv: RatingConv
    hidden: int | tuple[int, ...]
    layers: int
    embedding: int
    dropout: float
    items: int = 0
    heads: int = 1

    features = FEATURES
    outputs = 1
    task: LabelForm = dataclasses.field(default="rating", init=False)
    staged = None
    single_client_only = True  # clients are few and large
    meets_all = False
    solved_flops = 0
    first_maps = ()  # tables meet the users and items, and are no weights
    source = None

    __getstate__ = state_of_fields

    @property
    def noun(self) -> str:
        """The name of its convolution, in messages."""
        return f"model {self.conv}"

    @property
    def widths(self) -> list[int]:
        """Widths of the embeddings and of every layer."""
        hidden = (self.hidden,) * self.layers if isinstance(self.hidden, int) else self.hidden
        return [self.embedding, *hidden]

    @property
    def table_widths(self) -> Mapping[str, int]:
        """Columns of the tables that a client keeps."""
        return {EMBEDDING: self.embedding, BIAS: 1}

    @cached_property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, shared form."""
        shapes: dict[str, tuple[int, ...]] = {}
        for number, (inputs, outputs) in enumerate(itertools.pairwise(self.widths)):
            shapes[f"{number}.weight"] = inputs, outputs
            if self.conv == "rating_gat":
                for end in ("sender", "receiver"):
                    shapes[f"{number}.{end}"] = self.heads, outputs // self.heads
            edge = self.heads if self.conv == "rating_gat" else outputs
            shapes[f"{number}.edge"] = 2, edge
            shapes[f"{number}.bias"] = (outputs,)
        shapes |= {HEAD_WEIGHT: (self.widths[-1], 1), HEAD_BIAS: (1,)}
        return MappingProxyType({**shapes, **item_shape(self.items, self.embedding)})

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return Glorot weights, zero biases and a zero head; drawn in float64."""
        weights: Params = {}
        for name, shape in self.weight_shapes.items():
            is_drawn = len(shape) == 2 and not name.startswith("head.") and name != ITEMS
            value = glorot(key.fold(name), *shape) if is_drawn else torch.zeros(shape)
            weights[name] = value.to(dtype)
        return weights

    def first_tables(self, block: ClientBlock, key: Key) -> dict[str, Ragged]:
        """Return tables before training: embeddings drawn from +-1/sqrt(width), biases of 0.

        Rows of unseen users and items are 0.
        """
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
        report_each(_pass_flops(self, graph, len(graph.row), passes=1))
        predictions = self._predict_pairs(values, graph, graph.user, graph.item, None)
        return at_ratings(block, graph.row, predictions)

    def factors(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Factors:
        """Return the factors that rank the items of one client; see `RankingModel`."""
        graph = rating_graph(require_one_client(block), dtype_of(block))
        values = values_of(self, weights, block, tables)
        report_each(_pass_flops(self, graph, 0, passes=1))
        h, bias = self._embed_nodes(values, graph, None)
        nodes, biases = at_nodes(block, h), at_nodes(block, bias[:, 0])
        level = biases + graph.mean + values[HEAD_BIAS]
        return Factors(nodes * values[HEAD_WEIGHT][:, 0], nodes, biases, level)

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train one client; every step sends messages along all of its edges."""
        return fit_pairs(self, training, inputs)

    def predict_pairs(
        self, p: Mapping[str, Tensor], block: ClientBlock, pair: Tensor, key: Key | None
    ) -> Tensor:
        """Return predictions of ratings in a step; see `PairModel`."""
        graph = rating_graph(block, dtype_of(block))
        return self._predict_pairs(p, graph, graph.user[pair], graph.item[pair], key)

    def flops(self, block: ClientBlock, ratings: int, *, passes: int) -> float:
        """Return the operations of a pass; see `PairModel`."""
        return _pass_flops(self, rating_graph(block, dtype_of(block)), ratings, passes=passes)

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values."""
        return {"kind": "graph", **dataclasses.asdict(self)}

    def _predict_pairs(
        self,
        p: Mapping[str, Tensor],
        graph: RatingGraph,
        user: Tensor,
        item: Tensor,
        key: Key | None,
    ) -> Tensor:
        """Return predictions (R, 1) of pairs, from weights and tables."""
        h, bias = self._embed_nodes(p, graph, key)
        products = h.index_select(0, user) * h.index_select(0, item)
        sums = bias.index_select(0, user) + bias.index_select(0, item)
        return graph.mean + sums + products @ p[HEAD_WEIGHT] + p[HEAD_BIAS]

    def _embed_nodes(
        self, p: Mapping[str, Tensor], graph: RatingGraph, key: Key | None
    ) -> tuple[Tensor, Tensor]:
        """Return last layers (E, O) and biases (E, 1) of users and items."""
        h, bias = ends(p, graph)
        convolve = _gcn if self.conv == "rating_gcn" else _gat
        for number in range(self.layers):
            if number and self.dropout and key is not None:
                rows = graph.key[graph.slot]
                h = dropped(h, self.dropout, rows, key.fold("layer", number))
            layer_weights = {name: p[f"{number}.{name}"] for name in _layer_names(self, number)}
            h = convolve(layer_weights, h, graph)
            h = h.relu() if number < self.layers - 1 else h
        return h, bias


def _layer_names(model: RatingModel, number: int) -> list[str]:
    """Return the names of a layer's weights."""
    prefix = f"{number}."
    return [name.removeprefix(prefix) for name in model.weight_shapes if name.startswith(prefix)]


def _gcn(p: Mapping[str, Tensor], h: Tensor, graph: RatingGraph) -> Tensor:
    """Return sum over j, i itself too, of (h_j W + e_ij V) / sqrt(d_i d_j), plus a bias, (E, O).

    Kipf and Welling, ICLR 2017, eq. 2, with a term of the edge e_ij. That term is linear in
    constants, so it needs one product for each node and none for each edge.
    """
    neighbor_sum = sparse_product(graph.gcn, h @ p["weight"], symmetric=True)
    return neighbor_sum + torch.addmm(p["bias"], graph.gcn_chance, p["edge"])


def _gat(p: Mapping[str, Tensor], h: Tensor, graph: RatingGraph) -> Tensor:
    """Return attentive means over neighbors and self, heads side by side, (E, O).

    Veličković et al., ICLR 2018, eq. 1 to 5, with a term e_ij a of the edge before the leaky ReLU,
    0 for the node itself, as in PyG's GATConv with `edge_dim`.
    """
    z, heads = h @ p["weight"], p["sender"].shape[0]
    by_head = z.view(len(z), heads, -1)
    sender_logits, receiver_logits = (
        (by_head * p[end]).sum(dim=2) for end in ("sender", "receiver")
    )
    rows, columns = graph.adj.row, graph.adj.indices.long()
    logits = (
        sender_logits.index_select(0, columns)
        + receiver_logits.index_select(0, rows)
        + graph.chance @ p["edge"]
    )
    edge, loop = leaky_relu(logits, SLOPE), leaky_relu(sender_logits + receiver_logits, SLOPE)
    receiver = rows[:, None].expand_as(edge)
    largest = loop.detach().scatter_reduce(0, receiver, edge.detach(), "amax")  # it cancels
    edge, loop = (edge - largest.index_select(0, rows)).exp(), (loop - largest).exp()
    weighted_sum = edge_product(graph.adj, edge, by_head) + loop[..., None] * by_head
    return (weighted_sum / loop.index_add(0, rows, edge)[..., None]).flatten(1) + p["bias"]


def _pass_flops(model: RatingModel, graph: RatingGraph, ratings: int, *, passes: int) -> float:
    """Return the floating-point operations of a pass, or of one forth and back (3 passes)."""
    nodes, edges, flops = len(graph.slot), graph.adj.nnz, 0
    for inputs, outputs in itertools.pairwise(model.widths):
        flops += nodes * (2 * inputs * outputs + 4 * outputs) + 2 * edges * outputs
    flops += ratings * (3 * model.widths[-1] + 3)
    return float(passes * flops + (passes > 1) * LOSS_FLOPS * ratings)
