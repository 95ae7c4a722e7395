"""Layer-wise importance sampling: FastGCN and LADIES, for all clients of a block at once.

In every hop each client draws `size` of its rows, with replacement, for all rows that it has
reached together; messages come along the edges between both. An edge from a row u that was drawn m
times stands for m / (size q(u)), so a sum over neighbors is unbiased, whatever q. A_hat below is
D^-1/2 (A + I) D^-1/2 with the client's own degrees.

Chen, Ma and Xiao, "FastGCN: Fast learning with graph convolutional networks via importance
sampling", ICLR 2018: q(u) ~ |A_hat[:, u]|^2, the same in every hop.

Zou, Hu, Wang, Jiang, Sun and Gu, "Layer-dependent importance sampling for training deep and large
graph convolutional networks", NeurIPS 2019: q(u) ~ |A_hat[R, u]|^2, R the rows reached, so that
only their neighbors are drawn.

What we changed: the diagonal of A_hat takes no part in q, because a row's own message is always
there and is no draw. LADIES divides every row of the drawn matrix by its sum; ours scales the
shares of a receiver to sum to its degree (`normalize`), which means the same to all convolutions.

C: clients. n: rows. r: rows reached. e: edges.
"""

from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as options_of
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.core.payload import State
from silograph.core.setting_values import log
from silograph.graph.block.block import ClientBlock
from silograph.nn.forward import AnyModel
from silograph.nn.mini_batches import Drawn, Reached, Stateless, edges_of, weights_of_a_sum

LEVELS = 2.0**36  # of the largest weight of a client; sums of 2^26 rows are exact in int64
SIZE = {"help": "rows that a client draws for a hop, with replacement", "tune": log(16, 1024)}


@options_of(frozen=True, config=STRICT)
class FastGCNOptions:
    """The help text is the documentation of the field."""

    size: Annotated[int, Field(ge=1, le=2**20)] = field(default=256, metadata=SIZE)


@options_of(frozen=True, config=STRICT)
class LadiesOptions:
    """The help texts are the documentation of the fields."""

    size: Annotated[int, Field(ge=1, le=2**20)] = field(default=256, metadata=SIZE)
    normalize: bool = field(
        default=True,
        metadata={
            "help": "scale what a row's drawn neighbors stand for to its number of neighbors, as "
            "the paper does: less variance, but biased"
        },
    )


@dataclass(frozen=True)
class FastGCN(Stateless):
    """The same distribution over a client's rows in every hop.

    Attributes:
        size: draws of a client for a hop.
    """

    size: int

    def why_not(self, model: AnyModel) -> str | None:
        """Return a reason unless the model sums over neighbors with weights."""
        return weights_of_a_sum(model)

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Draw rows of each client."""
        del hop, state
        if "fastgcn" not in block.memo:
            rows = torch.arange(len(block.row_key), device=block.off.device)
            block.memo["fastgcn"] = _column_norms(block, edges_of(block, rows), rows)
        weight = block.memo["fastgcn"]
        assert isinstance(weight, Tensor)
        all_edges = edges_of(block, reached.rows)
        return _edges_from_drawn(
            all_edges, *_draw_counts(block, weight, reached.clients, self.size, key)
        )


@dataclass(frozen=True)
class Ladies(Stateless):
    """A distribution over the neighbors of the rows that a client has reached.

    Attributes:
        size: draws of a client for a hop.
        normalize: whether shares of a receiver are scaled to sum to its degree.
    """

    size: int
    normalize: bool = False

    def why_not(self, model: AnyModel) -> str | None:
        """Return a reason unless the model sums over neighbors with weights."""
        return weights_of_a_sum(model)

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Draw neighbors of each client's rows."""
        del hop, state
        all_edges = edges_of(block, reached.rows)
        weight = _column_norms(block, all_edges, reached.rows)
        drawn = _edges_from_drawn(
            all_edges, *_draw_counts(block, weight, reached.clients, self.size, key)
        )
        if not self.normalize:
            return drawn
        total = drawn.share.new_zeros(len(reached.rows))
        total.index_add_(0, drawn.position, drawn.share)
        degree = block.adj.degree[reached.rows].to(total.dtype)
        share = drawn.share * (degree / total)[drawn.position]
        return Drawn(drawn.position, drawn.neighbor, share)


def _column_norms(block: ClientBlock, edges: Drawn, rows: Tensor) -> Tensor:
    """Return |A_hat[rows, u]|^2 of every row u without the diagonal, (n,) float64.

    Args:
        block: C clients.
        edges: all edges of the rows.
        rows: (r,) int64.
    """
    scale = 1 / (block.adj.degree.double() + 1)
    total = torch.zeros_like(scale)
    total.index_add_(0, edges.neighbor, scale[rows][edges.position])
    return total * scale


def _draw_counts(
    block: ClientBlock, weight: Tensor, clients: Tensor, size: int, key: Key
) -> tuple[Tensor, Tensor]:
    """Draw rows in proportion to weights; return counts of draws and expected counts, (n,) each.

    Weights are rounded to whole numbers, at least 1, so that their sums are exact: what a client
    draws does not depend on who else is in the block. The second result is exact for the rounded.

    Args:
        block: C clients.
        weight: (n,) float64; 0 is never drawn.
        clients: (A,) int64 clients that draw.
        size: draws of each.
        key: of the draw.
    """
    order, client = _rows_sorted_by_key(block), block.client
    largest = torch.zeros(block.num_clients, dtype=weight.dtype, device=weight.device)
    largest = largest.scatter_reduce(0, client, weight, "amax")
    level = (weight * (LEVELS / largest.clamp(min=torch.finfo(weight.dtype).tiny))[client]).round()
    level = level.clamp(min=1).masked_fill(weight == 0, 0).long()
    cumulative = torch.cat([level.new_zeros(1), level[order].cumsum(0)])
    begin, end = cumulative[block.off[:-1]], cumulative[block.off[1:]]
    clients = clients[(end > begin)[clients]]
    first = block.row_key[order[block.off[:-1][clients]]]
    total = (end - begin)[clients, None]
    ticket = (key.fold("rows").uniform(first, size) * total).long().clamp(max=total - 1)
    ticket = (ticket + begin[clients, None]).flatten()
    hit_rows = order[torch.searchsorted(cumulative[1:], ticket, right=True)]
    expected = size * level.double() / (end - begin).clamp(min=1)[client]
    return torch.bincount(hit_rows, minlength=len(weight)), expected


def _rows_sorted_by_key(block: ClientBlock) -> Tensor:
    """Return the rows (n,) int64 in the order of their keys, client after client."""
    if "rows by key" not in block.memo:
        order = block.row_key.argsort()
        block.memo["rows by key"] = order[block.client[order].argsort(stable=True)]
    sorted_rows = block.memo["rows by key"]
    assert isinstance(sorted_rows, Tensor)
    return sorted_rows


def _edges_from_drawn(all_edges: Drawn, count: Tensor, expected: Tensor) -> Drawn:
    """Return the edges from drawn rows, weighted by the count of draws over the expected count."""
    is_drawn = count[all_edges.neighbor] > 0
    neighbor = all_edges.neighbor[is_drawn]
    share = all_edges.share[is_drawn] * (count[neighbor] / expected[neighbor]).to(
        all_edges.share.dtype
    )
    return Drawn(all_edges.position[is_drawn], neighbor, share)
