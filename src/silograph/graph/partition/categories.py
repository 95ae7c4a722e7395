"""Cuts of rating graphs: ratings go to clients, users and items wherever a rating of theirs is.

n: nodes of the graph. C: clients.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import PartitionError
from silograph.core.key import Key
from silograph.graph.graph import Graph
from silograph.graph.partition.options import CategoryOptions, Spread
from silograph.graph.rating_pairs import pairs_among

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
    held = []
    for client, part in enumerate(nodes):
        ratings = part[user[part] >= 0]
        if not len(ratings):
            raise PartitionError(
                f"expected at least one rating a client, got none at client {client}: use fewer "
                "clients or another partition"
            )
        held.append(torch.cat([ratings, user[ratings], item[ratings]]).unique())
    return tuple(held)


def category(graph: Graph, clients: int, key: Key, options: CategoryOptions) -> tuple[Tensor, ...]:
    """Give each client whole values of a column, such as categories of products.

    Values are dealt in an order drawn by key. How many a client gets is drawn, too, alike likely
    among all numbers that the spread allows and that use up the values.
    """
    if options.column not in graph.columns or graph.columns[options.column].is_floating_point():
        known = [name for name, c in graph.columns.items() if not c.is_floating_point()]
        raise PartitionError(
            f"expected a column {options.column!r} of words or whole numbers in {graph.name!r}, "
            f"got {', '.join(known) or 'none'}: "
            + (
                f"give one of these as --option column={known[0]}"
                if known
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
    below, above = BEYOND[spread]
    fewest = max(1, values // clients + below)
    most = -(-values // clients) + above
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
