"""Batches of rows with those who send to them: own rows, and slots of the halo."""

from dataclasses import replace

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import offsets
from silograph.graph.block.block import ClientBlock
from silograph.graph.block.extension import extended
from silograph.graph.csr import CSR
from silograph.nn.conv import Messages
from silograph.nn.neighbors import Drawn, Neighbors, Reached, edges_of
from silograph.nn.stored_rows import Batch, Senders, StoredRows, Surroundings


def surroundings(block: ClientBlock, *, halo: bool = True) -> Surroundings:
    """Return the graph of a block's rows, and of its slots if the halo is wanted."""
    if halo:
        return block.once("surroundings", Surroundings, lambda: _surroundings(block))
    # Kept without the block, which would hold itself, and all that a call to it worked out.
    place, none = block.once("rows alone", tuple, lambda: _alone(block))
    return Surroundings(block, place, place, none)


def _alone(block: ClientBlock) -> tuple[Tensor, Tensor]:
    place = torch.arange(len(block.row_key), device=block.off.device)
    return place, torch.full_like(place, -1)


def _surroundings(block: ClientBlock) -> Surroundings:
    device, n = block.off.device, len(block.row_key)
    place = torch.arange(n, device=device)
    slots = len(block.halo.key)
    place = place + block.halo.off[block.client]
    row = torch.full((n + slots,), -1, device=device)
    row[place] = torch.arange(n, device=device)
    slot = torch.full_like(row, -1)
    slot[row < 0] = torch.arange(slots, device=device)
    if block.source is not None:
        whole = surroundings(block.source[0]).graph
        return Surroundings(whole.called(block.source[1]), place, row, slot)
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    none = block.adj.values.new_zeros(n, 0)
    every = torch.arange(slots, device=device)
    graph = extended(replace(block, x=none), every, block.halo.off, none.new_zeros(slots, 0))
    return Surroundings(graph, place, row, slot)


def whole_batch(block: ClientBlock, around: Surroundings, stored: StoredRows) -> Batch:
    """Return all rows of a block with all edges.

    The last one is kept with the block, in the memory of its edges once more, or twice where slots
    send in later layers only: which slots are known changes in the first rounds only.
    """
    name = ("whole batch", around.graph is block, 0 in stored.halo)
    kept = block.memo.get(name)
    if not isinstance(kept, tuple) or not torch.equal(kept[0], stored.known):
        rows = torch.arange(len(block.row_key), device=block.off.device)
        kept = stored.known, batch_of_edges(block, around, stored, rows, block.off)
        block.memo[name] = kept
    found = kept[1]
    assert isinstance(found, Batch)
    return found


def batch_of_edges(
    block: ClientBlock,
    around: Surroundings,
    stored: StoredRows,
    rows: Tensor,
    off: Tensor,
    *,
    later: bool = True,
) -> Batch:
    """Return some rows (b,) of a block with all their edges.

    `later`: whether sums of stages after the first are wanted, too.
    """
    first = edges_of(block, rows)
    if not later and 0 not in stored.halo:
        alone = surroundings(block, halo=False)
        return _batch(block, alone, stored, rows, off, first, first)
    return _batch(
        block, around, stored, rows, off, first, edges_of(around.graph, around.place[rows])
    )


def drawn_batch(
    block: ClientBlock,
    around: Surroundings,
    stored: StoredRows,
    rows: Tensor,
    off: Tensor,
    neighbors: Neighbors,
    key: Key,
) -> Batch:
    """Return some rows (b,) of a block with edges drawn by key."""
    first = neighbors.draw(block, _reached(rows, off), 0, key, {})
    later = first
    if around.graph is not block:
        later = drawn_around(around, rows, off, neighbors, key)
    return _batch(block, around, stored, rows, off, first, later)


def drawn_around(
    around: Surroundings, rows: Tensor, off: Tensor, neighbors: Neighbors, key: Key
) -> Drawn:
    """Return edges drawn for some rows (b,) of a block among own rows and slots, as `Drawn`."""
    return neighbors.draw(around.graph, _reached(around.place[rows], off), 0, key, {})


def _reached(rows: Tensor, off: Tensor) -> Reached:
    clients = torch.arange(len(off) - 1, device=off.device)
    return Reached(rows, torch.zeros_like(rows), clients, off)


def _batch(
    block: ClientBlock,
    around: Surroundings,
    stored: StoredRows,
    rows: Tensor,
    off: Tensor,
    first: Drawn,
    later: Drawn,
) -> Batch:
    alone = surroundings(block, halo=False)
    with_features = 0 in stored.halo
    shared = _senders(block, around, stored.known, rows, off, later)
    if with_features or around.graph is block:
        return Batch(rows, off, shared, shared)
    return Batch(rows, off, _senders(block, alone, stored.known, rows, off, first), shared)


def _senders(
    block: ClientBlock, around: Surroundings, known: Tensor, rows: Tensor, off: Tensor, drawn: Drawn
) -> Senders:
    """Return who sends along drawn edges, without slots of which no row is there."""
    row, slot = around.row[drawn.neighbor], around.slot[drawn.neighbor]
    position, share = drawn.position, drawn.share
    if bool((slot >= 0).any()):
        kept = (slot < 0) | known[slot.clamp(min=0)]
        if not bool(kept.all()):
            share = _made_up(position, share, kept, len(rows))
            row, slot, position, share = row[kept], slot[kept], position[kept], share[kept]
    own = row >= 0
    senders = _others(len(block.row_key), row[own], rows)
    slots = _others(len(block.halo.key), slot[~own], slot[:0])
    place = torch.empty(len(block.row_key), dtype=torch.int64, device=rows.device)
    place[rows] = torch.arange(len(rows), device=rows.device)
    place[senders] = torch.arange(len(senders), device=rows.device) + len(rows)
    of_slot = torch.empty(len(block.halo.key), dtype=torch.int64, device=rows.device)
    of_slot[slots] = torch.arange(len(slots), device=rows.device) + len(rows) + len(senders)
    column = torch.empty_like(row)
    column[own] = place[row[own]]
    column[~own] = of_slot[slot[~own]]
    total = len(rows) + len(senders) + len(slots)
    starts = offsets(torch.bincount(position, minlength=len(rows)))
    degree = around.graph.adj.degree[around.place].to(share.dtype)[:, None]
    mine = degree[rows]
    return Senders(
        rows=senders,
        off=torch.searchsorted(senders, block.off),
        slots=slots,
        slot_off=torch.searchsorted(slots, block.halo.off),
        adj=CSR(starts, *_in_order(position * total + column, column, share), total),
        messages=Messages(_no_edges(rows), False, mine, mine, None, off, off),
        degree=degree[senders],
        num_slots=len(block.halo.key),
    )


def _in_order(place: Tensor, column: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns and shares (e,) of edges in the order of their places, which are distinct."""
    if bool((place.diff() > 0).all()):  # as they are where all rows are worked out
        return column, share
    order = place.argsort()
    return column[order], share[order]


def _no_edges(rows: Tensor) -> CSR:
    """Return a matrix (b, b) without entries: sums are made elsewhere."""
    starts = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
    return CSR(starts, rows[:0], None, len(rows))


def _made_up(position: Tensor, share: Tensor, kept: Tensor, rows: int) -> Tensor:
    """Return shares (e,) with which the edges that are kept stand for all of their receiver's."""
    total = share.new_zeros(rows).index_add_(0, position, share)
    there = share.new_zeros(rows).index_add_(0, position[kept], share[kept])
    return share * (total / there.clamp(min=torch.finfo(share.dtype).tiny))[position]


def _others(count: int, named: Tensor, but: Tensor) -> Tensor:
    """Return those of `count` rows that are named, ascending, each once, but for some."""
    mask = torch.zeros(count, dtype=torch.bool, device=named.device)
    mask[named] = True
    mask[but] = False
    return mask.nonzero()[:, 0]
