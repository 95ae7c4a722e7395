"""Convolutions, each split into the parts that a federation needs to tell apart.

    z = map(x)                                  linear, at the node that sends
    s = post * (A @ (pre * z)) + own * z        the sum over neighbors, scaled on both sides, and
                                                the node's own z
    out = finish(x, s)                          bias and further self terms, at the receiver

Only the sum crosses clients, so only the sum has to know about them; each side scales by its
own degrees, so no degree travels. In the backward pass `pre` and `post` swap.

Every function takes weights that are shared by all clients or stacked by client (`segment`).

n: rows. I, O: input and output width. C: clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.work import report_entries, report_rows
from silograph.graph.block import ClientBlock, Rows, SparseRows
from silograph.graph.csr import CSR
from silograph.nn.segment import gradients, segment_bias, segment_linear, sparse_product

Params = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Messages:
    """Who hears whom in one layer; r rows hear s rows, of which they are some.

    Attributes:
        adj: (r, s), no self loops. Values are 1, or how many edges a drawn one stands for.
        symmetric: whether `adj` is.
        sender: (s, 1) floating point, number of neighbors of each row that sends.
        receiver: (r, 1) the same of each row that hears.
        own: (r,) int64 where a row that hears is among those that send; None: the same rows.
        sender_off: (C + 1,) rows of each client that send.
        off: (C + 1,) rows of each client that hear.
        operators: what `operator` has worked out, by convolution.
    """

    adj: CSR
    symmetric: bool
    sender: Tensor
    receiver: Tensor
    own: Tensor | None
    sender_off: Tensor
    off: Tensor
    operators: dict[str, CSR] = field(default_factory=dict, init=False, repr=False)

    def own_of(self, z: Tensor) -> Tensor:
        """Return the rows of z (s, D) that hear, (r, D)."""
        return z if self.own is None else z[self.own]

    def own_rows(self, x: Rows) -> Rows:
        """Return the same of features."""
        if isinstance(x, Tensor):
            return self.own_of(x)
        return x if self.own is None else SparseRows(x.csr.select_rows(self.own), self.off)


def internal_messages(block: ClientBlock, dtype: torch.dtype) -> Messages:
    """Return the messages along internal edges: cross-client edges are dropped."""
    name = ("messages", dtype)
    if name not in block.memo:
        degree = block.adj.degree.to(dtype)[:, None]
        block.memo[name] = Messages(block.adj, True, degree, degree, None, block.off, block.off)
    found = block.memo[name]
    assert isinstance(found, Messages)
    return found


class Conv(Protocol):
    """A convolution; see the head of this file for what the parts are."""

    @property
    def sums(self) -> bool:
        """Whether neighbors are summed at all."""

    @property
    def maps(self) -> tuple[str, ...]:
        """Names of the weights (I, O) that meet x, and meet it linearly."""

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Return initial weights in float64, shared form."""

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """Return z (n, O)."""

    def pre(self, degree: Tensor) -> Tensor | None:
        """Return the sender's scale (n, 1), or None for 1."""

    def post(self, degree: Tensor) -> Tensor | None:
        """Return the receiver's scale (n, 1), or None for 1."""

    def own(self, degree: Tensor) -> Tensor | None:
        """Return the weight of the receiver's own z (n, 1), or None for 0."""

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Return the output (n, O)."""


def operator(conv: Conv, messages: Messages) -> CSR:
    """Return post * A * pre + own as one matrix (n, n), for messages among the same rows.

    One product in place of four passes over the rows.
    """
    name = type(conv).__name__
    if name not in messages.operators:
        like = messages.sender
        one, zero = np.ones(len(like)), np.zeros(len(like))
        pre, post, own = conv.pre(like), conv.post(like), conv.own(like)
        left, right, middle = (
            default if scale is None else scale[:, 0].double().cpu().numpy()
            for scale, default in ((post, one), (pre, one), (own, zero))
        )
        adj = messages.adj.scipy()
        matrix = sp.diags_array(left) @ adj @ sp.diags_array(right) + sp.diags_array(middle)
        found = CSR.from_scipy(sp.csr_matrix(matrix))
        messages.operators[name] = found.to(like.device, like.dtype)
    return messages.operators[name]


def propagate(conv: Conv, z: Tensor, messages: Messages) -> Tensor:
    """Return post * (A @ (pre * z)) + own * z, (n, O)."""
    pre, post = conv.pre(messages.sender), conv.post(messages.receiver)
    own = conv.own(messages.receiver)
    width, passes = z.shape[1], 1 + gradients(z)
    report_entries(messages.adj.indptr, messages.off, 2 * width * passes)
    report_rows(messages.sender_off, width * passes * (pre is not None))
    report_rows(messages.off, width * passes * ((post is not None) + 2 * (own is not None)))
    if messages.own is None:
        matrix = operator(conv, messages)
        alike = messages.symmetric and (pre is None) == (post is None)
        return sparse_product(matrix, z, symmetric=alike)
    s = sparse_product(messages.adj, z if pre is None else pre * z)
    s = s if post is None else post * s
    return s if own is None else s + own * messages.own_of(z)


def convolve(conv: Conv, p: Mapping[str, Tensor], x: Rows, messages: Messages) -> Tensor:
    """Return one convolution of x (n, I), (n, O)."""
    z = conv.map(p, x, messages.sender_off)
    s = propagate(conv, z, messages) if conv.sums else messages.own_of(z)
    return conv.finish(p, x, s, messages)


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
    maps = ("weight",)

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

    def own(self, degree: Tensor) -> Tensor:
        """1 / d: the self loop."""
        return 1 / (degree + 1)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Add the bias."""
        del x
        return segment_bias(s, p["bias"], m.off)


class SAGE:
    """GraphSAGE with the mean of the neighbors: mean(X_N) W + X W_root + b.

    Hamilton, Ying and Leskovec, "Inductive representation learning on large graphs", NeurIPS
    2017, algorithm 1 with the mean aggregator, in the form of PyG's SAGEConv. A node without
    neighbors has mean 0. Weights: weight (I, O), root (I, O), bias (O,).
    """

    sums = True
    maps = ("weight", "root")

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

    def own(self, degree: Tensor) -> None:
        """None: the node's own row has its own weight, see `finish`."""
        del degree

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Add the node's own row, through its own weight, and the bias."""
        report_rows(m.off, s.shape[1])
        own = segment_linear(m.own_rows(x), p["root"], m.off)
        return segment_bias(s + own, p["bias"], m.off)


class MLP:
    """A linear layer that ignores the graph: X W + b. Weights: weight (I, O), bias (O,)."""

    sums = False
    maps = ("weight",)

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

    def own(self, degree: Tensor) -> Tensor:
        """1: there is nothing else."""
        return torch.ones_like(degree)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Add the bias."""
        del x
        return segment_bias(s, p["bias"], m.off)


CONVS: dict[str, Conv] = {"gcn": GCN(), "sage": SAGE(), "mlp": MLP()}
