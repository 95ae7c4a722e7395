"""`reproduce`: run what a recipe lacks, then write its page; finished cells do not run again."""

import contextlib
import math
import os
import platform
import re
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import silograph
from silograph.core.config import Scalar, make_config
from silograph.core.errors import ConfigError, lookup
from silograph.core.files import write_atomic
from silograph.core.numeric_state import standard_numerics
from silograph.experiment.resolve.resolve import cores_of_run
from silograph.experiment.resolve.user_code import check_trusted, import_spec, is_spec
from silograph.experiment.run.run import check_mode
from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Cell, Line, digest_of, is_final
from silograph.study.plots import COLORS as COLORS
from silograph.study.plots import Curves as Curves
from silograph.study.plots import Points as Points
from silograph.study.plots import check_plots
from silograph.study.plots import svg_of as svg_of
from silograph.study.study import (
    PACKED,
    ExecutionOptions,
    StudyFile,
    check_processes,
    load_study_data,
    read_lines,
    run_missing_cells,
)

# --- recipe --------------------------------------------------------------------------------------
# A recipe: cells with their place in tables, and the page that is written of their lines.
#
# A recipe is a `Recipe` in silograph's repository (`benchmarks/FOLDER/recipe_NAME.py`) or in a
# file of the user's: `silograph reproduce my_recipe.py:RECIPE`.


class StudyLines:
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
        cells: returns the cells to run, from the lines so far. It is called again
            when they have run, so that later cells may depend on earlier ones.
        page: returns tables and curves of the lines.
        text: the page before its sections are filled in: Markdown with pairs of marks
            `<!-- NAME -->`. A page that exists keeps its own text.
    """

    name: str
    title: str
    cells: Callable[[StudyLines], Sequence[Cell]]
    page: Callable[[StudyLines], Page]
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


MOST_NAMED = 40  # cells that are named one by one among those that have not run
Only = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Reproduced:
    """The outcome of `reproduce`.

    Attributes:
        page: the file of the page.
        ran: cells that ran now.
        copied: cells that another recipe of the folder has run, whose lines were copied now.
        failed: cells without a result, of those that ran or had run.
        missing: cells that have not run.
    """

    page: Path
    ran: int
    failed: int
    missing: int
    copied: int = 0


def paths_of(recipe: Recipe, out: Path) -> tuple[Path, Path]:
    """Return the files of a recipe: its lines and its page."""
    return out / f"{recipe.name}.jsonl", out / f"{recipe.name}.md"


@standard_numerics()
def reproduce(
    recipe: Recipe,
    *,
    name: str | None = None,
    out: str | os.PathLike[str] = "benchmarks",
    data_dir: str | None = None,
    only: Only | None = None,
    processes: int | None = None,
    max_minutes: float = math.inf,
    progress: str = "none",
) -> Reproduced:
    """Run the cells of a recipe that have no line yet, then write its page.

    A cell that another recipe of the same folder has run is not run again: its line is copied.

    Args:
        recipe: the recipe.
        name: what `silograph reproduce` finds it by; None is its own name.
        out: folder of the recipes' files.
        data_dir: as for `run`.
        only: labels, or fields of `RunConfig`, and the values of the cells that may run.
        processes: as for `compare`; times of cells that ran side by side compare nothing.
        max_minutes: when to start no more cells; 0 only writes the page.
        progress: `live`, `plain` or `none`, on standard error.

    Raises:
        SilographError: a file cannot be used, or `only` matches no cell.
    """
    check_mode(progress)
    if not max_minutes >= 0:
        raise ConfigError(f"expected at least 0 minutes, got {max_minutes}")
    check_plots()
    lines, page = paths_of(recipe, Path(out))
    deadline = None if max_minutes == math.inf else time.monotonic() + 60 * max_minutes
    execution = ExecutionOptions(0, progress, deadline=deadline)
    _select_cells(recipe, read_lines(lines), only or {})  # before there is a file
    with StudyFile(lines) as file:
        num_copied = _copy_lines(recipe, file)
        ran = _run(recipe, file, only or {}, data_dir, processes, execution)
        write_page(recipe, page, file.lines, recipe.name if name is None else name)
        finished = StudyLines(file.lines)
    all_cells = recipe.cells(finished)
    cell_lines = [finished.any(cell) for cell in all_cells]
    return Reproduced(
        page=page,
        ran=ran,
        failed=sum(line is not None and "error" in line for line in cell_lines),
        missing=sum(line is None for line in cell_lines),
        copied=num_copied,
    )


def _copy_lines(recipe: Recipe, file: StudyFile) -> int:
    """Copy lines of this recipe's cells from other recipes of the folder; return how many."""
    missing = [c for c in recipe.cells(StudyLines(file.lines)) if not _is_done(file, c)]
    if not missing or file.path is None:
        return 0
    num_copied, line_by_digest = 0, _read_neighboring_lines(file.path)
    for cell in missing:
        line = line_by_digest.get(cell.digest)
        if line is not None:
            file.add({**line, "labels": dict(cell.labels)})
            num_copied += 1
    return num_copied


def _read_neighboring_lines(path: Path) -> dict[str, Line]:
    """Return finished lines of the other files of a folder by cell; other files have none."""
    line_by_digest: dict[str, Line] = {}
    line_files = path.parent.glob("*.jsonl*")
    for lines_file in sorted(
        {file.with_name(file.name.removesuffix(PACKED)) for file in line_files}
    ):
        if lines_file != path:
            with contextlib.suppress(ConfigError, KeyError, TypeError, AttributeError):
                line_by_digest |= {
                    digest_of(line): line for line in read_lines(lines_file) if is_final(line)
                }
    return line_by_digest


def _run(
    recipe: Recipe,
    file: StudyFile,
    only: Only,
    data_dir: str | None,
    processes: int | None,
    execution: ExecutionOptions,
) -> int:
    """Run missing cells, and then cells that depend on them; return how many cells ran."""
    ran = 0
    while True:
        runnable = _select_cells(recipe, file.lines, only)
        if execution.deadline is not None and time.monotonic() >= execution.deadline:
            return ran
        cells = [replace(c, config=replace(c.config, data_dir=data_dir)) for c in runnable]
        load_study_data(cells, file.lines, file.path)
        missing = [cell for cell in cells if not _is_done(file, cell)]
        if not missing:
            return ran
        at_once = check_processes(processes, cores_of_run(missing[0].config))
        num_ran = run_missing_cells(
            missing, file, replace(execution, processes=at_once), len(missing)
        ).ran
        ran += num_ran
        if num_ran < len(missing) or not all(_is_done(file, cell) for cell in missing):
            return ran  # later cells may need these


def _is_done(file: StudyFile, cell: Cell) -> bool:
    line = file.find_line(cell.digest)
    return line is not None and is_final(line)


def _select_cells(recipe: Recipe, lines: Sequence[Line], only: Only) -> list[Cell]:
    """Return the cells that may run now.

    Raises:
        ConfigError: `only` has a key or value that no cell has.
    """
    cells = recipe.cells(StudyLines(lines))
    for key, values in only.items():
        available_values = {value_of(cell, key) for cell in cells}
        for value in values:
            if value not in available_values and not available_values - {""}:
                raise ConfigError(
                    f"expected a label or key that the cells of the recipe have, got {key!r}"
                )
            if value not in available_values:
                choices = ", ".join(sorted(available_values - {""}))
                raise ConfigError(f"expected {key} among {choices}, got {value!r}")
    return [c for c in cells if all(value_of(c, key) in only[key] for key in only)]


def value_of(cell: Cell, key: str) -> str:
    """Return a label of a cell, or else a field of its config, as text; empty if it has none."""
    return str(cell.labels.get(key, getattr(cell.config, key, "")))


def write_page(recipe: Recipe, path: Path, lines: Sequence[Line], name: str) -> None:
    """Write page and plots; text outside the marks of an existing page stays.

    Raises:
        ConfigError: a mark in the page stands there once, or more than twice.
    """
    finished = StudyLines(lines)
    page = recipe.page(finished)
    sections = {
        **page.sections,
        "cells": cells_section(recipe, finished),
        "again": (
            f"Run again: `silograph reproduce {shlex.quote(name)} --data-dir DIR`; it goes on "
            "where it stopped, `--max-minutes 0` only writes this page."
        ),
    }
    sections["machine"] = machine_section(lines)
    text = path.read_text(encoding="utf-8") if path.exists() else recipe.text
    for name, section in sections.items():
        text = replace_section(text, name, section)
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, curves in page.plots.items():
        write_atomic(path.with_name(file), svg_of(curves))
    write_atomic(path, text)


def replace_section(text: str, name: str, section: str) -> str:
    r"""Return a page with the text between the two marks of a name replaced; added if it has none.

    >>> replace_section("a <!-- t -->old<!-- t --> b", "t", "new")
    'a <!-- t -->\nnew\n<!-- t --> b'

    Raises:
        ConfigError: the mark stands there once, or more than twice.
    """
    mark = f"<!-- {name} -->"
    parts = text.split(mark)
    if len(parts) == 1:
        return f"{text.rstrip()}\n\n{mark}\n{section}\n{mark}\n"
    if len(parts) != 3:
        raise ConfigError(f"expected {mark} twice in the page, got it {len(parts) - 1} times")
    return f"{parts[0]}{mark}\n{section}\n{mark}{parts[2]}"


def cells_section(recipe: Recipe, finished: StudyLines) -> str:
    """Return which cells of a recipe have run, failed or not."""
    cells = recipe.cells(finished)
    lines = [(cell, finished.any(cell)) for cell in cells]
    failed = [f"{c.name}: {line['error']}" for c, line in lines if line and "error" in line]
    missing = [cell for cell, line in lines if line is None]
    parts = [f"{len(cells) - len(missing)} of {len(cells)} cells have run."]
    parts += [f"Failed: {text}." for text in failed]
    if len(missing) > MOST_NAMED:
        keys = list(islice(missing[0].labels, 2))
        counts = Counter(tuple(value_of(cell, key) for key in keys) for cell in missing)
        rows = [[*values, str(count)] for values, count in counts.items()]
        parts.append("Not yet run:\n\n" + markdown_table([*keys, "cells"], rows))
    elif missing:
        parts.append("Not yet run: " + "; ".join(cell.name for cell in missing) + ".")
    return "\n\n".join(parts)


def machine_section(lines: Sequence[Line]) -> str:
    """Return the versions that computed the lines, and the machine that wrote the page."""
    packages = ("silograph", "torch", "numpy")
    version_counts = Counter(
        ", ".join(f"{p} {line['versions'][p]}" for p in packages if p in line.get("versions", {}))
        for line in lines
    )
    texts = [
        f"{count} by {text or 'versions not written down'}"
        for text, count in version_counts.items()
    ]
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"Cells: {'; '.join(texts) or 'none yet'}. Page written on {machine}."


def listing(out: Path, recipes: Sequence[Recipe]) -> list[list[str]]:
    """Return name, cells done and title of recipes."""
    rows = []
    for recipe in recipes:
        finished = StudyLines(read_lines(paths_of(recipe, out)[0]))
        cells = recipe.cells(finished)
        num_done = sum(finished.any(cell) is not None for cell in cells)
        rows.append([recipe.name, f"{num_done}/{len(cells)}", recipe.title])
    return rows


# --- Recipes by name: the files FOLDER/recipe_NAME.py of the repository's benchmarks -------------


_PART = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"


def recipes_in(folder: Path) -> dict[str, str]:
    """Return where the recipes of a folder are, by name.

    FOLDER/NAME is `RECIPE` in the file FOLDER/recipe_NAME.py, beside its lines and its page.

    Raises:
        ConfigError: there are none.
    """
    files = sorted(folder.glob("*/recipe_*.py"))
    if not files:
        raise ConfigError(
            f"expected recipes in {folder}, got none: they are in the folder benchmarks of "
            "silograph's repository, so run the command there, or name the folder by --recipes DIR"
        )
    return {
        f"{file.parent.name}/{file.stem.removeprefix('recipe_')}": f"{file}:RECIPE"
        for file in files
    }


def own_recipes(folder: Path) -> bool:
    """Return whether a folder is the benchmarks of the repository that silograph is imported from.

    Its recipes are then as much to be trusted as the library that reads them.
    """
    return folder.resolve() == Path(silograph.__file__).resolve().parents[2] / "benchmarks"


def find_recipe(name: str, folder: Path, *, trust: bool) -> Recipe:
    """Return a recipe by its name in a folder, or by `FILE.py:NAME` or `package.module:NAME`.

    Args:
        name: of the recipe.
        folder: of recipes by name.
        trust: whether a recipe by name may be run: its file is what the folder has. Those of
            silograph's own repository may.

    Raises:
        ConfigError: there is none (names the nearest), its name is not like folder/name, or it is
            not trusted.
    """
    spec = name if is_spec(name) else lookup(recipes_in(folder), name, "recipe")
    if not is_spec(name) and not own_recipes(folder):
        check_trusted({"recipe": spec}, trust, folder)
    recipe = import_spec(spec, Recipe)
    if not re.fullmatch(rf"{_PART}(/{_PART})*", recipe.name):
        raise ConfigError(f"expected a recipe's name like folder/name, got {recipe.name!r}")
    return recipe
