"""Files that a silo is given: its secrets, and whom it trusts."""

from pathlib import Path

from silograph.core.errors import ConfigError
from silograph.graph.silos.data import Silo


def read_roots(ca: Path | None, *, insecure: bool) -> bytes | None:
    """Return the certificates that a server's must come from; None is without TLS.

    Raises:
        ConfigError: there is no such file, or `insecure` besides.
    """
    if insecure:
        if ca is not None:
            raise ConfigError(
                "expected --ca or --insecure, which is without TLS, got both: leave --insecure "
                f"out to use {ca}"
            )
        return None
    if ca is None:
        raise ConfigError(
            "expected the certificate of the server's authority, got none: give --ca FILE, or "
            "--insecure to try it on this machine"
        )
    return read_file(ca, "ca")


def read_secrets(silo: Silo, path: Path | None) -> dict[str, bytes]:
    """Return what a silo shares with each silo that its edges lead to.

    Raises:
        ConfigError: a file is missing; `silograph.federation.joining.edge_tags` says more of the
            length.
    """
    others = tuple(dict.fromkeys(silo.cross.silo))
    if not others:
        return {}
    if path is None:
        raise ConfigError(
            f"expected the secret that {silo.name} shares with {others[0]}, which edges lead to, "
            "got none: put it into the silo's folder as the file secret, or give --secret FILE"
        )
    if path.is_dir():
        return {name: read_file(path / check_part(name), "secret") for name in others}
    return dict.fromkeys(others, read_file(path, "secret"))


def check_part(name: str) -> str:
    """Return a silo's name as that of a file; raise `ConfigError` where it is none."""
    if Path(name).name != name:
        raise ConfigError(f"expected a silo's name that can name a file, got {name!r}")
    return name


def read_file(path: Path, setting: str) -> bytes:
    """Return what a file holds; raise `ConfigError`, which names the setting, if it cannot be."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: expected a file at {path}, got: {error.strerror}") from None
