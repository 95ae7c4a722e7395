"""Whether a run uses the weights of edges, and what is said of it."""

from dataclasses import replace
from typing import Literal

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.resolve.own_partition import CutGraph
from silograph.graph.features import FeatureSource
from silograph.graph.graph import Graph
from silograph.graph.silos.data import Silo, Silos, featured
from silograph.methods.base import AnyMethod
from silograph.nn.any_model import AnyModel

Use = Literal["use", "ignore"]
WEIGHED_SAMPLERS = ("full", "fanout")  # whose sums take weights


def why_not_weighed(model: AnyModel) -> str | None:
    """Return why a model has no place for weights of edges, or None if it has."""
    if model.staged is None:
        return f"{model.noun} is told of edges without them"
    sums = [stage.conv for stage in model.staged.stages if stage.conv.sums]
    if not sums:
        return f"{model.noun} reads no edges"
    without = [conv.name for conv in sums if not conv.weighs]
    return f"{without[0]} has no place for them" if without else None


def edge_weights_in(asked: RunConfig, model: AnyModel) -> Use:
    """Return what becomes of weights of edges, if there are any."""
    return "ignore" if why_not_weighed(model) else asked.edge_weights


def has_weights(data: Graph | CutGraph | Silos | Silo) -> bool:
    """Whether any edge of the data has a weight."""
    if isinstance(data, Silos):
        return any(silo.weighted for silo in data.members)
    if isinstance(data, Silo):
        return data.weighted
    graph = data.graph if isinstance(data, CutGraph) else data
    return graph.edge_weight is not None


def check_edge_weights(
    asked: RunConfig,
    config: ResolvedConfig,
    method: AnyMethod,
    model: AnyModel,
    data: Graph | CutGraph | Silos | Silo,
) -> str | None:
    """Return the line that says what becomes of the weights of edges, None where there are none.

    Raises:
        ConfigError: the method or the neighbor sampler cannot use them.
    """
    if not has_weights(data):
        return None
    if (reason := why_not_weighed(model)) is not None:
        return f"edge weights are not used: {reason}; every edge counts 1"
    if asked.edge_weights == "ignore":
        return "edge weights are not used (edge_weights=ignore); every edge counts 1"
    ignore = "add edge_weights=ignore, and every edge counts 1"
    if not method.weighs_edges:
        why = "exchanges rows" if method.rows != "none" else "makes or draws edges of its own"
        raise ConfigError(
            f"expected edges without weights for method {method.name}, which {why}, got weights: "
            f"{ignore}"
        )
    if config.neighbors not in WEIGHED_SAMPLERS:
        raise ConfigError(
            f"expected neighbors=full or fanout with weights of edges, got {config.neighbors}, "
            f"whose draws know none: {ignore}"
        )
    return f"edge weights are used by {config.model}"


def with_edges(graph: Graph, use: Use) -> Graph:
    """Return a graph with its weights of edges, or without."""
    return graph if use == "use" else replace(graph, edge_weight=None)


def silo_as_used(silo: Silo, features: FeatureSource, use: Use) -> Silo:
    """Return a silo with the features and the weights of edges that a config asks for.

    Raises:
        DataError: the given features are asked for, and there are none.
    """
    silo = featured(silo, features)
    if use == "use":
        return silo
    return replace(silo, edge_weight=None, cross=replace(silo.cross, weight=None))
