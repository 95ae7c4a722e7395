"""The tables of a comparison: as text for a terminal, as Markdown for a page."""

import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from silograph.core.config import Scalar
from silograph.core.errors import ConfigError
from silograph.core.text import counted, decimals, html_lines, html_table
from silograph.experiment.run.result import VIEWS
from silograph.experiment.terminal_table import console_to, markdown_table, print_number_table
from silograph.graph.datasets import is_path
from silograph.graph.partition.split import parse_ratios
from silograph.study.cells import Cell
from silograph.task.metric_table import METRICS

# --- Paired statistics: two methods on the same seeds, and what so few seeds can show ------------
#
# n: seeds that both methods have.


Test = Literal["auto", "t", "resampled", "wilcoxon"]
TESTS = ("auto", "t", "resampled", "wilcoxon")
LEVEL = 0.95
DIGITS = 12  # of a difference that are no rounding
MOST_EXACT = 9_999  # sign patterns that are gone through; above, scipy draws so many


@dataclass(frozen=True)
class Paired:
    """The difference of two methods over the seeds they share.

    Attributes:
        n: number of seeds.
        mean: mean difference; None without seeds.
        low: lower end of its 95 % interval by Student's t; None below two seeds.
        high: upper end.
        p: two-sided p-value; None where the test cannot say anything.
    """

    n: int
    mean: float | None
    low: float | None
    high: float | None
    p: float | None


def paired_test(
    ours: Sequence[float], theirs: Sequence[float], test: Test = "t", overlap: float = 0.0
) -> Paired:
    """Compare two methods on the same seeds.

    Seeds that split one graph anew share nodes, so their differences are not independent, and
    Student's variance of their mean, s^2 / n, is too small. `resampled` takes
    s^2 (1 / n + test nodes / other nodes): C. Nadeau and Y. Bengio, "Inference for the
    Generalization Error", Machine Learning 52, 2003, section 3.

    >>> result = paired_test([0.8, 0.9, 0.7], [0.7, 0.7, 0.4])
    >>> round(result.mean, 3), round(result.p, 4)
    (0.2, 0.0742)

    Args:
        ours: (n,) scores of one method, by seed.
        theirs: (n,) scores of the other, in the same order.
        test: `t` (Student, differences about normal), `resampled` (the same, corrected for splits
            that overlap) or `wilcoxon` (signed ranks, exact).
        overlap: of `resampled`: test nodes over those that train or validate; see `overlap_of`.

    Raises:
        ConfigError: another test.
    """
    if test not in TESTS[1:]:
        raise ConfigError(f"expected test t, resampled or wilcoxon, got {test!r}")
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    n = len(differences)
    if n < 2:
        return Paired(n, differences[0] if n else None, None, None, None)
    mean, spread = statistics.mean(differences), statistics.stdev(differences)
    extra = overlap if test == "resampled" else 0.0
    half = half_width(n, extra) * spread
    p = _wilcoxon(differences) if test == "wilcoxon" else _t(n, mean, spread, extra)
    return Paired(n, mean, mean - half, mean + half, p)


def half_width(n: int, overlap: float = 0.0) -> float:
    """Return half the 95 % interval of a mean of n values, in standard deviations of the values."""
    from scipy import stats

    return float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * math.sqrt(1 / n + overlap)


def overlap_of(split: str, split_seed: int | None) -> float | None:
    """Return test nodes over those that train or validate, of splits that every seed draws anew.

    Validation nodes choose the round, so they are of what a run learns from.

    >>> round(overlap_of("0.2/0.4/0.4", None), 3), overlap_of("public", None)
    (0.667, None)

    Args:
        split: the run's split.
        split_seed: the seed that all runs split by; None: each run's own.

    Returns:
        None where all seeds have one split, or nothing but test nodes is left.
    """
    if split_seed is not None or split in ("public", "full"):
        return None
    train, val, test = parse_ratios(split)
    return test / (train + val) if train + val > 0 else None


def _t(n: int, mean: float, spread: float, overlap: float) -> float | None:
    """Return the p-value of Student's paired test; None where all differences are the same."""
    from scipy import stats

    if spread <= 1e-12 * abs(mean):
        return 1.0 if mean == 0 else None
    return float(2 * stats.t.sf(abs(mean) / (spread * math.sqrt(1 / n + overlap)), n - 1))


def _wilcoxon(differences: Sequence[float]) -> float:
    """Return the p-value of Wilcoxon's signed ranks; differences of 0 are left out."""
    from scipy import stats

    # Scores are shares of nodes: .8 - .7 and .7 - .6 are one rank, though not one float.
    rounded = (round(d, DIGITS) for d in differences)
    nonzero = [d for d in rounded if d != 0]
    if not nonzero:
        return 1.0
    tied = len({abs(d) for d in nonzero}) < len(nonzero)
    method: Any = "exact"
    if tied:
        method = stats.PermutationMethod(n_resamples=MOST_EXACT, rng=np.random.default_rng(0))
    return float(stats.wilcoxon(nonzero, method=method).pvalue)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted for their number (Holm, Scandinavian J. of Statistics, 1979).

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    ranked = sorted((p, place) for place, p in enumerate(values) if p is not None)
    adjusted: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, place) in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - rank) * p))
        adjusted[place] = largest
    return adjusted


def power_of(n: int, test: Test, overlap: float = 0.0) -> str:
    """Return in a sentence what n seeds can show."""
    if n < 2:
        return f"{n} seed: no spread and no test; give at least 2, better 5 to 10"
    if test == "wilcoxon":
        return f"{n} seeds: the smallest p-value that signed ranks can give is {2 / 2**n:.3g}"
    smallest = f"{half_width(n, overlap):.2f}"
    return (
        f"{n} seeds: a difference shows at the 5 % level only above {smallest} standard "
        "deviations of the differences, and a p-value rests on their being about normal"
    )


# --- What is compared, and a row of what comes of it ---------------------------------------------


ComparisonRow = dict[str, Any]


@dataclass(frozen=True)
class ComparisonRequest:
    """What is compared, and how it is judged.

    Attributes:
        methods: names of methods, in the order of the tables.
        seeds: seeds, each with its own cut, split and initial weights unless those are fixed.
        over: further fields of the config or options of parts, and their values.
        options: options of methods, by method.
        baseline: the method that others are tested against; None for the best one.
        metric: the score; None for the one that picks the rounds of the runs.
        view: view of the paired test; `own` for one that all methods have, of several the one that
            most methods are about.
        test: `t`, `resampled`, `wilcoxon`, or `auto`: resampled where every seed splits one graph
            anew, else t.
    """

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    over: Mapping[str, tuple[Scalar, ...]]
    options: Mapping[str, Mapping[str, Scalar]]
    baseline: str | None = None
    metric: str | None = None
    view: str = "own"
    test: Test = "auto"

    @property
    def tests(self) -> bool:
        """Whether there is another method to test one against."""
        return len(self.methods) > 1


WIDE = 140  # columns from which scores and costs stand side by side
Column = tuple[str, Callable[[ComparisonRow], str]]
Titled = tuple[str, list[Column]]


class Compared(Protocol):
    """What is shown of a comparison; `Comparison` says what each part is."""

    @property
    def request(self) -> ComparisonRequest:
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


def format_value(row: ComparisonRow, value: float | None, *, signed: bool = False) -> str:
    """Return a score of a row, or a difference of two, in the unit of all tables and files."""
    if value is None:
        return "-"
    text = METRICS[row["metric"]].text(value)
    return f"+{text}" if signed and value >= 0 else text


def small(p: float | None) -> str:
    """Return a p-value."""
    return "-" if p is None else "< .001" if p < 0.001 else f"{p:.3f}".lstrip("0")


def format_cost(value: float | None, unit: float, digits: int) -> str:
    """Return a cost in its unit."""
    return "-" if value is None else decimals(value / unit, digits)


def _score(view: str) -> Column:
    def text(row: ComparisonRow) -> str:
        mean, std = row[f"{view}_mean"], row[f"{view}_std"]
        spread = "" if std is None else f" ± {format_value(row, std)}"
        few = f" ({_of_all(row)})" if row["diverged"] or row["failed"] else ""
        return f"{format_value(row, mean)}{spread}{'*' if view in row['best'] else ''}{few}"

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
        low, high = (format_value(row, row[end], signed=True) for end in ("low", "high"))
        return f"{low} to {high}"

    def difference(row: ComparisonRow) -> str:
        if row["method"] == row["reference"]:
            return "reference"
        if row["view"] is None and row["seeds"]:
            return "no common view"
        return format_value(row, row["difference"], signed=True)

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
    ("MB", lambda row: format_cost(row["bytes"], 1e6, 1)),
    ("GFLOP", lambda row: format_cost(row["flops"], 1e9, 1)),
    ("seconds", lambda row: format_cost(row["seconds"], 1, 1)),
    ("peak MB", lambda row: format_cost(row["peak_memory_bytes"], 1e6, 0)),
    ("best round", lambda row: format_cost(row["best_round"], 1, 0)),
]
ROWS: Column = ("rows MB", lambda row: format_cost(row["row_bytes"], 1e6, 1))
BIAS: Column = (
    "local bias",
    lambda row: "-" if row["local_bias"] is None else f"{row['local_bias']:.4g}",
)


def tables_of(comparison: Compared, width: float) -> list[Titled]:
    """Return the tables that fit a width."""
    has_local_bias = any(row["local_bias"] is not None for row in comparison.rows)
    has_row_bytes = any(row["row_bytes"] for row in comparison.rows)
    costs = [COSTS[0], *[ROWS] * has_row_bytes, *COSTS[1:], *[BIAS] * has_local_bias]
    tested = [("paired test", TESTED)] * comparison.request.tests
    if width >= WIDE:
        sections = [
            ("scores, and costs as means of a run", [*SCORES, *costs]),
            *tested,
        ]
    else:
        sections = [("scores", SCORES), *tested, ("costs, mean of a run", costs)]
    names = comparison.names
    method: Column = ("method", lambda row: names[row["method"]])
    return [(title, [method, *columns]) for title, columns in sections]


def paired_tables(comparison: Compared) -> dict[str, list[Any]]:
    """Return scores and paired tests as texts, and the notes on them, for the page of a folder.

    They are those of the terminal, so that both have one unit, one order and one mark of the best.
    """
    method: Column = ("method", lambda row: comparison.names[row["method"]])

    def make_rows(columns: Sequence[Column]) -> list[dict[str, Any]]:
        return [
            {
                "title": point,
                "columns": [name for name, _ in columns],
                "rows": _texts(columns, rows, constant),
            }
            for point, rows, constant in groups(comparison)
        ]

    return {
        "scores": make_rows([method, *SCORES]),
        "tables": make_rows([method, *TESTED]) if comparison.request.tests else [],
        "notes": list(comparison.notes),
    }


def groups(comparison: Compared) -> list[tuple[str, list[ComparisonRow], ComparisonRow]]:
    """Return the rows by the values of what is varied, those values in words, and the constant."""
    keys = comparison.request.over
    grouped_rows = groupby(comparison.rows, key=lambda row: [row[key] for key in keys])
    return [
        (", ".join(f"{k} {value}" for k, value in zip(keys, point, strict=True)), list(rows), last)
        for (point, rows), last in zip(grouped_rows, comparison.constants, strict=True)
    ]


def title_of(comparison: Compared) -> str:
    """Return dataset and metric in words."""
    config = comparison.cells[0].config
    varied_values = comparison.request.over
    name = Path(config.dataset).name if is_path(config.dataset) else config.dataset
    words = [] if "dataset" in varied_values else [name]
    words += (
        []
        if "clients" in varied_values or config.clients is None
        else [counted(config.clients, "client")]
    )
    words += [] if "partition" in varied_values else [config.partition]
    return ", ".join(words)


def _texts(
    columns: Sequence[Column], rows: Sequence[ComparisonRow], constant: ComparisonRow
) -> list[list[str]]:
    """Return the rows as text; tables of scores end with the best constant prediction."""
    texts = [[text(row) for _, text in columns] for row in rows]
    if constant["mean"] is None or SCORES[0] not in columns:
        return texts
    spread = "" if constant["std"] is None else f" ± {format_value(constant, constant['std'])}"
    text = f"{format_value(constant, constant['mean'])}{spread}"
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
            print_number_table(console, names, _texts(columns, rows, last), ": ".join(words))
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
            method_cells = [c for c in cells if c.labels["method"] == method]
            without = [c.labels for c in method_cells if key not in c.config.options]
            at = (", ".join(f"{k}={e[k]}" for k in over if k not in options) for e in without)
            part = (
                ""
                if len(without) == len(method_cells)
                else f" at {' and '.join(dict.fromkeys(at))}"
            )
            none += [f"{name}{part}"] if without else []
        if none:
            notes.append(f"without option {key}, alike for each of its values: {', '.join(none)}")
    return notes
