"""Hands blocks to the compiled kernels: arrays in, tensors out, work counted.

Kernels check no bounds. What does not come from the block itself is checked by `nn.backends`, which
alone calls these functions.

A block as arrays is in `kernel_block`, the model in `kernel_model`, weights in `kernel_weights`.

n: rows. K: outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Stacked, State, dense
from silograph.core.work import REUSED_MEMORY, report_clients, report_spared, work_for
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Params
from silograph.nn.correction import Proximal
from silograph.nn.fit import (
    LOSS_FLOPS,
    Fitted,
    Memory,
    Schedule,
    StartFields,
    Training,
    TrainingInputs,
    check_labels,
    has_used_rows,
    joined_bases,
    patched,
    rows_apart,
    start_fields,
    starts_compact,
    stays_without_data,
    used_rows,
    whole_memory,
)
from silograph.nn.flow import FlowRule, rule_of
from silograph.nn.flow_compiled import networks_of, with_full_fanout
from silograph.nn.forward import Staged
from silograph.nn.kernel_block import (
    BlockArrays,
    contiguous,
    flatten_weights,
    flush_subnormals,
    model_shape,
    prepare_block,
    run_in_threads,
    step_rule,
    unflatten_weights,
)
from silograph.nn.kernels import arrays
from silograph.nn.kernels import flow as flow_kernels
from silograph.nn.kernels import optim as kernels_optim
from silograph.nn.kernels import training as kernels
from silograph.nn.kernels.training import StepArrays
from silograph.nn.masked import Masked, NearStart, SparseMasks, is_mask
from silograph.nn.optim import SGD, Adam

# --- kernel weights ------------------------------------------------------------------------------
# Weights and optimizer state of a block's clients, into the kernels' arrays and out of them.
#
# C: clients. F: features. D: width of the first matrices. M: first matrices.


def params_of(
    model: Staged,
    block: ClientBlock,
    fields: StartFields,
    memory: Memory | None,
    *,
    used: int,
    compact: bool,
) -> arrays.ParamArrays:
    """Return weights and moments; first matrices have `used` rows in all, those that clients use.

    `compact`: these are not all of their rows, and moments have as many.
    """
    maps = model.first_maps
    flat = flatten_weights(model, {n: dense(field) for n, field in fields.items() if n not in maps})
    empty3, empty2 = np.empty((0, 0, 0), flat.dtype), np.empty((0, 0), flat.dtype)
    first_rows_at_start, moments_at_start = empty3, [empty3, empty3]
    bases, which = joined_bases([fields[name] for name in maps])
    if len(bases):
        rows = REUSED_MEMORY.empty((len(maps), used, bases.shape[-1]), flat.dtype)
    elif compact:
        rows = torch.stack([used_rows(fields[name], block.x) for name in maps]).numpy()
    else:
        rows, first_rows_at_start = _first_matrices(
            model, {name: dense(fields[name]) for name in maps}
        )
    moments = [empty3, empty3, empty2, empty2]
    steps = np.zeros(block.num_clients, np.int64)
    if memory is not None:
        moments, moments_at_start = _moment_arrays(model, memory, rows, flat, compact=compact)
        steps = _steps_before(memory, block.num_clients)
    starts = arrays.BegunRows(first_rows_at_start, *moments_at_start)
    weights = contiguous(bases), contiguous(which), starts, rows, flat
    first_rows, second_rows, first_flat, second_flat = moments
    moment_arrays = first_rows, second_rows, first_flat, second_flat
    return arrays.ParamArrays(*weights, *moment_arrays, steps, None)


def _steps_before(memory: Memory, clients: int) -> np.ndarray:
    """Return the steps that the optimizer of each client has counted, (C,) int64."""
    steps = memory.get("steps")
    if not isinstance(steps, Tensor):
        # SGD does not count: its velocity is what it was given, from the first step on.
        return np.ones(clients, np.int64)
    step_counts: np.ndarray = steps.to(torch.int64).contiguous().numpy()
    return step_counts


def masked_params_of(
    model: Masked,
    training: Training,
    block: ClientBlock,
    fields: StartFields,
    memory: Params | None,
) -> arrays.ParamArrays:
    """Return weights, masks and moments; first matrices have all of their rows."""
    inner, used = model.inner, block.num_clients * model.features
    weight_fields = {name: fields[name] for name in inner.weight_shapes}
    of_weights = None if memory is None else _memory_of_weights(memory)
    params = params_of(inner, block, weight_fields, of_weights, used=used, compact=False)
    ones = torch.ones((), dtype=torch.from_numpy(params.flat).dtype)
    mask_fields = {
        name: fields[model.masks[name]]
        if name in model.masks
        else Stacked(ones.expand(block.num_clients, *shape))
        for name, shape in inner.weight_shapes.items()
    }
    of_masks = None if memory is None else _memory_of_masks(model, memory, params)
    masks = params_of(inner, block, mask_fields, of_masks, used=used, compact=False)
    proximal = sum(c.weight for c in training.corrections if isinstance(c, NearStart))
    l1 = sum(c.l1 for c in training.corrections if isinstance(c, SparseMasks))
    moments = masks.first_rows, masks.second_rows, masks.first_flat, masks.second_flat
    scalars = float(proximal), float(l1), float(model.least)
    mask_arrays = arrays.MaskArrays(masks.begun, masks.rows, masks.flat, *moments, *scalars)
    return params._replace(masks=mask_arrays)


def _memory_of_weights(memory: Mapping[str, Tensor]) -> Params:
    """Return the optimizer's state of the weights alone."""
    return {name: m for name, m in memory.items() if not is_mask(name.rpartition("/")[2])}


def _memory_of_masks(
    model: Masked, memory: Mapping[str, Tensor], params: arrays.ParamArrays
) -> Params:
    """Return the optimizer's state of the masks by the names of their weights; biases have 0."""
    mask_state, zero = {}, torch.zeros((), dtype=torch.from_numpy(params.flat).dtype)
    for name, m in memory.items():
        kind, slash, weight = name.rpartition("/")
        if not slash:
            mask_state[name] = m
        elif weight in model.masks:
            mask_state[name] = memory[f"{kind}/{model.masks[weight]}"]
        elif not is_mask(weight):
            mask_state[name] = zero.expand(m.shape)
    return mask_state


def _moment_arrays(
    model: Staged, memory: Memory, rows: np.ndarray, flat: np.ndarray, *, compact: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the optimizer's state, of the matrices and of the rest, and what matrices start as."""
    by_kind: dict[str, Params] = {"first": {}, "second": {}, "momentum": {}}
    for name, m in memory.items():
        kind, slash, weight = name.partition("/")
        if slash:  # rows of clients' own, or all of them
            by_kind[kind][weight] = m.t if isinstance(m, Patched) else m
    pairs = [by_kind["first"] or by_kind["momentum"], by_kind["second"]]
    by_rows = [
        _first_matrices(model, m, compact=compact)
        if m
        else (np.zeros_like(rows), np.empty((0, 0, 0), rows.dtype))
        for m in pairs
    ]
    by_flat = [flatten_weights(model, m) if m else np.zeros_like(flat) for m in pairs]
    return [by_kind for by_kind, _ in by_rows] + by_flat, [start_rows for _, start_rows in by_rows]


def _first_matrices(
    model: Staged, tensors: Mapping[str, Tensor], *, compact: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return memory for first matrices (C, F, D) as rows of all clients, (M, C * F, D).

    `compact`: they are given as rows already.

    And what kernels fill it with, client by client (`BegunRows`), which spares a pass over all of
    it; empty for several matrices, which are copied here.
    """
    matrices = [tensors[name] for name in model.first_maps]
    parts = matrices if compact else [t.flatten(0, 1) for t in matrices]
    if len(parts) > 1:
        rows: np.ndarray = torch.stack(parts).numpy()
        return rows, rows[:0]
    start_rows: np.ndarray = parts[0].contiguous()[None].numpy()
    return REUSED_MEMORY.empty(start_rows.shape, start_rows.dtype), start_rows


def weights_of(
    model: Staged,
    training: Training,
    block: ClientBlock,
    fields: StartFields,
    params: arrays.ParamArrays,
    steps_before: np.ndarray | None,
) -> dict[str, Stacked | Patched]:
    """Return trained weights; `before` (C,) are steps at the start if only used rows were held."""
    weights: dict[str, Stacked | Patched] = {
        name: Stacked(t) for name, t in unflatten_weights(model, params.flat).items()
    }
    if steps_before is None:
        weights |= {n: Stacked(t) for n, t in _split_by_client(model, block, params.rows).items()}
    else:
        steps = torch.from_numpy(params.steps - steps_before)
        for name, rows in zip(model.first_maps, params.rows, strict=True):
            assert isinstance(block.x, SparseRows)  # only then are there used rows
            t = torch.from_numpy(rows)
            path, flops = partial(untouched_rows_after, training), training.flops[name]
            weights[name] = patched(path, fields[name], t, block.x, steps, flops)
    return {name: weights[name] for name in model.weight_shapes}


def masked_weights_of(
    model: Masked, training: Training, block: ClientBlock, params: arrays.ParamArrays
) -> dict[str, Stacked | Patched]:
    """Return trained weights and masks."""
    weights, masks = (
        weights_of(model.inner, training, block, {}, part, None)
        for part in (params, _masks_as_params(params))
    )
    return {**weights, **{mask: masks[name] for name, mask in model.masks.items()}}


def masked_memory_of(
    model: Masked, training: Training, block: ClientBlock, params: arrays.ParamArrays
) -> Params:
    """Return the optimizer's state of weights and masks after training."""
    memory, masks = (
        memory_of(model.inner, training, block, part) for part in (params, _masks_as_params(params))
    )
    for name, m in masks.items():
        kind, _, weight = name.rpartition("/")
        if weight in model.masks:
            memory[f"{kind}/{model.masks[weight]}"] = m
    return memory


def _masks_as_params(params: arrays.ParamArrays) -> arrays.ParamArrays:
    """Return masks as if they were weights."""
    masks = params.masks
    assert masks is not None  # see `masked_params_of`
    moments = masks.first_rows, masks.second_rows, masks.first_flat, masks.second_flat
    no_bases = params.start[:0], params.which, masks.begun
    return arrays.ParamArrays(*no_bases, masks.rows, masks.flat, *moments, params.steps, None)


def memory_of(
    model: Staged, training: Training, block: ClientBlock, params: arrays.ParamArrays
) -> Params:
    """Return the optimizer's state after training, as `Optimizer.init` names it."""
    state: Params = {}
    for kind, (rows, flat) in _moments_by_kind(training, params).items():
        tensors = unflatten_weights(model, flat) | _split_by_client(model, block, rows)
        state |= {f"{kind}/{name}": tensors[name] for name in model.weight_shapes}
    if isinstance(training.optimizer, Adam):
        state["steps"] = torch.from_numpy(params.steps).float()
    return state


def _moments_by_kind(
    training: Training, params: arrays.ParamArrays
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the moments of first matrices and of other weights, as the optimizer names them."""
    optimizer = training.optimizer
    if isinstance(optimizer, SGD):
        velocities = params.first_rows, params.first_flat
        return {"momentum": velocities} if optimizer.momentum else {}
    return {
        "first": (params.first_rows, params.first_flat),
        "second": (params.second_rows, params.second_flat),
    }


@dataclass(frozen=True)
class _History:
    """What clients have had in common as long as they had an optimizer; its next steps.

    Attributes:
        bases: number of the base of the weights, and of each moment.
        before: steps that the optimizer has counted.
        count: steps to take.
    """

    bases: tuple[int, ...]
    before: int
    count: int


def kept_weights_and_memory(
    model: Staged,
    training: Training,
    block: ClientBlock,
    fields: StartFields,
    memory: Memory,
    params: arrays.ParamArrays,
    before: np.ndarray,
) -> tuple[dict[str, Stacked | Patched], Memory]:
    """Return trained weights and the optimizer's state, where both hold used rows only.

    Rows that meet no data follow the optimizer with a gradient of 0, once for each history of
    clients. Law: all bits are those of `weights_of` and `memory_of` with whole matrices.

    Args:
        model: the shape.
        training: how clients were trained.
        block: the clients.
        fields: weights at the start, see `starts_compact`.
        memory: optimizer state at the start, see `rows_apart`.
        params: used rows and other weights after training, with their moments.
        before: (C,) steps that the optimizer had counted.
    """
    assert isinstance(block.x, SparseRows)  # only then are there used rows
    used, by_kind = block.x.used, _moments_by_kind(training, params)
    counts = params.steps - before
    weights: dict[str, Stacked | Patched] = {
        name: Stacked(t) for name, t in unflatten_weights(model, params.flat).items()
    }
    state: dict[str, Tensor | Patched] = {
        f"{kind}/{name}": t
        for kind, (_, flat) in by_kind.items()
        for name, t in unflatten_weights(model, flat).items()
    }
    for number, name in enumerate(model.first_maps):
        start = [fields[name], *(memory[f"{kind}/{name}"] for kind in by_kind)]
        bases, which, steps_of_rows = _kept_bases(training, start, before, counts, block.x)
        unused = block.num_features - used.off.diff()
        spared = int((torch.from_numpy(counts) * unused).sum()) - steps_of_rows
        report_spared(float(training.flops[name] * bases[0].shape[2] * spared))
        rows = [params.rows, *(rows for rows, _ in by_kind.values())]
        names = [name, *(f"{kind}/{name}" for kind in by_kind)]
        trained = {
            own: Patched(base, which, torch.from_numpy(r[number]), used.feature, used.off)
            for own, base, r in zip(names, bases, rows, strict=True)
        }
        weights[name] = trained.pop(name)
        state |= trained
    if isinstance(training.optimizer, Adam):
        state["steps"] = torch.from_numpy(params.steps).float()
    ordered = {name: state[name] for name in memory}
    return {name: weights[name] for name in model.weight_shapes}, ordered


def _kept_bases(
    training: Training,
    start: Sequence[Tensor | Stacked | Patched],
    before: np.ndarray,
    counts: np.ndarray,
    x: SparseRows,
) -> tuple[list[Tensor], Tensor, int]:
    """Return bases (G, R, D) of weights and moments after training, and each client's, (C,).

    And how many steps of rows were taken for them.
    """
    fields = [field for field in start if isinstance(field, Patched)]
    assert len(fields) == len(start)  # see `has_used_rows`
    numbers = torch.stack([field.which for field in fields], dim=1).tolist()
    histories = [
        _History(tuple(bases), t, count)
        for bases, t, count in zip(numbers, before.tolist(), counts.tolist(), strict=True)
    ]
    distinct = list(dict.fromkeys(histories))
    place = {history: number for number, history in enumerate(distinct)}
    which = torch.tensor([place[history] for history in histories])
    bases = [field.base.new_empty(len(distinct), *field.base.shape[1:]) for field in fields]
    steps_of_rows = 0
    members, ends = which.bincount(minlength=len(distinct)).tolist(), x.used.off.tolist()
    for client, (number, history) in enumerate(zip(which.tolist(), histories, strict=True)):
        if distinct[number] is not history:
            continue  # not the first client of its history
        for base, field, own in zip(bases, fields, history.bases, strict=True):
            base[number] = field.base[own]
        wanted = np.ones(bases[0].shape[1], bool)
        if members[number] == 1:  # rows of its own are nobody's
            wanted[x.used.feature[ends[client] : ends[client + 1]].numpy()] = False
        steps_of_rows += history.count * int(wanted.sum())
        _take_steps_without_data(training, [base[number] for base in bases], wanted, history)
    return bases, which, steps_of_rows


def _take_steps_without_data(
    training: Training, tensors: Sequence[Tensor], wanted: np.ndarray, history: _History
) -> None:
    """Take a history's steps on its weights and moments (R, D), in place."""
    if history.count == 0:
        return
    p, m, *second = (t.numpy() for t in tensors)
    v = second[0] if second else p[:0]  # SGD has velocities only
    rule, memory = step_rule(training), np.empty((2, kernels_optim.TOGETHER), p.dtype)
    with flush_subnormals():  # as rows are in training
        kernels_optim.kept_rows_after(p, m, v, wanted, rule, history.before, history.count, memory)


def _split_by_client(model: Staged, block: ClientBlock, rows: np.ndarray) -> Params:
    """Return the first matrices (C, F, D) from rows of all clients."""
    shape = block.num_clients, block.num_features, rows.shape[2]
    return {
        name: torch.from_numpy(part).view(shape)
        for name, part in zip(model.first_maps, rows, strict=True)
    }


def untouched_rows_after(training: Training, start: Tensor, steps: int) -> Tensor:
    """Return weights (R, D) after some steps of a fresh optimizer with a gradient of 0.

    They are not to be changed in place: they are returned once more for the same weights.

    Raises:
        ProtocolError: a correction that is not compiled.
    """
    for correction in training.corrections:
        if not isinstance(correction, Proximal):
            raise ProtocolError(
                f"expected training that is compiled, got: correction {type(correction).__name__} "
                "is not compiled; run with kernels=torch"
            )
    if stays_without_data(training, start, steps):
        return start.clone(memory_format=torch.contiguous_format)
    # Compared by its bits, as kernels write weights in place, which torch does not see. NumPy takes
    # a quarter of the time of `torch.equal`.
    latest, bits = training.rows_without_data, start.contiguous().view(torch.int32).numpy()
    for others, before, after in latest:
        # Other weights mostly differ in the first row already.
        is_first_alike = others == steps and np.array_equal(before[:1], bits[:1])
        if is_first_alike and np.array_equal(before, bits):
            return after
    after = _step_without_data(training, start, steps)
    latest[MOST_LATEST - 1 :] = []
    latest.insert(0, (steps, bits.copy(), after))
    return after


MOST_LATEST = 2  # first matrices of a layer with a weight for the node itself


def _step_without_data(training: Training, start: Tensor, steps: int) -> Tensor:
    weight = start.clone(memory_format=torch.contiguous_format)
    with flush_subnormals():  # as rows are in training
        values = weight.numpy().reshape(-1)
        memory = np.empty((4, kernels_optim.TOGETHER), values.dtype)
        kernels_optim.untouched_rows_after(values, step_rule(training), steps, memory)
    return weight


# --- kernel work ---------------------------------------------------------------------------------
# Work of the compiled kernels in closed form: what the torch layers report for the same passes.
#
# C: clients. L: layers.


def _whole_counts(model: Staged, block: ClientBlock) -> np.ndarray:
    """Return the counts of `training.count` for one pass of all rows, (C, 2 L + 4)."""
    sums = tuple(stage.conv.sums for stage in model.stages)
    rows = block.off.diff()
    edges = block.adj.indptr[block.off].diff()
    entries = torch.zeros_like(rows)
    if isinstance(block.x, SparseRows):
        entries = block.x.csr.indptr[block.off].diff()
    edges_of = [edges * sums_neighbors for sums_neighbors in sums]
    columns = [rows] * (len(sums) + 1) + edges_of + [entries] * 2
    counts: np.ndarray = torch.stack([*columns, torch.ones_like(rows)], dim=1).numpy()
    return counts


def _flops_per_count(model: Staged, sparse: bool, passes: int) -> np.ndarray:
    """Return operations for one of each number that is counted (see `training.count`), (2 L + 4,).

    They are what the torch layers report for the same passes.

    Args:
        model: the shape.
        sparse: whether features are.
        passes: 1, or 2 with the way back (3 where both factors of a product have a gradient).
    """
    layers = len(model.stages)
    edges, entries, own_entries = layers + 1, 2 * layers + 1, 2 * layers + 2
    flops = [0] * (2 * layers + 4)
    for layer, stage in enumerate(model.stages):
        width, out, rooted = stage.inputs, stage.outputs, stage.conv.rooted
        inputs_of_stage, outputs_of_stage = layer, layer + 1
        if layer == 0 and sparse:
            flops[entries] += 2 * out * passes
            flops[own_entries] += 2 * out * passes * rooted
        else:
            products = passes + (passes > 1 and layer > 0)
            flops[inputs_of_stage] += 2 * width * out * products
            flops[outputs_of_stage] += 2 * width * out * products * rooted
        if stage.conv.sums and stage.conv.scales is not None:
            scales = stage.conv.scales
            flops[edges + layer] += 2 * out * passes
            flops[inputs_of_stage] += out * passes * (scales.pre is not None)
            flops[outputs_of_stage] += (
                out * passes * ((scales.post is not None) + 2 * (scales.own is not None))
            )
        flops[outputs_of_stage] += out * rooted  # the sum with the own row
        flops[outputs_of_stage] += out * passes  # bias
        if stage.drop > 0 and passes > 1:
            if layer:
                flops[inputs_of_stage] += 2 * width * passes
            else:  # features have no gradient
                flops[entries if sparse else inputs_of_stage] += 2 if sparse else 2 * width
        flops[outputs_of_stage] += out * passes * stage.relu
    return np.array(flops, np.float64)


def report_masks(model: Masked, block: ClientBlock, work: np.ndarray) -> None:
    """Report the products of weights and masks, in training and in predictions."""
    flops = 0.0
    for stage in model.inner.stages:
        # Rooted layers take them for the neighbors' map and for the own one.
        flops += len(stage.conv.maps) * stage.inputs * stage.outputs * (1 + stage.conv.rooted)
    report_clients(torch.from_numpy(3 * flops * work[:, -1]))  # 2 on the way back
    with work_for(Kind.EVALUATION):
        report_clients(torch.full((block.num_clients,), flops, dtype=torch.float64))


# --- plan ----------------------------------------------------------------------------------------
# What training reads besides weights, worked out once for all rounds.
#
# C: clients. L: layers.


@dataclass(frozen=True, eq=False)
class Plan:
    """A model, a schedule and a block's clients as the kernels read them.

    Attributes:
        data: the block.
        shape: model and schedule.
        counts: (C, 2 L + 4) numbers that a pass of all rows counts, see `training.count`.
        flops_of_count: (2 L + 4,) operations of training for one of each.
        loss_flops: (C,) operations of all losses of a round.
        pass_flops: (C,) float64 operations of a forward pass of all rows.
    """

    data: BlockArrays
    shape: arrays.ModelShape
    counts: np.ndarray
    flops_of_count: np.ndarray
    loss_flops: np.ndarray
    pass_flops: Tensor

    def take(self, positions: Tensor, off: Tensor) -> "Plan":
        """Return the plan for calls to the clients at `positions` (k,), with rows `off`."""
        places = positions.numpy()
        return replace(
            self,
            data=self.data.take(positions, off),
            counts=self.counts[places],
            loss_flops=self.loss_flops[places],
            pass_flops=self.pass_flops[positions],
        )


def plan(model: Staged, schedule: Schedule, block: ClientBlock, *, compact: bool) -> Plan:
    """Return the plan of training, or of a pass without steps, at a block's clients.

    `compact`: weights of a client are its used rows.
    """
    name = ("plan", model, schedule, compact)
    if name not in block.memo and block.source is not None:
        whole_block, positions = block.source
        whole_plan = plan(model, schedule, whole_block, compact=compact)
        block.memo[name] = whole_plan.take(positions, block.off)
    if name not in block.memo:
        is_drawn_by_flow = rule_of(schedule.neighbors) is not None
        own_schedule = with_full_fanout(model, schedule) if is_drawn_by_flow else schedule
        is_sparse, counts = isinstance(block.x, SparseRows), _whole_counts(model, block)
        max_degree = int(block.adj.degree.max()) if len(block.row_key) else 0
        # Every epoch has a loss of every training node, however they are grouped into steps.
        loss_flops = LOSS_FLOPS * model.outputs * schedule.epochs * block.num_train.numpy()
        pass_flops = counts.astype(np.float64) @ _flops_per_count(model, is_sparse, 1)
        block.memo[name] = Plan(
            prepare_block(model, block, compact=compact),
            model_shape(model, own_schedule, max_degree),
            counts,
            _flops_per_count(model, is_sparse, 2),
            loss_flops,
            torch.from_numpy(pass_flops),
        )
    value = block.memo[name]
    assert isinstance(value, Plan)
    return value


NO_STEPS = Schedule(0)


def prepare(training: Training, block: ClientBlock, keep_optimizer: bool) -> None:
    """Work out the plan of the clients' rounds, which usually start from one model for all."""
    model = training.model.staged
    assert model is not None  # see `CompiledBackend.trainer`
    check_labels(training, block)
    compact = isinstance(block.x, SparseRows) and training.alike
    if keep_optimizer:
        compact = compact and bool(rows_apart(training, block.x))
    plan(model, training.schedule, block, compact=compact)


def fit(training: Training, inputs: TrainingInputs) -> Fitted:
    """Train every client of a block; see `silograph.nn.fit.fit`."""
    model, block, memory = training.model.staged, inputs.block, inputs.memory
    assert model is not None  # see `CompiledBackend.trainer`
    # 1. Weights as the kernels read them: only the rows that clients use, where the others follow
    # from the start.
    fields = start_fields(model, inputs.start, block.num_clients)
    compact = training.alike and starts_compact(model, fields, block.x)
    if memory is not None:
        names = rows_apart(training, block.x)
        compact = compact and all(has_used_rows(memory[n], block.x) for n in names) and names != ()
        memory = memory if compact else whole_memory(memory)
    prepared = plan(model, training.schedule, block, compact=compact)
    used = int(prepared.data.called.used_off[-1])
    params = params_of(model, block, fields, memory, used=used, compact=compact)
    steps_before = params.steps.copy()
    # 2. Train.
    outputs, sampler = _train(model, training, inputs, prepared, params)
    steps = params.steps - steps_before
    report_training(model, training, prepared, outputs.work)
    # 3. Weights as others read them.
    if memory is not None and compact:
        weights, final_memory = kept_weights_and_memory(
            model, training, block, fields, memory, params, steps_before
        )
    else:
        before = steps_before if compact else None
        weights = weights_of(model, training, block, fields, params, before)
        final_memory = {} if memory is None else memory_of(model, training, block, params)
    return _to_fitted(weights, final_memory, outputs, steps, sampler)


def report_training(model: Staged, training: Training, prepared: Plan, work: np.ndarray) -> None:
    """Report the work of training, and separately that of predicting the clients' rows."""
    flops = work.astype(np.float64) @ prepared.flops_of_count + prepared.loss_flops
    flow = None if training.schedule.whole else rule_of(training.schedule.neighbors)
    if flow is not None and flow.policy == "trained" and flow.credit == "gate":
        widths = [2 * stage.outputs * stage.conv.sums for stage in model.stages]
        flops += work[:, : len(widths)] @ np.array(widths, np.float64)  # gates of messages
    report_clients(torch.from_numpy(flops))
    report_clients(torch.from_numpy(work[:, -1] * training.step_flops), Kind.OPTIMIZER)
    report_clients(prepared.pass_flops, Kind.EVALUATION)


def fit_masked(training: Training, inputs: TrainingInputs) -> Fitted:
    """Train weights with masks; no row of them is left out, as all of them may move."""
    model = training.model
    assert isinstance(model, Masked)  # see `CompiledBackend.trainer`
    block, memory = inputs.block, inputs.memory
    fields = start_fields(model, inputs.start, block.num_clients)
    memory = None if memory is None else whole_memory(memory)
    prepared = plan(model.inner, training.schedule, block, compact=False)
    params = masked_params_of(model, training, block, fields, memory)
    steps_before = params.steps.copy()
    outputs, sampler = _train(model.inner, training, inputs, prepared, params)
    report_training(model.inner, training, prepared, outputs.work)
    report_masks(model, block, outputs.work)
    weights = masked_weights_of(model, training, block, params)
    final_memory = {}
    if inputs.memory is not None:
        final_memory = masked_memory_of(model, training, block, params)
    return _to_fitted(weights, final_memory, outputs, params.steps - steps_before, sampler)


def _train(
    model: Staged,
    training: Training,
    inputs: TrainingInputs,
    prepared: Plan,
    params: arrays.ParamArrays,
) -> tuple[arrays.Filled, State]:
    """Train the weights in `params` in place; return outputs and the sampler's new state."""
    schedule, block, data, shape = training.schedule, inputs.block, prepared.data, prepared.shape
    flow = None if schedule.whole else rule_of(schedule.neighbors)
    outputs = arrays.Filled(
        loss=np.zeros(block.num_clients),
        logits=np.empty((int(block.off[-1]), model.outputs), params.flat.dtype),
        work=np.zeros((block.num_clients, 2 * len(model.stages) + 4), np.int64),
    )
    if flow is not None:
        return outputs, _train_flow(model, training, flow, inputs, prepared, params, outputs)
    seed, rule = np.uint64(inputs.key.value), step_rule(training)
    step_arrays, steps_before = StepArrays(data.rows, data.inputs, shape, rule), params.steps.copy()

    def train(first: int, end: int) -> None:
        s, spare = _memory_of_thread(data, shape, rule, params, first, end)
        kernels.train(first, end, data.called, step_arrays, params, seed, outputs, s, spare)

    run_in_threads(block, train)
    if shape.fanout is None:  # all steps of a client do the same
        outputs.work[:] = (params.steps - steps_before)[:, None] * prepared.counts
    return outputs, {}


def _train_flow(
    model: Staged,
    training: Training,
    flow: FlowRule,
    inputs: TrainingInputs,
    prepared: Plan,
    params: arrays.ParamArrays,
    outputs: arrays.Filled,
) -> State:
    """Do what `_train` does, on nodes that flow networks choose; return their new state."""
    block, data, shape = inputs.block, prepared.data, prepared.shape
    seed, rule = np.uint64(inputs.key.value), step_rule(training)
    networks = networks_of(flow, model, block, inputs.sampler)
    rows_without_own = data.rows._replace(own=np.zeros_like(data.rows.own))
    step_arrays = StepArrays(rows_without_own, data.inputs, shape, rule)

    def train(first: int, end: int) -> None:
        s, spare = _memory_of_thread(data, shape, rule, params, first, end)
        flows, inner = networks.sampling.flows, networks.sampling.shape
        clients, flat = data.called.position[first:end], flows.flat
        own = arrays.scratch(
            data.rows,
            networks.sampling.inputs,
            inner.memory,
            clients,
            flat.dtype,
            flat.shape[1],
            inner.width,
        )
        if inner.gated and inner.learns:
            s = s._replace(credit=np.empty(len(s.nodes), flat.dtype))
        buffers = flow_kernels.Buffers(s, spare, flow_kernels.flow_memory(own, inner.hops))
        flow_kernels.train_flow(
            first,
            end,
            data.called,
            data.rows,
            step_arrays,
            params,
            networks.sampling,
            seed,
            outputs,
            buffers,
        )

    run_in_threads(block, train)
    return networks.new_state()


def _memory_of_thread(
    data: BlockArrays,
    shape: arrays.ModelShape,
    rule: arrays.StepRule,
    params: arrays.ParamArrays,
    first: int,
    end: int,
) -> tuple[arrays.Scratch, arrays.Spare]:
    """Return memory for the training of the called clients `first` to `end`."""
    clients, flat, width = data.called.position[first:end], params.flat, params.rows.shape[2]
    s = arrays.scratch(data.rows, data.inputs, shape, clients, flat.dtype, flat.shape[1], width)
    single_step = shape.fanout is None and shape.epochs == 1 and shape.batch == 0
    return s, arrays.spare(params, rule, len(s.rows), single_step=single_step)


def _to_fitted(
    weights: dict[str, Stacked | Patched],
    memory: Memory,
    outputs: arrays.Filled,
    steps: np.ndarray,
    sampler: State,
) -> Fitted:
    """Return the result of training."""
    logits = torch.from_numpy(outputs.logits)
    loss = torch.from_numpy(outputs.loss).to(logits.dtype)
    return Fitted(weights, memory, loss, logits, torch.from_numpy(steps), sampler)


def predict(model: Staged, weights: Mapping[str, Tensor], block: ClientBlock) -> Tensor:
    """Return logits (n, K) of one model for all clients."""
    prepared = plan(model, NO_STEPS, block, compact=isinstance(block.x, SparseRows))
    data, shape = prepared.data, prepared.shape
    first = [weights[name].contiguous().numpy() for name in model.first_maps]
    w = arrays.Weights(
        first[0], first[-1], flatten_weights(model, {k: t[None] for k, t in weights.items()})[0]
    )
    logits = np.empty((int(block.off[-1]), model.outputs), w.flat.dtype)

    def run(start: int, end: int) -> None:
        clients, dtype = data.called.position[start:end], logits.dtype
        s = arrays.scratch(data.rows, data.inputs, shape, clients, dtype, 1, 1)
        inputs = data.called, data.rows, data.inputs, data.features, shape
        kernels.predict(start, end, *inputs, w, logits, s)

    run_in_threads(block, run)
    report_clients(prepared.pass_flops)
    return torch.from_numpy(logits)
