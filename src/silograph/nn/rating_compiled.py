"""The GCN of ratings by the compiled kernels: the gradient of a step, and predictions.

Steps, optimizers and tables are those of `silograph.nn.rating_steps`, products and sums over edges
torch's. Rows of the table are mapped before users and items sum over them, which is the same. Users
without training ratings and trust have the same embeddings in every layer, so they share one row.
So do items without training ratings.

E: users and items. D: distinct ones. O: width of a layer. R: ratings. t: rows of the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from silograph.core.key import Key, keep_probability
from silograph.core.payload import State
from silograph.core.work import report_each
from silograph.graph.block.block import ClientBlock
from silograph.graph.csr import CSR
from silograph.nn.conv import Params
from silograph.nn.fit import Fitted, Training, TrainingInputs, dtype_of
from silograph.nn.forward import dropped
from silograph.nn.kernel_block import contiguous
from silograph.nn.kernels import ratings as kernels
from silograph.nn.rating_model import HEAD_BIAS, HEAD_WEIGHT, RatingModel
from silograph.nn.rating_steps import (
    RatingGraph,
    at_ratings,
    fit_pairs,
    rating_graph,
    require_one_client,
    values_of,
)
from silograph.nn.segment import sparse_product
from silograph.nn.shared_items import BIAS, EMBEDDING


def fit(training: Training, inputs: TrainingInputs) -> Fitted:
    """Train one client; see `fit_pairs`."""
    model = training.model
    assert isinstance(model, RatingModel)  # see `CompiledBackend.trainer`
    passes = CompiledPasses(model, require_one_client(inputs.block))
    return fit_pairs(model, training, inputs, passes)


def predict(
    model: RatingModel, weights: Mapping[str, Tensor], block: ClientBlock, tables: State
) -> Tensor:
    """Return predictions (n, 1) of one client; see `RatingModel.forward`."""
    return CompiledPasses(model, require_one_client(block)).predict(weights, tables)


@dataclass(frozen=True, eq=False)
class DistinctNodes:
    """The users and items of one client; those with the same embeddings in every layer are one.

    Attributes:
        slot: (D,) int64 row of each in the tables.
        key: (D,) int64 counter of its draws.
        features: (D, 2) sums of transition probabilities, `RatingGraph.gcn_chance`.
        edges: (D, D) weights of the GCN.
        table_edges: (D, t) the same edges, whose columns are rows of the table.
        user: (R,) int64 which of the D is the user of each rating of the client.
        item: (R,) int64 which is its item.
    """

    slot: Tensor
    key: Tensor
    features: Tensor
    edges: CSR
    table_edges: CSR
    user: Tensor
    item: Tensor

    @staticmethod
    def of(graph: RatingGraph) -> "DistinctNodes":
        """Return the distinct users and items; those without edges are equal if their rows are."""
        count = len(graph.slot)
        label = torch.where(graph.adj.degree > 0, len(graph.key) + torch.arange(count), graph.slot)
        _, first, inverse = np.unique(label.numpy(), return_index=True, return_inverse=True)
        rows, number = torch.from_numpy(first), torch.from_numpy(inverse)
        edges = CSR.from_scipy(graph.gcn.scipy()[first][:, first])
        slot = graph.slot[rows]
        return DistinctNodes(
            slot,
            graph.key[slot],
            graph.gcn_chance[rows],
            edges,
            edges.with_columns(slot[edges.indices.long()], len(graph.key)),
            number[graph.user],
            number[graph.item],
        )


class CompiledPasses:
    """The GCN at one client; see `PairPasses`."""

    def __init__(self, model: RatingModel, block: ClientBlock) -> None:
        self._model, self._block = model, block
        self._graph = graph = rating_graph(block, dtype_of(block))
        self._nodes = block.once("distinct nodes", DistinctNodes, lambda: DistinctNodes.of(graph))

    def gradient(
        self, values: Params, seeds: Tensor, pair: Tensor, key: Key
    ) -> tuple[Tensor, Params]:
        """See `PairPasses`."""
        nodes = self._nodes
        layer_inputs = self._layer_inputs(values, key)
        pairs = self._pairs(values, layer_inputs[-1], nodes.user[pair], nodes.item[pair])
        grads = {name: torch.empty_like(w) for name, w in values.items()}
        g = torch.empty_like(layer_inputs[-1])
        bias = g.new_empty(len(nodes.slot), 1)
        head_gradient = kernels.HeadGradient(
            h=g.numpy(),
            bias=bias.numpy(),
            w=grads[HEAD_WEIGHT].numpy(),
            level=grads[HEAD_BIAS].numpy(),
        )
        y = contiguous(self._block.y[seeds], g.numpy().dtype)
        loss = kernels.loss_gradient(pairs, y, head_gradient)
        grads[BIAS] = torch.zeros_like(values[BIAS]).index_add_(0, nodes.slot, bias)
        for layer in reversed(range(self._model.layers)):
            g = self._backward_layer(layer, values, layer_inputs, g, grads)
        grads[EMBEDDING] = g
        return torch.tensor(loss, dtype=torch.float64), grads

    def predict(self, weights: Mapping[str, Tensor], tables: State) -> Tensor:
        """See `PairPasses`."""
        graph, nodes = self._graph, self._nodes
        values = values_of(self._model, weights, self._block, tables)
        report_each(self._model.flops(self._block, len(graph.row), passes=1))
        h = self._layer_inputs(values, None)[-1]
        out = h.new_empty(len(graph.row), 1)
        kernels.predict(self._pairs(values, h, nodes.user, nodes.item), out.numpy())
        return at_ratings(self._block, graph.row, out)

    def _layer_inputs(self, values: Params, key: Key | None) -> list[Tensor]:
        """Return the inputs of each layer, first rows of the table, and the outputs of the last."""
        nodes, model, layer_inputs = self._nodes, self._model, [values[EMBEDDING]]
        for layer in range(model.layers):
            mapped = layer_inputs[-1] @ values[f"{layer}.weight"]
            edges = nodes.edges if layer else nodes.table_edges
            out = sparse_product(edges, mapped, symmetric=True)
            edge, bias = (contiguous(values[f"{layer}.{name}"]) for name in ("edge", "bias"))
            kernels.finish(
                out.numpy(), nodes.features.numpy(), edge, bias, layer < model.layers - 1
            )
            if layer < model.layers - 1 and model.dropout and key is not None:
                out = dropped(out, model.dropout, nodes.key, key.fold("layer", layer + 1))
            layer_inputs.append(out)
        return layer_inputs

    def _backward_layer(
        self, layer: int, values: Params, layer_inputs: list[Tensor], g: Tensor, grads: Params
    ) -> Tensor:
        """Fill the gradient of a layer's weights; return the gradient of its inputs."""
        nodes, model = self._nodes, self._model
        edge, bias = (grads[f"{layer}.{name}"].numpy() for name in ("edge", "bias"))
        relu, scale = layer < model.layers - 1, 1 / keep_probability(model.dropout)
        kernels.finish_back(
            layer_inputs[layer + 1].numpy(),
            g.numpy(),
            nodes.features.numpy(),
            edge,
            bias,
            relu,
            scale,
        )
        mapped = sparse_product(nodes.edges if layer else nodes.table_edges.transposed, g)
        torch.mm(layer_inputs[layer].T, mapped, out=grads[f"{layer}.weight"])
        return mapped @ values[f"{layer}.weight"].T

    def _pairs(self, values: Params, h: Tensor, user: Tensor, item: Tensor) -> kernels.PairArrays:
        """Return ratings (R,) with embeddings and biases of their ends for the kernels."""
        bias, w = values[BIAS].index_select(0, self._nodes.slot), values[HEAD_WEIGHT]
        level = self._graph.mean + float(values[HEAD_BIAS])
        return kernels.PairArrays(
            user.numpy(), item.numpy(), h.numpy(), bias.numpy(), contiguous(w), level
        )
