"""The graph of ratings that silos hold together: who has one key at two silos is one user or item.

n: nodes of the graph. k: rows of all silos. C: silos.
"""

import numpy as np
import torch
from torch import Tensor

from silograph.core.payload import owners
from silograph.graph.block.block import ClientBlock
from silograph.graph.block.pairs import kinds, pairs_of
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.graph.partition.partition import Partition
from silograph.graph.silos.data import Silos


def join_rating_silos(silos: Silos, block: ClientBlock) -> tuple[Graph, Partition, Split]:
    """Return the graph that silos with ratings hold together, who holds what, and what for.

    Only a simulation can do that. Nodes are in the order of `sg.ratings`. A pair that two silos
    have rated has a rating of each, and each silo's has the role that it has there.

    Args:
        silos: their data.
        block: all of them as one block.
    """
    keys, holder = np.array([key for silo in silos.members for key in silo.keys]), owners(block.off)
    number, ratings = _numbers(block, keys, holder)
    n = int(number.max()) + 1
    row = torch.from_numpy(np.unique(number.numpy(), return_index=True)[1])  # of each node, one
    node_id, twice = keys[row.numpy()], ratings[_repeated(keys[ratings.numpy()])]
    node_id = node_id.astype(np.object_)
    for rating in twice.tolist():
        node_id[number[rating]] = f"{silos.ids[holder[rating]]}/{keys[rating]}"
    edges = number[torch.stack([block.adj.row, block.adj.indices.long()])]
    graph = Graph(
        adj=CSR.undirected(edges.numpy(), n),
        x=kinds(block.x)[row].float(),
        y=block.y[row],
        num_classes=1,
        node_id=node_id.astype(np.str_),
        name=silos.name,
        scale=silos.members[0].scale,  # silos agree on one
    )
    nodes = tuple(part.sort().values for part in number.split(block.off.diff().tolist()))
    cut = Partition(silos.ids, nodes, n, "silo", apart=True)
    return graph, cut, block.split.map(lambda mask: mask[row])


def _numbers(block: ClientBlock, keys: np.ndarray, holder: Tensor) -> tuple[Tensor, Tensor]:
    """Return the node of each row, (k,) int64, and the rows of ratings in the order of nodes."""
    number, count, pairs = torch.empty(len(keys), dtype=torch.int64), 0, pairs_of(block)
    for side in kinds(block.x).bool().T:
        names, place = np.unique(keys[side.numpy()], return_inverse=True)
        number[side] = count + torch.from_numpy(place)
        count += len(names)
    order = np.lexsort((holder[pairs.row], number[pairs.item], number[pairs.user]))
    ratings = pairs.row[torch.from_numpy(order)]
    number[ratings] = torch.arange(count, count + len(order))
    return number, ratings


def _repeated(keys: np.ndarray) -> np.ndarray:
    """Return which of some keys there are several of, bool."""
    _, place, times = np.unique(keys, return_inverse=True, return_counts=True)
    found: np.ndarray = times[place] > 1
    return found
