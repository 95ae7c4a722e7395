"""The graph of whatever a user has in memory: a `Graph`, PyG data, or a networkx graph."""

import sys
from typing import Any

from silograph.core.errors import DataError
from silograph.graph.graph import Graph
from silograph.graph.read.networkx import from_networkx


def graph_of(value: Any) -> Graph:
    """Return the graph of PyG data, of a list of them, or of a networkx graph.

    Raises:
        DataError: something else, or as by `from_pyg` and `from_networkx`.
    """
    if isinstance(value, Graph):
        return value
    if is_clients(value) or _is_of(value, "torch_geometric"):
        from silograph.graph.read.pyg_data import from_pyg  # which imports PyG

        return from_pyg(value)
    if _is_of(value, "networkx"):
        return from_networkx(value)
    mend = (
        "write its tables as CSV files and use sg.from_csv(nodes=..., edges=...), or give columns "
        "to sg.from_arrays: x=table[[...]].to_numpy(), y=table[...].to_numpy(), edge_index=..."
        if _is_of(value, "pandas") or _is_of(value, "polars")
        else "see sg.from_arrays, sg.from_pyg, sg.from_networkx, sg.from_csv"
    )
    raise DataError(
        f"expected a Graph, or the name or path of one, got {type(value).__name__}: {mend}"
    )


def is_clients(value: object) -> bool:
    """Whether a value is a list with PyG data, the graphs of clients."""
    return isinstance(value, list | tuple) and any(_is_of(v, "torch_geometric") for v in value)


def _is_of(value: object, package: str) -> bool:
    """Whether a value is of a class of a package or of one that inherits from it."""
    return package in sys.modules and any(
        base.__module__.partition(".")[0] == package for base in type(value).__mro__
    )
