"""What an agent sees of a model: its weights in a few numbers.

Weights are hashed into `SIZE` sums with random signs (Charikar, Chen and Farach-Colton, "Finding
frequent items in data streams", ICALP 2002), which keeps inner products in expectation and costs
one pass over the weights; then principal components of the first sketches are taken. The hash is
the same in all runs, so that an agent can go on in another one.

D: weights. K: principal components.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from silograph.core.key import Key

SIZE = 1024


def sketch_of(weights: Mapping[str, Tensor]) -> Tensor:
    """Return the sketch of a model's weights, (1024,) float64, in the order of their names."""
    flat = torch.cat([weights[name].detach().double().cpu().flatten() for name in sorted(weights)])
    place, sign = _hash(len(flat))
    return flat.new_zeros(SIZE).index_add_(0, place, flat * sign)


@lru_cache(maxsize=2)  # a run has one model
def _hash(size: int) -> tuple[Tensor, Tensor]:
    """Return the sum (D,) int64 to which each weight is added, and its sign (D,) float64."""
    words = Key.of(0).fold("sketch of weights").words(torch.arange(size), 1)[:, 0]
    return words & (SIZE - 1), ((words >> 32) & 1).double() * 2 - 1


def principal(sketches: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the mean (1024,) of sketches (T, 1024), T >= K, and a projection (1024, K).

    The first coordinate of the sketches has a root mean square of 1, so that states are no larger
    than actions beside them. Signs are chosen so that the largest entry of each component is
    positive. Components along which the sketches do not differ are 0: any direction would do for
    them, and machines choose different ones.
    """
    mean = sketches.mean(0)
    _, sizes, axes = torch.linalg.svd(sketches - mean, full_matrices=False)
    axes = axes[:count] * (sizes > 1e-9 * sizes[0])[:count, None]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    axes = axes * torch.where(largest < 0, -1.0, 1.0)
    spread = ((sketches - mean) @ axes[0]).square().mean().sqrt()
    return mean, axes.T / spread.clamp(min=torch.finfo(axes.dtype).tiny)
