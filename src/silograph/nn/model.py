"""A model is a row of stages: convolutions, with ReLU and dropout between them.

n: rows. F: features. K: outputs (classes or label bits). C: clients.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from silograph.core.errors import lookup
from silograph.core.key import Key, keep_probability
from silograph.core.work import report_rows
from silograph.graph.block.block import ClientBlock, Rows
from silograph.graph.graph import LabelForm
from silograph.nn import own_module
from silograph.nn.conv import (
    GAT,
    GCN,
    GIN,
    MLP,
    SAGE,
    AnyConv,
    GraphConv,
    Messages,
    Params,
    Propagation,
    convolve,
    internal_messages,
)
from silograph.nn.own_module import ModuleModel
from silograph.nn.segment import gradients


@dataclass(frozen=True)
class Model:
    """The shape of a model; its weights are a flat mapping, names like `0.weight`.

    Attributes:
        conv: name in `MODELS`.
        features: F.
        hidden: width of the hidden layers.
        outputs: K.
        layers: number of layers with weights.
        dropout: probability with which a hidden activation is dropped in training.
        task: what the outputs mean.
        residual: whether hidden layers add their input to their output.
        heads: attention heads of `gat`.
        hops: propagation steps of `appnp`.
        teleport: weight of a prediction in each of them.
    """

    conv: str
    features: int
    hidden: int
    outputs: int
    layers: int
    dropout: float
    task: LabelForm
    residual: bool = False
    heads: int = 1
    hops: int = 0
    teleport: float = 0.0

    @property
    def widths(self) -> list[int]:
        """F, hidden, ..., K."""
        return [self.features, *[self.hidden] * (self.layers - 1), self.outputs]


@dataclass(frozen=True)
class Stage:
    """A step through a model with at most one sum over neighbors.

        h = enter(x)                 dropout
        h = convolve(conv, h)        see `silograph.nn.conv.base`
        x = leave(h)                 ReLU, the stage's input, the restart

    Attributes:
        conv: what is in the middle.
        inputs: I.
        outputs: O.
        drop: whether entries of x are dropped in training.
        relu: whether ReLU follows.
        skip: whether x, before dropout, is added after ReLU.
        teleport: weight of what entered the first stage that has one; it is added.
    """

    conv: AnyConv
    inputs: int
    outputs: int
    drop: bool
    relu: bool
    skip: bool = False
    teleport: float = 0.0


def _layers(model: Model, conv: Callable[[bool], AnyConv]) -> tuple[Stage, ...]:
    """Return layers with ReLU and dropout between them; `conv` is told if it is the last."""
    last = model.layers - 1
    return tuple(
        Stage(
            conv(layer == last),
            inputs,
            outputs,
            drop=layer > 0,
            relu=layer < last,
            # Kipf and Welling, ICLR 2017, eq. 14, where widths are equal.
            skip=model.residual and 0 < layer < last,
        )
        for layer, (inputs, outputs) in enumerate(itertools.pairwise(model.widths))
    )


def _appnp(model: Model) -> tuple[Stage, ...]:
    """Return an MLP and then `hops` steps that mix its predictions (see `Propagation`)."""
    step = Stage(
        Propagation(model.teleport),
        model.outputs,
        model.outputs,
        drop=False,
        relu=False,
        teleport=model.teleport,
    )
    return _layers(model, lambda _: MLP()) + (step,) * model.hops


MODELS: dict[str, Callable[[Model], tuple[Stage, ...]]] = {
    "gcn": lambda model: _layers(model, lambda _: GCN()),
    "sage": lambda model: _layers(model, lambda _: SAGE()),
    "graphconv": lambda model: _layers(model, lambda _: GraphConv()),
    "gin": lambda model: _layers(model, lambda _: GIN(model.hidden)),
    "gat": lambda model: _layers(model, lambda last: GAT(model.heads, concat=not last)),
    "appnp": _appnp,
    "mlp": lambda model: _layers(model, lambda _: MLP()),
}


@lru_cache(maxsize=64)
def stages(model: Model) -> tuple[Stage, ...]:
    """Return the stages of a model; weights of stage i are named `i.NAME`.

    Raises:
        ConfigError: no such model.
    """
    return lookup(MODELS, model.conv, "model")(model)


def num_sums(model: Model) -> int:
    """Return the number of stages that sum over neighbors: how far a node hears."""
    return sum(stage.conv.sums for stage in stages(model))


AnyModel = Model | ModuleModel


def init_weights(model: AnyModel, key: Key, dtype: torch.dtype) -> Params:
    """Return initial weights; drawn in float64, so that dtypes start from the same numbers."""
    if isinstance(model, ModuleModel):
        return own_module.init_weights(model, key, dtype)
    return {
        f"{number}.{name}": value.to(dtype)
        for number, stage in enumerate(stages(model))
        for name, value in stage.conv.init(key.fold(number), stage.inputs, stage.outputs).items()
    }


def first_maps(model: AnyModel) -> tuple[str, ...]:
    """Return the names of the weights that meet the features, and meet them linearly."""
    if isinstance(model, ModuleModel):
        return ()  # nobody knows
    return tuple(f"0.{name}" for name in stages(model)[0].conv.maps)


@lru_cache(maxsize=64)  # shapes are asked for in every round
def weight_shapes(model: AnyModel) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every weight, shared form."""
    if isinstance(model, ModuleModel):
        return own_module.weight_shapes(model)
    weights = init_weights(model, Key.of(0), torch.float32)
    return MappingProxyType({name: tuple(w.shape) for name, w in weights.items()})


def dropout(x: Tensor, drop: float, row_key: Tensor, key: Key) -> Tensor:
    """Return x (n, D) with entries dropped by key and the rest scaled to keep the mean."""
    keep = key.keep(row_key, x.shape[1], drop)
    return x * keep.to(x.dtype) * (1 / keep_probability(drop))


@dataclass(frozen=True, eq=False)
class Pass:
    """What one pass through a model of L stages reads.

    Attributes:
        x: features of the rows that enter stage 0.
        messages: L of them; the rows that hear in one are those that send in the next.
        row_key: (L) keys of the rows that enter each stage.
    """

    x: Rows
    messages: tuple[Messages, ...]
    row_key: tuple[Tensor, ...]


def whole_pass(model: Model, block: ClientBlock, dtype: torch.dtype) -> Pass:
    """Return the pass of all rows of a block along all internal edges."""
    messages, count = internal_messages(block, dtype), len(stages(model))
    return Pass(block.x, (messages,) * count, (block.row_key,) * count)


def forward(
    model: AnyModel, weights: Mapping[str, Tensor], block: ClientBlock, key: Key | None = None
) -> Tensor:
    """Return logits (n, K) from internal edges.

    Args:
        model: the shape.
        weights: shared by all clients, or with a leading dimension C.
        block: the rows.
        key: key of the dropout draws; None turns dropout off.
    """
    if isinstance(model, ModuleModel):
        assert key is None  # its training is elsewhere: silograph.nn.fit_module
        return own_module.forward(model, weights, block)
    dtype = next(iter(weights.values())).dtype
    return forward_pass(model, weights, whole_pass(model, block, dtype), key)


def forward_pass(
    model: Model, weights: Mapping[str, Tensor], inputs: Pass, key: Key | None
) -> Tensor:
    """Return logits (r, K) of the rows that hear in the last stage; see `forward`."""
    x: Rows = inputs.x
    origin: Tensor | None = None
    for number, stage in enumerate(stages(model)):
        messages, prefix = inputs.messages[number], f"{number}."
        params = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        h = x
        if stage.drop and key is not None and model.dropout > 0:
            assert isinstance(x, Tensor)  # only the input can be sparse
            report_rows(messages.sender_off, 2 * x.shape[1] * (1 + gradients(x)))
            h = dropout(x, model.dropout, inputs.row_key[number], key.fold("dropout", number))
        if stage.teleport:
            assert isinstance(x, Tensor)  # linear stages come first
            origin = messages.own_of(x if origin is None else origin)
        x = leave(stage, convolve(stage.conv, params, h, messages), x, origin, messages)
    assert isinstance(x, Tensor)  # at least one stage
    return x


def leave(stage: Stage, out: Tensor, x: Rows, origin: Tensor | None, messages: Messages) -> Tensor:
    """Return what leaves a stage, (r, O).

    Args:
        stage: the stage.
        out: (r, O) what its convolution gave.
        x: (s, I) what entered the stage.
        origin: (r, O) what entered the first stage with a restart; None before that.
        messages: s rows send, r hear.
    """
    if stage.relu:
        report_rows(messages.off, out.shape[1] * (1 + gradients(out)))
        out = torch.relu(out)
    if stage.skip:
        assert isinstance(x, Tensor)  # never the first stage
        report_rows(messages.off, out.shape[1])
        out = out + messages.own_of(x)
    if origin is not None:
        report_rows(messages.off, 2 * out.shape[1] * (1 + gradients(origin)))
        out = out + stage.teleport * origin
    return out
