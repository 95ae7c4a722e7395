"""GraphSAGE with the mean of the neighbors: mean(X_N) W + X W_root + b.

Hamilton, Ying and Leskovec, "Inductive representation learning on large graphs", NeurIPS 2017,
algorithm 1 with the mean aggregator, in the form of PyG's SAGEConv. A node without neighbors has
mean 0. All weights are uniform in +-1/sqrt(I), as there.
"""

from torch import Tensor

from silograph.nn.conv.base import Scales, rooted_init
from silograph.nn.conv.plain import PlainConv


def mean(degree: Tensor) -> Tensor:
    """Return 1 / d."""
    return 1 / degree.clamp(min=1)


SAGE = PlainConv("SAGE", rooted_init, Scales(post=mean), rooted=True)
