"""The ratings of a block, and which of their users and items train there.

n: rows.
"""

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.graph.block.block import ClientBlock, Rows
from silograph.graph.rating_pairs import Pairs, pairs_among

UNSEEN = 2  # rows of a table before those of users and items that train: one user, one item


def pairs_of(block: ClientBlock) -> Pairs:
    """Return the ratings of a block, worked out once."""
    return block.once("pairs", Pairs, lambda: pairs_among(kinds(block.x), block.adj))


def kinds(x: Rows) -> Tensor:
    """Return the features (n, 2) that say what a row is; raise `ProtocolError` for others."""
    if not isinstance(x, Tensor) or x.shape[1] != 2:
        raise ProtocolError("expected features that say which rows are users and items, got others")
    return x


def trained_rows(block: ClientBlock) -> Tensor:
    """Return which users and items have a rating that trains, (n,) bool; worked out once."""
    return block.once("trained rows", Tensor, lambda: _trained(block))


def _trained(block: ClientBlock) -> Tensor:
    pairs = pairs_of(block)
    train = block.split.train[pairs.row]
    known = torch.zeros_like(block.split.train)
    known[pairs.user[train]] = True
    known[pairs.item[train]] = True
    return known


def seen_rows(block: ClientBlock) -> Tensor:
    """Return which ratings have a user and an item that train there, (n,) bool; worked out once."""
    return block.once("seen rows", Tensor, lambda: _seen(block))


def _seen(block: ClientBlock) -> Tensor:
    pairs, known = pairs_of(block), trained_rows(block)
    seen = torch.zeros_like(known)
    seen[pairs.row] = known[pairs.user] & known[pairs.item]
    return seen


def table_rows(block: ClientBlock) -> Tensor:
    """Return how many rows the tables of each client have, (C,) int64."""
    return block.count(trained_rows(block)) + UNSEEN
