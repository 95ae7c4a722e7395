"""Uniform selection: size, order, independence of numbering, and frequencies."""

import itertools
import math

import pytest

from silograph.core.key import Key
from silograph.selection.base import select_uniform

IDS = [f"silo {i}" for i in range(7)]


@pytest.mark.parametrize(("share", "number"), [(1.0, 7), (0.5, 4), (0.3, 2), (0.01, 1)])
def test_size_and_order(share: float, number: int) -> None:
    chosen = select_uniform(IDS, share, Key.of(1))
    assert len(chosen) == number
    assert chosen == [name for name in IDS if name in chosen]


def test_the_same_clients_whatever_their_numbering() -> None:
    for seed in range(20):
        key = Key.of(seed)
        assert set(select_uniform(IDS, 0.4, key)) == set(select_uniform(IDS[::-1], 0.4, key))


def test_every_pair_is_equally_likely() -> None:
    """2 of 7: each of 21 pairs with p = 1/21; 5 sigma of a binomial count."""
    draws = 4200
    counts = dict.fromkeys(itertools.combinations(IDS, 2), 0)
    for seed in range(draws):
        counts[tuple(select_uniform(IDS, 2 / 7, Key.of(seed)))] += 1  # type: ignore[index]
    sigma = math.sqrt(draws / 21 * (1 - 1 / 21))
    assert all(abs(count - draws / 21) < 5 * sigma for count in counts.values())
