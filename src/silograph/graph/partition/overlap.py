"""Cuts in which clients may hold copies of the same node, and some nodes may be held by nobody.

n: nodes of the graph. C: clients.
"""

import math

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import PartitionError
from silograph.core.key import Key
from silograph.graph.graph import MISSING, Graph
from silograph.graph.node_key import drawn_order, node_words
from silograph.graph.partition.disjoint import metis
from silograph.graph.partition.label_skew import require_classes
from silograph.graph.partition.options import (
    MetisOverlappingOptions,
    NoPartitionOptions,
    SharesOptions,
)

SMALLEST_SHARE = 0.05  # a normal draw may be negative


def metis_overlapping(
    graph: Graph, clients: int, key: Key, options: MetisOverlappingOptions
) -> tuple[Tensor, ...]:
    """Cut by METIS into parts, then draw several clients from each: five halves, unless told.

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
    held = []
    for number in range(clients // each):
        nodes = (part == number).nonzero()[:, 0]
        for copy in range(each):
            draw = key.fold("copy", copy)
            held.append(nodes[_drawn(words[nodes], share, draw)])
    return tuple(held)


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
    wanted = _classes(graph, clients, key, options.share_classes)
    held = []
    for client in range(clients):
        generator = np.random.Generator(np.random.PCG64(key.fold("share", client).value))
        share = float(np.clip(generator.normal(mean, math.sqrt(variance)), SMALLEST_SHARE, 1.0))
        draw = key.fold("nodes", client)
        if wanted is None:
            held.append(_drawn(words, share, draw))
        else:
            nodes = torch.isin(graph.y, wanted[client]).nonzero()[:, 0]
            held.append(nodes[_drawn(words[nodes], share, draw)])
    return tuple(held)


def _classes(graph: Graph, clients: int, key: Key, count: int | None) -> Tensor | None:
    """Return the drawn classes of each client, (C, count) int64; None if it draws from all."""
    if count is None:
        return None
    require_classes(graph, "share_classes")
    there: Tensor = graph.y[graph.y != MISSING].unique()
    if count > len(there):
        raise PartitionError(
            f"expected at most {len(there)} share_classes, as many classes as nodes of "
            f"{graph.name!r} have, got {count}"
        )
    draws = key.fold("classes").matrix(clients, len(there))
    drawn: Tensor = there[draws.argsort(dim=1, stable=True)[:, :count]]
    return drawn


def _drawn(words: Tensor, share: float, key: Key) -> Tensor:
    """Return positions of a share of the words (k,) int64, at least one, ascending."""
    count = max(1, math.floor(share * len(words) + 0.5))
    return drawn_order(words, key)[:count].sort().values
