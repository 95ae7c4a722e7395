"""The tables of a comparison: as text for a terminal, as Markdown for a page."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from silograph.core.html import html_lines, html_table
from silograph.core.text import counted, decimals
from silograph.experiment.markdown import markdown_table
from silograph.experiment.run.result import VIEWS
from silograph.experiment.terminal_table import console_to, print_fitted
from silograph.graph.datasets import is_path
from silograph.study.cells import Cell
from silograph.study.compare.asked import Asked, ComparisonRow
from silograph.task.metric_table import METRICS

WIDE = 140  # columns from which scores and costs stand side by side
Column = tuple[str, Callable[[ComparisonRow], str]]
Titled = tuple[str, list[Column]]


class Compared(Protocol):
    """What is shown of a comparison; `Comparison` says what each part is."""

    @property
    def asked(self) -> Asked:
        """What is compared."""

    @property
    def cells(self) -> Sequence[Cell]:
        """Its cells."""

    @property
    def names(self) -> Mapping[str, str]:
        """What the methods are called."""

    @property
    def rows(self) -> Sequence[ComparisonRow]:
        """A row for each method and value of what is varied."""

    @property
    def constants(self) -> Sequence[ComparisonRow]:
        """What the best constant prediction has, for each value of what is varied."""

    @property
    def legend(self) -> str:
        """What the tables of scores show; the first note."""

    @property
    def notes(self) -> Sequence[str]:
        """What a reader must know."""

    @property
    def failed_alike(self) -> Sequence[str]:
        """A line for what failed, one for seeds that failed alike."""


def shown(row: ComparisonRow, value: float | None, *, signed: bool = False) -> str:
    """Return a score of a row, or a difference of two, in the unit of all tables and files."""
    if value is None:
        return "-"
    text = METRICS[row["metric"]].text(value)
    return f"+{text}" if signed and value >= 0 else text


def small(p: float | None) -> str:
    """Return a p-value."""
    return "-" if p is None else "< .001" if p < 0.001 else f"{p:.3f}".lstrip("0")


def scaled(value: float | None, unit: float, digits: int) -> str:
    """Return a cost in its unit."""
    return "-" if value is None else decimals(value / unit, digits)


def _score(view: str) -> Column:
    def text(row: ComparisonRow) -> str:
        mean, std = row[f"{view}_mean"], row[f"{view}_std"]
        spread = "" if std is None else f" ± {shown(row, std)}"
        few = f" ({_of_all(row)})" if row["diverged"] or row["failed"] else ""
        return f"{shown(row, mean)}{spread}{'*' if view in row['best'] else ''}{few}"

    return view, text


def _of_all(row: ComparisonRow) -> str:
    return f"{row['seeds']} of {row['seeds'] + row['diverged'] + row['failed']}"


def _seeds(row: ComparisonRow) -> str:
    """Return the number of seeds in the means, and what became of the others."""
    without = [f"{row[what]} {what}" for what in ("diverged", "failed") if row[what]]
    return "; ".join([_of_all(row), *without]) if without else str(row["seeds"])


def _tested() -> list[Column]:
    """Return the columns of paired tests."""

    def interval(row: ComparisonRow) -> str:
        if row["low"] is None:
            return "-"
        return f"{shown(row, row['low'], signed=True)} to {shown(row, row['high'], signed=True)}"

    def difference(row: ComparisonRow) -> str:
        if row["method"] == row["reference"]:
            return "reference"
        if row["view"] is None and row["seeds"]:
            return "no common view"
        return shown(row, row["difference"], signed=True)

    return [
        ("difference", difference),
        ("95 % interval", interval),
        ("p", lambda row: small(row["p"])),
        ("p, Holm", lambda row: small(row["p_holm"])),
        ("view", lambda row: row["view"] or "-"),
        ("pairs", lambda row: "-" if row["pairs"] is None else str(row["pairs"])),
    ]


SCORES: list[Column] = [*(_score(view) for view in VIEWS), ("seeds", _seeds)]
TESTED = _tested()
COSTS: list[Column] = [
    ("MB", lambda row: scaled(row["bytes"], 1e6, 1)),
    ("GFLOP", lambda row: scaled(row["flops"], 1e9, 1)),
    ("seconds", lambda row: scaled(row["seconds"], 1, 1)),
    ("peak MB", lambda row: scaled(row["peak_memory_bytes"], 1e6, 0)),
    ("best round", lambda row: scaled(row["best_round"], 1, 0)),
]
ROWS: Column = ("rows MB", lambda row: scaled(row["row_bytes"], 1e6, 1))
BIAS: Column = (
    "local bias",
    lambda row: "-" if row["local_bias"] is None else f"{row['local_bias']:.4g}",
)


def tables_of(comparison: Compared, width: float) -> list[Titled]:
    """Return the tables that fit a width."""
    asked = any(row["local_bias"] is not None for row in comparison.rows)
    sent = any(row["row_bytes"] for row in comparison.rows)
    costs = [COSTS[0], *[ROWS] * sent, *COSTS[1:], *[BIAS] * asked]
    tested = [("paired test", TESTED)] * comparison.asked.tests
    if width >= WIDE:
        apart = [
            ("scores, and costs as means of a run", [*SCORES, *costs]),
            *tested,
        ]
    else:
        apart = [("scores", SCORES), *tested, ("costs, mean of a run", costs)]
    names = comparison.names
    method: Column = ("method", lambda row: names[row["method"]])
    return [(title, [method, *columns]) for title, columns in apart]


def paired_tables(comparison: Compared) -> dict[str, list[Any]]:
    """Return scores and paired tests as texts, and the notes on them, for the page of a folder.

    They are those of the terminal, so that both have one unit, one order and one mark of the best.
    """
    method: Column = ("method", lambda row: comparison.names[row["method"]])

    def made(columns: Sequence[Column]) -> list[dict[str, Any]]:
        return [
            {
                "title": point,
                "columns": [name for name, _ in columns],
                "rows": _texts(columns, rows, constant),
            }
            for point, rows, constant in groups(comparison)
        ]

    return {
        "scores": made([method, *SCORES]),
        "tables": made([method, *TESTED]) if comparison.asked.tests else [],
        "notes": list(comparison.notes),
    }


def groups(comparison: Compared) -> list[tuple[str, list[ComparisonRow], ComparisonRow]]:
    """Return the rows by the values of what is varied, those values in words, and the constant."""
    over = comparison.asked.over
    found = groupby(comparison.rows, key=lambda row: [row[key] for key in over])
    return [
        (", ".join(f"{k} {value}" for k, value in zip(over, point, strict=True)), list(rows), last)
        for (point, rows), last in zip(found, comparison.constants, strict=True)
    ]


def title_of(comparison: Compared) -> str:
    """Return dataset and metric in words."""
    config = comparison.cells[0].config
    known = comparison.asked.over
    name = Path(config.dataset).name if is_path(config.dataset) else config.dataset
    words = [] if "dataset" in known else [name]
    words += (
        [] if "clients" in known or config.clients is None else [counted(config.clients, "client")]
    )
    words += [] if "partition" in known else [config.partition]
    return ", ".join(words)


def _texts(
    columns: Sequence[Column], rows: Sequence[ComparisonRow], constant: ComparisonRow
) -> list[list[str]]:
    """Return the rows as text; tables of scores end with the best constant prediction."""
    texts = [[text(row) for _, text in columns] for row in rows]
    if constant["mean"] is None or SCORES[0] not in columns:
        return texts
    spread = "" if constant["std"] is None else f" ± {shown(constant, constant['std'])}"
    text = f"{shown(constant, constant['mean'])}{spread}"
    filled = {v for v in VIEWS if any(row[f"{v}_mean"] is not None for row in rows)}
    ends = [text if name in filled else "-" for name, _ in columns[1:]]
    return [*texts, [constant["name"], *ends]]


def text_of(comparison: Compared, width: int) -> str:
    """Return tables and notes as plain text of at most so many columns."""
    file = io.StringIO()
    console = console_to(file, width)
    for point, rows, last in groups(comparison):
        for title, columns in tables_of(comparison, width):
            words = [w for w in (title_of(comparison), point, title) if w]
            names = [name for name, _ in columns]
            print_fitted(console, names, _texts(columns, rows, last), ": ".join(words))
            console.print()
    for note in comparison.notes:
        console.print(note)
    for line in comparison.failed_alike:
        console.print(f"failed: {line}")
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def html_of(comparison: Compared) -> str:
    """Return tables and notes for a notebook."""
    parts = [
        html_table(
            ": ".join(w for w in (title_of(comparison), point, title) if w),
            [name for name, _ in columns],
            _texts(columns, rows, last),
        )
        for point, rows, last in groups(comparison)
        for title, columns in tables_of(comparison, math.inf)
    ]
    failed = [f"failed: {line}" for line in comparison.failed_alike]
    return "".join(parts) + html_lines([*comparison.notes, *failed])


def markdown_of(comparison: Compared) -> str:
    """Return tables and notes as a page."""
    parts = [f"# Comparison: {title_of(comparison)}"]
    for point, rows, last in groups(comparison):
        for title, columns in tables_of(comparison, -math.inf):
            parts.append("## " + ": ".join(w for w in (point, title) if w))
            parts.append(markdown_table([name for name, _ in columns], _texts(columns, rows, last)))
    parts.append("\n".join(f"- {note}" for note in comparison.notes))
    if comparison.failed_alike:
        parts.append("## failed\n\n" + "\n".join(f"- {line}" for line in comparison.failed_alike))
    return "\n\n".join(parts) + "\n"


def without_options(
    cells: Sequence[Cell], names: Mapping[str, str], over: Sequence[str]
) -> list[str]:
    """Return which runs have not the options that are varied, a line for each option.

    Args:
        cells: the runs.
        names: what tables call each method.
        over: keys that are varied: fields, and options of parts.
    """
    notes, options = [], [key for key in over if any(key in c.config.options for c in cells)]
    for key in options:
        none = []
        for method, name in names.items():
            mine = [c for c in cells if c.labels["method"] == method]
            without = [c.labels for c in mine if key not in c.config.options]
            at = (", ".join(f"{k}={e[k]}" for k in over if k not in options) for e in without)
            part = "" if len(without) == len(mine) else f" at {' and '.join(dict.fromkeys(at))}"
            none += [f"{name}{part}"] if without else []
        if none:
            notes.append(f"without option {key}, alike for each of its values: {', '.join(none)}")
    return notes
