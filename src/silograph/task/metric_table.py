"""Metrics: what scores are called, which direction is better, and how they are shown.

Nothing here needs torch, so that pages of finished runs are made without it.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

from silograph.core.errors import ConfigError, lookup, unknown

LOSS = "loss"
NAME = re.compile(r"[a-z][a-z0-9_@]*")  # of metrics: keys of JSON, parts of names of columns
RANKINGS = ("recall@10", "ndcg@10")  # of runs that rank items
AVERAGE_PRECISION, BRIER, ECE = "average_precision", "brier", "ece"
NUMBERED = re.compile(r"(precision|recall|recall@fpr)(?:@|=)([0-9.]+(?:e-?[0-9]+)?)")


@dataclass(frozen=True)
class Metric:
    """A score of a model.

    Attributes:
        name: as in result.json and in columns of rounds.csv.
        title: as in tables for people.
        says: what it is, as a sentence.
        higher: whether higher values are better; otherwise lower ones are.
        share: whether it lies in 0..1.
        labels: forms of labels whose task has it; see `Task.labels`.
        validation: whether validation nodes have it in every run; otherwise only where the run
            picks its round or stops by it, as it takes messages of its own.
        of: it, from the counts that clients report (`Task.tally`), tensors (C, ...) by their names
            without `val.` or `test.`; at least one node is among them. None: the task works it out.
        from_histogram: whether runs on classes have it only where they ask for it, by `metric` or
            `target`; it is computed from histograms (`silograph.task.decision_scores`).
    """

    name: str
    title: str
    says: str
    higher: bool
    share: bool
    labels: tuple[str, ...]
    validation: bool = True
    of: Callable[[Mapping[str, Any]], float | None] | None = None
    from_histogram: bool = False

    def goodness(self, value: float | None) -> float:
        """Return a number that is higher for better values; None is worse than every value."""
        if value is None:
            return -float("inf")
        return value if self.higher else -value

    def best(self, values: Iterable[float | None]) -> float | None:
        """Return the best of the values that there are, None if there are none."""
        return max((v for v in values if v is not None), key=self.goodness, default=None)

    def reaches(self, value: float | None, target: float) -> bool:
        """Whether a value is as good as a target, or better."""
        return value is not None and self.goodness(value) >= self.goodness(target)

    def text(self, value: float | None) -> str:
        """Return a value as results print it."""
        if value is None:
            return "-"
        return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.6g}"


CLASSES = ("multiclass", "multilabel")
NUMBERS = ("node_value", "rating")
RATINGS = ("rating",)


def _higher_is_better(
    name: str,
    title: str,
    says: str,
    *labels: str,
    validation: bool = True,
    from_histogram: bool = False,
) -> Metric:
    return Metric(
        name,
        title,
        says,
        higher=True,
        share=True,
        labels=labels,
        validation=validation,
        from_histogram=from_histogram,
    )


def _lower_is_better(name: str, title: str, says: str, *labels: str) -> Metric:
    return Metric(name, title, says, False, share=False, labels=labels)


def _of_decisions(name: str, title: str, says: str, *, higher: bool = True) -> Metric:
    """Return a metric of classes that only runs have that ask for it."""
    return Metric(
        name,
        title,
        says,
        higher,
        share=True,
        labels=CLASSES,
        validation=False,
        from_histogram=True,
    )


def _first_nodes(kind: str, k: int) -> Metric:
    says = {
        "precision": f"Share of nodes with the class among the {k} that have its highest scores.",
        "recall": f"Share of the class's nodes that are among the {k} with its highest scores.",
    }
    return _of_decisions(f"{kind}@{k}", f"{kind}@{k}", says[kind])


def _recall_at_rate(rate: float) -> Metric:
    return _of_decisions(
        f"recall@fpr={rate:g}",
        f"recall@fpr={rate:g}",
        f"Share of the class's nodes that are found where at most {100 * rate:g} % of the others "
        "are taken for it.",
    )


def _mean_loss(counts: Mapping[str, Any]) -> float:
    return float(counts["loss"].sum()) / int(counts["nodes"].sum())


_ALL = (
    _higher_is_better(
        "accuracy", "accuracy", "Share of right labels, over all clients' nodes.", *CLASSES
    ),
    _higher_is_better(
        "accuracy_client_mean",
        "client mean",
        "Mean of the clients' own shares of right labels.",
        *CLASSES,
    ),
    _higher_is_better("f1_macro", "F1 macro", "Mean of the classes' F1.", *CLASSES),
    _higher_is_better(
        "f1_micro", "F1 micro", "F1 of all decisions together, over all clients' nodes.", *CLASSES
    ),
    _higher_is_better(
        "auc", "AUC", "Area under the ROC curve, mean over classes.", *CLASSES, validation=False
    ),
    _lower_is_better(
        "rmse", "RMSE", "Root of the mean squared error, over all clients' targets.", *NUMBERS
    ),
    _lower_is_better(
        "rmse_seen",
        "RMSE seen",
        "RMSE of ratings whose user and item train at the client.",
        *RATINGS,
    ),
    _lower_is_better(
        "rmse_unseen", "RMSE unseen", "RMSE of the other ratings; see there.", *RATINGS
    ),
    _lower_is_better("mae", "MAE", "Mean absolute error, over all clients' targets.", *NUMBERS),
    _lower_is_better(
        "rmse_client_mean", "RMSE client mean", "Mean of the clients' own RMSE.", *NUMBERS
    ),
    _higher_is_better(
        "recall@10",
        "recall@10",
        "Share of a user's relevant items among the first 10 that its silo recommends, mean over "
        "users; of classes, share of the class's nodes among the 10 with its highest scores.",
        *RATINGS,
        from_histogram=True,
    ),
    _higher_is_better(
        "ndcg@10",
        "NDCG@10",
        "Discounted gain of the first 10 items that a silo recommends to a user, as a share of the "
        "best possible one, mean over users.",
        *RATINGS,
    ),
    _of_decisions(
        AVERAGE_PRECISION,
        "avg. precision",
        "Average precision: mean precision over the steps of recall.",
    ),
    _first_nodes("precision", 100),
    _first_nodes("recall", 100),
    _recall_at_rate(0.01),
    _of_decisions(
        BRIER, "Brier", "Mean squared difference of probabilities and truth.", higher=False
    ),
    _of_decisions(
        ECE,
        "calibration error",
        "Expected calibration error: mean distance between a probability and how often it is "
        "right, over ten parts of 0 to 1.",
        higher=False,
    ),
    Metric(
        LOSS,
        "loss",
        "Mean loss of a node.",
        higher=False,
        share=False,
        labels=(*CLASSES, *NUMBERS),
        of=_mean_loss,
    ),
)


class _Metrics(dict[str, Metric]):
    """Metrics by their names, and those with any number in their name, such as precision@50."""

    def __missing__(self, name: str) -> Metric:
        """Return a metric with a number in its name."""
        kind, number = number_in(str(name))
        if kind == "recall@fpr" and 0 < number < 1:
            return _recall_at_rate(number)
        if kind in ("precision", "recall") and number.is_integer() and 1 <= number < 2**31:
            return _first_nodes(kind, int(number))
        raise KeyError(name)


def number_in(name: str) -> tuple[str, float]:
    """Return kind and number of a metric with a number in its name; ("", 0) for other names.

    >>> number_in("precision@50"), number_in("recall@fpr=.01")
    (('precision', 50.0), ('recall@fpr', 0.01))
    """
    match = NUMBERED.fullmatch(name)
    if match is None or (match[1] == "recall@fpr") != ("=" in name):
        return "", 0.0
    try:
        return match[1], float(match[2])
    except ValueError:  # 1.2.3
        return "", 0.0


# Of the metrics with a number one of each kind is listed, as an example.
EXAMPLES = {"precision": "precision@100", "recall": "recall@100", "recall@fpr": "recall@fpr=0.01"}
METRICS: dict[str, Metric] = _Metrics({metric.name: metric for metric in _ALL})


def add_metric(metric: Metric) -> None:
    """Add a metric to those that runs of this process have; again, to replace one added before.

    Runs end with `ConfigError` where its function fails, or gives no finite number and not None.

    Raises:
        ConfigError: silograph has a metric of that name, or it cannot be a name; nothing says how
            it is worked out; or no task has such labels.
    """
    is_known = metric.name in METRICS or number_in(metric.name)[0]
    if is_known and not added([metric.name]):
        raise ConfigError(
            f"expected a new name of a metric, got {metric.name!r}: choose another one"
        )
    if NAME.fullmatch(metric.name) is None:
        raise ConfigError(
            "expected small letters, digits, _ or @ as the name of a metric, a letter first, got "
            f"{metric.name!r}: choose another one"
        )
    if metric.of is None:
        raise ConfigError(f"expected a function `of` in metric {metric.name}, got none")
    known_labels = (*CLASSES, *NUMBERS)
    if not metric.labels or not set(metric.labels) <= set(known_labels):
        raise ConfigError(
            f"expected labels of metric {metric.name} among {', '.join(known_labels)}, got "
            f"{metric.labels}"
        )
    METRICS[metric.name] = replace(metric, of=partial(_own_score, metric.name, metric.of))


def added(names: Iterable[str | None]) -> list[str]:
    """Return the names that `add_metric` has added in this process."""
    built_in = {metric.name for metric in _ALL}
    return [name for name in names if name in METRICS and name not in built_in]


def title_of(name: str) -> str:
    """Return a metric's title; the name of one that this process does not know."""
    try:
        return METRICS[name].title
    except KeyError:
        return name


def _own_score(
    name: str, of: Callable[[Mapping[str, Any]], float | None], counts: Mapping[str, Any]
) -> float | None:
    """Return the score that a user's function computes from counts."""
    try:
        value = of(counts)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"metric {name} cannot be worked out ({problem}): change it") from error
    if value is None:
        return None
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(
            f"expected a finite number or None from metric {name}, got {value!r}: change it"
        )
    return float(value)


def metrics_of_labels(labels: str) -> tuple[str, ...]:
    """Return the names of the metrics that the task of a form of labels has; the loss is last."""
    names = [m.name for m in METRICS.values() if labels in m.labels and m.name != LOSS]
    return (*names, LOSS)


def own_scores(labels: str, counts: Mapping[str, Any], part: str) -> dict[str, float | None]:
    """Compute the metrics that have a function of counts, from the counts of `val` or `test`."""
    prefix, names = f"{part}.", metrics_of_labels(labels)
    part_counts = {n.removeprefix(prefix): t for n, t in counts.items() if n.startswith(prefix)}
    return {name: of(part_counts) for name in names if (of := METRICS[name].of) is not None}


def metric_of(name: str) -> Metric:
    """Return a metric by its name.

    Raises:
        ConfigError: unknown (names the nearest).
    """
    return lookup(METRICS, name, "metric")


def metric_among(name: str, metrics: Iterable[str], what: str) -> Metric:
    """Return a metric of a task.

    Args:
        name: of the metric.
        metrics: names of those that the task has.
        what: what the metric is for, in the error.

    Raises:
        ConfigError: the task does not have it (names the nearest).
    """
    known_names = list(metrics)
    if not is_metric_among(name, known_names):
        raise unknown(what, name, known_names)
    try:
        return METRICS[name]
    except KeyError:  # a number that cannot be, such as precision@0
        raise unknown(what, name, known_names) from None


def is_metric_among(name: str, metrics: Iterable[str]) -> bool:
    """Whether a task with these metrics has this one."""
    known_names = list(metrics)
    return name in known_names or EXAMPLES.get(number_in(name)[0]) in known_names


def reported(names: Iterable[str], metric: str) -> list[str]:
    """Return the metrics that results show, in the order of `names`.

    The loss is among them only where it is the metric of the run: it says little of how good
    predictions are.

    Args:
        names: of the metrics that there are.
        metric: the metric of the run, by which its best round is chosen.
    """
    return [name for name in names if name != LOSS or name == metric]
