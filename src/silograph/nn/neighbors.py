"""Neighbor samplers: which neighbors a step sums over, for all clients of a block at once.

A sampler is a frozen value. Training asks it hop by hop, from the training rows of a batch
outwards, for the edges along which messages come, and tells it the losses of the step afterwards.
What a sampler remembers of a client is a part of the client's state, so it survives a restart and
never leaves the client.

Here are the protocol and the samplers that the compiled kernels have, too; the others, and the
names of all, are in `silograph.sampling.neighbors`.

C: clients. A: clients that take part in a step. n: rows. r: rows reached. e: edges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from silograph.core.key import Key, mix_words, signed
from silograph.core.payload import State
from silograph.federation.field_specs import FieldSpecs
from silograph.graph.block.block import ClientBlock
from silograph.nn.any_model import AnyModel


@dataclass(frozen=True, eq=False)
class Reached:
    """The rows that the batches of some clients have reached so far: neighbors of all are wanted.

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
        share: (e,) in the run's dtype, how many edges each stands for, times its weight.
        degree: (n,) in the run's dtype, what convolutions take for degrees in this hop; None: the
            degrees in the client's graph, of weighted edges the sums of their weights.
        trace: whatever `learn` wants to see again.
    """

    position: Tensor
    neighbor: Tensor
    share: Tensor
    degree: Tensor | None = None
    trace: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Signal:
    """What a sampler is told at the end of a step.

    Attributes:
        clients: (A,) int64 positions in the block of the clients that took part, ascending.
        draws: by hop, the rows that were reached and what was drawn for them.
        loss: (A,) their mean training loss before the step.
        key: of the step.
        own: whether nobody else reads the state, so that `learn` may change its tensors in place.
    """

    clients: Tensor
    draws: tuple[tuple[Reached, Drawn], ...]
    loss: Tensor
    key: Key
    own: bool = False


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
        """Return what a client's state holds for it, by name; names are its own."""

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


class Stateless:
    """What samplers share that remember nothing, and draw in torch."""

    def fanout(self, hops: int) -> tuple[int, ...] | None:
        """It is not compiled."""
        del hops
        return None

    def maps(self, model: AnyModel) -> Sequence[tuple[int, ...]]:
        """None."""
        del model
        return ()

    def specs(self, model: AnyModel) -> FieldSpecs:
        """Nothing."""
        del model
        return {}

    def init(self, block: ClientBlock, model: AnyModel, key: Key) -> State:
        """Nothing."""
        del block, model, key
        return {}

    def learn(self, block: ClientBlock, state: State, signal: Signal) -> State:
        """Nothing."""
        del block, signal
        return state


@dataclass(frozen=True)
class Full(Stateless):
    """All neighbors."""

    def fanout(self, hops: int) -> tuple[int, ...]:
        """All, at every hop."""
        return (0,) * hops

    def why_not(self, model: AnyModel) -> str | None:
        """Any model can."""
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
        """Any model can: attention weighs a drawn edge by how many it stands for (`GAT`)."""
        del model
        return None

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Draw for each row by itself; scores of edges are hashes of both rows' keys."""
        del state
        every, count = edges_of(block, reached.rows), self.counts[hop]
        degree = block.adj.degree[reached.rows]
        if count == 0 or not bool((degree > count).any()):
            return every
        kept = (degree <= count)[every.position]
        # Rows with fewer neighbors keep them all: only the others' edges are sorted.
        edge = (~kept).nonzero()[:, 0]
        order = edge[edge_words(block, reached.rows, key, every, edge).argsort()]
        order = order[every.position[order].argsort(stable=True)]
        sizes = degree[degree > count]
        first = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        rank = torch.arange(len(order), device=order.device) - first
        kept[order[rank < count]] = True
        position = every.position[kept]
        share = (degree[position].to(every.share.dtype) / count).clamp(min=1)
        return Drawn(position, every.neighbor[kept], share * every.share[kept])


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
    hashed = mix_words(block.row_key[rows] ^ signed(key.value))
    return mix_words(hashed[position] ^ block.row_key[neighbor])


def uniform_of(words: Tensor) -> Tensor:
    """Return random words (e,) int64 as draws from [0, 1], float64."""
    return words.double() * 2.0**-64 + 0.5


def weights_of_a_sum(model: AnyModel) -> str | None:
    """Return why weights of drawn neighbors mean nothing to a model, or None if they do."""
    if model.staged is None:
        return f"{model.noun} sees all edges of a client"
    if any(stage.conv.scales is None for stage in model.staged.stages):
        return "attention is normalized over the neighbors that were drawn"
    return None
