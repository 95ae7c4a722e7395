"""What a comparison is asked for, and the paired tests of two methods on the same seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from silograph.core.config import Scalar
from silograph.core.errors import ConfigError, mistake
from silograph.graph.partition.split import BY_CLIENT, TIMED, parse_fold, parse_ratios
from silograph.study.arms import ArmSettings

# --- Paired statistics: two methods on the same seeds, and what so few seeds can show ------------
#
# n: seeds that both methods have.


Test = Literal["auto", "t", "resampled", "wilcoxon"]
TESTS = ("auto", "t", "resampled", "wilcoxon")
LEVEL = 0.95
DIGITS = 12  # of a difference that are no rounding
MOST_EXACT = 9_999  # sign patterns that are gone through; above, scipy draws so many


@dataclass(frozen=True)
class Paired:
    """The difference of two methods over the seeds they share.

    Attributes:
        n: number of seeds.
        mean: mean difference; None without seeds.
        low: lower end of its 95 % interval by Student's t; None below two seeds.
        high: upper end.
        p: two-sided p-value; None where the test cannot say anything.
    """

    n: int
    mean: float | None
    low: float | None
    high: float | None
    p: float | None


def paired_test(
    ours: Sequence[float], theirs: Sequence[float], test: Test = "t", overlap: float = 0.0
) -> Paired:
    """Compare two methods on the same seeds.

    Seeds that split one graph anew share nodes, so their differences are not independent, and
    Student's variance of their mean, s^2 / n, is too small. `resampled` takes
    s^2 (1 / n + test nodes / other nodes): C. Nadeau and Y. Bengio, "Inference for the
    Generalization Error", Machine Learning 52, 2003, section 3.

    >>> result = paired_test([0.8, 0.9, 0.7], [0.7, 0.7, 0.4])
    >>> round(result.mean, 3), round(result.p, 4)
    (0.2, 0.0742)

    Args:
        ours: (n,) scores of one method, by seed.
        theirs: (n,) scores of the other, in the same order.
        test: `t` (Student, differences about normal), `resampled` (the same, corrected for splits
            that overlap) or `wilcoxon` (signed ranks, exact).
        overlap: of `resampled`: test nodes over those that train or validate; see `overlap_of`.

    Raises:
        ConfigError: another test.
    """
    if test not in TESTS[1:]:
        raise ConfigError(
            f"expected test t, resampled or wilcoxon, got {test!r}",
            **mistake("option-value", "test", test),
        )
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    n = len(differences)
    if n < 2:
        return Paired(n, differences[0] if n else None, None, None, None)
    mean, spread = statistics.mean(differences), statistics.stdev(differences)
    extra = overlap if test == "resampled" else 0.0
    half = half_width(n, extra) * spread
    p = _wilcoxon(differences) if test == "wilcoxon" else _t(n, mean, spread, extra)
    return Paired(n, mean, mean - half, mean + half, p)


def half_width(n: int, overlap: float = 0.0) -> float:
    """Return half the 95 % interval of a mean of n values, in standard deviations of the values."""
    from scipy import stats

    return float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * math.sqrt(1 / n + overlap)


def overlap_of(split: str, split_seed: int | None) -> float | None:
    """Return test nodes over those that train or validate, of splits that every seed draws anew.

    Validation nodes choose the round, so they are of what a run learns from.

    >>> round(overlap_of("0.2/0.4/0.4", None), 3), overlap_of("public", None)
    (0.667, None)
    >>> overlap_of("fold=1/5", None), overlap_of("by-client:0.6/0.2/0.2", None)
    (0.25, 0.25)

    Args:
        split: the run's split.
        split_seed: the seed that all runs split by; None: each run's own.

    Returns:
        None where all seeds have one split, or nothing but test nodes is left.
    """
    if split_seed is not None or split in ("public", "full") or split.startswith(TIMED):
        return None
    if fold := parse_fold(split):
        return 1 / (fold[1] - 1)
    train, val, test = parse_ratios(split.removeprefix(BY_CLIENT))
    return test / (train + val) if train + val > 0 else None


def _t(n: int, mean: float, spread: float, overlap: float) -> float | None:
    """Return the p-value of Student's paired test; None where all differences are the same."""
    from scipy import stats

    if spread <= 1e-12 * abs(mean):
        return 1.0 if mean == 0 else None
    return float(2 * stats.t.sf(abs(mean) / (spread * math.sqrt(1 / n + overlap)), n - 1))


def _wilcoxon(differences: Sequence[float]) -> float:
    """Return the p-value of Wilcoxon's signed ranks; differences of 0 are left out."""
    from scipy import stats

    # Scores are shares of nodes: .8 - .7 and .7 - .6 are one rank, though not one float.
    rounded = (round(d, DIGITS) for d in differences)
    nonzero = [d for d in rounded if d != 0]
    if not nonzero:
        return 1.0
    tied = len({abs(d) for d in nonzero}) < len(nonzero)
    method: Any = "exact"
    if tied:
        method = stats.PermutationMethod(n_resamples=MOST_EXACT, rng=np.random.default_rng(0))
    return float(stats.wilcoxon(nonzero, method=method).pvalue)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted for their number (Holm, Scandinavian J. of Statistics, 1979).

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    ranked = sorted((p, place) for place, p in enumerate(values) if p is not None)
    adjusted: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, place) in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - rank) * p))
        adjusted[place] = largest
    return adjusted


def power_of(n: int, test: Test, overlap: float = 0.0) -> str:
    """Return in a sentence what n seeds can show."""
    if n < 2:
        return f"{n} seed: no spread and no test; give at least 2, better 5 to 10"
    if test == "wilcoxon":
        return f"{n} seeds: the smallest p-value that signed ranks can give is {2 / 2**n:.3g}"
    smallest = f"{half_width(n, overlap):.2f}"
    return (
        f"{n} seeds: a difference shows at the 5 % level only above {smallest} standard "
        "deviations of the differences, and a p-value assumes that they are about normal"
    )


# --- What is compared, and a row of what comes of it ---------------------------------------------


ComparisonRow = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ComparisonRequest:
    """What is compared, and how it is judged.

    Attributes:
        methods: names of methods, each an arm, in the order of the tables.
        arms: settings of named arms, which come after the methods.
        seeds: seeds, each with its own cut, split and initial weights unless those are fixed.
        over: further fields of the config or options of parts, and their values.
        options: options of methods, by method.
        baseline: the arm that others are tested against; None for the best one.
        metric: the score; None for the one that picks the rounds of the runs.
        view: view of the paired test; `own` for one that all arms have, of several the one that
            most arms are about.
        test: `t`, `resampled`, `wilcoxon`, or `auto`: resampled where every seed splits one graph
            anew, else t.
    """

    methods: tuple[str, ...] = ()
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: tuple[int, ...]
    over: Mapping[str, tuple[Scalar, ...]]
    options: Mapping[str, Mapping[str, Scalar]]
    baseline: str | None = None
    metric: str | None = None
    view: str = "own"
    test: Test = "auto"

    @property
    def all_arms(self) -> list[ArmSettings]:
        """Methods and named arms, before anything is varied."""
        methods = [ArmSettings.of(("method", name), {"method": name}) for name in self.methods]
        return methods + [ArmSettings.of(("arm", n), s) for n, s in self.arms.items()]
