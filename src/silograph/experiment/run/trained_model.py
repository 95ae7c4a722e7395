"""A trained model by itself, with how data were prepared for it: saved, loaded, used on a graph.

The file is safetensors; its metadata holds the model's shape, the names of the classes and how
data are prepared (`Preprocessing`), so nothing else is needed to use it. Only a model of all
clients that was trained on each client's own statistics needs those of the client besides.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import safetensors.torch
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from silograph.core.errors import DataError, lookup, mistake
from silograph.core.files import check_regular, write_atomic
from silograph.core.numeric_state import standard_numerics
from silograph.core.text import state_of_fields
from silograph.experiment.resolve.data import Use, prepare_silo, with_edges
from silograph.experiment.resolve.user_code import absolute, import_spec, names_file
from silograph.experiment.result_files import MODEL, check_model_file
from silograph.graph.block.block import make_block, whole
from silograph.graph.column_statistics import ColumnStatistics, standardize
from silograph.graph.graph import (
    FeatureSource,
    Graph,
    LabelForm,
    Split,
    row_normalize,
    with_directions,
    with_features,
)
from silograph.graph.read.tables import RepeatedEdges
from silograph.graph.silos.data import Silo
from silograph.nn.consisrec import ConsisRec
from silograph.nn.conv import Params
from silograph.nn.forward import AnyModel
from silograph.nn.model import MODELS, Model
from silograph.nn.own_module import Make, ModuleModel
from silograph.nn.rating_factors import RatingBiases, RatingFactors
from silograph.nn.rating_model import RatingModel
from silograph.nn.rating_profiles import RatingProfiles
from silograph.task.registry import task_of
from silograph.task.threshold import Threshold, read_threshold

# --- `Preprocessing`: how data were prepared for a model, with all that was fitted to training data
#
# It is saved in the model's file and applied wherever the model is used, so that what is predicted
# for a node does not depend on which other nodes are in the file.
#
# F: features.


# Files of the second version name the tables' rules, too. Those of the third are of models that
# read directions of edges, which older versions of silograph would not do.
VERSION, OF_TABLES, DIRECTED = 1, 2, 3
FeatureScaling = Literal["none", "row", "standard", "standard_client"]
MEAN_EDGE_WEIGHT = "mean_edge_weight"
KEYS = {
    *("version", "features", "normalize", "feature_names", "edge_weights", "mean", "deviation"),
    *(MEAN_EDGE_WEIGHT, "repeated_edges", "time"),
}
STATISTICS_FORMAT = "silograph client statistics"  # the key of a file of them
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
        repeated_edges: how the graph's readers combine edges that are listed several times; None:
            as by default.
        time: column of times in the graph's tables, which is no feature; or None.
    """

    features: FeatureSource = "given"
    normalize: FeatureScaling = "none"
    feature_names: tuple[str, ...] = ()
    edge_weights: Use = "ignore"
    statistics: ColumnStatistics | None = None
    mean_edge_weight: float | None = None
    repeated_edges: RepeatedEdges | None = None
    time: str | None = None

    @property
    def needs_client(self) -> bool:
        """Whether the statistics of a client have to be chosen before it can be applied."""
        return self.normalize == "standard_client" and self.statistics is None

    def of_client(self, statistics: ColumnStatistics) -> "Preprocessing":
        """Return the preprocessing with the (F,) statistics of one client."""
        return replace(self, statistics=statistics)

    def apply(self, data: Graph | Silo, *, directed: bool = False) -> Graph:
        """Return a graph, or what a silo holds, as the model takes it.

        Args:
            data: the graph, or a silo, as it was read.
            directed: whether the model reads directions of edges.

        Raises:
            DataError: features have other names or another number, or are missing, or edges have no
                directions, or the statistics of a client have to be chosen.
        """
        if self.needs_client:
            raise DataError(
                "a model that was trained with normalize standard_client needs the statistics of "
                "one client, got none: choose it by `silograph predict RUN --client NAME`, or "
                "result.model_of(NAME)",
                **mistake("missing-option", "client"),
            )
        rule, mean = self.edge_weights, self.mean_edge_weight
        if isinstance(data, Silo):
            data = prepare_silo(data, self.features, rule, mean, directed=directed)
            check_names("features", self.feature_names, data.feature_names, data.name)
            graph = data.graph
        else:
            graph = with_directions(data, symmetric=True) if directed else data
            graph = with_edges(with_features(graph, self.features), rule, mean)
            check_names("features", self.feature_names, graph.feature_names, graph.name)
        if self.normalize == "row":
            return row_normalize(graph)
        if self.statistics is None:
            return graph
        expected = len(self.statistics.mean)
        if graph.num_features != expected:
            raise DataError(
                f"expected a graph with the model's {expected} features, got {graph.num_features}",
                **mistake("model-mismatch", "features", expected, graph.num_features),
            )
        return replace(graph, x=standardize(graph.x, self.statistics))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the file of a model; float64 numbers come back to the bit."""
        values: dict[str, Any] = {
            "version": OF_TABLES if self.repeated_edges or self.time else VERSION,
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
        rules = {"repeated_edges": self.repeated_edges, "time": self.time}
        return values | {name: rule for name, rule in rules.items() if rule is not None}


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
    if version > DIRECTED:
        raise DataError(
            f"expected a model with preprocessing of version {DIRECTED} in {path}, got version "
            f"{version}: use the version of silograph that wrote it, or a later one",
            **mistake("other-version", DIRECTED, version),
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
        TypeAdapter(RepeatedEdges | None).validate_python(values.get("repeated_edges")),
        TypeAdapter(str | None).validate_python(values.get("time")),
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
    write_atomic(path, safetensors.torch.save(tensors, {STATISTICS_FORMAT: json.dumps(about)}))


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
            about = json.loads((file.metadata() or {})[STATISTICS_FORMAT])
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
            "restore the file from a copy, or train again",
            **mistake("damaged-file", path),
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
        f"expected the {what} of the model in {where}, {which}{our_name}, got {their_name}: {mend}",
        **mistake("model-mismatch", what, list(ours), list(theirs)),
    )


def _some(names: Sequence[str]) -> str:
    """Return the first of many names, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# --- The model, and its file ---------------------------------------------------------------------


MOST_SIZE, MOST_HOPS = 10**7, 1000  # of a file's model: what a run may have
RATING_KINDS: Mapping[str, type[AnyModel]] = {
    "biases": RatingBiases,
    "consisrec": ConsisRec,
    "factors": RatingFactors,
    "graph": RatingModel,
    "profiles": RatingProfiles,
}
aten: Any = torch.ops.aten
BLOCK_ROWS, BLOCK_COLUMNS = 64, 32  # multiples of what any BLAS computes together
FORMAT = "silograph model 1"  # one key, because the order of several would vary in the file


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel:
    """A model with its weights.

    Attributes:
        shape: what the weights are for.
        weights: by name, shared form.
        class_names: names of the classes, or empty.
        preprocessing: how features and edges were prepared, with what was fitted to training data.
        threshold: from which probability on a node is taken for the positive class; None: the run
            has chosen none.
    """

    shape: AnyModel
    weights: Params
    class_names: tuple[str, ...] = ()
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    threshold: Threshold | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: of a module that a user's file makes, the file's name."""
        state = state_of_fields(self)
        if isinstance(self.shape, ModuleModel) and names_file(self.shape.name):
            state["shape"] = state_of_fields(self.shape) | {"make": absolute(self.shape.name)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what a pickle holds; a file that makes the module is run again."""
        shape = state["shape"]
        if isinstance(shape, dict):
            make = import_spec(shape["make"], cast("type[Make]", Callable))
            state = state | {"shape": ModuleModel(**shape | {"make": make})}
        self.__dict__.update(state)

    def __repr__(self) -> str:
        """Return the shape; the weights are too many to print."""
        return f"TrainedModel({self.shape}, normalize={self.preprocessing.normalize!r})"

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features in their order, or empty."""
        return self.preprocessing.feature_names

    @property
    def _reads_directions(self) -> bool:
        """Whether it reads directions of edges."""
        return isinstance(self.shape, Model | ModuleModel) and self.shape.directed != "none"

    def check_says_all(self) -> None:
        """Raise `DataError` for a model of ratings: tables of its clients belong to it."""
        if self.shape.task == "rating":
            raise DataError(
                f"expected a model of nodes, got {self.shape.noun}: what it knows of users and "
                "items stays with the clients; `silograph recommend` predicts ratings "
                "with the result folder that a silo keeps"
            )

    @standard_numerics()
    def logits(self, graph: Graph | Silo) -> Tensor:
        """Return the logits of every node, (n, K), along all edges of the graph or inside the silo.

        Raises:
            DataError: no graph or silo, or its features or classes are not those of the model.
        """
        self.check_says_all()
        if not isinstance(graph, Graph | Silo):
            raise DataError(
                f"expected a Graph or a Silo, got {type(graph).__name__}: see sg.load and "
                "sg.read_silos"
            )
        check_names("classes", self.class_names, graph.class_names, graph.name)
        graph = self.preprocessing.apply(graph, directed=self._reads_directions)
        if graph.num_features != self.shape.features:
            raise DataError(
                f"expected a graph with the model's {self.shape.features} features, "
                f"got {graph.num_features}",
                **mistake("model-mismatch", "features", self.shape.features, graph.num_features),
            )
        none = torch.zeros(graph.num_nodes, dtype=torch.bool)
        weight = next(iter(self.weights.values()))
        block, _ = make_block(graph, whole(graph), Split(none, none, none), weight.dtype)
        with torch.no_grad(), _RowsRoundAlike():  # type: ignore[no-untyped-call]
            return self.shape.forward(self.weights, block.to(weight.device, weight.dtype))

    def for_client(self, statistics: ColumnStatistics) -> "TrainedModel":
        """Return the model as one client uses it, which was trained on its own statistics (F,)."""
        return replace(self, preprocessing=self.preprocessing.of_client(statistics))

    @standard_numerics()
    def probabilities(self, graph: Graph | Silo) -> np.ndarray | None:
        """Return how likely each class or label bit is, (n, K) float64; None for numbers."""
        values = task_of(self.shape.task).probabilities(self.logits(graph).cpu())
        return None if values is None else values.numpy()

    @standard_numerics()
    def predict(self, graph: Graph | Silo) -> np.ndarray:
        """Return the predicted labels: (n,) int64 classes, or (n, K) int64 bits for multi-label."""
        return task_of(self.shape.task).decide(self.logits(graph).cpu()).numpy()

    @standard_numerics()
    def decisions(self, graph: Graph | Silo) -> np.ndarray:
        """Return which nodes the threshold takes for the positive class, (n,) bool.

        Raises:
            DataError: the model has no threshold.
        """
        probabilities = self.probabilities(graph)
        if self.threshold is None or probabilities is None:
            raise DataError(
                "expected a model with a threshold, got none: train with threshold=f1, "
                "recall@fpr=RATE or cost=FP:FN"
            )
        return self.threshold.decide(probabilities)

    @standard_numerics()
    def save(self, path: str | os.PathLike[str], *, private: bool = False) -> None:
        """Write the model to a safetensors file, whole or not at all.

        Args:
            path: of the file.
            private: whether only its owner may read it.
        """
        about: dict[str, Any] = {
            "shape": self.shape.described(),
            "class_names": self.class_names,
            "preprocessing": self.preprocessing.to_dict()
            | ({"version": DIRECTED} if self._reads_directions else {}),
        }
        if self.threshold is not None:
            about["threshold"] = self.threshold.to_dict()
        weights = {name: w.detach().cpu().contiguous() for name, w in self.weights.items()}
        data = safetensors.torch.save(weights, {FORMAT: json.dumps(about)})
        write_atomic(Path(path), data, private=private)


class _RowsRoundAlike(TorchDispatchMode):
    """Inside, a row of a product of matrices has the same bits whatever rows are beside it.

    BLAS computes rows and columns in blocks, and those that are left over in another way, which
    rounds differently. Which sizes that concerns depends on the processor. With rows and columns
    of zeros up to a multiple of a block nothing is left over.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch."""
        del types
        kwargs = kwargs or {}
        if func in (aten.mm.default, aten.bmm.default):
            return _padded_product(func, *args)
        if func is aten.addmm.default and not kwargs:
            return args[0] + _padded_product(aten.mm.default, *args[1:])
        return func(*args, **kwargs)


def _padded_product(multiply: Any, a: Tensor, b: Tensor) -> Tensor:
    """Return a (..., n, k) times b (..., k, m), computed with more rows and columns of zeros."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return cast(Tensor, multiply(a, b))
    rows, columns = a.shape[-2], b.shape[-1]
    a = pad(a, (0, 0, 0, -rows % BLOCK_ROWS))
    b = pad(b, (0, -columns % BLOCK_COLUMNS))
    return cast(Tensor, multiply(a, b)[..., :rows, :columns])


def _check_sizes(shape: AnyModel, weight_shapes: Mapping[str, Sequence[int]], path: str) -> None:
    """Raise `DataError` for sizes that the weights do not have; they could allocate any memory."""
    largest = max((n for dims in weight_shapes.values() for n in dims), default=0)
    is_usable = 1 <= shape.features <= MOST_SIZE and 1 <= shape.outputs <= MOST_SIZE
    if isinstance(shape, Model):
        hidden = shape.hidden if isinstance(shape.hidden, tuple) else (shape.hidden,)
        sizes = [shape.features, shape.outputs, shape.heads, *(hidden if shape.layers > 1 else ())]
        is_usable = (
            shape.conv in MODELS
            and all(1 <= size <= largest for size in sizes)
            and all(1 <= width <= MOST_SIZE for width in hidden)
            and not (shape.residual and len(set(hidden)) > 1)
            and 1 <= shape.layers <= len(weight_shapes)
            and 0 <= shape.hops <= MOST_HOPS
            and 0 <= shape.teleport <= 1
        )
    if isinstance(shape, RatingProfiles):
        widths = (shape.hidden,) if isinstance(shape.hidden, int) else shape.hidden
        is_usable = (
            all(1 <= width <= largest for width in widths)
            and 1 <= shape.layers <= len(weight_shapes)
            and (isinstance(shape.hidden, int) or len(widths) == shape.layers)
        )
    if isinstance(shape, RatingModel):
        hidden = (shape.hidden,) if isinstance(shape.hidden, int) else shape.hidden
        sizes = [*hidden, shape.heads, shape.embedding]
        is_usable = (
            all(1 <= size <= largest for size in sizes)
            and 1 <= shape.layers <= len(weight_shapes)
            and (isinstance(shape.hidden, int) or len(hidden) == shape.layers)
        )
    if not is_usable:
        raise DataError(
            f"expected weights of {shape} in {path}, got {weight_shapes}",
            **mistake("damaged-file", path),
        )


def _check_usable(
    shape: AnyModel, weights: Params, classes: Sequence[str], features: Sequence[str], path: str
) -> None:
    """Raise `DataError` for an invalid file: it may come from anybody."""
    dtypes = sorted({str(w.dtype) for w in weights.values()})
    if dtypes not in (["torch.float32"], ["torch.float64"]):
        raise DataError(
            f"expected weights of float32 or float64 in {path}, got {dtypes}",
            **mistake("damaged-file", path),
        )
    if not all(bool(w.isfinite().all()) for w in weights.values()):
        raise DataError(
            f"expected finite weights in {path}, got NaN or infinity",
            **mistake("damaged-file", path),
        )
    for what, names, count in (
        ("classes", classes, shape.outputs),
        ("features", features, shape.features),
    ):
        if names and len(names) != count:
            raise DataError(
                f"expected names of {count} {what} in {path}, got {len(names)}",
                **mistake("damaged-file", path),
            )


def _read_shape(saved: Mapping[str, Any], make: Make | None, path: str) -> AnyModel:
    """Return the model of a saved description.

    Raises:
        DataError: the model is a torch.nn.Module, and its class is missing.
    """
    if saved.get("task") == "rating":
        options = {name: value for name, value in saved.items() if name not in ("task", "kind")}
        return TypeAdapter(RATING_KINDS[_rating_kind(saved)]).validate_python(options)
    if "module" not in saved:
        return TypeAdapter(Model).validate_python(saved)
    if make is None:
        raise DataError(
            f"expected the class of the model in {path}, got none: it is a torch.nn.Module, "
            f"{saved['module']}, and files are not trusted to name code; use "
            "sg.load_model(PATH, model=...)"
        )
    task: LabelForm = TypeAdapter(LabelForm).validate_python(saved["task"])
    way: Literal["none", "along"] = TypeAdapter(Literal["none", "along"]).validate_python(
        saved.get("directed", "none")
    )
    sizes = int(saved["features"]), int(saved["outputs"])
    return ModuleModel(saved["module"], make, *sizes, task, way)


def _rating_kind(saved: Mapping[str, Any]) -> str:
    """Return the kind of a model of ratings; an older file says it by an option of its own."""
    kind_by_option = {
        "social": "factors",
        "sampled": "consisrec",
        "embedding": "graph",
        "folds": "profiles",
    }
    default_kind = next(
        (kind for option, kind in kind_by_option.items() if option in saved), "biases"
    )
    return str(saved.get("kind", default_kind))


def _no_model_error(path: Path) -> DataError:
    """Return the error for a path at which there is no file of a model."""
    if path.is_dir():
        files = sorted([*path.glob("*.safetensors"), *path.glob("*/*.safetensors")])
        remedy = f"give a file in it, such as {files[0]}" if files else "there is no model in it"
        return DataError(
            f"expected a model file, got the folder {path}: {remedy}",
            **mistake("wrong-format", path),
        )
    got = "one that cannot be read or is no model" if path.exists() else "no such file"
    return DataError(
        f"expected a model file at {path}, got {got}: give model.safetensors of a result folder or "
        "a file of its models",
        **mistake("wrong-format" if path.exists() else "missing-file", path),
    )


@standard_numerics()
def load_model(path: str | os.PathLike[str], *, model: Make | None = None) -> TrainedModel:
    """Return the model of a file that `TrainedModel.save` wrote.

    Args:
        path: the file, or a result folder with a model of all clients.
        model: the class of the model, if it was a torch.nn.Module of yours.

    Raises:
        DataError: the file is missing, damaged, or holds something else; in a result folder also
            where it is not as the run has written it.
    """
    if (Path(path) / MODEL).is_file():
        path = Path(path) / MODEL
    if not Path(path).is_dir():
        check_regular(path)
    try:
        check_model_file(Path(path))
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        raise _no_model_error(Path(path)) from None
    if FORMAT not in about:
        raise DataError(
            f"expected a {FORMAT!r} in {os.fspath(path)}, got keys {sorted(about)}",
            **mistake("wrong-format", path),
        )
    try:
        saved = json.loads(about[FORMAT])
        shape = _read_shape(saved["shape"], model, os.fspath(path))
        names = TypeAdapter(tuple[str, ...]).validate_python(saved["class_names"])
        if "preprocessing" in saved:
            values = TypeAdapter(dict[str, Any]).validate_python(saved["preprocessing"])
            preprocessing = read_preprocessing(values, shape.features, os.fspath(path))
        else:
            preprocessing = read_old_preprocessing(saved, os.fspath(path))
        threshold = None
        if "threshold" in saved:
            values = TypeAdapter(dict[str, Any]).validate_python(saved["threshold"])
            threshold = read_threshold(values, shape.outputs)
    except DataError:
        raise
    # pydantic's ValidationError is a ValueError; nested or huge values of a file are the last two.
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise DataError(
            f"expected a model's shape in {os.fspath(path)}, got none",
            **mistake("damaged-file", path),
        ) from None
    weight_shapes = {name: tuple(w.shape) for name, w in weights.items()}
    _check_sizes(shape, weight_shapes, os.fspath(path))
    if weight_shapes != shape.weight_shapes:
        raise DataError(
            f"expected weights {dict(shape.weight_shapes)} in {os.fspath(path)}, got "
            f"{weight_shapes}",
            **mistake("damaged-file", path),
        )
    _check_usable(shape, weights, names, preprocessing.feature_names, os.fspath(path))
    return TrainedModel(shape, weights, names, preprocessing, threshold)
