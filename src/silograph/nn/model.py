"""A model is a stack of convolutions with ReLU and dropout between them.

n: rows. F: features. K: outputs (classes or label bits). C: clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.errors import lookup
from silograph.core.key import Key, keep_probability
from silograph.core.work import report_rows
from silograph.graph.block import ClientBlock, Rows
from silograph.graph.graph import Task
from silograph.nn.conv import CONVS, Params, convolve, internal_messages
from silograph.nn.segment import gradients


@dataclass(frozen=True)
class Model:
    """The shape of a model; its weights are a flat mapping, names like `0.weight`.

    Attributes:
        conv: name in `CONVS`.
        features: F.
        hidden: width of the hidden layers.
        outputs: K.
        layers: number of convolutions.
        dropout: probability with which a hidden activation is dropped in training.
        task: what the outputs mean.
    """

    conv: str
    features: int
    hidden: int
    outputs: int
    layers: int
    dropout: float
    task: Task

    @property
    def widths(self) -> list[int]:
        """F, hidden, ..., K."""
        return [self.features, *[self.hidden] * (self.layers - 1), self.outputs]


def init_weights(model: Model, key: Key, dtype: torch.dtype) -> Params:
    """Return initial weights; drawn in float64, so that dtypes start from the same numbers."""
    conv = lookup(CONVS, model.conv, "convolution")
    return {
        f"{layer}.{name}": value.to(dtype)
        for layer, (inputs, outputs) in enumerate(
            zip(model.widths[:-1], model.widths[1:], strict=True)
        )
        for name, value in conv.init(key.fold(layer), inputs, outputs).items()
    }


def weight_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight, shared form."""
    weights = init_weights(model, Key.of(0), torch.float32)
    return {name: tuple(w.shape) for name, w in weights.items()}


def dropout(x: Tensor, drop: float, row_key: Tensor, key: Key) -> Tensor:
    """Return x (n, D) with entries dropped by key and the rest scaled to keep the mean."""
    keep = key.keep(row_key, x.shape[1], drop)
    return x * keep.to(x.dtype) * (1 / keep_probability(drop))


def forward(
    model: Model, weights: Mapping[str, Tensor], block: ClientBlock, key: Key | None = None
) -> Tensor:
    """Return logits (n, K) from internal edges.

    Args:
        model: the shape.
        weights: shared by all clients, or with a leading dimension C.
        block: the rows.
        key: key of the dropout draws; None turns dropout off.
    """
    conv = lookup(CONVS, model.conv, "convolution")
    messages = internal_messages(block, next(iter(weights.values())).dtype)
    x: Rows = block.x
    for layer in range(model.layers):
        if layer and key is not None and model.dropout > 0:
            assert isinstance(x, Tensor)  # only the input can be sparse
            report_rows(block.off, 2 * x.shape[1] * (1 + gradients(x)))
            x = dropout(x, model.dropout, block.row_key, key.fold("dropout", layer))
        prefix = f"{layer}."
        params = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        x = convolve(conv, params, x, messages)
        if layer < model.layers - 1:
            report_rows(block.off, x.shape[1] * (1 + gradients(x)))
            x = torch.relu(x)
    assert isinstance(x, Tensor)  # at least one layer
    return x
