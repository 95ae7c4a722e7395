"""Partitions passed as values: clients of nodes, a `Partition`, or a function of the graph.

A config contains `given:` and the hash of such a partition, so that a run or a line of a study can
be identified. Where every node has one client, the clients are stored in the graph, as its silos.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from silograph.core.config import RunConfig
from silograph.core.errors import CheckpointError, ConfigError, PartitionError
from silograph.federation.base import in_function
from silograph.graph.graph import Graph
from silograph.graph.partition.own import (
    assigned,
    is_partition_file,
    of_silos,
    owner_of_each,
    read_partition,
)
from silograph.graph.partition.partition import Partition
from silograph.graph.read.in_memory import graph_of, is_clients
from silograph.graph.silos.data import Silos

GIVEN = "given:"  # prefix of `partition` in a config for a partition in memory
PENDING = f"{GIVEN}in memory"  # until the graph is loaded and the hash is known


@dataclass(frozen=True, eq=False)
class CutGraph:
    """A graph with a partition in which a node may be at several clients, or at none."""

    graph: Graph
    partition: Partition

    @property
    def overlapping(self) -> bool:
        """Whether several clients hold a node."""
        return len(torch.unique(self.partition.copies)) < len(self.partition.copies)


@dataclass(frozen=True, eq=False)
class CallArguments:
    """Graph and options of a call, in the form that a config can contain.

    Attributes:
        graph: the graph in memory, the silos, or the name or path of either.
        options: of the run; `partition` is text.
        partition: the partition where it is a value.
    """

    graph: Graph | Silos | str | os.PathLike[str] | None
    options: dict[str, Any]
    partition: Any = None


def parse_call_arguments(graph: Any, options: Mapping[str, Any]) -> CallArguments:
    """Parse graph and options of a call.

    Raises:
        ConfigError: a partition of another type, one beside a list of clients, or a seed of a
            cut that is there.
        DataError: a graph of another type, or one that cannot be used.
    """
    options = dict(options)
    partition = options.get("partition")
    if isinstance(partition, os.PathLike):
        options["partition"] = os.path.abspath(os.path.expanduser(os.fspath(partition)))
    elif partition is not None and not isinstance(partition, str):
        _check_kind(partition)
        if isinstance(partition, Partition) and options.get("partition_seed") is not None:
            raise ConfigError(
                "partition_seed: expected none with a Partition, which is cut already, got "
                f"{options['partition_seed']}: leave partition_seed out"
            )
        options["partition"] = PENDING
    if is_clients(graph) and options.setdefault("partition", "silo") != "silo":
        raise ConfigError(
            "expected no partition with a list of clients, got one: they are cut already; leave "
            "it out"
        )
    if graph is not None and not isinstance(graph, Silos | str | os.PathLike):
        graph = graph_of(graph)
    is_value = options.get("partition") == PENDING
    return CallArguments(graph, options, partition if is_value else None)


def _check_kind(partition: Any) -> None:
    is_array = isinstance(partition, list | tuple) or hasattr(partition, "__array__")
    if not (is_array or isinstance(partition, Partition) or callable(partition)):
        raise ConfigError(
            "expected a partition by name, FILE.csv, an array with the client of every node, a "
            f"Partition or a function of the graph, got {type(partition).__name__}"
        )


def apply_partition(
    data: Graph | Silos, partition: Any, config: RunConfig
) -> tuple[Graph | CutGraph, RunConfig]:
    """Return a graph with its partition, and the config that says its hash.

    Args:
        data: the graph.
        partition: the value.
        config: of the run.

    Raises:
        ConfigError: silos, which are cut already.
        PartitionError: the partition does not fit the graph.
    """
    if isinstance(data, Silos):
        raise ConfigError(
            "partition: expected none with silos, got one in memory: they are cut already"
        )
    if callable(partition) and not isinstance(partition, Partition):
        partition = _call_partition_function(partition, data)
    if isinstance(partition, Partition):
        if partition.num_nodes != data.num_nodes:
            raise PartitionError(
                f"expected a partition of the {data.num_nodes} nodes of {data.name!r}, got one of "
                f"{partition.num_nodes}: cut this graph itself"
            )
        cut_data: Graph | CutGraph = CutGraph(data, partition)
        owner = owner_of_each(partition)
        if owner is not None:
            cut_data = replace(data, silo=owner, silo_names=partition.ids)
    else:
        cut_data = assigned(data, partition)
        partition = of_silos(cut_data)
    return cut_data, replace(config, partition=f"{GIVEN}{partition.hash}")


def _call_partition_function(function: Callable[[Graph], Any], graph: Graph) -> Any:
    """Call a user's partition function on a graph.

    Raises:
        OpError: it failed: one line, which names it and the place in its file.
        PartitionError: it returned nothing.
    """
    name = getattr(function, "__name__", type(function).__name__)
    with in_function(function, f"partition function {name}"):
        clients_of_nodes = function(graph)
    if clients_of_nodes is None:
        raise PartitionError(
            f"expected the client of every node, or a Partition, from partition function {name}, "
            "got None: return one"
        )
    return clients_of_nodes


def restore_partition(data: Graph | Silos, partition: Any, config: RunConfig) -> Graph | CutGraph:
    """Return a graph with the partition of a resumed run.

    Raises:
        ConfigError: the run's partition was not in memory.
        CheckpointError: the partition differs from that of the run.
    """
    if not config.partition.startswith(GIVEN) or partition is None:
        raise ConfigError(
            f"expected no partition, for that of the run is {config.partition}, got one: leave it "
            "out"
        )
    cut_data, new_config = apply_partition(data, partition, config)
    if new_config.partition != config.partition:
        raise CheckpointError(
            f"expected the partition of the run, {config.partition}, got {new_config.partition}: "
            "going on would not give the numbers of an uninterrupted run"
        )
    return cut_data


def names_clients(partition: str) -> bool:
    """Whether a partition itself says how many clients there are."""
    return partition == "silo" or partition.startswith(GIVEN) or is_partition_file(partition)


def with_own_partition(config: RunConfig, data: Graph | CutGraph) -> Graph | CutGraph:
    """Return a graph whose nodes have the clients that a partition of the user's gives them.

    The graph of another config, which is cut later, is returned as it is.

    Raises:
        ConfigError: the partition is not in memory, or does not go with the other options.
        DataError: the file of a partition cannot be used.
    """
    if isinstance(data, CutGraph):
        _check_in_memory_partition(config, data.partition)
    elif config.partition.startswith(GIVEN):
        check_given_partition(data, config.partition)
        _check_num_clients(config, len(data.silo_names))
    elif is_partition_file(config.partition):
        data = read_partition(data, Path(config.partition).expanduser())
        _check_num_clients(config, len(data.silo_names))
    return data


def _check_in_memory_partition(config: RunConfig, partition: Partition) -> None:
    """Raise `ConfigError` for options that do not go with a partition that is a value."""
    if config.partition != f"{GIVEN}{partition.hash}":
        raise ConfigError(f"expected the partition {config.partition}, got another in memory")
    for name in ("largest_component", "drop_edges"):
        if getattr(config, name):
            raise ConfigError(
                f"expected a partition that is used as it is, got {name}={getattr(config, name)}: "
                "leave it out, or cut the graph that is meant"
            )
    _check_num_clients(config, len(partition.ids))


def _check_num_clients(config: RunConfig, clients: int) -> None:
    """Raise `ConfigError` for another number of clients than that of the user's partition."""
    if config.clients not in (None, clients):
        raise ConfigError(
            f"clients: expected {clients}, as the partition has, got {config.clients}: leave "
            "clients out"
        )


def check_given_partition(graph: Graph, partition: str) -> None:
    """Raise `ConfigError` unless a graph carries the in-memory partition of a config."""
    if graph.silo is None or f"{GIVEN}{of_silos(graph).hash}" != partition:
        raise ConfigError(
            f"expected the partition {partition} of the run, got none: it was made in memory; use "
            "sg.run(..., partition=...), or sg.resume(DIR, partition=...) to go on"
        )
