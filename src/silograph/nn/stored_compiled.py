"""Steps on stored rows by the compiled kernels: all batches between two exchanges in one call.

Results are those of `silograph.nn.stored_rows`, from the same batches and draws. While a client
trains, its weights after the first matrices wait side by side as one field `flat`, and so do their
moments, so that a call copies nothing but what it changes.

J: batches. C: clients. b: rows of a batch. e: edges. S: halo slots. W: widths of all stored stages
together.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, Stacked, offsets, owners
from silograph.core.work import report_clients
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Conv
from silograph.nn.fit import LOSS_FLOPS, Schedule, Training, TrainingFields
from silograph.nn.forward import Staged
from silograph.nn.kernel_block import (
    BlockArrays,
    contiguous,
    flatten_weights,
    later_names,
    model_shape,
    prepare_block,
    run_in_threads,
    step_rule,
    unflatten_weights,
)
from silograph.nn.kernels import arrays
from silograph.nn.kernels import stored as kernels
from silograph.nn.model import scales_of
from silograph.nn.segment import segment_sum
from silograph.nn.stored_rows import STEPS, Batch, Senders, StoredRows, TrainingRows, stored_stages

FLAT = "flat"
KINDS = "weights", "memory/first", "memory/second", "memory/momentum"


def pack_weights(model: Staged, fields: TrainingFields) -> TrainingFields:
    """Return clients in training with the weights after the first matrices side by side."""
    names, new = tuple(later_names(model.stages)), dict(fields)
    for kind in KINDS:
        if f"{kind}/{names[0]}" in fields:
            parts = {name: new.pop(f"{kind}/{name}").t for name in names}
            new[f"{kind}/{FLAT}"] = Stacked(torch.from_numpy(flatten_weights(model, parts)))
    return new


def unpack_weights(model: Staged, fields: TrainingFields) -> TrainingFields:
    """Return clients in training with all weights by name; views of what they were."""
    new = dict(fields)
    for kind in KINDS:
        field = new.pop(f"{kind}/{FLAT}", None)
        if field is not None:
            parts = unflatten_weights(model, field.t.numpy())
            new |= {f"{kind}/{name}": Stacked(t) for name, t in parts.items()}
    return new


def prepare(
    model: Staged, block: ClientBlock, *, compact: bool
) -> tuple[BlockArrays, arrays.ModelShape]:
    """Return block and model as the kernels read them, worked out once.

    `compact`: whether weights of a client are its used rows; where features are dense it has all.
    """
    data = prepare_block(model, block, compact=compact and isinstance(block.x, SparseRows))
    name = ("stored rows", model)
    return data, block.origin.once(name, arrays.ModelShape, lambda: model_shape(model, Schedule(1)))


def train_(
    model: Staged,
    training: Training,
    block: ClientBlock,
    fields: TrainingFields,
    batches: Sequence[TrainingRows],
    stored: StoredRows,
    keys: Sequence[Key],
) -> tuple[Tensor, ...]:
    """Take a step with every client that has rows in a batch, batch after batch, in place.

    Args:
        model: a shape that is compiled.
        training: how they train.
        block: C clients.
        fields: of the clients, from `pack_weights`.
        batches: J of them, of clients that have rows in them or not.
        stored: rows of others; `own` becomes what entered the stages of the batches' rows.
        keys: of the batches.

    Returns:
        The loss of each row of each batch, (b,) float64.

    Raises:
        ProtocolError: weights, moments or stored rows are not those of the model and block.
    """
    compact = isinstance(fields[f"weights/{model.first_maps[0]}"], Ragged)
    (data, shape), stages = prepare(model, block, compact=compact), stored_stages(model)
    check_fields(model, training, fields, block.num_clients, int(data.called.used_off[-1]))
    check_stored(model, stored, block)
    flat_weights = fields[f"weights/{FLAT}"].t
    own_rows = torch.cat(
        [flat_weights.new_empty(len(block.row_key), 0), *(stored.own[n] for n in stages)], 1
    )
    batch_arrays = _arrange_batches(model, block, batches, stored, own_rows, keys)
    w, m1, m2 = (_tensors_of_kind(model, fields, kind) for kind in _weight_and_moment_kinds(fields))
    clients = kernels.TrainingArrays(w, m1, m2, fields[STEPS].t.numpy())
    rule = step_rule(training)

    def train(first: int, end: int) -> None:
        kernels.train_stored(
            first, end, data.called, data.rows, data.inputs, shape, rule, batch_arrays, clients
        )

    run_in_threads(block, train)
    for number, part in zip(stages, own_rows.split([*_stage_widths(model)], dim=1), strict=True):
        stored.own[number].copy_(part)
    for batch in batches:
        report_clients(_step_flops(model, block, batch))
        report_clients((batch.batch.off.diff() > 0).double() * training.step_flops, Kind.OPTIMIZER)
    losses: tuple[Tensor, ...] = torch.from_numpy(batch_arrays.loss).split(
        [len(batch.batch.rows) for batch in batches]
    )
    return losses


def check_fields(
    model: Staged, training: Training, fields: TrainingFields, clients: int, used: int
) -> None:
    """Raise `ProtocolError` unless clients in training have what kernels read and write of them.

    Args:
        model: the shape.
        training: how they train.
        fields: of the clients, from `pack_weights`.
        clients: how many.
        used: rows of the first matrices of all of them.
    """
    later = [torch.Size(model.weight_shapes[name]).numel() for name in later_names(model.stages)]
    shapes: dict[str, tuple[int, ...]] = {
        n: (used, model.weight_shapes[n][-1]) for n in model.first_maps
    }
    shapes[FLAT] = (clients, sum(later))
    moments = {name.partition("/")[0] for name in training.optimizer.init({"": torch.zeros(1)})}
    kinds = [KINDS[0], *(f"memory/{moment}" for moment in moments if moment != STEPS)]
    expected = {f"{kind}/{name}": shape for kind in kinds for name, shape in shapes.items()}
    expected[STEPS] = (clients,)
    shapes_found = {
        name: tuple(f.t.flatten(0, -2).shape) for name, f in fields.items() if name != STEPS
    }
    shapes_found[STEPS] = tuple(fields[STEPS].t.shape) if STEPS in fields else ()
    misfit = min(
        (n for n in shapes_found.keys() | expected if shapes_found.get(n) != expected.get(n)),
        default="",
    )
    if misfit or len({field.t.dtype for name, field in fields.items() if name != STEPS}) > 1:
        raise ProtocolError(
            f"expected clients in training whose {misfit or 'weights'} has shape "
            f"{expected.get(misfit)} and the run's dtype, got {shapes_found.get(misfit)}: they are "
            "of another model, optimizer or block"
        )


def check_stored(model: Staged, stored: StoredRows, block: ClientBlock) -> None:
    """Raise `ProtocolError` unless stored rows are those of a block's rows and slots."""
    widths = dict(zip(stored_stages(model), _stage_widths(model), strict=True))
    for rows, rows_by_stage in (len(block.row_key), stored.own), (len(block.halo.key), stored.halo):
        for number, stored_rows in rows_by_stage.items():
            if stored_rows.shape != (rows, widths.get(number)):
                raise ProtocolError(
                    f"expected stored rows of shape {(rows, widths.get(number))} for stage "
                    f"{number}, got {tuple(stored_rows.shape)}"
                )


def _stage_widths(model: Staged) -> list[int]:
    """Return the width of what enters each stored stage."""
    return [model.stages[number].inputs for number in stored_stages(model)]


def _weight_and_moment_kinds(fields: TrainingFields) -> tuple[str, str, str]:
    """Return the names of weights and of two moments; weights, where there is no such moment."""
    first_moment = next(
        (kind for kind in ("memory/first", "memory/momentum") if _has_kind(fields, kind)), KINDS[0]
    )
    return (
        KINDS[0],
        first_moment,
        "memory/second" if _has_kind(fields, "memory/second") else KINDS[0],
    )


def _has_kind(fields: TrainingFields, kind: str) -> bool:
    return f"{kind}/{FLAT}" in fields


def _tensors_of_kind(model: Staged, fields: TrainingFields, kind: str) -> kernels.Trained:
    first = [fields[f"{kind}/{name}"].t.flatten(0, -2).numpy() for name in model.first_maps]
    return kernels.Trained(first[0], first[-1], fields[f"{kind}/{FLAT}"].t.numpy())


def _arrange_batches(
    model: Staged,
    block: ClientBlock,
    batches: Sequence[TrainingRows],
    stored: StoredRows,
    own: Tensor,
    keys: Sequence[Key],
) -> kernels.BatchArrays:
    """Return the batches side by side, as kernels read them."""
    stages, rows = stored_stages(model), torch.cat([batch.batch.rows for batch in batches])
    first_column = dict(
        zip(stages, offsets(torch.tensor([*_stage_widths(model), 0])).tolist(), strict=False)
    )
    later = model.stages[-1 if not stages else stages[0]].conv
    halo = [stored.halo[number] for number in stages if number in stored.halo]
    pairs = [(c.batch, c.batch.first) for c in batches], [(c.batch, c.batch.later) for c in batches]
    return kernels.BatchArrays(
        key=np.array([key.value for key in keys], np.uint64),
        clients=block.num_clients,
        rows=contiguous(rows - block.off[block.client[rows]], np.int64),
        off=_join_offsets([batch.batch.off for batch in batches]),
        share=contiguous(torch.cat([share_of(batch, own.dtype) for batch in batches])),
        first=_sender_arrays(model.stages[0].conv, block, pairs[0], []),
        later=_sender_arrays(later, block, pairs[1], halo),
        own=own.numpy(),
        place=np.array(
            [first_column.get(number, -1) for number in range(len(model.stages))], np.int64
        ),
        loss=np.zeros(len(rows)),
    )


def _join_offsets(offs: Sequence[Tensor]) -> np.ndarray:
    """Return the ends of J C runs, which lie batch after batch, from offsets (C + 1,) in each."""
    return contiguous(offsets(torch.cat([off.diff() for off in offs])), np.int64)


def _sender_arrays(
    conv: Conv, block: ClientBlock, pairs: Sequence[tuple[Batch, Senders]], halo: Sequence[Tensor]
) -> kernels.SenderArrays:
    """Return the senders of each batch in a stage; `halo` has slots' rows (S, D) of each stage."""
    rows = torch.cat([senders.rows for _, senders in pairs])
    slots = torch.cat([senders.slots for _, senders in pairs])
    edges = [_edge_arrays(conv, batch, senders) for batch, senders in pairs]
    own_weights = [_own_weight(conv, senders) for _, senders in pairs]
    no_columns = own_weights[0].new_empty(len(slots), 0)
    return kernels.SenderArrays(
        rows=contiguous(rows - block.off[block.client[rows]], np.int64),
        off=_join_offsets([senders.off for _, senders in pairs]),
        slot=contiguous(torch.cat([no_columns, *(rows[slots] for rows in halo)], dim=1)),
        slot_key=contiguous(block.halo.key[slots], np.int64).view(np.uint64),
        slot_off=_join_offsets([senders.slot_off for _, senders in pairs]),
        ptr=contiguous(offsets(torch.cat([s.adj.indptr.diff() for _, s in pairs])), np.int64),
        col=contiguous(torch.cat([col for col, _ in edges]), np.int32),
        value=contiguous(torch.cat([value for _, value in edges])),
        own=contiguous(torch.cat(own_weights)),
    )


def _own_weight(conv: Conv, senders: Senders) -> Tensor:
    """Return the weight of a row's own z, (b,); 0 where the sum has none."""
    degree = senders.messages.receiver
    weight = scales_of(conv).itself(degree)
    return (torch.zeros_like(degree) if weight is None else weight)[:, 0]


def _edge_arrays(conv: Conv, batch: Batch, senders: Senders) -> tuple[Tensor, Tensor]:
    """Return the sender of each edge (e,) as its client numbers them, and both scales times it."""
    adj, scales = senders.adj, scales_of(conv)
    assert adj.values is not None  # how many edges each stands for
    size, num_senders = len(batch.rows), len(senders.rows)
    col, client = adj.indices.long(), owners(batch.off)[adj.row]
    counts, sender_counts = batch.off.diff(), senders.off.diff()
    value = adj.values
    sender_scale = scales.sender_scale(torch.cat([senders.messages.sender, senders.degree]))
    if sender_scale is not None:  # slots come scaled by their owners
        ones = sender_scale.new_ones(len(senders.slots))
        value = value * torch.cat([sender_scale[:, 0], ones])[col]
    receiver_scale = scales.receiver_scale(senders.messages.receiver)
    if receiver_scale is not None:
        value = value * receiver_scale[adj.row, 0]
    local = torch.where(
        col < size,
        col - batch.off[client],
        torch.where(
            col < size + num_senders,
            col - size - senders.off[client] + counts[client],
            col - size - num_senders - senders.slot_off[client] + (counts + sender_counts)[client],
        ),
    )
    return local, value


def share_of(batch: TrainingRows, dtype: torch.dtype) -> Tensor:
    """Return the weight of each row's loss, (b,)."""
    if batch.share is not None:
        return batch.share
    counts = batch.batch.off.diff()
    return torch.repeat_interleave(1 / counts.to(dtype), counts)


def _step_flops(model: Staged, block: ClientBlock, batch: TrainingRows) -> Tensor:
    """Return operations of a step on a batch, (C,) float64: what the torch layers report."""
    rows = batch.batch.off.diff().double()
    total = LOSS_FLOPS * model.outputs * rows
    for number, stage in enumerate(model.stages):
        conv, inner, out = stage.conv, 2.0 * stage.inputs * stage.outputs, stage.outputs
        senders = batch.batch.later if number else batch.batch.first
        others, slots, edges = (torch.zeros_like(rows) for _ in range(3))
        if conv.sums:
            others, slots = senders.off.diff().double(), senders.slot_off.diff().double()
            edges = senders.adj.indptr[batch.batch.off].diff().double()
            slots = slots * (number > 0)
        if number == 0 and isinstance(block.x, SparseRows):
            entries = block.x.csr.degree.double()
            batch_entries = segment_sum(entries[batch.batch.rows], batch.batch.off)
            sender_entries = segment_sum(entries[senders.rows], senders.off) * conv.sums
            total += 4 * out * (batch_entries * (1 + conv.rooted) + sender_entries)
        else:
            products = 3 if number else 2
            total += inner * (products * rows * (1 + conv.rooted) + 2 * (others + slots))
        if conv.sums:
            scales = scales_of(conv)
            total += 2 * out * (scales.pre is not None) * (rows + others)
            total += 2 * out * (2 * edges + (scales.post is not None) * rows)
            total += 4 * out * (scales.own is not None) * rows
        total += out * rows * (conv.rooted + 2 + 2 * stage.relu)
        if stage.drop > 0 and number:
            total += 2 * stage.inputs * (2 * rows + others + slots)
    return total
