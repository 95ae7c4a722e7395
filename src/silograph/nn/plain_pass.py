"""Passes along drawn edges through plain convolutions, half a stage at a time, without autograd.

The first half of a stage is `map_rows`, up to its sum over neighbors. The second is `sum_rows`.
Their results can be cached: the next op of a step continues from them, and `pass_gradients` reads
them. All values and gradients have the bits of `forward_pass` and autograd.

Halves report the work of a forward pass without gradients.

C: clients. s, r: rows that enter and leave a stage. I, O: width of its input and output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.work import report_entries, report_rows
from silograph.graph.block.block import Rows, SparseRows
from silograph.nn.conv import Messages, Params, PlainConv, propagate_back
from silograph.nn.forward import Staged, dropout_factors, leave
from silograph.nn.model import stage_weights
from silograph.nn.segment import product_gradients, segment_sum, sparse_product


def is_plain(model: Staged) -> bool:
    """Return whether the functions of this file compute the passes of a model.

    Its convolutions must be plain ones without root weights, skip connections, teleports or dropout
    of edges, and features must not be dropped.
    """
    return model.stages[0].drop == 0 and all(
        isinstance(stage.conv, PlainConv)
        and not (stage.conv.rooted or stage.skip or stage.teleport or stage.edge_drop)
        for stage in model.stages
    )


@dataclass(frozen=True, eq=False)
class MappedRows:
    """Rows times a stage's weight.

    Attributes:
        x: (s, I) the rows, after dropout.
        factor: (s, I) `dropout_factors` of the rows; None: no dropout.
        z: (s, O) the product.
    """

    x: Rows
    factor: Tensor | None
    z: Tensor


def map_rows(
    model: Staged,
    number: int,
    weights: Mapping[str, Tensor],
    x: Rows,
    row_key: Tensor,
    off: Tensor,
    key: Key,
    product: Tensor | None = None,
) -> MappedRows:
    """Return the rows that enter a stage after dropout, times its weight.

    Args:
        model: a plain one.
        number: of the stage.
        weights: of each client, (C, ...).
        x: (s, I).
        row_key: (s,) int64.
        off: (C + 1,) rows of each client.
        key: of the step.
        product: (s, O) of sparse x and the weight, if it is known already.
    """
    stage = model.stages[number]
    if product is not None:
        assert isinstance(x, SparseRows)  # see `product`
        report_entries(x.csr.indptr, off, 2 * product.shape[1])
        return MappedRows(x, None, product)
    factor = None
    if stage.drop:
        assert isinstance(x, Tensor)  # features are not dropped, see `is_plain`
        report_rows(off, 2 * x.shape[1])
        factor = dropout_factors(row_key, x, stage.drop, key.fold("dropout", number))
        x = x * factor
    return MappedRows(x, factor, stage.conv.map(stage_weights(number, weights), x, off))


def sum_rows(
    model: Staged,
    number: int,
    weights: Mapping[str, Tensor],
    mapped: MappedRows,
    messages: Messages,
) -> Tensor:
    """Return the outputs (r, O) of a stage, from its `map_rows` and its messages."""
    stage, params = model.stages[number], stage_weights(number, weights)
    s = stage.conv.combine(params, mapped.z, messages)
    out = stage.conv.finish(params, mapped.x, s, messages)
    return leave(stage, out, mapped.x, None, messages)


def pass_gradients(
    model: Staged,
    weights: Mapping[str, Tensor],
    mapped: Sequence[MappedRows],
    outputs: Sequence[Tensor],
    messages: Sequence[Messages],
    grad: Tensor,
) -> Params:
    """Return the gradients of the weights, (C, ...).

    Only the products for the gradients of rows are reported. The rest of the work is that of the
    forward pass again, which callers report.

    Args:
        model: a plain one.
        weights: of each client, (C, ...).
        mapped: of each stage.
        outputs: (r, O) of each stage.
        messages: of each stage.
        grad: (r, O) of the last outputs.
    """
    gradients = Params()
    for number, stage in reversed(tuple(enumerate(model.stages))):
        rows, stage_messages, weight = mapped[number], messages[number], weights[f"{number}.weight"]
        assert isinstance(stage.conv, PlainConv)  # see `is_plain`
        if stage.relu:
            grad = torch.ops.aten.threshold_backward(grad, outputs[number], 0)
        gradients[f"{number}.bias"] = segment_sum(grad, stage_messages.off)
        grad = propagate_back(stage.conv, grad, stage_messages)
        if isinstance(rows.x, SparseRows):
            of_weight = sparse_product(rows.x.stacked.transposed, grad)
            gradients[f"{number}.weight"] = of_weight.view(weight.shape)
            break  # features are the first inputs
        sizes = stage_messages.sender_off.diff().tolist()
        grad_x, of_weight = product_gradients(rows.x, weight, grad, sizes, of_x=number > 0)
        gradients[f"{number}.weight"] = of_weight
        if grad_x is not None:
            report_rows(stage_messages.sender_off, 2 * weight.shape[1] * weight.shape[2])
            grad = grad_x if rows.factor is None else grad_x.mul_(rows.factor)
    return gradients
