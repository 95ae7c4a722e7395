"""Server optimizers: the clients' mean change is a pseudo-gradient that the server follows.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive federated
optimization", ICLR 2021, algorithm 2, with Delta_t = (mean of the clients' weights) - x_t.
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
