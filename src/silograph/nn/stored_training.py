"""Steps of local training on stored rows, for the clients of a block together, in torch.

A client in training is a mapping of fields, so that it can wait in its state for rows of other
silos between two steps: `weights/NAME`, `memory/NAME` of the optimizer, and `steps` (C,) int64
taken by it. First weights are rows of used features where features are sparse and the optimizer is
fresh.

C: clients. n: rows. b: rows of a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import Patched, Ragged, Stacked, from_bases, put, take_all
from silograph.core.payload import state_of as fields_of
from silograph.core.work import report_rows, report_steps
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Params
from silograph.nn.fit import held_start, patched, rest
from silograph.nn.forward import Staged
from silograph.nn.schedule import Training
from silograph.nn.start import start_fields, starts_compact
from silograph.nn.steps import LOSS_FLOPS, Held, features_for, own_copy
from silograph.nn.stored_rows import Batch, StoredRows, batch_pass
from silograph.task.registry import task_of

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


def started(
    model: Staged,
    training: Training,
    block: ClientBlock,
    weights: Mapping[str, Tensor],
    memory: Mapping[str, Tensor] | None,
    *,
    compact: bool,
) -> Held:
    """Return clients before their first step.

    Args:
        model: the shape.
        training: how they train.
        block: the clients.
        weights: that all start from.
        memory: optimizer state (C, ...) to go on from; None: a fresh one.
        compact: whether first weights may be held as rows of used features.
    """
    fields = start_fields(model, weights, block.num_clients)
    small = compact and memory is None and starts_compact(model, fields, block.x)
    held = held_start(model, block, fields, compact=small)
    off = {name: f.off for name, f in held.items() if isinstance(f, Ragged)}
    given = memory
    if given is None:
        given = training.optimizer.init({name: f.t for name, f in held.items()})
    found: Held = {f"weights/{name}": f for name, f in held.items()}
    for name, m in given.items():
        if name != STEPS:
            own = off.get(name.rpartition("/")[2])
            t = m if memory is None else own_copy(m)  # zeros that nobody has written take no memory
            found[f"memory/{name}"] = Stacked(t) if own is None else Ragged(t, own)
    steps = torch.zeros(block.num_clients, dtype=torch.int64, device=block.off.device)
    if memory is not None and STEPS in memory:
        steps = memory[STEPS].long()
    return found | {STEPS: Stacked(steps)}


def weights_of(held: Held) -> Params:
    """Return the weights, (C, ...) or rows of all clients."""
    return {k.removeprefix("weights/"): f.t for k, f in held.items() if k.startswith("weights/")}


def is_compact(held: Held) -> bool:
    """Whether first weights are rows of used features."""
    return any(isinstance(f, Ragged) for f in held.values())


def memory_of(training: Training, held: Held) -> Params:
    """Return the optimizer's state (C, ...), as `Optimizer.init` makes it."""
    found = {k.removeprefix("memory/"): f.t for k, f in held.items() if k.startswith("memory/")}
    counts = STEPS in training.optimizer.init({"": held[STEPS].t.float()})
    return found | ({STEPS: held[STEPS].t.float()} if counts else {})


def alike(held: Held, active: Tensor) -> list[Tensor]:
    """Return the clients in the mask (C,) bool, in groups that have taken equally many steps."""
    steps = held[STEPS].t
    counts = torch.unique(steps[active])
    return [(active & (steps == count)).nonzero()[:, 0] for count in counts]


def part_of(held: Held, positions: Tensor) -> Held:
    """Return a copy of the clients at `positions` (k,) int64."""
    return fields_of(take_all(held, positions))


def put_back(held: Held, part: Held, positions: Tensor) -> Held:
    """Return all clients, those at `positions` as in `part`."""
    return {name: put(held[name], f, positions) for name, f in part.items()}


def step_(
    model: Staged,
    training: Training,
    block: ClientBlock,
    held: Held,
    chosen: TrainingRows,
    stored: StoredRows,
    key: Key,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Take one step in place; all clients have rows, and have taken equally many steps.

    Returns:
        The loss of each row (b,), and what entered each stage of `stored_stages`, (b, I).
    """
    batch, weights = chosen.batch, weights_of(held)
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    x = features_for(block, is_compact(held))
    with torch.enable_grad():
        logits, entered = batch_pass(model, leaves, block, x, batch, stored, key)
        report_rows(batch.off, LOSS_FLOPS * model.outputs)
        losses = task_of(model.task).loss(logits, block.y[batch.rows])
        share = chosen.share
        if share is None:
            counts = batch.off.diff()
            share = torch.repeat_interleave(1 / counts.to(losses.dtype), counts)
        # Clients share no weight, so the gradient of the sum holds each client's own.
        found = torch.autograd.grad((losses * share).sum(), list(leaves.values()))
    report_steps(training.step_flops)
    memory = {k.removeprefix("memory/"): f.t for k, f in held.items() if k.startswith("memory/")}
    counted = memory | {STEPS: held[STEPS].t[:1].float()}
    training.optimizer.step_(weights, dict(zip(leaves, found, strict=True)), counted)
    held[STEPS].t.add_(1)
    return losses.detach(), entered


def finished(
    training: Training, block: ClientBlock, held: Held, base: Mapping[str, Tensor]
) -> dict[str, Stacked | Patched]:
    """Return trained weights, (C, ...); used rows stand in what the others have become.

    Args:
        training: how they were trained.
        block: the clients.
        held: they.
        base: (F, D) what the first weights were, where they are held as used rows.
    """
    nobody = torch.zeros(block.num_clients, dtype=torch.int64, device=block.off.device)
    weights: dict[str, Stacked | Patched] = {}
    for name, w in weights_of(held).items():
        if isinstance(held[f"weights/{name}"], Stacked):
            weights[name] = Stacked(w)
        else:
            assert isinstance(block.x, SparseRows)  # only then are there used rows
            start, path = from_bases(base[name][None], nobody), partial(rest, training)
            flops = training.flops_of(name)
            weights[name] = patched(path, start, w, block.x, held[STEPS].t, flops)
    return weights
