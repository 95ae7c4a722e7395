"""Convolutions of one matrix before a plain sum: what GCN, GraphConv, GraphSAGE and MLP share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from silograph.core.key import Key
from silograph.graph.block.block import Rows
from silograph.nn.conv.base import Params, Scales, add_root, linear_map, propagate
from silograph.nn.conv.edges import Messages
from silograph.nn.segment import segment_bias


@dataclass(frozen=True)
class PlainConv:
    """The sum of X W over neighbors, with scales, and b; if rooted, plus X W_root.

    Weights: weight (I, O), root (I, O) if rooted, bias (O,).

    Attributes:
        name: what messages call it.
        init: draws initial weights.
        scales: of the sum.
        sums: whether neighbors are summed; else the layer is linear.
        rooted: whether the node's own row has a weight of its own.
        weighs: whether weights of edges scale the terms of the sum, and their sums are degrees.
    """

    name: str
    init: Callable[[Key, int, int], Params]
    scales: Scales
    sums: bool = True
    rooted: bool = False
    weighs: bool = False
    indivisible = ""

    @property
    def maps(self) -> tuple[str, ...]:
        """Names of the matrices."""
        return ("weight", "root") if self.rooted else ("weight",)

    @property
    def kernel(self) -> str | None:
        """Name of its compiled form; none has both a weight and a scale for the node's own row."""
        if not self.sums:
            return "linear"
        if not self.rooted:
            return "sum"
        return "rooted sum" if self.scales.own is None else None

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X W: sums are linear, so W may come before them."""
        return linear_map(p, x, off)

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the sum, (r, O)."""
        del p
        return propagate(self.scales, z, m) if self.sums else m.own_of(z)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Add the node's own row, if it has a weight of its own, and the bias."""
        return segment_bias(add_root(p, x, s, m) if self.rooted else s, p["bias"], m.off)
