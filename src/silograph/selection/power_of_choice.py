"""Power of choice: of clients drawn by their size, those with the largest loss take part.

Cho, Wang and Joshi, "Towards understanding biased client selection in federated learning", AISTATS
2022 (first as "Client selection in federated learning: convergence analysis and power-of-choice
selection strategies", 2020), section 4: d candidates are drawn without replacement in proportion to
their data; the m of them with the largest local loss train.

What we changed: of the paper's variants this is rpow-d, which costs no message: a client's loss is
the mean training loss that it reported when it last trained, and infinite before that, so nobody
waits for ever. Sizes are training nodes, which clients report with their loss; who has not reported
yet counts as the mean of those who have.

State: `loss` (C,) float64, `nodes` (C,) float64, -1 where unknown. C: clients.
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
from silograph.selection.ranking import highest, race


@dataclass(frozen=True, config=STRICT)
class PowerOfChoiceOptions:
    """The help texts are the documentation of the fields."""

    clients: Annotated[int, Field(ge=1)] = clients_field(10)
    candidates: Annotated[int, Field(ge=1)] | None = field(
        default=None,
        metadata={
            "help": "clients among whom those of the largest loss train; none: twice clients"
        },
    )
    budget: Budget = budget_field()
    least_clients: Least = least_clients_field()
    least_selections: Least = least_selections_field()


def init(ids: Sequence[str], options: PowerOfChoiceOptions) -> SelectorState:
    """Nothing is known of anybody."""
    del options
    clients = len(ids)
    unknown = torch.full((clients,), -1.0, dtype=torch.float64)
    return {"loss": torch.full_like(unknown, torch.inf), "nodes": unknown}


def sizes(nodes: Tensor) -> Tensor:
    """Return the clients' sizes (C,), the mean of those known in place of the others."""
    known = nodes >= 0
    mean = nodes[known].mean() if bool(known.any()) else nodes.new_ones(())
    return torch.where(known, nodes, mean)


def draw(
    ids: Sequence[str], options: PowerOfChoiceOptions, state: SelectorState, t: int, key: Key
) -> list[str]:
    """Draw candidates by size, and take those with the largest loss."""
    del t
    number = min(options.clients, len(ids))
    most = 2 * number if options.candidates is None else options.candidates
    drawing = race(ids, sizes(state["nodes"]), key.fold("candidates"))
    among = drawing.argsort(descending=True, stable=True)[: max(number, most)]
    loss = torch.full_like(state["loss"], -torch.inf)
    loss[among] = state["loss"][among]
    return highest(ids, loss, number, key)


def observe(
    options: PowerOfChoiceOptions, state: SelectorState, t: int, facts: RoundFacts
) -> SelectorState:
    """Keep the loss of who trained; of who has no training node, 0."""
    del options, t
    loss = facts.train_loss.nan_to_num(nan=0.0, posinf=0.0)
    return {
        "loss": torch.where(facts.answered, loss, state["loss"]),
        "nodes": torch.where(facts.answered, facts.nodes.double(), state["nodes"]),
    }


POWER_OF_CHOICE = Selector(
    "power_of_choice",
    "of clients drawn by size, those with the largest loss",
    PowerOfChoiceOptions,
    draw,
    init=init,
    observe=observe,
)
