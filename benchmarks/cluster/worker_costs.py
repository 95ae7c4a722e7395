"""What workers cost and gain: calls, rounds, memory and start-up.

    python benchmarks/cluster/worker_costs.py [--quick] [--ray] [--graph PubMed] [--workers 1,2]

A call of an op that computes nothing, with a model of 256 x 128 values of which the mean is taken,
shows what a call costs. Rounds of FedAvg on drawn graphs of the sizes of PubMed and ogbn-arxiv show
the gain. Others may use this machine, so seconds are CPU time: that of the engine's process and
that of the busiest worker. Their sum is what a run takes where every worker has a core. Start-up is
in CPU time, too.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from nothing import nothing

import silograph as sg
from silograph.core.config import make_config
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.numeric_state import standard_numerics
from silograph.core.payload import Shared
from silograph.experiment.resolve.resolve import SimulatedRun, resolve_simulation
from silograph.experiment.run.setup import make_engine
from silograph.federation.base import Engine, WeightedMean
from silograph.graph.graph import Graph

SIZES = {"PubMed": (19_717, 44_338, 500, 3), "arxiv": (169_343, 1_166_243, 128, 40)}
TICK = 1 / os.sysconf("SC_CLK_TCK")
CALLS, ROUNDS, EPOCHS = 50, 2, 3
Row = dict[str, Any]


def drawn_graph(nodes: int, edges: int, features: int, classes: int) -> Graph:
    """Return a graph of a given size with random edges and labels that its features tell."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (nodes,), generator=generator)
    means = torch.randn(classes, features, generator=generator)
    x = means[y] + torch.randn(nodes, features, generator=generator)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    return sg.from_arrays(edge_index=edge_index.numpy(), x=x.numpy(), y=y.numpy())


def worker_processes() -> Iterator[Path]:
    """Yield the folders in /proc of this run's workers, which this process has started."""
    for folder in sorted(Path("/proc").glob("[0-9]*")):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        is_worker = b"workers.process_main" in command or command.startswith(b"ray::WorkerServer")
        if is_worker and is_descendant(folder):
            yield folder


def is_descendant(folder: Path) -> bool:
    """Return whether this process has started another, or a process in between has."""
    while folder.name not in ("0", "1"):
        if int(folder.name) == os.getpid():
            return True
        parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        folder = folder.with_name(parent)
    return False


def worker_seconds() -> list[float]:
    """Return the CPU seconds of each worker so far."""
    texts = [
        (folder / "stat").read_text().rpartition(")")[2].split() for folder in worker_processes()
    ]
    return [TICK * (int(text[11]) + int(text[12])) for text in texts]


def resident_bytes(folder: Path) -> int:
    """Return the resident memory of a process."""
    return int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cost_of(work: Callable[[], None], times: int) -> Row:
    """Return the CPU milliseconds of a piece of work, on the mean: engine, busiest worker."""
    workers, own = worker_seconds(), time.process_time()
    for _ in range(times):
        work()
    own = time.process_time() - own
    spent = [after - before for before, after in zip(workers, worker_seconds(), strict=True)]
    return {"engine": 1e3 * own / times, "worker": 1e3 * max(spent, default=0.0) / times}


def costs_of_engine(fed: Engine, run: SimulatedRun) -> Row:
    """Return the costs of a call and of a round of an engine, and memory by process."""
    inbox = {"w": Shared(torch.zeros(256, 128))}
    mean = WeightedMean("n", around={"w": inbox["w"].t})
    cfg, method = run.resolved.method_config, run.resolved.parts.method.part
    key, rounds = Key.of(1), iter(range(1, 100))
    weights = cfg.model.init_weights(key, torch.float32)
    state = method.init(fed, cfg, weights, key)

    def call() -> None:
        fed.call(nothing, inbox, what=Kind.WEIGHTS, key=key, reduce=mean)

    def turn() -> None:
        nonlocal state
        t = next(rounds)
        fed.start_round(t)
        state, _ = method.round(fed, cfg.in_round(t), state, t, key)
        fed.keep(t, ())

    call()
    turn()  # kernels are compiled or loaded
    costs = {"call": cost_of(call, CALLS), "round": cost_of(turn, ROUNDS)}
    memory = [resident_bytes(folder) for folder in worker_processes()]
    return costs | {"memory": [resident_bytes(Path("/proc/self")), *memory]}


def measure(run: SimulatedRun, engine: Literal["local", "ray"], workers: int) -> Row:
    """Return the costs of one engine."""
    config = replace(run.resolved.config, engine=engine, workers=workers)
    own = time.process_time()
    resolved = replace(run.resolved, config=config)
    fed = make_engine(replace(run, resolved=resolved, workers=workers))
    with closing(fed):
        start = {"engine": time.process_time() - own, "worker": max(worker_seconds(), default=0.0)}
        return {"start": start, **costs_of_engine(fed, run)}


def table(rows: list[Row], engine: str) -> str:
    """Return the table of all rows."""
    base = {(r["graph"], r["clients"]): total(r["round"]) for r in rows if r["workers"] == 1}
    lines = [
        f"| {r['graph']} | {r['clients']} | {r['workers']} | {text(r['call'])} | "
        f"{text(r['round'])} | {base[r['graph'], r['clients']] / total(r['round']):.2f} | "
        f"{' + '.join(f'{size / 1e6:.0f}' for size in r['memory'])} | "
        f"{r['start']['engine']:.1f} + {r['start']['worker']:.1f} |"
        for r in rows
    ]
    return "\n".join(
        [
            f"## {engine}",
            "",
            "| graph | clients | workers | call, ms | round, ms | gain | memory, MB | start, s |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def total(cost: Mapping[str, float]) -> float:
    """Return the CPU time of the engine and the busiest worker."""
    return cost["engine"] + cost["worker"]


def text(cost: Mapping[str, float]) -> str:
    """Return a cost as engine + busiest worker."""
    return f"{cost['engine']:.1f} + {cost['worker']:.1f}"


@standard_numerics()
def main() -> None:
    """Measure, and print a table, and meanwhile a line of JSON for each row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="graphs of a fifth of the size")
    parser.add_argument("--ray", action="store_true", help="on Ray instead of processes")
    parser.add_argument("--graph", choices=[*SIZES], help="one of the graphs (default: both)")
    parser.add_argument("--workers", default="1,2,3", help="numbers of workers")
    given = parser.parse_args()
    scale, rows = 0.2 if given.quick else 1.0, list[Row]()
    for name, (nodes, edges, features, classes) in SIZES.items():
        if given.graph not in (None, name):
            continue
        graph = drawn_graph(int(nodes * scale), int(edges * scale), features, classes)
        for clients in (100, 1000) if name == "PubMed" else (1000,):
            options = {"method": "fedavg", "partition": "random", "clients": clients}
            options |= {"block_size": clients // 20, "local_epochs": EPOCHS}
            run = resolve_simulation(make_config(options), graph)
            for workers in map(int, given.workers.split(",")):
                is_ray = given.ray and workers > 1
                engine: Literal["local", "ray"] = "ray" if is_ray else "local"
                row = {"graph": name, "clients": clients, "workers": workers}
                rows.append(row | measure(run, engine, workers))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows, "Ray" if given.ray else "Processes"))


if __name__ == "__main__":
    main()
