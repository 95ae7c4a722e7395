"""GCN: the graph convolution of Kipf and Welling."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.graph.block.block import Rows
from silograph.nn.conv.base import Params, glorot
from silograph.nn.conv.edges import Messages
from silograph.nn.segment import segment_bias, segment_linear


@dataclass(frozen=True)
class GCN:
    """Graph convolution: D^-1/2 (A + I) D^-1/2 X W + b, D the degrees of A + I.

    Kipf and Welling, "Semi-supervised classification with graph convolutional networks",
    ICLR 2017, eq. 2. Weights: weight (I, O), bias (O,).
    """

    sums = True
    indivisible = None
    maps = ("weight",)
    rooted = False

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Glorot weight, zero bias, as in PyG's GCNConv."""
        bias = torch.zeros(outputs, dtype=torch.float64)
        return {"weight": glorot(key.fold("weight"), inputs, outputs), "bias": bias}

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X W."""
        return segment_linear(x, p["weight"], off)

    def pre(self, degree: Tensor) -> Tensor | None:
        """d^-1/2 with the self loop counted."""
        return (degree + 1).rsqrt()

    def post(self, degree: Tensor) -> Tensor | None:
        """The same on the receiver's side."""
        return (degree + 1).rsqrt()

    def own(self, degree: Tensor) -> Tensor | None:
        """1 / d: the self loop."""
        return 1 / (degree + 1)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Add the bias."""
        del x
        return segment_bias(s, p["bias"], m.off)
