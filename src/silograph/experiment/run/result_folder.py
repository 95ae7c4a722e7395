"""Result folders: made once, never overwritten, files complete or absent.

config.toml         the run with every default written out, ready for `silograph run --config`: it
                    means the same when a default has changed since; what was not given stands
                    under [defaults], and a run that differs chooses it anew
run.json            what was given and what was resolved, versions, source, hashes of graph and cut
simulation.json     what only a simulation knows of the cut: label counts, edges between clients;
                    absent where silos hold the graph
checksums.json      digests of the files that stand before the first round; when the run is over
                    also of its tables, its result and its models
session.json        of a run whose graph silos hold: its token, and their public keys
clients.csv         one row a client: nodes, edges, halo; with bytes, flops and test scores when
                    the run is over
rounds.csv          one row a judged round, written as the run goes
ledger.jsonl        one line for each direction of each call
checkpoints/        the last two, for `silograph resume`
diverged.txt        why training ended early, where it diverged
model.safetensors   the server's model of the best round; when the run is over
client_statistics.safetensors  with normalize=standard_client and a model of all clients: by which
                    means and deviations each client standardizes its features
recommenders/       of a simulation on ratings: what recommends items to each client's users
models/             where clients have models of their own: those, one file a client
result.json         the final result; there only when the run is over
report.html         the run as a page for people; written after everything else
"""

import csv
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from silograph.core.config import RunConfig, make_config
from silograph.core.errors import CheckpointError, ConfigError, TrainingError, mistake, read_mistake
from silograph.core.files import check_regular, hold_folder, sync_folder, write_atomic
from silograph.core.resolved_config import to_run_config
from silograph.core.run_file import read_toml, write_toml
from silograph.core.text import in_path
from silograph.experiment.resolve.data import Cut
from silograph.experiment.resolve.parts import (
    find_method,
    non_default_values,
    option_help,
    unset_options,
)
from silograph.experiment.resolve.user_code import code_digests
from silograph.experiment.result_files import (
    ABOUT,
    CHECKPOINTS,
    CLIENT_STATISTICS,
    CLIENTS,
    CONFIG,
    DIVERGED,
    FACT,
    FEATURE_DRIFT,
    FORMAT,
    LATER,
    LEDGER,
    MODEL,
    MODELS,
    RECOMMENDERS,
    RESULT,
    ROUNDS,
    SIMULATION,
    SUMS,
    Row,
    add_sums,
    check_format,
    check_written,
    describe_difference,
    digest_of,
    digest_of_bytes,
    file_of,
    is_of_model,
    read_csv,
    read_rounds,
    read_sums,
    replace_sums,
    to_csv,
    write_sums,
)
from silograph.experiment.run.recommender import client_recommenders
from silograph.experiment.run.result import VIEWS, Result
from silograph.experiment.run.round_scores import metrics_of
from silograph.experiment.run.setup import Setup, versions
from silograph.experiment.run.snapshot import identity
from silograph.experiment.run.trained_model import write_client_statistics
from silograph.federation.checkpoint import Checkpoint, CheckpointFolder
from silograph.federation.ledger import Ledger, Record
from silograph.federation.state_files import check_file, state_files
from silograph.graph.datasets import Source
from silograph.graph.graph import Graph
from silograph.graph.heterogeneity import describe
from silograph.methods.base import seen_by

# --- A new result folder: where it may be, and what is written before the first round ------------


SOURCE = {"data_dir", "dataset"}  # what run.json says of data that can be read again


def default_folder(config: RunConfig, part_name: str | None = None) -> str:
    """Return runs/DATASET-METHOD-TIME, with a number behind it if that exists.

    Args:
        config: of the run.
        part_name: stands in place of the method; None: the method's own name.

    Raises:
        ConfigError: unknown method, or one that cannot be imported.
    """
    name = find_method(config).name if part_name is None else part_name
    dataset = Path(os.path.abspath(config.dataset)).stem
    now = time.time()
    timestamp = (
        f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1000) % 1000:03d}"
    )
    base = f"runs/{dataset}-{in_path(name)}-{timestamp}"
    folder, number = base, 2
    while os.path.lexists(folder):
        folder, number = f"{base}-{number}", number + 1
    return folder


def check_free(path: str) -> None:
    """Raise `ConfigError` if a result folder could not be made at `path`."""
    if not path or "\0" in path:
        raise ConfigError(
            f"expected the path of a result folder, got {path!r}",
            **mistake("option-value", "out", path),
        )
    if os.path.lexists(path):
        raise ConfigError(
            f"expected a result folder that does not exist yet, got {path}: choose another --out, "
            "nothing was overwritten",
            **mistake("existing-output", path),
        )


def write_start(folder: Path, setup: Setup, user_config: RunConfig, source: Source | None) -> None:
    """Write the files that exist before the first round."""
    rerun_config = to_run_config(replace(setup.config, out=None))
    unset = unset_options(user_config, setup.parts)
    if (
        rerun_config.edge_weights != user_config.edge_weights
    ):  # the model has no place for them; another may
        unset.add("edge_weights")
    write_atomic(folder / CONFIG, write_toml(rerun_config, unset))
    given_options = non_default_values(replace(user_config, out=None), setup.parts)
    method, simulated_cut = setup.method, setup.simulated
    about: dict[str, Any] = {
        "format": FORMAT,
        "versions": versions(),
        "source": None if source is None else source.to_dict(),
        "same": identity(setup),
        "code": code_digests(setup.config),
        "model": setup.method_config.model.described(),
        "metrics": list(metrics_of(setup)),
        "given": given_options,
        "config": {k: v for k, v in vars(setup.config).items() if k != "out"},
        "help": option_help(setup.parts),
        "method": {
            "name": method.name,
            "title": method.title,
            "reference": method.reference,
            "judge": method.evaluate.view,
            "seen": seen_by(method, setup.config),
            "held": method.setting.held(setup.method_config.options),
            "facts": {**setup.parts.neighbors.part.facts, **method.facts},
        },
        "simulated": setup.is_simulation,
        "partition_hash": setup.partition_hash,
        "dataset": _dataset(setup),
    }
    write_atomic(folder / ABOUT, json.dumps(about, indent=2) + "\n")
    rows: Sequence[Mapping[str, Any]] = [{"client": name} for name in setup.federation.ids]
    if simulated_cut is not None or setup.shards is not None:
        shards = setup.shards
        rows, figures = (
            figures_of(setup.cut) if shards is None else (shards.client_rows, shards.figures)
        )
        write_atomic(folder / SIMULATION, json.dumps(figures) + "\n")
    write_atomic(folder / CLIENTS, to_csv(rows))
    files = [name for name in (CONFIG, ABOUT, SIMULATION, CLIENTS) if (folder / name).exists()]
    sums = {name: [digest_of(folder / name)] for name in files}
    write_sums(folder, sums)


def figures_of(cut: Cut) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return figures of each client of a cut, and of the whole of it."""
    graph = cut.graph
    statistics = describe(graph, cut.partition, copies=cut.copies_split)
    class_names: Sequence[str] = ()  # of what label counts are of
    if not graph.has_numbers:
        class_names = graph.class_names or [str(k) for k in range(graph.num_classes)]
    return statistics.client_rows(), {
        "note": "Known in a simulation only: silos would not tell label counts or edges.",
        **statistics.totals(),
        "classes": class_names,
        "labels": statistics.labels.tolist(),
        "between": None if statistics.between is None else statistics.between.tolist(),
    }


def _dataset(setup: Setup) -> dict[str, Any]:
    """Return name and sizes of the graph; its numbers of nodes and edges only in a simulation."""
    sizes = {"features": setup.schema.num_features, "classes": setup.schema.num_classes}
    if not setup.is_simulation:
        return {"name": setup.config.dataset, **sizes}
    shards = setup.shards
    name = setup.cut.graph.name if shards is None else shards.name
    sizes |= sizes_of(setup.cut.graph) if shards is None else shards.sizes
    weights = {} if setup.edge_weights is None else {"edge_weights": setup.edge_weights}
    return {"name": name, **sizes, **weights}


def sizes_of(graph: Graph) -> dict[str, int]:
    """Return numbers of nodes and edges, and of users, items and ratings."""
    return {"nodes": graph.num_nodes, "edges": graph.num_edges, **graph.rating_sizes}


# --- Files of the models that clients have of their own, as a simulation keeps them --------------
#
# At a silo of a real federation the silo keeps its own (`silograph.deploy.silo_result`).


GROWING = (ROUNDS, LEDGER)
FILE_ENDINGS = (".csv", ".html", ".json", ".jsonl", ".safetensors", ".toml")  # of what runs write
_VALIDATORS: Mapping[str, TypeAdapter[Any]] = {  # of run.json
    "same": TypeAdapter(dict[str, str]),
    "source": TypeAdapter(dict[str, str | None] | None),
}


class Prefix:
    """Number and digest of the bytes that a growing file begins with, updated as it grows."""

    def __init__(self) -> None:
        self.size = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, data: bytes) -> None:
        """Add data that were appended."""
        self.size += len(data)
        self._hash.update(data)

    @property
    def digest(self) -> str:
        """32 hex digits."""
        return self._hash.hexdigest()


def check_no_links(folder: Path) -> None:
    """Raise `ConfigError` for links in a folder that is written to: they lead to others' files.

    Raises:
        DataError: something in it is no regular file, such as a FIFO, or a folder with the name
            of a file.
    """
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            entry = os.path.join(where, name)
            if os.path.islink(entry):
                raise ConfigError(
                    f"expected a result folder without links, got one at {entry}, and what it "
                    "leads to would be changed: put the file itself there"
                )
            if name in files or name.endswith(FILE_ENDINGS):
                check_regular(entry)


class ResultFolder:
    """Reads and writes one run's folder, and keeps others from writing to it."""

    def __init__(self, path: Path) -> None:
        """Take hold of a folder that `create` made.

        Raises:
            ConfigError: there is no run in it, or a link, or another process is writing to it.
        """
        self.path = path
        self.run = ""  # digest of the run's identity, once it is known
        self.checkpoints = CheckpointFolder(path / CHECKPOINTS)
        self._num_written_records = 0  # records of the ledger that are in its file
        self._prefixes_by_file = {name: Prefix() for name in GROWING}
        check_no_links(path)
        for name in (CONFIG, ABOUT, SUMS, *GROWING):
            check_regular(path / name)
        try:
            (path / CONFIG).open("rb").close()
            lock = hold_folder(path)
        except OSError as error:
            raise ConfigError(
                f"expected a result folder with a config.toml at {path}, got: {error.strerror}",
                **read_mistake(error, path),
            ) from None
        if lock is None:
            raise ConfigError(
                f"expected a run that nobody is writing, got {path}, which another process holds",
                **mistake("folder-in-use", path),
            )
        self._lock = lock

    @staticmethod
    def create(
        path: str, setup: Setup, user_config: RunConfig, source: Source | None
    ) -> "ResultFolder":
        """Make the folder with what is known before the first round, all at once.

        Args:
            path: the folder.
            setup: the run.
            user_config: the config of the user; seeds and defaults are resolved in `setup`.
            source: where the data are; None where silos hold them.

        Raises:
            ConfigError: the folder exists or cannot be made.
        """
        check_free(path)
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            try:
                write_start(temporary, setup, user_config, source)
                temporary.rename(target)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        except OSError as error:
            raise ConfigError(
                f"expected to make the result folder {path}, got: {error.strerror}",
                **mistake("unwritable-path", path),
            ) from None
        folder = ResultFolder(target)
        folder.checkpoints.synced = not setup.is_simulation
        folder.set_identity(identity(setup))
        return folder

    def about(self) -> dict[str, Any]:
        """Return what run.json says.

        Raises:
            CheckpointError: it is missing, damaged, or of another version.
        """
        try:
            run_json: dict[str, Any] = json.loads((self.path / ABOUT).read_text(encoding="utf-8"))
            check_format(run_json, self.path / ABOUT)
            identity_and_source: dict[str, Any] = {
                name: _VALIDATORS[name].validate_python(run_json[name])
                for name in ("same", "source")
            }
            code = _VALIDATORS["same"].validate_python(run_json.get("code", {}))
            simulated = run_json.get("simulated", True) is True
            if (
                identity_and_source["source"] is not None
                and not identity_and_source["source"].keys() >= SOURCE
            ):
                raise ValueError(f"a source without {' and '.join(sorted(SOURCE))}")
        # pydantic's ValidationError is a ValueError.
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            short_reason = " ".join(str(reason).split())[:200]
            raise CheckpointError(
                f"expected what the run was in {self.path / ABOUT}, got: {short_reason}: restore "
                "the file from a copy, or begin a new run",
                **mistake("damaged-file", self.path / ABOUT),
            ) from None
        self._check_sums()
        self.checkpoints.synced = not simulated
        return {**identity_and_source, "code": code, "simulated": simulated}

    def config(self) -> RunConfig:
        """Return the config of the run.

        Raises:
            ConfigError: it cannot be read.
            CheckpointError: it is cut: a run writes its model with every config.
        """
        path = self.path / CONFIG
        config = make_config(read_toml(path), source=str(path))
        if config.model is None:
            raise CheckpointError(
                f"expected the config of a run in {path}, got one without a model: restore the "
                "file from a copy, or begin a new run",
                **mistake("damaged-file", path),
            )
        return config

    def _check_sums(self) -> None:
        """Raise `CheckpointError` for a file that is not as the run has written it.

        Models are left out: they are written when the run is over, and it was stopped before. So
        are files of `LATER`: the config and the tables are compared with the run's checkpoints.
        """
        for name, digests in read_sums(self.path).items():
            file = self.path / Path(name).name
            if is_of_model(name) or name in LATER:
                continue
            if line := describe_difference(file, digest_of(file), digests):
                raise CheckpointError(line, **mistake("damaged-file", file))

    def record_digest(self, name: str, data: bytes) -> None:
        """Record the digest of what a file will contain, besides its earlier digests."""
        add_sums(self.path, {name: digest_of_bytes(data)})

    def set_identity(self, same: Mapping[str, str]) -> None:
        """Set the identity of the run that writes here."""
        text = json.dumps(same, sort_keys=True)
        self.run = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def why_checkpoint_unusable(self, checkpoint: Checkpoint) -> str | None:
        """Return why a checkpoint is not of this folder as it is, or None.

        Raises:
            CheckpointError: the weights of its best round, or files of clients' states, are
                missing or damaged.
        """
        if checkpoint.facts.get("run") != self.run:
            return "it belongs to another run"
        current_sizes = self.sizes()
        try:
            for name, (size, digest) in checkpoint.facts["prefixes"].items():
                if current_sizes[name] < size:
                    return (
                        f"{name} has {current_sizes[name]} bytes, fewer than the {size} it had then"
                    )
                if self._prefix(name, size).digest != digest:
                    return f"{name} is damaged within the {size} bytes that it had then"
            if checkpoint.facts["best_apart"]:
                self.checkpoints.best(int(checkpoint.facts["best_round"]))  # raises if unusable
            digests = checkpoint.facts.get("states", {})
            for file in state_files(self.checkpoints.path, checkpoint.round, digests):
                check_file(file)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return "its facts are not those that this version writes"
        return None

    def record_divergence(self, reason: str) -> None:
        """Write why training ended, for the page."""
        text = reason + "\n"
        replace_sums(self.path, {DIVERGED: digest_of_bytes(text.encode(errors="backslashreplace"))})
        write_atomic(self.path / DIVERGED, text)

    @property
    def has_rounds(self) -> bool:
        """Whether the folder contains rounds or checkpoints."""
        return self.sizes()[ROUNDS] > 0 or bool(self.checkpoints.rounds)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path)

    def close(self) -> None:
        """Let others write to the folder."""
        os.close(self._lock)

    def add_round(self, row: Row) -> None:
        """Append a row to the table of rounds."""
        path = self.path / ROUNDS
        text = to_csv([row])
        if path.exists() and path.stat().st_size:
            header, _, text = text.partition("\n")
            with path.open(encoding="utf-8") as file:
                known_header = file.readline().rstrip("\n")
            if header != known_header:
                raise TrainingError(
                    f"expected the same facts in every round of a method, got columns {header} "
                    f"after {known_header}"
                )
        self._append(ROUNDS, text)

    def add_records(self, ledger: Ledger) -> None:
        """Append what the ledger's file does not have yet."""
        new = ledger.since(self._num_written_records)
        self._append(LEDGER, "".join(record.to_line() + "\n" for record in new))
        self._num_written_records += len(new)

    def _append(self, name: str, text: str) -> None:
        data, path = text.encode(), self.path / name
        is_new = not path.exists()
        with path.open("ab") as file:
            file.write(data)
            if self.checkpoints.synced:
                file.flush()
                os.fsync(file.fileno())
        if is_new and self.checkpoints.synced:
            sync_folder(self.path)
        self._prefixes_by_file[name].add(data)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the growing files."""
        paths = {name: self.path / name for name in GROWING}
        return {name: p.stat().st_size if p.exists() else 0 for name, p in paths.items()}

    def prefixes(self) -> dict[str, tuple[int, str]]:
        """Return size and digest of the growing files, as this process wrote them."""
        return {
            name: (file_prefix.size, file_prefix.digest)
            for name, file_prefix in self._prefixes_by_file.items()
        }

    def _prefix(self, name: str, size: int) -> "Prefix":
        """Return size and digest of the first `size` bytes of a growing file."""
        prefix = Prefix()
        if size:
            with (self.path / name).open("rb") as file:
                prefix.add(file.read(size))
        return prefix

    def records(self, size: int) -> list[Record]:
        """Return the records in the first bytes of the ledger's file.

        Raises:
            CheckpointError: a record is unreadable.
        """
        if not size:
            return []
        with (self.path / LEDGER).open("rb") as file:
            lines = file.read(size).decode(errors="replace").splitlines()
        return [Record.from_line(line) for line in lines]

    def truncate_files(self, sizes: Mapping[str, int]) -> list[Row]:
        """Cut the growing files to these bytes, and return the rows that are left.

        Raises:
            CheckpointError: the table of rounds or the ledger is unreadable.
        """
        (self.path / DIVERGED).unlink(missing_ok=True)
        for name, size in sizes.items():
            if self.sizes()[name] > size:
                os.truncate(self.path / name, size)
        self._prefixes_by_file = {name: self._prefix(name, size) for name, size in sizes.items()}
        self._num_written_records = len(self.records(sizes[LEDGER]))
        try:
            return read_rounds(self.path / ROUNDS) if sizes[ROUNDS] else []
        except (ValueError, TypeError, csv.Error) as error:
            raise CheckpointError(
                f"expected a table of rounds in {self.path / ROUNDS}, got: {error}",
                **mistake("damaged-file", self.path / ROUNDS),
            ) from None

    @property
    def is_complete(self) -> bool:
        """Whether the run is over and its result written."""
        return (self.path / RESULT).exists()

    def with_recorded_costs(self, result: Result) -> Result:
        """Return the result of a complete run with memory and compile seconds of its process.

        Raises:
            CheckpointError: result.json is damaged.
            DataError: it is not as the run has written it.
        """
        path = self.path / RESULT
        try:
            result_json = json.loads(path.read_text(encoding="utf-8"))
            memory = int(result_json["peak_memory_bytes"])
            seconds = float(result_json["compile_seconds"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"expected the result of a run in {path}, got something else: remove the file, and "
                "resume writes it anew",
                **mistake("damaged-file", path),
            ) from error
        check_written(self.path, [RESULT], "remove the file, and resume writes it anew")
        return replace(result, peak_memory_bytes=memory, compile_seconds=seconds)

    def finish(self, result: Result, setup: Setup) -> None:
        """Write the final clients.csv, the model, and last result.json; once."""
        if self.is_complete:
            return
        self.add_records(setup.federation.ledger)
        sizes, flops = setup.federation.ledger.by_client()
        columns: dict[str, Sequence[Any]] = {"bytes": sizes.tolist(), "flops": flops.tolist()}
        for name, views in result.client_scores.items():
            columns |= {f"test_{view}_{name}": views.get(view, ()) for view in VIEWS}
        # Sorted, for a checkpoint has them in an order of its own; NaN is not known.
        for name, t in sorted(result.client_facts.items()):
            columns[f"{FACT}{name}"] = [v if math.isfinite(v) else None for v in t.tolist()]
        rows: list[dict[str, Any]] = [dict(row) for row in read_csv(self.path / CLIENTS)]
        for name, values in columns.items():
            # Others have no value, or one client that trained on the uncut graph.
            column = values if len(values) == len(rows) else [None] * len(rows)
            for row, value in zip(rows, column, strict=True):
                row[name] = value
        text = to_csv(rows)
        self.record_digest(CLIENTS, text.encode())  # before, for the next line may be the last
        write_atomic(self.path / CLIENTS, text)
        self._save_models(result)
        self._save_recommenders(result, setup)
        if result.feature_drift:
            drift_text = to_csv(
                [
                    {"feature": name, "client": client, "distance": None if d != d else d}
                    for name, distances in result.feature_drift.items()
                    for client, d in zip(setup.federation.ids, distances.tolist(), strict=True)
                ]
            )
            add_sums(self.path, {FEATURE_DRIFT: digest_of_bytes(drift_text.encode())})
            write_atomic(self.path / FEATURE_DRIFT, drift_text)
        text = json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n"
        digests = {name: file_prefix.digest for name, file_prefix in self._prefixes_by_file.items()}
        digests[RESULT] = digest_of_bytes(text.encode(errors="backslashreplace"))
        replace_sums(self.path, digests)
        write_atomic(self.path / RESULT, text)

    def _save_recommenders(self, result: Result, setup: Setup) -> None:
        """Write what recommends items to each client's users, of a simulation on ratings."""
        digests = {}
        for number, (client, recommender) in enumerate(client_recommenders(result, setup).items()):
            name = f"{RECOMMENDERS}/{file_of(number, client)}"
            (self.path / name).parent.mkdir(exist_ok=True)
            recommender.save(self.path / name)
            digests[name] = digest_of(self.path / name)
        if digests:
            add_sums(self.path, digests)

    def _save_models(self, result: Result) -> None:
        """Write the models, and then their digests, which `load_model` compares."""
        models = {} if result.model is None else {MODEL: result.model}
        for number, (client, model) in enumerate(result.models.items()):
            models[f"{MODELS}/{file_of(number, client)}"] = model
        digests = {}
        for name, model in models.items():
            path = self.path / name
            path.parent.mkdir(exist_ok=True)
            model.save(path)
            digests[name] = digest_of(path)
        if result.model is not None and result.model.preprocessing.needs_client:
            path = self.path / CLIENT_STATISTICS
            if result.client_statistics:
                write_client_statistics(path, result.client_statistics)
                digests[CLIENT_STATISTICS] = digest_of(path)
        if digests:
            add_sums(self.path, digests)
