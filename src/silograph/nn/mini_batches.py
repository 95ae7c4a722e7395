"""Mini-batches of training nodes with drawn neighbors, for a block of one client.

Hamilton, Ying and Leskovec, "Inductive representation learning on large graphs", NeurIPS 2017,
algorithm 2. What we changed: neighbors are drawn without replacement, and a drawn edge stands for
degree / drawn of them, so the sum over neighbors is unbiased for every convolution.

Draws are hashes of the keys of the rows, so they depend on no numbering.

n: rows. L: stages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from silograph.core.key import Key, mix_words, signed
from silograph.core.payload import offsets
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.graph.csr import CSR
from silograph.nn.conv import Messages
from silograph.nn.model import Pass


def batches(block: ClientBlock, size: int | None, key: Key) -> list[Tensor]:
    """Return the training rows of one client in batches, in an order drawn anew for each key."""
    train = block.split.train.nonzero()[:, 0]
    if size is None or size >= len(train):
        return [train]
    order = key.fold("order").words(block.row_key[train], 1)[:, 0].argsort()
    return list(train[order].split(size))


def draw_edges(
    block: ClientBlock, rows: Tensor, fanout: int | None, key: Key
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw at most `fanout` neighbors of each row, without replacement; None: all.

    Returns:
        Position among `rows`, neighbor, and how many edges the drawn one stands for.
    """
    edges = block.adj.select_rows(rows)
    position, neighbor = edges.row, edges.indices.long()
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    share = torch.ones_like(position, dtype=block.adj.values.dtype)
    if fanout is None:
        return position, neighbor, share
    hashed = mix_words(block.row_key[rows] ^ signed(key.value))
    score = mix_words(hashed[position] ^ block.row_key[neighbor])
    order = score.argsort()
    order = order[position[order].argsort(stable=True)]
    rank = torch.arange(len(order), device=rows.device) - edges.indptr[:-1].long()[position[order]]
    kept = order[rank < fanout]
    degree = edges.degree[position[kept]].to(share.dtype)
    return position[kept], neighbor[kept], (degree / fanout).clamp(min=1)


def sampled_pass(
    block: ClientBlock,
    x: Tensor | SparseRows,
    seeds: Tensor,
    fanout: tuple[int, ...],
    key: Key,
    sums: Sequence[bool],
) -> Pass:
    """Return the pass that ends at the seeds, along edges drawn from there.

    Args:
        block: one client.
        x: its features, in the form that the weights want.
        seeds: rows whose logits are wanted.
        fanout: neighbors drawn by hop, the seeds' first, 0 for all; one for each stage that sums.
        key: key of the step.
        sums: (L,) whether a stage sums over neighbors; else none are drawn.
    """
    rows = seeds
    keys: list[Tensor] = []
    messages: list[Messages] = []
    hops = iter(fanout)
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    for number, hears in reversed(tuple(enumerate(sums))):
        drawn = rows[:0], rows[:0], block.adj.values[:0]
        if hears:
            drawn = draw_edges(block, rows, next(hops) or None, key.fold("neighbors", number))
        senders, heard = _one_stage(block, rows, *drawn)
        messages.insert(0, heard)
        keys.insert(0, block.row_key[senders])
        rows = senders
    entering: Tensor | SparseRows
    if isinstance(x, SparseRows):
        off = torch.tensor([0, len(rows)], device=rows.device)
        entering = SparseRows(x.csr.select_rows(rows), off)
    else:
        entering = x[rows]
    return Pass(entering, tuple(messages), tuple(keys))


def _one_stage(
    block: ClientBlock, rows: Tensor, position: Tensor, neighbor: Tensor, share: Tensor
) -> tuple[Tensor, Messages]:
    """Return the rows that enter a stage, those that leave it first, and the stage's messages.

    Args:
        block: one client.
        rows: (r,) int64 rows that leave the stage.
        position: (e,) int64 position among `rows` of every edge.
        neighbor: (e,) int64 its other end.
        share: (e,) how many edges it stands for.
    """
    device = rows.device
    place = torch.full((block.adj.num_rows,), -1, device=device)
    place[rows] = torch.arange(len(rows), device=device)
    new = neighbor[place[neighbor] < 0].unique()
    place[new] = torch.arange(len(new), device=device) + len(rows)
    senders = torch.cat([rows, new])
    order = (position * len(senders) + place[neighbor]).argsort()
    starts = offsets(torch.bincount(position, minlength=len(rows)))
    degree = block.adj.degree.to(share.dtype)[:, None]
    messages = Messages(
        adj=CSR(starts, place[neighbor][order], share[order], len(senders)),
        symmetric=False,
        sender=degree[senders],
        receiver=degree[rows],
        own=torch.arange(len(rows), device=device),
        sender_off=torch.tensor([0, len(senders)], device=device),
        off=torch.tensor([0, len(rows)], device=device),
    )
    return senders, messages
