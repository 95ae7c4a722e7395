"""Node classification graphs of the Open Graph Benchmark, read from their raw folders.

    raw/edge.csv.gz             two nodes a line
    raw/node-feat.csv.gz        F numbers a line
    raw/node-label.csv.gz       one class a line
    raw/num-node-list.csv.gz    n
    raw/num-edge-list.csv.gz    E
    split/KIND/train.csv.gz     one node a line; so valid.csv.gz and test.csv.gz

Nodes are numbered from 0 by their line in node-feat.csv.gz. W. Hu et al.: "Open Graph Benchmark:
datasets for machine learning on graphs", NeurIPS 2020; the benchmark's own package is not needed.

n: nodes. E: edges as stored. F: features a node. k: lines of a table.
"""

import warnings
import zlib
from pathlib import Path

import numpy as np

from silograph.core.errors import DataError, mistake, reword_error
from silograph.graph.graph import Graph
from silograph.graph.read.arrays import from_arrays
from silograph.graph.read.tables import RepeatedEdges, report_unused

FOLDERS = {"ogbn-arxiv": "ogbn_arxiv", "ogbn-products": "ogbn_products"}
"""Folder of a graph, by its name in `load`."""
CLASSES = {"ogbn-arxiv": 40, "ogbn-products": 47}
PARTS = ("train", "valid", "test")


def is_ogb(folder: Path) -> bool:
    """Whether `load_ogb` is meant to read a folder."""
    return any((folder / name).is_dir() for name in ("raw", "split")) or folder.name == "raw"


def load_ogb(folder: Path, repeated_edges: RepeatedEdges = "mean") -> Graph:
    """Return the graph of a folder with `raw` and `split`, or of its `raw`; see this module.

    `repeated_edges` is that of `from_arrays`. -1 and NaN mark a label that is not known.

    Raises:
        DataError: names the file or folder, and what is wrong with it.
    """
    if folder.name == "raw":
        folder = folder.resolve().parent
    raw, name = folder / "raw", folder.resolve().name.replace("_", "-")
    num_classes = CLASSES.get(name.lower())
    # The benchmark's own features are float32 by definition.
    x = _read(raw / "node-feat.csv.gz", np.float64 if num_classes is None else np.float32)
    edges = _read(raw / "edge.csv.gz", np.int64)
    y = _read(raw / "node-label.csv.gz", np.float64)
    for file, rows in (("num-node-list.csv.gz", x), ("num-edge-list.csv.gz", edges)):
        count = _read(raw / file, np.int64)
        if count.tolist() != [[len(rows)]]:
            got = " ".join(map(str, count.ravel()[:9]))
            raise DataError(
                f"{raw / file}: expected {len(rows)}, the lines of one graph's table, got {got}"
            )
    if (raw / "edge-feat.csv.gz").is_file():
        report_unused(folder, ["edge-feat.csv.gz"])
    split = _read_split(folder / "split", len(x))
    try:
        return from_arrays(
            edge_index=edges.T,
            x=x,
            y=y,
            num_classes=num_classes,
            task="multiclass" if y.shape[1] == 1 else "multilabel",
            split=split,
            repeated_edges=repeated_edges,
            name=name,
        )
    except DataError as error:
        raise reword_error(error, f"{folder}: {error}", DataError) from None


def _read(path: Path, dtype: type[np.generic]) -> np.ndarray:
    """Return a table of numbers (k, columns), as many on every line as on the first."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an empty file; a fraction among whole numbers
            return np.loadtxt(path, dtype, delimiter=",", ndmin=2, comments=None, encoding="utf-8")
    except (EOFError, OSError, ValueError, Warning, zlib.error) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"{path}: expected a gzipped table of numbers of the Open Graph Benchmark, got "
            f"{reason}",
            **mistake("wrong-format", path),
        ) from None


def _read_split(folder: Path, n: int) -> list[np.ndarray]:
    """Return the masks of training, validation and test nodes, each (n,) bool."""
    kinds = sorted(path.parent for path in folder.glob(f"*/{PARTS[0]}.csv.gz"))
    if len(kinds) != 1:
        raise DataError(
            f"{folder}: expected one folder with train.csv.gz, valid.csv.gz and test.csv.gz, such "
            f"as time, got {len(kinds)} of them"
        )
    masks = []
    for part in PARTS:
        path = kinds[0] / f"{part}.csv.gz"
        nodes = _read(path, np.int64)
        if nodes.shape[1] != 1 or not 0 <= nodes.min() <= nodes.max() < n:
            raise DataError(
                f"{path}: expected one node of 0..{n - 1} on each line, got {nodes.shape[1]} "
                f"columns from {nodes.min()} to {nodes.max()}"
            )
        mask = np.zeros(n, np.bool_)
        mask[nodes[:, 0]] = True
        masks.append(mask)
    return masks
