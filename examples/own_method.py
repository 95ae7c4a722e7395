"""A method of your own: the median of the clients' weights in place of their mean.

Shows: a round at the server, with the parts of FedAvg; `sg.run(method=METHOD)`. A median is not
moved far by a few broken clients (Yin et al., "Byzantine-robust distributed learning", ICML 2018,
algorithm 1). `--aggregator median` has it for every method that averages.
"""

from dataclasses import replace
from typing import Any

import silograph as sg
from silograph import methods as m


@m.calls(m.train)
def median_round(
    server: m.Server[Any], state: m.ServerState
) -> tuple[m.ServerState, m.RoundReport]:
    """Train at the selected clients, and take the median of every weight over them."""
    assert state.weights is not None  # set by FedAvg's set-up
    client_ids = server.select()
    replies = server.gather(m.train, m.GlobalModel(state.weights), to=client_ids)
    trained = replies["nodes"] > 0  # clients with training nodes
    weights = {name: replies[f"weights/{name}"][trained].median(0).values for name in state.weights}
    return m.ServerState(weights, state.memory), server.report(client_ids, replies, trained)


METHOD = replace(
    m.FEDAVG, name="median", title="median of clients", **m.program(median_round), cautions=()
)

if __name__ == "__main__":
    graph = sg.load("digits")
    print(graph)
    for method in (m.FEDAVG, METHOD):
        result = sg.run(graph, method=method, clients=6, partition="random", rounds=20)
        assert result.test.server is not None
        print(f"{method.name}: accuracy {result.test.server.accuracy:.4f}")
