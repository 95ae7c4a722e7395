"""`ClientBlock`: the rows of C >= 1 clients, sorted by client, with the edges they know.

One process simulates many clients as one block; a silo of a real federation holds a block of
one. All client code acts on blocks, so both run the same code.

C: clients. n: rows of all clients together. F: features. S: halo slots. B: boundary rows.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from silograph.core.errors import DataError, ProtocolError
from silograph.core.key import GOLDEN, hash_texts, mix_words, signed
from silograph.core.payload import offsets, owners, rows_of, runs_at
from silograph.graph.column_statistics import ClientSums
from silograph.graph.csr import CSR, index_dtype
from silograph.graph.graph import (
    MISSING,
    Graph,
    Pairs,
    Split,
    client_words,
    node_words,
    pairs_among,
)
from silograph.graph.partition.cuts import HeldEdges, distinct_numbers, held_edges
from silograph.graph.partition.partition import Partition, row_keys_of

# --- The halo: remote end points of a client's cross-client edges, and who owns them -------------
#
# A client numbers its halo nodes with slots of its own. The owner of a halo node knows it as a
# boundary row. `Route` says which boundary row answers for which slot; it is agreed once, before
# training, and is all that the engine needs to carry rows between clients.
#
# C: clients. n: rows. S: halo slots of all clients together. B: boundary rows.


@dataclass(frozen=True, eq=False)
class Halo:
    """The neighbors of a block's clients that they do not hold themselves.

    Attributes:
        off: (C + 1,) int64, slots of each client.
        adj: (n, S) own rows x halo slots; values are as those of `ClientBlock.adj`.
        key: (S,) int64, the counter of every draw for a slot: the `row_key` that its node would
            have if the client held it.
        boundary: (B,) int64 own rows (numbered in the block) that others hold as halo,
            ascending.
        boundary_off: (C + 1,) int64, boundary rows of each client.
    """

    off: Tensor
    adj: CSR
    key: Tensor
    boundary: Tensor
    boundary_off: Tensor

    def take(self, positions: Tensor, row_off: Tensor) -> "Halo":
        """Return the halo of the clients at `positions` (k,); `row_off` (C + 1,) of the block."""
        boundary_off = offsets(self.boundary_off.diff()[positions])
        new_off = offsets(row_off.diff()[positions])
        shift = torch.repeat_interleave(new_off[:-1] - row_off[positions], boundary_off.diff())
        return Halo(
            off=offsets(self.off.diff()[positions]),
            adj=self.adj.select_diagonal(row_off, self.off, positions),
            key=runs_at(self.key, self.off, positions),
            boundary=runs_at(self.boundary, self.boundary_off, positions) + shift,
            boundary_off=boundary_off,
        )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Halo":
        """Return a copy on another device."""
        return Halo(
            self.off.to(device),
            self.adj.to(device, dtype),
            self.key.to(device),
            self.boundary.to(device),
            self.boundary_off.to(device),
        )


@dataclass(frozen=True, eq=False)
class Route:
    """The owner of each halo slot of the federation.

    Attributes:
        target: (S,) int64 boundary row of every slot, slots and boundary rows in client order.
        slot_off: (C + 1,) int64 slots of each client.
        boundary_off: (C + 1,) int64 boundary rows of each client.
        memo: cache of values that follow from the route, some of them also from tensors that are
            stored with them. Whoever reads such a value compares these tensors first.
    """

    target: Tensor
    slot_off: Tensor
    boundary_off: Tensor
    memo: dict[object, object] = field(default_factory=dict, init=False, repr=False)


def connect(graph: Graph, partition: Partition) -> tuple[CSR, Halo, Route]:
    """Sort every edge into internal and cross-client ones.

    Memory beyond the result is that of a chunk of edges.

    Args:
        graph: the uncut graph.
        partition: who holds which of its nodes.

    Returns:
        Internal edges (n, n), the halo, and the route. Edges that were dropped, and those to a
        node that nobody holds, are in neither.
    """
    nodes, client_of_row, num_nodes = partition.copies, partition.client_of_node, graph.num_nodes
    num_rows, clients = len(nodes), len(partition.ids)
    if clients == 1 and num_rows == num_nodes and partition.dropped is None:
        return _uncut(graph)
    off = torch.searchsorted(client_of_row, torch.arange(clients + 1))
    is_owner = partition.owner[nodes] == client_of_row
    row_at_owner = torch.full((num_nodes,), -1)
    row_at_owner[nodes[is_owner]] = is_owner.nonzero()[:, 0]
    names, words = hash_texts(partition.ids), node_words(graph.node_id)

    num_edges = int(graph.adj.degree[nodes].sum())
    weight = graph.edge_weight
    internal = _GrowingRows(num_rows, num_edges, num_rows, weight)
    external = _GrowingRows(num_rows, num_edges, num_edges, weight)
    key = _GrowingTensor(num_edges, torch.int64)
    owner_row = _GrowingTensor(num_edges, external.dtype)
    slots_of_client = torch.zeros(clients, dtype=torch.int64)
    for edges in held_edges(graph.weighted_adj, partition.nodes):
        inner = partition.internal(edges).nonzero()[:, 0]
        outer = partition.external(edges).nonzero()[:, 0]
        internal.add(edges, inner, edges.position[inner])
        slots, slot_of_edge = distinct_numbers(edges.place[outer], edges.num_places)
        external.add(edges, outer, slot_of_edge + len(key))
        slot_client, slot_node = slots // num_nodes + edges.first_client, slots % num_nodes
        slots_of_client += torch.bincount(slot_client, minlength=clients)
        key.add(client_words(names[slot_client], words[slot_node]))
        owner_row.add(row_at_owner[slot_node])

    num_slots, owner_row_of_slot = len(key), owner_row.tensor()
    is_boundary = torch.zeros(num_rows, dtype=torch.bool)
    is_boundary[owner_row_of_slot] = True
    boundary = is_boundary.nonzero()[:, 0]
    place = torch.empty(num_rows, dtype=torch.int64)
    place[boundary] = torch.arange(len(boundary))
    boundary_off = torch.searchsorted(boundary, off)
    halo = Halo(
        off=offsets(slots_of_client),
        adj=external.csr(num_slots),
        key=key.tensor(),
        boundary=boundary,
        boundary_off=boundary_off,
    )
    route = Route(place[owner_row_of_slot], halo.off, boundary_off)
    return internal.csr(num_rows), halo, route


def _uncut(graph: Graph) -> tuple[CSR, Halo, Route]:
    """Return what `connect` does for one client that holds all nodes; edges are the graph's own."""
    adj, weight = graph.adj, graph.edge_weight
    dtype = index_dtype(adj.nnz, adj.num_cols)
    internal = CSR(adj.indptr.to(dtype), adj.indices.to(dtype), weight, adj.num_cols)
    none, off = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    no_entries = torch.zeros(adj.num_rows + 1, dtype=torch.int32), none.int()
    external = CSR(*no_entries, None if weight is None else weight[:0], 0)
    return internal, Halo(off, external, none, none, off), Route(none, off, off)


class _GrowingTensor:
    """A tensor that grows row by row up to a size; memory that is not written to is not used."""

    def __init__(self, most: int, dtype: torch.dtype, width: tuple[int, ...] = ()) -> None:
        self._array = torch.empty(0, dtype=dtype).numpy()
        self._array = np.empty((most, *width), self._array.dtype)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def add(self, rows: Tensor) -> None:
        """Append rows (k, ...)."""
        self._array[self._used : self._used + len(rows)] = rows.numpy()
        self._used += len(rows)

    def tensor(self) -> Tensor:
        """Return all rows; nothing can be added then."""
        self._array.resize((self._used, *self._array.shape[1:]), refcheck=False)  # in place
        return torch.from_numpy(self._array)


class _GrowingRows:
    """A sparse matrix that grows by whole rows."""

    def __init__(self, rows: int, entries: int, columns: int, weight: Tensor | None) -> None:
        self.dtype = index_dtype(entries, columns)
        self._lengths = torch.zeros(rows, dtype=torch.int64)
        self._indices = _GrowingTensor(entries, self.dtype)
        self._values = None
        if weight is not None:
            self._values = _GrowingTensor(entries, weight.dtype, tuple(weight.shape[1:]))

    def add(self, edges: HeldEdges, selected: Tensor, columns: Tensor) -> None:
        """Append the edges of a chunk at `selected` (k,), ascending, with columns (k,)."""
        start, end = edges.rows
        lengths = torch.bincount(edges.row[selected] - start, minlength=end - start)
        self._lengths[start:end] = lengths
        self._indices.add(columns)
        if self._values is not None:
            assert edges.weight is not None  # as said at the beginning
            self._values.add(edges.weight[selected])

    def csr(self, num_cols: int) -> CSR:
        """Return the matrix."""
        dtype = index_dtype(len(self._indices), num_cols)
        values = None if self._values is None else self._values.tensor()
        indptr = offsets(self._lengths).to(dtype)
        return CSR(indptr, self._indices.tensor().to(dtype), values, num_cols)


Memo = TypeVar("Memo")


@dataclass(frozen=True, eq=False)
class UsedRows:
    """Sparse features of a block, with a column only for what occurs at a client.

    Attributes:
        csr: (n, U) with values; U features that occur, of every client, in client order.
        feature: (U,) int64 which feature a column is.
        off: (C + 1,) int64 columns of each client.
    """

    csr: CSR
    feature: Tensor
    off: Tensor

    def take(self, row_off: Tensor, positions: Tensor) -> "UsedRows":
        """Return those of the clients at `positions` (k,); `row_off` (C + 1,) of the block."""
        return UsedRows(
            self.csr.select_diagonal(row_off, self.off, positions),
            runs_at(self.feature, self.off, positions),
            offsets(self.off.diff()[positions]),
        )


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Sparse features of a block.

    Attributes:
        csr: (n, F) with values.
        off: (C + 1,) rows of each client.
        source: of features of some clients: those that they are a part of, and the positions (k,)
            int64 of the clients there.
        feature: which feature a column is, (columns,) int64 or longer; None: its number.
        places: features with the same places and other values; None: there are none.
    """

    csr: CSR
    off: Tensor
    source: "tuple[SparseRows, Tensor] | None" = None
    feature: Tensor | None = None
    places: "SparseRows | None" = None

    @cached_property
    def stacked(self) -> CSR:
        """(n, C * F): client c's rows moved to columns c F onwards, to meet stacked weights."""
        if self.places is not None and self.csr.values is not None:
            return self.places.stacked.with_values(self.csr.values)
        csr, clients = self.csr, len(self.off) - 1
        num_cols = clients * csr.num_cols
        dtype = index_dtype(csr.nnz, num_cols)
        shift = torch.arange(clients, dtype=dtype, device=csr.indices.device) * csr.num_cols
        entries = csr.indptr.index_select(0, self.off).diff()
        columns = csr.indices.to(dtype) + shift.repeat_interleave(entries, output_size=csr.nnz)
        return csr.with_columns(columns, num_cols)

    @cached_property
    def used(self) -> UsedRows:
        """The same without columns of features that do not occur: most of them, in small clients.

        A weight that meets no feature gets no gradient from data.
        """
        if self.source is not None:
            return self.source[0].used.take(self.source[0].off, self.source[1])
        width, clients = self.csr.num_cols, len(self.off) - 1
        wide = owners(self.off)[self.csr.row] * width + self.csr.indices
        column, inverse = torch.unique(wide, return_inverse=True)
        starts = torch.arange(clients + 1, device=wide.device) * width
        off = torch.searchsorted(column, starts)
        return UsedRows(self.csr.with_columns(inverse, len(column)), column % width, off)


Rows = Tensor | SparseRows


@dataclass(frozen=True, eq=False)
class SharedSums:
    """What other clients have of one client's users and items.

    See `silograph.exchange.shared_biases`.

    Attributes:
        mean: () float64 of all clients' training ratings, as far as its items are shared.
        total: (n,) float64 sum of other clients' residuals of each row, 0 of what is not shared.
        number: (n,) float64 number of these residuals.
    """

    mean: Tensor
    total: Tensor
    number: Tensor

    def is_same(self, other: "SharedSums") -> bool:
        """Return whether all values are the same."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


@dataclass(frozen=True, eq=False)
class ClientBlock:
    """C clients, their rows in client order.

    Attributes:
        ids: the clients' names.
        off: (C + 1,) int64; client c has rows off[c]:off[c + 1].
        x: features, (n, F) dense or sparse.
        y: labels as in `Graph`, (n,) or (n, T) int64, -1 where missing.
        split: (n,) masks.
        adj: (n, n) internal edges: both end points at the same client; symmetric; values are
            weights of edges, 1 where they have none; (nnz, 2) where a run reads directions.
        row_key: (n,) int64, the counter of every draw for a row.
        halo: the remote end points of cross-client edges.
        sums: sums of each client's training data by name, which a run scales data by; see
            `silograph.exchange.collect`.
        user_tag: (n,) int64 words by which silos find the users that they share, keyed by a secret;
            None: the words of public keys, where one process holds all clients.
        shared: of a block of one client with ratings: what other clients have of its users and
            items; None where nothing is shared.
        class_weight: (K,) float64 weight of each class in the loss of training nodes, of label bits
            that of their ones; None: all count alike.
        source: of a block for calls to some clients: the block that it is a part of, and their
            positions (k,) int64 there.
        memo: cache of values that are computed from the block alone, or that hold only for a key or
            tensor kept beside them, which whoever reads them compares first.
    """

    ids: tuple[str, ...]
    off: Tensor
    x: Rows
    y: Tensor
    split: Split
    adj: CSR
    row_key: Tensor
    halo: Halo
    sums: Mapping[str, ClientSums] = field(default_factory=dict)
    user_tag: Tensor | None = None
    shared: SharedSums | None = None
    class_weight: Tensor | None = None
    source: "tuple[ClientBlock, Tensor] | None" = None
    memo: dict[object, object] = field(default_factory=dict, init=False, repr=False)

    @property
    def origin(self) -> "ClientBlock":
        """The block of all clients that this one is a part of; itself, if it is no part."""
        return self if self.source is None else self.source[0].origin

    @cached_property
    def num_clients(self) -> int:
        """C."""
        return len(self.ids)

    @cached_property
    def num_features(self) -> int:
        """F."""
        return self.x.csr.num_cols if isinstance(self.x, SparseRows) else int(self.x.shape[1])

    @cached_property
    def client(self) -> Tensor:
        """Position of the client of every row, (n,) int64."""
        return owners(self.off)

    @cached_property
    def num_train(self) -> Tensor:
        """Training nodes of every client, (C,) int64."""
        if self.source is not None:
            return self.source[0].num_train[self.source[1]]
        return self.count(self.split.train)

    def count(self, mask: Tensor) -> Tensor:
        """Return how many rows of each client a mask (n,) bool selects, (C,) int64."""
        return torch.bincount(self.client[mask], minlength=self.num_clients)

    def once(self, name: object, kind: type[Memo], make: Callable[[], Memo]) -> Memo:
        """Return a value from `memo` by name, computed at the first call."""
        if name not in self.memo:
            self.memo[name] = make()
        value = self.memo[name]
        assert isinstance(value, kind)
        return value

    def take(self, positions: Tensor) -> "ClientBlock":
        """Return the block of the clients at `positions` (k,) int64, in that order: a copy."""
        part = self.called(positions)
        x = SparseRows(part.x.csr.copied(), part.off) if isinstance(part.x, SparseRows) else part.x
        halo = replace(part.halo, adj=part.halo.adj.copied())
        return ClientBlock(
            ids=part.ids,
            off=part.off,
            x=x,
            y=part.y,
            split=part.split,
            adj=part.adj.copied(),
            row_key=part.row_key,
            halo=halo,
            sums=part.sums,
            user_tag=part.user_tag,
            shared=part.shared,
            class_weight=part.class_weight,
        )

    def with_shared(self, sums: SharedSums) -> "ClientBlock":
        """Return the block with what other clients have of its users and items."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return ClientBlock(**values | {"shared": sums, "source": None})

    def with_user_tag(self, user_tag: Tensor) -> "ClientBlock":
        """Return the block with words (n,) by which its users are found at other silos."""
        return replace(self, user_tag=user_tag)

    def called(self, positions: Tensor) -> "ClientBlock":
        """Return the same block for calls to some of the clients, while this one stays in memory.

        Values computed for this block are reused, and fields are copied only when they are read: so
        the cost of a call is that of its clients.
        """
        return _Part.of(self, positions)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "ClientBlock":
        """Return a copy on another device, with floating point values of `dtype`."""
        off = self.off.to(device)
        x: Rows
        if isinstance(self.x, SparseRows):
            x = SparseRows(self.x.csr.to(device, dtype), off)
        else:
            x = self.x.to(device, dtype)
        return ClientBlock(
            ids=self.ids,
            off=off,
            x=x,
            y=self.y.to(device),
            split=self.split.map(lambda mask: mask.to(device)),
            adj=self.adj.to(device, dtype),
            row_key=self.row_key.to(device),
            halo=self.halo.to(device, dtype),
            sums={name: sums.to(device) for name, sums in self.sums.items()},
            user_tag=None if self.user_tag is None else self.user_tag.to(device),
            shared=self.shared,
            class_weight=None if self.class_weight is None else self.class_weight.to(device),
        )


class _Part(ClientBlock):
    """Some clients of a block: every field is copied when it is first read."""

    @staticmethod
    def of(whole: ClientBlock, positions: Tensor) -> "_Part":
        """Return the clients of a block at `positions` (k,) int64."""
        part = _Part.__new__(_Part)  # with no field that can be worked out later
        part.__dict__ |= {"memo": {}, "source": (whole, positions)}
        part.__dict__ |= {"ids": tuple(whole.ids[p] for p in positions.tolist())}
        return part

    @cached_property
    def _of(self) -> tuple[ClientBlock, Tensor]:
        assert self.source is not None  # see `of`
        return self.source

    @cached_property
    def _rows(self) -> Tensor:
        return rows_of(self._of[0].off, self._of[1])

    @cached_property
    def off(self) -> Tensor:
        """(k + 1,)."""
        whole, positions = self._of
        return offsets(whole.off.diff()[positions])

    @cached_property
    def x(self) -> Rows:
        """(n, F)."""
        whole, positions = self._of
        if not isinstance(whole.x, SparseRows):
            return runs_at(whole.x, whole.off, positions)
        csr = whole.x.csr.select_runs(whole.off, positions)
        return SparseRows(csr, self.off, source=(whole.x, positions))

    @cached_property
    def y(self) -> Tensor:
        """(n,) or (n, T)."""
        return self._of[0].y[self._rows]

    @cached_property
    def split(self) -> Split:
        """(n,) masks."""
        return self._of[0].split.map(lambda mask: mask[self._rows])

    @cached_property
    def adj(self) -> CSR:
        """(n, n)."""
        whole, positions = self._of
        return whole.adj.select_diagonal(whole.off, whole.off, positions)

    @cached_property
    def row_key(self) -> Tensor:
        """(n,)."""
        return self._of[0].row_key[self._rows]

    @cached_property
    def user_tag(self) -> Tensor | None:
        """(n,)."""
        user_tag = self._of[0].user_tag
        return None if user_tag is None else user_tag[self._rows]

    @cached_property
    def shared(self) -> SharedSums | None:
        """Of the only client."""
        return self._of[0].shared

    @cached_property
    def class_weight(self) -> Tensor | None:
        """(K,), the same for all clients."""
        return self._of[0].class_weight

    @cached_property
    def sums(self) -> Mapping[str, ClientSums]:
        """Sums of their training data by name."""
        whole, positions = self._of
        return {name: sums.take(positions) for name, sums in whole.sums.items()}

    @cached_property
    def halo(self) -> Halo:
        """The remote end points of their edges."""
        whole, positions = self._of
        return whole.halo.take(positions, whole.off)


def make_block(
    graph: Graph, partition: Partition, split: Split, dtype: torch.dtype = torch.float32
) -> tuple[ClientBlock, Route]:
    """Cut a graph: return all clients as one block, and the route of halo slots to owners.

    A node that several clients hold appears once at each; an edge is cross-client only where
    the client does not hold the neighbor, and then points to the neighbor's one owner.

    Raises:
        DataError: the partition was made for a graph of another size.
    """
    if partition.num_nodes != graph.num_nodes:
        raise DataError(
            f"expected a partition of this graph's {graph.num_nodes} nodes, "
            f"got one of {partition.num_nodes}"
        )
    nodes = partition.copies
    off = offsets(torch.tensor([len(part) for part in partition.nodes]))
    adj, halo, route = connect(graph, partition)
    features, is_labeled = graph.x, graph.labeled
    x: Rows = (
        SparseRows(features.select_rows(nodes), off)
        if isinstance(features, CSR)
        else features[nodes]
    )
    block = ClientBlock(
        ids=partition.ids,
        off=off,
        x=x,
        y=graph.y[nodes],
        split=split.map(lambda mask: (mask & is_labeled)[nodes]),
        adj=adj,
        row_key=row_keys_of(graph, partition),
        halo=halo,
    )
    return block.to("cpu", dtype), route


def dense_rows(block: ClientBlock, rows: Tensor) -> Tensor:
    """Return the features of rows (k,) of a block, dense, (k, F)."""
    if not isinstance(block.x, SparseRows):
        return block.x[rows]
    selected = block.x.csr.select_rows(rows)
    assert selected.values is not None  # features always carry values
    dense = selected.values.new_zeros(len(rows), selected.num_cols)
    dense[selected.row, selected.indices.long()] = selected.values
    return dense


def whole(graph: Graph, name: str = "uncut") -> Partition:
    """Return the partition that gives the whole graph to one client."""
    return Partition(
        ids=(name,),
        nodes=(torch.arange(graph.num_nodes),),
        num_nodes=graph.num_nodes,
        method="whole",
    )


# --- extension -----------------------------------------------------------------------------------
# Blocks with more rows, without labels: halo nodes whose features are known, made neighbors.
#
# C: clients. n: own rows. k: added rows. F: features.


def extended(block: ClientBlock, slot: Tensor, slot_off: Tensor, x: Tensor) -> ClientBlock:
    """Return the block with some halo nodes as rows, each client's behind its own.

    They have the features given, the edges to the client's own rows, no labels, and are in no part
    of the split. The halo stays as it was.

    Args:
        block: C clients.
        slot: (k,) int64 halo slots of the block, ascending.
        slot_off: (C + 1,) int64 of each client.
        x: (k, F) their features.
    """
    edges = block.halo.adj.transposed.select_rows(slot)  # (k, n)
    assert edges.values is not None  # as of `Halo.adj`, those of own rows first
    ends = edges.indices.long(), edges.row, edges.values
    return _with_rows(block, slot_off, ends, x, block.halo.key[slot])


def with_neighbors(block: ClientBlock, host: Tensor, off: Tensor, x: Tensor) -> ClientBlock:
    """Return the block with new rows behind each client's own, every one beside one of these.

    They have the features given, no labels, and are in no part of the split. The halo stays as it
    was.

    Args:
        block: C clients.
        host: (k,) int64 row of the block that each is a neighbor of, ascending.
        off: (C + 1,) int64 new rows of each client.
        x: (k, F) their features.
    """
    new_nodes = torch.arange(len(host), device=host.device)
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    ends = host, new_nodes, block.adj.values.new_ones(len(host))
    return _with_rows(block, off, ends, x, neighbor_keys(block.row_key, host))


def neighbor_keys(row_key: Tensor, host: Tensor) -> Tensor:
    """Return the row keys of new neighbors (k,) of rows `host` (k,), ascending; row_key (n,)."""
    first = torch.searchsorted(host, host)
    nth = torch.arange(len(host), device=host.device) - first
    return mix_words(row_key[host] + (nth + 1) * signed(GOLDEN))


def _with_rows(
    block: ClientBlock,
    new_off: Tensor,
    ends: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    key: Tensor,
) -> ClientBlock:
    """Return the block with rows behind each client's own.

    Args:
        block: C clients.
        new_off: (C + 1,) int64 new rows of each.
        ends: (E,) rows of the block and (E,) new rows, the two ends of each new edge; (E,) or
            (E, 2) weights, as stored at the rows of the block.
        x: (k, F) features of the new rows.
        key: (k,) int64 their row keys.
    """
    halo, n = block.halo, len(block.row_key)
    off = block.off + new_off
    own = torch.arange(n, device=off.device) + new_off[block.client]
    new_rows = torch.arange(len(key), device=off.device) + block.off[1:][owners(new_off)]
    total = n + len(key)
    own_ends, new_ends = own[ends[0]], new_rows[ends[1]]
    inner = own[block.adj.row], own[block.adj.indices.long()]
    rows = torch.cat([inner[0], own_ends, new_ends])
    columns = torch.cat([inner[1], new_ends, own_ends])
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    assert halo.adj.values is not None
    device, dtype = off.device, block.adj.values.dtype
    # Of weights by direction (E, 2) the other end sees the two the other way round.
    from_new = ends[2].flip(1) if ends[2].dim() == 2 else ends[2]
    weights = torch.cat([block.adj.values, ends[2], from_new]).cpu()
    adj = CSR.from_pairs(rows.cpu(), columns.cpu(), (total, total), weights).to(device, dtype)
    touching = own[halo.adj.row].cpu(), halo.adj.indices.long().cpu()
    outer_shape = (total, halo.adj.num_cols)
    outer = CSR.from_pairs(*touching, outer_shape, halo.adj.values.cpu()).to(device, dtype)
    missing = math.nan if block.y.is_floating_point() else MISSING
    y = block.y.new_full((total, *block.y.shape[1:]), missing)
    y[own] = block.y
    row_key = block.row_key.new_empty(total)
    row_key[own], row_key[new_rows] = block.row_key, key
    return ClientBlock(
        ids=block.ids,
        off=off,
        x=_features(block, own, new_rows, x, off),
        y=y,
        split=block.split.map(lambda mask: _mask(mask, own, total)),
        adj=adj,
        row_key=row_key,
        halo=Halo(halo.off, outer, halo.key, own[halo.boundary], halo.boundary_off),
        class_weight=block.class_weight,
    )


def _mask(mask: Tensor, own: Tensor, total: int) -> Tensor:
    new = mask.new_zeros(total)
    new[own] = mask
    return new


def _features(block: ClientBlock, own: Tensor, new_rows: Tensor, x: Tensor, off: Tensor) -> Rows:
    if not isinstance(block.x, SparseRows):
        dense = x.new_empty(len(own) + len(new_rows), x.shape[1])
        dense[own], dense[new_rows] = block.x, x
        return dense
    order = torch.empty(len(own) + len(new_rows), dtype=torch.int64)
    order[torch.cat([own, new_rows]).cpu()] = torch.arange(len(order))
    old_rows = block.x.csr.scipy(x.cpu().numpy().dtype)
    rows = sp.vstack([old_rows, sp.csr_matrix(x.cpu().numpy())]).tocsr()[order.numpy()]
    return SparseRows(CSR.from_scipy(rows).to(off.device, x.dtype), off)


# --- The ratings of a block, and which of their users and items train there ----------------------
#
# n: rows.


UNSEEN = 2  # rows of a table before those of users and items that train: one user, one item


def pairs_of(block: ClientBlock) -> Pairs:
    """Return the ratings of a block, cached."""
    return block.once("pairs", Pairs, lambda: pairs_among(kinds(block.x), block.adj))


def kinds(x: Rows) -> Tensor:
    """Return features (n, 2), the kind of each row; raise `ProtocolError` for other features."""
    if not isinstance(x, Tensor) or x.shape[1] != 2:
        raise ProtocolError("expected features that say which rows are users and items, got others")
    return x


def trained_rows(block: ClientBlock) -> Tensor:
    """Return which users and items have a rating that trains, (n,) bool; cached."""
    return block.once("trained rows", Tensor, lambda: _trained_nodes(block))


def _trained_nodes(block: ClientBlock) -> Tensor:
    pairs = pairs_of(block)
    train = block.split.train[pairs.row]
    is_trained = torch.zeros_like(block.split.train)
    is_trained[pairs.user[train]] = True
    is_trained[pairs.item[train]] = True
    return is_trained


def seen_rows(block: ClientBlock) -> Tensor:
    """Return which ratings have a user and an item that train there, (n,) bool; cached."""
    return block.once("seen rows", Tensor, lambda: _usable_ratings(block))


def _usable_ratings(block: ClientBlock) -> Tensor:
    pairs, is_trained = pairs_of(block), trained_rows(block)
    is_usable = torch.zeros_like(is_trained)
    is_usable[pairs.row] = is_trained[pairs.user] & is_trained[pairs.item]
    return is_usable


def table_rows(block: ClientBlock) -> Tensor:
    """Return how many rows the tables of each client have, (C,) int64."""
    return block.count(trained_rows(block)) + UNSEEN
