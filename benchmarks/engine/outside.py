"""What a round costs outside the compiled kernels, and with half of the clients.

    python benchmarks/engine/outside.py --data-dir ../shared/data --rounds 60

FedAvg, GCN of width 128, one local epoch, METIS, one thread, no result folder, by CPU time of the
process. Rounds that call all clients and rounds that call half of them are timed in turn; the
figures are medians, and the last column is the median of the ratios of neighboring rounds, half to
all. Time in kernels is measured around every call from Python to one, so it has what numba takes to
hand over arrays.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from silograph.core.config import make_config
from silograph.experiment.run import run as loop
from silograph.experiment.run.clock import TrainingClock
from silograph.experiment.run.setup import Setup, prepare
from silograph.experiment.run.snapshot import Snapshot, without_parts
from silograph.graph.datasets import load
from silograph.graph.graph import Graph

CELLS = (("cora", 10), ("cora", 100), ("pubmed", 10), ("pubmed", 100))
SHARES = {"all": 1.0, "half": 0.5}
KERNELS = (
    "silograph.nn.kernels.training.train",
    "silograph.nn.kernels.training.predict",
    "silograph.nn.kernels.optim.untouched_rows_after",
    "silograph.task.count_kernels.tally",
    "silograph.federation.fold_kernel.add_rows",
    "silograph.federation.fold_kernel.add_slices",
    "silograph.federation.fold_kernel.compare",
)
WARM_UP = 5


class Clock:
    """Sums the CPU seconds that are spent in kernels."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel whose seconds are counted."""

        def timed(*arguments: Any) -> Any:
            begin = time.process_time()
            found = kernel(*arguments)
            self.seconds += time.process_time() - begin
            return found

        return timed


@contextmanager
def timed_kernels() -> Iterator[Clock]:
    """Count the seconds in all kernels."""
    clock = Clock()
    with ExitStack() as stack:
        for path in KERNELS:
            module, _, name = path.rpartition(".")
            kernel = getattr(importlib.import_module(module), name, None)  # older code has fewer
            if kernel is not None:
                stack.enter_context(patch(path, clock.around(kernel)))
        yield clock


def prepared(graph: Graph, dataset: str, clients: int, share: float, every: int) -> Setup:
    """Return a run of one cell."""
    options = {"dataset": dataset, "clients": clients, "method": "fedavg", "rounds": 10**6}
    options |= {"participation": share, "eval_every": every}
    return prepare(make_config(options), graph)


def run_round(setup: Setup, before: Snapshot) -> Snapshot:
    """Run one round as the loop of a run does."""
    begun = loop.begin_round(setup, None, before, TrainingClock(0.0))
    state = without_parts(before.state)
    trained = setup.method.round(setup.federation, begun.cfg, state, begun.t, begun.key)
    return loop.finish_round(setup, None, before, begun, *trained)[0]


def measure(setups: dict[str, Setup], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return CPU seconds of single rounds, and those of them in kernels, by who is called."""
    at: dict[str, Snapshot] = {name: loop.first_snapshot(s) for name, s in setups.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in setups}
    with timed_kernels() as clock:
        for _ in range(rounds + WARM_UP):
            for name, setup in setups.items():
                inside, begin = clock.seconds, time.process_time()
                at[name] = run_round(setup, at[name])
                took = time.process_time() - begin
                found[name].append((took, clock.seconds - inside))
    return {name: values[WARM_UP:] for name, values in found.items()}


def lines(found: dict[str, list[tuple[float, float]]]) -> Iterator[str]:
    """Yield the last cells of the line of each who is called."""
    for name, values in found.items():
        whole = statistics.median(a for a, _ in values)
        inside = statistics.median(b for _, b in values)
        outside = statistics.median(1 - b / a for a, b in values)
        pairs = zip(values, found["all"], strict=True)
        ratio = statistics.median(mine / all_ for (mine, _), (all_, _) in pairs)
        shown = "" if name == "all" else f"{ratio:.2f}"
        yield f"{1000 * whole:.1f} | {1000 * inside:.1f} | {100 * outside:.0f} % | {shown}"


def main() -> None:
    """Print two lines for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="cells whose names have this: cora/100")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| graph | clients | evaluated | called | ms a round | in kernels | outside | to all |")
    print("|---|---|---|---|---|---|---|---|")
    for dataset, clients in CELLS:
        if arguments.only not in f"{dataset}/{clients}":
            continue
        graph = load(dataset, data_dir=arguments.data_dir)
        for evaluated, every in (("yes", 1), ("no", 10**6)):
            setups = {n: prepared(graph, dataset, clients, s, every) for n, s in SHARES.items()}
            for name, line in zip(SHARES, lines(measure(setups, arguments.rounds)), strict=True):
                print(f"| {dataset} | {clients} | {evaluated} | {name} | {line} |", flush=True)


if __name__ == "__main__":
    main()
