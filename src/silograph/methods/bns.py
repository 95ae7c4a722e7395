"""BNS-GCN: silos fetch the rows of a random share of their halo in every step.

Wan, Li, Li, Kim and Lin, "BNS-GCN: Efficient full-graph training of graph convolutional networks
with partition-parallelism and random boundary node sampling", MLSys 2022, algorithm 1. Each silo
draws every halo slot with probability `rate`; for a drawn one it hears the row in every layer,
divided by the rate, and returns its gradient; of the others it hears nothing in this step.

With rate 1 this is centralized training. Single rows cross, so this is a baseline for systems where
all machines belong to one owner: what it shows to other silos stands in docs/exchange.md.

What we changed: rows cross after the linear map and scaled by their owner (GCN commutes with both),
so that no degree travels; each row is drawn by itself, where the authors' code draws a fixed number
from each pair of silos; judged with complete sums.
"""

from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, State
from silograph.evaluation.scoring import AllSilos
from silograph.exchange.passes import (
    Crossing,
    cotangents_steps,
    divisible,
    finish,
    gradient_steps,
    gradients,
    inputs_of,
    reach_of,
    share_cotangents,
    stage_of,
)
from silograph.exchange.pull import pull, pull_steps, rows_of_width
from silograph.federation.base import Federation
from silograph.federation.field_specs import FieldSpecs
from silograph.federation.program import Call, Steps
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import Method, MethodConfig, Needs, RoundReport, ServerState
from silograph.methods.global_training import (
    calls_of_global_training,
    check_together,
    start_together,
    steps_together,
)
from silograph.nn.conv import Params
from silograph.nn.fit import check_like, check_places
from silograph.nn.model import before, scales_of
from silograph.nn.reach import gathered, messages_out


@dataclass(frozen=True, config=STRICT)
class BNSOptions:
    """The options of BNS-GCN."""

    rate: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.1, metadata={"help": "probability that a halo node's row is fetched in a step"}
    )


def fit_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Take `local_epochs` steps, all silos together."""
    return steps_together(fed, cfg, state, t, key, step)


def step(
    fed: Federation, cfg: MethodConfig, weights: Mapping[str, Tensor], key: Key
) -> tuple[Params, float | None]:
    """Draw slots, and return the gradients of the loss."""
    fed.call(draw, {}, what=Kind.CONTROL, key=key)
    return gradients(fed, divisible(cfg.model), weights, key, crossing=BY_ROWS)


def fetch(fed: Federation, request: Mapping[str, Shared], key: Key) -> None:
    """Fetch the rows of the drawn slots and finish a stage."""
    pull(fed, ask, serve, store, what=Kind.EMBEDDINGS, key=key, inbox=request)


def draw(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Draw slots. In: nothing. Out: nothing."""
    del inbox
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    rate = cfg.options.rate
    is_drawn = key.fold("boundary").uniform(block.halo.key)[:, 0] < rate
    weight = is_drawn.to(block.adj.values.dtype) / rate
    return {**state, "pass/slot": Ragged(weight, block.halo.off)}, {}


def ask(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Name the drawn slots. In: `stage`. Out: `slot` (t,) int32."""
    del cfg, inbox
    reach = reach_of(block, state, key)
    assert reach.slots is not None  # some are drawn, by name
    return state, {"slot": Ragged(reach.slots, reach.slot_off)}


def serve(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Compute rows, and send the requested ones. In: `stage`, `row` (k,). Out: `rows`."""
    stage_inputs, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    z = before(params, stage_inputs)
    row = inbox["row"]
    assert isinstance(row, Ragged)  # from `pull`
    requested_rows = block.halo.boundary[
        check_places(row, block.halo.boundary_off, "boundary rows")
    ]
    rows = messages_out(scales_of(stage_inputs.stage.conv), z, stage_inputs.reach)[requested_rows]
    new = {**state, f"pass/z/{stage_inputs.number}": Ragged(z, stage_inputs.reach.off)}
    return new, {"rows": Ragged(rows, row.off)}


def store(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Add the received rows and finish the stage. In: `stage`, `rows` (t, O). Out: nothing."""
    stage_inputs, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    rows = check_like(inbox["rows"].t, state[f"pass/z/{stage_inputs.number}"].t)
    halo_sum = gathered(stage_inputs.reach, stage_inputs.reach.outer.transposed, rows)
    return finish(cfg, block, state, key, stage_inputs, params, halo_sum), {}


def fetch_steps(request_specs: FieldSpecs, width: int, key: Key) -> Steps:
    """Return the calls of `fetch`."""
    what = Kind.EMBEDDINGS
    return pull_steps(
        ask, serve, store, what=what, key=key, inbox=request_specs, form=rows_of_width(width)
    )


BY_ROWS = Crossing(fetch, share_cotangents, fetch_steps, partial(cotangents_steps, named=True))


def step_steps(cfg: MethodConfig, key: Key) -> Steps:
    """Return the calls of `step`."""
    return Call(draw, Kind.CONTROL, key), gradient_steps(divisible(cfg.model), key, BY_ROWS)


BNS = Method(
    name="bns",
    title="one model on the joined graph, on a drawn share of the boundary (BNS-GCN)",
    reference="Wan et al., BNS-GCN: Efficient full-graph training of graph convolutional networks "
    "with partition-parallelism and random boundary node sampling, MLSys 2022",
    options=BNSOptions,
    init=start_together,
    round=fit_round,
    check=check_together,
    evaluate=AllSilos(),
    needs=Needs(keep_optimizer=True),
    calls=calls_of_global_training(step_steps),
    rows="single",
)
