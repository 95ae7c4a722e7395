"""The command line: a thin skin over `silograph.run`; every flag is a field of `RunConfig`.

Everything slow (torch, loaders) is imported inside the commands, so that help is instant.
"""

import json as jsonlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Annotated

import click
import typer
from typer.main import get_command

from silograph.cli import federation
from silograph.cli.flags import (
    CUT_FIELDS,
    FIELDS,
    MISTAKE,
    SHARD_FIELDS,
    CommandInputs,
    Json,
    Quiet,
    StoppedError,
    app,
    command,
    flag,
    logging_with_flags,
    prefix_with_flag,
    resume_hint,
    usage_error,
)
from silograph.cli.studies import print_comparison, print_search
from silograph.core.compiling import is_compiling
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, SilographError, mistake
from silograph.core.files import write_atomic
from silograph.core.stop_signals import INTERRUPTED, handle_signals
from silograph.core.text import count_of, printable

if TYPE_CHECKING:
    from silograph.experiment.run.result import Result

DAMAGED = 1  # exit code of a report on files that were altered or are missing


@command(
    "run",
    FIELDS,
    examples=(
        "silograph run digits",
        "silograph run cora --clients 10 --partition metis --method fedavg",
        "silograph run cora --model sage --method fedais --rounds 50 --out runs/fedais",
        "silograph run silos/ --normalize standard",
        "silograph run --config runs/fedais/config.toml --seed 1",
    ),
)
def run_command(inputs: CommandInputs, json: Json = False, quiet: Quiet = False) -> None:
    """Train a federation and write a result folder."""
    from silograph.experiment.resolve.user_code import own_code
    from silograph.experiment.run.progress import best_mode
    from silograph.experiment.run.result_folder import default_folder
    from silograph.experiment.run.run import run

    config = inputs.config
    out = default_folder(config) if config.out is None else config.out
    with resume_hint(out, trust=bool(own_code(config)), run=True):
        progress = "none" if quiet else best_mode()
        result = run(config=replace(config, out=out), progress=progress)
    _print(result, json)


@app.command("resume")
def resume_command(
    folder: Annotated[Path, typer.Argument(help="result folder of the run")],
    json: Json = False,
    quiet: Quiet = False,
    trust: Annotated[bool, flag("--trust", "run code of yours that the folder names")] = False,
    engine: Annotated[
        str | None, flag("--engine", "resume a run with this engine: local or ray")
    ] = None,
    workers: Annotated[
        str | None, flag("--workers", "resume a run with this number of workers, or auto")
    ] = None,
    address: Annotated[
        str | None, flag("--address", "resume a run on the Ray cluster at this address")
    ] = None,
) -> int:
    """Continue an interrupted run, comparison or search, with the same numbers."""
    from silograph.experiment.report import LINES
    from silograph.experiment.result_files import RESULT
    from silograph.experiment.run.progress import best_mode
    from silograph.experiment.run.run import resume
    from silograph.study.compare import is_comparison, resume_comparison
    from silograph.study.tune import LINES as TRIALS
    from silograph.study.tune import WINNER, is_search, resume_search

    progress = "none" if quiet else best_mode()
    run = not is_comparison(folder) and not is_search(folder)
    flags = {"engine": engine, "workers": workers, "address": address}
    new_engine = {name: value for name, value in flags.items() if value is not None} or None
    if new_engine and not run:
        raise ConfigError(
            f"expected a run to resume with another engine, got {folder}, which holds several: "
            f"leave {', '.join(new_engine)} out",
            **mistake("conflicting-options", [*new_engine]),
        )
    with resume_hint(str(folder), trust=trust, run=run):
        if is_comparison(folder):
            with _report_if_complete("comparison", folder, [LINES], quiet):
                comparison = resume_comparison(folder, trust=trust, progress=progress)
            return print_comparison(comparison, json)
        if is_search(folder):
            with _report_if_complete("search", folder, [TRIALS, WINNER], quiet):
                tuned = resume_search(folder, trust=trust, progress=progress)
            return print_search(tuned, json)
        with _report_if_complete("run", folder, [RESULT], quiet):
            result = resume(folder, trust=trust, progress=progress, engine=new_engine)
    _print(result, json)
    return 0


@contextmanager
def _report_if_complete(
    what: str, folder: Path, files: Sequence[str], quiet: bool
) -> Iterator[None]:
    """Report a complete run: the files that training writes have not changed."""

    def contents() -> list[bytes | None]:
        paths = [folder / name for name in files]
        return [path.read_bytes() if path.exists() else None for path in paths]

    initial_contents = contents()
    yield
    if initial_contents == contents() and not quiet:
        typer.echo(f"the {what} in {folder} was complete: nothing was trained", err=True)


@app.command("report")
def report_command(
    folders: Annotated[
        list[Path], typer.Argument(help="result folders, finished or not, or that of a comparison")
    ],
    out: Annotated[
        Path | None,
        flag(
            "--out",
            "the page (default: DIR/report.html; of several folders, comparison.html here)",
        ),
    ] = None,
) -> int:
    """Write a page about a run, about several side by side, or about the runs of a comparison."""
    from silograph.experiment.report import comparison_runs, write_comparison, write_report

    if out is not None and out.suffix.lower() not in ("", ".html", ".htm"):
        raise ConfigError(
            f"expected --out as FILE.html, got {out}: print the page as PDF in a browser; figures "
            "and tables for papers are in the folder of silograph compare",
            **mistake("option-value", "out", str(out)),
        )
    paths = [folder.resolve() for folder in folders]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ConfigError(f"expected result folders that differ, got {folders[number]} twice")
    if len(folders) == 1 and (runs := comparison_runs(folders[0])):
        page = write_comparison(runs, out or folders[0] / "report.html", comparison=folders[0])
    elif len(folders) == 1:
        page = write_report(folders[0], out)
    else:
        page = write_comparison(folders, out or Path("comparison.html"))
    typer.echo(f"written to {page.path}")
    return DAMAGED if page.is_of_damaged else 0


@app.command("predict")
def predict_command(
    run: Annotated[Path, typer.Argument(help="result folder of a run or silo, or a model's file")],
    out: Annotated[Path, flag("--out", "file to write, CSV or .parquet; it must not exist")],
    data: Annotated[
        str | None, flag("--data", "a silo's folder, or name or path of a graph")
    ] = None,
    tables: Annotated[
        Path | None,
        flag(
            "--tables", "in place of --data: raw tables, prepared as those of the run's silo were"
        ),
    ] = None,
    like: Annotated[
        Path | None,
        flag("--like", "of --tables: folder prepared before (default: as the run has saved it)"),
    ] = None,
    model: Annotated[
        str | None,
        flag("--model", "FILE.py:NAME, for a model that is a module of your own"),
    ] = None,
    data_dir: Annotated[
        str | None, flag("--data-dir", "folder of data sets, for a graph's name")
    ] = None,
    columns: Annotated[
        str | None, flag("--columns", "names of columns in tables, as for run")
    ] = None,
    na_values: Annotated[
        str | None, flag("--na-values", "missing values in tables, as for run")
    ] = None,
    client: Annotated[
        str | None,
        flag("--client", "whose statistics or model, where each client has its own of them"),
    ] = None,
) -> None:
    """Write what the model of a run predicts for each node, with probabilities and decisions."""
    from silograph.experiment.resolve.exclusions import own_module
    from silograph.experiment.run.predictions import predict_tables_to, predict_to

    make = None if model is None else own_module(make_config({"model": model}))
    if (data is None) == (tables is None):
        got = "both" if tables is not None else "neither"
        raise ConfigError(
            f"expected --data or --tables, got {got}: give one of them",
            **(
                mistake("missing-option", "data")
                if tables is None
                else mistake("conflicting-options", ["data", "tables"])
            ),
        )
    if tables is not None:
        if data_dir or columns or na_values:
            raise ConfigError(
                "expected no --data-dir, --columns or --na-values beside --tables, whose columns "
                "the schema describes: leave them out",
                **mistake("conflicting-options", ["tables", "data_dir", "columns", "na_values"]),
            )
        count = predict_tables_to(run, tables, out, like=like, model=make, client=client)
    elif like is not None:
        raise ConfigError("expected --like with --tables only: leave it out, or give --tables")
    else:
        assert data is not None  # see above
        count = predict_to(
            run,
            data,
            out,
            model=make,
            data_dir=data_dir,
            columns=columns,
            na_values=na_values,
            client=client,
        )
    typer.echo(f"predictions of {count_of(count, 'node')} written to {out}")


@app.command("recommend")
def recommend_command(
    run: Annotated[
        Path,
        typer.Argument(
            help="result folder of a silo, or its recommender's file, or of a simulation"
        ),
    ],
    user: Annotated[
        str | None, flag("--user", "id of a user; one that is unknown gets popular items")
    ] = None,
    item: Annotated[
        str | None, flag("--item", "predict the user's rating of this item only")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="number of items")] = 10,
    client: Annotated[str | None, flag("--client", "of a simulation, whose users")] = None,
    all_users: Annotated[
        bool,
        flag(
            "--all", "write the items of all users to --out, of a simulation those of all clients"
        ),
    ] = False,
    out: Annotated[Path | None, flag("--out", "with --all: a new file, CSV or .parquet")] = None,
    json: Annotated[bool, flag("--json", "print one JSON object")] = False,
) -> None:
    """Print the items of a silo that a user would rate highest, without those rated already."""
    from silograph.cli.printing import print_recommended
    from silograph.experiment.run.recommender import (
        client_names,
        load_recommender,
        recommender_file,
        write_recommendations,
    )

    if all_users != (out is not None) or all_users == (user is not None) or (all_users and item):
        raise ConfigError(
            "expected either --user ID, perhaps with --item ID, or --all with --out FILE"
        )
    if out is not None:
        names = client_names(run) if client is None else []
        files: dict[str | None, Path] = {name: recommender_file(run, name) for name in names}
        files = files or {None: recommender_file(run, client)}
        recommenders = {name: load_recommender(path) for name, path in files.items()}
        num_users = write_recommendations(recommenders, top, out)
        of_clients = f" of {count_of(len(names), 'client')}" if names else ""
        typer.echo(f"{count_of(num_users, 'user')}{of_clients} written to {out}")
        return
    assert user is not None  # see above
    recommender = load_recommender(recommender_file(run, client))
    print_recommended(recommender, user, item, top, as_json=json)


def _print(result: "Result", json: bool) -> None:
    if json:
        typer.echo(result.to_json())
        return
    from silograph.cli.printing import print_result

    print_result(result)


@command("partition", CUT_FIELDS)
def partition_command(
    inputs: CommandInputs,
    json: Annotated[bool, flag("--json", "print the figures as one JSON object")] = False,
    quick: Annotated[
        bool,
        flag("--quick", "without clustering, which takes long on dense graphs"),
    ] = False,
) -> None:
    """Cut a graph and print what the cut did."""
    from silograph.cli.printing import print_cut

    print_cut(inputs.config, as_json=json, quick=quick)


@command("attack", FIELDS)
def attack_command(
    inputs: CommandInputs,
    json: Annotated[bool, flag("--json", "print the findings as one JSON object")] = False,
) -> None:
    """Simulate a run, and show what its server recovers of the silos' data."""
    from silograph.cli.printing import print_findings
    from silograph.experiment.run.result_folder import default_folder
    from silograph.study.attack import attack, write_findings

    config = inputs.config
    out = Path(config.out or f"{default_folder(config)}-attack")
    findings = attack(config)
    write_findings(findings, config, out)
    print_findings(findings, out, as_json=json)


@command("export-silos", CUT_FIELDS)
def export_command(
    inputs: CommandInputs,
    out: Annotated[Path, flag("--out", "folder to make, with a folder for each silo")],
    format: Annotated[str, flag("--format", "of the tables: csv, npz or parquet")] = "csv",
    without_cross_edges: Annotated[
        bool,
        flag(
            "--without-cross-edges",
            "leave out edges between silos, as differential privacy needs",
        ),
    ] = False,
) -> None:
    """Cut a graph and write one folder a silo, as if each had made its own."""
    from silograph.deploy.demo import export_silos

    folders = export_silos(inputs.config, out, format, cross_edges=not without_cross_edges)
    typer.echo(f"{count_of(len(folders), 'silo')} written to {out}")


@command(
    "shard",
    SHARD_FIELDS,
    examples=(
        "silograph shard cora --clients 100 --partition metis --out shards",
        "silograph run shards --workers 2",
    ),
)
def shard_command(
    inputs: CommandInputs,
    out: Annotated[Path, flag("--out", "folder to make, with a file for each client")],
) -> None:
    """Cut a graph and write one file for each client, read when the client is called."""
    from silograph.experiment.run.shard import shard

    shards = shard(config=replace(inputs.config, out=str(out)))
    clients = shards.clients
    size = f"{clients.num_bytes / 1e6:,.1f} MB"
    typer.echo(f"{count_of(clients.num_clients, 'client')} written to {out}, {size}")


@dataclass(frozen=True, kw_only=True)
class PreparationFlags:
    """Flags of what makes silos' folders."""

    tables: Annotated[
        Path | None,
        typer.Argument(help="folder of a silo's raw tables, or of one such folder for each silo"),
    ] = None
    schema: Annotated[Path | None, flag("--schema", "file that says what columns mean")] = None
    like: Annotated[
        Path | None,
        flag("--like", "folder prepared before: its schema, means and ranks count again"),
    ] = None
    out: Annotated[Path | None, flag("--out", "folder to make")] = None
    name: Annotated[str | None, flag("--name", "of the silo (default: the folder's)")] = None
    received: Annotated[
        list[Path] | None,
        flag("--received", "edges to this silo that another has handed over (repeatable)"),
    ] = None
    format: Annotated[str, flag("--format", "of the tables: csv, npz or parquet")] = "csv"
    make_key: Annotated[
        bool,
        flag("--make-key", "make the silo's own key, and print its line for the server's --keys"),
    ] = False
    make_secret: Annotated[
        bool,
        flag("--make-secret", "make OUT/secret, which all silos share: one of them does this once"),
    ] = False
    guess: Annotated[
        bool, flag("--guess", "print a first schema from the tables, and nothing else")
    ] = False
    count_categories: Annotated[
        Path | None,
        flag("--count-categories", "file to write: the silo's words of categories to be counted"),
    ] = None
    categories: Annotated[
        list[Path] | None,
        flag(
            "--categories",
            "such a file of each silo (repeatable): print the schema with all their words",
        ),
    ] = None


@command("prepare")
def prepare_command(flags: PreparationFlags) -> None:
    """Make silos' folders from raw tables, by a schema that all silos share."""
    alone = {
        "--guess": flags.guess,
        "--count-categories": flags.count_categories is not None,
        "--categories": flags.categories is not None,
    }
    of_folder = (flags.out, flags.like, flags.received, flags.make_key or None)
    makes_folder = flags.make_secret or any(value is not None for value in of_folder)
    chosen = [name for name, is_there in alone.items() if is_there]
    if len(chosen) > 1 or (chosen and makes_folder):
        raise ConfigError(
            f"expected {chosen[0]} alone, got it with other flags that say what to make: leave "
            "them out",
            **mistake("conflicting-options", chosen),
        )
    if flags.categories is not None:
        from silograph.graph.silos.categories import join_categories

        if flags.schema is None or flags.tables is not None:
            raise ConfigError("expected --schema and no TABLES with --categories")
        typer.echo(join_categories(flags.schema, flags.categories), nl=False)
        return
    if flags.tables is None:
        raise ConfigError(
            "expected a folder of raw tables, got none: give TABLES",
            **mistake("missing-option", "tables"),
        )
    if flags.guess:
        from silograph.graph.silos.guess_schema import guess_schema

        typer.echo(guess_schema(flags.tables), nl=False)
        return
    if flags.count_categories is not None:
        from silograph.graph.silos.categories import count_categories

        if flags.schema is None:
            raise ConfigError(
                "expected --schema with --count-categories, got none",
                **mistake("missing-option", "schema"),
            )
        words = count_categories(flags.tables, schema=flags.schema, out=flags.count_categories)
        for name, of_feature in words.items():
            typer.echo(f"{printable(name)}: {count_of(len(of_feature), 'word')}")
        typer.echo(f"written to {flags.count_categories}: read it before you hand it over")
        return
    if flags.out is None:
        raise ConfigError(
            "expected a folder to make, got none: give --out", **mistake("missing-option", "out")
        )
    if flags.make_key:  # before tables are read, which takes long
        from silograph.federation.session.wire import need_packages

        need_packages()
    from silograph.graph.silos.prepare import prepare
    from silograph.graph.silos.read import SECRET

    silos = prepare(
        flags.tables,
        schema=flags.schema,
        like=flags.like,
        out=flags.out,
        name=flags.name,
        received=flags.received or (),
        format=flags.format,
    )
    for silo in silos:
        typer.echo(f"{silo.name}: {silo.counts}")
        for note in silo.notes:
            typer.echo(f"  {printable(note)}")
    typer.echo(f"written to {flags.out}")
    secret = token_bytes(32)
    for silo in silos:
        if flags.make_secret:
            write_atomic(silo.folder / SECRET, secret, private=True)
            typer.echo(f"{silo.folder / SECRET} is for the other silos, and not for the server")
        if flags.make_key:
            federation.make_key(silo.folder)


@app.command("check")
def check_command(
    data: Annotated[Path, typer.Argument(help="folder of a silo, or with the folders of several")],
    json: Annotated[bool, flag("--json", "print everything as one JSON object")] = False,
    out: Annotated[Path | None, flag("--out", "page to write, FILE.html, with histograms")] = None,
) -> None:
    """Show what silos' folders hold, how far they differ, and what looks wrong."""
    from silograph.cli.printing import print_inspection

    if out is not None and (json or out.suffix.lower() not in (".html", ".htm")):
        raise ConfigError(
            f"expected --out FILE.html without --json, got {out}: for JSON redirect the output"
        )
    print_inspection(data, out, as_json=json)


def _version(is_requested: bool) -> None:
    if is_requested:
        import importlib.metadata  # a tenth of the time of --help

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
def methods_command(
    names: Annotated[
        list[str] | None, typer.Argument(help="methods to show (default: all)", show_default=False)
    ] = None,
) -> None:
    """List the methods and their options, or show those that are named."""
    from silograph.cli.printing import print_methods

    print_methods(names or ())


@app.command("parts")
def parts_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="parts to show, or kinds such as neighbors (default: all)", show_default=False
        ),
    ] = None,
) -> None:
    """List the parts that a run chooses by name and their options, or show those that are named."""
    from silograph.cli.printing import print_parts

    print_parts(names or ())


@app.command("datasets")
def datasets_command() -> None:
    """List the datasets that are known by name."""
    from silograph.cli.printing import print_datasets

    print_datasets()


@app.command("compile")
def compile_command(
    dtype: Annotated[
        list[str] | None,
        flag("--dtype", "float32 or float64; may be repeated (default: float32)"),
    ] = None,
) -> None:
    """Compile all kernels now, so that no run has to wait for them: for a machine or an image."""
    from silograph.experiment.run.compile_kernels import PRECISIONS, compile_kernels

    names = dict.fromkeys(dtype or ["float32"])
    for name in names:
        if name not in PRECISIONS:
            raise ConfigError(
                f"--dtype must be float32 or float64, got {name!r}",
                **mistake("option-value", "dtype", name),
            )
    for name in names:
        count = compile_kernels(name, lambda line: typer.echo(line, err=True))
        typer.echo(f"{name}: {count_of(count, 'kernel')} compiled")


# As --help lists them: what most users begin with comes first.
ORDER = (
    *("run", "resume", "compare", "tune", "report", "predict", "recommend"),
    *("datasets", "methods", "parts", "partition", "shard"),
    *("prepare", "check", "export-silos", "server", "silo", "certs", "audit", "demo-federation"),
    *("attack", "train-agent", "reproduce", "compile"),
)
app.registered_commands.sort(key=lambda registered: ORDER.index(registered.name or ""))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without torch's place in its own source."""
    return (str(error).splitlines() or ["out of memory"])[0].rpartition("Allocator: ")[2]


def report_error(line: str, arguments: Sequence[str], error: BaseException | None = None) -> int:
    """Print a mistake as one line, and with --json as JSON, too; return the exit code.

    Args:
        line: what is wrong.
        arguments: of the command.
        error: that was raised; None for flags that cannot be read.
    """
    typer.echo(f"error: {line}", err=True)
    print_error_json(line, arguments, error)
    return MISTAKE


def print_error_json(line: str, arguments: Sequence[str], error: BaseException | None) -> None:
    """With --json, print an error as JSON, the last line on standard error.

    Standard output stays empty: whoever reads a result there must not take an error for one.
    """
    if "--json" not in arguments:
        return
    if not isinstance(error, SilographError):  # of the operating system, or flags
        error = ConfigError() if error is None else SilographError(code="system")
    about = {"code": error.code, "message": line, "fields": error.fields}
    typer.echo(jsonlib.dumps({"error": about}, default=str), err=True)


def main() -> None:
    """Run the command line; a user's mistake is one line on standard error and exit code 2.

    SIGTERM, with which services are stopped, does what Ctrl-C does: nothing is left behind. Once a
    command is over SIGTERM is ignored: Python ends anyway, and an exception would be a traceback.
    """
    handle_signals()
    code = run_app(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if is_compiling():  # LLVM cannot be stopped, and takes up to half a minute
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@cache
def command_line() -> click.Command:
    """Build the commands and their flags, once in a process.

    typer's `app()` builds all of them anew at each call, which takes 60 ms.
    """
    return get_command(app)


def run_app(arguments: list[str]) -> int:
    """Run the command line with these arguments and return the exit code."""
    try:
        with logging_with_flags():
            code = command_line()(args=arguments, prog_name="silograph", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        typer.echo(error.ctx.get_help())
        return 2
    except click.ClickException as error:
        return report_error(" ".join(usage_error(error).split()), arguments)
    except SilographError as error:  # which may quote another machine
        text = prefix_with_flag(" ".join(str(error).splitlines()), arguments)
        return report_error(printable(text), arguments, error)
    except StoppedError as stopped:
        typer.echo("\n".join(stopped.lines), err=True)
        if stopped.code == MISTAKE:
            print_error_json(str(stopped).removeprefix("error: "), arguments, stopped.__cause__)
        return stopped.code
    except OSError as error:
        return report_error(str(error), arguments, error)
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error):
            raise
        line = f"expected a run that fits into memory, got: {first_line(error)}"
        return report_error(line, arguments, error)
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer's own answer to Ctrl-C in a command
        typer.echo("interrupted", err=True)
    return code if isinstance(code, int) else 0
