"""DDPG: an agent at the server learns by rounds which values of the knobs pay.

Chen, Li, Miyazaki and Wu, "FedGraph: Federated graph learning with intelligent sampling", IEEE
TPDS 2022, algorithm 4 and eq. 9-14, on the networks of `silograph.control.ddpg`.

    state    `summary`: round, scores, seconds and norms of the server's weights;
             `pca`, as in the paper: the weights, 20 principal components
    action   all knobs, each scaled to 0..1 of its range; by-client knobs have a value a client
    reward   omega^(score - target) - alpha (seconds - beta)

The first 20 rounds are a profile: values are drawn alike over the ranges, in every second round one
for all clients. Then the scale of states is fixed, and beta is the least time of a round, alpha one
over the mean time: a round that is longer by a tenth of the mean costs .1. From then on the actor
acts, with noise that decays, and every round is followed by an update.

Values that are drawn for each client apart hardly move the time of a round, which its slowest
client decides, nor any mean. So half of the profile, and half of the noise's variance, is alike at
all clients: the profile has the times that policies can reach, and the critic sees what a knob
does.

What we changed: the paper wants the time term close to 1; dividing by the mean excess over beta
does that, but pays for milliseconds where all rounds take about as long (decision 13). By default
the state is a summary, because components of weights are those of one initialization. With `pca` it
has the server's weights only, not those of every client, which the server never has by themselves.
The score is the clients' pooled validation score, where the paper takes a test set at the server.
Steps are Adam's, as in the paper of DDPG.

The agent's state is tensors in the server's checkpoint. Its first weights and its draws from the
replay come from its own `seed`, those of profile and noise from the run's key.

T: rounds of the profile. N: transitions kept. A: values of an action. L: layers of the model.
M: numbers that are observed of a run: 4 + 2 L, or those of a sketch. K: principal components.
S: values of a state: M, or K.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear

from silograph.control.base import Controller, ControllerState, Knob, Knobs, RunStanding
from silograph.core.errors import ConfigError, mistake, read_mistake
from silograph.core.files import check_regular, write_atomic
from silograph.core.key import Key
from silograph.core.payload import fields_under, with_prefix
from silograph.core.text import count_of
from silograph.nn.conv import Params
from silograph.nn.optim import Adam

# --- Actor and critic of DDPG as flat mappings of tensors, and one update of both ----------------
#
# Lillicrap, Hunt, Pritzel, Heess, Erez, Tassa, Silver and Wierstra, "Continuous control with deep
# reinforcement learning", ICLR 2016, algorithm 1. Networks have two hidden layers with ReLU; the
# actor ends in a sigmoid, so that actions are in (0, 1).
#
# Nothing here draws: initial weights take a key, and the caller of `update_networks` draws the
# batch.
#
# S: values of a state. A: values of an action. B: transitions.


ACTOR, CRITIC = "actor", "critic"
TARGET = "target_"  # of the networks that follow slowly
LAST = 3e-3  # bound of the last layers' first weights, as in the paper


@dataclass(frozen=True)
class Learning:
    """How networks learn.

    Attributes:
        actor_lr: Adam's step size for the actor.
        critic_lr: for the critic.
        discount: of the return (gamma).
        follow: share of the way that targets go to the networks in an update (phi, tau).
        critic_decay: L2 penalty on the critic's weights. With the .01 of the paper of DDPG its
            gradient hardly points to the best action (decision 13).
        centering: weight of the actor's mean squared values before the sigmoid in its loss; without
            it they run to where the sigmoid is flat, and no gradient brings them back.
    """

    actor_lr: float = 1e-5
    critic_lr: float = 1e-3
    discount: float = 0.9
    follow: float = 0.01
    critic_decay: float = 1e-4
    centering: float = 0.03


@dataclass(frozen=True, eq=False)
class Transitions:
    """Transitions of the agent: state, action, reward and next state.

    Attributes:
        state: (B, S).
        action: (B, A).
        reward: (B,).
        after: (B, S) the state that followed.
    """

    state: Tensor
    action: Tensor
    reward: Tensor
    after: Tensor


@dataclass(frozen=True, eq=False)
class Networks:
    """Actor, critic, their targets, and what their optimizers remember.

    Attributes:
        weights: by name, `actor/0.weight` (O, I), `critic/0.bias` (O,), `target_actor/...`.
        memory: of Adam, `actor/first/0.weight` and so on.
    """

    weights: Params
    memory: Params

    def part(self, name: str) -> Params:
        """Return one network's weights by their own names."""
        return fields_under(name, self.weights)


def first_networks(states: int, actions: int, hidden: Sequence[int], key: Key) -> Networks:
    """Return networks before the first update, float32; targets are equal to them.

    Args:
        states: S.
        actions: A.
        hidden: widths of the hidden layers.
        key: of the draws.
    """
    weights, memory = Params(), Params()
    for name, inputs, outputs in ((ACTOR, states, actions), (CRITIC, states + actions, 1)):
        network_weights = _initial_layers([inputs, *hidden, outputs], key.fold(name))
        weights |= with_prefix(name, network_weights) | with_prefix(
            TARGET + name, {n: w.clone() for n, w in network_weights.items()}
        )
        memory |= with_prefix(name, _optimizer(0.0).init(_with_client_dimension(network_weights)))
    return Networks(weights, memory)


def _initial_layers(widths: Sequence[int], key: Key) -> Params:
    layers, last = Params(), len(widths) - 2
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        bound = LAST if number == last else inputs**-0.5
        values = (2 * key.fold(number).matrix(outputs, inputs + 1) - 1) * bound
        layers[f"{number}.weight"] = values[:, :-1].float().contiguous()
        layers[f"{number}.bias"] = values[:, -1].float().contiguous()
    return layers


def forward(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the outputs (B, O) of a network for rows x (B, I); ReLU between its layers."""
    layers = len(weights) // 2
    for number in range(layers):
        x = linear(x, weights[f"{number}.weight"], weights[f"{number}.bias"])
        x = torch.relu(x) if number < layers - 1 else x
    return x


def act(actor: Mapping[str, Tensor], state: Tensor) -> Tensor:
    """Return the actions of states (B, S), (B, A) in (0, 1)."""
    return torch.sigmoid(forward(actor, state))


def value(critic: Mapping[str, Tensor], state: Tensor, action: Tensor) -> Tensor:
    """Return the critic's value of actions (B, A) in states (B, S), (B,)."""
    return forward(critic, torch.cat([state, action], dim=1))[:, 0]


def critic_loss(
    critic: Mapping[str, Tensor], networks: Networks, transitions: Transitions, discount: float
) -> Tensor:
    """Return the mean squared error of the critic against its target (FedGraph, eq. 10), ()."""
    target_actor, target_critic = (networks.part(TARGET + name) for name in (ACTOR, CRITIC))
    with torch.no_grad():
        later = value(target_critic, transitions.after, act(target_actor, transitions.after))
        target = transitions.reward + discount * later
    return (target - value(critic, transitions.state, transitions.action)).square().mean()


def actor_loss(actor: Mapping[str, Tensor], critic: Mapping[str, Tensor], state: Tensor) -> Tensor:
    """Return minus the mean value of the actor's own actions, (); its gradient is eq. 12's."""
    return -value(critic, state, act(actor, state)).mean()


def update_networks(networks: Networks, transitions: Transitions, learning: Learning) -> Networks:
    """Return the networks after one update of critic, actor and targets (eq. 10-14).

    The actor follows the critic as this update has made it, as in the paper of DDPG.
    """
    critic = {name: w.detach().requires_grad_() for name, w in networks.part(CRITIC).items()}
    with torch.enable_grad():
        loss = critic_loss(critic, networks, transitions, learning.discount)
    optimizer = _optimizer(learning.critic_lr, learning.critic_decay)
    networks = _step_network(networks, CRITIC, critic, loss, optimizer)
    actor = {name: w.detach().requires_grad_() for name, w in networks.part(ACTOR).items()}
    with torch.enable_grad():
        loss = actor_loss(actor, networks.part(CRITIC), transitions.state)
        loss = loss + learning.centering * forward(actor, transitions.state).square().mean()
    networks = _step_network(networks, ACTOR, actor, loss, _optimizer(learning.actor_lr))
    weights = dict(networks.weights)
    for name in weights:
        if name.startswith(TARGET):
            weights[name] = weights[name].lerp(weights[name.removeprefix(TARGET)], learning.follow)
    return replace(networks, weights=weights)


def _step_network(
    networks: Networks, name: str, leaves: Mapping[str, Tensor], loss: Tensor, optimizer: Adam
) -> Networks:
    """Return the networks after a step of one of them down a loss."""
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    grads = _with_client_dimension(dict(zip(leaves, gradients, strict=True)))
    weights = {n: w.detach()[None].clone() for n, w in leaves.items()}
    memory = {n: m.clone() for n, m in fields_under(name, networks.memory).items()}
    optimizer.step_(weights, grads, memory)
    network_weights = {n: w[0] for n, w in weights.items()}
    return Networks(
        {**networks.weights, **with_prefix(name, network_weights)},
        {**networks.memory, **with_prefix(name, memory)},
    )


def _optimizer(lr: float, decay: float = 0.0) -> Adam:
    return Adam(lr, decay)


def _with_client_dimension(tensors: Mapping[str, Tensor]) -> Params:
    """Return tensors with a leading dimension of one, as optimizers of clients want them."""
    return {name: t[None] for name, t in tensors.items()}


# --- An agent in a file: tensors in safetensors, read as a stranger's ----------------------------


FORMAT = {"silograph_agent": "2"}
OLD_FORMAT = {"silograph_agent": "1"}
MEND = "give the file agent.safetensors that silograph train-agent wrote"
LARGEST = 1e12  # so that products of its numbers are finite in float32, too
MOST_ROUNDS = 2**31
ACTION = "replay/action"  # (N, A)


def write_agent(path: Path, agent: Mapping[str, Tensor]) -> None:
    """Write an agent, whole or not at all."""
    tensors = {name: t.contiguous() for name, t in agent.items()}
    write_atomic(path, safetensors.torch.save(tensors, FORMAT))


def read_agent(
    path: str | Path, like: Mapping[str, Tensor], clients: int = 0, by_client: int = 0
) -> dict[str, Tensor]:
    """Return the agent of a file.

    Args:
        path: of the file.
        like: an agent with the names, shapes and dtypes that it must have.
        clients: of the run.
        by_client: values that an action has for each of them.

    Raises:
        ConfigError: it cannot be read, or it is no agent of such states, knobs and clients.
    """
    if Path(path).is_dir():
        raise ConfigError(
            f"expected an agent in {path}, got a folder: {MEND}", **mistake("wrong-format", path)
        )
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata() == OLD_FORMAT:
                raise ConfigError(
                    f"expected an agent of this version in {path}, got an older one, whose reward "
                    "counted time otherwise: train it again",
                    **mistake("other-version", None, None),
                )
            if (file.metadata() or {}) != FORMAT:
                raise ConfigError(
                    f"expected an agent in {path}, got another file: {MEND}",
                    **mistake("wrong-format", path),
                )
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            expected_shapes = {name: tuple(t.shape) for name, t in like.items()}
            _check_state_kind(path, shapes, expected_shapes)
            if shapes != expected_shapes:  # nothing is read that is larger than it may be
                clients_message = _clients_message(shapes, expected_shapes, clients, by_client)
                raise ConfigError(_misfit_message(path, shapes, expected_shapes, clients_message))
            agent = {name: file.get_tensor(name) for name in expected_shapes}
    except FileNotFoundError:
        raise ConfigError(
            f"expected an agent in {path}, got no such file: {MEND}",
            **mistake("missing-file", path),
        ) from None
    except SafetensorError as error:
        raise ConfigError(
            f"expected an agent in {path}, got: {error}: {MEND}", **mistake("wrong-format", path)
        ) from None
    except OSError as error:
        raise ConfigError(
            f"expected an agent in {path}, got: {error}", **read_mistake(error, path)
        ) from None
    for name, t in agent.items():
        if t.dtype is not like[name].dtype:
            raise ConfigError(
                f"expected {name} as {like[name].dtype} in the agent {path}, got {t.dtype}"
            )
        if not bool(torch.isfinite(t).all()):
            raise ConfigError(f"expected finite numbers in the agent {path}, got others in {name}")
        if t.is_floating_point() and float(t.abs().max()) > LARGEST:
            raise ConfigError(f"expected numbers up to {LARGEST:g} in the agent {path}, got {name}")
    if not 0 <= int(agent["rounds"]) < MOST_ROUNDS:
        raise ConfigError(
            f"expected rounds from 0 to {MOST_ROUNDS - 1} in the agent {path}, got "
            f"{int(agent['rounds'])}"
        )
    return agent


def _check_state_kind(path: str | Path, names: Collection[str], expected: Collection[str]) -> None:
    """Raise `ConfigError` if an agent with tensors of these names sees another kind of state."""
    kind, expected_kind = (PCA if "axes" in present else SUMMARY for present in (names, expected))
    if kind != expected_kind:
        raise ConfigError(
            f"expected an agent with agent_state={expected_kind} in {path}, got one with "
            f"agent_state={kind}: give --option agent_state={kind}, or train another agent"
        )


def _misfit_message(
    path: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    expected_shapes: Mapping[str, tuple[int, ...]],
    clients: str,
) -> str:
    tensor_name = min(
        n for n in shapes.keys() | expected_shapes.keys() if shapes.get(n) != expected_shapes.get(n)
    )
    if shapes.get(SCALE) != expected_shapes.get(SCALE):
        clients = f"a model of another number of layers, or {clients}"
    return (
        f"expected {tensor_name[:60]} of shape {expected_shapes.get(tensor_name)} in the agent "
        f"{path}, got {shapes.get(tensor_name)}: it was trained for other knobs, or {clients}"
    )


def _clients_message(
    shapes: Mapping[str, tuple[int, ...]],
    expected_shapes: Mapping[str, tuple[int, ...]],
    clients: int,
    by_client: int,
) -> str:
    """Return a message that an agent had other clients, with their number if it is known."""
    our_shape, their_shape = expected_shapes.get(ACTION, ()), shapes.get(ACTION, ())
    if (
        len(our_shape) != len(their_shape)
        or len(our_shape) != 2
        or by_client < 1
        or our_shape == their_shape
    ):
        return "another number of clients"
    difference, remainder = divmod(their_shape[1] - our_shape[1], by_client)
    their_clients = clients + difference
    if remainder or their_clients < 1:
        return "another number of clients"
    return f"for {count_of(their_clients, 'client')}, where this run has {clients}"


# --- What an agent sees of a run -----------------------------------------------------------------
#
# `summary`: what has the same meaning whatever the first weights were. Round, score, its change,
# seconds of the last round, and the Euclidean norms of each layer's weights and of their change in
# that round.
#
# `pca`: the server's weights in a few numbers, as in the paper. Weights are hashed into `SIZE` sums
# with random signs (Charikar, Chen and Farach-Colton, "Finding frequent items in data streams",
# ICALP 2002), which keeps inner products in expectation and costs one pass over the weights; then
# principal components of the first sketches are taken. The hash is the same in all runs, so that an
# agent can go on in another one.
#
# D: weights.


AgentState = Literal["summary", "pca"]
SUMMARY, PCA = "summary", "pca"
SCORE, SECONDS, NORMS = 1, 3, 4  # places in a summary; the first norm is at the last one
SCALE = "scale"  # (M,) by which the numbers of a summary are multiplied
LARGEST_STATE = 5.0  # of a summary, in standard deviations of the profile
SIZE = 1024  # of a sketch


def summary_of(
    standing: RunStanding,
    seconds: float,
    previous_score: float,
    previous_weights: Mapping[str, Tensor],
) -> Tensor:
    """Return the summary of a run after a round, (4 + 2 L,) float64.

    Args:
        standing: after the round.
        seconds: of the round.
        previous_score: validation score before it.
        previous_weights: of the server's model before it.
    """
    assert standing.val_score is not None  # `_check_standing`, and else the run has stopped
    weights = {name: w.detach().double().cpu() for name, w in standing.weights.items()}
    changes = {name: w - previous_weights[name].double().cpu() for name, w in weights.items()}
    score_change = standing.val_score - previous_score
    numbers = [math.log1p(standing.round), standing.val_score, score_change, seconds]
    norms = [_layer_norms(weights), _layer_norms(changes)]
    return torch.cat([torch.tensor(numbers, dtype=torch.float64), *norms])


def _layer_norms(weights: Mapping[str, Tensor]) -> Tensor:
    """Return the norm of float64 weights by layer, (L,), in the order of their names."""
    squares: dict[str, Tensor] = {}
    for name in sorted(weights):
        layer = name.rpartition(".")[0]
        square = weights[name].square().sum()
        squares[layer] = squares.get(layer, torch.zeros_like(square)) + square
    return torch.stack(list(squares.values())).sqrt()


def scale_of_summaries(summaries: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is subtracted from a summary (M,) and what it is multiplied by, (M,) float64.

    Seconds are counted as in the reward, all else in standard deviations. Numbers that do not
    differ are 0.

    Args:
        summaries: (T, M) of the profile.
        alpha: of the reward, () in 1 / s.
        beta: of the reward, () in s.
    """
    mean, deviation = summaries.mean(0), summaries.std(0)
    differs = deviation > 1e-9 * mean.abs().clamp(min=1e-9)
    scale = torch.where(differs, 1 / deviation.clamp(min=torch.finfo(mean.dtype).tiny), 0.0)
    mean[SECONDS], scale[SECONDS] = beta, alpha
    return mean, scale


def sketch_of(weights: Mapping[str, Tensor]) -> Tensor:
    """Return the sketch of a model's weights, (1024,) float64, in the order of their names."""
    flat = torch.cat([weights[name].detach().double().cpu().flatten() for name in sorted(weights)])
    position, sign = _hash_positions(len(flat))
    return flat.new_zeros(SIZE).index_add_(0, position, flat * sign)


@lru_cache(maxsize=2)  # a run has one model
def _hash_positions(size: int) -> tuple[Tensor, Tensor]:
    """Return the sum (D,) int64 to which each weight is added, and its sign (D,) float64."""
    words = Key.of(0).fold("sketch of weights").words(torch.arange(size), 1)[:, 0]
    return words & (SIZE - 1), ((words >> 32) & 1).double() * 2 - 1


def principal(sketches: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the mean (1024,) of sketches (T, 1024), T >= K, and a projection (1024, K).

    The first coordinate of the sketches has a root mean square of 1, so that states are no larger
    than actions beside them. Signs are chosen so that the largest entry of each component is
    positive. Components along which the sketches do not differ are 0: any direction would do for
    them, and machines choose different ones.
    """
    mean = sketches.mean(0)
    _, sizes, axes = torch.linalg.svd(sketches - mean, full_matrices=False)
    axes = axes[:count] * (sizes > 1e-9 * sizes[0])[:count, None]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    axes = axes * torch.where(largest < 0, -1.0, 1.0)
    spread = ((sketches - mean) @ axes[0]).square().mean().sqrt()
    return mean, axes.T / spread.clamp(min=torch.finfo(axes.dtype).tiny)


PROFILE = 20  # rounds; as many as there are principal components
COMPONENTS = 20
Time = Literal["virtual", "measured", "none"]
OBSERVATION = "observation"  # (M,) of the last round
LAST_WEIGHTS = "weights"  # of the server's model after it; for summaries


def agent_of(state: ControllerState) -> dict[str, Tensor]:
    """Return what another run goes on with: all but the observation, weights and clock of a run."""
    return {
        name: t
        for name, t in state.items()
        if name not in (OBSERVATION, "seconds") and not name.startswith(f"{LAST_WEIGHTS}/")
    }


@dataclass(frozen=True)
class AgentOptions:
    """How the agent learns.

    Attributes:
        target: score that the reward is measured from (Lambda), a fraction.
        omega: base of the reward.
        state: what it sees of a run: a summary, or principal components of the weights.
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
    state: AgentState = "summary"
    time: Time = "virtual"
    explore: bool = True
    agent: str | None = None
    seed: int = 0
    hidden: tuple[int, ...] = (512, 256)
    learning: Learning = field(default_factory=Learning)
    batch: int = 64
    capacity: int = 4096
    noise: float = 0.3
    decay: float = 0.998
    least_noise: float = 0.1


def init(options: AgentOptions, knobs: Knobs, standing: RunStanding) -> ControllerState:
    """Return a new agent, or that of a file, at the beginning of a run.

    Raises:
        ConfigError: the run has no clock, no scores or no model for it, or the file no agent that
            fits.
    """
    _check_standing(options, standing)
    agent = blank_agent(options, knobs, standing.clients, num_layers(standing.weights))
    if options.agent is not None:
        by_client = sum(knob.by_client for knob in knobs)
        agent = read_agent(options.agent, agent, standing.clients, by_client)
    if not options.explore and int(agent["rounds"]) < PROFILE:
        raise ConfigError(
            f"expected an agent that has seen {PROFILE} rounds or more with explore=false, got one "
            f"of {int(agent['rounds'])}: train it first, and give --option agent=FILE"
        )
    assert standing.val_score is not None  # checked above
    return {**agent, **_run_fields(options, standing, 0.0, standing.val_score, standing.weights)}


def _run_fields(
    options: AgentOptions,
    standing: RunStanding,
    seconds: float,
    previous_score: float,
    previous_weights: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return what a state has of its run after a round; see `summary_of`."""
    clock = {"seconds": _scalar(_clock(standing))}
    if options.state == PCA:
        return {OBSERVATION: sketch_of(standing.weights), **clock}
    summary = summary_of(standing, seconds, previous_score, previous_weights)
    last_weights = {name: w.detach().cpu().clone() for name, w in standing.weights.items()}
    return {OBSERVATION: summary, **clock, **with_prefix(LAST_WEIGHTS, last_weights)}


def num_layers(weights: Mapping[str, Tensor]) -> int:
    """Return the number of layers of a model (L): modules that have weights of their own."""
    return len({name.rpartition(".")[0] for name in weights})


def _check_standing(options: AgentOptions, standing: RunStanding) -> None:
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


def blank_agent(
    options: AgentOptions, knobs: Knobs, clients: int, layers: int
) -> dict[str, Tensor]:
    """Return an agent that has seen no round, for a model of so many layers."""
    size, capacity = action_size(knobs, clients), options.capacity
    if options.state == PCA:
        length, states = SIZE, COMPONENTS
        scale = {"axes": _zeros_float64(SIZE, COMPONENTS)}
    else:
        length = states = NORMS + 2 * layers
        scale = {SCALE: _zeros_float64(length)}
    networks = first_networks(states, size, options.hidden, Key.of(options.seed).fold("ddpg"))
    return {
        **with_prefix("net", networks.weights),
        **with_prefix("optimizer", networks.memory),
        "replay/state": torch.zeros(capacity, states),
        "replay/action": torch.zeros(capacity, size),
        "replay/reward": torch.zeros(capacity),
        "replay/after": torch.zeros(capacity, states),
        "profile/observation": _zeros_float64(PROFILE, length),
        "profile/after": _zeros_float64(PROFILE, length),
        "profile/action": torch.zeros(PROFILE, size),
        "profile/score": _zeros_float64(PROFILE),
        "profile/seconds": _zeros_float64(PROFILE),
        "mean": _zeros_float64(length),
        **scale,
        "alpha": _scalar(0.0),
        "beta": _scalar(0.0),
        "rounds": torch.tensor(0),
    }


def propose(
    options: AgentOptions, knobs: Knobs, state: ControllerState, standing: RunStanding, key: Key
) -> Mapping[str, Tensor]:
    """Return random values in the profile, then the actor's, with noise while it explores."""
    rounds, size = int(state["rounds"]), state["replay/action"].shape[1]
    if rounds < PROFILE:
        shared_values = key.fold("profile alike").matrix(1, len(knobs))[0]
        own_values = key.fold("profile").matrix(1, size)[0]
        action = (
            own_values
            if rounds % 2
            else _repeat_over_clients(knobs, shared_values, standing.clients)
        )
    else:
        seen = scaled_state(state, state[OBSERVATION])
        action = act(_networks(state).part(ACTOR), seen[None])[0].double()
        if options.explore:
            scale = max(options.least_noise, options.noise * options.decay ** (rounds - PROFILE))
            shared_values = _repeat_over_clients(
                knobs, _draw_normal(key.fold("noise alike"), len(knobs)), standing.clients
            )
            noise = (_draw_normal(key.fold("noise"), size) + shared_values) / math.sqrt(2)
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
    """Return the agent after a round, with the new transition; if it explores, it learns."""
    seconds = _reward_seconds(options, _clock(standing) - float(state["seconds"]), facts)
    previous_score = float(state[OBSERVATION][SCORE])  # of summaries
    last_weights = fields_under(LAST_WEIGHTS, state)
    new = {**state, **_run_fields(options, standing, seconds, previous_score, last_weights)}
    if not options.explore:
        return new
    assert standing.val_score is not None  # else the run has stopped, see `Controlling`
    rounds, action = int(state["rounds"]), to_action(knobs, values)
    new["rounds"] = torch.tensor(rounds + 1)
    if rounds < PROFILE:
        row = {OBSERVATION: state[OBSERVATION], "after": new[OBSERVATION], "action": action}
        figures = {"score": standing.val_score, "seconds": seconds}
        for name, t in (row | {n: _scalar(v) for n, v in figures.items()}).items():
            new[f"profile/{name}"] = new[f"profile/{name}"].index_copy(
                0, torch.tensor([rounds]), t.to(new[f"profile/{name}"].dtype)[None]
            )
        return _finish_profile(options, new) if rounds + 1 == PROFILE else new
    reward = rewards(options, new, _scalar(standing.val_score), _scalar(seconds))
    before, after = (scaled_state(new, t[OBSERVATION])[None] for t in (state, new))
    transition = Transitions(before, action[None], reward.float()[None], after)
    return _learn_from_replay(options, _store_transitions(new, transition, rounds))


def note(options: AgentOptions, state: ControllerState, rounds: int) -> str | None:
    """Return a note that the agent has set nothing yet if a run ends within the profile."""
    if not options.explore or int(state["rounds"]) > PROFILE:
        return None
    which = f"all {rounds} rounds were" if rounds > 1 else "the only round was"
    return f"{which} the agent's profile (it takes {PROFILE}): the agent set nothing"


def rewards(
    options: AgentOptions, agent: ControllerState, score: Tensor, seconds: Tensor
) -> Tensor:
    """Return the reward of rounds by score and seconds (FedGraph, eq. 9), (...) float64."""
    return options.omega ** (score - options.target) - agent["alpha"] * (seconds - agent["beta"])


def _finish_profile(options: AgentOptions, state: ControllerState) -> ControllerState:
    """Set the scale of states, alpha and beta from the profile, and store its transitions."""
    profile = fields_under("profile", state)
    beta, mean_seconds = profile["seconds"].min(), profile["seconds"].mean()
    alpha = 1 / mean_seconds if mean_seconds > 0 else torch.zeros_like(beta)  # 0: time=none
    if options.state == PCA:
        name, (mean, scale) = "axes", principal(profile[OBSERVATION], COMPONENTS)
    else:
        name, (mean, scale) = SCALE, scale_of_summaries(profile[OBSERVATION], alpha, beta)
    new = {**state, "mean": mean, name: scale, "alpha": alpha, "beta": beta}
    reward = rewards(options, new, profile["score"], profile["seconds"]).float()
    states_before, states_after = (
        scaled_state(new, profile[OBSERVATION]),
        scaled_state(new, profile["after"]),
    )
    return _store_transitions(
        new, Transitions(states_before, profile["action"], reward, states_after), 0
    )


def _store_transitions(
    state: ControllerState, transitions: Transitions, number: int
) -> ControllerState:
    """Return the agent with transitions from `number` on in its replay, over the oldest."""
    capacity = len(state["replay/reward"])
    position = torch.arange(number, number + len(transitions.reward)) % capacity
    rows = with_prefix("replay", vars(transitions))
    return {**state, **{name: state[name].index_copy(0, position, t) for name, t in rows.items()}}


def _learn_from_replay(options: AgentOptions, state: ControllerState) -> ControllerState:
    """Return the agent after an update on a batch of its replay."""
    rounds, replay = int(state["rounds"]), fields_under("replay", state)
    num_stored = min(rounds, len(replay["reward"]))
    key = Key.of(options.seed).fold("replay", rounds)
    sample = (key.matrix(1, options.batch)[0] * num_stored).long()
    batch = Transitions(**{name: t[sample] for name, t in replay.items()})
    new_networks = update_networks(_networks(state), batch, options.learning)
    return {
        **state,
        **with_prefix("net", new_networks.weights),
        **with_prefix("optimizer", new_networks.memory),
    }


def _networks(state: ControllerState) -> Networks:
    return Networks(fields_under("net", state), fields_under("optimizer", state))


def scaled_state(agent: ControllerState, observation: Tensor) -> Tensor:
    """Return the states (..., S) float32 of observations (..., M), by the scale of the profile."""
    centered = observation - agent["mean"]
    if "axes" in agent:
        return (centered @ agent["axes"]).float()
    return (centered * agent[SCALE]).clamp(-LARGEST_STATE, LARGEST_STATE).float()


def action_size(knobs: Knobs, clients: int) -> int:
    """Return the number of values of an action (A)."""
    return sum(_num_values(knob, clients) for knob in knobs)


def _repeat_over_clients(knobs: Knobs, values: Tensor, clients: int) -> Tensor:
    """Return an action (A,) that has the value of a knob, of values (knobs,), at all clients."""
    return values.repeat_interleave(torch.tensor([_num_values(knob, clients) for knob in knobs]))


def to_knobs(knobs: Knobs, action: Tensor, clients: int) -> dict[str, Tensor]:
    """Return the values of knobs from an action (A,) in 0..1, knob after knob."""
    parts = action.double().split([_num_values(knob, clients) for knob in knobs])
    return {knob.name: _knob_value(knob, part) for knob, part in zip(knobs, parts, strict=True)}


def _knob_value(knob: Knob, part: Tensor) -> Tensor:
    value = (knob.low + part * (knob.high - knob.low)).clamp(knob.low, knob.high)
    value = value if knob.by_client else value[0]
    return value.round().to(knob.dtype) if knob.dtype is torch.int64 else value


def to_action(knobs: Knobs, values: Mapping[str, Tensor]) -> Tensor:
    """Return knobs as an action, (A,) float32: what was done, whole numbers rounded."""
    parts = [
        (values[knob.name].double().reshape(-1) - knob.low) / max(knob.high - knob.low, 1e-12)
        for knob in knobs
    ]
    return torch.cat(parts).float()


def _num_values(knob: Knob, clients: int) -> int:
    return clients if knob.by_client else 1


def _draw_normal(key: Key, size: int) -> Tensor:
    """Return standard normal draws (size,) float64 (Box and Muller, 1958)."""
    u = key.matrix(2, size)
    return (-2 * torch.log1p(-u[0])).sqrt() * torch.cos(2 * math.pi * u[1])


def _reward_seconds(options: AgentOptions, virtual: float, facts: Mapping[str, float]) -> float:
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


def _zeros_float64(*size: int) -> Tensor:
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
