"""Result folders: made once, never overwritten, files complete or absent.

config.toml         the run as it was given, ready for `silograph run --config`
run.json            everything as resolved: seeds, versions, source, hashes of graph and cut
clients.csv         one row a client: nodes, edges, halo; with bytes and flops when the run is over
rounds.csv          one row a judged round, written as the run goes
ledger.jsonl        one line for each direction of each call
checkpoints/        the last two, for `silograph resume`
model.safetensors   the server's model of the best round; when the run is over
result.json         the final result; there only when the run is over
"""

import csv
import fcntl
import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from silograph.core.config import RunConfig, write_toml
from silograph.core.errors import CheckpointError, ConfigError
from silograph.experiment.result import Result, Row
from silograph.experiment.setup import Setup, versions
from silograph.experiment.snapshot import identity
from silograph.federation.checkpoint import Checkpoint, CheckpointFolder
from silograph.federation.ledger import Ledger, Record
from silograph.graph.statistics import describe

ROUNDS, LEDGER = "rounds.csv", "ledger.jsonl"
WHOLE = ("round", "participants", "bytes", "bytes_evaluation")  # columns of integers


def default_folder(config: RunConfig) -> str:
    """Return runs/DATASET-METHOD-TIME, with a number behind it if that exists."""
    dataset = Path(os.path.abspath(config.dataset)).stem
    now = time.time()
    stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1000) % 1000:03d}"
    base = f"runs/{dataset}-{config.method}-{stamp}"
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


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, also after a crash."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class ResultFolder:
    """Reads and writes one run's folder, and keeps others from writing to it."""

    def __init__(self, path: Path) -> None:
        """Take hold of a folder that `create` made.

        Raises:
            ConfigError: there is no run in it, or another process is writing to it.
        """
        self.path = path
        self.run = ""  # digest of the run's identity, once it is known
        self.checkpoints = CheckpointFolder(path / "checkpoints")
        self._written = 0  # records of the ledger that are in its file
        try:
            self._lock: IO[str] = (path / "config.toml").open(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"expected a result folder with a config.toml at {path}, got: {error.strerror}"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(
                f"expected a run that nobody is writing, got {path}, which another process holds"
            ) from None

    @staticmethod
    def create(
        path: str, setup: Setup, given: RunConfig, source: Mapping[str, str | None] | None
    ) -> "ResultFolder":
        """Make the folder with what is known before the first round, all at once.

        Args:
            path: the folder.
            setup: the run.
            given: the config as it was given; seeds and defaults are resolved in `setup`.
            source: what `load` finds the graph by, or None for a graph in memory.

        Raises:
            ConfigError: the folder exists or cannot be made.
        """
        check_free(path)
        target = Path(path)
        making = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            making.mkdir()
            try:
                _write_start(making, setup, given, source)
                making.rename(target)
            except BaseException:
                shutil.rmtree(making, ignore_errors=True)
                raise
        except OSError as error:
            raise ConfigError(
                f"expected to make the result folder {path}, got: {error.strerror}"
            ) from None
        folder = ResultFolder(target)
        folder.take(identity(setup))
        return folder

    def about(self) -> dict[str, Any]:
        """Return what run.json says.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        try:
            found: dict[str, Any] = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            return {"same": found["same"], "source": found["source"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"expected what the run was in {self.path / 'run.json'}, got: {error}"
            ) from None

    def take(self, same: Mapping[str, str]) -> None:
        """Say which run writes here from now on."""
        text = json.dumps(same, sort_keys=True)
        self.run = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def fits(self, checkpoint: Checkpoint) -> str | None:
        """Return why a checkpoint is not of this folder as it is, or None.

        Raises:
            CheckpointError: the weights of its best round are missing or damaged.
        """
        if checkpoint.facts.get("run") != self.run:
            return "it belongs to another run"
        have = self.sizes()
        for name, size in checkpoint.facts["sizes"].items():
            if have[name] < size:
                return f"{name} has {have[name]} bytes, fewer than the {size} it had then"
        if checkpoint.facts["best_apart"]:
            self.checkpoints.best(checkpoint.facts["best_round"])  # raises where it is unusable
        return None

    def close(self) -> None:
        """Let others write to the folder."""
        self._lock.close()

    def add_round(self, row: Row) -> None:
        """Append a row to the table of rounds."""
        path = self.path / ROUNDS
        text = _csv([row])
        if path.exists() and path.stat().st_size:
            text = text.partition("\n")[2]
        with path.open("a", newline="", encoding="utf-8") as file:
            file.write(text)

    def add_records(self, ledger: Ledger) -> None:
        """Append what the ledger's file does not have yet."""
        new = ledger.since(self._written)
        with (self.path / LEDGER).open("a", encoding="utf-8") as file:
            file.writelines(record.to_line() + "\n" for record in new)
        self._written += len(new)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the growing files."""
        paths = {name: self.path / name for name in (ROUNDS, LEDGER)}
        return {name: p.stat().st_size if p.exists() else 0 for name, p in paths.items()}

    def cut_back(self, sizes: Mapping[str, int]) -> tuple[list[Row], list[Record]]:
        """Cut the growing files to these bytes, and return the rows and records that are left.

        Raises:
            CheckpointError: a record of the ledger is unreadable.
        """
        for name, size in sizes.items():
            if self.sizes()[name] > size:
                os.truncate(self.path / name, size)
        rows, records = [], []
        if sizes.get(ROUNDS):
            with (self.path / ROUNDS).open(newline="", encoding="utf-8") as file:
                rows = [_row(line) for line in csv.DictReader(file)]
        if sizes.get(LEDGER):
            lines = (self.path / LEDGER).read_text(encoding="utf-8").splitlines()
            records = [Record.from_line(line) for line in lines]
        self._written = len(records)
        return rows, records

    @property
    def is_complete(self) -> bool:
        """Whether the run is over and its result written."""
        return (self.path / "result.json").exists()

    def finish(self, result: Result, setup: Setup) -> None:
        """Write the final clients.csv, the model, and last result.json; once."""
        if self.is_complete:
            return
        self.add_records(setup.federation.ledger)
        sizes, flops = setup.federation.ledger.by_client()
        rows = [dict(row) for row in client_rows(setup)]
        if len(rows) == len(sizes):  # not when one client trained on the uncut graph
            for row, size, work in zip(rows, sizes.tolist(), flops.tolist(), strict=True):
                row |= {"bytes": size, "flops": work}
        write_atomic(self.path / "clients.csv", _csv(rows))
        if result.model is not None:
            result.model.save(self.path / "model.safetensors")
        full = result.to_dict() | {
            "val": asdict(result.val),
            "partition_hash": result.partition_hash,
        }
        text = json.dumps(full, indent=2, allow_nan=False)
        write_atomic(self.path / "result.json", text + "\n")


def _write_start(
    folder: Path, setup: Setup, given: RunConfig, source: Mapping[str, str | None] | None
) -> None:
    """Write what is known before the first round."""
    write_atomic(folder / "config.toml", write_toml(replace(given, out=None)))
    graph = setup.cut.graph
    about: dict[str, Any] = {
        "versions": versions(),
        "source": source,
        "same": identity(setup),
        "model": asdict(setup.method_config.model),
        "partition_hash": setup.cut.partition.hash,
        "dataset": {
            "nodes": graph.num_nodes,
            "edges": graph.num_edges,
            "features": graph.num_features,
            "classes": graph.num_classes,
        },
    }
    write_atomic(folder / "run.json", json.dumps(about, indent=2) + "\n")
    write_atomic(folder / "clients.csv", _csv(client_rows(setup)))


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(line: Mapping[str, str]) -> Row:
    """Return a row of the table of rounds as it was: Python's floats survive their text."""
    return {
        name: None if not text else int(text) if name in WHOLE else float(text)
        for name, text in line.items()
    }


def client_rows(setup: Setup) -> Sequence[Mapping[str, Any]]:
    """Return one row for each client of the cut."""
    cut = setup.cut
    return describe(cut.graph, cut.partition, cut.split).client_rows()
