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

import numpy as np
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

TIE = 1e-12  # distances squared that differ by less, do so by rounding


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
    wanted = number - int(chosen.sum())
    allowed = known & fast_enough(options, state, wanted)
    order = draws_of(ids, key).argsort(stable=True)  # so the first of equals is the lowest draw
    order = order[allowed[order]]
    labels = state["labels"]
    picks = balancing(
        labels[order].numpy(),
        labels[chosen].sum(0).numpy(),
        shares(labels[known].sum(0)).numpy(),
        wanted,
        first=not bool(chosen.any()),
    )
    chosen[order[torch.from_numpy(picks)]] = True
    return in_order(ids, chosen.nonzero()[:, 0])


def balancing(
    labels: np.ndarray, joined: np.ndarray, aim: np.ndarray, number: int, *, first: bool
) -> np.ndarray:
    """Return the positions (number,) int64 of who brings the labels nearest to the aim, in turn.

    Args:
        labels: (n, K) float64 counts of each client's labels, n >= number.
        joined: (K,) counts of who takes part already.
        aim: (K,) shares to come near to.
        number: of clients to choose.
        first: whether nobody takes part yet: then the first client is taken as it is.

    The squared distance of (joined + l) / |joined + l|_1 to the aim is expanded, so that a choice
    costs one product of the labels with those of who joined last. The aim's own square is left
    out: it is the same for all.
    """
    picks, far = np.empty(number, dtype=np.int64), np.empty(len(labels))
    twice, product, sizes = 2 * labels, 2 * (labels @ aim), labels.sum(1)
    own = (labels * labels).sum(1)
    # Of joined + l, for each client's l: sum of squares, twice the product with the aim, sum.
    square = own + twice @ joined + joined @ joined
    to_aim, total = product + 2 * (joined @ aim), sizes + joined.sum()
    for place in range(number):
        best = 0
        if place or not first:
            inverse = 1 / np.maximum(total, 1e-12)
            np.multiply(square, inverse, out=far)
            np.subtract(far, to_aim, out=far)
            np.multiply(far, inverse, out=far)
            best = int((far <= far.min() + TIE).argmax())
        last = labels[best]
        change = twice @ last
        change += twice[best] @ joined + own[best]
        picks[place] = best
        square += change
        square[best] = np.inf  # taken
        to_aim += product[best]
        total += sizes[best]
        joined = joined + last
    return picks


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
