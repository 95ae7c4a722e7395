"""The command line: a thin skin over `silograph.run`; every flag is a field of `RunConfig`.

Everything slow (torch, loaders) is imported inside the commands, so that help is instant.
"""

import dataclasses
import importlib.metadata
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import click
import typer

from silograph.core.config import RunConfig, make_config, parse_option, read_toml
from silograph.core.errors import SilographError

if TYPE_CHECKING:
    from silograph.experiment.result import Result

CUT_FIELDS = (
    "data_dir",
    "scale",
    "largest_component",
    "split",
    "partition",
    "clients",
    "alpha",
    "seed",
    "partition_seed",
    "split_seed",
)
INTERRUPTED = 130  # exit code of a program stopped by Ctrl-C
app = typer.Typer(
    help="Graph neural networks over graphs that live in separate silos.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _plain_type(annotation: Any) -> type:
    """Return the type that a flag is read as: Optional, Annotated and Literal taken off."""
    if get_origin(annotation) is Annotated:
        return _plain_type(get_args(annotation)[0])
    if isinstance(annotation, type):
        return annotation
    inner = [a for a in get_args(annotation) if a is not type(None)]
    return type(inner[0]) if isinstance(inner[0], str) else _plain_type(inner[0])


def _flag(field: "dataclasses.Field[Any]") -> inspect.Parameter:
    """Return the command-line parameter of a config field."""
    name = "--" + field.name.replace("_", "-")
    help_text = field.metadata["help"]
    kind: Any = _plain_type(field.type)
    if get_origin(field.type) is Literal:
        help_text += f": {' or '.join(get_args(field.type))}"
    if field.name == "options":
        kind, name = list[str], "--option"
    elif field.default is not None:
        help_text += f" (default: {str(field.default).lower()})"
    off = field.metadata["off"] or f"--no-{name[2:]}"
    names = [f"{name}/{off}"] if kind is bool else [name]
    declared = typer.Option(
        None, *names, help=help_text, show_default=False, rich_help_panel=field.metadata["group"]
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=declared,
        annotation=kind | None,
    )


def _command(
    name: str, fields: tuple[str, ...] | None, extra: Mapping[str, Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command that takes DATASET, `--config`, the flags of `fields`, and `extra`.

    The wrapped function gets a `RunConfig` (run file first, flags over it) and the extras.
    """
    chosen = [
        f
        for f in dataclasses.fields(RunConfig)
        if f.name != "dataset" and (fields is None or f.name in fields)
    ]

    def register(body: Callable[..., None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            own = {key: given.pop(key) for key in extra}
            file = given.pop("config")
            values = read_toml(file) if file is not None else {}
            make_config(values, source=str(file))  # so that an error names what is wrong
            flags = {key: value for key, value in given.items() if value is not None}
            if "options" in flags:
                own_options = dict(parse_option(text) for text in flags.pop("options"))
                values["options"] = {**values.get("options", {}), **own_options}
            body(make_config(values | flags), **own)

        parameters = [
            inspect.Parameter(
                "dataset",
                inspect.Parameter.KEYWORD_ONLY,
                default=typer.Argument(
                    None, help="name of a dataset, or a path to its file (default: digits)"
                ),
                annotation=str | None,
            ),
            inspect.Parameter(
                "config",
                inspect.Parameter.KEYWORD_ONLY,
                default=typer.Option(None, "--config", help="run file (TOML); flags go over it"),
                annotation=Path | None,
            ),
            *(_flag(f) for f in chosen),
            *(
                inspect.Parameter(
                    key, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=bool
                )
                for key, value in extra.items()
            ),
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__doc__ = body.__doc__
        app.command(name)(command)
        return body

    return register


@_command(
    "run",
    None,
    {
        "json": typer.Option(False, "--json", help="print the final result as one JSON object"),
        "quiet": typer.Option(False, "--quiet", help="show no progress"),
    },
)
def run_command(config: RunConfig, json: bool, quiet: bool) -> None:
    """Train a federation and write a result folder."""
    from silograph.experiment.folder import default_folder
    from silograph.experiment.progress import best_mode
    from silograph.experiment.run import run

    if config.out is None:
        config = dataclasses.replace(config, out=default_folder(config))
    with resume_hint(config.out):
        result = run(config=config, progress="none" if quiet else best_mode())
    _print(result, json)


@app.command("resume")
def resume_command(
    folder: Annotated[Path, typer.Argument(help="result folder of the run")],
    json: Annotated[
        bool, typer.Option("--json", help="print the final result as one JSON object")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="show no progress")] = False,
) -> None:
    """Go on with an interrupted run as if it had not been."""
    from silograph.experiment.progress import best_mode
    from silograph.experiment.run import resume

    with resume_hint(str(folder)):
        result = resume(folder, progress="none" if quiet else best_mode())
    _print(result, json)


@contextmanager
def resume_hint(folder: str | None) -> Iterator[None]:
    """On Ctrl-C or a full disk, say how to go on."""
    try:
        yield
    except (KeyboardInterrupt, OSError):
        if folder is not None and Path(folder).is_dir():
            typer.echo(f"to go on: silograph resume {shlex.quote(folder)}", err=True)
        raise


def _print(result: "Result", json: bool) -> None:
    if json:
        typer.echo(result.to_json())
        return
    from silograph.experiment.tables import print_result

    print_result(result)


@_command(
    "partition",
    CUT_FIELDS,
    {"json": typer.Option(False, "--json", help="print the figures as one JSON object")},
)
def partition_command(config: RunConfig, json: bool) -> None:
    """Cut a graph and print what the cut did."""
    from silograph.experiment.tables import print_cut

    print_cut(config, as_json=json)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"silograph {importlib.metadata.version('silograph')}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Graph neural networks over graphs that live in separate silos."""
    del version  # its callback has answered


@app.command("methods")
def methods_command() -> None:
    """List the methods and their options."""
    from silograph.experiment.tables import print_methods

    print_methods()


@app.command("datasets")
def datasets_command() -> None:
    """List the datasets that are known by name."""
    from silograph.experiment.tables import print_datasets

    print_datasets()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without torch's place in its own source."""
    return (str(error).splitlines() or ["out of memory"])[0].rpartition("Allocator: ")[2]


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error and exit code 2."""
    sys.exit(run_app(sys.argv[1:]))


def run_app(arguments: list[str]) -> int:
    """Run the command line with these arguments and return the exit code."""
    try:
        code = app(args=arguments, prog_name="silograph", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        typer.echo(error.ctx.get_help())
        return 2
    except click.ClickException as error:
        typer.echo(f"error: {' '.join(error.format_message().split())}", err=True)
        return 2
    except SilographError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error):
            raise
        typer.echo(
            f"error: expected a run that fits into memory, got: {first_line(error)}", err=True
        )
        return 2
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer's own answer to Ctrl-C in a command
        typer.echo("interrupted", err=True)
    return code if isinstance(code, int) else 0
