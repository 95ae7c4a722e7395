"""How many batches pass between two exchanges of rows: fewer as the loss falls.

Li, Chen, Ren, Wang, Hu, Li, Yu and Chen, "Federated graph learning with adaptive importance-based
sampling", AAAI 2025, eq. 11: tau_t = ceil(sqrt(F_t / F_0) tau_0), for each knob.

What we changed: F is the validation loss of the last scored round, pooled over clients, where the
paper takes the test loss, which nothing here is chosen by; and a limit of bytes is kept to (see
"round costs" in `silograph.control.base`).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from silograph.control.base import (
    Controller,
    ControllerState,
    Knobs,
    RunStanding,
    affordable_interval,
    costs_after,
    no_costs,
)
from silograph.core.errors import ConfigError
from silograph.core.key import Key


def remember_first_loss(options: Any, knobs: Knobs, standing: RunStanding) -> ControllerState:
    """Return the state before round 1: the loss of the first weights, and no costs."""
    del options, knobs
    first = torch.tensor(loss_of(standing), dtype=torch.float64)
    return {"first": first, **no_costs(standing)}


def propose(
    options: Any, knobs: Knobs, state: ControllerState, standing: RunStanding, key: Key
) -> Mapping[str, Tensor]:
    """Return the interval of eq. 11, within the remaining bytes."""
    del options, key
    # Silos report losses, so that a ratio of any size may come.
    loss, first = max(loss_of(standing), 0.0), float(state["first"])
    share = math.sqrt(loss / first) if first > 0 else 1.0
    share = math.inf if math.isnan(share) else share
    return {
        knob.name: affordable_interval(knob, share * knob.start, state, standing) for knob in knobs
    }


def observe(
    options: Any,
    knobs: Knobs,
    state: ControllerState,
    standing: RunStanding,
    facts: Mapping[str, float],
    values: Mapping[str, Tensor],
) -> ControllerState:
    """Update the costs by the round."""
    del options, knobs, values
    return {"first": state["first"].clone(), **costs_after(state, standing, facts)}


def loss_of(standing: RunStanding) -> float:
    """Return the validation loss of the last scored round.

    Raises:
        ConfigError: there is none, as no client has validation nodes or sent their counts.
    """
    if standing.val_loss is None:
        raise ConfigError(
            "expected validation counts for an interval that follows their loss, got none: give "
            "validation nodes by split, such as '0.8/0.1/0.1'; if clients have some and sent no "
            "counts, lower evaluation_min_count, or let silos allow counts (evaluation in "
            "policy.toml); or take interval=fixed"
        )
    return standing.val_loss


LOSS_INTERVAL = Controller(
    name="loss_interval",
    title="intervals shrink with the root of the validation loss (FedAIS, eq. 11)",
    propose=propose,
    init=remember_first_loss,
    observe=observe,
    needs_scores=True,
)
