"""`silograph server`: waits for silos, and trains with them."""

import dataclasses
import itertools
import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from click.core import ParameterSource

from silograph.cli.flags import AT_SILOS, FIELDS, Given, command, declared_flags
from silograph.cli.hints import going_on
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from silograph.deploy.venue import Venue

LOG = logging.getLogger("silograph")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what went wrong is said in our own words
PANEL = "Federation"
LOG_FILE = "file that gets what happens as JSON lines, one an event"
LOG_LEVEL = "the least that is logged: debug, info or warning (default: info)"
WRITTEN_DOWN = {"dataset", "config", "silos", "keys", *FIELDS}  # in a run's folder


def _option(name: str, text: str) -> Any:
    return typer.Option(name, help=text, show_default=False, rich_help_panel=PANEL)


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Flags of the server besides those of the run."""

    listen: Annotated[str, _option("--listen", "HOST:PORT that silos connect to; port 0: any")]
    silos: Annotated[
        str | None, _option("--silos", "names of the silos: a,b,c (default: --clients, by name)")
    ] = None
    certs: Annotated[
        Path | None,
        _option("--certs", "folder with server.pem and server.key (see silograph certs)"),
    ] = None
    insecure: Annotated[bool, _option("--insecure", "without TLS, on this machine only")] = False
    keys: Annotated[
        Path | None,
        _option(
            "--keys",
            "file of the lines that silograph silo --make-key prints, or folder of NAME.pub: only "
            "these silos can attach",
        ),
    ] = None
    accept_first_keys: Annotated[
        bool,
        _option(
            "--accept-first-keys",
            "in place of --keys: the first key that takes a name keeps it (default with "
            "--insecure only)",
        ),
    ] = False
    least: Annotated[
        int | None, _option("--least", "silos without which a round fails (default: all)")
    ] = None
    round_seconds: Annotated[
        float,
        _option(
            "--round-seconds",
            "how long a silo may take over its answers of a round (default: 600)",
        ),
    ] = 600.0
    max_update_norm: Annotated[
        float | None,
        _option(
            "--max-update-norm",
            "Euclidean norm beyond which a silo's update counts as a failure (default: any)",
        ),
    ] = None
    rejoin_seconds: Annotated[
        float,
        _option("--rejoin-seconds", "how long a round waits for silos that it needs (default: 60)"),
    ] = 60.0
    resume: Annotated[
        Path | None,
        _option("--resume", "result folder of a run to go on with, in place of a config"),
    ] = None
    wait: Annotated[float, _option("--wait", "seconds to wait for all silos (default: 600)")] = (
        600.0
    )
    metrics: Annotated[
        str | None, _option("--metrics", "PORT or HOST:PORT where OpenMetrics text is read")
    ] = None
    keep_model: Annotated[
        bool, _option("--keep-model", "silos do not get the model when the run is over")
    ] = False
    log_file: Annotated[Path | None, _option("--log-file", LOG_FILE)] = None
    log_level: Annotated[str, _option("--log-level", LOG_LEVEL)] = "info"
    json: Annotated[
        bool, typer.Option("--json", help="print the final result as one JSON object")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="show no progress")] = False


@command(
    "server",
    [name for name in FIELDS if name not in AT_SILOS],
    declared_flags(ServerFlags),
    "what tables and the result folder call the silos' data, which the server does not have "
    "(default: silos)",
)
def server_command(given: Given, **said: Any) -> None:
    """Wait for silos, train with them, and write a result folder."""
    from silograph.cli.printing import print_result
    from silograph.deploy.logs import logging_to
    from silograph.deploy.server import serve, serve_again
    from silograph.experiment.resolve.parts import own_code
    from silograph.experiment.run.progress import best_mode

    flags, words = ServerFlags(**said), _words()
    if flags.resume is not None:
        _check_alone(words)
    _check_number(given, flags, words)
    config, venue = _served(given.config), _venue(flags)
    _tell_unused(config, words)
    mode = "none" if flags.quiet else best_mode()
    folder = str(config.out if flags.resume is None else flags.resume)
    if own_code(config):
        words["trust"] = ["--trust"]
    anew = None  # where there is no folder yet
    if flags.resume is None:
        anew = shlex.join(["silograph", "server", *itertools.chain(*words.values())])
    again = going_on(_again(folder, words), folder, also=(ProtocolError,), before=anew)
    with again, logging_to(flags.log_file, flags.log_level):
        if flags.resume is not None:
            result = serve_again(flags.resume, venue, trust=given.trust, progress=mode)
        else:
            result = serve(config, venue, progress=mode)
    if flags.json:
        typer.echo(result.to_json())
    else:
        print_result(result)


def _served(config: RunConfig) -> RunConfig:
    """Return the config of a run at silos: with a name of its own, and a result folder."""
    from silograph.experiment.run.new_folder import default_folder

    if config.dataset == RunConfig().dataset:
        config = dataclasses.replace(config, dataset="silos")
    if config.out is None:
        config = dataclasses.replace(config, out=default_folder(config))
    return config


def _venue(flags: ServerFlags) -> "Venue":
    """Return how the server meets its silos."""
    from silograph.deploy.venue import Venue

    certs, silos = flags.certs, flags.silos
    return Venue(
        listen=flags.listen,
        silos=None if silos is None else tuple(name.strip() for name in silos.split(",")),
        certificate=None if certs is None else (certs / "server.pem", certs / "server.key"),
        insecure=flags.insecure,
        keys=flags.keys,
        accept_first_keys=flags.accept_first_keys,
        least=flags.least,
        seconds=flags.round_seconds,
        patience=flags.wait,
        rejoin=flags.rejoin_seconds,
        metrics=flags.metrics,
        hand_over=not flags.keep_model,
        update_norm=flags.max_update_norm,
    )


def _tell_unused(config: RunConfig, words: Mapping[str, list[str]]) -> None:
    """Log what was given and changes nothing of the training."""
    if "dataset" in words:
        LOG.warning("%s is a name in tables only: the data are the silos' own", config.dataset)
    if "block_size" in words and config.block_size != 1:
        LOG.warning("%s is not used: each silo trains by itself", " ".join(words["block_size"]))


def _check_number(given: Given, flags: ServerFlags, words: Mapping[str, list[str]]) -> None:
    """Raise `ConfigError` where a run file has another number of silos than there are names."""
    number = given.file.clients
    if flags.silos is None or number is None or "clients" in given.flags:
        return
    names = flags.silos.split(",")
    if len(names) != number:
        raise ConfigError(
            f"--silos: expected as many names as clients = {number} in {words['config'][1]}, got "
            f"{len(names)}: leave clients out of the file, or add --clients {len(names)}"
        )


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
            value = context.params[each.name]
            if isinstance(each, click.Argument):
                found[each.name] = [str(value)]
            elif isinstance(value, bool):
                found[each.name] = [(each.opts if value else each.secondary_opts)[0]]
            else:
                several = value if isinstance(value, list | tuple) else [value]
                found[each.name] = [w for v in several for w in (each.opts[0], str(v))]
    return found
