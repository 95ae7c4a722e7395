"""Floating point numbers as float16, or as bytes or half bytes with a scale for each row.

k: rows. D: width of a row.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

LEVELS = 127  # of a row that is sent as bytes, on either side of 0
HALF_LEVELS = 7  # as half bytes
ZERO = 8  # a half byte that stands for 0
# The largest number by the dtype of bytes, and of pairs of half bytes, whatever is sent.
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


def from_small(t: Tensor, scale: Tensor | None, dtype: torch.dtype, width: int) -> Tensor:
    """Return numbers (..., D) of a dtype from `as_halves`, or from bytes with their scales.

    Args:
        t: numbers as they were sent.
        scale: of their rows.
        dtype: that is wanted.
        width: D.
    """
    if t.dtype is torch.uint8:
        halves = torch.stack((t & 15, t >> 4), -1).flatten(-2)[..., :width]
        t = halves.to(torch.int8) - ZERO
    found = t.to(dtype)
    return found if scale is None else found * scale.to(dtype)[..., None]
