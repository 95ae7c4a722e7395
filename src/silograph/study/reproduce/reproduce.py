"""`reproduce`: run what a recipe lacks, then write its page; what ran before is kept."""

import contextlib
import math
import os
import platform
import shlex
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from silograph.core.errors import ConfigError
from silograph.core.files import write_atomic
from silograph.core.numeric_state import standard_numerics
from silograph.experiment.markdown import markdown_table
from silograph.experiment.run.run import check_mode
from silograph.study.cells import Cell, Line, digest_of, lasts
from silograph.study.datasets import fetch
from silograph.study.reproduce.plots import check_plots, svg_of
from silograph.study.reproduce.recipe import Found, Recipe
from silograph.study.study import How, StudyFile, check_processes, read_lines, run_missing

MOST_NAMED = 40  # cells that are named one by one among those that have not run
Only = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Reproduced:
    """What came of a call.

    Attributes:
        page: the file of the page.
        ran: cells that ran now.
        taken: cells that another recipe of the folder has run, whose lines were copied now.
        failed: cells without a result, of those that ran or had run.
        missing: cells that have not run.
    """

    page: Path
    ran: int
    failed: int
    missing: int
    taken: int = 0


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
        SilographError: a file cannot be used, or no cell is asked for.
    """
    check_mode(progress)
    if not max_minutes >= 0:
        raise ConfigError(f"expected at least 0 minutes, got {max_minutes}")
    check_plots()
    lines, page = paths_of(recipe, Path(out))
    until = None if max_minutes == math.inf else time.monotonic() + 60 * max_minutes
    how = How(0, progress, until=until)
    _chosen(recipe, read_lines(lines), only or {})  # before there is a file
    with StudyFile(lines) as file:
        taken = _take(recipe, file)
        ran = _run(recipe, file, only or {}, data_dir, processes, how)
        write_page(recipe, page, file.lines, recipe.name if name is None else name)
        found = Found(file.lines)
    all_cells = recipe.cells(found)
    known = [found.any(cell) for cell in all_cells]
    return Reproduced(
        page=page,
        ran=ran,
        failed=sum(line is not None and "error" in line for line in known),
        missing=sum(line is None for line in known),
        taken=taken,
    )


def _take(recipe: Recipe, file: StudyFile) -> int:
    """Copy lines that recipes beside this one have of its cells; return how many."""
    missing = [c for c in recipe.cells(Found(file.lines)) if not _is_done(file, c)]
    if not missing or file.path is None:
        return 0
    taken, known = 0, _lines_beside(file.path)
    for cell in missing:
        line = known.get(cell.digest)
        if line is not None:
            file.add({**line, "labels": dict(cell.labels)})
            taken += 1
    return taken


def _lines_beside(path: Path) -> dict[str, Line]:
    """Return finished lines of the other files of a folder by cell; other files have none."""
    known: dict[str, Line] = {}
    for other in sorted(path.parent.glob("*.jsonl")):
        if other != path:
            with contextlib.suppress(ConfigError, KeyError, TypeError, AttributeError):
                known |= {digest_of(line): line for line in read_lines(other) if lasts(line)}
    return known


def _run(
    recipe: Recipe,
    file: StudyFile,
    only: Only,
    data_dir: str | None,
    processes: int | None,
    how: How,
) -> int:
    """Run what is missing, and then what follows from it; return how many cells ran."""
    ran = 0
    while True:
        chosen = _chosen(recipe, file.lines, only)
        if how.until is not None and time.monotonic() >= how.until:
            return ran
        cells = [replace(c, config=replace(c.config, data_dir=data_dir)) for c in chosen]
        fetch(cells, file.lines, file.path)
        missing = [cell for cell in cells if not _is_done(file, cell)]
        if not missing:
            return ran
        at_once = check_processes(processes, missing[0].config.threads)
        tried = run_missing(missing, file, replace(how, processes=at_once), len(missing)).ran
        ran += tried
        if tried < len(missing) or not all(_is_done(file, cell) for cell in missing):
            return ran  # later cells may need these


def _is_done(file: StudyFile, cell: Cell) -> bool:
    line = file.found(cell.digest)
    return line is not None and lasts(line)


def _chosen(recipe: Recipe, lines: Sequence[Line], only: Only) -> list[Cell]:
    """Return the cells that may run now.

    Raises:
        ConfigError: `only` names what no cell has.
    """
    cells = recipe.cells(Found(lines))
    for key, values in only.items():
        have = {value_of(cell, key) for cell in cells}
        for value in values:
            if value not in have:
                raise ConfigError(_not_there(key, value, have - {""}))
    return [c for c in cells if all(value_of(c, key) in only[key] for key in only)]


def _not_there(key: str, value: str, have: Collection[str]) -> str:
    if have:
        return f"expected {key} among {', '.join(sorted(have))}, got {value!r}"
    return f"expected a label or key that the cells of the recipe have, got {key!r}"


def value_of(cell: Cell, key: str) -> str:
    """Return a label of a cell, or else a field of its config, as text; empty if it has none."""
    return str(cell.labels.get(key, getattr(cell.config, key, "")))


def write_page(recipe: Recipe, path: Path, lines: Sequence[Line], name: str) -> None:
    """Write page and plots; text outside the marks of an existing page is kept.

    Raises:
        ConfigError: a mark in the page stands there once, or more than twice.
    """
    found = Found(lines)
    made = recipe.page(found)
    sections = {**made.sections, "cells": cells_section(recipe, found), "again": again(name)}
    sections["machine"] = machine_section(lines)
    text = path.read_text(encoding="utf-8") if path.exists() else recipe.text
    for name, section in sections.items():
        text = filled(text, name, section)
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, curves in made.plots.items():
        write_atomic(path.with_name(file), svg_of(curves))
    write_atomic(path, text)


def filled(text: str, name: str, section: str) -> str:
    r"""Return a page with the text between the two marks of a name replaced; added if it has none.

    >>> filled("a <!-- t -->old<!-- t --> b", "t", "new")
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


def again(name: str) -> str:
    """Return how to make the page again."""
    return (
        f"Run again: `silograph reproduce {shlex.quote(name)} --data-dir DIR`; it goes on "
        "where it stopped, `--max-minutes 0` only writes this page."
    )


def cells_section(recipe: Recipe, found: Found) -> str:
    """Return which cells of a recipe have run, failed or not."""
    cells = recipe.cells(found)
    lines = [(cell, found.any(cell)) for cell in cells]
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
    told = Counter(
        ", ".join(f"{p} {line['versions'][p]}" for p in packages if p in line.get("versions", {}))
        for line in lines
    )
    texts = [f"{count} by {text or 'versions not written down'}" for text, count in told.items()]
    here = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return f"Cells: {'; '.join(texts) or 'none yet'}. Page written on {here}."


def listing(out: Path, recipes: Sequence[Recipe]) -> list[list[str]]:
    """Return name, cells done and title of recipes."""
    rows = []
    for recipe in recipes:
        found = Found(read_lines(paths_of(recipe, out)[0]))
        cells = recipe.cells(found)
        done = sum(found.any(cell) is not None for cell in cells)
        rows.append([recipe.name, f"{done}/{len(cells)}", recipe.title])
    return rows
