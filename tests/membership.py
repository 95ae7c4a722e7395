"""Lower bounds of epsilon from scores of an attack on membership."""

import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import beta, norm

CERTAINTY = 0.95


def lower_bound(members: np.ndarray, others: np.ndarray, delta: float) -> float:
    """Return a lower bound of epsilon from scores of two hypotheses, by Clopper-Pearson.

    Jagielski, Ullman and Oprea, "Auditing differentially private machine learning: how private is
    private SGD?", NeurIPS 2020. The threshold is chosen on one half, and judged on the other.
    """

    def bound(threshold: float, part: slice) -> float:
        least, most = _rates(members[part], others[part], threshold)
        return math.log(max(least - delta, 1e-12) / most)

    half = len(members) // 2
    best = max(
        _thresholds(members[:half], others[:half]),
        key=lambda threshold: bound(threshold, slice(None, half)),
    )
    return bound(best, slice(half, None))


def gaussian_lower_bound(members: np.ndarray, others: np.ndarray, delta: float) -> float:
    """Return a lower bound of epsilon for noise that is Gaussian, from scores of two hypotheses.

    Nasr, Hayes, Steinke, Balle, Tramer, Jagielski, Carlini and Terzis, "Tight auditing of
    differentially private machine learning", USENIX Security 2023: rates of both errors bound how
    many standard deviations apart the hypotheses are. Epsilon follows in closed form (Balle and
    Wang, ICML 2018, theorem 8). The threshold is chosen on one half, and judged on the other.
    """

    def distance(threshold: float, part: slice) -> float:
        least, most = _rates(members[part], others[part], threshold)
        return float(norm.ppf(least) - norm.ppf(most))

    half = len(members) // 2
    best = max(
        _thresholds(members[:half], others[:half]),
        key=lambda threshold: distance(threshold, slice(None, half)),
    )
    return gaussian_epsilon(distance(best, slice(half, None)), delta)


def gaussian_epsilon(distance: float, delta: float) -> float:
    """Return epsilon of Gaussians that are some standard deviations apart; 0 where none is."""

    def gap(epsilon: float) -> float:
        first = norm.cdf(distance / 2 - epsilon / distance)
        return float(first - math.exp(epsilon) * norm.cdf(-distance / 2 - epsilon / distance))

    if distance <= 0 or gap(0.0) <= delta:
        return 0.0
    return float(brentq(lambda epsilon: gap(epsilon) - delta, 0.0, 300.0))


def _thresholds(members: np.ndarray, others: np.ndarray) -> list[float]:
    chosen: list[float] = np.quantile(
        np.concatenate([members, others]), np.linspace(0, 1, 99)
    ).tolist()
    return chosen


def _rates(members: np.ndarray, others: np.ndarray, threshold: float) -> tuple[float, float]:
    """Return the least rate of hits and the largest of false alarms, by Clopper-Pearson."""
    hits, alarms = int((members > threshold).sum()), int((others > threshold).sum())
    count, tail = len(members), (1 - CERTAINTY) / 2
    least = float(beta.ppf(tail, hits, count - hits + 1)) if hits else 0.0
    most = float(beta.ppf(1 - tail, alarms + 1, count - alarms)) if alarms < count else 1.0
    return least, most
