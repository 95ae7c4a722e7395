"""When a run stops before its last round, and what it says about it."""

from dataclasses import dataclass, replace
from enum import StrEnum

from silograph.core.config import RunConfig
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.text import counted
from silograph.experiment.resolve.run_metric import parse_target
from silograph.task.metric_table import METRICS
from silograph.task.scores import Scores


class Limit(StrEnum):
    """What ends a run before its last round, as its result names it."""

    TARGET = "target reached"
    PATIENCE = "patience"
    BYTES = "max_bytes"
    SECONDS = "max_seconds"
    VIRTUAL_SECONDS = "max_virtual_seconds"
    SELECTOR_BUDGET = "selector.budget"


@dataclass(frozen=True)
class Stop:
    """Why a run stops.

    >>> stop = Stop(Limit.BYTES, "9 bytes exchanged, limit 8")
    >>> print(stop.after_evaluation(3))
    max_bytes: 9 bytes exchanged, limit 8; the evaluation after it took 3 more

    Attributes:
        limit: what ends it.
        found: how the run stands to that limit.
    """

    limit: Limit
    found: str

    def __str__(self) -> str:
        """Return it as results and checkpoints have it."""
        return f"{self.limit}: {self.found}"

    def after_evaluation(self, more: int) -> "Stop":
        """Return it with the bytes of the last evaluation, where bytes are the reason."""
        if self.limit is not Limit.BYTES or more == 0:
            return self
        return replace(self, found=f"{self.found}; the evaluation after it took {more} more")


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
) -> Stop | None:
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
            reached = f"validation {target.metric} {shown} {sign} {target.value:g}"
            return Stop(Limit.TARGET, reached)
    waited = config.patience is not None and t - best_round >= config.patience
    if waited and validation is not None:  # a round that was not judged says nothing
        rounds = counted(t - best_round, "round")
        return Stop(Limit.PATIENCE, f"no better validation for {rounds}, best {best_round}")
    if config.max_bytes is not None and total_bytes >= config.max_bytes:
        why = f"{total_bytes} bytes exchanged, limit {config.max_bytes}"
        short = " (less than one round takes)" if first and total_bytes > config.max_bytes else ""
        return Stop(Limit.BYTES, why + short)
    if config.max_seconds is not None and seconds >= config.max_seconds:
        trained = f"{seconds:.1f} seconds of training, limit {config.max_seconds:g}"
        return Stop(Limit.SECONDS, trained)
    limit = config.max_virtual_seconds
    if limit is not None and virtual_seconds is not None and virtual_seconds >= limit:
        passed = f"{virtual_seconds:.1f} virtual seconds, limit {limit:g}"
        return Stop(Limit.VIRTUAL_SECONDS, passed)
    return None
