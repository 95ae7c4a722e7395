"""What options say of an agent, alike for every method whose knobs one may set."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from silograph.control.base import Controller, ControllerState, Knobs, RunStanding
from silograph.control.ddpg import DDPG, AgentOptions, action_size, to_knobs
from silograph.core.errors import ConfigError, mistake
from silograph.core.key import Key

# --- drawn ---------------------------------------------------------------------------------------
# Knobs that are drawn anew for every round, alike over their ranges: what an agent has to beat.


def propose(
    options: object, knobs: Knobs, state: ControllerState, standing: RunStanding, key: Key
) -> Mapping[str, Tensor]:
    """Return random values."""
    del options, state
    action = key.fold("drawn").matrix(1, action_size(knobs, standing.clients))[0]
    return to_knobs(knobs, action, standing.clients)


DRAWN = Controller("drawn", "knobs are drawn anew for every round", propose)


OF_AGENT: dict[str, Any] = {"read_if": {"policy": ("ddpg",)}}
TARGET = OF_AGENT | {"help": "ddpg: score that the reward is measured from"}
TIME = OF_AGENT | {"help": "ddpg: seconds of a round in the reward; none: a reward of scores alone"}
EXPLORE = OF_AGENT | {"help": "ddpg: learn, and add noise to what the agent does"}
AGENT: dict[str, Any] = {"help": "ddpg: file of an agent to go on from", "server_only": True}
AGENT_STATE = OF_AGENT | {
    "help": "ddpg: what the agent sees: summary (round, scores, seconds, norms of weights and of "
    "their change) or pca (principal components of the weights, as FedGraph's paper)"
}
AGENT_SEED = OF_AGENT | {"help": "ddpg: seed of a new agent's networks and of its replay"}


def by_policy(options: Any, otherwise: Controller) -> Controller:
    """Return the controller of `policy`: `ddpg` (an agent), `drawn` (at random), or `otherwise`.

    The options must have the fields `target`, `time`, `explore`, `agent`, `agent_state` and
    `agent_seed`; see `AgentOptions`.

    Raises:
        ConfigError: a file of an agent, but another policy.
    """
    if options.agent is not None and options.policy != "ddpg":
        raise ConfigError(
            f"expected policy=ddpg with agent={options.agent}, got policy={options.policy}: give "
            "--option policy=ddpg, or leave the agent out",
            **mistake("conflicting-options", ["policy", "agent"]),
        )
    if options.policy == "ddpg":
        agent_options = AgentOptions(
            target=options.target,
            state=options.agent_state,
            time=options.time,
            explore=options.explore,
            agent=options.agent,
            seed=options.agent_seed,
        )
        return replace(DDPG, options=agent_options)
    return DRAWN if options.policy == "drawn" else otherwise
