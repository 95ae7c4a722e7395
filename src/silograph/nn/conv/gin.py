"""GIN: the sum of a node and its neighbors, then a perceptron."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.work import report_rows
from silograph.graph.block.block import Rows
from silograph.nn.conv.base import (
    Params,
    Scales,
    linear_map,
    propagate,
    uniform,
    uniform_bias,
)
from silograph.nn.conv.edges import Messages
from silograph.nn.segment import gradients, segment_bias, segment_linear


@dataclass(frozen=True)
class GIN:
    """Graph isomorphism layer: relu((A + (1 + eps) I) X W + b) W_out + b_out, with eps = 0.

    Xu, Hu, Leskovec and Jegelka, "How powerful are graph neural networks?", ICLR 2019, eq. 4.1,
    in the form of PyG's GINConv. What we changed: eps is fixed (the paper's GIN-0), and the
    perceptron has no batch norm, whose running statistics are no weights and depend on who is in
    the batch. Its first matrix is linear, so it comes before the sum.
    Weights: weight (I, H), bias (H,), out (H, O), out_bias (O,).

    Attributes:
        hidden: H, width between the perceptron's two matrices.
    """

    hidden: int
    name = "GIN"
    sums = True
    scales = Scales(own=torch.ones_like)  # 1 + eps
    indivisible = ""
    maps = ("weight",)
    rooted = False
    weighs = False
    kernel = None

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Uniform in +-1/sqrt(inputs of the matrix), as in torch's linear layers."""
        return {
            "weight": uniform(key.fold("weight"), inputs, self.hidden),
            "bias": uniform_bias(key.fold("bias"), inputs, self.hidden),
            "out": uniform(key.fold("out"), self.hidden, outputs),
            "out_bias": uniform_bias(key.fold("out_bias"), self.hidden, outputs),
        }

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X W, (n, H)."""
        return linear_map(p, x, off)

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the sum, (r, H)."""
        del p
        return propagate(self.scales, z, m)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """The rest of the perceptron."""
        del x
        h = torch.relu(segment_bias(s, p["bias"], m.off))
        report_rows(m.off, h.shape[1] * (1 + gradients(h)))
        return segment_bias(segment_linear(h, p["out"], m.off), p["out_bias"], m.off)
