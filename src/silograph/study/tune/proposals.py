"""What a search tries next: a pure function of its number and of the trials before it.

optuna proposes (tree-structured Parzen estimators; Watanabe, "Tree-structured Parzen estimator",
2023); it keeps nothing, so a search that was stopped goes on as if it had not been.
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silograph.core.config import Scalar
from silograph.core.errors import SilographError
from silograph.core.ranges import Range
from silograph.task.metric_table import METRICS, Metric

TrialParams = Mapping[str, Scalar]


@dataclass(frozen=True)
class Trial:
    """One setting that was tried.

    Attributes:
        number: from 0.
        params: values of the tuned keys.
        values: validation scores by seed, of the seeds that have run; None where training
            diverged.
        error: what went wrong, or None.
        whole: whether every seed has run.
        metric: what the scores are.
    """

    number: int
    params: TrialParams
    values: tuple[float | None, ...]
    error: str | None
    whole: bool
    metric: Metric = METRICS["accuracy"]

    @property
    def diverged(self) -> int:
        """Number of seeds whose training diverged."""
        return sum(value is None for value in self.values)

    @property
    def scores(self) -> tuple[float, ...]:
        """Validation scores by seed, the worst there is where training diverged."""
        worst = 0.0 if self.metric.higher else math.inf
        return tuple(worst if value is None else value for value in self.values)

    @property
    def mean(self) -> float | None:
        """Mean validation score; None unless every seed has one."""
        return sum(self.scores) / len(self.scores) if self.whole and self.scores else None


def check_optuna() -> None:
    """Raise `SilographError` where optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise SilographError(
            "expected optuna for tune, got no such package: pip install 'silograph[tune]'"
        ) from None


def propose(
    number: int, ranges: Mapping[str, Range], before: Sequence[Trial], seed: int
) -> TrialParams:
    """Return the values to try.

    Args:
        number: of the new trial; with `seed` it decides what is drawn.
        ranges: of the tuned keys.
        before: earlier trials; those without a mean are left out.
        seed: of the search.
    """
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    distributions = {key: _distribution(r) for key, r in ranges.items()}
    text = f"silograph search {seed} {number}".encode()
    own = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    sampler = optuna.samplers.TPESampler(seed=own)
    higher = not before or before[0].metric.higher
    study = optuna.create_study(direction="maximize" if higher else "minimize", sampler=sampler)
    for trial in before:
        if trial.mean is not None:
            study.add_trial(
                optuna.trial.create_trial(
                    params=dict(trial.params), distributions=distributions, value=trial.mean
                )
            )
    return dict(study.ask(distributions).params)


def _distribution(values: Range) -> Any:
    from optuna import distributions

    if values.kind == "choice":
        return distributions.CategoricalDistribution(values.choices)
    log = values.kind == "log"
    if isinstance(values.low, int) and isinstance(values.high, int):
        return distributions.IntDistribution(values.low, values.high, log=log)
    return distributions.FloatDistribution(values.low, values.high, log=log)
