"""The accountant against closed forms and published examples."""

import math

import pytest

pytest.importorskip("dp_accounting")

import dp_accounting
import dp_accounting.pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from mistakes import raises_code
from silograph.core.errors import ConfigError
from silograph.federation.privacy.accounting import epsilon_left, epsilon_of, noise_multiplier_for


def exact_epsilon(multiplier: float, releases: int, delta: float) -> float:
    """Epsilon of composed continuous Gaussians: Balle and Wang, ICML 2018, theorem 8."""
    scale = math.sqrt(releases) / multiplier

    def gap(epsilon: float) -> float:
        first = norm.cdf(scale / 2 - epsilon / scale)
        return float(first - math.exp(epsilon) * norm.cdf(-scale / 2 - epsilon / scale)) - delta

    return float(brentq(gap, 1e-9, 300.0))


@pytest.mark.parametrize(
    ("multiplier", "releases", "delta"), [(1.0, 1, 1e-5), (5.0, 100, 1e-6), (40.0, 100, 1e-5)]
)
def test_epsilon_is_an_upper_bound_near_the_exact_one(
    multiplier: float, releases: int, delta: float
) -> None:
    """Renyi divergences cost something beside the exact curve, but no more than a tenth."""
    epsilon, exact = epsilon_of({multiplier: releases}, delta), 0.0
    exact = exact_epsilon(multiplier, releases, delta)
    assert exact <= epsilon <= 1.12 * exact + 0.02


def test_the_librarys_own_accountant_of_privacy_loss_agrees() -> None:
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(8.0), 50))
    theirs = accountant.get_epsilon(1e-5)
    assert theirs == pytest.approx(exact_epsilon(8.0, 50, 1e-5), rel=1e-3)
    assert theirs <= epsilon_of({8.0: 50}, 1e-5) <= 1.12 * theirs


def test_a_published_example() -> None:
    """Of the library's tests: 200 Gaussians of multiplier 0.5 are one of 0.5 / sqrt(200).

    Renyi divergence of order a is a / (2 z^2), so epsilon is the least of
    a T / (2 z^2) + ln(1 - 1/a) - ln(delta a) / (a - 1) over the orders
    (Canonne, Kamath and Steinke 2020, proposition 12).
    """
    z, releases, delta = 10.0, 40, 1e-5
    orders = [1 + step / 1000 for step in range(100, 60_000)]
    least = min(
        a * releases / (2 * z * z) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)
        for a in orders
    )
    assert epsilon_of({z: releases}, delta) == pytest.approx(least, rel=1e-2)


def test_runs_add_up_as_one() -> None:
    both = epsilon_of({10.0: 20, 20.0: 80}, 1e-5)
    assert both == pytest.approx(epsilon_of({10.0: 40}, 1e-5), rel=1e-9)  # 80 / 20^2 = 20 / 10^2
    assert epsilon_of({}, 1e-5) == epsilon_of({10.0: 0}, 1e-5) == 0


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0, 8.0, 100.0])
@pytest.mark.parametrize("releases", [1, 100])
def test_the_multiplier_is_the_least_that_keeps_the_promise(epsilon: float, releases: int) -> None:
    multiplier = noise_multiplier_for(epsilon, 1e-5, releases)
    assert epsilon_of({multiplier: releases}, 1e-5) <= epsilon
    assert epsilon_of({multiplier * 0.99 - 1 / 1024: releases}, 1e-5) > epsilon
    assert multiplier * 2**12 == int(multiplier * 2**12)


def test_more_noise_than_can_be_used_is_refused() -> None:
    with raises_code(ConfigError, "option-value", option="dp_epsilon"):
        noise_multiplier_for(1e-4, 1e-9, 10_000)


@given(st.floats(0.5, 20.0), st.floats(0.5, 20.0), st.sampled_from([1e-5, 1e-3]))
@settings(max_examples=20, deadline=None)
def test_a_run_of_what_is_left_fits_and_a_larger_one_does_not(
    allowed: float, first: float, delta: float
) -> None:
    spent = {noise_multiplier_for(first, delta, 7): 7, 40.0: 3}
    left = epsilon_left(spent, allowed, delta)
    if left == 0:
        assert epsilon_of(spent, delta) > allowed * 0.99  # multipliers are rounded up
        return
    for rounds in (1, 30):  # however many releases the run has
        for factor, fits in ((0.999, True), (1.05, False)):
            multiplier = noise_multiplier_for(left * factor, delta, rounds)
            assert (epsilon_of(spent | {multiplier: rounds}, delta) <= allowed) is fits
    assert left > 0.99 * (allowed - epsilon_of(spent, delta))


def test_without_charges_all_is_left() -> None:
    assert epsilon_left({}, 8.0, 1e-5) == 8.0
    assert epsilon_left({0.5: 10}, 8.0, 1e-5) == 0.0
