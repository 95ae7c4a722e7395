"""A pass over some rows of a client that reads stored rows of all others: one hop at any depth.

What enters a stage of the rows of a batch is worked out; what enters it of their other neighbors
was stored before, of own rows and of halo slots. So memory and work of a batch are those of one
hop, however many stages there are, and no gradient flows through a stored row.

Fey, Lenssen, Weichert and Leskovec, "GNNAutoScale: scalable and expressive graph neural networks
via historical embeddings", ICML 2021, for one machine; Li et al., "Federated graph learning with
adaptive importance-based sampling", AAAI 2025, eq. 6, across silos.

Rows of a slot are scaled by their owner, by its own degree, so that no degree travels. Edges to a
slot of which no row is there yet are left out, and the receiver's other edges stand for them.

Where nothing is dropped, slots' rows are summed before they are multiplied by the weights, as maps
are linear: where nodes have many neighbors in other silos there are far more slots than rows.

C: clients. n: rows. S: halo slots. b: rows of a batch. o: own rows that only send. h: slots that
send. I, O: width before and after a stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import offsets
from silograph.core.work import report_entries, report_rows
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.graph.csr import CSR
from silograph.nn.conv import Conv, Messages, convolve
from silograph.nn.forward import Staged, after_dropout, leave
from silograph.nn.segment import gradients, sparse_product
from silograph.nn.stage_halves import scales_of


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The rows and halo slots of a block as rows of one graph, without features.

    Attributes:
        graph: a client's slots come behind its own rows; without the halo, the block itself.
        place: (n,) int64 of the block's rows in the graph.
        row: (m,) int64 row of the block that a row of the graph is, -1 for a slot.
        slot: (m,) int64 slot that it is, -1 for a row of the block.
    """

    graph: ClientBlock
    place: Tensor
    row: Tensor
    slot: Tensor


@dataclass(frozen=True, eq=False)
class StoredRows:
    """What is stored of rows, by the number of the stage that it enters.

    Attributes:
        own: (n, I) of the block's rows.
        halo: (S, I) of slots, scaled by their owners.
        known: (S,) bool slots of which rows are there.
    """

    own: Mapping[int, Tensor]
    halo: Mapping[int, Tensor]
    known: Tensor


@dataclass(frozen=True, eq=False)
class Senders:
    """Who sends to the rows of a batch in a stage, besides themselves.

    Attributes:
        rows: (o,) int64 own rows, ascending.
        off: (C + 1,) of each client.
        slots: (h,) int64 slots, ascending.
        slot_off: (C + 1,) of each client.
        adj: (b, b + o + h) how many edges each drawn one stands for.
        messages: what convolutions know of the batch's own rows.
        degree: (o, 1) floating point, neighbors of `rows`.
        num_slots: S, of the block.
    """

    rows: Tensor
    off: Tensor
    slots: Tensor
    slot_off: Tensor
    adj: CSR
    messages: Messages
    degree: Tensor
    num_slots: int

    @cached_property
    def parts(self) -> tuple[CSR, CSR]:
        """`adj` as what own rows send (b, b + o), and what slots of the block do (b, S)."""
        inside = self.adj.num_cols - len(self.slots)
        of_slots = self.adj.indices >= inside
        columns = self.slots[self.adj.indices[of_slots].long() - inside]
        return _part(self.adj, ~of_slots, inside), _part(
            self.adj, of_slots, self.num_slots, columns
        )


def _part(adj: CSR, kept: Tensor, columns: int, indices: Tensor | None = None) -> CSR:
    """Return the entries of a matrix in the mask (nnz,), maybe with other columns."""
    starts = offsets(kept.long())[adj.indptr.long()]
    values = None if adj.values is None else adj.values[kept]
    return CSR(starts, adj.indices[kept].long() if indices is None else indices, values, columns)


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a block that are worked out together.

    Attributes:
        rows: (b,) int64, by client.
        off: (C + 1,) of each client.
        first: who sends to them in the stage that features enter.
        later: in all later ones.
    """

    rows: Tensor
    off: Tensor
    first: Senders
    later: Senders


def stored_stages(model: Staged) -> tuple[int, ...]:
    """Return the stages whose neighbors' rows are stored: all with a sum, but that of features."""
    found = (number for number, stage in enumerate(model.stages) if number and stage.conv.sums)
    return tuple(found)


def batch_pass(
    model: Staged,
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    x: Rows,
    batch: Batch,
    stored: StoredRows,
    key: Key | None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return logits (b, K) of a batch, and what enters each stage of `stored_stages`, (b, I).

    Args:
        model: the shape; silos can share its sums.
        weights: shared by all clients, or (C, ...), or used rows of the first ones.
        block: C clients, each of which has rows in the batch, or whose weights are shared.
        x: features of all its rows, in the form that the weights want.
        batch: the rows.
        stored: rows of the others.
        key: key of the dropout draws; None turns dropout off.
    """
    h, entered = _passed(model, weights, block, x, batch, stored, key, len(model.stages))
    assert isinstance(h, Tensor)  # at least one stage
    return h, entered


def rows_entering(
    model: Staged,
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    x: Rows,
    batch: Batch,
    stored: StoredRows,
) -> dict[int, Tensor]:
    """Return what enters each stage of `stored_stages` of a batch (b, I), as `batch_pass` does."""
    last = max(stored_stages(model), default=0)
    return _passed(model, weights, block, x, batch, stored, None, last + 1)[1]


def _passed(
    model: Staged,
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    x: Rows,
    batch: Batch,
    stored: StoredRows,
    key: Key | None,
    until: int,
) -> tuple[Rows, dict[int, Tensor]]:
    """Pass through the stages before `until`; of the last, if others follow, only what enters."""
    wanted, entered = stored_stages(model), dict[int, Tensor]()
    h, origin = _rows_at(x, batch.rows, batch.off), None
    row_key = block.row_key[batch.rows]
    for number, stage in enumerate(model.stages):
        senders = batch.later if number else batch.first
        params = {
            name.removeprefix(f"{number}."): w
            for name, w in weights.items()
            if name.startswith(f"{number}.")
        }
        if number in wanted:
            assert isinstance(h, Tensor)  # only features can be sparse
            entered[number] = h.detach()
        if number + 1 == until < len(model.stages):
            break
        if stage.teleport and origin is None:
            assert isinstance(h, Tensor)  # linear stages come first
            origin = h
        inputs = after_dropout(stage, number, h, row_key, batch.off, key)
        others = _other_inputs(model, number, block, x, senders, stored, key)
        dropped = key is not None
        out = _convolved(stage.conv, params, inputs, others, senders, dropped=dropped)
        h = leave(stage, out, h, origin, senders.messages)
    return h, entered


def _rows_at(x: Rows, rows: Tensor, off: Tensor) -> Rows:
    if isinstance(x, Tensor):
        return x[rows]
    return SparseRows(x.csr.select_rows(rows), off, feature=x.feature)


def _other_inputs(
    model: Staged,
    number: int,
    block: ClientBlock,
    x: Rows,
    senders: Senders,
    stored: StoredRows,
    key: Key | None,
) -> tuple[Rows, Tensor | None]:
    """Return what enters a stage of the other own rows that send, (o, I), and of slots, (h, I).

    Without a key for dropout it is what is stored of all slots, (S, I).
    """
    stage = model.stages[number]
    if not stage.conv.sums:
        return x, None
    own = _rows_at(x if number == 0 else stored.own[number], senders.rows, senders.off)
    keys = block.row_key[senders.rows]
    own = after_dropout(stage, number, own, keys, senders.off, key)
    if number not in stored.halo or key is None:
        return own, stored.halo.get(number)
    keys = block.halo.key[senders.slots]
    rows = stored.halo[number][senders.slots]
    halo = after_dropout(stage, number, rows, keys, senders.slot_off, key)
    assert isinstance(halo, Tensor)  # as it went in
    return own, halo


def _convolved(
    conv: Conv,
    params: Mapping[str, Tensor],
    x: Rows,
    others: tuple[Rows, Tensor | None],
    senders: Senders,
    *,
    dropped: bool,
) -> Tensor:
    """Return one convolution of the rows of a batch, (b, O).

    `others` are as `_other_inputs` returned them, `dropped` is whether with a key for dropout.
    """
    messages = senders.messages
    if not conv.sums:
        return convolve(conv, params, x, messages)
    scales, off = scales_of(conv), messages.off
    z, other = conv.map(params, x, off), conv.map(params, others[0], senders.off)
    parts = [
        _scaled(z, scales.before(messages.sender), off),
        _scaled(other, scales.before(senders.degree), senders.off),
    ]
    if others[1] is None:
        heard = _summed(senders.adj, torch.cat(parts), off)
    elif dropped:
        mapped = conv.map(params, others[1], senders.slot_off)
        heard = _summed(senders.adj, torch.cat([*parts, mapped]), off)
    else:
        near, far = senders.parts
        mapped = conv.map(params, _summed(far, others[1], off), off)
        report_rows(off, z.shape[1])
        heard = _summed(near, torch.cat(parts), off) + mapped
    s, work = _scaled(heard, scales.after(messages.receiver), off), 1 + gradients(z)
    own = scales.itself(messages.receiver)
    if own is not None:
        report_rows(off, 2 * z.shape[1] * work)
        s = s + own * z
    return conv.finish(params, x, s, messages)


def _summed(adj: CSR, x: Tensor, off: Tensor) -> Tensor:
    """Return sums (b, I) of rows (s, I) by a matrix (b, s), and report their work."""
    report_entries(adj.indptr, off, 2 * x.shape[1] * (1 + gradients(x)))
    return sparse_product(adj, x)


def _scaled(z: Tensor, scale: Tensor | None, off: Tensor) -> Tensor:
    if scale is None:
        return z
    report_rows(off, z.shape[1] * (1 + gradients(z)))
    return scale * z


def to_send(
    model: Staged, number: int, around: Surroundings, rows: Tensor, x: Tensor, client_off: Tensor
) -> Tensor:
    """Return what rows (k,) send to other silos in a stage, x (k, I) with their own scale."""
    degree = around.graph.adj.degree[around.place[rows]].to(x.dtype)[:, None]
    return _scaled(x, scales_of(model.stages[number].conv).before(degree), client_off)
