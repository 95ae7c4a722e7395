"""Where and how a server meets its silos."""

from dataclasses import dataclass
from pathlib import Path

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, mistake, read_mistake
from silograph.core.text import count_of
from silograph.federation.program import Program, calls_of
from silograph.federation.session.engine import WEIGHTS
from silograph.graph.silos.data import Silo

# --- Files of a silo: its secrets, and the certificates that it trusts ---------------------------


def read_roots(ca: Path | None, *, insecure: bool) -> bytes | None:
    """Return the certificates that a server's must come from; None is without TLS.

    Raises:
        ConfigError: there is no such file, or `insecure` besides.
    """
    if insecure:
        if ca is not None:
            raise ConfigError(
                "expected --ca or --insecure, which is without TLS, got both: leave --insecure "
                f"out to use {ca}",
                **mistake("conflicting-options", ["ca", "insecure"]),
            )
        return None
    if ca is None:
        raise ConfigError(
            "expected the certificate of the server's authority, got none: give --ca FILE, or "
            "--insecure to try it on this machine",
            **mistake("missing-option", "ca"),
        )
    return read_file(ca, "ca")


def read_secrets(silo: Silo, path: Path | None) -> dict[str, bytes]:
    """Return what a silo shares with each silo that its edges lead to.

    Raises:
        ConfigError: a file is missing; `silograph.federation.matching` says more of the
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


def common_secret(path: Path | None) -> bytes | None:
    """Return the secret that all silos share, by which they find common users; None without one.

    A folder has secrets of pairs, which name no user alike to all silos.
    """
    return None if path is None or path.is_dir() else read_file(path, "secret")


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
        raise ConfigError(
            f"{setting}: expected a file at {path}, got: {error.strerror}",
            **read_mistake(error, path),
        ) from None


@dataclass(frozen=True)
class ServerSettings:
    """How a server meets its silos; no setting here changes a number.

    Attributes:
        listen: HOST:PORT; port 0 takes a free one.
        silos: their names, in the order of every sum; None: as many as `clients` of the config,
            in the order of their names.
        certificate: files of the server's certificate chain and key; None with `insecure`.
        insecure: without TLS, on this machine only.
        keys: folder or file of the silos' public keys, see `read_keys`; only they may attach.
        revoked: file of revoked public keys, see `read_revoked`; it and `keys` are read again when
            they change.
        accept_first_keys: whether the first key that takes a silo's name keeps it for the run,
            where `keys` is None. With `insecure`, which is for this machine only, it does so
            anyway.
        least: silos without which a round fails; None: all of them.
        seconds: how long a silo may take over its answers of a round, and over each before the
            first; None: as long as its stream is there.
        patience: seconds for which the server waits for its silos.
        rejoin: seconds for which a round that cannot go on without silos waits until they attach
            again; it is then done again.
        metrics: PORT of this machine or HOST:PORT where figures are read; None: nowhere.
        hand_over: whether silos get the model when the run is over.
        update_norm: largest Euclidean norm of a silo's update of the weights; None: any.
        share_audit_heads: whether silos get the signed heads of all silos' audits at the end.
    """

    listen: str
    silos: tuple[str, ...] | None = None
    certificate: tuple[Path, Path] | None = None
    insecure: bool = False
    keys: Path | None = None
    revoked: Path | None = None
    accept_first_keys: bool = False
    least: int | None = None
    seconds: float | None = None
    patience: float = 600.0
    rejoin: float = 60.0
    metrics: str | None = None
    hand_over: bool = True
    update_norm: float | None = None
    share_audit_heads: bool = False


def expected_silos(
    config: RunConfig, server_settings: ServerSettings
) -> tuple[tuple[str, ...] | None, int]:
    """Return the silos' names, if they are known, and their number.

    Raises:
        ConfigError: neither is known, or the settings do not fit them.
    """
    from silograph.federation.session.identity import check_name

    names = (
        None
        if server_settings.silos is None
        else tuple(check_name(n) for n in server_settings.silos)
    )
    if names is not None and len(set(names)) < len(names):
        raise ConfigError(
            f"silos: expected every silo once, got {', '.join(names)}",
            **mistake("option-value", "silos", list(names)),
        )
    num_silos = config.clients if names is None else len(names)
    if num_silos is None:
        raise ConfigError(
            "silos: expected their names, or their number as clients=N, got neither: give one",
            **mistake("missing-option", "silos"),
        )
    if config.clients not in (None, num_silos):
        raise ConfigError(
            f"silos: expected as many names as clients={config.clients}, got {num_silos}: leave "
            "clients out",
            **mistake("conflicting-options", ["silos", "clients"]),
        )
    if server_settings.least is not None and not 1 <= server_settings.least <= num_silos:
        raise ConfigError(
            f"least: expected 1 to {count_of(num_silos, 'silo')}, got {server_settings.least}",
            **mistake("option-value", "least", server_settings.least),
        )
    _check_seconds(server_settings)
    return names, num_silos


def known_keys(
    server_settings: ServerSettings, names: tuple[str, ...] | None, count: int
) -> dict[str, bytes] | None:
    """Return the public keys (32 bytes) of the silos that may attach, by name; None: first keys.

    Args:
        server_settings: where silos attach.
        names: of the silos, if they are known.
        count: number of silos.

    Raises:
        ConfigError: there are no keys although they are needed, or too few.
    """
    from silograph.federation.session.key_versions import read_keys

    if server_settings.keys is None:
        if server_settings.insecure or server_settings.accept_first_keys:
            return None
        raise ConfigError(
            "expected the public keys of the silos, got none: give --keys with a file of the lines "
            "that silograph silo --make-key prints at each silo, or --accept-first-keys to give "
            "each name to the first key that takes it",
            **mistake("missing-option", "keys"),
        )
    if server_settings.accept_first_keys:
        raise ConfigError(
            "expected --keys or --accept-first-keys, got both: leave one out",
            **mistake("conflicting-options", ["keys", "accept_first_keys"]),
        )
    keys = read_keys(server_settings.keys)
    if missing := [name for name in names or () if name not in keys]:
        raise ConfigError(
            f"expected a public key of each silo in {server_settings.keys}, got none of "
            f"{', '.join(missing)}: add what silograph silo --make-key prints there"
        )
    if len(keys) < count:
        raise ConfigError(
            f"expected public keys of {count_of(count, 'silo')} in {server_settings.keys}, got "
            f"{len(keys)}: add what silograph silo --make-key prints at the others"
        )
    return keys


def _check_seconds(server_settings: ServerSettings) -> None:
    """Raise `ConfigError` for times that nobody can wait for."""
    if not server_settings.patience >= 0:
        raise ConfigError(
            f"wait: expected 0 seconds or more, got {server_settings.patience:g}",
            **mistake("option-value", "wait", server_settings.patience),
        )
    if not server_settings.rejoin >= 0:
        raise ConfigError(
            f"rejoin_seconds: expected 0 seconds or more, got {server_settings.rejoin:g}",
            **mistake("option-value", "rejoin_seconds", server_settings.rejoin),
        )
    if server_settings.seconds is not None and not server_settings.seconds > 0:
        raise ConfigError(
            f"round_seconds: expected more than 0 seconds, got {server_settings.seconds:g}",
            **mistake("option-value", "round_seconds", server_settings.seconds),
        )
    if server_settings.update_norm is not None and not server_settings.update_norm > 0:
        raise ConfigError(
            f"max_update_norm: expected more than 0, got {server_settings.update_norm:g}",
            **mistake("option-value", "max_update_norm", server_settings.update_norm),
        )


def check_update_norm(
    server_settings: ServerSettings, program: Program, method: str, *, secure: bool = False
) -> None:
    """Raise `ConfigError` for a bound of updates in a run whose updates nobody can measure."""
    if server_settings.update_norm is None:
        return
    if secure:
        raise ConfigError(
            "expected no --max-update-norm with secure_aggregation, whose server sees no update of "
            "a single silo: leave one of them out",
            **mistake("conflicting-options", ["max_update_norm", "secure_aggregation"]),
        )
    calls = [
        c for c in calls_of(program.round(1)) if any(n.startswith(WEIGHTS) for n in c.reply_specs)
    ]
    if not calls:
        raise ConfigError(
            "expected a method whose silos answer with weights for --max-update-norm, got "
            f"{method}",
            **mistake("conflicting-options", ["max_update_norm", "method"]),
        )
    sends_new_weights = any(
        n.startswith(WEIGHTS) and n not in c.inbox_specs for c in calls for n in c.reply_specs
    )
    if sends_new_weights:
        raise ConfigError(
            "expected a method whose silos answer weights with what these have become, for "
            f"--max-update-norm, got {method}: leave --max-update-norm out, or use fedavg",
            **mistake("conflicting-options", ["max_update_norm", "method"]),
        )


def credentials(server_settings: ServerSettings) -> tuple[bytes, bytes] | None:
    """Return the server's certificate chain and key; None without TLS.

    Raises:
        ConfigError: there is neither a certificate nor `insecure`, or both.
    """
    if server_settings.insecure:
        if server_settings.certificate is not None:
            raise ConfigError(
                "expected --certs or --insecure, which is without TLS, got both: leave one out",
                **mistake("conflicting-options", ["certs", "insecure"]),
            )
        return None
    if server_settings.certificate is None:
        raise ConfigError(
            "expected the server's certificate and key, got none: give --certs DIR (silograph "
            "certs makes one to try with), or --insecure on this machine",
            **mistake("missing-option", "certs"),
        )
    chain, key = server_settings.certificate
    return read_file(chain, "certs"), read_file(key, "certs")
