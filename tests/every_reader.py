"""One small table of nodes, read by every reader of graphs: laws hold for all of them.

n: nodes. F: features.
"""

import gzip
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data

from silograph.graph.datasets import load
from silograph.graph.graph import Features, Graph
from silograph.graph.read.arrays import from_arrays
from silograph.graph.read.columns import INDEX_NAMES
from silograph.graph.read.csv import from_csv
from silograph.graph.read.in_memory import from_networkx, from_pyg
from silograph.graph.silos.data import Silo
from silograph.graph.silos.read import read_silo


@dataclass(frozen=True)
class NodeTable:
    """Nodes of a ring, by columns; a label of None is missing.

    Attributes:
        features: (n,) numbers each, by name.
        labels: (n,) class numbers or words.
        ids: (n,) keys.
    """

    features: Mapping[str, Sequence[float]]
    labels: Sequence[Any]
    ids: Sequence[Any]

    @property
    def x(self) -> np.ndarray:
        """(n, F)."""
        return np.array(list(self.features.values())).T

    @property
    def edge_index(self) -> np.ndarray:
        """(2, n) each node and the next one."""
        rows = np.arange(len(self.labels))
        return np.stack([rows, np.roll(rows, -1)])


def typed(column: Sequence[Any]) -> np.ndarray:
    """Return a column as an array; numpy makes floats of integers on both sides of 2^63."""
    large = [cell for cell in column if isinstance(cell, int) and cell >= 2**63]
    return np.array(column, dtype=np.uint64 if large else None)


def numeric_table(features: Mapping[str, Sequence[float]]) -> NodeTable:
    """Return nodes with these features, labels 0 and 1 in turn, and ids from 10."""
    n = len(next(iter(features.values())))
    return NodeTable(features, [row % 2 for row in range(n)], list(range(10, 10 + n)))


def text(header: Sequence[str], rows: Sequence[Sequence[Any]], separator: str = ",") -> str:
    """Return a table as text, numbers with all their digits."""
    lines = [header, *([cell if isinstance(cell, str) else repr(cell) for cell in r] for r in rows)]
    return "".join(separator.join(line) + "\n" for line in lines)


def _csv(path: Path, table: NodeTable) -> Graph:
    columns = {"id": table.ids, "label": table.labels, **table.features}
    rows = list(zip(*columns.values(), strict=True))
    (path / "nodes.csv").write_text(text(list(columns), rows))
    edges = [(table.ids[a], table.ids[b]) for a, b in table.edge_index.T]
    (path / "edges.csv").write_text(text(["source", "target"], edges))
    return from_csv(nodes=path / "nodes.csv", edges=path / "edges.csv")


def _npz(path: Path, table: NodeTable) -> Graph:
    np.savez(
        path / "graph.npz",
        x=table.x,
        y=np.array(table.labels),
        edge_index=table.edge_index,
        node_id=typed(table.ids),
    )
    return load(path / "graph.npz")


def _sparse_npz(path: Path, table: NodeTable) -> Graph:
    x = sp.csr_matrix(table.x)
    np.savez(
        path / "graph.npz",
        x_data=x.data,
        x_indices=x.indices,
        x_indptr=x.indptr,
        x_shape=x.shape,
        y=np.array(table.labels),
        edge_index=table.edge_index,
        node_id=typed(table.ids),
    )
    return load(path / "graph.npz")


def _arrays(path: Path, table: NodeTable) -> Graph:
    return from_arrays(x=table.x, y=table.labels, edge_index=table.edge_index, node_id=table.ids)


def _sparse(path: Path, table: NodeTable) -> Graph:
    x = sp.csr_matrix(table.x)
    return from_arrays(x=x, y=table.labels, edge_index=table.edge_index, node_id=table.ids)


def _pyg(path: Path, table: NodeTable) -> Graph:
    data = Data(
        x=torch.from_numpy(table.x.copy()),
        y=torch.tensor(table.labels),
        edge_index=torch.from_numpy(table.edge_index),
    )
    return from_pyg(data, node_id=table.ids)


def _networkx(path: Path, table: NodeTable) -> Graph:
    graph: Any = nx.Graph()
    for key, label, row in zip(table.ids, table.labels, table.x.tolist(), strict=True):
        graph.add_node(key, x=row, y=label)
    graph.add_edges_from((table.ids[a], table.ids[b]) for a, b in table.edge_index.T)
    return from_networkx(graph)


def _ogb(path: Path, table: NodeTable) -> Graph:
    def write(name: str, rows: Sequence[Sequence[Any]]) -> None:
        file = path / "own" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = (",".join(map(repr, row)) + "\n" for row in rows)
        file.write_bytes(gzip.compress("".join(lines).encode()))

    n = len(table.labels)
    write("raw/edge.csv.gz", table.edge_index.T.tolist())
    write("raw/node-feat.csv.gz", table.x.tolist())
    write("raw/node-label.csv.gz", [[label] for label in table.labels])
    write("raw/num-node-list.csv.gz", [[n]])
    write("raw/num-edge-list.csv.gz", [[n]])
    for number, part in enumerate(("train", "valid", "test")):
        write(f"split/own/{part}.csv.gz", [[number]])
    return load(path / "own")


def silo_columns(table: NodeTable) -> dict[str, dict[str, Sequence[Any]]]:
    """Return the columns of a silo's tables."""
    ends = table.edge_index
    return {
        "nodes": {"id": table.ids, "label": table.labels},
        "features": {"id": table.ids, **table.features},
        "edges": {
            "source": [table.ids[row] for row in ends[0]],
            "target": [table.ids[row] for row in ends[1]],
        },
        "cross_edges": {"own": [], "silo": [], "remote": []},
    }


def write_silo(path: Path, table: NodeTable, format: str) -> None:
    """Write the folder of a silo; features in .npz as a matrix, as that format has them."""
    whole = all(isinstance(key, int) for key in table.ids)
    words = sorted({label for label in table.labels if isinstance(label, str)})
    classes = words or 1 + max(label for label in table.labels if label is not None)
    features = [name for name in table.features if name not in ("", "Unnamed: 0", *INDEX_NAMES)]
    (path / "silo.toml").write_text(
        f'name = "north"\nfeatures = {len(features)}\nclasses = {classes!r}\n'
        f'keys = "{"integer" if whole else "text"}"\n'
    )
    for stem, columns in silo_columns(table).items():
        if format == "npz" and stem == "features":
            np.savez(path / "features.npz", x=table.x)
        elif format == "npz":
            arrays: dict[str, Any] = {name: typed(column) for name, column in columns.items()}
            np.savez(path / f"{stem}.npz", **arrays)
        elif format == "parquet":
            arrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            made = {n: arrow.array(c, None if c else "string") for n, c in columns.items()}
            parquet.write_table(arrow.table(made), path / f"{stem}.parquet")
        else:
            rows = list(zip(*columns.values(), strict=True))
            (path / f"{stem}.csv").write_text(text(list(columns), rows))


def _silo(format: str) -> Callable[[Path, NodeTable], Graph]:
    def read(path: Path, table: NodeTable) -> Graph:
        write_silo(path, table, format)
        found: Silo = read_silo(path)
        return found.graph

    return read


Reader = Callable[[Path, NodeTable], Graph]
READERS: dict[str, Reader] = {
    "arrays": _arrays,
    "sparse arrays": _sparse,
    "npz": _npz,
    "sparse npz": _sparse_npz,
    "csv": _csv,
    "pyg": _pyg,
    "networkx": _networkx,
    "ogb": _ogb,
    "silo csv": _silo("csv"),
    "silo npz": _silo("npz"),
    "silo parquet": _silo("parquet"),
}


def dense(x: Features) -> torch.Tensor:
    """Return features as a dense tensor of their own dtype."""
    if isinstance(x, torch.Tensor):
        return x
    assert x.values is not None  # features always carry values
    return torch.from_numpy(x.scipy().toarray())


def _table_arrays(table: NodeTable) -> dict[str, Any]:
    return {"y": table.labels, "edge_index": table.edge_index, "node_id": table.ids}


def _named_arrays(path: Path, table: NodeTable) -> Graph:
    return from_arrays(x=table.x, feature_names=list(table.features), **_table_arrays(table))


def _named_sparse(path: Path, table: NodeTable) -> Graph:
    x = sp.csr_matrix(table.x)
    return from_arrays(x=x, feature_names=list(table.features), **_table_arrays(table))


NAMED_READERS: dict[str, Reader] = {
    "arrays with names": _named_arrays,
    "sparse arrays with names": _named_sparse,
    "csv": _csv,
    "silo csv": _silo("csv"),
    "silo parquet": _silo("parquet"),
}
"""Readers that know the names of features."""
