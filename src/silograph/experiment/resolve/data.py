"""The data of a run: prepared, cut into clients and split, and what is fitted to training data.

Federated sums: `sum_specs` lists those of a run, `complete_block` applies the results at a client.
How to add one is in `silograph.exchange.collect`.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, DataError, PartitionError, mistake, unknown
from silograph.core.key import Key
from silograph.core.payload import State, offsets, owners
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import BALANCED, ends_of, json_mapping
from silograph.exchange.collect import SumSpec, SumSpecs, fit_from_sums, statistics_in
from silograph.exchange.feature_drift import drift_sums
from silograph.experiment.resolve.parts import ChosenPart, Parts, choose_parts
from silograph.experiment.resolve.run_request import CutGraph, with_own_partition
from silograph.federation.field_specs import EDGES
from silograph.federation.matching import agree
from silograph.graph.block.block import ClientBlock, Route, SparseRows, make_block, whole
from silograph.graph.column_statistics import (
    DRIFT,
    EDGE_WEIGHTS,
    FEATURES,
    LABELS,
    ClientSums,
    ColumnStatistics,
    balanced_weights,
    dense_columns,
    standardize,
    sum_by_client,
    sum_edge_weights,
    sum_labels,
)
from silograph.graph.csr import CSR
from silograph.graph.datasets import load
from silograph.graph.generated import ProgressCallback
from silograph.graph.graph import (
    FeatureSource,
    Graph,
    LabelForm,
    Schema,
    Split,
    fingerprint,
    key_order,
    largest_component,
    narrowing_problem,
    normalized_rows,
    row_normalize,
    row_problem,
    scale_problem,
    schema_of,
    subgraph,
    with_directions,
    with_features,
)
from silograph.graph.heterogeneity import leaked_tests
from silograph.graph.partition.partition import (
    Partition,
    Partitioner,
    make_partition,
    names_clients,
)
from silograph.graph.partition.split import choose_split, copies_split, time_column
from silograph.graph.silos.data import (
    Silo,
    Silos,
    featured,
    join_blocks,
    join_rating_silos,
    join_silos,
    silo_block,
    silo_fingerprint,
    silo_split,
    silo_with_directions,
    silo_without_directions,
)
from silograph.graph.silos.shards import Shards
from silograph.methods.base import AnyMethod
from silograph.nn.forward import AnyModel

# --- How a run transforms edge weights, and the messages about it --------------------------------
#
# A client whose data have no weights has edges of weight 1. If no client has weights, every rule
# is `use`, so that such runs need no sums. If any has, the rule applies to all edges of all
# clients.


STANDARD = ("standard", "standard_client")  # values of `normalize` that fit statistics
Use = Literal["log", "scale", "use", "ignore"]
DEFAULT: Use = "log"
USUAL_MEDIAN = (0.1, 10.0)  # of weights that are used as they are, beside self loops of weight 1
WEIGHED_SAMPLERS = ("full", "fanout")  # whose sums take weights


def why_not_weighed(model: AnyModel) -> str | None:
    """Return why a model has no place for weights of edges, or None if it has."""
    if model.staged is None:
        return f"{model.noun} is told of edges without them"
    convolutions = [stage.conv for stage in model.staged.stages if stage.conv.sums]
    if not convolutions:
        return f"{model.noun} reads no edges"
    unweighted_layers = [conv.name for conv in convolutions if not conv.weighs]
    return f"{unweighted_layers[0]} has no place for them" if unweighted_layers else None


def edge_weights_in(config: RunConfig, model: AnyModel, *, weighted: bool) -> Use:
    """Return the rule for edge weights.

    Args:
        config: the config.
        model: of the run.
        weighted: whether any client has weights of edges.
    """
    if config.edge_weights == "ignore" or why_not_weighed(model):
        return "ignore"
    return (config.edge_weights or DEFAULT) if weighted else "use"


def has_weights(data: Graph | CutGraph | Silos | Silo | Shards) -> bool:
    """Whether any edge of the data has a weight."""
    if isinstance(data, Shards):
        return data.weighted
    if isinstance(data, Silos):
        return any(silo.weighted for silo in data.members)
    if isinstance(data, Silo):
        return data.weighted
    graph = data.graph if isinstance(data, CutGraph) else data
    return graph.edge_weight is not None


def check_edge_weights(
    user_config: RunConfig,
    config: ResolvedConfig,
    method: AnyMethod,
    model: AnyModel,
    data: Graph | CutGraph | Silos | Silo | Shards,
) -> str | None:
    """Return the line that says what becomes of the weights of edges, None where there are none.

    Raises:
        ConfigError: the method or the neighbor sampler cannot use them.
    """
    # A silo without weights among silos that have some: the rule applies to its edges, too.
    if not has_weights(data) and config.edge_weights not in ("log", "scale"):
        return None
    if (reason := why_not_weighed(model)) is not None:
        return f"edge weights are not used: {reason}; every edge counts 1"
    if user_config.edge_weights == "ignore":
        return "edge weights are not used (edge_weights=ignore); every edge counts 1"
    ignore = "add edge_weights=ignore, and every edge counts 1"
    if not method.weighs_edges:
        reason_text = (
            "exchanges rows" if method.rows != "none" else "makes or draws edges of its own"
        )
        raise ConfigError(
            f"expected edges without weights for method {method.name}, which {reason_text}, got "
            f"weights: {ignore}",
            **mistake("conflicting-options", ["method", "edge_weights"]),
        )
    if config.neighbors not in WEIGHED_SAMPLERS:
        raise ConfigError(
            f"expected neighbors=full or fanout with weights of edges, got {config.neighbors}, "
            f"whose draws know none: {ignore}",
            **mistake("conflicting-options", ["neighbors", "edge_weights"]),
        )
    description = {
        "log": ", as log2(1 + weight)",
        "scale": ", divided by their mean over all clients",
    }.get(config.edge_weights, "")
    return f"edge weights are used by {config.model}{description}"


def describe_weight_scale(rule: Use, weight: Tensor | None) -> str | None:
    """Return what is wrong with the scale of weights that are used as they are, or None.

    Args:
        rule: what becomes of weights of edges.
        weight: (E,) or (E, 2) of all edges, or None.
    """
    if rule != "use" or weight is None or not len(weight):
        return None
    low, high = USUAL_MEDIAN
    median = float(weight[~weight.isnan()].median())  # NaN is no edge in that direction
    if low <= median <= high:
        return None
    return (
        f"edge weights are used as they are and their median is {median:g}, beside self loops of "
        "weight 1: set edge_weights=log or edge_weights=scale"
    )


def with_edges(graph: Graph, rule: Use, mean: float | None = None) -> Graph:
    """Return a graph with its weights of edges as they are used, or without.

    Args:
        graph: with its original weights, if it has any.
        rule: what becomes of them.
        mean: of the weights over all clients, by which `scale` divides them; None: they are not
            divided yet.

    Raises:
        DataError: a weight is negative, and `rule` is "log".
    """
    weight = _transform(graph.edge_weight, rule, mean, graph.adj.nnz, graph.name)
    return replace(graph, edge_weight=weight)


def prepare_silo(
    silo: Silo,
    features: FeatureSource,
    rule: Use,
    mean: float | None = None,
    *,
    directed: bool = False,
) -> Silo:
    """Return a silo with the features and the weights of edges that a config asks for.

    Args:
        silo: as it was read.
        features: where features come from.
        rule: what becomes of weights of edges.
        mean: as for `with_edges`.
        directed: whether messages follow the directions of edges.

    Raises:
        DataError: `features` is "given", and the silo has none; `directed`, and its edges have no
            directions; or see `with_edges`.
    """
    silo = silo_with_directions(silo) if directed else silo_without_directions(silo)
    return silo_with_edges(featured(silo, features), rule, mean)


def silo_with_edges(silo: Silo, rule: Use, mean: float | None = None) -> Silo:
    """Return a silo with its weights of edges as they are used, or without; see `with_edges`."""
    cross = silo.cross
    weight = _transform(silo.edge_weight, rule, mean, silo.adj.nnz, silo.name)
    between = _transform(cross.weight, rule, mean, len(cross.row), silo.name)
    return replace(silo, edge_weight=weight, cross=replace(cross, weight=between))


def _transform(
    weight: Tensor | None, rule: Use, mean: float | None, edges: int, name: str
) -> Tensor | None:
    """Return the weights (E,) float64 as they are used, None where each of the edges counts 1.

    Those of both directions (E, 2) stay NaN where there is no edge.
    """
    if rule == "ignore":
        if weight is None or weight.dim() == 1:
            return None
        return torch.ones_like(weight).where(~weight.isnan(), weight)
    if rule == "use":
        return weight
    edge_weight = torch.ones(edges, dtype=torch.float64) if weight is None else weight.double()
    if rule == "scale":
        return weight if mean is None or mean in (0.0, 1.0) else edge_weight / mean
    if bool((edge_weight < 0).any()):
        raise DataError(
            f"expected edge weights from 0 in {name} with edge_weights=log, got "
            f"{float(edge_weight.min()):g}: change these weights, or set edge_weights=ignore"
        )
    # A weight of 1 stays exactly 1, the weight of self loops.
    return torch.log1p(edge_weight) / math.log(2)


def sum_specs(
    config: RunConfig | ResolvedConfig, schema: Schema, method: AnyMethod | None = None
) -> SumSpecs:
    """Return the federated sums of a run by name.

    Args:
        config: of the run.
        schema: of the features as they are used, and of labels.
        method: of the run; one that trains uncut has one client, which needs no sums of others.
            None: one that does not.
    """
    specs: dict[str, SumSpec] = {}
    if method is not None and method.setting.uncut:
        return specs
    if config.normalize == "standard":
        specs[FEATURES] = SumSpec(schema.num_features)
    elif config.feature_drift:
        specs[DRIFT] = SumSpec(schema.num_features)
    if config.edge_weights == "scale":
        specs[EDGE_WEIGHTS] = SumSpec(1, among=EDGES, deviation=False)
    if config.class_weight == BALANCED:
        width = schema.num_classes * (2 if schema.task == "multilabel" else 1)
        specs[LABELS] = SumSpec(width, deviation=False)
    return specs


def class_weights(text: str, schema: Schema) -> Tensor:
    """Return the weights of classes of the config, (K,) float64; 1 of a class without one.

    Args:
        text: as `parse_class_weight` returns it, and not `balanced`.
        schema: of the data.

    Raises:
        ConfigError: a weight of a class that there is not.
    """
    names = list(schema.class_names) or [str(number) for number in range(schema.num_classes)]
    weights = torch.ones(schema.num_classes, dtype=torch.float64)
    for name, weight in json_mapping(text).items():
        if name not in names:
            raise unknown("class of class_weight", name, names)
        weights[names.index(name)] = weight
    return weights


def with_drift_sums(block: ClientBlock, config: RunConfig | ResolvedConfig) -> ClientBlock:
    """Return a block with the sums from which the bins of `feature_drift` follow.

    Raises:
        DataError: features are sparse, or too large.
    """
    if not config.feature_drift or config.normalize == "standard":  # features have sums already
        return block
    return replace(block, sums={**block.sums, DRIFT: drift_sums(block)})


def with_class_weight(
    block: ClientBlock, config: RunConfig | ResolvedConfig, schema: Schema
) -> ClientBlock:
    """Return a block with the weights of classes, or with the sums that they are computed from.

    Raises:
        ConfigError: a weight of a class that there is not.
    """
    if config.class_weight is None:
        return block
    if config.class_weight != BALANCED:
        return replace(block, class_weight=class_weights(config.class_weight, schema))
    least, classes = config.evaluation_min_count or 0, schema.num_classes
    rows = block.y, block.split.train, block.client
    sums = sum_labels(*rows, block.num_clients, classes, least)
    return replace(block, sums={**block.sums, LABELS: sums})


def with_balanced_classes(block: ClientBlock, shares: Tensor, task: LabelForm) -> ClientBlock:
    """Return a block with balanced weights of classes.

    Args:
        block: the block.
        shares: (W,) of each label among all clients' training rows.
        task: what labels mean.

    Raises:
        DataError: see `balanced_weights`.
    """
    classes = len(shares) // (2 if task == "multilabel" else 1)
    weights = balanced_weights(shares.cpu(), classes)
    return replace(block, class_weight=weights.to(block.off.device))


def complete_block(
    block: ClientBlock, silo: Silo, statistics: Mapping[str, ColumnStatistics]
) -> ClientBlock:
    """Return the block of a silo once the federated sums of the run are known.

    Args:
        block: as `silo_block` made it, where it computes.
        silo: its data, with the features and the weights of edges of the run.
        statistics: the results by name; without any, the block is returned as it is.

    Raises:
        DataError: features are sparse, or the mean of edge weights cannot be one.
    """
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    device, dtype = block.off.device, block.adj.values.dtype
    if FEATURES in statistics:
        x = standardize(silo.x, statistics[FEATURES])
        block = replace(block, x=x.to(device, dtype))
    if EDGE_WEIGHTS in statistics:
        mean = float(statistics[EDGE_WEIGHTS].mean)
        if not 0 <= mean < math.inf:  # it comes from the server
            raise DataError(f"expected the mean of edge weights to be 0 or more, got {mean:g}")
        scaled_silo = silo_with_edges(silo, "scale", mean)
        cross, halo = scaled_silo.cross, block.halo.adj
        shape = halo.num_rows, halo.num_cols
        adj = scaled_silo.graph.weighted_adj.to(device, dtype)
        cross_adj = CSR.from_pairs(cross.row, cross.slot, shape, cross.weight).to(device, dtype)
        block = replace(block, adj=adj, halo=replace(block.halo, adj=cross_adj))
    if LABELS in statistics:
        block = with_balanced_classes(block, statistics[LABELS].mean, silo.graph.task)
    return block


def narrowing_line(silo: Silo, block: ClientBlock, normalize: str) -> str | None:
    """Return which features of a silo lose distinct values in its block, or None."""
    before = normalized_rows(silo.x) if normalize == "row" else silo.x
    x, names = block.x, silo.feature_names
    after = x.csr.to("cpu", torch.float64) if isinstance(x, SparseRows) else x.cpu()
    return narrowing_problem(before, after, names, standardized=normalize.startswith("standard"))


class BlockInState:
    """Completes a silo's block with the statistics in its state, and caches the latest one.

    Args:
        block: as `silo_block` made it, where it computes.
        silo: its data.
        warn: called with a line where features lose values.
    """

    def __init__(self, block: ClientBlock, silo: Silo, warn: Callable[[str], None]) -> None:
        self._block = block
        self._silo = silo
        self._warn = warn
        self._completed: tuple[dict[str, ColumnStatistics], ClientBlock] = ({}, block)

    def __call__(self, state: State) -> ClientBlock:
        """Return the block that ops receive together with a state."""
        statistics = statistics_in(state)
        cached_statistics, block = self._completed
        if _equal_statistics(cached_statistics, statistics):
            return block
        block = complete_block(self._block, self._silo, statistics)
        self._completed = statistics, block
        if FEATURES in statistics:
            warning = narrowing_line(self._silo, block, "standard")
            if warning is not None:
                self._warn(warning)
        return block


def _equal_statistics(
    first: Mapping[str, ColumnStatistics], second: Mapping[str, ColumnStatistics]
) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name].mean, second[name].mean)
        and torch.equal(first[name].deviation, second[name].deviation)
        for name in first
    )


# --- A graph cut into clients, as a simulation has it --------------------------------------------


DEFAULT_CLIENTS = 10


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
            f"{len(nodes)}: give a larger share (--option server_share=SHARE)",
            **mistake("no-training-nodes"),
        )
    return make_block(graph, whole(graph, "server"), split)[0]


def seed_of(config: RunConfig | ResolvedConfig, name: str) -> int:
    """Return the seed of a kind, which is that of training where it is not given."""
    own: int | None = getattr(config, name)
    return config.seed if own is None else own


def prepare_graph(config: RunConfig | ResolvedConfig, graph: Graph) -> Graph:
    """Return the graph that a run uses: the kept part, with the features of the config.

    Edge weights and directions are kept or removed. Each client transforms weights later, as the
    config says.

    Raises:
        DataError: the config wants directions of edges, and all go both ways.
    """
    is_directed = config.directed != "none"
    graph = with_directions(graph) if is_directed else replace(graph, directed_weight=None)
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


VERY_UNEVEN = 0.5  # of the clients' number, as how many equal ones they count


def uneven_line(config: ResolvedConfig, train_nodes: Tensor) -> str | None:
    """Warn of a plain mean of models over clients with very unlike numbers of training nodes.

    They count as (sum of n)^2 / sum of n^2 equal clients.

    Args:
        config: of the run.
        train_nodes: n of each client (C,).
    """
    if config.options.get("method.average") != "clients":
        return None
    n = train_nodes[train_nodes > 0].double()
    equal_clients = float(n.sum() ** 2 / n.square().sum().clamp(min=1))
    if equal_clients >= VERY_UNEVEN * len(n):
        return None
    return (
        f"training nodes are very uneven: {int(n.min())} to {int(n.max())} a client, and "
        "average=clients gives each the same weight: use --option average=nodes"
    )


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
        repeated_edges=config.repeated_edges,
        time=time_column(config.split),
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
    num_unowned = int((cut.owner < 0).sum())
    if "degree" in config.features and num_unowned:
        raise PartitionError(
            f"expected every node at a client with features {config.features}, got {num_unowned} "
            "at none: silos cannot count neighbors that nobody holds; use constant"
        )
    key = Key.of(seed_of(config, "split_seed")).fold("split")
    copies = copies_split(graph, cut, config.split, key)
    split = choose_split(graph, cut, config.split, key)
    return check_trainable(config, Cut(graph, cut, split, copies=copies))


def standardize_cut(
    cut: Cut, dtype: torch.dtype, *, uncut: bool, federated: bool, secure: bool
) -> tuple[Cut, ClientSums]:
    """Return a cut with standardized features, and each client's sums of its training nodes.

    So the whole graph, which the experiment sees, has of each node what its client has.

    Args:
        cut: of the run.
        dtype: of the features in the run.
        uncut: whether one client holds the whole graph.
        federated: whether all clients have the same statistics, of the training nodes of all; a
            node counts at each client that trains on it.
        secure: whether the run has secure aggregation.

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
    sums = replace(sums, is_sent=federated)
    if uncut or federated:
        specs = {FEATURES: SumSpec(graph.num_features)}
        column_statistics = fit_from_sums({FEATURES: sums}, specs, secure=secure)[FEATURES]
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


def scale_edge_weights(cut: Cut, *, uncut: bool, secure: bool) -> tuple[Cut, ClientSums]:
    """Return a cut whose weights of edges have mean 1 over all clients, and each client's sums.

    Args:
        cut: of the run.
        uncut: whether one client holds the whole graph.
        secure: whether the run has secure aggregation.
    """
    graph = cut.graph
    graph_without_features = replace(graph, x=torch.zeros(graph.num_nodes, 0))
    partition = whole(graph) if uncut else cut.partition
    block, _ = make_block(graph_without_features, partition, cut.split, torch.float64)
    client = owners(block.off)
    sums = sum_edge_weights(block.adj, block.halo.adj, client, block.num_clients)
    specs = {EDGE_WEIGHTS: SumSpec(1, deviation=False)}
    mean = float(fit_from_sums({EDGE_WEIGHTS: sums}, specs, secure=secure)[EDGE_WEIGHTS].mean)
    scaled = with_edges(graph, "scale", mean)
    return replace(
        cut, graph=scaled, original_fingerprint=cut.fingerprint, mean_edge_weight=mean
    ), sums


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
            f"split {config.split!r}: give a larger training share",
            **mistake("no-training-nodes"),
        )
    return cut


# --- client data ---------------------------------------------------------------------------------
# Data of silos in one process: the clients that silos build, and what only a simulation can see.


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
    secure = config.secure_aggregation
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
        cut, sums[EDGE_WEIGHTS] = scale_edge_weights(cut, uncut=uncut, secure=secure)
    if standardizes:
        federated = config.normalize == "standard"
        cut, sums[FEATURES] = standardize_cut(
            cut, dtype, uncut=uncut, federated=federated, secure=secure
        )
    elif isinstance(data, Graph | CutGraph):
        x, names = cut.graph.x, cut.graph.feature_names
        converted = x.to("cpu", dtype) if isinstance(x, CSR) else x.to(dtype)
        problem = narrowing_problem(x, converted, names, standardized=False)
        cut = replace(cut, narrowing=problem)
    if uncut:
        block, route = make_block(cut.graph, whole(cut.graph), cut.split, dtype)
    else:
        block, route = clients_block(cut, dtype)
    schema = schema_of(cut.graph)
    block = with_class_weight(replace(block, sums=sums), config, schema)
    block = with_drift_sums(block, config)
    if config.class_weight == BALANCED:
        specs = {LABELS: sum_specs(config, schema)[LABELS]}
        shares = fit_from_sums(block.sums, specs, secure=secure)[LABELS].mean
        block = with_balanced_classes(block, shares, schema.task)
    return cut, block, route


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
    directed = config.directed != "none"
    members = [
        prepare_silo(silo, config.features, config.edge_weights, directed=directed)
        for silo in silos.members
    ]
    silos = replace(silos, members=tuple(members))
    blocks = [client_block(silo, config, dtype) for silo in silos.members]
    block, statistics, mean_edge_weight = join_blocks(blocks), None, None
    schema = replace(schema_of(silos.members[0].graph), num_features=block.num_features)
    if specs := sum_specs(config, schema):
        statistics_by_name = fit_from_sums(block.sums, specs, secure=config.secure_aggregation)
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
        *graph_partition_split,
        hasher.hexdigest(),
        statistics=statistics,
        narrowing=narrowing,
        mean_edge_weight=mean_edge_weight,
    )
    return check_trainable(config, cut), block, route


def client_block(silo: Silo, config: ResolvedConfig, dtype: torch.dtype) -> ClientBlock:
    """Return the block that a silo makes of its data alone.

    `silo` has the features and the weights of edges that the config asks for.

    Raises:
        ConfigError: a split that is none.
        DataError: the silo lacks the split of the config.
    """
    split = silo_split(silo, config.split, Key.of(config.split_seed).fold("split"))
    rule = config.edge_weights
    block = silo_block(silo, split, dtype, normalize=config.normalize, edge_weights=rule)
    block = with_class_weight(block, config, schema_of(silo.graph))
    return with_drift_sums(block, config)
