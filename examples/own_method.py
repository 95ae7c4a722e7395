"""A method of your own: FedAvg with the median of the clients' weights in place of their mean.

Shows: a server program and the parts that it reuses; `sg.run(method=METHOD)`; what it costs. A
median is not pulled away by a few broken clients; where none is, it may lose to the mean.
`--aggregator median` does so for all methods that average; here it shows a round of your own.
docs/reference/method_interface.md has all rules.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: "Byzantine-robust distributed learning: towards
optimal statistical rates", ICML 2018, algorithm 1 with medians, here of weights.
"""

from dataclasses import replace
from typing import Any

import silograph as sg
from silograph.methods import (
    FEDAVG,
    GlobalModel,
    RoundReport,
    Server,
    ServerState,
    calls,
    program,
    train,
)


@calls(train)
def median_round(server: Server[Any], state: ServerState) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients, take the median of every weight over those that could."""
    assert state.weights is not None  # set by FedAvg's set-up
    client_ids = server.select()
    replies = server.gather(train, GlobalModel(state.weights), to=client_ids)
    trained = replies["nodes"] > 0
    weights = {name: replies[f"weights/{name}"][trained].median(0).values for name in state.weights}
    return ServerState(weights, state.memory), server.report(client_ids, replies, trained)


METHOD = replace(
    FEDAVG, name="median", title="median of clients", **program(median_round), cautions=()
)

graph = sg.load("digits")
print(graph)
for method in (FEDAVG, METHOD):
    result = sg.run(graph, method=method, clients=6, partition="random", rounds=20)
    scores = result.test.server
    assert scores is not None
    print(f"{method.name}: accuracy {scores.accuracy:.4f}, {result.bytes / 1e6:.2f} MB")
