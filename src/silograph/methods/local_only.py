"""Local only: every client trains its own model on its own graph; nothing is shared.

All clients start from the same initial weights. In a round each selected client takes
`local_epochs` passes over its training nodes and keeps weights and, by default, optimizer state.
"""

from collections.abc import Mapping

from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, State, below, state_of, under
from silograph.core.work import work_for
from silograph.evaluation.evaluate import TABLES, ranked, remembered
from silograph.evaluation.scoring import personal
from silograph.exchange.collect import local_graph
from silograph.exchange.passes import weight_specs
from silograph.federation.base import Federation
from silograph.federation.program import Call, Calls, Steps
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import Method, MethodConfig, Needs, NoOptions, RoundReport, ServerState
from silograph.methods.local_training import (
    begin,
    local_round,
    local_steps,
    prefix_fields,
    reply_fields,
    shared,
    stacked,
    state_specs,
    train_from,
)
from silograph.nn.conv import Params
from silograph.nn.fit import stacked_copies


def begin_own(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Set up the state and keep the initial weights as own. In: `weights/*`. Out: nothing."""
    new, reply = begin(cfg, block, state, inbox, key)
    initial_weights = stacked_copies(under("weights", inbox), block.num_clients)
    with work_for(Kind.EVALUATION):
        graph = local_graph(block, state)
        weights, tables = under("weights", inbox), below(TABLES, new)
        score_fields: State = remembered(
            cfg.backend.predict(cfg.model, weights, graph, tables), graph
        )
        score_fields = {**score_fields, **ranked(cfg, "own", weights, graph, tables)}
    return {**new, **stacked("weights", initial_weights), **score_fields}, reply


def train_own(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Continue training the own weights. In: nothing. Out: `nodes` (C,), `loss` (C,)."""
    del inbox
    fitted, new = train_from(cfg, block, state, under("weights", state), key)
    return {**new, **state_of(prefix_fields("weights", fitted.weights))}, reply_fields(
        fitted, block
    )


def init(fed: Federation, cfg: MethodConfig, weights: Params, key: Key) -> ServerState:
    """Send the initial weights once; the server keeps no model."""
    del cfg
    fed.call(begin_own, shared("weights", weights), what=Kind.WEIGHTS, key=key)
    return ServerState(weights=None, memory={})


def fit_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Let the selected clients continue training; they send only their loss."""
    _, report = local_round(fed, cfg, train_own, {}, Kind.CONTROL, t, key)
    return state, report


def setup_steps(cfg: MethodConfig, key: Key) -> Steps:
    """Return the call of `init`."""
    return Call(begin_own, Kind.WEIGHTS, key, weight_specs(cfg.model, Shared))


def round_steps(cfg: MethodConfig, t: int, key: Key) -> Steps:
    """Return the call of `fit_round`."""
    return local_steps(cfg, train_own, {}, {}, Kind.CONTROL, t, key)


def own_weights(cfg: MethodConfig, server: Params, state: Mapping[str, Tensor]) -> Params:
    """Return each client's own trained weights, (C, ...)."""
    del server
    return {name: state[f"weights/{name}"] for name in cfg.model.weight_shapes}


CALLS = Calls(
    setup=setup_steps,
    round=round_steps,
    state=lambda cfg: {**state_specs(cfg), **weight_specs(cfg.model, Stacked)},
    server_model=False,
)

LOCAL = Method(
    name="local",
    title="every client trains alone",
    reference="the baseline of every paper of the field",
    options=NoOptions,
    init=init,
    round=fit_round,
    evaluate=personal(),
    needs=Needs(keep_optimizer=True),
    calls=CALLS,
    own_weights=own_weights,
)
