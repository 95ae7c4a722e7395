"""Steps of weights that have masks, along the gradient of their products.

What `silograph.nn.masked` does with torch: with a gradient g of the product W * M, that of W is
g * M and a pull to the start, that of M is g * W + l1 sign(M). Biases have no mask: theirs is 1.
"""

import numpy as np

from silograph.core.numba_extensions import pointer_to
from silograph.nn.kernels.arrays import (
    ROOTED,
    Array,
    ModelShape,
    Moving,
    StepRule,
    TrainedMatrix,
    TrainedWeights,
    compiled,
    copy,
)
from silograph.nn.kernels.optim import TOGETHER, step


@compiled
def multiply(w: Array, mask: Array, least: float, out: Array) -> None:
    """Fill out with w * mask, where a mask's entry below `least` counts as 0; of one shape."""
    flat, by, product = w.reshape(-1), mask.reshape(-1), out.reshape(-1)
    zero, low = w.dtype.type(0), w.dtype.type(least)
    for i in range(flat.shape[0]):
        product[i] = flat[i] * (zero if abs(by[i]) < low else by[i])


@compiled
def apply_masks(own: TrainedWeights, matrices: int, least: float) -> None:
    """Fill a client's weights with raw weights times masks.

    `matrices`: how many first matrices it has.
    """
    w, raw, mask = own.weights, own.mask_state.raw, own.mask_state.mask
    multiply(raw.first, mask.first, least, w.first)
    if matrices > 1:
        multiply(raw.second, mask.second, least, w.second)
    multiply(raw.flat, mask.flat, least, w.flat)


@compiled
def pull_of(raw: Array, start: Array, near: float) -> float:
    """Return `near` over the distance of a tensor from its start; 0 where it has not moved."""
    if near == 0:
        return 0.0
    square = 0.0
    for begin in range(0, raw.shape[0], TOGETHER):
        w, v = raw[begin : begin + TOGETHER], start[begin : begin + TOGETHER]
        part = w.dtype.type(0)
        for i in range(w.shape[0]):
            part += (w[i] - v[i]) * (w[i] - v[i])
        square += part
    return near / np.sqrt(square) if square > 0 else 0.0


@compiled
def step_under(
    p: Array, g: Array, own: TrainedMatrix, lo: int, pull: float, steps: StepRule, t: int
) -> None:
    """Step weights and masks from `lo` on along the gradient g (n,) of their products p (n,).

    Changes g. `own` is a matrix.
    """
    hi = lo + p.shape[0]
    raw, mask, other = own.raw.value[lo:hi], own.mask.value[lo:hi], own.mask_state.other[: hi - lo]
    l1, one, zero = p.dtype.type(own.mask_state.l1), p.dtype.type(1), p.dtype.type(0)
    for i in range(p.shape[0]):
        m = mask[i]
        other[i] = g[i] * raw[i] + l1 * (one if m > 0 else (-one if m < 0 else zero))
        g[i] = g[i] * m
    step(mask, other, mask[:0], own.mask.first[lo:hi], own.mask.second[lo:hi], steps, t)
    lean(raw, g, own.start[lo:hi], pull)
    step(raw, g, raw[:0], own.raw.first[lo:hi], own.raw.second[lo:hi], steps, t)
    for i in range(p.shape[0]):
        p[i] = raw[i] * mask[i]


@compiled
def lean(raw: Array, g: Array, start: Array, pull: float) -> None:
    """Add to g what pulls to the start."""
    by = g.dtype.type(pull)
    for i in range(g.shape[0]):
        g[i] += by * (raw[i] - start[i])


@compiled
def moving(value: Array, first: Array, second: Array) -> Moving:
    """Return what steps move with its moments, from arrays of any shape."""
    return Moving(value.reshape(-1), first.reshape(-1), second.reshape(-1))


@compiled
def matrix(own: TrainedWeights, second: bool) -> TrainedMatrix:
    """Return a client's first or second matrix."""
    w, start, one, two = own.weights, own.start, own.first, own.second
    if own.mask_state is None:
        if second:
            value = moving(w.second, one.second, two.second)
            return TrainedMatrix(w.second, start.second.reshape(-1), value, None, None)
        value = moving(w.first, one.first, two.first)
        return TrainedMatrix(w.first, start.first.reshape(-1), value, None, None)
    mask_state = own.mask_state
    if second:
        raw = moving(mask_state.raw.second, one.second, two.second)
        mask = moving(mask_state.mask.second, mask_state.first.second, mask_state.second.second)
        return TrainedMatrix(w.second, start.second.reshape(-1), raw, mask, mask_state)
    raw = moving(mask_state.raw.first, one.first, two.first)
    mask = moving(mask_state.mask.first, mask_state.first.first, mask_state.second.first)
    return TrainedMatrix(w.first, start.first.reshape(-1), raw, mask, mask_state)


@compiled
def flat_matrix(own: TrainedWeights) -> TrainedMatrix:
    """Return the weights after the first matrices as if they were one."""
    mask_state = own.mask_state
    raw = moving(mask_state.raw.flat, own.first.flat, own.second.flat)
    mask = moving(mask_state.mask.flat, mask_state.first.flat, mask_state.second.flat)
    return TrainedMatrix(own.weights.first[:0], own.start.flat, raw, mask, mask_state)


@compiled
def step_matrix(own: TrainedWeights, g: Array, lo: int, size: int, steps: StepRule, t: int) -> None:
    """Step `size` weights after the first matrices from `lo` on, which are a matrix."""
    w, hi = pointer_to(flat_matrix(own)), lo + size
    pull = pull_of(w.raw.value[lo:hi], w.start[lo:hi], w.mask_state.near)
    step_under(own.weights.flat[lo:hi], g[lo:hi], w, lo, pull, steps, t)


@compiled
def step_bias(own: TrainedWeights, g: Array, lo: int, size: int, steps: StepRule, t: int) -> None:
    """Step `size` weights after the first matrices from `lo` on, which are a bias."""
    w, hi = pointer_to(flat_matrix(own)), lo + size
    raw, start = w.raw.value[lo:hi], w.start[lo:hi]
    lean(raw, g[lo:hi], start, pull_of(raw, start, w.mask_state.near))
    step(raw, g[lo:hi], raw[:0], w.raw.first[lo:hi], w.raw.second[lo:hi], steps, t)
    copy(raw, own.weights.flat[lo:hi])


@compiled
def step_flat_under(
    shape: ModelShape, own: TrainedWeights, g: Array, steps: StepRule, later: StepRule, t: int
) -> None:
    """Step the weights after the first matrices, tensor by tensor, along the gradient g (P,)."""
    for layer in range(shape.layers):
        rule = later if layer > 0 else steps
        width = shape.width[layer + 1]
        if layer > 0:
            size = shape.width[layer] * width
            step_matrix(own, g, shape.place[layer, 0], size, rule, t)
            if shape.form[layer] == ROOTED:
                step_matrix(own, g, shape.place[layer, 1], size, rule, t)
        step_bias(own, g, shape.place[layer, 2], width, rule, t)
