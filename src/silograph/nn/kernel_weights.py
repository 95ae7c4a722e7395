"""Weights and optimizer state of a block's clients, into the kernels' arrays and out of them.

C: clients. F: features. D: width of the first matrices. M: first matrices.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from silograph.core.payload import Patched, Stacked, dense
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Params
from silograph.nn.fit import patched
from silograph.nn.forward import Staged
from silograph.nn.kernel_block import contiguous
from silograph.nn.kernel_model import flattened, step_rule, unflattened
from silograph.nn.kernel_threads import flushed
from silograph.nn.kernels import arrays
from silograph.nn.kernels import optim as kernels_optim
from silograph.nn.masked import Masked, Near, SparseMasks, is_mask
from silograph.nn.optim import SGD, Adam
from silograph.nn.schedule import Training
from silograph.nn.start import StartFields, joined_bases, used_rows, whole


def params_of(
    model: Staged,
    block: ClientBlock,
    fields: StartFields,
    memory: Mapping[str, Tensor] | None,
    *,
    used: int,
    compact: bool,
) -> arrays.ParamArrays:
    """Return weights and moments; first matrices have `used` rows in all, those that clients use.

    `compact`: these are not all of their rows.
    """
    maps = model.first_maps
    flat = flattened(model, {n: whole(field) for n, field in fields.items() if n not in maps})
    none3, none2 = np.empty((0, 0, 0), flat.dtype), np.empty((0, 0), flat.dtype)
    begun, begun_moments = none3, [none3, none3]
    given, which = joined_bases([fields[name] for name in maps])
    if len(given):
        rows = np.empty((len(maps), used, given.shape[-1]), flat.dtype)
    elif compact:
        rows = torch.stack([used_rows(fields[name], block.x) for name in maps]).numpy()
    else:
        rows, begun = _matrices(model, {name: dense(fields[name]) for name in maps})
    moments = [none3, none3, none2, none2]
    steps = np.zeros(block.num_clients, np.int64)
    if memory is not None:
        moments, begun_moments = _moments(model, memory, rows, flat)
        # SGD does not count: its velocity is what it was given, from the first step on.
        steps = np.ones(block.num_clients, np.int64)
        if "steps" in memory:
            steps = memory["steps"].to(torch.int64).contiguous().numpy()
    starts = arrays.BegunRows(begun, *begun_moments)
    weights = contiguous(given), contiguous(which), starts, rows, flat
    first_rows, second_rows, first_flat, second_flat = moments
    moved = first_rows, second_rows, first_flat, second_flat
    return arrays.ParamArrays(*weights, *moved, steps, _no_masks(rows, flat))


def _no_masks(rows: np.ndarray, flat: np.ndarray) -> arrays.MaskArrays:
    """Return what stands for masks where there are none."""
    none3, none2 = rows[:, :0], flat[:, :0]
    starts = arrays.BegunRows(none3, none3, none3)
    return arrays.MaskArrays(starts, none3, none2, none3, none3, none2, none2, 0.0, 0.0, 0.0)


def masked_params_of(
    model: Masked,
    training: Training,
    block: ClientBlock,
    fields: StartFields,
    memory: Mapping[str, Tensor],
) -> arrays.ParamArrays:
    """Return weights, masks and moments; first matrices have all of their rows."""
    inner, used = model.inner, block.num_clients * model.features
    own = {name: fields[name] for name in inner.weight_shapes}
    params = params_of(inner, block, own, _of_weights(memory), used=used, compact=False)
    one = torch.ones((), dtype=torch.from_numpy(params.flat).dtype)
    filled = {
        name: fields[model.masks[name]]
        if name in model.masks
        else Stacked(one.expand(block.num_clients, *shape))
        for name, shape in inner.weight_shapes.items()
    }
    masks = params_of(
        inner, block, filled, _of_masks(model, memory, params), used=used, compact=False
    )
    near = sum(c.weight for c in training.corrections if isinstance(c, Near))
    l1 = sum(c.l1 for c in training.corrections if isinstance(c, SparseMasks))
    moments = masks.first_rows, masks.second_rows, masks.first_flat, masks.second_flat
    numbers = float(near), float(l1), float(model.least)
    of_masks = arrays.MaskArrays(masks.begun, masks.rows, masks.flat, *moments, *numbers)
    return params._replace(masks=of_masks)


def _of_weights(memory: Mapping[str, Tensor]) -> Params:
    """Return the optimizer's state of the weights alone."""
    return {name: m for name, m in memory.items() if not is_mask(name.rpartition("/")[2])}


def _of_masks(model: Masked, memory: Mapping[str, Tensor], params: arrays.ParamArrays) -> Params:
    """Return the optimizer's state of the masks by the names of their weights; biases have 0."""
    found, zero = {}, torch.zeros((), dtype=torch.from_numpy(params.flat).dtype)
    for name, m in memory.items():
        kind, slash, weight = name.rpartition("/")
        if not slash:
            found[name] = m
        elif weight in model.masks:
            found[name] = memory[f"{kind}/{model.masks[weight]}"]
        elif not is_mask(weight):
            found[name] = zero.expand(m.shape)
    return found


def _moments(
    model: Staged, memory: Mapping[str, Tensor], rows: np.ndarray, flat: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the optimizer's state, of the matrices and of the rest, and what matrices start as."""
    found: dict[str, Params] = {"first": {}, "second": {}, "momentum": {}}
    for name, m in memory.items():
        kind, slash, weight = name.partition("/")
        if slash:
            found[kind][weight] = m
    pairs = [found["first"] or found["momentum"], found["second"]]
    by_rows = [
        _matrices(model, m) if m else (np.zeros_like(rows), np.empty((0, 0, 0), rows.dtype))
        for m in pairs
    ]
    by_flat = [flattened(model, m) if m else np.zeros_like(flat) for m in pairs]
    return [found for found, _ in by_rows] + by_flat, [begun for _, begun in by_rows]


def _matrices(model: Staged, tensors: Mapping[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return memory for first matrices (C, F, D) as rows of all clients, (M, C * F, D).

    And what kernels fill it with, client by client (`BegunRows`), which spares a pass over all of
    it; empty for several matrices, which are copied here.
    """
    parts = [tensors[name].flatten(0, 1) for name in model.first_maps]
    if len(parts) > 1:
        rows: np.ndarray = torch.stack(parts).numpy()
        return rows, rows[:0]
    begun: np.ndarray = parts[0].contiguous()[None].numpy()
    return np.empty_like(begun), begun


def weights_of(
    model: Staged,
    training: Training,
    block: ClientBlock,
    fields: StartFields,
    params: arrays.ParamArrays,
    before: np.ndarray | None,
) -> dict[str, Stacked | Patched]:
    """Return trained weights; `before` (C,) are steps at the start if only used rows were held."""
    found: dict[str, Stacked | Patched] = {
        name: Stacked(t) for name, t in unflattened(model, params.flat).items()
    }
    if before is None:
        found |= {n: Stacked(t) for n, t in _split(model, block, params.rows).items()}
    else:
        steps = torch.from_numpy(params.steps - before)
        for name, rows in zip(model.first_maps, params.rows, strict=True):
            assert isinstance(block.x, SparseRows)  # only then are there used rows
            t = torch.from_numpy(rows)
            path, flops = partial(rest, training), training.flops_of(name)
            found[name] = patched(path, fields[name], t, block.x, steps, flops)
    return {name: found[name] for name in model.weight_shapes}


def masked_weights_of(
    model: Masked, training: Training, block: ClientBlock, params: arrays.ParamArrays
) -> dict[str, Stacked | Patched]:
    """Return trained weights and masks."""
    own, masks = (
        weights_of(model.inner, training, block, {}, part, None)
        for part in (params, _as_params(params))
    )
    return {**own, **{mask: masks[name] for name, mask in model.masks.items()}}


def masked_memory_of(
    model: Masked, training: Training, block: ClientBlock, params: arrays.ParamArrays
) -> Params:
    """Return the optimizer's state of weights and masks after training."""
    own, masks = (
        memory_of(model.inner, training, block, part) for part in (params, _as_params(params))
    )
    for name, m in masks.items():
        kind, _, weight = name.rpartition("/")
        if weight in model.masks:
            own[f"{kind}/{model.masks[weight]}"] = m
    return own


def _as_params(params: arrays.ParamArrays) -> arrays.ParamArrays:
    """Return masks as if they were weights."""
    of = params.masks
    moments = of.first_rows, of.second_rows, of.first_flat, of.second_flat
    none = params.start[:0], params.which, of.begun
    return arrays.ParamArrays(*none, of.rows, of.flat, *moments, params.steps, of)


def memory_of(
    model: Staged, training: Training, block: ClientBlock, params: arrays.ParamArrays
) -> Params:
    """Return the optimizer's state after training, as `Optimizer.init` names it."""
    optimizer = training.optimizer
    moments = {
        "first": (params.first_rows, params.first_flat),
        "second": (params.second_rows, params.second_flat),
    }
    if isinstance(optimizer, SGD):
        moments = {"momentum": moments["first"]} if optimizer.momentum else {}
    state: Params = {}
    for kind, (rows, flat) in moments.items():
        tensors = unflattened(model, flat) | _split(model, block, rows)
        state |= {f"{kind}/{name}": tensors[name] for name in model.weight_shapes}
    if isinstance(optimizer, Adam):
        state["steps"] = torch.from_numpy(params.steps).float()
    return state


def _split(model: Staged, block: ClientBlock, rows: np.ndarray) -> Params:
    """Return the first matrices (C, F, D) from rows of all clients."""
    shape = block.num_clients, block.num_features, rows.shape[2]
    return {
        name: torch.from_numpy(part).view(shape)
        for name, part in zip(model.first_maps, rows, strict=True)
    }


def rest(training: Training, start: Tensor, steps: int) -> Tensor:
    """Return where weights (R, D) are after some steps of a fresh optimizer without data."""
    weight = start.clone(memory_format=torch.contiguous_format)
    with flushed():  # as rows are in training
        kernels_optim.rest(weight.numpy(), step_rule(training), steps)
    return weight
