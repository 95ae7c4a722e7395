"""A cell of a study: one run, where it stands in the study's tables, and what came of it.

A cell is known by what decides its result, not by its place in a table. The outcome of a cell is a
line: plain values, as they stand in the study's file.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from silograph.aggregation.server_optimizers import SERVER_OPTIMIZERS
from silograph.core.config import ENGINE, RunConfig, checked, make_config
from silograph.core.errors import DataError, SilographError
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import Scalar
from silograph.core.work import hand_back_freed_memory
from silograph.experiment.resolve.parts import (
    FLAT,
    TABLES,
    NamedPart,
    find_method,
    named_parts,
    options_of,
)
from silograph.experiment.resolve.resolve import choose, fill_defaults
from silograph.experiment.resolve.run_request import source_hash, with_absolute_paths
from silograph.experiment.resolve.user_code import digest as source_digest
from silograph.experiment.resolve.user_code import is_spec, own_code
from silograph.experiment.result_files import VIRTUAL, Row
from silograph.experiment.run.progress import Progress
from silograph.experiment.run.result import VIEWS, Result, untrained_entry
from silograph.experiment.run.run import resume, run
from silograph.experiment.run.setup import versions
from silograph.graph.datasets import is_path, locate, tables_of
from silograph.graph.graph import Graph, fingerprint, with_directions
from silograph.graph.partition.options import FAVORED
from silograph.graph.partition.partition import is_partition_file
from silograph.graph.silos.read import is_silos, silos_files
from silograph.methods.base import Method
from silograph.nn.own_module import Make
from silograph.task.metric_table import METRICS, Metric

Line = dict[str, Any]
RESULTS = 1  # raised where a change of the library changes what the same config gives
MACHINE = (
    "out",
    "checkpoint_every",
    "data_dir",
    "tracker",
    *ENGINE,
)  # fields that decide no result
APART = ("method", "options", "seed", *MACHINE)  # fields that a study neither varies nor tunes
LASTING = "TrainingError"  # an error that is an outcome: the same cell diverges again


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a study.

    Attributes:
        labels: its place in the study's tables, by coordinate.
        config: the run.
        graph: the graph, where it is in memory and not what `dataset` names.
        method: the method, where it is a value.
        model: what makes the module, where it is a value.
    """

    labels: Mapping[str, Scalar]
    config: RunConfig
    graph: Graph | None = None
    method: Method | None = None
    model: Make | None = None

    @property
    def name(self) -> str:
        """Return the labels as words."""
        return words_of(self.labels)

    @property
    def folder_name(self) -> str:
        """Return what its result folder is called, below that of the study."""
        labels = (str(value) for value in self.labels.values())
        words = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", label) for label in labels)
        return f"{words[:60]}-{self.digest[:8]}"

    @cached_property
    def start(self) -> Line:
        """Return the part of the cell's line that is known before it runs.

        Raises:
            ConfigError: unknown method, model or option (names the nearest), or a part of
                the user's whose file cannot be read.
        """
        graph = None
        if self.graph is not None:
            directed = self.config.directed != "none"
            graph = fingerprint(with_directions(self.graph) if directed else self.graph)
        elif is_path(self.config.dataset):
            graph = file_hash(Path(self.config.dataset).expanduser())
        config = settings_of_cell(self.config, self.method, in_memory=self.graph is not None)
        start = {"labels": dict(self.labels), "config": config, "graph": graph, "results": RESULTS}
        sources = self._sources()
        return start | ({"sources": sources} if sources else {})

    def _sources(self) -> dict[str, str]:
        """Return hashes of the code and files of users."""
        hashes = {}
        for name, value in {"method": self.method, "model": self.model}.items():
            spec = getattr(self.config, name) or ""
            if value is not None:
                hashes[name] = source_hash(value) or "unknown"
            elif is_spec(spec):
                hashes[name] = source_digest(spec)
        for name in ("neighbors", "selector", "aggregator", "server_optimizer"):
            if is_spec(spec := getattr(self.config, name) or ""):
                hashes[name] = source_digest(spec)
        if is_partition_file(self.config.partition):
            path = Path(self.config.partition).expanduser()
            hashes["partition"] = file_hash(path) or "absent"
        return hashes

    @cached_property
    def digest(self) -> str:
        """Digest that identifies the cell."""
        return digest_of(self.start)


def settings_of_cell(
    config: RunConfig, method: Method | None = None, *, in_memory: bool = False
) -> dict[str, Any]:
    """Return the settings that determine a run's result, with every seed and default.

    Args:
        config: of the run.
        method: the method, where it is a value.
        in_memory: whether `dataset` is only the name of a graph in memory.

    Raises:
        ConfigError: unknown method, model or option (names the nearest).
    """
    config = with_absolute_paths(config, in_memory=in_memory)
    values = fill_defaults(config, choose(config, method))
    return {name: value for name, value in values.items() if name not in MACHINE}


def file_hash(path: Path) -> str | None:
    """Return the hash of a graph's files, None where there are none to read."""
    digest = hashlib.blake2b(digest_size=8)
    files = list(tables_of(path).values()) or ([] if path.is_dir() else [path])
    if is_silos(path):
        files = silos_files(path)
    if not files or not all(file.is_file() for file in files):
        return None
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def words_of(labels: Mapping[str, Scalar]) -> str:
    """Return labels as words, numbers with their names."""
    return ", ".join(
        str(value) if isinstance(value, str) else f"{key} {value}" for key, value in labels.items()
    )


def named_file_hash(config: RunConfig | ResolvedConfig) -> str | None:
    """Return the hash of the file that a dataset by name is in, None if it is in none."""
    with contextlib.suppress(DataError):  # the folder is gone
        path = locate(config.dataset, data_dir=config.data_dir)
        return None if path is None else file_hash(path)
    return None


def metric_in(lines: Iterable[Line | None]) -> Metric | None:
    """Return the metric of the first line that has one; older lines have accuracy."""
    scored = (line for line in lines if line is not None and "error" not in line)
    return next((METRICS[line.get("metric", "accuracy")] for line in scored), None)


def digest_of(start: Line) -> str:
    """Return 16 hex digits of what decides a line's result.

    A key that a line does not have did not exist when it was written: its default says how things
    were then. A line whose setting has since come to mean something else fits no cell, so that the
    cell runs again.
    """
    config = with_options(start["config"])
    if "evaluation_min_count" not in config:  # written before these fields had their meaning
        config |= {"evaluate_clients": "all", "evaluation_min_count": 0}
        config.pop("eval_on_receipt", None)  # the same scores, by other messages
        if config["normalize"] == "standard":  # by each client, over all of its nodes
            config["normalize"] = "standard_all_nodes"
        if start.get("graph") is None:  # a graph by name has no weights: every rule gives the same
            config.pop("edge_weights", None)
        else:
            config.setdefault("edge_weights", "use")
    for f in fields(RunConfig):
        if f.name not in (*MACHINE, *FLAT, "options"):
            config.setdefault(f.name, f.default)
    favored = "partition.favored_classes"
    if config["options"].get(favored, FAVORED) is None:  # lines of old have the number itself
        config["options"] |= {favored: FAVORED}
    parts = [config, start.get("graph"), start["results"]]
    parts += [start["sources"]] if "sources" in start else []  # of what users wrote
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def with_options(config: Mapping[str, Any]) -> Line:
    """Return the config of a line with the options of all its parts; old lines have them as keys.

    An option that a line does not have is at the default of its part.
    """
    new_config = {name: value for name, value in config.items() if name not in FLAT}
    if new_config.get("neighbors") is None:
        new_config["neighbors"] = "full" if config.get("fanout") is None else "fanout"
    if new_config.get("selector") is None:
        new_config["selector"] = "uniform"  # what all methods had when lines did not say it
    old_options = {f"{kind}.{name}": config[name] for name, kind in FLAT.items() if name in config}
    old_options |= {n if "." in n else f"method.{n}": v for n, v in config["options"].items()}
    options = (
        dict(new_config["options"]) if not any(name in config for name in FLAT) else old_options
    )
    if new_config.get("server_optimizer") is None:
        new_config["server_optimizer"], options = _server_optimizer_of_old(new_config, options)
    with contextlib.suppress(SilographError):  # of a part that is gone: nothing to fill in
        options = fill_option_defaults(tuple(new_config.get(kind) for kind in TABLES), options)
    return new_config | {"options": options}


def _server_optimizer_of_old(config: Line, options: Line) -> tuple[str, Line]:
    """Return the server optimizer of a line from when it was an option of `fedopt`, and options."""
    renamed = {"method.server_lr": "method.correction_lr"} if config["method"] == "llcg" else {}
    if config["method"] != "fedopt":
        return "none", {renamed.get(name, name): value for name, value in options.items()}
    name = str(options.get("method.server_optimizer", "adam"))
    known = {f"method.{f.name}" for f in fields(SERVER_OPTIMIZERS[name].options)}
    return name, {
        n.replace("method.", "server_optimizer.") if n in known else n: value
        for n, value in options.items()
        if n in known or not n.startswith("method.")
    }


def fill_option_defaults(names: tuple[str | None, ...], option_values: Mapping[str, Any]) -> Line:
    """Return the options of parts (names in the order of `TABLES`), defaults written out.

    Options of users' parts stay as they are: lines have all of them, and to know what they are
    would be to import what a line names.

    Raises:
        ConfigError: there is no part of such a name, or an option out of range.
    """
    user_kinds = {kind for kind, name in zip(TABLES, names, strict=True) if name and is_spec(name)}
    filled: Line = {
        n: value for n, value in option_values.items() if n.partition(".")[0] in user_kinds
    }
    library_names = (
        None if kind in user_kinds else name for kind, name in zip(TABLES, names, strict=True)
    )
    for kind, part in cached_named_parts(tuple(library_names)).items():
        if kind in user_kinds:
            continue
        all_values = {name: option_values.get(f"{kind}.{name}") for name in options_of(part)}
        values = {name: value for name, value in all_values.items() if value is not None}
        options: object = checked(part.options, values, f"options of {part.name}")
        filled |= {f"{kind}.{name}": value for name, value in vars(options).items()}
    return filled


@lru_cache
def cached_named_parts(names: tuple[str | None, ...]) -> Mapping[str, NamedPart]:
    """Return parts by kind."""
    name_by_kind = zip(TABLES, names, strict=True)
    return named_parts(make_config({kind: name for kind, name in name_by_kind if name is not None}))


def is_final(line: Line) -> bool:
    """Whether a line is final: another try would give the same."""
    return "error" not in line or line.get("kind") == LASTING


def run_cell(
    cell: Cell,
    *,
    folder: str | None = None,
    progress: Progress | str = "none",
    test: bool = True,
) -> Line:
    """Run a cell and return its outcome as plain values; an error is one line of text.

    Args:
        cell: the run.
        folder: the run's result folder; if it exists, the run is resumed.
        progress: called after every round.
        test: whether test scores are returned.
    """
    is_reset = _reset_peak_memory()
    try:
        result = _run_or_resume(cell, folder, progress)
    except Exception as error:  # one cell must not end the others
        return {"error": one_line(error), "kind": type(error).__name__, "versions": versions()}
    unknown_peak = {} if is_reset else {"peak_memory_bytes": None}
    return _result_line(cell, result, test=test) | unknown_peak


def _run_or_resume(cell: Cell, folder: str | None, progress: Progress | str) -> Result:
    graph, method, model = cell.graph, cell.method, cell.model
    if folder is not None and Path(folder).exists():
        trusted_code = tuple(own_code(cell.config).values())
        return resume(
            folder, graph=graph, method=method, model=model, trust=trusted_code, progress=progress
        )
    config = replace(cell.config, out=folder)
    model_option: dict[str, Any] = {} if model is None else {"model": model}
    return run(graph, config=config, method=method, progress=progress, **model_option)


def one_line(error: BaseException) -> str:
    """Return an error's text as one line; the kind stands before what is not silograph's own."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SilographError) else f"{type(error).__name__}: {text}"[:500]


def _result_line(cell: Cell, result: Result, *, test: bool) -> Line:
    """Return the line of a cell's result: plain values, without test scores unless `test`."""
    config, last_row = result.config, result.rounds[-1]
    judging_view = find_method(cell.config, cell.method).evaluate.view
    parts = ("val", "test") if test else ("val",)
    line: Line = {
        part: {
            view: scores and dict(scores)
            for view in VIEWS
            for scores in [getattr(getattr(result, part), view)]
        }
        for part in parts
    }
    baseline = result.baseline
    if test:
        line["constant"] = baseline and {"name": result.constant, "scores": dict(baseline)}
        constant = {} if baseline is None else {result.constant: baseline}
        scores_by_name = {**constant, **result.untrained} if result.untrained else {}
        line |= untrained_entry({n: result.reported_scores(s) for n, s in scores_by_name.items()})
    if (each_best := result.each_best) is not None:
        line["each_best"] = {part: s and dict(s) for part in parts for s in [each_best[part]]}
    line |= {
        "judge": judging_view,
        "metric": result.metric.name,
        "local_bias": result.local_bias,
        "best_round": result.best_round,
        "stopped": result.stopped,
        "rounds": last_row["round"],
        "last": {k: v for k, v in last_row.items() if k.partition("_")[0] in parts},
        "bytes": {"total": result.bytes, "by_kind": result.ledger.bytes_by_kind},
        "flops": result.flops,
        "flops_by_part": result.ledger.flops_by_part,
        "seconds": round(result.seconds, 3),
        **({} if result.virtual_seconds is None else {VIRTUAL: result.virtual_seconds}),
        "peak_memory_bytes": result.peak_memory_bytes,
        "clients": config.clients,
        "kernels": config.kernels,
        "block_size": config.block_size,
        "partition": result.partition_hash,
    }
    if result.cut is not None:
        line["data"] = {"graph": result.cut.fingerprint, "file": named_file_hash(config)}
    curves = {part: f"{part}_{judging_view}_{result.metric.name}" for part in parts}
    return line | {"versions": versions(), "curve": _curve(result.rounds, curves)}


def _curve(rows: tuple[Row, ...], scores: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return the judged rounds as columns, rounded: enough to draw."""
    columns = {"round": "round", **scores, "train_loss": "train_loss"}
    columns |= {"bytes": "bytes", "flops": "flops"}
    if VIRTUAL in rows[0]:  # then time and who trained are what a run is about
        columns |= {n: n for n in (VIRTUAL, "bytes_evaluation", "participants")}
    return {
        name: [round(v, 5) if isinstance(v := row[key], float) else v for row in rows]
        for name, key in columns.items()
    }


def _reset_peak_memory() -> bool:
    """Forget the peak memory of earlier cells of this process; return whether that is possible."""
    hand_back_freed_memory()  # what they have freed would count as this cell's
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
