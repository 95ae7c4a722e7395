"""The features of a silo's nodes, from its table of features.

n: nodes. F: features.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch

from silograph.core.errors import DataError
from silograph.graph.csr import CSR
from silograph.graph.graph import Features
from silograph.graph.read.arrays import features_of
from silograph.graph.read.columns import missing_values, report_counting_features
from silograph.graph.read.npz import sparse
from silograph.graph.read.tables import Table, read_arrays
from silograph.graph.silos.spec import IN_TOML, NODES, SPEC, SiloSpec, only

_DENSE = ("x",)
_SPARSE = ("x_data", "x_indices", "x_indptr", "x_shape")


def read_features(
    path: Path, spec: SiloSpec, place: Mapping[str, int]
) -> tuple[Features, tuple[str, ...]]:
    """Return the features (n, F) of a silo's nodes, and their names where they have some.

    Args:
        path: the table. An .npz file holds no keys: x (n, F), or x_data, x_indices, x_indptr and
            x_shape, with a row for each node in the order of the table of nodes.
        spec: what it means.
        place: the row of every key.

    Raises:
        DataError: names file, line and how to mend it.
    """
    if path.suffix == ".npz":
        return _of_arrays(path, spec, len(place)), ()
    table = spec.read_table(path, "id", *(("feature", "value") if spec.sparse else ()))
    if spec.sparse:
        return _of_entries(table, spec, place), ()
    (id,) = spec.called("id")
    rows = _rows(table, id, place)
    names = [name for name in table.header if name != id]
    if len(names) != spec.features:
        raise DataError(
            f"{table.head}: expected {spec.features} columns of features besides {id!r}, as "
            f"{SPEC} says, got {len(names)}: add or drop columns, or correct {SPEC}"
        )
    given = table.numbers(names)
    x = np.empty_like(given)
    x[rows] = given
    report_counting_features(path, given, names)
    return torch.from_numpy(x), tuple(names)


def _rows(table: Table, column: str, place: Mapping[str, int]) -> list[int]:
    """Return the rows of keys that must be those of all nodes, each once."""
    seen: dict[str, int] = {}
    for row, key in enumerate(table.column(column, IN_TOML)):
        if key not in place:
            raise table.wrong(
                row, column, f"a key of {NODES}", key, "add the node, or drop the row"
            )
        if key in seen:
            first = f"{table.unit} {table.lines[seen[key]]}"
            raise table.wrong(row, column, f"a key not yet on {first}", key, "drop one of them")
        seen[key] = row
    absent = next((key for key in place if key not in seen), None)
    if absent is not None:
        raise DataError(
            f"{table.path}: expected features of every node, got none of {absent!r}: add a row"
        )
    return [place[key] for key in seen]


def _of_entries(table: Table, spec: SiloSpec, place: Mapping[str, int]) -> CSR:
    """Return the features of rows of node, feature, value; all others are 0."""
    id, feature, value = spec.called("id", "feature", "value")
    only(table, (id, feature, value))
    seen: dict[tuple[int, int], int] = {}
    cells = zip(table.column(id, IN_TOML), table.column(feature, IN_TOML), strict=True)
    for row, (key, cell) in enumerate(cells):
        if key not in place:
            raise table.wrong(row, id, f"a key of {NODES}", key, "add the node, or drop the row")
        if not (cell.isascii() and cell.isdigit() and int(cell) < spec.features):
            mend = f"correct it, or features in {SPEC}"
            expected = f"a feature 0..{spec.features - 1}"
            raise table.wrong(row, feature, expected, cell, mend)
        entry = (place[key], int(cell))
        if entry in seen:
            first = f"{table.unit} {table.lines[seen[entry]]}"
            expected = f"a feature of {key!r} not yet on {first}"
            raise table.wrong(row, feature, expected, cell, "drop one of them")
        seen[entry] = row
    table.column(value, IN_TOML)
    pairs = np.array(list(seen), dtype=np.int64).reshape(-1, 2).T
    values = table.numbers([value])[:, 0]
    return CSR.from_scipy(sp.coo_matrix((values, tuple(pairs)), (len(place), spec.features)))


def _of_arrays(path: Path, spec: SiloSpec, n: int) -> Features:
    """Return the features in an .npz file."""
    wanted = _SPARSE if spec.sparse else _DENSE
    expected = f"{', '.join(wanted)}, as sparse = {str(spec.sparse).lower()} in {SPEC} says"

    def choose(keys: set[str]) -> tuple[str, ...]:
        if keys != set(wanted):
            got = ", ".join(sorted(keys)) or "none"
            raise DataError(f"{path}: expected {expected}, got {got}: write these, or correct it")
        return wanted

    parts = read_arrays(path, expected, choose)
    try:
        x = features_of(
            sparse(path, [parts[key] for key in _SPARSE]) if spec.sparse else parts["x"],
            missing_values(spec.na_values),
        )
    except DataError as error:
        raise DataError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    shape = (x.num_rows, x.num_cols) if isinstance(x, CSR) else tuple(x.shape)
    if shape != (n, spec.features):
        raise DataError(
            f"{path}: expected features of shape {(n, spec.features)}, by {NODES} and {SPEC}, got "
            f"{shape}: one row a node, or correct {SPEC}"
        )
    if not isinstance(x, CSR):
        report_counting_features(path, x.numpy(), ())
    return x
