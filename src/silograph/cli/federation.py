"""Commands of real federations: `server`, `silo`, `audit`, `certs` and `demo-federation`."""

import dataclasses
import itertools
import json as jsonlib
import logging
import os
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from click.core import ParameterSource

from silograph.cli.flags import (
    AT_SILOS,
    FIELDS,
    CommandInputs,
    Json,
    Quiet,
    app,
    command,
    flag,
    hint_to_continue,
)
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, ProtocolError, mistake, read_mistake
from silograph.core.files import check_regular, describe_exposure
from silograph.core.text import count_of, printable

if TYPE_CHECKING:
    from silograph.deploy.server_settings import ServerSettings
    from silograph.deploy.silo import Attendance
    from silograph.federation.session.audit import AuditedRun, AuditEntry, AuditReading


FAILED = 1  # exit code where the two ends differ


@app.command("certs")
def certs_command(
    out: Annotated[Path, flag("--out", "folder for the files")],
    host: Annotated[
        list[str] | None,
        flag("--host", "name or address of the server (repeatable)"),
    ] = None,
    days: Annotated[int, flag("--days", "how long they hold", min=1, max=3650)] = 365,
) -> None:
    """Make an authority and a server's certificate, to try a federation with TLS."""
    from silograph.federation.session.wire import need_packages

    need_packages()
    from silograph.federation.session.identity import CA_KEY, SERVER_KEY, make_certificates

    hosts = host or ["localhost", "127.0.0.1"]
    make_certificates(out, hosts, days)
    typer.echo(
        f"written to {out}: server.pem and server.key for the server ({', '.join(hosts)}), ca.pem "
        "for the silos; keep ca.key to yourself"
    )
    for name in (CA_KEY, SERVER_KEY):  # on some file systems modes of files have no effect
        if (line := describe_exposure(out / name)) is not None:
            typer.echo(f"warning: {line}", err=True)


@command("demo-federation", FIELDS)
def demo_command(inputs: CommandInputs, quiet: Quiet = False) -> int:
    """Run server and silos as processes on this machine, and compare with a simulation."""
    from silograph.deploy.demo import demonstrate

    def report(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    demonstration = demonstrate(inputs.config, report)
    for line in demonstration.lines():
        typer.echo(line)
    return 0 if demonstration.same else FAILED


# --- `silograph server`: waits for silos, and trains with them -----------------------------------


LOG = logging.getLogger("silograph")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own messages say what went wrong
PANEL = "Federation"
LOG_FILE_HELP = "file that gets what happens as JSON lines, one an event"
LOG_LEVEL_HELP = "the least that is logged: debug, info or warning (default: info)"
WRITTEN_DOWN = {"dataset", "config", "silos", *FIELDS}  # in a run's folder


def _option(name: str, text: str) -> Any:
    return flag(name, text, show_default=False, rich_help_panel=PANEL)


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
    revoked: Annotated[
        Path | None,
        _option(
            "--revoked",
            "file of revoked public keys, one a line; it and --keys are read again if they change",
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
    share_audit_heads: Annotated[
        bool,
        _option(
            "--share-audit-heads",
            "at the end, send the signed heads of all silos' audits to each silo",
        ),
    ] = False
    keep_model: Annotated[
        bool, _option("--keep-model", "silos do not get the model when the run is over")
    ] = False
    log_file: Annotated[Path | None, _option("--log-file", LOG_FILE_HELP)] = None
    log_level: Annotated[str, _option("--log-level", LOG_LEVEL_HELP)] = "info"
    json: Json = False
    quiet: Quiet = False


@command(
    "server",
    [name for name in FIELDS if name not in AT_SILOS],
    "what tables and the result folder call the silos' data, which the server does not have "
    "(default: silos)",
    examples=(
        "silograph server --clients 3 --listen localhost:8443 --insecure",
        "silograph server --clients 3 --listen :8443 --certs certs --keys keys.txt",
    ),
)
def server_command(inputs: CommandInputs, flags: ServerFlags) -> None:
    """Wait for silos, train with them, and write a result folder."""
    from silograph.cli.printing import print_result
    from silograph.deploy.display import logging_to
    from silograph.deploy.server import resume_server, serve
    from silograph.experiment.resolve.user_code import own_code
    from silograph.experiment.run.progress import best_mode

    words = _typed_words()
    if flags.resume is not None:
        _check_resume_alone(words)
    _check_num_silos(inputs, flags, words)
    config, server_settings = _with_name_and_folder(inputs.config), _make_server_settings(flags)
    _warn_of_unused(config, words)
    mode = "none" if flags.quiet else best_mode()
    folder = str(config.out if flags.resume is None else flags.resume)
    if own_code(config):
        words["trust"] = ["--trust"]
    start_command = None  # where there is no folder yet
    if flags.resume is None:
        start_command = shlex.join(["silograph", "server", *itertools.chain(*words.values())])
    stop_hint = hint_to_continue(
        _resume_command_line(folder, words), folder, also=(ProtocolError,), before=start_command
    )
    with stop_hint, logging_to(flags.log_file, flags.log_level):
        if flags.resume is not None:
            result = resume_server(flags.resume, server_settings, trust=inputs.trust, progress=mode)
        else:
            result = serve(config, server_settings, progress=mode)
    if flags.json:
        typer.echo(result.to_json())
    else:
        print_result(result)


def _with_name_and_folder(config: RunConfig) -> RunConfig:
    """Return the config of a run at silos: with a name of its own, and a result folder."""
    from silograph.experiment.run.result_folder import default_folder

    if config.dataset == RunConfig().dataset:
        config = dataclasses.replace(config, dataset="silos")
    if config.out is None:
        config = dataclasses.replace(config, out=default_folder(config))
    return config


def _make_server_settings(flags: ServerFlags) -> "ServerSettings":
    """Return how the server meets its silos."""
    from silograph.deploy.server_settings import ServerSettings

    certs, silos = flags.certs, flags.silos
    return ServerSettings(
        listen=flags.listen,
        silos=None if silos is None else tuple(name.strip() for name in silos.split(",")),
        certificate=None if certs is None else (certs / "server.pem", certs / "server.key"),
        insecure=flags.insecure,
        keys=flags.keys,
        revoked=flags.revoked,
        accept_first_keys=flags.accept_first_keys,
        least=flags.least,
        seconds=flags.round_seconds,
        patience=flags.wait,
        rejoin=flags.rejoin_seconds,
        metrics=flags.metrics,
        hand_over=not flags.keep_model,
        update_norm=flags.max_update_norm,
        share_audit_heads=flags.share_audit_heads,
    )


def _warn_of_unused(config: RunConfig, words: Mapping[str, list[str]]) -> None:
    """Warn of flags that do not change the training."""
    if "dataset" in words:
        LOG.warning("%s is a name in tables only: the data are the silos' own", config.dataset)
    if "block_size" in words and config.block_size != 1:
        LOG.warning("%s is not used: each silo trains by itself", " ".join(words["block_size"]))


def _check_num_silos(
    inputs: CommandInputs, flags: ServerFlags, words: Mapping[str, list[str]]
) -> None:
    """Raise `ConfigError` where a run file has another number of silos than there are names."""
    number = inputs.file.clients
    if flags.silos is None or number is None or "clients" in inputs.flags:
        return
    names = flags.silos.split(",")
    if len(names) != number:
        raise ConfigError(
            f"--silos: expected as many names as clients = {number} in {words['config'][1]}, got "
            f"{len(names)}: leave clients out of the file, or add --clients {len(names)}",
            **mistake("conflicting-options", ["silos", "clients"]),
        )


def _check_resume_alone(words: Mapping[str, list[str]]) -> None:
    """Raise `ConfigError` for `--resume` together with flags that the run's folder sets."""
    for name, typed in words.items():
        if name in WRITTEN_DOWN:
            raise ConfigError(
                f"expected --resume alone, for the run's folder says the rest, got {typed[0]} "
                "besides: leave it out",
                **mistake("conflicting-options", ["resume", name]),
            )


def _resume_command_line(folder: str, words: Mapping[str, list[str]]) -> str:
    """Return the command that resumes a stopped server."""
    others = [words[name] for name in words if name not in WRITTEN_DOWN and name != "resume"]
    return shlex.join(["silograph", "server", "--resume", folder, *itertools.chain(*others)])


def _typed_words() -> dict[str, list[str]]:
    """Return the words of the command line, by the names of their parameters."""
    context, words_by_name = click.get_current_context(), {}
    for parameter in context.command.params:
        assert parameter.name is not None  # typer names all
        if context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            value = context.params[parameter.name]
            if isinstance(parameter, click.Argument):
                words_by_name[parameter.name] = [str(value)]
            elif isinstance(value, bool):
                words_by_name[parameter.name] = [
                    (parameter.opts if value else parameter.secondary_opts)[0]
                ]
            else:
                values = value if isinstance(value, list | tuple) else [value]
                words_by_name[parameter.name] = [
                    w for v in values for w in (parameter.opts[0], str(v))
                ]
    return words_by_name


# --- `silograph silo`: one silo takes part in one run --------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SiloFlags:
    """Flags of a silo."""

    data: Annotated[Path, flag("--data", "the silo's folder (docs/reference/silo_folder.md)")]
    server: Annotated[str | None, flag("--server", "HOST:PORT of the server")] = None
    init_policy: Annotated[
        bool,
        flag(
            "--init-policy",
            "write a strict DATA/policy.toml with comments, and stop (docs/reference/policy.md)",
        ),
    ] = False
    make_key: Annotated[
        bool,
        flag(
            "--make-key",
            "make the silo's own key if there is none, print its name and public key for the "
            "server's --keys, and stop",
        ),
    ] = False
    new_key: Annotated[
        bool,
        flag(
            "--new-key",
            "replace the silo's key by a new one that the old one signs, print the line for the "
            "server's --keys, and stop",
        ),
    ] = False
    name: Annotated[str | None, flag("--name", "the silo's name, if it is to be checked")] = None
    ca: Annotated[Path | None, flag("--ca", "certificate that the server's comes from")] = None
    insecure: Annotated[bool, flag("--insecure", "without TLS, to this machine only")] = False
    key: Annotated[
        Path | None,
        flag("--key", "the silo's own key (default: DATA/key.pem, made if absent)"),
    ] = None
    secret: Annotated[
        Path | None,
        flag(
            "--secret",
            "shared with other silos: a file, or a folder of NAME files (default: "
            "DATA/secret, if there is one)",
        ),
    ] = None
    state: Annotated[
        Path | None,
        flag("--state", "folder for the last two rounds (default: DATA/state)"),
    ] = None
    device: Annotated[
        str | None, flag("--device", "torch device (default: the server's config)")
    ] = None
    wait: Annotated[
        float,
        flag("--wait", "seconds to try to reach the server, also one that was stopped"),
    ] = 600.0
    no_wait: Annotated[
        bool,
        flag("--no-wait", "end with exit code 1 when the server is stopped, in place of waiting"),
    ] = False
    allow: Annotated[
        str | None,
        flag(
            "--allow",
            "methods with rows of single nodes that this silo agrees to, besides those that "
            "send weights and counts only: label_guided, bns, cagnet, fedgraph, fedsageplus, "
            "fedais and its presets, collect, items, users, features, or own.py:METHOD, separated "
            "by commas (docs/reference/policy.md says what each sends)",
        ),
    ] = None
    allow_code: Annotated[
        list[str] | None,
        flag(
            "--allow-code",
            "FILE.py or package.module with methods or models that the server may name; its "
            "code runs here (repeatable; docs/how_to/run_own_code_at_silos.md)",
        ),
    ] = None
    result: Annotated[
        Path | None,
        flag(
            "--result",
            "new folder for the model, the silo's scores and a report (default: "
            "DATA/results/METHOD-RUN)",
        ),
    ] = None
    audit: Annotated[
        Path | None,
        flag("--audit", "file of all that leaves the silo (default: DATA/audit.jsonl)"),
    ] = None
    log_file: Annotated[Path | None, flag("--log-file", LOG_FILE_HELP)] = None
    log_level: Annotated[str, flag("--log-level", LOG_LEVEL_HELP)] = "info"


@command("silo")
def silo_command(flags: SiloFlags) -> int:
    """Take part in one run with the data of a folder, which stay here."""
    if flags.init_policy:
        from silograph.deploy.policy import write_policy

        typer.echo(f"written to {write_policy(flags.data)}: read it, and change what does not fit")
        return 0
    if flags.make_key:
        make_key(flags.data, flags.key, flags.name)
        return 0
    if flags.new_key:
        replace_key(flags.data, flags.key, flags.name)
        return 0
    from silograph.deploy.display import logging_to, show_silo
    from silograph.deploy.silo import take_part_in_run
    from silograph.experiment.run.progress import best_mode
    from silograph.graph.silos.read import read_silo

    _check_server(flags.server)  # before data are read, which takes long and logs lines
    silo = read_silo(flags.data)
    _check_name(flags.data, flags.name, silo.name)
    attendance = _attendance(flags)
    with logging_to(flags.log_file, flags.log_level), show_silo(best_mode(), silo.name) as report:
        reason = take_part_in_run(silo, attendance, report)
    if reason is not None:
        typer.echo(f"error: the run failed: {reason}", err=True)
        return FAILED
    if best_mode() == "plain":
        typer.echo("the run is over", err=True)
    return 0


def _check_server(address: str | None) -> None:
    """Raise `ConfigError` unless an address is HOST:PORT."""
    from silograph.federation.session.wire import split_address

    if address is None:
        raise ConfigError(
            "expected the address of a server, got none: give --server HOST:PORT",
            **mistake("missing-option", "server"),
        )
    split_address(address, "server")


def _check_name(data: Path, expected: str | None, name: str) -> None:
    """Raise `ConfigError` where the silo of the folder is not the one that was named."""
    if expected is not None and expected != name:
        raise ConfigError(f"expected the silo {expected} in {data}, got {name}: see its silo.toml")


def make_key(data: Path, key_file: Path | None = None, expected: str | None = None) -> None:
    """Make a silo's key if there is none, and print the line for the server's `--keys`.

    The line alone is on standard output, so that it can be appended to a file.

    Args:
        data: the silo's folder.
        key_file: of the key; None: `key.pem` in the folder.
        expected: name that the silo must have; None: any.
    """
    from silograph.federation.session.wire import need_packages
    from silograph.graph.silos.read import SPEC, read_spec

    need_packages()
    from silograph.federation.session.identity import SiloKey, check_name, key_line

    name = check_name(read_spec(data / SPEC).name)
    _check_name(data, expected, name)
    path = _key_file(data, key_file)
    verb = "is already in" if path.exists() else "was written to"
    key = SiloKey.load(path)
    typer.echo(key_line(name, key.public))
    typer.echo(
        f"the private key {verb} {path}: keep it here. Send the line above to the server's people, "
        "who add it to the file that they give as --keys",
        err=True,
    )
    if (line := describe_exposure(path)) is not None:
        typer.echo(f"warning: {line}", err=True)


def replace_key(data: Path, key_file: Path | None = None, expected: str | None = None) -> None:
    """Replace a silo's key by a new one, and print the line to add to the server's `--keys`.

    Args:
        data: the silo's folder.
        key_file: of the key; None: `key.pem` in the folder.
        expected: name that the silo must have; None: any.
    """
    from silograph.federation.session.wire import need_packages
    from silograph.graph.silos.read import SPEC, read_spec

    need_packages()
    from silograph.federation.session.identity import check_name
    from silograph.federation.session.key_versions import rotate_key

    name = check_name(read_spec(data / SPEC).name)
    _check_name(data, expected, name)
    path = _key_file(data, key_file)
    successor = rotate_key(path, name)
    typer.echo(successor.line)
    typer.echo(
        f"{path} has version {successor.version} of the key of {name}, and the former key is gone. "
        "Send the line above to the server's people, who add it to the file that they give as "
        "--keys, below that of the former version; then start the silo again",
        err=True,
    )


def _key_file(data: Path, key_file: Path | None) -> Path:
    return data / "key.pem" if key_file is None else key_file


def _attendance(flags: SiloFlags) -> "Attendance":
    """Return how the silo takes part; what its folder holds are the defaults."""
    from silograph.deploy.allowed_code import allow_code, split_names
    from silograph.deploy.policy import read_policy
    from silograph.deploy.silo import Attendance, parse_allowed_methods
    from silograph.deploy.silo_result import RESULTS
    from silograph.federation.session.audit import AUDIT
    from silograph.graph.silos.prepare import PREPARED
    from silograph.graph.silos.read import SECRET

    assert flags.server is not None  # it is checked
    if not flags.wait >= 0:
        raise ConfigError(
            f"wait: expected 0 seconds or more, got {flags.wait:g}",
            **mistake("option-value", "wait", flags.wait),
        )
    data, secret = flags.data, flags.secret
    if secret is None and (data / SECRET).exists():
        secret = data / SECRET
    code = allow_code(split_names(flags.allow_code or ()))
    prepared = data / PREPARED
    return Attendance(
        server=flags.server,
        key=_key_file(data, flags.key),
        secret=secret,
        ca=flags.ca,
        insecure=flags.insecure,
        state=data / "state" if flags.state is None else flags.state,
        device=flags.device,
        patience=flags.wait,
        waits=not flags.no_wait,
        allow=parse_allowed_methods(flags.allow, code),
        code=code,
        out=flags.result,
        results=data / RESULTS,
        prepared=prepared.read_text("utf-8", "replace") if prepared.is_file() else None,
        policy=read_policy(data),
        audit=data / AUDIT if flags.audit is None else flags.audit,
    )


# --- `silograph audit`: what has left a silo, read from its audit file and checked ---------------


INDENT = 11  # columns before what a line says
MAX_REFUSALS = 20  # refusals of a run that are shown


@app.command("audit")
def audit_command(
    file: Annotated[Path, typer.Argument(help="audit.jsonl of a silo's folder")],
    head: Annotated[
        str | None,
        flag("--head", "hash of a line that was noted elsewhere: it must be there"),
    ] = None,
    keys: Annotated[
        Path | None,
        flag("--keys", "file of silos' public keys: the last line must be signed by one of them"),
    ] = None,
    witness: Annotated[
        list[Path] | None,
        flag(
            "--witness",
            "audit file of another silo: the heads of this one in it must be here (repeatable)",
        ),
    ] = None,
    json: Annotated[bool, flag("--json", "print one JSON object")] = False,
) -> int:
    """Check the audit file of a silo, and show what has left it by run and kind."""
    own = _read_audit_file(file)
    signers = {signed.public for signed in own.signed.values()}
    heads = {
        each.head: path
        for path in witness or ()
        for each in _read_audit_file(path).heads
        if each.public in signers
    }
    reading = _read_audit_file(file, {*heads, *([] if head is None else [head])})
    report = _AuditReport(file, reading, head, *_signature_check(reading, keys), heads)
    if json:
        typer.echo(jsonlib.dumps(_facts(report)))
    else:
        width = shutil.get_terminal_size().columns
        for line in _lines(report):
            typer.echo(_wrap_line(printable(line), width))
    return 0 if report.is_good else FAILED


@dataclass(frozen=True)
class _AuditReport:
    """An audit file as it was read, and what others say of it.

    Attributes:
        file: the file.
        reading: its content.
        head: a hash that a user has noted.
        unsigned: why the end of the file is not signed by a known key; None: it is, or nobody asks.
        lines_of_earlier_keys: lines signed by an earlier key of the silo, which a known key has
            signed again.
        witnessed: heads of this silo, by the other silos' audit files that have them.
    """

    file: Path
    reading: "AuditReading"
    head: str | None
    unsigned: str | None
    lines_of_earlier_keys: list[int]
    witnessed: Mapping[str, Path]

    @property
    def missing(self) -> list[str]:
        """Hashes that others have and this file has not."""
        noted = [*self.witnessed, *([] if self.head is None else [self.head])]
        return [each for each in noted if each not in self.reading.noted]

    @property
    def is_good(self) -> bool:
        """Whether every line is as it was written, and everything that was asked for is there."""
        return not self.missing and self.reading.broken is None and self.unsigned is None


def _read_audit_file(file: Path, noted_hashes: Collection[str] = ()) -> "AuditReading":
    from silograph.federation.session.audit import read_audit

    if not file.is_dir():
        check_regular(file)
    try:
        with file.open("rb") as reader:
            return read_audit(reader, noted_hashes)
    except IsADirectoryError:
        raise ConfigError(
            f"expected an audit file, got the folder {file}: name its audit.jsonl",
            **mistake("wrong-format", file),
        ) from None
    except OSError as error:
        raise ConfigError(
            f"expected an audit file at {file}, got: {error.strerror}", **read_mistake(error, file)
        ) from None


def _signature_check(reading: "AuditReading", keys: Path | None) -> tuple[str | None, list[int]]:
    """Return why the end is not signed by a known key or None, and the lines of earlier keys.

    A silo that has made a new key without a signature by the former one has lines that no key of
    the file has signed. Each signature covers all lines before it, so a later one by a known key of
    the same silo vouches for them.
    """
    if keys is None:
        return None, []
    from silograph.federation.session.key_versions import read_key_versions

    known = {
        (name, version.public)
        for name, versions in read_key_versions(keys).items()
        for version in versions
    }
    if not reading.signed:
        return "no line is signed", []
    last = max(reading.signed)
    signer, lines_of_earlier_keys = reading.signed[last], list[int]()
    for line, signed in reading.signed.items():
        if (signed.name, signed.public) in known:
            continue
        if signed.name != signer.name or (signer.name, signer.public) not in known:
            return (
                f"line {line} is signed by a key of {signed.name} that is not in {keys}: add that "
                "key, or, if the silo has a new key, audit again after its next run"
            ), []
        lines_of_earlier_keys.append(line)
    if last < reading.lines:
        return (
            f"{count_of(reading.lines - last, 'line')} after the last signature in line {last}"
        ), lines_of_earlier_keys
    return None, lines_of_earlier_keys


def _wrap_line(line: str, width: int) -> str:
    """Return a line of a run as lines of a terminal, those after the first indented."""
    if len(line) <= width or not line.startswith("  "):  # the others have the file's path
        return line
    lines = wrap(line, max(width, 40), subsequent_indent=" " * INDENT, break_long_words=False)
    return "\n".join(lines)


def _facts(report: _AuditReport) -> dict[str, Any]:
    reading, head = report.reading, report.head
    broken = reading.broken
    return {
        "file": str(report.file),
        "lines": reading.lines,
        "head": reading.head,
        "broken": None if broken is None else {"line": broken.line, "reason": str(broken)},
        "noted": None if head is None else {"head": head, "line": reading.noted.get(head)},
        "signed": [
            {"line": line, "name": each.name, "key": each.public.hex(), "version": each.version}
            for line, each in reading.signed.items()
        ],
        "unsigned": report.unsigned,
        "signed_by_earlier_keys": report.lines_of_earlier_keys,
        "witnessed": [
            {"head": each, "file": str(path), "line": reading.noted.get(each)}
            for each, path in report.witnessed.items()
        ],
        "privacy_budget": None if reading.budget is None else dataclasses.asdict(reading.budget),
        "runs": [_facts_of_run(run) for run in reading.runs],
    }


def _facts_of_run(run: "AuditedRun") -> dict[str, Any]:
    return {
        "run": run.run,
        "agreed": None if run.agreed is None else _plain(run.agreed),
        "agreements": run.agreements,
        "rounds": run.rounds,
        "repeats": run.repeats,
        "sent": {k: {"calls": run.calls.get(k), "bytes": n} for k, n in sorted(run.bytes.items())},
        "bytes": run.sent,
        "privacy": run.spent,
        "refused": run.refused,
        "refusals": [_plain(entry) for entry in run.refusals],
        "ended": None if run.ended is None else _plain(run.ended),
    }


def _plain(entry: "AuditEntry") -> dict[str, Any]:
    own = {k: v for k, v in entry.facts.items() if k not in ("former", "event", "run")}
    return {"line": entry.line, **own}


def _lines(report: _AuditReport) -> Iterator[str]:
    """Yield the printed lines of an audit."""
    file, reading, head = report.file, report.reading, report.head
    for run in reading.runs:
        yield from _lines_of_run(run, is_broken=reading.broken is not None)
        yield ""
    if reading.budget is not None:
        yield f"privacy budget: {reading.budget}"
    if reading.broken is not None:
        yield f"BROKEN: {file}, {reading.broken}"
        before = "the line" if reading.lines == 1 else f"the {reading.lines:,} lines"
        verb = "is" if reading.lines == 1 else "are"
        yield f"{before} before it {verb} whole; nothing is known of those after it"
    else:
        yield f"{file}: {count_of(reading.lines, 'line')}, each as it was written"
    if head is not None:
        noted = reading.noted.get(head)
        place = f"line {noted} has" if noted else "MISSING: no line has"
        yield f"{place} the noted hash {head}"
    yield from _lines_of_signatures(report)
    yield f"head {reading.head}"
    if not reading.broken:
        yield "store the head elsewhere: whoever has the file and the key can rewrite all of it"


def _lines_of_signatures(report: _AuditReport) -> Iterator[str]:
    """Yield who has signed an audit, and what other silos have noted of it."""
    reading = report.reading
    if reading.signed:
        last = max(reading.signed)
        signed = reading.signed[last]
        key = f"version {signed.version} of the key of {signed.name}, {signed.public.hex()}"
        yield f"signed in {count_of(len(reading.signed), 'line')}, the last time in line {last}"
        yield f"by {key}"
    if report.lines_of_earlier_keys:
        number, last = len(report.lines_of_earlier_keys), report.lines_of_earlier_keys[-1]
        lines = f"{count_of(number, 'line')}, the last time in line {last}"
        yield f"signed by an earlier key of this silo in {lines}; a known key has signed them again"
    if report.unsigned is not None:
        yield f"NOT SIGNED: {report.unsigned}"
    for head, path in report.witnessed.items():
        line = reading.noted.get(head)
        place = f"line {line} has" if line else "MISSING: no line has"
        yield f"{place} the head {head} that is in {path}"


def short_authority(facts: Mapping[str, Any]) -> str:
    """Return the beginning of a digest, and other words as they are."""
    authority = str(facts.get("authority"))
    return authority if " " in authority else authority[:16]


def _lines_of_run(run: "AuditedRun", *, is_broken: bool) -> Iterator[str]:
    from silograph.experiment.report.reading import size_text

    yield f"run {run.run}"
    if run.agreed is not None:
        facts = run.agreed.facts
        yield f"  agreed   {facts.get('time')}, {facts.get('method')}, {_rounds(facts)}"
        yield f"  server   {facts.get('server')}, authority {short_authority(facts)}"
        yield f"  config   {facts.get('config')}"
        yield f"  policy   {facts.get('policy')}"
    if run.agreements > 1:
        yield f"  started  {count_of(run.agreements, 'time')}"
    if run.bytes:
        rounds = "" if run.rounds is None else f"rounds {run.rounds[0]} to {run.rounds[1]}"
        rounds += f", {run.repeats} done again" if run.repeats else ""
        yield f"  {'sent':<16}{'calls':>10}{'bytes':>16}   {rounds}".rstrip()
        for kind, size in sorted(run.bytes.items()):
            yield f"  {kind:<16}{run.calls.get(kind, ''):>10}{size_text(size):>16}"
        calls = sum(run.calls.values())
        yield f"  {'all of it':<16}{calls:>10,}{size_text(run.sent):>16}"
    if run.spent is not None:
        spent = run.spent
        cost = f"epsilon {spent['epsilon']:.4g} at delta {spent['delta']:g}"
        replies = count_of(spent["releases"], "release")
        yield f"  privacy  {cost} of a {spent['unit']}, {replies} with noise"
    yield from _refusals(run)
    yield f"  ended    {_end(run, is_broken=is_broken)}"


def _refusals(run: "AuditedRun") -> Iterator[str]:
    """Yield what was refused; lines alike that follow each other are shown as one."""
    if run.refused:
        yield f"  refused  {run.refused:,}"
    grouped = groupby(run.refusals, key=lambda entry: str(entry.facts.get("reason")))
    groups = [(reason, list(entries)) for reason, entries in grouped]
    for reason, entries in groups[:MAX_REFUSALS]:
        first, last = entries[0].line, entries[-1].line
        place = f"line {first}" if first == last else f"lines {first} to {last}"
        number = sum(entry.facts["times"] for entry in entries)
        yield f"    {place}{f' ({number:,} times)' if number > 1 else ''}: {reason}"
    if len(groups) > MAX_REFUSALS:
        yield f"    and {count_of(len(groups) - MAX_REFUSALS, 'other')} (all of them: --json)"


def _rounds(facts: Mapping[str, Any]) -> str:
    """Return the rounds that were agreed to; the file may say anything."""
    rounds = facts.get("rounds")
    return count_of(rounds, "round") if isinstance(rounds, int) else f"{rounds} rounds"


def _end(run: "AuditedRun", *, is_broken: bool) -> str:
    """Return how a run ended; a line behind the broken one of a file may tell it."""
    if run.ended is None and is_broken:
        return "not known, the file is broken"
    if run.agreed is None:
        reason = None if run.ended is None else run.ended.facts.get("reason")
        return f"the silo did not agree to this run{f': {reason}' if reason else ''}"
    if run.ended is None:
        return "no line of an end: the process was killed, or is at work"
    facts = run.ended.facts
    return f"{facts.get('time')}, {facts.get('reason') or 'the run is over'}"
