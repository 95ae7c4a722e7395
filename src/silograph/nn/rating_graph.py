"""Who sends messages to whom among the users and items of a client, with transition probabilities.

Messages go along the ratings that train, and along trust. Ratings that validate or test are no
edges, so nothing of them reaches a prediction.

E: users and items of one client. e: directed edges among them. t: rows of a table.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from silograph.graph.block.block import ClientBlock
from silograph.graph.block.pairs import UNSEEN, kinds, pairs_of, trained_rows
from silograph.graph.csr import CSR
from silograph.graph.node_key import words_of_rows


@dataclass(frozen=True, eq=False)
class RatingGraph:
    """What a model reads of one client.

    Attributes:
        slot: (E,) int64 row of each user and item in the tables; those without a training rating
            share the row of unseen users, 0, or of unseen items, 1.
        key: (t,) int64 counter of the draws for each row of a table.
        word: (E,) int64 word of the public key of each, the same at all clients.
        is_item: (E,) bool.
        trust: (2, s) int64 users and whom they trust, each statement in both directions.
        adj: (E, E) edges, without values.
        chance: (e, 2) transition probabilities of an edge, from the receiver to the sender and
            back: a user's ratings divided by their sum, an item's likewise, and one over the number
            of users with whom there is trust.
        gcn: (E, E) D^-1/2 (A + I) D^-1/2.
        gcn_chance: (E, 2) `chance`, summed with the weights of `gcn`.
        mean: mean rating in training, 0 without any.
        row: (p,) int64 row of each rating in the block.
        user: (p,) int64 its user, among users and items.
        item: (p,) int64 its item.
    """

    slot: Tensor
    key: Tensor
    word: Tensor
    is_item: Tensor
    trust: Tensor
    adj: CSR
    chance: Tensor
    gcn: CSR
    gcn_chance: Tensor
    mean: float
    row: Tensor
    user: Tensor
    item: Tensor


def rating_graph(block: ClientBlock, dtype: torch.dtype) -> RatingGraph:
    """Return the users and items of a block of one client, worked out once."""
    return block.once(("rating graph", dtype), RatingGraph, lambda: _made(block, dtype))


def _made(block: ClientBlock, dtype: torch.dtype) -> RatingGraph:
    kind, pairs, known = kinds(block.x), pairs_of(block), trained_rows(block)
    entity = (kind > 0).any(dim=1)
    place = entity.long().cumsum(0) - 1
    who = entity.nonzero()[:, 0]
    slot = torch.where(known, known.long().cumsum(0) + UNSEEN - 1, (kind[:, 1] > 0).long())[who]
    trained = block.row_key[known.nonzero()[:, 0]]
    key = torch.cat([torch.arange(UNSEEN, dtype=trained.dtype, device=trained.device), trained])
    user, item = place[pairs.user], place[pairs.item]
    train = block.split.train[pairs.row]
    value = block.y[pairs.row[train]]
    inside = entity[block.adj.row] & entity[block.adj.indices.long()]
    trust = place[block.adj.row[inside]], place[block.adj.indices[inside].long()]
    rows = torch.cat([user[train], item[train], trust[0]])
    columns = torch.cat([item[train], user[train], trust[1]])
    weight = torch.cat([value, value, torch.ones(len(trust[0])).to(value)])
    rated = torch.arange(len(rows), device=rows.device) < 2 * len(value)
    chance = _chances(rows, columns, weight, rated, len(who))
    order = torch.argsort(rows * len(who) + columns)
    pairs_in_order = rows[order], columns[order]
    receiver, sender = (t.cpu() for t in pairs_in_order)
    adj = CSR.from_pairs(receiver, sender, (len(who), len(who)))
    adj, chance = adj.to(rows.device, dtype), chance[order].to(dtype)
    root = (adj.degree.to(dtype) + 1).rsqrt()
    norm = root[pairs_in_order[0]] * root[pairs_in_order[1]]
    summed = torch.zeros(len(who), 2, dtype=dtype, device=rows.device)
    summed.index_add_(0, pairs_in_order[0], norm[:, None] * chance)
    return RatingGraph(
        slot,
        key,
        words_of_rows(block.ids[0], block.row_key[who]),
        kind[who, 1] > 0,
        torch.stack(trust),
        adj,
        chance,
        _with_self(adj, norm, root),
        summed,
        float(value.mean()) if len(value) else 0.0,
        pairs.row,
        user,
        item,
    )


def _chances(rows: Tensor, columns: Tensor, weight: Tensor, rated: Tensor, count: int) -> Tensor:
    """Return how likely a step along each edge is, forth and back, (e, 2) float64.

    Ratings and trust are apart: an end's chances of each sum to 1. Where all weights of an end are
    0, all its steps are alike.
    """
    chances = []
    for end in (rows, columns):
        cell = end * 2 + rated
        total = torch.zeros(2 * count, dtype=torch.float64, device=end.device)
        total.index_add_(0, cell, weight.double())
        number = torch.bincount(cell, minlength=2 * count).double()
        some = total[cell] > 0
        alike = 1 / number[cell]
        chances.append(torch.where(some, weight.double() / total[cell].where(some, 1.0), alike))
    return torch.stack(chances, dim=1)


def _with_self(adj: CSR, norm: Tensor, root: Tensor) -> CSR:
    """Return the edges weighted by `norm` (e,), with squared roots (E,) on the diagonal."""
    import scipy.sparse as sp

    parts = (t.cpu().numpy() for t in (norm, adj.indices, adj.indptr))
    matrix = sp.csr_matrix(tuple(parts), shape=(adj.num_rows, adj.num_cols))
    diagonal = sp.diags_array(np.square(root.cpu().numpy()))
    return CSR.from_scipy(sp.csr_matrix(matrix + diagonal)).to(root.device, root.dtype)
