"""A graph prepared, cut into clients and split, as a simulation has it."""

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.graph.graph import Graph, Split, largest_component, row_normalize, subgraph
from silograph.graph.node_key import key_order
from silograph.graph.partition.options import READ_BY, CutOptions
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
    return row_normalize(graph) if config.normalize == "row" else graph


def cut_graph(config: RunConfig, graph: Graph) -> Cut:
    """Prepare, cut and split a graph; seeds must be resolved.

    Raises:
        SilographError: the graph, the cut or the split cannot be used.
    """
    graph = as_used(config, graph)
    assert config.partition_seed is not None  # resolved
    assert config.split_seed is not None  # resolved
    clients = config.clients
    if clients is None and config.partition != "silo":
        clients = DEFAULT_CLIENTS
    partition = make_partition(
        graph,
        config.partition,
        clients=clients,
        key=Key.of(config.partition_seed).fold("partition"),
        options=cut_options(config),
    )
    split = choose_split(graph, partition, config.split, Key.of(config.split_seed).fold("split"))
    return trainable(config, Cut(graph, partition, split))


def trainable(config: RunConfig, cut: Cut) -> Cut:
    """Return a cut that has something to train on; raise `DataError` for another."""
    if not bool((cut.split.train & cut.graph.labelled).any()):
        raise DataError(
            f"expected at least one labelled training node, got none in {cut.graph.name} with "
            f"split {config.split!r}: give a larger training share"
        )
    return cut
