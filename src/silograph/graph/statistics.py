"""What a cut did to a graph: sizes, lost edges, and how far the clients' labels are apart.

n: nodes of the graph. C: clients. K: classes (bits, for multi-label). E: stored edges, both
directions.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.payload import offsets, owners, ranges
from silograph.graph.graph import MISSING, Graph, Split
from silograph.graph.partition import Partition


@dataclass(frozen=True, eq=False)
class CutStatistics:
    """Figures of a partition; where clients overlap, each counts its own copy.

    Attributes:
        ids: (C,) names of the clients.
        nodes: (C,) int64 nodes held.
        internal_edges: (C,) int64 undirected edges with both end points held.
        cross_edges: (C,) int64 edges of held nodes whose other end is held by others only.
        halo: (C,) int64 distinct remote end points of those.
        labels: (C, K) int64 nodes of each class; for multi-label, nodes with the bit set.
        train: (C,) int64 training nodes held, or None without a split.
        val: as `train`, validation nodes.
        test: as `train`, test nodes.
        num_edges: undirected edges of the uncut graph.
        edges_cut: undirected edges that no client holds with both end points.
        label_distance: mean Jensen-Shannon distance (natural logarithm) between the label
            distributions of two clients; NaN where fewer than two have labels.
        homophily: share of the uncut graph's labelled edges whose end points agree; for
            multi-label the mean Jaccard index of their label sets; NaN without such edges.
    """

    ids: tuple[str, ...]
    nodes: Tensor
    internal_edges: Tensor
    cross_edges: Tensor
    halo: Tensor
    labels: Tensor
    train: Tensor | None
    val: Tensor | None
    test: Tensor | None
    num_edges: int
    edges_cut: int
    label_distance: float
    homophily: float

    @property
    def clients(self) -> int:
        """C, number of clients."""
        return len(self.ids)

    @property
    def cut_share(self) -> float:
        """Share of the undirected edges that are cut; 0 for a graph without edges."""
        return self.edges_cut / self.num_edges if self.num_edges else 0.0

    def client_rows(self) -> list[dict[str, int | str]]:
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
        }
        lists = {name: t.tolist() for name, t in columns.items() if t is not None}
        return [
            {"client": name, **{column: values[c] for column, values in lists.items()}}
            for c, name in enumerate(self.ids)
        ]

    def totals(self) -> dict[str, int | float | None]:
        """Return the figures of the whole cut; None where one is undefined."""
        return {
            "edges": self.num_edges,
            "edges_cut": self.edges_cut,
            "cut_share": self.cut_share,
            "label_distance": None if math.isnan(self.label_distance) else self.label_distance,
            "homophily": None if math.isnan(self.homophily) else self.homophily,
        }


def describe(graph: Graph, partition: Partition, split: Split | None = None) -> CutStatistics:
    """Return the figures of a cut; the split's are left out where none is given.

    Raises:
        DataError: the partition was made for a graph of another size.
    """
    if partition.num_nodes != graph.num_nodes:
        raise DataError(
            f"expected a partition of this graph's {graph.num_nodes} nodes, "
            f"got one of {partition.num_nodes}"
        )
    sizes = torch.tensor([len(part) for part in partition.nodes])
    nodes, client = torch.cat(partition.nodes), owners(offsets(sizes))
    internal, cross, halo, cut = _edges(graph, partition, nodes, client)
    labels = _labels(graph, nodes, client, len(sizes))
    masks = (None, None, None) if split is None else (split.train, split.val, split.test)
    train, val, test = (
        None if mask is None else torch.bincount(client[mask[nodes]], minlength=len(sizes))
        for mask in masks
    )
    return CutStatistics(
        ids=partition.ids,
        nodes=sizes,
        internal_edges=internal,
        cross_edges=cross,
        halo=halo,
        labels=labels,
        train=train,
        val=val,
        test=test,
        num_edges=graph.num_edges,
        edges_cut=cut,
        label_distance=label_distance(labels),
        homophily=edge_homophily(graph),
    )


def label_distance(labels: Tensor) -> float:
    """Return the mean Jensen-Shannon distance between the rows of `labels` (C, K), as shares.

    sqrt((KL(p | m) + KL(q | m)) / 2) with m = (p + q) / 2: J. Lin: "Divergence measures based on
    the Shannon entropy", IEEE Trans. Inf. Theory 37(1), 1991; a metric by D. Endres, J.
    Schindelin, IEEE Trans. Inf. Theory 49(7), 2003. At most sqrt(ln 2) = .833. Rows without
    labels are left out; NaN where fewer than two are left.
    """
    from scipy.spatial.distance import pdist

    counts = labels[labels.sum(dim=1) > 0].double()
    if len(counts) < 2:
        return math.nan
    shares = counts / counts.sum(dim=1, keepdim=True)
    return float(pdist(shares.numpy(), "jensenshannon").mean())


def edge_homophily(graph: Graph) -> float:
    """Return how far the end points of edges agree, over edges with two labelled end points.

    Multi-class: share of edges within a class (J. Zhu et al.: "Beyond homophily in graph neural
    networks", NeurIPS 2020). Multi-label: mean Jaccard index of the label sets (T. Zhao et al.:
    "Multi-label node classification on graph-structured data", TMLR 2023); two empty sets agree.
    NaN where there is no such edge.
    """
    known = graph.labelled
    row, col = graph.edge_index
    kept = known[row] & known[col]
    row, col = row[kept], col[kept]
    if not len(row):
        return math.nan
    if graph.task == "multiclass":
        return float((graph.y[row] == graph.y[col]).double().mean())
    both, either = torch.zeros(len(row)), torch.zeros(len(row))
    for bit in (graph.y == 1).unbind(dim=1):  # bit by bit: (E, K) need not fit in memory
        both += bit[row] & bit[col]
        either += bit[row] | bit[col]
    return float(torch.where(either == 0, 1.0, both / either.clamp(min=1)).double().mean())


def _edges(
    graph: Graph, partition: Partition, nodes: Tensor, client: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return internal edges, cross-client edges and halo nodes a client, and edges cut."""
    clients, adj = len(partition.ids), graph.adj
    degree = adj.degree[nodes]
    entry = ranges(adj.indptr[:-1].long()[nodes], degree)  # number of the stored edge
    holder, neighbor = torch.repeat_interleave(client, degree), adj.indices[entry].long()

    # (client, node) as one number; ascending, as nodes are within every client.
    place = client * graph.num_nodes + nodes
    wanted = holder * graph.num_nodes + neighbor
    found = torch.searchsorted(place, wanted).clamp(max=len(place) - 1)
    inside = place[found] == wanted
    # A neighbor that nobody holds is lost: there is no one to ask for it.
    outside = ~inside & (partition.owner[neighbor] >= 0)

    covered = torch.zeros(adj.nnz, dtype=torch.bool)
    covered[entry[inside]] = True
    remote = torch.unique(wanted[outside]) // max(graph.num_nodes, 1)
    return (
        torch.bincount(holder[inside], minlength=clients) // 2,
        torch.bincount(holder[outside], minlength=clients),
        torch.bincount(remote, minlength=clients),
        int((~covered).sum()) // 2,
    )


def _labels(graph: Graph, nodes: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return the label counts of every client, (C, K) int64."""
    y = graph.y[nodes]
    if graph.task == "multilabel":
        counts = torch.zeros(clients, graph.num_classes, dtype=torch.int64)
        return counts.index_add_(0, client, (y == 1).long())
    known = y != MISSING
    cell = client[known] * graph.num_classes + y[known]
    counts = torch.bincount(cell, minlength=clients * graph.num_classes)
    return counts.view(clients, graph.num_classes)
