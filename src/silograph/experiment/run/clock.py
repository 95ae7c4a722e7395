"""The clocks of a run: seconds of training, and the virtual clock of clients' speeds and links."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

import numpy as np

from silograph.core.config import RunConfig
from silograph.core.key import Key, hash_texts
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import parse_links, parse_speeds
from silograph.core.text import count_of
from silograph.experiment.resolve.exclusions import parse_target
from silograph.federation.ledger import VirtualClock
from silograph.task.metric_table import METRICS
from silograph.task.scores import Scores

SPEED, BANDWIDTH = 1e9, 1e6  # of one unit: operations a second, bytes a second


class FirstUse(Protocol):
    """Knows what kernels have cost that were used for the first time in this process.

    Attributes:
        seconds: of compiling them.
        warm_up_seconds: of compiling them or loading them from the cache on disk.
    """

    @property
    def seconds(self) -> float:
        """Seconds of compiling so far."""

    @property
    def warm_up_seconds(self) -> float:
        """Seconds of compiling or loading so far."""


@dataclass(frozen=True)
class NoFirstUse:
    """Of runs that compile nothing."""

    seconds: float = 0.0
    warm_up_seconds: float = 0.0


def watch_first_use(
    kernels: str, report: Callable[[str], None] = lambda _: None
) -> AbstractContextManager[FirstUse]:
    """Return what measures the first use of kernels while it is entered.

    What torch imports at its first use is imported here, before a clock runs.

    Args:
        kernels: what the run trains with: `compiled` or `torch`.
        report: called with one line when something is compiled.
    """
    if kernels != "compiled":
        import torch.fx.experimental.symbolic_shapes  # noqa: F401 - by autograd.grad: 500 modules

        return nullcontext(NoFirstUse())
    from silograph.nn.kernels.arrays import report_compiling  # numba imports slowly

    return report_compiling(report)


@dataclass(frozen=True)
class TrainingClock:
    """Seconds of training, without what only the first run of a process spends on kernels.

    So the seconds of several runs can be compared, whichever ran first.

    Attributes:
        began: seconds of the monotonic clock at which the run would have begun without breaks.
        first_use: what the use of new kernels has cost since then.
    """

    began: float
    first_use: FirstUse = NoFirstUse()

    def seconds(self) -> float:
        """Return the seconds of training so far."""
        return time.monotonic() - self.began - self.first_use.warm_up_seconds


def clock_of(config: ResolvedConfig, ids: Sequence[str]) -> VirtualClock | None:
    """Return the clock of a run, None where it has none.

    Speeds that are drawn are exp(z) with z standard normal, by seed and name of the client.
    """
    if config.speeds is None or config.links is None:
        return None
    return _make_clock(config.speeds, config.links, config.seed, tuple(ids))


@lru_cache(maxsize=4)  # called in every round
def _make_clock(speed_text: str, link_text: str, seed: int, ids: tuple[str, ...]) -> VirtualClock:
    speed_factors, clients = parse_speeds(speed_text), np.arange(len(ids))
    if speed_factors is None:
        u = Key.of(seed).fold("speeds").uniform(hash_texts(ids), 2).numpy()
        speeds = np.exp(np.sqrt(-2 * np.log(1 - u[:, 0])) * np.cos(2 * math.pi * u[:, 1]))
    else:
        speeds = np.array(speed_factors)[clients % len(speed_factors)]
    links = np.array(parse_links(link_text))
    rate, latency = links[clients % len(links)].T
    return VirtualClock(SPEED * speeds, BANDWIDTH * rate, latency.copy())


# --- When a run stops before its last round, and what it says about it ---------------------------


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
        reason: the value of the run, and the limit.
    """

    limit: Limit
    reason: str

    def __str__(self) -> str:
        """Return it as results and checkpoints have it."""
        return f"{self.limit}: {self.reason}"

    def after_evaluation(self, more: int) -> "Stop":
        """Return it with the bytes of the last evaluation, where bytes are the reason."""
        if self.limit is not Limit.BYTES or more == 0:
            return self
        return replace(self, reason=f"{self.reason}; the evaluation after it took {more} more")


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
            comparison, value_text = ">=" if metric.higher else "<=", metric.text(value)
            reached = f"validation {target.metric} {value_text} {comparison} {target.value:g}"
            return Stop(Limit.TARGET, reached)
    is_out_of_patience = config.patience is not None and t - best_round >= config.patience
    if is_out_of_patience and validation is not None:  # a round that was not judged says nothing
        rounds = count_of(t - best_round, "round")
        return Stop(Limit.PATIENCE, f"no better validation for {rounds}, best {best_round}")
    if config.max_bytes is not None and total_bytes >= config.max_bytes:
        description = f"{total_bytes} bytes exchanged, limit {config.max_bytes}"
        too_small_note = (
            " (less than one round takes)" if first and total_bytes > config.max_bytes else ""
        )
        return Stop(Limit.BYTES, description + too_small_note)
    if config.max_seconds is not None and seconds >= config.max_seconds:
        elapsed_training = f"{seconds:.1f} seconds of training, limit {config.max_seconds:g}"
        return Stop(Limit.SECONDS, elapsed_training)
    limit = config.max_virtual_seconds
    if limit is not None and virtual_seconds is not None and virtual_seconds >= limit:
        elapsed = f"{virtual_seconds:.1f} virtual seconds, limit {limit:g}"
        return Stop(Limit.VIRTUAL_SECONDS, elapsed)
    return None
