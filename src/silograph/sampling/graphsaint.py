"""GraphSAINT's subgraphs: how they are drawn, and by what their sums and losses are divided.

Zeng, Zhou, Srivastava, Kannan and Prasanna, "GraphSAINT: Graph sampling based inductive learning
method", ICLR 2020, algorithm 2 and section 3.2. Draws are with replacement, and a subgraph has all
edges among the nodes that were hit:

    node   `budget` nodes, P(u) ~ |A~[:, u]|^2, A~ = D^-1 (A + I)
    edge   both ends of `budget` edges, p_e ~ 1 / deg(u) + 1 / deg(v)
    walk   what `budget` walks of `walk_length` steps visit, from uniform roots

A message u -> v is divided by alpha = p(u, v) / p(v), the loss of v by lambda = p(v). Both are
estimated: before training, subgraphs are drawn until they hold every node `sample_coverage` times
on the mean, and C_v, C_{u,v} of those N hold v, and both ends of the edge.

What we changed: with the subgraph at hand counted as well, alpha = (C_{u,v} + 1) / (C_v + 1) and
lambda = (C_v + 1) / (N + 1). The paper's C_{u,v} / C_v and C_v / N can be 0 for what is drawn in
training, and the authors' code then puts in .1. Ours cannot, and is all but unbiased: for a given N

    E[1 / lambda] = (1 - (1 - p(v))^(N + 1)) / p(v)
    E[1 / alpha]  = 1 + (p(v) / p(u, v) - 1) (1 - (1 - p(u, v))^N).

A~ has self loops, so that nodes without edges are drawn, too; the edge sampler never draws those.
Subgraphs are of all nodes: those that are not for training send messages and have no loss.

State: `saint/nodes` (n,) int32 C_v, `saint/edges` (nnz,) int32 C_{u,v} by entry of the adjacency,
`saint/subgraphs` (C,) int64 N, and for a step what `silograph.exchange.stages` reads. Clients
draw from their own graphs; edges to other clients take no part.

C: clients. n: rows. r: drawn rows. nnz: entries of the adjacency.
"""

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.key import Key, mix_words
from silograph.core.payload import Payload, Ragged, Stacked, State
from silograph.federation.per_client import per_client
from silograph.graph.block.block import ClientBlock
from silograph.nn.reach import entries_among
from silograph.sampling.urn import Urn, fill

Sampler = Literal["node", "edge", "walk"]


class Sampling(Protocol):
    """How subgraphs are drawn: options of a method."""

    @property
    def sampler(self) -> Sampler:
        """What is drawn."""

    @property
    def budget(self) -> int:
        """How many nodes, edges or roots."""

    @property
    def walk_length(self) -> int:
        """Steps of a walk."""

    @property
    def sample_coverage(self) -> int:
        """How often the subgraphs drawn ahead hold a node, on the mean."""

    @property
    def normalize(self) -> bool:
        """Whether messages and losses are divided."""


@per_client
def presample(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Count what subgraphs hold that are drawn ahead.

    In: nothing. Out: `steps` (C,), how many subgraphs have as many nodes as the graph.
    """
    del inbox
    how: Sampling = cfg.options
    n, off = len(block.row_key), block.off
    nodes = torch.zeros(n, dtype=torch.int32, device=off.device)
    edges = torch.zeros(block.adj.nnz, dtype=torch.int32, device=off.device)
    number = held = 0
    while held < how.sample_coverage * n:
        rows = subgraph(block, how, key.fold("presample", number))
        nodes[rows] += 1
        edges[entries_among(block.adj, rows)] += 1
        number, held = number + 1, held + len(rows)
    counts: dict[str, Ragged | Stacked] = {
        "saint/nodes": Ragged(nodes, off),
        "saint/edges": Ragged(edges, torch.tensor([0, len(edges)], device=off.device)),
        "saint/subgraphs": Stacked(torch.tensor([number], device=off.device)),
    }
    steps = max(1, round(n * number / held))
    return {**state, **counts}, {"steps": Stacked(torch.tensor([steps], device=off.device))}


@per_client
def draw(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Draw the subgraph of a step, and work out its weights. In: nothing. Out: nothing."""
    del inbox
    rows = subgraph(block, cfg.options, key)
    if not cfg.options.normalize:
        return {**state, **taking_part(block, rows)}, {}
    entries = entries_among(block.adj, rows)
    nodes, edges, number = (state[f"saint/{f}"].t for f in ("nodes", "edges", "subgraphs"))
    single, joint = ((count + 1) / (number.double() + 1) for count in (nodes, edges[entries]))
    return {**state, **weighed(block, rows, entries, single, joint)}, {}


def taking_part(block: ClientBlock, rows: Tensor) -> dict[str, Ragged]:
    """Return the fields that say who takes part in a step: rows (r,) of one client, ascending."""
    heard = torch.zeros(int(block.halo.off[-1]), dtype=torch.bool, device=rows.device)
    off = torch.tensor([0, len(rows)], device=rows.device)
    return {"pass/rows": Ragged(rows, off), "pass/heard": Ragged(heard, block.halo.off)}


def weighed(
    block: ClientBlock, rows: Tensor, entries: Tensor, single: Tensor, joint: Tensor
) -> dict[str, Ragged]:
    """Return who takes part in a step, and with which weights (see `stages`).

    Args:
        block: one client.
        rows: (r,) int64, ascending.
        entries: (e,) int64 of the adjacency, those among the rows.
        single: (n,) float64 probability that a subgraph holds a row.
        joint: (e,) float64 that it holds both ends of an entry.
    """
    fields = taking_part(block, rows)
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    dtype = block.adj.values.dtype
    inner, off = single[block.adj.row[entries]] / joint, torch.tensor([0, len(entries)])
    fields["pass/inner"] = Ragged(inner.to(dtype), off.to(rows.device))
    fields["pass/loss"] = Ragged((1 / single[rows]).to(dtype), fields["pass/rows"].off)
    return fields


def subgraph(block: ClientBlock, how: Sampling, key: Key) -> Tensor:
    """Return the rows of a drawn subgraph of one client, (r,) int64 ascending.

    They do not depend on the order of the rows.

    Raises:
        DataError: edges are to be drawn, and there are none.
    """
    key = key.fold("subgraph", block.ids[0])
    adj, urn = block.adj, _remembered(block, how.sampler)
    assert isinstance(urn, Urn)
    hit = urn.draw(how.budget, key)
    if how.sampler == "edge":
        hit = torch.cat([adj.row[hit], adj.indices[hit].long()])
    if how.sampler == "walk":
        hit = walked(block, hit, how.walk_length, key.fold("walk"))
    rows: Tensor = torch.unique(hit)
    return rows


def chances(block: ClientBlock, sampler: Sampler) -> Tensor:
    """Return how likely a draw hits each row, or each entry of the adjacency, up to a factor.

    Args:
        block: one client.
        sampler: `edge` is about the (nnz,) entries, two for each edge, the others about (n,) rows.
    """
    adj = block.adj
    sender = adj.indices.long()
    if sampler == "edge":
        inverse = 1 / adj.degree.double()
        return inverse[adj.row] + inverse[sender]
    if sampler == "walk":
        return torch.ones(adj.num_rows, dtype=torch.float64, device=sender.device)
    squared = (adj.degree.double() + 1) ** -2
    return squared.index_add(0, sender, squared[adj.row])


def walked(block: ClientBlock, roots: Tensor, length: int, key: Key) -> Tensor:
    """Return the rows that walks of `length` steps from some roots visit, in any order.

    A step goes to a neighbor, all alike; where there is none, the walk stays.
    """
    neighbors = _remembered(block, "neighbors")
    assert isinstance(neighbors, Tensor)
    start, degree = block.adj.indptr.long(), block.adj.degree
    at, visited = roots, [roots]
    for u in key.uniform(torch.arange(len(roots), device=roots.device), length).unbind(1):
        free = degree[at] > 0
        nth = torch.minimum((u * degree[at]).long(), degree[at] - 1)
        at = at.clone()
        at[free] = neighbors[(start[at] + nth)[free]]
        visited.append(at)
    return torch.cat(visited)


def _remembered(block: ClientBlock, what: Sampler | Literal["neighbors"]) -> object:
    """Return the urn of a sampler, or the neighbors of all rows (nnz,), ordered by their keys."""
    name = ("graphsaint", what)
    if name not in block.memo:
        block.memo[name] = _neighbors(block) if what == "neighbors" else _urn(block, what)
    return block.memo[name]


def _urn(block: ClientBlock, sampler: Sampler) -> Urn:
    if sampler != "edge":
        return fill(chances(block, sampler), block.row_key)
    adj = block.adj
    if not adj.nnz:
        raise DataError(
            f"expected edges to draw from at every client, got none at {block.ids[0]}: use "
            "--option sampler=node or walk"
        )
    ends = mix_words(block.row_key[adj.row]) ^ block.row_key[adj.indices.long()]
    return fill(chances(block, sampler), mix_words(ends))


def _neighbors(block: ClientBlock) -> Tensor:
    neighbor = block.adj.indices.long()
    order = block.row_key[neighbor].argsort()
    order = order[block.adj.row[order].argsort(stable=True)]
    return neighbor[order]
