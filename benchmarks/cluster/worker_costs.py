"""What workers cost and gain: calls, rounds, memory, start-up; writes worker_costs.md.

    python benchmarks/cluster/worker_costs.py [--quick] [--ray]

A call of an op that computes nothing, with a model of 256 x 128 values that is averaged, shows the
cost of calls; rounds of FedAvg on graphs of PubMed's and ogbn-arxiv's sizes show the gain. Each
figure is the least of several: others use this machine, too.
"""

import argparse
import json
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from nothing import nothing

from silograph import from_arrays
from silograph.core.config import make_config
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.numeric_state import standard_numerics
from silograph.core.payload import Shared
from silograph.experiment.resolve.resolve import resolve_simulation
from silograph.experiment.run.setup import Setup, first_weights, make_engine, prepare
from silograph.federation.base import WeightedMean
from silograph.graph.graph import Graph
from silograph.methods.base import Method

FOLDER = Path(__file__).parent


def drawn_graph(nodes: int, edges: int, features: int, classes: int) -> Graph:
    """Return a graph of a given size with random edges and labels that its features tell."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (nodes,), generator=generator)
    means = torch.randn(classes, features, generator=generator)
    x = means[y] + torch.randn(nodes, features, generator=generator)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    return from_arrays(edge_index=edge_index.numpy(), x=x.numpy(), y=y.numpy())


def memory_of(process: str) -> int:
    """Return the resident memory of a process in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def children() -> list[str]:
    """Return the processes that this one has started."""
    texts = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return [number for text in texts for number in text.split()]


def seconds_of_call(setup: Setup, times: int) -> float:
    """Return the least seconds of a call that averages a model."""
    fed = setup.federation
    inbox = {"w": Shared(torch.zeros(256, 128))}
    mean, least = WeightedMean("n", around={"w": inbox["w"].t}), float("inf")
    for _ in range(times):
        began = time.perf_counter()
        fed.call(nothing, inbox, what=Kind.WEIGHTS, key=Key.of(0), reduce=mean)
        least = min(least, time.perf_counter() - began)
    return least


def seconds_of_round(setup: Setup, rounds: int) -> float:
    """Return the least seconds of a round of training after the first."""
    fed, cfg, method = setup.federation, setup.method_config, setup.method
    assert isinstance(method, Method)
    key, least = Key.of(1), float("inf")
    state = method.init(fed, cfg, first_weights(setup), key)
    for t in range(1, rounds + 2):
        fed.start_round(t)
        began = time.perf_counter()
        state, _ = method.round(fed, cfg.in_round(t), state, t, key)
        if t > 1:
            least = min(least, time.perf_counter() - began)
    return least


def measured(graph: Graph, engine: str, workers: int, times: int, **options: Any) -> dict[str, Any]:
    """Return seconds of start-up, of a call and of a round, and memory in bytes."""
    config = make_config({"method": "fedavg", "partition": "random", "block_size": 50, **options})
    run = resolve_simulation(config, graph)
    resolved = replace(run.resolved.config, engine=engine, workers=workers)
    began = time.perf_counter()
    federation = make_engine(resolved, run.resolved.method_config, run.block, run.route)
    started = time.perf_counter() - began
    with closing(federation):
        setup = replace(prepare(config, graph), federation=federation)
        call, turn = seconds_of_call(setup, times), seconds_of_round(setup, 3)
        own = [memory_of(number) for number in children()] if engine == "local" else []
        return {"start": started, "call": call, "round": turn, "memory": own}


@standard_numerics()
def main() -> None:
    """Measure, and print one line of JSON for each setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="small graphs")
    parser.add_argument("--ray", action="store_true", help="on Ray instead of processes")
    given = parser.parse_args()
    scale = 0.05 if given.quick else 1.0
    sizes = {
        "PubMed": (19_717, 44_338, 500, 3),
        "arxiv": (169_343, 1_166_243, 128, 40),
    }
    for name, (nodes, edges, features, classes) in sizes.items():
        graph = drawn_graph(int(nodes * scale), int(edges * scale), features, classes)
        for clients in (100, 1000):
            for workers in (1, 2, 3):
                engine = "ray" if given.ray and workers > 1 else "local"
                local = {"clients": clients, "local_epochs": 5, "hidden": 128}
                row = measured(graph, engine, workers, 5, **local)
                about = {"graph": name, "clients": clients, "workers": workers, "engine": engine}
                print(json.dumps(about | row), flush=True)


if __name__ == "__main__":
    main()
