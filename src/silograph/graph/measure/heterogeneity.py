"""Measures of how far clients are apart, and of a graph's structure.

n: nodes. C: clients. K: classes (bits, for multi-label). E: stored edges, both directions.
"""

import math

import numpy as np
import torch
from torch import Tensor

from silograph.graph.csr import CSR
from silograph.graph.graph import Graph

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
    known = graph.labeled
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
