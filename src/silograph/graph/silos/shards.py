"""Shards: a folder with one file for each client's block, so that no process holds the graph.

    FOLDER/shards.json       what a run must know before it reads a block, and sums of all files
    FOLDER/route.safetensors who answers for each halo slot
    FOLDER/000000.safetensors, ... the block of each client, in client order

Files are read through a memory map, an array at a time, and hold no code. Arrays are copied into
memory of torch's, on whose alignment the last bits of matrix products may depend.

C: clients. n: rows of a client.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors.numpy
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from silograph.core.errors import DataError, mistake, read_mistake
from silograph.core.files import check_regular, replacing, write_atomic
from silograph.core.payload import offsets
from silograph.graph.block.block import ClientBlock, Halo, Route, Rows, SparseRows
from silograph.graph.column_statistics import ClientSums
from silograph.graph.csr import CSR
from silograph.graph.graph import Schema, Split
from silograph.graph.silos.data import join_blocks

MANIFEST = "shards.json"
ROUTE = "route.safetensors"
FORMAT = 1
SUMS = "sums/"  # prefix of the arrays of a client's sums


@dataclass(frozen=True)
class ShardFile:
    """A file of a folder of shards.

    Attributes:
        name: in the folder.
        size: bytes.
        digest: BLAKE2b of its bytes, 32 hex digits.
    """

    name: str
    size: int
    digest: str


@dataclass(frozen=True, eq=False)
class ShardedClients:
    """C clients whose blocks are in files.

    Attributes:
        folder: of the files.
        ids: the clients' names.
        off: (C + 1,) int64; client c has rows off[c]:off[c + 1].
        files: of each client.
    """

    folder: Path
    ids: tuple[str, ...]
    off: Tensor
    files: tuple[ShardFile, ...]

    @property
    def num_clients(self) -> int:
        """C."""
        return len(self.ids)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.size for file in self.files)

    def take(self, positions: Tensor) -> Self:
        """Return the clients at `positions` (k,) int64; nothing is read."""
        numbers = positions.tolist()
        return type(self)(
            self.folder,
            tuple(self.ids[number] for number in numbers),
            offsets(self.off.diff()[positions]),
            tuple(self.files[number] for number in numbers),
        )

    def read(self, *, verify: bool = True) -> ClientBlock:
        """Return the block of the clients.

        Args:
            verify: whether files are compared with their digests, not only with their sizes.

        Raises:
            DataError: a file is missing or damaged.
        """
        blocks = [
            _read_block(self.folder, file, name, rows, verify=verify)
            for file, name, rows in zip(self.files, self.ids, self.off.diff().tolist(), strict=True)
        ]
        return blocks[0] if len(blocks) == 1 else join_blocks(blocks)


@dataclass(frozen=True, eq=False)
class Shards:
    """A cut graph in files: what a run must know of it without reading any client.

    Attributes:
        clients: where their blocks are.
        route: who answers for each halo slot.
        schema: features and labels as the run uses them.
        name: of the graph.
        settings: options of the run that the files were written with, and that decide them.
        num_train: (C,) int64 training nodes of each client.
        columns: (C,) int64 features that occur at each client; None of dense ones.
        feature_names: names of the given features in their order, or empty.
        overlapping: whether several clients hold a node.
        weighted: whether edges have weights.
        scale: least and largest rating; None where none is known.
        fingerprint: of the graph.
        partition_hash: of the cut.
        warnings: lines on what of the data is not used, or may keep a model from learning.
        sizes: of the graph, by name.
        client_rows: figures of each client.
        figures: of the cut, as a result folder has them.
    """

    clients: ShardedClients
    route: Route
    schema: Schema
    name: str
    settings: Mapping[str, Any]
    num_train: Tensor
    columns: Tensor | None
    feature_names: tuple[str, ...]
    overlapping: bool
    weighted: bool
    scale: tuple[float, float] | None
    fingerprint: str
    partition_hash: str
    warnings: tuple[str, ...]
    sizes: Mapping[str, int]
    client_rows: tuple[dict[str, Any], ...]
    figures: Mapping[str, Any]

    @property
    def num_clients(self) -> int:
        """C."""
        return self.clients.num_clients


# --- Writing --------------------------------------------------------------------------------------


def write_clients(folder: Path, block: ClientBlock) -> ShardedClients:
    """Write one file for each client of a block.

    Args:
        folder: where; it is there.
        block: C clients, on the CPU.
    """
    files = []
    for number in range(block.num_clients):
        tensors = block_tensors(block.take(torch.tensor([number])))
        files.append(_write_tensors(folder, f"{number:06d}.safetensors", tensors))
    return ShardedClients(folder, block.ids, block.off, tuple(files))


def write_manifest(shards: Shards) -> None:
    """Write route and manifest, the latter last: a folder without one is no folder of shards."""
    folder = shards.clients.folder
    tensors = {name: t for name, t in vars(shards.route).items() if isinstance(t, Tensor)}
    route = _write_tensors(folder, ROUTE, tensors)
    contents = {
        "format": FORMAT,
        "name": shards.name,
        "schema": asdict(shards.schema),
        "settings": dict(shards.settings),
        "clients": shards.clients.ids,
        "rows": shards.clients.off.diff().tolist(),
        "train": shards.num_train.tolist(),
        "columns": None if shards.columns is None else shards.columns.tolist(),
        "feature_names": shards.feature_names,
        "overlapping": shards.overlapping,
        "weighted": shards.weighted,
        "scale": shards.scale,
        "fingerprint": shards.fingerprint,
        "partition_hash": shards.partition_hash,
        "warnings": shards.warnings,
        "sizes": dict(shards.sizes),
        "client_rows": shards.client_rows,
        "figures": dict(shards.figures),
        "files": [asdict(file) for file in (*shards.clients.files, route)],
    }
    text = json.dumps(contents)
    write_atomic(folder / MANIFEST, json.dumps({"digest": _digest(text)} | contents))


def block_tensors(block: ClientBlock) -> dict[str, Tensor]:
    """Return the arrays of a block of one client by name."""
    tensors = {
        "y": block.y,
        "row_key": block.row_key,
        "halo/key": block.halo.key,
        "halo/boundary": block.halo.boundary,
        **{f"split/{part}": mask for part, mask in vars(block.split).items()},
    }
    matrices = {"adj": block.adj, "halo/adj": block.halo.adj}
    if isinstance(block.x, SparseRows):
        matrices["x"], tensors["x/width"] = block.x.csr, torch.tensor([block.num_features])
    else:
        tensors["x"] = block.x
    for name, csr in matrices.items():
        assert csr.values is not None  # blocks carry values of the run's dtype
        tensors |= {f"{name}/{part}": getattr(csr, part) for part in ("indptr", "indices")}
        tensors[f"{name}/values"] = csr.values
    for name, sums in block.sums.items():
        parts = {part: getattr(sums, part) for part in ("count", "total", "squares")}
        parts["is_sent"] = torch.tensor([sums.is_sent])
        tensors |= {f"{SUMS}{name}/{part}": t for part, t in parts.items()}
    return tensors


def _write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> ShardFile:
    arrays = {key: np.ascontiguousarray(t.numpy()) for key, t in tensors.items()}
    data = safetensors.numpy.save(arrays)
    path = folder / name
    with replacing(path, path.with_name(f"{name}.partial"), synced=False) as file:
        file.write(data)
    return ShardFile(name, len(data), hashlib.blake2b(data, digest_size=16).hexdigest())


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# --- Reading --------------------------------------------------------------------------------------


def is_shards(path: Path) -> bool:
    """Whether a path is that of a folder of shards."""
    return (path / MANIFEST).is_file()


def shards_have_ratings(path: Path) -> bool:
    """Whether shards are of ratings; False for damaged ones, of which `read_shards` says more."""
    try:
        return bool(_read_manifest(path / MANIFEST)["schema"]["task"] == "rating")
    except (DataError, KeyError, TypeError):
        return False


def read_shards(path: str | os.PathLike[str]) -> Shards:
    """Read the manifest of a folder of shards, and its route; no client is read.

    Raises:
        DataError: one of them is missing, damaged or of another version.
    """
    folder = Path(path).expanduser().absolute()
    contents = _read_manifest(folder / MANIFEST)
    try:
        *files, route = (_FILE.validate_python(file) for file in contents["files"])
        rows, ids = _LENGTHS.validate_python(contents["rows"]), tuple(contents["clients"])
        train = torch.tensor(_LENGTHS.validate_python(contents["train"]))
        columns = contents["columns"]
        clients = ShardedClients(folder, ids, offsets(torch.tensor(rows)), tuple(files))
        if not len(ids) == len(rows) == len(train) == len(files) > 0:
            raise ValueError(f"{len(ids)} clients with {len(files)} files")
        schema = Schema(
            **contents["schema"] | {"class_names": tuple(contents["schema"]["class_names"])}
        )
        scale = contents["scale"]
        return Shards(
            clients=clients,
            route=_read_route(folder, route, len(ids)),
            schema=schema,
            name=contents["name"],
            settings=contents["settings"],
            num_train=train,
            columns=None if columns is None else torch.tensor(_LENGTHS.validate_python(columns)),
            feature_names=tuple(contents["feature_names"]),
            overlapping=contents["overlapping"],
            weighted=contents["weighted"],
            scale=None if scale is None else (scale[0], scale[1]),
            fingerprint=contents["fingerprint"],
            partition_hash=contents["partition_hash"],
            warnings=tuple(contents["warnings"]),
            sizes=contents["sizes"],
            client_rows=tuple(contents["client_rows"]),
            figures=contents["figures"],
        )
    except DataError:
        raise
    except _OTHER_FORM as error:
        raise _damaged(folder / MANIFEST, f"{type(error).__name__}: {error}") from None


_FILE = TypeAdapter(ShardFile)
_LENGTHS = TypeAdapter(list[int])
_OTHER_FORM = (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the contents of a manifest.

    Raises:
        DataError: it is missing, damaged, or of another version.
    """
    check_regular(path)
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        digest = contents.pop("digest")
        is_whole = digest == _digest(json.dumps(contents))
    except OSError as error:
        raise DataError(
            f"expected {path}, got: {error.strerror}", **read_mistake(error, path)
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _damaged(path, "no manifest of shards") from None
    if not is_whole:
        raise _damaged(path, "contents that differ from their digest")
    if contents.get("format") != FORMAT:
        raise DataError(
            f"expected shards of format {FORMAT} in {path}, got {contents.get('format')}: write "
            "them again with this version",
            **mistake("other-version", FORMAT, contents.get("format")),
        )
    result: dict[str, Any] = contents
    return result


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        f"expected {path} as silograph shard wrote it, got {reason}: copy the folder again, or "
        "write it again with silograph shard",
        **mistake("damaged-file", path),
    )


def _read_route(folder: Path, file: ShardFile, clients: int) -> Route:
    tensors = _read_tensors(folder, file, verify=True)
    route = Route(**tensors)
    lengths = len(route.slot_off), len(route.boundary_off), len(route.target)
    if lengths != (clients + 1, clients + 1, int(route.slot_off[-1])):
        raise _damaged(folder / file.name, "a route of other clients")
    return route


def _read_tensors(folder: Path, file: ShardFile, *, verify: bool) -> dict[str, Tensor]:
    """Return the arrays of a file by name.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = folder / file.name
    if Path(file.name).name != file.name:  # a manifest of somebody else's
        raise _damaged(folder / MANIFEST, f"the file name {file.name!r}")
    check_regular(path)
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != file.size:
                raise _damaged(path, f"{size} bytes in place of {file.size}")
            if verify:
                hasher = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
                if hasher.hexdigest() != file.digest:
                    raise _damaged(path, "bytes that differ from their digest")
        with safe_open(path, framework="numpy") as arrays:
            return {name: _own_tensor(arrays.get_tensor(name)) for name in arrays.keys()}  # noqa: SIM118
    except OSError as error:
        raise DataError(
            f"expected {path}, got: {error.strerror or error}: copy it into the folder, or write "
            "all again with silograph shard",
            **read_mistake(error, path),
        ) from None
    except SafetensorError as error:
        raise _damaged(path, str(error)) from None


def _own_tensor(array: np.ndarray) -> Tensor:
    """Return a copy of an array in memory that torch has allocated."""
    t = torch.from_numpy(np.empty(0, array.dtype)).new_empty(array.shape)
    t.numpy()[...] = array
    return t


def _read_block(
    folder: Path, file: ShardFile, client: str, rows: int, *, verify: bool
) -> ClientBlock:
    """Return the block of one client.

    Raises:
        DataError: its file is missing or damaged.
    """
    tensors = _read_tensors(folder, file, verify=verify)
    try:
        slots, off = len(tensors["halo/key"]), torch.tensor([0, rows])
        boundary = tensors["halo/boundary"]
        halo = Halo(
            off=torch.tensor([0, slots]),
            adj=_csr(tensors, "halo/adj", rows, slots),
            key=tensors["halo/key"],
            boundary=boundary,
            boundary_off=torch.tensor([0, len(boundary)]),
        )
        if "x" in tensors:
            x: Rows = tensors["x"]
        else:
            x = SparseRows(_csr(tensors, "x", rows, int(tensors["x/width"])), off)
        return ClientBlock(
            ids=(client,),
            off=off,
            x=x,
            y=tensors["y"],
            split=Split(*(tensors[f"split/{part}"] for part in ("train", "val", "test"))),
            adj=_csr(tensors, "adj", rows, rows),
            row_key=tensors["row_key"],
            halo=halo,
            sums=dict(_sums(tensors)),
        )
    except _OTHER_FORM as error:
        raise _damaged(folder / file.name, f"{type(error).__name__}: {error}") from None


def _csr(tensors: Mapping[str, Tensor], name: str, rows: int, columns: int) -> CSR:
    indptr, indices, values = (
        tensors[f"{name}/{part}"] for part in ("indptr", "indices", "values")
    )
    if len(indptr) != rows + 1 or not len(indices) == len(values) == int(indptr[-1]):
        raise ValueError(f"{name} of another size")
    return CSR(indptr, indices, values, columns)


def _sums(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, ClientSums]]:
    """Yield the sums of a client by name."""
    for key in tensors:
        prefix, _, part = key.rpartition("/")
        if prefix.startswith(SUMS) and part == "count":
            count, total, squares = (
                tensors[f"{prefix}/{p}"] for p in ("count", "total", "squares")
            )
            is_sent = bool(tensors[f"{prefix}/is_sent"])
            yield prefix.removeprefix(SUMS), ClientSums(count, total, squares, is_sent)
