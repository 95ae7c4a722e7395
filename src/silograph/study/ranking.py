"""Ranks of arms over several data sets, and which differences of ranks so few data sets can show.

J. Demšar, "Statistical comparisons of classifiers over multiple data sets", JMLR 7, 2006: each arm
has a rank on each data set. Friedman's test asks whether all mean ranks could be one, and Nemenyi's
which two of them are not.

k: arms. n: data sets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from silograph.core.text import decimals
from silograph.study.paired_tests import LEVEL

FEWEST_ARMS, FEWEST_DATA_SETS = 2, 3  # of a ranking


@dataclass(frozen=True)
class Ranking:
    """Mean ranks, and what they show.

    Attributes:
        mean_ranks: by arm, best first; 1 is the best rank.
        datasets: number of data sets.
        p: of Friedman's test; None for two arms, which it is not for.
        critical_difference: what two mean ranks must differ by at the 5 % level (Nemenyi).
        p_values: of Nemenyi's test of each arm against the best, by arm; the best has none.
    """

    mean_ranks: Mapping[str, float]
    datasets: int
    p: float | None
    critical_difference: float
    p_values: Mapping[str, float]

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the ranks."""
        arms, n = len(self.mean_ranks), self.datasets
        friedman = "Friedman's test needs 3 arms"
        if self.p is not None:
            roughly = ", a rough value below 10 data sets" if n < 10 else ""
            friedman = f"Friedman's test of equal ranks gives p = {self.p:.3f}{roughly}"
        limit = f"of at most {arms - 1}"
        if self.critical_difference >= arms - 1:
            limit = f"which {n} data sets cannot show for any two of {arms} arms"
        return [
            f"ranking: mean over {n} data sets of the ranks of mean scores, 1 is best; {friedman}",
            "mean ranks differ at the 5 % level (Nemenyi) where they are more than "
            f"{decimals(self.critical_difference, 2)} apart, {limit}",
        ]


def rank_arms(scores: Mapping[str, Sequence[float]]) -> Ranking:
    """Rank arms over data sets.

    >>> ranking = rank_arms({"a": [0.7, 0.8, 0.6], "b": [0.9, 0.9, 0.8], "c": [0.8, 0.7, 0.6]})
    >>> ranking.mean_ranks
    {'b': 1.0, 'a': 2.5, 'c': 2.5}
    >>> round(ranking.critical_difference, 3)
    1.914

    Args:
        scores: of each arm, (n,) in the same order of data sets; higher is better. Ties have the
            mean of their ranks.
    """
    from scipy import stats

    table = np.array([list(values) for values in scores.values()])  # (k, n)
    k, n = table.shape
    mean_ranks = stats.rankdata(-table, axis=0).mean(1)
    # Where all arms are tied everywhere there is no variance to test by.
    is_constant = bool(np.ptp(table, axis=0).max() == 0)
    p = None
    if k > FEWEST_ARMS:
        p = 1.0 if is_constant else float(stats.friedmanchisquare(*table).pvalue)
    # Nemenyi's statistic: the studentized range of k mean ranks with this standard error.
    error = math.sqrt(k * (k + 1) / (12 * n))
    order = np.argsort(mean_ranks, kind="stable")
    names = list(scores)
    distances = (mean_ranks - mean_ranks[order[0]]) / error
    return Ranking(
        mean_ranks={names[i]: float(mean_ranks[i]) for i in order},
        datasets=n,
        p=p,
        critical_difference=float(stats.studentized_range.ppf(LEVEL, k, np.inf)) * error,
        p_values={
            names[i]: float(stats.studentized_range.sf(distances[i], k, np.inf)) for i in order[1:]
        },
    )
