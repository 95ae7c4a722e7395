"""How many batches pass between two exchanges of rows: the least bound on the gradient's norm.

Li, Chen, Ren, Wang, Hu, Li, Yu and Chen, "Federated graph learning with adaptive importance-based
sampling", AAAI 2025, eq. 10: tau = sqrt(2 (F - F_inf) o / (eta^3 c_total lambda^2 zeta^2)).

The paper says that the constants are hard to estimate, and not how. Here the server estimates them
from what it has, as means over the rounds so far. With J batches in a round, m the move of its
model in it, and s the mean squared length of the clients' own moves:

    eta lambda       |m_t - m_(t-1)| / (J |m_(t-1)|): how fast gradients change as the model moves
    eta^2 zeta^2     (s - |m|^2) / J: the spread of clients' models, which is noise and
                     heterogeneity alike
    o / c_total      bytes of an exchange over the bytes of all rounds of the run: delays are
                     counted in bytes
    F_inf            0; F is the validation loss of the last scored round

Moves under Adam are not eta times a gradient, so there the estimates are of Adam's own steps.
Before two rounds are over the interval is the knob's own value. A limit of bytes is kept to (see
"round costs" in `silograph.control.base`).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from silograph.control.base import (
    BATCHES,
    Controller,
    ControllerState,
    Knobs,
    RunStanding,
    affordable_interval,
    costs_after,
    no_costs,
)
from silograph.control.loss_interval import loss_of
from silograph.core.key import Key

MOVED, RATE = "moved", "rate"  # facts of a round: mean squared move of clients' models, eta
CURVED, SPREAD, DELAY = "curved", "spread", "delay"  # eta lambda, eta^2 zeta^2, o / c_total


def remember_weights(options: Any, knobs: Knobs, standing: RunStanding) -> ControllerState:
    """Return the state before round 1: the first weights, and no estimates yet."""
    del options, knobs
    loss_of(standing)
    vector, names = flatten_weights(standing.weights), ("rounds", "rate", CURVED, SPREAD, DELAY)
    numbers = {name: torch.zeros((), dtype=torch.float64) for name in names}
    return {"at": vector, "move": torch.zeros_like(vector), **numbers, **no_costs(standing)}


def flatten_weights(weights: Mapping[str, Tensor]) -> Tensor:
    """Return all weights as one vector, float64."""
    parts = [t.detach().cpu().double().flatten() for t in weights.values()]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


def propose(
    options: Any, knobs: Knobs, state: ControllerState, standing: RunStanding, key: Key
) -> Mapping[str, Tensor]:
    """Return eq. 10's interval if all constants are known, within the remaining bytes."""
    del options, key
    value = optimal_interval(
        max(loss_of(standing), 0.0), {name: float(state[name]) for name in NUMBERS}
    )
    return {
        knob.name: affordable_interval(
            knob, knob.start if value is None else value, state, standing
        )
        for knob in knobs
    }


NUMBERS = (CURVED, SPREAD, DELAY, "rate")


def optimal_interval(loss: float, constants: Mapping[str, float]) -> float | None:
    """Return eq. 10's interval, None if a constant is unknown or the result is no number."""
    # eta^3 lambda^2 zeta^2 = (eta lambda)^2 (eta^2 zeta^2) / eta
    denominator = constants[CURVED] * constants[CURVED] * constants[SPREAD]
    if not (denominator > 0 and constants[DELAY] > 0 and constants["rate"] > 0):
        return None
    value = math.sqrt(2 * loss * constants[DELAY] * constants["rate"] / denominator)
    return value if math.isfinite(value) else None


def observe(
    options: Any,
    knobs: Knobs,
    state: ControllerState,
    standing: RunStanding,
    facts: Mapping[str, float],
    values: Mapping[str, Tensor],
) -> ControllerState:
    """Update the estimates of the constants."""
    del options, knobs, values
    vector, last = flatten_weights(standing.weights), state["move"]
    move, steps = vector - state["at"], max(facts.get(BATCHES, 0.0), 1.0)
    number, length = float(state["rounds"]) + 1, float(last.norm())
    curved = float((move - last).norm()) / (steps * length) if length > 0 else 0.0
    spread = max(facts.get(MOVED, 0.0) - float(move.square().sum()), 0.0) / steps
    costs = costs_after(state, standing, facts)
    exchange_bytes = float(costs["exchange"])
    spent = (standing.bytes - float(state["bytes"])) * (standing.round + standing.rounds_left)
    estimates = {
        CURVED: curved,
        SPREAD: spread,
        DELAY: exchange_bytes / spent if spent > 0 else 0.0,
    }
    # Moves can be compared from the second round on.
    samples = {CURVED: max(number - 1, 1), SPREAD: number, DELAY: number}
    means = {
        name: float(state[name]) + (estimate - float(state[name])) / samples[name]
        if math.isfinite(estimate)  # clients report moves
        else float(state[name])
        for name, estimate in estimates.items()
    }
    numbers = {**means, "rounds": number, "rate": facts.get(RATE, 0.0)}
    return {
        "at": vector,
        "move": move,
        **{name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()},
        **costs,
    }


BOUND_INTERVAL = Controller(
    name="bound_interval",
    title="intervals of the least error bound, with estimated constants (FedAIS, eq. 10)",
    propose=propose,
    init=remember_weights,
    observe=observe,
    needs_scores=True,
)
