"""A recipe: cells with their place in tables, and the page that is written of their lines.

A recipe is a `Recipe` in silograph's repository (`benchmarks/FOLDER/recipe_NAME.py`) or in a file
of the user's: `silograph reproduce my_recipe.py:RECIPE`.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from silograph.core.config import Scalar, make_config
from silograph.study.cells import Cell, Line, digest_of

if TYPE_CHECKING:
    from silograph.study.reproduce.plots import Curves


class Found:
    """The lines of a study, by cell."""

    def __init__(self, lines: Sequence[Line]) -> None:
        """Take the lines; the latest of a cell counts."""
        self.lines = {digest_of(line): line for line in lines}

    def any(self, cell: Cell) -> Line | None:
        """Return the line of a cell, also of a failed one; None if it has not run."""
        return self.lines.get(cell.digest)

    def scored(self, cells: Sequence[Cell]) -> list[Line]:
        """Return the lines of those cells that have scores."""
        lines = (self.any(cell) for cell in cells)
        return [line for line in lines if line is not None and "error" not in line]


@dataclass(frozen=True)
class Page:
    """What a recipe writes of its lines.

    Attributes:
        sections: Markdown by name; each stands between two marks of that name in the page.
        plots: curves by the name of their SVG file, which stands beside the page.
    """

    sections: Mapping[str, str]
    plots: Mapping[str, "Curves"] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Recipe:
    """An experiment that can be made again.

    Attributes:
        name: FOLDER/NAME, the place of its files.
        title: one line for listings.
        cells: returns the cells that are to be run, given what has been found. It is asked again
            when they have run, so that later cells may depend on earlier ones.
        page: returns tables and curves of what has been found.
        text: the page before its sections are filled in: Markdown with pairs of marks
            `<!-- NAME -->`. A page that exists keeps its own text.
    """

    name: str
    title: str
    cells: Callable[[Found], Sequence[Cell]]
    page: Callable[[Found], Page]
    text: str


def cell(labels: Mapping[str, Scalar], **options: Any) -> Cell:
    """Return the cell of a recipe with these labels and fields of `RunConfig`."""
    return Cell(dict(labels), make_config(options, source="the recipe"))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return mean ± sample standard deviation in percent, - for nothing.

    >>> spread([0.8, 0.9]), spread([0.8]), spread([])
    ('85.00 ± 7.07', '80.00', '-')
    """
    if not values:
        return "-"
    mean = f"{100 * statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {100 * statistics.stdev(values):.{digits}f}"


def scores_of(
    lines: Sequence[Line], metric: str = "accuracy", *, last: bool = False
) -> list[float]:
    """Return test scores of the view that each line's method is about, of the lines that have them.

    >>> line = {"judge": "server", "test": {"server": {"accuracy": 0.8}}}
    >>> line["last"] = {"test_server_accuracy": 0.7}
    >>> scores_of([line]), scores_of([line], last=True), scores_of([line], "f1_micro", last=True)
    ([0.8], [0.7], [])

    Args:
        lines: lines with scores.
        metric: the name of the score.
        last: of the last round; else of the round that validation picks.
    """
    if last:
        values = [line["last"].get(f"test_{line['judge']}_{metric}") for line in lines]
    else:
        views = [line["test"][line["judge"]] for line in lines]
        values = [None if view is None else view[metric] for view in views]
    return [value for value in values if value is not None]


def beside(values: Sequence[float], paper: float, digits: int = 2) -> str:
    """Return `spread` and how far its mean is from the paper's percentage.

    >>> beside([0.8, 0.9], 84.0)
    '85.00 ± 7.07 (+1.00)'
    """
    text = spread(values, digits)
    return text if not values else f"{text} ({100 * statistics.mean(values) - paper:+.{digits}f})"
