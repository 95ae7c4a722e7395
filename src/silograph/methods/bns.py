"""BNS-GCN: silos fetch the rows of a random share of their halo in every step.

Wan, Li, Li, Kim and Lin, "BNS-GCN: Efficient full-graph training of graph convolutional networks
with partition-parallelism and random boundary node sampling", MLSys 2022, algorithm 1. Each silo
draws every halo slot with probability `rate`; for a drawn one it hears the row in every layer,
divided by the rate, and returns its gradient; of the others it hears nothing in this step.

With rate 1 this is centralized training. Single rows cross, so this is a baseline for systems where
all machines belong to one owner: docs/explanation/privacy.md says what it reveals.

What we changed: rows cross after the linear map and scaled by their owner (GCN commutes with both),
so that no degree travels; each row is drawn by itself, where the authors' code draws a fixed number
from each pair of silos; judged with complete sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as options_class
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged
from silograph.evaluation.scoring import AllSilos
from silograph.exchange.masked_sums import ROW_KEY_EXCHANGE
from silograph.exchange.pass_state import PassState, reach_of
from silograph.exchange.passes import (
    COTANGENTS,
    AtStage,
    Crossing,
    PassForm,
    divisible,
    finish,
    gradients,
    inputs_at,
    with_product,
)
from silograph.exchange.pull import BoundaryRows, Fetch, Slots
from silograph.federation.field_specs import SLOTS, FieldSpec, Masking
from silograph.federation.messages import Empty
from silograph.federation.secure.row_form import as_words, from_words
from silograph.methods.base import Method, Needs, RoundReport, ServerState
from silograph.methods.global_training import (
    calls_of_steps,
    check_together,
    start_together,
    steps_together,
    without_optimizer,
)
from silograph.methods.ops import Clients, Server, calls, op, program
from silograph.nn.conv import Params
from silograph.nn.fit import check_like
from silograph.nn.model import before, scales_of
from silograph.nn.reach import gathered, messages_out


@options_class(frozen=True, config=STRICT)
class BNSOptions:
    """The options of BNS-GCN."""

    rate: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.1, metadata={"help": "probability that a halo node's row is fetched in a step"}
    )


# --- Before each step: which halo slots are heard ------------------------------------------------


@op(Kind.CONTROL)
def draw(clients: Clients[BNSOptions], _state: Empty, _: Empty) -> tuple[PassState, Empty]:
    """Draw slots; a message of a drawn one weighs 1 / rate."""
    block, rate = clients.block, clients.options.rate
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    is_drawn = clients.key.fold("boundary").uniform(block.halo.key)[:, 0] < rate
    weight = is_drawn.to(block.adj.values.dtype) / rate
    return PassState(slot=Ragged(weight, block.halo.off)), Empty()


# --- In each layer: their rows -------------------------------------------------------------------


@dataclass(frozen=True)
class WantedRows(BoundaryRows, AtStage):
    """The boundary rows (k,) of a stage that somebody has drawn."""


@dataclass(frozen=True)
class SentRows:
    """These rows (k, O), after the linear map and scaled."""

    rows: Annotated[Ragged, lambda form: rows_spec(form, "inbox/row")]


@dataclass(frozen=True)
class ReceivedRows(AtStage):
    """The rows (t, O) of the slots that a client has drawn."""

    rows: Annotated[Ragged, lambda form: rows_spec(form, SLOTS)]


def rows_spec(form: PassForm, rows: str) -> FieldSpec:
    """Return the spec of rows; of slots there may be fewer, those that are drawn."""
    masking: Masking = (
        "" if not form.row_minimum.rows_are_masked else "halo" if rows == SLOTS else "own"
    )
    return FieldSpec(Ragged, (form.width,), rows=rows, fewer=rows == SLOTS, masking=masking)


@op(Kind.HALO_KEYS)
def ask(clients: Clients, state: PassState, _: AtStage) -> tuple[PassState, Slots]:
    """Name the drawn slots."""
    reach = reach_of(clients, state)
    assert reach.slots is not None  # some are drawn, by name
    return state, Slots(Ragged(reach.slots, reach.slot_off))


@op(Kind.EMBEDDINGS)
def serve(clients: Clients, state: PassState, request: WantedRows) -> tuple[PassState, SentRows]:
    """Compute rows, and send the requested ones."""
    at, params = inputs_at(clients, state, request, "before")
    z = before(params, at)
    rows = messages_out(scales_of(at.stage.conv), z, at.reach, request.rows(clients.block))
    if clients.cfg.row_minimum.rows_are_masked:
        rows = as_words(rows)
    return with_product(state, at, z), SentRows(Ragged(rows, request.row.off))


@op(Kind.EMBEDDINGS)
def store(clients: Clients, state: PassState, request: ReceivedRows) -> tuple[PassState, Empty]:
    """Add the received rows and finish the stage."""
    at, params = inputs_at(clients, state, request, "after")
    rows, own = request.rows.t, state.z[str(at.number)].t
    if clients.cfg.row_minimum.rows_are_masked:
        rows = from_words(rows, own)
    check_like(rows, own)
    halo_sum = gathered(at.reach, at.reach.outer.transposed, rows)
    return finish(clients, state, at, params, halo_sum), Empty()


BY_ROWS = Crossing(Fetch(ask, serve, store), COTANGENTS, ROW_KEY_EXCHANGE)


# --- Server --------------------------------------------------------------------------------------


@calls(calls_of_steps(draw, crossing=BY_ROWS, is_named=lambda _: True))
def train_round(server: Server, state: ServerState) -> tuple[ServerState, RoundReport]:
    """Take `local_epochs` steps, all silos together."""
    return steps_together(server, state, step)


def step(server: Server, weights: Mapping[str, Tensor]) -> tuple[Params, float | None]:
    """Draw slots, and return the gradients of the loss."""
    server.call(draw, Empty())
    return gradients(
        server.fed,
        divisible(server.cfg.model),
        weights,
        server.call_key,
        crossing=BY_ROWS,
        row_minimum=server.cfg.row_minimum,
    )


BNS = Method(
    name="bns",
    title="one model on the joined graph, on a drawn share of the boundary (BNS-GCN)",
    reference="Wan et al., BNS-GCN: Efficient full-graph training of graph convolutional networks "
    "with partition-parallelism and random boundary node sampling, MLSys 2022",
    options=BNSOptions,
    **program(train_round, setup=start_together, trained=without_optimizer),
    check=check_together,
    evaluate=AllSilos(),
    needs=Needs(keep_optimizer=True),
    rows="single",
    only_sums=True,
)
