"""Measures of how far clients are apart, and of a graph's structure.

n: nodes. C: clients. K: classes (bits, for multi-label). E: stored edges, both directions.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.numeric_state import standard_numerics
from silograph.core.payload import offsets
from silograph.graph.block.block import connect
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Graph, Split
from silograph.graph.partition.cuts import CHUNK_EDGES, distinct_numbers, held_edges
from silograph.graph.partition.partition import Partition

WEDGES = 1 << 24  # entries of a product that are held at a time, 12 bytes each


def label_distances(labels: Tensor) -> np.ndarray:
    """Return the Jensen-Shannon distance of every pair of rows of `labels` (C, K), as shares.

    sqrt((KL(p | m) + KL(q | m)) / 2) with m = (p + q) / 2 and the natural logarithm: J. Lin:
    "Divergence measures based on the Shannon entropy", IEEE Trans. Inf. Theory 37(1), 1991; a
    metric by D. Endres, J. Schindelin, IEEE Trans. Inf. Theory 49(7), 2003. At most sqrt(ln 2)
    = .833; its square is the divergence. Rows without labels are left out.

    Returns:
        (P,) float64 for the P pairs of rows with labels.
    """
    from scipy.spatial.distance import pdist

    counts = labels[labels.sum(dim=1) > 0].double()
    shares = counts / counts.sum(dim=1, keepdim=True)
    if len(shares) < 2:  # pdist refuses a single row
        return np.empty(0)
    distances: np.ndarray = pdist(shares.numpy(), "jensenshannon")
    return distances


def degree_distances(client: Tensor, degree: Tensor, clients: int) -> np.ndarray:
    """Return the Hellinger distance of the clients' degree distributions, pair by pair.

    sqrt(1 - sum_d sqrt(p_d q_d)) with p_d the share of a client's nodes that have degree d:
    0 to 1 (E. Hellinger, J. reine angew. Math. 136, 1909).

    Args:
        client: (n,) int64 client of every row; each has at least one.
        degree: (n,) int64 its internal edges.
        clients: C.

    Returns:
        (C (C - 1) / 2,) float64.
    """
    values, column = torch.unique(degree, return_inverse=True)
    cells = torch.bincount(client * len(values) + column, minlength=clients * len(values))
    counts = cells.view(clients, len(values)).double()
    root = (counts / counts.sum(dim=1, keepdim=True)).sqrt()
    overlap = (root @ root.T).numpy()[np.triu_indices(clients, 1)]
    distances: np.ndarray = np.sqrt(np.maximum(1 - overlap, 0))
    return distances


def local_clustering(adj: CSR) -> Tensor:
    """Return the share of a node's pairs of neighbors that are joined, (n,) float64.

    0 for nodes with fewer than two neighbors. D. Watts, S. Strogatz: "Collective dynamics of
    'small-world' networks", Nature 393, 1998. Takes time in proportion to the sum of squared
    degrees.

    Args:
        adj: (n, n) symmetric, no self loops.
    """
    matrix, degree = adj.scipy(np.int32), adj.degree
    work = np.zeros(adj.num_rows + 1, np.int64)
    np.cumsum(np.bincount(adj.row, degree[adj.indices], adj.num_rows), out=work[1:])
    closed = np.zeros(adj.num_rows)
    start = 0
    while start < adj.num_rows:
        stop = max(start + 1, int(np.searchsorted(work, work[start] + WEDGES, side="right")) - 1)
        rows = matrix[start:stop]
        closed[start:stop] = np.asarray((rows @ matrix).multiply(rows).sum(axis=1))[:, 0]
        start = stop
    pairs = (degree * (degree - 1)).double()  # each twice, as in `closed`
    return torch.where(pairs > 0, torch.from_numpy(closed) / pairs.clamp(min=1), 0.0)


def edge_homophily(graph: Graph) -> float:
    """Return how far the end points of edges agree, over edges with two labeled end points.

    Multi-class: share of edges within a class (J. Zhu et al.: "Beyond homophily in graph neural
    networks", NeurIPS 2020). Multi-label: mean Jaccard index of the label sets (T. Zhao et al.:
    "Multi-label node classification on graph-structured data", TMLR 2023); two empty sets agree.
    NaN where there is no such edge, or where labels are numbers.
    """
    if graph.has_numbers:
        return math.nan
    labeled, adj, num_known, num_same = graph.labeled, graph.adj, 0, 0
    agreement: list[Tensor] = []
    for start, end in _row_chunks(adj):
        first, last = int(adj.indptr[start]), int(adj.indptr[end])
        row = torch.repeat_interleave(torch.arange(start, end), adj.degree[start:end])
        col = adj.indices[first:last].long()
        is_known = labeled[row] & labeled[col]
        row, col = row[is_known], col[is_known]
        num_known += len(row)
        if graph.task == "multiclass":
            num_same += int((graph.y[row] == graph.y[col]).sum())
            continue
        shared_bits, either = torch.zeros(len(row)), torch.zeros(len(row))
        for bit in (graph.y == 1).unbind(dim=1):  # bit by bit: (E, K) need not fit in memory
            shared_bits += bit[row] & bit[col]
            either += bit[row] | bit[col]
        agreement.append(torch.where(either == 0, 1.0, shared_bits / either.clamp(min=1)))
    if not num_known:
        return math.nan
    if graph.task == "multiclass":
        return num_same / num_known
    return float(torch.cat(agreement).double().mean())


def _row_chunks(adj: CSR) -> Iterator[tuple[int, int]]:
    """Yield the first and last + 1 row of runs with at most `CHUNK_EDGES` entries, or one row."""
    start = 0
    while start < adj.num_rows:
        most = int(adj.indptr[start]) + CHUNK_EDGES
        bound = torch.tensor(most, dtype=torch.int64)
        end = int(torch.searchsorted(adj.indptr, bound, right=True)) - 1
        end = max(end, start + 1)
        yield start, end
        start = end


# --- statistics ----------------------------------------------------------------------------------
# What a cut did to a graph: sizes, lost edges, and how far the clients' labels are apart.
#
# n: nodes of the graph. C: clients. K: classes (bits, for multi-label). E: stored edges, both
# directions.


MOST_PAIRED = 60  # clients for which edges are counted pair by pair


@dataclass(frozen=True, eq=False)
class CutStatistics:
    """Figures of a partition; where clients overlap, each counts its own copy.

    Attributes:
        ids: (C,) names of the clients.
        nodes: (C,) int64 nodes held.
        internal_edges: (C,) int64 undirected edges with both end points held.
        cross_edges: (C,) int64 edges of held nodes whose other end is held by others only.
        halo: (C,) int64 distinct remote end points of those.
        between: (C, C) int64 cross-client edges by the client that counts them and the owner of
            their other end; None for more than `MOST_PAIRED` clients.
        labels: (C, K) int64 nodes of each class; for multi-label, nodes with the bit set.
        train: (C,) int64 training nodes held, or None without a split.
        val: as `train`, validation nodes.
        test: as `train`, test nodes.
        test_leaks: test nodes held whose copy trains at another client, or None without a split;
            0 unless clients split their own copies.
        num_edges: undirected edges of the uncut graph.
        edges_cut: missing links: undirected edges of it that are internal to no client.
        num_nodes: nodes of the uncut graph.
        nodes_held: those that at least one client holds.
        label_distance: mean Jensen-Shannon distance (natural logarithm) between the label
            distributions of two clients; NaN where fewer than two have labels.
        label_divergence: mean of its square.
        degree_distance: mean Hellinger distance between the distributions of two clients'
            internal degrees; NaN for one client.
        clustering: (C,) float64 mean clustering coefficient of a client's nodes by its internal
            edges, or None where it was not asked for.
        uncut_clustering: the same of the uncut graph.
        homophily: share of the uncut graph's labeled edges whose end points agree; for
            multi-label the mean Jaccard index of their label sets; NaN without such edges.
        shared: of ratings, how many users and items two or more clients hold, by `shared_users` and
            `shared_items`; nothing for other graphs.
    """

    ids: tuple[str, ...]
    nodes: Tensor
    internal_edges: Tensor
    cross_edges: Tensor
    halo: Tensor
    between: Tensor | None
    labels: Tensor
    train: Tensor | None
    val: Tensor | None
    test: Tensor | None
    test_leaks: int | None
    num_edges: int
    edges_cut: int
    num_nodes: int
    nodes_held: int
    label_distance: float
    label_divergence: float
    degree_distance: float
    clustering: Tensor | None
    uncut_clustering: float | None
    homophily: float
    shared: Mapping[str, int] = field(default_factory=dict)

    @property
    def clients(self) -> int:
        """C, number of clients."""
        return len(self.ids)

    @property
    def cut_share(self) -> float:
        """Share of the undirected edges that are cut; 0 for a graph without edges."""
        return self.edges_cut / self.num_edges if self.num_edges else 0.0

    @property
    def copies(self) -> float:
        """Mean number of clients that hold a node that is held: 1 in a disjoint cut."""
        return int(self.nodes.sum()) / self.nodes_held

    def client_rows(self) -> list[dict[str, int | float | str]]:
        """Return one row a client: name, sizes, and the number of classes it has labels of."""
        columns = {
            "nodes": self.nodes,
            "internal_edges": self.internal_edges,
            "cross_edges": self.cross_edges,
            "halo": self.halo,
            "classes": (self.labels > 0).sum(dim=1),
            "train": self.train,
            "val": self.val,
            "test": self.test,
            "clustering": self.clustering,
        }
        lists = {name: t.tolist() for name, t in columns.items() if t is not None}
        return [
            {"client": name, **{column: values[c] for column, values in lists.items()}}
            for c, name in enumerate(self.ids)
        ]

    def totals(self) -> dict[str, int | float | None]:
        """Return the figures of the whole cut; None where one is undefined."""
        figures = {
            "nodes": self.num_nodes,
            "nodes_held": self.nodes_held,
            "copies": self.copies,
            "edges": self.num_edges,
            "edges_cut": self.edges_cut,
            "cut_share": self.cut_share,
            "label_distance": self.label_distance,
            "label_divergence": self.label_divergence,
            "degree_distance": self.degree_distance,
            "clustering": None if self.clustering is None else float(self.clustering.mean()),
            "uncut_clustering": self.uncut_clustering,
            "homophily": self.homophily,
            "test_leaks": self.test_leaks,
            **self.shared,
        }
        return {k: None if v is None or math.isnan(v) else v for k, v in figures.items()}


@standard_numerics()
def describe(
    graph: Graph,
    partition: Partition,
    split: Split | None = None,
    *,
    copies: Split | None = None,
    clustering: bool = False,
) -> CutStatistics:
    """Return the figures of a cut; the split's are left out where none is given.

    Args:
        graph: the uncut graph.
        partition: its cut.
        split: who trains, validates and tests.
        copies: what each copy is for, masks over `partition.copies`, where that is not `split`.
        clustering: whether to work out clustering coefficients, which takes a while on dense
            graphs.

    Raises:
        DataError: the partition was made for a graph of another size.
    """
    if partition.num_nodes != graph.num_nodes:
        raise DataError(
            f"expected a partition of this graph's {graph.num_nodes} nodes, "
            f"got one of {partition.num_nodes}"
        )
    nodes, client, clients = partition.copies, partition.client_of_node, len(partition.ids)
    if copies is None and split is not None:
        copies = split.map(lambda mask: mask[nodes])
    labels = _labels(graph, nodes, client, clients)
    label_distance = label_distances(labels)
    counts = _count_edges(graph, partition)
    sizes = torch.bincount(client, minlength=clients)
    local_means, uncut_mean = None, None
    if clustering:
        local = connect(replace(graph, edge_weight=None), partition)[0]
        local_means = torch.bincount(client, local_clustering(local), len(sizes)) / sizes
        uncut_mean = float(local_clustering(graph.adj).mean())
    return CutStatistics(
        ids=partition.ids,
        nodes=sizes,
        internal_edges=offsets(counts.degree)[offsets(sizes)].diff() // 2,
        cross_edges=counts.cross,
        halo=counts.halo,
        between=counts.between,
        labels=labels,
        **_roles(copies, client, clients),
        test_leaks=None if copies is None else leaked_tests(copies, partition),
        num_edges=graph.num_edges,
        edges_cut=graph.num_edges - counts.covered,
        num_nodes=graph.num_nodes,
        nodes_held=int((partition.owner >= 0).sum()),
        label_distance=_mean(label_distance),
        label_divergence=_mean(label_distance**2),
        degree_distance=_mean(degree_distances(client, counts.degree, clients)),
        clustering=local_means,
        uncut_clustering=uncut_mean,
        homophily=edge_homophily(graph),
        shared=count_shared(graph, nodes),
    )


def count_shared(graph: Graph, nodes: Tensor) -> dict[str, int]:
    """Return how many users and items several clients hold, of ratings; else nothing.

    Args:
        graph: the uncut graph.
        nodes: of every copy that a client holds.
    """
    if not graph.rating_sizes:
        return {}
    assert isinstance(graph.x, Tensor)  # a rating graph says what its nodes are
    is_shared = torch.bincount(nodes, minlength=graph.num_nodes) > 1
    users, items = (int((is_shared & (kind > 0)).sum()) for kind in graph.x.T)
    return {"shared_users": users, "shared_items": items}


@dataclass(frozen=True, eq=False)
class _EdgeCounts:
    """Numbers of edges of the clients of a cut.

    Attributes:
        degree: (n,) int64 internal edges of each copy of a node.
        cross: (C,) int64 cross-client edges of each client.
        halo: (C,) int64 their distinct remote end points.
        between: (C, C) int64 as in `CutStatistics`.
        covered: undirected edges that are internal to at least one client.
    """

    degree: Tensor
    cross: Tensor
    halo: Tensor
    between: Tensor | None
    covered: int


def _count_edges(graph: Graph, partition: Partition) -> _EdgeCounts:
    """Count the edges of a cut, chunk by chunk."""
    nodes, client, clients = partition.copies, partition.client_of_node, len(partition.ids)
    has_copies = len(nodes) > len(torch.unique(nodes))
    degree = torch.zeros(len(nodes), dtype=torch.int64)
    cross, halo = torch.zeros(2, clients, dtype=torch.int64)
    between = None
    if clients <= MOST_PAIRED:
        between = torch.zeros(clients, clients, dtype=torch.int64)
    covered: list[Tensor] = []
    num_covered = 0
    for edges in held_edges(graph.adj, partition.nodes):
        is_internal, is_external = partition.internal(edges), partition.external(edges)
        row, (start, end) = edges.row[is_internal], edges.rows
        degree[start:end] = torch.bincount(row - start, minlength=end - start)
        # A remote neighbor counts once for each client: (client, node) as one number.
        slots = distinct_numbers(edges.place[is_external], edges.num_places)[0]
        halo += torch.bincount(slots // graph.num_nodes + edges.first_client, minlength=clients)
        own = client[edges.row[is_external]]
        cross += torch.bincount(own, minlength=clients)
        if between is not None:
            other = partition.owner[edges.neighbor[is_external]]
            pairs = torch.bincount(own * clients + other, minlength=clients**2)
            between += pairs.view(clients, clients)
        node, neighbor = nodes[row], edges.neighbor[is_internal]
        once = node < neighbor
        if has_copies:  # several clients may hold the same edge
            covered.append(node[once] * graph.num_nodes + neighbor[once])
        num_covered += int(once.sum())
    if has_copies:
        num_covered = len(torch.unique(torch.cat(covered)))
    return _EdgeCounts(degree, cross, halo, between, num_covered)


def _roles(copies: Split | None, client: Tensor, clients: int) -> dict[str, Tensor | None]:
    """Return the nodes of each client that train, validate and test, (C,) each."""
    if copies is None:
        return dict.fromkeys(("train", "val", "test"))
    masks = {"train": copies.train, "val": copies.val, "test": copies.test}
    return {k: torch.bincount(client[mask], minlength=clients) for k, mask in masks.items()}


def leaked_tests(copies: Split, partition: Partition) -> int:
    """Return how many copies test while another copy of their node trains.

    Args:
        copies: what each copy is for, masks over `partition.copies`.
        partition: who holds what.
    """
    nodes = partition.copies
    trains = torch.bincount(nodes[copies.train], minlength=partition.num_nodes) > 0
    return int(trains[nodes[copies.test]].sum())


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _labels(graph: Graph, nodes: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return the label counts of every client, (C, K) int64; (C, 0) where labels are numbers."""
    y = graph.y[nodes]
    if graph.has_numbers:
        return torch.zeros(clients, 0, dtype=torch.int64)
    if graph.task == "multilabel":
        counts = torch.zeros(clients, graph.num_classes, dtype=torch.int64)
        return counts.index_add_(0, client, (y == 1).long())
    is_known = y != MISSING
    cell = client[is_known] * graph.num_classes + y[is_known]
    counts = torch.bincount(cell, minlength=clients * graph.num_classes)
    return counts.view(clients, graph.num_classes)
