"""Optimizers for stacked weights: one fused step for all clients of a block.

State is a flat mapping of tensors with a leading dimension C, so that it can be sliced, saved
and carried like any other client state.

C: clients.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from silograph.core.errors import ProtocolError
from silograph.nn.conv import Params

ADAM_FLOPS = 12  # a parameter: two moments 3 + 4, root, division by the correction, eps, step 3


def check_alike(weights: Mapping[str, Tensor], *others: Sequence[Tensor | None]) -> None:
    """Raise `ProtocolError` unless what is read beside weights is as they are, and contiguous.

    The fused kernels read and write as many values of each as there are weights, and check nothing.

    Args:
        weights: by name.
        others: gradients, or a part of the state, one tensor for each weight; None: there is none.
    """
    for tensors in (list(weights.values()), *others):
        for (name, w), t in zip(weights.items(), tensors, strict=True):
            if t is None:
                continue
            if t.shape != w.shape or t.dtype is not w.dtype or not t.is_contiguous():
                raise ProtocolError(
                    f"expected a step of {name} {w.dtype} {tuple(w.shape)}, got {t.dtype} "
                    f"{tuple(t.shape)} with strides {t.stride()}: gradient and optimizer state "
                    "are as the weight, and contiguous"
                )


DecayLayers = Literal["all", "first"]
FIRST = "0."  # begins the names of the first layer's weights


@dataclass(frozen=True)
class _Group:
    """Names of weights with the same weight decay, and its value."""

    names: Sequence[str]
    weight_decay: float


def _groups(names: Iterable[str], weight_decay: float, layers: DecayLayers) -> list[_Group]:
    """Return the weights of a step by their weight decay."""
    if layers == "all" or weight_decay == 0:
        return [_Group(list(names), weight_decay)]
    first, later = list[str](), list[str]()
    for name in names:
        (first if name.startswith(FIRST) else later).append(name)
    return [g for g in (_Group(first, weight_decay), _Group(later, 0.0)) if g.names]


class Optimizer(Protocol):
    """An optimizer as a value; its state is explicit.

    Weights are contiguous: the fused kernels would misread strided ones.
    """

    def __hash__(self) -> int:
        """Hash by value: the shapes of its state are computed once for each."""

    @property
    def weight_decay(self) -> float:
        """L2 penalty added to the gradient."""

    def flops_of(self, name: str) -> int:
        """Return the floating-point operations of a step for one parameter of a weight."""

    def init(self, weights: Mapping[str, Tensor]) -> Params:
        """Return the state before the first step, for weights (C, ...)."""

    def step_(self, weights: Params, grads: Mapping[str, Tensor], state: Params) -> None:
        """Take one step for all clients; changes `weights` and `state` in place."""


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with heavy-ball momentum, in torch's form: v = mu v + g.

    Weight decay is added to the gradient (L2), of the weights of all layers or of the first one.
    State: `momentum/NAME` (C, ...) if mu > 0.
    """

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    decay_layers: DecayLayers = "all"

    def flops_of(self, name: str) -> int:
        """Return 2 operations each for the step, weight decay and momentum."""
        decays = self.weight_decay > 0 and (self.decay_layers == "all" or name.startswith(FIRST))
        return 2 + 2 * decays + 2 * (self.momentum > 0)

    def init(self, weights: Mapping[str, Tensor]) -> Params:
        """Return zero velocities; torch's first step, v = g, gives the same."""
        if self.momentum == 0:
            return {}
        return {f"momentum/{name}": torch.zeros_like(w) for name, w in weights.items()}

    def step_(self, weights: Params, grads: Mapping[str, Tensor], state: Params) -> None:
        """Take one step for all clients."""
        for group in _groups(weights, self.weight_decay, self.decay_layers):
            part = {name: weights[name] for name in group.names}
            self._fused_step(part, grads, state, group.weight_decay)

    def _fused_step(
        self,
        weights: Params,
        grads: Mapping[str, Tensor],
        state: Params,
        weight_decay: float,
    ) -> None:
        gradients = [grads[name].contiguous() for name in weights]
        velocity = [state.get(f"momentum/{name}") for name in weights]
        check_alike(weights, gradients, velocity)
        sgd(
            list(weights.values()),
            gradients,
            velocity,
            fused=True,
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, ICLR 2015, algorithm 1) with weight decay added to the gradient.

    Weight decay is that of the weights of all layers, or of the first one.

    State: `first/NAME` and `second/NAME` (C, ...), `steps` (C,) float32. Clients may differ in
    the number of steps they have taken.
    """

    lr: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay_layers: DecayLayers = "all"

    def flops_of(self, name: str) -> int:
        """Return the operations of a step, and 2 for weight decay."""
        decays = self.weight_decay > 0 and (self.decay_layers == "all" or name.startswith(FIRST))
        return ADAM_FLOPS + 2 * decays

    def init(self, weights: Mapping[str, Tensor]) -> Params:
        """Return zero moments and zero steps."""
        # Compact weights are rows of all clients: then all take equally many steps.
        clients = max(len(w) for w in weights.values())
        state = {f"first/{name}": torch.zeros_like(w) for name, w in weights.items()}
        state |= {f"second/{name}": torch.zeros_like(w) for name, w in weights.items()}
        device = next(iter(weights.values())).device
        return state | {"steps": torch.zeros(clients, dtype=torch.float32, device=device)}

    def step_(self, weights: Params, grads: Mapping[str, Tensor], state: Params) -> None:
        """Take one step for all clients, as one call where all have taken equally many."""
        for group in _groups(weights, self.weight_decay, self.decay_layers):
            part = {name: weights[name] for name in group.names}
            self._step_group(part, grads, state, group.weight_decay)
        state["steps"] += 1  # the kernel advances copies only

    def _step_group(
        self,
        weights: Params,
        grads: Mapping[str, Tensor],
        state: Params,
        weight_decay: float,
    ) -> None:
        # The fused kernel reads memory as contiguous: a strided gradient would be misread.
        lists = (
            list(weights.values()),
            [grads[name].contiguous() for name in weights],
            [state[f"first/{name}"] for name in weights],
            [state[f"second/{name}"] for name in weights],
        )
        check_alike(weights, *lists[1:])
        steps = state["steps"]
        same_steps = len(steps.unique()) == 1
        if steps.dim() != 1 or not (same_steps or all(len(w) == len(steps) for w in lists[0])):
            raise ProtocolError(
                f"expected a number of steps for each client, got shape {tuple(steps.shape)}"
            )
        if same_steps:
            self._fused_step(*lists, [steps[0].clone() for _ in weights], weight_decay)
        else:
            w, g, m, v = ([part for t in tensors for part in t.unbind(0)] for tensors in lists)
            steps_of_tensors = [step.clone() for _ in weights for step in steps.unbind(0)]
            self._fused_step(w, g, m, v, steps_of_tensors, weight_decay)

    def _fused_step(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        steps: list[Tensor],
        weight_decay: float,
    ) -> None:
        adam(
            weights,
            grads,
            first,
            second,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=self.lr,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
        )
