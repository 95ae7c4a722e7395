"""What clients do in local training: how many steps of which kind, and how each is taken."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from silograph.nn.conv import Params
from silograph.nn.correction import Correction
from silograph.nn.model import AnyModel, Model, weight_shapes
from silograph.nn.neighbors import FULL, Full, Neighbors
from silograph.nn.optim import Optimizer


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
    """

    model: AnyModel
    optimizer: Optimizer
    schedule: Schedule
    corrections: tuple[Correction, ...] = ()

    @property
    def layered(self) -> Model:
        """The model as layers of silograph's; a user's module is trained by `fit_module`."""
        assert isinstance(self.model, Model)
        return self.model

    @property
    def alike(self) -> bool:
        """Whether weights that meet no data take one path at all clients."""
        return all(correction.alike for correction in self.corrections)

    @property
    def step_flops(self) -> float:
        """Floating-point operations of a client's step, the gradient of the data apart."""
        size = sum(torch.Size(shape).numel() for shape in weight_shapes(self.model).values())
        each = self.optimizer.flops + sum(correction.flops for correction in self.corrections)
        return float(each * size)

    def of(self, clients: Tensor) -> "Training":
        """Return the training of the clients at these positions (k,) int64."""
        return replace(self, corrections=tuple(c.of(clients) for c in self.corrections))

    def correct(
        self, grads: Params, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
    ) -> Params:
        """Return the gradients that the optimizer follows."""
        for correction in self.corrections:
            grads = correction(grads, weights, start)
        return grads
