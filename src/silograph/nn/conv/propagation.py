"""One step of APPNP: neighbors are averaged, nothing is learned."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from silograph.core.key import Key
from silograph.graph.block.block import Rows
from silograph.nn.conv.base import Params
from silograph.nn.conv.edges import Messages
from silograph.nn.conv.gcn import GCN


@dataclass(frozen=True)
class Propagation:
    """A step of personalized PageRank without its restart: (1 - a) D^-1/2 (A + I) D^-1/2 X.

    Gasteiger, Bojchevski and Günnemann, "Predict then propagate: graph neural networks meet
    personalized PageRank", ICLR 2019, eq. 4; the restart, a times what the first step began
    with, is added by the stage (`silograph.nn.model.Stage.teleport`). No weights.

    Attributes:
        teleport: a, probability of a restart.
    """

    teleport: float
    sums = True
    indivisible = None
    maps = ()
    rooted = False

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Nothing to learn."""
        del key, inputs, outputs
        return {}

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X."""
        del p, off
        assert isinstance(x, Tensor)  # linear stages come first
        return x

    def pre(self, degree: Tensor) -> Tensor | None:
        """As GCN."""
        return GCN().pre(degree)

    def post(self, degree: Tensor) -> Tensor | None:
        """As GCN, times 1 - a."""
        return (1 - self.teleport) * (degree + 1).rsqrt()

    def own(self, degree: Tensor) -> Tensor | None:
        """As GCN, times 1 - a."""
        return (1 - self.teleport) / (degree + 1)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """The sum is all."""
        del p, x, m
        return s
