"""Statistics that a run fits to the training data of its clients before the first round.

Federated sums: `sum_specs` lists those of a run, `complete_block` applies the results at a client.
 How to add one is in `silograph.exchange.collect`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, DataError
from silograph.core.payload import State
from silograph.core.resolved_config import ResolvedConfig
from silograph.exchange.collect import SumSpec, SumSpecs, statistics_in
from silograph.experiment.resolve.own_partition import CutGraph
from silograph.federation.field_specs import EDGES
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.graph.column_statistics import (
    EDGE_WEIGHTS,
    FEATURES,
    ColumnStatistics,
    standardize,
)
from silograph.graph.csr import CSR
from silograph.graph.graph import FeatureSource, Graph, narrowing_problem, normalized_rows
from silograph.graph.silos.data import Silo, Silos, featured
from silograph.methods.base import AnyMethod
from silograph.nn.any_model import AnyModel

# --- How a run transforms edge weights, and the messages about it --------------------------------
#
# A client whose data have no weights has edges of weight 1. If no client has weights, every rule
# is `use`, so that such runs need no sums. If any has, the rule applies to all edges of all
# clients.


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


def has_weights(data: Graph | CutGraph | Silos | Silo) -> bool:
    """Whether any edge of the data has a weight."""
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
    data: Graph | CutGraph | Silos | Silo,
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
            f"weights: {ignore}"
        )
    if config.neighbors not in WEIGHED_SAMPLERS:
        raise ConfigError(
            f"expected neighbors=full or fanout with weights of edges, got {config.neighbors}, "
            f"whose draws know none: {ignore}"
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
        weight: (E,) of all edges, or None.
    """
    if rule != "use" or weight is None or not len(weight):
        return None
    low, high = USUAL_MEDIAN
    median = float(weight.median())
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


def prepare_silo(silo: Silo, features: FeatureSource, rule: Use, mean: float | None = None) -> Silo:
    """Return a silo with the features and the weights of edges that a config asks for.

    Raises:
        DataError: `features` is "given", and the silo has none; or see `with_edges`.
    """
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
    """Return the weights (E,) float64 as they are used, None where each of the edges counts 1."""
    if rule == "ignore":
        return None
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


def sum_specs(config: RunConfig | ResolvedConfig, features: int, method: AnyMethod) -> SumSpecs:
    """Return the federated sums of a run by name.

    Args:
        config: of the run.
        features: F, of the features as they are used.
        method: of the run; one that trains uncut has one client, which needs no sums of others.
    """
    specs: dict[str, SumSpec] = {}
    if config.normalize == "standard" and not method.setting.uncut:
        specs[FEATURES] = SumSpec(features)
    if config.edge_weights == "scale" and not method.setting.uncut:
        specs[EDGE_WEIGHTS] = SumSpec(1, among=EDGES, deviation=False)
    return specs


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
        if (warning := narrowing_line(self._silo, block, "standard")) is not None:
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
