"""LLCG: learn locally, correct globally.

Ramezani, Cong, Mahdavi, Kandemir and Sivasubramaniam, "Learn locally, correct globally: A
distributed algorithm for training graph neural networks", ICLR 2022 (algorithm 2). Clients train on
their own graphs and the server averages, as in FedAvg; then the server takes a few steps on data
that it holds itself, with the edges between silos.

That data is the point where this is no federation: **the server holds features, labels and edges of
a share of all nodes** (`server_share`; the paper: of all). It is drawn before training, stays in
simulation, and is in no ledger, as is the server's work on it.

What we changed: the number of local epochs stays the same over the rounds (the paper's rho is 1);
steps are on all nodes that train, unless a batch size is given; the server's optimizer is that of
the clients and keeps its state. A fan-out is the clients' alone: the server hears all neighbors
that it holds, as in the paper.
"""

from dataclasses import field, replace
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, mistake
from silograph.core.key import Key
from silograph.core.payload import fields_under, with_prefix
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import Caution, Method, MethodConfig, ServerHolds, ServerState
from silograph.methods.fedavg import FEDAVG_PROGRAM
from silograph.nn.conv import Params
from silograph.nn.fit import TrainingInputs, stacked_copies, whole_memory
from silograph.nn.mini_batches import FULL
from silograph.nn.optim import SGD, Adam


@dataclass(frozen=True, config=STRICT)
class LLCGOptions:
    """What the server holds and does; the help texts are the documentation of the fields."""

    server_share: Annotated[float, Field(gt=0, le=1)] = field(
        default=1.0,
        metadata={"help": "share of all nodes whose features, labels and edges the server holds"},
    )
    correction_steps: Annotated[int, Field(ge=1)] = field(
        default=1, metadata={"help": "passes of the server over its own training nodes in a round"}
    )
    correction_lr: Annotated[float, Field(gt=0)] | None = field(
        default=None, metadata={"help": "learning rate of these passes; none: the clients'"}
    )


def check(cfg: MethodConfig[LLCGOptions]) -> None:
    """Raise `ConfigError` for a model whose tables stay with clients, so the server has none."""
    if cfg.model.table_widths:
        raise ConfigError(
            "expected a model without tables for llcg, whose server trains on nodes of its own, "
            f"got {cfg.model.noun}, whose tables stay with the clients: use method=fedavg",
            **mistake("conflicting-options", ["method", "model"]),
        )


def server_share(options: LLCGOptions) -> float:
    """Return the share of nodes that the server holds."""
    return options.server_share


def correct(
    cfg: MethodConfig, server_block: ClientBlock, state: ServerState, t: int, key: Key
) -> ServerState:
    """Take the server's own steps from the mean of a round."""
    assert state.weights is not None  # set by init
    memory, correct_key = fields_under("correction", state.memory), key.fold("correct", t)
    weights, memory = train_at_server(cfg, server_block, state.weights, memory, correct_key)
    return ServerState(weights, {**state.memory, **with_prefix("correction", memory)})


def train_at_server(
    cfg: MethodConfig, server_block: ClientBlock, weights: Params, memory: Params, key: Key
) -> tuple[Params, Params]:
    """Return weights and optimizer state after the server's own steps.

    Args:
        cfg: of the run.
        server_block: the nodes that the server holds.
        weights: the mean.
        memory: of the server's optimizer; empty before its first step.
        key: of the draws.
    """
    options = cfg.options
    optimizer = cfg.optimizer
    if options.correction_lr is not None:
        assert isinstance(optimizer, SGD | Adam)  # all that a run can name
        optimizer = replace(optimizer, lr=options.correction_lr)
    schedule = replace(cfg.schedule, epochs=options.correction_steps, neighbors=FULL)
    training = replace(cfg.training, optimizer=optimizer, schedule=schedule)
    optimizer_state = {name: m[None] for name, m in memory.items()}
    if not optimizer_state:
        optimizer_state = optimizer.init(stacked_copies(weights, 1))
    fitted = cfg.backend.fit(training, TrainingInputs(server_block, weights, optimizer_state, key))
    memory = whole_memory(fitted.memory)
    return {n: w[0] for n, w in fitted.tensors.items()}, {n: m[0] for n, m in memory.items()}


LLCG = Method(
    name="llcg",
    title="average of locally trained models, corrected on nodes that the server holds",
    reference="Ramezani et al., Learn locally, correct globally: A distributed algorithm for "
    "training graph neural networks, ICLR 2022",
    options=LLCGOptions,
    init=FEDAVG_PROGRAM["init"],
    round=FEDAVG_PROGRAM["round"],
    check=check,
    server_step=True,
    weighs_classes=True,
    setting=ServerHolds(server_share, correct),
    cautions=(
        Caution(
            "clients train with adam, as for fedavg; where nodes have many neighbors (Amazon "
            "Photo) a step of the server does not make up for it, and the result is far behind "
            "local",
            of="labels of nodes",
        ),
    ),
    only_sums=True,
)
