"""Actor and critic of DDPG as flat mappings of tensors, and one update of both.

Lillicrap, Hunt, Pritzel, Heess, Erez, Tassa, Silver and Wierstra, "Continuous control with deep
reinforcement learning", ICLR 2016, algorithm 1. Networks have two hidden layers with ReLU; the
actor ends in a sigmoid, so that actions are in (0, 1).

Nothing here draws: initial weights take a key, and whoever calls `updated` draws the batch.

S: values of a state. A: values of an action. B: transitions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

from silograph.core.key import Key
from silograph.core.payload import below, named
from silograph.nn.conv import Params
from silograph.nn.optim import Adam

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
            gradient hardly points to the best action (see docs/decisions/064).
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
    """What was done in which state, and what came of it.

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
        return below(name, self.weights)


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
        own = _first_layers([inputs, *hidden, outputs], key.fold(name))
        weights |= named(name, own) | named(TARGET + name, {n: w.clone() for n, w in own.items()})
        memory |= named(name, _optimizer(0.0).init(_stacked(own)))
    return Networks(weights, memory)


def _first_layers(widths: Sequence[int], key: Key) -> Params:
    layers, last = Params(), len(widths) - 2
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        bound = LAST if number == last else inputs**-0.5
        drawn = (2 * key.fold(number).matrix(outputs, inputs + 1) - 1) * bound
        layers[f"{number}.weight"] = drawn[:, :-1].float().contiguous()
        layers[f"{number}.bias"] = drawn[:, -1].float().contiguous()
    return layers


def forward(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return what a network makes of rows x (B, I), (B, O); ReLU between its layers."""
    layers = len(weights) // 2
    for number in range(layers):
        x = linear(x, weights[f"{number}.weight"], weights[f"{number}.bias"])
        x = torch.relu(x) if number < layers - 1 else x
    return x


def act(actor: Mapping[str, Tensor], state: Tensor) -> Tensor:
    """Return the actions of states (B, S), (B, A) in (0, 1)."""
    return torch.sigmoid(forward(actor, state))


def value(critic: Mapping[str, Tensor], state: Tensor, action: Tensor) -> Tensor:
    """Return what the critic expects of actions (B, A) in states (B, S), (B,)."""
    return forward(critic, torch.cat([state, action], dim=1))[:, 0]


def critic_loss(
    critic: Mapping[str, Tensor], networks: Networks, found: Transitions, discount: float
) -> Tensor:
    """Return the mean squared error of the critic against its target (FedGraph, eq. 10), ()."""
    target_actor, target_critic = (networks.part(TARGET + name) for name in (ACTOR, CRITIC))
    with torch.no_grad():
        later = value(target_critic, found.after, act(target_actor, found.after))
        target = found.reward + discount * later
    return (target - value(critic, found.state, found.action)).square().mean()


def actor_loss(actor: Mapping[str, Tensor], critic: Mapping[str, Tensor], state: Tensor) -> Tensor:
    """Return minus the mean value of the actor's own actions, (); its gradient is eq. 12's."""
    return -value(critic, state, act(actor, state)).mean()


def updated(networks: Networks, found: Transitions, learning: Learning) -> Networks:
    """Return the networks after one update of critic, actor and targets (eq. 10-14).

    The actor follows the critic as this update has made it, as in the paper of DDPG.
    """
    critic = {name: w.detach().requires_grad_() for name, w in networks.part(CRITIC).items()}
    with torch.enable_grad():
        loss = critic_loss(critic, networks, found, learning.discount)
    optimizer = _optimizer(learning.critic_lr, learning.critic_decay)
    networks = _stepped(networks, CRITIC, critic, loss, optimizer)
    actor = {name: w.detach().requires_grad_() for name, w in networks.part(ACTOR).items()}
    with torch.enable_grad():
        loss = actor_loss(actor, networks.part(CRITIC), found.state)
        loss = loss + learning.centering * forward(actor, found.state).square().mean()
    networks = _stepped(networks, ACTOR, actor, loss, _optimizer(learning.actor_lr))
    weights = dict(networks.weights)
    for name in weights:
        if name.startswith(TARGET):
            weights[name] = weights[name].lerp(weights[name.removeprefix(TARGET)], learning.follow)
    return replace(networks, weights=weights)


def _stepped(
    networks: Networks, name: str, leaves: Mapping[str, Tensor], loss: Tensor, optimizer: Adam
) -> Networks:
    """Return the networks after a step of one of them down a loss."""
    found = torch.autograd.grad(loss, list(leaves.values()))
    grads = _stacked(dict(zip(leaves, found, strict=True)))
    weights = {n: w.detach()[None].clone() for n, w in leaves.items()}
    memory = {n: m.clone() for n, m in below(name, networks.memory).items()}
    optimizer.step_(weights, grads, memory)
    own = {n: w[0] for n, w in weights.items()}
    return Networks(
        {**networks.weights, **named(name, own)}, {**networks.memory, **named(name, memory)}
    )


def _optimizer(lr: float, decay: float = 0.0) -> Adam:
    return Adam(lr, decay)


def _stacked(tensors: Mapping[str, Tensor]) -> Params:
    """Return tensors with a leading dimension of one, as optimizers of clients want them."""
    return {name: t[None] for name, t in tensors.items()}
