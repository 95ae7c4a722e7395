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
from dataclasses import field, replace
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, State, named, under
from silograph.core.setting_values import log
from silograph.core.work import report_clients
from silograph.exchange.passes import weight_specs
from silograph.federation.base import Federation, Sum
from silograph.federation.field_specs import TRAINED
from silograph.federation.program import Call, Calls, Steps
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import (
    Caution,
    Method,
    MethodConfig,
    Needs,
    RoundReport,
    ServerState,
    keep_previous_if_not_finite,
)
from silograph.methods.local_training import (
    begin,
    local_round,
    local_steps,
    shared,
    stacked,
    state_specs,
    train_from,
    trained,
    zero_weights,
)
from silograph.nn.conv import Params
from silograph.nn.correction import Shift
from silograph.nn.fit import Fitted
from silograph.nn.optim import SGD

VARIATE_FLOPS = 5  # a parameter, in a round: c - c_i, three for the path, one for c_i


@dataclass(frozen=True, config=STRICT)
class ScaffoldOptions:
    """The help text is the documentation of the field."""

    server_lr: Annotated[float, Field(gt=0)] = field(
        default=1.0,
        metadata={
            "help": "step size of the server; 1 takes the clients' mean",
            "tune": log(0.1, 2.0),
        },
    )


def begin_variates(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Set up the state. In: nothing. Out: `nodes` (C,) training nodes."""
    new, _ = begin(cfg, block, state, inbox, key)
    zeros = zero_weights(cfg.model, block)
    return {**new, **stacked("variates", zeros)}, {"nodes": Stacked(block.num_train)}


def train_corrected(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Train from the server's weights along corrected gradients, and update the variates.

    In: `weights/*` and `variates/*` shared. Out: `weights/*` (C, ...), `variates/*` (C, ...) the
    changes of the client's own, `nodes` (C,), `loss` (C,).
    """
    start, server_variates = under("weights", inbox), under("variates", inbox)
    own_variates = under("variates", state)
    shift = Shift({name: server_variates[name] - c for name, c in own_variates.items()})
    fitted, new = train_from(replace(cfg, corrections=(shift,)), block, state, start, key)
    change = variate_change(cfg.optimizer, start, server_variates, fitted)
    size = sum(c[0].numel() for c in own_variates.values())
    report_clients((fitted.steps > 0).double() * (VARIATE_FLOPS * size))
    new_variates = {name: c + change[name] for name, c in own_variates.items()}
    reply = {**trained(fitted, block), **stacked("variates", change)}
    return {**new, **keep_previous_if_not_finite(stacked("variates", new_variates), state)}, reply


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


def init(fed: Federation, cfg: MethodConfig, weights: Params, key: Key) -> ServerState:
    """Set up the clients; all variates are 0."""
    del cfg
    reply = fed.call(begin_variates, {}, what=Kind.CONTROL, key=key, reduce=Sum())
    zeros = {name: torch.zeros_like(w) for name, w in weights.items()}
    return ServerState(weights, {**named("variates", zeros), "nodes": reply["nodes"].t})


def fit_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients; move the model and the common variate."""
    assert state.weights is not None  # set by init
    weights, options = state.weights, cfg.options
    server_variates = {name: state.memory[f"variates/{name}"] for name in weights}
    inbox = {**shared("weights", weights), **shared("variates", server_variates)}
    reply, report = local_round(fed, cfg, train_corrected, inbox, Kind.WEIGHTS, t, key)
    if reply is None:
        return state, report
    mean, change = under("weights", reply), under("variates", reply)
    share = float(reply["nodes"].t) / float(state.memory["nodes"])
    new_weights = {name: w.lerp(mean[name], options.server_lr) for name, w in weights.items()}
    server_variates = {
        name: c.add(change[name], alpha=share) for name, c in server_variates.items()
    }
    return ServerState(new_weights, {**state.memory, **named("variates", server_variates)}), report


def round_steps(cfg: MethodConfig, t: int, key: Key) -> Steps:
    """Return the call of `fit_round`."""
    inbox_specs, reply_specs = (
        {**weight_specs(cfg.model, form), **weight_specs(cfg.model, form, "variates")}
        for form in (Shared, Stacked)
    )
    return local_steps(cfg, train_corrected, inbox_specs, reply_specs, Kind.WEIGHTS, t, key)


def setup_steps(cfg: MethodConfig, key: Key) -> Steps:
    """Return the call of `init`."""
    del cfg
    return Call(begin_variates, Kind.CONTROL, key, {}, {"nodes": TRAINED})


CALLS = Calls(
    setup=setup_steps,
    round=round_steps,
    state=lambda cfg: {**state_specs(cfg), **weight_specs(cfg.model, Stacked, "variates")},
)

SCAFFOLD = Method(
    name="scaffold",
    title="average of models whose steps are corrected by control variates",
    reference="Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated "
    "learning, ICML 2020",
    options=ScaffoldOptions,
    init=init,
    round=fit_round,
    needs=Needs(
        optimizer="sgd",
        local_epochs=10,
        plain_sgd=True,
        corrections=lambda _: (Shift({}),),  # filled in at the clients
    ),
    calls=CALLS,
    cautions=(
        Caution(
            "plain sgd learns slowly where features are small, and is far behind local on PubMed "
            "in 100 rounds: raise --lr there",
            of="labels of nodes",
        ),
    ),
)
