"""Laws of learning-rate schedules: torch's schedulers, a round for an epoch."""

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from silograph.core.errors import ConfigError
from silograph.core.setting_values import CONSTANT, parse_rate_schedule

ROUNDS = 12


def torchs(text: str, warmup: int) -> list[float]:
    """Return the factors of torch's scheduler in rounds 1 to `ROUNDS`."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    name, *numbers = text.split(":")
    after: Any = lr_scheduler.ConstantLR(optimizer, 1.0)
    if name == "cosine":
        after = lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS - warmup)
    elif name == "step":
        after = lr_scheduler.StepLR(optimizer, int(numbers[0]), float(numbers[1]))
    scheduler = after
    if warmup > 1:
        rising = lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
        scheduler = lr_scheduler.SequentialLR(optimizer, [rising, after], [warmup])
    found = []
    for _ in range(ROUNDS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("text", ["constant", "cosine", "step:3:0.5", "step:1:0.1"])
def test_rates_are_those_of_torch(text: str, warmup: int) -> None:
    rates = parse_rate_schedule(text, ROUNDS, warmup)
    ours = [rates.at(t) for t in range(1, ROUNDS + 1)]
    assert ours == pytest.approx(torchs(text, warmup), abs=1e-12)
    assert all(0 < rate <= 1 for rate in ours)
    assert rates.at(0) == rates.at(1)


def test_without_a_schedule_the_rate_stays() -> None:
    assert {parse_rate_schedule("constant", 9, 0).at(t) for t in range(10)} == {1.0}
    assert {CONSTANT.at(t) for t in range(10)} == {1.0}


@pytest.mark.parametrize(
    "text", ["", "linear", "step", "step:3", "step:0:0.1", "step:1.5:0.1", "step:3:2", "step:3:nan"]
)
def test_other_forms_are_refused(text: str) -> None:
    message = (
        r"^expected lr_schedule constant, cosine, or step:ROUNDS:FACTOR with a factor above 0 and "
        r"at most 1 such as step:30:0.1, got "
    )
    with pytest.raises(ConfigError, match=message):
        parse_rate_schedule(text, 9, 0)


def test_a_warm_up_of_all_rounds_is_refused() -> None:
    message = "^expected fewer rounds of warm-up than rounds, got warmup_rounds=9 with rounds=9$"
    with pytest.raises(ConfigError, match=message):
        parse_rate_schedule("cosine", 9, 9)
