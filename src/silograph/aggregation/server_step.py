"""Server optimizers: the clients' mean change is a pseudo-gradient that the server follows.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive federated
optimization", ICLR 2021, algorithm 2, with Delta_t = (mean of the clients' weights) - x_t.

`ScaleFreeAdam` is ours: a step that does not depend on the size of the changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.nn.conv import Params

ServerStep = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Params], tuple[Params, Params]]


def replace(
    weights: Mapping[str, Tensor], mean: Mapping[str, Tensor], memory: Params
) -> tuple[Params, Params]:
    """FedAvg: the mean is the new model."""
    del weights
    return dict(mean), memory


@dataclass(frozen=True)
class ServerMomentum:
    """v = beta v + Delta; x = x + lr v (FedAvgM; Hsu, Qi and Brown, 2019). Memory: `velocity/*`."""

    lr: float
    momentum: float

    def __call__(
        self, weights: Mapping[str, Tensor], mean: Mapping[str, Tensor], memory: Params
    ) -> tuple[Params, Params]:
        """Return new weights and memory."""
        new: Params = {}
        velocity: Params = {}
        for name, w in weights.items():
            old = memory.get(f"velocity/{name}", torch.zeros_like(w))
            velocity[f"velocity/{name}"] = self.momentum * old + (mean[name] - w)
            new[name] = w + self.lr * velocity[f"velocity/{name}"]
        return new, velocity


@dataclass(frozen=True)
class ServerAdam:
    """FedAdam, without bias correction as in the paper. Memory: `first/*`, `second/*`.

    m = b1 m + (1 - b1) Delta; v = b2 v + (1 - b2) Delta^2; x = x + lr m / (sqrt(v) + tau).
    What we changed: v starts at 0, where the paper asks for at least tau^2.
    """

    lr: float
    beta1: float
    beta2: float
    tau: float

    def __call__(
        self, weights: Mapping[str, Tensor], mean: Mapping[str, Tensor], memory: Params
    ) -> tuple[Params, Params]:
        """Return new weights and memory."""
        new: Params = {}
        moments: Params = {}
        for name, w in weights.items():
            delta = mean[name] - w
            m = memory.get(f"first/{name}", torch.zeros_like(w))
            v = memory.get(f"second/{name}", torch.zeros_like(w))
            m = self.beta1 * m + (1 - self.beta1) * delta
            v = self.beta2 * v + (1 - self.beta2) * delta**2
            new[name] = w + self.lr * m / (v.sqrt() + self.tau)
            moments |= {f"first/{name}": m, f"second/{name}": v}
        return new, moments


@dataclass(frozen=True)
class ScaleFreeAdam:
    """Adam with bias correction, and a tau that is relative to the size of the changes.

    With m and v as in `ServerAdam`, m' = m / (1 - b1^t) and v' = v / (1 - b2^t) after t steps:

        x = x + lr m' / (sqrt(v') + relative_tau sqrt(mean of v'))

    The mean is over the entries of a tensor. Multiplying all changes of a tensor by the same factor
    leaves its steps what they are, so that the step depends neither on the clients' learning rate
    nor on the size of the features. A tensor that has never changed stays.

    Memory: `first/*`, `second/*`, and `steps` (): steps so far.
    """

    lr: float
    beta1: float
    beta2: float
    relative_tau: float

    def __call__(
        self, weights: Mapping[str, Tensor], mean: Mapping[str, Tensor], memory: Params
    ) -> tuple[Params, Params]:
        """Return new weights and memory."""
        t = int(memory["steps"]) + 1 if memory else 1
        new: Params = {}
        moments: Params = {"steps": torch.tensor(t)}
        for name, w in weights.items():
            delta = mean[name] - w
            m = memory.get(f"first/{name}", torch.zeros_like(w))
            v = memory.get(f"second/{name}", torch.zeros_like(w))
            m = self.beta1 * m + (1 - self.beta1) * delta
            v = self.beta2 * v + (1 - self.beta2) * delta**2
            root = (v / (1 - self.beta2**t)).sqrt()
            size = root + self.relative_tau * root.square().mean().sqrt()
            step = torch.where(size > 0, m / (1 - self.beta1**t) / size, 0)
            new[name] = w + self.lr * step
            moments |= {f"first/{name}": m, f"second/{name}": v}
        return new, moments
