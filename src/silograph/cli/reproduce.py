"""`silograph reproduce`: recipes, listed and made."""

import csv
import io
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from silograph.cli.compare_tune import FAILED
from silograph.cli.flags import app
from silograph.cli.hints import going_on
from silograph.core.errors import ConfigError
from silograph.core.text import counted

RECIPES = Path("benchmarks")


def only_of(texts: Sequence[str], datasets: str | None) -> dict[str, list[str]]:
    """Return the values that cells may have, by key, of `KEY=V1,V2`.

    A value with a comma stands in double quotes, as in CSV.

    >>> only_of(["clients=10,100"], "cora")
    {'clients': ['10', '100'], 'dataset': ['cora']}
    >>> only_of(['row="FedGNN, noise 0.002",FeSoG'], None)
    {'row': ['FedGNN, noise 0.002', 'FeSoG']}

    Raises:
        ConfigError: another form, or a key twice.
    """
    given = [*texts, *([f"dataset={datasets}"] if datasets is not None else [])]
    found: dict[str, list[str]] = {}
    for text in given:
        key, equals, values = text.partition("=")
        if not equals or key in found:
            raise ConfigError(f"expected --only KEY=VALUE,VALUE, each key once, got {text!r}")
        found[key] = _listed(values, f"--only {key}")
    return found


def _listed(text: str, what: str) -> list[str]:
    """Return the values of a line of CSV.

    Raises:
        ConfigError: one of them is empty, or quotes that do not end where a value does.
    """
    try:
        row = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error:
        row = []
    found = [value.strip() for value in row]
    if not found or not all(found):
        raise ConfigError(f'expected {what} as a list like a,b or "a, b",c, got {text!r}')
    return found


def _joined(values: Sequence[str]) -> str:
    """Return the line of CSV that `_listed` reads so."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(values)
    return line.getvalue()


@app.command("reproduce")
def reproduce_command(
    recipe: Annotated[
        str | None,
        typer.Argument(help="name of a recipe, or FILE.py:NAME (default: list the recipes)"),
    ] = None,
    datasets: Annotated[
        str | None, typer.Option("--datasets", help="run only cells of these: cora,pubmed")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help='run only cells with KEY=VALUE,"A, B" (repeatable)'),
    ] = None,
    recipes: Annotated[Path, typer.Option("--recipes", help="folder of recipes by name")] = RECIPES,
    out: Annotated[Path, typer.Option("--out", help="folder of pages and lines")] = RECIPES,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", help="folder in which datasets are looked for first")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", help="runs at the same time (default: cores / threads)"),
    ] = None,
    max_minutes: Annotated[
        float,
        typer.Option("--max-minutes", help="start no more cells then; 0 only writes the page"),
    ] = math.inf,
    quiet: Annotated[bool, typer.Option("--quiet", help="show no progress")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="run the code of recipes that are named, not given")
    ] = False,
) -> int:
    """Run what a recipe lacks and write its page, ours beside the paper's."""
    from silograph.experiment.run.progress import best_mode
    from silograph.study.reproduce.find import find_recipe
    from silograph.study.reproduce.reproduce import reproduce

    if recipe is None:
        list_recipes(recipes, out, trust=trust)
        return 0
    chosen = only_of(only or [], datasets)
    said = {"--data-dir": data_dir, "--processes": processes}
    with going_on(_again(recipe, recipes, out, chosen, said) + " --trust" * trust):
        made = reproduce(
            find_recipe(recipe, recipes, trust=trust),
            name=recipe,
            out=out,
            data_dir=data_dir,
            only=chosen,
            processes=processes,
            max_minutes=max_minutes,
            progress="none" if quiet else best_mode(),
        )
    if made.taken:
        typer.echo(f"copied {counted(made.taken, 'cell')} that recipes beside this one have run")
    typer.echo(
        f"ran {counted(made.ran, 'cell')}, {made.failed} without result, {made.missing} not yet run"
    )
    typer.echo(f"written to {made.page}")
    return FAILED if made.failed else 0


def _again(
    recipe: str,
    recipes: Path,
    out: Path,
    chosen: Mapping[str, Sequence[str]],
    said: Mapping[str, str | int | None],
) -> str:
    """Return the command with which a recipe that was interrupted goes on."""
    arguments = ["reproduce", recipe, "--out", str(out)]
    arguments += ["--recipes", str(recipes)] if recipes != RECIPES else []
    arguments += [f"--only={key}={_joined(values)}" for key, values in chosen.items()]
    for flag, value in said.items():
        arguments += [] if value is None else [flag, str(value)]
    return f"silograph {shlex.join(arguments)}"


def list_recipes(folder: Path, out: Path, *, trust: bool) -> None:
    """Print the recipes of a folder; where their code may be run, also how far their files are."""
    from silograph.cli.printing import print_table
    from silograph.study.reproduce.find import find_recipe, own_recipes, recipes_in
    from silograph.study.reproduce.reproduce import listing

    names = recipes_in(folder)
    if not trust and not own_recipes(folder):
        print_table(["recipe", "file"], [[n, spec.rpartition(":")[0]] for n, spec in names.items()])
        typer.echo("with --trust, which runs these files: what they are, and how far")
        return
    rows = listing(out, [find_recipe(name, folder, trust=True) for name in names])
    print_table(["recipe", "cells", "what it is"], rows)
