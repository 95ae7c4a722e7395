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
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, Shared, Stacked, offsets
from silograph.evaluation.scoring import AllSilos
from silograph.exchange.pass_state import PassState
from silograph.exchange.passes import (
    AtStage,
    Crossing,
    back_to_sum,
    divisible,
    finish,
    finish_back,
    gradient_of_sum,
    gradients,
    inputs_at,
    with_product,
)
from silograph.exchange.pull import Fetch
from silograph.exchange.rows import Broadcast
from silograph.federation.field_specs import BOUNDARY, COUNT, NODES, SLOTS, FieldSpec
from silograph.federation.messages import Empty
from silograph.graph.block.block import ClientBlock
from silograph.graph.csr import CSR
from silograph.methods.base import Method, Needs, NoOptions, RoundReport, ServerState
from silograph.methods.global_training import (
    START_TOGETHER,
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
from silograph.nn.reach import Reach, gathered, messages_back, messages_out

# --- Set-up: the positions of each client's halo in a broadcast ----------------------------------


@dataclass(frozen=True)
class NodeCount:
    """Number of nodes, (C,)."""

    nodes: Annotated[Stacked, COUNT]


@dataclass(frozen=True)
class FirstRow:
    """Where the rows of a client begin in a broadcast, (C,) int64."""

    first: Annotated[Stacked, FieldSpec(Stacked, (), torch.int64, low=0)]


@dataclass(frozen=True)
class BoundaryPlaces:
    """Positions (B, 1) of boundary rows in a broadcast."""

    rows: Annotated[Ragged, FieldSpec(Ragged, (1,), torch.int64, rows=BOUNDARY)]


@dataclass(frozen=True)
class HaloPlaces:
    """The same of halo slots, (S, 1)."""

    rows: Annotated[Ragged, FieldSpec(Ragged, (1,), torch.int64, rows=SLOTS)]


@dataclass(frozen=True)
class SetupState:
    """Where a client's own rows begin in a broadcast, until it knows where its halo is."""

    PREFIX: ClassVar[str] = "cagnet/"
    first: Stacked


@dataclass(frozen=True)
class ClientState:
    """Positions (S,) of halo slots in a broadcast."""

    PREFIX: ClassVar[str] = "cagnet/"
    place: Annotated[Ragged, FieldSpec(Ragged, (), torch.int64, rows=SLOTS, low=0)]


@op(Kind.STATISTICS)
def tell_size(clients: Clients, state: Empty, _: Empty) -> tuple[Empty, NodeCount]:
    """Count nodes."""
    return state, NodeCount(Stacked(clients.block.off.diff()))


@op(Kind.CONTROL)
def learn_place(_clients: Clients, _state: Empty, request: FirstRow) -> tuple[SetupState, Empty]:
    """Store where the own rows begin in a broadcast."""
    return SetupState(request.first), Empty()


@op(Kind.HALO_KEYS)
def tell_place(clients: Clients, state: SetupState, _: Empty) -> tuple[SetupState, BoundaryPlaces]:
    """Send the positions of boundary rows in a broadcast."""
    block, boundary = clients.block, clients.block.halo.boundary
    client = block.client[boundary]
    position = boundary - block.off[client] + state.first.t[client]
    return state, BoundaryPlaces(Ragged(position[:, None], block.halo.boundary_off))


@op(Kind.HALO_KEYS)
def hear_place(
    clients: Clients, _state: SetupState, request: HaloPlaces
) -> tuple[ClientState, Empty]:
    """Store the positions of the halo in a broadcast."""
    place = Ragged(request.rows.t[:, 0], clients.block.halo.off)
    return ClientState(place), Empty()


POSITIONS = Fetch[Empty](None, tell_place, hear_place)


@calls(*START_TOGETHER, tell_size, learn_place, POSITIONS)
def setup(server: Server, weights: Params) -> ServerState:
    """Set up the clients, and send each the positions of its halo in a broadcast."""
    state = start_together(server, weights)
    counts = server.call(tell_size, Empty())["nodes"].t
    server.call(learn_place, FirstRow(Stacked(offsets(counts)[:-1])))
    server.exchange(POSITIONS, Empty())
    return state


# --- In each layer: all rows to all silos, and on the way back all gradients ---------------------


@dataclass(frozen=True)
class OwnRows:
    """All rows (n, O) of a client: after the linear map and scaled, or gradients of its sums."""

    rows: Annotated[Ragged, lambda form: FieldSpec(Ragged, (form.width,), rows=NODES)]


@dataclass(frozen=True)
class AllRows(AtStage):
    """The rows (N, O) of all clients, in client order."""

    all: Annotated[Tensor, lambda form: FieldSpec(Shared, (None, form.width))]


@dataclass(frozen=True)
class PassWithHalo(PassState, ClientState):
    """What a client reads and writes that gets all rows in a pass."""


@op(Kind.EMBEDDINGS)
def send(clients: Clients, state: PassState, request: AtStage) -> tuple[PassState, OwnRows]:
    """Compute all rows."""
    at, params = inputs_at(clients, state, request, "before")
    z = before(params, at)
    rows = messages_out(scales_of(at.stage.conv), z, at.reach)
    return with_product(state, at, z), OwnRows(Ragged(rows, clients.block.off))


@op(Kind.EMBEDDINGS)
def hear(clients: Clients, state: PassWithHalo, request: AllRows) -> tuple[PassWithHalo, Empty]:
    """Take the halo's rows and finish the stage."""
    at, params = inputs_at(clients, state, request, "after")
    own = state.z[str(at.number)].t
    halo_sum = sum_over_halo(clients.block, state, at.reach, check_like(request.all, own))
    return finish(clients, state, at, params, halo_sum), Empty()


@op(Kind.COTANGENTS)
def send_back(clients: Clients, state: PassState, request: AtStage) -> tuple[PassState, OwnRows]:
    """Compute gradients back to the sum."""
    at, params = inputs_at(clients, state, request, "after")
    new, s = back_to_sum(clients, state, at, params)
    rows = messages_back(scales_of(at.stage.conv), s, at.reach)
    return new, OwnRows(Ragged(rows, clients.block.off))


@op(Kind.COTANGENTS)
def hear_back(
    clients: Clients, state: PassWithHalo, request: AllRows
) -> tuple[PassWithHalo, Empty]:
    """Take the halo's gradients and go on back from the sum."""
    at, params = inputs_at(clients, state, request, "before")
    own = gradient_of_sum(state)
    halo_sum = sum_over_halo(clients.block, state, at.reach, check_like(request.all, own))
    return finish_back(clients, state, at, params, halo_sum), Empty()


def sum_over_halo(block: ClientBlock, state: ClientState, reach: Reach, rows: Tensor) -> Tensor:
    """Return sums (n, O) over neighbors in other silos, from the rows (N, O) of all clients."""
    return gathered(reach, _incoming(block, state.place.t, reach, len(rows)), rows)


def _incoming(block: ClientBlock, position: Tensor, reach: Reach, total: int) -> CSR:
    """Return the edges from other silos by place in a broadcast, (n, N): no row is copied.

    Raises:
        ProtocolError: a halo slot whose place is none of the broadcast's.
    """
    cached = block.memo.get("cagnet")
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


BY_BROADCASTS = Crossing(Broadcast(send, hear), Broadcast(send_back, hear_back))


# --- Server --------------------------------------------------------------------------------------


@calls(calls_of_steps(crossing=BY_BROADCASTS))
def train_round(server: Server, state: ServerState) -> tuple[ServerState, RoundReport]:
    """Take `local_epochs` steps, all silos together."""
    return steps_together(server, state, step)


def step(server: Server, weights: Mapping[str, Tensor]) -> tuple[Params, float | None]:
    """Return the gradients of the loss."""
    model = divisible(server.cfg.model)
    return gradients(server.fed, model, weights, server.call_key, crossing=BY_BROADCASTS)


CAGNET = Method(
    name="cagnet",
    title="one model on the joined graph, all rows broadcast in every layer (CAGNET)",
    reference="Tripathy et al., Reducing communication in graph neural network training, SC 2020",
    options=NoOptions,
    **program(train_round, setup=setup, state=ClientState, trained=without_optimizer),
    check=check_together,
    evaluate=AllSilos(),
    needs=Needs(keep_optimizer=True),
    rows="single",
)
