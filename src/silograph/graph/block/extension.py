"""Blocks with more rows, without labels: halo nodes whose features are known, made neighbors.

C: clients. n: own rows. k: added rows. F: features.
"""

import math

import scipy.sparse as sp
import torch
from torch import Tensor

from silograph.core.key import GOLDEN, mix_words, signed
from silograph.core.payload import owners
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.graph.block.halo import Halo
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING


def extended(block: ClientBlock, slot: Tensor, slot_off: Tensor, x: Tensor) -> ClientBlock:
    """Return the block with some halo nodes as rows, each client's behind its own.

    They have the features given, the edges to the client's own rows, no labels, and are in no part
    of the split. The halo stays as it was.

    Args:
        block: C clients.
        slot: (k,) int64 halo slots of the block, ascending.
        slot_off: (C + 1,) int64 of each client.
        x: (k, F) their features.
    """
    edges = block.halo.adj.transposed.select_rows(slot)  # (k, n)
    assert edges.values is not None  # as of `Halo.adj`
    ends = edges.indices.long(), edges.row, edges.values
    return _with_rows(block, slot_off, ends, x, block.halo.key[slot])


def with_neighbors(block: ClientBlock, host: Tensor, off: Tensor, x: Tensor) -> ClientBlock:
    """Return the block with new rows behind each client's own, every one beside one of these.

    They have the features given, no labels, and are in no part of the split. The halo stays as it
    was.

    Args:
        block: C clients.
        host: (k,) int64 row of the block that each is a neighbor of, ascending.
        off: (C + 1,) int64 new rows of each client.
        x: (k, F) their features.
    """
    added = torch.arange(len(host), device=host.device)
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    ends = host, added, block.adj.values.new_ones(len(host))
    return _with_rows(block, off, ends, x, neighbor_keys(block.row_key, host))


def neighbor_keys(row_key: Tensor, host: Tensor) -> Tensor:
    """Return the row keys of new neighbors (k,) of rows `host` (k,), ascending; row_key (n,)."""
    first = torch.searchsorted(host, host)
    nth = torch.arange(len(host), device=host.device) - first
    return mix_words(row_key[host] + (nth + 1) * signed(GOLDEN))


def _with_rows(
    block: ClientBlock,
    new_off: Tensor,
    ends: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    key: Tensor,
) -> ClientBlock:
    """Return the block with rows behind each client's own.

    Args:
        block: C clients.
        new_off: (C + 1,) int64 new rows of each.
        ends: (E,) rows of the block and (E,) new rows, the two ends of each new edge; (E,) weights.
        x: (k, F) features of the new rows.
        key: (k,) int64 their row keys.
    """
    halo, n = block.halo, len(block.row_key)
    off = block.off + new_off
    own = torch.arange(n, device=off.device) + new_off[block.client]
    added = torch.arange(len(key), device=off.device) + block.off[1:][owners(new_off)]
    total = n + len(key)
    here, there = own[ends[0]], added[ends[1]]
    inner = own[block.adj.row], own[block.adj.indices.long()]
    rows = torch.cat([inner[0], here, there])
    columns = torch.cat([inner[1], there, here])
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    assert halo.adj.values is not None
    device, dtype = off.device, block.adj.values.dtype
    weights = torch.cat([block.adj.values, ends[2], ends[2]]).cpu()
    adj = CSR.from_pairs(rows.cpu(), columns.cpu(), (total, total), weights).to(device, dtype)
    touching = own[halo.adj.row].cpu(), halo.adj.indices.long().cpu()
    crossing = (total, halo.adj.num_cols)
    outer = CSR.from_pairs(*touching, crossing, halo.adj.values.cpu()).to(device, dtype)
    missing = math.nan if block.y.is_floating_point() else MISSING
    y = block.y.new_full((total, *block.y.shape[1:]), missing)
    y[own] = block.y
    row_key = block.row_key.new_empty(total)
    row_key[own], row_key[added] = block.row_key, key
    return ClientBlock(
        ids=block.ids,
        off=off,
        x=_features(block, own, added, x, off),
        y=y,
        split=block.split.map(lambda mask: _mask(mask, own, total)),
        adj=adj,
        row_key=row_key,
        halo=Halo(halo.off, outer, halo.key, own[halo.boundary], halo.boundary_off),
    )


def _mask(mask: Tensor, own: Tensor, total: int) -> Tensor:
    new = mask.new_zeros(total)
    new[own] = mask
    return new


def _features(block: ClientBlock, own: Tensor, added: Tensor, x: Tensor, off: Tensor) -> Rows:
    if not isinstance(block.x, SparseRows):
        dense = x.new_empty(len(own) + len(added), x.shape[1])
        dense[own], dense[added] = block.x, x
        return dense
    order = torch.empty(len(own) + len(added), dtype=torch.int64)
    order[torch.cat([own, added]).cpu()] = torch.arange(len(order))
    given = block.x.csr.scipy(x.cpu().numpy().dtype)
    rows = sp.vstack([given, sp.csr_matrix(x.cpu().numpy())]).tocsr()[order.numpy()]
    return SparseRows(CSR.from_scipy(rows).to(off.device, x.dtype), off)
