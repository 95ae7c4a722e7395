"""`ClientBlock`: the rows of C >= 1 clients, sorted by client, with the edges they know.

One process simulates many clients as one block; a silo of a real federation holds a block of
one. All client code acts on blocks, so both run the same code.

C: clients. n: rows of all clients together. F: features. S: halo slots. B: boundary rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.payload import offsets, owners, rows_of, runs_at
from silograph.graph.block.halo import Halo, Route, connect
from silograph.graph.column_statistics import ClientSums
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.graph.partition.partition import Partition, row_keys_of

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
        shift = owners(self.off)[self.csr.row] * self.csr.num_cols
        columns = self.csr.indices.long() + shift
        return self.csr.with_columns(columns, (len(self.off) - 1) * self.csr.num_cols)

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
class ClientBlock:
    """C clients, their rows in client order.

    Attributes:
        ids: the clients' names.
        off: (C + 1,) int64; client c has rows off[c]:off[c + 1].
        x: features, (n, F) dense or sparse.
        y: labels as in `Graph`, (n,) or (n, T) int64, -1 where missing.
        split: (n,) masks.
        adj: (n, n) internal edges: both end points at the same client; symmetric; values are
            weights of edges, 1 where they have none.
        row_key: (n,) int64, the counter of every draw for a row.
        halo: the remote end points of cross-client edges.
        sums: sums of each client's training data by name, which a run scales data by; see
            `silograph.exchange.statistics`.
        source: of a block for calls to some clients: the block that it is a part of, and their
            positions (k,) int64 there.
        memo: what others have worked out from the block alone and want to find again.
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
    source: "tuple[ClientBlock, Tensor] | None" = None
    memo: dict[object, object] = field(default_factory=dict, init=False, repr=False)

    @property
    def origin(self) -> "ClientBlock":
        """The block of all clients that this one is a part of; itself, if it is no part."""
        return self if self.source is None else self.source[0].origin

    @property
    def num_clients(self) -> int:
        """C."""
        return len(self.ids)

    @property
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
        """Return what is found in `memo` by a name, made at the first call."""
        if name not in self.memo:
            self.memo[name] = make()
        found = self.memo[name]
        assert isinstance(found, kind)
        return found

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
        )

    def called(self, positions: Tensor) -> "ClientBlock":
        """Return the same block for calls to some of the clients, while this one stays in memory.

        What was worked out for this block is used, not worked out again, and only what is read is
        copied: so a call costs what its clients cost.
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
        )


class _Part(ClientBlock):
    """Some clients of a block: every field is copied when it is first asked for."""

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
    """Cut a graph: return all clients as one block, and who answers for each halo slot.

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
    given, known = graph.x, graph.labeled
    x: Rows = SparseRows(given.select_rows(nodes), off) if isinstance(given, CSR) else given[nodes]
    block = ClientBlock(
        ids=partition.ids,
        off=off,
        x=x,
        y=graph.y[nodes],
        split=split.map(lambda mask: (mask & known)[nodes]),
        adj=adj,
        row_key=row_keys_of(graph, partition),
        halo=halo,
    )
    return block.to("cpu", dtype), route


def dense_rows(block: ClientBlock, rows: Tensor) -> Tensor:
    """Return the features of rows (k,) of a block, dense, (k, F)."""
    if not isinstance(block.x, SparseRows):
        return block.x[rows]
    chosen = block.x.csr.select_rows(rows)
    assert chosen.values is not None  # features always carry values
    dense = chosen.values.new_zeros(len(rows), chosen.num_cols)
    dense[chosen.row, chosen.indices.long()] = chosen.values
    return dense


def whole(graph: Graph, name: str = "uncut") -> Partition:
    """Return the partition that gives the whole graph to one client."""
    return Partition(
        ids=(name,),
        nodes=(torch.arange(graph.num_nodes),),
        num_nodes=graph.num_nodes,
        method="whole",
    )
