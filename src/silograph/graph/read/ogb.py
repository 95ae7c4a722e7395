"""Node classification graphs of the Open Graph Benchmark, read from their raw folders.

    raw/edge.csv.gz             two nodes a line
    raw/node-feat.csv.gz        F numbers a line
    raw/node-label.csv.gz       one class a line
    raw/num-node-list.csv.gz    n
    raw/num-edge-list.csv.gz    E
    split/KIND/train.csv.gz     one node a line; so valid.csv.gz and test.csv.gz

Nodes are numbered from 0 by their line in node-feat.csv.gz. The largest graph has raw/data.npz
(edge_index, node_feat, num_nodes_list, num_edges_list) and raw/node-label.npz (node_label)
instead of the tables. W. Hu et al.: "Open Graph Benchmark: datasets for machine learning on
graphs", NeurIPS 2020; the benchmark's own package is not needed.

n: nodes. E: edges as stored. F: features a node. k: lines of a table.
"""

import gzip
import warnings
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from silograph.core.errors import DataError
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split
from silograph.graph.read.arrays import numbered_labels
from silograph.graph.read.columns import compact_features, report_counting_features
from silograph.graph.read.tables import check_unpacked, report_unused

FOLDERS = {
    "ogbn-arxiv": "ogbn_arxiv",
    "ogbn-papers100m": "ogbn_papers100M",
    "ogbn-products": "ogbn_products",
}
"""Folder of a graph, by its name in `load`."""
CLASSES = {"ogbn-arxiv": 40, "ogbn-papers100m": 172, "ogbn-products": 47}
_PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class _Table:
    """Rows of numbers, and how their place in a file is called.

    Attributes:
        path: the file.
        rows: (k, columns).
        unit: what a row is in the file.
        first: number of the first row there.
    """

    path: Path
    rows: np.ndarray
    unit: str = "line"
    first: int = 1

    def wrong(self, row: int, expected: str, got: object) -> DataError:
        return DataError(
            f"{self.path}, {self.unit} {self.first + row}: expected {expected}, got {got}"
        )


@dataclass(frozen=True)
class _Raw:
    """The tables of a raw folder: edges (E, 2), x (n, F), y (n, 1), nodes and edges (1, 1)."""

    edges: _Table
    x: _Table
    y: _Table
    num_nodes: _Table
    num_edges: _Table


def is_ogb(folder: Path) -> bool:
    """Whether `load_ogb` is meant to read a folder."""
    return any((folder / name).is_dir() for name in ("raw", "split")) or folder.name == "raw"


def load_ogb(folder: Path) -> Graph:
    """Return the graph of a folder with `raw` and `split`, or of its `raw`; see this module.

    Directions of edges are dropped. -1 and NaN mark a label that is not known.

    Raises:
        DataError: names the file, and the line where one is wrong.
    """
    if folder.name == "raw":
        folder = folder.resolve().parent
    raw, name = folder / "raw", folder.resolve().name.replace("_", "-")
    if (raw / "data.npz").is_file():
        tables = _read_archives(raw)
    else:
        tables = _read_tables(raw, of_benchmark=name.lower() in CLASSES)
    n = len(tables.x.rows)
    _check_count(tables.num_nodes, tables.x)
    _check_count(tables.num_nodes, tables.y)
    _check_count(tables.num_edges, tables.edges)
    _check_features(tables.x)
    report_counting_features(tables.x.path, tables.x.rows, ())
    _check_nodes(tables.edges, n, columns=2)
    if (raw / "edge-feat.csv.gz").is_file():
        report_unused(folder, ["edge-feat.csv.gz"])
    try:
        y, classes, names = numbered_labels(tables.y.rows, n, CLASSES.get(name.lower()), ())
    except DataError as error:
        raise DataError(f"{tables.y.path}: {error}") from None
    return Graph(
        adj=CSR.undirected(tables.edges.rows.T, n),
        x=torch.from_numpy(tables.x.rows),
        y=y,
        num_classes=classes,
        node_id=np.arange(n, dtype=np.int64),
        name=name,
        split=_read_split(folder / "split", n),
        class_names=names,
    )


def _read_tables(raw: Path, *, of_benchmark: bool) -> _Raw:
    """Return the tables of a raw folder; the benchmark's own features are float32 by definition."""
    x = _read(raw / "node-feat.csv.gz", np.float32 if of_benchmark else np.float64)
    return _Raw(
        edges=_read(raw / "edge.csv.gz", np.int64),
        x=x if of_benchmark else replace(x, rows=compact_features(x.rows)),
        y=_read(raw / "node-label.csv.gz", np.float64),
        num_nodes=_read(raw / "num-node-list.csv.gz", np.int64),
        num_edges=_read(raw / "num-edge-list.csv.gz", np.int64),
    )


def _read_archives(raw: Path) -> _Raw:
    path, labels = raw / "data.npz", raw / "node-label.npz"
    x, y = _array(path, "node_feat", "f", 2), _array(labels, "node_label", "iuf", 2)
    # The largest graph is in half precision, and does not fit into memory twice.
    narrow = compact_features(x) if x.dtype.itemsize > 4 else x.astype(np.float32, copy=False)
    sizes = [_array(path, key, "iu", 1)[:, None] for key in ("num_nodes_list", "num_edges_list")]
    return _Raw(
        edges=_Table(path, _array(path, "edge_index", "iu", 2).T, "edge", 0),
        x=_Table(path, narrow, "node", 0),
        y=_Table(labels, y, "node", 0),
        num_nodes=_Table(path, sizes[0], "graph", 0),
        num_edges=_Table(path, sizes[1], "graph", 0),
    )


def _read(path: Path, dtype: type[np.generic]) -> _Table:
    """Return a table of numbers, as many on every line as on the first."""
    if not path.is_file():
        raise DataError(f"{path}: expected a table of the Open Graph Benchmark, got no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an empty file; a fraction among whole numbers
            rows = np.loadtxt(path, dtype, delimiter=",", ndmin=2, comments=None, encoding="utf-8")
    except (EOFError, OSError, zlib.error) as error:
        raise _damaged(path, error) from None
    except (ValueError, Warning) as error:
        raise _unreadable(path, dtype, error) from None
    return _Table(path, rows)


def _damaged(path: Path, error: BaseException) -> DataError:
    return DataError(
        f"{path}: expected a whole gzip file, got one cut short or damaged "
        f"({' '.join(str(error).split())}): download it again"
    )


def _unreadable(path: Path, dtype: type[np.generic], error: BaseException) -> DataError:
    """Return the error for the first line that is no row; numpy counts lines now so, now so."""
    width = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            for row, line in enumerate(file):
                cells = line.strip().split(",") if line.strip() else []
                width = width or len(cells)
                if cells and (len(cells) != width or not _are_numbers(cells, dtype)):
                    table = _Table(path, np.empty(0))
                    return table.wrong(row, f"numbers, {width} on a line", repr(line.strip()[:80]))
    except (EOFError, OSError, zlib.error) as damage:
        return _damaged(path, damage)
    return DataError(f"{path}: expected lines of numbers, got none ({str(error).splitlines()[0]})")


def _are_numbers(cells: list[str], dtype: type[np.generic]) -> bool:
    try:
        np.array(cells).astype(dtype)
    except (ValueError, OverflowError):
        return False
    return True


def _array(path: Path, key: str, kinds: str, ndim: int) -> np.ndarray:
    """Return an array of an .npz file, of as many axes, whose dtype is of one of these kinds."""
    if not path.is_file():
        raise DataError(f"{path}: expected an .npz file, got no such file")
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            check_unpacked(path, [key])
            array: np.ndarray = archive[key]
    except DataError:
        raise
    except Exception as error:  # foreign bytes surface as errors of numpy, zipfile, zlib and more
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(f"{path}: expected an array {key!r}, got {reason}") from None
    if array.dtype.kind not in kinds or array.ndim != ndim:
        raise DataError(
            f"{path}: expected {key!r} to hold {'whole ' * (kinds == 'iu')}numbers on {ndim} "
            f"axes, got {array.dtype} {array.shape}"
        )
    return array


def _check_columns(table: _Table, columns: int) -> None:
    if table.rows.shape[1] != columns:
        raise table.wrong(0, f"columns: {columns}", table.rows.shape[1])


def _check_count(size_table: _Table, table: _Table) -> None:
    _check_columns(size_table, 1)
    if len(size_table.rows) != 1:
        raise size_table.wrong(
            1, "the size of one graph", f"another: {len(size_table.rows)} graphs"
        )
    count = int(size_table.rows[0, 0])
    if count != len(table.rows):
        raise DataError(
            f"{table.path}: expected {count} {table.unit}s, as {size_table.path.name} says, "
            f"got {len(table.rows)}"
        )


def _check_features(x: _Table) -> None:
    finite = np.isfinite(x.rows).all(axis=1)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise x.wrong(row, "finite numbers", x.rows[row][~np.isfinite(x.rows[row])][0])


def _check_nodes(table: _Table, n: int, columns: int) -> None:
    _check_columns(table, columns)
    is_outside = ((table.rows < 0) | (table.rows >= n)).any(axis=1)
    if is_outside.any():
        row = int(np.flatnonzero(is_outside)[0])
        got = " and ".join(map(str, table.rows[row].tolist()))
        raise table.wrong(row, f"nodes 0..{n - 1}", got)


def _read_split(folder: Path, n: int) -> Split:
    kinds = sorted(path.parent for path in folder.glob(f"*/{_PARTS[0]}.csv.gz"))
    if len(kinds) != 1:
        raise DataError(
            f"{folder}: expected one folder with train.csv.gz, valid.csv.gz and test.csv.gz, such "
            f"as time, got {len(kinds)} of them"
        )
    role = np.full(n, -1, dtype=np.int8)
    for number, part in enumerate(_PARTS):
        table = _read(kinds[0] / f"{part}.csv.gz", np.int64)
        _check_nodes(table, n, columns=1)
        nodes = table.rows[:, 0]
        fresh = np.zeros(len(nodes), dtype=np.bool_)
        fresh[np.unique(nodes, return_index=True)[1]] = True
        invalid = np.flatnonzero(~fresh | (role[nodes] >= 0))
        if len(invalid):
            raise table.wrong(invalid[0], "a node that is in no part yet", nodes[invalid[0]])
        role[nodes] = number
    return Split(*(torch.from_numpy(role == number) for number in range(len(_PARTS))))
