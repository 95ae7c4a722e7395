"""A model is a stack of convolutions with ReLU and dropout between them.

n: rows. F: features. K: outputs (classes or label bits). C: clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from silograph.core.errors import lookup
from silograph.core.key import Key, keep_probability
from silograph.core.work import report_rows
from silograph.graph.block import ClientBlock, Rows
from silograph.graph.graph import Task
from silograph.nn.conv import CONVS, Messages, Params, convolve, internal_messages
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


def first_maps(model: Model) -> tuple[str, ...]:
    """Return the names of the weights that meet the features."""
    return tuple(f"0.{name}" for name in lookup(CONVS, model.conv, "convolution").maps)


@lru_cache(maxsize=64)  # shapes are asked for in every round
def weight_shapes(model: Model) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every weight, shared form."""
    weights = init_weights(model, Key.of(0), torch.float32)
    return MappingProxyType({name: tuple(w.shape) for name, w in weights.items()})


def dropout(x: Tensor, drop: float, row_key: Tensor, key: Key) -> Tensor:
    """Return x (n, D) with entries dropped by key and the rest scaled to keep the mean."""
    keep = key.keep(row_key, x.shape[1], drop)
    return x * keep.to(x.dtype) * (1 / keep_probability(drop))


@dataclass(frozen=True, eq=False)
class Pass:
    """What one pass through a model of L layers reads.

    Attributes:
        x: features of the rows that enter layer 0.
        messages: L of them; the rows that hear in one are those that send in the next.
        row_key: (L) keys of the rows that enter each layer.
    """

    x: Rows
    messages: tuple[Messages, ...]
    row_key: tuple[Tensor, ...]


def whole_pass(block: ClientBlock, layers: int, dtype: torch.dtype) -> Pass:
    """Return the pass of all rows of a block along all internal edges."""
    messages = internal_messages(block, dtype)
    return Pass(block.x, (messages,) * layers, (block.row_key,) * layers)


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
    dtype = next(iter(weights.values())).dtype
    return forward_pass(model, weights, whole_pass(block, model.layers, dtype), key)


def forward_pass(
    model: Model, weights: Mapping[str, Tensor], inputs: Pass, key: Key | None
) -> Tensor:
    """Return logits (r, K) of the rows that hear in the last layer; see `forward`."""
    conv = lookup(CONVS, model.conv, "convolution")
    x: Rows = inputs.x
    for layer, messages in enumerate(inputs.messages):
        if layer and key is not None and model.dropout > 0:
            assert isinstance(x, Tensor)  # only the input can be sparse
            report_rows(messages.sender_off, 2 * x.shape[1] * (1 + gradients(x)))
            x = dropout(x, model.dropout, inputs.row_key[layer], key.fold("dropout", layer))
        prefix = f"{layer}."
        params = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        x = convolve(conv, params, x, messages)
        if layer < model.layers - 1:
            report_rows(messages.off, x.shape[1] * (1 + gradients(x)))
            x = torch.relu(x)
    assert isinstance(x, Tensor)  # at least one layer
    return x
