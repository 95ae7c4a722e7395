"""What methods need of the clients' training, and their defaults."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from silograph.control import FIXED, Controller, Knob, knobs_of
from silograph.nn.correction import Correction
from silograph.nn.loss_term import LossTerm

LEARNING_RATES = {"sgd": 0.1, "adam": 0.01}  # where a method names none of its own


def fixed_knobs(options: Any) -> Controller:
    """Knobs stay what the options say."""
    del options
    return FIXED


def no_losses(options: Any) -> tuple[LossTerm, ...]:
    """Add nothing."""
    del options
    return ()


def no_corrections(options: Any) -> tuple[Correction, ...]:
    """Local steps follow the gradient of the data."""
    del options
    return ()


@dataclass(frozen=True)
class DefaultModel:
    """A model that runs have where they name none.

    Attributes:
        name: of the model.
        layers: default of the run's `layers` with it; None: that of all models.
        hidden: default of the run's `hidden` with it; None: that of all models.
    """

    name: str
    layers: int | None = None
    hidden: int | None = None


NODE_MODEL, RATING_MODEL = DefaultModel("gcn"), DefaultModel("rating_profiles")


@dataclass(frozen=True)
class Needs:
    """What a method needs of the clients' training, and its defaults.

    Attributes:
        optimizer: default of the run's `optimizer`.
        lr: default of the run's `lr` with that optimizer; None: that of `LEARNING_RATES`.
        weight_decay: default of the run's `weight_decay`.
        local_epochs: default of the run's `local_epochs`.
        keep_optimizer: default of the run's `keep_optimizer`.
        plain_sgd: whether gradients are recovered from the clients' steps, so that these must be
            plain SGD.
        corrections: what the options add to the gradient of every local step; what an op works
            out anew for every call stands here too, without its values, for the plan of the run.
        losses: what the options add to the loss of every local step, likewise.
        score_first: whether the first weights are scored before round 1, and the last scores kept
            for whatever decides by them.
        knobs: which of the options' knobs a run has, by those options.
        controller: what sets them, likewise.
        selector: default of the run's `selector`.
        rating_model: default of the run's `model` on ratings of users and items.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float | None = None
    weight_decay: float = 5e-4
    local_epochs: int = 1
    keep_optimizer: bool = False
    plain_sgd: bool = False
    corrections: Callable[[Any], tuple[Correction, ...]] = no_corrections
    losses: Callable[[Any], tuple[LossTerm, ...]] = no_losses
    score_first: bool = False
    knobs: Callable[[Any], tuple[Knob, ...]] = knobs_of
    controller: Callable[[Any], Controller] = fixed_knobs
    selector: str = "uniform"
    rating_model: DefaultModel = RATING_MODEL

    def learning_rate(self, optimizer: str) -> float:
        """Return the default of the run's `lr` with an optimizer."""
        own = self.lr if optimizer == self.optimizer else None
        return LEARNING_RATES[optimizer] if own is None else own
