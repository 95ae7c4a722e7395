"""Certificates to try a federation with: an authority of one's own and a server's certificate.

Real ones come from an organization's own authority. Keys are of the curve P-256, which every TLS
library knows.
"""

import datetime
import ipaddress
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from silograph.core.errors import ConfigError
from silograph.federation.session.identity import write_secret

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
            raise ConfigError(f"expected no {name} in {folder} yet, got one: use another folder")
    names = [_host(host) for host in hosts]
    authority, key = (
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP256R1()),
    )
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
    rest = name.partition(".")[2]
    return any(
        known.lower().rstrip(".") in (name, f"*.{rest}" if "." in rest else name) for known in hosts
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
