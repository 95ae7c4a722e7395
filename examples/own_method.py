"""A method of your own: FedAvg with the median of the clients' weights in place of their mean.

Shows: a server program and the parts that it reuses; `sg.run(method=METHOD)`; what it costs. A
median is not pulled away by a few broken clients; where none is, it may lose to the mean.
`--aggregator median` does so for all methods that average; here it shows a round of your own.
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
    selected,
    shared,
    train,
    under,
)


def median_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients, take the median of every weight over those that could."""
    assert state.weights is not None  # set by FedAvg's init
    inbox = shared("weights", state.weights)
    chosen = selected(fed, cfg, t, key)
    reply = fed.call(train, inbox, what=Kind.WEIGHTS, key=key.fold("train", t), to=chosen)
    trained = reply["nodes"].t > 0
    weights = {name: w[trained].median(0).values for name, w in under("weights", reply).items()}
    loss = float(reply["loss"].t[trained].mean())
    return ServerState(weights, state.memory), RoundReport(chosen, loss)


METHOD = replace(FEDAVG, name="median", title="median of clients", round=median_round, cautions=())

graph = sg.load("digits")
print(graph)
for method in (FEDAVG, METHOD):
    result = sg.run(graph, method=method, clients=6, partition="random", rounds=20)
    scores = result.test.server
    assert scores is not None
    print(f"{method.name}: accuracy {scores.accuracy:.4f}, {result.bytes / 1e6:.2f} MB")
