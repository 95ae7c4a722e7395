"""What scores candidates in FedGrAINS: a graph convolution on the rows that may be drawn.

C: clients.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from silograph.core.payload import offsets
from silograph.core.work import report_entries, report_rows
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.graph.csr import CSR
from silograph.nn.conv import Params
from silograph.nn.neighbors import Drawn, Reached
from silograph.nn.segment import (
    gradients,
    segment_bias,
    segment_linear,
    segment_sum,
    sparse_product,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Union:
    """The rows chosen so far and the candidates, with the edges of the former.

    Attributes:
        rows: (s,) int64 of the block, by client.
        hops: (s,) int64 layer in which each was chosen, or would be.
        off: (A + 1,) int64 rows of each client.
        operator: (s, s) D^-1/2 (A + I) D^-1/2, symmetric.
        candidate: (m,) int64 which of the rows are candidates, by client.
        candidate_off: (A + 1,) int64.
    """

    rows: Tensor
    hops: Tensor
    off: Tensor
    operator: CSR
    candidate: Tensor
    candidate_off: Tensor


def top_k(score: Tensor, off: Tensor, k: int) -> Tensor:
    """Return which candidates have the k highest scores of their client, (m,) bool."""
    client = torch.repeat_interleave(off.diff())
    order = score.argsort(descending=True)
    order = order[client[order].argsort(stable=True)]
    rank = torch.arange(len(score), device=score.device) - off[client]
    chosen = torch.zeros_like(client, dtype=torch.bool)
    chosen[order[rank < k]] = True
    return chosen


def log_forward(logit: Tensor, chosen: Tensor, off: Tensor) -> Tensor:
    """Return log P_F of the choice of each client, (A,).

    Args:
        logit: (m,) of the probability that a candidate is chosen.
        chosen: (m,) bool.
        off: (A + 1,) candidates of each client.
    """
    report_rows(off, 6 * (1 + gradients(logit)))
    return segment_sum(logsigmoid(torch.where(chosen, logit, -logit)), off)


def marked(block: ClientBlock, rows: Tensor) -> Tensor:
    """Return which rows of a block are among some, (n,) bool."""
    marked = torch.zeros(block.adj.num_rows, dtype=torch.bool, device=rows.device)
    marked[rows] = True
    return marked


def union_of(block: ClientBlock, reached: Reached, every: Drawn, hop: int) -> _Union:
    """Return the rows reached and all their neighbors; see `_Union`."""
    new = marked(block, every.neighbor)
    new[reached.rows] = False
    added = new.nonzero()[:, 0]
    rows = torch.cat([reached.rows, added])
    hops = torch.cat([reached.hops, torch.full_like(added, hop + 1)])
    order = block.client[rows].argsort(stable=True)
    rows, hops = rows[order], hops[order]
    count = len(rows)
    place = torch.empty(block.adj.num_rows, dtype=torch.int64, device=rows.device)
    place[rows] = torch.arange(count, device=rows.device)
    hears, sends = place[reached.rows[every.position]], place[every.neighbor]
    back, itself = new[every.neighbor], place[rows]
    entry = torch.cat([hears * count + sends, (sends * count + hears)[back], itself * (count + 1)])
    entry = entry.sort().values
    row, column = entry // count, entry % count
    degree = torch.bincount(row, minlength=count)
    scale = degree.to(every.share.dtype).rsqrt()
    dtype = torch.int32 if len(entry) < 2**31 else torch.int64
    operator = CSR(offsets(degree).to(dtype), column.to(dtype), scale[row] * scale[column], count)
    bounds = torch.cat([reached.clients, reached.clients[-1:] + 1])
    candidate = new[rows].nonzero()[:, 0]
    off = torch.searchsorted(block.client[rows], bounds)
    candidate_off = torch.searchsorted(block.client[rows[candidate]], bounds)
    return _Union(rows, hops, off, operator, candidate, candidate_off)


def policy_logits(
    block: ClientBlock, union: _Union, clients: Tensor, mapped: Tensor, weights: Params
) -> Tensor:
    """Return the logit of every row of a union by the flow network, a GCN of two layers, (s,).

    Args:
        block: C clients.
        union: the rows.
        clients: (A,) int64 that take part.
        mapped: (s, H) of `mapped_features`.
        weights: of the network.
    """
    part = {
        name: w[clients] for name, w in weights.items() if name not in ("features", "indicator")
    }
    z = mapped + _indicated(block, union, weights["indicator"])
    report_rows(union.off, z.shape[1] * 5)  # the sum above, ReLU, and their ways back
    h = segment_bias(_summed(union, z), part["bias"], union.off).relu()
    out = _summed(union, segment_linear(h, part["last"].transpose(1, 2), union.off))
    return segment_bias(out, part["last_bias"], union.off)[:, 0]


def mapped_features(block: ClientBlock, union: _Union, clients: Tensor, weight: Tensor) -> Tensor:
    """Return X W of the rows of a union, (s, H).

    Args:
        block: C clients.
        union: the rows.
        clients: (A,) int64 that take part.
        weight: (U, H) rows for the features of every client up to the last of these.
    """
    if isinstance(block.x, SparseRows):
        x = block.x.used.csr.select_rows(union.rows)
        x = CSR(x.indptr, x.indices, x.values, len(weight))
        report_entries(x.indptr, union.off, 2 * weight.shape[1] * (1 + gradients(weight)))
        return sparse_product(x, weight)
    each = weight.view(int(clients[-1]) + 1, -1, weight.shape[1])[clients]
    return segment_linear(block.x[union.rows], each, union.off)


def feature_gradient(
    block: ClientBlock, traces: Sequence[Mapping[str, Tensor]], found: Sequence[Tensor]
) -> Tensor:
    """Return the gradient of W, (U, H), from those of X W in every hop, (s, H) each.

    The rows of a hop are among those of the next, so one product is enough: X' (G + G').

    Args:
        block: C clients.
        traces: of the hops: `rows` (s,), and in the last one `mapped` (s, H) and `features`.
        found: by hop.
    """
    last = traces[-1]
    place = torch.empty(block.adj.num_rows, dtype=torch.int64, device=last["rows"].device)
    place[last["rows"]] = torch.arange(len(last["rows"]), device=place.device)
    total = found[-1].clone()
    for trace, grad in zip(traces[:-1], found[:-1], strict=True):
        total.index_add_(0, place[trace["rows"]], grad)
    (gradient,) = torch.autograd.grad(last["mapped"], last["features"], total)
    return gradient


def _indicated(block: ClientBlock, union: _Union, weight: Tensor) -> Tensor:
    """Return the rows of the indicator's weights (C, L + 1, H) of every row of a union, (s, H)."""
    clients, layers, width = weight.shape
    column = block.client[union.rows] * layers + union.hops
    report_rows(union.off, 2 * width * (1 + gradients(weight)))
    return weight.view(clients * layers, width).index_select(0, column)


def _summed(union: _Union, z: Tensor) -> Tensor:
    """Return the sums over neighbors of a union (s, D)."""
    report_entries(union.operator.indptr, union.off, 2 * z.shape[1] * (1 + gradients(z)))
    return sparse_product(union.operator, z, symmetric=True)
