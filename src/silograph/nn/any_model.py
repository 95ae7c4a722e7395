"""What every kind of model answers, so that nobody has to know the kinds to ask them.

n: rows. F: features. K: outputs (classes or label bits). C: clients.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock
from silograph.nn.conv import Params
from silograph.nn.forward import ModelSizes, Staged


class AnyModel(ModelSizes, Protocol):
    """The shape of a model, whose weights are a flat mapping: a value, equal ones are one model.

    How it is trained is asked of `silograph.nn.schedule.TrainableModel`.
    """

    @property
    def noun(self) -> str:
        """What the model is called in a sentence."""

    @property
    def staged(self) -> Staged | None:
        """The model as a row of stages; None: nobody can look between its layers."""

    @property
    def one_by_one(self) -> bool:
        """Whether clients are computed one after the other, in blocks of one."""

    @property
    def source(self) -> str | None:
        """Text of a user's code that decides what the model does, where it can be read."""

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return initial weights, shared form."""

    def forward(self, weights: Mapping[str, Tensor], block: ClientBlock) -> Tensor:
        """Return logits (n, K) from internal edges, nothing dropped.

        Args:
            weights: shared by all clients, or with a leading dimension C.
            block: the rows.
        """

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values, for files."""
