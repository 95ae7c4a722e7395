"""A pass over some rows of a client that reads stored rows of all others: one hop at any depth.

The inputs of a stage are computed for the rows of the batch. For their other neighbors, own rows
and halo slots, they are read from storage. So memory and work of a batch are those of one hop,
however many stages there are, and no gradient flows through a stored row.

Fey, Lenssen, Weichert and Leskovec, "GNNAutoScale: scalable and expressive graph neural networks
via historical embeddings", ICML 2021, for one machine; Li et al., "Federated graph learning with
adaptive importance-based sampling", AAAI 2025, eq. 6, across silos.

Rows of a slot are scaled by their owner, by its own degree, so that no degree travels. Edges to a
slot whose row has not been received yet are left out; the receiver's other edges stand for them.

Where nothing is dropped, slots' rows are summed before they are multiplied by the weights, as maps
are linear: where nodes have many neighbors in other silos there are far more slots than rows.

C: clients. n: rows. S: halo slots. b: rows of a batch. o: own rows that only send. h: slots that
send. I, O: width before and after a stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Ragged, Stacked, from_bases, offsets, take_all
from silograph.core.work import report_each, report_entries, report_rows
from silograph.graph.block.block import ClientBlock, Rows, SparseRows, extended
from silograph.graph.csr import CSR
from silograph.nn.conv import Conv, Messages, Params, convolve
from silograph.nn.fit import (
    LOSS_FLOPS,
    Training,
    TrainingFields,
    copy_start,
    features_for,
    own_copy,
    patched,
    put_all,
    start_fields,
    starts_compact,
    stays_without_data,
    untouched_rows_after,
)
from silograph.nn.forward import Staged, after_dropout, leave
from silograph.nn.mini_batches import Drawn, Neighbors, Reached, edges_of
from silograph.nn.model import scales_of
from silograph.nn.segment import gradients, sparse_product
from silograph.task.registry import task_of


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The rows and halo slots of a block as rows of one graph, without features.

    Attributes:
        graph: the slots of a client follow its own rows; without the halo, the block itself.
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
    """Stored rows by the number of the stage that they enter.

    Attributes:
        own: (n, I) of the block's rows.
        halo: (S, I) of slots, scaled by their owners.
        known: (S,) bool, slots whose rows have been received.
    """

    own: Mapping[int, Tensor]
    halo: Mapping[int, Tensor]
    known: Tensor


@dataclass(frozen=True, eq=False)
class Senders:
    """The rows and slots that send to the rows of a batch in a stage, besides these themselves.

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
        num_own = self.adj.num_cols - len(self.slots)
        is_slot = self.adj.indices >= num_own
        columns = self.slots[self.adj.indices[is_slot].long() - num_own]
        return _masked_matrix(self.adj, ~is_slot, num_own), _masked_matrix(
            self.adj, is_slot, self.num_slots, columns
        )


def _masked_matrix(adj: CSR, mask: Tensor, columns: int, indices: Tensor | None = None) -> CSR:
    """Return the entries of a matrix in the mask (nnz,), maybe with other columns."""
    starts = offsets(mask.long())[adj.indptr.long()]
    values = None if adj.values is None else adj.values[mask]
    return CSR(starts, adj.indices[mask].long() if indices is None else indices, values, columns)


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a block that are computed together.

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
    stages = (number for number, stage in enumerate(model.stages) if number and stage.conv.sums)
    return tuple(stages)


def batch_pass(
    model: Staged,
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    x: Rows,
    batch: Batch,
    stored: StoredRows,
    key: Key | None,
    first_outputs: Tensor | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return logits (b, K) of a batch, and its inputs (b, I) of each of the `stored_stages`.

    Args:
        model: the shape; silos can share its sums.
        weights: shared by all clients, or (C, ...), or used rows of the first ones.
        block: C clients, each of which has rows in the batch, or whose weights are shared.
        x: features of all its rows, in the form of the weights.
        batch: the rows.
        stored: rows of the others.
        key: key of the dropout draws; None turns dropout off.
        first_outputs: (b, O) of the first stage, if they are computed already.
    """
    until = len(model.stages)
    h, entered = _pass_until(model, weights, block, x, batch, stored, key, until, first_outputs)
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
    """Return a batch's inputs (b, I) of each of the `stored_stages`, as `batch_pass` does."""
    last = max(stored_stages(model), default=0)
    return _pass_until(model, weights, block, x, batch, stored, None, last)[1]


def _pass_until(
    model: Staged,
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    x: Rows,
    batch: Batch,
    stored: StoredRows,
    key: Key | None,
    until: int,
    first_outputs: Tensor | None = None,
) -> tuple[Rows, dict[int, Tensor]]:
    """Pass through the stages before `until`; if it is a stage, note what enters it."""
    stages_stored, entered = stored_stages(model), dict[int, Tensor]()
    h, origin = _select_rows(x, batch.rows, batch.off), None
    row_key = block.row_key[batch.rows]
    for number, stage in enumerate(model.stages):
        if number == 0 and first_outputs is not None:
            h = first_outputs
            continue
        senders = batch.later if number else batch.first
        params = {
            name.removeprefix(f"{number}."): w
            for name, w in weights.items()
            if name.startswith(f"{number}.")
        }
        if number in stages_stored:
            assert isinstance(h, Tensor)  # only features can be sparse
            entered[number] = h.detach()
        if number == until:
            break
        if stage.teleport and origin is None:
            assert isinstance(h, Tensor)  # linear stages come first
            origin = h
        inputs = after_dropout(stage, number, h, row_key, batch.off, key)
        others = _other_inputs(model, number, block, x, senders, stored, key)
        dropped = key is not None
        out = _convolve(stage.conv, params, inputs, others, senders, dropped=dropped)
        h = leave(stage, out, h, origin, senders.messages)
    return h, entered


def _select_rows(x: Rows, rows: Tensor, off: Tensor) -> Rows:
    total = len(x) if isinstance(x, Tensor) else x.csr.num_rows
    if len(rows) == total and torch.equal(rows, torch.arange(total, device=rows.device)):
        return x
    if isinstance(x, Tensor):
        return x.index_select(0, rows)
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
    """Return a stage's inputs of other own rows that send, (o, I), and of slots, (h, I).

    Without a key for dropout the latter are the stored rows of all slots, (S, I).
    """
    stage = model.stages[number]
    if not stage.conv.sums:
        return x, None
    own_rows = _select_rows(x if number == 0 else stored.own[number], senders.rows, senders.off)
    keys = block.row_key[senders.rows]
    own_rows = after_dropout(stage, number, own_rows, keys, senders.off, key)
    if number not in stored.halo or key is None:
        return own_rows, stored.halo.get(number)
    keys = block.halo.key[senders.slots]
    rows = stored.halo[number].index_select(0, senders.slots)
    halo = after_dropout(stage, number, rows, keys, senders.slot_off, key)
    assert isinstance(halo, Tensor)  # as it went in
    return own_rows, halo


def _convolve(
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
    z = conv.map(params, x, off)
    parts = [_scale_rows(z, scales.sender_scale(messages.sender), off)]
    if len(senders.rows):
        other = conv.map(params, others[0], senders.off)
        parts.append(_scale_rows(other, scales.sender_scale(senders.degree), senders.off))
    if others[1] is None:
        total = _sum_rows(senders.adj, _join(parts), off)
    elif dropped:
        mapped = conv.map(params, others[1], senders.slot_off)
        total = _sum_rows(senders.adj, torch.cat([*parts, mapped]), off)
    else:
        own_part, slot_part = senders.parts
        mapped = conv.map(params, _sum_rows(slot_part, others[1], off), off)
        report_rows(off, z.shape[1])
        total = _sum_rows(own_part, _join(parts), off)
        total = total + mapped if gradients(total, mapped) else total.add_(mapped)
    scale = scales.receiver_scale(messages.receiver)
    s, work = _scale_rows(total, scale, off, in_place=True), 1 + gradients(z)
    own_scale = scales.itself(messages.receiver)
    if own_scale is not None:
        report_rows(off, 2 * z.shape[1] * work)
        s = s + own_scale * z
    return conv.finish(params, x, s, messages)


def _sum_rows(adj: CSR, x: Tensor, off: Tensor) -> Tensor:
    """Return sums (b, I) of rows (s, I) by a matrix (b, s), and report their work."""
    report_entries(adj.indptr, off, 2 * x.shape[1] * (1 + gradients(x)))
    return sparse_product(adj, x)


def _join(parts: list[Tensor]) -> Tensor:
    """Concatenate parts; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scale_rows(z: Tensor, scale: Tensor | None, off: Tensor, *, in_place: bool = False) -> Tensor:
    """Return scaled rows, and report the work; `in_place` holds where no gradient needs z."""
    if scale is None:
        return z
    num_gradients = gradients(z)
    report_rows(off, z.shape[1] * (1 + num_gradients))
    return z.mul_(scale) if in_place and not num_gradients else scale * z


def to_send(
    model: Staged, number: int, around: Surroundings, rows: Tensor, x: Tensor, client_off: Tensor
) -> Tensor:
    """Return the messages of rows (k,) to other silos in a stage, x (k, I) with their own scale."""
    degree = around.graph.adj.degree[around.place[rows]].to(x.dtype)[:, None]
    return _scale_rows(x, scales_of(model.stages[number].conv).sender_scale(degree), client_off)


# --- Batches of rows with those who send to them: own rows, and slots of the halo ----------------


def surroundings(block: ClientBlock, *, halo: bool = True) -> Surroundings:
    """Return the graph of a block's rows, with its slots if `halo` is set."""
    if halo:
        return block.once("surroundings", Surroundings, lambda: _build_surroundings(block))
    # Kept without the block, which would hold itself, and all that a call to it worked out.
    own_positions, no_slots = block.once("rows alone", tuple, lambda: _own_positions(block))
    return Surroundings(block, own_positions, own_positions, no_slots)


def _own_positions(block: ClientBlock) -> tuple[Tensor, Tensor]:
    own_positions = torch.arange(len(block.row_key), device=block.off.device)
    return own_positions, torch.full_like(own_positions, -1)


def _build_surroundings(block: ClientBlock) -> Surroundings:
    device, n = block.off.device, len(block.row_key)
    position = torch.arange(n, device=device)
    slots = len(block.halo.key)
    position = position + block.halo.off[block.client]
    row = torch.full((n + slots,), -1, device=device)
    row[position] = torch.arange(n, device=device)
    slot = torch.full_like(row, -1)
    slot[row < 0] = torch.arange(slots, device=device)
    if block.source is not None:
        whole_graph = surroundings(block.source[0]).graph
        return Surroundings(whole_graph.called(block.source[1]), position, row, slot)
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    no_features = block.adj.values.new_zeros(n, 0)
    all_slots = torch.arange(slots, device=device)
    graph = extended(
        replace(block, x=no_features), all_slots, block.halo.off, no_features.new_zeros(slots, 0)
    )
    return Surroundings(graph, position, row, slot)


def whole_batch(block: ClientBlock, around: Surroundings, stored: StoredRows) -> Batch:
    """Return all rows of a block with all edges.

    The last result is cached with the block, as the known slots change in the first rounds only.
    It takes the memory of the block's edges, or twice that where slots send in later layers only.
    """
    name = ("whole batch", around.graph is block, 0 in stored.halo)
    cached = block.memo.get(name)
    if not isinstance(cached, tuple) or not torch.equal(cached[0], stored.known):
        rows = torch.arange(len(block.row_key), device=block.off.device)
        cached = stored.known, batch_of_edges(block, around, stored, rows, block.off)
        block.memo[name] = cached
    batch = cached[1]
    assert isinstance(batch, Batch)
    return batch


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

    `later`: whether stages after the first are computed, too.
    """
    first = edges_of(block, rows)
    if not later and 0 not in stored.halo:
        alone = surroundings(block, halo=False)
        return _build_batch(block, alone, stored, rows, off, first, first)
    return _build_batch(
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
    first = neighbors.draw(block, _as_reached(rows, off), 0, key, {})
    later = first
    if around.graph is not block:
        later = drawn_around(around, rows, off, neighbors, key)
    return _build_batch(block, around, stored, rows, off, first, later)


def drawn_around(
    around: Surroundings, rows: Tensor, off: Tensor, neighbors: Neighbors, key: Key
) -> Drawn:
    """Return edges drawn for some rows (b,) of a block among own rows and slots, as `Drawn`."""
    return neighbors.draw(around.graph, _as_reached(around.place[rows], off), 0, key, {})


def _as_reached(rows: Tensor, off: Tensor) -> Reached:
    clients = torch.arange(len(off) - 1, device=off.device)
    return Reached(rows, torch.zeros_like(rows), clients, off)


def _build_batch(
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
    shared = _build_senders(block, around, stored.known, rows, off, later)
    if with_features or around.graph is block:
        return Batch(rows, off, shared, shared)
    return Batch(rows, off, _build_senders(block, alone, stored.known, rows, off, first), shared)


def _build_senders(
    block: ClientBlock,
    around: Surroundings,
    is_received: Tensor,
    rows: Tensor,
    off: Tensor,
    edges: Drawn,
) -> Senders:
    """Return the senders along drawn edges, without slots whose rows have not been received."""
    row, slot = around.row[edges.neighbor], around.slot[edges.neighbor]
    position, share = edges.position, edges.share
    if bool((slot >= 0).any()):
        is_available = (slot < 0) | is_received[slot.clamp(min=0)]
        if not bool(is_available.all()):
            share = _shares_for_missing(position, share, is_available, len(rows))
            row, slot, position, share = (
                row[is_available],
                slot[is_available],
                position[is_available],
                share[is_available],
            )
    is_own = row >= 0
    senders = _selected_rows(len(block.row_key), row[is_own], rows)
    slots = _selected_rows(len(block.halo.key), slot[~is_own], slot[:0])
    row_position = torch.empty(len(block.row_key), dtype=torch.int64, device=rows.device)
    row_position[rows] = torch.arange(len(rows), device=rows.device)
    row_position[senders] = torch.arange(len(senders), device=rows.device) + len(rows)
    slot_position = torch.empty(len(block.halo.key), dtype=torch.int64, device=rows.device)
    slot_position[slots] = torch.arange(len(slots), device=rows.device) + len(rows) + len(senders)
    column = torch.empty_like(row)
    column[is_own] = row_position[row[is_own]]
    column[~is_own] = slot_position[slot[~is_own]]
    total = len(rows) + len(senders) + len(slots)
    starts = offsets(torch.bincount(position, minlength=len(rows)))
    batch_degree, degree = (
        around.graph.adj.degree[around.place[part]].to(share.dtype)[:, None]
        for part in (rows, senders)
    )
    return Senders(
        rows=senders,
        off=torch.searchsorted(senders, block.off),
        slots=slots,
        slot_off=torch.searchsorted(slots, block.halo.off),
        adj=CSR(starts, *_sort_edges(position * total + column, column, share), total),
        messages=Messages(_no_edges(rows), False, batch_degree, batch_degree, None, off, off),
        degree=degree,
        num_slots=len(block.halo.key),
    )


def _sort_edges(position: Tensor, column: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns and shares (e,) of edges in the order of their places, which are distinct."""
    if bool((position.diff() > 0).all()):  # as they are where all rows are worked out
        return column, share
    order = position.argsort()
    return column[order], share[order]


def _no_edges(rows: Tensor) -> CSR:
    """Return a matrix (b, b) without entries: `Senders.adj` makes the sums instead."""
    starts = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
    return CSR(starts, rows[:0], None, len(rows))


def _shares_for_missing(position: Tensor, share: Tensor, is_available: Tensor, rows: int) -> Tensor:
    """Return shares (e,) scaled so that available edges stand for all edges of their receiver."""
    total = share.new_zeros(rows).index_add_(0, position, share)
    available = share.new_zeros(rows).index_add_(0, position[is_available], share[is_available])
    return share * (total / available.clamp(min=torch.finfo(share.dtype).tiny))[position]


def _selected_rows(count: int, selected: Tensor, excluded: Tensor) -> Tensor:
    """Return the distinct selected rows of `count`, ascending, without the excluded ones."""
    mask = torch.zeros(count, dtype=torch.bool, device=selected.device)
    mask[selected] = True
    mask[excluded] = False
    return mask.nonzero()[:, 0]


# --- Steps of local training on stored rows, for the clients of a block together, in torch -------
#
# A client in training is a mapping of fields, so that it can wait in its state for rows of other
# silos between two steps: `weights/NAME`, `memory/NAME` of the optimizer, and `steps` (C,) int64
# taken by it. First weights are rows of used features where features are sparse and the optimizer
# is fresh.
#
# C: clients. n: rows. b: rows of a batch.


STEPS = "steps"  # of the optimizer's state; here a number for each client


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The rows that a batch trains on.

    Attributes:
        batch: they, with who sends to them.
        share: (b,) weight of each row's loss; None: 1 / rows of its client.
    """

    batch: Batch
    share: Tensor | None


def start_training(
    model: Staged,
    training: Training,
    block: ClientBlock,
    weights: Mapping[str, Tensor],
    memory: Mapping[str, Tensor] | None,
    *,
    compact: bool,
    skip_zeros: bool = False,
) -> TrainingFields:
    """Return clients before their first step.

    Args:
        model: the shape.
        training: how they train.
        block: the clients.
        weights: that all start from.
        memory: optimizer state (C, ...) to go on from; None: a fresh one.
        compact: whether first weights may be trained as rows of used features.
        skip_zeros: leave fresh moments of first weights uninitialized, for kernels that write
            them before they read them. This saves a pass over the largest tensors.
    """
    fields = start_fields(model, weights, block.num_clients)
    small = compact and memory is None and starts_compact(model, fields, block.x)
    weight_fields = copy_start(model, block, fields, compact=small)
    off = {name: f.off for name, f in weight_fields.items() if isinstance(f, Ragged)}
    uninitialized = model.first_maps if skip_zeros and memory is None else ()
    optimizer_state = memory
    if optimizer_state is None:
        parts = {n: f.t[:0] if n in uninitialized else f.t for n, f in weight_fields.items()}
        optimizer_state = training.optimizer.init(parts)
    fields_in_training: TrainingFields = {f"weights/{name}": f for name, f in weight_fields.items()}
    for name, m in optimizer_state.items():
        if name != STEPS:
            weights_name = name.rpartition("/")[2]
            used_off = off.get(weights_name)
            t = m if memory is None else own_copy(m)  # zeros that nobody has written take no memory
            if weights_name in uninitialized:
                t = torch.empty_like(weight_fields[weights_name].t)
            fields_in_training[f"memory/{name}"] = (
                Stacked(t) if used_off is None else Ragged(t, used_off)
            )
    steps = torch.zeros(block.num_clients, dtype=torch.int64, device=block.off.device)
    if memory is not None and STEPS in memory:
        steps = memory[STEPS].long()
    return fields_in_training | {STEPS: Stacked(steps)}


def weights_of(fields: TrainingFields) -> Params:
    """Return the weights, (C, ...) or rows of all clients."""
    return {k.removeprefix("weights/"): f.t for k, f in fields.items() if k.startswith("weights/")}


def is_compact(fields: TrainingFields) -> bool:
    """Whether first weights are rows of used features."""
    return any(isinstance(f, Ragged) for f in fields.values())


def memory_of(training: Training, fields: TrainingFields) -> Params:
    """Return the optimizer's state (C, ...), as `Optimizer.init` makes it."""
    memory = {k.removeprefix("memory/"): f.t for k, f in fields.items() if k.startswith("memory/")}
    counts_steps = STEPS in training.optimizer.init({"": fields[STEPS].t.float()})
    return memory | ({STEPS: fields[STEPS].t.float()} if counts_steps else {})


def groups_by_steps(fields: TrainingFields, active: Tensor) -> list[Tensor]:
    """Return the clients in the mask (C,) bool, in groups that have taken equally many steps."""
    steps = fields[STEPS].t
    counts = torch.unique(steps[active])
    return [(active & (steps == count)).nonzero()[:, 0] for count in counts]


def take_clients(fields: TrainingFields, positions: Tensor) -> TrainingFields:
    """Return a copy of the clients at `positions` (k,) int64."""
    return cast(TrainingFields, take_all(fields, positions))


def put_clients(fields: TrainingFields, part: TrainingFields, positions: Tensor) -> TrainingFields:
    """Return all clients, those at `positions` as in `part`."""
    return put_all(fields, part, positions)


def step_(
    model: Staged,
    training: Training,
    block: ClientBlock,
    fields: TrainingFields,
    training_rows: TrainingRows,
    stored: StoredRows,
    key: Key,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Take one step in place; all clients have rows, and have taken equally many steps.

    Returns:
        The loss of each row (b,), and what entered each stage of `stored_stages`, (b, I).
    """
    batch, weights = training_rows.batch, weights_of(fields)
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    x = features_for(block, is_compact(fields))
    with torch.enable_grad():
        logits, entered = batch_pass(model, leaves, block, x, batch, stored, key)
        report_rows(batch.off, LOSS_FLOPS * model.outputs)
        losses = task_of(model.task).loss(logits, block.y[batch.rows])
        share = training_rows.share
        if share is None:
            counts = batch.off.diff()
            share = torch.repeat_interleave(1 / counts.to(losses.dtype), counts)
        # Clients share no weight, so the gradient of the sum holds each client's own.
        gradients = torch.autograd.grad((losses * share).sum(), list(leaves.values()))
    report_each(training.step_flops, Kind.OPTIMIZER)
    memory = {k.removeprefix("memory/"): f.t for k, f in fields.items() if k.startswith("memory/")}
    optimizer_state = memory | {STEPS: fields[STEPS].t[:1].float()}
    training.optimizer.step_(weights, dict(zip(leaves, gradients, strict=True)), optimizer_state)
    fields[STEPS].t.add_(1)
    return losses.detach(), entered


def finish_training(
    training: Training, block: ClientBlock, fields: TrainingFields, base: Mapping[str, Tensor]
) -> dict[str, Stacked | Patched]:
    """Return trained weights, (C, ...); rows of unused features follow their path without data.

    Args:
        training: how they were trained.
        block: the clients.
        fields: of the clients in training.
        base: (F, D) first weights before training, where only used rows were trained.
    """
    base_of_client = torch.zeros(block.num_clients, dtype=torch.int64, device=block.off.device)
    weights: dict[str, Stacked | Patched] = {}

    def path(start: Tensor, steps: int) -> Tensor:
        """Return rows after steps without data; no copy if they stay, as nothing writes to them."""
        if stays_without_data(training, start, steps):
            return start
        return untouched_rows_after(training, start, steps)

    for name, w in weights_of(fields).items():
        if isinstance(fields[f"weights/{name}"], Stacked):
            weights[name] = Stacked(w)
        else:
            assert isinstance(block.x, SparseRows)  # only then are there used rows
            start = from_bases(base[name][None], base_of_client)
            flops = training.flops[name]
            weights[name] = patched(path, start, w, block.x, fields[STEPS].t, flops)
    return weights
