"""What a selector is: which clients take part in a round, from what earlier rounds have shown.

C: clients of the federation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from silograph.core.key import Key

SelectorState = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class RoundFacts:
    """What a round has shown of every client; all in the order of the federation's ids.

    Attributes:
        selected: (C,) bool, who was selected.
        answered: (C,) bool, who trained; not the selected silos that were away.
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


def nothing_kept(ids: Sequence[str], options: object) -> SelectorState:
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
        draw: from ids, options, state, number of the round (from 1) and a key: the ids of who takes
            part, at least one, each once and in the order of the ids.
        init: from ids and options: the state before round 1.
        observe: from options, state, number and facts of a round that is over: the next state,
            with tensors of its own. None: the selector learns nothing.
        on_receipt: whether selected clients score the model that they receive, before they train.
        uses_scores: whether `observe` reads `val_loss` or `val_accuracy` of the round that is over.
            The server's model is then scored before the next round, at the cost of sending it once
            more. Of no meaning without `observe`.
    """

    name: str
    title: str
    options: type
    draw: Draw
    init: Begin = nothing_kept
    observe: Observe | None = None
    on_receipt: bool = False
    uses_scores: bool = True
