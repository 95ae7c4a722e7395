"""Oort: clients of high statistical utility that are fast enough, and some that are unexplored.

Lai, Zhu, Madhyastha and Chowdhury, "Oort: Efficient federated learning via guided participant
selection", OSDI 2021, algorithm 1 and equation 1. Of K clients in round t:

    exploration   a share max(0.2, 0.9 * 0.98^(t-1)) of them is drawn from those that never trained
    exploitation  the others from those that did, by
                      U_i = u_i + sqrt(0.1 log t / L_i),   times (T / d_i)^alpha where d_i > T
                  with u_i clipped at its 95th percentile, L_i the round in which i last trained,
                  d_i its duration then. The cutoff is 95 % of the K-th largest; who is above it
                  is drawn in proportion to U_i.
    pacer         T is a percentile of the durations, which begins at 30 and rises by 5 whenever the
                  utility of the last 20 rounds is below that of the 20 before (as the authors'
                  code has it; algorithm 1 adds a constant).

What we changed: u_i is n_i times the mean training loss that clients report anyway, where the paper
has n_i times the root mean square of the nodes' losses, which would be one more number. Durations
are those of the virtual clock (`--speeds`, `--links`); without one all clients are fast enough, and
Oort is its statistical half. Unexplored clients are drawn uniformly: nobody knows their speed. The
fairness term and the removal of clients that took part often are left out.

State: `utility` (C,), `last` (C,) int64 round, 0 for never, `duration` (C,), `gains` (40,) utility
of the latest rounds, latest last, `percentile` (). C: clients.
"""

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.selection.base import (
    RoundFacts,
    Selector,
    SelectorState,
    ids_of_mask,
    mask_of_highest,
    mask_of_top,
    race_scores,
)
from silograph.selection.options import (
    Budget,
    Least,
    budget_field,
    check_at_most,
    clients_field,
    clients_of_round,
    least_clients_field,
    least_selections_field,
)

WINDOW = 20  # rounds
FIRST_PERCENTILE, STEP = 30.0, 5.0  # of durations
EXPLORE, DECAY, LEAST_EXPLORE = 0.9, 0.98, 0.2
CUT, CLIP = 0.95, 0.95


@dataclass(frozen=True, config=STRICT)
class OortOptions:
    """The help texts are the documentation of the fields."""

    clients: Annotated[int, Field(ge=1)] | None = clients_field()
    alpha: Annotated[float, Field(ge=0)] = field(
        default=2.0, metadata={"help": "how much slow clients are held back; 0: not at all"}
    )
    budget: Budget = budget_field()
    least_clients: Least = least_clients_field()
    least_selections: Least = least_selections_field()


def init(ids: Sequence[str], options: OortOptions) -> SelectorState:
    """Return the state before round 1, in which no client is known."""
    check_at_most("clients", options.clients, len(ids), "clients")
    zeros = torch.zeros(len(ids), dtype=torch.float64)
    return {
        "utility": zeros,
        "last": torch.zeros(len(ids), dtype=torch.int64),
        "duration": zeros.clone(),
        "gains": torch.zeros(2 * WINDOW, dtype=torch.float64),
        "percentile": torch.tensor(FIRST_PERCENTILE, dtype=torch.float64),
    }


def draw(
    ids: Sequence[str], options: OortOptions, state: SelectorState, t: int, key: Key
) -> list[str]:
    """Draw some clients that never trained, and some of high utility."""
    number, is_explored = clients_of_round(options.clients, len(ids)), state["last"].numpy() > 0
    num_explored = int(is_explored.sum())
    share = max(LEAST_EXPLORE, EXPLORE * DECAY ** (t - 1))
    exploit = min(number - round(share * number), num_explored)
    explore = min(number - exploit, len(ids) - num_explored)
    exploit = number - explore
    is_chosen = np.zeros(len(ids), dtype=bool)
    if explore:
        is_chosen = mask_of_highest(
            ids, (~is_explored).astype(np.float64), explore, key.fold("explore")
        )
    if exploit:
        scores = utilities(options, state, t)
        least = (
            CUT * np.partition(scores[is_explored], num_explored - exploit)[num_explored - exploit]
        )
        weights = np.where(is_explored & (scores >= least), scores, 0.0)
        is_chosen |= mask_of_top(race_scores(ids, weights, key.fold("exploit")), exploit)
    return ids_of_mask(ids, is_chosen)


def utilities(options: OortOptions, state: SelectorState, t: int) -> np.ndarray:
    """Return the utility (C,) of each client that has trained, above 0."""
    last, duration, utility = (state[name].numpy() for name in ("last", "duration", "utility"))
    is_explored = last > 0
    staleness = np.sqrt(0.1 * math.log(t) / np.maximum(last, 1))
    utility_now = np.minimum(utility, quantile(utility[is_explored], CLIP)) + staleness
    preferred = quantile(duration[is_explored], float(state["percentile"]) / 100)
    slowness = np.minimum(preferred / np.maximum(duration, 1e-12), 1.0) ** options.alpha
    penalized: np.ndarray = np.where(duration > preferred, utility_now * slowness, utility_now)
    return penalized.clip(min=1e-12)


def quantile(values: np.ndarray, share: float) -> float:
    """Return the value below which a share of values (n,) lies, between neighbors by a line."""
    position = share * (len(values) - 1)
    lower = int(position)
    upper = min(lower + 1, len(values) - 1)
    ordered = np.partition(values, (lower, upper))
    low, high = float(ordered[lower]), float(ordered[upper])
    weight = position - lower
    if weight < 0.5:
        return low + weight * (high - low)
    return high - (high - low) * (1 - weight)


def observe(options: OortOptions, state: SelectorState, t: int, facts: RoundFacts) -> SelectorState:
    """Update utility and duration of clients that trained; see the module for the pacer."""
    del options
    answered, loss = facts.answered.numpy(), facts.train_loss.numpy()
    loss = np.where(loss > 0, np.where(loss < np.inf, loss, 0.0), 0.0)  # of NaN, 0
    utility = np.where(answered, facts.nodes.numpy() * loss, state["utility"].numpy())
    durations = np.zeros(len(loss)) if facts.seconds is None else facts.seconds.numpy()
    gain = torch.from_numpy(utility[answered]).sum()
    gains, percentile = torch.cat([state["gains"][1:], gain[None]]), state["percentile"]
    if t >= 2 * WINDOW and t % WINDOW == 0:
        falls = bool(gains[:WINDOW].sum() > gains[WINDOW:].sum())
        percentile = (percentile + STEP * falls).clamp(max=100.0)
    return {
        "utility": torch.from_numpy(utility),
        "last": torch.from_numpy(np.where(answered, t, state["last"].numpy())),
        "duration": torch.from_numpy(np.where(answered, durations, state["duration"].numpy())),
        "gains": gains,
        "percentile": percentile.clone(),
    }


OORT = Selector(
    "oort",
    "clients of high utility that are fast enough, and some unexplored ones",
    OortOptions,
    draw,
    init=init,
    observe=observe,
    uses_scores=False,
)
