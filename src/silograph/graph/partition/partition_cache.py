"""A cache on disk of the parts that METIS computes for large graphs.

METIS takes 6 s of CPU time for a million edges and 1,000 parts, and its result is a function of its
input. So parts are stored under a hash of the whole input. If a file is missing or damaged, METIS
runs again.

n: nodes of the graph.
"""

import hashlib
import importlib.metadata
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from torch import Tensor

from silograph.core.files import replacing
from silograph.graph.csr import CSR

VARIABLE = "SILOGRAPH_CACHE"
OFF = "off"  # value of the variable that turns the cache off
MIN_ENTRIES = 1 << 20  # stored edges of a graph from which METIS takes longer than a few seconds
HASH_BYTES = 16


def partition_folder() -> Path | None:
    """Return the folder of the cache; None where it is turned off or there is no home folder.

    `$SILOGRAPH_CACHE/partitions`, else `$XDG_CACHE_HOME/silograph/partitions`, else
    `~/.cache/silograph/partitions`.
    """
    own, shared = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if own:
        return None if own == OFF else Path(own).expanduser() / "partitions"
    try:
        # By the XDG specification a relative path is invalid, and is ignored.
        base = Path(shared) if shared and Path(shared).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "silograph" / "partitions"


def cached_parts(
    adj: CSR,
    order: Tensor,
    parts: int,
    settings: tuple[int | bool, ...],
    find: Callable[[], np.ndarray],
) -> np.ndarray:
    """Return the part of every node, (n,) int64: from the cache, or computed and stored.

    Args:
        adj: (n, n) edges.
        order: (n,) int64, the order in which METIS gets the nodes.
        parts: their number.
        settings: seed and options of METIS.
        find: calls METIS; its result has an entry for every node in the order given.
    """
    folder = partition_folder() if adj.nnz >= MIN_ENTRIES else None
    if folder is None:
        return find()
    path = folder / f"{_input_hash(adj, order, parts, settings)}.metis"
    stored = _read(path, len(order), parts)
    if stored is not None:
        return stored
    part = find()
    # A full disk or a read-only folder is no reason to end a run.
    with suppress(OSError):
        _write(path, part)
    return part


def _input_hash(adj: CSR, order: Tensor, parts: int, settings: tuple[int | bool, ...]) -> str:
    """Return 32 hex digits (BLAKE2b) of the input of METIS and of its version."""
    version = importlib.metadata.version("pymetis")
    digest = hashlib.blake2b(repr((version, parts, settings)).encode(), digest_size=HASH_BYTES)
    for array in (adj.indptr, adj.indices, order):
        digest.update(f"{array.dtype} {len(array)};".encode())
        digest.update(array.contiguous().numpy().data)
    return digest.hexdigest()


def _write(path: Path, part: np.ndarray) -> None:
    """Write a hash of the parts, then the parts (n,) as little-endian int32; all or nothing."""
    data = part.astype("<i4").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Other processes and threads may be writing the same parts.
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    with replacing(path, partial, synced=False) as file:
        file.write(_hash(data))
        file.write(data)


def _read(path: Path, nodes: int, parts: int) -> np.ndarray | None:
    """Return the parts (n,) int64 of a file; None where it is not there or damaged."""
    try:
        if path.stat().st_size != HASH_BYTES + 4 * nodes:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    data = content[HASH_BYTES:]
    if content[:HASH_BYTES] != _hash(data) or len(data) != 4 * nodes:
        return None
    part = np.frombuffer(data, dtype="<i4").astype(np.int64)
    return part if part.min() >= 0 and part.max() < parts else None


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
