"""Stages of a pass whose neighbors are drawn one by one, in all silos.

A client keeps every neighbor of a row with a probability of its own for each stage (Chen, Li,
Miyazaki and Wu, "FedGraph: Federated graph learning with intelligent sampling", IEEE TPDS 2022,
algorithm 2). Neighbors in other silos are kept alike, where a stage is shared; their rows come from
their owners. A kept neighbor stands for d / k where k of d were kept (eq. 7), whose expectation is
1 - (1 - p)^d of the sum, or for 1 / p, which is unbiased.

Draws are hashes of the key and of both rows' keys, so a row that other silos want has the same
neighbors as in its own client's batch.

C: clients. n: rows of the block. r: rows that leave a stage. s: rows that enter it. k: halo slots
whose rows a stage needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from silograph.core.key import Key, mix_words, signed
from silograph.core.payload import Ragged, offsets, owners
from silograph.core.work import report_entries
from silograph.graph.block.block import ClientBlock
from silograph.graph.csr import CSR
from silograph.nn.conv import Messages
from silograph.nn.forward import Pass
from silograph.nn.mini_batches import entering, one_stage
from silograph.nn.neighbors import Drawn, Reached, edge_words, edges_of, uniform_of
from silograph.nn.segment import sparse_product


@dataclass(frozen=True, eq=False)
class StageDraw:
    """How a stage's neighbors are drawn.

    Attributes:
        sums: whether it sums over neighbors at all.
        keep: (C,) float64 probability with which each client keeps a neighbor.
        shared: whether neighbors in other silos count: in the draw, and in the degrees that
            convolutions scale by.
        by_degree: whether a kept neighbor stands for d / k; else for 1 / p.
    """

    sums: bool
    keep: Tensor
    shared: bool
    by_degree: bool


@dataclass(frozen=True, eq=False)
class SampledStage:
    """What a stage of a pass needs to know.

    Attributes:
        leaving: the rows that leave it.
        entering: the rows that enter it: those, their kept neighbors, and those `wanted`.
        wanted: (m,) int64 rows whose messages other silos want.
        messages: among own rows.
        slots: (k,) int32 halo slots whose rows it needs, as each client counts, ascending.
        outer: (r, k) what each of them stands for.
        degree: (n, 1) in the run's dtype, what its convolution takes for degrees.
        inner: the kept neighbors that are own rows.
    """

    leaving: Reached
    entering: Reached
    wanted: Tensor
    messages: Messages
    slots: Ragged
    outer: CSR
    degree: Tensor
    inner: Drawn


def seeds(block: ClientBlock, most: Tensor, key: Key) -> Reached:
    """Return at most so many (C,) training rows of each client, drawn without replacement."""
    train = block.split.train.nonzero()[:, 0]
    words = key.words(block.row_key[train], 1)[:, 0]
    order = words.argsort()
    order = order[block.client[train][order].argsort(stable=True)]
    client = block.client[train][order]
    rank = torch.arange(len(order), device=order.device) - offsets(block.num_train)[client]
    rows = train[order[rank < most[client]]].sort().values
    clients = torch.arange(block.num_clients, device=rows.device)
    return Reached(rows, torch.zeros_like(rows), clients, offsets(_count(block, rows)))


def _count(block: ClientBlock, rows: Tensor) -> Tensor:
    return torch.bincount(block.client[rows], minlength=block.num_clients)


def sampled_stage(
    block: ClientBlock, leaving: Reached, hop: int, how: StageDraw, wanted: Tensor, key: Key
) -> SampledStage:
    """Draw the neighbors of the rows that leave a stage.

    Args:
        block: C clients.
        leaving: the rows.
        hop: 0 in the last stage.
        how: they are drawn.
        wanted: (m,) int64 rows that have to enter besides.
        key: of the stage.
    """
    degree = block.adj.degree + block.halo.adj.degree if how.shared else block.adj.degree
    inner, cross = _kept(block, leaving.rows, how, degree, key)
    after, messages = one_stage(block, leaving, inner, hop, wanted)
    slots, column = torch.unique(cross.neighbor, return_inverse=True)
    first = block.halo.off[:-1][owners(block.halo.off)]
    named = Ragged((slots - first[slots]).int(), torch.searchsorted(slots, block.halo.off))
    order = (cross.position * len(slots) + column).argsort()
    starts = offsets(torch.bincount(cross.position, minlength=len(leaving.rows)))
    outer = CSR(starts, column[order], cross.share[order], len(slots))
    scale = degree.to(inner.share.dtype)[:, None]
    return SampledStage(leaving, after, wanted, messages, named, outer, scale, inner)


def with_wanted(block: ClientBlock, stage: SampledStage, hop: int, wanted: Tensor) -> SampledStage:
    """Return a stage with its neighbors as they are drawn, that other rows have to enter besides.

    Args:
        block: C clients.
        stage: as drawn.
        hop: 0 in the last stage.
        wanted: (m,) int64 rows, in place of those of the stage.
    """
    after, messages = one_stage(block, stage.leaving, stage.inner, hop, wanted)
    return replace(stage, entering=after, wanted=wanted, messages=messages)


def _kept(
    block: ClientBlock, rows: Tensor, how: StageDraw, degree: Tensor, key: Key
) -> tuple[Drawn, Drawn]:
    """Return the kept neighbors of rows (r,): own ones, and those in other silos as slots."""
    every = edges_of(block, rows)
    none = Drawn(rows[:0], rows[:0], every.share[:0])
    if not how.sums:
        return replace(none, degree=degree), none
    chance = how.keep[block.client[rows]]
    kept = uniform_of(edge_words(block, rows, key, every)) <= chance[every.position]
    position, neighbor = every.position[kept], every.neighbor[kept]
    far, slot = position[:0], neighbor[:0]
    if how.shared:
        edges = block.halo.adj.select_rows(rows)
        hashed = mix_words(block.row_key[rows] ^ signed(key.value))
        words = mix_words(hashed[edges.row] ^ block.halo.key[edges.indices.long()])
        kept = uniform_of(words) <= chance[edges.row]
        far, slot = edges.row[kept], edges.indices.long()[kept]
    if how.by_degree:
        count = torch.bincount(torch.cat([position, far]), minlength=len(rows))
        share = degree[rows].double() / count.clamp(min=1)
    else:
        share = 1 / chance
    share = share.to(every.share.dtype)
    return Drawn(position, neighbor, share[position], degree), Drawn(far, slot, share[far])


def sampled_inputs(
    block: ClientBlock, stages: Sequence[SampledStage], received: Mapping[int, Tensor]
) -> Pass:
    """Return the pass through drawn stages, the first one first.

    Args:
        block: C clients.
        stages: of the pass.
        received: by number of a stage, rows (k, O) of its slots, scaled by their owners.
    """
    messages = []
    for number, stage in enumerate(stages):
        found = stage.messages
        if number in received:
            rows = received[number]
            report_entries(stage.outer.indptr, found.off, 2 * rows.shape[1])
            found = replace(found, beside=sparse_product(stage.outer, rows))
        messages.append(found)
    keys = tuple(block.row_key[stage.entering.rows] for stage in stages)
    return Pass(entering(block.x, stages[0].entering), tuple(messages), keys)
