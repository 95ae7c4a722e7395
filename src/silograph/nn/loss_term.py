"""Terms that a method adds to the loss of clients' local steps, such as one of embeddings.

A term is a value, as a `Correction` of the gradient is. Training adds those that it is given to
the loss of the labels, node by node, before it takes the gradient. Torch alone computes them.

A: clients that take part in a step. r: their training nodes in it. D: width of the embeddings.
K: outputs.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from silograph.nn.any_model import AnyModel
from silograph.nn.forward import last_layer


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
        """Return what is added to the loss of each node, (r,)."""


def why_no_embeddings(model: AnyModel) -> str | None:
    """Return why nobody can tell the embeddings of a model, or None if they can be told."""
    if model.staged is None:
        return f"{model.noun} does not show the embeddings that the method's loss reads"
    if last_layer(model.staged) == 0:
        return "a model of one layer has no embeddings, which the method's loss reads"
    return None
