"""Subgraphs of training nodes along few sampled edges of each node, and their gradients.

Daigavane, Madan, Sinha, Thakurta, Aggarwal and Jain, "Node-level differentially private graph
neural networks", 2021 (arXiv 2111.15521), algorithms 1 and 2. Edges are sampled until no node has
more than K, the gradient of each training node is that of its subgraph of r hops, and a node is in
few subgraphs.

What we changed. Their algorithm 1 samples the edges of a node by its degree. If a node is added,
its neighbors sample other edges as well, and subgraphs change in which the node is not. We count
those, too. An edge is sampled if it is among the K first of both of its ends, in an order that is
drawn for pairs of nodes (`sample_bounded_edges`). The sampled graph has no directions.

Neighbors are silos with and without one node (*add or remove*). Let v have at most K edges. Then
all of them are among its first K, and

- at most B = 1 + K (1 + (K - 1) + ... + (K - 1)^(r - 1)) nodes are within r hops of v: the training
  nodes among them have v in their subgraphs;
- without v, each sampled neighbor u of v has room for one more edge, to some w, and no other edge
  changes. Who is within r - 1 hops of u had v in its subgraph. Of each w at most
  1 + (K - 1) + ... + (K - 1)^(r - 1) nodes are within r - 1 hops, without the new edge. There are K
  such w, so B - 1 further subgraphs change.

So at most 2 B - 1 subgraphs change. Each changes the sum of clipped gradients by at most 2 C: from
one gradient of norm C to another one. (B is at most (K^(r + 1) - 1) / (K - 1), the bound of the
paper, which has edges with directions.)

If v has more than K edges, its features, label and role are covered in the same way: replacing
them changes no edge, so at most B subgraphs. Which edges it has is not covered.

Where roles are shares of all nodes, one node more moves the role of at most one other. There is
room for it: of the 2 B - 1 subgraphs one is that of v itself, whose gradient is there or not, so it
changes the sum by C at most, and the moved role by another C. Folds move two roles, and are refused
(`silograph.experiment.resolve.privacy`).

n: rows of a block. S: subgraphs. N: rows of all subgraphs. r: hops. K: sampled edges of a node.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from silograph.core.key import Key, mix_words, signed
from silograph.core.payload import offsets
from silograph.core.work import work_of
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.graph.csr import CSR
from silograph.nn.conv import Messages
from silograph.nn.forward import Pass, Staged, forward_pass
from silograph.task.registry import task_of

MOST_VALUES = 2**22  # of gradients at once


def most_nodes_within(degree: int, hops: int) -> int:
    """Return B: how many nodes are within some hops of a node if none has more edges than K.

    Args:
        degree: K.
        hops: r.
    """
    in_branch: int = sum((degree - 1) ** hop for hop in range(hops))
    return 1 + degree * in_branch


def most_changed_subgraphs(degree: int, hops: int) -> int:
    """Return how many subgraphs change, at most, if a node is added or removed.

    Args:
        degree: K, edges that are sampled of a node at most.
        hops: r, hops from the training node of a subgraph.
    """
    return 2 * most_nodes_within(degree, hops) - 1


def sample_bounded_edges(adj: CSR, row_key: Tensor, degree: int, key: Key) -> CSR:
    """Return the edges that are among the first K of both of their ends, in a random order.

    The order of an edge depends on its two ends and the key alone. So edges of other nodes are in
    the same order whether a node is there or not.

    Args:
        adj: (n, n), symmetric, without self loops.
        row_key: (n,) int64.
        degree: K.
        key: of the draw.

    Returns:
        (n, n), symmetric, at most K entries in each row, with the weights of `adj`.
    """
    row, column = adj.row.cpu(), adj.indices.long().cpu()
    words = mix_words(row_key.cpu() ^ signed(key.value))
    priority = mix_words(words[row] + words[column])
    order = np.lexsort((column.numpy(), priority.numpy(), row.numpy()))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - adj.indptr.cpu().numpy()[row.numpy()[order]]
    is_first = torch.from_numpy(rank < degree)
    # Entries are ascending by row and column, so the other direction of each is found by its code.
    code, reverse_code = row * adj.num_cols + column, column * adj.num_cols + row
    is_sampled = is_first & is_first[torch.searchsorted(code, reverse_code)]
    lengths = torch.bincount(row[is_sampled], minlength=adj.num_rows)
    values = None if adj.values is None else adj.values.cpu()[is_sampled]
    indptr, indices = offsets(lengths), column[is_sampled]
    return CSR(indptr.to(adj.indices.dtype), indices.to(adj.indices.dtype), values, adj.num_cols)


@dataclass(frozen=True, eq=False)
class Subgraphs:
    """Subgraphs of some training nodes, one after the other.

    Attributes:
        rows: (N,) int64 rows of the block, ascending in each subgraph.
        off: (S + 1,) int64 offsets of the subgraphs.
        adj: (N, N) edges with an end within r - 1 hops of the training node, both directions: all
            that r layers read, and degrees follow from them alone.
        target: (S,) int64 positions of the training nodes among the N rows.
    """

    rows: Tensor
    off: Tensor
    adj: CSR
    target: Tensor


def subgraphs_of(edges: CSR, nodes: Tensor, hops: int) -> Subgraphs:
    """Return the subgraphs of training nodes (S,) int64 along sampled edges (n, n); r: `hops`."""
    n, matrix = edges.num_cols, edges.scipy(np.float32)
    starts = np.arange(len(nodes) + 1)
    ball = sp.csr_matrix((np.ones(len(nodes), np.float32), nodes.numpy(), starts), (len(nodes), n))
    inner = ball
    is_edge = matrix.copy()
    is_edge.data = np.ones_like(is_edge.data)
    for _ in range(hops):
        inner, ball = ball, ball + ball @ is_edge
        ball.data = np.ones_like(ball.data)
    ball.sort_indices()
    inner.sort_indices()
    # 1. Rows of all subgraphs; (subgraph, node) pairs are ascending.
    lengths = np.diff(ball.indptr)
    pairs = np.repeat(np.arange(len(nodes)), lengths) * n + ball.indices
    # 2. Edges of rows within r - 1 hops.
    subgraph = np.repeat(np.arange(len(nodes)), np.diff(inner.indptr))
    degree = np.diff(edges.indptr.numpy())[inner.indices]
    first = edges.indptr.numpy()[inner.indices].astype(np.int64)
    entry = np.arange(degree.sum()) + np.repeat(first - (np.cumsum(degree) - degree), degree)
    receiver = np.repeat(np.searchsorted(pairs, subgraph * n + inner.indices), degree)
    neighbor = edges.indices.numpy()[entry].astype(np.int64)
    sender = np.searchsorted(pairs, np.repeat(subgraph, degree) * n + neighbor)
    # 3. Both directions of each, once.
    total = len(pairs)
    both = np.concatenate([receiver * total + sender, sender * total + receiver])
    code, position = np.unique(both, return_index=True)
    values = None
    if edges.values is not None:
        values = edges.values[torch.from_numpy(np.concatenate([entry, entry])[position])]
    rows, columns = (torch.from_numpy(part) for part in np.divmod(code, max(total, 1)))
    target = np.searchsorted(pairs, np.arange(len(nodes)) * n + nodes.numpy())
    return Subgraphs(
        torch.from_numpy(ball.indices.astype(np.int64)),
        offsets(torch.from_numpy(lengths.astype(np.int64))),
        CSR.from_pairs(rows, columns, (total, total), values),
        torch.from_numpy(target),
    )


def gradients_of_subgraphs(
    model: Staged,
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    subgraphs: Subgraphs,
    key: Key,
) -> Tensor:
    """Return the gradient of the loss of each training node in its subgraph, (S, d) float64.

    Args:
        model: the shape; d weights in all, in the order of `weights`.
        weights: shared by all.
        block: with features, labels and keys of the rows.
        subgraphs: S of them.
        key: of dropout.
    """
    first = next(iter(weights.values()))
    device, dtype, count = first.device, first.dtype, len(subgraphs.target)
    rows, off = subgraphs.rows.to(device), subgraphs.off.to(device)
    x: Rows
    if isinstance(block.x, SparseRows):
        x = SparseRows(block.x.csr.select_rows(rows), off)
    else:
        x = block.x[rows]
    adj = subgraphs.adj.to(device, dtype)
    degree = adj.weighted_degree.to(dtype)[:, None]
    messages, depth = Messages(adj, True, degree, degree, None, off, off), len(model.stages)
    inputs = Pass(x, (messages,) * depth, (block.row_key[rows],) * depth)
    # Subgraphs share no weight, so the gradient of the sum holds each one's own.
    leaves = {
        name: w.detach().expand(count, *w.shape).contiguous().requires_grad_()
        for name, w in weights.items()
    }
    target = subgraphs.target.to(device)
    logits = forward_pass(model, leaves, inputs, key)[target]
    loss = task_of(model.task).loss(logits, block.y[rows[target]], block.class_weight)
    gradients = torch.autograd.grad(loss.sum(), list(leaves.values()))
    return torch.cat([g.double().flatten(1) for g in gradients], 1)


def gradients_by_node(
    model: Staged, weights: Mapping[str, Tensor], block: ClientBlock, degree: int, key: Key
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield gradients (S, d) of training nodes, and the clients (S,) int64 whose nodes they are.

    Args:
        model: the shape.
        weights: shared by all clients.
        block: of the clients.
        degree: K.
        key: of the draws of edges, and of dropout.
    """
    edges = sample_bounded_edges(block.adj, block.row_key, degree, key.fold("edges"))
    nodes = block.split.train.nonzero()[:, 0].cpu()
    hops = num_hops(model)
    size = max(1, MOST_VALUES // sum(w.numel() for w in weights.values()))
    for part in nodes.split(size):
        owner = block.client.cpu()[part]
        with work_of(owner):
            subgraphs = subgraphs_of(edges, part, hops)
            gradients = gradients_of_subgraphs(model, weights, block, subgraphs, key)
        yield gradients, owner


def num_hops(model: Staged) -> int:
    """Return how far an output of a model reads: its sums over neighbors, one after the other."""
    return sum(stage.conv.sums for stage in model.stages)
