"""Scores of decisions and of probabilities, from histograms of scores alone.

Clients send how many nodes have their score in each of 255 fixed bins (`silograph.task.counts`),
with and without the class. All scores here are of such tables, added up over clients, so no further
number leaves a client:

- Scores of ranks (average precision, `precision@K`, `recall@K`, `recall@fpr=RATE`) do not know the
  order of the nodes in a bin. They are the mean of scikit-learn's scores over all these orders.
- The Brier score and the calibration error are scikit-learn's if each node has the probability in
  the middle of its bin. It is off by at most half the bin's width, so these scores differ from
  exact ones by about as much at most; `docs/reference/metrics.md` has the widths.

Of two classes one is positive, and scores are of this one. Of more classes, and of several label
bits, they are the mean over the classes, each against the rest; the Brier score of several classes
is the sum over them, as in scikit-learn.

K: classes or label bits. B: bins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from silograph.graph.graph import LabelForm
from silograph.task.counts import BINS, CLIP, STEEPNESS, middle_of
from silograph.task.metric_table import AVERAGE_PRECISION, BRIER, ECE, EXAMPLES, number_in

CALIBRATION_BINS = 10  # of equal width in probability
SHOWN = (AVERAGE_PRECISION, EXAMPLES["recall@fpr"], BRIER, ECE)  # of every result
ROUNDING = 1e-9  # bins that were spread out add up to whole numbers but for this share


@lru_cache(maxsize=8)
def edges_of_bins(classes: int) -> np.ndarray:
    """Return the log-odds between which the bins lie, (B + 1,) float64, -CLIP to CLIP.

    It is the inverse of `silograph.task.counts.bins_of`.

    Args:
        classes: that a score chooses from; 2 for a label bit.
    """
    u = 2 * np.arange(1, BINS) / BINS - 1
    inner = u / (1 - np.abs(u)) / STEEPNESS - middle_of(classes)
    return np.concatenate([[-CLIP], inner, [CLIP]])


def sigmoid(odds: np.ndarray) -> np.ndarray:
    """Return the probabilities of log-odds within +-CLIP."""
    values: np.ndarray = 1 / (1 + np.exp(-odds))
    return values


@lru_cache(maxsize=8)
def probabilities_of_bins(classes: int) -> np.ndarray:
    """Return the probability in the middle of each bin, (B,) float64."""
    p = sigmoid(edges_of_bins(classes))
    values: np.ndarray = (p[1:] + p[:-1]) / 2
    return values


@dataclass(frozen=True)
class ReliabilityBin:
    """The nodes whose probability is in one of ten parts of 0 to 1.

    Attributes:
        nodes: their number; of several classes, each node counts once for each of them.
        predicted: mean probability of the class.
        share: how many of them have it.
    """

    nodes: int
    predicted: float
    share: float


@dataclass(frozen=True)
class DecisionScores:
    """What a result says of a model's decisions and probabilities, on test nodes.

    Attributes:
        positive: the class that scores are of; None: the mean over several.
        scores: by the names of metrics.
        reliability: how often probabilities are right.
    """

    positive: str | None
    scores: Mapping[str, float | None]
    reliability: tuple[ReliabilityBin, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for result.json."""
        return {
            "positive": self.positive,
            "scores": dict(self.scores),
            "reliability": [vars(part) for part in self.reliability],
        }


@dataclass(frozen=True, eq=False)
class ScoreTables:
    """Histograms of scores of the classes that scores are of.

    Attributes:
        tables: (T, 2, B) float64, nodes without and with the class by the bin of their score.
        classes: that each score chooses from.
        summed: whether the Brier score is the sum over classes; otherwise the mean over tables.
    """

    tables: np.ndarray
    classes: int
    summed: bool

    @classmethod
    def of(cls, bins: np.ndarray, labels: LabelForm, positive: int) -> "ScoreTables":
        """Return the tables of bins (K, 2, B) of all clients together.

        Args:
            bins: the histograms.
            labels: `multiclass` or `multilabel`.
            positive: the class, where there are two.
        """
        tables = bins.astype(np.float64)
        if labels == "multilabel":
            return cls(tables, 2, summed=False)
        if len(tables) == 2:
            return cls(tables[positive : positive + 1], 2, summed=False)
        return cls(tables, len(tables), summed=True)

    def mean(self, score: Callable[[np.ndarray], float]) -> float | None:
        """Return the mean of a score over the tables that have nodes with and without the class."""
        has_both = (self.tables.sum(axis=2) > 0.5).all(axis=1)
        values = [score(table) for table in self.tables[has_both]]
        return sum(values) / len(values) if values else None

    def brier(self) -> float | None:
        """Return the mean squared difference of probabilities and truth."""
        p, num_labels = probabilities_of_bins(self.classes), self.tables.sum()
        if num_labels < 0.5:
            return None
        squares = (self.tables[:, 0] * p**2 + self.tables[:, 1] * (1 - p) ** 2).sum()
        return float(squares / num_labels) * (len(self.tables) if self.summed else 1)

    def calibration_error(self) -> float | None:
        """Return the mean over classes of |share - mean probability|, weighted by nodes."""
        errors = []
        for table in self.tables:
            nodes, predicted, hits = _by_probability(table, self.classes)
            if nodes.sum() > 0.5:
                errors.append(float(np.abs(hits - predicted).sum() / nodes.sum()))
        return sum(errors) / len(errors) if errors else None

    def reliability(self) -> tuple[ReliabilityBin, ...]:
        """Return the reliability curve of all tables together; parts without nodes are left out."""
        nodes, predicted, hits = _by_probability(self.tables.sum(axis=0), self.classes)
        return tuple(
            ReliabilityBin(round(n), p / n, h / n)
            for n, p, h in zip(nodes.tolist(), predicted.tolist(), hits.tolist(), strict=True)
            if n > 0.5
        )

    def score(self, name: str) -> float | None:
        """Return a metric that is computed from histograms, by its name."""
        if name == AVERAGE_PRECISION:
            return self.mean(average_precision)
        if name == BRIER:
            return self.brier()
        if name == ECE:
            return self.calibration_error()
        kind, number = number_in(name)
        if kind == "recall@fpr":
            return self.mean(lambda table: recall_at_false_positive_rate(table, number))
        first = self.mean if kind == "recall" else self.mean_of_any
        return first(lambda table: first_nodes(table, number)[kind == "recall"])

    def mean_of_any(self, score: Callable[[np.ndarray], float]) -> float | None:
        """Return the mean of a score over the tables that have any node."""
        values = [score(table) for table in self.tables if table.sum() > 0.5]
        return sum(values) / len(values) if values else None


def _by_probability(table: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return nodes, sums of probabilities, and nodes with the class, of ten parts of 0 to 1.

    A bin of scores counts where its middle lies, as in `sklearn.calibration.calibration_curve`.
    """
    p = probabilities_of_bins(classes)
    part = np.searchsorted(np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1], p)
    nodes = table.sum(axis=0)
    return tuple(  # type: ignore[return-value]
        np.bincount(part, weights=values, minlength=CALIBRATION_BINS)
        for values in (nodes, nodes * p, table[1])
    )


def cumulated(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return false and true positives (B,) of the decisions "score in bin b or above", by bin."""
    false_positives, true_positives = table[:, ::-1].cumsum(axis=1)[:, ::-1]
    return false_positives, true_positives


def average_precision(table: np.ndarray) -> float:
    """Return the mean over positive nodes of the precision at their place, of one table (2, B).

    In a bin of d nodes, m of them positive, behind b nodes in higher bins, t of them positive, a
    positive node is at each of the places r = 1, ..., d as often. Then (r - 1) (m - 1) / (d - 1)
    others are before it on the mean over all orders, so the bin's mean precision is that of

        (t + 1 + (r - 1) (m - 1) / (d - 1)) / (b + r)

    over r. The sum of 1 / (b + r) is a difference of digamma functions.
    """
    from scipy.special import digamma  # its import takes a while, and few runs need it

    occupied = table[1] > 0
    false_positives, true_positives = (t[occupied] for t in cumulated(table))
    d, m = table.sum(axis=0)[occupied], table[1][occupied]
    t, b = true_positives - m, false_positives + true_positives - d
    # Bins that were spread out may have parts of a node.
    slope = np.maximum(m - 1, 0) / np.maximum(d - 1, 1)
    ends = t + np.minimum(m, 1) - slope  # at r = 0
    sums = slope * d + (ends - slope * b) * (digamma(b + d + 1) - digamma(b + 1))
    return float((m * sums / d).sum() / m.sum())


def first_nodes(table: np.ndarray, k: float) -> tuple[float, float]:
    """Return precision and recall of the k nodes with the highest scores, of one table (2, B).

    Of fewer nodes all are taken. Recall is 0 where no node has the class.
    """
    false_positives, true_positives = (np.append(t, 0.0)[::-1] for t in cumulated(table))
    num_first = min(k, table.sum())
    hits = np.interp(num_first, false_positives + true_positives, true_positives)
    return float(hits / num_first), float(hits / max(table[1].sum(), 1))


def recall_at_false_positive_rate(table: np.ndarray, rate: float) -> float:
    """Return the largest recall with at most this share of false positives, of one table (2, B).

    In the bin that holds the first negative node too many, (f + 1) / (n + 1) of the positive nodes
    are before it on the mean over all orders, where f of the bin's n negative ones are allowed.
    """
    false_positives, true_positives = (np.append(t, 0.0)[::-1] for t in cumulated(table))
    allowed = np.floor(rate * table[0].sum() * (1 + ROUNDING) + ROUNDING)
    place = int(np.searchsorted(false_positives, allowed + ROUNDING, side="right")) - 1
    hits = true_positives[place]
    if place + 1 < len(true_positives):
        in_bin = false_positives[place + 1] - false_positives[place]
        share = (max(allowed - false_positives[place], 0.0) + 1) / (in_bin + 1)
        hits += min(share, 1.0) * (true_positives[place + 1] - hits)
    return float(hits / table[1].sum())


def decision_scores(
    bins: np.ndarray, labels: LabelForm, class_names: Sequence[str], positive: int
) -> DecisionScores | None:
    """Return what a result says of decisions; None where nothing is known of scores.

    Args:
        bins: (K, 2, B) of all clients together.
        labels: `multiclass` or `multilabel`.
        class_names: of the K classes.
        positive: the class, where there are two.
    """
    tables = ScoreTables.of(bins, labels, positive)
    if not tables.tables.any():
        return None
    single = len(tables.tables) == 1
    name = class_names[positive if labels == "multiclass" else 0] if single else None
    scores = {metric: tables.score(metric) for metric in SHOWN}
    return DecisionScores(name, scores, tables.reliability())


def scores_of_histogram(
    bins: np.ndarray | None, labels: LabelForm, names: Sequence[str], positive: int
) -> dict[str, float | None]:
    """Return metrics that are computed from histograms; None each without one.

    Args:
        bins: (K, 2, B) of all clients together, or None.
        labels: `multiclass` or `multilabel`.
        names: of the metrics.
        positive: the class, where there are two.
    """
    if bins is None or not names:
        return dict.fromkeys(names)
    tables = ScoreTables.of(bins, labels, positive)
    return {name: tables.score(name) for name in names}
