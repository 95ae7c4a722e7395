"""FedAvg and FedOpt: train locally, average, let the server take a step.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-efficient learning of deep
networks from decentralized data", AISTATS 2017, algorithm 1.
Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive federated
optimization", ICLR 2021, algorithm 2.

What we changed: clients are weighted by their training nodes (the papers: by examples), a
client without any takes no part, and local steps are full batch unless a batch size is given.

FedOpt's own step is Adam with bias correction and a tau relative to the size of the changes, so
that it holds for raw, row-normalized and standardized features alike (`ScaleFreeAdam`). With
`server_tau` it is FedAdam as in the paper, but for v, which starts at 0 where the paper asks for at
least tau^2. The defaults (local SGD of rate 0.1, one epoch, server Adam of rate 0.01, relative tau
0.01) are derived in benchmarks/defaults/features.md. FedAvg keeps the setting of most papers on
graphs, local Adam of rate 0.01 built anew every round, which does not learn on small clients.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.aggregation.aggregators import (
    ScaleFreeAdam,
    ServerAdam,
    ServerMomentum,
    ServerStep,
    take_mean,
)
from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, under
from silograph.core.setting_values import log
from silograph.exchange.passes import weight_specs
from silograph.exchange.sent_weights import encode_weights, learn_form, mean_of, remembered_form
from silograph.federation.base import Federation, Op, WeightedMean, positions_of
from silograph.federation.field_specs import FieldSpecs
from silograph.federation.program import Steps
from silograph.methods.base import (
    AnyMethod,
    Caution,
    Method,
    MethodConfig,
    Needs,
    NoOptions,
    RoundReport,
    ServerState,
)
from silograph.methods.local_training import (
    TRAIN_CALLS,
    begin,
    local_round,
    local_steps,
    selected,
    shared,
    state_specs,
    train,
    train_sent,
    untouched_rows_after_round,
)
from silograph.nn.conv import Params

MOMENTUM_RATE = 1.0
ADAM_RATE = 0.01  # see benchmarks/defaults/features.md
ABSOLUTE_RATE = 0.005  # of Adam with an absolute tau, see benchmarks/defaults/sweep.md


@dataclass(frozen=True, config=STRICT)
class FedOptOptions:
    """The server's optimizer; the help texts are the documentation of the fields."""

    server_optimizer: Literal["momentum", "adam"] = field(
        default="adam", metadata={"help": "adam (FedAdam) or momentum (FedAvgM)"}
    )
    server_lr: Annotated[float, Field(gt=0)] | None = field(
        default=None,
        metadata={
            "help": "step size (default: 1 for momentum, 0.01 for adam, 0.005 with server_tau)",
            "tune": log(1e-3, 1.0),
        },
    )
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = field(
        default=0.9, metadata={"help": "momentum; 0 with step size 1 is FedAvg"}
    )
    server_beta1: Annotated[float, Field(ge=0, lt=1)] = field(
        default=0.9, metadata={"help": "adam: decay of the first moment"}
    )
    server_beta2: Annotated[float, Field(ge=0, lt=1)] = field(
        default=0.99, metadata={"help": "adam: decay of the second moment"}
    )
    server_relative_tau: Annotated[float, Field(ge=0)] = field(
        default=0.01,
        metadata={
            "help": "adam: degree of adaptivity, relative to the size of the updates",
            "tune": log(1e-3, 10.0),
        },
    )
    server_tau: Annotated[float, Field(gt=0)] | None = field(
        default=None,
        metadata={
            "help": "adam: an absolute degree of adaptivity, which makes the step that of the "
            "paper, without bias correction; none: relative"
        },
    )

    def __post_init__(self) -> None:
        """Set the default step size, so that the resolved config shows it."""
        if self.server_lr is None:
            adam = ADAM_RATE if self.server_tau is None else ABSOLUTE_RATE
            lr = MOMENTUM_RATE if self.server_optimizer == "momentum" else adam
            object.__setattr__(self, "server_lr", lr)


def server_step(options: object) -> ServerStep:
    """Return the server's step from the mean; without options of FedOpt it takes the mean."""
    if not isinstance(options, FedOptOptions):
        return take_mean
    assert options.server_lr is not None  # written out
    lr, tau = options.server_lr, options.server_tau
    betas = options.server_beta1, options.server_beta2
    if options.server_optimizer == "momentum":
        return ServerMomentum(lr, options.server_momentum)
    if tau is None:
        return ScaleFreeAdam(lr, *betas, options.server_relative_tau)
    return ServerAdam(lr, *betas, tau)


def init(fed: Federation, cfg: MethodConfig, weights: Params, key: Key) -> ServerState:
    """Set up the clients; the server starts from the initial weights."""
    fed.call(begin, {}, what=Kind.CONTROL, key=key)
    return ServerState(weights=weights, memory=learn_form(fed, cfg, key))


def fit_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key, op: Op = train
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients, average, step."""
    assert state.weights is not None  # set by init
    untouched_rows = untouched_rows_after_round(cfg, state.weights)
    inbox: Payload = shared("weights", state.weights)
    mean, form = WeightedMean("nodes", untouched_rows), remembered_form(state.memory)
    if not cfg.sent.plain:
        op, positions = train_sent, positions_of(fed.ids, selected(fed, cfg, t, key))
        inbox = encode_weights(cfg, state.weights, form, positions)
        mean = mean_of(cfg, "nodes", state.weights, form, untouched_rows)
    reply, report = local_round(fed, cfg, op, inbox, Kind.WEIGHTS, t, key, mean)
    if reply is None:
        return state, report
    optimizer_memory = {name: t for name, t in state.memory.items() if name not in form}
    weights, memory = server_step(cfg.options)(
        state.weights, under("weights", reply), optimizer_memory
    )
    return ServerState(weights, {**memory, **form}), report


def averaging(op: Op, keeps: Callable[[Any], FieldSpecs] = state_specs) -> AnyMethod:
    """Return FedAvg whose clients train by an op of yours, with the messages of `train`.

    Args:
        op: In: `weights/*` shared. Out: `weights/*` (C, ...), `nodes` (C,), `loss` (C,).
        keeps: what a client's state holds between rounds; see `state_specs`.
    """

    def round_of(
        fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
    ) -> tuple[ServerState, RoundReport]:
        return fit_round(fed, cfg, state, t, key, op)

    def steps(cfg: MethodConfig, t: int, key: Key) -> Steps:
        inbox_specs, reply_specs = (weight_specs(cfg.model, form) for form in (Shared, Stacked))
        return local_steps(cfg, op, inbox_specs, reply_specs, Kind.WEIGHTS, t, key)

    calls = dataclasses.replace(TRAIN_CALLS, round=steps, state=keeps)
    return dataclasses.replace(
        FEDAVG,
        round=round_of,
        calls=calls,
        small_weights=False,
        cautions=(),
        scores_on_receipt=False,  # an op of a user may not
    )


FEDAVG: AnyMethod = Method(
    name="fedavg",
    title="average of locally trained models",
    reference="McMahan et al., Communication-efficient learning of deep networks from "
    "decentralized data, AISTATS 2017",
    options=NoOptions,
    init=init,
    round=fit_round,
    calls=TRAIN_CALLS,
    small_weights=True,
    cautions=(
        Caution(
            "the defaults are the setting of most papers on graphs, and far behind local on small "
            "clients, on Photo and on Coauthor-CS; --optimizer sgd --local-epochs 10 learns there, "
            "but slowly where features are small",
            of="labels of nodes",
        ),
    ),
    aggregates=True,
)

FEDOPT: AnyMethod = dataclasses.replace(
    FEDAVG,
    name="fedopt",
    title="average of locally trained models, then a server momentum or Adam step",
    reference="Reddi et al., Adaptive federated optimization, ICLR 2021",
    options=FedOptOptions,
    needs=Needs(optimizer="sgd"),
    cautions=(),
)
