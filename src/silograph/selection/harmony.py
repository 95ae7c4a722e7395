"""Harmony: clients that together have everybody's labels, and among those the fast ones.

Tian, Li, Shi, Wang and Xu, "HARMONY: Heterogeneity-aware hierarchical management for federated
learning system", MICRO 2022. FedACS cites it as a baseline that "takes into account both the data
distribution and training capability of different clients when selecting clients", and says no more.

How we read it: Harmony's server (its "global coordinator") estimates how labels are distributed at
each device and how fast it trains, without their data; it selects devices whose labels together are
near those of all, and that are fast. Its other half, devices that reorganize their samples and
adapt their batches, changes local training and is not part of a selector. So here

- clients' labels are estimated by the counts of true labels among their validation nodes, which are
  part of what a selected client reports of the model that it receives (`tp + fn` of each class);
- clients are taken one after the other: always the one that brings the joined distribution of
  labels nearest to that of all known clients, in Euclidean distance, ties by a draw. The first one
  is drawn, so that rounds differ;
- clients beyond the share `fast` of the durations of the virtual clock are left out where enough
  others are known; without a clock nobody is;
- who is unknown is taken first, as in round 1, up to the number of clients;
- where a task has no classes nobody's labels are known, and clients are drawn uniformly.

It is a reading and not the authors' code: their estimates and weights are not in FedACS' text.

State: `labels` (C, K) float64, `known` (C,) bool, `duration` (C,) float64. K is 0 before the first
round. C: clients. K: classes or label bits.
"""

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
from silograph.selection.ranking import draws_of, highest, in_order


@dataclass(frozen=True, config=STRICT)
class HarmonyOptions:
    """The help texts are the documentation of the fields."""

    clients: Annotated[int, Field(ge=1)] = clients_field(10)
    fast: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.8, metadata={"help": "share of the known clients, fastest first, to choose from"}
    )
    budget: Budget = budget_field()
    least_clients: Least = least_clients_field()
    least_selections: Least = least_selections_field()


def init(ids: Sequence[str], options: HarmonyOptions) -> SelectorState:
    """Nothing is known of anybody."""
    del options
    return {
        "labels": torch.zeros(len(ids), 0, dtype=torch.float64),
        "known": torch.zeros(len(ids), dtype=torch.bool),
        "duration": torch.zeros(len(ids), dtype=torch.float64),
    }


def draw(
    ids: Sequence[str], options: HarmonyOptions, state: SelectorState, t: int, key: Key
) -> list[str]:
    """Take unknown clients first, then those that balance the labels."""
    del t
    number, known = min(options.clients, len(ids)), state["known"]
    if int((~known).sum()) >= number or state["labels"].shape[1] == 0:
        return highest(ids, (~known).double(), number, key)
    chosen = ~known
    allowed = known & fast_enough(options, state, number - int(chosen.sum()))
    draws = draws_of(ids, key)
    labels = state["labels"]
    aim = shares(labels[known].sum(0))
    joined = labels[chosen].sum(0)
    for _ in range(number - int(chosen.sum())):
        far = (shares(joined + labels) - aim).square().sum(1)
        if not bool(chosen.any()):
            far = draws  # the first one is drawn
        # Distances that differ by rounding only are ties.
        far = torch.where(allowed & ~chosen, far.round(decimals=12), torch.inf)
        best = (far == far.min()).nonzero()[:, 0]
        place = best[draws[best].argmin()]
        chosen[place] = True
        joined = joined + labels[place]
    return in_order(ids, chosen.nonzero()[:, 0])


def fast_enough(options: HarmonyOptions, state: SelectorState, number: int) -> Tensor:
    """Return which clients are among the fast ones, (C,) bool, at least `number` known ones."""
    known = state["known"]
    durations = state["duration"][known].sort().values
    count = max(number, round(options.fast * len(durations)))
    return known & (state["duration"] <= durations[min(count, len(durations)) - 1])


def shares(counts: Tensor) -> Tensor:
    """Return counts (..., K) as shares; zeros without any."""
    return counts / counts.sum(-1, keepdim=True).clamp(min=1e-12)


def observe(
    options: HarmonyOptions, state: SelectorState, t: int, facts: RoundFacts
) -> SelectorState:
    """Keep labels and durations of who answered; tasks without classes have no labels."""
    del options, t
    answered, received = facts.answered, facts.received
    labels = state["labels"]
    if "val.tp" in received:
        new = (received["val.tp"] + received["val.fn"]).double()
        old = labels if labels.shape == new.shape else torch.zeros_like(new)
        labels = torch.where(answered[:, None], new, old)
    took = torch.zeros_like(state["duration"]) if facts.seconds is None else facts.seconds
    return {
        "labels": labels.clone(),
        "known": state["known"] | answered,
        "duration": torch.where(answered, took, state["duration"]),
    }


HARMONY = Selector(
    "harmony",
    "clients that together have everybody's labels, among the fast ones",
    HarmonyOptions,
    draw,
    init=init,
    observe=observe,
    on_receipt=True,
)
