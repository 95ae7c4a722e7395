"""Weights and optimizer state of a block's clients, into the kernels' arrays and out of them.

C: clients. F: features. D: width of the first matrices. M: first matrices.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from silograph.core.payload import Patched, Stacked
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Params
from silograph.nn.fit import patched
from silograph.nn.forward import Staged
from silograph.nn.kernel_block import contiguous
from silograph.nn.kernel_model import flattened, step_rule, unflattened
from silograph.nn.kernels import arrays
from silograph.nn.kernels import optim as kernels_optim
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
    given, which = joined_bases([fields[name] for name in maps])
    if len(given):
        rows = np.empty((len(maps), used, given.shape[-1]), flat.dtype)
    elif compact:
        rows = torch.stack([used_rows(fields[name], block.x) for name in maps]).numpy()
    else:
        rows = _matrices(model, {name: whole(fields[name]) for name in maps})
    moments = [none3, none3, none2, none2]
    steps = np.zeros(block.num_clients, np.int64)
    if memory is not None:
        moments = _moments(model, memory, rows, flat)
        # SGD does not count: its velocity is what it was given, from the first step on.
        steps = np.ones(block.num_clients, np.int64)
        if "steps" in memory:
            steps = memory["steps"].to(torch.int64).contiguous().numpy()
    weights = given.numpy(), contiguous(which), rows, flat
    first_rows, second_rows, first_flat, second_flat = moments
    return arrays.ParamArrays(*weights, first_rows, second_rows, first_flat, second_flat, steps)


def _moments(
    model: Staged, memory: Mapping[str, Tensor], rows: np.ndarray, flat: np.ndarray
) -> list[np.ndarray]:
    """Return copies of the optimizer's state: of the matrices, then of the rest."""
    found: dict[str, Params] = {"first": {}, "second": {}, "momentum": {}}
    for name, m in memory.items():
        kind, slash, weight = name.partition("/")
        if slash:
            found[kind][weight] = m
    pairs = [found["first"] or found["momentum"], found["second"]]
    by_rows = [_matrices(model, m) if m else np.zeros_like(rows) for m in pairs]
    by_flat = [flattened(model, m) if m else np.zeros_like(flat) for m in pairs]
    return by_rows + by_flat


def _matrices(model: Staged, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Return first matrices (C, F, D) as rows of all clients, (M, C * F, D), a copy."""
    rows: np.ndarray = torch.stack([tensors[n].flatten(0, 1) for n in model.first_maps]).numpy()
    return rows


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
    kernels_optim.rest(weight.numpy(), step_rule(training), steps)
    return weight
