"""Rows of items that travel: what clients learn together of an item that several of them have.

Items are known to clients only by public keys, which nobody sends. Each takes a row of a table by a
hash of its key, so it has the same row everywhere, without any list of items; two items may have
the same row, the more rarely the longer the table. A row is an embedding, and the item's bias in
the last column; all are 0 at first, so that items that no client trains on stay unknown.

Who sees which rows change learns which items a client has, if it knows their keys: a silo
must allow `items` by name (`beyond_weights`).

E: users and items of a client. B: rows of the table. D: width of an embedding.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock
from silograph.nn.fit import dtype_of
from silograph.nn.rating_steps import RatingGraph, rating_graph, require_one_client

ITEMS = "items"  # the weight
EMBEDDING, BIAS = "embedding", "bias"  # tables of a client's own


def item_shape(rows: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of the weight; none where no row travels."""
    return {ITEMS: (rows, width + 1)} if rows else {}


def item_rows(graph: RatingGraph, rows: int) -> Tensor:
    """Return the row of each item, (E,) int64 below `rows`; numbers of no meaning for users."""
    return Key.of(0).fold("rows of items").words(graph.word, 1)[:, 0] % rows


def ends(p: Mapping[str, Tensor], graph: RatingGraph) -> tuple[Tensor, Tensor]:
    """Return embeddings (E, D) and biases (E, 1) from tables, those of items from shared rows."""
    h, bias = (p[name].index_select(0, graph.slot) for name in (EMBEDDING, BIAS))
    if ITEMS not in p:
        return h, bias
    row = p[ITEMS].index_select(0, item_rows(graph, len(p[ITEMS])))
    item = graph.is_item[:, None]
    return torch.where(item, row[:, :-1], h), torch.where(item, row[:, -1:], bias)


def item_counts(block: ClientBlock, rows: int) -> Tensor:
    """Return how many training ratings of one client meet each row, (B,) int64."""
    graph = rating_graph(require_one_client(block), dtype_of(block))
    item = graph.item[block.split.train[graph.row]]
    return torch.bincount(item_rows(graph, rows)[item], minlength=rows)
