"""`silograph silo`: one silo takes part in one run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silograph.cli.flags import flags_command
from silograph.cli.server import LOG_FILE, LOG_LEVEL
from silograph.core.errors import ConfigError
from silograph.core.files import describe_exposure

if TYPE_CHECKING:
    from silograph.deploy.silo import Attendance

FAILED = 1  # exit code of a silo whose run failed at the server


@dataclass(frozen=True, kw_only=True)
class SiloFlags:
    """Flags of a silo."""

    data: Annotated[Path, typer.Option("--data", help="the silo's folder (docs/silos.md)")]
    server: Annotated[str | None, typer.Option("--server", help="HOST:PORT of the server")] = None
    init_policy: Annotated[
        bool,
        typer.Option(
            "--init-policy",
            help="write a strict DATA/policy.toml with comments, and stop (docs/federation.md)",
        ),
    ] = False
    make_key: Annotated[
        bool,
        typer.Option(
            "--make-key",
            help="make the silo's own key if there is none, print its name and public key for the "
            "server's --keys, and stop",
        ),
    ] = False
    name: Annotated[
        str | None, typer.Option("--name", help="the silo's name, if it is to be checked")
    ] = None
    ca: Annotated[
        Path | None, typer.Option("--ca", help="certificate that the server's comes from")
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="without TLS, to this machine only")
    ] = False
    key: Annotated[
        Path | None,
        typer.Option("--key", help="the silo's own key (default: DATA/key.pem, made if absent)"),
    ] = None
    secret: Annotated[
        Path | None,
        typer.Option(
            "--secret",
            help="shared with other silos: a file, or a folder of NAME files (default: "
            "DATA/secret, if there is one)",
        ),
    ] = None
    state: Annotated[
        Path | None,
        typer.Option("--state", help="folder for the last two rounds (default: DATA/state)"),
    ] = None
    device: Annotated[
        str | None, typer.Option("--device", help="torch device (default: the server's config)")
    ] = None
    wait: Annotated[
        float,
        typer.Option(
            "--wait", help="seconds to try to reach the server, also one that was stopped"
        ),
    ] = 600.0
    no_wait: Annotated[
        bool,
        typer.Option(
            "--no-wait", help="end with exit code 1 when the server is stopped, in place of waiting"
        ),
    ] = False
    allow: Annotated[
        str | None,
        typer.Option(
            "--allow",
            help="methods with rows of single nodes that this silo agrees to, besides those that "
            "send weights and counts only: label_guided, bns, cagnet, fedgraph, fedsageplus, "
            "fedais and its presets, collect, items, features, or own.py:METHOD, separated by "
            "commas (docs/federation.md says what each sends)",
        ),
    ] = None
    allow_code: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-code",
            help="FILE.py or package.module with methods or models that the server may name; its "
            "code runs here (repeatable; docs/federation.md)",
        ),
    ] = None
    result: Annotated[
        Path | None,
        typer.Option(
            "--result",
            help="new folder for the model, the silo's scores and a report (default: "
            "DATA/results/METHOD-RUN)",
        ),
    ] = None
    audit: Annotated[
        Path | None,
        typer.Option(
            "--audit", help="file of all that leaves the silo (default: DATA/audit.jsonl)"
        ),
    ] = None
    log_file: Annotated[Path | None, typer.Option("--log-file", help=LOG_FILE)] = None
    log_level: Annotated[str, typer.Option("--log-level", help=LOG_LEVEL)] = "info"


@flags_command("silo", SiloFlags)
def silo_command(flags: SiloFlags) -> int:
    """Take part in one run with the data of a folder, which stay here."""
    if flags.init_policy:
        from silograph.deploy.policy import write_policy

        typer.echo(f"written to {write_policy(flags.data)}: read it, and change what does not fit")
        return 0
    if flags.make_key:
        _make_key(flags)
        return 0
    from silograph.deploy.logs import logging_to
    from silograph.deploy.silo import attend
    from silograph.deploy.silo_display import show_silo
    from silograph.experiment.run.progress import best_mode
    from silograph.graph.silos.read import read_silo

    _check_server(flags.server)  # before data are read, which takes long and logs lines
    silo = read_silo(flags.data)
    _check_name(flags, silo.name)
    how = _attendance(flags)
    with logging_to(flags.log_file, flags.log_level), show_silo(best_mode(), silo.name) as report:
        reason = attend(silo, how, report)
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
        raise ConfigError("expected the address of a server, got none: give --server HOST:PORT")
    split_address(address, "server")


def _check_name(flags: SiloFlags, name: str) -> None:
    """Raise `ConfigError` where the silo of the folder is not the one that was named."""
    if flags.name is not None and flags.name != name:
        raise ConfigError(
            f"expected the silo {flags.name} in {flags.data}, got {name}: see its silo.toml"
        )


def _make_key(flags: SiloFlags) -> None:
    """Make the silo's key if there is none, and print the line for the server's `--keys`.

    The line alone is on standard output, so that it can be appended to a file.
    """
    from silograph.federation.session.wire import need_packages
    from silograph.graph.silos.spec import SPEC, read_spec

    need_packages()
    from silograph.federation.session.identity import SiloKey, check_name, key_line

    name = check_name(read_spec(flags.data / SPEC).name)
    _check_name(flags, name)
    path = flags.data / "key.pem" if flags.key is None else flags.key
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


def _attendance(flags: SiloFlags) -> "Attendance":
    """Return how the silo takes part; what its folder holds are the defaults."""
    from silograph.deploy.allowed_code import allow_code, split_names
    from silograph.deploy.policy import read_policy
    from silograph.deploy.silo import Attendance, read_allowed
    from silograph.deploy.silo_result import RESULTS
    from silograph.federation.session.audit import AUDIT
    from silograph.graph.silos.spec import SECRET

    assert flags.server is not None  # it is checked
    if not flags.wait >= 0:
        raise ConfigError(f"wait: expected 0 seconds or more, got {flags.wait:g}")
    data, secret = flags.data, flags.secret
    if secret is None and (data / SECRET).exists():
        secret = data / SECRET
    code = allow_code(split_names(flags.allow_code or ()))
    return Attendance(
        server=flags.server,
        key=data / "key.pem" if flags.key is None else flags.key,
        secret=secret,
        ca=flags.ca,
        insecure=flags.insecure,
        state=data / "state" if flags.state is None else flags.state,
        device=flags.device,
        patience=flags.wait,
        waits=not flags.no_wait,
        allow=read_allowed(flags.allow, code),
        code=code,
        out=flags.result,
        results=data / RESULTS,
        policy=read_policy(data),
        audit=data / AUDIT if flags.audit is None else flags.audit,
    )
