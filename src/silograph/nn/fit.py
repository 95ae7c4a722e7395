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
from silograph.core.payload import Patched, Ragged, Stacked, join, offsets, put, state_of, take_all
from silograph.core.work import report_each, report_rows, work_for, work_of
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.nn.conv import Params
from silograph.nn.correction import Correction
from silograph.nn.mini_batches import batches, sampled_pass
from silograph.nn.model import (
    AnyModel,
    Model,
    Pass,
    first_maps,
    forward_pass,
    num_sums,
    stages,
    weight_shapes,
    whole_pass,
)
from silograph.nn.optim import Optimizer
from silograph.nn.segment import segment_sum
from silograph.task.loss import node_loss

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


@dataclass(frozen=True)
class Training:
    """How clients train.

    Attributes:
        model: the shape.
        optimizer: how steps are taken.
        schedule: which steps.
        corrections: what is added to the gradient of the data, in this order.
    """

    model: AnyModel
    optimizer: Optimizer
    schedule: Schedule
    corrections: tuple[Correction, ...] = ()

    @property
    def layered(self) -> Model:
        """The model as layers of silograph's; a user's module is trained by `fit_module`."""
        assert isinstance(self.model, Model)
        return self.model

    @property
    def alike(self) -> bool:
        """Whether weights that meet no data take one path at all clients."""
        return all(correction.alike for correction in self.corrections)

    @property
    def step_flops(self) -> float:
        """Floating-point operations of a client's step, the gradient of the data apart."""
        size = sum(torch.Size(shape).numel() for shape in weight_shapes(self.model).values())
        each = self.optimizer.flops + sum(correction.flops for correction in self.corrections)
        return float(each * size)

    def of(self, clients: Tensor) -> "Training":
        """Return the training of the clients at these positions (k,) int64."""
        return replace(self, corrections=tuple(c.of(clients) for c in self.corrections))

    def correct(
        self, grads: Params, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
    ) -> Params:
        """Return the gradients that the optimizer follows."""
        for correction in self.corrections:
            grads = correction(grads, weights, start)
        return grads


@dataclass(frozen=True, eq=False)
class Fitted:
    """What training leaves.

    Attributes:
        weights: of every client, (C, ...).
        memory: optimizer state (C, ...), empty if it was not to be kept.
        loss: (C,) mean training loss of the last epoch, before each step; 0 without training nodes.
        logits: (n, K) what each client's model says of its rows.
        steps: (C,) int64 steps taken; 0 without training nodes.
    """

    weights: dict[str, Stacked | Patched]
    memory: Params
    loss: Tensor
    logits: Tensor
    steps: Tensor


def stacked_copies(weights: Mapping[str, Tensor], clients: int) -> Params:
    """Return a copy of shared weights for each client, (C, ...)."""
    return {k: own_copy(w.expand(clients, *w.shape)) for k, w in weights.items()}


def own_copy(t: Tensor) -> Tensor:
    """Return a copy that is contiguous, whatever the strides: fused steps read it so."""
    return t.clone(memory_format=torch.contiguous_format)


def fit(
    training: Training,
    block: ClientBlock,
    start: Mapping[str, Tensor],
    memory: Mapping[str, Tensor] | None,
    key: Key,
) -> Fitted:
    """Train every client; those without training nodes stay as they are.

    With a fresh optimizer and sparse features, weights of features that do not occur at a client
    get no gradient from data: they follow one path, which is worked out once.

    Args:
        training: how they train.
        block: the rows.
        start: weights, shared by all clients or (C, ...).
        memory: optimizer state (C, ...) to go on from and return; None: a fresh one, not returned.
        key: key of the draws.
    """
    model = training.layered
    shapes = weight_shapes(model)
    shared = all(start[name].shape == shape for name, shape in shapes.items())
    sparse = isinstance(block.x, SparseRows)
    compact = memory is None and shared and sparse and training.alike
    held = _held(model, block, start, compact=compact, shared=shared)
    given: Held = {name: Stacked(own_copy(m)) for name, m in (memory or {}).items()}
    trainer = _Trainer(training, key, compact, memory is not None)
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
    weights = _weights(training, block, start, held, steps)
    kept = {name: f.t for name, f in given.items()}
    return Fitted(weights, kept, loss.to(logits.dtype), logits, steps)


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
        return {name: Stacked(own_copy(w)) for name, w in start.items()}
    held: Held = {}
    for name, w in start.items():
        if compact and name in maps:
            assert isinstance(block.x, SparseRows)  # see `fit`
            held[name] = Ragged(w[block.x.used.feature], block.x.used.off)
        else:
            held[name] = Stacked(own_copy(w.expand(clients, *w.shape)))
    return held


def _partly(
    trainer: "_Trainer", block: ClientBlock, held: Held, given: Held, active: Tensor
) -> tuple[Held, Held, Tensor, Tensor]:
    """Train some clients only; the others leave the computation."""
    with work_of(active):
        new, kept, loss, steps = trainer.of(active).run(
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

    training: Training
    key: Key
    compact: bool
    keep: bool

    def of(self, clients: Tensor) -> "_Trainer":
        return replace(self, training=self.training.of(clients))

    def run(self, block: ClientBlock, held: Held, given: Held) -> tuple[Held, Held, Tensor, Tensor]:
        """Return weights, optimizer state, loss (C,) and number of steps (C,)."""
        if self.training.schedule.drawn(num_sums(self.training.layered)) is None:
            return self._full(block, held, given)
        parts = []
        for position in torch.arange(block.num_clients, device=block.off.device).split(1):
            with work_of(position):
                part = state_of(take_all(held, position)), state_of(take_all(given, position))
                parts.append(self.of(position)._batched(block.take(position), *part))
        new, kept, loss, steps = zip(*parts, strict=True)
        return state_of(join(new)), state_of(join(kept)), torch.cat(loss), torch.cat(steps)

    def _full(
        self, block: ClientBlock, held: Held, given: Held
    ) -> tuple[Held, Held, Tensor, Tensor]:
        weights, start = {name: f.t for name, f in held.items()}, self._start(held)
        memory = self._memory(weights, given)
        dtype = next(iter(weights.values())).dtype
        x, epochs = rows_for(block, self.compact), self.training.schedule.epochs
        inputs = replace(whole_pass(self.training.layered, block, dtype), x=x)
        loss = torch.empty(0)
        for epoch in range(epochs):
            key = self.key.fold("epoch", epoch, "batch", 0)
            train = block.split.train
            weights, loss = self._step(block, weights, start, memory, inputs, train, key)
        steps = torch.full((block.num_clients,), epochs)
        return _filled(held, weights), self._kept(given, memory), loss.double(), steps

    def _batched(
        self, block: ClientBlock, held: Held, given: Held
    ) -> tuple[Held, Held, Tensor, Tensor]:
        """Train one client."""
        model, schedule = self.training.layered, self.training.schedule
        weights, start = {name: f.t for name, f in held.items()}, self._start(held)
        memory = self._memory(weights, given)
        x, steps = rows_for(block, self.compact), 0
        fanout = schedule.drawn(num_sums(model))
        assert fanout is not None  # see `run`
        sums = tuple(stage.conv.sums for stage in stages(model))
        device = block.off.device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for epoch in range(schedule.epochs):
            total = torch.zeros_like(total)
            key = self.key.fold("epoch", epoch)
            for number, seeds in enumerate(batches(block, schedule.batch_size, key)):
                step_key = key.fold("batch", number)
                inputs = sampled_pass(block, x, seeds, fanout, step_key, sums)
                off = torch.tensor([0, len(seeds)], device=device)
                seen = replace(block, off=off, y=block.y[seeds])
                every = torch.ones(len(seeds), dtype=torch.bool, device=device)
                weights, loss = self._step(seen, weights, start, memory, inputs, every, step_key)
                total = total + loss.double() * len(seeds) / block.num_train
                steps += 1
        return _filled(held, weights), self._kept(given, memory), total, torch.tensor([steps])

    def _start(self, held: Held) -> Params:
        """Return copies of the weights, which steps change in place, if a correction needs them."""
        return {name: f.t.clone() for name, f in held.items()} if self.training.corrections else {}

    def _memory(self, weights: Params, given: Held) -> Params:
        if self.keep:
            return {name: f.t for name, f in given.items()}
        return self.training.optimizer.init(weights)

    def _kept(self, given: Held, memory: Params) -> Held:
        return {name: Stacked(memory[name]) for name in given}

    def _step(
        self,
        block: ClientBlock,
        weights: Params,
        start: Params,
        memory: Params,
        inputs: Pass,
        train: Tensor,
        key: Key,
    ) -> tuple[Params, Tensor]:
        """Take one step on rows `train` (r,) bool of the pass; return weights and losses (C,)."""
        model = self.training.layered
        leaves = {name: w.requires_grad_() for name, w in weights.items()}
        logits = forward_pass(model, leaves, inputs, key)
        count = segment_sum(train.to(torch.int64), block.off)
        off = offsets(count)
        report_rows(off, LOSS_FLOPS * model.outputs)
        total = segment_sum(node_loss(logits[train], block.y[train], model.task), off)
        loss = total / count
        # Clients share no weight, so the gradient of the sum holds each client's own.
        found = torch.autograd.grad(loss.sum(), list(leaves.values()))
        weights = {name: w.detach() for name, w in leaves.items()}
        grads = self.training.correct(dict(zip(weights, found, strict=True)), weights, start)
        report_each(self.training.step_flops)
        self.training.optimizer.step_(weights, grads, memory)
        return weights, loss.detach()


def _filled(held: Held, weights: Params) -> Held:
    return {name: replace(f, t=weights[name]) for name, f in held.items()}


def rest(training: Training, start: Tensor, steps: int) -> Tensor:
    """Return where weights (R, D) are after some steps of a fresh optimizer without data."""
    weights, zero, begin = {"": own_copy(start[None])}, torch.zeros_like(start)[None], start[None]
    state = training.optimizer.init(weights)
    for _ in range(steps):
        grads = training.correct({"": zero}, weights, {"": begin})
        training.optimizer.step_(weights, grads, state)
    return weights[""][0]


def _weights(
    training: Training,
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
            weights[name] = patched(partial(rest, training), start[name], f.t, block.x, steps)
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
