"""Local training: steps of every client of a block on its own training nodes.

This is the torch form, for every layer and device; `silograph.nn.compiled` does the same for the
common ones in a fraction of the time.

C: clients. n: rows. F: features. H: hidden width. U: used rows of the first weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Ragged, Stacked
from silograph.core.work import report_spared, work_for
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Params
from silograph.nn.forward import Staged, forward_pass, whole_pass
from silograph.nn.optim import FIRST
from silograph.nn.schedule import Fitted as Fitted
from silograph.nn.schedule import Schedule as Schedule
from silograph.nn.schedule import Training as Training
from silograph.nn.schedule import TrainingInputs as TrainingInputs
from silograph.nn.start import StartFields, start_fields, starts_compact, used_rows, whole
from silograph.nn.steps import Held, InTraining, Trainer, features_for, own_copy


def stacked_copies(weights: Mapping[str, Tensor], clients: int) -> Params:
    """Return a copy of shared weights for each client, (C, ...)."""
    return {k: own_copy(w.expand(clients, *w.shape)) for k, w in weights.items()}


def fit(model: Staged, training: Training, inputs: TrainingInputs) -> Fitted:
    """Train every client; those without training nodes stay as they are.

    With a fresh optimizer and sparse features, weights of features that do not occur at a client
    get no gradient from data: they follow one path from each base, which is worked out once.
    """
    block, memory = inputs.block, inputs.memory
    fields = start_fields(model, inputs.start, block.num_clients)
    compact = memory is None and training.alike and starts_compact(model, fields, block.x)
    held = held_start(model, block, fields, compact=compact)
    given: Held = {name: Stacked(own_copy(m)) for name, m in (memory or {}).items()}
    trainer = Trainer(model, training, inputs.key, compact=compact, keep=memory is not None)
    found = trainer.run(block, InTraining(held, given, inputs.sampler))
    held, given = found.held, found.given
    tensors = {name: f.t for name, f in held.items()}
    with torch.no_grad(), work_for(Kind.EVALUATION):
        dtype = next(iter(tensors.values())).dtype
        read = replace(whole_pass(model, block, dtype), x=features_for(block, compact))
        logits = forward_pass(model, tensors, read, None)
    weights = _weights(training, block, fields, held, found.steps)
    kept = {name: f.t for name, f in given.items()}
    return Fitted(weights, kept, found.loss.to(logits.dtype), logits, found.steps, found.sampler)


def held_start(model: Staged, block: ClientBlock, fields: StartFields, *, compact: bool) -> Held:
    """Return copies of the starting weights, the first ones as used rows only if compact."""
    rows, held = model.first_maps if compact else (), Held()
    for name, f in fields.items():
        if name in rows:
            assert isinstance(block.x, SparseRows)  # see `starts_compact`
            held[name] = Ragged(used_rows(f, block.x), block.x.used.off)
        else:
            held[name] = Stacked(whole(f))
    return held


def rest(training: Training, start: Tensor, steps: int) -> Tensor:
    """Return where weights (R, D) are after some steps of a fresh optimizer without data."""
    name = f"{FIRST}rows"  # only first weights have rows that no data reaches
    weights, zero, begin = {name: own_copy(start[None])}, torch.zeros_like(start)[None], start[None]
    state = training.optimizer.init(weights)
    for _ in range(steps):
        grads = training.correct({name: zero}, weights, {name: begin})
        training.optimizer.step_(weights, grads, state)
    return weights[name][0]


def _weights(
    training: Training, block: ClientBlock, fields: StartFields, held: Held, steps: Tensor
) -> dict[str, Stacked | Patched]:
    """Return trained weights; used rows stand in what the others have become in as many steps."""
    weights: dict[str, Stacked | Patched] = {}
    for name, f in held.items():
        if isinstance(f, Stacked):
            weights[name] = f
        else:
            assert isinstance(block.x, SparseRows)  # only then are there used rows
            path, flops = partial(rest, training), training.flops_of(name)
            weights[name] = patched(path, fields[name], f.t, block.x, steps, flops)
    return weights


def patched(
    rest: Callable[[Tensor, int], Tensor],
    start: Stacked | Patched,
    rows: Tensor,
    x: SparseRows,
    steps: Tensor,
    flops: float,
) -> Patched:
    """Return first weights whose used rows (U, H) were trained for `steps` (C,) steps.

    `rest` tells where the other rows are after a number of steps from a base (F, H); `flops` are
    the operations of a step for one parameter, for what is not executed here (`report_spared`).
    """
    assert isinstance(start, Patched)  # see `starts_compact`
    paths = list(zip(start.which.tolist(), steps.tolist(), strict=True))
    place = {path: number for number, path in enumerate(sorted(set(paths)))}
    bases = [rest(start.base[g], count) for g, count in place]
    unused = start.base.shape[1] - x.used.off.diff().cpu()
    together = start.base.shape[1] * sum(count for _, count in place)
    report_spared(flops * rows.shape[1] * float(int((steps.cpu() * unused).sum()) - together))
    base = bases[0][None] if len(bases) == 1 else torch.stack(bases)
    which = torch.tensor([place[path] for path in paths], device=rows.device)
    return Patched(base, which, rows, x.used.feature, x.used.off)
