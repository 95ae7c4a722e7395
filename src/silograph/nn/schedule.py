"""What clients do in local training: how many steps of which kind, and how each is taken."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import Patched, Stacked, State, dense
from silograph.graph.block.block import ClientBlock
from silograph.nn.any_model import AnyModel
from silograph.nn.conv import Params
from silograph.nn.correction import Correction
from silograph.nn.loss_term import LossTerm
from silograph.nn.neighbors import FULL, Full, Neighbors
from silograph.nn.optim import Optimizer
from silograph.nn.start import Start


@dataclass(frozen=True)
class Schedule:
    """What a client does with its training nodes.

    Attributes:
        epochs: passes over them.
        batch_size: training nodes in a step; None: all.
        neighbors: draws the neighbors that a step sums over.
    """

    epochs: int
    batch_size: int | None = None
    neighbors: Neighbors = FULL

    @property
    def whole(self) -> bool:
        """Whether a step takes all rows and edges of a client."""
        return self.batch_size is None and isinstance(self.neighbors, Full)


@dataclass(frozen=True)
class Training:
    """How clients train.

    Attributes:
        model: the shape.
        optimizer: how steps are taken.
        schedule: which steps.
        corrections: what is added to the gradient of the data, in this order.
        losses: what is added to the loss of the labels; torch computes it.
    """

    model: "TrainableModel"
    optimizer: Optimizer
    schedule: Schedule
    corrections: tuple[Correction, ...] = ()
    losses: tuple[LossTerm, ...] = ()

    @property
    def alike(self) -> bool:
        """Whether weights that meet no data take one path at all clients."""
        return all(correction.alike for correction in self.corrections)

    @property
    def step_flops(self) -> float:
        """Floating-point operations of a client's step, the gradient of the data apart."""
        shapes = self.model.weight_shapes.items()
        return float(sum(self.flops_of(n) * torch.Size(shape).numel() for n, shape in shapes))

    def flops_of(self, name: str) -> int:
        """Return the same of one parameter of a weight."""
        corrections = sum(correction.flops for correction in self.corrections)
        return self.optimizer.flops_of(name) + corrections

    def of(self, clients: Tensor) -> "Training":
        """Return the training of the clients at these positions (k,) int64."""
        corrections = tuple(each.of(clients) for each in self.corrections)
        losses = tuple(each.of(clients) for each in self.losses)
        return replace(self, corrections=corrections, losses=losses)

    def correct(
        self, grads: Params, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
    ) -> Params:
        """Return the gradients that the optimizer follows."""
        for correction in self.corrections:
            grads = correction(grads, weights, start)
        return grads


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """What clients train from.

    Attributes:
        block: their rows, C clients.
        start: weights, see `silograph.nn.start`.
        memory: optimizer state (C, ...) to go on from and return; None: a fresh one, not returned.
        key: key of the draws.
        sampler: what the neighbor sampler remembers of every client.
        tables: those of the clients, with what the optimizer keeps of them if `memory` is.
    """

    block: ClientBlock
    start: Start
    memory: Mapping[str, Tensor] | None
    key: Key
    sampler: State = field(default_factory=dict)
    tables: State = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Fitted:
    """What training leaves.

    Attributes:
        weights: of every client, (C, ...).
        memory: optimizer state (C, ...), empty if it was not to be kept.
        loss: (C,) mean training loss of the last epoch, before each step; 0 without training nodes.
        logits: (n, K) what each client's model says of its rows.
        steps: (C,) int64 steps taken; 0 without training nodes.
        neighbors: what the neighbor sampler remembers of every client.
        tables: of every client, where the model has any, with what the optimizer keeps of them.
        received: (C, ...) counts of the model that training started from, where they are asked for.
    """

    weights: dict[str, Stacked | Patched]
    memory: Params
    loss: Tensor
    logits: Tensor
    steps: Tensor
    neighbors: State = field(default_factory=dict)
    tables: State = field(default_factory=dict)
    received: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> Params:
        """The weights as tensors (C, ...), whatever form they have."""
        return {name: dense(field) for name, field in self.weights.items()}


class TrainableModel(AnyModel, Protocol):
    """A model that says how it is trained; a new kind of model is a class with these answers."""

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train every client of a block in torch; see `silograph.nn.fit.fit`."""
