"""Mini-batches of training nodes with drawn neighbors, for all clients of a block at once.

Clients with fewer batches leave the computation; clients are sorted by how many batches they have,
so that those that take part are always the first ones, and their weights are a part in one piece.

C: clients. A: clients that take part in a step. n: rows. s: training rows in a step. L: stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from silograph.core.key import Key, mix_words, signed
from silograph.core.payload import State, offsets, ranges, stable_order
from silograph.federation.field_specs import FieldSpecs
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.graph.csr import CSR, index_dtype
from silograph.nn.conv import (
    AGAINST_COLUMN,
    ALONG_COLUMN,
    Messages,
    edges_one_way,
    internal_messages,
)
from silograph.nn.forward import AnyModel, Pass

# --- neighbors -----------------------------------------------------------------------------------
# Neighbor samplers: which neighbors a step sums over, for all clients of a block at once.
#
# A sampler is a frozen value. Training asks it hop by hop, from the training rows of a batch
# outwards, for the edges along which messages come, and tells it the losses of the step
# afterwards. What a sampler remembers of a client is a part of the client's state, so it survives
# a restart and never leaves the client.
#
# Here are the protocol and the samplers that the compiled kernels have, too; the others, and the
# names of all, are in `silograph.sampling.neighbors`.
#
# C: clients. A: clients that take part in a step. n: rows. r: rows reached. e: edges.


@dataclass(frozen=True, eq=False)
class Reached:
    """The rows that the batches of some clients have reached so far.

    Attributes:
        rows: (r,) int64 of the block, sorted by client; a client's training rows come first.
        hops: (r,) int64 hop at which each was reached, 0 for training rows.
        clients: (A,) int64 positions in the block of the clients that take part, ascending.
        off: (A + 1,) int64 rows of each of them.
    """

    rows: Tensor
    hops: Tensor
    clients: Tensor
    off: Tensor


@dataclass(frozen=True, eq=False)
class Drawn:
    """The edges of one hop.

    Attributes:
        position: (e,) int64 place among `Reached.rows` of the row that receives.
        neighbor: (e,) int64 row of the block that sends, of the same client; each once a receiver.
        share: (e,) in the run's dtype, how many edges each stands for, times its weight; (e, 2)
            where weights are those of both directions.
        degree: (n,) in the run's dtype, what convolutions take for degrees in this hop; None: the
            degrees in the client's graph, of weighted edges the sums of their weights.
        trace: tensors that `learn` needs after the step.
        gate: (n,) ones that scale what each row sends in this hop; `learn` gets the gradient of
            the loss by them. None: there is none.
    """

    position: Tensor
    neighbor: Tensor
    share: Tensor
    degree: Tensor | None = None
    trace: Mapping[str, Tensor] = field(default_factory=dict)
    gate: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Signal:
    """The outcome of a step, for samplers that learn.

    Attributes:
        clients: (A,) int64 positions in the block of the clients that took part, ascending.
        draws: by hop, the reached rows and the edges drawn for them.
        loss: (A,) their mean training loss before the step.
        key: of the step.
        gates: by hop, the gradient (n,) of `loss` by `Drawn.gate`; empty without gates.
        own: whether nobody else reads the state, so that `learn` may change its tensors in place.
    """

    clients: Tensor
    draws: tuple[tuple[Reached, Drawn], ...]
    loss: Tensor
    key: Key
    own: bool = False
    gates: tuple[Tensor, ...] = ()


class Neighbors(Protocol):
    """A neighbor sampler.

    Draws depend on the keys of rows (`ClientBlock.row_key`), not on their numbers, nor on which
    clients are in the block.
    """

    def fanout(self, hops: int) -> tuple[int, ...] | None:
        """Return neighbors drawn by hop, 0 for all, if that is all; compiled kernels draw so."""

    def why_not(self, model: AnyModel) -> str | None:
        """Return why a model cannot be trained on these draws, or None if it can."""

    def maps(self, model: AnyModel) -> Sequence[tuple[int, ...]]:
        """Return shapes of the weights that the draws of a step go through, those of all hops."""

    def specs(self, model: AnyModel) -> FieldSpecs:
        """Return the specs of its fields in a client's state, by names of its own."""

    def init(self, block: ClientBlock, model: AnyModel, key: Key) -> State:
        """Return that state before the first round, of every client."""

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Draw neighbors of the rows reached.

        Args:
            block: C clients; some may take no part.
            reached: the rows.
            hop: 0 for the neighbors of training rows, which are those of the last layer.
            key: of this step and hop, the same for all clients.
            state: of all C clients.
        """

    def learn(self, block: ClientBlock, state: State, signal: Signal) -> State:
        """Return the state (of all C clients) after a step; those that took no part keep theirs."""

    @property
    def fact_specs(self) -> FieldSpecs:
        """Specs of its figures in the clients' replies, which are facts of a round; by name."""

    def facts(self, block: ClientBlock, state: State) -> Mapping[str, Tensor]:
        """Return these figures after local training, (C,) each; `state` of all C clients."""

    def note(self, facts: Mapping[str, Sequence[float]]) -> str | None:
        """Return one line about a run, from its facts in the scored rounds; None: no line."""

    def messages(
        self, block: ClientBlock, sums: Sequence[bool], state: State
    ) -> tuple[Messages, ...] | None:
        """Return the messages of each stage when models are scored; None: all edges count alike.

        Args:
            block: C clients.
            sums: (L,) whether a stage sums over neighbors.
            state: of all C clients.
        """


class Stateless:
    """Base of samplers: no state, draws in torch, no figures, and no say when models are scored."""

    def fanout(self, hops: int) -> tuple[int, ...] | None:
        """Return None: there is no compiled form."""
        del hops
        return None

    def maps(self, model: AnyModel) -> Sequence[tuple[int, ...]]:
        """Return no weights."""
        del model
        return ()

    def specs(self, model: AnyModel) -> FieldSpecs:
        """Return no specs."""
        del model
        return {}

    def init(self, block: ClientBlock, model: AnyModel, key: Key) -> State:
        """Return no state."""
        del block, model, key
        return {}

    def learn(self, block: ClientBlock, state: State, signal: Signal) -> State:
        """Return the state unchanged."""
        del block, signal
        return state

    @property
    def fact_specs(self) -> FieldSpecs:
        """No specs."""
        return {}

    def facts(self, block: ClientBlock, state: State) -> Mapping[str, Tensor]:
        """Return no figures."""
        del block, state
        return {}

    def note(self, facts: Mapping[str, Sequence[float]]) -> str | None:
        """Return None: there is nothing to say."""
        del facts
        return None

    def messages(
        self, block: ClientBlock, sums: Sequence[bool], state: State
    ) -> tuple[Messages, ...] | None:
        """Return None: all edges count alike."""
        del block, sums, state
        return None


@dataclass(frozen=True)
class Full(Stateless):
    """All neighbors."""

    def fanout(self, hops: int) -> tuple[int, ...]:
        """Return 0 for every hop, which is all neighbors."""
        return (0,) * hops

    def why_not(self, model: AnyModel) -> str | None:
        """Return None: any model can be trained."""
        del model
        return None

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Return every edge of the rows reached."""
        del hop, key, state
        return edges_of(block, reached.rows)


@dataclass(frozen=True)
class Fanout(Stateless):
    """At most so many neighbors of each row, drawn alike and without replacement.

    Hamilton, Ying and Leskovec, "Inductive representation learning on large graphs", NeurIPS 2017,
    algorithm 2. What we changed: a drawn edge stands for degree / drawn of them, so the sum over
    neighbors is unbiased for every convolution.

    Attributes:
        counts: by hop, 0 for all.
    """

    counts: tuple[int, ...]

    def fanout(self, hops: int) -> tuple[int, ...]:
        """Return the counts."""
        del hops
        return self.counts

    def why_not(self, model: AnyModel) -> str | None:
        """Return None: attention weighs a drawn edge by how many it stands for (`GAT`)."""
        del model
        return None

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Draw for each row by itself; scores of edges are hashes of both rows' keys."""
        del state
        all_edges, count = edges_of(block, reached.rows), self.counts[hop]
        degree = block.adj.degree[reached.rows]
        if count == 0 or not bool((degree > count).any()):
            return all_edges
        is_kept = (degree <= count)[all_edges.position]
        # Rows with fewer neighbors keep them all: only the others' edges are sorted.
        edge = (~is_kept).nonzero()[:, 0]
        order = edge[edge_words(block, reached.rows, key, all_edges, edge).argsort()]
        order = order[all_edges.position[order].argsort(stable=True)]
        sizes = degree[degree > count]
        first = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        rank = torch.arange(len(order), device=order.device) - first
        is_kept[order[rank < count]] = True
        position = all_edges.position[is_kept]
        share = (degree[position].to(all_edges.share.dtype) / count).clamp(min=1)
        weight = all_edges.share[is_kept]
        share = share if weight.dim() == 1 else share[:, None]
        return Drawn(position, all_edges.neighbor[is_kept], share * weight)


FULL = Full()


def edges_of(block: ClientBlock, rows: Tensor) -> Drawn:
    """Return all edges of rows (r,) int64, each standing for itself, with its weight."""
    edges = block.adj.select_rows(rows)
    assert edges.values is not None  # blocks carry values of the run's dtype
    return Drawn(edges.row, edges.indices.long(), edges.values)


def edge_words(
    block: ClientBlock, rows: Tensor, key: Key, drawn: Drawn, edge: Tensor | None = None
) -> Tensor:
    """Return a random word for each edge, (e,) int64: a hash of the key and of both rows' keys.

    Args:
        block: the rows.
        rows: (r,) int64 that receive.
        key: of the draw.
        drawn: edges of these rows.
        edge: (k,) int64 which of them; None: all.
    """
    position, neighbor = drawn.position, drawn.neighbor
    if edge is not None:
        position, neighbor = position[edge], neighbor[edge]
    row_hashes = mix_words(block.row_key[rows] ^ signed(key.value))
    return mix_words(row_hashes[position] ^ block.row_key[neighbor])


def uniform_of(words: Tensor) -> Tensor:
    """Return random words (e,) int64 as draws from [0, 1], float64."""
    return words.double() * 2.0**-64 + 0.5


def weights_of_a_sum(model: AnyModel) -> str | None:
    """Return why a model cannot use weights of drawn neighbors, or None if it can."""
    if model.staged is None:
        return f"{model.noun} sees all edges of a client"
    if any(stage.conv.scales is None for stage in model.staged.stages):
        return "attention is normalized over the neighbors that were drawn"
    return None


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """A block whose clients are sorted by their number of batches, largest first.

    Attributes:
        order: (C,) int64 position of each in the block as it was.
        block: the sorted block.
        size: training rows in a batch; None: all of a client.
        is_reordered: whether any client has another position.
    """

    order: Tensor
    block: ClientBlock
    size: int | None
    is_reordered: bool

    @cached_property
    def inverse_order(self) -> Tensor:
        """Position in the sorted block of each client of the block as it was, (C,) int64."""
        return self.order.argsort()

    @cached_property
    def batches(self) -> Tensor:
        """Number of batches of each client, (C,) int64 on the CPU, largest first."""
        return num_batches(self.block, self.size)

    @cached_property
    def active(self) -> list[int]:
        """Number of clients that have a first batch, a second one, and so on."""
        num_batches_at_most = int(self.batches[0]) if len(self.batches) else 0
        return [int((self.batches > number).sum()) for number in range(num_batches_at_most)]

    def groups(self, number: int) -> list[tuple[int, int]]:
        """Return ranges of clients with equally many batches, of those with a batch `number`."""
        clients = self.active[number]
        return [(a, b) for a, b in self._groups if b <= clients]

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        ends = self.batches.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
        return list(zip([0, *ends], ends, strict=False))

    def seeds(self, train: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return the training rows (s,) of every client's batch `number`, and offsets (A + 1,).

        `train` (t,) are those of all clients, in the order of the epoch.
        """
        size, clients = self.size, self.active[number]
        count = self.block.num_train[:clients]
        start = offsets(self.block.num_train)[:clients]
        if size is not None:
            start, count = start + number * size, (count - number * size).clamp(max=size)
        return train[ranges(start, count)], offsets(count)


def num_batches(block: ClientBlock, size: int | None) -> Tensor:
    """Return the number of batches of training rows of each client, (C,) int64 on the CPU."""
    count = block.num_train.cpu()
    return (count > 0).long() if size is None else -(-count // size)


def batch_plan(block: ClientBlock, size: int | None) -> BatchPlan:
    """Return the plan of a block, worked out once unless it is that of a call to some clients."""
    if block.source is not None:  # block and cached plan would refer to each other, never freed
        return _build_plan(block, size)
    return block.once(("batches", size), BatchPlan, lambda: _build_plan(block, size))


def _build_plan(block: ClientBlock, size: int | None) -> BatchPlan:
    order = num_batches(block, size).argsort(descending=True, stable=True).to(block.off.device)
    is_reordered = not torch.equal(order, torch.arange(len(order), device=order.device))
    return BatchPlan(order, block.take(order) if is_reordered else block, size, is_reordered)


def shuffle_train(block: ClientBlock, size: int | None, key: Key) -> Tensor:
    """Return the training rows of all clients, (t,) int64, by client, in an order drawn by key.

    Where one batch has them all, they stay in the order of the block.
    """
    train = block.split.train.nonzero()[:, 0]
    if size is None or size >= int(block.num_train.max()):
        return train
    words = key.fold("order").words(block.row_key[train], 1)[:, 0]
    client = block.client[train]
    fits_one_batch = (block.num_train <= size)[client]
    words = torch.where(fits_one_batch, torch.arange(len(train), device=train.device), words)
    order = words.argsort()
    return train[order[client[order].argsort(stable=True)]]


def batches(block: ClientBlock, size: int | None, key: Key) -> list[Tensor]:
    """Return the training rows of one client in batches, in an order drawn anew for each key."""
    train = shuffle_train(block, size, key)
    return [train] if size is None else list(train.split(size))


def sampled_pass(
    block: ClientBlock,
    x: Tensor | SparseRows,
    seeds: Tensor,
    off: Tensor,
    neighbors: Neighbors,
    key: Key,
    sums: Sequence[bool],
    state: State,
) -> tuple[Pass, tuple[tuple[Reached, Drawn], ...]]:
    """Return the pass that ends at the seeds, along edges drawn from there, and the draws by hop.

    Args:
        block: C clients; the first A take part.
        x: their features, in the form that the weights want.
        seeds: (s,) int64 rows whose logits are computed, by client.
        off: (A + 1,) int64 seeds of each client.
        neighbors: draws.
        key: key of the step.
        sums: (L,) whether a stage sums over neighbors; else none are drawn.
        state: what the sampler remembers of all C clients.
    """
    clients = torch.arange(len(off) - 1, device=off.device)
    reached = Reached(seeds, torch.zeros_like(seeds), clients, off)
    keys: list[Tensor] = []
    messages: list[Messages] = []
    draws: list[tuple[Reached, Drawn]] = []
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    for number, sums_neighbors in reversed(tuple(enumerate(sums))):
        drawn = Drawn(seeds[:0], seeds[:0], block.adj.values[:0])
        if sums_neighbors:
            hop_key = key.fold("neighbors", number)
            drawn = neighbors.draw(block, reached, len(draws), hop_key, state)
            draws.append((reached, drawn))
        reached, stage_messages = one_stage(block, reached, drawn, len(draws))
        messages.insert(0, stage_messages)
        keys.insert(0, block.row_key[reached.rows])
    return Pass(features_of(x, reached), tuple(messages), tuple(keys)), tuple(draws)


def features_of(x: Tensor | SparseRows, reached: Reached) -> Tensor | SparseRows:
    """Return the features of the rows reached."""
    if isinstance(x, Tensor):
        return x.index_select(0, reached.rows)
    return SparseRows(x.csr.select_rows(reached.rows), reached.off, feature=x.feature)


def one_stage(
    block: ClientBlock, reached: Reached, drawn: Drawn, hop: int, more: Tensor | None = None
) -> tuple[Reached, Messages]:
    """Return the rows that enter a stage, each client's own first, and the stage's messages.

    Args:
        block: C clients.
        reached: (r,) rows that leave the stage.
        drawn: edges to them.
        hop: at which the new rows are reached.
        more: (m,) int64 rows that enter the stage besides, of the same clients.
    """
    rows, neighbor = reached.rows, drawn.neighbor
    new_rows = _new_neighbors(block, rows, neighbor, more)
    senders, hops = (
        torch.cat([rows, new_rows]),
        torch.cat([reached.hops, torch.full_like(new_rows, hop)]),
    )
    # `index_select` takes a third of the time of an index in brackets.
    client = block.client.index_select(0, senders)
    if len(reached.clients) > 1:
        order = stable_order(client)
        senders, hops, client = (t.index_select(0, order) for t in (senders, hops, client))
    client_bounds = torch.cat([reached.clients, reached.clients[-1:] + 1])
    off = torch.searchsorted(client, client_bounds)
    position = torch.empty(block.adj.num_rows, dtype=torch.int64, device=rows.device)
    position.index_copy_(0, senders, torch.arange(len(senders), device=rows.device))
    column = position.index_select(0, neighbor)
    order = stable_order(drawn.position * len(senders) + column)
    starts = offsets(torch.bincount(drawn.position, minlength=len(rows)))
    dtype = index_dtype(len(column), len(senders))  # that of SciPy, which transposes without a copy
    column, share = column.index_select(0, order).to(dtype), drawn.share.index_select(0, order)
    adj = CSR(starts.to(dtype), column, share, len(senders))
    reached_next = replace(reached, rows=senders, hops=hops, off=off)
    if drawn.share.dim() == 2:
        return reached_next, _both_ways(block, adj, reached, reached_next, position[rows])
    degree = _degree_column(block, drawn)
    messages = Messages(
        adj=adj,
        symmetric=False,
        sender=degree.index_select(0, senders),
        receiver=degree.index_select(0, rows),
        own=position.index_select(0, rows),
        sender_off=off,
        off=reached.off,
        gate=None if drawn.gate is None else drawn.gate[senders],
    )
    return reached_next, messages


def _both_ways(
    block: ClientBlock, adj: CSR, receivers: Reached, senders: Reached, own: Tensor
) -> Messages:
    """Return the messages along the directions of drawn edges, and those against them.

    Args:
        block: C clients.
        adj: (r, s) drawn edges, values (nnz, 2).
        receivers: (r,) rows.
        senders: (s,) rows.
        own: (r,) positions of the receivers among the senders.
    """
    assert adj.values is not None  # see above
    along = internal_messages(block, adj.values.dtype)  # whose degrees are those of all edges
    assert along.reverse is not None  # edges have directions
    first, second = (
        Messages(
            adj=edges_one_way(adj, way),
            symmetric=False,
            sender=all_edges.sender[senders.rows],
            receiver=all_edges.receiver[receivers.rows],
            own=own,
            sender_off=senders.off,
            off=receivers.off,
            loop=None if all_edges.loop is None else all_edges.loop[receivers.rows],
        )
        for way, all_edges in ((ALONG_COLUMN, along), (AGAINST_COLUMN, along.reverse))
    )
    return replace(first, reverse=second)


def _new_neighbors(
    block: ClientBlock, rows: Tensor, neighbor: Tensor, more: Tensor | None
) -> Tensor:
    """Return those of the neighbors and of `more` that are not among the rows, ascending, once."""
    is_new = torch.zeros(block.adj.num_rows, dtype=torch.bool, device=rows.device)
    is_new.index_fill_(0, neighbor, True)
    if more is not None:
        is_new.index_fill_(0, more, True)
    is_new.index_fill_(0, rows, False)
    return is_new.nonzero()[:, 0]


def _degree_column(block: ClientBlock, drawn: Drawn) -> Tensor:
    """Return the degrees that convolutions scale by, (n, 1)."""
    degrees = block.adj.weighted_degree if drawn.degree is None else drawn.degree
    return degrees.to(drawn.share.dtype)[:, None]


# --- Draws with replacement that do not depend on the order of items ------------------------------
# k: items.


@dataclass(frozen=True, eq=False)
class WeightedSampler:
    """Items with the probabilities that they are drawn.

    Attributes:
        items: (k,) int64, in the order of their keys.
        cumulative: (k,) float64 shares of the items so far, summed; the last is the sum of all.
    """

    items: Tensor
    cumulative: Tensor

    def draw(self, draws: int, key: Key) -> Tensor:
        """Return drawn items, (draws,) int64; there must be one to draw."""
        places = torch.from_numpy(self.find(key.draws(np.arange(draws))))
        return self.items[places.to(self.items.device)]

    def find(self, numbers: np.ndarray) -> np.ndarray:
        """Return the places in `items`, (k,) int64, for random numbers (k,) from [0, 1)."""
        cumulative = self.cumulative.cpu().numpy()  # few draws cost less in NumPy
        places: np.ndarray = np.searchsorted(cumulative, numbers * cumulative[-1], side="right")
        return places.clip(max=len(cumulative) - 1)


def build_sampler(share: Tensor, item_key: Tensor) -> WeightedSampler:
    """Return the sampler of items 0..k-1.

    Args:
        share: (k,) float64, probability of each, up to a common factor.
        item_key: (k,) int64, which do not depend on the numbering.
    """
    order = item_key.argsort()
    return WeightedSampler(order, share[order].cumsum(0))
