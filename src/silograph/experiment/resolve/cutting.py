"""A graph prepared, cut into clients and split, as a simulation has it."""

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, DataError, PartitionError
from silograph.core.key import Key
from silograph.experiment.resolve.own_partition import (
    GIVEN,
    CutGraph,
    check_given_partition,
    names_clients,
)
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.graph.features import with_features
from silograph.graph.graph import Graph, Split, largest_component, row_normalize, subgraph
from silograph.graph.node_key import key_order
from silograph.graph.partition.options import READ_BY, CutOptions
from silograph.graph.partition.own import read_partition
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import choose_split

DEFAULT_CLIENTS = 10


@dataclass(frozen=True, eq=False)
class Cut:
    """A graph as a simulation uses it: cut into clients, with its split.

    Attributes:
        graph: all of it.
        partition: who holds what.
        split: what for.
        silos: hash of the silos' own data where it came from silos, else nothing.
    """

    graph: Graph
    partition: Partition
    split: Split
    silos: str = ""


def held_block(cut: Cut, share: float, key: Key) -> ClientBlock:
    """Return a share of the nodes, drawn, with the edges among them, as one client.

    Raises:
        DataError: no node that trains is among them.
    """
    order = key_order(cut.graph.node_id, key)
    nodes = order[: max(1, round(share * len(order)))].sort().values
    split = Split(*(part[nodes] for part in vars(cut.split).values()))
    graph = subgraph(cut.graph, nodes)
    if not bool((split.train & graph.labelled).any()):
        raise DataError(
            f"expected a labelled training node among those that the server holds, got none of "
            f"{len(nodes)}: give a larger share (--option server_share=SHARE)"
        )
    return make_block(graph, whole(graph, "server"), split)[0]


def cut_options(config: RunConfig) -> CutOptions:
    """Return what a config says of the cut."""
    names = (f.name for f in dataclasses.fields(CutOptions))
    return CutOptions(**{name: getattr(config, name) for name in names})


def check_cut_options(given: Iterable[str], partitions: Collection[object]) -> None:
    """Raise `ConfigError` for an option of a cut that none of the ways of cutting reads.

    Args:
        given: names of the fields that were given on purpose.
        partitions: the ways of cutting.
    """
    for name in given:
        readers = READ_BY.get(name, ())
        if readers and not set(readers) & set(partitions):
            raise ConfigError(
                f"expected {name} with partition {' or '.join(readers)} only, got partition "
                f"{', '.join(map(str, partitions))}: leave {name} out, or change the partition"
            )


def as_used(config: RunConfig, graph: Graph) -> Graph:
    """Return the part of a graph that a config keeps, its features as the config wants them."""
    if config.largest_component:
        graph = largest_component(graph)
    graph = with_features(graph, config.features)
    return row_normalize(graph) if config.normalize == "row" else graph


def check_features(config: RunConfig) -> None:
    """Raise `ConfigError` for options that do not go with features that are made."""
    if config.features == "degree" and config.normalize == "row":
        raise ConfigError(
            "expected normalize none with features degree, got row: a single feature divided by "
            "itself is 1 at every node; leave normalize out"
        )
    if "degree" in config.features and config.drop_edges:
        raise ConfigError(
            f"expected no drop_edges with features {config.features}, got {config.drop_edges}: a "
            "silo cannot count edges that it has lost; use constant, or leave drop_edges out"
        )


def cut_graph(config: RunConfig, data: Graph | CutGraph) -> Cut:
    """Prepare, cut and split a graph; seeds must be resolved.

    Raises:
        SilographError: the graph, the cut or the split cannot be used.
    """
    if isinstance(data, CutGraph):
        graph, partition = as_used(config, data.graph), data.partition
        _check_as_given(config, partition)
    else:
        graph, partition = _partitioned(config, data)
    nowhere = int((partition.owner < 0).sum())
    if "degree" in config.features and nowhere:
        raise PartitionError(
            f"expected every node at a client with features {config.features}, got {nowhere} at "
            "none: silos cannot count neighbors that nobody holds; use constant"
        )
    assert config.split_seed is not None  # resolved
    split = choose_split(graph, partition, config.split, Key.of(config.split_seed).fold("split"))
    return trainable(config, Cut(graph, partition, split))


def _partitioned(config: RunConfig, graph: Graph) -> tuple[Graph, Partition]:
    """Return the graph as it is used, and how the config cuts it."""
    method, clients = config.partition, config.clients
    if names_clients(method) and method != "silo":
        if method.startswith(GIVEN):
            check_given_partition(graph, method)
        else:
            graph = read_partition(graph, Path(method).expanduser())
        method = "silo"
    elif clients is None and method != "silo":
        clients = DEFAULT_CLIENTS
    graph = as_used(config, graph)
    assert config.partition_seed is not None  # resolved
    key = Key.of(config.partition_seed).fold("partition")
    return graph, make_partition(
        graph, method, clients=clients, key=key, options=cut_options(config)
    )


def _check_as_given(config: RunConfig, partition: Partition) -> None:
    """Raise `ConfigError` for options that do not go with a partition that is a value."""
    if config.partition != f"{GIVEN}{partition.hash}":
        raise ConfigError(f"expected the partition {config.partition}, got another in memory")
    for name in ("largest_component", "drop_edges"):
        if getattr(config, name):
            raise ConfigError(
                f"expected a partition that is used as it is, got {name}={getattr(config, name)}: "
                "leave it out, or cut the graph that is meant"
            )
    if config.clients not in (None, len(partition.ids)):
        raise ConfigError(
            f"expected {len(partition.ids)} clients, as the partition has, got {config.clients}: "
            "leave the number out"
        )


def trainable(config: RunConfig, cut: Cut) -> Cut:
    """Return a cut that has something to train on; raise `DataError` for another."""
    if not bool((cut.split.train & cut.graph.labelled).any()):
        raise DataError(
            f"expected at least one labelled training node, got none in {cut.graph.name} with "
            f"split {config.split!r}: give a larger training share"
        )
    return cut
