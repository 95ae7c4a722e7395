"""Commands that try a real federation on one machine: certificates, and a demonstration."""

from pathlib import Path
from typing import Annotated

import typer

from silograph.cli.flags import FIELDS, Given, app, command
from silograph.core.files import describe_exposure

FAILED = 1  # exit code where the two ends differ


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
    from silograph.federation.session.certificates import CA_KEY, SERVER_KEY, make_certificates

    hosts = host or ["localhost", "127.0.0.1"]
    make_certificates(out, hosts, days)
    typer.echo(
        f"written to {out}: server.pem and server.key for the server ({', '.join(hosts)}), ca.pem "
        "for the silos; keep ca.key to yourself"
    )
    for name in (CA_KEY, SERVER_KEY):  # on some file systems modes of files have no effect
        if (line := describe_exposure(out / name)) is not None:
            typer.echo(f"warning: {line}", err=True)


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
