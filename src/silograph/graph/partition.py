"""Cutting a graph into clients.

A cut depends on the nodes' public keys and on a `Key`, never on how the nodes are numbered:
every method works on the nodes in an order drawn from (key, node key). That order is also what
makes METIS and Louvain answer differently to different keys. Both take nodes in the order of
their numbers, and the seed of METIS alone may change nothing (k-way, Cora, 100 parts: one and
the same cut for seeds 1 to 6).

n: nodes of the graph. n_c: nodes of client c. C: clients.
"""

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import PartitionError, lookup
from silograph.core.key import Key
from silograph.graph.graph import MISSING, Graph
from silograph.graph.node_key import node_words

if TYPE_CHECKING:
    import scipy.sparse as sp

Partitioner = Callable[[Graph, int, Key, float], Tensor]
"""(graph, clients, key, alpha) to the client of every node, (n,) int64."""

LARGEST_ALPHA = 1e6  # beyond, shares are equal to six digits, and gamma draws overflow in the end
SMALLEST_COARSENING = 30  # nodes a part that METIS k-way coarsens down to (CoarsenTo in kmetis.c)


@dataclass(frozen=True, eq=False)
class Partition:
    """Which nodes each client holds.

    Attributes:
        ids: (C,) distinct names of the clients.
        nodes: (C,) tensors (n_c,) int64: node numbers in the graph, ascending, at least one.
            A node may be held by several clients or by none.
        num_nodes: n, nodes of the graph that was cut.
        method: what made the cut.

    Raises:
        PartitionError: a client has no nodes, or ids or nodes break the rules above.
    """

    ids: tuple[str, ...]
    nodes: tuple[Tensor, ...]
    num_nodes: int
    method: str

    def __post_init__(self) -> None:
        """Check what every user of a partition relies on."""
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
                "use fewer clients or another method"
            )
        for name, part in zip(self.ids, self.nodes, strict=True):
            ascending = part.dtype == torch.int64 and bool((part.diff() > 0).all())
            if not ascending or part[0] < 0 or part[-1] >= self.num_nodes:
                raise PartitionError(
                    f"expected ascending int64 node numbers below {self.num_nodes} for client "
                    f"{name!r}, got {part.dtype} starting {part[:4].tolist()}"
                )

    @cached_property
    def hash(self) -> str:
        """16 hex digits that name the cut (BLAKE2b); `method` does not count."""
        digest = hashlib.blake2b(repr((self.num_nodes, self.ids)).encode(), digest_size=8)
        for part in self.nodes:
            # The length keeps the boundary between two clients apart from their contents.
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.cpu().numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def owner(self) -> Tensor:
        """The first client that holds a node, (n,) int64; -1 where none does."""
        none = len(self.ids)
        sizes = torch.tensor([len(part) for part in self.nodes])
        client = torch.repeat_interleave(torch.arange(none), sizes)
        first = torch.full((self.num_nodes,), none).scatter_reduce(
            0, torch.cat(self.nodes), client, "amin"
        )
        return torch.where(first == none, -1, first)


def key_order(node_id: np.ndarray, key: Key) -> Tensor:
    """Return the nodes in the order of one draw each from their public keys, (n,) int64."""
    return torch.argsort(key.words(node_words(node_id), 1)[:, 0], stable=True)


def client_ids(clients: int) -> tuple[str, ...]:
    """Return `client_00`, `client_01`, ..., padded so that sorting keeps the order."""
    width = max(2, len(str(clients - 1)))
    return tuple(f"client_{number:0{width}d}" for number in range(clients))


def make_partition(
    graph: Graph, method: str, *, clients: int | None, key: Key, alpha: float = 0.5
) -> Partition:
    """Cut a graph: every node goes to exactly one client, and every client gets at least one.

    Args:
        graph: the uncut graph.
        method: a name in `PARTITIONERS`.
        clients: how many; None only for `silo`, which takes them from the graph.
        key: the cut is a function of it, of `graph.node_id` and of what the method looks at.
        alpha: concentration of `dirichlet`, 0 < alpha <= 1e6; the other methods ignore it.

    Raises:
        ConfigError: `method` is not known.
        PartitionError: the method cannot cut this graph into so many clients.
    """
    partitioner = lookup(PARTITIONERS, method, "partition method")
    if method == "silo":
        ids = graph.silo_names
        clients = len(ids) if clients is None else clients
    elif clients is None:
        raise PartitionError(
            f"expected a number of clients for {method!r}, got None: only 'silo' needs none"
        )
    elif not 1 <= clients <= graph.num_nodes:
        raise PartitionError(
            f"expected 1 to {graph.num_nodes} clients (one node each at least), got {clients}"
        )
    else:
        ids = client_ids(clients)
    part = partitioner(graph, clients, key.fold("partition"), alpha)
    sizes = torch.bincount(part, minlength=clients).tolist()
    nodes = torch.split(torch.argsort(part, stable=True), sizes)
    return Partition(ids, tuple(nodes), graph.num_nodes, method)


def _random(graph: Graph, clients: int, key: Key, _alpha: float) -> Tensor:
    """Deal the nodes one by one in drawn order: sizes equal to within one."""
    order = key_order(graph.node_id, key)
    part = torch.empty_like(order)
    part[order] = torch.arange(len(order)) % clients
    return part


def _metis(graph: Graph, clients: int, key: Key, _alpha: float) -> Tensor:
    """Cut few edges into parts of near equal size.

    G. Karypis, V. Kumar: "A fast and high quality multilevel scheme for partitioning irregular
    graphs", SIAM J. Sci. Comput. 20(1), 1998. With very small parts some may come out empty;
    each then gets one node of the part that is largest at that time.
    """
    order = key_order(graph.node_id, key)
    part = _metis_parts(_adjacency(graph, order), clients, key)
    return _scatter(_fill_empty(part, clients), order)


def _louvain(graph: Graph, clients: int, key: Key, _alpha: float) -> Tensor:
    """Find communities, then pack them: the largest left goes to the smallest client.

    V. Blondel et al.: "Fast unfolding of communities in large networks", J. Stat. Mech., 2008.
    As in the Louvain splits of FederatedScope-GNN (Wang et al., KDD 2022) and OpenFGL (Li et
    al., VLDB 2025), a community above a client's fair share is split. They cut it by node
    number; here METIS halves it, so that its halves stay connected where they can.
    """
    from sknetwork.clustering import Louvain

    order = key_order(graph.node_id, key)
    adjacency = _adjacency(graph, order)
    # The drawn order already shuffles; Louvain draws nothing of its own.
    label = Louvain().fit_predict(adjacency) if adjacency.nnz else np.arange(len(order))
    members = np.split(np.argsort(label, kind="stable"), np.cumsum(np.bincount(label))[:-1])
    communities = _halve_largest(adjacency, members, clients, key)
    part = np.empty(len(order), np.int64)
    loads = [(0, client) for client in range(clients)]
    for community in sorted(communities, key=lambda nodes: (-len(nodes), nodes[0])):
        load, client = heapq.heappop(loads)
        part[community] = client
        heapq.heappush(loads, (load + len(community), client))
    return _scatter(part, order)


def _dirichlet(graph: Graph, clients: int, key: Key, alpha: float) -> Tensor:
    """Spread every class over the clients by shares from Dirichlet(alpha, ..., alpha).

    Small alpha: each class sits at few clients. Q. Li et al.: "Federated learning on non-IID
    data silos: an experimental study", ICDE 2022, after T.-M. Hsu et al.: "Measuring the effects
    of non-identical data distribution for federated visual classification", 2019. Unlabelled
    nodes are dealt evenly. Li et al. redraw until no client is short of nodes, which does not
    end with many clients; here an empty client gets one node of the client that is largest then.
    """
    if graph.task == "multilabel":
        raise PartitionError(
            "expected one class a node for 'dirichlet', got a multi-label graph: "
            "use 'metis', 'louvain' or 'random'"
        )
    if not 0 < alpha <= LARGEST_ALPHA:  # NaN fails too
        raise PartitionError(f"expected 0 < alpha <= {LARGEST_ALPHA:g}, got {alpha}")
    order = key_order(graph.node_id, key)
    y = graph.y[order].numpy()
    part = np.empty(len(order), np.int64)
    for label in range(graph.num_classes):
        mine = np.flatnonzero(y == label)
        generator = np.random.Generator(np.random.PCG64(key.fold("shares", label).value))
        shares = generator.dirichlet(np.full(clients, alpha))
        ends = np.rint(np.cumsum(shares)[:-1] * len(mine))
        part[mine] = np.searchsorted(ends, np.arange(len(mine)), side="right")
    unknown = np.flatnonzero(y == MISSING)
    part[unknown] = np.arange(len(unknown)) % clients
    return _scatter(_fill_empty(part, clients), order)


def _silo(graph: Graph, clients: int, _key: Key, _alpha: float) -> Tensor:
    """Take the silos that came with the data."""
    if graph.silo is None:
        raise PartitionError(
            f"expected a graph that names its silos for 'silo', got {graph.name!r} without: "
            "use 'metis', 'louvain', 'dirichlet' or 'random'"
        )
    silos = len(graph.silo_names)
    if clients != silos:
        raise PartitionError(
            f"expected {silos} clients, one for each silo, got {clients}: "
            "leave the number out or use another method"
        )
    outside = int(((graph.silo < 0) | (graph.silo >= silos)).sum())
    if outside:
        raise PartitionError(
            f"expected silo numbers 0 to {silos - 1}, got {outside} nodes outside: "
            "give every node a silo, or leave the node out of the graph"
        )
    return graph.silo


PARTITIONERS: dict[str, Partitioner] = {
    "random": _random,
    "metis": _metis,
    "louvain": _louvain,
    "dirichlet": _dirichlet,
    "silo": _silo,
}


def _adjacency(graph: Graph, order: Tensor) -> "sp.csr_matrix":
    """Return the adjacency with nodes renumbered, (n, n) int8: row i is node order[i]."""
    rows = order.numpy()
    adjacency = graph.adj.scipy(np.int8)[rows][:, rows]
    adjacency.sort_indices()
    return adjacency


def _scatter(part: np.ndarray, order: Tensor) -> Tensor:
    """Bring parts of the nodes in drawn order back to the graph's numbering, (n,) int64."""
    result = torch.empty_like(order)
    result[order] = torch.from_numpy(part)
    return result


def _metis_parts(adjacency: "sp.csr_matrix", parts: int, key: Key) -> np.ndarray:
    """Return the part of every row of a SciPy CSR matrix, (n,) int64; parts may be empty.

    Recursive bisection up to 8 parts, as pymetis has it, and again for parts so small that
    k-way partitioning starts without any coarsening. On Cora with 100 parts, k-way cuts .45 of
    the edges and bisection .29; with 1,000, k-way leaves 149 to 181 parts empty, bisection none.
    """
    import pymetis

    result = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(adjacency.indptr, adjacency.indices),
        recursive=parts <= 8 or adjacency.shape[0] < SMALLEST_COARSENING * parts,
        options=pymetis.Options(seed=key.fold("metis").value >> 33),  # 31 bits: an int of C
    )
    return np.asarray(result.vertex_part, dtype=np.int64)


def _halve_largest(
    adjacency: "sp.csr_matrix", members: list[np.ndarray], clients: int, key: Key
) -> list[np.ndarray]:
    """Halve the largest group until there is one a client and none is above the fair share."""
    fair = -(-adjacency.shape[0] // clients)
    heap = [(-len(nodes), int(nodes[0]), nodes) for nodes in members]  # no two first nodes agree
    heapq.heapify(heap)
    while len(heap) < clients or -heap[0][0] > fair:
        nodes = heapq.heappop(heap)[2]
        half = _fill_empty(_metis_parts(adjacency[nodes][:, nodes], 2, key), 2)
        for side in (nodes[half == 0], nodes[half == 1]):
            heapq.heappush(heap, (-len(side), int(side[0]), side))
    return [nodes for _, _, nodes in heap]


def _fill_empty(part: np.ndarray, clients: int) -> np.ndarray:
    """Give each empty client the last node of the client that is largest at that time."""
    sizes = np.bincount(part, minlength=clients)
    by_client, ends = np.argsort(part, kind="stable"), np.cumsum(sizes)
    part = part.copy()
    for client in np.flatnonzero(sizes == 0):
        donor = sizes.argmax()
        ends[donor] -= 1
        sizes[donor] -= 1
        part[by_client[ends[donor]]] = client
        sizes[client] = 1
    return part
