"""MLP: a linear layer that ignores the graph, X W + b; Glorot weight, zero bias."""

import torch

from silograph.nn.conv.base import Scales, glorot_init
from silograph.nn.conv.plain import PlainConv

MLP = PlainConv("MLP", glorot_init, Scales(own=torch.ones_like), sums=False)
