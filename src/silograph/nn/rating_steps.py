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
from silograph.core.work import report_each, work_for
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
from silograph.nn.conv import Params
from silograph.nn.fit import (
    Fitted,
    Training,
    TrainingInputs,
    dtype_of,
    own_copy,
    start_fields,
    whole,
    whole_memory,
)
from silograph.nn.forward import AnyModel
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
    """The users and items of one client with the edges among them.

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
    return block.once(("rating graph", dtype), RatingGraph, lambda: _build_graph(block, dtype))


def _build_graph(block: ClientBlock, dtype: torch.dtype) -> RatingGraph:
    kind, pairs, is_trained = kinds(block.x), pairs_of(block), trained_rows(block)
    entity = (kind > 0).any(dim=1)
    entity_number = entity.long().cumsum(0) - 1
    entities = entity.nonzero()[:, 0]
    slot = torch.where(
        is_trained, is_trained.long().cumsum(0) + UNSEEN - 1, (kind[:, 1] > 0).long()
    )[entities]
    trained_keys = block.row_key[is_trained.nonzero()[:, 0]]
    key = torch.cat(
        [torch.arange(UNSEEN, dtype=trained_keys.dtype, device=trained_keys.device), trained_keys]
    )
    user, item = entity_number[pairs.user], entity_number[pairs.item]
    train = block.split.train[pairs.row]
    value = block.y[pairs.row[train]]
    is_trust = entity[block.adj.row] & entity[block.adj.indices.long()]
    trust = (
        entity_number[block.adj.row[is_trust]],
        entity_number[block.adj.indices[is_trust].long()],
    )
    rows = torch.cat([user[train], item[train], trust[0]])
    columns = torch.cat([item[train], user[train], trust[1]])
    weight = torch.cat([value, value, torch.ones(len(trust[0])).to(value)])
    is_rating = torch.arange(len(rows), device=rows.device) < 2 * len(value)
    chance = _transition_probabilities(rows, columns, weight, is_rating, len(entities))
    order = torch.argsort(rows * len(entities) + columns)
    pairs_in_order = rows[order], columns[order]
    receiver, sender = (t.cpu() for t in pairs_in_order)
    adj = CSR.from_pairs(receiver, sender, (len(entities), len(entities)))
    adj, chance = adj.to(rows.device, dtype), chance[order].to(dtype)
    inverse_root = (adj.degree.to(dtype) + 1).rsqrt()
    norm = inverse_root[pairs_in_order[0]] * inverse_root[pairs_in_order[1]]
    gcn_chance = torch.zeros(len(entities), 2, dtype=dtype, device=rows.device)
    gcn_chance.index_add_(0, pairs_in_order[0], norm[:, None] * chance)
    return RatingGraph(
        slot,
        key,
        words_of_rows(block.ids[0], block.row_key[entities]),
        kind[entities, 1] > 0,
        torch.stack(trust),
        adj,
        chance,
        _add_self_loops(adj, norm, inverse_root),
        gcn_chance,
        float(value.mean()) if len(value) else 0.0,
        pairs.row,
        user,
        item,
    )


def _transition_probabilities(
    rows: Tensor, columns: Tensor, weight: Tensor, rated: Tensor, count: int
) -> Tensor:
    """Return the probability of a step along each edge, forth and back, (e, 2) float64.

    The probabilities at an end sum to 1 for its ratings, and to 1 for its trust. Where all weights
    are 0, its steps are equally likely.
    """
    chances = []
    for end in (rows, columns):
        cell = end * 2 + rated
        total = torch.zeros(2 * count, dtype=torch.float64, device=end.device)
        total.index_add_(0, cell, weight.double())
        num_edges = torch.bincount(cell, minlength=2 * count).double()
        has_weight = total[cell] > 0
        uniform = 1 / num_edges[cell]
        chances.append(
            torch.where(has_weight, weight.double() / total[cell].where(has_weight, 1.0), uniform)
        )
    return torch.stack(chances, dim=1)


def _add_self_loops(adj: CSR, norm: Tensor, root: Tensor) -> CSR:
    """Return the edges weighted by `norm` (e,), with squared roots (E,) on the diagonal."""
    import scipy.sparse as sp

    parts = (t.cpu().numpy() for t in (norm, adj.indices, adj.indptr))
    matrix = sp.csr_matrix(tuple(parts), shape=(adj.num_rows, adj.num_cols))
    diagonal = sp.diags_array(np.square(root.cpu().numpy()))
    return CSR.from_scipy(sp.csr_matrix(matrix + diagonal)).to(root.device, root.dtype)


class PairModel(AnyModel, Protocol):
    """A model of ratings that is trained by steps, one client at a time."""

    def predict_pairs(
        self, p: Mapping[str, Tensor], block: ClientBlock, pair: Tensor, key: Key | None
    ) -> Tensor:
        """Return predictions of training ratings in a step, (R, 1).

        Args:
            p: weights and tables of the client.
            block: the client.
            pair: (R,) int64 which ratings, by their places in `pairs_of`.
            key: of dropout; None: nothing is dropped.
        """

    def flops(self, block: ClientBlock, ratings: int, *, passes: int) -> float:
        """Return the floating-point operations of a pass, or of one forth and back (3 passes)."""


def require_one_client(block: ClientBlock) -> ClientBlock:
    """Return a block of one client; raise `ProtocolError` for others."""
    if block.num_clients != 1:
        raise ProtocolError(f"expected a block of one client for ratings, got {block.num_clients}")
    return block


def one_client(model: AnyModel, weights: Mapping[str, Tensor]) -> Params:
    """Return weights in shared form, from those that are or those (1, ...) of one client."""
    shapes = model.weight_shapes
    return {name: w if w.shape == shapes[name] else w[0] for name, w in weights.items()}


def check_tables(model: AnyModel, block: ClientBlock, tables: State) -> Params:
    """Return a client's tables; raise `ProtocolError` unless they are of this client and model."""
    if not model.table_widths:
        return {}
    rows, dtype = int(table_rows(block).sum()), dtype_of(block)
    for name, width in model.table_widths.items():
        table = tables[name].t if name in tables else None
        if table is None or table.shape != (rows, width) or table.dtype is not dtype:
            description = "none" if table is None else f"{tuple(table.shape)} in {table.dtype}"
            raise ProtocolError(
                f"expected a table {name} ({rows}, {width}) in {dtype}, got {description}: tables "
                "stay with their client and its training ratings"
            )
    return {name: tables[name].t for name in model.table_widths}


def values_of(
    model: AnyModel, weights: Mapping[str, Tensor], block: ClientBlock, tables: State
) -> Params:
    """Return one client's weights and tables; see `check_tables`."""
    return {**one_client(model, weights), **check_tables(model, block, tables)}


def draw_table(block: ClientBlock, key: Key, width: int) -> Ragged:
    """Return a client's table (t, D) drawn from +-1/sqrt(D); rows of the unseen are 0."""
    dtype = dtype_of(block)
    table = 2 * key.uniform(rating_graph(block, dtype).key, width) - 1
    table[:UNSEEN] = 0
    return Ragged((table * width**-0.5).to(dtype), offsets(table_rows(require_one_client(block))))


def at_ratings(block: ClientBlock, row: Tensor, predictions: Tensor) -> Tensor:
    """Return predictions (R, 1) in the rows (R,) of their ratings, (n, 1); 0 at all others."""
    out = predictions.new_zeros(len(block.y), 1)
    out[row] = predictions
    return out


def at_nodes(block: ClientBlock, part: Tensor) -> Tensor:
    """Return values of users and items (E, ...) in their rows, (n, ...); 0 in all others."""
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
    extra_loss: Callable[[Mapping[str, Tensor], ClientBlock], Tensor] | None = None

    def gradient(
        self, values: Params, seeds: Tensor, pair: Tensor, key: Key
    ) -> tuple[Tensor, Params]:
        """See `PairPasses`."""
        leaves = {name: w.detach().requires_grad_() for name, w in values.items()}
        predictions = self.model.predict_pairs(leaves, self.block, pair, key)
        loss = task_of(self.model.task).loss(predictions, self.block.y[seeds]).mean()
        whole_loss = loss if self.extra_loss is None else loss + self.extra_loss(leaves, self.block)
        gradients = torch.autograd.grad(
            whole_loss, list(leaves.values()), materialize_grads=True, allow_unused=True
        )
        return loss.detach().double(), dict(zip(leaves, gradients, strict=True))

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
    block = require_one_client(inputs.block)
    passes = TorchPasses(model, block) if passes is None else passes
    weights = {n: whole(field) for n, field in start_fields(model, inputs.start, 1).items()}
    values, state = _start_values(model, training, inputs, weights)
    loss, steps = _train(model, training, inputs, passes, (weights, values, state))
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


def _start_values(
    model: PairModel, training: Training, inputs: TrainingInputs, weights: Params
) -> tuple[Params, Params]:
    """Return the trained tensors and their optimizer state; steps change both in place.

    Tables belong to one client, so they are trained like its weights (1, ...).
    """
    memory, tables = inputs.memory, inputs.tables
    checked = check_tables(model, inputs.block, tables)
    values = weights | {n: own_copy(t)[None] for n, t in checked.items()}
    state = training.optimizer.init(values)
    if memory is not None:
        table_state = {
            n: own_copy(f.t)[None] for n, f in tables.items() if n not in model.table_widths
        }
        state |= {n: own_copy(m) for n, m in whole_memory(memory).items()} | table_state
    return values, state


def _train(
    model: PairModel,
    training: Training,
    inputs: TrainingInputs,
    passes: PairPasses,
    trained_values: tuple[Params, Params, Params],
) -> tuple[Tensor, int]:
    """Take all steps in place; return the loss of the last epoch, (1,) float64, and their number.

    Args:
        model: the shape.
        training: how.
        inputs: from what.
        passes: the model at the client.
        trained_values: its weights, these with its tables, and the optimizer state of both.
    """
    block, schedule, (weights, values, state) = inputs.block, training.schedule, trained_values
    start = {name: w.clone() for name, w in weights.items()} if training.corrections else {}
    row, optimizer = pairs_of(block).row, training.optimizer
    position = torch.full((len(block.y),), -1, device=block.y.device)
    position[row] = torch.arange(len(row), device=block.y.device)
    table_flops = sum(optimizer.flops_of(n) * values[n].numel() for n in model.table_widths)
    total, steps = torch.zeros(1, dtype=torch.float64, device=block.y.device), 0
    for epoch in range(schedule.epochs if int(block.num_train) else 0):
        total = torch.zeros_like(total)
        epoch_key = inputs.key.fold("epoch", epoch)
        for number, seeds in enumerate(batches(block, schedule.batch_size, epoch_key)):
            client_values = {name: w[0] for name, w in values.items()}
            batch_key = epoch_key.fold("batch", number)
            loss, gradients = passes.gradient(client_values, seeds, position[seeds], batch_key)
            grads = {name: g[None] for name, g in gradients.items()}
            corrected = training.correct({n: grads[n] for n in weights}, weights, start)
            optimizer.step_(values, grads | corrected, state)
            report_each(model.flops(block, len(seeds), passes=3))
            report_each(training.step_flops + table_flops, Kind.OPTIMIZER)
            steps += 1
            total = total + loss * len(seeds) / block.num_train
    return total, steps
