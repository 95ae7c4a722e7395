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
- clients are selected one after the other: always the one that brings the joint distribution of
  labels nearest to that of all known clients, in Euclidean distance, ties by a draw. The first one
  is drawn, so that rounds differ;
- clients slower than the share `fast` of the known ones, by the virtual clock, are left out if
  enough others are known; without a clock no client is;
- unknown clients are selected first, as in round 1, up to the number of clients;
- tasks without classes (ratings, numbers at nodes) are refused: nothing would be known of their
  labels, and every draw would be uniform.

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

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.selection.base import (
    RoundFacts,
    Selector,
    SelectorState,
    draw_by_name,
    highest,
    ids_of_mask,
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

TIE = 1e-12  # distances squared that differ by less, do so by rounding


@dataclass(frozen=True, config=STRICT)
class HarmonyOptions:
    """The help texts are the documentation of the fields."""

    clients: Annotated[int, Field(ge=1)] | None = clients_field()
    fast: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.8, metadata={"help": "share of the known clients, fastest first, to choose from"}
    )
    budget: Budget = budget_field()
    least_clients: Least = least_clients_field()
    least_selections: Least = least_selections_field()


def init(ids: Sequence[str], options: HarmonyOptions) -> SelectorState:
    """Return the state before round 1, in which no client is known."""
    check_at_most("clients", options.clients, len(ids), "clients")
    return {
        "labels": torch.zeros(len(ids), 0, dtype=torch.float64),
        "known": torch.zeros(len(ids), dtype=torch.bool),
        "duration": torch.zeros(len(ids), dtype=torch.float64),
    }


def draw(
    ids: Sequence[str], options: HarmonyOptions, state: SelectorState, t: int, key: Key
) -> list[str]:
    """Select unknown clients first, then those that balance the labels."""
    del t
    labels, is_known = state["labels"].numpy(), state["known"].numpy()
    number, is_selected = clients_of_round(options.clients, len(ids)), ~is_known
    num_missing = number - int(is_selected.sum())
    if num_missing <= 0 or labels.shape[1] == 0:
        return highest(ids, is_selected.astype(np.float64), number, key)
    is_allowed = is_known & is_fast_enough(
        options, state["duration"].numpy(), is_known, num_missing
    )
    order = draw_by_name(ids, key).argsort(
        kind="stable"
    )  # so the first of equals is the lowest draw
    order = order[is_allowed[order]]
    picks = select_balancing(
        labels[order],
        is_selected @ labels,
        shares(is_known @ labels),
        num_missing,
        first=not is_selected.any(),
    )
    is_selected[order[picks]] = True
    return ids_of_mask(ids, is_selected)


def select_balancing(
    labels: np.ndarray, joined: np.ndarray, aim: np.ndarray, number: int, *, first: bool
) -> np.ndarray:
    """Select clients whose labels come nearest to the aim, one after the other.

    Returns positions (number,) int64.

    Args:
        labels: (n, K) float64 counts of each client's labels, n >= number.
        joined: (K,) counts of the clients selected already.
        aim: (K,) shares to come near to.
        number: of clients to choose.
        first: whether no client is selected yet: then the first one is selected as it is.

    The squared distance of (joined + l) / |joined + l|_1 to the aim is expanded, so that a choice
    costs one product of the labels with those of who joined last. The aim's own square is left
    out: it is the same for all.
    """
    columns, picks = np.ascontiguousarray(labels.T), np.empty(number, dtype=np.int64)
    # Of each client's l, and of joined + l: sum of squares, twice the product with the aim, sum.
    own_terms = np.stack([(columns * columns).sum(0), 2 * (labels @ aim), columns.sum(0)])
    joint_terms = own_terms + np.array([[joined @ joined], [2 * (joined @ aim)], [joined.sum()]])
    joint_terms[0] += 2 * (joined @ columns)
    _fill_picks(columns, own_terms, joint_terms, joined.copy(), picks, first, TIE)
    return picks


def _fill_picks(
    labels: np.ndarray,
    own_terms: np.ndarray,
    joint_terms: np.ndarray,
    joined: np.ndarray,
    picks: np.ndarray,
    first: bool,
    tie: float,
) -> None:
    """Fill picks (number,); see `select_balancing`.

    Args:
        labels: (K, n) of each client.
        own_terms: (3, n) of each client's labels: sum of squares, twice the product with the aim,
            sum.
        joint_terms: (3, n) the same of its labels plus those of selected clients; changed in place.
        joined: (K,) labels of the selected clients; changed in place.
        picks: the result.
        first: whether the first client is selected as it is.
        tie: distances squared that differ by less are equal.
    """
    square, to_aim, total = joint_terms
    for position in range(len(picks)):
        best = 0
        if position or not first:
            inverse = 1 / np.maximum(total, 1e-12)
            distance = (square * inverse - to_aim) * inverse
            best = int((distance <= distance.min() + tie).argmax())
        new_labels = labels[:, best]
        joint_terms += own_terms[:, best, None]
        square += 2 * (new_labels @ labels + new_labels @ joined)
        square[best] = np.inf  # never chosen again
        joined += new_labels
        picks[position] = best


def is_fast_enough(
    options: HarmonyOptions, duration: np.ndarray, is_known: np.ndarray, number: int
) -> np.ndarray:
    """Return which clients are fast, (C,) bool, of the known ones at least `number`."""
    durations = duration[is_known]
    count = min(max(number, round(options.fast * len(durations))), len(durations))
    is_fast: np.ndarray = duration <= np.partition(durations, count - 1)[count - 1]
    return is_fast


def shares(counts: np.ndarray) -> np.ndarray:
    """Return counts (..., K) as shares; zeros without any."""
    label_shares: np.ndarray = counts / np.maximum(counts.sum(-1, keepdims=True), 1e-12)
    return label_shares


def observe(
    options: HarmonyOptions, state: SelectorState, t: int, facts: RoundFacts
) -> SelectorState:
    """Keep labels and durations of clients that answered."""
    del options, t
    answered, received = facts.answered, facts.received
    new = (received["val.tp"] + received["val.fn"]).double()
    labels = state["labels"]
    old = labels if labels.shape == new.shape else torch.zeros_like(new)
    labels = torch.where(answered[:, None], new, old)
    durations = torch.zeros_like(state["duration"]) if facts.seconds is None else facts.seconds
    return {
        "labels": labels,
        "known": state["known"] | answered,
        "duration": torch.where(answered, durations, state["duration"]),
    }


HARMONY = Selector(
    "harmony",
    "clients that together have everybody's labels, among the fast ones",
    HarmonyOptions,
    draw,
    init=init,
    observe=observe,
    uses_scores=False,
    on_receipt=True,
    needs_classes=True,
)
