"""Local only: every client trains its own model on its own graph; nothing is shared.

All clients start from the same initial weights. In a round each selected client takes
`local_epochs` passes over its training nodes and keeps weights and, by default, optimizer state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.payload import Shared, Stacked, State, dense, fields_under, stack
from silograph.core.work import work_for
from silograph.evaluation.evaluate import TABLES, predict, ranked
from silograph.evaluation.scoring import personal, received_specs
from silograph.exchange.shared_biases import Sharing, sharing_of
from silograph.federation.field_specs import LOSS, TRAINED
from silograph.federation.messages import Empty
from silograph.methods.base import (
    AnyMethod,
    Method,
    MethodConfig,
    Needs,
    NoOptions,
    RoundReport,
    ServerState,
)
from silograph.methods.local_training import LocalModel, exact_weights, sampler_specs
from silograph.methods.ops import Clients, Server, calls, op, program
from silograph.nn.conv import Params
from silograph.nn.fit import stacked_copies
from silograph.nn.forward import AnyModel
from silograph.task.counts import judges_of


@dataclass(frozen=True)
class OwnModel:
    """The clients' own weights, (C, ...)."""

    weights: Annotated[Mapping[str, Stacked], exact_weights(Stacked)]


@dataclass(frozen=True)
class InitialModel:
    """The weights that all clients start from."""

    weights: Annotated[Mapping[str, Tensor], exact_weights(Shared)]


@dataclass(frozen=True)
class TrainingReport:
    """Training nodes (C,), mean training loss (C,), and counts where the run scores the start."""

    nodes: Annotated[Stacked, TRAINED]
    loss: Annotated[Stacked, LOSS]
    received: Annotated[Mapping[str, Stacked], received_specs]
    sampler: Annotated[Mapping[str, Stacked], sampler_specs]


@dataclass(frozen=True)
class MeanLoss:
    """Mean loss over clients, weighted by training nodes."""

    loss: Tensor


@op(Kind.WEIGHTS)
def begin_own(
    clients: Clients[Any], _state: Empty, request: InitialModel
) -> tuple[OwnModel, Empty]:
    """Set up the clients with the initial weights as their own, and score these."""
    return begin_with(clients, request, clients.cfg), Empty()


def begin_with(
    clients: Clients[Any], request: InitialModel, trained: MethodConfig[Any]
) -> OwnModel:
    """Set up clients whose own model is the initial one, and score it; return their state.

    Args:
        clients: of a block.
        request: the initial weights.
        trained: config with the model that clients train.
    """
    clients.begin(trained)
    cfg, weights, graph = clients.cfg, request.weights, clients.graph
    with work_for(Kind.EVALUATION):
        tables = fields_under(TABLES, clients.state)
        logits = predict(cfg, weights, graph, clients.state)
        scores: State = {"own/logits": judges_of(graph).select(logits)}
        scores = {**scores, **ranked(cfg, "own", weights, graph, tables)}
    clients.state = {**clients.state, **scores}
    return OwnModel(stack(stacked_copies(weights, clients.block.num_clients)))


@op(Kind.CONTROL)
def train_own(clients: Clients[Any], state: OwnModel, _: Empty) -> tuple[OwnModel, TrainingReport]:
    """Continue training the own weights."""
    fitted = clients.fit({name: w.t for name, w in state.weights.items()})
    reply = LocalModel.of(fitted, clients.block)
    new = OwnModel(stack({name: dense(w) for name, w in fitted.weights.items()}))
    return new, TrainingReport(reply.nodes, reply.loss, reply.received, reply.sampler)


@calls(begin_own)
def setup(server: Server[Any], weights: Params) -> ServerState:
    """Send the initial weights once; the server keeps no model."""
    server.call(begin_own, InitialModel(weights))
    return ServerState(weights=None, memory={})


@calls(train_own)
def train_round(server: Server[Any], state: ServerState) -> tuple[ServerState, RoundReport]:
    """Let the selected clients continue training; they send only their loss."""
    _, report = server.average(train_own, Empty(), MeanLoss)
    return state, report


def own_weights(cfg: MethodConfig, server: Params, state: Mapping[str, Tensor]) -> Params:
    """Return each client's own trained weights, (C, ...)."""
    del server
    return {name: state[f"weights/{name}"] for name in cfg.model.weight_shapes}


LOCAL = Method(
    name="local",
    title="every client trains alone",
    reference="the baseline of every paper of the field",
    options=NoOptions,
    **program(train_round, setup=setup, state=OwnModel, server_model=False),
    weighs_classes=True,
    evaluate=personal(),
    needs=Needs(keep_optimizer=True),
    own_weights=own_weights,
)


def sharing_in(method: AnyMethod, model: AnyModel) -> Sharing | None:
    """Return what clients share of ratings before training.

    None where one client has all ratings, and where clients train alone: that is the baseline.
    """
    is_alone = method.setting.uncut or method.round is LOCAL.round
    return None if is_alone else sharing_of(model)
