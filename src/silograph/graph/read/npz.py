"""Graphs from .npz archives of plain arrays; nothing in them is ever unpickled.

n: nodes. E: edges as stored. F: features a node. T: label bits. A: attributes. S: silos.
"""

import os
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from silograph.core.errors import DataError, mistake, reword_error
from silograph.graph.graph import MISSING, Graph
from silograph.graph.read.arrays import PARTS, from_arrays
from silograph.graph.read.columns import MissingValues, NaValues, missing_values
from silograph.graph.read.ratings import ITEM, RATING, USER, of_archive
from silograph.graph.read.tables import (
    NAMES,
    Arrays,
    RepeatedEdges,
    Table,
    chosen_weight,
    read_arrays,
    report_unused,
    word_of,
)

_SPARSE = ("x_data", "x_indices", "x_indptr", "x_shape")
_SPARSE_Y = ("y_data", "y_indices", "y_indptr", "y_shape")
_ATTRIBUTES = ("attributes", "attribute_names")
_MASK = tuple(f"{part}_mask" for part in PARTS)
_MASKS = tuple(f"{part}_masks" for part in PARTS)
_NAMES = ("silo_names", "class_names")
_NUMBERS = ("num_nodes", "num_classes")
_READ = {
    *("edge_index", "y", *_SPARSE_Y, "task", "unlabelled", "x", *_SPARSE, *_ATTRIBUTES),
    *("node_id", "silo", *_NAMES, *_NUMBERS, *_MASK, *_MASKS),
}
_RATINGS = {"ratings", "trust"}
_OF_RATINGS = {*_RATINGS, "rating_category", "rating_time"}
_EXPECTED = f"edge_index, y and x (or {', '.join(_SPARSE)}, and so for y)"
MOST_BITS = 2**16  # labels are held dense: a wrong shape must not take all memory
# y was made from this attribute, so it must not be a feature as well.
_TARGET = "gender"


def load_npz(
    path: str | os.PathLike[str],
    *,
    na_values: NaValues = (),
    repeated_edges: RepeatedEdges = "mean",
    time: str | None = None,
) -> Graph:
    """Return the graph of an archive such as `np.savez(path, x=x, edge_index=edges, y=y)`.

    These keys are read, each checked as by `from_arrays`; others are ignored:
        edge_index: (2, E) integers.
        edge_weight: (E,) numbers >= 0; or an edge_attr of one floating point number >= 0 an edge.
        y: (n,) class numbers or words, or (n, T) label bits; or (n,) or (n, T) numbers with
            fractions, which are targets of a regression. Or y_data, y_indices, y_indptr, y_shape,
            the parts of a sparse matrix (n, T) of label bits.
        task: a word, `node_value`, where targets have no fractions.
        unlabelled: rows whose y counts as missing.
        x: (n, F); or x_data, x_indices, x_indptr, x_shape, the parts of a sparse matrix; or
            attributes (n, A), codes with 0 for missing, and attribute_names (A,): one-hot features
            of every attribute but "gender", which is what y tells there. None of these: a graph
            without features.
        train_mask, val_mask, test_mask: (n,) bool; or train_masks, val_masks, test_masks: (k, n)
            bool, of which the FIRST of the k splits is taken.
        silo, silo_names, node_id, class_names, num_classes: as in `from_arrays`.
        num_nodes: compared with the rows of the features.

    Or ratings (R, 3) and trust (T, 2), perhaps rating_category and rating_time (R,): a rating
    graph, see `silograph.graph.read.ratings.of_archive`.

    Args:
        path: the file.
        na_values: as in `from_arrays`.
        repeated_edges: as in `from_arrays`.
        time: key of the nodes' times (n,), numbers, dates (datetime64) or words in ISO 8601, by
            which a split may go.

    Raises:
        DataError: names the file, which is absent, damaged, not such an archive, or holds
            Python objects.
    """
    path = Path(path)
    parts = _read(path, time)
    if parts.keys() >= _RATINGS:
        return of_archive(path, parts, path.stem)
    names = {key: _names(path, parts[key], key) for key in _NAMES if key in parts}
    counts = {key: _whole(path, parts[key], key) for key in _NUMBERS if key in parts}
    num_nodes = counts.pop("num_nodes", None)
    weight, unused = chosen_weight({key: parts[key] for key in NAMES if key in parts})
    report_unused(path, unused)
    arrays: dict[str, Any] = {
        "edge_index": parts["edge_index"],
        "edge_weight": None if weight is None else parts[weight],
        "x": _features(path, parts),
        "y": _labels(path, parts),
        "split": _split(path, parts),
        "node_id": parts.get("node_id"),
        "silo": parts.get("silo"),
        "task": str(parts["task"]) if "task" in parts else None,
        "na_values": na_values,
        "repeated_edges": repeated_edges,
    }
    graph = checked(path, arrays | names | counts, path.stem)
    if num_nodes not in (None, graph.num_nodes):
        raise DataError(f"{path}: expected num_nodes {graph.num_nodes}, got {num_nodes}")
    if time is not None:
        times = _times(path, time, parts[time], graph.num_nodes, missing_values(na_values))
        graph = replace(graph, columns={time: torch.from_numpy(times)})
    return graph


def _times(path: Path, key: str, times: np.ndarray, n: int, missing: MissingValues) -> np.ndarray:
    """Return the times of nodes (n,) float64, NaN where missing; see `Table.times`."""
    if times.shape != (n,) or times.dtype.kind not in "biufMU":
        raise DataError(
            f"{path}: expected times {key!r} of shape ({n},), numbers or dates, got {times.shape} "
            f"of {times.dtype}"
        )
    if times.dtype.kind == "M":
        seconds = times.astype("datetime64[us]").astype(np.int64) / 1e6
        return np.where(np.isnat(times), np.nan, seconds)
    cells = [[word_of(time)] for time in times.tolist()]
    return Table(path, [key], cells, range(n), "node", missing=missing).times(key)


def archive_has_ratings(path: Path) -> bool:
    """Whether a file is an archive of ratings, by the names of its arrays; False if unreadable."""
    return _keys(path) >= _RATINGS


def is_rating_table(path: Path) -> bool:
    """Whether an .npz file is a table of ratings, by its columns, and no graph."""
    return (
        path.suffix == ".npz"
        and "edge_index" not in (keys := _keys(path))
        and keys >= {USER, ITEM, RATING}
    )


def _keys(path: Path) -> set[str]:
    """Return the names of the arrays in an archive; none if it is unreadable."""
    if not path.is_file():
        return set()
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except Exception:  # foreign bytes surface as many kinds of errors
        return set()


def checked(path: Path, arrays: dict[str, Any], name: str) -> Graph:
    """Return the graph of these arguments of `from_arrays`; its errors name the file."""
    try:
        return from_arrays(**arrays, name=name)
    except DataError as error:
        raise reword_error(error, f"{path}: {error}", DataError) from None


def _read(path: Path, time: str | None) -> Arrays:
    def choose(keys: set[str]) -> set[str]:
        _check_keys(path, keys)
        if keys >= _RATINGS:
            return keys & _OF_RATINGS
        if time is not None and time not in keys:
            got = ", ".join(sorted(keys)[:12])
            raise DataError(
                f"{path}: expected a key {time!r} with times of nodes, got keys {got}",
                **mistake("missing-column", path, time),
            )
        return keys & (_READ | {*NAMES} | ({time} if time else set()))

    return read_arrays(path, _EXPECTED, choose)


def _check_keys(path: Path, keys: set[str]) -> None:
    if keys >= _RATINGS:
        return
    if keys & _RATINGS:
        raise DataError(
            f"{path}: expected both ratings and trust of users, got one of them: trust may be "
            "empty, of shape (0, 2)"
        )
    whole = "x" in keys or keys.issuperset(_SPARSE) or keys.issuperset(_ATTRIBUTES)
    features = whole or not keys & {*_SPARSE, *_ATTRIBUTES}
    labels = "y" in keys or keys.issuperset(_SPARSE_Y)
    if not (features and labels and "edge_index" in keys):
        keys_text = ", ".join(sorted(keys)[:12]) or "none"
        rating_keys = keys & {USER, ITEM, RATING}
        remedy = f": a table of ratings has keys {USER}, {ITEM} and {RATING}" if rating_keys else ""
        raise DataError(
            f"{path}: expected keys {_EXPECTED}, got keys {keys_text}{remedy}",
            **mistake("wrong-format", path),
        )


def _features(path: Path, parts: Arrays) -> "np.ndarray | sp.csr_matrix[Any] | None":
    if "x" in parts:
        return parts["x"]
    if "x_data" in parts:
        return sparse(path, [parts[key] for key in _SPARSE])
    if "attributes" not in parts:
        return None
    return _one_hot(path, parts["attributes"], parts["attribute_names"])


def sparse(path: Path, parts: Sequence[np.ndarray], what: str = "x") -> "sp.csr_matrix[Any]":
    """Return the matrix `what` of its data, indices, indptr and shape.

    Which columns are meant is not checked.

    Raises:
        DataError: names the file.
    """
    data, indices, indptr, shape = parts
    kinds = [part.dtype.kind for part in parts]
    if kinds[0] not in "biuf" or any(kind not in "iu" for kind in kinds[1:]) or shape.shape != (2,):
        raise DataError(
            f"{path}: expected {what}_data of numbers and whole {what}_indices, {what}_indptr and "
            f"{what}_shape (2,), got {data.dtype}, {indices.dtype}, {indptr.dtype} and "
            f"{shape.dtype} {shape.shape}"
        )
    try:
        # Which columns are meant is checked with all other features.
        return sp.csr_matrix((data, indices, indptr), shape=(int(shape[0]), int(shape[1])))
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path}: expected sound parts of a sparse {what}, got {error}") from None


def _one_hot(path: Path, codes: np.ndarray, names: np.ndarray) -> "sp.csr_matrix[Any]":
    """Return (n, F): a column for every code but 0 (missing) of every attribute but the target."""
    if codes.ndim != 2 or codes.dtype.kind not in "iu" or names.shape != codes.shape[1:]:
        raise DataError(
            f"{path}: expected attributes (n, A) of integers and attribute_names (A,), "
            f"got {codes.shape} of {codes.dtype} and {names.shape}"
        )
    blocks = []
    for column, name in zip(codes.T, names.tolist(), strict=True):
        if name == _TARGET:
            continue
        values = np.unique(column[column != 0])
        row = np.flatnonzero(column)
        place = np.searchsorted(values, column[row])
        ones = np.ones(len(row), dtype=np.float32)
        blocks.append(sp.csr_matrix((ones, (row, place)), shape=(len(codes), len(values))))
    if len(blocks) != len(names) - 1:
        raise DataError(f"{path}: expected one attribute {_TARGET!r}, the target, got {names}")
    return sp.csr_matrix(sp.hstack(blocks))


def _labels(path: Path, parts: Arrays) -> np.ndarray:
    y = parts["y"] if "y" in parts else _sparse_bits(path, [parts[key] for key in _SPARSE_Y])
    if "unlabelled" not in parts:
        return y
    rows = parts["unlabelled"]
    if rows.dtype.kind not in "iu" or rows.ndim != 1 or y.dtype.kind not in "iu" or not len(y):
        raise DataError(
            f"{path}: expected unlabelled and y of integers, got {rows.dtype} and {y.dtype}"
        )
    if ((rows < 0) | (rows >= len(y))).any():
        raise DataError(f"{path}: expected unlabelled nodes 0..{len(y) - 1}, got others")
    y = y.astype(np.int64)
    y[rows] = MISSING
    return y


def _sparse_bits(path: Path, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return label bits (n, T) int64 of the parts of a sparse matrix; what is not stored is 0."""
    matrix = sparse(path, parts, "y")
    try:
        matrix.check_format(full_check=True)
    except ValueError as error:
        raise DataError(f"{path}: expected sound parts of a sparse y, got {error}") from None
    wrong = np.flatnonzero(~np.isin(matrix.data, (0, 1)))
    if len(wrong) or not matrix.has_canonical_format:
        got = f"y_data with {matrix.data[wrong[0]]}" if len(wrong) else "an entry twice"
        raise DataError(f"{path}: expected a sparse y of label bits 0 and 1, each once, got {got}")
    rows, columns = matrix.shape
    if columns > MOST_BITS:
        raise DataError(
            f"{path}: expected y_shape of at most {MOST_BITS} label bits, got {columns}"
        )
    bits = np.zeros((rows, columns), dtype=np.int64)
    bits[matrix.nonzero()] = 1
    return bits


def _split(path: Path, parts: Arrays) -> list[np.ndarray] | None:
    for keys in (_MASK, _MASKS):
        present = [key for key in keys if key in parts]
        if present and len(present) < len(keys):
            raise DataError(f"{path}: expected all of {', '.join(keys)}, got {', '.join(present)}")
        if present and keys == _MASK:
            return [parts[key] for key in keys]
        if present:
            masks = [parts[key] for key in keys]
            if any(mask.ndim != 2 or not len(mask) for mask in masks):
                raise DataError(
                    f"{path}: expected {', '.join(keys)} of shape (k, n), got "
                    + ", ".join(str(mask.shape) for mask in masks)
                )
            return [mask[0] for mask in masks]
    return None


def _names(path: Path, names: np.ndarray, key: str) -> list[str]:
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(f"{path}: expected {key} to be a list of words, got {names.dtype}")
    return [str(name) for name in names]


def _whole(path: Path, number: np.ndarray, key: str) -> int:
    if number.size != 1 or number.dtype.kind not in "iu":
        raise DataError(f"{path}: expected {key} to be one whole number, got {number.dtype}")
    return int(number.item())
