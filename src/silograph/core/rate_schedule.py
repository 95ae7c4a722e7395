"""How the clients' learning rate changes over rounds; nothing here needs torch.

A rate is a pure function of the number of the round and the config, so it is the same on every
engine and after a resume. Each form is that of `torch.optim.lr_scheduler`, a round for an epoch.
"""

import math
from dataclasses import dataclass
from typing import Literal

from silograph.core.errors import ConfigError


@dataclass(frozen=True)
class RateSchedule:
    """A factor of the learning rate for each round.

    Rounds 1 to W warm up: round t has t / W of the rate. After them, with s = t - W - 1:

        constant    1
        step        factor^floor(s / every)                (torch: StepLR)
        cosine      (1 + cos(pi s / (rounds - W))) / 2     (torch: CosineAnnealingLR to 0)

    Attributes:
        form: one of the above.
        rounds: of the run.
        warmup: W.
        every: rounds between steps.
        factor: of each step.
    """

    form: Literal["constant", "step", "cosine"] = "constant"
    rounds: int = 1
    warmup: int = 0
    every: int = 1
    factor: float = 1.0

    def at(self, t: int) -> float:
        """Return the factor of round t, from 1; what is done before round 1 has that of round 1."""
        t = max(t, 1)
        if t <= self.warmup:
            return t / self.warmup
        s = t - self.warmup - 1
        if self.form == "step":
            return float(self.factor ** (s // self.every))
        if self.form == "cosine":
            return (1 + math.cos(math.pi * s / (self.rounds - self.warmup))) / 2
        return 1.0


CONSTANT = RateSchedule()


def parse_rate_schedule(text: str, rounds: int, warmup: int) -> RateSchedule:
    """Return the schedule of a run.

    >>> parse_rate_schedule("step:30:0.1", 100, 5)
    RateSchedule(form='step', rounds=100, warmup=5, every=30, factor=0.1)

    Args:
        text: constant, cosine, or step:ROUNDS:FACTOR.
        rounds: of the run.
        warmup: rounds in which the rate rises.

    Raises:
        ConfigError: another form, or rounds of warm-up after which no round is left.
    """
    if warmup >= rounds and warmup:
        raise ConfigError(
            f"expected fewer rounds of warm-up than rounds, got warmup_rounds={warmup} with "
            f"rounds={rounds}"
        )
    if text == "constant":
        return RateSchedule("constant", rounds, warmup)
    if text == "cosine":
        return RateSchedule("cosine", rounds, warmup)
    name, *parts = text.split(":")
    every, factor = (_number(part) for part in parts) if len(parts) == 2 else (0.0, 0.0)
    if name != "step" or not (every >= 1 and every == int(every)) or not 0 < factor <= 1:
        raise ConfigError(
            f"expected lr_schedule constant, cosine, or step:ROUNDS:FACTOR with a factor above 0 "
            f"and at most 1 such as step:30:0.1, got {text!r}"
        )
    return RateSchedule("step", rounds, warmup, int(every), factor)


def _number(text: str) -> float:
    """Return a finite number, 0 where the text is none."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0
