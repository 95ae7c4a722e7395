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
from dataclasses import field
from functools import partial
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
from silograph.core.kinds import Kind
from silograph.core.setting_values import log
from silograph.federation.messages import Empty
from silograph.methods.base import (
    AnyMethod,
    Caution,
    Method,
    Needs,
    NoOptions,
    RoundReport,
    ServerState,
)
from silograph.methods.local_training import AveragedModel, GlobalModel, LocalModel
from silograph.methods.ops import ClientOp, Clients, Server, calls, op, program

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


@op(Kind.WEIGHTS)
def train(
    clients: Clients[NoOptions], state: Empty, request: GlobalModel
) -> tuple[Empty, LocalModel]:
    """Take E local epochs from w_t on the client's own training nodes (ClientUpdate)."""
    return state, LocalModel.of(clients.fit(request.weights), clients.block)


@calls(train)
def train_round(
    server: Server[NoOptions | FedOptOptions], state: ServerState
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients, average, step."""
    return average_and_step(server, state, train)


def average_and_step(
    server: Server[Any], state: ServerState, train: ClientOp[GlobalModel, LocalModel]
) -> tuple[ServerState, RoundReport]:
    """Average the models that clients train by an op, and let the server step towards the mean."""
    assert state.weights is not None  # set by init
    mean, report = server.average(train, GlobalModel(state.weights), AveragedModel)
    if mean is None:  # no selected client has a training node
        return state, report
    step = server_step(server.options)
    return ServerState(*step(state.weights, dict(mean.weights), dict(state.memory))), report


def averaging(train: ClientOp[GlobalModel, LocalModel], state: type = Empty) -> AnyMethod:
    """Return FedAvg whose clients train by an op of yours.

    Args:
        train: the op.
        state: class of the state that it keeps for clients between rounds.
    """
    own_round = calls(train)(partial(average_and_step, train=train))  # which pickle can write
    return dataclasses.replace(
        FEDAVG, **program(own_round, state=state), small_weights=False, cautions=()
    )


FEDAVG_PROGRAM = program(train_round)

FEDAVG: AnyMethod = Method(
    name="fedavg",
    title="average of locally trained models",
    reference="McMahan et al., Communication-efficient learning of deep networks from "
    "decentralized data, AISTATS 2017",
    options=NoOptions,
    **FEDAVG_PROGRAM,
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
