"""GraphConv: the sum of the neighbors, and the node itself with a weight of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from silograph.core.key import Key
from silograph.graph.block.block import Rows
from silograph.nn.conv.base import Params, add_root, rooted_init
from silograph.nn.conv.edges import Messages
from silograph.nn.segment import segment_linear


@dataclass(frozen=True)
class GraphConv:
    """The 1-dimensional GNN of Morris and others: A X W + X W_root + b.

    Morris, Ritzert, Fey, Hamilton, Lenssen, Rattan and Grohe, "Weisfeiler and Leman go neural:
    higher-order graph neural networks", AAAI 2019, eq. 5, in the form of PyG's GraphConv with sums.
    Weights: weight (I, O), root (I, O), bias (O,).
    """

    sums = True
    indivisible = None
    maps = ("weight", "root")
    rooted = True

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Uniform in +-1/sqrt(I) for all, as in PyG's GraphConv."""
        return rooted_init(key, inputs, outputs)

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X W."""
        return segment_linear(x, p["weight"], off)

    def pre(self, degree: Tensor) -> Tensor | None:
        """1."""
        del degree
        return None

    def post(self, degree: Tensor) -> Tensor | None:
        """1."""
        del degree
        return None

    def own(self, degree: Tensor) -> Tensor | None:
        """None: the node's own row has its own weight, see `finish`."""
        del degree
        return None

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Add the node's own row, through its own weight, and the bias."""
        return add_root(p, x, s, m)
