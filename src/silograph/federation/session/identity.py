"""Who a silo is: a name, and an Ed25519 key that it proves to have by signing what the server asks.

Bernstein, Duif, Lange, Schwabe and Yang, "High-speed high-security signatures", CHES 2011.

With known public keys only silos that have them may attach. Without, the first key that takes a
name keeps it.
"""

import datetime
import ipaddress
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from silograph.core.errors import ConfigError, mistake, read_mistake
from silograph.core.files import opens_private
from silograph.core.text import count_of
from silograph.federation.session.events import Event, What

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
PURPOSE = b"silograph session 2\0"


def check_name(name: str) -> str:
    """Return a silo's name; raise `ConfigError` unless files and logs can bear it."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(
            f"expected a silo's name of up to 64 letters, digits, _ . or -, got {name[:80]!r}"
        )
    return name


def signed_text(token: bytes, nonce: bytes, name: str, host: str) -> bytes:
    """Return the text that a silo signs: valid for this run, stream, name and server only.

    Without the server's name a server that the silo attaches to could hand another one's challenge
    on to it, and attach there in the silo's name.

    Args:
        token: of the run.
        nonce: of the stream.
        name: of the silo.
        host: by which the silo reaches the server, and which TLS has found in the server's
            certificate; empty without TLS.
    """
    return PURPOSE + token + nonce + name.encode() + b"\0" + host.encode()


class SiloKey:
    """A silo's private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @staticmethod
    def new() -> "SiloKey":
        """Make a key."""
        return SiloKey(Ed25519PrivateKey.generate())

    @staticmethod
    def load(path: Path) -> "SiloKey":
        """Read a key's file; make the file, for its owner only, if there is none.

        Raises:
            ConfigError: the file is no such key, or cannot be made.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            made = SiloKey.new()
            write_secret(path, made.private_pem)
            path.with_suffix(".pub").write_bytes(made.public_pem)
            return made
        except OSError as error:
            raise ConfigError(
                f"expected a silo's key at {path}, got: {error.strerror}",
                **read_mistake(error, path),
            ) from None
        try:
            key = load_pem_private_key(data, password=None)
        except (ValueError, TypeError):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(
                f"expected an Ed25519 key (PEM) in {path}, got something else",
                **mistake("wrong-format", path),
            )
        return SiloKey(key)

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @property
    def private_pem(self) -> bytes:
        """The private key as a file's text."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def public_pem(self) -> bytes:
        """The public key as a file's text."""
        return self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def sign(self, text: bytes) -> bytes:
        """Return the signature of a text, 64 bytes."""
        return self._key.sign(text)


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read; raise `ConfigError` where it cannot be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb", opener=opens_private) as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(
            f"expected to make {path}, got: {error.strerror}", **mistake("unwritable-path", path)
        ) from None


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether a signature is that of a public key (32 bytes)."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def key_line(name: str, public: bytes) -> str:
    """Return a silo's name and public key (32 bytes) as a line of a file of keys."""
    return f"{name} {public.hex()}"


class Register:
    """The key of each name.

    Args:
        names: that may attach; None: any, as long as there is room.
        room: how many names there can be.
        known: public keys by name; with None the first key that takes a name keeps it.
    """

    def __init__(
        self,
        names: tuple[str, ...] | None,
        room: int,
        known_keys: Mapping[str, bytes] | None = None,
    ) -> None:
        self._names = names
        self._room = room
        self._closed = known_keys is not None
        self.keys: dict[str, bytes] = dict(known_keys or {})
        self._registered: set[str] = set()
        self._left_out: dict[str, str] = {}
        self._revoked: frozenset[bytes] = frozenset()

    def update(self, known_keys: Mapping[str, bytes], revoked: frozenset[bytes]) -> None:
        """Replace the keys that changed and the list of revoked ones; other names keep theirs."""
        self.keys = {**self.keys, **known_keys}
        self._revoked = revoked

    def is_current(self, name: str, public: bytes) -> bool:
        """Whether a key of a silo may go on: not after it was replaced or revoked."""
        return public not in self._revoked and self.keys.get(name, public) == public

    def take(self, event: Event) -> None:
        """Bar a silo from attaching if the event says that it is left out of the run."""
        if event.what is What.LEFT_OUT and event.silo is not None:
            self._left_out[event.silo] = str(event)

    def refusal(self, name: str, public: bytes) -> str | None:
        """Return why a silo of a good name may not attach, or None; then the name is its own."""
        if public in self._revoked:
            return (
                f"the key of {name} is revoked, or was signed by a revoked key: move key.pem and "
                "key.versions away there, run silograph silo --make-key, and replace the silo's "
                "lines in the server's --keys by the one that it prints"
            )
        if self._names is not None and name not in self._names:
            return f"expected one of the run's silos, got {name}: give its name to --silos"
        if name in self.keys and self.keys[name] != public:
            return f"expected the key that {name} is registered with, got another: use its own"
        if self._closed and name not in self.keys:
            return (
                f"expected a silo whose public key is known, got {name}: add the line that "
                "silograph silo --make-key prints there to the server's --keys"
            )
        if name in self._left_out:
            return self._left_out[name]
        if name not in self._registered and len(self._registered) >= self._room:
            return f"expected {count_of(self._room, 'silo')}, got {name} besides: raise --clients"
        self.keys[name] = public
        self._registered.add(name)
        return None


# --- certificates --------------------------------------------------------------------------------
# Certificates to try a federation with: an authority of one's own and a server's certificate.
#
# Real ones come from an organization's own authority. Keys are of the curve P-256, which every TLS
# library knows.


WARNING_DAYS = 30  # before a certificate ends
CA, CA_KEY, SERVER, SERVER_KEY = "ca.pem", "ca.key", "server.pem", "server.key"


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """Write `ca.pem`, `server.pem` and their keys, which only their owner may read.

    Args:
        folder: where; none of the files may be there.
        hosts: names and addresses by which silos reach the server.
        days: how long they hold.

    Raises:
        ConfigError: a file is there already or cannot be made, or a host is none.
    """
    for name in (CA, CA_KEY, SERVER, SERVER_KEY):
        if (folder / name).exists():
            raise ConfigError(
                f"expected no {name} in {folder} yet, got one: use another folder",
                **mistake("existing-output", folder / name),
            )
    names = [_host(host) for host in hosts]
    authority = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = _name(f"silograph trial authority {secrets.token_hex(4)}")  # no two of one name
    subject = _name("silograph server")
    root = (
        _builder(issuer, issuer, authority.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority, hashes.SHA256())
    )
    leaf = (
        _builder(subject, issuer, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority, hashes.SHA256())
    )
    write_secret(folder / CA_KEY, _pem(authority))
    write_secret(folder / SERVER_KEY, _pem(key))
    (folder / CA).write_bytes(root.public_bytes(Encoding.PEM))
    (folder / SERVER).write_bytes(leaf.public_bytes(Encoding.PEM))


def check_pair(chain: bytes, key: bytes) -> None:
    """Raise `ConfigError` unless these are PEM: a certificate first, and its private key."""
    try:
        public = x509.load_pem_x509_certificates(chain)[0].public_key()
    except ValueError:
        raise ConfigError("expected the server's certificate (PEM), got something else") from None
    try:
        own = load_pem_private_key(key, password=None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):  # or it has a password
        raise ConfigError(
            "expected the key of the server's certificate (PEM, no password), got something else"
        ) from None
    if _spki(public) != _spki(own):
        raise ConfigError(
            "expected the key of the server's certificate, got another: its own certificate comes "
            "first in the chain"
        )


def hosts_of(chain: bytes) -> tuple[str, ...]:
    """Return the names and addresses that the first certificate of a chain (PEM) stands for.

    Those are its alternative names; its common name counts where it has none, as in gRPC.
    """
    leaf = x509.load_pem_x509_certificates(chain)[0]
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        commons = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return tuple(str(common.value) for common in commons)
    addresses = names.get_values_for_type(x509.IPAddress)
    return (*names.get_values_for_type(x509.DNSName), *map(str, addresses))


def ends_of(certificates: bytes) -> tuple[datetime.datetime, ...]:
    """Return when each certificate (PEM) ends, in UTC; none where there is no certificate."""
    try:
        chain = x509.load_pem_x509_certificates(certificates)
    except ValueError:
        return ()
    return tuple(certificate.not_valid_after_utc for certificate in chain)


def end_warning(what: str, end: datetime.datetime, now: datetime.datetime) -> str | None:
    """Return a warning of a certificate that ends within `WARNING_DAYS` or has ended, else None.

    >>> end_warning("it", datetime.datetime(2030, 1, 9), datetime.datetime(2030, 1, 2))
    'it ends on 2030-01-09, in 7 days: replace it before'
    """
    days = (end - now).days
    if days >= WARNING_DAYS:
        return None
    if end <= now:
        return f"{what} ended on {end:%Y-%m-%d}: replace it"
    return f"{what} ends on {end:%Y-%m-%d}, in {count_of(days, 'day')}: replace it before"


def is_host_of(host: str, hosts: Sequence[str]) -> bool:
    """Whether a certificate for some hosts stands for one; without any host it is none's, "".

    >>> is_host_of("a.example.org", ["*.example.org"]), is_host_of("b.a.org", ["*.org"])
    (True, False)
    """
    if not hosts:
        return host == ""
    try:
        return str(ipaddress.ip_address(host)) in hosts
    except ValueError:
        pass
    name = host.lower().rstrip(".")
    parent_domain = name.partition(".")[2]
    return any(
        pattern.lower().rstrip(".")
        in (name, f"*.{parent_domain}" if "." in parent_domain else name)
        for pattern in hosts
    )


def _spki(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(f"expected the server's name or address, got {host!r}") from None


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
