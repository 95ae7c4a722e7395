"""The graph of whatever a user has in memory: a `Graph`, PyG data, or a networkx graph."""

import sys
from typing import Any

from silograph.core.errors import DataError
from silograph.graph.graph import Graph
from silograph.graph.read.arrays import from_networkx


def graph_of(value: Any) -> Graph:
    """Return the graph of PyG data, of a list of them, or of a networkx graph.

    Raises:
        DataError: something else, or as by `from_pyg` and `from_networkx`.
    """
    if isinstance(value, Graph):
        return value
    if isinstance(value, list | tuple) or _is_of(value, "torch_geometric"):
        from silograph.graph.read.pyg_data import from_pyg  # which imports PyG

        return from_pyg(value)
    if _is_of(value, "networkx"):
        return from_networkx(value)
    raise DataError(
        f"expected a Graph, PyG Data, a networkx graph, or the name or path of one, got "
        f"{type(value).__name__}: see sg.from_arrays"
    )


def is_clients(value: object) -> bool:
    """Whether a graph is a list of the clients' own graphs."""
    return isinstance(value, list | tuple)


def _is_of(value: object, package: str) -> bool:
    """Whether a value is of a class of a package or of one that inherits from it."""
    return package in sys.modules and any(
        base.__module__.partition(".")[0] == package for base in type(value).__mro__
    )
