"""Round-robin: clients take part in turn, so all have trained equally often.

State: `next` () int64, the position of the client whose turn it is.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.selection.base import RoundFacts, Selector, SelectorState
from silograph.selection.options import (
    Budget,
    Least,
    budget_field,
    check_at_most,
    least_clients_field,
    least_selections_field,
)


@dataclass(frozen=True, config=STRICT)
class RoundRobinOptions:
    """The help texts are the documentation of the fields."""

    clients: Annotated[int, Field(ge=1)] = field(default=1, metadata={"help": "clients in a round"})
    budget: Budget = budget_field()
    least_clients: Least = least_clients_field()
    least_selections: Least = least_selections_field()


def init(ids: Sequence[str], options: RoundRobinOptions) -> SelectorState:
    """Begin with the first client."""
    check_at_most("clients", options.clients, len(ids), "clients")
    return {"next": torch.tensor(0)}


def draw(
    ids: Sequence[str], options: RoundRobinOptions, state: SelectorState, t: int, key: Key
) -> list[str]:
    """Return the clients whose turn it is."""
    del t, key
    number, first = min(options.clients, len(ids)), int(state["next"])
    return [ids[p] for p in sorted((first + i) % len(ids) for i in range(number))]


def observe(
    options: RoundRobinOptions, state: SelectorState, t: int, facts: RoundFacts
) -> SelectorState:
    """Go on with the client after the last one; silos that were away have missed their turn."""
    del t
    return {"next": (state["next"] + options.clients) % len(facts.selected)}


ROUND_ROBIN = Selector(
    "round_robin",
    "clients in turn",
    RoundRobinOptions,
    draw,
    init=init,
    observe=observe,
    uses_scores=False,
)
