"""Losses and their gradients, in the place of the logits."""

from typing import Any

import numpy as np

from silograph.nn.kernels.arrays import Array, ModelShape, RowArrays, Scratch, compiled


@compiled
def softmax_gradient(o: Array, i: int, y: int, weight: Any) -> float:
    """Replace logits o[i] (K,) by the gradient of `weight` times the cross-entropy; return that."""
    top = o[i, 0]
    for c in range(1, o.shape[1]):
        top = max(top, o[i, c])
    truth, total = o[i, y] - top, o.dtype.type(0)
    for c in range(o.shape[1]):
        o[i, c] = np.exp(o[i, c] - top)
        total += o[i, c]
    for c in range(o.shape[1]):
        o[i, c] = o[i, c] / total * weight
    o[i, y] -= weight
    return float(np.log(total) - truth)


@compiled
def bits_gradient(o: Array, i: int, y: Array, weight: Any) -> float:
    """The same for the mean binary cross-entropy over known bits (K,); -1 is not known."""
    known, loss = 0, 0.0
    for c in range(o.shape[1]):
        known += y[c] >= 0
    for c in range(o.shape[1]):
        v = o[i, c]
        if y[c] < 0:
            o[i, c] = 0
        else:
            loss += max(v, 0) - v * y[c] + np.log1p(np.exp(-abs(v)))
            o[i, c] = (1 / (1 + np.exp(-v)) - y[c]) * weight / known
    return float(loss / max(known, 1))


@compiled
def loss_gradient(
    rows: RowArrays, shape: ModelShape, k: int, drawn: bool, train: Array, s: Scratch
) -> float:
    """Replace logits by the gradient of the mean loss of the step's training rows; return it."""
    a, count, total, at = rows.off[k], train.shape[0], 0.0, 0
    weight = s.out.dtype.type(1.0 / count)
    for i in range(s.m[shape.layers]):
        row = s.nodes[i]
        if not drawn and (at == count or train[at] != row):
            for c in range(shape.outputs):
                s.out[i, c] = 0
            continue
        at += 1
        if shape.multilabel:
            total += bits_gradient(s.out, i, rows.y[a + row], weight)
        else:
            total += softmax_gradient(s.out, i, rows.y[a + row, 0], weight)
    return float(total / count)
