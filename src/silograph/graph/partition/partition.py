"""Cutting a graph into clients.

A cut depends on the nodes' public keys and on a `Key`, never on how the nodes are numbered:
every method works on the nodes in an order drawn from (key, node key). That order is also what
makes METIS and Louvain answer differently to different keys. Both take nodes in the order of
their numbers, and the seed of METIS alone may change nothing (k-way, Cora, 100 parts: one and
the same cut for seeds 1 to 6).

n: nodes of the graph. n_c: nodes of client c. C: clients.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.core.config import MOST, checked
from silograph.core.errors import ConfigError, DataError, PartitionError, lookup, mistake
from silograph.core.key import Key, hash_texts
from silograph.core.numeric_state import standard_numerics
from silograph.core.payload import offsets, owners
from silograph.core.text import count_of, short_repr
from silograph.graph.graph import Graph, client_words, node_words
from silograph.graph.partition.cuts import (
    HeldEdges,
    category,
    class_biased,
    dirichlet,
    dropped_edges,
    louvain,
    metis,
    metis_overlapping,
    random,
    shares,
    silo,
    with_ends,
    with_favored,
)
from silograph.graph.partition.options import (
    CategoryOptions,
    ClassBiasedOptions,
    DirichletOptions,
    LouvainOptions,
    MetisOverlappingOptions,
    NoPartitionOptions,
    SharesOptions,
)
from silograph.graph.read.tables import read_csv

CutNodes = Callable[[Graph, int, Key, Any], tuple[Tensor, ...]]
"""(graph, clients, key, options) to the nodes (n_c,) int64 of every client, ascending."""


def _as_they_are(options: Any, num_classes: int) -> Any:
    """Return options unchanged: their defaults do not depend on the graph."""
    del num_classes
    return options


@dataclass(frozen=True)
class Partitioner:
    """A way of cutting that users can name.

    Attributes:
        name: that users give.
        title: one line for listings.
        reference: title, authors, venue, year.
        options: frozen dataclass of its own options.
        cut: cuts, with checked options.
        overlapping: whether several clients may hold a node.
        complete: writes out defaults that depend on the number of classes.
        of_ratings: whether it cuts rating graphs only.
    """

    name: str
    title: str
    reference: str
    options: type
    cut: CutNodes
    overlapping: bool = False
    complete: Callable[[Any, int], Any] = _as_they_are
    of_ratings: bool = False


@dataclass(frozen=True, eq=False)
class Partition:
    """Which nodes each client holds.

    Attributes:
        ids: (C,) distinct names of the clients.
        nodes: (C,) tensors (n_c,) int64: node numbers in the graph, ascending, at least one.
            A node may be held by several clients or by none.
        num_nodes: n, nodes of the graph that was cut.
        method: what made the cut.
        chosen_owner: (n,) int64 the client that answers for a node, -1 for a node that nobody
            holds; None where it is the first that holds it.
        dropped: (e,) bool over the stored edges of the clients' nodes, in the order of
            `held_edges`: internal edges that their client has lost; None where none is.
        apart: whether clients know nothing of edges to nodes of others: there are no cross-client
            edges, as in rating graphs, where these would be ratings of other silos.

    Raises:
        PartitionError: a client has no nodes, or ids, nodes or owners break the rules above.
    """

    ids: tuple[str, ...]
    nodes: tuple[Tensor, ...]
    num_nodes: int
    method: str
    chosen_owner: Tensor | None = None
    dropped: Tensor | None = None
    apart: bool = False

    def __post_init__(self) -> None:
        """Check the rules that every user of a partition relies on."""
        if not self.ids or len(self.ids) != len(self.nodes):
            raise PartitionError(
                f"expected one node tensor a client and at least one client, "
                f"got {len(self.ids)} ids and {len(self.nodes)} tensors"
            )
        if len(set(self.ids)) < len(self.ids):
            twice = next(name for name in self.ids if self.ids.count(name) > 1)
            raise PartitionError(
                f"expected distinct client ids, got {twice!r} twice: rename one of them"
            )
        empty = [name for name, part in zip(self.ids, self.nodes, strict=True) if not len(part)]
        if empty:
            raise PartitionError(
                f"expected at least one node a client, got {len(empty)} empty of "
                f"{len(self.ids)} clients (first: {empty[0]!r}): "
                "use fewer clients or another method",
                **mistake("empty-client", empty[0]),
            )
        for name, part in zip(self.ids, self.nodes, strict=True):
            ascending = part.dtype == torch.int64 and bool((part.diff() > 0).all())
            if not ascending or part[0] < 0 or part[-1] >= self.num_nodes:
                raise PartitionError(
                    f"expected ascending int64 node numbers below {self.num_nodes} for client "
                    f"{name!r}, got {part.dtype} starting {part[:4].tolist()}"
                )
        if self.chosen_owner is not None:
            self._check_owner(self.chosen_owner)

    def _check_owner(self, owner: Tensor) -> None:
        claims = (
            (owner[self.copies] == self.client_of_node).sum()
            if len(owner) == self.num_nodes
            else -1
        )
        held_nodes = torch.unique(self.copies)
        if claims != len(held_nodes) or int((owner >= 0).sum()) != len(held_nodes):
            raise PartitionError(
                f"expected one of a node's holders as its owner, and -1 for a node that nobody "
                f"holds, got {int(claims)} nodes with an owner that holds them of "
                f"{len(held_nodes)} that are held"
            )

    @cached_property
    def hash(self) -> str:
        """16 hex digits that name the cut (BLAKE2b); `method` does not count."""
        digest = hashlib.blake2b(repr((self.num_nodes, self.ids)).encode(), digest_size=8)
        for part in self.nodes:
            # The length keeps the boundary between two clients apart from their contents.
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.cpu().numpy().astype("<i8").tobytes())
        if self.chosen_owner is not None:
            digest.update(b"owner" + self.chosen_owner.numpy().astype("<i8").tobytes())
        if self.dropped is not None:
            digest.update(b"dropped" + np.packbits(self.dropped.numpy()).tobytes())
        if self.apart:
            digest.update(b"apart")
        return digest.hexdigest()

    @cached_property
    @standard_numerics()
    def copies(self) -> Tensor:
        """Node of every row, client by client, (sum of n_c,) int64."""
        return torch.cat(self.nodes)

    @cached_property
    @standard_numerics()
    def client_of_node(self) -> Tensor:
        """Client of every row, (sum of n_c,) int64."""
        return owners(offsets(torch.tensor([len(part) for part in self.nodes])))

    @cached_property
    @standard_numerics()
    def owner(self) -> Tensor:
        """The one client that answers for a node, (n,) int64; -1 where nobody holds it."""
        if self.chosen_owner is not None:
            return self.chosen_owner
        return first_holder(self.copies, self.client_of_node, self.num_nodes)

    def internal(self, edges: HeldEdges) -> Tensor:
        """Return which stored edges of the clients' nodes are internal, (e,) bool.

        Raises:
            PartitionError: the dropped edges are those of another graph.
        """
        if self.dropped is None:
            return edges.is_internal
        if len(self.dropped) != edges.total:
            raise PartitionError(
                f"expected a partition of a graph whose clients hold {len(self.dropped)} ends of "
                f"edges, got {edges.total}: cut this graph itself"
            )
        return edges.is_internal & ~self.dropped[edges.start : edges.start + len(edges.row)]

    def external(self, edges: HeldEdges) -> Tensor:
        """Return which of them are cross-client: the other end is held by others, (e,) bool."""
        if self.apart:
            return torch.zeros_like(edges.is_internal)
        return ~edges.is_internal & (self.owner[edges.neighbor] >= 0)


def first_holder(nodes: Tensor, client: Tensor, num_nodes: int) -> Tensor:
    """Return the least client of the rows of each node, (num_nodes,) int64; -1 for none."""
    no_client = torch.iinfo(torch.int64).max
    first = torch.full((num_nodes,), no_client).scatter_reduce(0, nodes, client, "amin")
    return torch.where(first == no_client, -1, first)


def client_ids(clients: int) -> tuple[str, ...]:
    """Return `client_00`, `client_01`, ..., padded so that sorting keeps the order."""
    width = max(2, len(str(clients - 1)))
    return tuple(f"client_{number:0{width}d}" for number in range(clients))


@standard_numerics()
def make_partition(
    graph: Graph,
    method: str | Partitioner,
    *,
    clients: int | None,
    key: Key | int,
    drop_edges: float = 0.0,
    **options: Any,
) -> Partition:
    """Cut a graph; every client gets at least one node.

    `make_partition(graph, "metis", clients=10, key=0)` is the partition of a run with these
    `clients`, `partition="metis"` and seed 0, or `partition_seed=0`.

    In a disjoint cut every node goes to exactly one client. In an overlapping one a node may be
    at several clients: one of them, drawn by key, answers for it. Or at none: it then has no
    role, and its edges are lost.

    Args:
        graph: the uncut graph.
        method: a name in `PARTITIONERS`, or a way of cutting of your own.
        clients: how many; None only for `silo`, which takes them from the graph.
        key: what random choices are drawn by, a seed or a `Key`: the cut is a function of it, of
            `graph.node_id` and of what the method looks at.
        drop_edges: share of every client's internal edges that is lost, 0 to 1.
        options: of the method, checked by `Partitioner.options`.

    Raises:
        ConfigError: `method` or an option is not known, or an option is out of range.
        PartitionError: the method cannot cut this graph into so many clients.
    """
    own = method if isinstance(method, Partitioner) else None
    partitioner = own or lookup(PARTITIONERS, str(method), "partition")
    method = partitioner.name
    checked_options: object = checked(partitioner.options, options, f"options of {method}")
    _check_drawing(clients, key)
    if not 0 <= drop_edges <= 1:
        raise PartitionError(
            f"expected 0 <= drop_edges <= 1, got {drop_edges}",
            **mistake("option-value", "drop_edges", drop_edges),
        )
    ids = _ids(graph, method, clients)
    clients = len(ids) if clients is None else clients
    key = (key if isinstance(key, Key) else Key.of(int(key)).fold("partition")).fold("partition")
    nodes = partitioner.cut(
        graph, clients, key, partitioner.complete(checked_options, graph.num_classes)
    )
    has_ratings = graph.task == "rating"
    if has_ratings:
        nodes = with_ends(graph, nodes)
        if drop_edges:
            raise PartitionError(
                f"expected no drop_edges for a rating graph, got {drop_edges}: a rating without "
                "its user or item is none; leave it out"
            )
    cut = Partition(ids, nodes, graph.num_nodes, method, apart=has_ratings)
    if partitioner.overlapping or has_ratings:
        cut = replace(cut, chosen_owner=_drawn_owner(graph, cut, key.fold("owner")))
    if drop_edges:
        drop, row_key = key.fold("drop edges"), row_keys_of(graph, cut)
        is_dropped = dropped_edges(graph.adj, nodes, row_key, drop_edges, drop)
        cut = replace(cut, dropped=is_dropped)
    return cut


def _check_drawing(clients: object, key: object) -> None:
    """Raise `ConfigError` for an invalid number of clients or an invalid key."""
    is_count = isinstance(clients, int | np.integer) and not isinstance(clients, bool)
    if not isinstance(key, Key | int | np.integer) or not (clients is None or is_count):
        raise ConfigError(
            f"expected a whole number of clients and a seed or Key as key, got "
            f"{short_repr(clients)} and {short_repr(key)}"
        )
    if not isinstance(key, Key) and not 0 <= key < MOST:
        raise ConfigError(
            f"key: expected a seed from 0 to {MOST - 1}, as a run has, or a Key, got "
            f"{short_repr(key)}",
            **mistake("option-value", "key", short_repr(key)),
        )


def _ids(graph: Graph, method: str, clients: int | None) -> tuple[str, ...]:
    """Return the names of the clients of a cut; those of silos are in the graph.

    Raises:
        PartitionError: the graph cannot be cut into so many clients.
    """
    if method == "silo":
        return graph.silo_names
    if clients is None:
        raise PartitionError(
            f"expected a number of clients for {method!r}, got None: only 'silo' needs none"
        )
    has_ratings = graph.task == "rating"
    what, most = ("rating", int(graph.labeled.sum())) if has_ratings else ("node", graph.num_nodes)
    if not 1 <= clients <= most:
        line = f"clients: expected 1 to {most} (one {what} each at least), got {clients}"
        raise PartitionError(line)
    return client_ids(clients)


def row_keys_of(graph: Graph, partition: Partition) -> Tensor:
    """Return the counters of all clients' rows, (sum of n_c,) int64."""
    words, client_of_row = node_words(graph.node_id), partition.client_of_node
    return client_words(words[partition.copies], hash_texts(partition.ids)[client_of_row])


def _drawn_owner(graph: Graph, partition: Partition, key: Key) -> Tensor:
    """Return one of the holders of each node, all alike likely, (n,) int64; -1 for none.

    The first holder would answer for nearly everything where clients overlap much.
    """
    nodes, n = partition.copies, partition.num_nodes
    word = key.words(row_keys_of(graph, partition), 1)[:, 0]
    highest = torch.full((n,), torch.iinfo(torch.int64).min).scatter_reduce(0, nodes, word, "amax")
    wins = word == highest[nodes]
    return first_holder(nodes[wins], partition.client_of_node[wins], n)


def _disjoint(part_of: Callable[[Graph, int, Key, Any], Tensor]) -> CutNodes:
    """Return the nodes of every client from a method that returns the client of every node."""

    def cut(graph: Graph, clients: int, key: Key, options: object) -> tuple[Tensor, ...]:
        part = part_of(graph, clients, key, options)
        sizes = torch.bincount(part, minlength=clients).tolist()
        return tuple(torch.split(torch.argsort(part, stable=True), sizes))

    return cut


PARTITIONERS: dict[str, Partitioner] = {
    part.name: part
    for part in (
        Partitioner("random", "nodes dealt one by one", "", NoPartitionOptions, _disjoint(random)),
        Partitioner(
            "metis",
            "few edges between parts of near equal size",
            "Karypis and Kumar, A fast and high quality multilevel scheme for partitioning "
            "irregular graphs, SIAM J. Sci. Comput. 1998",
            NoPartitionOptions,
            _disjoint(metis),
        ),
        Partitioner(
            "louvain",
            "communities, packed into clients; those above a fair share are halved",
            "Blondel et al., Fast unfolding of communities in large networks, J. Stat. Mech. 2008",
            LouvainOptions,
            _disjoint(louvain),
        ),
        Partitioner(
            "dirichlet",
            "every class spread over the clients by drawn shares",
            "Li et al., Federated learning on non-IID data silos: an experimental study, ICDE 2022",
            DirichletOptions,
            _disjoint(dirichlet),
        ),
        Partitioner(
            "class_biased",
            "a few classes favored at each client",
            "Zhang et al., Tackling the local bias in federated graph learning, 2021",
            ClassBiasedOptions,
            _disjoint(class_biased),
            complete=with_favored,
        ),
        Partitioner(
            "silo", "the silos that came with the data", "", NoPartitionOptions, _disjoint(silo)
        ),
        Partitioner(
            "category",
            "whole values of a column of ratings, such as categories, at each client",
            "",
            CategoryOptions,
            category,
            of_ratings=True,
        ),
        Partitioner(
            "metis_overlapping",
            "several clients, each with a share of a part of METIS",
            "Baek et al., Personalized subgraph federated learning, ICML 2023",
            MetisOverlappingOptions,
            metis_overlapping,
            overlapping=True,
        ),
        Partitioner(
            "shares",
            "each client with a share of all nodes",
            "Chen et al., FedGraph: Federated graph learning with intelligent sampling, IEEE TPDS "
            "2022",
            SharesOptions,
            shares,
            overlapping=True,
        ),
    )
}


# --- Cuts that users bring: the client of every node, in memory or in a CSV file ------------------
#
# n: nodes of the graph.


NODE, CLIENT = "node", "client"  # columns of a file
GIVEN = "given:"  # prefix of `partition` in a config for a partition in memory


def is_partition_file(partition: str) -> bool:
    """Whether a partition is the path of a CSV file."""
    return partition.lower().endswith(".csv")


def names_clients(partition: str) -> bool:
    """Whether a partition itself says how many clients there are."""
    return partition == "silo" or partition.startswith(GIVEN) or is_partition_file(partition)


def check_no_path(partition: str) -> None:
    """Raise `ConfigError` for a value that looks like a file but has no known ending."""
    if "/" in partition or os.sep in partition or os.path.exists(partition):
        raise ConfigError(
            f"expected a partition by name, or a file of clients whose name ends in .csv, got "
            f"{partition!r}: name the file FILE.csv"
        )


def assigned(graph: Graph, clients: Any, what: str = "partition") -> Graph:
    """Return the graph whose silos are the clients (n,) of its nodes.

    Args:
        graph: any silos of its own are forgotten.
        clients: (n,) whole numbers from 0, which make client_00, client_01 and so on, or names,
            which are sorted.
        what: what it is called in errors.

    Raises:
        PartitionError: not one client for every node.
    """
    codes, n = _array(clients, what), graph.num_nodes
    if codes.shape != (n,):
        raise PartitionError(
            f"expected a client for each of the {n} nodes of {graph.name!r} as {what}, got shape "
            f"{codes.shape}: give one number or name a node"
        )
    if codes.dtype.kind not in "iuU":
        raise PartitionError(
            f"expected whole numbers or names of clients in {what}, got dtype {codes.dtype}: give "
            "every node one"
        )
    values, index = np.unique(codes, return_inverse=True)
    if (codes.dtype.kind != "U" and values[0] < 0) or values[0] == "":
        raise PartitionError(
            f"expected a client for every node in {what}, got {values[0].item()!r} at node "
            f"{int(np.flatnonzero(codes == values[0])[0])}: number clients from 0, or name them"
        )
    silo = torch.from_numpy(index.astype(np.int64))
    return replace(graph, silo=silo, silo_names=_names(values.tolist()))


def read_partition(graph: Graph, path: Path) -> Graph:
    """Return the graph whose silos are the clients that a CSV file gives its nodes.

    Args:
        graph: any silos of its own are forgotten.
        path: columns `node`, a public key, and `client`, a number or a name; a line a node.

    Raises:
        DataError: names the file, line and column.
    """
    table = read_csv(path)
    if sorted(table.header) != sorted((NODE, CLIENT)):
        raise DataError(
            f"{table.head}: expected columns {NODE},{CLIENT}, got {','.join(table.header)[:200]}"
        )
    place = {str(key): row for row, key in enumerate(graph.node_id.tolist())}
    client_of_node: list[str | None] = [None] * graph.num_nodes
    row_by_key: dict[str, int] = {}
    for row, (key, client) in enumerate(zip(table.column(NODE), table.column(CLIENT), strict=True)):
        if key not in place:
            raise table.wrong(row, NODE, f"a node of {graph.name!r}", key)
        if key in row_by_key:
            raise table.wrong(
                row, NODE, f"a node not yet on line {table.lines[row_by_key[key]]}", key
            )
        if not client:
            raise table.wrong(row, CLIENT, "a client", client)
        row_by_key[key] = row
        client_of_node[place[key]] = client
    missing_rows = [row for row, client in enumerate(client_of_node) if client is None]
    if missing_rows:
        raise DataError(
            f"{path}: expected a client for every node of {graph.name!r}, got none for node "
            f"{graph.node_id[missing_rows[0]]!s} ({count_of(len(missing_rows), 'such node')}): "
            f"add a line for each"
        )
    names = [str(client) for client in client_of_node]
    numbers = all(name.isascii() and name.isdigit() and len(name) < 19 for name in names)
    return assigned(graph, [int(name) for name in names] if numbers else names, str(path))


def of_silos(graph: Graph) -> Partition:
    """Return the partition that gives each silo of a graph to a client of its name."""
    assert graph.silo is not None  # assigned
    nodes = tuple((graph.silo == c).nonzero()[:, 0] for c in range(len(graph.silo_names)))
    return Partition(graph.silo_names, nodes, graph.num_nodes, "given")


def owner_of_each(partition: Partition) -> Tensor | None:
    """Return the client (n,) of every node; None where a node has none or several."""
    is_plain = len(partition.copies) == partition.num_nodes == len(torch.unique(partition.copies))
    return partition.owner if is_plain and partition.dropped is None else None


def _names(values: Sequence[Any]) -> tuple[str, ...]:
    """Return names of clients: numbers become client_00, client_01, ..."""
    if isinstance(values[0], str):
        return tuple(values)
    width = max(2, len(str(values[-1])))
    return tuple(f"client_{value:0{width}d}" for value in values)


def _array(clients: Any, what: str) -> np.ndarray:
    """Return clients as an array; words among objects as words."""
    try:
        codes = np.asarray(clients.detach().cpu() if isinstance(clients, Tensor) else clients)
    except (TypeError, ValueError, RuntimeError):
        raise PartitionError(
            f"expected a client for every node as {what}, got {type(clients).__name__} that numpy "
            "cannot read as one array"
        ) from None
    if codes.dtype.kind == "O" and all(isinstance(code, str) for code in codes.ravel().tolist()):
        return codes.astype(np.str_)
    return codes
