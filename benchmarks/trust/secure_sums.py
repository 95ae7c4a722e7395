"""What secure aggregation costs: bytes, CPU seconds and accuracy beside plain sums.

    python benchmarks/trust/secure_sums.py simulated cora.npz
    python benchmarks/trust/secure_sums.py protocol
    python benchmarks/trust/secure_sums.py sessions cora.npz

Runs alternate, plain and secure; seconds are CPU seconds of this process, the least of several.
`protocol` takes the steps of one sum without any training. `sessions` has a server and ten silos in
threads of this process, over gRPC; seconds of a round are differences of a long and a short run.
Each prints a line of JSON for each cell.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import silograph as sg
from silograph.core.config import RunConfig, make_config
from silograph.deploy.server import serve
from silograph.deploy.server_settings import ServerSettings
from silograph.deploy.silo import Attendance, take_part_in_run
from silograph.experiment.resolve.data import cut_graph
from silograph.experiment.resolve.parts import choose_parts
from silograph.experiment.run.result import Result
from silograph.federation.secure.protocol import ServerSum, SiloSum
from silograph.federation.session.events import Event, What
from silograph.graph.graph import Graph
from silograph.graph.silos.export import write_silos
from silograph.graph.silos.read import read_silo

SILOS = (3, 10, 50, 100)
VALUES = 200_000  # of a model such as that of Cora with 128 hidden units
ABOUT = b"benchmark"
RUN: dict[str, Any] = {"method": "fedavg", "partition": "random", "eval_every": 1000}


def tell(**cell: Any) -> None:
    """Print a cell."""
    print(json.dumps(cell), flush=True)


def cpu_seconds(run: Callable[[], Result]) -> tuple[float, Result]:
    """Return the CPU seconds of a run, and its result."""
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def bytes_up(result: Result, number: int) -> int:
    """Return the bytes of weights that all clients have sent in a round."""
    return sum(
        int(r.bytes.sum())
        for r in result.ledger.records
        if r.round == number and r.direction == "up" and r.what == "weights"
    )


def bytes_around(result: Result, number: int) -> int:
    """Return the bytes of keys, shares and what unmasks the training's sum of a round."""
    kinds = ("keys", "shares", "masks")
    records = [r for r in result.ledger.records if r.round == number and r.step == 1]
    return sum(int(r.bytes.sum()) for r in records if r.what in kinds)


def accuracy_of(result: Result) -> float:
    """Return the test accuracy of the server's model."""
    assert result.test.server is not None
    return float(result.test.server["accuracy"] or 0)


def difference_of(one: Result, other: Result) -> float:
    """Return the largest difference of two models' weights."""
    assert one.model is not None
    assert other.model is not None
    a, b = one.model.weights, other.model.weights
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def simulated(graph: Graph, rounds: int, times: int, silos: Sequence[int] = SILOS) -> None:
    """Compare rounds in one process."""
    for clients in silos:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        results: dict[bool, Result] = {}
        for _ in range(times):
            for secure in (False, True):
                options = {**RUN, "clients": clients, "secure_aggregation": secure}
                longer, results[secure] = cpu_seconds(
                    lambda o=options: sg.run(graph, **o, rounds=1 + rounds)  # type: ignore[misc]
                )
                shorter, _ = cpu_seconds(
                    lambda o=options: sg.run(graph, **o, rounds=1)  # type: ignore[misc]
                )
                seconds[secure].append((longer - shorter) / rounds)
        plain, masked = results[False], results[True]
        tell(
            part="simulated",
            silos=clients,
            seconds_plain=round(min(seconds[False]), 4),
            seconds_secure=round(min(seconds[True]), 4),
            bytes_up_plain=bytes_up(plain, 2) // clients,
            bytes_up_secure=bytes_up(masked, 2) // clients,
            bytes_around=bytes_around(masked, 2) // clients,
            accuracy_plain=accuracy_of(plain),
            accuracy_secure=accuracy_of(masked),
            largest_difference=difference_of(plain, masked),
        )


def protocol(times: int, silos: Sequence[int] = SILOS) -> None:
    """Measure one sum, at a silo and at the server."""
    for count in silos:
        best = [float("inf")] * 2
        for _ in range(times if count < 50 else 1):
            names = [f"silo{i:03}" for i in range(count)]
            values = {n: np.arange(VALUES, dtype=np.uint64) for n in names}
            start = time.process_time()
            parties = {name: SiloSum(name, ABOUT) for name in names}
            server = ServerSum(ABOUT)
            for name in names:
                server.add_keys(name, parties[name].advertise())
            for name in names:
                server.add_shares(name, parties[name].share(server.keys_for(name), names))
            for name in names:
                server.add_masked(name, parties[name].mask(values[name], server.shares_for(name)))
            for name in names:
                server.add_confirmed(name, parties[name].confirm(server.states))
            for name in names:
                server.add_revealed(name, parties[name].reveal(server.tags_for(name)))
            at_silos = time.process_time() - start
            start = time.process_time()
            total = server.unmask()
            best = [min(best[0], at_silos / count), min(best[1], time.process_time() - start)]
            assert (total == np.arange(VALUES, dtype=np.uint64) * np.uint64(count)).all()
        tell(part="protocol", silos=count, silo=round(best[0], 4), server=round(best[1], 4))


def federate(graph: Graph, config: RunConfig, folder: Path) -> Result:
    """Run a federation of silos in threads."""
    cut = cut_graph(config, graph, choose_parts(config).partition)
    silos = write_silos(folder, cut.graph, cut.partition, cut.split, format="npz")
    (folder / "secret").write_bytes(bytes(range(32)))
    (folder / "secret").chmod(0o600)
    address: list[str] = []
    listening = threading.Event()

    def report(event: Event) -> None:
        if event.what is What.LISTENING:
            address.append(str(event.address))
            listening.set()

    def take_part(path: Path) -> None:
        listening.wait(600)
        attendance = Attendance(address[0], path / "key.pem", folder / "secret", insecure=True)
        take_part_in_run(read_silo(path), attendance, lambda _: None)

    threads = [threading.Thread(target=take_part, args=(path,)) for path in silos]
    for thread in threads:
        thread.start()
    result = serve(config, ServerSettings("127.0.0.1:0", insecure=True), report=report)
    for thread in threads:
        thread.join()
    return result


def sessions(graph: Graph, rounds: int, times: int, epochs: int) -> None:
    """Compare rounds of ten silos over gRPC, each with so many local epochs."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    results: dict[bool, Result] = {}
    base = {**RUN, "clients": 10, "dataset": "cora", "evaluation_min_count": 0}
    base["local_epochs"] = epochs
    for _ in range(times):
        for secure in (False, True):
            taken = []
            for number in (1, 1 + rounds):
                options = {**base, "secure_aggregation": secure, "rounds": number}
                config = make_config({**options, "evaluate_clients": "all"})
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "silos"
                    second, results[secure] = cpu_seconds(
                        lambda c=config, p=path: federate(graph, c, p)  # type: ignore[misc]
                    )
                taken.append(second)
            seconds[secure].append((taken[1] - taken[0]) / rounds)
    plain, masked = results[False], results[True]
    tell(
        part="sessions",
        silos=10,
        epochs=epochs,
        seconds_plain=round(min(seconds[False]), 4),
        seconds_secure=round(min(seconds[True]), 4),
        bytes_up_plain=bytes_up(plain, 2) // 10,
        bytes_up_secure=bytes_up(masked, 2) // 10,
        bytes_around=bytes_around(masked, 2) // 10,
        accuracy_plain=accuracy_of(plain),
        accuracy_secure=accuracy_of(masked),
    )


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("simulated", "protocol", "sessions"))
    parser.add_argument("graph", nargs="?")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--silos", type=int, nargs="*", default=SILOS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.part == "protocol":
        protocol(arguments.times, arguments.silos)
        return
    graph = sg.load(arguments.graph)
    if arguments.part == "simulated":
        simulated(graph, arguments.rounds, arguments.times, arguments.silos)
    else:
        sessions(graph, arguments.rounds, arguments.times, arguments.epochs)


if __name__ == "__main__":
    main()
