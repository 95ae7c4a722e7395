"""A method of your own: FedAvg with the median of the clients' weights in place of their mean.

Shows: a server program and the parts that it reuses; `sg.run(method=METHOD)`; what it costs. A
median is not pulled away by a few broken clients; where none is, it may lose to the mean.
docs/methods.md tells the rest.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: "Byzantine-robust distributed learning: towards
optimal statistical rates", ICML 2018, algorithm 1 with medians, here of weights.
"""

from dataclasses import replace

import silograph as sg
from silograph.methods import (
    FEDAVG,
    Federation,
    Key,
    Kind,
    MethodConfig,
    RoundReport,
    ServerState,
    shared,
    train,
    under,
)


def median_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Train everywhere, take the median of every weight over clients that trained."""
    del cfg  # nothing of this method is a choice
    assert state.weights is not None  # set by FedAvg's init
    inbox = shared("weights", state.weights)
    reply = fed.call(train, inbox, what=Kind.WEIGHTS, key=key.fold("train", t))
    trained = reply["nodes"].t > 0
    weights = {name: w[trained].median(0).values for name, w in under("weights", reply).items()}
    loss = float(reply["loss"].t[trained].mean())
    return ServerState(weights, state.memory), RoundReport(tuple(fed.ids), loss)


METHOD = replace(FEDAVG, name="median", title="median of clients", round=median_round)

graph = sg.load("digits")
print(graph)
for method in (FEDAVG, METHOD):
    result = sg.run(graph, method=method, clients=6, partition="random", rounds=20)
    scores = result.test.server
    assert scores is not None
    print(f"{method.name}: accuracy {scores.accuracy:.4f}, {result.bytes / 1e6:.2f} MB")
