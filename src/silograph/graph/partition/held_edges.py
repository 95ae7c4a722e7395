"""The edges that clients hold an end of.

C: clients. n: rows, the clients' copies of nodes. e: stored edges of these rows. E: stored edges
of the uncut graph, both directions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import offsets, owners
from silograph.graph.csr import CSR


@dataclass(frozen=True, eq=False)
class HeldEdges:
    """The stored edges of the clients' rows: client by client, row by row.

    Attributes:
        row: (e,) int64 row of the one end.
        neighbor: (e,) int64 node of the uncut graph at the other end.
        inside: (e,) bool, whether the row's client holds the neighbor.
        position: (e,) int64 the neighbor's row there; means nothing where it is not inside.
        weight: (e,) their values in the uncut graph; None where it has none.
    """

    row: Tensor
    neighbor: Tensor
    inside: Tensor
    position: Tensor
    weight: Tensor | None = None


def held_edges(adj: CSR, nodes: Sequence[Tensor]) -> HeldEdges:
    """Return every stored edge of every client's nodes.

    Args:
        adj: (N, N) edges of the uncut graph.
        nodes: (C,) tensors (n_c,) int64, node numbers, ascending.
    """
    node = torch.cat(tuple(nodes))
    client = owners(offsets(torch.tensor([len(part) for part in nodes])))
    # (client, node) as one number; ascending, as nodes are within every client.
    place = client * adj.num_rows + node
    edges = adj.select_rows(node)
    row, neighbor = edges.row, edges.indices.long()
    wanted = client[row] * adj.num_rows + neighbor
    position = torch.searchsorted(place, wanted).clamp(max=len(place) - 1)
    return HeldEdges(row, neighbor, place[position] == wanted, position, edges.values)


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
        (e,) bool over the edges of `held_edges`.
    """
    edges = held_edges(adj, nodes)
    client = owners(offsets(torch.tensor([len(part) for part in nodes])))[edges.row]
    client = client[edges.inside]
    ends = row_key[edges.row[edges.inside]] + row_key[edges.position[edges.inside]]
    word = key.words(ends, 1)[:, 0]
    order = torch.argsort(word, stable=True)
    order = order[torch.argsort(client[order], stable=True)]
    sizes = torch.bincount(client, minlength=len(nodes))  # each edge counts twice
    count = 2 * torch.floor(share * sizes.double() / 2 + 0.5).long()
    last = (offsets(sizes)[:-1] + count - 1)[client].clamp(min=0)
    # By word, not by rank: then no tie can part the two directions of an edge.
    dropped = torch.zeros_like(edges.inside)
    dropped[edges.inside] = (count > 0)[client] & (word <= word[order[last]])
    return dropped
