"""GraphSAINT: centralized training on drawn subgraphs. A reference, not a federation.

Zeng, Zhou, Srivastava, Kannan and Prasanna, "GraphSAINT: Graph sampling based inductive learning
method", ICLR 2020, algorithms 1 and 2 and section 3.2. Every step runs a whole GNN on a subgraph,
drawn anew. Draws are with replacement, and a subgraph has all edges among the nodes that were hit:

    node   `budget` nodes, P(u) ~ |A~[:, u]|^2, A~ = D^-1 (A + I)
    edge   both ends of `budget` edges, p_e ~ 1 / deg(u) + 1 / deg(v)
    walk   what `budget` walks of `walk_length` steps visit, from uniform roots

A message u -> v is divided by alpha = p(u, v) / p(v), the loss of v by lambda = p(v). Both are
estimated: before training, subgraphs are drawn until they hold every node `sample_coverage` times
on the mean, and C_v, C_{u,v} of those N hold v, and both ends of the edge.

What we changed: convolutions scale by the degrees of the whole graph as they do elsewhere, GCN on
both sides (the paper: the mean over neighbors); a node's own message is not divided, since it is
there whenever the node is. Judged on the whole graph, as `centralized` is.

With the subgraph at hand counted as well, alpha = (C_{u,v} + 1) / (C_v + 1) and lambda = (C_v + 1)
/ (N + 1). The paper's C_{u,v} / C_v and C_v / N can be 0 for what is drawn in training, and the
authors' code then puts in .1. Ours cannot, and is all but unbiased: for a given N

    E[1 / lambda] = (1 - (1 - p(v))^(N + 1)) / p(v)
    E[1 / alpha]  = 1 + (p(v) / p(u, v) - 1) (1 - (1 - p(u, v))^N).

A~ has self loops, so that nodes without edges are drawn, too; the edge sampler never draws those.
Subgraphs are of all nodes: those that are not for training send messages and have no loss. Clients
draw from their own graphs; edges to other clients take no part.

C: clients. n: rows. r: drawn rows. nnz: entries of the adjacency.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as options_class
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.errors import DataError
from silograph.core.key import Key, mix_words
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, Stacked
from silograph.evaluation.scoring import AllSilos
from silograph.exchange.pass_state import PassState
from silograph.exchange.passes import divisible, gradients
from silograph.federation.base import per_client
from silograph.federation.field_specs import COUNT
from silograph.federation.messages import Empty
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import Method, MethodConfig, Needs, RoundReport, ServerState, Uncut
from silograph.methods.global_training import (
    START_TOGETHER,
    calls_of_steps,
    check_together,
    start_together,
    steps_together,
    without_optimizer,
)
from silograph.methods.ops import Clients, Server, calls, op, program, when
from silograph.nn.conv import Params
from silograph.nn.mini_batches import WeightedSampler, build_sampler
from silograph.nn.reach import entries_among

Sampler = Literal["node", "edge", "walk"]
STEPS = "saint/steps"  # of a pass, in the server's memory


@options_class(frozen=True, config=STRICT)
class GraphSAINTOptions:
    """What is drawn and how it is weighed; the help texts are the documentation of the fields."""

    sampler: Sampler = field(
        default="walk", metadata={"help": "what subgraphs are drawn by: node, edge or walk"}
    )
    budget: Annotated[int, Field(ge=1)] = field(
        default=1000,
        metadata={"help": "nodes, edges or roots of walks drawn for a subgraph, with replacement"},
    )
    walk_length: Annotated[int, Field(ge=1)] = field(
        default=2, metadata={"help": "walk: steps from a root"}
    )
    steps: Annotated[int, Field(ge=1)] | None = field(
        default=None,
        metadata={"help": "steps in a pass; none: until subgraphs have as many nodes as the graph"},
    )
    sample_coverage: Annotated[int, Field(ge=1)] = field(
        default=50,
        metadata={"help": "times that subgraphs drawn ahead hold a node, on the mean"},
    )
    normalize: bool = field(
        default=True,
        metadata={"help": "divide messages and losses by how likely they are drawn"},
    )


def counts_ahead(cfg: MethodConfig[GraphSAINTOptions]) -> bool:
    """Return whether subgraphs are drawn ahead: for their weights, or for the number of steps."""
    return cfg.options.normalize or cfg.options.steps is None


# --- Before training: how often subgraphs hold each node and edge --------------------------------


@dataclass(frozen=True)
class ClientState:
    """Counts over the subgraphs drawn ahead, of runs that draw any.

    They never leave this process, so nothing says what silos would check of them.

    Attributes:
        nodes: (n,) int32 C_v.
        edges: (nnz,) int32 C_{u,v} by entry of the adjacency.
        subgraphs: (C,) int64 N.
    """

    PREFIX: ClassVar[str] = "saint/"
    nodes: Ragged | None
    edges: Ragged | None
    subgraphs: Stacked | None


@dataclass(frozen=True)
class PassSteps:
    """How many subgraphs have as many nodes as the graph, (C,)."""

    steps: Annotated[Stacked, COUNT]


@per_client
@op(Kind.STATISTICS)
def presample(
    clients: Clients[GraphSAINTOptions], _state: Empty, _: Empty
) -> tuple[ClientState, PassSteps]:
    """Draw subgraphs ahead and count their nodes and edges."""
    block, options = clients.block, clients.options
    n, off = len(block.row_key), block.off
    nodes = torch.zeros(n, dtype=torch.int32, device=off.device)
    edges = torch.zeros(block.adj.nnz, dtype=torch.int32, device=off.device)
    number = total_nodes = 0
    while total_nodes < options.sample_coverage * n:
        rows = draw_subgraph(block, options, clients.key.fold("presample", number))
        nodes[rows] += 1
        edges[entries_among(block.adj, rows)] += 1
        number, total_nodes = number + 1, total_nodes + len(rows)
    counts = ClientState(
        nodes=Ragged(nodes, off),
        edges=Ragged(edges, torch.tensor([0, len(edges)], device=off.device)),
        subgraphs=Stacked(torch.tensor([number], device=off.device)),
    )
    steps = max(1, round(n * number / total_nodes))
    return counts, PassSteps(Stacked(torch.tensor([steps], device=off.device)))


@calls(*START_TOGETHER, when(counts_ahead, presample))
def setup(server: Server, weights: Params) -> ServerState:
    """Draw subgraphs ahead if weights need them, and set the number of steps of a pass."""
    state, steps = start_together(server, weights), server.options.steps
    if counts_ahead(server.cfg):
        steps_of_pass = server.call(presample, Empty())["steps"].t.max()
    return replace(state, memory={STEPS: steps_of_pass if steps is None else torch.tensor(steps)})


# --- Before each step: a subgraph, and by what its sums and losses are divided -------------------


@dataclass(frozen=True)
class StepState(PassState, ClientState):
    """State of a client that has drawn the subgraph of a step."""


@per_client
@op(Kind.CONTROL)
def draw(
    clients: Clients[GraphSAINTOptions], state: ClientState, _: Empty
) -> tuple[StepState, Empty]:
    """Draw the subgraph of a step, and work out its weights."""
    block = clients.block
    rows = draw_subgraph(block, clients.options, clients.key)
    if not clients.options.normalize:
        return StepState(**vars(state), **vars(subgraph_rows(block, rows))), Empty()
    nodes, edges, number = (part.t for part in vars(state).values() if part is not None)
    entries = entries_among(block.adj, rows)
    single, joint = ((count + 1) / (number.double() + 1) for count in (nodes, edges[entries]))
    drawn = weighted_subgraph(block, rows, entries, single, joint)
    return StepState(**vars(state), **vars(drawn)), Empty()


def subgraph_rows(block: ClientBlock, rows: Tensor) -> PassState:
    """Return the rows of a step: rows (r,) of one client, ascending."""
    is_fetched = torch.zeros(int(block.halo.off[-1]), dtype=torch.bool, device=rows.device)
    off = torch.tensor([0, len(rows)], device=rows.device)
    return PassState(rows=Ragged(rows, off), heard=Ragged(is_fetched, block.halo.off))


def weighted_subgraph(
    block: ClientBlock, rows: Tensor, entries: Tensor, single: Tensor, joint: Tensor
) -> PassState:
    """Return the rows of a step and their weights.

    Args:
        block: one client.
        rows: (r,) int64, ascending.
        entries: (e,) int64 of the adjacency, those among the rows.
        single: (n,) float64 probability that a subgraph holds a row.
        joint: (e,) float64 that it holds both ends of an entry.
    """
    drawn = subgraph_rows(block, rows)
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    assert drawn.rows is not None  # see `subgraph_rows`
    dtype = block.adj.values.dtype
    inner, off = single[block.adj.row[entries]] / joint, torch.tensor([0, len(entries)])
    loss = Ragged((1 / single[rows]).to(dtype), drawn.rows.off)
    return replace(drawn, inner=Ragged(inner.to(dtype), off.to(rows.device)), loss=loss)


def draw_subgraph(block: ClientBlock, options: GraphSAINTOptions, key: Key) -> Tensor:
    """Return the rows of a drawn subgraph of one client, (r,) int64 ascending.

    They do not depend on the order of the rows.

    Raises:
        DataError: edges are to be drawn, and there are none.
    """
    key = key.fold("subgraph", block.ids[0])
    adj, sampler = block.adj, _cached(block, options.sampler)
    assert isinstance(sampler, WeightedSampler)
    hits = sampler.draw(options.budget, key)
    if options.sampler == "edge":
        hits = torch.cat([adj.row[hits], adj.indices[hits].long()])
    if options.sampler == "walk":
        hits = walk(block, hits, options.walk_length, key.fold("walk"))
    rows: Tensor = torch.unique(hits)
    return rows


def draw_probabilities(block: ClientBlock, sampler: Sampler) -> Tensor:
    """Return the probability of each row, or entry of the adjacency, in a draw, up to a factor.

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


def walk(block: ClientBlock, roots: Tensor, length: int, key: Key) -> Tensor:
    """Return the rows that walks of `length` steps from some roots visit, in any order.

    A step goes to a neighbor, drawn uniformly; the walk stays where there is none.
    """
    neighbors = _cached(block, "neighbors")
    assert isinstance(neighbors, Tensor)
    start, degree = block.adj.indptr.long(), block.adj.degree
    position, visited = roots, [roots]
    for u in key.uniform(torch.arange(len(roots), device=roots.device), length).unbind(1):
        has_neighbor = degree[position] > 0
        neighbor_number = torch.minimum((u * degree[position]).long(), degree[position] - 1)
        position = position.clone()
        position[has_neighbor] = neighbors[(start[position] + neighbor_number)[has_neighbor]]
        visited.append(position)
    return torch.cat(visited)


def _cached(block: ClientBlock, what: Sampler | Literal["neighbors"]) -> object:
    """Return what a sampler draws by, or all rows' neighbors (nnz,), ordered by their keys."""
    name = ("graphsaint", what)
    if name not in block.memo:
        block.memo[name] = (
            _sorted_neighbors(block) if what == "neighbors" else _build_sampler(block, what)
        )
    return block.memo[name]


def _build_sampler(block: ClientBlock, sampler: Sampler) -> WeightedSampler:
    if sampler != "edge":
        return build_sampler(draw_probabilities(block, sampler), block.row_key)
    adj = block.adj
    if not adj.nnz:
        raise DataError(
            f"expected edges to draw from at every client, got none at {block.ids[0]}: use "
            "--option sampler=node or walk"
        )
    ends = mix_words(block.row_key[adj.row]) ^ block.row_key[adj.indices.long()]
    return build_sampler(draw_probabilities(block, sampler), mix_words(ends))


def _sorted_neighbors(block: ClientBlock) -> Tensor:
    neighbor = block.adj.indices.long()
    order = block.row_key[neighbor].argsort()
    order = order[block.adj.row[order].argsort(stable=True)]
    return neighbor[order]


# --- Server (algorithm 1) ------------------------------------------------------------------------


# In simulation only, where nobody needs to know beforehand how many steps a pass has.
@calls(calls_of_steps(draw))
def train_round(server: Server, state: ServerState) -> tuple[ServerState, RoundReport]:
    """Take the steps of `local_epochs` passes."""
    memory = dict(state.memory)
    steps = memory.pop(STEPS)
    new, report = steps_together(server, replace(state, memory=memory), step, batches=int(steps))
    return replace(new, memory={**new.memory, STEPS: steps}), report


def step(server: Server, weights: Mapping[str, Tensor]) -> tuple[Params, float | None]:
    """Draw a subgraph, and return the gradients of its loss."""
    server.call(draw, Empty())
    model, weighed = divisible(server.cfg.model), server.options.normalize
    return gradients(server.fed, model, weights, server.call_key, weighed=weighed)


GRAPHSAINT = Method(
    name="graphsaint",
    title="one model on subgraphs drawn from the uncut graph (no silos)",
    reference="Zeng et al., GraphSAINT: Graph sampling based inductive learning method, ICLR 2020",
    options=GraphSAINTOptions,
    **program(train_round, setup=setup, trained=without_optimizer),
    check=check_together,
    setting=Uncut(),
    evaluate=AllSilos(),
    needs=Needs(keep_optimizer=True),
    ratings=False,
)
