"""Global training: in every step all silos together run one forward and one backward pass.

Gradients of the weights are summed, and the server takes one step, so that there is one model. What
methods do differently is which rows take part and how sums reach other silos; the rest is here.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from silograph.core.errors import ConfigError, mistake
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.exchange.passes import BY_SUMS, Crossing, PassForm, divisible, pass_calls
from silograph.exchange.rows import AGREEMENT, agree_on_edges
from silograph.federation.messages import Empty
from silograph.federation.ops import CallContext, Group, Part, for_each
from silograph.methods.base import MethodConfig, RoundReport, ServerState
from silograph.methods.ops import Clients, Server, calls, op
from silograph.nn.conv import Params
from silograph.nn.mini_batches import Fanout, Full

# Gradients by name at given weights, those that are 0 left out, and the loss if there is one.
GlobalStep = Callable[[Server, Mapping[str, Tensor]], tuple[Params, float | None]]


def without_optimizer(cfg: MethodConfig) -> MethodConfig:
    """Return the config of the clients, which keep no optimizer: the server takes the steps."""
    return replace(cfg, keep_optimizer=False)


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
            f"{', '.join(name for name, is_set in is_wrong.items() if is_set)}",
            **mistake(
                "conflicting-options",
                ["method", *(name for name, is_set in is_wrong.items() if is_set)],
            ),
        )


# --- Set-up --------------------------------------------------------------------------------------


@op(Kind.CONTROL)
def start(clients: Clients, state: Empty, _: Empty) -> tuple[Empty, Empty]:
    """Set up the state of every client."""
    clients.begin(without_optimizer(clients.cfg))
    return state, Empty()


START_TOGETHER = start, *AGREEMENT


@calls(*START_TOGETHER)
def start_together(server: Server, weights: Params) -> ServerState:
    """Set up the clients, and let owners agree on the edges between them.

    Raises:
        DataError: owners disagree on an edge.
    """
    server.call(start, Empty())
    agree_on_edges(server.fed, server.key, summed=server.cfg.count_rules.summed)
    return ServerState(weights, {})


# --- Round ---------------------------------------------------------------------------------------


def step_keys(cfg: MethodConfig, key: Key, batches: int = 1) -> list[Key]:
    """Return the key of every step of a round, from that of the round's calls."""
    steps = product(range(cfg.schedule.epochs), range(batches))
    return [key.fold("epoch", epoch, "batch", batch) for epoch, batch in steps]


def calls_of_steps(
    *own: Part,
    crossing: Crossing = BY_SUMS,
    is_named: Callable[[MethodConfig], bool] = lambda _: False,
) -> Group:
    """Return the calls of all steps of a round, for its order of calls.

    Args:
        own: calls of the method in each step, before the pass.
        crossing: how sums reach other silos.
        is_named: whether clients name the slots of partial sums, as not all rows take part.
    """

    def each_step(context: CallContext) -> list[CallContext]:
        return [replace(context, key=key) for key in step_keys(context.cfg, context.key)]

    def in_pass(context: CallContext) -> list[CallContext]:
        cfg = context.cfg
        form = PassForm(divisible(cfg.model), True, is_named(cfg), cfg.row_minimum)
        return [replace(context, cfg=form)]

    return for_each(each_step, *own, for_each(in_pass, *pass_calls(crossing)))


def steps_together(
    server: Server, state: ServerState, step: GlobalStep, *, batches: int = 1
) -> tuple[ServerState, RoundReport]:
    """Take `local_epochs` times `batches` steps, all silos together; the loss is the last one's."""
    assert state.weights is not None  # set by the set-up
    cfg = server.cfg
    weights = {name: w[None].clone() for name, w in state.weights.items()}
    memory = {name: m.clone() for name, m in state.memory.items()}
    if not memory or not cfg.keep_optimizer:
        memory = cfg.optimizer.init(weights)
    loss: float | None = None
    for key in step_keys(cfg, server.call_key, batches):
        shared = {name: w[0] for name, w in weights.items()}
        grads, step_loss = step(replace(server, key_of_calls=key), shared)
        if step_loss is None:  # no training node took part: weight decay alone is no step
            continue
        loss = step_loss
        grads = {n: grads[n] if n in grads else torch.zeros_like(w) for n, w in shared.items()}
        cfg.optimizer.step_(weights, {name: g[None] for name, g in grads.items()}, memory)
    new = ServerState({name: w[0] for name, w in weights.items()}, memory)
    return new, RoundReport(tuple(server.fed.ids), loss)
