"""Global training: in every step all silos together run one forward and one backward pass.

Gradients of the weights are summed, and the server takes one step, so that there is one model. What
methods do differently is which rows take part and how sums reach other silos; the rest is here.
"""

from collections.abc import Callable, Mapping
from itertools import product

import torch
from torch import Tensor

from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, State
from silograph.evaluation.evaluate import logits_specs, no_logits
from silograph.exchange.passes import divisible
from silograph.exchange.rows import agree_on_edges, agreement_steps
from silograph.federation.base import Federation
from silograph.federation.field_specs import FieldSpecs
from silograph.federation.program import Call, Calls, Steps
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import MethodConfig, RoundReport, ServerState
from silograph.nn.conv import Params
from silograph.nn.mini_batches import Fanout, Full

# Gradients by name at given weights, those that are 0 left out, and the loss if there is one.
GlobalStep = Callable[
    [Federation, MethodConfig, Mapping[str, Tensor], Key], tuple[Params, float | None]
]


def start_together(fed: Federation, cfg: MethodConfig, weights: Params, key: Key) -> ServerState:
    """Set up the clients, and let owners agree on the edges between them.

    Raises:
        DataError: owners disagree on an edge.
    """
    del cfg
    fed.call(start, {}, what=Kind.CONTROL, key=key)
    agree_on_edges(fed, key)
    return ServerState(weights=weights, memory={})


def check_together(cfg: MethodConfig) -> None:
    """Raise `ConfigError` for a model or a config without steps of all silos together."""
    divisible(cfg.model)
    if cfg.participation < 1 or not cfg.schedule.whole:
        is_wrong = {
            "participation": cfg.participation < 1,
            "batch_size": cfg.schedule.batch_size is not None,
            "fanout": isinstance(cfg.schedule.neighbors, Fanout),
            "neighbors": not isinstance(cfg.schedule.neighbors, Full | Fanout),
        }
        raise ConfigError(
            "expected participation=1 and neither batch_size nor fanout with global training, "
            "whose steps all silos take together: leave out "
            f"{', '.join(name for name, is_set in is_wrong.items() if is_set)}"
        )


def start(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Set up the state of every client. In: nothing. Out: nothing."""
    del inbox, key
    return {**state, **no_logits(cfg.model, block)}, {}


def steps_together(
    fed: Federation,
    cfg: MethodConfig,
    state: ServerState,
    t: int,
    key: Key,
    step: GlobalStep,
    *,
    batches: int = 1,
) -> tuple[ServerState, RoundReport]:
    """Take `local_epochs` times `batches` steps, all silos together; the loss is the last one's."""
    assert state.weights is not None  # set by init
    weights = {name: w[None].clone() for name, w in state.weights.items()}
    memory = {name: m.clone() for name, m in state.memory.items()}
    if not memory or not cfg.keep_optimizer:
        memory = cfg.optimizer.init(weights)
    loss: float | None = None
    for step_key in _step_keys(cfg, t, key, batches):
        shared = {name: w[0] for name, w in weights.items()}
        grads, step_loss = step(fed, cfg, shared, step_key)
        if step_loss is None:  # no training node took part: weight decay alone is no step
            continue
        loss = step_loss
        grads = {name: grads.get(name, torch.zeros_like(w)) for name, w in shared.items()}
        cfg.optimizer.step_(weights, {name: g[None] for name, g in grads.items()}, memory)
    new = ServerState({name: w[0] for name, w in weights.items()}, memory)
    return new, RoundReport(tuple(fed.ids), loss)


def _step_keys(cfg: MethodConfig, t: int, key: Key, batches: int = 1) -> list[Key]:
    """Return the key of every step of a round."""
    return [
        key.fold("train", t, "epoch", epoch, "batch", batch)
        for epoch, batch in product(range(cfg.schedule.epochs), range(batches))
    ]


def calls_of_global_training(
    step: Callable[[MethodConfig, Key], Steps],
    setup: Callable[[MethodConfig, Key], Steps] | None = None,
    state: Callable[[MethodConfig], FieldSpecs] | None = None,
) -> Calls:
    """Return the calls of a method that trains all silos together.

    Args:
        step: the calls of a step, from its key.
        setup: those of `init` after `start_together`, if there are more.
        state: what it keeps between rounds besides logits, if anything.
    """
    return Calls(
        setup=lambda cfg, key: (
            Call(start, Kind.CONTROL, key),
            agreement_steps(key),
            () if setup is None else setup(cfg, key),
        ),
        round=lambda cfg, t, key: tuple(
            step(cfg, step_key) for step_key in _step_keys(cfg, t, key)
        ),
        state=lambda cfg: {**logits_specs(cfg.model), **(state(cfg) if state else {})},
    )
