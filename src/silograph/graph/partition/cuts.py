"""Ways of cutting a graph into clients: by structure, chance, labels, own silos, with overlap.

A way of cutting returns the client of every node. It sees the nodes in an order drawn from
(key, node key), never in that of their numbers.

n: nodes of the graph.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import PartitionError, mistake
from silograph.core.key import Key
from silograph.core.payload import offsets, owners, runs_at
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Graph, drawn_order, key_order, node_words, pairs_among
from silograph.graph.partition.options import (
    FAVORED,
    CategoryOptions,
    ClassBiasedOptions,
    DirichletOptions,
    LouvainOptions,
    MetisOverlappingOptions,
    NoPartitionOptions,
    SharesOptions,
    Spread,
)
from silograph.graph.partition.partition_cache import cached_parts

if TYPE_CHECKING:
    import scipy.sparse as sp


SMALLEST_COARSENING = 30  # nodes a part that METIS k-way coarsens down to (CoarsenTo in kmetis.c)


def random(graph: Graph, clients: int, key: Key, _options: NoPartitionOptions) -> Tensor:
    """Deal the nodes one by one in drawn order: sizes equal to within one."""
    order = key_order(graph.node_id, key)
    part = torch.empty_like(order)
    part[order] = torch.arange(len(order)) % clients
    return part


def metis(graph: Graph, clients: int, key: Key, _options: NoPartitionOptions) -> Tensor:
    """Cut few edges into parts of near equal size.

    G. Karypis, V. Kumar: "A fast and high quality multilevel scheme for partitioning irregular
    graphs", SIAM J. Sci. Comput. 20(1), 1998. With very small parts some may come out empty;
    each then gets one node of the part that is largest at that time.
    """
    order = key_order(graph.node_id, key)
    settings = metis_settings(graph.num_nodes, clients, key)
    part = cached_parts(
        graph.adj,
        order,
        clients,
        settings,
        lambda: metis_parts(_adjacency(graph, order), clients, key),
    )
    return scattered(fill_empty(part, clients), order)


def louvain(graph: Graph, clients: int, key: Key, options: LouvainOptions) -> Tensor:
    """Find communities, then pack them: the largest left goes to the smallest client.

    V. Blondel et al.: "Fast unfolding of communities in large networks", J. Stat. Mech., 2008.
    As in the Louvain splits of FederatedScope-GNN (Wang et al., KDD 2022) and OpenFGL (Li et
    al., VLDB 2025), a community above a client's fair share is split. They cut it by node
    number; here METIS halves it, so that its halves stay connected where they can.

    Halving can decide most of the cut. Amazon Photo with 100 clients has .605 of its edges cut and
    59 to 100 nodes a client; with `halve` false, which halves only until there is a community for
    each client, .107 and 1 to 1,594. Cora with 100 clients: .301 and .118.
    """
    from sknetwork.clustering import Louvain

    order = key_order(graph.node_id, key)
    adjacency = _adjacency(graph, order)
    # The drawn order already shuffles; Louvain draws nothing of its own.
    label = Louvain().fit_predict(adjacency) if adjacency.nnz else np.arange(len(order))
    members = np.split(np.argsort(label, kind="stable"), np.cumsum(np.bincount(label))[:-1])
    fair = -(-len(order) // clients) if options.halve else len(order)
    communities = _halve_largest(adjacency, members, clients, fair, key)
    part = np.empty(len(order), np.int64)
    loads = [(0, client) for client in range(clients)]
    for community in sorted(communities, key=lambda nodes: (-len(nodes), nodes[0])):
        load, client = heapq.heappop(loads)
        part[community] = client
        heapq.heappush(loads, (load + len(community), client))
    return scattered(part, order)


def silo(graph: Graph, clients: int, _key: Key, _options: NoPartitionOptions) -> Tensor:
    """Take the silos that came with the data."""
    if graph.silo is None:
        first = "dirichlet" if graph.task != "rating" else "category"
        is_known = first == "dirichlet" or first in graph.columns
        others = ", ".join(repr(name) for name in [*[first] * is_known, "metis", "louvain"])
        raise PartitionError(
            f"partition: expected a graph that names its silos for 'silo', got {graph.name!r} "
            f"without: use {others} or 'random'"
        )
    silos = len(graph.silo_names)
    if clients != silos:
        raise PartitionError(
            f"clients: expected {silos}, one for each silo, got {clients}: leave clients out, or "
            "use another partition"
        )
    num_outside = int(((graph.silo < 0) | (graph.silo >= silos)).sum())
    if num_outside:
        raise PartitionError(
            f"expected silo numbers 0 to {silos - 1}, got {num_outside} nodes outside: "
            "give every node a silo, or leave the node out of the graph"
        )
    return graph.silo


def _adjacency(graph: Graph, order: Tensor) -> "sp.csr_matrix":
    """Return the adjacency with nodes renumbered, (n, n) int8: row i is node order[i]."""
    rows = order.numpy()
    adjacency = graph.adj.scipy(np.int8)[rows][:, rows]
    adjacency.sort_indices()
    return adjacency


def scattered(part: np.ndarray, order: Tensor) -> Tensor:
    """Bring parts of the nodes in drawn order back to the graph's numbering, (n,) int64."""
    result = torch.empty_like(order)
    result[order] = torch.from_numpy(part)
    return result


def metis_parts(adjacency: "sp.csr_matrix", parts: int, key: Key) -> np.ndarray:
    """Return the part of every row of a SciPy CSR matrix, (n,) int64; parts may be empty.

    Recursive bisection up to 8 parts, as pymetis has it, and again for parts so small that
    k-way partitioning starts without any coarsening. On Cora with 100 parts, k-way cuts .45 of
    the edges and bisection .29; with 1,000, k-way leaves 149 to 181 parts empty, bisection none.
    """
    import pymetis

    recursive, seed = metis_settings(adjacency.shape[0], parts, key)
    result = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(adjacency.indptr, adjacency.indices),
        recursive=recursive,
        options=pymetis.Options(seed=seed),
    )
    return np.asarray(result.vertex_part, dtype=np.int64)


def metis_settings(nodes: int, parts: int, key: Key) -> tuple[bool, int]:
    """Return whether METIS bisects recursively, and its seed."""
    seed = key.fold("metis").value >> 33  # 31 bits: an int of C
    return parts <= 8 or nodes < SMALLEST_COARSENING * parts, seed


def _halve_largest(
    adjacency: "sp.csr_matrix", members: list[np.ndarray], clients: int, most: int, key: Key
) -> list[np.ndarray]:
    """Halve the largest group until there is one a client and none has more than `most` nodes."""
    heap = [(-len(nodes), int(nodes[0]), nodes) for nodes in members]  # no two first nodes agree
    heapq.heapify(heap)
    while len(heap) < clients or -heap[0][0] > most:
        nodes = heapq.heappop(heap)[2]
        half = fill_empty(metis_parts(adjacency[nodes][:, nodes], 2, key), 2)
        for side in (nodes[half == 0], nodes[half == 1]):
            heapq.heappush(heap, (-len(side), int(side[0]), side))
    return [nodes for _, _, nodes in heap]


def fill_empty(part: np.ndarray, clients: int) -> np.ndarray:
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


# --- categories ----------------------------------------------------------------------------------
# Cuts of rating graphs: ratings go to clients, users and items wherever a rating of theirs is.
#
# n: nodes of the graph. C: clients.


# Fewest and most values of a client beyond the mean's floor and ceiling: 28 values at 10 clients
# make 2 to 3, 2 to 4 and 1 to 5.
BEYOND: dict[Spread, tuple[int, int]] = {"average": (0, 0), "skewed": (0, 1), "extreme": (-1, 2)}
MOST_DRAWS = 100_000


def with_ends(graph: Graph, nodes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the ratings among each client's nodes, with their users and items, ascending.

    A way of cutting looks at nodes, whatever they are; of a rating graph, its answer for ratings
    counts.

    Raises:
        PartitionError: a client has no rating.
    """
    assert isinstance(graph.x, Tensor)  # the kinds of nodes
    pairs = pairs_among(graph.x, graph.adj)
    user, item = torch.full((2, graph.num_nodes), -1)
    user[pairs.row], item[pairs.row] = pairs.user, pairs.item
    nodes_by_client = []
    for client, part in enumerate(nodes):
        ratings = part[user[part] >= 0]
        if not len(ratings):
            raise PartitionError(
                f"expected at least one rating a client, got none at client {client}: use fewer "
                "clients or another partition",
                **mistake("empty-client", client),
            )
        nodes_by_client.append(torch.cat([ratings, user[ratings], item[ratings]]).unique())
    return tuple(nodes_by_client)


def category(graph: Graph, clients: int, key: Key, options: CategoryOptions) -> tuple[Tensor, ...]:
    """Give each client whole values of a column, such as categories of products.

    Values are dealt in an order drawn by key. How many a client gets is drawn, too, alike likely
    among all numbers that the spread allows and that use up the values.
    """
    if options.column not in graph.columns or graph.columns[options.column].is_floating_point():
        category_columns = [name for name, c in graph.columns.items() if not c.is_floating_point()]
        raise PartitionError(
            f"expected a column {options.column!r} of words or whole numbers in {graph.name!r}, "
            f"got {', '.join(category_columns) or 'none'}: "
            + (
                f"give one of these as --option column={category_columns[0]}"
                if category_columns
                else "add it, or choose another partition"
            )
        )
    code = graph.columns[options.column]
    values = int(code.max()) + 1
    if values < clients:
        raise PartitionError(
            f"expected at least {clients} values of {options.column!r}, one a client, got {values}"
            f": use clients={values}, or fewer"
        )
    sizes = _sizes(values, clients, options.spread, key.fold("sizes"))
    order = torch.argsort(key.fold("order").matrix(1, values)[0], stable=True)
    client_of = torch.empty(values, dtype=torch.int64)
    client_of[order] = torch.repeat_interleave(torch.arange(clients), sizes)
    client = torch.where(code >= 0, client_of[code.clamp(min=0)], -1)
    return tuple((client == number).nonzero()[:, 0] for number in range(clients))


def _sizes(values: int, clients: int, spread: Spread, key: Key) -> Tensor:
    """Return how many of the values each client gets, (C,) int64, at least 1."""
    below_mean, above_mean = BEYOND[spread]
    fewest = max(1, values // clients + below_mean)
    most = -(-values // clients) + above_mean
    if spread == "average":
        larger = torch.arange(clients) < values % clients
        dealt = torch.argsort(key.matrix(1, clients)[0], stable=True)
        return (values // clients + larger.long())[dealt]
    generator = np.random.Generator(np.random.PCG64(key.value))
    for _ in range(MOST_DRAWS):
        sizes = generator.integers(fewest, most + 1, clients)
        if sizes.sum() == values:
            return torch.from_numpy(sizes)
    raise PartitionError(
        f"expected numbers from {fewest} to {most} for {clients} clients that sum to {values}, "
        "found none"
    )


# --- The edges that clients hold an end of -------------------------------------------------------
#
# All clients' edges at once would take ten times the memory of the graph, so they come in chunks.
#
# C: clients. n: rows, the clients' copies of nodes. N: nodes of the uncut graph. E: stored edges of
# all rows. e: those of a chunk.


CHUNK_EDGES = 1 << 20  # stored edges of a chunk, unless a client has more
CHUNK_PLACES = 1 << 22  # pairs of a client and a node of a chunk, unless there are more nodes


@dataclass(frozen=True, eq=False)
class HeldEdges:
    """The stored edges of the rows of some clients: client by client, row by row.

    Attributes:
        start: number of stored edges of all clients before the chunk.
        total: E.
        first_client: first client of the chunk.
        rows: where its rows begin and end among those of all clients.
        num_places: clients of the chunk times N.
        row: (e,) int64 row of the one end.
        neighbor: (e,) int64 node of the uncut graph at the other end.
        place: (e,) int64 client and neighbor as one number, ascending by client, then node:
            (client - first_client) * N + neighbor.
        is_internal: (e,) bool, whether the row's client holds the neighbor.
        position: (e,) int64 the neighbor's row there; undefined where not internal.
        weight: (e,) or (e, 2) their values in the uncut graph; None where it has none.
    """

    start: int
    total: int
    first_client: int
    rows: tuple[int, int]
    num_places: int
    row: Tensor
    neighbor: Tensor
    place: Tensor
    is_internal: Tensor
    position: Tensor
    weight: Tensor | None = None


def held_edges(adj: CSR, nodes: Sequence[Tensor]) -> Iterator[HeldEdges]:
    """Yield every stored edge of every client's nodes, in chunks of whole clients.

    Args:
        adj: (N, N) edges of the uncut graph.
        nodes: (C,) tensors (n_c,) int64, node numbers, ascending.
    """
    num_nodes, first_entry, degree = adj.num_rows, adj.indptr.long(), adj.degree
    row_off = offsets(torch.tensor([len(part) for part in nodes]))
    entry_off = offsets(degree[torch.cat(tuple(nodes))])[row_off].tolist()
    groups = _client_groups(entry_off, num_nodes)
    most_places = num_nodes * max(last - first for first, last in groups)
    row_of_place = torch.full((most_places,), -1, dtype=torch.int32)
    for first, last in groups:
        node = torch.cat(tuple(nodes[first:last]))
        start, end = int(row_off[first]), int(row_off[last])
        client_start = owners(row_off[first : last + 1] - start) * num_nodes
        neighbor = runs_at(adj.indices, first_entry, node).long()
        place = neighbor
        if last - first > 1:
            place = neighbor + torch.repeat_interleave(client_start, degree[node])
        own_place = client_start + node
        row_of_place[own_place] = torch.arange(end - start, dtype=torch.int32)
        position = row_of_place[place]
        row_of_place[own_place] = -1
        yield HeldEdges(
            start=entry_off[first],
            total=entry_off[-1],
            first_client=first,
            rows=(start, end),
            num_places=(last - first) * num_nodes,
            row=torch.repeat_interleave(torch.arange(start, end), degree[node]),
            neighbor=neighbor,
            place=place,
            is_internal=position >= 0,
            position=position.long() + start,
            weight=None if adj.values is None else runs_at(adj.values, first_entry, node),
        )


def _client_groups(entry_off: list[int], num_nodes: int) -> list[tuple[int, int]]:
    """Return the first and last + 1 client of each chunk; `entry_off` (C + 1,) stored edges."""
    clients, most = len(entry_off) - 1, max(1, CHUNK_PLACES // num_nodes)
    groups: list[tuple[int, int]] = []
    first = 0
    for last in range(1, clients + 1):
        is_full = last - first == most
        if is_full or last == clients or entry_off[last + 1] - entry_off[first] > CHUNK_EDGES:
            groups.append((first, last))
            first = last
    return groups


def distinct_numbers(numbers: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Return the distinct ones of whole numbers (e,), ascending (u,), and where each is there (e,).

    As `torch.unique` with `return_inverse`, but without a sort if the numbers are dense.

    Args:
        numbers: (e,) int64, from 0.
        bound: they are below it.
    """
    if len(numbers) * SPARSE < bound:
        distinct, places = torch.unique(numbers, return_inverse=True)
        return distinct, places
    occurs = torch.zeros(bound, dtype=torch.bool)
    occurs[numbers] = True
    distinct = occurs.nonzero()[:, 0]
    rank = torch.empty(bound, dtype=torch.int32)
    rank[distinct] = torch.arange(len(distinct), dtype=torch.int32)
    return distinct, rank[numbers].long()


SPARSE = 16  # bound / count of numbers above which sorting is faster than a table of the bound


def dropped_edges(
    adj: CSR, nodes: Sequence[Tensor], row_key: Tensor, share: float, key: Key
) -> Tensor:
    """Drop a share of every client's internal edges, both directions of an edge together.

    A client with m internal edges loses round(share * m) of them (halves round up): those with
    the smallest words, drawn from the counters of both ends. Cross-client edges stay, and so do
    other clients' copies of an edge.

    Args:
        adj: (N, N) edges of the uncut graph.
        nodes: (C,) tensors (n_c,) int64, node numbers, ascending.
        row_key: (n,) int64 the counter of every row's draws.
        share: 0 to 1.
        key: the draw is a function of it.

    Returns:
        (E,) bool over the edges of `held_edges`.
    """
    client_of_row = owners(offsets(torch.tensor([len(part) for part in nodes])))
    parts = []
    for edges in held_edges(adj, nodes):
        client = client_of_row[edges.row[edges.is_internal]]
        ends = row_key[edges.row[edges.is_internal]] + row_key[edges.position[edges.is_internal]]
        word = key.words(ends, 1)[:, 0]
        order = torch.argsort(word, stable=True)
        order = order[torch.argsort(client[order], stable=True)]
        sizes = torch.bincount(client, minlength=len(nodes))  # each edge counts twice
        count = 2 * torch.floor(share * sizes.double() / 2 + 0.5).long()
        last = (offsets(sizes)[:-1] + count - 1)[client].clamp(min=0)
        # By word, not by rank: then no tie can part the two directions of an edge.
        is_dropped = torch.zeros_like(edges.is_internal)
        is_dropped[edges.is_internal] = (count > 0)[client] & (word <= word[order[last]])
        parts.append(is_dropped)
    return torch.cat(parts)


# --- Disjoint cuts that skew the clients' labels -------------------------------------------------
#
# C: clients. K: classes. n: nodes of the graph.


FITTING_STEPS = 1000
FITTED = 1e-9  # relative to a client's size


def dirichlet(graph: Graph, clients: int, key: Key, options: DirichletOptions) -> Tensor:
    """Spread every class over the clients by shares from Dirichlet(alpha, ..., alpha).

    Small alpha: each class sits at few clients. Q. Li et al.: "Federated learning on non-IID
    data silos: an experimental study", ICDE 2022, after T.-M. Hsu et al.: "Measuring the effects
    of non-identical data distribution for federated visual classification", 2019. Unlabeled
    nodes are dealt evenly. Li et al. redraw until no client is short of nodes, which does not
    end with many clients; here an empty client gets one node of the client that is largest then.
    """
    require_classes(graph, "dirichlet")

    def shares(label: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64(key.fold("shares", label).value))
        return generator.dirichlet(np.full(clients, options.alpha))

    return _deal_classes(graph, clients, key, shares)


def with_favored(options: ClassBiasedOptions, num_classes: int) -> ClassBiasedOptions:
    """Return the options with the number of favored classes written out."""
    if options.favored_classes is not None:
        return options
    return replace(options, favored_classes=max(1, min(FAVORED, num_classes - 1)))


def class_biased(graph: Graph, clients: int, key: Key, options: ClassBiasedOptions) -> Tensor:
    """Favor a few classes at each client: their nodes are `favor` times as likely to go there.

    The non-iid setting of B. Zhang et al.: "Tackling the local bias in federated graph learning",
    2021: in each client the nodes of a few classes, drawn at random, are sampled with ten times
    the probability of others. Its clients share one pool and are equally large, which leaves
    the probabilities open. Here client c gets r_c w_ck s_k nodes of class k with w_ck = `favor`
    or 1, where r and s make the clients equally large and use every node once (iterative
    proportional fitting: W. Deming, F. Stephan, Ann. Math. Stat. 11(4), 1940). So odds ratios
    of two classes at two clients are those of w, and sizes are equal to within K + 1 nodes.
    Unlabeled nodes are dealt evenly.
    """
    require_classes(graph, "class_biased")
    favored, favor = options.favored_classes, options.favor
    assert favored is not None  # written out
    if favored >= graph.num_classes:
        raise PartitionError(
            f"expected 1 to {graph.num_classes - 1} favored_classes (fewer than the "
            f"{graph.num_classes} classes of {graph.name!r}), got {favored}"
        )
    table = _fitted(_weights(graph, clients, key, favored, favor), graph)
    return _deal_classes(graph, clients, key, lambda label: table[:, label])


def require_classes(graph: Graph, method: str) -> None:
    """Raise `PartitionError` where nodes have no class each, which `method` needs."""
    if graph.task != "multiclass":
        got = "a multi-label graph" if graph.task == "multilabel" else "numbers to predict"
        raise PartitionError(
            f"expected one class a node for {method!r}, got {got}: "
            "use 'metis', 'louvain' or 'random'"
        )


def _weights(graph: Graph, clients: int, key: Key, favored: int, favor: float) -> np.ndarray:
    """Return `favor` for the drawn classes of each client and 1 for the others, (C, K)."""
    draws = key.fold("favored").matrix(clients, graph.num_classes)
    weights = np.ones((clients, graph.num_classes))
    favored_clients = draws.argsort(dim=1, stable=True)[:, :favored].numpy()
    np.put_along_axis(weights, favored_clients, favor, axis=1)
    return weights


def _fitted(weights: np.ndarray, graph: Graph) -> np.ndarray:
    """Scale rows and columns until rows sum alike and columns to shares of 1, (C, K)."""
    present = torch.bincount(graph.y[graph.y != MISSING], minlength=graph.num_classes).numpy()
    nodes = present.astype(np.float64)
    size = max(nodes.sum(), 1.0) / len(weights)
    table = weights * nodes
    for _ in range(FITTING_STEPS):
        table *= (size / np.maximum(table.sum(axis=1), FITTED))[:, None]
        table *= nodes / np.maximum(table.sum(axis=0), FITTED)
        if np.abs(table.sum(axis=1) - size).max() <= FITTED * size:
            break
    return table / np.maximum(nodes, 1.0)


def _deal_classes(
    graph: Graph, clients: int, key: Key, shares: Callable[[int], np.ndarray]
) -> Tensor:
    """Deal each class by its shares (C,) in drawn order, and unlabeled nodes evenly."""
    order = key_order(graph.node_id, key)
    y = graph.y[order].numpy()
    part = np.empty(len(order), np.int64)
    for label in range(graph.num_classes):
        members = np.flatnonzero(y == label)
        ends = np.rint(np.cumsum(shares(label))[:-1] * len(members))
        part[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    unknown = np.flatnonzero(y == MISSING)
    part[unknown] = np.arange(len(unknown)) % clients
    return scattered(fill_empty(part, clients), order)


# --- overlap -------------------------------------------------------------------------------------
# Cuts in which clients may hold copies of the same node, and some nodes may be held by nobody.
#
# n: nodes of the graph. C: clients.


SMALLEST_SHARE = 0.05  # a normal draw may be negative


def metis_overlapping(
    graph: Graph, clients: int, key: Key, options: MetisOverlappingOptions
) -> tuple[Tensor, ...]:
    """Cut by METIS into parts, then draw several clients from each: by default five halves.

    Clients of one part come one after the other. A node of a part is at none of its m clients
    with probability (1 - share)^m: 1 in 32 for five halves. E. Ceyani et al.: "FedGrAINS:
    Personalized subgraph federated learning with adaptive neighbor sampling", section 4.1, after
    J. Baek et al.: "Personalized subgraph federated learning", ICML 2023.
    """
    each, share = options.clients_per_part, options.part_share
    if clients % each:
        raise PartitionError(
            f"expected a multiple of clients_per_part for 'metis_overlapping', got {clients} "
            f"clients at {each} a part: change either"
        )
    part = metis(graph, clients // each, key, NoPartitionOptions())
    words = node_words(graph.node_id)
    nodes_by_client = []
    for number in range(clients // each):
        nodes = (part == number).nonzero()[:, 0]
        for copy in range(each):
            draw = key.fold("copy", copy)
            nodes_by_client.append(nodes[_draw_share(words[nodes], share, draw)])
    return tuple(nodes_by_client)


def shares(graph: Graph, clients: int, key: Key, options: SharesOptions) -> tuple[Tensor, ...]:
    """Let each client draw its own share of all nodes, xi ~ Normal(mean, variance).

    Shares are clipped to .05 to 1. F. Chen et al.: "FedGraph: Federated graph learning with
    intelligent sampling", IEEE TPDS 33(8), 2022, section 5, which has a mean of .8 and
    variances of .1, .5 and 1. A node is held by nobody with probability prod (1 - xi).

    With `share_classes` a client draws its share of the nodes of so many classes, and none of
    others (the paper's non-iid data); each client draws its classes alike among those that occur.
    """
    mean, variance = options.share_mean, options.share_variance
    words = node_words(graph.node_id)
    allowed_classes = _classes(graph, clients, key, options.share_classes)
    nodes_by_client = []
    for client in range(clients):
        generator = np.random.Generator(np.random.PCG64(key.fold("share", client).value))
        share = float(np.clip(generator.normal(mean, math.sqrt(variance)), SMALLEST_SHARE, 1.0))
        draw = key.fold("nodes", client)
        if allowed_classes is None:
            nodes_by_client.append(_draw_share(words, share, draw))
        else:
            nodes = torch.isin(graph.y, allowed_classes[client]).nonzero()[:, 0]
            nodes_by_client.append(nodes[_draw_share(words[nodes], share, draw)])
    return tuple(nodes_by_client)


def _classes(graph: Graph, clients: int, key: Key, count: int | None) -> Tensor | None:
    """Return the drawn classes of each client, (C, count) int64; None if it draws from all."""
    if count is None:
        return None
    require_classes(graph, "share_classes")
    classes_in_graph: Tensor = graph.y[graph.y != MISSING].unique()
    if count > len(classes_in_graph):
        raise PartitionError(
            f"expected at most {len(classes_in_graph)} share_classes, as many classes as nodes of "
            f"{graph.name!r} have, got {count}"
        )
    draws = key.fold("classes").matrix(clients, len(classes_in_graph))
    classes: Tensor = classes_in_graph[draws.argsort(dim=1, stable=True)[:, :count]]
    return classes


def _draw_share(words: Tensor, share: float, key: Key) -> Tensor:
    """Return positions of a share of the words (k,) int64, at least one, ascending."""
    count = max(1, math.floor(share * len(words) + 0.5))
    return drawn_order(words, key)[:count].sort().values
