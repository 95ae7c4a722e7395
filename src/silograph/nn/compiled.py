"""Hands blocks to the compiled kernels: arrays in, tensors out, work counted.

Kernels check no bounds. What does not come from the block itself is checked by `nn.backends`, which
alone calls these functions.

A block as arrays is in `kernel_block`, the model in `kernel_model`, weights in `kernel_weights`.

n: rows. K: outputs.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from silograph.core.payload import Patched, Stacked, State
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Params
from silograph.nn.doors import dtype_of
from silograph.nn.flow import FlowRule, rule_of
from silograph.nn.flow_compiled import as_drawn, networks_of
from silograph.nn.forward import Staged
from silograph.nn.kernel_block import BlockArrays, prepared
from silograph.nn.kernel_model import flattened, model_shape, step_rule
from silograph.nn.kernel_threads import share_out
from silograph.nn.kernel_weights import (
    masked_memory_of,
    masked_params_of,
    masked_weights_of,
    memory_of,
    params_of,
    weights_of,
)
from silograph.nn.kernel_weights import rest as rest
from silograph.nn.kernel_work import report_masks, report_pass, report_training
from silograph.nn.kernels import arrays
from silograph.nn.kernels import flow_training as flow_kernels
from silograph.nn.kernels import training as kernels
from silograph.nn.kernels.training import StepArrays
from silograph.nn.masked import Masked
from silograph.nn.schedule import Fitted, Schedule, Training, TrainingInputs
from silograph.nn.start import start_fields, starts_compact

PREDICTS = Schedule(0)


def fit(model: Staged, training: Training, inputs: TrainingInputs) -> Fitted:
    """Train every client of a block; see `silograph.nn.fit.fit`."""
    if isinstance(training.model, Masked):
        return _fit_masked(training.model, training, inputs)
    block, memory = inputs.block, inputs.memory
    fields = start_fields(model, inputs.start, block.num_clients)
    compact = memory is None and training.alike and starts_compact(model, fields, block.x)
    data = prepared(model, block, compact=compact)
    params = params_of(
        model, block, fields, memory, used=int(data.called.used_off[-1]), compact=compact
    )
    before = params.steps.copy()
    filled, sampler = _train(model, training, inputs, data, params)
    report_training(model, training, block, filled.work)
    weights = weights_of(model, training, block, fields, params, before if compact else None)
    kept = {} if memory is None else memory_of(model, training, block, params)
    return _fitted(weights, kept, filled, params.steps - before, sampler)


def _fit_masked(model: Masked, training: Training, inputs: TrainingInputs) -> Fitted:
    """Train weights with masks; no row of them is left out, as all of them may move."""
    block, memory = inputs.block, inputs.memory
    fields = start_fields(model, inputs.start, block.num_clients)
    if memory is None:
        clients, dtype = block.num_clients, dtype_of(block)
        shapes = model.weight_shapes.items()
        like = {name: torch.empty(clients, *shape, dtype=dtype) for name, shape in shapes}
        memory = training.optimizer.init(like)
    data = prepared(model.inner, block, compact=False)
    params = masked_params_of(model, training, block, fields, memory)
    before = params.steps.copy()
    filled, sampler = _train(model.inner, training, inputs, data, params)
    report_training(model.inner, training, block, filled.work)
    report_masks(model, block, filled.work)
    weights = masked_weights_of(model, training, block, params)
    kept = {}
    if inputs.memory is not None:
        kept = masked_memory_of(model, training, block, params)
    return _fitted(weights, kept, filled, params.steps - before, sampler)


def _train(
    model: Staged,
    training: Training,
    inputs: TrainingInputs,
    data: BlockArrays,
    params: arrays.ParamArrays,
) -> tuple[arrays.Filled, State]:
    """Train the weights in `params` in place; return what comes of it, and of the sampler."""
    flow = rule_of(training.schedule.neighbors)
    if flow is not None:
        return _train_flow(model, training, flow, inputs, data, params)
    block, filled = inputs.block, _unfilled(model, inputs.block, params)
    seed, rule = np.uint64(inputs.key.value), step_rule(training)
    shape = _shape(model, training.schedule, block)

    def train(first: int, end: int) -> None:
        kernels.train(
            first, end, data.called, data.rows, data.inputs, shape, rule, params, seed, filled
        )

    share_out(block, train)
    return filled, {}


def _train_flow(
    model: Staged,
    training: Training,
    by: FlowRule,
    inputs: TrainingInputs,
    data: BlockArrays,
    params: arrays.ParamArrays,
) -> tuple[arrays.Filled, State]:
    """Do the same on nodes that flow networks choose."""
    block, filled = inputs.block, _unfilled(model, inputs.block, params)
    seed, rule = np.uint64(inputs.key.value), step_rule(training)
    shape = _shape(model, as_drawn(model, training.schedule), block)
    networks = networks_of(by, model, block, inputs.sampler)
    linked = data.rows._replace(own=np.zeros_like(data.rows.own))
    of = StepArrays(linked, data.inputs, shape, rule)

    def train(first: int, end: int) -> None:
        flow_kernels.train_flow(
            first, end, data.called, data.rows, of, params, networks.sampling, seed, filled
        )

    share_out(block, train)
    return filled, networks.after()


def _shape(model: Staged, schedule: Schedule, block: ClientBlock) -> arrays.ModelShape:
    """Return model and schedule as kernels read them, worked out once where nothing is drawn."""
    if not schedule.whole:
        most = int(block.adj.degree.max()) if len(block.row_key) else 0
        return model_shape(model, schedule, most)
    name = ("shape", model, schedule.epochs)
    return block.origin.once(name, arrays.ModelShape, lambda: model_shape(model, schedule))


def _fitted(
    weights: dict[str, Stacked | Patched],
    kept: Params,
    filled: arrays.Filled,
    steps: np.ndarray,
    sampler: State,
) -> Fitted:
    """Return what training leaves."""
    logits = torch.from_numpy(filled.logits)
    loss = torch.from_numpy(filled.loss).to(logits.dtype)
    return Fitted(weights, kept, loss, logits, torch.from_numpy(steps), sampler)


def _unfilled(model: Staged, block: ClientBlock, params: arrays.ParamArrays) -> arrays.Filled:
    """Return memory for what training fills."""
    return arrays.Filled(
        loss=np.zeros(block.num_clients),
        logits=np.empty((int(block.off[-1]), model.outputs), params.flat.dtype),
        work=np.zeros((block.num_clients, 2 * len(model.stages) + 4), np.int64),
    )


def predict(model: Staged, weights: Mapping[str, Tensor], block: ClientBlock) -> Tensor:
    """Return logits (n, K) of one model for all clients."""
    data = prepared(model, block, compact=isinstance(block.x, SparseRows))
    first = [weights[name].contiguous().numpy() for name in model.first_maps]
    w = arrays.Weights(
        first[0], first[-1], flattened(model, {k: t[None] for k, t in weights.items()})[0]
    )
    logits = np.empty((int(block.off[-1]), model.outputs), w.flat.dtype)
    shape = _shape(model, PREDICTS, block)

    def run(start: int, end: int) -> None:
        kernels.predict(
            start, end, data.called, data.rows, data.inputs, data.features, shape, w, logits
        )

    share_out(block, run)
    report_pass(model, block)
    return torch.from_numpy(logits)
