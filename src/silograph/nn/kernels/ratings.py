"""The GCN of ratings around its products and sums over edges, fused, forward and backward.

    out_i = ReLU(s_i + e_i V + b)             s: sums over edges, e: sums of the edges' features
    r     = mean + b_u + b_i + (h_u * h_i) w + c

torch would write and read every term, and a row of products for each rating; here they stay in
registers. Products of matrices and sums over edges are left to torch, whose own are 1.5 to 1.8
times as fast.

E: users and items. O: width of a layer. R: ratings.
"""

from typing import Any, NamedTuple

import numpy as np

from silograph.nn.kernels.arrays import Array, compiled, kernel
from silograph.nn.kernels.layers import rectify, rectify_back

BLOCK = 256  # rows whose sum is in the weights' dtype; sums of blocks are in float64


class PairArrays(NamedTuple):
    """Ratings, and what is known of their ends."""

    user: Array  # (R,) among users and items
    item: Array  # (R,)
    h: Array  # (E, O)
    bias: Array  # (E, 1)
    w: Array  # (O, 1)
    level: float  # mean and c


class HeadGradient(NamedTuple):
    """Of the loss, by what a rating is made of; filled."""

    h: Array  # (E, O)
    bias: Array  # (E, 1)
    w: Array  # (O, 1)
    level: Array  # (1,)


@kernel
def finish(out: Array, features: Array, edge: Array, bias: Array, relu: bool) -> None:
    """Add what edges have and the bias to sums (E, O), and cut what is negative, in place."""
    for i in range(out.shape[0]):
        to, fro = features[i, 0], features[i, 1]
        for j in range(out.shape[1]):
            out[i, j] += bias[j] + to * edge[0, j] + fro * edge[1, j]
    if relu:
        rectify(out)


@kernel
def finish_back(
    out: Array, g: Array, features: Array, g_edge: Array, g_bias: Array, relu: bool, scale: float
) -> None:
    """Replace the gradient by what left a layer (E, O) by that by the sums, and fill the others'.

    `out` is what was left of `finish` after dropout, which scaled by `scale`.
    """
    if relu:
        rectify_back(out, g, scale)
    rows, width = g.shape
    part, sums = np.empty((3, width), g.dtype), np.zeros((3, width), np.float64)
    for first in range(0, rows, BLOCK):
        part[:] = 0
        for i in range(first, min(first + BLOCK, rows)):
            to, fro = features[i, 0], features[i, 1]
            for j in range(width):
                part[0, j] += to * g[i, j]
                part[1, j] += fro * g[i, j]
                part[2, j] += g[i, j]
        sums += part
    g_edge[:], g_bias[:] = sums[:2], sums[2]


@compiled
def rating(p: PairArrays, r: int) -> Any:
    """Return what is predicted of a rating."""
    u, i = p.user[r], p.item[r]
    prediction = p.h.dtype.type(p.level) + p.bias[u, 0] + p.bias[i, 0]
    for j in range(p.h.shape[1]):
        prediction += p.h[u, j] * p.h[i, j] * p.w[j, 0]
    return prediction


@kernel
def predict(p: PairArrays, out: Array) -> None:
    """Fill `out` (R, 1) with predictions."""
    for r in range(p.user.shape[0]):
        out[r, 0] = rating(p, r)


@kernel
def loss_gradient(p: PairArrays, y: Array, g: HeadGradient) -> float:
    """Return the mean squared error of ratings y (R,), and fill its gradient.

    No task but that of ratings is compiled, whose loss is the squared error.
    """
    many, width = p.user.shape[0], p.h.shape[1]
    total, level, share = 0.0, 0.0, p.h.dtype.type(2 / many)
    part, sums = np.empty(width, p.h.dtype), np.zeros(width, np.float64)
    g.h[:], g.bias[:] = 0, 0
    for first in range(0, many, BLOCK):
        part[:] = 0
        for r in range(first, min(first + BLOCK, many)):
            u, i, error = p.user[r], p.item[r], rating(p, r) - y[r]
            total += np.float64(error) ** 2
            d = error * share
            for j in range(width):
                a, b = d * p.h[u, j], d * p.h[i, j]
                part[j] += a * p.h[i, j]
                g.h[u, j] += b * p.w[j, 0]
                g.h[i, j] += a * p.w[j, 0]
            g.bias[u, 0] += d
            g.bias[i, 0] += d
            level += d
        sums += part
    g.w[:, 0], g.level[:] = sums, level
    return float(total / many)
