"""What every kind of model answers, so that nobody has to know the kinds to ask them.

n: rows. F: features. K: outputs (classes or label bits). C: clients.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import NO_STATE, State
from silograph.graph.block.block import ClientBlock
from silograph.nn.conv import Params
from silograph.nn.forward import ModelSizes, Staged

NO_TABLES: Mapping[str, int] = MappingProxyType({})


class AnyModel(ModelSizes, Protocol):
    """The shape of a model, whose weights are a flat mapping: a value, equal ones are one model.

    How it is trained is asked of `silograph.nn.fit.TrainableModel`.
    """

    @property
    def noun(self) -> str:
        """Name of the model in messages."""

    @property
    def staged(self) -> Staged | None:
        """The model as a row of stages; None: nobody can look between its layers."""

    @property
    def single_client_only(self) -> bool:
        """Whether clients are computed one after the other, in blocks of one."""

    @property
    def meets_all(self) -> bool:
        """Whether an output may meet all rows, whatever the edges are."""

    @property
    def solved_flops(self) -> float:
        """Most operations of a row in an equation that is solved, besides those of steps."""

    @property
    def table_widths(self) -> Mapping[str, int]:
        """Columns of the tables, rows of its own users and items, that each client keeps."""

    @property
    def source(self) -> str | None:
        """Text of a user's code that decides what the model does, where it can be read."""

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return initial weights, shared form."""

    def forward(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Tensor:
        """Return logits (n, K) from internal edges, nothing dropped.

        Args:
            weights: shared by all clients, or with a leading dimension C.
            block: the rows.
            tables: of the clients, where the model has any.
        """

    def first_tables(self, block: ClientBlock, key: Key) -> State:
        """Return the clients' tables before training, by name; none where it has none."""

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values, for files."""
