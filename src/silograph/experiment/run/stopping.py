"""When a run stops before its last round, and what it says about it."""

from dataclasses import dataclass

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, unknown
from silograph.task.scores import Scores

TARGETS = ("accuracy", "accuracy_client_mean", "f1_macro", "f1_micro")


@dataclass(frozen=True)
class Target:
    """A validation score at which a run may stop."""

    metric: str
    value: float


def parse_target(text: str | None) -> Target | None:
    """Return the target of `METRIC=VALUE`.

    >>> parse_target("accuracy=0.8")
    Target(metric='accuracy', value=0.8)

    Raises:
        ConfigError: another form, an unknown metric, or a value outside 0..1.
    """
    if text is None:
        return None
    metric, equals, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not equals or not 0 <= number <= 1:
        raise ConfigError(f"expected a target METRIC=VALUE with a value in 0..1, got {text!r}")
    if metric.strip() not in TARGETS:
        raise unknown("metric of the target", metric.strip(), TARGETS)
    return Target(metric.strip(), number)


def reason_to_stop(
    config: RunConfig,
    *,
    t: int,
    best_round: int,
    validation: Scores | None,
    total_bytes: int,
    seconds: float,
) -> str | None:
    """Return why the run stops after round t, or None.

    Args:
        config: the run's limits.
        t: the round that is over.
        best_round: the best one so far.
        validation: scores of round t, None if it was not judged.
        total_bytes: all bytes of the ledger.
        seconds: of training so far.
    """
    target = parse_target(config.target)
    if target is not None and validation is not None:
        value = getattr(validation, target.metric)
        if value is not None and value >= target.value:
            return f"target reached: validation {target.metric} {value:.4f} >= {target.value:g}"
    waited = config.patience is not None and t - best_round >= config.patience
    if waited and validation is not None:  # a round that was not judged says nothing
        return f"patience: no better validation for {t - best_round} rounds, best {best_round}"
    if config.max_bytes is not None and total_bytes >= config.max_bytes:
        return f"max_bytes: {total_bytes} bytes exchanged, limit {config.max_bytes}"
    if config.max_seconds is not None and seconds >= config.max_seconds:
        return f"max_seconds: {seconds:.1f} seconds of training, limit {config.max_seconds:g}"
    return None
