"""Graphs from networkx graphs."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.numeric_state import standard_numerics
from silograph.graph.graph import Graph
from silograph.graph.read.arrays import array_of, from_arrays, split_of
from silograph.graph.read.columns import (
    NUMBERS,
    MissingValues,
    NaValues,
    missing_values,
    read_column,
)

if TYPE_CHECKING:
    import networkx as nx

LOG = logging.getLogger("silograph")
SHOWN = 9  # attributes in a line
ROW = (list, tuple, np.ndarray, Tensor)


@standard_numerics()
def from_networkx(
    graph: "nx.Graph[Any]",
    *,
    x: str | Sequence[str] = "x",
    y: str = "y",
    silo: str | None = None,
    split: str | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] = (),
    na_values: NaValues = (),
    name: str = "graph",
) -> Graph:
    """Return the graph of a networkx graph (directed and multigraphs too).

    Node names become the public keys: integers stay, anything else is written as a string. The
    `weight` of an edge is its weight, 1 where it has none.

    Args:
        graph: nodes in their networkx order.
        x: node attribute with the features: a number or F numbers. Or several attributes of one
            number each, `["age", "income"]`, which name the features; numbers may be text, as
            some files have them. Where no node has it, the nodes have no features.
        y: node attribute with the label, as in `from_arrays`; absent or None is missing.
        silo: node attribute that says who holds the node, or None.
        split: node attribute with "train", "val", "test" or nothing, or None.
        num_classes: as in `from_arrays`.
        class_names: as in `from_arrays`.
        na_values: as in `from_arrays`.
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
    weights = [
        1.0 if weight is None else weight for _, _, weight in graph.edges(data="weight", default=1)
    ]
    missing = missing_values(na_values)
    present = {key for attributes in nodes.values() for key in attributes}
    bare = isinstance(x, str) and x not in present
    if isinstance(x, str) and bare:
        _report_other_attributes(name, nodes, x, {y, silo, split})
    if bare or not nodes:
        features = None
    elif isinstance(x, str):
        features = _stacked_features(nodes, x)
    else:
        features = np.stack([_scalar_column(nodes, key, missing) for key in x], axis=1)
    if nodes and y not in present and num_classes is None:
        others = ", ".join(sorted(map(str, present))[:SHOWN]) or "none"
        raise DataError(
            f"expected a node attribute {y!r} with labels, got attributes {others}: name yours, "
            'such as y="kind", or give num_classes if no label is known'
        )
    return from_arrays(
        edge_index=np.array(pairs, dtype=np.int64).reshape(-1, 2).T,
        edge_weight=weights,
        x=features if nodes else np.zeros((0, 1)),
        feature_names=() if isinstance(x, str) else x,
        y=_level([attributes.get(y) for attributes in nodes.values()]),
        num_classes=num_classes,
        node_id=list(nodes) if whole else [str(node) for node in nodes],
        split=None if split is None else split_of(_attribute(nodes, split, "")),
        silo=None if silo is None else _attribute(nodes, silo),
        class_names=class_names,
        na_values=na_values,
        name=name,
    )


def _report_other_attributes(
    name: str, nodes: dict[Any, dict[str, Any]], x: str, others: set[str | None]
) -> None:
    """Report attributes that may be meant as features where no node has the one that is named."""
    counts = Counter(
        key
        for attributes in nodes.values()
        for key, value in attributes.items()
        if isinstance(value, NUMBERS) and key not in others
    )
    columns = [str(key) for key, count in counts.items() if count == len(nodes)]
    if columns:
        LOG.warning(
            "%s: nodes have no features, as none has the attribute %r; for those that they have "
            "use from_networkx(graph, x=%r)",
            name,
            x,
            columns[:SHOWN],
        )


def _scalar_column(
    nodes: dict[Any, dict[str, Any]], key: str, missing: MissingValues
) -> np.ndarray:
    """Return an attribute of one number a node, (n,) float64."""
    cells = _attribute(nodes, key)
    names = list(nodes)

    def place(row: int) -> str:
        return f"attribute {key!r} of node {names[row]!r}"

    return read_column(cells, "number", missing, place=place, from_text=True)


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
    return np.stack(rows)


def _level(labels: list[Any]) -> list[Any]:
    """Write out the missing labels of a multi-label task, None, as T missing bits."""
    widths = [len(label) for label in labels if isinstance(label, ROW)]
    if not widths:
        return labels
    return [[None] * widths[0] if label is None else label for label in labels]
