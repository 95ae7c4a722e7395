"""What a round of Flower's simulation on Ray costs, with clients that compute nothing.

    python -m venv flower && flower/bin/pip install 'flwr[simulation]'
    flower/bin/python benchmarks/cluster/flower_costs.py [--clients 100] [--workers 2]

The model has 256 x 128 values, as in `worker_costs.py`: each client replies with what it got, and
the server takes the mean. CPU milliseconds of the server's process and of the busiest actor.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.client import ClientApp, NumPyClient  # type: ignore[import-not-found]
from flwr.common import Context, ndarrays_to_parameters  # type: ignore[import-not-found]
from flwr.server import (  # type: ignore[import-not-found]
    ServerApp,
    ServerAppComponents,
    ServerConfig,
)
from flwr.server.strategy import FedAvg  # type: ignore[import-not-found]
from flwr.simulation import run_simulation  # type: ignore[import-not-found]

TICK = 1 / os.sysconf("SC_CLK_TCK")
ROUNDS = 4  # the first is not counted


def actors() -> dict[str, Path]:
    """Return the folders in /proc of Flower's actors by process number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"ClientAppActor" in (folder / "cmdline").read_bytes():
                found[folder.name] = folder
        except OSError:  # it has ended
            continue
    return found


def seconds_of(folder: Path) -> float:
    """Return the CPU seconds of a process so far."""
    text = (folder / "stat").read_text().rpartition(")")[2].split()
    return TICK * (int(text[11]) + int(text[12]))


class Echo(NumPyClient):  # type: ignore[misc]
    """A client that replies with what it got."""

    def fit(self, parameters: Any, config: Any) -> tuple[Any, int, dict[str, Any]]:
        """Return the weights that came."""
        del config
        return parameters, 1, {}


class Measured(FedAvg):  # type: ignore[misc]
    """FedAvg that notes CPU seconds when it has aggregated a round."""

    notes: list[tuple[float, dict[str, float]]]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Aggregate, and note what every process has used so far."""
        assert not failures
        outcome = super().aggregate_fit(server_round, results, failures)
        by_actor = {name: seconds_of(folder) for name, folder in actors().items()}
        self.notes.append((time.process_time(), by_actor))
        return outcome


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    everyone = {"fraction_fit": 1.0, "fraction_evaluate": 0.0, "min_fit_clients": given.clients}
    everyone |= {"min_available_clients": given.clients}
    weights = ndarrays_to_parameters([np.zeros((256, 128), np.float32)])
    strategy = Measured(**everyone, initial_parameters=weights)
    strategy.notes = []

    def server(context: Context) -> ServerAppComponents:
        del context
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))

    def client(context: Context) -> Any:
        del context
        return Echo().to_client()

    start = time.process_time()
    run_simulation(
        ServerApp(server_fn=server),
        ClientApp(client_fn=client),
        num_supernodes=given.clients,
        backend_config={
            "init_args": {"num_cpus": given.workers, "address": "local"},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    (first, first_actors), *_, (last, last_actors) = strategy.notes
    rounds = ROUNDS - 1
    busiest = max(last_actors[name] - first_actors.get(name, 0.0) for name in last_actors)
    row = {"clients": given.clients, "workers": given.workers, "actors": len(last_actors)}
    row |= {"server_ms": 1e3 * (last - first) / rounds, "actor_ms": 1e3 * busiest / rounds}
    row |= {"first_round_server_s": first - start}
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
