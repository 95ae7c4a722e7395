"""A study: cells that are run where their line is missing, one JSON line each as they end.

A study can end at any instant, its process killed, and go on: finished lines are never lost, and
a last line that was cut off is dropped.

Lines of finished cells can be packed: beside `NAME.jsonl` there may be `NAME.jsonl.xz`, whose lines
come first. Nobody adds to it but `pack`.
"""

import json
import logging
import lzma
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, mistake
from silograph.core.files import check_regular, hold_folder, write_atomic
from silograph.experiment.resolve.data import prepare_graph
from silograph.experiment.resolve.resolve import num_cores
from silograph.experiment.result_files import UNCHECKED, with_digest, without_digest
from silograph.graph.datasets import is_path, source_of
from silograph.graph.graph import Graph, fingerprint
from silograph.graph.partition.split import time_column
from silograph.study.cells import Cell, Line, digest_of, is_final, named_file_hash
from silograph.study.workers import Job, run_here, run_in_processes, show_study

LOG = logging.getLogger("silograph")
PACKED = ".xz"  # ends the name of a file of packed lines
MOST_PACKED = 2**30  # bytes of text in such a file


class StudyFile(AbstractContextManager["StudyFile"]):
    """The lines of a study, in a file or only in memory; one process at a time holds its folder."""

    def __init__(self, path: Path | None, *, is_locked: bool = False) -> None:
        """Take hold of the file's folder, and drop a last line that was cut off.

        Args:
            path: of the file, made if absent; None keeps lines in memory.
            is_locked: whether this process has locked the folder already, for another file in it.

        Raises:
            ConfigError: another process holds it, it cannot be made, or a line is unreadable.
        """
        self.path = path
        self.lines: list[Line] = []
        self._by_digest: dict[str, Line] = {}
        self._unchecked = 0  # lines without a digest
        self._file = -1
        self._lock: int | None = None
        if path is not None:
            self._file, self._lock = _open(path, is_locked=is_locked)
            try:
                packed = _parse_lines(packed_path(path), _read_packed(path))
                for line, has_digest in packed + _read_repaired_lines(path, self._file):
                    self._remember(line)
                    self._unchecked += not has_digest
            except BaseException:
                self.close()
                raise

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Let others write to the file."""
        if self._file >= 0:
            os.close(self._file)
            if self._lock is not None:
                os.close(self._lock)
            self._file, self._lock = -1, None

    def warn_of_unchecked(self) -> None:
        """Log a line where an older version has written some lines, which have no digests."""
        if self._unchecked:
            line_count = f"{self._unchecked} of {len(self.lines)} lines of {self.path}"
            LOG.warning("%s", UNCHECKED.format(line_count))

    def find_line(self, digest: str) -> Line | None:
        """Return the latest line of a cell, None if it has none."""
        return self._by_digest.get(digest)

    def add(self, line: Line) -> None:
        """Append a line; it is on the disk whole, or not at all."""
        if self._file >= 0:
            text = (json.dumps(with_digest(line), allow_nan=False) + "\n").encode()
            size = os.fstat(self._file).st_size
            try:
                if os.write(self._file, text) != len(text):
                    raise OSError(28, "No space left on device", str(self.path))
                os.fsync(self._file)
            except BaseException:
                os.ftruncate(self._file, size)
                raise
        self._remember(line)

    def _remember(self, line: Line) -> None:
        self.lines.append(line)
        self._by_digest[digest_of(line)] = line


def _open(path: Path, *, is_locked: bool) -> tuple[int, int | None]:
    """Return the file, made if absent, and what holds its folder."""
    lock = None
    check_regular(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = None if is_locked else hold_folder(path.parent)
        if is_locked or lock is not None:
            return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666), lock
    except OSError as error:
        if lock is not None:
            os.close(lock)
        raise ConfigError(
            f"expected to write {path}, got: {error.strerror}", **mistake("unwritable-path", path)
        ) from None
    raise ConfigError(
        f"expected a study that nobody is running, got {path.parent}, which another process holds: "
        "wait for it to end, or take another folder",
        **mistake("folder-in-use", path.parent),
    )


def _read_repaired_lines(path: Path, file: int) -> list[tuple[Line, bool]]:
    """Return the lines of a file, and drop a last one that was cut off."""
    text = path.read_bytes()
    complete, _, rest_of_file = text.rpartition(b"\n")
    if rest_of_file:
        if _parse_line(rest_of_file) is None:
            os.ftruncate(file, len(text) - len(rest_of_file))
        else:  # somebody's editor left the last newline out
            os.write(file, b"\n")
            complete = text
    return _parse_lines(path, complete)


def read_lines(path: Path) -> list[Line]:
    """Return the finished lines of a study's file without holding it; none if it is absent.

    Raises:
        ConfigError: a line is unreadable.
    """
    check_regular(path)
    lines = _parse_lines(packed_path(path), _read_packed(path))
    if path.exists():
        text = path.read_bytes()
        complete, _, last_line = text.rpartition(b"\n")
        lines += _parse_lines(path, complete if _parse_line(last_line) is None else text)
    return [line for line, _ in lines]


def packed_path(path: Path) -> Path:
    """Return the file of the packed lines of a study's file."""
    return path.with_name(path.name + PACKED)


def pack(path: Path) -> None:
    """Move the lines of a study's file to its packed ones, which take a tenth of the room.

    Raises:
        ConfigError: another process holds the folder, or a line is unreadable.
    """
    with StudyFile(path):  # which looks at every line
        packed_text = _read_packed(path)
        text = path.read_bytes()
        if not packed_text.endswith(text):  # else a process ended before it removed the file
            write_atomic(packed_path(path), lzma.compress(packed_text + text))
        path.unlink()


def _read_packed(path: Path) -> bytes:
    """Return the text of packed lines; nothing if there are none."""
    packed = packed_path(path)
    check_regular(packed)
    if not packed.exists():
        return b""
    try:
        with lzma.open(packed) as file:
            text = file.read(MOST_PACKED + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise ConfigError(
            f"expected packed lines in {packed}, got: {error}: restore the file from a copy",
            **mistake("damaged-file", packed),
        ) from None
    if len(text) > MOST_PACKED:
        raise ConfigError(f"expected at most {MOST_PACKED:,} bytes of lines in {packed}, got more")
    return text


def _parse_lines(path: Path, text: bytes) -> list[tuple[Line, bool]]:
    """Return lines and whether each has a digest; raise `DataError` for one that was altered."""
    lines = []
    for number, part in enumerate(text.split(b"\n"), start=1):
        if part.strip():
            line = _parse_line(part)
            if line is None:
                raise ConfigError(
                    f"expected the JSON of a cell in line {number} of {path}, got "
                    f"{part[:40].decode(errors='replace')!r}: mend or remove that line",
                    **mistake("damaged-file", path),
                )
            lines.append(without_digest(line, f"line {number} of {path}"))
    return lines


def _parse_line(text: bytes) -> Line | None:
    """Return the line that a text holds, None if it holds something else."""
    try:
        line = json.loads(text)
        config, results = line["config"], line["results"]
        is_valid = isinstance(config["options"], dict) and isinstance(line["labels"], dict)
    except (ValueError, KeyError, TypeError):
        return None
    return line if is_valid and isinstance(results, int) and "method" in config else None


@dataclass(frozen=True)
class ExecutionOptions:
    """How a study is run.

    Attributes:
        processes: cells at the same time, each in a process of its own; 0: one after the other in
            this process.
        progress: `live`, `plain` or `none`, on standard error.
        runs: folder of the cells' result folders, None for none; with it an interrupted cell goes
            on from its checkpoint.
        test: whether test scores are returned.
        deadline: when to start no more cells (`time.monotonic`), None for never.
    """

    processes: int
    progress: str = "none"
    runs: Path | None = None
    test: bool = True
    deadline: float | None = None


@dataclass(frozen=True)
class CellCounts:
    """How many cells of a study have run and failed."""

    ran: int
    failed: int


def check_processes(processes: int | None, cores: int, own: Sequence[str] = ()) -> int:
    """Return the number of processes, the default for None.

    Args:
        processes: the number that the user gave, or None.
        cores: of a run.
        own: names of parts and metrics that are values, which stay in this process.

    Raises:
        ConfigError: below 0, or above 0 with values.
    """
    if own and processes not in (None, 0):
        raise ConfigError(
            f"expected processes=0 with {own[0]} as a value, got {processes!r}: leave processes "
            "out, or name a part other than a metric as FILE.py:NAME",
            **mistake("conflicting-options", ["processes", own[0]]),
        )
    if processes is None:
        return 0 if own else max(1, num_cores() // cores)
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 0:
        raise ConfigError(
            f"expected a number of processes from 0 (one after the other, here), got {processes!r}",
            **mistake("option-value", "processes", processes),
        )
    return processes


def run_missing_cells(
    cells: Iterable[Cell],
    file: StudyFile,
    execution: ExecutionOptions,
    total: int,
    on_cell: Callable[[Cell, Line], None] | None = None,
) -> CellCounts:
    """Run the cells that have no line yet.

    Args:
        cells: read one at a time, as processes come free; may depend on lines of earlier cells.
        file: where lines are, and are added.
        execution: processes, progress and folders.
        total: number of cells, as far as it is known.
        on_cell: called with every cell and its line, also for cells that had a line before.

    Returns:
        How many ran, and how many of all cells failed.
    """
    ran = failed = 0
    report_cell = on_cell or (lambda *_: None)

    def missing() -> Iterator[Job]:
        nonlocal failed
        for cell in cells:
            line = file.find_line(cell.digest)
            if line is not None and is_final(line):
                failed += "error" in line
                display.count_skipped()
                report_cell(cell, line)
            elif execution.deadline is None or time.monotonic() < execution.deadline:
                folder = None
                if execution.runs is not None:
                    folder = str(execution.runs / cell.folder_name)
                yield Job(cell, folder, execution.test)

    runner = run_here if execution.processes == 0 else run_in_processes
    with show_study(execution.progress, total) as display:
        outcomes = runner(missing(), execution.processes, display)
        try:
            for job, outcome in outcomes:
                line = job.cell.start | outcome
                file.add(line)
                ran, failed = ran + 1, failed + ("error" in line)
                display.finish_cell(job.cell, line)
                report_cell(job.cell, line)
        finally:
            outcomes.close()  # ends its processes now, not when memory is tidied up
    return CellCounts(ran, failed)


# --- The data of a study: read once, and still what its finished lines were computed on ----------
#
# A graph in a file of the user's, or in memory, is part of the digest of a cell. A dataset by name
# is not, so that a recipe means the same on every machine; its lines have the hash of their graph.


FinishedCells = Sequence[tuple[RunConfig, Line]]


def load_study_data(cells: Iterable[Cell], lines: Iterable[Line], path: Path | None) -> None:
    """Read the graphs of missing cells, and refuse lines that were computed on other graphs.

    A wrong name fails at once, and nothing is downloaded twice. Where nothing is missing, a
    graph is read only if its file is not the one that a line names.

    Args:
        cells: of the study.
        lines: finished lines.
        path: file of the lines, for the error.

    Raises:
        SilographError: a graph cannot be read, or is not that of the lines.
    """
    line_by_digest = {digest_of(line): line for line in lines if is_final(line)}
    groups: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.graph is None:
            config = cell.config
            reading_options = (
                *(config.data_dir, config.columns, config.na_values, config.rating_scale),
                *(config.repeated_edges, time_column(config.split)),
            )
            groups[config.dataset, config.scale, *reading_options].append(cell)
    for (dataset, scale, *_), group in groups.items():
        finished = [
            (c.config, line_by_digest[c.digest]) for c in group if c.digest in line_by_digest
        ]
        # The file of a dataset may be there and not be the one that a line names.
        hashes = {line["data"]["file"] for _, line in finished if "data" in line}
        is_changed = bool(hashes) and named_file_hash(finished[0][0]) not in {*hashes, None}
        if len(finished) < len(group) or is_changed:
            graph = source_of(group[0].config).read(scale)
            if isinstance(graph, Graph) and not is_path(dataset):
                _check_fingerprints(graph, finished, path)


def _check_fingerprints(graph: Graph, finished: FinishedCells, path: Path | None) -> None:
    """Raise `ConfigError` where a line was computed on another graph, if it says on which."""
    hashes: dict[tuple[object, ...], set[str]] = {}
    for config, line in finished:
        if "data" not in line:  # an older line
            continue
        graph_options = (
            config.largest_component,
            config.normalize,
            config.features,
            config.edge_weights,
            config.directed,
        )
        line_fingerprint = line["data"]["graph"]
        if graph_options not in hashes:
            # A model that has no place for weights of edges was trained without.
            variants = (config, replace(config, edge_weights="ignore"))
            hashes[graph_options] = {fingerprint(prepare_graph(v, graph)) for v in variants}
        if line_fingerprint not in hashes[graph_options]:
            current_fingerprint = fingerprint(prepare_graph(config, graph))
            raise ConfigError(
                f"expected {config.dataset} as it was for the lines of {path} (graph "
                f"{line_fingerprint}), got another (graph {current_fingerprint}): put its file "
                "back, or choose another --out, nothing was overwritten"
            )
