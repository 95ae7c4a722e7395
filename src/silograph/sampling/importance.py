"""Which training nodes a client trains on: importance by the change of a node's loss.

Li, Chen, Ren, Wang, Hu, Li, Yu and Chen, "Federated graph learning with adaptive importance-based
sampling", AAAI 2025, eq. 8: p_v = |Delta_v| / sum |Delta|, where Delta_v is the change of v's loss
between two consecutive local models.

What we changed: a share of the probability is spread evenly (`floor`), so that no node is never
drawn; nodes whose losses all stayed are alike. Nodes are drawn without replacement. The mean of
a batch's losses is then biased towards important nodes, as in the paper; `inclusions` and
`systematic` are the unbiased way.

Everything is done for all clients at once; draws depend on keys of nodes, not on their order.

C: clients. t: nodes of all clients, by client, `off` (C + 1,) of each.
"""

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import offsets, owners
from silograph.nn.segment import segment_sum

MOST = 1e200  # of a change of a loss, so that sums are finite
LEAST = 2.0**-54  # below every positive draw


def probabilities(change: Tensor, off: Tensor, floor: float) -> Tensor:
    """Return how likely each node is drawn, (t,) float64, which sums to 1 for each client.

    Args:
        change: (t,) of each node's loss.
        off: (C + 1,).
        floor: share of the probability that all nodes have alike.
    """
    # What is infinite or NaN counts as no change: with it a client would draw nothing, and where
    # lengths are added up along all clients, nor would those after it.
    size = change.double().abs()
    size = size.where(size.isfinite(), 0).clamp(max=MOST)
    total = segment_sum(size, off)
    client, count = owners(off), off.diff().double()
    even = 1 / count[client]
    found = torch.where(total[client] > 0, size / total.clamp(min=LEAST**2)[client], even)
    return (1 - floor) * found + floor * even


def draw_order(p: Tensor, off: Tensor, row_key: Tensor, key: Key) -> Tensor:
    """Return all nodes (t,) int64, each client's in the order in which they are drawn.

    Without replacement, each next one with a probability in proportion to p among those left:
    exponential clocks of rate p ring in that order (Efraimidis and Spirakis, "Weighted random
    sampling with a reservoir", 2006).

    Args:
        p: (t,) float64, 0 or more.
        off: (C + 1,).
        row_key: (t,) int64.
        key: of the draw.
    """
    clock = -torch.log(key.uniform(row_key)[:, 0].clamp(min=LEAST)) / p
    return by_client(clock.argsort(stable=True), off)


def by_client(order: Tensor, off: Tensor) -> Tensor:
    """Return an order of all nodes (t,) with each client's together, clients as they come."""
    return order[owners(off)[order].argsort(stable=True)]


def first_of(order: Tensor, off: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first `count` (C,) of each client's nodes, and offsets (C + 1,)."""
    rank = torch.arange(len(order), device=order.device) - off[owners(off)]
    return order[rank < count[owners(off)]], offsets(count)


def inclusions(p: Tensor, off: Tensor, count: Tensor) -> Tensor:
    """Return how likely each node is to be among those drawn, pi = min(1, c p), (t,) float64.

    c is such that a client's sum to `count` (C,), at most its number of nodes; with fewer nodes of
    p > 0 than that these are certain.
    """
    client, certain = owners(off), torch.zeros_like(p, dtype=torch.bool)
    while True:
        # Sums of those left alone: a difference of running sums would lose small ones.
        left = segment_sum(torch.where(certain, 0, p), off)
        more = count - segment_sum(certain.long(), off)
        factor = torch.where(left > 0, more / left.clamp(min=LEAST**2), 0)[client]
        found = ~certain & (factor * p >= 1 - 1e-12)
        if not bool(found.any()):
            return torch.where(certain, 1, factor * p)
        certain |= found


def systematic(pi: Tensor, off: Tensor, row_key: Tensor, key: Key, client_key: Tensor) -> Tensor:
    """Return which nodes are drawn, (t,) bool: each with probability pi, almost a fixed number.

    Nodes stand on a line, in an order drawn by key, each with a piece of its length pi; those are
    drawn whose piece meets a grid of unit steps with a random start (Madow, 1949).

    Args:
        pi: (t,) float64, at most 1.
        off: (C + 1,).
        row_key: (t,) int64.
        key: of the draw.
        client_key: (C,) int64, of the starts.
    """
    client = owners(off)
    order = by_client(key.fold("order").words(row_key, 1)[:, 0].argsort(stable=True), off)
    length = pi[order]
    end = length.cumsum(0)
    begin = end - length
    first = begin[off[:-1].clamp(max=max(len(pi) - 1, 0))][client]
    start = key.fold("start").uniform(client_key)[:, 0][client]
    hit = torch.floor(end - first - start) > torch.floor(begin - first - start)
    drawn = torch.empty_like(hit)
    drawn[order] = hit
    return drawn
