"""GraphConv: the sum of the neighbors, and the node itself with a weight of its own.

The 1-dimensional GNN of Morris and others: A X W + X W_root + b.
Weights of edges are the entries of A.

Morris, Ritzert, Fey, Hamilton, Lenssen, Rattan and Grohe, "Weisfeiler and Leman go neural:
higher-order graph neural networks", AAAI 2019, eq. 5, in the form of PyG's GraphConv with sums.
All weights are uniform in +-1/sqrt(I), as there.
"""

from silograph.nn.conv.base import Scales, rooted_init
from silograph.nn.conv.plain import PlainConv

GraphConv = PlainConv("GraphConv", rooted_init, Scales(), rooted=True, weighs=True)
