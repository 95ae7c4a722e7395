"""Clipping against closed forms: norms, directions, and what integers lose."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from silograph.core.key import Key
from silograph.core.payload import Stacked
from silograph.federation.privacy.release import SimulatedNoise, shares_of
from silograph.federation.privacy.updates import (
    CLIP_UNITS,
    UpdatePrivacy,
    add_noise,
    clip_to_grid,
    clipped_updates,
    mean_update,
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
    fields = clipped_updates(trained, start, 2.0)
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
