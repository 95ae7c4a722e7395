"""FedACS' bandit: how many clients take part, and which, by upper confidence bounds.

Xu, Gao, Liu, Ma and Huang, "FedACS: An adaptive client selection framework for
communication-efficient federated graph learning", IEEE Transactions on Mobile Computing 2025,
algorithm 1 and equations 14 to 17. Arms are numbers of clients, m, and clients, i:

    reward of round t   g_t = (1 - r_t / target) log t,   for i; g_t - b_t / B for m  (14, 15)
    score in round t    mean reward + sqrt(2 log t / count)                            (16, 17)

Round 1 takes all clients. Then every other number is tried once, in random order, with random
clients; and then the number of the highest score takes the clients of the highest scores.

How we read it, and what we changed:

- *Whose score.* The paper's server scores on a test set. Here selected clients score the model that
  they receive before they train, on validation nodes; so g_t is known after round t + 1, and counts
  for the number and the clients of round t then. r_t is the metric over the nodes of those clients
  together: it differs a little with who they are.
- *Direction.* For metrics of which higher values are better g_t = (r_t / target - 1) log t.
- *The target* is `selector.target`. Without one it is the score of the initial weights, so g_t is
  the relative gain since then (of a score below .01, relative to .01). Round 1 has log 1 = 0. While
  scores are worse than the target rewards are negative and grow with log t, as in the paper.
- *B* is `selector.budget`. Without one it is what all clients would take in all rounds.
- *Away.* A selected silo that did not answer gets neither reward nor count; a round whose score
  nobody could tell counts for nobody, and its number is tried again.
- *Ties* go to the smaller number, and among clients to a draw. A client without a count comes
  first. A number whose only reward is still to come waits for it.
- *Arms.* `selector.arms=10` takes ten numbers from least to most, in even steps, in place of all:
  exploring all of them costs about N (N + 1) / 2 trainings of a client.
- *Ablations.* `selector.level=number` draws the clients (the paper's ND), `clients` draws the
  number (CS).

State: `number_reward`, `reward` sums (A,) and (C,) float64, `number_count`, `count` int64, `tried`
(A,) bool, `target` () float64, 0 while unknown, and of the last round, whose reward is to come:
`last_arm` () int64, -1 for none, `last_clients` (C,) bool, `last_cost` () float64.
A: numbers. C: clients.
"""

import math
from collections.abc import Sequence
from dataclasses import field
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.selection.base import RoundFacts, Selector, SelectorState, draw_ids, highest
from silograph.selection.options import (
    Budget,
    Least,
    budget_field,
    check_at_most,
    least_clients_field,
    least_selections_field,
)

MOST_GAIN = 1e9  # of a round: sums of what is reported stay finite, whatever it is
LEAST_TARGET = 0.01  # of the initial weights' score, which others are relative to


@dataclass(frozen=True, config=STRICT)
class UcbOptions:
    """The help texts are the documentation of the fields."""

    level: Literal["both", "number", "clients"] = field(
        default="both",
        metadata={"help": "what the bandit chooses; the other is drawn uniformly"},
    )
    arms: Annotated[int, Field(ge=2)] | None = field(
        default=None,
        metadata={"help": "how many numbers of clients are tried, in even steps; none: every one"},
    )
    target: Annotated[float, Field(gt=0)] | None = field(
        default=None,
        metadata={"help": "score that rewards are relative to; none: that of the first weights"},
    )
    budget: Budget = budget_field()
    least_clients: Least = least_clients_field()
    least_selections: Least = least_selections_field()


@lru_cache(maxsize=4)  # asked for several times in every round
def arms_of(clients: int, options: UcbOptions) -> np.ndarray:
    """Return the numbers of clients that are arms, (A,) int64, ascending; the last one is all.

    Not to be changed.
    """
    least = min(options.least_clients or 1, clients)
    numbers = np.arange(least, clients + 1)
    if options.arms is None or options.arms >= len(numbers):
        return numbers
    steps = torch.linspace(least, clients, options.arms, dtype=torch.float64).round().long()
    return np.array(sorted(set(steps.tolist())))


def init(ids: Sequence[str], options: UcbOptions) -> SelectorState:
    """Return the state before round 1, in which no arm has a reward."""
    most_arms = max(2, len(ids) + 1 - (options.least_clients or 1))
    check_at_most("arms", options.arms, most_arms, "sizes that a round can have")
    arms, clients = len(arms_of(len(ids), options)), len(ids)
    target = options.target or 0.0  # 0: unknown
    return {
        "number_reward": torch.zeros(arms, dtype=torch.float64),
        "number_count": torch.zeros(arms, dtype=torch.int64),
        "tried": torch.zeros(arms, dtype=torch.bool),
        "reward": torch.zeros(clients, dtype=torch.float64),
        "count": torch.zeros(clients, dtype=torch.int64),
        "target": torch.tensor(target, dtype=torch.float64),
        "last_arm": torch.tensor(-1),
        "last_clients": torch.zeros(clients, dtype=torch.bool),
        "last_cost": torch.tensor(0.0, dtype=torch.float64),
    }


def confidence_bounds(
    rewards: np.ndarray, counts: np.ndarray, t: int, unknown: float
) -> np.ndarray:
    """Return the scores of arms in round t, `unknown` for those without a count; eq. 16 and 17."""
    num_rewards = np.maximum(counts, 1)
    scores = rewards / num_rewards + np.sqrt(2 * math.log(t) / num_rewards)
    return np.where(counts > 0, scores, unknown)


def draw(
    ids: Sequence[str], options: UcbOptions, state: SelectorState, t: int, key: Key
) -> list[str]:
    """Choose a number of clients, then the clients; algorithm 1."""
    if t == 1:
        return list(ids)
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    numbers, untried = arms_of(len(ids), options), ~arrays["tried"]
    is_exploring = options.level != "clients" and untried.any()
    if is_exploring or options.level == "clients":
        candidates = numbers[untried] if is_exploring else numbers
        number = candidates[
            int(key.fold("number").draws(np.zeros(1, dtype=np.int64))[0] * len(candidates))
        ]
    else:
        scores = confidence_bounds(arrays["number_reward"], arrays["number_count"], t, -math.inf)
        number = numbers[scores.argmax()]  # the smallest of equals
    if is_exploring or options.level == "number":
        return draw_ids(ids, int(number), key)
    scores = confidence_bounds(arrays["reward"], arrays["count"], t, math.inf)
    return highest(ids, scores, int(number), key)


def observe(options: UcbOptions, state: SelectorState, t: int, facts: RoundFacts) -> SelectorState:
    """Credit the previous round with its reward, and remember this one."""
    new = {name: tensor.numpy().copy() for name, tensor in state.items()}
    score = facts.score if facts.score is not None and math.isfinite(facts.score) else None
    if score is not None and float(new["target"]) == 0:
        new["target"][()] = max(score, LEAST_TARGET)
    arm = int(new["last_arm"])
    if arm >= 0 and score is None:
        new["tried"][arm] = new["number_count"][arm] > 0
    elif arm >= 0 and score is not None:
        gain = gain_of(score, float(new["target"]), t - 1, higher=facts.higher)
        new["number_reward"][arm] += gain - float(new["last_cost"])
        new["number_count"][arm] += 1
        new["reward"] += gain * new["last_clients"]
        new["count"] += new["last_clients"]
    selected = int(facts.selected.numpy().sum())
    arm = int(np.abs(arms_of(len(facts.selected), options) - selected).argmin())
    new["tried"][arm] = True
    new["last_arm"][()], new["last_cost"][()] = arm, facts.cost
    new["last_clients"][:] = facts.answered.numpy()
    return {name: torch.from_numpy(array) for name, array in new.items()}


def gain_of(score: float, target: float, t: int, *, higher: bool) -> float:
    """Return the reward of round t for clients; eq. 15, in the metric's direction."""
    share = score / target
    gain = (share - 1 if higher else 1 - share) * math.log(t)
    return min(max(gain, -MOST_GAIN), MOST_GAIN)


UCB = Selector(
    "ucb",
    "FedACS: number of clients and clients by a two-level bandit",
    UcbOptions,
    draw,
    init=init,
    observe=observe,
    uses_scores=False,
    on_receipt=True,
)
