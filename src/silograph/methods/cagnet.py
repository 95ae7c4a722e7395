"""CAGNET: every silo sends all its rows to all others, in every layer, forward and backward.

Tripathy, Yelick and Buluç, "Reducing communication in graph neural network training", SC 2020,
sections IV-A and IV-B: the dense matrix of a layer is broadcast block by block, and each process
multiplies its rows of the adjacency matrix with what it hears. This is centralized training.

The paper's 1.5D form keeps every block of rows on c processes, which lets them share the broadcasts
out and costs a sum over the c. Among silos a copy would hand edges and features to another silo; if
the copies are a silo's own machines instead, what crosses between silos is that of the 1D form
whatever c is, and that is what runs here.

Single rows of all nodes cross, boundary or not: a baseline for systems with one owner.

What we changed: rows cross after the linear map and scaled by their owner; all silos get the same
message, their own rows included, 1 / C more bytes than need be; judged through sums.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State, offsets
from silograph.evaluation.scoring import AllSilos
from silograph.exchange.passes import (
    Crossing,
    back_to_sum,
    divisible,
    finish,
    finish_back,
    gradient_steps,
    gradients,
    inputs_of,
    stage_of,
)
from silograph.exchange.pull import pull, pull_steps, rows_of_width
from silograph.exchange.rows import broadcast, broadcast_steps
from silograph.federation.base import Federation
from silograph.federation.field_specs import COUNT, SLOTS, FieldSpec, FieldSpecs
from silograph.federation.program import Call, Steps
from silograph.graph.block.block import ClientBlock
from silograph.graph.csr import CSR
from silograph.methods.base import Method, MethodConfig, Needs, NoOptions, RoundReport, ServerState
from silograph.methods.global_training import (
    calls_of_global_training,
    check_together,
    start_together,
    steps_together,
)
from silograph.nn.conv import Params
from silograph.nn.fit import check_like
from silograph.nn.model import before, scales_of
from silograph.nn.reach import Reach, gathered, messages_back, messages_out


def init(fed: Federation, cfg: MethodConfig, weights: Params, key: Key) -> ServerState:
    """Set up the clients, and send each the positions of its halo in a broadcast."""
    state = start_together(fed, cfg, weights, key)
    counts = fed.call(tell_size, {}, what=Kind.STATISTICS, key=key)["nodes"].t
    first = {"first": Stacked(offsets(counts)[:-1])}
    fed.call(learn_place, first, what=Kind.CONTROL, key=key)
    pull(fed, None, tell_place, hear_place, what=Kind.HALO_KEYS, key=key)
    return state


def fit_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Take `local_epochs` steps, all silos together."""
    return steps_together(fed, cfg, state, t, key, step)


def step(
    fed: Federation, cfg: MethodConfig, weights: Mapping[str, Tensor], key: Key
) -> tuple[Params, float | None]:
    """Return the gradients of the loss."""
    return gradients(fed, divisible(cfg.model), weights, key, crossing=BY_BROADCASTS)


def show(fed: Federation, request: Mapping[str, Shared], key: Key) -> None:
    """Broadcast all rows of a stage."""
    broadcast(fed, send, hear, what=Kind.EMBEDDINGS, key=key, inbox=request)


def show_back(fed: Federation, request: Mapping[str, Shared], key: Key) -> None:
    """Broadcast the gradients of all sums of a stage."""
    broadcast(fed, send_back, hear_back, what=Kind.COTANGENTS, key=key, inbox=request)


def tell_size(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Count nodes. In: nothing. Out: `nodes` (C,)."""
    del cfg, inbox, key
    return state, {"nodes": Stacked(block.off.diff())}


def learn_place(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Store where the own rows begin in a broadcast. In: `first` (C,). Out: nothing."""
    del cfg, block, key
    return {**state, "cagnet/first": Stacked(inbox["first"].t)}, {}


def tell_place(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send the positions of boundary rows in a broadcast. In: nothing. Out: `rows` (B, 1) int64."""
    del cfg, inbox, key
    boundary, client = block.halo.boundary, block.client[block.halo.boundary]
    position = boundary - block.off[client] + state["cagnet/first"].t[client]
    return state, {"rows": Ragged(position[:, None], block.halo.boundary_off)}


def hear_place(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Store the positions of the halo in a broadcast. In: `rows` (S, 1) int64. Out: nothing."""
    del cfg, key
    new = dict(state)
    del new["cagnet/first"]
    return {**new, "cagnet/place": Ragged(inbox["rows"].t[:, 0], block.halo.off)}, {}


def send(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Compute all rows. In: `stage`. Out: `rows` (n, O)."""
    stage_inputs, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    z = before(params, stage_inputs)
    rows = messages_out(scales_of(stage_inputs.stage.conv), z, stage_inputs.reach)
    new = {**state, f"pass/z/{stage_inputs.number}": Ragged(z, stage_inputs.reach.off)}
    return new, {"rows": Ragged(rows, block.off)}


def hear(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the halo's rows and finish the stage. In: `stage`, `all` (N, O). Out: nothing."""
    stage_inputs, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    rows = check_like(inbox["all"].t, state[f"pass/z/{stage_inputs.number}"].t)
    halo_sum = gathered(
        stage_inputs.reach, _incoming(block, state, stage_inputs.reach, len(rows)), rows
    )
    return finish(cfg, block, state, key, stage_inputs, params, halo_sum), {}


def send_back(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Compute gradients back to the sum. In: `stage`. Out: `rows` (n, O)."""
    stage_inputs, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    new, s = back_to_sum(block, state, stage_inputs, params)
    return new, {
        "rows": Ragged(
            messages_back(scales_of(stage_inputs.stage.conv), s, stage_inputs.reach), block.off
        )
    }


def hear_back(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the halo's gradients and go on back from the sum. In: `stage`, `all` (N, O).

    Out: nothing.
    """
    stage_inputs, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    rows = check_like(inbox["all"].t, state["pass/sum"].t)
    halo_sum = gathered(
        stage_inputs.reach, _incoming(block, state, stage_inputs.reach, len(rows)), rows
    )
    return finish_back(cfg, block, state, key, stage_inputs, params, halo_sum), {}


def _incoming(block: ClientBlock, state: State, reach: Reach, total: int) -> CSR:
    """Return the edges from other silos by place in a broadcast, (n, N): no row is copied.

    Raises:
        ProtocolError: a halo slot whose place is none of the broadcast's.
    """
    position, cached = state["cagnet/place"].t, block.memo.get("cagnet")
    if isinstance(cached, tuple) and cached[0] is position and cached[1].num_cols == total:
        incoming_edges: CSR = cached[1]
        return incoming_edges
    slots = reach.outer.transposed
    # Products read the rows at these places unseen, and a transpose has a row for each place.
    is_valid = position.shape == block.halo.key.shape and bool(
        ((position >= 0) & (position < total)).all()
    )
    if not is_valid or position.is_floating_point():
        raise ProtocolError(
            f"expected the places of {len(block.halo.key)} halo slots among {total} rows, got "
            f"{position.dtype} of shape {tuple(position.shape)}, or others"
        )
    incoming = slots.with_columns(position[slots.indices.long()], total)
    incoming = incoming.transposed.transposed  # columns in order
    block.memo["cagnet"] = (position, incoming)
    return incoming


def show_steps(request_specs: FieldSpecs, width: int, key: Key) -> Steps:
    """Return the calls of `show`."""
    return broadcast_steps(
        send, hear, what=Kind.EMBEDDINGS, key=key, width=width, inbox=request_specs
    )


def show_back_steps(request_specs: FieldSpecs, width: int, key: Key) -> Steps:
    """Return the calls of `show_back`."""
    what = Kind.COTANGENTS
    return broadcast_steps(
        send_back, hear_back, what=what, key=key, width=width, inbox=request_specs
    )


BY_BROADCASTS = Crossing(show, show_back, show_steps, show_back_steps)


def setup_steps(cfg: MethodConfig, key: Key) -> Steps:
    """Return the calls of `init` besides those of all global training."""
    del cfg
    first = {"first": FieldSpec(Stacked, (), torch.int64, low=0)}
    what, dtype = Kind.HALO_KEYS, torch.int64
    return (
        Call(tell_size, Kind.STATISTICS, key, {}, {"nodes": COUNT}),
        Call(learn_place, Kind.CONTROL, key, first),
        pull_steps(None, tell_place, hear_place, what=what, key=key, form=rows_of_width(1, dtype)),
    )


def step_steps(cfg: MethodConfig, key: Key) -> Steps:
    """Return the calls of `step`."""
    return gradient_steps(divisible(cfg.model), key, BY_BROADCASTS)


def state_specs(cfg: MethodConfig) -> FieldSpecs:
    """Return the specs of the client state between rounds, without logits."""
    del cfg
    return {"cagnet/place": FieldSpec(Ragged, (), torch.int64, rows=SLOTS, low=0)}


CAGNET = Method(
    name="cagnet",
    title="one model on the joined graph, all rows broadcast in every layer (CAGNET)",
    reference="Tripathy et al., Reducing communication in graph neural network training, SC 2020",
    options=NoOptions,
    init=init,
    round=fit_round,
    check=check_together,
    evaluate=AllSilos(),
    needs=Needs(keep_optimizer=True),
    calls=calls_of_global_training(step_steps, setup_steps, state_specs),
    rows="single",
)
