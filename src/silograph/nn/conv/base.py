"""Convolutions, each split into the parts that a federation needs to tell apart.

    z = map(x)                                  linear, at the node that sends
    s = combine(z)                              the sum over neighbors; plain ones are
        = post * (A @ (pre * z)) + own * z      scaled on both sides, with the node's own z
    out = finish(x, s)                          bias, further self terms, what comes after the sum

Only the sum crosses clients, so only the sum has to know about them; each side scales by its
own degrees, so no degree travels. In the backward pass `pre` and `post` swap.

Every function takes weights that are shared by all clients or stacked by client (`segment`).

n: rows. I, O: input and output width. C: clients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.work import report_entries, report_rows
from silograph.graph.block.block import Rows
from silograph.graph.csr import CSR
from silograph.nn.conv.edges import Messages
from silograph.nn.segment import gradients, segment_linear, sparse_product

Params = dict[str, Tensor]


DegreeScale = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Scales:
    """A plain sum over neighbors, post * (A @ (pre * z)) + own * z, from degrees (n, 1).

    Attributes:
        pre: the sender's scale (n, 1); None: 1.
        post: the receiver's scale (n, 1); None: 1.
        own: weight of the receiver's own z (n, 1); None: 0.
    """

    pre: DegreeScale | None = None
    post: DegreeScale | None = None
    own: DegreeScale | None = None

    def before(self, degree: Tensor) -> Tensor | None:
        """Return the sender's scale (n, 1), or None for 1."""
        return None if self.pre is None else self.pre(degree)

    def after(self, degree: Tensor) -> Tensor | None:
        """Return the receiver's scale (n, 1), or None for 1."""
        return None if self.post is None else self.post(degree)

    def itself(self, degree: Tensor) -> Tensor | None:
        """Return the weight of the receiver's own z (n, 1), or None for 0."""
        return None if self.own is None else self.own(degree)


class Conv(Protocol):
    """A convolution; see the head of this file for its parts. A value: equal ones do the same."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def sums(self) -> bool:
        """Whether neighbors are summed at all."""

    @property
    def scales(self) -> Scales | None:
        """The sum, if it is plain: each silo can send its part; None: see `indivisible`."""

    @property
    def indivisible(self) -> str:
        """Why silos cannot each send their part of the sum; empty where `scales` are given."""

    @property
    def weighs(self) -> bool:
        """Whether weights of edges scale the terms of its sum."""

    @property
    def maps(self) -> tuple[str, ...]:
        """Names of the weights (I, O) that meet x, and meet it linearly."""

    @property
    def rooted(self) -> bool:
        """Whether `finish` reads x."""

    @property
    def kernel(self) -> str | None:
        """Name of its compiled form in `silograph.nn.kernels.arrays.FORMS`; None: there is none."""

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Return initial weights in float64, shared form."""

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """Return z (n, O)."""

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the sum over neighbors, s (r, O)."""

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Return the output (n, O)."""


def convolve(conv: Conv, p: Mapping[str, Tensor], x: Rows, messages: Messages) -> Tensor:
    """Return one convolution of x (n, I), (n, O)."""
    s = conv.combine(p, conv.map(p, x, messages.sender_off), messages)
    return conv.finish(p, x, s, messages)


def operator(scales: Scales, messages: Messages) -> CSR:
    """Return post * A * pre + own as one matrix (n, n), for messages among the same rows.

    One product in place of four passes over the rows.
    """
    if scales not in messages.operators:
        degree = messages.sender
        own = scales.itself(degree)
        messages.operators[scales] = as_matrix(scales, messages.adj, degree, own)
    return messages.operators[scales]


def as_matrix(scales: Scales, adj: CSR, degree: Tensor, own: Tensor | None) -> CSR:
    """Return post * adj * pre + own as one matrix (n, n).

    Args:
        scales: of both sides.
        adj: (n, n) weights of edges.
        degree: (n, 1) that the scales are made of.
        own: (n, 1) weight of a row's own message; None: 0.
    """
    one, zero = np.ones(len(degree)), np.zeros(len(degree))
    left, right, middle = (
        default if scale is None else scale[:, 0].double().cpu().numpy()
        for scale, default in (
            (scales.after(degree), one),
            (scales.before(degree), one),
            (own, zero),
        )
    )
    matrix = sp.diags_array(left) @ adj.scipy() @ sp.diags_array(right) + sp.diags_array(middle)
    return CSR.from_scipy(sp.csr_matrix(matrix)).to(degree.device, degree.dtype)


def propagate(scales: Scales, z: Tensor, messages: Messages) -> Tensor:
    """Return post * (A @ (pre * z)) + own * z, (n, O); `beside` is added to what A gives."""
    pre, post = scales.before(messages.sender), scales.after(messages.receiver)
    own = scales.itself(messages.receiver)
    width, passes = z.shape[1], 1 + gradients(z)
    report_entries(messages.adj.indptr, messages.off, 2 * width * passes)
    report_rows(messages.sender_off, width * passes * (pre is not None))
    report_rows(messages.off, width * passes * ((post is not None) + 2 * (own is not None)))
    if messages.own is None and messages.beside is None:
        matrix = operator(scales, messages)
        # Scales on both sides are the same up to a factor.
        alike = messages.symmetric and (pre is None) == (post is None)
        return sparse_product(matrix, z, symmetric=alike)
    s = sparse_product(messages.adj, z if pre is None else pre * z)
    s = s if messages.beside is None else s + messages.beside
    s = s if post is None else post * s
    return s if own is None else s + own * messages.own_of(z)


def glorot(key: Key, inputs: int, outputs: int) -> Tensor:
    """Uniform in +-sqrt(6 / (I + O)) (Glorot and Bengio, AISTATS 2010), (I, O) float64."""
    bound: float = (6 / (inputs + outputs)) ** 0.5
    return (2 * key.matrix(inputs, outputs) - 1) * bound


def uniform(key: Key, inputs: int, outputs: int) -> Tensor:
    """Uniform in +-1/sqrt(I), torch's default for linear layers, (I, O) float64."""
    bound: float = inputs**-0.5
    return (2 * key.matrix(inputs, outputs) - 1) * bound


def uniform_bias(key: Key, inputs: int, outputs: int) -> Tensor:
    """Return the bias of such a layer, (O,) float64."""
    bound: float = inputs**-0.5
    return ((2 * key.matrix(1, outputs) - 1) * bound)[0]


def glorot_init(key: Key, inputs: int, outputs: int) -> Params:
    """Return Glorot weight, zero bias."""
    bias = torch.zeros(outputs, dtype=torch.float64)
    return {"weight": glorot(key.fold("weight"), inputs, outputs), "bias": bias}


def rooted_init(key: Key, inputs: int, outputs: int) -> Params:
    """Return weights of neighbors, of the node itself, and a bias, all uniform."""
    return {
        "weight": uniform(key.fold("weight"), inputs, outputs),
        "root": uniform(key.fold("root"), inputs, outputs),
        "bias": uniform_bias(key.fold("bias"), inputs, outputs),
    }


def linear_map(p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
    """Return X W, (n, O)."""
    return segment_linear(x, p["weight"], off)


def add_root(p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
    """Return s (n, O) plus the node's own row, through its own weight."""
    report_rows(m.off, s.shape[1])
    return s + segment_linear(m.own_rows(x), p["root"], m.off)


def inverse_root(degree: Tensor) -> Tensor:
    """Return d^-1/2 with the self loop counted."""
    return (degree + 1).rsqrt()


def inverse(degree: Tensor) -> Tensor:
    """Return 1 / d with the self loop counted."""
    return 1 / (degree + 1)
