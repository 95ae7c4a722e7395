"""MLP: a linear layer that ignores the graph."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.graph.block.block import Rows
from silograph.nn.conv.base import Params
from silograph.nn.conv.edges import Messages
from silograph.nn.conv.gcn import GCN
from silograph.nn.segment import segment_bias, segment_linear


@dataclass(frozen=True)
class MLP:
    """A linear layer that ignores the graph: X W + b. Weights: weight (I, O), bias (O,)."""

    sums = False
    indivisible = None
    maps = ("weight",)
    rooted = False

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Glorot weight, zero bias."""
        return GCN().init(key, inputs, outputs)

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X W."""
        return segment_linear(x, p["weight"], off)

    def pre(self, degree: Tensor) -> Tensor | None:
        """No neighbors."""
        del degree
        return None

    def post(self, degree: Tensor) -> Tensor | None:
        """No neighbors."""
        del degree
        return None

    def own(self, degree: Tensor) -> Tensor | None:
        """1: there is nothing else."""
        return torch.ones_like(degree)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Add the bias."""
        del x
        return segment_bias(s, p["bias"], m.off)
