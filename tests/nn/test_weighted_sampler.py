"""Draws with replacement: their probabilities, and that numbering does not matter."""

import torch

from silograph.core.key import Key
from silograph.nn.mini_batches import build_sampler

SHARE = torch.tensor([1.0, 0.0, 5.0, 2.0], dtype=torch.float64)
NAMES = torch.tensor([40, -7, 3, 11])


def test_items_are_drawn_in_proportion_to_their_shares() -> None:
    draws = 20_000
    found = torch.bincount(build_sampler(SHARE, NAMES).draw(draws, Key.of(0)), minlength=4)
    p = SHARE / SHARE.sum()
    spread = (draws * p * (1 - p)).sqrt()
    assert bool(((found - draws * p).abs() <= 5 * spread).all())


def test_numbering_does_not_matter() -> None:
    order = torch.tensor([2, 0, 3, 1])
    plain = build_sampler(SHARE, NAMES).draw(50, Key.of(1))
    moved = build_sampler(SHARE[order], NAMES[order]).draw(50, Key.of(1))
    assert plain.tolist() == order[moved].tolist()
    assert build_sampler(SHARE, NAMES).draw(0, Key.of(1)).tolist() == []
