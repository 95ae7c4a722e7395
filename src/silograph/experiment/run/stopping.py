"""When a run stops before its last round, and what it says about it."""

from silograph.core.config import RunConfig
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.text import counted
from silograph.experiment.resolve.run_metric import parse_target
from silograph.task.metric_table import METRICS
from silograph.task.scores import Scores

BYTES = "max_bytes"


def reason_to_stop(
    config: RunConfig | ResolvedConfig,
    *,
    t: int,
    best_round: int,
    validation: Scores | None,
    total_bytes: int,
    seconds: float,
    virtual_seconds: float | None = None,
    first: bool = False,
) -> str | None:
    """Return why the run stops after round t, or None.

    Args:
        config: the run's limits.
        t: the round that is over.
        best_round: the best one so far.
        validation: scores of round t, None if it was not judged.
        total_bytes: all bytes of the ledger.
        seconds: of training so far.
        virtual_seconds: of the virtual clock so far, None without one.
        first: whether no round was over before.
    """
    target = parse_target(config.target, config.metric)
    if target is not None and validation is not None:
        metric, value = METRICS[target.metric], validation[target.metric]
        if metric.reaches(value, target.value):
            sign, shown = ">=" if metric.higher else "<=", metric.text(value)
            return f"target reached: validation {target.metric} {shown} {sign} {target.value:g}"
    waited = config.patience is not None and t - best_round >= config.patience
    if waited and validation is not None:  # a round that was not judged says nothing
        return (
            f"patience: no better validation for {counted(t - best_round, 'round')}, "
            f"best {best_round}"
        )
    if config.max_bytes is not None and total_bytes >= config.max_bytes:
        why = f"{BYTES}: {total_bytes} bytes exchanged, limit {config.max_bytes}"
        short = " (less than one round takes)" if first and total_bytes > config.max_bytes else ""
        return why + short
    if config.max_seconds is not None and seconds >= config.max_seconds:
        return f"max_seconds: {seconds:.1f} seconds of training, limit {config.max_seconds:g}"
    limit = config.max_virtual_seconds
    if limit is not None and virtual_seconds is not None and virtual_seconds >= limit:
        return f"max_virtual_seconds: {virtual_seconds:.1f} virtual seconds, limit {limit:g}"
    return None


def with_closing_bytes(stopped: str | None, more: int) -> str | None:
    """Return why a run stopped, with the bytes of its last evaluation where bytes were the reason.

    >>> with_closing_bytes("max_bytes: 9 bytes exchanged, limit 8", 3)
    'max_bytes: 9 bytes exchanged, limit 8; the evaluation after it took 3 more'
    """
    if stopped is None or more == 0 or not stopped.startswith(f"{BYTES}: "):
        return stopped
    return f"{stopped}; the evaluation after it took {more} more"
