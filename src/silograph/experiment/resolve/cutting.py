"""A graph prepared, cut into clients and split, as a simulation has it."""

import dataclasses
from dataclasses import dataclass, replace

import torch

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, DataError, PartitionError
from silograph.core.key import Key
from silograph.core.payload import offsets, owners
from silograph.core.rating_scale import ends_of
from silograph.core.resolved_config import ResolvedConfig
from silograph.exchange.statistics import SumSpec, fit_from_sums
from silograph.experiment.resolve.edge_weights import with_edges
from silograph.experiment.resolve.own_partition import (
    CutGraph,
    names_clients,
    with_own_partition,
)
from silograph.experiment.resolve.parts import Chosen, choose_parts
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.graph.block.halo import Route
from silograph.graph.column_statistics import (
    EDGE_WEIGHTS,
    FEATURES,
    ClientSums,
    ColumnStatistics,
    dense_columns,
    standardize,
    sum_by_client,
    sum_edge_weights,
)
from silograph.graph.datasets import load
from silograph.graph.features import (
    narrowing_problem,
    row_problem,
    scale_problem,
    with_features,
)
from silograph.graph.generated.generate import ProgressCallback
from silograph.graph.graph import (
    Graph,
    LabelForm,
    Split,
    fingerprint,
    largest_component,
    row_normalize,
    subgraph,
)
from silograph.graph.measure.statistics import leaked_tests
from silograph.graph.node_key import key_order
from silograph.graph.partition.partition import Partition, Partitioner, make_partition
from silograph.graph.partition.split import choose_split, copies_split

DEFAULT_CLIENTS = 10
STANDARD = ("standard", "standard_client")  # values of `normalize` that fit statistics


@dataclass(frozen=True, eq=False)
class Cut:
    """A graph as a simulation uses it: cut into clients, with its split.

    Attributes:
        graph: all of it.
        partition: who holds what.
        split: what for; where each client splits its own copies, what their owners say.
        copies: what each copy is for, masks over `partition.copies`, where that is told apart.
        silos: hash of the silos' own data where it came from silos, else nothing.
        given: fingerprint of the graph before its features were standardized or its weights of
            edges scaled, else nothing.
        statistics: what standardized them: (F,) of all clients, or (C, F) of each client; else
            None.
        narrowing: which features lose distinct values in the dtype of the run, as a line, or None.
        mean_edge_weight: what divided the weights of edges, else None.
    """

    graph: Graph
    partition: Partition
    split: Split
    silos: str = ""
    given: str = ""
    statistics: ColumnStatistics | None = None
    narrowing: str | None = None
    mean_edge_weight: float | None = None
    copies: Split | None = None

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the graph, features as silos have them before they are standardized."""
        return self.given or fingerprint(self.graph)

    @property
    def copies_split(self) -> Split:
        """What each copy that a client holds is for, masks over `partition.copies`."""
        return self.copies or self.split.map(lambda mask: mask[self.partition.copies])

    @property
    def test_leaks(self) -> int:
        """Copies that test while another copy of their node trains: 0 for a split made once."""
        return 0 if self.copies is None else leaked_tests(self.copies, self.partition)


def clients_block(cut: Cut, dtype: torch.dtype) -> tuple[ClientBlock, Route]:
    """Return the clients of a cut as one block, and who answers for each halo slot."""
    block, route = make_block(cut.graph, cut.partition, cut.split, dtype)
    known = cut.graph.labeled[cut.partition.copies]
    return replace(block, split=cut.copies_split.map(lambda mask: mask & known)), route


def held_block(cut: Cut, share: float, key: Key) -> ClientBlock:
    """Return a share of the nodes, drawn, with the edges among them, as one client.

    Raises:
        DataError: no node that trains is among them.
    """
    order = key_order(cut.graph.node_id, key)
    nodes = order[: max(1, round(share * len(order)))].sort().values
    split = Split(*(part[nodes] for part in vars(cut.split).values()))
    graph = subgraph(cut.graph, nodes)
    if not bool((split.train & graph.labeled).any()):
        raise DataError(
            f"expected a labeled training node among those that the server holds, got none of "
            f"{len(nodes)}: give a larger share (--option server_share=SHARE)"
        )
    return make_block(graph, whole(graph, "server"), split)[0]


def seed_of(config: RunConfig | ResolvedConfig, name: str) -> int:
    """Return the seed of a kind, which is that of training where it is not given."""
    own: int | None = getattr(config, name)
    return config.seed if own is None else own


def as_used(config: RunConfig | ResolvedConfig, graph: Graph) -> Graph:
    """Return the part of a graph that a config keeps, features as the config wants.

    Weights of edges stay as they are, or go: each client does with them what the config says.
    """
    graph = with_edges(graph, "ignore" if config.edge_weights == "ignore" else "use")
    if config.largest_component:
        graph = largest_component(graph)
    graph = with_features(graph, config.features)
    return row_normalize(graph) if config.normalize == "row" else graph


def scale_line(config: ResolvedConfig, graph: Graph) -> str | None:
    """Return what is wrong with the scale of a graph's features, as a run uses them, or None."""
    if config.features != "given" or config.normalize in STANDARD or graph.task == "rating":
        return None
    problem = row_problem if config.normalize == "row" else scale_problem
    return problem(graph.x, graph.feature_names)


def load_and_cut(config: RunConfig, report: ProgressCallback | None = None) -> Cut:
    """Load, cut and split the graph of a config; its options are checked before.

    Raises:
        SilographError: something about the config, the graph, the cut or the split cannot be used.
    """
    partition = choose_parts(config).partition
    graph = load(
        config.dataset,
        data_dir=config.data_dir,
        scale=config.scale,
        columns=config.columns,
        rating_scale=ends_of(config.rating_scale),
        na_values=config.na_values,
        report=report,
    )
    return cut_graph(config, with_own_partition(config, graph), partition)


def cut_graph(
    config: RunConfig | ResolvedConfig, data: Graph | CutGraph, partition: Chosen[Partitioner]
) -> Cut:
    """Prepare, cut and split a graph; one with a partition of the user's has it already.

    Raises:
        SilographError: the graph, the cut or the split cannot be used.
    """
    if isinstance(data, CutGraph):
        graph, cut = as_used(config, data.graph), data.partition
    else:
        graph = as_used(config, data)
        cut = make_partition(
            graph,
            partition.part,
            clients=clients_of_graph(config, graph),
            key=Key.of(seed_of(config, "partition_seed")).fold("partition"),
            drop_edges=config.drop_edges,
            **dataclasses.asdict(partition.options),
        )
    _check_degrees(config, cut)
    key = Key.of(seed_of(config, "split_seed")).fold("split")
    copies = copies_split(graph, cut, config.split, key)
    split = choose_split(graph, cut, config.split, key)
    return trainable(config, Cut(graph, cut, split, copies=copies))


def standardize_cut(
    cut: Cut, dtype: torch.dtype, *, uncut: bool, federated: bool
) -> tuple[Cut, ClientSums]:
    """Return a cut with standardized features, and each client's sums of its training nodes.

    So the whole graph, which the experiment sees, has of each node what its client has.

    Args:
        cut: of the run.
        dtype: of the features in the run.
        uncut: whether one client holds the whole graph.
        federated: whether all clients have the same statistics, of the training nodes of all; a
            node counts at each client that trains on it.

    Raises:
        DataError: features are sparse, or too large.
        PartitionError: each client has its own statistics, and clients share nodes, or a node has
            no client.
    """
    graph, partition = cut.graph, cut.partition
    if uncut:
        clients, rows = 1, (cut.split.train & graph.labeled).nonzero()[:, 0]
        client = torch.zeros_like(rows)
    else:
        clients, rows = len(partition.ids), partition.copies
        sizes = torch.tensor([len(nodes) for nodes in partition.nodes])
        trains = cut.copies_split.train & graph.labeled[rows]
        client, rows = owners(offsets(sizes))[trains], rows[trains]
    sums = sum_by_client(dense_columns(graph.x)[rows], client, clients)
    if uncut or federated:
        statistics = fit_from_sums({FEATURES: sums}, {FEATURES: SumSpec(graph.num_features)})
        used = statistics[FEATURES]
        x = standardize(graph.x, used)
    else:
        owner = partition.owner
        if len(partition.copies) != graph.num_nodes or bool((owner < 0).any()):
            raise PartitionError(
                "expected every node at one client with normalize standard_client, got a partition "
                f"in which clients share nodes or some are at none ({partition.method}): each "
                "client has statistics of its own; use normalize standard, row or none, or another "
                "partition"
            )
        used = sums.own_statistics()
        x = standardize(graph.x, used, owner)
    scaled = replace(graph, x=x.to(dtype))
    problem = narrowing_problem(graph.x, scaled.x, graph.feature_names, standardized=True)
    cut = replace(cut, graph=scaled, given=cut.fingerprint, statistics=used, narrowing=problem)
    return cut, sums


def scale_edge_weights(cut: Cut, *, uncut: bool) -> tuple[Cut, ClientSums]:
    """Return a cut whose weights of edges have mean 1 over all clients, and each client's sums.

    Args:
        cut: of the run.
        uncut: whether one client holds the whole graph.
    """
    graph = cut.graph
    bare = replace(graph, x=torch.zeros(graph.num_nodes, 0))
    held = whole(graph) if uncut else cut.partition
    block, _ = make_block(bare, held, cut.split, torch.float64)
    client = owners(block.off)
    sums = sum_edge_weights(block.adj, block.halo.adj, client, block.num_clients)
    fitted = fit_from_sums({EDGE_WEIGHTS: sums}, {EDGE_WEIGHTS: SumSpec(1, deviation=False)})
    mean = float(fitted[EDGE_WEIGHTS].mean)
    scaled = with_edges(graph, "scale", mean)
    return replace(cut, graph=scaled, given=cut.fingerprint, mean_edge_weight=mean), sums


def _check_degrees(config: RunConfig | ResolvedConfig, cut: Partition) -> None:
    """Raise `PartitionError` where features are degrees that silos could not count."""
    nowhere = int((cut.owner < 0).sum())
    if "degree" in config.features and nowhere:
        raise PartitionError(
            f"expected every node at a client with features {config.features}, got {nowhere} at "
            "none: silos cannot count neighbors that nobody holds; use constant"
        )


def check_features(config: RunConfig) -> None:
    """Raise `ConfigError` for options that do not go with features that are made."""
    if config.features == "degree" and config.normalize == "row":
        raise ConfigError(
            "expected normalize none with features degree, got row: a single feature divided by "
            "itself is 1 at every node; leave normalize out"
        )
    if config.features == "constant" and config.normalize in STANDARD:
        raise ConfigError(
            f"expected normalize none with features constant, got {config.normalize}: a constant "
            "feature is then 0 at every node; leave normalize out"
        )
    if "degree" in config.features and config.drop_edges:
        raise ConfigError(
            f"expected no drop_edges with features {config.features}, got {config.drop_edges}: a "
            "silo cannot count edges that it has lost; use constant, or leave drop_edges out"
        )


def check_standard(config: RunConfig, task: LabelForm) -> None:
    """Raise `ConfigError` where there are no features to standardize."""
    if task == "rating" and config.normalize in STANDARD:
        raise ConfigError(
            f"expected normalize none with ratings, got {config.normalize}: users, items and "
            "ratings have no features to standardize; leave normalize out"
        )


def clients_of_graph(config: RunConfig | ResolvedConfig, graph: Graph) -> int:
    """Return the number of clients of a cut."""
    if config.clients is not None:
        return config.clients
    return len(graph.silo_names) if names_clients(config.partition) else DEFAULT_CLIENTS


def trainable(config: RunConfig | ResolvedConfig, cut: Cut) -> Cut:
    """Return a cut that has something to train on; raise `DataError` for another."""
    known = cut.graph.labeled[cut.partition.copies]
    if not bool((cut.copies_split.train & known).any()):
        raise DataError(
            f"expected at least one labeled training node, got none in {cut.graph.name} with "
            f"split {config.split!r}: give a larger training share"
        )
    return cut
