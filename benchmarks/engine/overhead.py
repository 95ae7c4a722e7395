"""What the ledger and a checkpoint after every round cost, against neither.

    python benchmarks/engine/overhead.py --data-dir ../shared/data

FedAvg, GCN of width 128, one local epoch, every round judged. Single rounds are timed in turn with
nothing, with the ledger, and with ledger and checkpoint, in one process on one thread, by CPU time
of the process; the figure is the median of the ratios of neighboring rounds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from silograph.core.config import make_config
from silograph.core.work import Meter
from silograph.experiment.run import run as loop
from silograph.experiment.run.clock import TrainingClock
from silograph.experiment.run.result_folder import ResultFolder
from silograph.experiment.run.setup import Setup, prepare
from silograph.experiment.run.snapshot import separate_best_weights, to_checkpoint, without_parts
from silograph.graph.datasets import load

VARIANTS = ("neither", "ledger", "ledger + checkpoint")
WARM_UP = 3
CELLS = (("cora", 10), ("cora", 100), ("pubmed", 10), ("pubmed", 100))


@contextmanager
def unmetered(clients: int) -> Iterator[Meter]:
    """Stand in for `metered`: nobody counts."""
    yield Meter(clients)


def no_sizes(_op: str, _payload: Any, clients: int) -> np.ndarray:
    """Stand in for `frame_sizes`."""
    return np.zeros(clients, dtype=np.int64)


@contextmanager
def without_ledger() -> Iterator[None]:
    """Switch off everything that the ledger costs."""
    engine = "silograph.federation.in_process"
    with (
        patch(f"{engine}.metered", unmetered),
        patch(f"{engine}.frame_sizes", no_sizes),
        patch("silograph.federation.ledger.Ledger.append", lambda *_: None),
    ):
        yield


def measure(setup: Setup, folder: ResultFolder, rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of single rounds by variant; variants take turns in changing order."""
    snapshot = loop.first_snapshot(setup)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}

    def one(variant: str) -> None:
        nonlocal snapshot
        begin = time.process_time()
        begun = loop.begin_round(setup, None, snapshot, TrainingClock(0.0))
        state = without_parts(snapshot.state)
        trained = setup.method.round(setup.federation, begun.cfg, state, begun.t, begun.key)
        snapshot, rows = loop.finish_round(setup, None, snapshot, begun, *trained)
        if variant == "ledger + checkpoint":
            (row,) = rows
            folder.add_round(row)
            folder.add_records(setup.federation.ledger)
            apart = separate_best_weights(snapshot)
            if apart is not None and snapshot.best is not None:
                folder.checkpoints.keep_best(snapshot.best.round, apart)
            folder.checkpoints.write(to_checkpoint(setup, snapshot, folder.run, folder.prefixes()))
        seconds[variant].append(time.process_time() - begin)

    for turn in range(rounds + WARM_UP):
        for place in range(len(VARIANTS)):
            variant = VARIANTS[(turn + place) % len(VARIANTS)]
            with without_ledger() if variant == "neither" else nullcontext():
                one(variant)
    return {name: values[WARM_UP:] for name, values in seconds.items()}


def main() -> None:
    """Print one line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| graph | clients | ms a round, neither | ledger | ledger + checkpoint |")
    print("|---|---|---|---|---|")
    for dataset, clients in CELLS:
        config = make_config(
            {"dataset": dataset, "clients": clients, "method": arguments.method, "rounds": 10**6}
        )
        setup = prepare(config, load(dataset, data_dir=arguments.data_dir))
        with tempfile.TemporaryDirectory() as place:
            folder = ResultFolder.create(str(Path(place) / "run"), setup, config, None)
            seconds = measure(setup, folder, arguments.rounds)
            folder.close()
        base = statistics.median(seconds["neither"])
        cells = [f"{1000 * base:.1f}"]
        for name in VARIANTS[1:]:
            ratios = [b / a for a, b in zip(seconds["neither"], seconds[name], strict=True)]
            cells.append(f"{100 * (statistics.median(ratios) - 1):+.1f} %")
        print(f"| {dataset} | {clients} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
