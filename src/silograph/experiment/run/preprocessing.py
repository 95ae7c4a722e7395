"""`Preprocessing`: how data were prepared for a model, with all that was fitted to training data.

It is saved in the model's file and applied wherever the model is used, so that what is predicted
for a node does not depend on which other nodes are in the file.

F: features.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from silograph.core.errors import DataError, lookup
from silograph.core.files import write_atomic
from silograph.experiment.resolve.fitting import Use, prepare_silo, with_edges
from silograph.graph.column_statistics import ColumnStatistics, standardize
from silograph.graph.graph import FeatureSource, Graph, row_normalize, with_features
from silograph.graph.silos.data import Silo

VERSION = 1
FeatureScaling = Literal["none", "row", "standard", "standard_client"]
MEAN_EDGE_WEIGHT = "mean_edge_weight"
KEYS = {
    *("version", "features", "normalize", "feature_names", "edge_weights", "mean", "deviation"),
    MEAN_EDGE_WEIGHT,
}
FORMAT = "silograph client statistics"  # the key of a file of them
SHOWN = 3  # names in a message


@dataclass(frozen=True, eq=False)
class Preprocessing:
    """How the features and edges of a graph become the input of a model.

    Attributes:
        features: where features come from: `given`, or what they are made of.
        normalize: `none`, `row` (each node by itself), `standard` or `standard_client`.
        feature_names: names of the features in their order, or empty.
        edge_weights: what becomes of weights of edges where a graph has them.
        statistics: (F,) mean and deviation of each feature over training nodes, float64: those of
            all clients with `standard`, of one client with `standard_client`; None with others, and
            with `standard_client` where the client is not chosen yet.
        mean_edge_weight: of the edges that all clients trained on, by which weights are divided
            with edge_weights=scale; None with others.
    """

    features: FeatureSource = "given"
    normalize: FeatureScaling = "none"
    feature_names: tuple[str, ...] = ()
    edge_weights: Use = "ignore"
    statistics: ColumnStatistics | None = None
    mean_edge_weight: float | None = None

    @property
    def needs_client(self) -> bool:
        """Whether the statistics of a client have to be chosen before it can be applied."""
        return self.normalize == "standard_client" and self.statistics is None

    def of_client(self, statistics: ColumnStatistics) -> "Preprocessing":
        """Return the preprocessing with the (F,) statistics of one client."""
        return replace(self, statistics=statistics)

    def apply(self, data: Graph | Silo) -> Graph:
        """Return a graph, or what a silo holds, as the model takes it.

        Raises:
            DataError: features have other names or another number, or are missing, or the
                statistics of a client have to be chosen.
        """
        if self.needs_client:
            raise DataError(
                "a model that was trained with normalize standard_client needs the statistics of "
                "one client, got none: choose it by `silograph predict RUN --client NAME`, or "
                "result.model_of(NAME)"
            )
        rule, mean = self.edge_weights, self.mean_edge_weight
        if isinstance(data, Silo):
            data = prepare_silo(data, self.features, rule, mean)
            check_names("features", self.feature_names, data.feature_names, data.name)
            graph = data.graph
        else:
            graph = with_edges(with_features(data, self.features), rule, mean)
            check_names("features", self.feature_names, graph.feature_names, graph.name)
        if self.normalize == "row":
            return row_normalize(graph)
        if self.statistics is None:
            return graph
        expected = len(self.statistics.mean)
        if graph.num_features != expected:
            raise DataError(
                f"expected a graph with the model's {expected} features, got {graph.num_features}"
            )
        return replace(graph, x=standardize(graph.x, self.statistics))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the file of a model; float64 numbers come back to the bit."""
        values: dict[str, Any] = {
            "version": VERSION,
            "features": self.features,
            "normalize": self.normalize,
            "feature_names": self.feature_names,
            "edge_weights": self.edge_weights,
        }
        if self.statistics is not None:
            values["mean"] = self.statistics.mean.tolist()
            values["deviation"] = self.statistics.deviation.tolist()
        if self.mean_edge_weight is not None:
            values[MEAN_EDGE_WEIGHT] = self.mean_edge_weight
        return values


def read_preprocessing(values: Mapping[str, Any], features: int, path: str) -> Preprocessing:
    """Return the preprocessing of a model's file, which may come from anybody.

    Args:
        values: what `to_dict` returned.
        features: F of the model.
        path: of the file, for messages.

    Raises:
        DataError: it is of a later version.
        KeyError, TypeError, ValueError: it is none.
    """
    version = values["version"]
    if type(version) is not int or version < 1:
        raise ValueError(version)
    if version > VERSION:
        raise DataError(
            f"expected a model with preprocessing of version {VERSION} in {path}, got version "
            f"{version}: use the version of silograph that wrote it, or a later one"
        )
    if not values.keys() <= KEYS:
        raise ValueError(min(values.keys() - KEYS))
    names = TypeAdapter(tuple[str, ...]).validate_python(values["feature_names"])
    return Preprocessing(
        TypeAdapter(FeatureSource).validate_python(values["features"]),
        TypeAdapter(FeatureScaling).validate_python(values["normalize"]),
        names,
        TypeAdapter(Use).validate_python(values["edge_weights"]),
        _read_statistics(values, features),
        _read_mean_edge_weight(values),
    )


def read_old_preprocessing(values: Mapping[str, Any], path: str) -> Preprocessing:
    """Return the preprocessing of a model's file from before `Preprocessing`.

    Raises:
        DataError: the model was trained on standardized features, and the file does not say by
            which means and deviations.
        KeyError, ValueError: it is none.
    """
    normalize = values["normalize"]
    if normalize == "standard":
        raise DataError(
            f"the model in {path} was trained with normalize standard by an older version, which "
            "did not save means and deviations: train it again"
        )
    return Preprocessing(
        TypeAdapter(FeatureSource).validate_python(values.get("features", "given")),
        TypeAdapter(Literal["none", "row"]).validate_python(normalize),
        TypeAdapter(tuple[str, ...]).validate_python(values.get("feature_names", ())),
        TypeAdapter(Use).validate_python(values.get("edge_weights", "ignore")),
    )


def _read_statistics(values: Mapping[str, Any], features: int) -> ColumnStatistics | None:
    """Return the statistics; raise `ValueError` unless they are those of the normalization."""
    expects_statistics = {"standard": True, "standard_client": None}.get(values["normalize"], False)
    has_statistics = "mean" in values or "deviation" in values
    if expects_statistics is not None and has_statistics is not expects_statistics:
        raise ValueError("statistics")
    if not has_statistics:
        return None
    return checked_statistics(_numbers(values["mean"]), _numbers(values["deviation"]), (features,))


def _read_mean_edge_weight(values: Mapping[str, Any]) -> float | None:
    """Return the mean weight; raise `ValueError` unless it is that of the use of weights."""
    mean = values.get(MEAN_EDGE_WEIGHT)
    if (mean is not None) is not (values["edge_weights"] == "scale"):
        raise ValueError(MEAN_EDGE_WEIGHT)
    if mean is None:
        return None
    if type(mean) not in (int, float) or not 0 <= mean < math.inf:
        raise ValueError(mean)
    return float(mean)


def _numbers(values: Any) -> Tensor:
    """Return a list of JSON numbers as (F,) float64; raise `TypeError` for anything else."""
    if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
        raise TypeError(type(values).__name__)
    return torch.tensor(values, dtype=torch.float64)


def checked_statistics(mean: Tensor, deviation: Tensor, shape: tuple[int, ...]) -> ColumnStatistics:
    """Return statistics of a file; raise `ValueError` for other shapes or impossible numbers."""
    for values in (mean, deviation):
        has_right_form = values.dtype is torch.float64 and values.shape == shape
        if not has_right_form or not bool(values.isfinite().all()):
            raise ValueError(f"statistics of shape {tuple(values.shape)}")
    if bool((deviation < 0).any()):
        raise ValueError("negative deviation")
    return ColumnStatistics(mean, deviation)


def write_client_statistics(path: Path, statistics: Mapping[str, ColumnStatistics]) -> None:
    """Write the (F,) statistics of each client to a safetensors file, whole or not at all."""
    tensors = {
        "mean": torch.stack([own.mean for own in statistics.values()]),
        "deviation": torch.stack([own.deviation for own in statistics.values()]),
    }
    about = {"version": VERSION, "clients": list(statistics)}
    write_atomic(path, safetensors.torch.save(tensors, {FORMAT: json.dumps(about)}))


def read_client_statistics(path: Path, client: str, features: int) -> ColumnStatistics:
    """Return the (F,) statistics of one client from what `write_client_statistics` wrote.

    Args:
        path: the file, which may come from anybody.
        client: whose statistics.
        features: F.

    Raises:
        ConfigError: there is no such client.
        DataError: the file is damaged, or of a later version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[FORMAT])
            version, clients = about["version"], about["clients"]
            clients = TypeAdapter(list[str]).validate_python(clients)
            if type(version) is not int or not 1 <= version <= VERSION:
                raise ValueError(version)
            if len(set(clients)) < len(clients):
                raise ValueError(clients)
            shape = (len(clients), features)
            mean, deviation = file.get_tensor("mean"), file.get_tensor("deviation")
            statistics = checked_statistics(mean, deviation, shape)
    # pydantic's ValidationError is a ValueError; nested values of a file are the last one.
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError):
        raise DataError(
            f"expected statistics of clients in {path} as a run writes them, got something else: "
            "restore the file from a copy, or train again"
        ) from None
    position = lookup({name: i for i, name in enumerate(clients)}, client, "client")
    return statistics.of_client(position)


def check_names(what: str, ours: Sequence[str], theirs: Sequence[str], where: str) -> None:
    """Raise `DataError` where data mean something else than the model by their columns."""
    if not ours or not theirs or tuple(ours) == tuple(theirs):
        return
    position = next(
        (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if len({*pair}) > 1), 0
    )
    our_name, their_name = (
        (_some(ours), _some(theirs)) if position < SHOWN else (ours[position], theirs[position])
    )
    which = "" if position < SHOWN else f"the {position + 1}th "
    mend = "rename them or bring them into the model's order"
    if what == "classes":
        mend += ", or read a folder of tables with with_labels=False, as labels are not needed"
    raise DataError(
        f"expected the {what} of the model in {where}, {which}{our_name}, got {their_name}: {mend}"
    )


def _some(names: Sequence[str]) -> str:
    """Return the first of many names, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
