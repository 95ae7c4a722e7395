"""A pass through a model that is a row of stages, with at most one sum over neighbors in each.

C: clients. n: rows. K: outputs (classes or label bits).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from silograph.core.key import Key, keep_probability
from silograph.core.work import report_rows
from silograph.graph.block.block import ClientBlock, Rows
from silograph.graph.graph import LabelForm
from silograph.nn.conv import Conv, Messages, convolve, internal_messages
from silograph.nn.segment import gradients


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

    conv: Conv
    inputs: int
    outputs: int
    drop: bool
    relu: bool
    skip: bool = False
    teleport: float = 0.0


class ModelSizes(Protocol):
    """What models of every kind say of their sizes and weights: a value, equal ones are alike."""

    def __hash__(self) -> int:
        """Programs and shapes are worked out once for each model."""

    @property
    def features(self) -> int:
        """F."""

    @property
    def outputs(self) -> int:
        """K."""

    @property
    def task(self) -> LabelForm:
        """What the outputs mean."""

    @property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, shared form."""

    @property
    def first_maps(self) -> tuple[str, ...]:
        """Names of the weights that meet the features, and meet them linearly, where known."""


class Staged(ModelSizes, Protocol):
    """A model that is a row of stages: silos can exchange rows between their halves.

    A value: equal ones have equal stages. Weights of stage i are named `i.NAME`.
    """

    @property
    def dropout(self) -> float:
        """Probability with which what enters a stage is dropped in training, if the stage drops."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages."""


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


def dropped(x: Tensor, drop: float, row_key: Tensor, key: Key) -> Tensor:
    """Return x (n, D) with entries dropped by key and the rest scaled to keep the mean."""
    keep = key.keep(row_key, x.shape[1], drop)
    return x * keep.to(x.dtype) * (1 / keep_probability(drop))


def whole_pass(model: Staged, block: ClientBlock, dtype: torch.dtype) -> Pass:
    """Return the pass of all rows of a block along all internal edges."""
    messages, count = internal_messages(block, dtype), len(model.stages)
    return Pass(block.x, (messages,) * count, (block.row_key,) * count)


def forward_pass(
    model: Staged, weights: Mapping[str, Tensor], inputs: Pass, key: Key | None
) -> Tensor:
    """Return logits (r, K) of the rows that hear in the last stage.

    Args:
        model: the shape.
        weights: shared by all clients, or with a leading dimension C.
        inputs: what the pass reads.
        key: key of the dropout draws; None turns dropout off.
    """
    return _passed(model, weights, inputs, key, None)[0]


def rows_of_stage(
    model: Staged, weights: Mapping[str, Tensor], inputs: Pass, key: Key | None, number: int
) -> Rows:
    """Return what enters the convolution of a stage, (s, I), after dropout; see `forward_pass`."""
    x = inputs.x if number == 0 else _passed(model, weights, inputs, key, None, until=number)[0]
    return _dropped(model, number, x, inputs, key)


def last_layer(model: Staged) -> int:
    """Return the number of the last stage that has weights."""
    return max(int(name.partition(".")[0]) for name in model.weight_shapes)


def embedded_pass(
    model: Staged, weights: Mapping[str, Tensor], inputs: Pass, key: Key | None
) -> tuple[Tensor, Tensor]:
    """Return what `forward_pass` does, and what entered the last layer with weights, (r, D).

    The model has two layers or more.
    """
    logits, embeddings = _passed(model, weights, inputs, key, last_layer(model))
    assert embeddings is not None  # of that layer
    return logits, embeddings


def _passed(
    model: Staged,
    weights: Mapping[str, Tensor],
    inputs: Pass,
    key: Key | None,
    at: int | None,
    until: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return logits, and what entered stage `at` of the rows that hear in the last stage.

    With `until` the pass ends before that stage, and what enters it stands for the logits.
    """
    x: Rows = inputs.x
    origin: Tensor | None = None
    entered: Tensor | None = None
    for number, stage in enumerate(model.stages[:until]):
        if number == at:
            assert isinstance(x, Tensor)  # only the input can be sparse
            entered = x
        messages, prefix = inputs.messages[number], f"{number}."
        params = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        h = _dropped(model, number, x, inputs, key)
        if stage.teleport:
            assert isinstance(x, Tensor)  # linear stages come first
            origin = messages.own_of(x if origin is None else origin)
        if entered is not None:
            entered = messages.own_of(entered)
        x = leave(stage, convolve(stage.conv, params, h, messages), x, origin, messages)
    assert isinstance(x, Tensor)  # at least one stage
    return x, entered


def _dropped(model: Staged, number: int, x: Rows, inputs: Pass, key: Key | None) -> Rows:
    """Return what enters the convolution of a stage, from what enters the stage."""
    if not model.stages[number].drop or key is None or model.dropout == 0:
        return x
    assert isinstance(x, Tensor)  # only the input can be sparse
    report_rows(inputs.messages[number].sender_off, 2 * x.shape[1] * (1 + gradients(x)))
    return dropped(x, model.dropout, inputs.row_key[number], key.fold("dropout", number))


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
