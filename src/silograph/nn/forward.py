"""A pass through a model that is a row of stages, with at most one sum over neighbors in each.

C: clients. n: rows. K: outputs (classes or label bits).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from silograph.core.key import Key, keep_probability
from silograph.core.payload import NO_STATE, State
from silograph.core.work import report_entries, report_rows
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.graph.graph import LabelForm
from silograph.nn.conv import Conv, Messages, Params, PlainConv, convolve, internal_messages
from silograph.nn.segment import gradients


@dataclass(frozen=True)
class Stage:
    """A step through a model with at most one sum over neighbors.

        h = enter(x)                 dropout
        h = convolve(conv, h)        see `silograph.nn.conv`
        x = leave(h)                 ReLU, the stage's input, the restart

    Attributes:
        conv: what is in the middle.
        inputs: I.
        outputs: O.
        drop: probability with which an entry of x is dropped in training.
        relu: whether ReLU follows.
        skip: whether x, before dropout, is added after ReLU.
        teleport: weight of what entered the first stage that has one; it is added.
        edge_drop: probability with which the attention to a neighbor is dropped in training.
    """

    conv: Conv
    inputs: int
    outputs: int
    drop: float
    relu: bool
    skip: bool = False
    teleport: float = 0.0
    edge_drop: float = 0.0


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
    def stages(self) -> tuple[Stage, ...]:
        """The stages."""


@dataclass(frozen=True, eq=False)
class Pass:
    """The inputs of one pass through a model of L stages.

    Attributes:
        x: features of the rows that enter stage 0.
        messages: L of them; the receivers of one are the senders of the next.
        row_key: (L) keys of the rows that enter each stage.
    """

    x: Rows
    messages: tuple[Messages, ...]
    row_key: tuple[Tensor, ...]


def dropout_factors(row_key: Tensor, x: Tensor, drop: float, key: Key) -> Tensor:
    """Return what dropout multiplies x (n, D) by: 0, or 1 over the probability to keep an entry."""
    is_kept = key.keep(row_key, x.shape[1], drop)
    # Viewed as bytes: torch takes ten times as long to convert bool.
    return is_kept.view(torch.uint8).to(x.dtype).mul_(1 / keep_probability(drop))


def dropped(x: Tensor, drop: float, row_key: Tensor, key: Key) -> Tensor:
    """Return x (n, D) with entries dropped by key and the rest scaled to keep the mean."""
    return x * dropout_factors(row_key, x, drop, key)


def _drop_entries(x: SparseRows, drop: float, row_key: Tensor, key: Key) -> SparseRows:
    """Return sparse features after dropout, by the draws that dense ones have."""
    csr, values = x.csr, x.csr.values
    assert values is not None  # features carry values
    column = csr.indices.long() if x.feature is None else x.feature[csr.indices.long()]
    is_kept = key.keep_entries(row_key[csr.row], column, drop)
    csr.by_column  # noqa: B018 - every step wants this order, and one without dropout does not
    values = values * is_kept.to(values.dtype) * (1 / keep_probability(drop))
    return SparseRows(csr.with_values(values), x.off, feature=x.feature, places=x)


def after_dropout(
    stage: Stage, number: int, x: Rows, row_key: Tensor, off: Tensor, key: Key | None
) -> Rows:
    """Apply the dropout of a stage to its inputs.

    Args:
        stage: the stage.
        number: of the stage, from 0.
        x: (s, I); only features can be sparse.
        row_key: (s,) int64.
        off: (C + 1,) rows of each client.
        key: key of the step; None turns dropout off.
    """
    if key is None or stage.drop == 0:
        return x
    key = key.fold("dropout", number)
    if isinstance(x, SparseRows):
        report_entries(x.csr.indptr, off, 2)
        return _drop_entries(x, stage.drop, row_key, key)
    report_rows(off, 2 * x.shape[1] * (1 + gradients(x)))
    return dropped(x, stage.drop, row_key, key)


def whole_pass(model: Staged, block: ClientBlock, dtype: torch.dtype) -> Pass:
    """Return the pass of all rows of a block along all internal edges."""
    messages, count = internal_messages(block, dtype), len(model.stages)
    return Pass(block.x, (messages,) * count, (block.row_key,) * count)


def forward_pass(
    model: Staged, weights: Mapping[str, Tensor], inputs: Pass, key: Key | None
) -> Tensor:
    """Return logits (r, K) of the receivers of the last stage.

    Args:
        model: the shape.
        weights: shared by all clients, or with a leading dimension C.
        inputs: what the pass reads.
        key: key of the dropout draws; None turns dropout off.
    """
    return _run_pass(model, weights, inputs, key, None)[0]


def rows_of_stage(
    model: Staged, weights: Mapping[str, Tensor], inputs: Pass, key: Key | None, number: int
) -> Rows:
    """Return the inputs of a stage's convolution, (s, I), after dropout; see `forward_pass`."""
    x = inputs.x if number == 0 else _run_pass(model, weights, inputs, key, None, until=number)[0]
    return _inputs_after_dropout(model, number, x, inputs, key)


def last_layer(model: Staged) -> int:
    """Return the number of the last stage that has weights."""
    return max(int(name.partition(".")[0]) for name in model.weight_shapes)


def embedded_pass(
    model: Staged, weights: Mapping[str, Tensor], inputs: Pass, key: Key | None
) -> tuple[Tensor, Tensor]:
    """Return logits as `forward_pass` does, and the inputs of the last layer with weights, (r, D).

    The model has two layers or more.
    """
    logits, embeddings = _run_pass(model, weights, inputs, key, last_layer(model))
    assert embeddings is not None  # of that layer
    return logits, embeddings


def _run_pass(
    model: Staged,
    weights: Mapping[str, Tensor],
    inputs: Pass,
    key: Key | None,
    embedded_stage: int | None,
    until: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return logits of the last stage's receivers, and their inputs of stage `embedded_stage`.

    With `until` the pass ends before that stage, and its inputs are returned as the logits.
    """
    x: Rows = inputs.x
    origin: Tensor | None = None
    embeddings: Tensor | None = None
    for number, stage in enumerate(model.stages[:until]):
        if number == embedded_stage:
            assert isinstance(x, Tensor)  # only the input can be sparse
            embeddings = x
        messages, prefix = inputs.messages[number], f"{number}."
        params = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        h = _inputs_after_dropout(model, number, x, inputs, key)
        if stage.edge_drop and key is not None:
            draws = key.fold("attention", number)
            messages = messages.with_dropout(stage.edge_drop, inputs.row_key[number], draws)
        if stage.teleport:
            assert isinstance(x, Tensor)  # linear stages come first
            origin = messages.own_of(x if origin is None else origin)
        if embeddings is not None:
            embeddings = messages.own_of(embeddings)
        x = leave(stage, convolve(stage.conv, params, h, messages), x, origin, messages)
    assert isinstance(x, Tensor)  # at least one stage
    return x, embeddings


def _inputs_after_dropout(
    model: Staged, number: int, x: Rows, inputs: Pass, key: Key | None
) -> Rows:
    """Return the inputs of the convolution of a stage of a pass."""
    off = inputs.messages[number].sender_off
    return after_dropout(model.stages[number], number, x, inputs.row_key[number], off, key)


def leave(stage: Stage, out: Tensor, x: Rows, origin: Tensor | None, messages: Messages) -> Tensor:
    """Return the outputs of a stage, (r, O).

    Args:
        stage: the stage.
        out: (r, O) outputs of its convolution.
        x: (s, I) inputs of the stage.
        origin: (r, O) inputs of the first stage with a restart; None before that.
        messages: from s senders to r receivers.
    """
    if stage.relu:
        report_rows(messages.off, out.shape[1] * (1 + gradients(out)))
        # A plain convolution ends by adding its bias, so `out` is a new tensor and may be changed.
        out = torch.relu_(out) if isinstance(stage.conv, PlainConv) else torch.relu(out)
    if stage.skip:
        assert isinstance(x, Tensor)  # never the first stage
        report_rows(messages.off, out.shape[1])
        out = out + messages.own_of(x)
    if origin is not None:
        report_rows(messages.off, 2 * out.shape[1] * (1 + gradients(origin)))
        out = out + stage.teleport * origin
    return out


# --- What every kind of model answers, so that nobody has to know the kinds -----------------------
#
# n: rows. F: features. K: outputs (classes or label bits). C: clients.


NO_TABLES: Mapping[str, int] = MappingProxyType({})


class AnyModel(ModelSizes, Protocol):
    """The shape of a model, whose weights are a flat mapping: a value, equal ones are one model.

    How it is trained is asked of `silograph.nn.fit.TrainableModel`.
    """

    @property
    def noun(self) -> str:
        """Name of the model in messages."""

    @property
    def staged(self) -> Staged | None:
        """The model as a row of stages; None: nobody can look between its layers."""

    @property
    def single_client_only(self) -> bool:
        """Whether clients are computed one after the other, in blocks of one."""

    @property
    def meets_all(self) -> bool:
        """Whether an output may meet all rows, whatever the edges are."""

    @property
    def solved_flops(self) -> float:
        """Most operations of a row in an equation that is solved, besides those of steps."""

    @property
    def table_widths(self) -> Mapping[str, int]:
        """Columns of the tables, rows of its own users and items, that each client keeps."""

    @property
    def source(self) -> str | None:
        """Text of a user's code that decides what the model does, where it can be read."""

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return initial weights, shared form."""

    def forward(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Tensor:
        """Return logits (n, K) from internal edges, nothing dropped.

        Args:
            weights: shared by all clients, or with a leading dimension C.
            block: the rows.
            tables: of the clients, where the model has any.
        """

    def first_tables(self, block: ClientBlock, key: Key) -> State:
        """Return the clients' tables before training, by name; none where it has none."""

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values, for files."""
