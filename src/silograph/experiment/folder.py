"""Result folders: made once, never overwritten, files complete or absent.

config.toml    the run, ready for `silograph run --config`
run.json       versions, the model's shape, the partition's hash
clients.csv    one row a client: nodes, edges, halo
rounds.csv     one row an evaluated round, written as the run goes
result.json    the final result; there only when the run is complete
"""

import csv
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from silograph.core.config import RunConfig, write_toml
from silograph.core.errors import ConfigError
from silograph.experiment.result import Result, Row
from silograph.experiment.setup import Setup
from silograph.graph.statistics import describe

PACKAGES = ("silograph", "torch", "torch-geometric", "numpy", "scipy", "scikit-learn", "pymetis")


def default_folder(config: RunConfig) -> str:
    """Return runs/DATASET-METHOD-TIME, with a number behind it if that exists."""
    dataset = Path(config.dataset).stem
    base = f"runs/{dataset}-{config.method}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, number = base, 2
    while os.path.lexists(name):
        name, number = f"{base}-{number}", number + 1
    return name


def check_free(path: str) -> None:
    """Raise `ConfigError` if a result folder could not be made at `path`."""
    if not path or "\0" in path:
        raise ConfigError(f"expected the path of a result folder, got {path!r}")
    if os.path.lexists(path):
        raise ConfigError(
            f"expected a result folder that does not exist yet, got {path}: choose another --out, "
            "nothing was overwritten"
        )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide numbers."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **found}


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, also after a crash."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class ResultFolder:
    """Writes one run's folder."""

    def __init__(self, path: str, setup: Setup) -> None:
        """Make the folder and write what is known before the first round.

        Raises:
            ConfigError: the folder exists or cannot be made.
        """
        check_free(path)
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"expected to make the result folder {path}, got: {error.strerror}"
            ) from None
        write_atomic(self.path / "config.toml", write_toml(replace(setup.config, out=None)))
        about: dict[str, Any] = {
            "versions": versions(),
            "model": asdict(setup.method_config.model),
            "partition_hash": setup.cut.partition.hash,
            "dataset": {
                "nodes": setup.cut.graph.num_nodes,
                "edges": setup.cut.graph.num_edges,
                "features": setup.cut.graph.num_features,
                "classes": setup.cut.graph.num_classes,
            },
        }
        write_atomic(self.path / "run.json", json.dumps(about, indent=2) + "\n")
        self._write_clients(setup)

    def _write_clients(self, setup: Setup) -> None:
        rows = client_rows(setup)
        with (self.path / "clients.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def add_round(self, row: Row) -> None:
        """Append a row to rounds.csv."""
        path = self.path / "rounds.csv"
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)

    def finish(self, result: Result) -> None:
        """Write result.json."""
        full = result.to_dict() | {
            "val": asdict(result.val),
            "partition_hash": result.partition_hash,
        }
        write_atomic(self.path / "result.json", json.dumps(full, indent=2) + "\n")


def client_rows(setup: Setup) -> Sequence[Mapping[str, Any]]:
    """Return one row for each client of the cut."""
    cut = setup.cut
    return describe(cut.graph, cut.partition, cut.split).client_rows()
