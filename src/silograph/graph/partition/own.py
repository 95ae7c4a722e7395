"""Cuts that users bring: the client of every node, in memory or in a CSV file.

n: nodes of the graph.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ConfigError, DataError, PartitionError
from silograph.core.text import count_of
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import Partition
from silograph.graph.read.tables import read_csv

NODE, CLIENT = "node", "client"  # columns of a file
GIVEN = "given:"  # prefix of `partition` in a config for a partition in memory


def is_partition_file(partition: str) -> bool:
    """Whether a partition is the path of a CSV file."""
    return partition.lower().endswith(".csv")


def names_clients(partition: str) -> bool:
    """Whether a partition itself says how many clients there are."""
    return partition == "silo" or partition.startswith(GIVEN) or is_partition_file(partition)


def check_no_path(partition: str) -> None:
    """Raise `ConfigError` for a value that looks like a file but has no known ending."""
    if "/" in partition or os.sep in partition or os.path.exists(partition):
        raise ConfigError(
            f"expected a partition by name, or a file of clients whose name ends in .csv, got "
            f"{partition!r}: name the file FILE.csv"
        )


def assigned(graph: Graph, clients: Any, what: str = "partition") -> Graph:
    """Return the graph whose silos are the clients (n,) of its nodes.

    Args:
        graph: any silos of its own are forgotten.
        clients: (n,) whole numbers from 0, which make client_00, client_01 and so on, or names,
            which are sorted.
        what: what it is called in errors.

    Raises:
        PartitionError: not one client for every node.
    """
    codes, n = _array(clients, what), graph.num_nodes
    if codes.shape != (n,):
        raise PartitionError(
            f"expected a client for each of the {n} nodes of {graph.name!r} as {what}, got shape "
            f"{codes.shape}: give one number or name a node"
        )
    if codes.dtype.kind not in "iuU":
        raise PartitionError(
            f"expected whole numbers or names of clients in {what}, got dtype {codes.dtype}: give "
            "every node one"
        )
    values, index = np.unique(codes, return_inverse=True)
    if (codes.dtype.kind != "U" and values[0] < 0) or values[0] == "":
        raise PartitionError(
            f"expected a client for every node in {what}, got {values[0].item()!r} at node "
            f"{int(np.flatnonzero(codes == values[0])[0])}: number clients from 0, or name them"
        )
    silo = torch.from_numpy(index.astype(np.int64))
    return replace(graph, silo=silo, silo_names=_names(values.tolist()))


def read_partition(graph: Graph, path: Path) -> Graph:
    """Return the graph whose silos are the clients that a CSV file gives its nodes.

    Args:
        graph: any silos of its own are forgotten.
        path: columns `node`, a public key, and `client`, a number or a name; a line a node.

    Raises:
        DataError: names the file, line and column.
    """
    table = read_csv(path)
    if sorted(table.header) != sorted((NODE, CLIENT)):
        raise DataError(
            f"{table.head}: expected columns {NODE},{CLIENT}, got {','.join(table.header)[:200]}"
        )
    place = {str(key): row for row, key in enumerate(graph.node_id.tolist())}
    client_of_node: list[str | None] = [None] * graph.num_nodes
    row_by_key: dict[str, int] = {}
    for row, (key, client) in enumerate(zip(table.column(NODE), table.column(CLIENT), strict=True)):
        if key not in place:
            raise table.wrong(row, NODE, f"a node of {graph.name!r}", key)
        if key in row_by_key:
            raise table.wrong(
                row, NODE, f"a node not yet on line {table.lines[row_by_key[key]]}", key
            )
        if not client:
            raise table.wrong(row, CLIENT, "a client", client)
        row_by_key[key] = row
        client_of_node[place[key]] = client
    missing_rows = [row for row, client in enumerate(client_of_node) if client is None]
    if missing_rows:
        raise DataError(
            f"{path}: expected a client for every node of {graph.name!r}, got none for node "
            f"{graph.node_id[missing_rows[0]]!s} ({count_of(len(missing_rows), 'such node')}): "
            f"add a line for each"
        )
    names = [str(client) for client in client_of_node]
    numbers = all(name.isascii() and name.isdigit() and len(name) < 19 for name in names)
    return assigned(graph, [int(name) for name in names] if numbers else names, str(path))


def of_silos(graph: Graph) -> Partition:
    """Return the partition that gives each silo of a graph to a client of its name."""
    assert graph.silo is not None  # assigned
    nodes = tuple((graph.silo == c).nonzero()[:, 0] for c in range(len(graph.silo_names)))
    return Partition(graph.silo_names, nodes, graph.num_nodes, "given")


def owner_of_each(partition: Partition) -> Tensor | None:
    """Return the client (n,) of every node; None where a node has none or several."""
    is_plain = len(partition.copies) == partition.num_nodes == len(torch.unique(partition.copies))
    return partition.owner if is_plain and partition.dropped is None else None


def _names(values: Sequence[Any]) -> tuple[str, ...]:
    """Return names of clients: numbers become client_00, client_01, ..."""
    if isinstance(values[0], str):
        return tuple(values)
    width = max(2, len(str(values[-1])))
    return tuple(f"client_{value:0{width}d}" for value in values)


def _array(clients: Any, what: str) -> np.ndarray:
    """Return clients as an array; words among objects as words."""
    try:
        codes = np.asarray(clients.detach().cpu() if isinstance(clients, Tensor) else clients)
    except (TypeError, ValueError, RuntimeError):
        raise PartitionError(
            f"expected a client for every node as {what}, got {type(clients).__name__} that numpy "
            "cannot read as one array"
        ) from None
    if codes.dtype.kind == "O" and all(isinstance(code, str) for code in codes.ravel().tolist()):
        return codes.astype(np.str_)
    return codes
