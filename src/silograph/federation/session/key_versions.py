"""Versions of a silo's key: each new one is signed by the one before it.

A file of keys has a line for each version of a silo's key:

    NAME KEY                      the first one that is known here
    NAME KEY VERSION SIGNATURE    a later one; the signature is by the version before

Keys and signatures are in hexadecimal, and the newest version counts. A file of revoked keys has
lines of the same form, or a key alone. Whoever has a stolen key can sign a next version with it, so
versions that a revoked key has signed count as revoked.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
)

from silograph.core.errors import ConfigError, mistake
from silograph.core.files import write_atomic
from silograph.federation.session.identity import (
    SiloKey,
    check_name,
    is_signed,
    key_line,
    write_secret,
)

SUCCESSION = b"silograph key succession 1\0"
MOST_VERSIONS = 10**6


@dataclass(frozen=True)
class KeyVersion:
    """A version of a silo's public key.

    Attributes:
        name: of the silo.
        public: the key, 32 bytes.
        version: its number, from 1.
        signature: by the version before, 64 bytes; empty for the first one that is known.
    """

    name: str
    public: bytes
    version: int = 1
    signature: bytes = b""

    @property
    def line(self) -> str:
        """The version as a line of a file of keys."""
        more = f" {self.version} {self.signature.hex()}" if self.signature else ""
        return key_line(self.name, self.public) + more

    def is_successor_of(self, former: "KeyVersion") -> bool:
        """Whether this is the next version of another one, and signed by it."""
        text = succession_text(self.name, self.version, self.public)
        follows = (self.name, self.version) == (former.name, former.version + 1)
        return follows and is_signed(former.public, self.signature, text)


def succession_text(name: str, version: int, public: bytes) -> bytes:
    """Return the text by which a silo's key signs the next one."""
    return SUCCESSION + name.encode() + b"\0" + version.to_bytes(8, "big") + public


def read_keys(path: Path) -> dict[str, bytes]:
    """Return the newest public key (32 bytes) of each silo, by name; see `read_key_versions`."""
    return {name: versions[-1].public for name, versions in read_key_versions(path).items()}


def read_key_versions(path: Path) -> dict[str, tuple[KeyVersion, ...]]:
    """Return the versions of each silo's key, the newest last.

    Args:
        path: folder with a file NAME.pub (PEM) for each silo, or a file of keys; in it empty lines
            and lines that begin with # are left out.

    Raises:
        ConfigError: there are none, one of them is no Ed25519 key, two silos have the same one, or
            a version is not signed by the one before.
    """
    versions = _read_key_folder(path) if path.is_dir() else _read_key_file(path)
    newest = {name: each[-1].public for name, each in versions.items()}
    if len(set(newest.values())) < len(newest):
        names = [name for name, key in newest.items() if list(newest.values()).count(key) > 1]
        raise ConfigError(
            f"expected a key of its own for each silo in {path}, got the same for "
            f"{' and '.join(names)}: run silograph silo --make-key at each silo"
        )
    return versions


def _read_key_folder(folder: Path) -> dict[str, tuple[KeyVersion, ...]]:
    keys: dict[str, tuple[KeyVersion, ...]] = {}
    for path in sorted(folder.glob("*.pub")):
        try:
            key = load_pem_public_key(path.read_bytes())
        except (ValueError, OSError):
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise ConfigError(
                f"expected an Ed25519 public key (PEM) in {path}, got something else",
                **mistake("wrong-format", path),
            )
        name, public = check_name(path.stem), key.public_bytes(Encoding.Raw, PublicFormat.Raw)
        keys[name] = (KeyVersion(name, public),)
    if not keys:
        raise ConfigError(
            f"expected NAME.pub files in {folder}, got none", **mistake("missing-file", folder)
        )
    return keys


def _read_key_file(path: Path) -> dict[str, tuple[KeyVersion, ...]]:
    versions: dict[str, tuple[KeyVersion, ...]] = {}
    for number, line in _lines(path):
        match line.split():
            case [name, key] if _is_hex(key, 32):
                own = KeyVersion(check_name(name), bytes.fromhex(key))
            case [name, key, version, signature] if (
                _is_hex(key, 32)
                and _is_hex(signature, 64)
                and version.isdecimal()
                and 1 < int(version) <= MOST_VERSIONS
            ):
                key_and_signature = bytes.fromhex(key), bytes.fromhex(signature)
                own = KeyVersion(
                    check_name(name), key_and_signature[0], int(version), key_and_signature[1]
                )
            case _:
                raise ConfigError(
                    f"{path}, line {number}: expected NAME KEY as silograph silo --make-key prints "
                    f"it, got {line[:80]!r}",
                    **mistake("wrong-format", path),
                )
        former = versions.get(own.name, ())
        if former and not own.signature:
            raise ConfigError(
                f"{path}, line {number}: expected each silo once, got {own.name} again: the line "
                "of a new version is printed by silograph silo --new-key",
                **mistake("wrong-format", path),
            )
        if former and not own.is_successor_of(former[-1]):
            raise ConfigError(
                f"{path}, line {number}: expected version {former[-1].version + 1} of the key of "
                f"{own.name}, signed by the version before, got another line: add what silograph "
                "silo --new-key printed, in its order",
                **mistake("wrong-format", path),
            )
        versions[own.name] = (*former, own)
    if not versions:
        raise ConfigError(
            f"expected lines NAME KEY in {path}, got none", **mistake("wrong-format", path)
        )
    return versions


def read_revoked(path: Path) -> frozenset[bytes]:
    """Return the revoked public keys (32 bytes each) of a file; it may be empty.

    Raises:
        ConfigError: the file cannot be read, or a line has no key.
    """
    revoked = set()
    for number, line in _lines(path):
        words = line.split()
        key = next((word for word in words[:2] if _is_hex(word, 32)), None)
        if key is None:
            raise ConfigError(
                f"{path}, line {number}: expected a revoked KEY, or NAME KEY, got {line[:80]!r}",
                **mistake("wrong-format", path),
            )
        revoked.add(bytes.fromhex(key))
    return frozenset(revoked)


def successors_of_revoked(
    versions: Mapping[str, tuple[KeyVersion, ...]], revoked: frozenset[bytes]
) -> list[KeyVersion]:
    """Return the versions that a revoked key has signed, or a successor of one.

    Args:
        versions: of each silo's key, the newest last.
        revoked: public keys, 32 bytes each.
    """
    successors: list[KeyVersion] = []
    for each in (version for chain in versions.values() for version in chain if version.signature):
        text = succession_text(each.name, each.version, each.public)
        signers = (*revoked, *(former.public for former in successors))
        # The line of the signer may be gone from the file: its signature tells who it was.
        if any(is_signed(signer, each.signature, text) for signer in signers):
            successors.append(each)
    return successors


def _is_hex(text: str, size: int) -> bool:
    return re.fullmatch(rf"[0-9a-fA-F]{{{2 * size}}}", text) is not None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, but for comments and empty ones."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text"
        raise ConfigError(f"keys: expected a file or folder at {path}, got: {why}") from None
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            yield number, line


# --- At a silo: its key's file, and beside it the versions so far --------------------------------


def versions_file(key_file: Path) -> Path:
    """Return where the versions of a silo's key are, beside the key."""
    return key_file.with_suffix(".versions")


def own_version(key_file: Path, name: str, public: bytes) -> KeyVersion:
    """Return the version of a silo's key: 1 where nothing beside it says another."""
    return _history(key_file, name, public)[-1]


def rotate_key(key_file: Path, name: str) -> KeyVersion:
    """Replace a silo's key by a new one that the old one signs, and return its version.

    The old private key is deleted. A crash leaves the old key or the new one, and its version.

    Raises:
        ConfigError: there is no key yet, or a file cannot be written.
    """
    if not key_file.exists():
        raise ConfigError(
            f"expected a key to replace at {key_file}, got none: make one with silograph silo "
            "--make-key",
            **mistake("missing-file", key_file),
        )
    old, new = SiloKey.load(key_file), SiloKey.new()
    history = _history(key_file, name, old.public)
    version = history[-1].version + 1
    signature = old.sign(succession_text(name, version, new.public))
    successor = KeyVersion(name, new.public, version, signature)
    text = "".join(f"{each.line}\n" for each in (*history, successor))
    temporary = key_file.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    write_secret(temporary, new.private_pem)
    try:
        write_atomic(versions_file(key_file), text.encode())
        os.replace(temporary, key_file)
        key_file.with_suffix(".pub").write_bytes(new.public_pem)
    except OSError as error:
        raise ConfigError(
            f"expected to write {key_file}, got: {error.strerror}",
            **mistake("unwritable-path", key_file),
        ) from None
    return successor


def _history(key_file: Path, name: str, public: bytes) -> tuple[KeyVersion, ...]:
    """Return the versions up to a key; versions after it are of a replacement that was broken off.

    Raises:
        ConfigError: the file of versions is damaged, or does not have the key.
    """
    path = versions_file(key_file)
    if not path.exists():
        return (KeyVersion(name, public),)
    versions = read_key_versions(path).get(name, ())
    places = [i for i, each in enumerate(versions) if each.public == public]
    if not places:
        raise ConfigError(
            f"expected the versions of the key in {key_file} in {path}, got those of another: move "
            "that file away to count from 1 again",
            **mistake("wrong-format", path),
        )
    return versions[: places[0] + 1]
