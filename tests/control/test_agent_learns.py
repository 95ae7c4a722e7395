"""An agent of FedGraph's size finds the best rates where a round's time alone tells them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from silograph.control import AgentOptions, Knob, RunStanding
from silograph.control import ddpg as agents
from silograph.control.base import ControllerState
from silograph.control.ddpg import sketch_of
from silograph.core.key import Key

CLIENTS, ROUNDS = 20, 30
KNOBS = (
    Knob("kappa", 1, 1024, 256, by_client=True),
    Knob("keep_1", 0.05, 1.0, 0.5, by_client=True),
    Knob("keep_2", 0.05, 1.0, 0.5, by_client=True),
)
BEST = torch.tensor([0.7, 0.25, 0.6], dtype=torch.float64).repeat_interleave(CLIENTS)
OPTIONS = AgentOptions(time="measured", target=0.5, omega=1.0)  # a reward of time alone


def numbers(key: Key) -> Tensor:
    return key.matrix(1, 400)[0] - 0.5


def standing_at(episode: int, t: int) -> RunStanding:
    """Weights go one way from one of five starts, with something of their own in each round."""
    start, way = numbers(Key.of(100 + episode % 5)), numbers(Key.of(5))
    gone = 2 * (1 - 0.9**t)
    own = 0.1 * numbers(Key.of(6).fold(episode, t))
    return RunStanding(
        t, CLIENTS, 0, None, t, 1.0, 0.5, None, {"w": (start + gone * way + own).float()}
    )


def missed_by(action: Tensor) -> float:
    return float((action - BEST).square().mean())


def trained(episodes: int) -> ControllerState:
    """The agent after episodes whose rounds take as many seconds as rates are off, squared."""
    agent: ControllerState = {}
    for episode in range(episodes):
        state = {**agents.init(OPTIONS, KNOBS, standing_at(episode, 0)), **agent}
        for t in range(1, ROUNDS + 1):
            key = Key.of(0).fold(episode, t)
            values = agents.propose(OPTIONS, KNOBS, state, standing_at(episode, t - 1), key)
            took = {"seconds": missed_by(agents.to_action(KNOBS, values).double())}
            now = standing_at(episode, t)
            state = dict(agents.observe(OPTIONS, KNOBS, state, now, took, values))
        agent = {n: t for n, t in state.items() if n not in agents.OF_THE_RUN}
    return agent


@pytest.mark.slow
def test_sixty_values_that_are_best_alike_are_found_in_fifty_episodes() -> None:
    """The middle of all ranges misses by .0375, what is drawn by .12."""
    agent, quiet, missed = trained(50), replace(OPTIONS, explore=False), list[float]()
    for episode in range(50, 55):
        for t in range(ROUNDS):
            now = standing_at(episode, t)
            state = {**agent, "sketch": sketch_of(now.weights)}
            values = agents.propose(quiet, KNOBS, state, now, Key.of(0))
            missed.append(missed_by(agents.to_action(KNOBS, values).double()))
    assert sum(missed) / len(missed) < 0.02
