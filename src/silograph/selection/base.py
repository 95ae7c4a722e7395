"""What a selector is: which clients take part in a round, from what earlier rounds have shown.

C: clients of the federation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key, hash_texts
from silograph.selection.options import AllOptions, UniformOptions

SelectorState = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class RoundFacts:
    """What the server knows of every client after a round, in the order of the federation's ids.

    Attributes:
        selected: (C,) bool, who was selected.
        answered: (C,) bool, who trained; selected silos that were offline are False.
        nodes: (C,) int64 training nodes, 0 of who did not answer.
        train_loss: (C,) float64 mean training loss, NaN of who did not answer or has no such node.
        counting: returns the bytes of each client; see `bytes`.
        val_loss: (C,) float64 mean loss on validation nodes, NaN of who has none, of the view that
            picks the round; None if the round was not evaluated.
        val_accuracy: (C,) float64, likewise.
        received: counts of validation nodes by name, (C, ...), of the model with which a client
            began the round (see `Task.tally`), zeros of who did not answer; for selectors that
            ask for scores on receipt.
        scoring: returns the run's metric of these counts together; see `score`.
        higher: whether higher scores are better.
        costing: returns the round's share of the budget; see `cost`.
        timing: returns (C,) float64 virtual seconds that each client has taken in the round, None
            without a virtual clock; see `seconds`.
    """

    selected: Tensor
    answered: Tensor
    nodes: Tensor
    train_loss: Tensor
    counting: Callable[[], Tensor]
    val_loss: Tensor | None
    val_accuracy: Tensor | None
    received: Mapping[str, Tensor] = field(default_factory=dict)
    scoring: Callable[[], float | None] = lambda: None
    higher: bool = True
    costing: Callable[[], float] = lambda: 0.0
    timing: Callable[[], Tensor | None] = lambda: None

    @cached_property
    def score(self) -> float | None:
        """How good the round before was, by the run's metric; None if no node of `received` says.

        This and what follows is worked out when a selector asks for it.
        """
        return self.scoring()

    @cached_property
    def cost(self) -> float:
        """Bytes of the round without evaluation, as a share of the budget.

        Without budget, as a share of what all clients would take in all rounds.
        """
        return self.costing()

    @cached_property
    def bytes(self) -> Tensor:
        """Bytes of all messages of the round, evaluation included, (C,) int64."""
        return self.counting()

    @cached_property
    def seconds(self) -> Tensor | None:
        """Virtual seconds that each client has taken, (C,) float64; None without virtual clock."""
        return self.timing()


Begin = Callable[[Sequence[str], Any], SelectorState]
Draw = Callable[[Sequence[str], Any, SelectorState, int, Key], list[str]]
Observe = Callable[[Any, SelectorState, int, RoundFacts], SelectorState]


def no_state(ids: Sequence[str], options: object) -> SelectorState:
    """Return the state of a selector that remembers nothing."""
    del ids, options
    return {}


@dataclass(frozen=True)
class Selector:
    """A selector: three pure functions. Their state is tensors in the server's checkpoint.

    Attributes:
        name: what users call it.
        title: one line for listings.
        options: frozen dataclass of the selector's own options.
        draw: from ids, options, state, number of the round (from 1) and the round's own key: the
            ids of who takes part, at least one, each once and in the order of the ids.
        init: from ids and options: the state before round 1.
        observe: from options, state, number and facts of a round that is over: the next state,
            with tensors of its own. None: the selector learns nothing.
        on_receipt: whether selected clients score the model that they receive, before they train.
        uses_scores: whether `observe` reads `val_loss` or `val_accuracy` of the round that is over.
            The server's model is then scored before the next round, at the cost of sending it once
            more. Of no meaning without `observe`.
        needs_classes: whether `observe` reads counts of each class, which ratings and numbers at
            nodes do not have. A run on such labels is refused before it begins.
    """

    name: str
    title: str
    options: type
    draw: Draw
    init: Begin = no_state
    observe: Observe | None = None
    on_receipt: bool = False
    uses_scores: bool = True
    needs_classes: bool = False


# --- ranking -------------------------------------------------------------------------------------
# Choosing clients by scores; ties are broken by a draw that belongs to the client's name.
#
# Everything here is NumPy: a step on a thousand numbers takes torch ten times as long, most of it
# before the first number.
#
# C: clients.


@lru_cache(maxsize=4)  # of a federation in every round
def name_keys(ids: tuple[str, ...]) -> np.ndarray:
    """Return hashes of the clients' names, the counters of their draws, (C,) int64, read-only."""
    return hash_texts(ids).numpy()


def draw_by_name(ids: Sequence[str], key: Key) -> np.ndarray:
    """Return a draw from [0, 1) for each client, (C,) float64, that depends on its name only."""
    return key.draws(name_keys(tuple(ids)))


def draw_ids(ids: Sequence[str], number: int, key: Key) -> list[str]:
    """Return `number` distinct clients drawn uniformly, in the order of `ids`."""
    if number >= len(ids):
        return list(ids)
    return ids_of_mask(ids, mask_of_top(-draw_by_name(ids, key), number))


def highest(ids: Sequence[str], scores: np.ndarray, number: int, key: Key) -> list[str]:
    """Return the `number` clients of the highest scores (C,), none NaN, in the order of `ids`."""
    return ids_of_mask(ids, mask_of_highest(ids, scores, number, key))


def mask_of_highest(ids: Sequence[str], scores: np.ndarray, number: int, key: Key) -> np.ndarray:
    """Return a mask (C,) bool of the `number` clients with the highest scores (C,).

    Raises:
        ProtocolError: a score is NaN, or there are fewer clients.
    """
    scores = np.asarray(scores)
    if number > len(scores) or bool(np.isnan(scores).any()):
        raise ProtocolError(
            f"expected scores of at least {number} clients, none of them NaN, got {len(scores)}, "
            f"{int(np.isnan(scores).sum())} of them NaN"
        )
    is_chosen, equals = _split_at_rank(scores, number)
    num_missing = number - int(is_chosen.sum())
    if num_missing < len(equals):
        equals = equals[mask_of_top(-draw_by_name(ids, key)[equals], num_missing)]
    is_chosen[equals] = True
    return is_chosen


def mask_of_top(scores: np.ndarray, number: int) -> np.ndarray:
    """Return a mask (n,) bool of the `number` highest scores (n,); the first ones of equals."""
    is_chosen, equals = _split_at_rank(scores, number)
    is_chosen[equals[: number - int(is_chosen.sum())]] = True
    return is_chosen


def _split_at_rank(scores: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask (n,) bool of scores above the `number`-th highest, and positions of ties."""
    if not number:
        return np.zeros(len(scores), dtype=bool), np.empty(0, dtype=np.int64)
    least = np.partition(scores, -number)[-number]
    return scores > least, (scores == least).nonzero()[0]


def race_scores(ids: Sequence[str], weights: np.ndarray, key: Key) -> np.ndarray:
    """Return scores (C,) whose `number` highest are a draw in proportion to weights (C,).

    Without replacement, one client after the other; clients of weight 0 come last. Infinite weights
    come first, in a tie that `highest` draws. Efraimidis and Spirakis, "Weighted random
    sampling with a reservoir", 2006.
    """
    log_draws = torch.from_numpy(np.maximum(draw_by_name(ids, key), 2.0**-54)).log().numpy()
    clocks: np.ndarray = log_draws / np.maximum(weights, 1e-300)
    return clocks


def ids_of_mask(ids: Sequence[str], chosen: np.ndarray) -> list[str]:
    """Return the chosen clients (C,) bool, in the order of `ids`."""
    return [ids[p] for p in chosen.nonzero()[0].tolist()]


# --- limits --------------------------------------------------------------------------------------
# What limits the clients of a round: a budget, least clients a round, least selections in total.
#
# Xu et al., "FedACS", 2025, equation 13. All clients of a round cost the same, and what they cost
# is known before the round; so limits are about numbers of clients, and are kept before the fact.


@dataclass(frozen=True)
class SelectionLimits:
    """How many clients the rounds from here on may and must have.

    Attributes:
        clients: N, of the federation.
        least: L, in a round.
        affordable: selections that the budget pays for from here on; None: no budget.
        selections_left: selections that are still required.
        rounds: that remain.
    """

    clients: int
    least: int
    affordable: int | None
    selections_left: int
    rounds: int

    @property
    def most(self) -> int:
        """Clients that the next round may have at most."""
        return self.clients if self.affordable is None else min(self.clients, self.affordable)

    @property
    def most_in_all(self) -> int:
        """Selections that all rounds together may have at most."""
        if self.affordable is None:
            return self.clients * self.rounds
        fitting = min(self.rounds, self.affordable // self.least)
        return min(self.affordable, self.clients * fitting)

    @property
    def can_be_met(self) -> bool:
        """Whether there are rounds of L to N clients that together are enough and not too many."""
        if self.selections_left <= 0:
            return True
        fewest = -(-self.selections_left // self.clients)
        if self.affordable is None:
            return fewest <= self.rounds
        enough = self.selections_left <= self.affordable
        return enough and fewest <= min(self.rounds, self.affordable // self.least)

    def after(self, number: int) -> "SelectionLimits":
        """Return the limits after a round of `number` clients."""
        affordable = None if self.affordable is None else self.affordable - number
        return replace(
            self,
            affordable=affordable,
            selections_left=self.selections_left - number,
            rounds=self.rounds - 1,
        )

    def number(self, wanted: int) -> int | None:
        """Return the number of clients nearest to `wanted` that keeps the limits.

        None: the round is not started, because the budget does not pay for the clients that the
        selector wants. While required selections are missing, the selector gets fewer instead. If
        silos were offline and the required selections cannot be met any more, the other limits
        are still kept.
        """
        wanted = max(wanted, self.least)
        if self.selections_left <= 0:
            return wanted if wanted <= self.most else None
        if self.most < self.least:
            return None
        numbers = range(self.least, self.most + 1)
        feasible = [number for number in numbers if self.after(number).can_be_met] or [*numbers]
        return min(feasible, key=lambda number: (abs(number - wanted), number))


def resized(chosen: Sequence[str], ids: Sequence[str], number: int, key: Key) -> list[str]:
    """Return `number` clients: some of the chosen ones, or others besides, drawn uniformly."""
    if number <= len(chosen):
        return draw_ids(chosen, number, key)
    others = draw_ids([name for name in ids if name not in set(chosen)], number - len(chosen), key)
    selected_ids = {*chosen, *others}
    return [name for name in ids if name in selected_ids]


# --- All clients, or a share of them that is drawn uniformly -------------------------------------


def select_uniform(ids: Sequence[str], share: float, key: Key) -> list[str]:
    """Return max(1, round(share * C)) distinct clients, in the order of `ids`.

    The draw of a client depends on its name and not on its position.
    """
    return draw_ids(ids, max(1, round(share * len(ids))), key)


def draw_uniform(
    ids: Sequence[str], options: UniformOptions, state: SelectorState, t: int, key: Key
) -> list[str]:
    """Return a share of the clients; see `select_uniform`."""
    del state, t
    return select_uniform(ids, options.participation, key)


def draw_all(
    ids: Sequence[str], options: object, state: SelectorState, t: int, key: Key
) -> list[str]:
    """Return all clients."""
    del options, state, t, key
    return list(ids)


UNIFORM = Selector("uniform", "a share of the clients, drawn anew", UniformOptions, draw_uniform)
ALL = Selector("all", "all clients", AllOptions, draw_all)
