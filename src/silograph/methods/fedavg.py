"""FedAvg and FedOpt: train locally, average, let the server take a step.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-efficient learning of deep
networks from decentralized data", AISTATS 2017, algorithm 1.
Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive federated
optimization", ICLR 2021, algorithm 2.

What we changed: clients are weighted by their training nodes (the papers: by examples), a
client without any takes no part, and local steps are full batch unless a batch size is given.

FedOpt is FedAvg with a server optimizer, `adam` by default (`silograph.aggregation.
server_optimizers` has the steps, their options, and what we changed), and five local epochs of SGD
of rate 0.02. The server's step is derived in benchmarks/defaults/features.md, the local steps in
benchmarks/defaults/fedopt.md. FedAvg keeps the setting of most papers
on graphs, local Adam of rate 0.01 built anew every round, which does not learn on small clients.
"""

import dataclasses
from functools import partial
from typing import Any

from silograph.core.kinds import Kind
from silograph.federation.messages import Empty
from silograph.methods.base import (
    AnyMethod,
    Caution,
    Method,
    Needs,
    NoOptions,
    RoundReport,
    ServerState,
    Uncut,
)
from silograph.methods.clipped_updates import FACTS, average_clipped, train_clipped
from silograph.methods.local_training import AveragedModel, GlobalModel, LocalModel
from silograph.methods.node_gradients import step_along_gradients, sum_clipped_gradients
from silograph.methods.ops import ClientOp, Clients, Server, calls, op, program, when


@op(Kind.WEIGHTS)
def train(
    clients: Clients[NoOptions], state: Empty, request: GlobalModel
) -> tuple[Empty, LocalModel]:
    """Take E local epochs from w_t on the client's own training nodes (ClientUpdate)."""
    return state, LocalModel.of(clients.fit(request.weights), clients.block)


@calls(
    when(lambda cfg: cfg.privacy is None, train),
    when(lambda cfg: cfg.privacy is not None and cfg.privacy.unit == "silo", train_clipped),
    when(lambda cfg: cfg.privacy is not None and cfg.privacy.unit == "node", sum_clipped_gradients),
)
def average_and_step(
    server: Server[Any],
    state: ServerState,
    train: ClientOp[GlobalModel, LocalModel] = train,
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients, average, and let the server step towards the mean."""
    assert state.weights is not None  # set by init
    if server.cfg.privacy is not None:
        is_node = server.cfg.privacy.unit == "node"
        private_round = step_along_gradients if is_node else average_clipped
        return server.step(*private_round(server, state))
    mean, report = server.average(train, GlobalModel(state.weights), AveragedModel)
    if mean is None:  # no selected client has a training node
        return state, report
    return server.step(state, mean.weights, report)


def averaging(train: ClientOp[GlobalModel, LocalModel], state: type = Empty) -> AnyMethod:
    """Return FedAvg whose clients train by an op of yours.

    Args:
        train: the op.
        state: class of the state that it keeps for clients between rounds.
    """
    own_round = calls(train)(partial(average_and_step, train=train))  # which pickle can write
    return dataclasses.replace(
        FEDAVG,
        **program(own_round, state=state),
        small_weights=False,
        cautions=(),
        clips_updates=False,
    )


FEDAVG_PROGRAM = program(average_and_step)

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
            "the defaults are the setting of most papers on graphs, 7 to 55 points behind fedopt "
            "on Cora (benchmarks/defaults/beside_fedopt.md), and far behind local on small "
            "clients, on Photo and on Coauthor-CS; --optimizer sgd --local-epochs 10 learns there, "
            "but slowly where features are small",
            of="labels of nodes",
        ),
    ),
    aggregates=True,
    server_step=True,
    weighs_classes=True,
    only_sums=True,
    clips_updates=True,
    facts=FACTS,
)

FEDOPT: AnyMethod = dataclasses.replace(
    FEDAVG,
    name="fedopt",
    title="average of locally trained models, then a server momentum or Adam step",
    reference="Reddi et al., Adaptive federated optimization, ICLR 2021",
    needs=Needs(optimizer="sgd", lr=0.02, local_epochs=5, server_optimizer="adam"),
    cautions=(),
)

# Centralized training: one model, the uncut graph, full batch. The reference, not a federation: it
# is FedAvg with one client that holds everything and keeps its optimizer, so one round is
# `local_epochs` ordinary training steps.
CENTRALIZED: AnyMethod = dataclasses.replace(
    FEDAVG,
    name="centralized",
    title="one model on the uncut graph (no silos)",
    reference="Kipf and Welling, Semi-supervised classification with graph convolutional "
    "networks, ICLR 2017",
    needs=Needs(keep_optimizer=True),
    small_weights=False,
    clips_updates=False,
    setting=Uncut(),
    aggregates=False,
    server_step=False,
    cautions=(),
)
