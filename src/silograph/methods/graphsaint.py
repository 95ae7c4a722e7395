"""GraphSAINT: centralized training on drawn subgraphs. A reference, not a federation.

Zeng, Zhou, Srivastava, Kannan and Prasanna, "GraphSAINT: Graph sampling based inductive learning
method", ICLR 2020 (algorithm 1). Every step runs a whole GNN on a subgraph, drawn anew by nodes,
edges or random walks, whose sums and losses are divided so that what was likely to be drawn counts
less (`silograph.sampling.graphsaint`).

What we changed: convolutions scale by the degrees of the whole graph as they do elsewhere, GCN on
both sides (the paper: the mean over neighbors); a node's own message is not divided, since it is
there whenever the node is. Judged on the whole graph, as `centralized` is.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.evaluation.scoring import AllSilos
from silograph.exchange.passes import divisible, gradients
from silograph.federation.base import Federation
from silograph.methods.base import Method, MethodConfig, RoundReport, ServerState, Uncut
from silograph.methods.global_training import check_together, start_together, steps_together
from silograph.methods.needs import Needs
from silograph.nn.conv import Params
from silograph.sampling.graphsaint import Sampler, draw, presample

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
    """Draw subgraphs ahead where anything is read off them, and find how many make a pass."""
    state = start_together(fed, cfg, weights, key)
    steps = cfg.options.steps
    if cfg.options.normalize or steps is None:
        found = fed.call(presample, {}, what=Kind.STATISTICS, key=key)["steps"].t.max()
    return replace(state, memory={STEPS: found if steps is None else torch.tensor(steps)})


def fit_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Take the steps of `local_epochs` passes."""
    kept = dict(state.memory)
    steps = kept.pop(STEPS)
    trained = replace(state, memory=kept)
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
