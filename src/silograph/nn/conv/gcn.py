"""GCN: the graph convolution of Kipf and Welling.

D^-1/2 (A + I) D^-1/2 X W + b, D the degrees of A + I. Weights of edges are the entries of A, and
degrees their sums; a self loop has weight 1.

Kipf and Welling, "Semi-supervised classification with graph convolutional networks", ICLR 2017,
eq. 2. Glorot weight, zero bias, as in PyG's GCNConv.
"""

from silograph.nn.conv.base import Scales, glorot_init, inverse, inverse_root
from silograph.nn.conv.plain import PlainConv

GCN = PlainConv(
    "GCN", glorot_init, Scales(pre=inverse_root, post=inverse_root, own=inverse), weighs=True
)
