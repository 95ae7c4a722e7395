"""Laws of paired statistics: closed forms, SciPy's own tests, and enumeration."""

import itertools

import numpy as np
import pytest
from scipy import stats

from mistakes import raises_code
from silograph.core.errors import ConfigError
from silograph.study.paired_tests import (
    Paired,
    half_width,
    holm,
    overlap_of,
    paired_test,
    power_of,
)


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_t_is_that_of_scipy(n: int) -> None:
    rng = np.random.default_rng(n)
    ours, theirs = rng.normal(size=(2, n))
    theirs_test = stats.ttest_rel(ours, theirs)
    interval = theirs_test.confidence_interval(0.95)
    found = paired_test(ours.tolist(), theirs.tolist())
    assert found.n == n
    assert found.mean == pytest.approx((ours - theirs).mean(), rel=1e-12)
    assert found.p == pytest.approx(theirs_test.pvalue, rel=1e-10)
    assert found.low == pytest.approx(interval.low, rel=1e-10)
    assert found.high == pytest.approx(interval.high, rel=1e-10)


def test_t_of_two_seeds_in_closed_form() -> None:
    """With one degree of freedom t is Cauchy: p = 1 - 2/pi arctan t; here mean 2, s = sqrt 2."""
    found = paired_test([1.0, 3.0], [0.0, 0.0])
    assert found.p == pytest.approx(1 - 2 / np.pi * np.arctan(2.0), rel=1e-12)
    quantile = np.tan(np.pi * 0.475)  # of Cauchy at .975
    assert found.high == pytest.approx(2 + quantile, rel=1e-9)  # s / sqrt n = 1
    assert half_width(2) == pytest.approx(quantile / np.sqrt(2), rel=1e-9)


@pytest.mark.parametrize("differences", [[0.1, 0.2, -0.3, 0.4], [0.1, 0.1, -0.1, 0.4, 0.0]])
def test_wilcoxon_is_the_enumeration_of_signs(differences: list[float]) -> None:
    kept = [d for d in differences if d != 0]
    ranks = stats.rankdata(np.abs(kept))
    observed = abs(ranks @ np.sign(kept))
    flips = itertools.product([-1, 1], repeat=len(kept))
    share = np.mean([abs(ranks @ np.array(signs)) >= observed - 1e-9 for signs in flips])
    found = paired_test(differences, [0.0] * len(differences), "wilcoxon")
    assert found.p == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize("n", [2, 5])
def test_the_corrected_test_is_the_formula_of_its_paper(n: int) -> None:
    """Nadeau and Bengio: t = mean / (s sqrt(1/n + n_test/n_train)) with n - 1 degrees."""
    ours = np.random.default_rng(n).normal(size=n)
    spread = ours.std(ddof=1) * np.sqrt(1 / n + 0.5)
    found = paired_test(ours.tolist(), [0.0] * n, "resampled", 0.5)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(ours.mean()) / spread, n - 1), rel=1e-10)
    half = stats.t.ppf(0.975, n - 1) * spread
    assert (found.low, found.high) == pytest.approx((ours.mean() - half, ours.mean() + half))


def test_without_overlap_the_correction_is_student_s_test() -> None:
    assert paired_test([1.0, 2.0, 4.0], [0.0] * 3, "resampled") == paired_test(
        [1.0, 2.0, 4.0], [0.0] * 3
    )


def test_splits_overlap_where_every_seed_draws_its_own() -> None:
    assert overlap_of("0.2/0.4/0.4", None) == pytest.approx(0.4 / 0.6)
    assert overlap_of("0.2/0.4/0.4", 3) is None
    assert overlap_of("public", None) is overlap_of("full", None) is None
    assert overlap_of("0/0/1", None) is None


def test_a_wider_interval_needs_a_larger_difference() -> None:
    assert "4.30 standard deviations" in power_of(3, "resampled", 2 / 3)


def test_wilcoxon_ranks_differences_of_equal_size_alike() -> None:
    """Of 10 nodes: differences of 1, 1 and -1 node are tied, whatever floats make of them."""
    ours, theirs = [0.8, 0.7, 0.1, 0.9], [0.7, 0.6, 0.2, 0.5]
    assert len({abs(a - b) for a, b in zip(ours[:3], theirs[:3], strict=True)}) > 1
    nodes = [round(10 * a) - round(10 * b) for a, b in zip(ours, theirs, strict=True)]
    expected = paired_test([float(n) for n in nodes], [0.0] * 4, "wilcoxon").p
    assert paired_test(ours, theirs, "wilcoxon").p == expected


def test_swapping_the_two_turns_the_sign_only() -> None:
    ours, theirs = [0.8, 0.9, 0.7, 0.5], [0.7, 0.75, 0.72, 0.1]
    for test in ("t", "wilcoxon"):
        there, back = paired_test(ours, theirs, test), paired_test(theirs, ours, test)
        assert there.p == pytest.approx(back.p)
        assert there.mean == pytest.approx(-(back.mean or 0))
        assert (there.low, there.high) == pytest.approx((-(back.high or 0), -(back.low or 0)))


def test_where_there_is_nothing_to_test() -> None:
    assert paired_test([], []) == Paired(0, None, None, None, None)
    assert paired_test([0.5], [0.25]) == Paired(1, 0.25, None, None, None)
    assert paired_test([0.5, 0.5], [0.5, 0.5]).p == 1
    assert paired_test([0.5, 0.5], [0.25, 0.25]) == Paired(2, 0.25, 0.25, 0.25, None)
    assert paired_test([0.5, 0.5], [0.5, 0.5], "wilcoxon").p == 1


def test_holm_by_hand() -> None:
    """Sorted .01, .02, .03 times 3, 2, 1, never falling: .03, .04, .04."""
    assert holm([0.03, 0.01, None, 0.02]) == pytest.approx([0.04, 0.03, None, 0.04])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_what_few_seeds_can_show_is_true() -> None:
    """At the stated multiple of the spread t gives 5 %; signed ranks of one sign give their least.

    For n = 3 with mean m and standard deviation s, differences m - s, m, m + s.
    """
    m = half_width(3)
    assert paired_test([m - 1, m, m + 1], [0.0] * 3).p == pytest.approx(0.05, rel=1e-9)
    assert "2.48 standard deviations" in power_of(3, "t")
    assert paired_test([1.0, 2.0, 3.0], [0.0] * 3, "wilcoxon").p == pytest.approx(0.25)
    assert "is 0.25" in power_of(3, "wilcoxon")
    assert "no spread and no test" in power_of(1, "t")


def test_another_test_is_refused() -> None:
    with raises_code(ConfigError, "option-value", option="test", got="z"):
        paired_test([1.0], [0.0], "z")  # type: ignore[arg-type]
