"""Steps on stored rows by the compiled kernels: all batches between two exchanges in one call.

Results are those of `silograph.nn.stored_rows`, from the same batches and draws. While a client
trains, its weights after the first matrices wait side by side as one field `flat`, and so do their
moments, so that a call copies nothing but what it changes. `moves/NAME` (U,) or (C, F) bool says
which rows of a first matrix have moments. The moments of other rows are uninitialized memory.

J: batches. C: clients. b: rows of a batch. e: edges. S: halo slots. W: widths of all stored stages
together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, Stacked, offsets
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
from silograph.nn.kernels.first_stage import WantedRows, first_stage
from silograph.nn.model import scales_of
from silograph.nn.optim import Optimizer
from silograph.nn.stored_batches import BatchRows, DrawnBatches, Edges
from silograph.nn.stored_rows import (
    STEPS,
    StoredRows,
    Surroundings,
    stored_stages,
    surroundings,
)

FLAT, MOVES = "flat", "moves"
KINDS = "weights", "memory/first", "memory/second", "memory/momentum"


def pack_weights(model: Staged, fields: TrainingFields, *, fresh: bool) -> TrainingFields:
    """Return clients in training with the weights after the first matrices side by side.

    `fresh`: whether the optimizer has taken no step, so that no row has moments.
    """
    names, new = tuple(later_names(model.stages)), dict(fields)
    for name in model.first_maps:
        weights = fields[f"weights/{name}"]
        moves = torch.zeros(weights.t.shape[:-1], dtype=torch.bool)
        for kind in () if fresh else KINDS[1:]:
            if f"{kind}/{name}" in fields:
                moves |= (fields[f"{kind}/{name}"].t != 0).any(dim=-1)
        new[f"{MOVES}/{name}"] = replace(weights, t=moves)
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


@dataclass(frozen=True, eq=False)
class TrainingBatches:
    """J batches with their senders, which every call of `train_` on some of them can use again.

    Attributes:
        arrays: as the kernels read them, but for stored rows: they change, and `train_` adds them.
        slots: (h,) int64 slots of the block that send.
        flops: (J, C) float64 operations of each step.
    """

    arrays: kernels.BatchArrays
    slots: np.ndarray
    flops: np.ndarray


def training_batches(
    model: Staged, block: ClientBlock, known: np.ndarray, drawn: DrawnBatches, share: Tensor
) -> TrainingBatches:
    """Return drawn batches with their senders.

    Args:
        model: a shape that is compiled.
        block: C clients.
        known: (S,) bool, slots whose rows have been received.
        drawn: J batches.
        share: (b,) weight of each row's loss.
    """
    stages, rows = stored_stages(model), drawn.rows
    later = model.stages[-1 if not stages else stages[0]].conv
    alone, first = surroundings(block, halo=False), model.stages[0].conv
    around = alone if drawn.around is drawn.alone else surroundings(block)
    first_senders, _ = senders_of(block, alone, first, rows, drawn.alone, known)
    later_senders, slots = senders_of(block, around, later, rows, drawn.around, known)
    first_column = dict(
        zip(stages, offsets(torch.tensor([*_stage_widths(model), 0])).tolist(), strict=False)
    )
    no_rows = np.empty((0, 0), first_senders.value.dtype)
    arrays = kernels.BatchArrays(
        key=np.array([key.value for key in drawn.keys], np.uint64),
        clients=block.num_clients,
        begin=0,
        end=len(drawn.keys),
        rows=rows.rows - block.off.numpy()[block.client.numpy()[rows.rows]],
        off=rows.off,
        share=contiguous(share),
        first=first_senders,
        later=later_senders,
        own=no_rows,
        halo=no_rows,
        place=np.array(
            [first_column.get(number, -1) for number in range(len(model.stages))], np.int64
        ),
        loss=np.zeros(len(rows.rows)),
    )
    return TrainingBatches(arrays, slots, _step_flops(model, block, rows.rows, arrays))


def train_(
    model: Staged,
    training: Training,
    block: ClientBlock,
    fields: TrainingFields,
    batches: TrainingBatches,
    batch_range: range,
    stored: StoredRows,
) -> np.ndarray:
    """Take a step with every client that has rows in a batch, batch after batch, in place.

    Args:
        model: a shape that is compiled.
        training: how they train.
        block: C clients.
        fields: of the clients, from `pack_weights`.
        batches: J of them, of clients that have rows in them or not.
        batch_range: which of them to train on.
        stored: rows of others; `own` becomes what entered the stages of the batches' rows.

    Returns:
        The loss of each row of these batches, (b',) float64.

    Raises:
        ProtocolError: weights, moments or stored rows are not those of the model and block.
    """
    compact = isinstance(fields[f"weights/{model.first_maps[0]}"], Ragged)
    (data, shape), stages = prepare(model, block, compact=compact), stored_stages(model)
    check_fields(model, training, fields, block.num_clients, int(data.called.used_off[-1]))
    check_stored(model, stored, block)
    flat_weights = fields[f"weights/{FLAT}"].t
    # Stages side by side; the rows of a single one are changed where they are.
    parts = [stored.own[n] for n in stages]
    is_single = len(parts) == 1 and parts[0].is_contiguous()
    no_columns = flat_weights.new_empty(len(block.row_key), 0)
    own_rows = parts[0] if is_single else torch.cat([no_columns, *parts], dim=1)
    batch_arrays = _add_stored_rows(model, batches, batch_range, own_rows, stored)
    w, m1, m2 = (_tensors_of_kind(model, fields, kind) for kind in _weight_and_moment_kinds(fields))
    moves = [fields[f"{MOVES}/{name}"].t.reshape(-1).numpy() for name in model.first_maps]
    clients = kernels.TrainingArrays(w, m1, m2, moves[0], moves[-1], fields[STEPS].t.numpy())
    rule = step_rule(training)

    def train(first: int, end: int) -> None:
        kernels.train_stored(
            first, end, data.called, data.rows, data.inputs, shape, rule, batch_arrays, clients
        )

    run_in_threads(block, train)
    if not is_single:
        trained = own_rows.split([*_stage_widths(model)], dim=1)
        for number, part in zip(stages, trained, strict=True):
            stored.own[number].copy_(part)
    first, end = batch_range.start, batch_range.stop
    off = batch_arrays.off[first * block.num_clients : end * block.num_clients + 1]
    steps = (np.diff(off).reshape(len(batch_range), -1) > 0).sum(0)
    report_clients(torch.from_numpy(batches.flops[first:end].sum(0)))
    report_clients(torch.from_numpy(steps * float(training.step_flops)), Kind.OPTIMIZER)
    return batch_arrays.loss[off[0] : off[-1]]


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
    shapes: dict[str, tuple[int, ...]] = {
        n: (used, model.weight_shapes[n][-1]) for n in model.first_maps
    }
    shapes[FLAT] = (clients, _size_of_flat(model))
    kinds = [KINDS[0], *_kinds_of_moments(training.optimizer)]
    expected = {f"{kind}/{name}": shape for kind in kinds for name, shape in shapes.items()}
    expected |= {f"{MOVES}/{name}": (used,) for name in model.first_maps}
    expected[STEPS] = (clients,)
    weights, progress = dict[str, Tensor](), dict[str, Tensor]()
    for name, f in fields.items():
        is_progress = name == STEPS or name.startswith(f"{MOVES}/")
        (progress if is_progress else weights)[name] = f.t
    shapes_found = {name: tuple(t.flatten(0, -2).shape) for name, t in weights.items()}
    shapes_found |= {name: tuple(t.reshape(-1).shape) for name, t in progress.items()}
    misfit = min(
        (n for n in shapes_found.keys() | expected if shapes_found.get(n) != expected.get(n)),
        default="",
    )
    is_mixed = len({t.dtype for t in weights.values()}) > 1
    for name, t in progress.items():
        is_mixed |= t.dtype is not (torch.int64 if name == STEPS else torch.bool)
    if misfit or is_mixed:
        raise ProtocolError(
            f"expected clients in training whose {misfit or 'weights'} has shape "
            f"{expected.get(misfit)} and the run's dtype, got {shapes_found.get(misfit)}: they are "
            "of another model, optimizer or block"
        )


def _size_of_flat(model: Staged) -> int:
    """Return the number of a client's weights after the first matrices."""
    return sum(torch.Size(model.weight_shapes[n]).numel() for n in later_names(model.stages))


@lru_cache(maxsize=64)
def _kinds_of_moments(optimizer: Optimizer) -> Sequence[str]:
    """Return the names of an optimizer's moments, with their prefix."""
    moments = {name.partition("/")[0] for name in optimizer.init({"": torch.zeros(1)})}
    return tuple(f"memory/{moment}" for moment in moments if moment != STEPS)


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


def compute_first_outputs(
    model: Staged, block: ClientBlock, fields: TrainingFields, rows: Tensor, off: Tensor
) -> Tensor | None:
    """Compute the outputs of the first stage for some rows, (b, O) float32.

    They have the bits of the torch form where torch fuses products and sums as the kernel does.
    The work reported is that of the torch form.

    Args:
        model: a shape that is compiled.
        block: C clients.
        fields: weights of the clients in training, from `pack_weights`.
        rows: (b,) int64 of the block.
        off: (C + 1,) int64 of them by client.

    Returns:
        None where only torch can compute them: the stage is no plain sum of sparse features, or
        weights are in float64, whose sums torch adds up in another order.
    """
    # 1. What the kernel can compute. Fields of other shapes fail in the torch form, with a message.
    stage, clients, n = model.stages[0], block.num_clients, len(block.row_key)
    is_plain = stage.conv.sums and not stage.skip and not stage.teleport
    if not is_plain or not isinstance(fields[f"weights/{model.first_maps[0]}"], Ragged):
        return None
    data, shape = prepare(model, block, compact=True)
    weights = _tensors_of_kind(model, fields, KINDS[0])
    expected = (int(data.called.used_off[-1]), stage.outputs)
    is_whole = weights.first.shape == weights.second.shape == expected
    if not is_whole or weights.flat.shape != (clients, _size_of_flat(model)):
        return None
    if any(part.dtype != np.float32 for part in weights):
        return None
    # 2. The rows, and the scales of their sums.
    origin, no_scale = block.origin, np.empty(0, np.float32)
    scaled = _scales(origin, surroundings(origin, halo=False), stage.conv)
    assert origin.adj.values is not None  # blocks carry values of the run's dtype
    wanted = WantedRows(
        rows=(rows - block.off[block.client[rows]]).numpy(),
        off=off.numpy(),
        edge=contiguous(origin.adj.values),
        sender=no_scale if scaled.sender is None else scaled.sender,
        receiver=no_scale if scaled.receiver is None else scaled.receiver,
        itself=no_scale if scales_of(stage.conv).own is None else scaled.itself,
        relu=stage.relu,
        mapped=np.empty((n, stage.outputs), np.float32),
        is_mapped=np.zeros(n, np.bool_),
        is_wanted=np.zeros(n, np.bool_),
        term=np.empty((clients, 1, stage.outputs), np.float32),
        counts=np.zeros((clients, 4), np.int64),
    )
    out = np.empty((len(rows), stage.outputs), np.float32)

    def compute(begin: int, end: int) -> None:
        first_stage(begin, end, data.called, data.rows, data.inputs, shape, wanted, weights, out)

    run_in_threads(block, compute)
    # 3. The work, from what the kernel has counted.
    entries, others, other_entries, edges = wanted.counts.T.astype(np.float64)
    scales, counts = scales_of(stage.conv), np.diff(wanted.off)
    products = (1 + stage.conv.rooted) * entries + other_entries + edges
    by_row = (scales.post is not None) + 2 * (scales.own is not None) + stage.conv.rooted
    terms = (by_row + 1 + stage.relu) * counts + (scales.pre is not None) * (counts + others)
    report_clients(torch.from_numpy(stage.outputs * (2 * products + terms)))
    return torch.from_numpy(out)


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


def _add_stored_rows(
    model: Staged, batches: TrainingBatches, batch_range: range, own: Tensor, stored: StoredRows
) -> kernels.BatchArrays:
    """Return batches for the kernel, with stored rows of the block `own` (n, W) and of slots."""
    arrays = batches.arrays
    parts = [stored.halo[number] for number in stored_stages(model) if number in stored.halo]
    if len(parts) == 1 and parts[0].is_contiguous():
        halo, later = parts[0].numpy(), arrays.later
    else:  # only the slots that these batches read, their stages side by side
        bounds = np.array([batch_range.start, batch_range.stop]) * arrays.clients
        first, end = arrays.later.slot_off[bounds]
        slots = torch.from_numpy(batches.slots[first:end])
        rows = [own.new_empty(len(slots), 0), *(part[slots] for part in parts)]
        halo = torch.cat(rows, dim=1).numpy()
        later = arrays.later._replace(slot=np.arange(len(batches.slots)) - first)
    begin, stop = batch_range.start, batch_range.stop
    return arrays._replace(begin=begin, end=stop, own=own.numpy(), halo=halo, later=later)


@dataclass(frozen=True, eq=False)
class Scaled:
    """Scales of the rows of a block in a convolution, worked out once.

    Attributes:
        sender: (n,) or None for 1.
        receiver: (n,) or None for 1.
        itself: (n,) weight of the own z; 0 where the sum has none.
    """

    sender: np.ndarray | None
    receiver: np.ndarray | None
    itself: np.ndarray


def _scales(block: ClientBlock, around: Surroundings, conv: Conv) -> Scaled:
    """Return the scales of a convolution, whose degrees are those in `around`, cached."""

    def make() -> Scaled:
        assert block.adj.values is not None  # blocks carry values of the run's dtype
        degree = around.graph.adj.degree[around.place].to(block.adj.values.dtype)[:, None]
        scales = scales_of(conv)
        parts = scales.sender_scale(degree), scales.receiver_scale(degree), scales.itself(degree)
        sender, receiver, itself = (None if t is None else t[:, 0].numpy() for t in parts)
        return Scaled(sender, receiver, np.zeros_like(degree[:, 0]) if itself is None else itself)

    return block.once(("scales of senders", conv, around.graph is block), Scaled, make)


def senders_of(
    block: ClientBlock,
    around: Surroundings,
    conv: Conv,
    rows: BatchRows,
    edges: Edges,
    known: np.ndarray,
) -> tuple[kernels.SenderArrays, np.ndarray]:
    """Return the senders of edges, and the slots (h,) int64 of the block among them.

    Slots whose rows have not been received do not send.

    Args:
        block: C clients.
        around: the graph that the edges are of.
        conv: the convolution of the stage.
        rows: of J batches.
        edges: drawn for them.
        known: (S,) bool, slots whose rows have been received.
    """
    row, slot = around.row.numpy()[edges.node], around.slot.numpy()[edges.node]
    position, share = edges.position, edges.share
    is_slot = slot >= 0
    if is_slot.any():
        is_here = ~is_slot
        is_here[is_slot] = known[slot[is_slot]]
        if not is_here.all():
            share = _shares_for_missing(position, share, is_here, len(rows.rows))[is_here]
            row, slot, position, is_slot = (t[is_here] for t in (row, slot, position, is_slot))
    n, num_slots, client_off = len(block.row_key), len(block.halo.key), block.off.numpy()
    batch, batches = rows.batch[position], (len(rows.off) - 1) // block.num_clients
    is_own, counts = ~is_slot, np.diff(rows.off)
    own_place, slot_place = (
        batch[is_own] * n + row[is_own],
        batch[is_slot] * num_slots + slot[is_slot],
    )
    row_place = rows.batch * n + rows.rows
    # Numbers of own rows, ascending, that send and are not in the batch, and of slots.
    sends = np.zeros(batches * n, np.bool_)
    sends[own_place] = True
    sends[row_place] = False
    sender, sender_off = _runs(sends, client_off, batches)
    sends = np.zeros(batches * num_slots, np.bool_)
    sends[slot_place] = True
    slots, slot_off = _runs(sends, block.halo.off.numpy(), batches)
    # A client numbers its senders: rows of the batch, then other rows, then slots.
    number = np.empty(batches * n, np.int64)
    number[row_place] = np.arange(len(rows.rows)) - np.repeat(rows.off[:-1], counts)
    senders = np.diff(sender_off)
    number[sender] = np.arange(len(sender)) + np.repeat(counts - sender_off[:-1], senders)
    slot_number = np.empty(batches * num_slots, np.int64)
    shift = counts + senders - slot_off[:-1]
    slot_number[slots] = np.arange(len(slots)) + np.repeat(shift, np.diff(slot_off))
    column = np.empty(len(row), np.int64)
    column[is_own], column[is_slot] = number[own_place], slot_number[slot_place]
    scaled = _scales(block, around, conv)
    value = share
    if scaled.sender is not None:  # slots come scaled by their owners
        value = value.copy()
        value[is_own] *= scaled.sender[row[is_own]]
    if scaled.receiver is not None:
        value = value * scaled.receiver[rows.rows[position]]
    order = np.lexsort((column, position))
    slots, sender = slots % max(num_slots, 1), sender % n
    arrays = kernels.SenderArrays(
        rows=sender - client_off[block.client.numpy()[sender]],
        off=sender_off,
        slot=slots,
        slot_key=block.halo.key.numpy()[slots].view(np.uint64),
        slot_off=slot_off,
        ptr=_offsets(np.bincount(position, minlength=len(rows.rows))),
        col=column[order].astype(np.int32),
        value=value[order],
        own=scaled.itself[rows.rows],
    )
    return arrays, slots


def _runs(mask: np.ndarray, off: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places in a mask of J parts, ascending, and offsets (J C + 1,) of the runs.

    `off` (C + 1,): the runs of each part.
    """
    places = np.flatnonzero(mask)
    starts = (np.arange(parts)[:, None] * off[-1] + off[:-1]).reshape(-1)
    return places, np.append(np.searchsorted(places, starts), len(places))


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Return where runs begin, and the end of the last one."""
    return np.concatenate([[0], lengths.cumsum()])


def _shares_for_missing(
    position: np.ndarray, share: np.ndarray, is_here: np.ndarray, rows: int
) -> np.ndarray:
    """Return shares (e,) scaled so that available edges stand for all edges of their receiver."""
    total, available = np.zeros((2, rows), share.dtype)
    np.add.at(total, position, share)
    np.add.at(available, position[is_here], share[is_here])
    factor = np.ones_like(total)  # of rows without any edge it does not matter
    np.divide(total, available, out=factor, where=available > 0)
    scaled: np.ndarray = share * factor[position]
    return scaled


def _step_flops(
    model: Staged, block: ClientBlock, block_rows: np.ndarray, batches: kernels.BatchArrays
) -> np.ndarray:
    """Return operations of steps on batches, (J, C) float64: what the torch layers report.

    `block_rows` (b,): rows of the batches in the block.
    """
    off, clients = batches.off, block.num_clients

    def by_client(ends: np.ndarray) -> np.ndarray:
        """Return the length of each client's runs, (J, C) float64."""
        lengths: np.ndarray = (ends[1:] - ends[:-1]).reshape(-1, clients)
        return lengths.astype(np.float64)

    rows = by_client(off)
    total = LOSS_FLOPS * model.outputs * rows
    for number, stage in enumerate(model.stages):
        conv, inner, out = stage.conv, 2.0 * stage.inputs * stage.outputs, stage.outputs
        senders = batches.later if number else batches.first
        others, slots, edges = (np.zeros_like(rows) for _ in range(3))
        if conv.sums:
            others, slots = by_client(senders.off), by_client(senders.slot_off)
            edges = by_client(senders.ptr[off])
            slots = slots * (number > 0)
        if number == 0 and isinstance(block.x, SparseRows):
            entries, first = block.x.csr.degree.numpy(), block.off.numpy()[:-1]
            batch_entries = by_client(_ends_of_sums(entries[block_rows], off))
            sender_rows = senders.rows + np.repeat(
                np.tile(first, len(batches.key)), np.diff(senders.off)
            )
            sender_entries = by_client(_ends_of_sums(entries[sender_rows], senders.off)) * conv.sums
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


def _ends_of_sums(values: np.ndarray, off: np.ndarray) -> np.ndarray:
    """Return sums of the values before each offset."""
    sums: np.ndarray = np.concatenate([[0], values.cumsum()])[off]
    return sums
