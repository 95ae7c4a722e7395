"""GraphSAINT: centralized training on drawn subgraphs. A reference, not a federation.

Zeng, Zhou, Srivastava, Kannan and Prasanna, "GraphSAINT: Graph sampling based inductive learning
method", ICLR 2020 (algorithm 1). Every step runs a whole GNN on a subgraph, drawn anew by nodes,
edges or random walks, whose sums and losses are divided so that what was likely to be drawn counts
less (`silograph.methods.graphsaint`).

What we changed: convolutions scale by the degrees of the whole graph as they do elsewhere, GCN on
both sides (the paper: the mean over neighbors); a node's own message is not divided, since it is
there whenever the node is. Judged on the whole graph, as `centralized` is.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.errors import DataError
from silograph.core.key import Key, mix_words
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Stacked, State
from silograph.evaluation.scoring import AllSilos
from silograph.exchange.passes import divisible, gradients
from silograph.federation.base import Federation, per_client
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import Method, MethodConfig, Needs, RoundReport, ServerState, Uncut
from silograph.methods.global_training import check_together, start_together, steps_together
from silograph.nn.conv import Params
from silograph.nn.reach import entries_among
from silograph.sampling.label_guided import WeightedSampler, build_sampler

# --- graphsaint ----------------------------------------------------------------------------------
# GraphSAINT's subgraphs: how they are drawn, and by what their sums and losses are divided.
#
# Zeng, Zhou, Srivastava, Kannan and Prasanna, "GraphSAINT: Graph sampling based inductive
# learning method", ICLR 2020, algorithm 2 and section 3.2. Draws are with replacement, and a
# subgraph has all edges among the nodes that were hit:
#
#     node   `budget` nodes, P(u) ~ |A~[:, u]|^2, A~ = D^-1 (A + I)
#     edge   both ends of `budget` edges, p_e ~ 1 / deg(u) + 1 / deg(v)
#     walk   what `budget` walks of `walk_length` steps visit, from uniform roots
#
# A message u -> v is divided by alpha = p(u, v) / p(v), the loss of v by lambda = p(v). Both are
# estimated: before training, subgraphs are drawn until they hold every node `sample_coverage`
# times on the mean, and C_v, C_{u,v} of those N hold v, and both ends of the edge.
#
# What we changed: with the subgraph at hand counted as well, alpha = (C_{u,v} + 1) / (C_v + 1)
# and lambda = (C_v + 1) / (N + 1). The paper's C_{u,v} / C_v and C_v / N can be 0 for what is
# drawn in training, and the authors' code then puts in .1. Ours cannot, and is all but unbiased:
# for a given N
#
#     E[1 / lambda] = (1 - (1 - p(v))^(N + 1)) / p(v)
#     E[1 / alpha]  = 1 + (p(v) / p(u, v) - 1) (1 - (1 - p(u, v))^N).
#
# A~ has self loops, so that nodes without edges are drawn, too; the edge sampler never draws
# those. Subgraphs are of all nodes: those that are not for training send messages and have no
# loss.
#
# State: `saint/nodes` (n,) int32 C_v, `saint/edges` (nnz,) int32 C_{u,v} by entry of the
# adjacency, `saint/subgraphs` (C,) int64 N, and for a step what `silograph.exchange.passes`
# reads. Clients draw from their own graphs; edges to other clients take no part.
#
# C: clients. n: rows. r: drawn rows. nnz: entries of the adjacency.


Sampler = Literal["node", "edge", "walk"]


class Sampling(Protocol):
    """How subgraphs are drawn: options of a method."""

    @property
    def sampler(self) -> Sampler:
        """Name of the sampler: `node`, `edge` or `walk`."""

    @property
    def budget(self) -> int:
        """Number of nodes, edges or roots."""

    @property
    def walk_length(self) -> int:
        """Steps of a walk."""

    @property
    def sample_coverage(self) -> int:
        """Mean number of the subgraphs drawn ahead that contain a node."""

    @property
    def normalize(self) -> bool:
        """Whether messages and losses are divided."""


@per_client
def presample(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Draw subgraphs ahead and count their nodes and edges.

    In: nothing. Out: `steps` (C,), how many subgraphs have as many nodes as the graph.
    """
    del inbox
    options: Sampling = cfg.options
    n, off = len(block.row_key), block.off
    nodes = torch.zeros(n, dtype=torch.int32, device=off.device)
    edges = torch.zeros(block.adj.nnz, dtype=torch.int32, device=off.device)
    number = total_nodes = 0
    while total_nodes < options.sample_coverage * n:
        rows = draw_subgraph(block, options, key.fold("presample", number))
        nodes[rows] += 1
        edges[entries_among(block.adj, rows)] += 1
        number, total_nodes = number + 1, total_nodes + len(rows)
    counts: dict[str, Ragged | Stacked] = {
        "saint/nodes": Ragged(nodes, off),
        "saint/edges": Ragged(edges, torch.tensor([0, len(edges)], device=off.device)),
        "saint/subgraphs": Stacked(torch.tensor([number], device=off.device)),
    }
    steps = max(1, round(n * number / total_nodes))
    return {**state, **counts}, {"steps": Stacked(torch.tensor([steps], device=off.device))}


@per_client
def draw(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Draw the subgraph of a step, and work out its weights. In: nothing. Out: nothing."""
    del inbox
    rows = draw_subgraph(block, cfg.options, key)
    if not cfg.options.normalize:
        return {**state, **step_row_fields(block, rows)}, {}
    entries = entries_among(block.adj, rows)
    nodes, edges, number = (state[f"saint/{f}"].t for f in ("nodes", "edges", "subgraphs"))
    single, joint = ((count + 1) / (number.double() + 1) for count in (nodes, edges[entries]))
    return {**state, **weighted_step_fields(block, rows, entries, single, joint)}, {}


def step_row_fields(block: ClientBlock, rows: Tensor) -> dict[str, Ragged]:
    """Return the fields with the rows of a step: rows (r,) of one client, ascending."""
    is_fetched = torch.zeros(int(block.halo.off[-1]), dtype=torch.bool, device=rows.device)
    off = torch.tensor([0, len(rows)], device=rows.device)
    return {"pass/rows": Ragged(rows, off), "pass/heard": Ragged(is_fetched, block.halo.off)}


def weighted_step_fields(
    block: ClientBlock, rows: Tensor, entries: Tensor, single: Tensor, joint: Tensor
) -> dict[str, Ragged]:
    """Return the fields with the rows of a step and their weights (see `stages`).

    Args:
        block: one client.
        rows: (r,) int64, ascending.
        entries: (e,) int64 of the adjacency, those among the rows.
        single: (n,) float64 probability that a subgraph holds a row.
        joint: (e,) float64 that it holds both ends of an entry.
    """
    fields = step_row_fields(block, rows)
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    dtype = block.adj.values.dtype
    inner, off = single[block.adj.row[entries]] / joint, torch.tensor([0, len(entries)])
    fields["pass/inner"] = Ragged(inner.to(dtype), off.to(rows.device))
    fields["pass/loss"] = Ragged((1 / single[rows]).to(dtype), fields["pass/rows"].off)
    return fields


def draw_subgraph(block: ClientBlock, options: Sampling, key: Key) -> Tensor:
    """Return the rows of a drawn subgraph of one client, (r,) int64 ascending.

    They do not depend on the order of the rows.

    Raises:
        DataError: edges are to be drawn, and there are none.
    """
    key = key.fold("subgraph", block.ids[0])
    adj, urn = block.adj, _cached(block, options.sampler)
    assert isinstance(urn, WeightedSampler)
    hits = urn.draw(options.budget, key)
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
    """Return the urn of a sampler, or the neighbors of all rows (nnz,), ordered by their keys."""
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


STEPS = "saint/steps"


@dataclass(frozen=True, config=STRICT)
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


def init(fed: Federation, cfg: MethodConfig, weights: Params, key: Key) -> ServerState:
    """Draw subgraphs ahead if weights need them, and set the number of steps of a pass."""
    state = start_together(fed, cfg, weights, key)
    steps = cfg.options.steps
    if cfg.options.normalize or steps is None:
        steps_of_pass = fed.call(presample, {}, what=Kind.STATISTICS, key=key)["steps"].t.max()
    return replace(state, memory={STEPS: steps_of_pass if steps is None else torch.tensor(steps)})


def fit_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Take the steps of `local_epochs` passes."""
    memory = dict(state.memory)
    steps = memory.pop(STEPS)
    trained = replace(state, memory=memory)
    new, report = steps_together(fed, cfg, trained, t, key, step, batches=int(steps))
    return replace(new, memory={**new.memory, STEPS: steps}), report


def step(
    fed: Federation, cfg: MethodConfig, weights: Mapping[str, Tensor], key: Key
) -> tuple[Params, float | None]:
    """Draw a subgraph, and return the gradients of its loss."""
    fed.call(draw, {}, what=Kind.CONTROL, key=key)
    return gradients(fed, divisible(cfg.model), weights, key, weighed=cfg.options.normalize)


GRAPHSAINT = Method(
    name="graphsaint",
    title="one model on subgraphs drawn from the uncut graph (no silos)",
    reference="Zeng et al., GraphSAINT: Graph sampling based inductive learning method, ICLR 2020",
    options=GraphSAINTOptions,
    init=init,
    round=fit_round,
    check=check_together,
    setting=Uncut(),
    evaluate=AllSilos(),
    needs=Needs(keep_optimizer=True),
    ratings=False,
)
