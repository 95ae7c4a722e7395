"""Steps of local training in torch, for the clients of a block together.

C: clients. A: clients that take part in a step. n: rows. R: rows of a weight of all clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.payload import Ragged, Stacked, State, offsets, put, state_of, take_all
from silograph.core.work import report_rows, report_steps, work_of
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.graph.csr import CSR
from silograph.nn.conv import Params
from silograph.nn.forward import Pass, Staged, embedded_pass, forward_pass, whole_pass
from silograph.nn.loss_term import StepNodes
from silograph.nn.mini_batches import BatchPlan, batch_plan, sampled_pass, shuffled
from silograph.nn.neighbors import Signal
from silograph.nn.schedule import Training
from silograph.nn.segment import segment_sum
from silograph.task.registry import task_of

LOSS_FLOPS = 7  # a class of a training node: exp, sum, log, difference, product; 2 on the way back
Held = dict[str, Stacked | Ragged]


@dataclass(frozen=True, eq=False)
class InTraining:
    """Clients before or after their training.

    Attributes:
        held: weights, (C, ...) or rows (R, D) of all clients.
        given: optimizer state (C, ...); empty if a fresh one is made and thrown away.
        sampler: what the neighbor sampler remembers.
        loss: (C,) float64 mean of the last epoch; 0 without training nodes.
        steps: (C,) int64 steps taken.
    """

    held: Held
    given: Held
    sampler: State
    loss: Tensor = field(default_factory=lambda: torch.empty(0))
    steps: Tensor = field(default_factory=lambda: torch.empty(0))

    def take(self, positions: Tensor) -> "InTraining":
        """Return the clients at `positions` (k,) int64."""
        held, given, sampler = (
            state_of(take_all(fields, positions))
            for fields in (self.held, self.given, self.sampler)
        )
        loss, steps = (t[positions.to(t.device)] if len(t) else t for t in (self.loss, self.steps))
        return InTraining(held, given, sampler, loss, steps)

    def put(self, part: "InTraining", positions: Tensor) -> "InTraining":
        """Return all clients, those at `positions` as in `part`, the others without a step."""
        clients = len(next(f.t for f in self.held.values() if isinstance(f, Stacked)))
        return InTraining(
            {name: put(self.held[name], f, positions) for name, f in part.held.items()},
            {name: put(self.given[name], f, positions) for name, f in part.given.items()},
            self.sampler,
            part.loss.new_zeros(clients).index_copy(0, positions, part.loss),
            part.steps.new_zeros(clients).index_copy(0, positions.cpu(), part.steps),
        )


@dataclass(frozen=True, eq=False)
class _Live:
    """What steps change in place, of the first clients of a block or of all.

    Attributes:
        weights: (C, ...), or rows (R, D) of all clients.
        start: copies of the weights before the first step, where a correction needs them.
        memory: optimizer state, in the forms of the weights; `steps` (C,) or longer.
        off: (C + 1,) int64 rows of each client, of the weights that are held as rows.
    """

    weights: Params
    start: Params
    memory: Params
    off: Mapping[str, Tensor]

    def slices(self, tensors: Mapping[str, Tensor], a: int, b: int) -> Params:
        """Return views of clients a to b, of tensors named as weights or `KIND/WEIGHT`."""
        return {name: t[self._row(name, a) : self._row(name, b)] for name, t in tensors.items()}

    def part(self, a: int, b: int) -> "_Live":
        """Return clients a to b; steps on them are steps on these."""
        kinds = self.weights, self.start, self.memory
        weights, start, memory = (self.slices(tensors, a, b) for tensors in kinds)
        return _Live(weights, start, memory, self.off)

    def _row(self, name: str, client: int) -> int:
        off = self.off.get(name.rpartition("/")[2])
        return client if off is None else int(off[client])


@dataclass(frozen=True, eq=False)
class _Targets:
    """What a step is to predict.

    Attributes:
        rows: (r,) bool which rows of the pass; None: all of them.
        row: (t,) int64 where they are among the rows of the clients.
        y: (t, ...) their labels, by client.
        off: (A + 1,) int64 how many each client has.
    """

    rows: Tensor | None
    row: Tensor
    y: Tensor
    off: Tensor


def own_copy(t: Tensor) -> Tensor:
    """Return a copy that is contiguous, whatever the strides: fused steps read it so."""
    return t.clone(memory_format=torch.contiguous_format)


def features_for(block: ClientBlock, compact: bool) -> Rows:
    """Return features that meet weights in compact form: one row for each used feature."""
    if not compact:
        return block.x
    assert isinstance(block.x, SparseRows)  # compact only where features are sparse
    return SparseRows(block.x.used.csr, block.x.off, feature=block.x.used.feature)


@dataclass(frozen=True)
class Trainer:
    """Trains the clients of a block together.

    Attributes:
        model: what they train.
        training: how.
        key: of the draws.
        compact: whether the first weights are held as rows for the features that occur.
        keep: whether optimizer state is given and returned.
    """

    model: Staged
    training: Training
    key: Key
    compact: bool
    keep: bool

    def of(self, clients: Tensor) -> "Trainer":
        """Return the trainer of the clients at these positions (k,) int64."""
        return replace(self, training=self.training.of(clients))

    def run(self, block: ClientBlock, begun: InTraining) -> InTraining:
        """Return the clients after training; those without training nodes are as they were."""
        schedule = self.training.schedule
        if not schedule.whole:
            return self._sorted(batch_plan(block, schedule.batch_size), begun)
        active = (block.num_train > 0).nonzero()[:, 0]
        if len(active) == block.num_clients:
            return self._whole(block, begun)
        if not len(active):
            zero = torch.zeros(block.num_clients, dtype=torch.float64, device=block.off.device)
            return replace(begun, loss=zero, steps=zero.long().cpu())
        with work_of(active):
            part = self.of(active)._whole(block.take(active), begun.take(active))
        return begun.put(part, active)

    def _whole(self, block: ClientBlock, begun: InTraining) -> InTraining:
        """Take steps on all rows; every client has training nodes."""
        live, epochs = self._live(begun), self.training.schedule.epochs
        dtype = next(iter(live.weights.values())).dtype
        inputs = whole_pass(self.model, block, dtype)
        inputs = replace(inputs, x=features_for(block, self.compact))
        train = block.split.train
        targets = _Targets(train, train.nonzero()[:, 0], block.y[train], offsets(block.num_train))
        loss = torch.empty(0)
        for epoch in range(epochs):
            key = self.key.fold("epoch", epoch, "batch", 0)
            loss = self._step(live, [(0, block.num_clients)], inputs, targets, key)
        steps = torch.full((block.num_clients,), epochs)
        return self._done(begun, live, begun.sampler, loss.double(), steps)

    def _sorted(self, plan: BatchPlan, begun: InTraining) -> InTraining:
        """Take steps on batches, with the clients in the order of the plan."""
        if not plan.moved:
            return self._batched(plan, begun)
        return self.of(plan.order)._batched(plan, begun.take(plan.order)).take(plan.back)

    def _batched(self, plan: BatchPlan, begun: InTraining) -> InTraining:
        """Let the clients that have a batch `number` take that step together, in every epoch."""
        live, state, block = self._live(begun), begun.sampler, plan.block
        schedule = self.training.schedule
        loss = torch.zeros(block.num_clients, dtype=torch.float64, device=block.off.device)
        for epoch in range(schedule.epochs):
            loss, key = torch.zeros_like(loss), self.key.fold("epoch", epoch)
            train = shuffled(block, schedule.batch_size, key)
            for number, active in enumerate(plan.active):
                # A fresh optimizer has counted as many steps for all in the first epoch.
                alike = epoch == 0 and not self.keep
                runs = [(0, active)] if alike else plan.groups(number)
                seeds, off = plan.seeds(train, number)
                with work_of(plan.order[:active]):
                    part, step_key = live.part(0, active), key.fold("batch", number)
                    own = state is not begun.sampler  # what was given is not ours to change
                    found, state = self._batch(block, part, runs, seeds, off, step_key, state, own)
                loss[:active] += found.double() * off.diff() / block.num_train[:active]
        return self._done(begun, live, state, loss, plan.batches * schedule.epochs)

    def _batch(
        self,
        block: ClientBlock,
        live: _Live,
        runs: Sequence[tuple[int, int]],
        seeds: Tensor,
        off: Tensor,
        key: Key,
        state: State,
        own: bool,
    ) -> tuple[Tensor, State]:
        """Take one step on rows `seeds` (s,) of the first A clients; see `_step` and `Signal`."""
        neighbors = self.training.schedule.neighbors
        clients = torch.arange(len(off) - 1, device=off.device)
        sums = [stage.conv.sums for stage in self.model.stages]
        x = self._first_rows(block, live)
        inputs, draws = sampled_pass(block, x, seeds, off, neighbors, key, sums, state)
        trainer = self if len(clients) == block.num_clients else self.of(clients)
        loss = trainer._step(live, runs, inputs, _Targets(None, seeds, block.y[seeds], off), key)
        return loss, neighbors.learn(block, state, Signal(clients, draws, loss, key, own))

    def _first_rows(self, block: ClientBlock, live: _Live) -> Rows:
        """Return features for the weights that these clients hold."""
        x = features_for(block, self.compact)
        if not self.compact:
            return x
        assert isinstance(x, SparseRows)  # see `features_for`
        used = max(len(live.weights[name]) for name in live.off)
        csr = CSR(x.csr.indptr, x.csr.indices, x.csr.values, used)
        return replace(x, csr=csr)

    def _live(self, begun: InTraining) -> _Live:
        weights = {name: f.t for name, f in begun.held.items()}
        start = {k: w.clone() for k, w in weights.items()} if self.training.corrections else {}
        memory = {name: f.t for name, f in begun.given.items()}
        if not self.keep:
            memory = self.training.optimizer.init(weights)
        off = {name: f.off for name, f in begun.held.items() if isinstance(f, Ragged)}
        return _Live(weights, start, memory, off)

    def _done(
        self, begun: InTraining, live: _Live, sampler: State, loss: Tensor, steps: Tensor
    ) -> InTraining:
        held = {name: replace(f, t=live.weights[name]) for name, f in begun.held.items()}
        given: Held = {name: Stacked(live.memory[name]) for name in begun.given}
        return InTraining(held, given, sampler, loss, steps)

    def _step(
        self,
        live: _Live,
        runs: Sequence[tuple[int, int]],
        inputs: Pass,
        targets: _Targets,
        key: Key,
    ) -> Tensor:
        """Take one step in place; return mean losses (A,).

        Args:
            live: the A clients that take it.
            runs: ranges of clients whose optimizers have counted equally many steps.
            inputs: what the pass reads.
            targets: what it is to predict.
            key: of the step.
        """
        leaves = {name: w.detach().requires_grad_() for name, w in live.weights.items()}
        total = segment_sum(self._losses(leaves, inputs, targets, key), targets.off)
        loss = total / targets.off.diff()
        # Clients share no weight, so the gradient of the sum holds each client's own.
        found = torch.autograd.grad(loss.sum(), list(leaves.values()))
        grads = dict(zip(leaves, found, strict=True))
        grads = self.training.correct(grads, live.weights, live.start)
        report_steps(self.training.step_flops)
        for a, b in runs:
            part = live.part(a, b)
            self.training.optimizer.step_(part.weights, live.slices(grads, a, b), part.memory)
        return loss.detach()

    def _losses(self, leaves: Params, inputs: Pass, targets: _Targets, key: Key) -> Tensor:
        """Return the loss of each target, (t,)."""
        model, losses = self.model, self.training.losses
        if not losses:
            logits = _at(targets, forward_pass(model, leaves, inputs, key))
            report_rows(targets.off, LOSS_FLOPS * model.outputs)
            return task_of(model.task).loss(logits, targets.y)
        found = embedded_pass(model, leaves, inputs, key)
        logits, embeddings = (_at(targets, t) for t in found)
        report_rows(targets.off, LOSS_FLOPS * model.outputs)
        each = task_of(model.task).loss(logits, targets.y)
        nodes = StepNodes(embeddings, logits, targets.y, targets.row, targets.off)
        for term in losses:
            more = term(nodes)
            if more.shape != each.shape:
                raise ConfigError(
                    f"expected a loss {tuple(each.shape)} of {type(term).__name__}, one for each "
                    f"node, got {tuple(more.shape)}"
                )
            report_rows(targets.off, term.flops(embeddings.shape[1]))
            each = each + more
        return each


def _at(targets: _Targets, t: Tensor) -> Tensor:
    """Return the rows of a pass that are targets."""
    return t if targets.rows is None else t[targets.rows]
