"""Label-guided global training: one model, trained on all silos' graphs as if they were one.

Zhang, Luo, Feng, Liu, Zhou and Zheng, "Tackling the local bias in federated graph learning", 2021
(algorithm 1). In every step all silos together run a forward and a backward pass through the model;
sums over neighbors reach other silos as partial sums (`silograph.federation.stages`). Gradients of
the weights are summed, and the server takes one step, so that there is one model.

Without sampling this is centralized training, to rounding. With `sample` every silo draws nodes by
label (`silograph.sampling.label_guided`), and the pass runs on those and the edges among them.

What we changed: the loss is divided by the number of training nodes that take part; with
`weigh_loss` each counts 1/p and the number is that of all, which makes the loss of drawn rows
unbiased. Judged with complete sums, too: a node of the test set hears all its neighbors.
"""

from dataclasses import field
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, State
from silograph.evaluation.judge import no_logits
from silograph.federation.agreement import agree_on_edges
from silograph.federation.base import Federation
from silograph.federation.stages import divisible, gradients
from silograph.graph.block import ClientBlock
from silograph.methods.base import Method, MethodConfig, RoundReport, ServerState
from silograph.nn.conv import Params
from silograph.sampling.label_guided import draw_rows, set_up


@dataclass(frozen=True, config=STRICT)
class LabelGuidedOptions:
    """What is drawn and how it is weighed; the help texts are the documentation of the fields."""

    sample: Annotated[int, Field(ge=1)] | None = field(
        default=None,
        metadata={"help": "nodes drawn in a step, all silos together; none: all nodes"},
    )
    normalize: Literal["paper", "conditional", "none"] = field(
        default="paper",
        metadata={"help": "divide messages by p(u) (paper), by p(u | v) (conditional), or not"},
    )
    rows: Literal["drawn", "all"] = field(
        default="drawn",
        metadata={"help": "rows that are evaluated in a step; only drawn ones send messages"},
    )
    weigh_loss: bool = field(
        default=False, metadata={"help": "weigh a drawn node's loss by 1/p: unbiased, less steady"}
    )


def init(fed: Federation, cfg: MethodConfig, weights: Params, key: Key) -> ServerState:
    """Set up the clients, and what they draw by."""
    model = divisible(cfg.model)
    if cfg.participation < 1 or cfg.schedule.drawn(model.layers) is not None:
        raise ConfigError(
            "expected participation=1 and neither batch_size nor fanout with global training, "
            "whose steps all silos take together: use --option sample=NODES"
        )
    fed.call(start, {}, what=Kind.CONTROL, key=key)
    agree_on_edges(fed, key)
    options = cfg.options
    if options.sample is not None:
        set_up(fed, options.sample, options.normalize, key)
    return ServerState(weights=weights, memory={})


def start(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Set up the state of every client. In: nothing. Out: nothing."""
    del state, inbox, key
    return dict(no_logits(cfg.model, block)), {}


def fit_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Take `local_epochs` steps, all silos together."""
    assert state.weights is not None  # set by init
    weights = {name: w[None].clone() for name, w in state.weights.items()}
    memory = {name: m.clone() for name, m in state.memory.items()}
    if not memory or not cfg.keep_optimizer:
        memory = cfg.optimizer.init(weights)
    loss: float | None = None
    for epoch in range(cfg.schedule.epochs):
        step = key.fold("train", t, "epoch", epoch, "batch", 0)
        if cfg.options.sample is not None:
            draw_rows(fed, cfg.options, step)
        shared = {name: w[0] for name, w in weights.items()}
        grads, found = gradients(
            fed, divisible(cfg.model), shared, step, weighed=cfg.options.weigh_loss
        )
        if found is None:  # nobody drew a training node: weight decay alone is no step
            continue
        loss = found
        grads = {name: grads.get(name, torch.zeros_like(w)) for name, w in shared.items()}
        cfg.optimizer.step_(weights, {name: g[None] for name, g in grads.items()}, memory)
    new = ServerState({name: w[0] for name, w in weights.items()}, memory)
    return new, RoundReport(tuple(fed.ids), loss)


LABEL_GUIDED = Method(
    name="label_guided",
    title="one model on the joined graph, on nodes drawn by label",
    reference="Zhang et al., Tackling the local bias in federated graph learning, 2021",
    options=LabelGuidedOptions,
    optimizer="adam",
    keep_optimizer=True,
    judge="server",
    uncut=False,
    init=init,
    round=fit_round,
    exchange=True,
)
