"""Clipping against closed forms: norms, directions, and what integers lose."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from silograph.core.key import Key
from silograph.core.payload import Stacked
from silograph.federation.privacy.release import SimulatedNoise, shares_of
from silograph.federation.privacy.updates import (
    ADAPTED_CLIP_UNITS,
    CLIP_RATE,
    CLIP_UNITS,
    LEAST_CLIP,
    MOST_CLIP,
    WITHIN_UNITS,
    UpdatePrivacy,
    add_noise,
    clip_to_grid,
    clipped_updates,
    mean_update,
    next_clip,
    share_within,
)
from silograph.federation.secure.partners import topology_of

PRIVACY = UpdatePrivacy("silo", 4.0, 1e-5, 2.0, 3.0, 10)


@given(
    arrays.arrays(
        np.float64,
        st.tuples(st.integers(1, 3), st.integers(1, 20)),
        elements=st.floats(allow_nan=True, allow_infinity=True, width=64),
    ),
    st.floats(1e-6, 1e6),
)
def test_no_update_is_longer_than_the_clip(updates: np.ndarray, clip: float) -> None:
    """The sensitivity that the accountant counts, in exact integers, whatever comes."""
    for row, update in zip(clip_to_grid(updates, clip).tolist(), updates, strict=True):
        assert sum(value * value for value in row) <= CLIP_UNITS**2
        if not np.isfinite(update).all():
            assert not any(row)


def test_short_updates_stay_and_long_ones_keep_their_direction() -> None:
    generator = np.random.default_rng(0)
    directions = generator.normal(size=(2, 1000))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    grid = clip_to_grid(directions * np.array([[0.5], [40.0]]), 2.0)
    assert np.abs(grid * 2.0 / CLIP_UNITS - directions * np.array([[0.5], [2.0]])).max() <= (
        2.0 / CLIP_UNITS * 1.001
    )
    assert np.linalg.norm(grid[1]) / CLIP_UNITS == pytest.approx(1, abs=1e-5)


def test_the_mean_has_a_fixed_denominator() -> None:
    start = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    trained = {"a": torch.full((2, 2, 3), 0.25), "b": torch.ones(2, 4)}
    fields, within = clipped_updates(trained, start, 2.0, PRIVACY)
    assert within is None  # for a fixed clip
    assert all(field.t.dtype == torch.int64 for field in fields.values())
    total = {name: field.t.sum(0) for name, field in fields.items()}
    mean = mean_update(total, start, 2.0, 4)  # two of four silos are away
    torch.testing.assert_close(mean["a"], torch.full((2, 3), 0.125), rtol=0, atol=1e-6)
    assert torch.equal(mean["b"], start["b"])


@pytest.mark.parametrize("secure", [False, True])
def test_the_noise_of_the_fewest_survivors_is_all_of_it(secure: bool) -> None:
    """With shares the least sum that is ever unmasked has the variance that was promised.

    Also for a silo of that sum, which subtracts its own share.
    """
    silos = 10
    reply = {"update/w": Stacked(torch.zeros(silos, 20_000, dtype=torch.int64))}
    noise = SimulatedNoise(PRIVACY, secure=secure)
    ids = [f"silo {n}" for n in range(silos)]
    noised = noise.add(reply, ids, Key.of(3), silos)["update/w"].t
    fewest = topology_of(silos).threshold - 1 if secure else 1
    assert shares_of(silos, secure=secure) == fewest
    total = noised[:fewest].sum(0).double() / CLIP_UNITS
    expected = PRIVACY.noise_multiplier
    assert float(total.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * 20_000))
    assert torch.equal(noise.add(reply, ids, Key.of(3), silos)["update/w"].t, noised)
    assert abs(float(torch.corrcoef(noised.double())[0, 1])) < 5 / math.sqrt(20_000)


def test_noise_does_not_depend_on_the_order_of_fields() -> None:
    fields = {n: Stacked(torch.zeros(1, 5, dtype=torch.int64)) for n in ("b", "a")}
    one = add_noise(fields, [b"seed"], 100)
    other = add_noise(dict(reversed(fields.items())), [b"seed"], 100)
    assert all(torch.equal(one[n].t, other[n].t) for n in fields)
    assert not torch.equal(one["a"].t, one["b"].t)


def test_a_silo_of_two_adds_all_of_the_noise() -> None:
    """The other one knows its own share."""
    assert shares_of(2, secure=True) == 1
    assert all(shares_of(n, secure=True) == topology_of(n).threshold - 1 for n in range(3, 120))


# --- A clip that adapts --------------------------------------------------------------------------


ADAPTING = dataclasses.replace(PRIVACY, quantile=0.5)


@example(np.full((1, 20), 1e308), 1.0)  # whose norm is no finite number
@given(
    arrays.arrays(
        np.float64,
        st.tuples(st.integers(1, 3), st.integers(1, 20)),
        elements=st.floats(allow_nan=True, allow_infinity=True, width=64),
    ),
    st.floats(1e-6, 1e6) | st.sampled_from([LEAST_CLIP, MOST_CLIP]),
)
def test_no_silo_moves_update_and_share_by_more_than_the_accountant_counts(
    updates: np.ndarray, clip: float
) -> None:
    """Neighbors are with and without one silo, which moves the sums by its own integers."""
    start = {"a": torch.zeros(updates.shape[1], dtype=torch.float64)}
    trained = {"a": torch.from_numpy(updates)}
    fields, within = clipped_updates(trained, start, clip, ADAPTING)
    assert within is not None
    for row, word in zip(fields["a"].t.tolist(), within.t.tolist(), strict=True):
        assert abs(word) == WITHIN_UNITS
        assert sum(value * value for value in (*row, word)) <= CLIP_UNITS**2


def test_the_worst_pair_moves_them_by_all_that_the_accountant_counts() -> None:
    """A long update along one weight: nothing is wasted, and the noise is as without the share."""
    start = {"a": torch.zeros(3, dtype=torch.float64)}
    trained = {"a": torch.tensor([[0.0, 1e9, 0.0]], dtype=torch.float64)}
    fields, within = clipped_updates(trained, start, 1.0, ADAPTING)
    assert within is not None
    moved = math.hypot(*fields["a"].t[0].tolist(), int(within.t[0]))
    assert CLIP_UNITS - 2 < moved <= CLIP_UNITS
    assert ADAPTING.sigma() == PRIVACY.sigma()
    # Theorem 1 of Andrew et al. 2021: z_delta^-2 = z^-2 - (2 sigma_b)^-2.
    z, sigma = ADAPTING.noise_multiplier, ADAPTING.sigma()
    z_delta, sigma_b = sigma / ADAPTED_CLIP_UNITS, sigma / (2 * WITHIN_UNITS)
    assert z_delta == pytest.approx((z**-2 - (2 * sigma_b) ** -2) ** -0.5, rel=1e-6)
    assert z < z_delta < 1.04 * z


@pytest.mark.parametrize("first", [1e-3, 1.0, 500.0])
@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.75])
def test_without_noise_the_clip_goes_to_the_quantile_of_planted_norms(
    first: float, quantile: float
) -> None:
    generator = np.random.default_rng(0)
    norms = np.sort(generator.lognormal(0.0, 1.0, 41))
    directions = generator.normal(size=(41, 7))
    directions *= (norms / np.linalg.norm(directions, axis=1))[:, None]
    start = {"a": torch.zeros(7, dtype=torch.float64)}
    trained, clip = {"a": torch.from_numpy(directions)}, first
    for _ in range(400):
        _, words = clipped_updates(trained, start, clip, ADAPTING)
        assert words is not None
        within = share_within(int(words.t.sum()), len(norms))
        assert within == pytest.approx((norms <= clip).mean())
        following = next_clip(clip, within, quantile)
        assert following == pytest.approx(clip * math.exp(-CLIP_RATE * (within - quantile)))
        clip = following
    # A step is at most this far, and no step leads away from the quantile.
    width = math.exp(CLIP_RATE * max(quantile, 1 - quantile))
    target = norms[math.ceil(quantile * len(norms)) - 1]
    assert target / width <= clip <= target * width


def test_a_clip_stays_finite_whatever_the_noise() -> None:
    clip = 1.0
    for _ in range(20):
        clip = next_clip(clip, -1e300, 0.5)
    assert clip == MOST_CLIP
    for _ in range(40):
        clip = next_clip(clip, 1e300, 0.5)
    assert clip == LEAST_CLIP


def test_updates_within_an_adapting_clip_come_back_whole() -> None:
    start = {"a": torch.zeros(4, dtype=torch.float64)}
    trained = {"a": torch.tensor([[0.1, -0.2, 0.3, 0.0]], dtype=torch.float64)}
    fields, _ = clipped_updates(trained, start, 3.0, ADAPTING)
    total = {name: field.t.sum(0) for name, field in fields.items()}
    mean = mean_update(total, start, 3.0, 1, ADAPTING.clip_units)
    torch.testing.assert_close(mean["a"], trained["a"][0], rtol=0, atol=1e-6)


def test_silos_that_are_away_count_half() -> None:
    assert share_within(0, 5) == 0.5
    assert share_within(4 * WITHIN_UNITS, 4) == 1.0
    assert share_within(-4 * WITHIN_UNITS, 4) == 0.0
