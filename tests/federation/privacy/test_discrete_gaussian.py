"""The noise is the discrete Gaussian: against its probabilities, its moments and its tails."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chisquare, kstest, norm

from silograph.federation.privacy.discrete_gaussian import (
    MOST_SIGMA,
    _accepted,
    _exact_chance,
    draw_discrete_gaussian,
)

COUNT = 300_000


@pytest.mark.parametrize("sigma", [1, 2, 3, 5, 12])
def test_small_scales_have_the_probabilities_of_the_definition(sigma: int) -> None:
    """Canonne, Kamath and Steinke 2020, definition 1; chi-square at a fixed key."""
    values = draw_discrete_gaussian(b"chi-square" + bytes([sigma]), sigma, COUNT)
    support = np.arange(-40 * sigma, 40 * sigma + 1)
    weights = np.exp(-(support.astype(float) ** 2) / (2 * sigma**2))
    chances = weights / weights.sum()
    inner = np.abs(support) <= 3 * sigma
    counts = np.array([(values == y).sum() for y in support[inner]])
    counts = np.append(counts, COUNT - counts.sum())
    expected = np.append(chances[inner], 1 - chances[inner].sum()) * COUNT
    assert chisquare(counts, expected).pvalue > 1e-3


@pytest.mark.parametrize("sigma", [1000, 2**22, 3 * 2**30 + 7, MOST_SIGMA])
def test_large_scales_are_the_gaussian_to_rounding(sigma: int) -> None:
    values = draw_discrete_gaussian(b"ks" + sigma.to_bytes(8, "big"), sigma, COUNT)
    assert kstest(values / sigma, norm.cdf).pvalue > 1e-3
    assert values.std() / sigma == pytest.approx(1, abs=5 / math.sqrt(2 * COUNT))
    assert abs(values.mean()) < 5 * sigma / math.sqrt(COUNT)
    assert 3.9 < np.abs(values).max() / sigma < 6.5  # of so many values


def test_low_bits_are_uniform() -> None:
    """Nothing of the value that noise hides shows in its last digits."""
    bits = draw_discrete_gaussian(b"bits", 2**20, COUNT) & 15
    assert chisquare(np.bincount(bits, minlength=16)).pvalue > 1e-3


def test_a_key_gives_the_same_noise_and_another_key_independent_noise() -> None:
    one, again = (draw_discrete_gaussian(b"one", 2**22, 50_000) for _ in range(2))
    other = draw_discrete_gaussian(b"other", 2**22, 50_000)
    assert np.array_equal(one, again)
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(50_000)
    assert (one - other).std() / 2**22 == pytest.approx(math.sqrt(2), rel=0.02)
    assert len(draw_discrete_gaussian(b"one", 2**22, 0)) == 0


def test_close_decisions_are_made_with_many_digits() -> None:
    """The exact probability is that of the float within its error, and decides where they meet."""
    sigma, log_bound = 10, 0.25
    for size, v in ((3, 0), (9, 1), (25, 3)):
        chance = 2.0**v * math.exp(-(size**2) / (2 * sigma**2) - log_bound)
        exact = _exact_chance(size, v, sigma, log_bound)
        assert abs(Fraction(exact, 2**64) - Fraction(chance)) < Fraction(1, 2**50)
    word = np.array([3 << 1], np.uint64)  # y = 3 with u below 2^3 and v = 0
    threshold = _exact_chance(3, 0, sigma, log_bound)
    for uniform, accepted in ((threshold - 1, 1), (threshold, 0)):
        draw = np.array([uniform], np.uint64)
        assert len(_accepted(word, draw, sigma, 3, log_bound)) == accepted


@pytest.mark.parametrize("sigma", [0, MOST_SIGMA + 1])
def test_scales_out_of_range_are_refused(sigma: int) -> None:
    with pytest.raises(ValueError, match="scale"):
        draw_discrete_gaussian(b"", sigma, 1)
