"""DDPG: an agent at the server learns by rounds which values of the knobs pay.

Chen, Li, Miyazaki and Wu, "FedGraph: Federated graph learning with intelligent sampling", IEEE
TPDS 2022, algorithm 4 and eq. 9-14, on the networks of `silograph.control.actor_critic`.

    state    the server's weights (see `silograph.control.weight_sketch`), 20 principal components
    action   all knobs, each scaled to 0..1 of its range; by-client knobs have a value a client
    reward   omega^(score - target) - alpha (seconds - beta)

The first 20 rounds are a profile: values are drawn alike over the ranges, in every second round one
for all clients. Then principal components are fixed, and beta is the least time of a round, alpha
such that the time term is 1 on the mean. From then on the actor acts, with noise that decays, and
every round is followed by an update.

Values that are drawn for each client apart hardly move the time of a round, which its slowest
client decides, nor any mean. So half of the profile, and half of the noise's variance, is alike at
all clients: the profile has the times that policies can reach, and the critic sees what a knob
does.

What we changed: the state has the server's weights only, not those of every client, which the
server never has by themselves; the score is the clients' pooled validation score, where the paper
takes a test set at the server; steps are Adam's, as in the paper of DDPG.

The agent's state is tensors in the server's checkpoint. Its first weights and its draws from the
replay come from its own `seed`, those of profile and noise from the run's key.

T: rounds of the profile. N: transitions kept. K: principal components. A: values of an action.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from silograph.control.actor_critic import (
    ACTOR,
    Learning,
    Networks,
    Transitions,
    act,
    first_networks,
    updated,
)
from silograph.control.agent_file import read_agent
from silograph.control.base import Controller, ControllerState, Knob, Knobs, RunStanding
from silograph.control.weight_sketch import SIZE, principal, sketch_of
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.payload import below, named

PROFILE = 20  # rounds; as many as there are principal components
COMPONENTS = 20
Time = Literal["virtual", "measured", "none"]
OF_THE_RUN = ("sketch", "seconds")  # what another run begins anew


@dataclass(frozen=True)
class AgentOptions:
    """How the agent learns.

    Attributes:
        target: score that the reward is measured from (Lambda), a fraction.
        omega: base of the reward.
        time: whose seconds a round takes: those of the virtual clock, measured ones, or none, for
            a reward without time.
        explore: whether it learns; else it acts by what it has learned, without noise.
        agent: path of a file to go on from.
        seed: of its first weights and of what it draws from the replay.
        hidden: widths of the networks' hidden layers.
        learning: step sizes and the like.
        batch: transitions in an update.
        kept: transitions in the replay (N).
        noise: standard deviation of what is added to an action at first.
        decay: by which the noise is multiplied a round.
        least_noise: that it does not fall below.
    """

    target: float = 0.9
    omega: float = 128.0
    time: Time = "virtual"
    explore: bool = True
    agent: str | None = None
    seed: int = 0
    hidden: tuple[int, ...] = (512, 256)
    learning: Learning = field(default_factory=Learning)
    batch: int = 64
    kept: int = 4096
    noise: float = 0.3
    decay: float = 0.998
    least_noise: float = 0.1


def init(options: AgentOptions, knobs: Knobs, standing: RunStanding) -> ControllerState:
    """Return a new agent, or that of a file, at the beginning of a run.

    Raises:
        ConfigError: the run has no clock, no scores or no model for it, or the file no agent that
            fits.
    """
    _check(options, standing)
    begun = {"sketch": sketch_of(standing.weights), "seconds": _scalar(_clock(standing))}
    agent = blank_agent(options, knobs, standing.clients)
    if options.agent is not None:
        by_client = sum(knob.by_client for knob in knobs)
        agent = read_agent(options.agent, agent, standing.clients, by_client)
    if not options.explore and int(agent["rounds"]) < PROFILE:
        raise ConfigError(
            f"expected an agent that has seen {PROFILE} rounds or more with explore=false, got one "
            f"of {int(agent['rounds'])}: train it first, and give --option agent=FILE"
        )
    return {**agent, **begun}


def _check(options: AgentOptions, standing: RunStanding) -> None:
    if not standing.weights:
        raise ConfigError("expected a method whose server has a model for ddpg, got one without")
    if standing.val_score is None:
        raise ConfigError("expected validation nodes, whose score is in the reward, got none")
    if not 0 <= standing.val_score <= 1:
        raise ConfigError(
            "expected a --metric from 0 to 1, which the reward is made of, got "
            f"{standing.val_score:g}"
        )
    if options.time == "virtual" and standing.virtual_seconds is None:
        raise ConfigError(
            "expected a virtual clock, whose seconds are in the reward, got none: give --speeds "
            "equal, or --option time=measured"
        )


def blank_agent(options: AgentOptions, knobs: Knobs, clients: int) -> dict[str, Tensor]:
    """Return an agent that has seen nothing."""
    size, most = action_size(knobs, clients), options.kept
    networks = first_networks(COMPONENTS, size, options.hidden, Key.of(options.seed).fold("ddpg"))
    return {
        **named("net", networks.weights),
        **named("optimizer", networks.memory),
        "replay/state": torch.zeros(most, COMPONENTS),
        "replay/action": torch.zeros(most, size),
        "replay/reward": torch.zeros(most),
        "replay/after": torch.zeros(most, COMPONENTS),
        "profile/sketch": _doubles(PROFILE, SIZE),
        "profile/after": _doubles(PROFILE, SIZE),
        "profile/action": torch.zeros(PROFILE, size),
        "profile/score": _doubles(PROFILE),
        "profile/seconds": _doubles(PROFILE),
        "mean": _doubles(SIZE),
        "axes": _doubles(SIZE, COMPONENTS),
        "alpha": _scalar(0.0),
        "beta": _scalar(0.0),
        "rounds": torch.tensor(0),
    }


def propose(
    options: AgentOptions, knobs: Knobs, state: ControllerState, standing: RunStanding, key: Key
) -> Mapping[str, Tensor]:
    """Return drawn values in the profile, then the actor's, with noise if it explores."""
    rounds, size = int(state["rounds"]), state["replay/action"].shape[1]
    if rounds < PROFILE:
        alike = key.fold("profile alike").matrix(1, len(knobs))[0]
        own = key.fold("profile").matrix(1, size)[0]
        action = own if rounds % 2 else _spread(knobs, alike, standing.clients)
    else:
        action = act(_networks(state).part(ACTOR), _seen(state, state["sketch"])[None])[0].double()
        if options.explore:
            scale = max(options.least_noise, options.noise * options.decay ** (rounds - PROFILE))
            alike = _spread(knobs, _normal(key.fold("noise alike"), len(knobs)), standing.clients)
            noise = (_normal(key.fold("noise"), size) + alike) / math.sqrt(2)
            action = (action + scale * noise).clamp(0, 1)
    return to_knobs(knobs, action, standing.clients)


def observe(
    options: AgentOptions,
    knobs: Knobs,
    state: ControllerState,
    standing: RunStanding,
    facts: Mapping[str, float],
    values: Mapping[str, Tensor],
) -> ControllerState:
    """Return the agent after a round: what it has seen, and in exploring what it has learned."""
    clock = _clock(standing)
    took = _took(options, clock - float(state["seconds"]), facts)
    new = {**state, "sketch": sketch_of(standing.weights), "seconds": _scalar(clock)}
    if not options.explore:
        return new
    assert standing.val_score is not None  # else the run has stopped, see `Controlling`
    rounds, action = int(state["rounds"]), to_action(knobs, values)
    new["rounds"] = torch.tensor(rounds + 1)
    if rounds < PROFILE:
        seen = {"sketch": state["sketch"], "after": new["sketch"], "action": action}
        told = {"score": standing.val_score, "seconds": took}
        for name, t in (seen | {n: _scalar(v) for n, v in told.items()}).items():
            new[f"profile/{name}"] = _with_row(new[f"profile/{name}"], rounds, t)
        return _profiled(options, new) if rounds + 1 == PROFILE else new
    reward = rewards(options, new, _scalar(standing.val_score), _scalar(took))
    found = (_seen(new, t)[None] for t in (state["sketch"], new["sketch"]))
    one = Transitions(next(found), action[None], reward.float()[None], next(found))
    return _learned(options, _stored(new, one, rounds))


def note(options: AgentOptions, state: ControllerState, rounds: int) -> str | None:
    """Return that the agent has set nothing yet, where a run ends within the profile."""
    if not options.explore or int(state["rounds"]) > PROFILE:
        return None
    return f"{_all_of(rounds)} the agent's profile (it takes {PROFILE}): the agent set nothing"


def _all_of(rounds: int) -> str:
    return f"all {rounds} rounds were" if rounds > 1 else "the only round was"


def rewards(
    options: AgentOptions, agent: ControllerState, score: Tensor, seconds: Tensor
) -> Tensor:
    """Return the reward of rounds by score and seconds (FedGraph, eq. 9), (...) float64."""
    return options.omega ** (score - options.target) - agent["alpha"] * (seconds - agent["beta"])


def _profiled(options: AgentOptions, state: ControllerState) -> ControllerState:
    """Fix what the profile decides, and store its transitions."""
    profile = below("profile", state)
    mean, axes = principal(profile["sketch"], COMPONENTS)
    beta = profile["seconds"].min()
    over_least = profile["seconds"].mean() - beta
    alpha = 1 / over_least if over_least > 0 else torch.zeros_like(beta)  # else all took alike
    new = {**state, "mean": mean, "axes": axes, "alpha": alpha, "beta": beta}
    reward = rewards(options, new, profile["score"], profile["seconds"]).float()
    before, after = _seen(new, profile["sketch"]), _seen(new, profile["after"])
    return _stored(new, Transitions(before, profile["action"], reward, after), 0)


def _stored(state: ControllerState, found: Transitions, number: int) -> ControllerState:
    """Return the agent with transitions from `number` on in its replay, over the oldest."""
    most = len(state["replay/reward"])
    place = torch.arange(number, number + len(found.reward)) % most
    rows = named("replay", vars(found))
    return {**state, **{name: state[name].index_copy(0, place, t) for name, t in rows.items()}}


def _learned(options: AgentOptions, state: ControllerState) -> ControllerState:
    """Return the agent after an update on a batch of its replay."""
    rounds, replay = int(state["rounds"]), below("replay", state)
    there = min(rounds, len(replay["reward"]))
    key = Key.of(options.seed).fold("replay", rounds)
    drawn = (key.matrix(1, options.batch)[0] * there).long()
    batch = Transitions(**{name: t[drawn] for name, t in replay.items()})
    after = updated(_networks(state), batch, options.learning)
    return {**state, **named("net", after.weights), **named("optimizer", after.memory)}


def _networks(state: ControllerState) -> Networks:
    return Networks(below("net", state), below("optimizer", state))


def _seen(state: ControllerState, sketch: Tensor) -> Tensor:
    """Return the principal components of sketches (..., 1024), (..., K) float32."""
    return ((sketch - state["mean"]) @ state["axes"]).float()


def action_size(knobs: Knobs, clients: int) -> int:
    """Return A."""
    return sum(_count(knob, clients) for knob in knobs)


def _spread(knobs: Knobs, values: Tensor, clients: int) -> Tensor:
    """Return an action (A,) that has the value of a knob, of values (knobs,), at all clients."""
    return values.repeat_interleave(torch.tensor([_count(knob, clients) for knob in knobs]))


def to_knobs(knobs: Knobs, action: Tensor, clients: int) -> dict[str, Tensor]:
    """Return the values of knobs from an action (A,) in 0..1, knob after knob."""
    parts = action.double().split([_count(knob, clients) for knob in knobs])
    return {knob.name: _value(knob, part) for knob, part in zip(knobs, parts, strict=True)}


def _value(knob: Knob, part: Tensor) -> Tensor:
    found = (knob.low + part * (knob.high - knob.low)).clamp(knob.low, knob.high)
    found = found if knob.by_client else found[0]
    return found.round().to(knob.dtype) if knob.dtype is torch.int64 else found


def to_action(knobs: Knobs, values: Mapping[str, Tensor]) -> Tensor:
    """Return knobs as an action, (A,) float32: what was done, whole numbers rounded."""
    parts = [
        (values[knob.name].double().reshape(-1) - knob.low) / max(knob.high - knob.low, 1e-12)
        for knob in knobs
    ]
    return torch.cat(parts).float()


def _count(knob: Knob, clients: int) -> int:
    return clients if knob.by_client else 1


def _with_row(t: Tensor, row: int, value: Tensor) -> Tensor:
    return t.index_copy(0, torch.tensor([row]), value.to(t.dtype)[None])


def _normal(key: Key, size: int) -> Tensor:
    """Return standard normal draws (size,) float64 (Box and Muller, 1958)."""
    u = key.matrix(2, size)
    return (-2 * torch.log1p(-u[0])).sqrt() * torch.cos(2 * math.pi * u[1])


def _took(options: AgentOptions, virtual: float, facts: Mapping[str, float]) -> float:
    """Return the seconds of a round that count in the reward."""
    match options.time:
        case "virtual":
            return virtual
        case "measured":
            return facts["seconds"]
        case _:
            return 0.0


def _clock(standing: RunStanding) -> float:
    return standing.virtual_seconds or 0.0


def _doubles(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64)


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


DDPG = Controller(
    "ddpg",
    "an agent learns values from scores and time",
    propose,
    init,
    observe,
    needs_scores=True,
    options=AgentOptions(),
    note=note,
)
