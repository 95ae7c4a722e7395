"""Local training of a user's own module, for a block of one client (see `per_client`)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Stacked
from silograph.core.work import report_each, work_for
from silograph.graph.block.block import ClientBlock
from silograph.nn.conv import Params
from silograph.nn.fit import Fitted, Training
from silograph.nn.mini_batches import batches
from silograph.nn.operation_counter import OperationCounter
from silograph.nn.own_module import (
    Client,
    ModuleModel,
    call,
    client_of,
    forward,
    module_for,
)
from silograph.nn.start import Start, start_fields, whole
from silograph.nn.steps import LOSS_FLOPS, own_copy
from silograph.task.registry import task_of


def fit(
    training: Training,
    block: ClientBlock,
    start: Start,
    memory: Mapping[str, Tensor] | None,
    key: Key,
) -> Fitted:
    """Train one client; see `silograph.nn.fit.fit`. Every step passes all of its nodes and edges.

    Raises:
        ConfigError: the module raises, or returns something else than logits.
    """
    model, optimizer, schedule = training.model, training.optimizer, training.schedule
    assert isinstance(model, ModuleModel)  # see `tiers.fit`
    client = client_of(block)
    weights = {name: whole(field) for name, field in start_fields(model, start, 1).items()}
    begun = {name: w.clone() for name, w in weights.items()} if training.corrections else {}
    state = (
        optimizer.init(weights) if memory is None else {k: own_copy(m) for k, m in memory.items()}
    )
    module = module_for(model, client.x, training=True)
    total, steps = torch.zeros(1, dtype=torch.float64, device=client.x.device), 0
    for epoch in range(schedule.epochs if int(block.num_train) else 0):
        total = torch.zeros_like(total)
        epoch_key = key.fold("epoch", epoch)
        for number, seeds in enumerate(batches(block, schedule.batch_size, epoch_key)):
            leaves = {name: w.detach()[0].requires_grad_() for name, w in weights.items()}
            step_key = epoch_key.fold("batch", number)
            loss, found = _loss(model, module, leaves, client, block.y, seeds, step_key)
            grads = {name: g[None] for name, g in found.items()}
            optimizer.step_(weights, training.correct(grads, weights, begun), state)
            report_each(training.step_flops)
            steps += 1
            total = total + loss.double() * len(seeds) / block.num_train
    with torch.no_grad(), work_for(Kind.EVALUATION):
        logits = forward(model, weights, block)
    kept = {} if memory is None else state
    fields: dict[str, Stacked | Patched] = {name: Stacked(w) for name, w in weights.items()}
    return Fitted(fields, kept, total.to(logits.dtype), logits, torch.tensor([steps]))


def _loss(
    model: ModuleModel,
    module: torch.nn.Module,
    leaves: Params,
    client: Client,
    y: Tensor,
    seeds: Tensor,
    key: Key,
) -> tuple[Tensor, Params]:
    """Return the mean loss of rows `seeds` (s,), and its gradients."""
    with OperationCounter() as tally:
        logits = call(model, module, leaves, client, key)
    known = logits.detach().requires_grad_()
    loss = task_of(model.task).loss(known[seeds], y[seeds]).mean()
    cotangent = torch.autograd.grad(loss, known)
    with tally:
        grads = torch.autograd.grad(
            logits, list(leaves.values()), cotangent, allow_unused=True, materialize_grads=True
        )
    report_each(float(tally.flops + LOSS_FLOPS * model.outputs * len(seeds)))
    return loss.detach(), dict(zip(leaves, grads, strict=True))
