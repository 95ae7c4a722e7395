"""SCAFFOLD: local steps are corrected by how a client's gradient differs from everybody's.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: stochastic controlled averaging for
federated learning", ICML 2020, algorithm 1 with option II.

Client i keeps a control variate c_i, the server keeps c; all start at 0. In a round a selected
client takes K_i plain SGD steps of rate eta along g + c - c_i from the server's x to y_i, and then

    c_i+ = c_i - c + (x - y_i) / (K_i eta)
    x+   = x + server_lr * mean over S of (y_i - x)
    c+   = c + (n_S / n) * mean over S of (c_i+ - c_i)

What we changed: both means are weighted by training nodes, and n_S / n is the share of the
training nodes that the selected clients S hold, where the paper counts clients. With clients of
one size that is the same. So c is always the mean of all c_i weighted by training nodes, and the
method lowers the loss that FedAvg lowers. Clients without training nodes leave c_i at 0.

K_i is a client's own number of steps: with mini-batches clients differ. Weight decay is a part of
the path, and so of the variates: a step adds c - c_i to a gradient with decay, as it should.
The path tells the gradient for plain SGD only; so Adam and momentum are refused. Where a schedule
has made eta less than the rounding of a weight of 1, the path tells nothing, and variates stay.

Memory and bytes: variates are as large as the model and touch every weight, so no row is left out
and torch trains. Every client of the federation keeps one copy of the model, in checkpoints too;
messages are twice those of FedAvg. They count as weights, of which they are differences.

The defaults are the paper's server step, 1, this library's rate of local SGD, 0.1, and ten local
epochs: with one, 100 rounds are 100 steps of rate 0.1, which do not learn
(benchmarks/defaults/methods.md). No rate was better throughout. Validation accuracy beside FedAvg
with the same SGD (METIS, 3 local epochs, 100 rounds, server view; Cora with 10 clients: seeds 0
and 1, else seed 0):

    rate               0.1          0.3          1
    Cora, 10 clients   .849 (.848)  .861 (.856)  .855 (.855)
    Cora, 100          .838 (.835)  -            .812 (.850)
    CiteSeer, 10       .758 (.755)  .756 (.752)  .752 (.752)
    PubMed, 10         .564 (.615)  .716 (.740)  .809 (.835)

State of a client: `variates/*` (C, ...), and what local training keeps. C: clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as options_class
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Shared, Stacked, fields_under, stack, with_prefix
from silograph.core.setting_values import log
from silograph.core.work import report_clients
from silograph.evaluation.scoring import received_specs
from silograph.federation.base import Sum
from silograph.federation.field_specs import LOSS, TRAINED
from silograph.federation.messages import Empty
from silograph.methods.base import (
    Caution,
    Method,
    Needs,
    RoundReport,
    ServerState,
    keep_previous_if_not_finite,
)
from silograph.methods.local_training import LocalModel, exact_weights, sampler_specs, zero_weights
from silograph.methods.ops import Clients, Server, calls, op, program
from silograph.nn.conv import Params
from silograph.nn.correction import Shift
from silograph.nn.fit import Fitted
from silograph.nn.optim import SGD

VARIATE_FLOPS = 5  # a parameter, in a round: c - c_i, three for the path, one for c_i


@options_class(frozen=True, config=STRICT)
class ScaffoldOptions:
    """The help text is the documentation of the field."""

    server_lr: Annotated[float, Field(gt=0)] = field(
        default=1.0,
        metadata={
            "help": "step size of the server; 1 takes the clients' mean",
            "tune": log(0.1, 2.0),
        },
    )


@dataclass(frozen=True)
class ClientState:
    """Control variates c_i of each client, (C, ...)."""

    variates: Annotated[Mapping[str, Stacked], exact_weights(Stacked, "variates")]


@dataclass(frozen=True)
class TrainingNodes:
    """Number of training nodes of each client, (C,)."""

    nodes: Annotated[Stacked, TRAINED]


@dataclass(frozen=True)
class CorrectedModel:
    """The server's model x and its control variate c."""

    weights: Annotated[Mapping[str, Tensor], exact_weights(Shared)]
    variates: Annotated[Mapping[str, Tensor], exact_weights(Shared, "variates")]


@dataclass(frozen=True)
class LocalChange:
    """The clients' models y_i after training, and c_i+ - c_i; else as `LocalModel`."""

    weights: Annotated[Mapping[str, Stacked | Patched], exact_weights(Stacked)]
    variates: Annotated[Mapping[str, Stacked], exact_weights(Stacked, "variates")]
    nodes: Annotated[Stacked, TRAINED]
    loss: Annotated[Stacked, LOSS]
    received: Annotated[Mapping[str, Stacked], received_specs]
    sampler: Annotated[Mapping[str, Stacked], sampler_specs]


@dataclass(frozen=True)
class AveragedChange:
    """Means over clients, weighted by training nodes, and n_S, the sum of these."""

    weights: Mapping[str, Tensor]
    variates: Mapping[str, Tensor]
    nodes: Tensor


@op(Kind.CONTROL)
def begin_variates(
    clients: Clients[ScaffoldOptions], _state: Empty, _: Empty
) -> tuple[ClientState, TrainingNodes]:
    """Set up the clients; all variates are 0."""
    clients.begin()
    zeros = zero_weights(clients.cfg.model, clients.block)
    return ClientState(stack(zeros)), TrainingNodes(Stacked(clients.block.num_train))


@op(Kind.WEIGHTS)
def train_corrected(
    clients: Clients[ScaffoldOptions], state: ClientState, request: CorrectedModel
) -> tuple[ClientState, LocalChange]:
    """Take K_i steps along g + c - c_i from x, and update the client's own variate."""
    cfg, own = clients.cfg, state.variates
    shift = Shift({name: request.variates[name] - c.t for name, c in own.items()})
    fitted = clients.fit(request.weights, replace(cfg, corrections=(shift,)))
    change = variate_change(cfg.optimizer, request.weights, request.variates, fitted)
    size = sum(c.t[0].numel() for c in own.values())
    report_clients((fitted.steps > 0).double() * (VARIATE_FLOPS * size))
    new = {name: Stacked(c.t + change[name]) for name, c in own.items()}
    model = LocalModel.of(fitted, clients.block)
    reply = LocalChange(**vars(model), variates=stack(change))
    return ClientState(keep_previous_if_not_finite(new, own)), reply


def variate_change(
    optimizer: object,
    start: Mapping[str, Tensor],
    server_variates: Mapping[str, Tensor],
    fitted: Fitted,
) -> Params:
    """Return (x - y_i) / (K_i eta) - c (C, ...), 0 for clients that took no step.

    Also 0 for all where eta, after a schedule, is below the rounding of a weight of 1: a path of
    such steps is rounding, and divided by eta it would be a variate of noise, or infinite.
    """
    assert isinstance(optimizer, SGD)  # see `Needs.plain_sgd`
    if optimizer.lr < torch.finfo(next(iter(start.values())).dtype).eps:
        return {name: torch.zeros_like(w.t) for name, w in fitted.weights.items()}
    change: Params = {}
    for name, trained_weight in fitted.weights.items():
        assert isinstance(trained_weight, Stacked)  # a shift leaves no row out
        y = trained_weight.t
        steps = fitted.steps.to(y.device, y.dtype).view(-1, *[1] * (y.dim() - 1))
        mean = (start[name] - y) / (steps.clamp(min=1) * optimizer.lr) - server_variates[name]
        change[name] = torch.where(steps > 0, mean, 0)
    return change


@calls(begin_variates)
def setup(server: Server[ScaffoldOptions], weights: Params) -> ServerState:
    """Set up the clients; the server's variate c is 0."""
    reply = server.call(begin_variates, Empty(), reduce=Sum())
    zeros = {name: torch.zeros_like(w) for name, w in weights.items()}
    return ServerState(weights, {**with_prefix("variates", zeros), "nodes": reply["nodes"].t})


@calls(train_corrected)
def train_round(
    server: Server[ScaffoldOptions], state: ServerState
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients; move the model x and the common variate c."""
    assert state.weights is not None  # set by setup
    variates = fields_under("variates", state.memory)
    request = CorrectedModel(state.weights, variates)
    mean, report = server.average(train_corrected, request, AveragedChange)
    if mean is None:  # no selected client has a training node
        return state, report
    share = float(mean.nodes) / float(state.memory["nodes"])
    lr = server.options.server_lr
    x = {name: w.lerp(mean.weights[name], lr) for name, w in state.weights.items()}
    c = {name: v.add(mean.variates[name], alpha=share) for name, v in variates.items()}
    return ServerState(x, {**state.memory, **with_prefix("variates", c)}), report


SCAFFOLD = Method(
    name="scaffold",
    title="average of models whose steps are corrected by control variates",
    reference="Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated "
    "learning, ICML 2020",
    options=ScaffoldOptions,
    **program(train_round, setup=setup, state=ClientState),
    weighs_classes=True,
    needs=Needs(
        optimizer="sgd",
        local_epochs=10,
        plain_sgd=True,
        corrections=lambda _: (Shift({}),),  # filled in at the clients
    ),
    cautions=(
        Caution(
            "plain sgd learns slowly where features are small, and is far behind local on PubMed "
            "in 100 rounds: raise --lr there",
            of="labels of nodes",
        ),
    ),
    only_sums=True,
)
