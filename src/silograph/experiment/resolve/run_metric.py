"""The metric of a run and the validation score at which it may stop."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.resolved_config import ResolvedConfig
from silograph.graph.graph import LabelForm, Schema
from silograph.nn.any_model import AnyModel
from silograph.task.metric_table import METRICS, RANKINGS, metric_among, metric_of
from silograph.task.ranking import RankingModel
from silograph.task.registry import task_of

RELEVANT = 4.0  # of scales from 1 to 5, as of Ciao and Epinions


@dataclass(frozen=True)
class Target:
    """A validation score at which a run may stop."""

    metric: str
    value: float


def parse_target(
    text: str | None, default: str | None = None, known: Iterable[str] = METRICS
) -> Target | None:
    """Return the target of `METRIC=VALUE`, or of `VALUE` alone.

    >>> parse_target("accuracy=0.8")
    Target(metric='accuracy', value=0.8)
    >>> parse_target("0.8", "rmse")
    Target(metric='rmse', value=0.8)

    Args:
        text: what was asked for, or None.
        default: the metric of a value alone; None while it is not known: any will do.
        known: metrics to choose from.

    Raises:
        ConfigError: another form, an unknown metric, or a value that the metric cannot have.
    """
    if text is None:
        return None
    metric, equals, value = (part.strip() for part in text.rpartition("="))
    number = _number(value)
    if number is None or (equals and not metric):
        raise ConfigError(
            f"target: expected METRIC=VALUE, or a VALUE of the run's metric alone, such as "
            f"accuracy=0.8 or 0.8, got {text!r}"
        )
    if not equals and default is None:
        return Target("", number)
    try:
        chosen = metric_among(metric or str(default), known, "metric")
    except ConfigError as error:
        raise ConfigError(f"target: {error}") from None
    if number < 0 or (chosen.share and number > 1):
        ends = "from 0 to 1" if chosen.share else "of 0 or more"
        raise ConfigError(f"target: expected a value of {chosen.name} {ends}, got {text!r}")
    return Target(chosen.name, number)


def _number(text: str) -> float | None:
    """Return a finite number, None where the text is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def check_metric(config: RunConfig) -> None:
    """Raise `ConfigError` where metric or target cannot be those of any task."""
    if config.metric is not None:
        metric_of(config.metric)
    parse_target(config.target, config.metric)


def check_metric_of(config: RunConfig, task: LabelForm) -> None:
    """Raise `ConfigError` for a metric that does not exist; its choices are those of a task."""
    known = task_of(task).metrics
    if config.metric is not None and config.metric not in METRICS:
        metric_among(config.metric, known, "metric")
    parse_target(config.target, None, known)


def scores_extra(config: RunConfig | ResolvedConfig) -> bool:
    """Whether validation nodes are scored by what they are not in every run: the AUC."""
    target = parse_target(config.target, config.metric)
    names = [config.metric, target and target.metric]
    return any(not METRICS[name].validation for name in names if name)


def scores_some(config: ResolvedConfig) -> bool:
    """Whether a round's model is scored by those alone who train from it in the next round."""
    return config.evaluate_clients == "participants"


def relevant_of_run(config: RunConfig, schema: Schema, model: AnyModel) -> float | None:
    """Return the least rating of items that rankings should have first; None: nothing is ranked.

    Raises:
        ConfigError: rankings of data without ratings, or of a model that has none.
    """
    target = parse_target(config.target, config.metric)
    asked = [config.metric, target and target.metric]
    least = config.relevant
    if least is None and any(name in RANKINGS for name in asked):
        least = RELEVANT
    if least is None:
        return None
    if schema.task != "rating" or not isinstance(model, RankingModel):
        raise ConfigError(
            f"relevant: expected a model of ratings of users and items, got {model.noun} of "
            f"{schema.task}: leave relevant out"
        )
    return least


def check_relevant(least: float | None, scale: tuple[float, float] | None) -> None:
    """Raise `ConfigError` where no rating of a scale is as high as what is relevant."""
    if least is not None and scale is not None and least > scale[1]:
        raise ConfigError(
            f"relevant: expected at most {scale[1]:g}, the largest rating that there may be, got "
            f"{least:g}: no item would be relevant; lower it"
        )


def metric_of_run(config: RunConfig, schema: Schema) -> str:
    """Return the metric of a run.

    Raises:
        ConfigError: the task has no such metric, or not that of the target (names the nearest).
    """
    task = task_of(schema.task)
    name = task.primary if config.metric is None else config.metric
    metric_among(name, task.metrics, f"metric of {task.name}")
    parse_target(config.target, name, task.metrics)
    return name
