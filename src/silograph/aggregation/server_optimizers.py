"""Server optimizers, by the name that users give: the server's step towards the clients' mean.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive federated
optimization", ICLR 2021, algorithm 2: the mean change of the clients' weights, Delta_t = (their
mean) - x_t, is a pseudo-gradient that the server follows. `none` takes the mean itself, as FedAvg
does.

Ours is the step of `adam` by default, `ScaleFreeAdam`: it has bias correction and a tau relative to
the size of the changes, so that it holds for raw, row-normalized and standardized features alike.
With `server_tau` it is FedAdam as in the paper, but for v, which starts at 0 where the paper asks
for at least tau^2. The defaults of adam (rate 0.01, relative tau 0.01) are derived in
benchmarks/defaults/features.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.setting_values import log
from silograph.nn.conv import Params

ServerStep = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Params], tuple[Params, Params]]
"""(weights x_t, the clients' mean, memory) to x_t+1 and the new memory; each by name.

Memory is empty before the first step, and comes back as the step before has returned it.
"""
RELATIVE_RATE, ABSOLUTE_RATE = 0.01, 0.005  # of adam; see benchmarks/defaults


@dataclass(frozen=True)
class ServerOptimizer:
    """A server optimizer.

    Attributes:
        name: what users call it.
        title: one line for listings.
        reference: title, authors, venue, year.
        options: frozen dataclass of its own options.
        step: the step that options stand for.
    """

    name: str
    title: str
    reference: str
    options: type
    step: Callable[[Any], ServerStep]


RATE = {"tune": log(1e-3, 1.0)}


@checked(frozen=True, config=STRICT)
class NoServerOptions:
    """Options of server optimizers that have none."""


@checked(frozen=True, config=STRICT)
class MomentumOptions:
    """The help texts are the documentation of the fields."""

    server_lr: Annotated[float, Field(gt=0)] = field(
        default=1.0, metadata={"help": "step size of the server", **RATE}
    )
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = field(
        default=0.9, metadata={"help": "momentum; 0 with step size 1 takes the mean"}
    )


@checked(frozen=True, config=STRICT)
class AdamOptions:
    """The help texts are the documentation of the fields."""

    server_lr: Annotated[float, Field(gt=0)] | None = field(
        default=None,
        metadata={"help": "step size of the server (default: 0.01, 0.005 with server_tau)", **RATE},
    )
    server_beta1: Annotated[float, Field(ge=0, lt=1)] = field(
        default=0.9, metadata={"help": "decay of the first moment"}
    )
    server_beta2: Annotated[float, Field(ge=0, lt=1)] = field(
        default=0.99, metadata={"help": "decay of the second moment"}
    )
    server_relative_tau: Annotated[float, Field(ge=0)] = field(
        default=0.01,
        metadata={
            "help": "degree of adaptivity, relative to the size of the updates",
            "tune": log(1e-3, 10.0),
        },
    )
    server_tau: Annotated[float, Field(gt=0)] | None = field(
        default=None,
        metadata={
            "help": "an absolute degree of adaptivity, which makes the step that of the paper, "
            "without bias correction; none: relative"
        },
    )

    def __post_init__(self) -> None:
        """Set the default step size, so that the resolved config shows it."""
        if self.server_lr is None:
            rate = RELATIVE_RATE if self.server_tau is None else ABSOLUTE_RATE
            object.__setattr__(self, "server_lr", rate)


# --- steps ---------------------------------------------------------------------------------------


def take_mean(
    weights: Mapping[str, Tensor], mean: Mapping[str, Tensor], memory: Params
) -> tuple[Params, Params]:
    """Return the mean as the new model, as FedAvg does."""
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


def moments_after(
    name: str, delta: Tensor, memory: Params, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """Return m = b1 m + (1 - b1) Delta and v = b2 v + (1 - b2) Delta^2 of a tensor."""
    m = memory.get(f"first/{name}", torch.zeros_like(delta))
    v = memory.get(f"second/{name}", torch.zeros_like(delta))
    return beta1 * m + (1 - beta1) * delta, beta2 * v + (1 - beta2) * delta**2


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
            m, v = moments_after(name, mean[name] - w, memory, self.beta1, self.beta2)
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
            m, v = moments_after(name, mean[name] - w, memory, self.beta1, self.beta2)
            root = (v / (1 - self.beta2**t)).sqrt()
            size = root + self.relative_tau * root.square().mean().sqrt()
            step = torch.where(size > 0, m / (1 - self.beta1**t) / size, 0)
            new[name] = w + self.lr * step
            moments |= {f"first/{name}": m, f"second/{name}": v}
        return new, moments


# --- parts ---------------------------------------------------------------------------------------


def take_no_step(options: object) -> ServerStep:
    """Return the step of FedAvg."""
    del options
    return take_mean


def momentum_step(options: MomentumOptions) -> ServerStep:
    """Return the step of FedAvgM."""
    return ServerMomentum(options.server_lr, options.server_momentum)


def adam_step(options: AdamOptions) -> ServerStep:
    """Return the step of FedAdam, scale-free unless tau is absolute."""
    assert options.server_lr is not None  # written out
    lr, betas = options.server_lr, (options.server_beta1, options.server_beta2)
    if options.server_tau is None:
        return ScaleFreeAdam(lr, *betas, options.server_relative_tau)
    return ServerAdam(lr, *betas, options.server_tau)


NONE = ServerOptimizer(
    "none",
    "the server takes the mean",
    "McMahan et al., Communication-efficient learning of deep networks from decentralized data, "
    "AISTATS 2017",
    NoServerOptions,
    take_no_step,
)
MOMENTUM = ServerOptimizer(
    "momentum",
    "a step with momentum (FedAvgM)",
    "Hsu, Qi and Brown, Measuring the effects of non-identical data distribution for federated "
    "visual classification, 2019",
    MomentumOptions,
    momentum_step,
)
ADAM = ServerOptimizer(
    "adam",
    "a step of Adam (FedAdam)",
    "Reddi et al., Adaptive federated optimization, ICLR 2021",
    AdamOptions,
    adam_step,
)
SERVER_OPTIMIZERS: dict[str, ServerOptimizer] = {o.name: o for o in (NONE, MOMENTUM, ADAM)}
