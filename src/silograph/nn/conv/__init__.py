"""Convolutions: one file for each operator, `base` for what they share, `edges` for messages."""

from silograph.nn.conv.base import Conv, Params, Scales, convolve, operator, propagate
from silograph.nn.conv.edges import Messages, internal_messages

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
