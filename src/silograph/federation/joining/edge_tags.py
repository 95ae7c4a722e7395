"""Cross-silo edges under keyed hashes: what two silos can compare through a server that cannot.

Each pair of silos has a secret that the server does not know. It may be of the pair alone, or one
that all silos share; silos that list edges to each other's nodes have told each other these
nodes' keys already, and the secret goes the same way. For a run, the pair derives a key from its
secret, its two names and the run's nonce, and with it

    node tag    hash of (owner, the node's key): names a node to the other silo of the pair
    edge tag    hash of (silo, key, silo, key), silos by name, and of the edge's weight where it
                is not 1: names an edge to both

as BLAKE2b keyed with 32 bytes, 16 bytes long (J.-P. Aumasson et al.: "BLAKE2: simpler, smaller,
fast as MD5", ACNS 2013; RFC 7693). Parts are hashed with their lengths, so no two lists of parts
give the same bytes.

Who learns what:
- The server: the silos' names and `SiloFacts`; how many slots, boundary rows and edges each pair
  has; which slot is which boundary row (it carries rows by that). Without the secret a tag tells
  it no more than a random number would: it cannot test a guessed key, however short keys are. Tags
  of two runs cannot be linked either, as long as nonces differ; the server draws them, so a
  dishonest one can repeat a nonce and see which edges or weights have changed. Tags keep keys from
  the server; they do not keep it from carrying rows to the wrong silo.
- A silo: which of its own edges the other owner does not list; never a tag of another silo. One
  that lists guessed edges learns of each whether the other lists it, for which both of its ends
  must be right and its weight, and the run does not start while one guess is wrong.
- Server and a silo together: with secrets of pairs, they can test guessed keys and weights against
  the tags of that silo's own pairs. With one secret for all, against all tags, so that short or
  serial keys of all boundary nodes fall: where silos do not trust each other with that, each pair
  needs a secret of its own.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping

import numpy as np

from silograph.core.errors import ConfigError
from silograph.graph.silos.data import Silo

TAG_BYTES = 16
LEAST_SECRET, LONGEST_SECRET = 16, 64  # bytes; 64 is BLAKE2b's longest key


def pair_key(secret: bytes, run: bytes, one: str, other: str) -> bytes:
    """Return the key (32 bytes) of two silos for a run; both get the same.

    Args:
        secret: what the two share, 16 to 64 random bytes.
        run: nonce of the run, public.
        one: name of one silo.
        other: name of the other.

    Raises:
        ConfigError: a secret of another length.
    """
    if not LEAST_SECRET <= len(secret) <= LONGEST_SECRET:
        raise ConfigError(
            f"expected a secret of {LEAST_SECRET} to {LONGEST_SECRET} bytes between {one} and "
            f"{other}, got {len(secret)}: draw one with secrets.token_bytes(32)"
        )
    first, second = sorted((one, other))
    parts = _joined(run, first.encode(), second.encode())
    return hashlib.blake2b(parts, key=secret, digest_size=32, person=b"silograph pair").digest()


def node_tag(key: bytes, owner: str, node: str) -> bytes:
    """Return the tag (16 bytes) of a node by its owner and its key there."""
    return _hash(key, b"silograph node", _named(owner, node)).digest()


def edge_tags(silo: Silo, keys: Mapping[str, bytes]) -> list[bytes]:
    """Return the tags (16 bytes) of a silo's cross-silo edges, in the order of its list.

    That of an edge is the same from both ends, and another one where they say weights that differ
    in float32: tables of one silo may have more digits than the arrays of the other.

    Args:
        silo: its data.
        keys: its `pair_key` with every silo that its edges lead to.
    """
    cross, tags = silo.cross, []
    # Hashing starts once a pair, and names are written once a node: twice as fast as edge by edge.
    start = {other: _edge_hash(key) for other, key in keys.items()}
    own = [_named(silo.name, key) for key in silo.keys]
    remote = [_named(*end) for end in zip(cross.silo, cross.keys, strict=True)]
    weights = np.ones(len(cross.row)) if cross.weight is None else cross.weight.numpy()
    listed = (cross.row.tolist(), cross.slot.tolist(), weights.tolist())
    for row, slot, weight in zip(*listed, strict=True):
        other = cross.silo[slot]
        found = start[other].copy()
        found.update(own[row] + remote[slot] if silo.name < other else remote[slot] + own[row])
        if weight != 1:
            found.update(struct.pack(">f", weight + 0.0))  # -0 is 0
        tags.append(found.digest())
    return tags


def pair_keys(silo: Silo, secrets: Mapping[str, bytes], run: bytes) -> dict[str, bytes]:
    """Return a silo's key with every silo that its edges lead to.

    Raises:
        ConfigError: there is no secret with one of them, or one of the wrong length.
    """
    keys = {}
    for other in dict.fromkeys(silo.cross.silo):
        if other not in secrets:
            raise ConfigError(
                f"expected a secret between {silo.name} and {other}, which edges of {silo.name} "
                "lead to, got none: agree on one, or correct the edges"
            )
        keys[other] = pair_key(secrets[other], run, silo.name, other)
    return keys


def as_words(tags: Iterable[bytes]) -> np.ndarray:
    """Return tags as (k, 16) uint8."""
    return np.frombuffer(b"".join(tags), dtype=np.uint8).reshape(-1, TAG_BYTES)


def as_tags(words: np.ndarray) -> list[bytes]:
    """Return (k, 16) uint8 as tags."""
    joined = words.tobytes()
    return [joined[i : i + TAG_BYTES] for i in range(0, len(joined), TAG_BYTES)]


def _named(silo: str, node: str) -> bytes:
    return _joined(silo.encode(), node.encode())


def _edge_hash(key: bytes, data: bytes = b"") -> "hashlib.blake2b":
    return _hash(key, b"silograph edge", data)


def _hash(key: bytes, person: bytes, data: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(data, key=key, digest_size=TAG_BYTES, person=person)


def _joined(*parts: bytes) -> bytes:
    """Return parts as one text that no other parts give."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
