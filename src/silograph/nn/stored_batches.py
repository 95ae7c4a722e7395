"""Neighbors drawn for several batches of stored rows at once, in NumPy.

They are those that `silograph.nn.mini_batches.Fanout` draws for each batch, to the same bits.
Batches are small, and torch takes several times as long as NumPy to begin an operation.

J: batches. C: clients. b: rows of batches, batch after batch, each by client; run j C + k has those
of batch j at client k. e: edges.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from silograph.core.key import Key, mix_words, signed
from silograph.nn.stored_rows import Surroundings


@dataclass(frozen=True, eq=False)
class BatchRows:
    """Rows of J batches.

    Attributes:
        rows: (b,) int64 of the block.
        off: (J C + 1,) int64 of each run.
        batch: (b,) int64 number of each row's batch among the J.
        places: (b,) int64 of the rows among the nodes that the round has drawn.
        sample: these nodes, (m,).
    """

    rows: np.ndarray
    off: np.ndarray
    batch: np.ndarray
    places: Tensor
    sample: Tensor

    @staticmethod
    def of(rows: Tensor, off: Tensor, places: Tensor, sample: Tensor, batches: int) -> "BatchRows":
        """Return rows (b,) with offsets (J C + 1,) as arrays; the others are as above."""
        ends = off.numpy()
        counts = np.diff(ends[:: (len(ends) - 1) // batches])
        batch = np.repeat(np.arange(batches), counts)
        return BatchRows(rows.numpy(), ends, batch, places, sample)


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges that were drawn for the rows of batches.

    Attributes:
        position: (e,) int64 place among the rows of the one that receives, ascending.
        node: (e,) int64 row of the graph that sends.
        share: (e,) how many edges each stands for, times its weight.
    """

    position: np.ndarray
    node: np.ndarray
    share: np.ndarray

    def slice_of_rows(self, first: int, end: int) -> slice:
        """Return the slice of the edges that rows first to end receive."""
        a, b = np.searchsorted(self.position, [first, end]).tolist()
        return slice(a, b)

    def select_rows(self, first: int, end: int) -> "Edges":
        """Return the edges that rows first to end receive."""
        at = self.slice_of_rows(first, end)
        return Edges(self.position[at] - first, self.node[at], self.share[at])


def draw_edges(around: Surroundings, rows: BatchRows, count: int, keys: Sequence[Key]) -> Edges:
    """Draw at most `count` neighbors of each row, 0: all; as `mini_batches.Fanout` does.

    Args:
        around: the graph.
        rows: of J batches.
        count: of neighbors.
        keys: of the batches.
    """
    adj, row_key = around.graph.adj, around.graph.row_key.numpy()
    assert adj.values is not None  # blocks carry values of the run's dtype
    weight, node = adj.values.numpy(), around.place.numpy()[rows.rows]
    degree, position, entry = _entries(adj.indptr.numpy(), node)
    neighbor, share = adj.indices.numpy()[entry].astype(np.int64), weight[entry]
    is_cut = degree > count
    if count == 0 or not is_cut.any():
        return Edges(position, neighbor, share)
    key = np.array([signed(key.value) for key in keys])[rows.batch]
    is_kept = ~is_cut[position]
    # Rows with fewer neighbors keep them all: only the others' edges are sorted.
    edge = np.flatnonzero(~is_kept)
    words = mix_words(mix_words(row_key[node] ^ key)[position[edge]] ^ row_key[neighbor[edge]])
    order = edge[np.lexsort((words, position[edge]))]
    sizes = degree[is_cut]
    rank = np.arange(len(order)) - np.repeat(sizes.cumsum() - sizes, sizes)
    is_kept[order[rank < count]] = True
    position, share = position[is_kept], share[is_kept]
    factor = np.maximum(degree[position].astype(share.dtype) / share.dtype.type(count), 1)
    return Edges(position, neighbor[is_kept], factor * share)


def _entries(indptr: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the degrees of rows (b,), and for their entries (e,) the place of the row, and where.

    Both are int64.
    """
    start = indptr[rows].astype(np.int64)
    degree = indptr[rows + 1] - start
    position = np.repeat(np.arange(len(rows)), degree)
    first = degree.cumsum() - degree
    return degree, position, np.arange(len(position)) + (start - first)[position]


@dataclass(frozen=True, eq=False)
class DrawnBatches:
    """J batches with the edges that were drawn for them.

    Attributes:
        keys: of the batches.
        rows: of the batches.
        alone: edges of each client's own graph, for the stage that features enter.
        around: edges of the graph with the halo, for all later stages.
        slot: (e,) int64 halo slot that sends along each of these; -1: an own row does.
    """

    keys: tuple[Key, ...]
    rows: BatchRows
    alone: Edges
    around: Edges
    slot: np.ndarray

    @property
    def clients(self) -> int:
        """Number of clients, C."""
        return (len(self.rows.off) - 1) // len(self.keys)

    def find_range(self, key: Key, count: int, sample: Tensor) -> range | None:
        """Return which of the batches are `count` consecutive ones; None: they are not all here.

        Args:
            key: of the first of them.
            count: how many.
            sample: (m,) int64 rows that they are made of.
        """
        first = self.keys.index(key) if key in self.keys else len(self.keys)
        is_here = first + count <= len(self.keys) and torch.equal(self.rows.sample, sample)
        return range(first, first + count) if is_here else None

    def bounds_of_rows(self, batches: range) -> tuple[int, int]:
        """Return the first row of consecutive batches, and the end of their rows."""
        off, clients = self.rows.off, self.clients
        return int(off[batches.start * clients]), int(off[batches.stop * clients])

    def slots(self, batches: range) -> np.ndarray:
        """Return the slots (e',) int64 that consecutive batches have drawn, with repetitions."""
        slot = self.slot[self.around.slice_of_rows(*self.bounds_of_rows(batches))]
        return slot[slot >= 0]

    def select(self, batches: range) -> "DrawnBatches":
        """Return consecutive batches, as if they had been drawn without the others."""
        first, end = self.bounds_of_rows(batches)
        rows, clients = self.rows, self.clients
        off = rows.off[batches.start * clients : batches.stop * clients + 1] - first
        selected = BatchRows(
            rows.rows[first:end],
            off,
            rows.batch[first:end] - batches.start,
            rows.places[first:end],
            rows.sample,
        )
        alone, around = (edges.select_rows(first, end) for edges in (self.alone, self.around))
        if self.around is self.alone:
            around = alone
        slot = self.slot[self.around.slice_of_rows(first, end)]
        return DrawnBatches(self.keys[batches.start : batches.stop], selected, alone, around, slot)


def draw_batches(
    graphs: tuple[Surroundings, Surroundings], rows: BatchRows, count: int, keys: tuple[Key, ...]
) -> DrawnBatches:
    """Draw at most `count` neighbors of each row of J batches, 0: all.

    Args:
        graphs: of own rows alone, and with the halo.
        rows: of the batches.
        count: of neighbors.
        keys: of the batches.
    """
    alone, around = graphs
    edges = [draw_edges(alone, rows, count, keys)]
    if around.graph is not alone.graph:
        edges.append(draw_edges(around, rows, count, keys))
    slot = around.slot.numpy()[edges[-1].node]
    return DrawnBatches(keys, rows, edges[0], edges[-1], slot)
