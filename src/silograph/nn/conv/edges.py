"""Who hears whom: the edges of one layer, with what both ends of a sum need to know.

C: clients.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from silograph.core.key import Key, keep_probability, mix_words, signed
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.graph.csr import CSR


@dataclass(frozen=True, eq=False)
class EdgeDraws:
    """Dropout of attention, drawn for an edge and head from the keys of both of its ends.

    Attributes:
        drop: probability with which an edge or self loop is dropped.
        sender: (s,) int64 keys of the rows that send.
        receiver: (r,) int64 of those that hear.
        key: of the draws.
    """

    drop: float
    sender: Tensor
    receiver: Tensor
    key: Key

    def applied(self, weight: Tensor, row: Tensor | None, column: Tensor | None) -> Tensor:
        """Return attention (m, heads) with entries dropped and the rest scaled to keep the mean.

        Args:
            weight: (m, heads).
            row: (m,) int64 who hears; None: every row that hears hears itself, (r, heads).
            column: (m,) int64 who sends, likewise.
        """
        hears = mix_words(self.receiver ^ signed(self.key.value))
        hears = hears if row is None else hears[row]
        sends = self.receiver if column is None else self.sender[column]
        keep = self.key.keep(hears ^ sends, weight.shape[1], self.drop)
        return weight * keep.to(weight.dtype) * (1 / keep_probability(self.drop))


@dataclass(frozen=True, eq=False)
class Messages:
    """Who hears whom in one layer; r rows hear s rows, of which they are some.

    Attributes:
        adj: (r, s), no self loops. Values are weights of edges, times how many a drawn one stands
            for.
        symmetric: whether `adj` is.
        sender: (s, 1) floating point, sum of the weights of each sending row's edges; where all are
            1, its number of neighbors.
        receiver: (r, 1) the same of each row that hears.
        own: (r,) int64 where a row that hears is among those that send; None: the same rows.
        sender_off: (C + 1,) rows of each client that send.
        off: (C + 1,) rows of each client that hear.
        beside: (r, O) sums over neighbors that other silos hold, scaled by those; None: none.
        attention: which attention is dropped; None: none is.
        operators: what `operator` has worked out, by convolution.
    """

    adj: CSR
    symmetric: bool
    sender: Tensor
    receiver: Tensor
    own: Tensor | None
    sender_off: Tensor
    off: Tensor
    beside: Tensor | None = None
    attention: "EdgeDraws | None" = None
    operators: dict[object, CSR] = field(default_factory=dict, init=False, repr=False)

    def own_of(self, z: Tensor) -> Tensor:
        """Return the rows of z (s, D) that hear, (r, D)."""
        return z if self.own is None else z[self.own]

    def own_rows(self, x: Rows) -> Rows:
        """Return the same of features."""
        if isinstance(x, Tensor):
            return self.own_of(x)
        if self.own is None:
            return x
        return SparseRows(x.csr.select_rows(self.own), self.off, feature=x.feature)

    def dropping(self, drop: float, row_key: Tensor, key: Key) -> "Messages":
        """Return the same for a step that drops attention; `row_key` (s,) of the rows that send."""
        return replace(self, attention=EdgeDraws(drop, row_key, self.own_of(row_key), key))


def internal_messages(block: ClientBlock, dtype: torch.dtype) -> Messages:
    """Return the messages along internal edges: cross-client edges are dropped."""
    return block.once(("messages", dtype), Messages, lambda: _messages(block, dtype))


def _messages(block: ClientBlock, dtype: torch.dtype) -> Messages:
    degree = block.adj.weighted_degree.to(dtype)[:, None]
    return Messages(block.adj, True, degree, degree, None, block.off, block.off)
