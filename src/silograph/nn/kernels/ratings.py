"""What surrounds products and sums over edges in the GCN of ratings, fused, there and back.

    out_i = ReLU(s_i + e_i V + b)             s: sums over edges, e: sums of the edges' features
    r     = mean + b_u + b_i + (h_u * h_i) w + c

torch would write and read every term, and a row of products for each rating; here they stay in
registers. Products of matrices and sums over edges are left to torch, whose own are faster
(note 075).

E: users and items. O: width of a layer. R: ratings.
"""

from typing import Any, NamedTuple

import numpy as np

from silograph.nn.kernels.arrays import Array, compiled, kernel
from silograph.nn.kernels.layers import add_columns, rectify


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
        there, back = features[i, 0], features[i, 1]
        for j in range(out.shape[1]):
            out[i, j] += bias[j] + there * edge[0, j] + back * edge[1, j]
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
        zero, factor, flat, flat_g = (
            g.dtype.type(0),
            g.dtype.type(scale),
            out.reshape(-1),
            g.reshape(-1),
        )
        for i in range(flat.shape[0]):  # above 0 where neither ReLU nor dropout cut it
            flat_g[i] = flat_g[i] * factor if flat[i] > 0 else zero
    add_columns(g, g_bias)
    g_edge[:] = 0
    for i in range(g.shape[0]):
        there, back = features[i, 0], features[i, 1]
        for j in range(g.shape[1]):
            g_edge[0, j] += there * g[i, j]
            g_edge[1, j] += back * g[i, j]


@compiled
def rating(p: PairArrays, r: int) -> Any:
    """Return what is predicted of a rating."""
    u, i = p.user[r], p.item[r]
    said = p.h.dtype.type(p.level) + p.bias[u, 0] + p.bias[i, 0]
    for j in range(p.h.shape[1]):
        said += p.h[u, j] * p.h[i, j] * p.w[j, 0]
    return said


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
    total, share = 0.0, p.h.dtype.type(2 / p.user.shape[0])
    g.h[:], g.bias[:], g.w[:], g.level[:] = 0, 0, 0, 0
    for r in range(p.user.shape[0]):
        u, i, error = p.user[r], p.item[r], rating(p, r) - y[r]
        total += np.float64(error) ** 2
        d = error * share
        for j in range(p.h.shape[1]):
            a, b = d * p.h[u, j], d * p.h[i, j]
            g.w[j, 0] += a * p.h[i, j]
            g.h[u, j] += b * p.w[j, 0]
            g.h[i, j] += a * p.w[j, 0]
        g.bias[u, 0] += d
        g.bias[i, 0] += d
        g.level[0] += d
    return float(total / p.user.shape[0])
