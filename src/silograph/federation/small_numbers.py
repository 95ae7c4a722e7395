"""Floating point numbers as float16, or as bytes with a scale for each row.

k: rows. D: width of a row.
"""

import torch
from torch import Tensor

LEVELS = 127  # of a row that is sent as bytes, on either side of 0
LARGEST = 2.0**120  # scale: times its levels it is finite
LARGEST_HALF = 65504.0  # of float16


def as_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (..., D) as whole numbers from -127 to 127, int8, and scales (...) float32.

    A row is its numbers times its scale, to within half a scale in each entry. The scale of a row
    that is not finite is not finite, either, or the largest.
    """
    scale = (x.abs().amax(-1).double() / LEVELS).clamp(max=LARGEST).float()
    levels = x.double() / scale.double().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return levels.round().clamp(-LEVELS, LEVELS).nan_to_num(0.0).to(torch.int8), scale


def as_halves(x: Tensor) -> Tensor:
    """Return float16 numbers, the largest that there are for what is larger."""
    return x.clamp(-LARGEST_HALF, LARGEST_HALF).half()


def from_small(t: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return numbers (..., D) of a dtype from `as_halves`, or from `as_bytes` with its scales."""
    found = t.to(dtype)
    return found if scale is None else found * scale.to(dtype)[..., None]
