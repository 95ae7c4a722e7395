"""Reports: one run, or several side by side, as a page that needs nothing but a browser."""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silograph.core.errors import CheckpointError, ConfigError, DataError, SilographError, mistake
from silograph.core.files import check_regular, write_atomic
from silograph.experiment.report.reading import RunRecord, read_run
from silograph.experiment.result_files import (
    ABOUT,
    REPORT,
    RESULT,
    SUMS,
    UNCHECKED,
    check_folder,
    digest_of,
    read_json,
    read_sums,
    without_digest,
)

if TYPE_CHECKING:  # it imports torch, which other pages do without
    from silograph.graph.silos.inspect import Inspection

LOG = logging.getLogger("silograph")
COMPARISON = "compare.json"  # says that a folder is that of a comparison
PAIRED = "paired.json"  # its paired tests
TABLES, LINES = "compare.md", "compare.jsonl"  # its tables, and a line for each run
MARK = "<!-- silograph report -->"


@dataclass(frozen=True)
class WrittenPage:
    """A page that was written.

    Attributes:
        path: of the file.
        is_of_damaged: whether a file that it tells of was altered or is missing.
    """

    path: Path
    is_of_damaged: bool


def write_report(
    folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None
) -> WrittenPage:
    """Write the page of one run.

    Args:
        folder: a result folder; the run may still be going.
        out: the page's file; None is report.html in the folder.

    Raises:
        DataError: there is no run at `folder`, or a file of it is damaged.
        ConfigError: `out` is there already and is no report.
    """
    from silograph.experiment.report.page import run_page  # jinja2 takes a while to import

    path = Path(folder) / REPORT if out is None else Path(out)
    check_out(path)
    with _as_runs_write_them([folder]):
        run = read_run(folder)
        page = run_page(run)
    _warn([run])
    return WrittenPage(_write_page(path, page), run.is_damaged)


def write_comparison(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    comparison: str | os.PathLike[str] | None = None,
) -> WrittenPage:
    """Write one page about several runs.

    Args:
        folders: result folders; the runs may still be going.
        out: the page's file.
        comparison: folder of the comparison that made the runs, for its paired tests.

    Raises:
        DataError: there is no run in one of the folders, or a file of it is damaged.
        ConfigError: no folder is given, runs differ in their metric, or `out` is there already and
            is no report.
    """
    from silograph.experiment.report.several_runs import comparison_page, in_order_of

    if not folders:
        raise ConfigError(
            "expected at least one result folder, got none", **mistake("missing-option", "folders")
        )
    check_out(Path(out))
    with _as_runs_write_them(folders):
        runs = [read_run(folder) for folder in folders]
        for run in runs:  # scores of several metrics cannot stand in one column
            if run.metric != runs[0].metric:
                raise ConfigError(
                    f"expected runs of one metric, got {runs[0].metric.name} in {runs[0].path} and "
                    f"{run.metric.name} in {run.path}: report runs of one task and one --metric "
                    "together"
                )
        paired, lines, damaged = None, list[str](), list[str]()
        if comparison is not None:
            (plan, of_plan), (paired, of_tables) = (
                _read_table(Path(comparison) / name) for name in (COMPARISON, PAIRED)
            )
            damaged, unchecked = _check_comparison(Path(comparison))
            runs = in_order_of(plan or {}, runs, (paired or {}).get("runs", {}))
            lines = [*damaged, *of_plan, *of_tables, *unchecked]
        page = comparison_page(runs, paired, lines)
    _warn(runs, lines)
    is_of_damaged = bool(damaged) or any(run.is_damaged for run in runs)
    return WrittenPage(_write_page(Path(out), page), is_of_damaged)


def write_inspection(
    inspection: "Inspection", data: str | os.PathLike[str], out: str | os.PathLike[str]
) -> None:
    """Write the page about the data of silos.

    Args:
        inspection: what their folders hold.
        data: the folder of the silo, or of all of them; the page has its name as a title.
        out: the page's file, readable by its owner only.

    Raises:
        ConfigError: `out` is there already and is no report, or cannot be written.
    """
    from silograph.experiment.report.data_page import data_page

    check_out(Path(out))
    page = data_page(inspection, Path(data).resolve().name)
    try:
        _write_page(Path(out), page, private=True)
    except OSError as error:
        raise ConfigError(
            f"expected to write the page {out}, got: {error.strerror}",
            **mistake("unwritable-path", out),
        ) from None


def _warn(runs: Sequence[RunRecord], lines: Sequence[str] = ()) -> None:
    """Log which files of a page do not fit their digests; the page says it, too."""
    for line in (*lines, *(line for run in runs for line in run.warnings)):
        LOG.warning("%s", line)


@contextmanager
def _as_runs_write_them(folders: Sequence[str | os.PathLike[str]]) -> Iterator[None]:
    """Raise `DataError` where a page cannot be made of files: their fields may be of any type."""
    try:
        yield
    except SilographError:
        raise
    except Exception as error:
        checks = [check_folder(Path(f), is_over=(Path(f) / RESULT).exists()) for f in folders]
        altered = [f"{check.folder}/{name}" for check in checks for name in check.altered]
        place = ", ".join(altered or [str(folder) for folder in folders])
        raise DataError(
            f"expected files as runs write them in {place}, got others "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): restore them "
            "from a copy",
            **mistake("damaged-file", place),
        ) from error


def comparison_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the result folders of a comparison in their order; none where it is another folder.

    Runs that no round was begun of are left out.

    Raises:
        DataError: a comparison without any run.
    """
    check_regular(Path(folder) / COMPARISON)
    if not (Path(folder) / COMPARISON).is_file():
        return []
    # A finished run without run.json is found by its result: reported as damaged, and not skipped.
    of_runs = (
        path.parent for n in (ABOUT, RESULT) for path in Path(folder).glob(f"runs/[!.]*/{n}")
    )
    folders = sorted(set(of_runs))
    if not folders:
        raise DataError(
            f"expected runs in the comparison {os.fspath(folder)}, got none: go on with it by "
            f"silograph resume {os.fspath(folder)}"
        )
    return folders


def _read_table(path: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a file of a comparison, None where there is none yet, and what a reader must know.

    Raises:
        DataError: it has been altered.
    """
    check_regular(path)
    if not path.is_file():
        return None, []
    table, has_digest = without_digest(read_json(path), str(path))
    return table, [] if has_digest else [UNCHECKED.format(path)]


def _check_comparison(folder: Path) -> tuple[list[str], list[str]]:
    """Return a line for each damaged file of a comparison, and for each that has no digest.

    Its plan and its paired tests are checked as they are read.

    Raises:
        DataError: one of them is no regular file.
    """
    try:
        has_sums = (folder / SUMS).exists()
        sums, damaged = read_sums(folder) if has_sums else {}, list[str]()
    except CheckpointError as error:
        sums, damaged = {}, [str(error)]
    unchecked = []
    for name in (TABLES, PAIRED):
        digest = digest_of(folder / name)
        if digest == "none":
            # A comparison that was stopped while it wrote them may lack some.
            damaged += [] if "none" in sums.get(name, ["none"]) else [_missing(folder / name)]
        elif name in sums and digest not in sums[name]:
            damaged.append(_altered(f"{folder / name}", f"its digest in {SUMS}"))
        elif name not in sums and name != PAIRED:
            unchecked.append(UNCHECKED.format(folder / name))
    check_regular(folder / LINES)
    if not (folder / LINES).exists():
        damaged += [_missing(folder / LINES)] if sums else []
        return damaged, unchecked
    # A last line without an end is one that is being written.
    *complete_lines, _ = (folder / LINES).read_bytes().split(b"\n")
    unchecked_lines = []
    for number, line in enumerate(complete_lines, start=1):
        place = f"line {number} of {folder / LINES}"
        try:
            _, has_digest = without_digest(json.loads(line), place) if line.strip() else ({}, True)
        except (ValueError, AttributeError, RecursionError):
            damaged.append(_altered(place, "its digest"))
        else:
            unchecked_lines += [] if has_digest else [number]
    if unchecked_lines:
        line_count = f"{len(unchecked_lines)} of {len(complete_lines)} lines of {folder / LINES}"
        unchecked.append(UNCHECKED.format(line_count))
    return damaged, unchecked


def _missing(path: Path) -> str:
    return f"{path} is missing: silograph resume {path.parent} writes it anew"


def _altered(what: str, digest: str) -> str:
    return (
        f"{what} does not fit {digest}: it has been altered or damaged since the comparison wrote "
        "it, so do not trust its figures"
    )


def _write_page(path: Path, page: str, *, private: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page, private=private)
    return path


def check_out(path: Path) -> None:
    """Raise `ConfigError` where a page would overwrite something else."""
    if not os.path.lexists(path):
        return
    try:
        check_regular(path)
        with path.open(encoding="utf-8", errors="replace") as file:
            is_report = MARK in file.read(200)
    except (OSError, DataError):  # a folder or a FIFO, or not to be read
        is_report = False
    if not is_report:
        raise ConfigError(
            f"expected the path of a new report or of an old one, got {path}, which is something "
            "else: choose another --out, nothing was overwritten",
            **mistake("existing-output", path),
        )


def add_report(folder: Path) -> None:
    """Write the page of a run that has ended, unless it is there; a full disk is but a warning."""
    report, result = folder / REPORT, folder / RESULT
    try:
        # A page from before the end is older than the result.
        is_over = result.exists()
        if (
            not is_over
            or not report.exists()
            or report.stat().st_mtime_ns < result.stat().st_mtime_ns
        ):
            write_report(folder)
    except OSError as error:
        LOG.warning("no report.html: %s; later: silograph report %s", error.strerror, folder)
