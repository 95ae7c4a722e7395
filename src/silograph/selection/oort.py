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

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.selection.base import RoundFacts, Selector, SelectorState
from silograph.selection.options import (
    Budget,
    Least,
    budget_field,
    clients_field,
    least_clients_field,
    least_selections_field,
)
from silograph.selection.ranking import highest, in_order, race

WINDOW = 20  # rounds
FIRST_PERCENTILE, STEP = 30.0, 5.0  # of durations
EXPLORE, DECAY, LEAST_EXPLORE = 0.9, 0.98, 0.2
CUT, CLIP = 0.95, 0.95


@dataclass(frozen=True, config=STRICT)
class OortOptions:
    """The help texts are the documentation of the fields."""

    clients: Annotated[int, Field(ge=1)] = clients_field(10)
    alpha: Annotated[float, Field(ge=0)] = field(
        default=2.0, metadata={"help": "how much slow clients are held back; 0: not at all"}
    )
    budget: Budget = budget_field()
    least_clients: Least = least_clients_field()
    least_selections: Least = least_selections_field()


def init(ids: Sequence[str], options: OortOptions) -> SelectorState:
    """Nothing is known of anybody."""
    del options
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
    """Draw from who never trained, and from who is useful."""
    number, seen = min(options.clients, len(ids)), state["last"] > 0
    known = int(seen.sum())
    share = max(LEAST_EXPLORE, EXPLORE * DECAY ** (t - 1))
    exploit = min(number - round(share * number), known)
    explore = min(number - exploit, len(ids) - known)
    exploit = number - explore
    chosen = torch.zeros(len(ids), dtype=torch.bool)
    if exploit:
        scores = utilities(options, state, t)
        least = CUT * float(scores[seen].topk(exploit).values[-1])
        weights = torch.where(seen & (scores >= least), scores, 0.0)
        chosen[race(ids, weights, key.fold("exploit")).topk(exploit).indices] = True
    new = highest(ids, (~seen).double(), explore, key.fold("explore"))
    names = {*in_order(ids, chosen.nonzero()[:, 0]), *new}
    return [name for name in ids if name in names]


def utilities(options: OortOptions, state: SelectorState, t: int) -> Tensor:
    """Return the utility (C,) of each client that has trained, above 0."""
    seen, duration = state["last"] > 0, state["duration"]
    clip = state["utility"][seen].quantile(CLIP)
    fresh = (0.1 * math.log(t) / state["last"].clamp(min=1)).sqrt()
    found = state["utility"].minimum(clip) + fresh
    preferred = duration[seen].quantile(float(state["percentile"]) / 100)
    slow = (preferred / duration.clamp(min=1e-12)).clamp(max=1.0) ** options.alpha
    return torch.where(duration > preferred, found * slow, found).clamp(min=1e-12)


def observe(options: OortOptions, state: SelectorState, t: int, facts: RoundFacts) -> SelectorState:
    """Keep the utility and the duration of who trained; see the module for the pacer."""
    del options
    answered, old = facts.answered, state["duration"]
    loss = facts.train_loss.nan_to_num(nan=0.0, posinf=0.0).clamp(min=0)
    utility = torch.where(answered, facts.nodes * loss, state["utility"])
    took = torch.zeros_like(old) if facts.seconds is None else facts.seconds
    gain = utility[answered].sum()
    gains, percentile = torch.cat([state["gains"][1:], gain[None]]), state["percentile"]
    if t >= 2 * WINDOW and t % WINDOW == 0:
        falls = bool(gains[:WINDOW].sum() > gains[WINDOW:].sum())
        percentile = (percentile + STEP * falls).clamp(max=100.0)
    return {
        "utility": utility,
        "last": torch.where(answered, t, state["last"]),
        "duration": torch.where(answered, took, old),
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
)
