"""What a run makes of the weights of edges, and what is said of it.

A client whose data have no weights has edges of weight 1. If no client has weights, every rule is
`use`, so that such runs need no sums. If any has, the rule applies to all edges of all clients.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, DataError
from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.resolve.own_partition import CutGraph
from silograph.graph.features import FeatureSource
from silograph.graph.graph import Graph
from silograph.graph.silos.data import Silo, Silos, featured
from silograph.methods.base import AnyMethod
from silograph.nn.any_model import AnyModel

Use = Literal["log", "scale", "use", "ignore"]
DEFAULT: Use = "log"
USUAL_MEDIAN = (0.1, 10.0)  # of weights that are used as they are, beside self loops of weight 1
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


def edge_weights_in(asked: RunConfig, model: AnyModel, *, weighted: bool) -> Use:
    """Return what becomes of weights of edges.

    Args:
        asked: the config.
        model: of the run.
        weighted: whether any client has weights of edges.
    """
    if asked.edge_weights == "ignore" or why_not_weighed(model):
        return "ignore"
    return (asked.edge_weights or DEFAULT) if weighted else "use"


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
    # A silo without weights among silos that have some: the rule applies to its edges, too.
    if not has_weights(data) and config.edge_weights not in ("log", "scale"):
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
    how = {
        "log": ", as log2(1 + weight)",
        "scale": ", divided by their mean over all clients",
    }.get(config.edge_weights, "")
    return f"edge weights are used by {config.model}{how}"


def describe_weight_scale(use: Use, weight: Tensor | None) -> str | None:
    """Return what is wrong with the scale of weights that are used as they are, or None.

    Args:
        use: what becomes of weights of edges.
        weight: (E,) of all edges, or None.
    """
    if use != "use" or weight is None or not len(weight):
        return None
    low, high = USUAL_MEDIAN
    median = float(weight.median())
    if low <= median <= high:
        return None
    return (
        f"edge weights are used as they are and their median is {median:g}, beside self loops of "
        "weight 1: set edge_weights=log or edge_weights=scale"
    )


def with_edges(graph: Graph, use: Use, mean: float | None = None) -> Graph:
    """Return a graph with its weights of edges as they are used, or without.

    Args:
        graph: with weights as they were given, if it has any.
        use: what becomes of them.
        mean: of the weights over all clients, by which `scale` divides them; None: they are not
            divided yet.

    Raises:
        DataError: a weight is negative and the logarithm is asked for.
    """
    weight = _transform(graph.edge_weight, use, mean, graph.adj.nnz, graph.name)
    return replace(graph, edge_weight=weight)


def silo_as_used(silo: Silo, features: FeatureSource, use: Use, mean: float | None = None) -> Silo:
    """Return a silo with the features and the weights of edges that a config asks for.

    Raises:
        DataError: the given features are asked for, and there are none; or see `with_edges`.
    """
    return silo_with_edges(featured(silo, features), use, mean)


def silo_with_edges(silo: Silo, use: Use, mean: float | None = None) -> Silo:
    """Return a silo with its weights of edges as they are used, or without; see `with_edges`."""
    cross = silo.cross
    weight = _transform(silo.edge_weight, use, mean, silo.adj.nnz, silo.name)
    between = _transform(cross.weight, use, mean, len(cross.row), silo.name)
    return replace(silo, edge_weight=weight, cross=replace(cross, weight=between))


def _transform(
    weight: Tensor | None, use: Use, mean: float | None, edges: int, name: str
) -> Tensor | None:
    """Return the weights (E,) float64 as they are used, None where each of the edges counts 1."""
    if use == "ignore":
        return None
    if use == "use":
        return weight
    given = torch.ones(edges, dtype=torch.float64) if weight is None else weight.double()
    if use == "scale":
        return weight if mean is None or mean in (0.0, 1.0) else given / mean
    if bool((given < 0).any()):
        raise DataError(
            f"expected edge weights from 0 in {name} with edge_weights=log, got "
            f"{float(given.min()):g}: change these weights, or set edge_weights=ignore"
        )
    return torch.log1p(given) / math.log(2)  # a weight of 1 stays exactly 1, as self loops weigh
