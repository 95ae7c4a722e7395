"""Commands of a real federation: the server, a silo, certificates, and all on one machine."""

import dataclasses
import itertools
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import click
import typer
from click.core import ParameterSource

from silograph.cli.flags import CUT_FIELDS, FIELDS, Given, app, command
from silograph.cli.hints import going_on
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, ProtocolError

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what went wrong is said in our own words
PANEL = "Federation"
LOG_FILE = "file that gets what happens as JSON lines, one an event"
LOG_LEVEL = "the least that is logged: debug, info or warning (default: info)"
# The graph is at the silos, and is cut already: a server has no flags for that.
AT_SILOS = {*CUT_FIELDS, "local_bias"} - {"split", "clients", "seed", "split_seed"}
WRITTEN_DOWN = {"dataset", "config", "silos", "keys", *FIELDS}  # in a run's folder
FAILED = 1  # exit code of a silo whose run failed at the server


def _option(*names: str, help: str, default: object = None) -> object:
    return typer.Option(default, *names, help=help, show_default=False, rich_help_panel=PANEL)


@command(
    "server",
    [name for name in FIELDS if name not in AT_SILOS],
    {
        "listen": (
            str,
            _option("--listen", help="HOST:PORT that silos connect to; port 0: any", default=...),
        ),
        "silos": (
            str | None,
            _option("--silos", help="names of the silos: a,b,c (default: --clients, by name)"),
        ),
        "certs": (
            Path | None,
            _option("--certs", help="folder with server.pem and server.key (see silograph certs)"),
        ),
        "insecure": (
            bool,
            _option("--insecure", help="without TLS, on this machine only", default=False),
        ),
        "keys": (
            Path | None,
            _option("--keys", help="folder of NAME.pub; default: the first key keeps a name"),
        ),
        "least": (
            int | None,
            _option("--least", help="silos without which a round fails (default: all)"),
        ),
        "round_seconds": (
            float,
            _option(
                "--round-seconds",
                help="how long a silo may take over its answers of a round (default: 600)",
                default=600.0,
            ),
        ),
        "rejoin_seconds": (
            float,
            _option(
                "--rejoin-seconds",
                help="how long a round waits for silos that it needs (default: 60)",
                default=60.0,
            ),
        ),
        "resume": (
            Path | None,
            _option("--resume", help="result folder of a run to go on with, in place of a config"),
        ),
        "wait": (
            float,
            _option("--wait", help="seconds to wait for all silos (default: 600)", default=600.0),
        ),
        "metrics": (
            str | None,
            _option("--metrics", help="PORT or HOST:PORT where OpenMetrics text is read"),
        ),
        "keep_model": (
            bool,
            _option(
                "--keep-model",
                help="silos do not get the model when the run is over",
                default=False,
            ),
        ),
        "log_file": (Path | None, _option("--log-file", help=LOG_FILE)),
        "log_level": (str, _option("--log-level", help=LOG_LEVEL, default="info")),
        "json": (
            bool,
            typer.Option(False, "--json", help="print the final result as one JSON object"),
        ),
        "quiet": (bool, typer.Option(False, "--quiet", help="show no progress")),
    },
)
def server_command(
    given: Given,
    listen: str,
    silos: str | None,
    certs: Path | None,
    insecure: bool,
    keys: Path | None,
    least: int | None,
    round_seconds: float,
    rejoin_seconds: float,
    resume: Path | None,
    wait: float,
    metrics: str | None,
    keep_model: bool,
    log_file: Path | None,
    log_level: str,
    json: bool,
    quiet: bool,
) -> None:
    """Wait for silos, train with them, and write a result folder."""
    from silograph.cli.printing import print_result
    from silograph.deploy.logs import logging_to
    from silograph.deploy.server import serve, serve_again
    from silograph.deploy.venue import Venue
    from silograph.experiment.run.progress import best_mode
    from silograph.experiment.run.result_folder import default_folder

    words = _words()
    if resume is not None:
        _check_alone(words)
    config = given.config
    if config.dataset == RunConfig().dataset:
        config = dataclasses.replace(config, dataset="silos")
    if config.out is None:
        config = dataclasses.replace(config, out=default_folder(config))
    venue = Venue(
        listen=listen,
        silos=None if silos is None else tuple(name.strip() for name in silos.split(",")),
        certificate=None if certs is None else (certs / "server.pem", certs / "server.key"),
        insecure=insecure,
        keys=keys,
        least=least,
        seconds=round_seconds,
        patience=wait,
        rejoin=rejoin_seconds,
        metrics=metrics,
        hand_over=not keep_model,
    )
    mode = "none" if quiet else best_mode()
    folder = str(config.out if resume is None else resume)
    again = going_on(_again(folder, words), folder, also=(ProtocolError,))
    with again, logging_to(log_file, log_level):
        if resume is not None:
            result = serve_again(resume, venue, progress=mode)
        else:
            result = serve(config, venue, progress=mode)
    if json:
        typer.echo(result.to_json())
    else:
        print_result(result)


def _check_alone(words: Mapping[str, list[str]]) -> None:
    """Raise `ConfigError` where `--resume` stands beside what the run's folder says."""
    for name, said in words.items():
        if name in WRITTEN_DOWN:
            raise ConfigError(
                f"expected --resume alone, for the run's folder says the rest, got {said[0]} "
                "besides: leave it out"
            )


def _again(folder: str, words: Mapping[str, list[str]]) -> str:
    """Return the command with which a server that was stopped goes on."""
    kept = [words[name] for name in words if name not in WRITTEN_DOWN and name != "resume"]
    return shlex.join(["silograph", "server", "--resume", folder, *itertools.chain(*kept)])


def _words() -> dict[str, list[str]]:
    """Return the words of the command line, by the names of their parameters."""
    context, found = click.get_current_context(), {}
    for each in context.command.params:
        assert each.name is not None  # typer names all
        if context.get_parameter_source(each.name) is ParameterSource.COMMANDLINE:
            value, word = context.params[each.name], each.opts[0]
            found[each.name] = [word] if isinstance(value, bool) else [word, str(value)]
    return found


@app.command("silo")
def silo_command(
    server: Annotated[str, typer.Option("--server", help="HOST:PORT of the server")],
    data: Annotated[Path, typer.Option("--data", help="the silo's folder (docs/silos.md)")],
    name: Annotated[
        str | None, typer.Option("--name", help="the silo's name, if it is to be checked")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", help="certificate that the server's comes from")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="without TLS, to this machine only")
    ] = False,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="the silo's own key (default: DATA/key.pem, made if absent)"),
    ] = None,
    secret: Annotated[
        Path | None,
        typer.Option(
            "--secret",
            help="shared with other silos: a file, or a folder of NAME files (default: "
            "DATA/secret, if there is one)",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="folder for the last two rounds (default: DATA/state)"),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="torch device (default: the server's config)")
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", help="seconds to try to reach the server, also one that was stopped"
        ),
    ] = 600.0,
    no_wait: Annotated[
        bool,
        typer.Option(
            "--no-wait", help="end with exit code 1 when the server is stopped, in place of waiting"
        ),
    ] = False,
    allow: Annotated[
        str | None,
        typer.Option(
            "--allow",
            help="methods that this silo agrees to besides those that send weights and counts "
            "only: label_guided,bns,cagnet,collect,own.py:METHOD (docs/exchange.md)",
        ),
    ] = None,
    allow_code: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-code",
            help="FILE.py or package.module with methods or models that the server may name; its "
            "code runs here (repeatable; docs/federation.md)",
        ),
    ] = None,
    result: Annotated[
        Path | None,
        typer.Option(
            "--result",
            help="new folder for the model, the silo's scores and a report (default: "
            "DATA/results/METHOD-RUN)",
        ),
    ] = None,
    log_file: Annotated[Path | None, typer.Option("--log-file", help=LOG_FILE)] = None,
    log_level: Annotated[str, typer.Option("--log-level", help=LOG_LEVEL)] = "info",
) -> int:
    """Take part in one run with the data of a folder, which stay here."""
    from silograph.deploy.allowed_code import allow_code as import_allowed
    from silograph.deploy.allowed_code import split_names
    from silograph.deploy.logs import logging_to
    from silograph.deploy.silo import Attendance, attend, read_allowed
    from silograph.deploy.silo_display import show_silo
    from silograph.deploy.silo_result import RESULTS
    from silograph.experiment.run.progress import best_mode
    from silograph.graph.silos.read import read_silo
    from silograph.graph.silos.spec import SECRET

    silo = read_silo(data)
    if name is not None and name != silo.name:
        raise ConfigError(f"expected the silo {name} in {data}, got {silo.name}: see its silo.toml")
    if secret is None and (data / SECRET).exists():
        secret = data / SECRET
    code = import_allowed(split_names(allow_code or ()))
    how = Attendance(
        server=server,
        key=data / "key.pem" if key is None else key,
        secret=secret,
        ca=ca,
        insecure=insecure,
        state=data / "state" if state is None else state,
        device=device,
        patience=wait,
        waits=not no_wait,
        allow=read_allowed(allow, code),
        code=code,
        out=result,
        results=data / RESULTS,
    )
    with logging_to(log_file, log_level), show_silo(best_mode(), silo.name) as report:
        reason = attend(silo, how, report)
    if reason is not None:
        typer.echo(f"error: the run failed: {reason}", err=True)
        return FAILED
    if best_mode() == "plain":
        typer.echo("the run is over", err=True)
    return 0


@app.command("certs")
def certs_command(
    out: Annotated[Path, typer.Option("--out", help="folder for the files")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="name or address of the server (repeatable)"),
    ] = None,
    days: Annotated[int, typer.Option("--days", help="how long they hold", min=1, max=3650)] = 365,
) -> None:
    """Make an authority and a server's certificate, to try a federation with TLS."""
    from silograph.federation.session.wire import need_packages

    need_packages()
    from silograph.federation.session.certificates import make_certificates

    hosts = host or ["localhost", "127.0.0.1"]
    make_certificates(out, hosts, days)
    typer.echo(
        f"written to {out}: server.pem and server.key for the server ({', '.join(hosts)}), ca.pem "
        "for the silos; keep ca.key to yourself"
    )


@command(
    "demo-federation",
    FIELDS,
    {"quiet": (bool, typer.Option(False, "--quiet", help="show no progress"))},
)
def demo_command(given: Given, quiet: bool) -> int:
    """Run server and silos as processes on this machine, and compare with a simulation."""
    from silograph.deploy.demo import demonstrate

    found = demonstrate(given.config, tell=(lambda _: None) if quiet else _tell)
    for line in found.lines():
        typer.echo(line)
    return 0 if found.same else FAILED


def _tell(line: str) -> None:
    typer.echo(line, err=True)
