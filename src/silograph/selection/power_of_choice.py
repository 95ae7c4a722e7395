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

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, mistake
from silograph.core.key import Key
from silograph.selection.base import (
    RoundFacts,
    Selector,
    SelectorState,
    highest,
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


@dataclass(frozen=True, config=STRICT)
class PowerOfChoiceOptions:
    """The help texts are the documentation of the fields."""

    clients: Annotated[int, Field(ge=1)] | None = clients_field()
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
    """Return the state before round 1, in which no client is known."""
    clients = len(ids)
    check_at_most("clients", options.clients, clients, "clients")
    check_at_most("candidates", options.candidates, clients, "clients")
    if options.candidates is not None and options.candidates < clients_of_round(
        options.clients, clients
    ):
        raise ConfigError(
            "option selector.candidates: expected at least "
            f"{clients_of_round(options.clients, clients)}, the clients of a round, got "
            f"{options.candidates}: raise it, or leave it out",
            **mistake("option-value", "selector.candidates", options.candidates),
        )
    unknown = torch.full((clients,), -1.0, dtype=torch.float64)
    return {"loss": torch.full_like(unknown, torch.inf), "nodes": unknown}


def sizes(nodes: np.ndarray) -> np.ndarray:
    """Return the clients' sizes (C,), with the mean of known sizes for unknown ones."""
    is_known = nodes >= 0
    return np.where(is_known, nodes, nodes[is_known].mean() if is_known.any() else 1.0)


def draw(
    ids: Sequence[str], options: PowerOfChoiceOptions, state: SelectorState, t: int, key: Key
) -> list[str]:
    """Draw candidates by size, and select those with the largest loss."""
    del t
    number = clients_of_round(options.clients, len(ids))
    num_candidates = min(options.candidates or 2 * number, len(ids))
    draw_scores = race_scores(ids, sizes(state["nodes"].numpy()), key.fold("candidates"))
    is_candidate = mask_of_top(draw_scores, num_candidates)
    return highest(ids, np.where(is_candidate, state["loss"].numpy(), -np.inf), number, key)


def observe(
    options: PowerOfChoiceOptions, state: SelectorState, t: int, facts: RoundFacts
) -> SelectorState:
    """Keep the loss of clients that trained, 0 for those without a training node."""
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
    uses_scores=False,
)
