"""Losses that are NaN or infinite end a run: training diverged."""

import math
from collections.abc import Iterable

from silograph.core.errors import TrainingError
from silograph.task.scores import Part, Scores


def diverged(what: str, loss: float, t: int) -> TrainingError:
    """Return the error for a loss that is NaN or infinite."""
    return TrainingError(
        f"expected a finite {what} loss, got {loss} in round {t}: training diverged; lower --lr, "
        "or the server's learning rate"
    )


def check_loss(scores: Iterable[Scores | None], part: Part, t: int) -> None:
    """Raise `TrainingError` where a judged model's loss is NaN or infinite."""
    for judged in scores:
        if judged is not None and judged.loss is not None and not math.isfinite(judged.loss):
            raise diverged({"val": "validation", "test": "test"}[part], judged.loss, t)
