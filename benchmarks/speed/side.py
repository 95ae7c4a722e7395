"""What benchmarks share: silograph's side of a race, the machine, lines and pages."""

import json
import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from silograph.core.numeric_state import torch_threads
from silograph.core.resolved_config import training_key
from silograph.experiment.run import run as rounds
from silograph.experiment.run.clock import TrainingClock
from silograph.experiment.run.selecting import Selection
from silograph.experiment.run.setup import Setup, versions
from silograph.experiment.run.snapshot import Snapshot, without_parts
from silograph.nn.conv import Params

HERE = Path(__file__).parent
MARK = "<!-- table -->"
Row = dict[str, Any]  # one line of a benchmark


def one_round(
    setup: Setup, selection: Selection | None, snapshot: Snapshot
) -> tuple[Snapshot, list[Any]]:
    """Run a round and score it, as `silograph run` does; return the run after it and its rows."""
    begun = rounds.begin_round(setup, selection, snapshot, TrainingClock(0.0))
    state = without_parts(snapshot.state)
    trained = setup.method.round(setup.federation, begun.cfg, state, begun.t, begun.key)
    return rounds.finish_round(setup, selection, snapshot, begun, *trained)


class Ours:
    """Silograph's side: a set-up, and the run so far."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.snapshot = setup, rounds.first_snapshot(setup)

    @property
    def weights(self) -> Params:
        """The averaged model."""
        weights = self.snapshot.state.weights
        assert weights is not None  # FedAvg and centralized have them
        return weights

    def round(self) -> object:
        """Run one round and judge it, as `silograph run` does."""
        with torch_threads(self.setup.config.threads):
            self.snapshot, rows = one_round(self.setup, None, self.snapshot)
        return rows  # of the round before, whose model the clients have just scored

    def train(self) -> object:
        """Run one round that nobody judges."""
        setup, state, t = self.setup, self.snapshot.state, self.snapshot.round + 1
        fed, key = setup.federation, training_key(setup.config)
        with torch_threads(setup.config.threads):
            fed.start_round(t)
            state, report = setup.method.round(fed, setup.method_config, state, t, key)
        self.snapshot = replace(self.snapshot, round=t, state=state)
        return report


def machine() -> Row:
    """Return what seconds depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = versions()
    with suppress(metadata.PackageNotFoundError):
        found["numba"] = metadata.version("numba")
    commit = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "versions": found,
    }


def latest(lines: Path) -> dict[str, Row]:
    """Return the last line of each cell."""
    found = lines.read_text().splitlines() if lines.exists() else []
    return {row["cell"]: row for row in map(json.loads, found)}


def add_line(lines: Path, row: Row) -> None:
    """Append the line of a cell."""
    with lines.open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_page(page: Path, text: str) -> None:
    """Put a text between the page's two marks."""
    before, _, after = page.read_text().split(MARK)
    page.write_text(f"{before}{MARK}\n{text}\n{MARK}{after}")
