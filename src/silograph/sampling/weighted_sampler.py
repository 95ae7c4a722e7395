"""Draws with replacement that do not depend on the order in which items are numbered.

k: items.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.key import Key


@dataclass(frozen=True, eq=False)
class WeightedSampler:
    """Items with the probabilities that they are drawn.

    Attributes:
        items: (k,) int64, in the order of their keys.
        cumulative: (k,) float64 shares of the items so far, summed; the last is the sum of all.
    """

    items: Tensor
    cumulative: Tensor

    def draw(self, draws: int, key: Key) -> Tensor:
        """Return drawn items, (draws,) int64; there must be one to draw."""
        ticket = (
            key.uniform(torch.arange(draws, device=self.items.device))[:, 0] * self.cumulative[-1]
        )
        drawn_items = torch.searchsorted(self.cumulative, ticket, right=True)
        return self.items[drawn_items.clamp(max=len(self.items) - 1)]


def build_sampler(share: Tensor, item_key: Tensor) -> WeightedSampler:
    """Return the sampler of items 0..k-1.

    Args:
        share: (k,) float64, probability of each, up to a common factor.
        item_key: (k,) int64, which do not depend on the numbering.
    """
    order = item_key.argsort()
    return WeightedSampler(order, share[order].cumsum(0))
