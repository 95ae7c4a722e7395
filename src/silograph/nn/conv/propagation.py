"""One step of APPNP: neighbors are averaged, nothing is learned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from silograph.core.key import Key
from silograph.graph.block.block import Rows
from silograph.nn.conv.base import Params, Scales, inverse_root, propagate
from silograph.nn.conv.edges import Messages


def _post(degree: Tensor, kept: float) -> Tensor:
    return kept * inverse_root(degree)


def _own(degree: Tensor, kept: float) -> Tensor:
    return kept / (degree + 1)


@dataclass(frozen=True)
class _Kept:
    """A scale with its second argument; unlike partial functions, equal ones are equal."""

    scale: Callable[[Tensor, float], Tensor]
    kept: float

    def __call__(self, degree: Tensor) -> Tensor:
        return self.scale(degree, self.kept)


@dataclass(frozen=True)
class Propagation:
    """A step of personalized PageRank without its restart: (1 - a) D^-1/2 (A + I) D^-1/2 X.

    Gasteiger, Bojchevski and Günnemann, "Predict then propagate: graph neural networks meet
    personalized PageRank", ICLR 2019, eq. 4; the restart, a times what the first step began
    with, is added by the stage (`silograph.nn.forward.Stage.teleport`). No weights.

    Attributes:
        teleport: a, probability of a restart.
    """

    teleport: float
    name = "Propagation"
    sums = True
    indivisible = ""
    maps = ()
    rooted = False
    weighs = True
    kernel = None

    @property
    def scales(self) -> Scales:
        """As GCN, times 1 - a."""
        kept = 1 - self.teleport
        return Scales(inverse_root, _Kept(_post, kept), _Kept(_own, kept))

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Nothing to learn."""
        del key, inputs, outputs
        return {}

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X."""
        del p, off
        assert isinstance(x, Tensor)  # linear stages come first
        return x

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the sum, (r, O)."""
        del p
        return propagate(self.scales, z, m)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """The sum is all."""
        del p, x, m
        return s
