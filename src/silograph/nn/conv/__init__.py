"""Convolutions: one file for each operator, `base` for what they share, `edges` for messages."""

from collections.abc import Mapping

from torch import Tensor

from silograph.graph.block.block import Rows
from silograph.nn.conv.base import Conv, Params, operator, propagate
from silograph.nn.conv.edges import Messages, internal_messages
from silograph.nn.conv.gat import GAT
from silograph.nn.conv.gcn import GCN
from silograph.nn.conv.gin import GIN
from silograph.nn.conv.graphconv import GraphConv
from silograph.nn.conv.mlp import MLP
from silograph.nn.conv.propagation import Propagation
from silograph.nn.conv.sage import SAGE

AnyConv = Conv | GAT
__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "MLP",
    "SAGE",
    "AnyConv",
    "Conv",
    "GraphConv",
    "Messages",
    "Params",
    "Propagation",
    "convolve",
    "internal_messages",
    "operator",
    "propagate",
]


def convolve(conv: AnyConv, p: Mapping[str, Tensor], x: Rows, messages: Messages) -> Tensor:
    """Return one convolution of x (n, I), (n, O)."""
    z = conv.map(p, x, messages.sender_off)
    if isinstance(conv, GAT):
        s = conv.attend(p, z, messages)
    else:
        s = propagate(conv, z, messages) if conv.sums else messages.own_of(z)
    return conv.finish(p, x, s, messages)
