"""The graph of whatever a user has in memory: a `Graph`, PyG data, or a networkx graph."""

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import DataError, reword_error
from silograph.core.numeric_state import standard_numerics
from silograph.graph.csr import CSR
from silograph.graph.graph import Features, Graph, LabelForm, with_directions
from silograph.graph.read.arrays import PARTS, ArrayInput, array_of, from_arrays, split_of
from silograph.graph.read.columns import (
    NUMBERS,
    MissingValues,
    NaValues,
    missing_values,
    read_column,
)
from silograph.graph.read.tables import FEATURES, NAMES, RepeatedEdges, chosen_weight, report_unused

if TYPE_CHECKING:
    import networkx as nx
    from torch_geometric.data import Data


# --- Graphs from networkx graphs -----------------------------------------------------------------


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
    repeated_edges: RepeatedEdges = "mean",
    num_classes: int | None = None,
    class_names: Sequence[str] = (),
    na_values: NaValues = (),
    name: str = "graph",
) -> Graph:
    """Return the graph of a networkx graph (multigraphs too); a directed one keeps directions.

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
        repeated_edges: what an edge of a multigraph, or one in both directions, weighs, as in
            `from_arrays`.
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
    result = from_arrays(
        edge_index=np.array(pairs, dtype=np.int64).reshape(-1, 2).T,
        edge_weight=weights,
        repeated_edges=repeated_edges,
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
    return result if graph.is_directed() else replace(result, directed_weight=None)


def _report_other_attributes(
    name: str, nodes: dict[Any, dict[str, Any]], x: str, others: set[str | None]
) -> None:
    """Report attributes that may be the features if no node has the named one."""
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


def graph_of(value: Any, repeated_edges: RepeatedEdges = "mean") -> Graph:
    """Return the graph of PyG data, of a list of them, or of a networkx graph.

    Args:
        value: the data; a `Graph` is returned as it is.
        repeated_edges: what an edge weighs that is listed several times, see `from_arrays`.

    Raises:
        DataError: something else, or as by `from_pyg` and `from_networkx`.
    """
    if isinstance(value, Graph):
        return value
    if is_clients(value) or _is_of(value, "torch_geometric"):
        return from_pyg(value, repeated_edges=repeated_edges)
    if _is_of(value, "networkx"):
        return from_networkx(value, repeated_edges=repeated_edges)
    remedy = (
        "write its tables as CSV files and use sg.from_csv(nodes=..., edges=...), or give columns "
        "to sg.from_arrays: x=table[[...]].to_numpy(), y=table[...].to_numpy(), edge_index=..."
        if _is_of(value, "pandas") or _is_of(value, "polars")
        else "see sg.from_arrays, sg.from_pyg, sg.from_networkx, sg.from_csv"
    )
    raise DataError(
        f"expected a Graph, or the name or path of one, got {type(value).__name__}: {remedy}"
    )


def is_clients(value: object) -> bool:
    """Whether a value is a list with PyG data, the graphs of clients."""
    return isinstance(value, list | tuple) and any(_is_of(v, "torch_geometric") for v in value)


def _is_of(value: object, package: str) -> bool:
    """Whether a value is of a class of a package or of one that inherits from it."""
    return package in sys.modules and any(
        base.__module__.partition(".")[0] == package for base in type(value).__mro__
    )


# --- pyg data ------------------------------------------------------------------------------------
# Graphs from PyG data in memory: one `Data`, or a list of them, each the graph of one client.
#
# n: nodes.


# Fields of a Data that are read, or whose loss is reported elsewhere.
USED = {"x", "y", "edge_index", "num_nodes", *(f"{part}_mask" for part in PARTS), *NAMES}


@standard_numerics()
def from_pyg(
    data: Any,
    *,
    num_classes: int | None = None,
    node_id: "ArrayInput | None" = None,
    silo: "ArrayInput | None" = None,
    silo_names: Sequence[str] = (),
    repeated_edges: RepeatedEdges = "mean",
    class_names: Sequence[str] = (),
    task: LabelForm | None = None,
    na_values: NaValues = (),
    name: str = "graph",
) -> Graph:
    """Return the graph of a `torch_geometric.data.Data`, or of a list with one for each client.

    A `Data` has `edge_index`, from sources to targets, `y` and mostly `x`. `num_nodes` has to be
    the number of rows of `x`, or of `y` where there is no `x`. `train_mask`, `val_mask` and
    `test_mask`, each (n,) bool, become the split where all three are there. `edge_weight` (or an
    `edge_attr` of one floating point number >= 0 an edge) becomes the edges' weights. Other values
    of edges are not used; that is reported where they differ from edge to edge. Any other field,
    such as `pos` or `batch`, is not used either, which is reported.

    Of a list, each `Data` is the graph of one silo, and no edge joins two of them: `run` with
    `partition="silo"` trains one client on each. Their names are `silo_names`, by default
    client_00, client_01 and so on. All have the same features and label their nodes alike.

    The other arguments and the errors are those of `from_arrays`; errors in a list name the `Data`.
    """
    if isinstance(data, list | tuple):
        if silo is not None:
            raise DataError("expected no silo beside a list of Data, got one: each is a silo")
        members = [_checked(each, f"{_place(i)}: ") for i, each in enumerate(data)]
        arrays, directed_weight = _joined(members, tuple(silo_names), repeated_edges)
    else:
        members, directed_weight = [_checked(data)], None
        arrays = _arrays(data) | {"silo": silo, "silo_names": silo_names}
        arrays["repeated_edges"] = repeated_edges
    report_unused(name, dict.fromkeys(key for each in members for key in _weight(each)[1]))
    others = dict.fromkeys(key for each in members for key in each.to_dict() if key not in USED)
    if others:
        LOG.warning("%s: fields of the Data are not used: %s", name, ", ".join(others))
    graph = from_arrays(
        **arrays,
        num_classes=num_classes,
        node_id=node_id,
        class_names=class_names,
        task=task,
        na_values=na_values,
        name=name,
    )
    return graph if directed_weight is None else replace(graph, directed_weight=directed_weight)


def _checked(data: Any, where: str = "") -> "Data":
    """Return data that have what a graph needs."""
    from torch_geometric.data import Data, HeteroData

    if isinstance(data, HeteroData):
        kinds = ", ".join(map(str, data.node_types)) or "none"
        raise DataError(
            f"{where}expected a torch_geometric.data.Data, got HeteroData, which has several kinds "
            f"of nodes ({kinds}): silograph reads one kind; make a Data of one of them with its "
            "x, y and edge_index, or use data.to_homogeneous()"
        )
    if not isinstance(data, Data):
        raise DataError(
            f"{where}expected a torch_geometric.data.Data, got {type(data).__name__}: "
            "of a dataset pass its first graph, dataset[0]"
        )
    for key in ("edge_index", "y"):
        if data.get(key) is None:
            remedy = "set it, or use from_arrays"
            if key == "edge_index" and data.get("adj_t") is not None:
                remedy = "leave the transform ToSparseTensor out, which makes adj_t of it"
            raise DataError(f"{where}expected data.{key}, got None: {remedy}")
    x, y = data.get("x"), data.y
    rows = len(y if x is None else x) if getattr(y if x is None else x, "ndim", 0) else None
    count = data.get("num_nodes")
    if count is not None and rows is not None and int(count) != rows:
        raise DataError(
            f"{where}expected data.num_nodes {rows}, the rows of {'y' if x is None else 'x'}, got "
            f"{int(count)}: give each node a row, or correct num_nodes"
        )
    missing_masks = [key for key in _masks(data) if data.get(key) is None]
    if 0 < len(missing_masks) < len(PARTS):
        raise DataError(
            f"{where}expected all of {', '.join(_masks(data))} or none, got no {missing_masks[0]}: "
            "add it (all False will do) or delete the others"
        )
    return data


def _masks(data: "Data") -> dict[str, Any]:
    return {f"{part}_mask": data.get(f"{part}_mask") for part in PARTS}


def _weight(data: "Data") -> tuple[str | None, list[str]]:
    """Return the name of the weights of edges, and of values of edges that are not used."""
    attributes = {key: data.get(key) for key in NAMES}
    return chosen_weight({k: v.detach().cpu() for k, v in attributes.items() if torch.is_tensor(v)})


def _arrays(data: "Data") -> dict[str, Any]:
    """Return the arguments of `from_arrays` that data give."""
    masks, weight = list(_masks(data).values()), _weight(data)[0]
    return {
        "edge_index": data.edge_index,
        "edge_weight": None if weight is None else data[weight],
        "x": data.get("x"),
        "y": data.y,
        "split": None if masks[0] is None else masks,
    }


def _joined(
    members: "Sequence[Data]", names: tuple[str, ...], repeated_edges: RepeatedEdges
) -> tuple[dict[str, Any], Tensor | None]:
    """Return the arguments of `from_arrays` for the graphs of several clients side by side.

    Each edge is listed in both directions with the weight that `repeated_edges` makes of it.
    Weights of their directions are returned besides, as in `Graph`.
    """
    if not members:
        raise DataError("expected at least one Data in the list of clients, got none")
    if names and len(names) != len(members):
        raise DataError(
            f"expected a name for each of {len(members)} clients, got {len(names)} silo_names"
        )
    graphs = [_member(data, place, repeated_edges) for place, data in enumerate(members)]
    _check_alike(graphs)
    _check_edge_values(members)
    weighted = any(graph.edge_weight is not None for graph in graphs)
    parts = [graph.weighted_adj for graph in graphs]
    parts = [adj.to("cpu", torch.float64) for adj in parts] if weighted else parts
    adj = CSR.block_diagonal(parts)
    splits = [list(vars(graph.split).values()) for graph in graphs if graph.split is not None]
    width = max(2, len(str(len(graphs) - 1)))
    directed_weight = None
    if any(graph.is_directed for graph in graphs):
        ways = [with_directions(graph, symmetric=True).edge_weight for graph in graphs]
        weights = [weight[:, 0].nan_to_num(-1) for weight in ways if weight is not None]
        directed_weight = torch.cat(weights)
    arrays = {
        "edge_index": torch.stack([adj.row, adj.indices.long()]),
        "edge_weight": adj.values if weighted else None,
        "x": _stacked([graph.x for graph in graphs]),
        "y": np.concatenate([np.asarray(data.y.detach().cpu()) for data in members]),
        "split": [torch.cat(masks) for masks in zip(*splits, strict=True)] or None,
        "silo": np.repeat(np.arange(len(graphs)), [graph.num_nodes for graph in graphs]),
        "silo_names": names or [f"client_{place:0{width}d}" for place in range(len(graphs))],
    }
    return arrays, directed_weight


def _member(data: "Data", place: int, repeated_edges: RepeatedEdges) -> Graph:
    """Return the graph of one client, its labels left out: all clients number them together."""
    try:
        y = np.zeros(len(data.y), dtype=np.int64)
        return from_arrays(**_arrays(data) | {"y": y, "repeated_edges": repeated_edges})
    except DataError as error:
        raise reword_error(error, f"{_place(place)}: {error}", DataError) from None


def _check_edge_values(members: "Sequence[Data]") -> None:
    """Raise `DataError` where values of edges would be weights at some clients only."""
    with_values = [
        place for place, data in enumerate(members) if torch.is_tensor(data.get(FEATURES))
    ]
    others = [place for place in with_values if _weight(members[place])[0] != FEATURES]
    if others and len(others) < len(with_values):
        raise DataError(
            f"{_place(others[0])}: expected {FEATURES} of one floating point number >= 0 an edge, "
            "as other clients have for weights, got others: name weights edge_weight"
        )


def _check_alike(graphs: Sequence[Graph]) -> None:
    """Raise `DataError` unless all clients have the same features, and all or none a split."""
    for place, graph in enumerate(graphs):
        for what, value, first in (
            ("features", graph.num_features, graphs[0].num_features),
            ("sparse features", isinstance(graph.x, CSR), isinstance(graphs[0].x, CSR)),
            ("masks", graph.split is not None, graphs[0].split is not None),
        ):
            if value != first:
                raise DataError(
                    f"{_place(place)}: expected {what} as in Data 0 ({first}), got {value}: give "
                    "all clients the same"
                )


def _stacked(parts: Sequence[Features]) -> Features | None:
    """Return the features of all clients, one below the other; None where there are none."""
    sparse = [part for part in parts if isinstance(part, CSR)]
    if sparse:
        return CSR.stacked_rows(sparse)
    dense = torch.cat([part for part in parts if not isinstance(part, CSR)])
    return dense if dense.shape[1] else None


def _place(place: int) -> str:
    return f"Data {place} of the list"
