"""Thresholds: from which probability on a node is taken for the positive class.

A threshold is chosen on validation nodes, from the counts of scores in fixed bins that clients send
(`silograph.task.counts`). So it is the lower edge of a bin.

B: bins.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from silograph.core.errors import ConfigError, mistake
from silograph.task.decision_scores import ROUNDING, cumulated, edges_of_bins, sigmoid
from silograph.task.metric_table import number_in

F1, COST = "f1", "cost"
THRESHOLD = "threshold"  # field of the message that hands a model over
NO_THRESHOLD = 2.0  # its value where none could be chosen


@dataclass(frozen=True)
class ThresholdRule:
    """By what a threshold is chosen.

    Attributes:
        name: `f1`: the best F1; `recall@fpr`: the best recall with at most a share `rate` of false
            positives; `cost`: the least cost of all errors.
        rate: of false positives.
        false_positive: cost of one.
        false_negative: cost of one.
    """

    name: str
    rate: float = 0.0
    false_positive: float = 1.0
    false_negative: float = 1.0

    def goodness(self, table: np.ndarray) -> np.ndarray:
        """Return how good it is to take nodes of bin b and above for positive, (B + 1,) float64.

        Place B is to take none. Not allowed is -infinity.

        Args:
            table: (2, B) validation nodes without and with the class.
        """
        false_positives, hits = (np.append(t, 0.0) for t in cumulated(table))
        misses = table[1].sum() - hits
        if self.name == F1:
            errors = false_positives + misses
            f1: np.ndarray = 2 * hits / np.maximum(2 * hits + errors, 1)
            return f1
        if self.name == COST:
            cost: np.ndarray = self.false_positive * false_positives + self.false_negative * misses
            return -cost
        allowed = false_positives <= self.rate * table[0].sum() + ROUNDING * table.sum()
        recall: np.ndarray = np.where(allowed, hits, -np.inf)
        return recall


def parse_threshold(text: str) -> ThresholdRule:
    """Return the rule of a threshold.

    >>> parse_threshold("cost=1:20")
    ThresholdRule(name='cost', rate=0.0, false_positive=1.0, false_negative=20.0)

    Raises:
        ConfigError: another text.
    """
    if text == F1:
        return ThresholdRule(F1)
    kind, rate = number_in(text)
    if kind == "recall@fpr" and 0 < rate < 1:
        return ThresholdRule(kind, rate=rate)
    name, equals, costs = text.partition("=")
    if name == COST and equals:
        try:
            false_positive, false_negative = (float(cost) for cost in costs.split(":"))
        except ValueError:
            false_positive = false_negative = 0.0
        if 0 < false_positive < math.inf and 0 < false_negative < math.inf:
            return ThresholdRule(COST, false_positive=false_positive, false_negative=false_negative)
    raise ConfigError(
        "threshold: expected f1, recall@fpr=RATE with a rate between 0 and 1, or cost=FP:FN with "
        f"the costs of a false positive and of a false negative, got {text!r}",
        **mistake("option-value", "threshold", text),
    )


@dataclass(frozen=True)
class Threshold:
    """From which probability on a node is taken for the positive class; saved with a model.

    Attributes:
        rule: as the run has it.
        positive: number of the class.
        probability: of the class, from which on a node is taken for it; 1: no node is.
    """

    rule: str
    positive: int
    probability: float

    def decide(self, probabilities: np.ndarray) -> np.ndarray:
        """Return which nodes are taken for the positive class, (n,) bool; with 1 none is.

        Args:
            probabilities: (n, K) of each class.
        """
        if self.probability == 1:
            return np.zeros(len(probabilities), dtype=bool)
        decided: np.ndarray = probabilities[:, self.positive] >= self.probability
        return decided

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the file of a model."""
        return dict(vars(self))


def read_threshold(values: Mapping[str, Any], outputs: int) -> Threshold:
    """Return the threshold of a model's file, which may come from anybody.

    Raises:
        ConfigError, KeyError, TypeError, ValueError: it is none.
    """
    rule, positive, probability = (values[name] for name in ("rule", "positive", "probability"))
    if type(rule) is not str or type(positive) is not int:
        raise TypeError(rule, positive)
    parse_threshold(rule)
    if type(probability) not in (int, float) or not 0 <= probability <= 1:
        raise ValueError(probability)
    if not 0 <= positive < outputs or outputs > 2:
        raise ValueError(positive)
    return Threshold(rule, positive, float(probability))


def best_bin(table: np.ndarray, rule: ThresholdRule) -> int | None:
    """Return the bin from which on nodes are taken for positive, at most B; None: nothing is known.

    Of bins that are equally good it is the highest one.

    Args:
        table: (2, B) validation nodes without and with the class.
        rule: by which it is chosen.
    """
    if not (table.sum(axis=1) > 0.5).all():
        return None
    goodness = rule.goodness(table)
    return int(np.nonzero(goodness >= goodness.max())[0][-1])


def probability_of(bin_number: int) -> float:
    """Return the lower edge of a bin as a probability; that of place B is 1."""
    return float(sigmoid(edges_of_bins(2))[bin_number]) if bin_number else 0.0


@dataclass(frozen=True)
class DecisionCounts:
    """What a threshold does on nodes.

    Attributes:
        true_positives: nodes that have the class and are taken for it.
        false_positives: nodes that are taken for it and have another one.
        false_negatives: nodes that have it and are not taken for it.
        true_negatives: all others.
    """

    true_positives: int
    false_positives: int
    false_negatives: int
    true_negatives: int

    @classmethod
    def of(cls, table: np.ndarray, probability: float) -> "DecisionCounts":
        """Return the counts of nodes (2, B) for a threshold that is the edge of a bin."""
        edges = sigmoid(edges_of_bins(2))
        first = 0 if probability == 0 else int(np.abs(edges - probability).argmin())
        positives, negatives = table[:, first:].sum(axis=1), table[:, :first].sum(axis=1)
        counts = positives[1], positives[0], negatives[1], negatives[0]
        return cls(*(round(float(count)) for count in counts))

    @property
    def precision(self) -> float | None:
        """Share of the nodes taken for the class that have it; None where none are."""
        positives = self.true_positives + self.false_positives
        return self.true_positives / positives if positives else None

    @property
    def recall(self) -> float | None:
        """Share of the nodes with the class that are found; None without any."""
        nodes = self.true_positives + self.false_negatives
        return self.true_positives / nodes if nodes else None

    @property
    def false_positive_rate(self) -> float | None:
        """Share of the other nodes that are taken for the class; None without any."""
        nodes = self.false_positives + self.true_negatives
        return self.false_positives / nodes if nodes else None

    @property
    def f1(self) -> float | None:
        """Harmonic mean of precision and recall; None where nothing is or is taken for it."""
        hits, errors = self.true_positives, self.false_positives + self.false_negatives
        return 2 * hits / (2 * hits + errors) if hits + errors else None

    def to_dict(self) -> dict[str, int | float | None]:
        """Return plain values for result.json."""
        shares = {
            name: getattr(self, name)
            for name in ("precision", "recall", "false_positive_rate", "f1")
        }
        return {**vars(self), **shares}


@dataclass(frozen=True)
class ThresholdScores:
    """A threshold, and what it does on the nodes of all clients.

    Attributes:
        positive: name of the positive class.
        threshold: the threshold.
        val: counts of validation nodes, by which it was chosen.
        test: counts of test nodes.
    """

    positive: str
    threshold: Threshold
    val: DecisionCounts
    test: DecisionCounts

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for result.json."""
        return {
            "rule": self.threshold.rule,
            "positive": self.positive,
            "probability": self.threshold.probability,
            "val": self.val.to_dict(),
            "test": self.test.to_dict(),
        }


def threshold_line(rule: str, scores: ThresholdScores | None) -> str:
    """Return what a summary says of the threshold of a run that asks for one by a rule."""
    if scores is None:
        return (
            f"threshold {rule}: none, as no client has sent scores of validation nodes with and "
            "without the class"
        )
    counts, probability = scores.test, scores.threshold.probability
    shares = {
        "precision": counts.precision,
        "recall": counts.recall,
        "false positive rate": counts.false_positive_rate,
    }
    figures = ", ".join(
        f"{name} {'-' if value is None else f'{value:.4f}'}" for name, value in shares.items()
    )
    return (
        f"threshold {rule}: class {scores.positive} from a probability of {probability:.4f} on "
        f"(test: {figures})"
    )
