"""Local training: steps of every client of a block on its own training nodes.

This is the torch form, for every layer and device; `silograph.nn.compiled` does the same for the
common ones in a fraction of the time.

C: clients. n: rows. F: features. H: hidden width. U: used rows of the first weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Patched,
    Ragged,
    Stacked,
    join,
    offsets,
    put,
    state_of,
    take_all,
)
from silograph.core.work import report_each, report_rows, work_for, work_of
from silograph.graph.block import ClientBlock, Rows, SparseRows
from silograph.nn.conv import Params
from silograph.nn.loss import node_loss
from silograph.nn.model import (
    Model,
    Pass,
    first_maps,
    forward_pass,
    num_sums,
    stages,
    weight_shapes,
    whole_pass,
)
from silograph.nn.optim import Optimizer, rest
from silograph.nn.sampling import batches, sampled_pass
from silograph.nn.segment import segment_sum

LOSS_FLOPS = 7  # a class of a training node: exp, sum, log, difference, product; 2 on the way back
Held = dict[str, Stacked | Ragged]


@dataclass(frozen=True)
class Schedule:
    """What a client does with its training nodes.

    Attributes:
        epochs: passes over them.
        batch_size: training nodes in a step; None: all.
        fanout: neighbors drawn of each node by hop, the training nodes' first, 0 for all; None:
            every edge of the client in every step.
    """

    epochs: int
    batch_size: int | None = None
    fanout: tuple[int, ...] | None = None

    def drawn(self, hops: int) -> tuple[int, ...] | None:
        """Return the fan-out of every hop, or None where a step takes all rows of a client."""
        if self.fanout is None and self.batch_size is not None:
            return (0,) * hops
        return self.fanout


@dataclass(frozen=True, eq=False)
class Fitted:
    """What training leaves.

    Attributes:
        weights: of every client, (C, ...).
        memory: optimizer state (C, ...), empty if it was not to be kept.
        loss: (C,) mean training loss of the last epoch, before each step; 0 without training nodes.
        logits: (n, K) what each client's model says of its rows.
    """

    weights: dict[str, Stacked | Patched]
    memory: Params
    loss: Tensor
    logits: Tensor


def stacked_copies(weights: Mapping[str, Tensor], clients: int) -> Params:
    """Return a copy of shared weights for each client, (C, ...)."""
    return {k: w.expand(clients, *w.shape).clone() for k, w in weights.items()}


def fit(
    model: Model,
    optimizer: Optimizer,
    schedule: Schedule,
    block: ClientBlock,
    start: Mapping[str, Tensor],
    memory: Mapping[str, Tensor] | None,
    key: Key,
) -> Fitted:
    """Train every client; those without training nodes stay as they are.

    With a fresh optimizer and sparse features, weights of features that do not occur at a client
    get no gradient from data: they follow one path, which is worked out once.

    Args:
        model: the shape.
        optimizer: how steps are taken.
        schedule: which steps.
        block: the rows.
        start: weights, shared by all clients or (C, ...).
        memory: optimizer state (C, ...) to go on from and return; None: a fresh one, not returned.
        key: key of the draws.
    """
    shapes = weight_shapes(model)
    shared = all(start[name].shape == shape for name, shape in shapes.items())
    compact = memory is None and shared and isinstance(block.x, SparseRows)
    held = _held(model, block, start, compact=compact, shared=shared)
    given: Held = {name: Stacked(m.clone()) for name, m in (memory or {}).items()}
    trainer = _Trainer(model, optimizer, schedule, key, compact, memory is not None)
    active = (block.num_train > 0).nonzero()[:, 0]
    loss = torch.zeros(block.num_clients, dtype=torch.float64, device=block.off.device)
    steps = torch.zeros(block.num_clients, dtype=torch.int64)
    if len(active):
        if len(active) == block.num_clients:
            held, given, loss, steps = trainer.run(block, held, given)
        else:
            held, given, loss, steps = _partly(trainer, block, held, given, active)
    tensors = {name: f.t for name, f in held.items()}
    with torch.no_grad(), work_for(Kind.EVALUATION):
        dtype = next(iter(tensors.values())).dtype
        inputs = replace(whole_pass(model, block, dtype), x=rows_for(block, compact))
        logits = forward_pass(model, tensors, inputs, None)
    weights = _weights(optimizer, block, start, held, steps)
    kept = {name: f.t for name, f in given.items()}
    return Fitted(weights, kept, loss.to(logits.dtype), logits)


def rows_for(block: ClientBlock, compact: bool) -> Rows:
    """Return features that meet weights in compact form: one row for each used feature."""
    if not compact:
        return block.x
    assert isinstance(block.x, SparseRows)  # compact only where features are sparse
    return SparseRows(block.x.used.csr, block.x.off)


def _held(
    model: Model, block: ClientBlock, start: Mapping[str, Tensor], *, compact: bool, shared: bool
) -> Held:
    """Return copies of the starting weights, the first ones as used rows only if compact."""
    clients, maps = block.num_clients, first_maps(model)
    if not shared:
        return {name: Stacked(w.clone()) for name, w in start.items()}
    held: Held = {}
    for name, w in start.items():
        if compact and name in maps:
            assert isinstance(block.x, SparseRows)  # see `fit`
            held[name] = Ragged(w[block.x.used.feature], block.x.used.off)
        else:
            held[name] = Stacked(w.expand(clients, *w.shape).clone())
    return held


def _partly(
    trainer: "_Trainer", block: ClientBlock, held: Held, given: Held, active: Tensor
) -> tuple[Held, Held, Tensor, Tensor]:
    """Train some clients only; the others leave the computation."""
    with work_of(active):
        new, kept, loss, steps = trainer.run(
            block.take(active), state_of(take_all(held, active)), state_of(take_all(given, active))
        )
    none = torch.zeros(block.num_clients, dtype=loss.dtype, device=loss.device)
    taken = torch.zeros(block.num_clients, dtype=torch.int64)
    return (
        {name: put(held[name], f, active) for name, f in new.items()},
        {name: put(given[name], f, active) for name, f in kept.items()},
        none.index_copy(0, active, loss),
        taken.index_copy(0, active.cpu(), steps),
    )


@dataclass(frozen=True)
class _Trainer:
    """Trains all clients of a block, in full batches together, else one after the other."""

    model: Model
    optimizer: Optimizer
    schedule: Schedule
    key: Key
    compact: bool
    keep: bool

    def run(self, block: ClientBlock, held: Held, given: Held) -> tuple[Held, Held, Tensor, Tensor]:
        """Return weights, optimizer state, loss (C,) and number of steps (C,)."""
        if self.schedule.drawn(num_sums(self.model)) is None:
            return self._full(block, held, given)
        parts = []
        for position in torch.arange(block.num_clients, device=block.off.device).split(1):
            with work_of(position):
                part = state_of(take_all(held, position)), state_of(take_all(given, position))
                parts.append(self._batched(block.take(position), *part))
        new, kept, loss, steps = zip(*parts, strict=True)
        return state_of(join(new)), state_of(join(kept)), torch.cat(loss), torch.cat(steps)

    def _full(
        self, block: ClientBlock, held: Held, given: Held
    ) -> tuple[Held, Held, Tensor, Tensor]:
        weights = {name: f.t for name, f in held.items()}
        memory = self._memory(weights, given)
        dtype = next(iter(weights.values())).dtype
        x = rows_for(block, self.compact)
        inputs = replace(whole_pass(self.model, block, dtype), x=x)
        loss = torch.empty(0)
        for epoch in range(self.schedule.epochs):
            key = self.key.fold("epoch", epoch, "batch", 0)
            weights, loss = self._step(block, weights, memory, inputs, block.split.train, key)
        steps = torch.full((block.num_clients,), self.schedule.epochs)
        return _filled(held, weights), self._kept(given, memory), loss.double(), steps

    def _batched(
        self, block: ClientBlock, held: Held, given: Held
    ) -> tuple[Held, Held, Tensor, Tensor]:
        """Train one client."""
        weights = {name: f.t for name, f in held.items()}
        memory = self._memory(weights, given)
        x, steps = rows_for(block, self.compact), 0
        fanout = self.schedule.drawn(num_sums(self.model))
        assert fanout is not None  # see `run`
        sums = tuple(stage.conv.sums for stage in stages(self.model))
        device = block.off.device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for epoch in range(self.schedule.epochs):
            total = torch.zeros_like(total)
            key = self.key.fold("epoch", epoch)
            for number, seeds in enumerate(batches(block, self.schedule.batch_size, key)):
                step_key = key.fold("batch", number)
                inputs = sampled_pass(block, x, seeds, fanout, step_key, sums)
                off = torch.tensor([0, len(seeds)], device=device)
                seen = replace(block, off=off, y=block.y[seeds])
                every = torch.ones(len(seeds), dtype=torch.bool, device=device)
                weights, loss = self._step(seen, weights, memory, inputs, every, step_key)
                total = total + loss.double() * len(seeds) / block.num_train
                steps += 1
        return _filled(held, weights), self._kept(given, memory), total, torch.tensor([steps])

    def _memory(self, weights: Params, given: Held) -> Params:
        return (
            {name: f.t for name, f in given.items()} if self.keep else self.optimizer.init(weights)
        )

    def _kept(self, given: Held, memory: Params) -> Held:
        return {name: Stacked(memory[name]) for name in given}

    def _step(
        self,
        block: ClientBlock,
        weights: Params,
        memory: Params,
        inputs: Pass,
        train: Tensor,
        key: Key,
    ) -> tuple[Params, Tensor]:
        """Take one step on rows `train` (r,) bool of the pass; return weights and losses (C,)."""
        leaves = {name: w.requires_grad_() for name, w in weights.items()}
        logits = forward_pass(self.model, leaves, inputs, key)
        count = segment_sum(train.to(torch.int64), block.off)
        off = offsets(count)
        report_rows(off, LOSS_FLOPS * self.model.outputs)
        total = segment_sum(node_loss(logits[train], block.y[train], self.model.task), off)
        loss = total / count
        # Clients share no weight, so the gradient of the sum holds each client's own.
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()))
        weights = {name: w.detach() for name, w in leaves.items()}
        size = sum(torch.Size(shape).numel() for shape in weight_shapes(self.model).values())
        report_each(float(self.optimizer.flops * size))
        self.optimizer.step_(weights, dict(zip(weights, grads, strict=True)), memory)
        return weights, loss.detach()


def _filled(held: Held, weights: Params) -> Held:
    return {name: replace(f, t=weights[name]) for name, f in held.items()}


def _weights(
    optimizer: Optimizer,
    block: ClientBlock,
    start: Mapping[str, Tensor],
    held: Held,
    steps: Tensor,
) -> dict[str, Stacked | Patched]:
    """Return trained weights; used rows stand in what the others have become in as many steps."""
    weights: dict[str, Stacked | Patched] = {}
    for name, f in held.items():
        if isinstance(f, Stacked):
            weights[name] = f
        else:
            assert isinstance(block.x, SparseRows)  # only then are there used rows
            weights[name] = patched(partial(rest, optimizer), start[name], f.t, block.x, steps)
    return weights


def patched(
    rest: Callable[[Tensor, int], Tensor],
    start: Tensor,
    rows: Tensor,
    x: SparseRows,
    steps: Tensor,
) -> Patched:
    """Return first weights whose used rows (U, H) were trained for `steps` (C,) steps.

    `rest` tells where the other rows are after a number of steps from `start` (F, H).
    """
    counts, which = steps.unique(return_inverse=True)
    base = torch.stack([rest(start, count) for count in counts.tolist()])
    return Patched(base, which.to(rows.device), rows, x.used.feature, x.used.off)
