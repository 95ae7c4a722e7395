"""What a comparison writes for a paper: tables, figures, and the command that gives them again."""

import json
import logging
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from silograph.core.config import RunConfig
from silograph.core.errors import SilographError
from silograph.core.files import check_regular, write_atomic
from silograph.core.run_file import parse_option, toml_value
from silograph.experiment.report import COMPARISON, PAIRED, TABLES
from silograph.experiment.resolve.parts import find_option, named_parts
from silograph.experiment.result_files import VIRTUAL, with_digest, write_with_sums
from silograph.study.cells import Line
from silograph.study.comparison import Comparison, paired_tables, rows_by_point, without_errors
from silograph.study.paired_tests import ComparisonRequest
from silograph.study.plots import Curves, Points, check_plots, pdf_of, svg_of
from silograph.study.study_request import FIELDS, StudyBase
from silograph.task.metric_table import METRICS

LOG = logging.getLogger("silograph")
LATEX, CSV, COMMAND = "compare.tex", "compare.csv", "command.json"
FIGURES = "figures"
FILES = (TABLES, LATEX, CSV, COMMAND, PAIRED)
# Horizontal axes: name of the files, column of a curve, unit and label.
AXES = (
    ("rounds", "round", 1.0, "rounds"),
    ("bytes", "bytes", 1e6, "MB sent"),
    ("work", "flops", 1e9, "GFLOP at the clients"),
    ("virtual-time", VIRTUAL, 1.0, "virtual seconds"),
)
MOST_POINTS = 200  # of a line


def check_files(folder: Path) -> None:
    """Raise `DataError` where a file of a comparison is there and is no regular file."""
    for name in FILES:
        check_regular(folder / name)


def write_files(comparison: Comparison, base: StudyBase, folder: Path) -> None:
    """Write tables, the command and figures; without matplotlib a line says that there are none."""
    command = {
        "command": command_of(comparison.request, base),
        "settings": COMPARISON,
        "versions": _versions([line for line in comparison.lines if line is not None]),
    }
    paired = json.dumps(with_digest(paired_tables(comparison)), indent=2) + "\n"
    texts = {
        TABLES: comparison.to_markdown(),
        LATEX: comparison.to_latex(),
        CSV: comparison.to_csv(),
        COMMAND: json.dumps(command, indent=2) + "\n",
        PAIRED: paired,
    }
    write_with_sums(folder, texts)
    try:
        check_plots(f"the figures of {folder}")
    except SilographError as error:
        LOG.warning("%s", f"{error}; then silograph resume {shlex.quote(str(folder))}")
        return
    figures = figures_of(comparison)
    for path in (folder / FIGURES).glob("*.*"):  # those of fewer tables have other names
        is_of_axis = any(path.stem.endswith(name) for name, *_ in AXES)
        if path.suffix in (".svg", ".pdf") and is_of_axis and path.stem not in figures:
            path.unlink()
    for name, curves in figures.items():
        (folder / FIGURES).mkdir(exist_ok=True)
        write_atomic(folder / FIGURES / f"{name}.svg", svg_of(curves))
        write_atomic(folder / FIGURES / f"{name}.pdf", pdf_of(curves))


def _versions(lines: Sequence[Line]) -> list[Mapping[str, str]]:
    """Return the sets of versions that lines were computed with, each once."""
    texts = dict.fromkeys(json.dumps(line["versions"], sort_keys=True) for line in lines)
    return [json.loads(text) for text in texts]


# --- The command that gives a comparison again ---------------------------------------------------


def command_of(request: ComparisonRequest, base: StudyBase) -> str:
    """Return the command that gives the same cells and tables, or the call where there is none.

    It needs no file of settings. What is in memory, or has a comma or a colon where the command
    line parts texts there, is in a call of Python alone.

    Args:
        request: what is compared.
        base: what all runs have in common.
    """
    from silograph.experiment.report.page import flags  # jinja2 takes a while to import

    config = base.to_dict()["config"]
    defaults = {name: f.default for name, f in FIELDS.items()}
    changed = {
        name: value
        for name, value in config.items()
        if name not in ("options", "dataset", "method", "metric", "seed", "out")
        and value != defaults[name]
    }
    over = {key: list(values) for key, values in request.over.items()}
    names = [str(name) for name in over.pop("dataset", [config["dataset"]])]
    arms = _arms_in_full(request, base.config)
    options = _options_in_full(request, base.config)
    texts = [*names, *(str(value) for values in over.values() for value in values)]
    if (
        base.graph is not None
        or base.own.names
        or any("," in text for text in texts)
        or any(":" in name or name != name.strip() for name in arms)
    ):
        given: dict[str, Any] = {
            "methods": list(request.methods),
            "arms": arms,
            "seeds": list(request.seeds),
            "over": {key: list(values) for key, values in request.over.items()},
            "options": options,
            **_judged(request),
            **changed,
        }
        keywords = ", ".join(f"{name}={value!r}" for name, value in given.items() if value)
        graph = "graph" if base.graph is not None else repr(config["dataset"])
        return f"sg.compare({graph}, {keywords})"
    words = ["silograph", "compare", ",".join(names), *flags(changed)]
    words += ["--methods", ",".join(request.methods)] if request.methods else []
    for name, settings in arms.items():
        texts = [_word(key, value) for key, value in settings.items()]
        words += ["--arm", f"{name}: {shlex.join(texts)}"]
    words += ["--seeds", _seeds(request.seeds)]
    for key, values in over.items():
        words += ["--over", f"{key}={','.join(_text(value) for value in values)}"]
    for part, part_options in options.items():
        for name, value in part_options.items():
            words += ["--options", f"{part}.{_word(name, value)}"]
    for name, value in _judged(request).items():
        words += [f"--{name}", str(value)]
    return shlex.join(words)


def _arms_in_full(request: ComparisonRequest, config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return named arms, with the method of all where it is not the default of a command."""
    default = {} if config.method == RunConfig().method else {"method": config.method}
    return {name: {**default, **settings} for name, settings in request.arms.items()}


def _options_in_full(request: ComparisonRequest, config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return options by method or part, with those of the config of all runs."""
    options: dict[str, dict[str, Any]] = {}
    parts = named_parts(config) if config.options else {}
    for name, value in config.options.items():
        kind, option = find_option(name, parts)
        options.setdefault(config.method if kind == "method" else kind, {})[option] = value
    for part, part_options in request.options.items():
        options[part] = options.get(part, {}) | dict(part_options)
    return options


def _judged(request: ComparisonRequest) -> dict[str, Any]:
    """Return how a comparison is judged, without defaults."""
    default = ComparisonRequest(seeds=(0,), over={}, options={})
    names = ("baseline", "metric", "view", "test")
    values = {name: getattr(request, name) for name in names}
    return {name: v for name, v in values.items() if v != getattr(default, name)}


def _seeds(seeds: Sequence[int]) -> str:
    """Return seeds as `--seeds` reads them: a single number is how many."""
    if list(seeds) == list(range(len(seeds))):
        return str(len(seeds))
    return ",".join(map(str, seeds))


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):  # such as widths
        return ",".join(map(str, value))
    return value if isinstance(value, str) else toml_value(value)


def _word(key: str, value: Any) -> str:
    """Return KEY=VALUE that reads back as this value: a text that looks like a number is quoted."""
    word = f"{key}={_text(value)}"
    is_text = isinstance(value, str) and key not in FIELDS
    return f"{key}={toml_value(value)}" if is_text and parse_option(word)[1] != value else word


# --- Figures: the score against rounds and costs, mean and band over seeds -----------------------


def figures_of(comparison: Comparison) -> dict[str, Curves]:
    """Return the figures of a comparison by name: one for each table and axis that all runs have.

    A line is the mean over the seeds of an arm, from the first to the last place that all of them
    reached, and its band is the sample standard deviation. Between two rounds scores are on a
    straight line.
    """
    figures = {}
    points = rows_by_point(comparison)
    for point, rows, _ in points:
        values = tuple(rows[0][key] for key in comparison.point_keys)
        lines_by_arm = {
            row["arm"]: without_errors(comparison.lines_of(values, row["arm"])) for row in rows
        }
        views = {arm: lines[0]["judge"] for arm, lines in lines_by_arm.items() if lines}
        all_lines = [line for lines in lines_by_arm.values() for line in lines]
        is_one_view = len(set(views.values())) == 1
        for name, column, unit, label in AXES:
            if not all_lines or not all(column in line["curve"] for line in all_lines):
                continue
            means: dict[str, Points] = {}
            bands: dict[str, list[float]] = {}
            for arm, lines in lines_by_arm.items():
                title = comparison.names[arm] + ("" if is_one_view else f" ({views.get(arm)})")
                if (drawn := _mean_and_band(lines, column, unit)) is not None:
                    x, y, half = drawn
                    means[title] = x, y
                    bands |= {title: half} if len(lines) > 1 else {}
            of_view = f", {next(iter(views.values()))} view" if is_one_view else ""
            y_label = f"test {METRICS[rows[0]['metric']].title}{of_view}"
            prefix = f"{re.sub(r'[^A-Za-z0-9.]+', '-', point)}-" if len(points) > 1 else ""
            if means:
                figures[f"{prefix}{name}"] = Curves(
                    "", label, y_label, means, bands=bands, print=True
                )
    return figures


def _mean_and_band(
    lines: Sequence[Line], column: str, unit: float
) -> tuple[list[float], list[float], list[float]] | None:
    """Return places on an axis, the mean test score there, and its deviation over seeds.

    None where no run has a test score.

    Args:
        lines: of the seeds of an arm.
        column: of their curves, the axis.
        unit: of the axis.
    """
    curves = []
    for line in lines:
        pairs = zip(line["curve"][column], line["curve"]["test"], strict=True)
        known = [(x / unit, score) for x, score in pairs if score is not None]
        curves += [tuple(zip(*known, strict=True))] if known else []
    if not curves:
        return None
    low, high = max(min(x) for x, _ in curves), min(max(x) for x, _ in curves)
    places = np.array(sorted({x for xs, _ in curves for x in xs if low <= x <= high}))
    if len(places) > MOST_POINTS:
        places = places[np.linspace(0, len(places) - 1, MOST_POINTS).round().astype(int)]
    if not len(places):  # costs so different that one seed ended before another began
        return None
    scores = np.array([np.interp(places, x, y) for x, y in curves])
    band = scores.std(0, ddof=1) if len(curves) > 1 else np.full(len(places), math.nan)
    return places.tolist(), scores.mean(0).tolist(), band.tolist()
