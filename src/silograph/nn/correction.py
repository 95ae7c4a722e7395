"""Corrections: what a method adds to the gradient of a client's local steps.

A correction is a value. Training applies those it is given, in order, to the gradient of the
data, before the optimizer takes its step; the optimizer then adds weight decay.

C: clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from silograph.nn.conv import Params
from silograph.nn.forward import AnyModel, last_layer


class Correction(Protocol):
    """A term of the gradient.

    Weights, gradients and the start are those of some clients, (C, ...), or, where `alike` holds,
    rows (R, D) of them.
    """

    @property
    def alike(self) -> bool:
        """Whether it is one function of weight and start, entry by entry, for all clients.

        Then weights that meet no data take one path at all clients, and are worked out once.
        """

    @property
    def flops(self) -> int:
        """Floating-point operations of a step for one parameter."""

    @property
    def copies(self) -> int:
        """Copies of a client's weights that it takes in training, for the plan of memory."""

    def of(self, clients: Tensor) -> "Correction":
        """Return the correction of the clients at these positions (k,) int64."""

    def __call__(
        self, grads: Params, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
    ) -> Params:
        """Return the corrected gradients; `start` are the weights at the start of the call."""


@dataclass(frozen=True)
class Proximal:
    """The gradient mu (w - w_t) of mu/2 ||w - w_t||^2, which pulls to the start w_t.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated optimization in heterogeneous
    networks", MLSys 2020, equation 2.
    """

    mu: float
    alike: ClassVar[bool] = True
    flops: ClassVar[int] = 3  # difference, product, sum
    copies: ClassVar[int] = 1  # the start

    def of(self, clients: Tensor) -> "Proximal":
        """Return itself."""
        del clients
        return self

    def __call__(
        self, grads: Params, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
    ) -> Params:
        """Return the corrected gradients."""
        return {
            name: g.add(weights[name] - start[name], alpha=self.mu) for name, g in grads.items()
        }


@dataclass(frozen=True, eq=False)
class Shift:
    """Adds to every gradient of a client a vector of its own, such as a control variate.

    Attributes:
        by: (C, ...) by name of the weight; a weight that is missing is not shifted.
    """

    by: Params
    alike: ClassVar[bool] = False
    flops: ClassVar[int] = 1
    copies: ClassVar[int] = 5  # the start, the shift, the client's variate before, after, change

    def of(self, clients: Tensor) -> "Shift":
        """Return the shift of the clients at these positions (k,) int64."""
        return Shift({name: t[clients] for name, t in self.by.items()})

    def __call__(
        self, grads: Params, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
    ) -> Params:
        """Return the corrected gradients."""
        del weights, start
        return {name: g + self.by[name] if name in self.by else g for name, g in grads.items()}


# --- loss term -----------------------------------------------------------------------------------
# Terms that a method adds to the loss of clients' local steps, such as one of embeddings.
#
# A term is a value, as a `Correction` of the gradient is. Training adds those that it is given to
# the loss of the labels, node by node, before it takes the gradient. Torch alone computes them.
#
# A: clients that take part in a step. r: their training nodes in it. D: width of the embeddings.
# K: outputs.


@dataclass(frozen=True, eq=False)
class StepNodes:
    """The training nodes of a local step, by client.

    Attributes:
        embeddings: (r, D) what enters the last layer, before dropout; gradients go through it.
        logits: (r, K), likewise.
        y: (r, ...) labels, as the task has them.
        row: (r,) int64 where the nodes are among all rows of the clients that train.
        off: (A + 1,) int64; client c has off[c]:off[c + 1].
    """

    embeddings: Tensor
    logits: Tensor
    y: Tensor
    row: Tensor
    off: Tensor


class LossTerm(Protocol):
    """A term of the loss."""

    def of(self, clients: Tensor) -> "LossTerm":
        """Return the term of the clients at these positions (k,) int64."""

    def flops(self, width: int) -> float:
        """Floating-point operations for a node whose embedding is so wide, gradients included."""

    def __call__(self, nodes: StepNodes) -> Tensor:
        """Return the term of each node, (r,), which is added to its loss."""


def why_no_embeddings(model: AnyModel) -> str | None:
    """Return why a model has no embeddings for loss terms, or None if it has."""
    if model.staged is None:
        return f"{model.noun} does not show the embeddings that the method's loss reads"
    if last_layer(model.staged) == 0:
        return "a model of one layer has no embeddings, which the method's loss reads"
    return None
