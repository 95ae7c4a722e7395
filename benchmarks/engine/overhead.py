"""What the ledger and a checkpoint after every round cost, against neither.

    python benchmarks/engine/overhead.py --data-dir ../shared/data

FedAvg, GCN of width 128, one local epoch, every round judged. Rounds are timed in turn with
nothing, with the ledger, and with ledger and checkpoint, in one process on one thread, by CPU time
of the process; the figure is the median over blocks of the ratio within a block.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from silograph.core.config import make_config, resolve_seeds
from silograph.core.work import Meter
from silograph.experiment import loop
from silograph.experiment.folder import ResultFolder
from silograph.experiment.setup import Setup, prepare
from silograph.experiment.snapshot import Snapshot, identity, to_checkpoint
from silograph.graph.datasets import load

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
        patch(f"{engine}.InProcess._record", lambda *_: None),
    ):
        yield


def timed(action: Callable[[], Snapshot]) -> tuple[float, Snapshot]:
    """Return the CPU seconds of an action, and what it returned."""
    begin = time.process_time()
    done = action()
    return time.process_time() - begin, done


def measure(setup: Setup, folder: ResultFolder, blocks: int, rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of a round for each variant, one figure a block."""
    same = identity(setup)
    snapshot = loop.first_snapshot(setup)
    seconds: dict[str, list[float]] = {"neither": [], "ledger": [], "ledger + checkpoint": []}

    def go(checkpoint: bool) -> Snapshot:
        now = snapshot
        for _ in range(rounds):
            now, row = loop._round(setup, now, 0.0)
            if checkpoint:
                assert row is not None
                folder.add_round(row)
                folder.add_records(setup.federation.ledger)
                folder.checkpoints.write(to_checkpoint(setup, now, same, folder.sizes()))
        return now

    go(True)  # warm up
    for _ in range(blocks):
        with without_ledger():
            taken, _ = timed(lambda: go(False))
        seconds["neither"].append(taken / rounds)
        for name in ("ledger", "ledger + checkpoint"):
            taken, _ = timed(lambda name=name: go(name != "ledger"))  # type: ignore[misc]
            seconds[name].append(taken / rounds)
    return seconds


def main() -> None:
    """Print one line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--method", default="fedavg")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| graph | clients | ms a round, neither | ledger | ledger + checkpoint |")
    print("|---|---|---|---|---|")
    for dataset, clients in CELLS:
        config = make_config(
            {"dataset": dataset, "clients": clients, "method": arguments.method, "rounds": 10**6}
        )
        setup = prepare(resolve_seeds(config), load(dataset, data_dir=arguments.data_dir))
        with tempfile.TemporaryDirectory() as place:
            folder = ResultFolder.create(str(Path(place) / "run"), setup, identity(setup))
            seconds = measure(setup, folder, blocks=9, rounds=6)
            folder.close()
        base = seconds["neither"]
        cells = [f"{1000 * statistics.median(base):.1f}"]
        for name in ("ledger", "ledger + checkpoint"):
            ratios = [b / a for a, b in zip(base, seconds[name], strict=True)]
            cells.append(f"{100 * (statistics.median(ratios) - 1):+.1f} %")
        print(f"| {dataset} | {clients} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
