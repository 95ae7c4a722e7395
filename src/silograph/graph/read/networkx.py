"""Graphs from networkx graphs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from silograph.core.errors import DataError
from silograph.graph.graph import Graph
from silograph.graph.read.arrays import array_of, from_arrays, split_of

if TYPE_CHECKING:
    import networkx as nx

ROW = (list, tuple, np.ndarray, Tensor)


def from_networkx(
    graph: "nx.Graph[Any]",
    *,
    x: str = "x",
    y: str = "y",
    silo: str | None = None,
    split: str | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] = (),
    name: str = "graph",
) -> Graph:
    """Return the graph of a networkx graph (directed and multigraphs too).

    Node names become the public keys: integers stay, anything else is written as a string. The
    `weight` of an edge is its weight, 1 where it has none.

    Args:
        graph: nodes in their networkx order.
        x: node attribute with the features: a number or F numbers. Where no node has it, the
            nodes have no features.
        y: node attribute with the label, as in `from_arrays`; absent or None is missing.
        silo: node attribute that says who holds the node, or None.
        split: node attribute with "train", "val", "test" or nothing, or None.
        num_classes: as in `from_arrays`.
        class_names: as in `from_arrays`.
        name: as in `from_arrays`.

    Raises:
        DataError: as in `from_arrays`; a node lacks features or a silo.
    """
    import networkx as nx

    if not isinstance(graph, nx.Graph):
        raise DataError(f"expected a networkx graph, got {type(graph).__name__}")
    nodes = dict(graph.nodes(data=True))
    row = {node: i for i, node in enumerate(nodes)}
    pairs = [(row[a], row[b]) for a, b in graph.edges()]
    whole = all(isinstance(node, int | np.integer) for node in nodes)
    weights = [weight for _, _, weight in graph.edges(data="weight", default=1)]
    bare = nodes and not any(x in attributes for attributes in nodes.values())
    return from_arrays(
        edge_index=np.array(pairs, dtype=np.int64).reshape(-1, 2).T,
        edge_weight=weights,
        x=None if bare else _stacked_features(nodes, x),
        y=_level([attributes.get(y) for attributes in nodes.values()]),
        num_classes=num_classes,
        node_id=list(nodes) if whole else [str(node) for node in nodes],
        split=None if split is None else split_of(_attribute(nodes, split, "")),
        silo=None if silo is None else _attribute(nodes, silo),
        class_names=class_names,
        name=name,
    )


def _attribute(nodes: dict[Any, dict[str, Any]], key: str, default: str | None = None) -> list[Any]:
    values = [attributes.get(key, default) for attributes in nodes.values()]
    for node, value in zip(nodes, values, strict=True):
        if value is None:
            raise DataError(f"expected attribute {key!r} on every node, got none on node {node!r}")
    return values


def _stacked_features(nodes: dict[Any, dict[str, Any]], key: str) -> np.ndarray:
    rows: list[np.ndarray] = []
    for node, value in zip(nodes, _attribute(nodes, key), strict=True):
        row = np.atleast_1d(array_of(value, f"attribute {key!r} of node {node!r}"))
        if rows and row.shape != rows[0].shape:
            raise DataError(
                f"expected {rows[0].size} numbers in attribute {key!r} of node {node!r}, "
                f"got shape {row.shape}: give every node the same features"
            )
        rows.append(row)
    return np.stack(rows) if rows else np.zeros((0, 1))


def _level(labels: list[Any]) -> list[Any]:
    """Write out the missing labels of a multi-label task, None, as T missing bits."""
    widths = [len(label) for label in labels if isinstance(label, ROW)]
    if not widths:
        return labels
    return [[None] * widths[0] if label is None else label for label in labels]
