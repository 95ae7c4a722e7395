"""Convolutions, each split into the parts that a federation needs to tell apart.

    z = map(x)                        linear, at the node that sends
    s = post * (A @ (pre * z))        the sum over neighbors, scaled on both sides
    out = finish(x, z, s)             bias and self term, at the node that receives

Only the sum crosses clients, so only the sum has to know about them; each side scales by its
own degrees, so no degree travels. In the backward pass `pre` and `post` swap.

Every function takes weights that are shared by all clients or stacked by client (`segment`).

n: rows. I, O: input and output width. C: clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.work import report_entries, report_rows
from silograph.graph.block import ClientBlock, Rows
from silograph.graph.csr import CSR
from silograph.nn.segment import gradients, segment_bias, segment_linear, sparse_product

Params = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Messages:
    """Who hears whom in one layer.

    Attributes:
        adj: (n, n) symmetric, values 1, no self loops.
        degree: (n, 1) floating point, number of neighbors of each row.
        off: (C + 1,) rows of each client.
    """

    adj: CSR
    degree: Tensor
    off: Tensor


def internal_messages(block: ClientBlock, dtype: torch.dtype) -> Messages:
    """Return the messages along internal edges: cross-client edges are dropped."""
    return Messages(block.adj, block.adj.degree.to(dtype)[:, None], block.off)


class Conv(Protocol):
    """A convolution; see the head of this file for what the parts are."""

    @property
    def sums(self) -> bool:
        """Whether neighbors are summed at all."""

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Return initial weights in float64, shared form."""

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """Return z (n, O)."""

    def pre(self, degree: Tensor) -> Tensor | None:
        """Return the sender's scale (n, 1), or None for 1."""

    def post(self, degree: Tensor) -> Tensor | None:
        """Return the receiver's scale (n, 1), or None for 1."""

    def finish(
        self, p: Mapping[str, Tensor], x: Rows, z: Tensor, s: Tensor | None, m: Messages
    ) -> Tensor:
        """Return the output (n, O)."""


def propagate(conv: Conv, z: Tensor, messages: Messages) -> Tensor:
    """Return post * (A @ (pre * z)), (n, O)."""
    pre, post = conv.pre(messages.degree), conv.post(messages.degree)
    width, passes = z.shape[1], 1 + gradients(z)
    report_entries(messages.adj.indptr, messages.off, 2 * width * passes)
    report_rows(messages.off, width * passes * ((pre is not None) + (post is not None)))
    s = sparse_product(messages.adj, z if pre is None else pre * z, symmetric=True)
    return s if post is None else post * s


def convolve(conv: Conv, p: Mapping[str, Tensor], x: Rows, messages: Messages) -> Tensor:
    """Return one convolution of x (n, I), (n, O)."""
    z = conv.map(p, x, messages.off)
    s = propagate(conv, z, messages) if conv.sums else None
    return conv.finish(p, x, z, s, messages)


def glorot(key: Key, inputs: int, outputs: int) -> Tensor:
    """Uniform in +-sqrt(6 / (I + O)) (Glorot and Bengio, AISTATS 2010), (I, O) float64."""
    bound: float = (6 / (inputs + outputs)) ** 0.5
    return (2 * key.matrix(inputs, outputs) - 1) * bound


class GCN:
    """Graph convolution: D^-1/2 (A + I) D^-1/2 X W + b, D the degrees of A + I.

    Kipf and Welling, "Semi-supervised classification with graph convolutional networks",
    ICLR 2017, eq. 2. Weights: weight (I, O), bias (O,).
    """

    sums = True

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Glorot weight, zero bias, as in PyG's GCNConv."""
        bias = torch.zeros(outputs, dtype=torch.float64)
        return {"weight": glorot(key.fold("weight"), inputs, outputs), "bias": bias}

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X W."""
        return segment_linear(x, p["weight"], off)

    def pre(self, degree: Tensor) -> Tensor:
        """d^-1/2 with the self loop counted."""
        return (degree + 1).rsqrt()

    def post(self, degree: Tensor) -> Tensor:
        """The same on the receiver's side."""
        return (degree + 1).rsqrt()

    def finish(
        self, p: Mapping[str, Tensor], x: Rows, z: Tensor, s: Tensor | None, m: Messages
    ) -> Tensor:
        """Add the self loop, 1 / d times the node's own z, and the bias."""
        del x
        assert s is not None  # `sums` is True
        report_rows(m.off, 2 * z.shape[1] * (1 + gradients(z)))
        return segment_bias(s + z / (m.degree + 1), p["bias"], m.off)


class SAGE:
    """GraphSAGE with the mean of the neighbors: mean(X_N) W + X W_root + b.

    Hamilton, Ying and Leskovec, "Inductive representation learning on large graphs", NeurIPS
    2017, algorithm 1 with the mean aggregator, in the form of PyG's SAGEConv. A node without
    neighbors has mean 0. Weights: weight (I, O), root (I, O), bias (O,).
    """

    sums = True

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Uniform in +-1/sqrt(I) for all, as in PyG's SAGEConv."""
        bound = inputs**-0.5
        return {
            "weight": (2 * key.fold("weight").matrix(inputs, outputs) - 1) * bound,
            "root": (2 * key.fold("root").matrix(inputs, outputs) - 1) * bound,
            "bias": ((2 * key.fold("bias").matrix(1, outputs) - 1) * bound)[0],
        }

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X W: the mean is linear, so W may come before it."""
        return segment_linear(x, p["weight"], off)

    def pre(self, degree: Tensor) -> None:
        """1."""
        del degree

    def post(self, degree: Tensor) -> Tensor:
        """1 / d."""
        return 1 / degree.clamp(min=1)

    def finish(
        self, p: Mapping[str, Tensor], x: Rows, z: Tensor, s: Tensor | None, m: Messages
    ) -> Tensor:
        """Add the node's own row, through its own weight, and the bias."""
        del z
        assert s is not None  # `sums` is True
        report_rows(m.off, s.shape[1])
        return segment_bias(s + segment_linear(x, p["root"], m.off), p["bias"], m.off)


class MLP:
    """A linear layer that ignores the graph: X W + b. Weights: weight (I, O), bias (O,)."""

    sums = False

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Glorot weight, zero bias."""
        return GCN().init(key, inputs, outputs)

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X W."""
        return segment_linear(x, p["weight"], off)

    def pre(self, degree: Tensor) -> None:
        """No neighbors."""
        del degree

    def post(self, degree: Tensor) -> None:
        """No neighbors."""
        del degree

    def finish(
        self, p: Mapping[str, Tensor], x: Rows, z: Tensor, s: Tensor | None, m: Messages
    ) -> Tensor:
        """Add the bias."""
        del x, s
        return segment_bias(z, p["bias"], m.off)


CONVS: dict[str, Conv] = {"gcn": GCN(), "sage": SAGE(), "mlp": MLP()}
