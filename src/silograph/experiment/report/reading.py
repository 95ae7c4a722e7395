"""A run as its result folder tells it; needs neither torch nor the dataset."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silograph.core.errors import DataError, SilographError, mistake
from silograph.core.files import check_regular
from silograph.core.text import short_repr
from silograph.experiment.result_files import (
    ABOUT,
    ALL_BIASES,
    CLIENTS,
    DIVERGED,
    FEATURE_DRIFT,
    LEDGER,
    MODEL,
    MODELS,
    REPORT,
    RESULT,
    ROUNDS,
    SIMULATION,
    SUMS,
    VIRTUAL,
    Row,
    check_folder,
    check_format,
    check_written,
    damaged_file_error,
    read_csv,
    read_json,
    read_rounds,
)
from silograph.experiment.terminal_table import better_personalized_text, better_untrained_text
from silograph.task.metric_table import LOSS, METRICS, Metric, metric_of, reported

VIEWS = ("server", "uncut", "personalized")
SEARCH = "tune.json"  # says that a folder is that of a search
WITHHELD = (
    "Scores, losses and figures of work are withheld because of differential privacy: each silo "
    "scores the model for itself, in its own result."
)


def scores_are_withheld(dp_epsilon: float | None, *, is_simulation: bool) -> bool:
    """Whether silos send no scores, because of differential privacy; a simulation has them."""
    return dp_epsilon is not None and not is_simulation


# Of run.json.
NEEDED = ("config", "given", "method", "versions", "model", "metrics", "dataset", "partition_hash")


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What the folder of a run holds, whether the run is over or not.

    Attributes:
        path: the folder, as the user wrote it.
        given: values of the config that the user set and that are not the default.
        about: what run.json says.
        rows: the judged rounds so far.
        clients: rows of clients.csv.
        cut: what simulation.json says; None where silos held the graph.
        traffic: bytes by kind and direction, from the ledger.
        result: what result.json says; None while the run is not over.
        feature_drift: rows of feature_drift.csv, the feature that differs most first.
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
    feature_drift: Sequence[Mapping[str, str]] = ()
    models: int = 0
    diverged: str | None = None
    warnings: tuple[str, ...] = ()
    is_damaged: bool = False

    @property
    def class_scores(self) -> tuple[list[dict[str, Any]], str]:
        """The test scores of each class, and their view.

        Beside a confusion matrix, which is of the uncut view, they are of that view, too.
        """
        result = self.result or {}
        rows, matrix = result.get("by_class") or [], result.get("confusion")
        if not matrix:
            return rows, self.judge
        predicted = [sum(column) for column in zip(*matrix, strict=True)]
        scores = []
        for number, (row, counts) in enumerate(zip(rows, matrix, strict=True)):
            hits, nodes = counts[number], sum(counts)
            scores.append(
                {
                    "class": row["class"],
                    "nodes": nodes,
                    "precision": hits / predicted[number] if predicted[number] else None,
                    "recall": hits / nodes if nodes else None,
                    "f1": 2 * hits / (nodes + predicted[number]) if nodes else None,
                }
            )
        return scores, "uncut"

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
    def is_private(self) -> bool:
        """Whether the run has differential privacy; results of older versions do not say."""
        return self.about["config"].get("dp_epsilon") is not None

    @property
    def withheld(self) -> str | None:
        """Why silos send no scores, in a sentence; None where they do, or a simulation has them."""
        epsilon, is_simulation = self.about["config"].get("dp_epsilon"), self.cut is not None
        return WITHHELD if scores_are_withheld(epsilon, is_simulation=is_simulation) else None

    @property
    def client_table(self) -> list[dict[str, str]]:
        """Rows of clients.csv, without figures of work where they are withheld."""
        left_out = {"flops"} if self.withheld else set[str]()
        return [{n: cell for n, cell in row.items() if n not in left_out} for row in self.clients]

    @property
    def by_validation(self) -> bool:
        """Whether validation scores pick the round."""
        if self.is_private:
            return False
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
        scores_by_view: dict[str, Mapping[str, float | None]] = {}
        for view in VIEWS:
            start = f"{part}_{view}_"
            names = [name for name in row if name.startswith(start)]
            if names and row[f"{start}{LOSS}"] is not None:
                scores_by_view[view] = {name.removeprefix(start): row[name] for name in names}
        return scores_by_view

    @property
    def baseline(self) -> Mapping[str, Any] | None:
        """Name and test scores of the best constant prediction; None where nobody knows it."""
        return None if self.result is None else self.result["baseline"]

    @property
    def untrained(self) -> Mapping[str, Mapping[str, float | None]]:
        """Test scores of what predicts ratings without training, the global mean first, by name."""
        scores_by_name = {} if self.result is None else self.result.get("untrained", {})
        first = self.baseline
        return (
            {first["name"]: first["scores"], **scores_by_name}
            if scores_by_name and first
            else scores_by_name
        )

    @property
    def better_untrained(self) -> str | None:
        """One line about a model that is worse than no model at all; None where it is better."""
        first = {self.baseline["name"]: self.baseline["scores"]} if self.baseline else {}
        at_silos = first | {n: s for n, s in self.untrained.items() if n != ALL_BIASES}
        scores = self.scores("test").get(self.judge)
        return better_untrained_text(self.metric, self.judge, scores, at_silos)

    @property
    def better_personalized(self) -> str | None:
        """One line about clients whose own models are better than the server's; None otherwise."""
        if self.is_private:  # few methods for own models could be used instead
            return None
        scores = self.scores("test")
        return better_personalized_text(
            self.metric, self.judge, scores.get("server"), scores.get("personalized")
        )

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
        metric_names = [
            name for name in self.reported if f"test_{self.judge}_{name}" in self.clients[0]
        ]
        return metric_of(metric_names[0]) if metric_names else self.metric

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
        raise DataError(
            f"expected the result folder of a run, got {os.fspath(path)}: {other}",
            **mistake("wrong-format", path),
        )
    try:
        about = read_json(folder / ABOUT)
        check_format(about, folder / ABOUT)
        missing = [name for name in NEEDED if name not in about]
        if missing:
            raise ValueError(f"run.json without {missing[0]!r}")
        check_written(folder, (ABOUT, SIMULATION, CLIENTS))
        is_over = (folder / RESULT).exists()
        check = check_folder(folder, is_over=is_over)
        result = read_json(folder / RESULT) if is_over else None
        rows = read_rounds(folder / ROUNDS) if (folder / ROUNDS).exists() else []
        traffic, last = read_ledger(folder / LEDGER)
        if result is not None:
            _check_complete(folder, result, rows, sum(traffic.values()), last)
        return RunRecord(
            path=os.fspath(path),
            given=about["given"],
            about=about,
            rows=rows,
            clients=read_csv(folder / CLIENTS),
            cut=read_json(folder / SIMULATION) if about.get("simulated", True) else None,
            traffic=traffic,
            result=result,
            feature_drift=read_csv(folder / FEATURE_DRIFT)
            if (folder / FEATURE_DRIFT).exists()
            else (),
            models=len([*(folder / MODELS).glob(f"*{Path(MODEL).suffix}")]) if is_over else 0,
            diverged=None if is_over else _text_of(folder / DIVERGED),
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
            f"expected the result folder of a run at {os.fspath(path)}, got {reason}{hint}",
            **mistake("wrong-format", path),
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


def _check_complete(
    folder: Path, result: Mapping[str, Any], rows: Sequence[Row], num_bytes: int, last_round: int
) -> None:
    """Raise `DataError` where a run is over and a table that grew with it lacks its end.

    The last round is always judged, and every byte of the result is in the ledger.

    Args:
        folder: of the run.
        result: what result.json says.
        rows: the table of rounds.
        num_bytes: bytes of the ledger.
        last_round: the ledger's last round.
    """
    judged = int(rows[-1]["round"] or 0) if rows else 0
    end, total = max(last_round, int(result["best_round"])), int(result["bytes"]["total"])
    if judged < end:
        raise _cut_short(folder / ROUNDS, f"rounds up to {end}", f"up to {judged}")
    if num_bytes < total:
        raise _cut_short(folder / LEDGER, f"{total:,} bytes up to round {judged}", f"{num_bytes:,}")


def _cut_short(path: Path, expected: str, got: str) -> DataError:
    """Return the error for a table that lacks its end, or that is not there."""
    got = got if path.exists() else "no such file"
    return DataError(
        f"expected {expected} in {path}, for {RESULT} says that the run is over, got {got}: "
        "restore the file from a copy",
        **mistake("damaged-file", path),
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
                    raise damaged_file_error(path, f"the line {short_repr(line)}") from None
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


# --- What figures are made of: axes, paths and shares, as plain values for the templates ---------
#
# Curves are SVG paths in a box of 1000 x 1000 that the page stretches to any width; labels are
# text beside it, so they are readable on a phone, too.


BOX = 1000
MOST_POINTS = 400  # of a curve
LEVELS = 12  # of a heat map
AXES = {
    "round": "rounds",
    "bytes": "bytes",
    "seconds": "seconds",
    VIRTUAL: "virtual seconds",  # of runs with a virtual clock
}
Axis = Mapping[str, "Values"]
Values = Sequence[float | None]


def size_text(size: int) -> str:
    """Return bytes as a text; kB are 10^3 bytes, MB 10^6 and GB 10^9.

    >>> size_text(2_158_973_440), size_text(158_973_440), size_text(13_200), size_text(440)
    ('2.16 GB', '158.97 MB', '13.2 kB', '440 B')
    """
    if size >= 1e9:
        return f"{size / 1e9:,.2f} GB"
    if size >= 1e6:
        return f"{size / 1e6:,.2f} MB"
    return f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size} B"


@dataclass(frozen=True)
class Tick:
    """A place on an axis: `at` is its share of the axis, in percent."""

    at: float
    text: str


def ticks(low: float, high: float, max_ticks: int = 5) -> list[float]:
    """Return round numbers within low..high, about `max_ticks` of them.

    >>> ticks(0, 100)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    rough = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def spread(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    """Return the least and the largest value, apart from each other, with a margin."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-3):
        return low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    return low - margin * (high - low), high + margin * (high - low)


@dataclass(frozen=True)
class Scale:
    """A linear scale from low..high to 0..1."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Return where a value stands, 0..1."""
        return (value - self.low) / (self.high - self.low)

    def marks(self, unit: str = "", max_ticks: int = 5) -> list[Tick]:
        """Return ticks; bytes are shown in MB and other millions as M, rounds are whole numbers."""
        factor = 1e6 if unit == "bytes" else 1.0
        values = ticks(self.low / factor, self.high / factor, max_ticks)
        values = [v for v in values if unit != "round" or v == int(v)]
        millions = max(map(abs, values), default=0) >= 1e6  # there is room for seven signs
        texts = [f"{v / 1e6:,.10g} M" if millions else f"{v:,.10g}" for v in values]
        places = [round(100 * self.share(v * factor), 2) for v in values]
        return [Tick(at, text) for at, text in zip(places, texts, strict=True)]


@dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        name: what the legend calls it.
        look: CSS classes: a color and a stroke.
        ys: values, None where there is none.
        axis: number of the x values that it stands over.
    """

    name: str
    look: str
    ys: Values
    axis: int = 0


def thin_indices(
    count: int, required: Sequence[int] = (), max_points: int = MOST_POINTS
) -> list[int]:
    """Return about `max_points` of 0..count - 1, evenly, with the last and the `required` ones."""
    step = max(1, math.ceil(count / max_points))
    return sorted({*range(0, count, step), count - 1, *required}) if count else []


def path_of(xs: Values, ys: Values, x: Scale, y: Scale) -> str:
    """Return the SVG path through the points, broken where a value is missing."""
    steps, pen = [], "M"
    for a, b in zip(xs, ys, strict=True):
        if a is None or b is None:
            pen = "M"
            continue
        steps.append(f"{pen}{BOX * x.share(a):.0f} {BOX * (1 - y.share(b)):.0f}")
        pen = "L"
    return "".join(steps)


def dots_of(xs: Values, ys: Values, x: Scale, y: Scale) -> str:
    """Return a path of points; round line ends make them dots."""
    points = [
        f"M{BOX * x.share(a):.0f} {BOX * (1 - y.share(b)):.0f}h0"
        for a, b in zip(xs, ys, strict=True)
        if a is not None and b is not None
    ]
    return "".join(points)


def curves(
    key: str,
    lines: Sequence[Curve],
    axes: Sequence[Mapping[str, Values]],
    best: Mapping[str, float] | None = None,
) -> dict[str, Any] | None:
    """Return a figure of curves over rounds, bytes and seconds; None without any value.

    Args:
        key: name of the figure, unique on the page.
        lines: the curves; those without values are left out.
        axes: x values of the curves by axis.
        best: where on each axis the best round stands.
    """
    lines = [line for line in lines if any(v is not None for v in line.ys)]
    if not lines:
        return None
    values = [v for line in lines for v in line.ys if v is not None]
    y, all_integers = Scale(*spread(values, 0.04)), all(float(v).is_integer() for v in values)
    panels = [_panel(unit, lines, axes, y, best) for unit in units_of(axes)]
    data = {
        "series": [
            {
                "name": line.name,
                "look": line.look,
                "axis": line.axis,
                "y": [short(v) for v in line.ys],
            }
            for line in lines
        ]
    }
    has_single_points = all(sum(v is not None for v in line.ys) == 1 for line in lines)
    marks = y.marks("round" if all_integers else "")
    figure = {"key": key, "y": y, "ticks": marks, "panels": panels, "lines": lines, "data": data}
    return figure | {
        "single": has_single_points,
        "millions": any(mark.text.endswith("M") for mark in marks),
    }


def units_of(axes: Sequence[Axis]) -> list[str]:
    """Return the units that all axes have."""
    return [unit for unit in AXES if all(unit in axis for axis in axes)]


def _panel(
    unit: str,
    lines: Sequence[Curve],
    axes: Sequence[Mapping[str, Values]],
    y: Scale,
    best: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Return the curves of a figure over one of its x axes."""
    x = Scale(*spread([v for line in lines for v in axes[line.axis][unit] if v is not None]))
    paths = []
    for line in lines:
        xs, few = axes[line.axis][unit], sum(v is not None for v in line.ys) <= 3
        dots = dots_of(xs, line.ys, x, y) if few else ""
        paths.append({"look": line.look, "d": path_of(xs, line.ys, x, y), "dots": dots})
    return {
        "unit": unit,
        "label": "MB, all messages" if unit == "bytes" else AXES[unit],
        "low": x.low,
        "high": x.high,
        "ticks": x.marks(unit),
        "best": None if best is None else round(100 * x.share(best[unit]), 2),
        "paths": paths,
    }


def short(value: float | None) -> float | None:
    """Return a value with as many digits as a page shows."""
    return None if value is None else float(f"{value:.6g}")


def heat(rows: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Return one path of unit squares for each level of shade, from shares 0..1 by row."""
    paths: dict[int, list[str]] = {}
    for j, row in enumerate(rows):
        for i, value in enumerate(row):
            level = math.ceil(min(value, 1.0) * LEVELS)
            if level:
                paths.setdefault(level, []).append(f"M{i} {j}h1v1h-1z")
    return [
        {"opacity": round(level / LEVELS, 3), "d": "".join(paths[level])} for level in sorted(paths)
    ]


def bars(values: Sequence[float], max_bars: int = 500) -> dict[str, Any]:
    """Return the outline of bars sorted from large to small, of at most `max_bars` of them."""
    ordered = sorted(values, reverse=True)
    shown_values = [ordered[i] for i in thin_indices(len(ordered), max_points=max_bars)]
    y = Scale(0.0, max(shown_values[0], 1e-9))
    width = BOX / len(shown_values)
    steps = [
        f"L{i * width:.1f} {BOX * (1 - y.share(v)):.0f}H{(i + 1) * width:.1f}"
        for i, v in enumerate(shown_values)
    ]
    return {
        "d": f"M0 {BOX}{''.join(steps)}V{BOX}z",
        "ticks": y.marks(max_ticks=4),
        "count": len(values),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, linear between neighbors."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
