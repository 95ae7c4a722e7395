"""Floating point numbers as float16, or as bytes or half bytes with a scale for each row.

k: rows. D: width of a row.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from silograph.core.errors import ProtocolError

LEVELS = 127  # of a row that is sent as bytes, on either side of 0
HALF_LEVELS = 7  # as half bytes
ZERO = 8  # a half byte that stands for 0
# Dtypes of numbers with scales (uint8: pairs of half bytes), and how far from 0 a number may be:
# -128 and -8 are never sent from here, but may come.
SCALED = {torch.int8: 128, torch.uint8: 8}
LARGEST = 2.0**120  # scale: times its levels it is finite
LARGEST_HALF = 65504.0  # of float16


def as_bytes(x: Tensor, most: int = LEVELS) -> tuple[Tensor, Tensor]:
    """Return rows (..., D) as whole numbers from -most to most, int8, and scales (...) float32.

    A row is its numbers times its scale, to within half a scale in each entry. The scale of a row
    that is not finite is not finite, either, or the largest.
    """
    scale = (x.abs().amax(-1).double() / most).clamp(max=LARGEST).float()
    levels = x.double() / scale.double().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return levels.round().clamp(-most, most).nan_to_num(0.0).to(torch.int8), scale


def as_half_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (..., D) as whole numbers from -7 to 7, two in a byte, and scales (...) float32.

    The bytes are (..., (D + 1) // 2) uint8: 8 more than number 2 i in the low half of byte i, 8
    more than the next one in the high half; 8 where there is none.
    """
    numbers, scale = as_bytes(x, HALF_LEVELS)
    halves = pad(numbers + ZERO, (0, numbers.shape[-1] % 2), value=ZERO).to(torch.uint8)
    return halves[..., 0::2] | halves[..., 1::2] << 4, scale


def as_halves(x: Tensor) -> Tensor:
    """Return float16 numbers, the largest that there are for what is larger."""
    return x.clamp(-LARGEST_HALF, LARGEST_HALF).half()


def packed_width(dtype: torch.dtype, width: int) -> int:
    """Return how many entries a row of so many small numbers has on its way."""
    return (width + 1) // 2 if dtype is torch.uint8 else width


def unpacked(t: Tensor, width: int) -> Tensor:
    """Return rows (..., D) of small numbers, half bytes as int8.

    Args:
        t: rows as they were sent, (..., `packed_width`).
        width: D.

    Raises:
        ProtocolError: rows of another width.
    """
    expected = packed_width(t.dtype, width)
    if t.shape[-1] != expected:
        raise ProtocolError(
            f"expected {expected} entries for a row of {width} numbers, got {t.shape[-1]}"
        )
    if t.dtype is not torch.uint8:
        return t
    return torch.stack((t & 15, t >> 4), -1).flatten(-2)[..., :width].to(torch.int8) - ZERO


def from_small(t: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return numbers (..., D) of a dtype from `as_halves`, or from bytes with their scales."""
    found = t.to(dtype)
    return found if scale is None else found * scale.to(dtype)[..., None]
