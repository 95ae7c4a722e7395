"""How many batches pass between two exchanges of rows: fewer as the loss falls.

Li, Chen, Ren, Wang, Hu, Li, Yu and Chen, "Federated graph learning with adaptive importance-based
sampling", AAAI 2025, eq. 11: tau_t = ceil(sqrt(F_t / F_0) tau_0), for each knob.

What we changed: F is the validation loss of the last scored round, pooled over clients, where the
paper takes the test loss, which nothing here is chosen by. If the run has a limit of bytes, the
interval is the least from there on with which what is left lasts to the last round. The estimate
takes the cost of an exchange from the last round, and what else a round costs from the mean of all,
since only some are scored. By how much the dearest round exceeds that mean is set aside, since the
last round is scored.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from silograph.control.base import Controller, ControllerState, Knobs, RunStanding
from silograph.core.errors import ConfigError
from silograph.core.key import Key

ROW_BYTES, EXCHANGES, BATCHES = "row_bytes", "exchanges", "batches"  # facts of a round


def remember_first(options: Any, knobs: Knobs, standing: RunStanding) -> ControllerState:
    """Keep the loss of the first weights; no round has cost anything yet."""
    del options, knobs
    loss = loss_of(standing)
    costs = {"bytes": standing.bytes, "fixed": 0.0, "dear": 0.0, "exchange": 0.0, "batches": 0.0}
    return {
        "first": torch.tensor(loss, dtype=torch.float64),
        **{name: torch.tensor(cost, dtype=torch.float64) for name, cost in costs.items()},
    }


def propose(
    options: Any, knobs: Knobs, state: ControllerState, standing: RunStanding, key: Key
) -> Mapping[str, Tensor]:
    """Follow eq. 11, and the bytes that are left."""
    del options, key
    # Silos report losses, so that a ratio of any size may come.
    loss, first = max(loss_of(standing), 0.0), float(state["first"])
    share = math.sqrt(loss / first) if first > 0 else 1.0
    share = math.inf if math.isnan(share) else share
    return {
        knob.name: knob.constant(
            _affordable(
                math.ceil(min(share * knob.start, knob.high)), int(knob.high), state, standing
            ),
            standing.clients,
        )
        for knob in knobs
    }


def observe(
    options: Any,
    knobs: Knobs,
    state: ControllerState,
    standing: RunStanding,
    facts: Mapping[str, float],
    values: Mapping[str, Tensor],
) -> ControllerState:
    """Remember what the round has cost."""
    del options, knobs, values
    rows, times = facts.get(ROW_BYTES, 0.0), facts.get(EXCHANGES, 0.0)
    mean, now = float(state["fixed"]), standing.bytes - float(state["bytes"]) - rows
    costs = {
        "bytes": float(standing.bytes),
        "fixed": mean + (now - mean) / max(standing.round, 1),
        "dear": max(float(state["dear"]), now),
        "exchange": rows / max(times, 1),
        "batches": facts.get(BATCHES, 0.0),
    }
    return {
        "first": state["first"].clone(),
        **{name: torch.tensor(cost, dtype=torch.float64) for name, cost in costs.items()},
    }


def _affordable(tau: int, most: int, state: ControllerState, standing: RunStanding) -> int:
    """Return the least interval from `tau` on that the bytes left allow; `most` if none does."""
    batches, each = float(state["batches"]), float(state["exchange"])
    left, rounds = standing.bytes_left, standing.rounds_left
    if left is None or not rounds or not batches or not each:
        return tau
    fixed = float(state["fixed"])
    times = ((left - (float(state["dear"]) - fixed)) / rounds - fixed) / each
    if times >= math.ceil(batches / tau):
        return tau
    return max(tau, math.ceil(batches / math.floor(times))) if times >= 1 else most


def loss_of(standing: RunStanding) -> float:
    """Return the validation loss of the last scored round.

    Raises:
        ConfigError: there are no validation nodes.
    """
    if standing.val_loss is None:
        raise ConfigError(
            "expected validation nodes for an interval that follows their loss, got none: give "
            "some by split, such as '0.8/0.1/0.1', or take interval=fixed"
        )
    return standing.val_loss


LOSS_INTERVAL = Controller(
    name="loss_interval",
    title="intervals shrink with the root of the validation loss (FedAIS, eq. 11)",
    propose=propose,
    init=remember_first,
    observe=observe,
    needs_scores=True,
)
