"""Blocks with halo nodes whose features are known: they become rows without labels.

C: clients. n: own rows. k: added rows. F: features.
"""

import math

import scipy.sparse as sp
import torch
from torch import Tensor

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
    halo, n = block.halo, len(block.row_key)
    off = block.off + slot_off
    own = torch.arange(n, device=off.device) + slot_off[block.client]
    added = torch.arange(len(slot), device=off.device) + block.off[1:][owners(slot_off)]
    total = n + len(slot)
    edges = halo.adj.transposed.select_rows(slot)  # (k, n)
    ends = own[edges.indices.long()], added[edges.row]
    inner = own[block.adj.row], own[block.adj.indices.long()]
    rows = torch.cat([inner[0], ends[0], ends[1]])
    columns = torch.cat([inner[1], ends[1], ends[0]])
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    device, dtype = off.device, block.adj.values.dtype
    adj = CSR.from_pairs(rows.cpu(), columns.cpu(), (total, total)).to(device, dtype)
    touching = own[halo.adj.row].cpu(), halo.adj.indices.long().cpu()
    outer = CSR.from_pairs(*touching, (total, halo.adj.num_cols)).to(device, dtype)
    missing = math.nan if block.y.is_floating_point() else MISSING
    y = block.y.new_full((total, *block.y.shape[1:]), missing)
    y[own] = block.y
    row_key = block.row_key.new_empty(total)
    row_key[own], row_key[added] = block.row_key, halo.key[slot]
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
