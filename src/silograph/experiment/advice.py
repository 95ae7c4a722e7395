"""What the course of a run says about its number of rounds: too few, or more than it needed."""

from collections.abc import Sequence

from silograph.core.text import counted
from silograph.experiment.result_files import Row
from silograph.task.metric_table import LOSS, METRICS, Metric

STEP = 5  # patience is suggested in multiples of this
WORTH = 0.25  # share of the rounds that patience must save to be worth a line


def advice_of(
    rows: Sequence[Row],
    view: str,
    metric: Metric,
    best_round: int,
    *,
    rounds: int,
    patience: int | None,
) -> str | None:
    """Return one line about the number of rounds, or None where there is nothing to say.

    Args:
        rows: the evaluated rounds of a run that is over.
        view: the view that picks the best round.
        metric: the metric that picks it.
        best_round: the round that was picked.
        rounds: the number of rounds that was asked for.
        patience: the run's patience, None where it has none.
    """
    best = _best_so_far(rows, f"val_{view}", metric)
    if len(best) < 2 or best[-1][1] != best_round:
        return None  # no course without two evaluations; rounds without some silos compare apart
    last = best[-1][0]
    if last == best_round == rounds:
        return (
            f"validation {metric.title} was still improving at the last round: raise --rounds "
            f"(now {rounds})"
        )
    waited = max((t - b for t, b in best if t < best_round), default=0)
    enough = STEP * (max(waited, STEP) // STEP + 1)
    saved = last - best_round - enough
    if patience is not None or saved < WORTH * rounds:
        return None
    return (
        f"the best round was {best_round} of {rounds}: --patience {enough} gives the same model "
        f"{counted(saved, 'round')} earlier"
    )


def _best_so_far(rows: Sequence[Row], prefix: str, metric: Metric) -> list[tuple[int, int]]:
    """Return each evaluated round with the best one up to it, by the metric and then the loss."""
    found: list[tuple[int, int]] = []
    best: tuple[float, float] | None = None
    for row in rows:
        value, loss = row[f"{prefix}_{metric.name}"], row[f"{prefix}_{LOSS}"]
        if value is None or loss is None:
            continue
        rank, t = (metric.goodness(value), METRICS[LOSS].goodness(loss)), int(row["round"] or 0)
        chosen = t if best is None or rank > best else found[-1][1]
        best = rank if best is None else max(best, rank)
        found.append((t, chosen))
    return found
