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

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import NO_STATE, Patched, Ragged, Stacked, State, offsets
from silograph.core.work import report_each, work_for
from silograph.graph.block.block import ClientBlock
from silograph.graph.block.pairs import UNSEEN, kinds, table_rows
from silograph.graph.graph import LabelForm
from silograph.nn.conv import Params
from silograph.nn.conv.base import glorot
from silograph.nn.conv.gat import SLOPE
from silograph.nn.doors import dtype_of
from silograph.nn.forward import dropped
from silograph.nn.mini_batches import batches
from silograph.nn.rating_graph import RatingGraph, rating_graph
from silograph.nn.schedule import Fitted, Training, TrainingInputs
from silograph.nn.segment import edge_product, sparse_product
from silograph.nn.start import start_fields, whole
from silograph.nn.steps import LOSS_FLOPS, own_copy
from silograph.task.ranking import Factors
from silograph.task.registry import task_of

RatingConv = Literal["rating_gcn", "rating_gat"]
EMBEDDING, BIAS = "embedding", "bias"
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
        heads: attention heads of `rating_gat`, side by side in O.
    """

    conv: RatingConv
    hidden: int | tuple[int, ...]
    layers: int
    embedding: int
    dropout: float
    heads: int = 1

    features = FEATURES
    outputs = 1
    task: LabelForm = dataclasses.field(default="rating", init=False)
    staged = None
    one_by_one = True  # clients are few and large
    first_maps = ()  # tables meet the users and items, and are no weights
    source = None

    @property
    def noun(self) -> str:
        """Its convolution."""
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
        return MappingProxyType({**shapes, "head.weight": (self.widths[-1], 1), "head.bias": (1,)})

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return Glorot weights, zero biases and a zero head; drawn in float64."""
        weights: Params = {}
        for name, shape in self.weight_shapes.items():
            drawn = len(shape) == 2 and not name.startswith("head.")
            value = glorot(key.fold(name), *shape) if drawn else torch.zeros(shape)
            weights[name] = value.to(dtype)
        return weights

    def first_tables(self, block: ClientBlock, key: Key) -> dict[str, Ragged]:
        """Return tables before training: embeddings drawn from +-1/sqrt(width), biases of 0.

        Rows of unseen users and items are 0.
        """
        off, dtype = offsets(table_rows(_alone(block))), dtype_of(block)
        found: dict[str, Ragged] = {}
        for name, width in self.table_widths.items():
            zero = torch.zeros(int(off[-1]), width, dtype=dtype, device=off.device)
            found[name] = Ragged(zero, off)
        drawn = 2 * key.uniform(rating_graph(block, dtype).key, self.embedding) - 1
        drawn[:UNSEEN] = 0
        table = (drawn * self.embedding**-0.5).to(dtype)
        return {**found, EMBEDDING: Ragged(table, off)}

    def forward(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Tensor:
        """Return predictions (n, 1) of one client, 0 at users and items.

        Raises:
            ProtocolError: several clients, or not the tables of this one.
        """
        graph = rating_graph(_alone(block), dtype_of(block))
        values = self._values(weights, block, tables)
        report_each(_pass_flops(self, graph, len(graph.row), passes=1))
        found = self._ratings(values, graph, graph.user, graph.item, None)
        out = found.new_zeros(len(block.y), 1)
        out[graph.row] = found
        return out

    def factors(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Factors:
        """Return what orders the items of one client; see `RankingModel`."""
        graph = rating_graph(_alone(block), dtype_of(block))
        values = self._values(weights, block, tables)
        report_each(_pass_flops(self, graph, 0, passes=1))
        h, bias = self._nodes(values, graph, None)
        rows = (kinds(block.x) > 0).any(dim=1)
        nodes = h.new_zeros(len(block.y), h.shape[1])
        nodes[rows] = h
        biases = bias.new_zeros(len(block.y))
        biases[rows] = bias[:, 0]
        return Factors(nodes * values["head.weight"][:, 0], nodes, biases)

    def _values(
        self, weights: Mapping[str, Tensor], block: ClientBlock, tables: State
    ) -> dict[str, Tensor]:
        """Return one client's weights and tables."""
        shapes = self.weight_shapes
        own = {name: w if w.shape == shapes[name] else w[0] for name, w in weights.items()}
        return {**own, **_checked(self, block, tables)}

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train one client; every step sends messages along all of its edges."""
        return _fit(self, training, inputs)

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values."""
        return dataclasses.asdict(self)

    def _ratings(
        self,
        p: Mapping[str, Tensor],
        graph: RatingGraph,
        user: Tensor,
        item: Tensor,
        key: Key | None,
    ) -> Tensor:
        """Return predictions (R, 1) of pairs, from weights and tables."""
        h, bias = self._nodes(p, graph, key)
        both = h.index_select(0, user) * h.index_select(0, item)
        sums = bias.index_select(0, user) + bias.index_select(0, item)
        return graph.mean + sums + both @ p["head.weight"] + p["head.bias"]

    def _nodes(
        self, p: Mapping[str, Tensor], graph: RatingGraph, key: Key | None
    ) -> tuple[Tensor, Tensor]:
        """Return last layers (E, O) and biases (E, 1) of users and items."""
        h = p[EMBEDDING].index_select(0, graph.slot)
        bias = p[BIAS].index_select(0, graph.slot)
        convolve = _gcn if self.conv == "rating_gcn" else _gat
        for number in range(self.layers):
            if number and self.dropout and key is not None:
                rows = graph.key[graph.slot]
                h = dropped(h, self.dropout, rows, key.fold("layer", number))
            own = {name: p[f"{number}.{name}"] for name in _names(self, number)}
            h = convolve(own, h, graph)
            h = h.relu() if number < self.layers - 1 else h
        return h, bias


def _names(model: RatingModel, number: int) -> list[str]:
    """Return the names of a layer's weights."""
    begins = f"{number}."
    return [name.removeprefix(begins) for name in model.weight_shapes if name.startswith(begins)]


def _gcn(p: Mapping[str, Tensor], h: Tensor, graph: RatingGraph) -> Tensor:
    """Return sum over j, i itself too, of (h_j W + e_ij V) / sqrt(d_i d_j), plus a bias, (E, O).

    Kipf and Welling, ICLR 2017, eq. 2, with a term of the edge e_ij. That term is linear in
    constants, so it needs one product for each node and none for each edge.
    """
    summed = sparse_product(graph.gcn, h @ p["weight"], symmetric=True)
    return summed + graph.gcn_chance @ p["edge"] + p["bias"]


def _gat(p: Mapping[str, Tensor], h: Tensor, graph: RatingGraph) -> Tensor:
    """Return attentive means over neighbors and self, heads side by side, (E, O).

    Veličković et al., ICLR 2018, eq. 1 to 5, with a term e_ij a of the edge before the leaky ReLU,
    0 for the node itself, as in PyG's GATConv with `edge_dim`.
    """
    z, heads = h @ p["weight"], p["sender"].shape[0]
    apart = z.view(len(z), heads, -1)
    sent, heard = ((apart * p[end]).sum(dim=2) for end in ("sender", "receiver"))
    rows, columns = graph.adj.row, graph.adj.indices.long()
    told = sent.index_select(0, columns) + heard.index_select(0, rows) + graph.chance @ p["edge"]
    edge, loop = leaky_relu(told, SLOPE), leaky_relu(sent + heard, SLOPE)
    where = rows[:, None].expand_as(edge)
    top = loop.detach().scatter_reduce(0, where, edge.detach(), "amax")  # it cancels
    edge, loop = (edge - top.index_select(0, rows)).exp(), (loop - top).exp()
    summed = edge_product(graph.adj, edge, apart) + loop[..., None] * apart
    return (summed / loop.index_add(0, rows, edge)[..., None]).flatten(1) + p["bias"]


def _alone(block: ClientBlock) -> ClientBlock:
    if block.num_clients != 1:
        raise ProtocolError(f"expected a block of one client for ratings, got {block.num_clients}")
    return block


def _checked(model: RatingModel, block: ClientBlock, tables: State) -> Params:
    """Return a client's tables; raise `ProtocolError` unless they are of this client and model."""
    rows, dtype = int(table_rows(block).sum()), dtype_of(block)
    for name, width in model.table_widths.items():
        found = tables[name].t if name in tables else None
        if found is None or found.shape != (rows, width) or found.dtype is not dtype:
            got = "none" if found is None else f"{tuple(found.shape)} in {found.dtype}"
            raise ProtocolError(
                f"expected a table {name} ({rows}, {width}) in {dtype}, got {got}: tables stay "
                "with their client and its training ratings"
            )
    return {name: tables[name].t for name in model.table_widths}


def _fit(model: RatingModel, training: Training, inputs: TrainingInputs) -> Fitted:
    block, start, memory = _alone(inputs.block), inputs.start, inputs.memory
    key, tables = inputs.key, inputs.tables
    optimizer, schedule = training.optimizer, training.schedule
    graph, names = rating_graph(block, dtype_of(block)), tuple(model.weight_shapes)
    weights = {name: whole(field) for name, field in start_fields(model, start, 1).items()}
    begun = {name: w.clone() for name, w in weights.items()} if training.corrections else {}
    # Tables are one client's, so they stand beside its weights (1, ...) in every step.
    values = weights | {n: own_copy(t)[None] for n, t in _checked(model, block, tables).items()}
    state = optimizer.init(values)
    if memory is not None:
        kept = {n: own_copy(f.t)[None] for n, f in tables.items() if n not in model.table_widths}
        state |= {n: own_copy(m) for n, m in memory.items()} | kept
    position = torch.full((len(block.y),), -1, device=block.y.device)
    position[graph.row] = torch.arange(len(graph.row), device=block.y.device)
    total, steps = torch.zeros(1, dtype=torch.float64, device=block.y.device), 0
    for epoch in range(schedule.epochs if int(block.num_train) else 0):
        total = torch.zeros_like(total)
        epoch_key = key.fold("epoch", epoch)
        for number, seeds in enumerate(batches(block, schedule.batch_size, epoch_key)):
            leaves = {name: w.detach()[0].requires_grad_() for name, w in values.items()}
            pair, step_key = position[seeds], epoch_key.fold("batch", number)
            said = model._ratings(leaves, graph, graph.user[pair], graph.item[pair], step_key)
            loss = task_of(model.task).loss(said, block.y[seeds]).mean()
            found = torch.autograd.grad(loss, list(leaves.values()))
            grads = {name: g[None] for name, g in zip(leaves, found, strict=True)}
            changed = training.correct({n: grads[n] for n in names}, weights, begun)
            optimizer.step_(values, grads | changed, state)
            report_each(_pass_flops(model, graph, len(seeds), passes=3) + training.step_flops)
            report_each(float(optimizer.flops * sum(values[n].numel() for n in model.table_widths)))
            steps += 1
            total = total + loss.detach().double() * len(seeds) / block.num_train
    off = offsets(table_rows(block))
    new: dict[str, Ragged] = {n: Ragged(values[n][0], off) for n in model.table_widths}
    with torch.no_grad(), work_for(Kind.EVALUATION):
        logits = model.forward({n: values[n] for n in names}, block, tables=new)
    moments: Params = {}
    if memory is not None:
        moments = {n: state[n] for n in memory}
        new |= {n: Ragged(t[0], off) for n, t in state.items() if n not in memory}
    fields: dict[str, Stacked | Patched] = {n: Stacked(values[n]) for n in names}
    loss_of = total.to(logits.dtype)
    return Fitted(fields, moments, loss_of, logits, torch.tensor([steps]), tables=new)


def _pass_flops(model: RatingModel, graph: RatingGraph, ratings: int, *, passes: int) -> float:
    """Return the floating-point operations of a pass, or of one forth and back (3 passes)."""
    nodes, edges, flops = len(graph.slot), graph.adj.nnz, 0
    for inputs, outputs in itertools.pairwise(model.widths):
        flops += nodes * (2 * inputs * outputs + 4 * outputs) + 2 * edges * outputs
    flops += ratings * (3 * model.widths[-1] + 3)
    return float(passes * flops + (passes > 1) * LOSS_FLOPS * ratings)
