"""`Graph`: the uncut graph, as a user hands it in and as a simulation cuts it.

n: nodes. F: features a node. T: label bits of a multi-label task.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from silograph.core.html import html_table
from silograph.core.numeric_state import as_data, standard_numerics
from silograph.graph.csr import CSR
from silograph.graph.rating_pairs import rating_sizes

LabelForm = Literal["multiclass", "multilabel", "node_value", "rating"]
Features = Tensor | CSR
MISSING = -1  # label of a node (or label bit) that is not known


@dataclass(frozen=True, eq=False)
class Split:
    """Which nodes train, choose and judge: three disjoint masks, each (n,) bool."""

    train: Tensor
    val: Tensor
    test: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "Split":
        """Return the split of the masks that `change` makes of these."""
        return Split(change(self.train), change(self.val), change(self.test))


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """An undirected graph with node features and node labels.

    Attributes:
        adj: (n, n) without values; both directions of every edge, no self loops, no duplicates.
        x: (n, F), dense or CSR; float32 where that holds every value exactly, else float64.
        y: multi-class (n,) int64 in 0..num_classes-1; multi-label (n, T) int64 of 0 and 1.
            `MISSING` (-1) marks what is not known; such nodes never train or judge. For
            regression (n, T) float64 targets; NaN marks what is not known. For ratings (n,)
            float64, NaN at users and items; see `silograph.graph.read.ratings`.
        num_classes: number of classes, or T for multi-label and regression.
        node_id: (n,) public keys of the nodes, int64, uint64 or strings; they name nodes across
            silos.
        name: what tables and result folders call this graph.
        split: the split that came with the data, or None.
        silo: (n,) int64 index into `silo_names`: who holds the node; or None.
        silo_names: names of the silos, empty when `silo` is None.
        class_names: names of the classes, bits or targets, or empty.
        columns: what is known of nodes besides, (n,) int64 codes or float64 numbers by name, for
            ways of cutting and splitting; -1 or NaN where nothing is. No model reads them.
        feature_names: names of the features in their order, or empty.
        edge_weight: (nnz,) float64 >= 0, the weight of every stored edge of `adj`, alike in both
            directions; None: every edge counts 1.
        scale: least and largest rating that there may be, or None where labels are no ratings.
    """

    adj: CSR
    x: Features
    y: Tensor
    num_classes: int
    node_id: np.ndarray
    name: str = "graph"
    split: Split | None = None
    silo: Tensor | None = None
    silo_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    feature_names: tuple[str, ...] = ()
    edge_weight: Tensor | None = None
    scale: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Copy tensors that autograd could not use as data, such as those of inference mode."""
        for name in ("adj", "x", "y", "split", "silo", "edge_weight"):
            value = getattr(self, name)
            if value is not None:
                same = value.map(as_data) if isinstance(value, CSR | Split) else as_data(value)
                object.__setattr__(self, name, same)
        object.__setattr__(self, "columns", {k: as_data(v) for k, v in self.columns.items()})

    def __repr__(self) -> str:
        """Return name and sizes."""
        what = "targets" if self.has_numbers else "classes"
        own = self.rating_sizes or {"features": self.num_features, what: self.num_classes}
        sizes = {"nodes": self.num_nodes, "edges": self.num_edges, **own}
        told = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return f"Graph({self.name!r}, {told}, task={self.task!r})"

    def _repr_html_(self) -> str:
        what = "targets" if self.has_numbers else "classes"
        silos = {"silos": f"{len(self.silo_names):,}"} if self.silo_names else {}
        own = self.rating_sizes or {"features": self.num_features, what: self.num_classes}
        rows = {
            "nodes": f"{self.num_nodes:,}",
            "edges": f"{self.num_edges:,}" + ", weighted" * (self.edge_weight is not None),
            **{name: f"{size:,}" for name, size in own.items()},
            "task": self.task,
            "labeled nodes": f"{int(self.labeled.sum()):,}",
            "split": "none" if self.split is None else "train, val and test masks",
        }
        return html_table("graph", ["name", self.name], (rows | silos).items())

    @property
    def has_numbers(self) -> bool:
        """Whether labels are numbers to predict, and not classes or bits."""
        return self.y.is_floating_point()

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.adj.num_rows

    @property
    def num_edges(self) -> int:
        """Number of undirected edges."""
        return self.adj.nnz // 2

    @property
    def num_features(self) -> int:
        """Number of features a node."""
        return self.x.num_cols if isinstance(self.x, CSR) else int(self.x.shape[1])

    @property
    def task(self) -> LabelForm:
        """`multiclass` (one class a node), `multilabel`, `node_value` (T numbers) or `rating`."""
        return label_form(self.y)

    @property
    def rating_sizes(self) -> dict[str, int]:
        """How many users, items and ratings there are; nothing where labels are no ratings."""
        if self.task != "rating" or isinstance(self.x, CSR):
            return {}
        return rating_sizes(self.x)

    @property
    @standard_numerics()
    def labeled(self) -> Tensor:
        """Nodes with at least one known label, (n,) bool."""
        known = known_labels(self.y)
        return known if known.dim() == 1 else known.any(dim=1)

    @property
    @standard_numerics()
    def weighted_adj(self) -> CSR:
        """`adj` with the weights of edges as values, if they have any."""
        return self.adj if self.edge_weight is None else self.adj.with_values(self.edge_weight)

    @property
    @standard_numerics()
    def edge_index(self) -> Tensor:
        """Both directions of every edge, (2, E) int64, sorted by first end point."""
        return torch.stack([self.adj.row, self.adj.indices.long()])


def label_form(y: Tensor) -> LabelForm:
    """Return which form labels (n,) or (n, T) have."""
    if y.is_floating_point():
        return "rating" if y.dim() == 1 else "node_value"
    return "multiclass" if y.dim() == 1 else "multilabel"


def known_labels(y: Tensor) -> Tensor:
    """Return which labels are known, bool of the shape of y."""
    return ~torch.isnan(y) if y.is_floating_point() else y != MISSING


@dataclass(frozen=True)
class Schema:
    """What a model needs to know of a graph, and all that server and silos must agree on.

    Attributes:
        num_features: F.
        num_classes: as in `Graph`.
        task: as in `Graph`.
        class_names: names of the classes, or empty.
    """

    num_features: int
    num_classes: int
    task: LabelForm
    class_names: tuple[str, ...] = ()


def schema_of(graph: Graph) -> Schema:
    """Return the schema of a graph."""
    return Schema(graph.num_features, graph.num_classes, graph.task, graph.class_names)


def subgraph(graph: Graph, nodes: Tensor) -> Graph:
    """Return the graph induced by `nodes` (k,) int64, in that order."""
    local = torch.full((graph.num_nodes,), -1, dtype=torch.int64)
    local[nodes] = torch.arange(len(nodes))
    rows = graph.weighted_adj.select_rows(nodes)
    cols = local[rows.indices.long()]
    inside = cols >= 0
    values = None if rows.values is None else rows.values[inside]
    adj = CSR.from_pairs(rows.row[inside], cols[inside], (len(nodes), len(nodes)), values)
    x = graph.x.select_rows(nodes) if isinstance(graph.x, CSR) else graph.x[nodes]
    split = graph.split
    return replace(
        graph,
        adj=replace(adj, values=None),
        edge_weight=adj.values,
        x=x,
        y=graph.y[nodes],
        node_id=graph.node_id[nodes.numpy()],
        split=split and split.map(lambda mask: mask[nodes]),
        silo=None if graph.silo is None else graph.silo[nodes],
        columns={name: column[nodes] for name, column in graph.columns.items()},
    )


def largest_component(graph: Graph) -> Graph:
    """Return the largest connected component, nodes in their old order."""
    from scipy.sparse.csgraph import connected_components

    _, label = connected_components(graph.adj.scipy(np.int8), directed=False)
    keep = label == np.bincount(label).argmax()
    return subgraph(graph, torch.from_numpy(np.flatnonzero(keep)))


def row_normalize(graph: Graph) -> Graph:
    """Return the graph with every node's features divided by their sum (rows of zeros stay)."""
    return replace(graph, x=normalized_rows(graph.x))


def normalized_rows(x: Features) -> Features:
    """Return features (n, F) with every row divided by its sum (rows of zeros stay)."""
    if isinstance(x, CSR):
        assert x.values is not None  # features always carry values
        total = torch.zeros(x.num_rows, dtype=x.values.dtype).index_add_(0, x.row, x.values)
        scale = torch.where(total == 0, torch.ones_like(total), 1 / total)
        return replace(x, values=x.values * scale[x.row])
    total = x.sum(dim=1, keepdim=True)
    return torch.where(total == 0, x, x / total)


def fingerprint(graph: Graph) -> str:
    """Return 16 hex digits (BLAKE2b) of everything that training reads of a graph."""
    digest = hashlib.blake2b(digest_size=8)
    x = graph.x
    parts = [graph.adj.indptr, graph.adj.indices, graph.y]
    parts += [x] if isinstance(x, Tensor) else [x.indptr, x.indices]
    if isinstance(x, CSR) and x.values is not None:
        parts.append(x.values)
    if graph.edge_weight is not None:
        parts.append(graph.edge_weight)
    if graph.split is not None:
        parts += [graph.split.train, graph.split.val, graph.split.test]
    for name, column in sorted(graph.columns.items()):
        digest.update(f"{name};".encode())
        parts.append(column)
    for part in parts:
        digest.update(f"{part.dtype} {tuple(part.shape)};".encode())
        digest.update(part.contiguous().numpy().data)
    digest.update(f"{graph.num_classes} {graph.node_id.dtype};".encode())
    digest.update(graph.node_id.tobytes())
    return digest.hexdigest()
