"""FedSage+'s generator node by node: the oracle of its loss, and of what it generates."""

from collections.abc import Mapping

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock, dense_rows, neighbor_keys
from silograph.methods.fedsage import NeighGen


def _neighbor_key(block: ClientBlock, row: int, nth: int) -> Tensor:
    return neighbor_keys(block.row_key, torch.full((nth + 1,), row))[-1:]


def _encoded(own: Mapping[str, Tensor], features: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Two layers of GraphSAGE, and how many neighbors each node seems to lack."""
    mean = edges / edges.sum(1, keepdim=True).clamp(min=1)
    z = mean @ features @ own["first.weight"] + features @ own["first.root"] + own["first.bias"]
    z = z.relu()
    z = mean @ z @ own["second.weight"] + z @ own["second.root"] + own["second.bias"]
    return z, (z @ own["degree.weight"] + own["degree.bias"])[:, 0]


def _made(
    gen: NeighGen,
    own: Mapping[str, Tensor],
    block: ClientBlock,
    row: int,
    key: Key,
    z: Tensor,
    d: Tensor,
) -> list[Tensor]:
    """The features of the neighbors that are generated for a row."""
    found = []
    for p in range(round(min(max(float(d.detach()), 0), gen.most))):
        noise = torch.special.ndtri(key.uniform(_neighbor_key(block, row, p), gen.width))[0]
        found.append((z + noise) @ own["feature.weight"] + own["feature.bias"])
    return found


def _dense(block: ClientBlock) -> tuple[Tensor, Tensor]:
    n = len(block.row_key)
    edges = torch.zeros(n, n, dtype=torch.float64)
    edges[block.adj.row, block.adj.indices.long()] = 1
    return dense_rows(block, torch.arange(n)), edges


def loss_by_hand(
    gen: NeighGen,
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    hidden: Tensor,
    key: Key,
    weight: float,
    *,
    alone: bool = False,
) -> Tensor:
    """All clients' losses, each with the other clients' nodes unless it learns alone."""
    features, edges = _dense(block)
    total = features.new_zeros(())
    for c in range(block.num_clients):
        own = {n: w[c] for n, w in weights.items()}
        rows = torch.arange(int(block.off[c]), int(block.off[c + 1]))
        there = rows[~hidden[rows]]
        z, d = _encoded(own, features[there], edges[there][:, there])
        others = [features[block.client == o] for o in range(block.num_clients) if o != c]
        for place, v in enumerate(there.tolist()):
            near = ((edges[v] > 0) & hidden).nonzero()[:, 0]
            miss = (d[place] - len(near)).abs()
            total = total + torch.where(miss < 1, miss**2 / 2, miss - 0.5) / len(there)
            for x in _made(gen, own, block, v, key, z[place], d[place]):
                for group in [features[near], *([] if alone else others)]:
                    if len(group):
                        apart = (group - x).square().sum(1).min()
                        total = total + weight * apart / len(there)
    return total


def generated_by_hand(
    gen: NeighGen, weights: Mapping[str, Tensor], block: ClientBlock, key: Key
) -> tuple[list[int], Tensor]:
    """How many neighbors each row gets on the whole graph, and their features (k, F)."""
    features, edges = _dense(block)
    counts, found = [], [features[:0]]
    for c in range(block.num_clients):
        own = {n: w[c] for n, w in weights.items()}
        rows = torch.arange(int(block.off[c]), int(block.off[c + 1]))
        z, d = _encoded(own, features[rows], edges[rows][:, rows])
        for place, v in enumerate(rows.tolist()):
            made = _made(gen, own, block, v, key, z[place], d[place])
            counts.append(len(made))
            found += [x[None] for x in made]
    return counts, torch.cat(found)
