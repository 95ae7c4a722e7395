"""Convolutions: one file for each operator, `base` for what they share, `edges` for messages."""

from silograph.nn.conv.layers import (
    Conv,
    Messages,
    Params,
    Scales,
    convolve,
    internal_messages,
    operator,
    propagate,
)

__all__ = [
    "Conv",
    "Messages",
    "Params",
    "Scales",
    "convolve",
    "internal_messages",
    "operator",
    "propagate",
]
