"""Local training: steps of every client of a block on its own training nodes.

This is the torch form, for every layer and device; `silograph.nn.compiled` does the same for the
common ones in a fraction of the time.

C: clients. n: rows. F: features. H: hidden width. U: used rows of the first weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Patched,
    Ragged,
    Stacked,
    State,
    dense,
    from_bases,
    offsets,
    owners,
    patched_problem,
    put,
    state_of,
    take_all,
)
from silograph.core.text import state_of_fields
from silograph.core.work import report_each, report_rows, report_spared, work_for, work_of
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.graph.csr import CSR
from silograph.nn.conv import Params
from silograph.nn.correction import Correction, LossTerm, StepNodes
from silograph.nn.forward import (
    AnyModel,
    ModelSizes,
    Pass,
    Staged,
    embedded_pass,
    forward_pass,
    whole_pass,
)
from silograph.nn.mini_batches import (
    FULL,
    BatchPlan,
    Full,
    Neighbors,
    Signal,
    batch_plan,
    sampled_pass,
    shuffle_train,
)
from silograph.nn.optim import FIRST, Optimizer
from silograph.nn.segment import segment_sum
from silograph.task.registry import task_of

# --- start ---------------------------------------------------------------------------------------
# Initial weights of local training: bases that clients share, and weights or rows of their own.
#
# Each weight of a start is one of these:
#
# - a tensor in the model's shape, shared by all clients, or (C, ...) with a slice for each;
# - a `Stacked` value: every client's own weights, stored between rounds;
# - a `Patched` value: each client has one of G bases, and may have rows of its own in it.
#
# The result of training (`Fitted.weights`) is such a start, too. Where features are sparse and the
# optimizer is fresh, first weights that come from bases are trained as the rows of the features
# that occur at a client; so one base for all costs what shared weights cost, and they are the
# same computation.
#
# C: clients. F: features. D: width. U: used rows of the first weights.


Start = Mapping[str, Tensor | Stacked | Patched]
Memory = Mapping[str, Tensor | Patched]  # optimizer state (C, ...)
StartFields = Mapping[str, Stacked | Patched]


def start_fields(model: ModelSizes, start: Start, clients: int) -> dict[str, Stacked | Patched]:
    """Return every weight as a value, in the model's order; shared tensors are a single base."""
    fields: dict[str, Stacked | Patched] = {}
    base_of_client: Tensor | None = None  # the base of all clients
    for name, shape in model.weight_shapes.items():
        w = start[name]
        if not isinstance(w, Tensor):
            fields[name] = w
        elif w.dim() > len(shape):
            fields[name] = Stacked(w)
        else:
            if base_of_client is None:
                base_of_client = torch.zeros(clients, dtype=torch.int64, device=w.device)
            fields[name] = from_bases(w[None], base_of_client)
    return fields


def whole(value: Stacked | Patched) -> Tensor:
    """Return a contiguous copy of the slices of all clients, (C, ...)."""
    if isinstance(value, Patched):
        return value.stacked().t.contiguous()  # strides of a base outlive the choice of rows
    return value.t.clone(memory_format=torch.contiguous_format)


def joined_bases(fields: Sequence[Stacked | Patched]) -> tuple[Tensor, Tensor]:
    """Return all bases (G, ...) of M weights, and which of them each client has, (M, C) int64.

    There are none if a client has anything of its own in them.
    """
    bases, which, count = [], [], 0
    for value in fields:
        if not isinstance(value, Patched) or len(value.t):
            return value.t.new_empty(0, 0, 0), torch.empty(len(fields), 0, dtype=torch.int64)
        bases.append(value.base)
        which.append(value.which + count)
        count += len(value.base)
    return bases[0] if len(bases) == 1 else torch.cat(bases), torch.stack(which)


def starts_compact(model: ModelSizes, fields: StartFields, x: Rows) -> bool:
    """Whether clients differ from the bases only in rows of used features of the first weights."""
    if not isinstance(x, SparseRows):
        return False
    return all(
        isinstance(fields[name], Patched)
        and (not len(fields[name].t) or has_used_rows(fields[name], x))
        for name in model.first_maps
    )


def has_used_rows(value: Tensor | Stacked | Patched, x: Rows) -> bool:
    """Whether clients have rows of their own for the features that occur there, and no others."""
    return (
        isinstance(value, Patched)
        and isinstance(x, SparseRows)
        and torch.equal(value.off, x.used.off)
        and torch.equal(value.index, x.used.feature)
    )


def used_rows(value: Stacked | Patched, x: Rows) -> Tensor:
    """Return a copy of the rows of first weights that are for used features, (U, D).

    Args:
        value: from which `starts_compact`.
        x: sparse features.
    """
    assert isinstance(x, SparseRows)  # see `starts_compact`
    assert isinstance(value, Patched)  # likewise
    if len(value.t):
        return value.t.clone(memory_format=torch.contiguous_format)
    if len(value.base) == 1:
        return value.base[0].index_select(0, x.used.feature)
    return value.base[value.which[owners(x.used.off)], x.used.feature]


# --- Kept optimizer state of rows that meet no data ----------------------------------------------
#
# A client that has no node with some feature never changes the weights of that feature by its data.
# With a kept optimizer their moments depend on the rounds in which the client took part, and on how
# many steps it took. So clients with one history have one base for all such rows, in `Patched`
# form: rows of their own for the features that occur, and the history's base for the others. A
# history splits where its clients part, and goes with its last client.


def rows_apart(training: "Training", x: Rows) -> tuple[str, ...]:
    """Return names of the optimizer state that is held by histories, if rows meet no data at all.

    Empty: optimizer state is held whole.
    """
    model = training.model.staged
    if model is None or not training.alike or not isinstance(x, SparseRows):
        return ()
    like = {name: torch.empty(1) for name in model.first_maps}
    return tuple(name for name in training.optimizer.init(like) if "/" in name)


def first_memory(training: "Training", block: ClientBlock, *, apart: bool) -> Memory:
    """Return the optimizer state (C, ...) before the first step.

    Args:
        training: the model and the optimizer.
        block: C clients.
        apart: whether state of rows that meet no data is held by histories.
    """
    model, clients = training.model, block.num_clients
    names = rows_apart(training, block.x) if apart else ()
    firsts = {name.partition("/")[2] for name in names}
    like = block.adj.values
    assert like is not None  # blocks carry values of the run's dtype
    weights = {
        name: like.new_zeros(1 if name in firsts else clients, *shape)
        for name, shape in model.weight_shapes.items()
    }
    memory: dict[str, Tensor | Patched] = dict(training.optimizer.init(weights))
    for name in names:
        assert isinstance(block.x, SparseRows)  # see `rows_apart`
        base, used = memory[name], block.x.used
        assert isinstance(base, Tensor)
        which = torch.zeros(clients, dtype=torch.int64, device=base.device)
        rows = base.new_zeros(len(used.feature), *base.shape[2:])
        memory[name] = Patched(base, which, rows, used.feature, used.off)
    return memory


def whole_memory(memory: Memory) -> Params:
    """Return optimizer state as tensors (C, ...), whatever form it has."""
    return {name: m.stacked().t if isinstance(m, Patched) else m for name, m in memory.items()}


# --- What clients do in local training: how many steps of which kind, and how each is taken ------


@dataclass(frozen=True)
class Schedule:
    """The steps of a client on its training nodes in a round.

    Attributes:
        epochs: passes over them.
        batch_size: training nodes in a step; None: all.
        neighbors: draws the neighbors that a step sums over.
    """

    epochs: int
    batch_size: int | None = None
    neighbors: Neighbors = FULL

    @property
    def whole(self) -> bool:
        """Whether a step takes all rows and edges of a client."""
        return self.batch_size is None and isinstance(self.neighbors, Full)


@dataclass(frozen=True)
class Training:
    """Model, optimizer and schedule of the clients' training.

    Attributes:
        model: the shape.
        optimizer: how steps are taken.
        schedule: which steps.
        corrections: terms added to the gradient of the data, in this order.
        losses: terms added to the loss of the labels; torch computes them.
    """

    model: "TrainableModel"
    optimizer: Optimizer
    schedule: Schedule
    corrections: tuple[Correction, ...] = ()
    losses: tuple[LossTerm, ...] = ()

    __getstate__ = state_of_fields  # what is worked out from them is not pickled

    @cached_property
    def alike(self) -> bool:
        """Whether weights that meet no data take one path at all clients."""
        return all(correction.alike for correction in self.corrections)

    @cached_property
    def flops(self) -> Mapping[str, int]:
        """Operations of a step for one parameter of each weight, without the data's gradient."""
        corrections = sum(correction.flops for correction in self.corrections)
        names = self.model.weight_shapes
        return {name: self.optimizer.flops_of(name) + corrections for name in names}

    @cached_property
    def step_flops(self) -> float:
        """Floating-point operations of a client's step, without the gradient of the data."""
        shapes = self.model.weight_shapes.items()
        return float(sum(self.flops[name] * torch.Size(shape).numel() for name, shape in shapes))

    @cached_property
    def rows_without_data(self) -> list[tuple[int, np.ndarray, Tensor]]:
        """Latest steps without data: their number, the bytes of the weights, and what these became.

        In one process the server wants them for its mean, and clients for their rows.
        """
        return []

    def of(self, clients: Tensor) -> "Training":
        """Return the training of the clients at these positions (k,) int64."""
        corrections = tuple(each.of(clients) for each in self.corrections)
        losses = tuple(each.of(clients) for each in self.losses)
        return replace(self, corrections=corrections, losses=losses)

    def correct(
        self, grads: Params, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
    ) -> Params:
        """Return the gradients with all corrections added."""
        for correction in self.corrections:
            grads = correction(grads, weights, start)
        return grads


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """What clients need to train.

    Attributes:
        block: their rows, C clients.
        start: weights, see `silograph.nn.fit`.
        memory: optimizer state (C, ...) to go on from and return; None: a fresh one, not returned.
            Moments of rows that meet no data may be in `Patched` form, see `rows_apart`.
        key: key of the draws.
        sampler: the neighbor sampler's state of every client.
        tables: those of the clients, with their optimizer state if `memory` is given.
    """

    block: ClientBlock
    start: Start
    memory: Memory | None
    key: Key
    sampler: State = field(default_factory=dict)
    tables: State = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Fitted:
    """The result of training.

    Attributes:
        weights: of every client, (C, ...).
        memory: optimizer state (C, ...), empty if it is made anew every round.
        loss: (C,) mean training loss of the last epoch, before each step; 0 without training nodes.
        logits: (n, K) of each client's model for its rows.
        steps: (C,) int64 steps taken; 0 without training nodes.
        neighbors: the neighbor sampler's state of every client.
        tables: of every client, where the model has any, with their optimizer state.
        received: (C, ...) counts of the initial model, if the run scores models on receipt.
        sampler_facts: (C,) figures of the neighbor sampler, by name.
    """

    weights: dict[str, Stacked | Patched]
    memory: Memory
    loss: Tensor
    logits: Tensor
    steps: Tensor
    neighbors: State = field(default_factory=dict)
    tables: State = field(default_factory=dict)
    received: Mapping[str, Tensor] = field(default_factory=dict)
    sampler_facts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> Params:
        """The weights as tensors (C, ...), whatever form they have."""
        return {name: dense(field) for name, field in self.weights.items()}


class Trainer(NamedTuple):
    """Trains the clients of a block by a training that it has been found to support.

    Attributes:
        fit: trains; see `silograph.nn.fit.fit`. Inputs have been checked by `check_fit`.
        prepare: works out what all rounds of a block read besides weights; the last argument says
            whether clients keep their optimizer's state.
    """

    fit: Callable[[Training, TrainingInputs], Fitted]
    prepare: Callable[[Training, ClientBlock, bool], None]


class TrainableModel(AnyModel, Protocol):
    """A model that says how it is trained; a new kind of model is a class with these answers."""

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train every client of a block in torch; see `silograph.nn.fit.fit`."""


# --- Steps of local training in torch, for the clients of a block together -----------------------
#
# C: clients. A: clients that take part in a step. n: rows. R: rows of a weight of all clients.


LOSS_FLOPS = 7  # a class of a training node: exp, sum, log, difference, product; 2 on the way back
TrainingFields = dict[str, Stacked | Ragged]


@dataclass(frozen=True, eq=False)
class InTraining:
    """Clients before or after their training.

    Attributes:
        weights: (C, ...), or rows (R, D) of all clients.
        memory: optimizer state (C, ...); empty if a fresh one is made and thrown away.
        sampler: what the neighbor sampler remembers.
        loss: (C,) float64 mean of the last epoch; 0 without training nodes.
        steps: (C,) int64 steps taken.
    """

    weights: TrainingFields
    memory: TrainingFields
    sampler: State
    loss: Tensor = field(default_factory=lambda: torch.empty(0))
    steps: Tensor = field(default_factory=lambda: torch.empty(0))

    def take(self, positions: Tensor) -> "InTraining":
        """Return the clients at `positions` (k,) int64."""
        weights, memory = (
            cast(TrainingFields, take_all(fields, positions))
            for fields in (self.weights, self.memory)
        )
        sampler = state_of(take_all(self.sampler, positions))
        loss, steps = (t[positions.to(t.device)] if len(t) else t for t in (self.loss, self.steps))
        return InTraining(weights, memory, sampler, loss, steps)

    def put(self, part: "InTraining", positions: Tensor) -> "InTraining":
        """Return all clients, those at `positions` as in `part`, the others without a step."""
        clients = len(next(f.t for f in self.weights.values() if isinstance(f, Stacked)))
        return InTraining(
            put_all(self.weights, part.weights, positions),
            put_all(self.memory, part.memory, positions),
            self.sampler,
            part.loss.new_zeros(clients).index_copy(0, positions, part.loss),
            part.steps.new_zeros(clients).index_copy(0, positions.cpu(), part.steps),
        )


def put_all(fields: TrainingFields, part: TrainingFields, positions: Tensor) -> TrainingFields:
    """Return the fields of all clients, those at `positions` as in `part`."""
    every = {name: put(fields[name], f, positions) for name, f in part.items()}
    return cast(TrainingFields, every)


@dataclass(frozen=True, eq=False)
class _StepState:
    """The tensors that steps change in place, of the first clients of a block or of all.

    Attributes:
        weights: (C, ...), or rows (R, D) of all clients.
        start: copies of the weights before the first step, where a correction needs them.
        memory: optimizer state, in the forms of the weights; `steps` (C,) or longer.
        off: (C + 1,) int64 offsets of each client's rows, of weights that are trained as rows.
    """

    weights: Params
    start: Params
    memory: Params
    off: Mapping[str, Tensor]

    def slices(self, tensors: Mapping[str, Tensor], a: int, b: int) -> Params:
        """Return views of clients a to b, of tensors named as weights or `KIND/WEIGHT`."""
        return {name: t[self._row(name, a) : self._row(name, b)] for name, t in tensors.items()}

    def part(self, a: int, b: int) -> "_StepState":
        """Return clients a to b; steps on them are steps on these."""
        kinds = self.weights, self.start, self.memory
        weights, start, memory = (self.slices(tensors, a, b) for tensors in kinds)
        return _StepState(weights, start, memory, self.off)

    def _row(self, name: str, client: int) -> int:
        off = self.off.get(name.rpartition("/")[2])
        return client if off is None else int(off[client])


@dataclass(frozen=True, eq=False)
class _Targets:
    """The labels that a step predicts.

    Attributes:
        rows: (r,) bool which rows of the pass have labels to predict; None: all of them.
        row: (t,) int64 their positions among the rows of the clients.
        y: (t, ...) their labels, by client.
        off: (A + 1,) int64 offsets of each client's labels.
        class_weight: (K,) of the loss, see `ClientBlock`.
    """

    rows: Tensor | None
    row: Tensor
    y: Tensor
    off: Tensor
    class_weight: Tensor | None


def own_copy(t: Tensor) -> Tensor:
    """Return a copy that is contiguous, whatever the strides: fused steps read it so."""
    return t.clone(memory_format=torch.contiguous_format)


def features_for(block: ClientBlock, compact: bool) -> Rows:
    """Return features that meet weights in compact form: one row for each used feature."""
    if not compact:
        return block.x
    assert isinstance(block.x, SparseRows)  # compact only where features are sparse
    return SparseRows(block.x.used.csr, block.x.off, feature=block.x.used.feature)


@dataclass(eq=False)
class _Step:
    """A step of the clients of a block, or of the first A of them.

    Attributes:
        training: how they train.
        live: what the step changes in place.
        runs: ranges of clients whose optimizers have counted equally many steps.
        inputs: what the pass reads.
        targets: what it is to predict.
        key: of the step.
        clients: (A,) int64 whose work it is, of those of the call; None: all of them.
        gates: of messages, see `Drawn`.
        loss: (A,) mean losses, once the step is taken.
        gate_gradients: the gradients of the gates, likewise.
    """

    training: Training
    live: _StepState
    runs: Sequence[tuple[int, int]]
    inputs: Pass
    targets: _Targets
    key: Key
    clients: Tensor | None
    gates: Sequence[Tensor] = ()
    loss: Tensor = field(default_factory=lambda: torch.empty(0))
    gate_gradients: tuple[Tensor, ...] = ()


@dataclass
class StepPlan:
    """Plans the steps of the clients of a block, who take them together.

    Attributes:
        model: what they train.
        training: how.
        key: of the draws.
        compact: whether the first weights are trained as rows for the features that occur.
        keep: whether training continues from an optimizer state and returns it.
        trained: the clients after all steps; those without training nodes are as they were.
    """

    model: Staged
    training: Training
    key: Key
    compact: bool
    keep: bool
    trained: InTraining = field(init=False)

    def of(self, clients: Tensor) -> "StepPlan":
        """Return the plan of the clients at these positions (k,) int64."""
        own = self.training.of(clients)
        return StepPlan(self.model, own, self.key, self.compact, self.keep)

    def steps(self, block: ClientBlock, start: InTraining) -> Iterator[_Step]:
        """Yield every step when it is to be taken, and set `trained` after the last one."""
        schedule = self.training.schedule
        if not schedule.whole:
            plan = batch_plan(block, schedule.batch_size)
            if not plan.is_reordered:
                yield from self._steps_on_batches(plan, start)
                return
            ordered = self.of(plan.order)
            yield from ordered._steps_on_batches(plan, start.take(plan.order))
            self.trained = ordered.trained.take(plan.inverse_order)
            return
        active = (block.num_train > 0).nonzero()[:, 0]
        if len(active) == block.num_clients:
            yield from self._steps_on_all_rows(block, start, None)
        elif not len(active):
            zeros = torch.zeros(block.num_clients, dtype=torch.float64, device=block.off.device)
            self.trained = replace(start, loss=zeros, steps=zeros.long().cpu())
        else:
            part = self.of(active)
            yield from part._steps_on_all_rows(block.take(active), start.take(active), active)
            self.trained = start.put(part.trained, active)

    def _steps_on_all_rows(
        self, block: ClientBlock, start: InTraining, active: Tensor | None
    ) -> Iterator[_Step]:
        """Yield steps on all rows; every client has training nodes."""
        live, epochs = self._start_steps(start), self.training.schedule.epochs
        dtype = next(iter(live.weights.values())).dtype
        inputs = whole_pass(self.model, block, dtype)
        inputs = replace(inputs, x=features_for(block, self.compact))
        train = block.split.train
        row, off = train.nonzero()[:, 0], offsets(block.num_train)
        targets = _Targets(train, row, block.y[train], off, block.class_weight)
        loss = torch.empty(0)
        for epoch in range(epochs):
            key = self.key.fold("epoch", epoch, "batch", 0)
            runs = [(0, block.num_clients)]
            step = _Step(self.training, live, runs, inputs, targets, key, active)
            yield step
            loss = step.loss
        steps = torch.full((block.num_clients,), epochs)
        self.trained = _after_training(start, live, start.sampler, loss.double(), steps)

    def _steps_on_batches(self, plan: BatchPlan, start: InTraining) -> Iterator[_Step]:
        """Yield steps that the clients with a batch `number` take together, in every epoch."""
        live, state, block = self._start_steps(start), start.sampler, plan.block
        schedule, neighbors = self.training.schedule, self.training.schedule.neighbors
        sums_neighbors = [stage.conv.sums for stage in self.model.stages]
        loss = torch.zeros(block.num_clients, dtype=torch.float64, device=block.off.device)
        for epoch in range(schedule.epochs):
            loss, key = torch.zeros_like(loss), self.key.fold("epoch", epoch)
            train = shuffle_train(block, schedule.batch_size, key)
            for number, active in enumerate(plan.active):
                # A fresh optimizer has counted as many steps for all in the first epoch.
                counted_alike = epoch == 0 and not self.keep
                runs = [(0, active)] if counted_alike else plan.groups(number)
                (seeds, off), members = plan.seeds(train, number), plan.order[:active]
                part, step_key = live.part(0, active), key.fold("batch", number)
                with work_of(members):
                    x = self._first_rows(block, part)
                    inputs, draws = sampled_pass(
                        block, x, seeds, off, neighbors, step_key, sums_neighbors, state
                    )
                clients = torch.arange(active, device=off.device)
                own = self.training if active == block.num_clients else self.training.of(clients)
                targets = _Targets(None, seeds, block.y[seeds], off, block.class_weight)
                gates = [drawn.gate for _, drawn in draws if drawn.gate is not None]
                step = _Step(own, part, runs, inputs, targets, step_key, members, gates)
                yield step
                # The caller's state must stay unchanged; later ones are our own.
                is_own = state is not start.sampler
                signal = Signal(clients, draws, step.loss, step_key, is_own, step.gate_gradients)
                with work_of(members):
                    state = neighbors.learn(block, state, signal)
                loss[:active] += step.loss.double() * off.diff() / block.num_train[:active]
        steps = plan.batches * schedule.epochs
        self.trained = _after_training(start, live, state, loss, steps)

    def _first_rows(self, block: ClientBlock, live: _StepState) -> Rows:
        """Return features for the weights that these clients hold."""
        x = features_for(block, self.compact)
        if not self.compact:
            return x
        assert isinstance(x, SparseRows)  # see `features_for`
        used = max(len(live.weights[name]) for name in live.off)
        csr = CSR(x.csr.indptr, x.csr.indices, x.csr.values, used)
        return replace(x, csr=csr)

    def _start_steps(self, clients: InTraining) -> _StepState:
        weights = {name: f.t for name, f in clients.weights.items()}
        start = {k: w.clone() for k, w in weights.items()} if self.training.corrections else {}
        memory = {name: f.t for name, f in clients.memory.items()}
        if not self.keep:
            memory = self.training.optimizer.init(weights)
        off = {name: f.off for name, f in clients.weights.items() if isinstance(f, Ragged)}
        return _StepState(weights, start, memory, off)


def _after_training(
    start: InTraining, live: _StepState, sampler: State, loss: Tensor, steps: Tensor
) -> InTraining:
    weights = {name: replace(f, t=live.weights[name]) for name, f in start.weights.items()}
    memory: TrainingFields = {name: Stacked(live.memory[name]) for name in start.memory}
    return InTraining(weights, memory, sampler, loss, steps)


def _losses(model: Staged, step: _Step, leaves: Params) -> Tensor:
    """Return the loss of each target of a step, (t,)."""
    losses, targets = step.training.losses, step.targets
    if not losses:
        logits = _target_rows(targets, forward_pass(model, leaves, step.inputs, step.key))
        report_rows(targets.off, LOSS_FLOPS * model.outputs)
        return label_losses(model, logits, targets.y, targets.off, targets.class_weight)
    outputs = embedded_pass(model, leaves, step.inputs, step.key)
    logits, embeddings = (_target_rows(targets, t) for t in outputs)
    report_rows(targets.off, LOSS_FLOPS * model.outputs)
    target_losses = label_losses(model, logits, targets.y, targets.off, targets.class_weight)
    nodes = StepNodes(embeddings, logits, targets.y, targets.row, targets.off)
    for term in losses:
        extra_losses = term(nodes)
        if extra_losses.shape != target_losses.shape:
            raise ConfigError(
                f"expected a loss {tuple(target_losses.shape)} of {type(term).__name__}, one "
                f"for each node, got {tuple(extra_losses.shape)}"
            )
        report_rows(targets.off, term.flops(embeddings.shape[1]))
        target_losses = target_losses + extra_losses
    return target_losses


def label_losses(
    model: ModelSizes, logits: Tensor, y: Tensor, off: Tensor, class_weight: Tensor | None
) -> Tensor:
    """Return the loss of each label (t,), so that the mean of a client's is the loss of its step.

    With weights of classes this mean is sum(w l) / sum(w), as `torch.nn.CrossEntropyLoss(weight=w)`
    has it; of label bits only those that are 1 have a weight, and the mean is over all.

    Args:
        model: that has made the logits.
        logits: (t, K).
        y: (t, ...) labels, by client.
        off: (A + 1,) int64 offsets of each client's labels.
        class_weight: (K,), see `ClientBlock`.
    """
    task = task_of(model.task)
    losses = task.loss(logits, y, class_weight)
    if class_weight is None or task.wide:
        return losses
    counts = off.diff()
    mean_weight = segment_sum(class_weight.to(losses.dtype)[y], off) / counts.clamp(min=1)
    return losses / torch.repeat_interleave(mean_weight, counts)


def _target_rows(targets: _Targets, t: Tensor) -> Tensor:
    """Return the rows of a pass that are targets."""
    return t if targets.rows is None else t[targets.rows]


def stacked_copies(weights: Mapping[str, Tensor], clients: int) -> Params:
    """Return a copy of shared weights for each client, (C, ...)."""
    return {k: own_copy(w.expand(clients, *w.shape)) for k, w in weights.items()}


def fit(model: Staged, training: Training, inputs: TrainingInputs) -> Fitted:
    """Train every client; those without training nodes stay as they are.

    With a fresh optimizer and sparse features, weights of features that do not occur at a client
    get no gradient from data: they follow one path from each base, which is worked out once.
    """
    block, memory = inputs.block, inputs.memory
    # 1. Copy the weights that steps change in place.
    fields = start_fields(model, inputs.start, block.num_clients)
    compact = memory is None and training.alike and starts_compact(model, fields, block.x)
    weight_fields = copy_start(model, block, fields, compact=compact)
    optimizer_memory: TrainingFields = {
        name: Stacked(own_copy(m)) for name, m in whole_memory(memory or {}).items()
    }
    start = InTraining(weight_fields, optimizer_memory, inputs.sampler)
    # 2. Take the steps of all epochs.
    plan = StepPlan(model, training, inputs.key, compact=compact, keep=memory is not None)
    for step in plan.steps(block, start):
        with nullcontext() if step.clients is None else work_of(step.clients):
            live, off, own = step.live, step.targets.off, step.training
            leaves = {name: w.detach().requires_grad_() for name, w in live.weights.items()}
            loss = segment_sum(_losses(model, step, leaves), off) / off.diff()
            # Clients share no weight, so the gradient of the sum holds each client's own.
            gradients = torch.autograd.grad(loss.sum(), [*leaves.values(), *step.gates])
            grads = own.correct(
                dict(zip(leaves, gradients, strict=False)), live.weights, live.start
            )
            report_each(own.step_flops, Kind.OPTIMIZER)
            for a, b in step.runs:
                part = live.part(a, b)
                own.optimizer.step_(part.weights, live.slices(grads, a, b), part.memory)
            step.loss, step.gate_gradients = loss.detach(), gradients[len(leaves) :]
    trained = plan.trained
    # 3. Predict, and return weights as others read them.
    tensors = {name: f.t for name, f in trained.weights.items()}
    with torch.no_grad(), work_for(Kind.EVALUATION):
        dtype = next(iter(tensors.values())).dtype
        inputs_at_end = replace(whole_pass(model, block, dtype), x=features_for(block, compact))
        logits = forward_pass(model, tensors, inputs_at_end, None)
    weights = _trained_weights(training, block, fields, trained.weights, trained.steps)
    final_memory = {name: f.t for name, f in trained.memory.items()}
    return Fitted(
        weights, final_memory, trained.loss.to(logits.dtype), logits, trained.steps, trained.sampler
    )


def copy_start(
    model: Staged, block: ClientBlock, fields: StartFields, *, compact: bool
) -> TrainingFields:
    """Return copies of the starting weights, the first ones as used rows only if compact."""
    rows, weight_fields = model.first_maps if compact else (), TrainingFields()
    for name, f in fields.items():
        if name in rows:
            assert isinstance(block.x, SparseRows)  # see `starts_compact`
            weight_fields[name] = Ragged(used_rows(f, block.x), block.x.used.off)
        else:
            weight_fields[name] = Stacked(whole(f))
    return weight_fields


def stays_without_data(training: Training, start: Tensor, steps: int) -> bool:
    """Return whether weights (R, D) without data stay where they are.

    Raises:
        ProtocolError: they move, and are not rows of weights.
    """
    if steps == 0 or (training.optimizer.weight_decay == 0 and not training.corrections):
        return True
    if start.dim() != 2 or not start.is_floating_point():
        raise ProtocolError(f"expected rows of weights, got {start.dtype} {tuple(start.shape)}")
    return False


def untouched_rows_after(training: Training, start: Tensor, steps: int) -> Tensor:
    """Return weights (R, D) after some steps of a fresh optimizer with a gradient of 0."""
    if stays_without_data(training, start, steps):
        return own_copy(start)
    name = f"{FIRST}rows"  # only first weights have rows that no data reaches
    weights, no_gradient, base = (
        {name: own_copy(start[None])},
        torch.zeros_like(start)[None],
        start[None],
    )
    state = training.optimizer.init(weights)
    for _ in range(steps):
        grads = training.correct({name: no_gradient}, weights, {name: base})
        training.optimizer.step_(weights, grads, state)
    return weights[name][0]


def _trained_weights(
    training: Training,
    block: ClientBlock,
    fields: StartFields,
    weight_fields: TrainingFields,
    steps: Tensor,
) -> dict[str, Stacked | Patched]:
    """Return trained weights; rows of unused features follow their path without data."""
    weights: dict[str, Stacked | Patched] = {}
    for name, f in weight_fields.items():
        if isinstance(f, Stacked):
            weights[name] = f
        else:
            assert isinstance(block.x, SparseRows)  # only then are there used rows
            path, flops = partial(untouched_rows_after, training), training.flops[name]
            weights[name] = patched(path, fields[name], f.t, block.x, steps, flops)
    return weights


def patched(
    untouched_rows_after: Callable[[Tensor, int], Tensor],
    start: Stacked | Patched,
    rows: Tensor,
    x: SparseRows,
    steps: Tensor,
    flops: float,
) -> Patched:
    """Return first weights whose used rows (U, H) were trained for `steps` (C,) steps.

    `untouched_rows_after` returns the other rows after a number of steps from a base (F, H);
    `flops` are the operations of a step for one parameter, for the work saved here
    (`report_spared`).
    """
    assert isinstance(start, Patched)  # see `starts_compact`
    paths = list(zip(start.which.tolist(), steps.tolist(), strict=True))
    base_number = {path: number for number, path in enumerate(sorted(set(paths)))}
    bases = [untouched_rows_after(start.base[g], count) for g, count in base_number]
    unused_rows = start.base.shape[1] - x.used.off.diff().cpu()
    computed_once = start.base.shape[1] * sum(count for _, count in base_number)
    report_spared(
        flops * rows.shape[1] * float(int((steps.cpu() * unused_rows).sum()) - computed_once)
    )
    base = bases[0][None] if len(bases) == 1 else torch.stack(bases)
    which = torch.tensor([base_number[path] for path in paths], device=rows.device)
    return Patched(base, which, rows, x.used.feature, x.used.off)


# --- input checks --------------------------------------------------------------------------------
# What comes from outside is checked here before any code that trusts it reads it.
#
# Compiled kernels and torch's fused optimizers check no bounds: a weight that is too small makes
# them read, and optimizer state that is too small makes them write, where they must not. Weights
# come from a server and state may come from a damaged file, so both tiers check them first, and
# refuse the same with the same words.
#
# C: clients. F: features. K: outputs.


ANOTHER = "these are weights of another model"
MOST_STEPS = 2**53  # beyond, counting by ones stands still even in float64


def dtype_of(block: ClientBlock) -> torch.dtype:
    """Return the dtype of a block's floating point values."""
    values = block.origin.adj.values  # a part copies when asked
    assert values is not None  # blocks carry values of the run's dtype
    return values.dtype


def check_fit(training: Training, inputs: TrainingInputs) -> None:
    """Raise `ProtocolError` unless a block can be trained from these weights and this state."""
    model, block, start, origin = training.model, inputs.block, inputs.start, inputs.block.origin
    shapes, clients = _expected_shapes(model, start, block), block.num_clients
    values, of_tensors = origin.adj.values, None  # tensors are shared by all, or (C, ...) of each
    assert values is not None  # blocks carry values of the run's dtype
    dtype = values.dtype
    for name, shape in shapes.items():
        match start[name]:
            case Tensor() as w:
                if of_tensors is None:
                    of_tensors = (clients,) if w.dim() > len(shape) else ()
                if w.shape != of_tensors + shape or w.dtype is not dtype:
                    _raise_misfit(name, w, of_tensors + shape, dtype, ANOTHER)
            case Stacked(t) if t.shape != (clients, *shape) or t.dtype is not dtype:
                _raise_misfit(name, t, (clients, *shape), dtype, ANOTHER)
            case Patched(base) as field:
                if base.shape[1:] != shape or base.dtype is not dtype or not len(base):
                    _raise_misfit(name, base, (max(len(base), 1), *shape), dtype, ANOTHER)
                problem = patched_problem(field, clients)
                if problem is None and field.t.dtype is not dtype:
                    problem = f"rows of {dtype}, got {field.t.dtype}"
                if problem:
                    raise ProtocolError(f"expected {problem} for {name} where training starts")
    if ("labels", model.task, model.outputs) not in origin.memo:
        check_labels(training, origin)  # once for all clients, not anew for those of each call
    if inputs.memory is not None:
        check_memory(model, training.optimizer, inputs.memory, block)


def check_weights(
    model: AnyModel, weights: Mapping[str, Tensor], block: ClientBlock, *, shared: bool = False
) -> None:
    """Raise `ProtocolError` unless weights are those of the model, in the block's dtype.

    Args:
        model: the shape.
        weights: shared by all clients, or all (C, ...).
        block: C clients with the model's number of features.
        shared: whether weights must be shared.
    """
    _check_slices(_expected_shapes(model, weights, block), weights, block, shared=shared)


def _expected_shapes(
    model: AnyModel, weights: Mapping[str, object], block: ClientBlock
) -> Mapping[str, tuple[int, ...]]:
    """Return shapes by name; raise `ProtocolError` unless model, names and features fit."""
    shapes = model.weight_shapes
    if model.features != block.num_features:
        raise ProtocolError(
            f"expected a model of {block.num_features} features, got one of {model.features}"
        )
    if weights.keys() != shapes.keys():
        raise ProtocolError(
            f"expected the weights {_name_some(shapes)}, got {_name_some(weights)}: {ANOTHER}"
        )
    return shapes


def _check_slices(
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    *,
    shared: bool,
) -> None:
    """Raise `ProtocolError` unless weights have these shapes: all shared, or all (C, ...)."""
    first = next(iter(shapes), None)
    stacked = first is not None and not shared and weights[first].dim() > len(shapes[first])
    clients, dtype = (block.num_clients,) if stacked else (), dtype_of(block)
    for name, shape in shapes.items():
        w = weights[name]
        if w.shape != clients + shape or w.dtype is not dtype:
            _raise_misfit(name, w, clients + shape, dtype, ANOTHER)


def check_memory(model: AnyModel, optimizer: Optimizer, memory: Memory, block: ClientBlock) -> None:
    """Raise `ProtocolError` unless optimizer state (C, ...) is as `Optimizer.init` makes it."""
    expected = _memory_shapes(model, optimizer, dtype_of(block))
    if memory.keys() != expected.keys():
        raise ProtocolError(
            f"expected the optimizer state {_name_some(expected)}, got {_name_some(memory)}: it is "
            "of another optimizer or model"
        )
    for name, (shape, dtype) in expected.items():
        m, expected_shape = memory[name], (block.num_clients, *shape)
        reason = "this is optimizer state of another model"
        if isinstance(m, Patched):
            if m.base.shape[1:] != shape or m.base.dtype is not dtype:
                _raise_misfit(name, m.base, (len(m.base), *shape), dtype, reason)
            problem = patched_problem(m, block.num_clients)
            if problem is None and m.t.dtype is not dtype:
                problem = f"rows of {dtype}, got {m.t.dtype}"
            if problem:
                raise ProtocolError(f"expected {problem} for {name} of the optimizer state")
        elif m.shape != expected_shape or m.dtype is not dtype:
            _raise_misfit(name, m, expected_shape, dtype, reason)
    steps = memory.get("steps")
    if isinstance(steps, Patched):
        raise ProtocolError("expected a number of steps for each client, got rows")
    if steps is not None and not bool(((steps >= 0) & (steps < MOST_STEPS)).all()):
        raise ProtocolError(
            "expected steps of 0 or more in the optimizer state, got "
            f"{steps.flatten()[:4].tolist()}"
        )


def check_labels(training: Training, block: ClientBlock, keep_optimizer: bool = False) -> None:
    """Raise `ProtocolError` unless training rows have labels that the model has outputs for.

    It is all that torch needs as `Trainer.prepare`.
    """
    del keep_optimizer
    model, weight = training.model, block.class_weight
    if weight is not None and weight.shape != (model.outputs,):
        raise ProtocolError(
            f"expected a weight for each of {model.outputs} classes, got {tuple(weight.shape)}"
        )
    y, task = block.y, task_of(model.task)
    is_other_task = y.dim() != 1 + task.wide or (task.wide and y.shape[1] != model.outputs)
    if is_other_task or y.is_floating_point() == task.classes:
        what = "numbers" if not task.classes else "bits" if task.wide else "classes"
        raise ProtocolError(
            f"expected {model.outputs} {what} as labels, got labels of "
            f"shape {tuple(y.shape)}: the model is for another task"
        )
    if task.classes and not task.wide and bool(block.split.train.any()):
        smallest, largest = (int(t) for t in y[block.split.train].aminmax())
        if smallest < 0 or largest >= model.outputs:
            raise ProtocolError(
                f"expected labels of training rows in 0 to {model.outputs - 1}, got "
                f"{smallest} to {largest}: the model is for fewer classes"
            )
    block.memo["labels", model.task, model.outputs] = True


def check_places(positions: Ragged, off: Tensor, what: str) -> Tensor:
    """Return positions (k,) int64 in a block from positions that clients count each by themselves.

    Args:
        positions: (k,) integers, ascending in each client.
        off: (C + 1,) int64 offsets of the clients' positions in the block.
        what: what they are, for the message.

    Raises:
        ProtocolError: a place that does not exist, or one out of order.
    """
    t = positions.t
    if (
        t.dim() != 1
        or t.is_floating_point()
        or t.dtype is torch.bool
        or len(positions.off) != len(off)
    ):
        raise ProtocolError(
            f"expected {what} as whole numbers for each of {len(off) - 1} clients, got {t.dtype} "
            f"of shape {tuple(t.shape)} for {len(positions.off) - 1}"
        )
    # In NumPy: torch takes several times as long for few places.
    local, client = t.long().cpu().numpy(), owners(positions.off).cpu().numpy()
    starts = off.cpu().numpy()
    if not ((local >= 0) & (local < np.diff(starts)[client])).all():
        raise ProtocolError(f"expected {what}, got others")
    places = starts[client] + local
    if not (places[1:] > places[:-1]).all():
        raise ProtocolError(f"expected {what} in ascending order, got another order")
    return torch.from_numpy(places).to(t.device)


def check_like(rows: Tensor, own: Tensor) -> Tensor:
    """Return rows (k, D) of other silos; raise `ProtocolError` unless they are as the own (r, D).

    What is made of them has as many columns, which would be any number else.
    """
    if rows.dim() != 2 or rows.shape[1:] != own.shape[1:] or rows.dtype is not own.dtype:
        raise ProtocolError(
            f"expected rows of {own.shape[-1]} values of {own.dtype}, got {rows.dtype} of shape "
            f"{tuple(rows.shape)}"
        )
    return rows


@lru_cache(maxsize=64)  # a millisecond
def _memory_shapes(
    model: AnyModel, optimizer: Optimizer, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of one client's optimizer state, by name.

    Tensors of device `meta` would need no memory, but torch imports 500 modules for the first one,
    which a run's clock would count.
    """
    blank = {
        name: torch.empty(1, *shape, dtype=dtype) for name, shape in model.weight_shapes.items()
    }
    return {name: (tuple(t.shape[1:]), t.dtype) for name, t in optimizer.init(blank).items()}


def _raise_misfit(
    name: str, t: Tensor, shape: tuple[int, ...], dtype: torch.dtype, reason: str
) -> None:
    if t.shape != shape:
        raise ProtocolError(f"expected {name} of shape {shape}, got {tuple(t.shape)}: {reason}")
    raise ProtocolError(f"expected {name} of {dtype}, got {t.dtype}: {reason}")


def _name_some(names: Mapping[str, object]) -> str:
    """Return at most six names, shortened: a server may send any number of any length."""
    texts = [repr(name[:40])[1:-1] for name in list(names)[:6]]
    return ", ".join(texts + ["..."] * (len(names) > 6)) or "none"
