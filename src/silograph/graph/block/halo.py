"""The halo: remote end points of a client's cross-client edges, and who owns them.

A client numbers its halo nodes with slots of its own. The owner of a halo node knows it as a
boundary row. `Route` says which boundary row answers for which slot; it is agreed once, before
training, and is all that the engine needs to carry rows between clients.

C: clients. n: rows. S: halo slots of all clients together. B: boundary rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.key import hash_texts
from silograph.core.payload import offsets, runs_at
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph
from silograph.graph.node_key import client_words, node_words
from silograph.graph.partition.held_edges import held_edges
from silograph.graph.partition.partition import Partition


@dataclass(frozen=True, eq=False)
class Halo:
    """What the clients of a block know of nodes they do not hold.

    Attributes:
        off: (C + 1,) int64, slots of each client.
        adj: (n, S) own rows x halo slots; values are weights of edges, 1 where they have none.
        key: (S,) int64, the counter of every draw for a slot: the `row_key` that its node would
            have if the client held it.
        boundary: (B,) int64 own rows (numbered in the block) that others hold as halo,
            ascending.
        boundary_off: (C + 1,) int64, boundary rows of each client.
    """

    off: Tensor
    adj: CSR
    key: Tensor
    boundary: Tensor
    boundary_off: Tensor

    def take(self, positions: Tensor, row_off: Tensor) -> "Halo":
        """Return the halo of the clients at `positions` (k,); `row_off` (C + 1,) of the block."""
        boundary_off = offsets(self.boundary_off.diff()[positions])
        new_off = offsets(row_off.diff()[positions])
        shift = torch.repeat_interleave(new_off[:-1] - row_off[positions], boundary_off.diff())
        return Halo(
            off=offsets(self.off.diff()[positions]),
            adj=self.adj.select_diagonal(row_off, self.off, positions),
            key=runs_at(self.key, self.off, positions),
            boundary=runs_at(self.boundary, self.boundary_off, positions) + shift,
            boundary_off=boundary_off,
        )

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Halo":
        """Return a copy on another device."""
        return Halo(
            self.off.to(device),
            self.adj.to(device, dtype),
            self.key.to(device),
            self.boundary.to(device),
            self.boundary_off.to(device),
        )


@dataclass(frozen=True, eq=False)
class Route:
    """Who answers for each halo slot of the federation.

    Attributes:
        target: (S,) int64 boundary row of every slot, slots and boundary rows in client order.
        slot_off: (C + 1,) int64 slots of each client.
        boundary_off: (C + 1,) int64 boundary rows of each client.
    """

    target: Tensor
    slot_off: Tensor
    boundary_off: Tensor


def connect(graph: Graph, partition: Partition) -> tuple[CSR, Halo, Route]:
    """Sort every edge into internal and cross-client ones.

    Args:
        graph: the uncut graph.
        partition: who holds which of its nodes.

    Returns:
        Internal edges (n, n), the halo, and the route. Edges that were dropped, and those to a
        node that nobody holds, are in neither.
    """
    nodes, holder, num_nodes = partition.copies, partition.holder, graph.num_nodes
    num_rows, clients = len(nodes), torch.arange(len(partition.ids) + 1)
    off = torch.searchsorted(holder, clients)
    edges = held_edges(graph.weighted_adj, partition.nodes)
    row, inside = edges.row, partition.internal(edges)
    weight = None if edges.weight is None else edges.weight[inside]
    internal = CSR.from_pairs(row[inside], edges.position[inside], (num_rows, num_rows), weight)

    outside = partition.external(edges)
    row, neighbor = row[outside], edges.neighbor[outside]
    weight = None if edges.weight is None else edges.weight[outside]
    slots, slot_of_edge = torch.unique(holder[row] * num_nodes + neighbor, return_inverse=True)
    slot_client, slot_node = slots // num_nodes, slots % num_nodes
    place = holder * num_nodes + nodes  # ascending: (client, node) -> row
    owner_row = torch.searchsorted(place, partition.owner[slot_node] * num_nodes + slot_node)
    boundary, target = torch.unique(owner_row, return_inverse=True)
    boundary_off = torch.searchsorted(boundary, off)
    slot_off = torch.searchsorted(slot_client, clients)
    names, words = hash_texts(partition.ids), node_words(graph.node_id)
    halo = Halo(
        off=slot_off,
        adj=CSR.from_pairs(row, slot_of_edge, (num_rows, len(slots)), weight),
        key=client_words(names[slot_client], words[slot_node]),
        boundary=boundary,
        boundary_off=boundary_off,
    )
    return internal, halo, Route(target, halo.off, boundary_off)
