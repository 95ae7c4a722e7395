"""A graph prepared, cut into clients and split, as a simulation has it."""

import dataclasses
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, DataError, PartitionError
from silograph.core.key import Key
from silograph.core.payload import offsets, owners
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import ends_of
from silograph.exchange.collect import SumSpec, fit_from_sums
from silograph.experiment.resolve.fitting import (
    complete_block,
    narrowing_line,
    prepare_silo,
    with_edges,
)
from silograph.experiment.resolve.own_partition import (
    GIVEN,
    CutGraph,
    apply_partition,
    names_clients,
    with_own_partition,
)
from silograph.experiment.resolve.parts import ChosenPart, Parts, choose_parts
from silograph.federation.joining.matching import agree
from silograph.graph.block.block import ClientBlock, Route, make_block, whole
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
from silograph.graph.csr import CSR
from silograph.graph.datasets import load, source_of
from silograph.graph.generated.generate import ProgressCallback
from silograph.graph.graph import (
    Graph,
    LabelForm,
    Split,
    fingerprint,
    key_order,
    largest_component,
    narrowing_problem,
    row_normalize,
    row_problem,
    scale_problem,
    subgraph,
    with_features,
)
from silograph.graph.measure.heterogeneity import leaked_tests
from silograph.graph.partition.partition import Partition, Partitioner, make_partition
from silograph.graph.partition.split import choose_split, copies_split
from silograph.graph.silos.data import (
    Silo,
    Silos,
    join_blocks,
    join_rating_silos,
    join_silos,
    silo_block,
    silo_fingerprint,
    silo_split,
)

DEFAULT_CLIENTS = 10
STANDARD = ("standard", "standard_client")  # values of `normalize` that fit statistics


@dataclass(frozen=True, eq=False)
class Cut:
    """A graph as a simulation uses it: cut into clients, with its split.

    Attributes:
        graph: all of it.
        partition: who holds what.
        split: what for; where each client splits its own copies, what their owners say.
        copies: what each copy is for, masks over `partition.copies`; None: as the split says.
        silos: hash of the silos' own data where it came from silos, else nothing.
        original_fingerprint: fingerprint of the graph before its features were standardized or
            its weights of edges scaled, else nothing.
        statistics: what standardized them: (F,) of all clients, or (C, F) of each client; else
            None.
        narrowing: which features lose distinct values in the dtype of the run, as a line, or None.
        mean_edge_weight: what divided the weights of edges, else None.
    """

    graph: Graph
    partition: Partition
    split: Split
    silos: str = ""
    original_fingerprint: str = ""
    statistics: ColumnStatistics | None = None
    narrowing: str | None = None
    mean_edge_weight: float | None = None
    copies: Split | None = None

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the graph, features as silos have them before they are standardized."""
        return self.original_fingerprint or fingerprint(self.graph)

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
    has_label = cut.graph.labeled[cut.partition.copies]
    return replace(block, split=cut.copies_split.map(lambda mask: mask & has_label)), route


def make_server_block(cut: Cut, share: float, key: Key) -> ClientBlock:
    """Return a share of the nodes, drawn, with the edges among them, as one client.

    Raises:
        DataError: no node that trains is among them.
    """
    order = key_order(cut.graph.node_id, key)
    nodes = order[: max(1, round(share * len(order)))].sort().values
    split = Split(*(mask[nodes] for mask in vars(cut.split).values()))
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


def prepare_graph(config: RunConfig | ResolvedConfig, graph: Graph) -> Graph:
    """Return the graph that a run uses: the kept part, with the features of the config.

    Edge weights are kept or removed. Each client transforms them later, as the config says.
    """
    graph = with_edges(graph, "ignore" if config.edge_weights == "ignore" else "use")
    if config.largest_component:
        graph = largest_component(graph)
    graph = with_features(graph, config.features)
    return row_normalize(graph) if config.normalize == "row" else graph


def scale_line(config: ResolvedConfig, graph: Graph) -> str | None:
    """Describe what is wrong with the scale of the features that a run uses; None: nothing."""
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
    config: RunConfig | ResolvedConfig, data: Graph | CutGraph, partition: ChosenPart[Partitioner]
) -> Cut:
    """Prepare, cut and split a graph; one with a partition of the user's has it already.

    Raises:
        SilographError: the graph, the cut or the split cannot be used.
    """
    if isinstance(data, CutGraph):
        graph, cut = prepare_graph(config, data.graph), data.partition
    else:
        graph = prepare_graph(config, data)
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
    return check_trainable(config, Cut(graph, cut, split, copies=copies))


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
        is_training = cut.copies_split.train & graph.labeled[rows]
        client, rows = owners(offsets(sizes))[is_training], rows[is_training]
    sums = sum_by_client(dense_columns(graph.x)[rows], client, clients)
    if uncut or federated:
        statistics = fit_from_sums({FEATURES: sums}, {FEATURES: SumSpec(graph.num_features)})
        column_statistics = statistics[FEATURES]
        x = standardize(graph.x, column_statistics)
    else:
        owner = partition.owner
        if len(partition.copies) != graph.num_nodes or bool((owner < 0).any()):
            raise PartitionError(
                "expected every node at one client with normalize standard_client, got a partition "
                f"in which clients share nodes or some are at none ({partition.method}): each "
                "client has statistics of its own; use normalize standard, row or none, or another "
                "partition"
            )
        column_statistics = sums.own_statistics()
        x = standardize(graph.x, column_statistics, owner)
    scaled = replace(graph, x=x.to(dtype))
    problem = narrowing_problem(graph.x, scaled.x, graph.feature_names, standardized=True)
    cut = replace(
        cut,
        graph=scaled,
        original_fingerprint=cut.fingerprint,
        statistics=column_statistics,
        narrowing=problem,
    )
    return cut, sums


def scale_edge_weights(cut: Cut, *, uncut: bool) -> tuple[Cut, ClientSums]:
    """Return a cut whose weights of edges have mean 1 over all clients, and each client's sums.

    Args:
        cut: of the run.
        uncut: whether one client holds the whole graph.
    """
    graph = cut.graph
    graph_without_features = replace(graph, x=torch.zeros(graph.num_nodes, 0))
    partition = whole(graph) if uncut else cut.partition
    block, _ = make_block(graph_without_features, partition, cut.split, torch.float64)
    client = owners(block.off)
    sums = sum_edge_weights(block.adj, block.halo.adj, client, block.num_clients)
    statistics = fit_from_sums({EDGE_WEIGHTS: sums}, {EDGE_WEIGHTS: SumSpec(1, deviation=False)})
    mean = float(statistics[EDGE_WEIGHTS].mean)
    scaled = with_edges(graph, "scale", mean)
    return replace(
        cut, graph=scaled, original_fingerprint=cut.fingerprint, mean_edge_weight=mean
    ), sums


def _check_degrees(config: RunConfig | ResolvedConfig, cut: Partition) -> None:
    """Raise `PartitionError` where features are degrees that silos could not count."""
    num_unowned = int((cut.owner < 0).sum())
    if "degree" in config.features and num_unowned:
        raise PartitionError(
            f"expected every node at a client with features {config.features}, got {num_unowned} "
            "at none: silos cannot count neighbors that nobody holds; use constant"
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
    """Return the number of clients into which a graph is cut."""
    if config.clients is not None:
        return config.clients
    return len(graph.silo_names) if names_clients(config.partition) else DEFAULT_CLIENTS


def check_trainable(config: RunConfig | ResolvedConfig, cut: Cut) -> Cut:
    """Return the cut; raise `DataError` where it has no labeled training node."""
    has_label = cut.graph.labeled[cut.partition.copies]
    if not bool((cut.copies_split.train & has_label).any()):
        raise DataError(
            f"expected at least one labeled training node, got none in {cut.graph.name} with "
            f"split {config.split!r}: give a larger training share"
        )
    return cut


# --- client data ---------------------------------------------------------------------------------
# Data of silos in one process: the clients that silos build, and what only a simulation can see.


CUT = "silo"  # value of `partition` for data that are in silos already


def refuse_in_memory(data: object) -> None:
    """Raise `ConfigError` for silos in memory, where several runs read them from their folder."""
    if isinstance(data, Silos):
        raise ConfigError(
            "expected the path of the silos' folder for several runs, got silos in memory: give "
            "the path"
        )


def cut_for_studies(
    graph: Graph | None, partition: Any, config: RunConfig
) -> tuple[Graph, RunConfig]:
    """Return the graph of several runs with its partition, and the config that says its hash.

    Args:
        graph: the graph; None: it is loaded by the config.
        partition: the value.
        config: of the runs.

    Raises:
        ConfigError: silos, or a partition in which a node has several clients or none.
        PartitionError: it is none of this graph.
    """
    data: Graph | Silos | None = graph
    if data is None:
        data = source_of(config).read(config.scale)
    cut_data, config = apply_partition(data, partition, config)
    if isinstance(cut_data, CutGraph):
        raise ConfigError(
            "expected a partition in which every node has one client for several runs, got another "
            "in memory: run it alone with sg.run"
        )
    return cut_data, config


def with_silo_partition(config: RunConfig) -> RunConfig:
    """Return the config of a run on silos, which says that they are the cut.

    Raises:
        ConfigError: it names another cut.
    """
    if config.partition not in (RunConfig().partition, CUT):
        got = "one in memory" if config.partition.startswith(GIVEN) else config.partition
        raise ConfigError(
            f"partition: expected none with silos, got {got}: they are cut already; "
            "leave partition out"
        )
    return replace(config, partition=CUT)


def clients_of(
    config: ResolvedConfig, parts: Parts, data: Graph | CutGraph | Silos, dtype: torch.dtype
) -> tuple[Cut, ClientBlock, Route]:
    """Return the clients of a graph that is cut for them, or of silos, as one block.

    Args:
        config: of the run.
        parts: of the run; with a method that trains uncut, one client holds the whole graph.
        data: the graph, perhaps cut already, or the silos.
        dtype: of features and edges.

    Raises:
        SilographError: the graph, the cut, the split or the silos cannot be used.
    """
    uncut, standardizes = parts.method.part.setting.uncut, config.normalize in STANDARD
    transforms_edge_weights = config.edge_weights in ("log", "scale")
    if isinstance(data, Silos):
        if not uncut:
            return join_silo_data(config, data, dtype)
        # Features and weights of edges are transformed below, in float64 until then.
        raw_config = replace(config, normalize="none") if standardizes else config
        raw_config = (
            replace(raw_config, edge_weights="use") if transforms_edge_weights else raw_config
        )
        cut, _, _ = join_silo_data(
            raw_config, data, torch.float64 if standardizes or transforms_edge_weights else dtype
        )
    else:
        cut = cut_graph(config, data, parts.partition)
    sums = {}
    if config.edge_weights == "log" and cut.graph.edge_weight is not None:
        cut = replace(cut, graph=with_edges(cut.graph, "log"), original_fingerprint=cut.fingerprint)
    if config.edge_weights == "scale":
        cut, sums[EDGE_WEIGHTS] = scale_edge_weights(cut, uncut=uncut)
    if standardizes:
        federated = config.normalize == "standard"
        cut, sums[FEATURES] = standardize_cut(cut, dtype, uncut=uncut, federated=federated)
    elif isinstance(data, Graph | CutGraph):
        x, names = cut.graph.x, cut.graph.feature_names
        converted = x.to("cpu", dtype) if isinstance(x, CSR) else x.to(dtype)
        problem = narrowing_problem(x, converted, names, standardized=False)
        cut = replace(cut, narrowing=problem)
    if uncut:
        block, route = make_block(cut.graph, whole(cut.graph), cut.split, dtype)
    else:
        block, route = clients_block(cut, dtype)
    return cut, replace(block, sums=sums), route


def join_silo_data(
    config: ResolvedConfig, silos: Silos, dtype: torch.dtype
) -> tuple[Cut, ClientBlock, Route]:
    """Let silos split their nodes, make their blocks and agree, each from its own data.

    Args:
        config: of the run.
        silos: their data.
        dtype: of features and edges.

    Returns:
        The graph that they hold together, which only one process can see; all of them as one
        block; who answers for each halo slot.

    Raises:
        DataError: silos disagree, or one lacks the split of the config.
    """
    route = agree(silos)
    edge_weight_rule = config.edge_weights
    members = [prepare_silo(silo, config.features, edge_weight_rule) for silo in silos.members]
    silos = replace(silos, members=tuple(members))
    blocks = [client_block(silo, config, dtype) for silo in silos.members]
    block, statistics, mean_edge_weight = join_blocks(blocks), None, None
    specs: dict[str, SumSpec] = {}
    if config.normalize == "standard":
        specs[FEATURES] = SumSpec(block.num_features)
    if config.edge_weights == "scale":
        specs[EDGE_WEIGHTS] = SumSpec(1, deviation=False)
    if specs:
        statistics_by_name = fit_from_sums(block.sums, specs)
        pairs = zip(silos.members, blocks, strict=True)
        blocks = [complete_block(own, silo, statistics_by_name) for silo, own in pairs]
        block = join_blocks(blocks)
        statistics = statistics_by_name.get(FEATURES)
        if EDGE_WEIGHTS in statistics_by_name:
            mean_edge_weight = float(statistics_by_name[EDGE_WEIGHTS].mean)
    if config.normalize == "standard_client":
        statistics = block.sums[FEATURES].own_statistics()
    hasher = hashlib.blake2b(digest_size=8)
    for silo in silos.members:
        hasher.update(silo_fingerprint(silo).encode())
    has_ratings = silos.members[0].graph.task == "rating"
    graph_partition_split = (
        join_rating_silos(silos, block) if has_ratings else join_silos(silos, block, route)
    )
    pairs = zip(silos.members, blocks, strict=True)
    lines = (narrowing_line(silo, own, config.normalize) for silo, own in pairs)
    narrowing = next(filter(None, lines), None)
    cut = Cut(
        *graph_partition_split, hasher.hexdigest(), statistics=statistics, narrowing=narrowing
    )
    cut = replace(cut, mean_edge_weight=mean_edge_weight)
    return check_trainable(config, cut), block, route


def client_block(silo: Silo, config: ResolvedConfig, dtype: torch.dtype) -> ClientBlock:
    """Return the block that a silo makes of its data alone.

    `silo` has the features and the weights of edges that the config asks for.

    Raises:
        ConfigError: a split that is none.
        DataError: the silo lacks the split of the config.
    """
    split = silo_split(silo, config.split, Key.of(config.split_seed).fold("split"))
    edge_weight_rule = config.edge_weights
    return silo_block(silo, split, dtype, normalize=config.normalize, edge_weights=edge_weight_rule)


def check_uncut(config: RunConfig, silos: Silos) -> None:
    """Raise `ConfigError` for options that cut a graph, where silos hold their parts already."""
    for name in ("largest_component", "drop_edges"):
        if getattr(config, name):
            raise ConfigError(
                f"expected silos' data as they are, got {name}={getattr(config, name)}: nobody "
                "holds the whole graph; leave it out, or give it to export-silos"
            )
    if config.clients not in (None, len(silos.ids)):
        raise ConfigError(
            f"clients: expected {len(silos.ids)}, one for each silo, got {config.clients}: leave "
            "clients out"
        )
