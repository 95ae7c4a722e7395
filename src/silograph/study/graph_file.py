"""A graph in memory, handed to another process as a file of plain arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split

SPLIT = ("train", "val", "test")
COLUMN = "column:"  # begins the names of what else is known of nodes


def write_graph(path: Path, graph: Graph) -> None:
    """Write every field of a graph; nothing is pickled."""
    x = graph.x
    parts: dict[str, Any] = {
        "indptr": graph.adj.indptr.numpy(),
        "indices": graph.adj.indices.numpy(),
        "y": graph.y.numpy(),
        "num_classes": graph.num_classes,
        "node_id": graph.node_id,
        "name": graph.name,
        "silo_names": np.array(graph.silo_names, dtype=np.str_),
        "class_names": np.array(graph.class_names, dtype=np.str_),
        "feature_names": np.array(graph.feature_names, dtype=np.str_),
    }
    parts |= {COLUMN + name: column.numpy() for name, column in graph.columns.items()}
    if isinstance(x, Tensor):
        parts["x"] = x.numpy()
    else:
        assert x.values is not None  # features always carry values
        parts |= {"x_indptr": x.indptr.numpy(), "x_indices": x.indices.numpy()}
        parts |= {"x_values": x.values.numpy(), "x_cols": x.num_cols}
    if graph.edge_weight is not None:
        parts["edge_weight"] = graph.edge_weight.numpy()
    if graph.scale is not None:
        parts["scale"] = np.array(graph.scale)
    if graph.silo is not None:
        parts["silo"] = graph.silo.numpy()
    if graph.split is not None:
        parts |= {name: getattr(graph.split, name).numpy() for name in SPLIT}
    np.savez(path, allow_pickle=False, **parts)


def read_graph(path: str | Path) -> Graph:
    """Return the graph that `write_graph` wrote."""
    with np.load(path, allow_pickle=False) as archive:
        parts = {name: archive[name] for name in archive.files}
    arrays = {n: torch.from_numpy(a) for n, a in parts.items() if a.ndim and a.dtype.kind in "bif"}
    num_nodes = len(arrays["indptr"]) - 1
    x = arrays.get("x")
    return Graph(
        adj=CSR(arrays["indptr"], arrays["indices"], None, num_nodes),
        x=_sparse(arrays, int(parts["x_cols"])) if x is None else x,
        y=arrays["y"],
        num_classes=int(parts["num_classes"]),
        node_id=parts["node_id"],
        name=str(parts["name"]),
        split=Split(*(arrays[name] for name in SPLIT)) if "train" in arrays else None,
        silo=arrays.get("silo"),
        silo_names=tuple(parts["silo_names"].tolist()),
        class_names=tuple(parts["class_names"].tolist()),
        feature_names=tuple(parts["feature_names"].tolist()),
        edge_weight=arrays.get("edge_weight"),
        columns={n.removeprefix(COLUMN): t for n, t in arrays.items() if n.startswith(COLUMN)},
        scale=_pair(arrays["scale"].tolist()) if "scale" in arrays else None,
    )


def _pair(values: list[float]) -> tuple[float, float]:
    low, high = values
    return low, high


def _sparse(arrays: dict[str, Tensor], num_cols: int) -> CSR:
    return CSR(arrays["x_indptr"], arrays["x_indices"], arrays["x_values"], num_cols)
