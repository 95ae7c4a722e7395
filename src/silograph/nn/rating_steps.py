"""Local training of models of ratings: every step predicts some training ratings of one client.

E: users and items of a client. D: width of a table. t: its rows. p: ratings of a block.
R: ratings in a step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Ragged, Stacked, State, offsets
from silograph.core.work import report_each, report_steps, work_for
from silograph.graph.block.block import (
    UNSEEN,
    ClientBlock,
    kinds,
    pairs_of,
    table_rows,
    trained_rows,
)
from silograph.graph.csr import CSR
from silograph.graph.graph import words_of_rows
from silograph.nn.any_model import AnyModel
from silograph.nn.conv import Params
from silograph.nn.fit import (
    Fitted,
    Training,
    TrainingInputs,
    dtype_of,
    own_copy,
    start_fields,
    whole,
)
from silograph.nn.mini_batches import batches
from silograph.task.registry import task_of

# --- rating graph --------------------------------------------------------------------------------
# Who sends messages to whom among the users and items of a client, with transition probabilities.
#
# Messages go along the ratings that train, and along trust. Ratings that validate or test are no
# edges, so nothing of them reaches a prediction.
#
# E: users and items of one client. e: directed edges among them. t: rows of a table.


@dataclass(frozen=True, eq=False)
class RatingGraph:
    """What a model reads of one client.

    Attributes:
        slot: (E,) int64 row of each user and item in the tables; those without a training rating
            share the row of unseen users, 0, or of unseen items, 1.
        key: (t,) int64 counter of the draws for each row of a table.
        word: (E,) int64 word of the public key of each, the same at all clients.
        is_item: (E,) bool.
        trust: (2, s) int64 users and whom they trust, each statement in both directions.
        adj: (E, E) edges, without values.
        chance: (e, 2) transition probabilities of an edge, from the receiver to the sender and
            back: a user's ratings divided by their sum, an item's likewise, and one over the number
            of users with whom there is trust.
        gcn: (E, E) D^-1/2 (A + I) D^-1/2.
        gcn_chance: (E, 2) `chance`, summed with the weights of `gcn`.
        mean: mean rating in training, 0 without any.
        row: (p,) int64 row of each rating in the block.
        user: (p,) int64 its user, among users and items.
        item: (p,) int64 its item.
    """

    slot: Tensor
    key: Tensor
    word: Tensor
    is_item: Tensor
    trust: Tensor
    adj: CSR
    chance: Tensor
    gcn: CSR
    gcn_chance: Tensor
    mean: float
    row: Tensor
    user: Tensor
    item: Tensor


def rating_graph(block: ClientBlock, dtype: torch.dtype) -> RatingGraph:
    """Return the users and items of a block of one client, worked out once."""
    return block.once(("rating graph", dtype), RatingGraph, lambda: _made(block, dtype))


def _made(block: ClientBlock, dtype: torch.dtype) -> RatingGraph:
    kind, pairs, known = kinds(block.x), pairs_of(block), trained_rows(block)
    entity = (kind > 0).any(dim=1)
    place = entity.long().cumsum(0) - 1
    who = entity.nonzero()[:, 0]
    slot = torch.where(known, known.long().cumsum(0) + UNSEEN - 1, (kind[:, 1] > 0).long())[who]
    trained = block.row_key[known.nonzero()[:, 0]]
    key = torch.cat([torch.arange(UNSEEN, dtype=trained.dtype, device=trained.device), trained])
    user, item = place[pairs.user], place[pairs.item]
    train = block.split.train[pairs.row]
    value = block.y[pairs.row[train]]
    inside = entity[block.adj.row] & entity[block.adj.indices.long()]
    trust = place[block.adj.row[inside]], place[block.adj.indices[inside].long()]
    rows = torch.cat([user[train], item[train], trust[0]])
    columns = torch.cat([item[train], user[train], trust[1]])
    weight = torch.cat([value, value, torch.ones(len(trust[0])).to(value)])
    rated = torch.arange(len(rows), device=rows.device) < 2 * len(value)
    chance = _chances(rows, columns, weight, rated, len(who))
    order = torch.argsort(rows * len(who) + columns)
    pairs_in_order = rows[order], columns[order]
    receiver, sender = (t.cpu() for t in pairs_in_order)
    adj = CSR.from_pairs(receiver, sender, (len(who), len(who)))
    adj, chance = adj.to(rows.device, dtype), chance[order].to(dtype)
    root = (adj.degree.to(dtype) + 1).rsqrt()
    norm = root[pairs_in_order[0]] * root[pairs_in_order[1]]
    summed = torch.zeros(len(who), 2, dtype=dtype, device=rows.device)
    summed.index_add_(0, pairs_in_order[0], norm[:, None] * chance)
    return RatingGraph(
        slot,
        key,
        words_of_rows(block.ids[0], block.row_key[who]),
        kind[who, 1] > 0,
        torch.stack(trust),
        adj,
        chance,
        _with_self(adj, norm, root),
        summed,
        float(value.mean()) if len(value) else 0.0,
        pairs.row,
        user,
        item,
    )


def _chances(rows: Tensor, columns: Tensor, weight: Tensor, rated: Tensor, count: int) -> Tensor:
    """Return how likely a step along each edge is, forth and back, (e, 2) float64.

    Ratings and trust are apart: an end's chances of each sum to 1. Where all weights of an end are
    0, all its steps are alike.
    """
    chances = []
    for end in (rows, columns):
        cell = end * 2 + rated
        total = torch.zeros(2 * count, dtype=torch.float64, device=end.device)
        total.index_add_(0, cell, weight.double())
        number = torch.bincount(cell, minlength=2 * count).double()
        some = total[cell] > 0
        alike = 1 / number[cell]
        chances.append(torch.where(some, weight.double() / total[cell].where(some, 1.0), alike))
    return torch.stack(chances, dim=1)


def _with_self(adj: CSR, norm: Tensor, root: Tensor) -> CSR:
    """Return the edges weighted by `norm` (e,), with squared roots (E,) on the diagonal."""
    import scipy.sparse as sp

    parts = (t.cpu().numpy() for t in (norm, adj.indices, adj.indptr))
    matrix = sp.csr_matrix(tuple(parts), shape=(adj.num_rows, adj.num_cols))
    diagonal = sp.diags_array(np.square(root.cpu().numpy()))
    return CSR.from_scipy(sp.csr_matrix(matrix + diagonal)).to(root.device, root.dtype)


class PairModel(AnyModel, Protocol):
    """A model of ratings that is trained by steps, one client at a time."""

    def said(
        self, p: Mapping[str, Tensor], block: ClientBlock, pair: Tensor, key: Key | None
    ) -> Tensor:
        """Return what is predicted of training ratings in a step, (R, 1).

        Args:
            p: weights and tables of the client.
            block: the client.
            pair: (R,) int64 which ratings, by their places in `pairs_of`.
            key: of dropout; None: nothing is dropped.
        """

    def flops(self, block: ClientBlock, ratings: int, *, passes: int) -> float:
        """Return the floating-point operations of a pass, or of one forth and back (3 passes)."""


def alone(block: ClientBlock) -> ClientBlock:
    """Return a block of one client; raise `ProtocolError` for others."""
    if block.num_clients != 1:
        raise ProtocolError(f"expected a block of one client for ratings, got {block.num_clients}")
    return block


def one_client(model: AnyModel, weights: Mapping[str, Tensor]) -> Params:
    """Return weights in shared form, from those that are or those (1, ...) of one client."""
    shapes = model.weight_shapes
    return {name: w if w.shape == shapes[name] else w[0] for name, w in weights.items()}


def checked_tables(model: AnyModel, block: ClientBlock, tables: State) -> Params:
    """Return a client's tables; raise `ProtocolError` unless they are of this client and model."""
    if not model.table_widths:
        return {}
    rows, dtype = int(table_rows(block).sum()), dtype_of(block)
    for name, width in model.table_widths.items():
        found = tables[name].t if name in tables else None
        if found is None or found.shape != (rows, width) or found.dtype is not dtype:
            got = "none" if found is None else f"{tuple(found.shape)} in {found.dtype}"
            raise ProtocolError(
                f"expected a table {name} ({rows}, {width}) in {dtype}, got {got}: tables stay "
                "with their client and its training ratings"
            )
    return {name: tables[name].t for name in model.table_widths}


def values_of(
    model: AnyModel, weights: Mapping[str, Tensor], block: ClientBlock, tables: State
) -> Params:
    """Return one client's weights and tables; see `checked_tables`."""
    return {**one_client(model, weights), **checked_tables(model, block, tables)}


def drawn_table(block: ClientBlock, key: Key, width: int) -> Ragged:
    """Return a client's table (t, D) drawn from +-1/sqrt(D); rows of the unseen are 0."""
    dtype = dtype_of(block)
    drawn = 2 * key.uniform(rating_graph(block, dtype).key, width) - 1
    drawn[:UNSEEN] = 0
    return Ragged((drawn * width**-0.5).to(dtype), offsets(table_rows(alone(block))))


def at_ratings(block: ClientBlock, row: Tensor, found: Tensor) -> Tensor:
    """Return predictions (R, 1) in the rows (R,) of their ratings, (n, 1); 0 at all others."""
    out = found.new_zeros(len(block.y), 1)
    out[row] = found
    return out


def at_nodes(block: ClientBlock, part: Tensor) -> Tensor:
    """Return what users and items have (E, ...) in their rows, (n, ...); 0 in all others."""
    out = part.new_zeros(len(block.y), *part.shape[1:])
    out[(kinds(block.x) > 0).any(dim=1)] = part
    return out


class PairPasses(Protocol):
    """A model of ratings at one client, forward and backward."""

    def gradient(
        self, values: Params, seeds: Tensor, pair: Tensor, key: Key
    ) -> tuple[Tensor, Params]:
        """Return the mean loss of training ratings in a step, () float64, and its gradient.

        Args:
            values: weights and tables of the client, shared form.
            seeds: (R,) int64 rows of the ratings in the block.
            pair: (R,) int64 their places in `pairs_of`.
            key: of dropout.
        """

    def predict(self, weights: Params, tables: State) -> Tensor:
        """Return predictions (n, 1), 0 at users and items; weights are shared or (1, ...)."""


@dataclass(frozen=True)
class TorchPasses:
    """Passes by torch's autograd.

    Attributes:
        model: the shape.
        block: one client.
        added: to the loss of every step, from weights and tables; not reported with it.
    """

    model: PairModel
    block: ClientBlock
    added: Callable[[Mapping[str, Tensor], ClientBlock], Tensor] | None = None

    def gradient(
        self, values: Params, seeds: Tensor, pair: Tensor, key: Key
    ) -> tuple[Tensor, Params]:
        """See `PairPasses`."""
        leaves = {name: w.detach().requires_grad_() for name, w in values.items()}
        said = self.model.said(leaves, self.block, pair, key)
        loss = task_of(self.model.task).loss(said, self.block.y[seeds]).mean()
        whole_loss = loss if self.added is None else loss + self.added(leaves, self.block)
        found = torch.autograd.grad(
            whole_loss, list(leaves.values()), materialize_grads=True, allow_unused=True
        )
        return loss.detach().double(), dict(zip(leaves, found, strict=True))

    def predict(self, weights: Params, tables: State) -> Tensor:
        """See `PairPasses`."""
        return self.model.forward(weights, self.block, tables=tables)


def fit_pairs(
    model: PairModel, training: Training, inputs: TrainingInputs, passes: PairPasses | None = None
) -> Fitted:
    """Train one client on its training ratings, all of them or batches.

    Args:
        model: the shape.
        training: how.
        inputs: from what.
        passes: the model at the client; None: by torch.
    """
    block = alone(inputs.block)
    passes = TorchPasses(model, block) if passes is None else passes
    weights = {n: whole(field) for n, field in start_fields(model, inputs.start, 1).items()}
    values, state = _started(model, training, inputs, weights)
    loss, steps = _trained(model, training, inputs, passes, (weights, values, state))
    off, names, memory = offsets(table_rows(block)), model.weight_shapes, inputs.memory
    new: dict[str, Ragged] = {n: Ragged(values[n][0], off) for n in model.table_widths}
    with torch.no_grad(), work_for(Kind.EVALUATION):
        logits = passes.predict({n: values[n] for n in names}, new)
    moments: Params = {}
    if memory is not None:
        moments = {n: state[n] for n in memory}
        new |= {n: Ragged(t[0], off) for n, t in state.items() if n not in memory}
    fields: dict[str, Stacked | Patched] = {n: Stacked(values[n]) for n in names}
    count = torch.tensor([steps])
    return Fitted(fields, moments, loss.to(logits.dtype), logits, count, tables=new)


def _started(
    model: PairModel, training: Training, inputs: TrainingInputs, weights: Params
) -> tuple[Params, Params]:
    """Return what is trained and what the optimizer keeps of it, both changed in place later.

    Tables are one client's, so they stand beside its weights (1, ...) in every step.
    """
    memory, tables = inputs.memory, inputs.tables
    held = checked_tables(model, inputs.block, tables)
    values = weights | {n: own_copy(t)[None] for n, t in held.items()}
    state = training.optimizer.init(values)
    if memory is not None:
        kept = {n: own_copy(f.t)[None] for n, f in tables.items() if n not in model.table_widths}
        state |= {n: own_copy(m) for n, m in memory.items()} | kept
    return values, state


def _trained(
    model: PairModel,
    training: Training,
    inputs: TrainingInputs,
    passes: PairPasses,
    held: tuple[Params, Params, Params],
) -> tuple[Tensor, int]:
    """Take all steps in place; return the loss of the last epoch, (1,) float64, and their number.

    Args:
        model: the shape.
        training: how.
        inputs: from what.
        passes: the model at the client.
        held: its weights, these and its tables, and what the optimizer keeps of both.
    """
    block, schedule, (weights, values, state) = inputs.block, training.schedule, held
    begun = {name: w.clone() for name, w in weights.items()} if training.corrections else {}
    row, optimizer = pairs_of(block).row, training.optimizer
    position = torch.full((len(block.y),), -1, device=block.y.device)
    position[row] = torch.arange(len(row), device=block.y.device)
    of_tables = sum(optimizer.flops_of(n) * values[n].numel() for n in model.table_widths)
    total, steps = torch.zeros(1, dtype=torch.float64, device=block.y.device), 0
    for epoch in range(schedule.epochs if int(block.num_train) else 0):
        total = torch.zeros_like(total)
        epoch_key = inputs.key.fold("epoch", epoch)
        for number, seeds in enumerate(batches(block, schedule.batch_size, epoch_key)):
            now = {name: w[0] for name, w in values.items()}
            batch_key = epoch_key.fold("batch", number)
            loss, found = passes.gradient(now, seeds, position[seeds], batch_key)
            grads = {name: g[None] for name, g in found.items()}
            changed = training.correct({n: grads[n] for n in weights}, weights, begun)
            optimizer.step_(values, grads | changed, state)
            report_each(model.flops(block, len(seeds), passes=3))
            report_steps(training.step_flops + of_tables)
            steps += 1
            total = total + loss * len(seeds) / block.num_train
    return total, steps
