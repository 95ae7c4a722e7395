"""A run as its result folder tells it; needs neither torch nor the dataset."""

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silograph.core.errors import DataError, SilographError
from silograph.core.files import check_regular
from silograph.core.text import shown
from silograph.experiment.checksums import check_folder, check_written
from silograph.experiment.result_files import (
    ABOUT,
    CLIENTS,
    DIVERGED,
    LEDGER,
    MODEL,
    MODELS,
    REPORT,
    RESULT,
    ROUNDS,
    SIMULATION,
    SUMS,
    Row,
    check_format,
    damaged,
    read_csv,
    read_json,
    read_rounds,
)
from silograph.task.metric_table import LOSS, METRICS, Metric, metric_of, reported

VIEWS = ("server", "uncut", "personalized")
SEARCH = "tune.json"  # says that a folder is that of a search
# Of run.json.
NEEDED = ("config", "given", "method", "versions", "model", "metrics", "dataset", "partition_hash")


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What the folder of a run holds, whether the run is over or not.

    Attributes:
        path: the folder, as it was given.
        given: what was given of the config and is not the default.
        about: what run.json says.
        rows: the judged rounds so far.
        clients: rows of clients.csv.
        cut: what simulation.json says; None where silos held the graph.
        traffic: bytes by kind and direction, from the ledger.
        result: what result.json says; None while the run is not over.
        models: number of clients' own models in the folder; 0 while the run is not over.
        diverged: why training ended early, where it diverged; None elsewhere.
        warnings: which files do not fit their digests, or could not be checked, a line each.
        is_damaged: whether a file was altered or is missing.
    """

    path: str
    given: Mapping[str, Any]
    about: Mapping[str, Any]
    rows: Sequence[Row]
    clients: Sequence[Mapping[str, str]]
    cut: Mapping[str, Any] | None
    traffic: Mapping[tuple[str, str], int]
    result: Mapping[str, Any] | None
    models: int = 0
    diverged: str | None = None
    warnings: tuple[str, ...] = ()
    is_damaged: bool = False

    @property
    def judge(self) -> str:
        """The view whose validation score picks the round."""
        return str(self.about["method"]["judge"])

    @property
    def method(self) -> str:
        """The name of the method, also where the config has that of its file."""
        return str(self.about["method"].get("name", self.about["config"]["method"]))

    @property
    def metric(self) -> Metric:
        """The metric that picks the round."""
        return metric_of(self.about["config"]["metric"])

    @property
    def reported(self) -> list[str]:
        """Names of the scores that tables show, the run's metric first."""
        metric = self.metric.name
        return sorted(reported(self.about["metrics"], metric), key=lambda name: name != metric)

    @property
    def heard(self) -> str:
        """How a node is seen in the `server` view."""
        return str(self.about["method"]["seen"])

    @property
    def by_validation(self) -> bool:
        """Whether there are validation scores to pick the round by."""
        return any(row[f"val_{self.judge}_{self.metric.name}"] is not None for row in self.rows)

    @property
    def best_row(self) -> Row | None:
        """The row of the best round so far; None before the first."""
        if not self.rows or not self.by_validation:
            return self.rows[-1] if self.rows else None
        if self.result is not None:
            best = self.result["best_round"]
            return next((row for row in self.rows if row["round"] == best), None)
        return max(self.rows, key=self._rank)  # the first of equals

    def _rank(self, row: Row) -> tuple[float, float]:
        value, loss = (row[f"val_{self.judge}_{name}"] for name in (self.metric.name, LOSS))
        return self.metric.goodness(value), METRICS[LOSS].goodness(loss)

    def scores(self, part: str) -> dict[str, Mapping[str, float | None]]:
        """Return the scores of `val` or `test` at the best round, by the views there are."""
        if self.result is not None:
            return {view: s for view, s in self.result[part].items() if s is not None}
        row = self.best_row or {}
        found: dict[str, Mapping[str, float | None]] = {}
        for view in VIEWS:
            start = f"{part}_{view}_"
            names = [name for name in row if name.startswith(start)]
            if names and row[f"{start}{LOSS}"] is not None:
                found[view] = {name.removeprefix(start): row[name] for name in names}
        return found

    @property
    def baseline(self) -> Mapping[str, Any] | None:
        """Name and test scores of the best constant prediction; None where nobody knows it."""
        return None if self.result is None else self.result["baseline"]

    @property
    def untrained(self) -> Mapping[str, Mapping[str, float | None]]:
        """Test scores of what predicts ratings without training, the global mean first, by name."""
        found = {} if self.result is None else self.result.get("untrained", {})
        first = self.baseline
        return {first["name"]: first["scores"], **found} if found and first else found

    @property
    def total_bytes(self) -> int:
        """Bytes so far, evaluation included."""
        if self.result is not None:
            return int(self.result["bytes"]["total"])
        return max(int(self.rows[-1]["bytes"] or 0) if self.rows else 0, sum(self.traffic.values()))

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        if self.result is not None:
            return float(self.result["seconds"])
        return float(self.rows[-1]["seconds"] or 0.0) if self.rows else 0.0

    @property
    def client_metric(self) -> Metric:
        """The metric that clients.csv has of every client: the run's, or else the first one."""
        known = [name for name in self.reported if f"test_{self.judge}_{name}" in self.clients[0]]
        return metric_of(known[0]) if known else self.metric

    def client_scores(self, view: str) -> list[float | None]:
        """Return the test score of every client at the best round; empty before the end."""
        name = self.client_metric.name
        cells = [row.get(f"test_{view}_{name}", "") for row in self.clients]
        values = [float(cell) if cell else None for cell in cells]
        return values if any(value is not None for value in values) else []


def read_run(path: str | os.PathLike[str]) -> RunRecord:
    """Return the run of a result folder, also of one that is still being written.

    Raises:
        DataError: there is no run, or a file of it is missing or damaged.
    """
    folder, check = Path(path), None
    if (other := _other_folder(folder)) is not None:
        raise DataError(f"expected the result folder of a run, got {os.fspath(path)}: {other}")
    try:
        about = read_json(folder / ABOUT)
        check_format(about, folder / ABOUT)
        missing = [name for name in NEEDED if name not in about]
        if missing:
            raise ValueError(f"run.json without {missing[0]!r}")
        check_written(folder, (ABOUT, SIMULATION, CLIENTS))
        over = (folder / RESULT).exists()
        check = check_folder(folder, is_over=over)
        result = read_json(folder / RESULT) if over else None
        rows = read_rounds(folder / ROUNDS) if (folder / ROUNDS).exists() else []
        traffic, last = read_ledger(folder / LEDGER)
        if result is not None:
            _check_whole(folder, result, rows, sum(traffic.values()), last)
        return RunRecord(
            path=os.fspath(path),
            given=about["given"],
            about=about,
            rows=rows,
            clients=read_csv(folder / CLIENTS),
            cut=read_json(folder / SIMULATION) if about.get("simulated", True) else None,
            traffic=traffic,
            result=result,
            models=len([*(folder / MODELS).glob(f"*{Path(MODEL).suffix}")]) if over else 0,
            diverged=None if over else _text_of(folder / DIVERGED),
            warnings=tuple(check.lines()),
            is_damaged=check.is_damaged,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, SilographError):
            raise
        reason = (
            f"{Path(error.filename).name}: {error.strerror}"
            if isinstance(error, OSError)
            else error
        )
        altered = () if check is None else check.altered
        if altered:
            reason = f"{reason}, and {', '.join(altered)} with other digests than in {SUMS}"
        hint = f"; there are runs in {folder / 'runs'}" if (folder / "runs").is_dir() else ""
        raise DataError(
            f"expected the result folder of a run at {os.fspath(path)}, got {reason}{hint}"
        ) from None


def _other_folder(folder: Path) -> str | None:
    """Return what a folder is that has results and no run, and what to do; None: it is not."""
    if (folder / ABOUT).exists():
        return None
    if (folder / SEARCH).is_file():
        page = folder / "tune.md"
        best = f"see {page}" if page.is_file() else f"go on with it by silograph resume {folder}"
        return f"this is a search, {best}"
    try:
        of_silo = "silo" in read_json(folder / RESULT)
    except (OSError, DataError):
        return None
    return f"this is a silo's result, its page is {folder / REPORT}" if of_silo else None


def _check_whole(
    folder: Path, result: Mapping[str, Any], rows: Sequence[Row], sent: int, last: int
) -> None:
    """Raise `DataError` where a run is over and a table that grew with it lacks its end.

    The last round is always judged, and every byte of the result is in the ledger.

    Args:
        folder: of the run.
        result: what result.json says.
        rows: the table of rounds.
        sent: bytes of the ledger.
        last: its last round.
    """
    judged = int(rows[-1]["round"] or 0) if rows else 0
    end, total = max(last, int(result["best_round"])), int(result["bytes"]["total"])
    if judged < end:
        raise _cut_short(folder / ROUNDS, f"rounds up to {end}", f"up to {judged}")
    if sent < total:
        raise _cut_short(folder / LEDGER, f"{total:,} bytes up to round {judged}", f"{sent:,}")


def _cut_short(path: Path, expected: str, got: str) -> DataError:
    """Return the error for a table that lacks its end, or that is not there."""
    got = got if path.exists() else "no such file"
    return DataError(
        f"expected {expected} in {path}, for {RESULT} says that the run is over, got {got}: "
        "restore the file from a copy"
    )


def _text_of(path: Path) -> str | None:
    """Return the text of a file, None where there is none."""
    check_regular(path)
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def read_ledger(path: Path) -> tuple[dict[tuple[str, str], int], int]:
    """Return bytes by kind and direction of a ledger's file, and its last round.

    A line still being written is left. The operations of each client are skipped: for many clients
    they are most of the file.
    """
    total: dict[tuple[str, str], int] = defaultdict(int)
    last = 0
    check_regular(path)
    if not path.exists():
        return {}, last
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n"):
                try:
                    record = json.loads(line[: line.rindex(', "flops": ')] + "}")
                    last = record["round"]
                    if size := packed_sum(record["bytes"]):  # work apart has none
                        total[record["what"], record["direction"]] += size
                except (ValueError, KeyError, TypeError):
                    raise damaged(path, f"the line {shown(line)}") from None
    return dict(total), last


def packed_sum(values: Mapping[str, int] | Sequence[int]) -> int:
    """Return the sum of integers as a ledger's file has them: equal, consecutive, or a list.

    >>> packed_sum({"all": 5, "times": 2}), packed_sum({"from": 5, "times": 2}), packed_sum([5, 7])
    (10, 11, 12)
    """
    if not isinstance(values, Mapping):
        return sum(values)
    k = values["times"]
    return values["all"] * k if "all" in values else values["from"] * k + k * (k - 1) // 2
