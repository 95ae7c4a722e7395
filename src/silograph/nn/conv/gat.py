"""GAT: neighbors weighted by attention."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from silograph.core.key import Key
from silograph.core.work import report_entries, report_rows
from silograph.graph.block.block import Rows
from silograph.nn.conv.layers import Messages, Params, glorot, linear_map
from silograph.nn.segment import (
    edge_product,
    gradients,
    segment_bias,
    segment_heads,
)

SLOPE = 0.2  # of the leaky ReLU
EDGE_FLOPS = 6  # an edge or self loop, a head: add, leaky ReLU, maximum, difference, exp, sum


@dataclass(frozen=True)
class GAT:
    """Graph attention with self loops: for each head, out_i = sum over j of a_ij (W x_j) + b.

        a_ij = softmax over j, in N(i) or i itself, of leaky_relu(u . W x_j + v . W x_i)

    Veličković, Cucurull, Casanova, Romero, Liò and Bengio, "Graph attention networks", ICLR 2018,
    eq. 3 to 6, in the form of PyG's GATConv. Heads stand side by side, or their mean is taken.
    In training, attention is dropped where the model asks for it (section 3.3; `EdgeDraws`).
    Over drawn neighbors, one that stands for k has weight k in the softmax: a ratio of unbiased
    sums, exact where all are drawn.
    Weights: weight (I, heads * D), sender u (heads, D), receiver v (heads, D), bias (O,).

    Attributes:
        heads: number of them.
        concat: whether heads stand side by side, O = heads * D; else their mean, O = D.
    """

    heads: int
    concat: bool
    name = "GAT"
    sums = True
    scales = None
    indivisible = (
        "attention weighs each edge by both of its ends and by all edges of the receiver, so its "
        "sum is not one of parts that silos can work out alone"
    )
    maps = ("weight",)
    rooted = False
    weighs = False
    kernel = None

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Glorot weights, zero bias, as in PyG's GATConv."""
        width = outputs // self.heads if self.concat else outputs
        return {
            "weight": glorot(key.fold("weight"), inputs, self.heads * width),
            "sender": glorot(key.fold("sender"), self.heads, width),
            "receiver": glorot(key.fold("receiver"), self.heads, width),
            "bias": torch.zeros(outputs, dtype=torch.float64),
        }

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X W, (n, heads * D)."""
        return linear_map(p, x, off)

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the attentive mean of z (s, heads * D) over neighbors and self, (r, heads, D)."""
        rows, columns = m.adj.row, m.adj.indices.long()
        own = m.own_of(z)
        sent = segment_heads(z, p["sender"], m.sender_off)
        receiver_logits = segment_heads(own, p["receiver"], m.off)
        edge = leaky_relu(
            sent.index_select(0, columns) + receiver_logits.index_select(0, rows), SLOPE
        )
        loop = leaky_relu(m.own_of(sent) + receiver_logits, SLOPE)
        where = rows[:, None].expand_as(edge)
        # The largest is taken off so that nothing overflows; it cancels.
        top = loop.detach().scatter_reduce(0, where, edge.detach(), "amax")
        edge, loop = (edge - top.index_select(0, rows)).exp(), (loop - top).exp()
        if m.own is not None:
            assert m.adj.values is not None  # drawn edges say what they stand for
            edge = edge * m.adj.values[:, None]
        total = loop.index_add(0, rows, edge)
        self._report(z, edge, m)
        if m.attention is not None:
            edge = m.attention.apply_dropout(edge, rows, columns)
            loop = m.attention.apply_dropout(loop, None, None)
        s = edge_product(m.adj, edge, z.view(len(z), self.heads, -1))
        s = s + loop[..., None] * own.view(s.shape)
        return s / total[..., None]

    def _report(self, z: Tensor, edge: Tensor, m: Messages) -> None:
        passes = 1 + gradients(edge)
        softmax = (EDGE_FLOPS + 2 * (m.attention is not None)) * self.heads * passes
        report_entries(m.adj.indptr, m.off, softmax + 2 * z.shape[1] * (passes + gradients(z)))
        loops = softmax + 2 * z.shape[1] * (passes + gradients(z))
        report_rows(m.off, loops + z.shape[1] * passes)  # the division

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Concatenate or average the heads, and add the bias."""
        del x
        if self.concat:
            return segment_bias(s.flatten(1), p["bias"], m.off)
        report_rows(m.off, s[0].numel() * (1 + gradients(s)) if len(s) else 0)
        return segment_bias(s.mean(dim=1), p["bias"], m.off)
