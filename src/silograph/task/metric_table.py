"""Metrics: what scores are called, which direction is better, and how they are shown.

Nothing here needs torch, so that pages of finished runs are made without it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from silograph.core.errors import lookup, unknown

LOSS = "loss"
RANKINGS = ("recall@10", "ndcg@10")  # of runs that rank items


@dataclass(frozen=True)
class Metric:
    """A score of a model.

    Attributes:
        name: as in result.json and in columns of rounds.csv.
        title: as in tables for people.
        says: what it is, as a sentence.
        higher: whether higher values are better; otherwise lower ones are.
        share: whether it lies in 0..1; comparisons show shares in percent.
        validation: whether validation nodes have it in every run; otherwise only where the run
            picks its round or stops by it, as it takes messages of its own.
    """

    name: str
    title: str
    says: str
    higher: bool
    share: bool
    validation: bool = True

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


def _higher(name: str, title: str, says: str, *, validation: bool = True) -> Metric:
    return Metric(name, title, says, higher=True, share=True, validation=validation)


def _lower(name: str, title: str, says: str) -> Metric:
    return Metric(name, title, says, higher=False, share=False)


_ALL = (
    _higher("accuracy", "accuracy", "Share of right labels, over all clients' nodes."),
    _higher(
        "accuracy_client_mean", "client mean", "Mean of the clients' own shares of right labels."
    ),
    _higher("f1_macro", "F1 macro", "Mean of the classes' F1."),
    _higher("f1_micro", "F1 micro", "F1 of all decisions together, over all clients' nodes."),
    _higher("auc", "AUC", "Area under the ROC curve, mean over classes.", validation=False),
    _lower("rmse", "RMSE", "Root of the mean squared error, over all clients' targets."),
    _lower("rmse_seen", "RMSE seen", "RMSE of ratings whose user and item train at the client."),
    _lower("rmse_unseen", "RMSE unseen", "RMSE of the other ratings; see there."),
    _lower("mae", "MAE", "Mean absolute error, over all clients' targets."),
    _lower("rmse_client_mean", "RMSE client mean", "Mean of the clients' own RMSE."),
    _higher(
        "recall@10",
        "recall@10",
        "Share of a user's relevant items among the first 10 that its silo recommends, mean over "
        "users.",
    ),
    _higher(
        "ndcg@10",
        "NDCG@10",
        "Discounted gain of the first 10 items that a silo recommends to a user, as a share of the "
        "best possible one, mean over users.",
    ),
    _lower(LOSS, "loss", "Mean loss of a node."),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}


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
    known = list(metrics)
    if name not in known:
        raise unknown(what, name, known)
    return METRICS[name]


def reported(names: Iterable[str]) -> list[str]:
    """Return the metrics that tables of results show: all but the loss."""
    return [name for name in names if name != LOSS]
