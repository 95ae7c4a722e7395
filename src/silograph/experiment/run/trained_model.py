"""A trained model by itself: saved, loaded, and used on a graph.

The file is safetensors; its metadata holds the model's shape, the names of the classes and how
features were prepared, so nothing else is needed to use it.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from silograph.core.errors import DataError
from silograph.graph.block.block import make_block, whole
from silograph.graph.features import FeatureSource, with_features
from silograph.graph.graph import Graph, LabelForm, Split, row_normalize
from silograph.nn.conv import Params
from silograph.nn.model import AnyModel, Model, forward, weight_shapes
from silograph.nn.own_module import Make, ModuleModel
from silograph.task.registry import task_of

FORMAT = "silograph model 1"  # one key, because the order of several would vary in the file


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel:
    """A model with its weights.

    Attributes:
        shape: what the weights are for.
        weights: by name, shared form.
        class_names: names of the classes, or empty.
        normalize: how features were prepared: `none` or `row`.
        features: where they came from: `given`, or what they were made of.
    """

    shape: AnyModel
    weights: Params
    class_names: tuple[str, ...] = ()
    normalize: str = "none"
    features: FeatureSource = "given"

    def __repr__(self) -> str:
        """Return the shape; the weights are too many to print."""
        return f"TrainedModel({self.shape}, normalize={self.normalize!r})"

    def logits(self, graph: Graph) -> Tensor:
        """Return the logits of every node, (n, K), along all edges of the graph.

        Raises:
            DataError: not a graph, or it has another number of features than the model.
        """
        if not isinstance(graph, Graph):
            raise DataError(f"expected a Graph, got {type(graph).__name__}: see sg.load")
        graph = with_features(graph, self.features)
        if graph.num_features != self.shape.features:
            raise DataError(
                f"expected a graph with the model's {self.shape.features} features, "
                f"got {graph.num_features}"
            )
        if self.normalize == "row":
            graph = row_normalize(graph)
        none = torch.zeros(graph.num_nodes, dtype=torch.bool)
        weight = next(iter(self.weights.values()))
        block, _ = make_block(graph, whole(graph), Split(none, none, none), weight.dtype)
        with torch.no_grad():
            return forward(self.shape, self.weights, block.to(weight.device, weight.dtype))

    def predict(self, graph: Graph) -> np.ndarray:
        """Return the predicted labels: (n,) int64 classes, or (n, K) int64 bits for multi-label."""
        return task_of(self.shape.task).decide(self.logits(graph).cpu()).numpy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a safetensors file, whole or not at all."""
        about = {
            "shape": described(self.shape),
            "class_names": self.class_names,
            "normalize": self.normalize,
        } | ({} if self.features == "given" else {"features": self.features})
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        weights = {name: w.detach().cpu().contiguous() for name, w in self.weights.items()}
        partial.write_bytes(safetensors.torch.save(weights, {FORMAT: json.dumps(about)}))
        partial.replace(target)


def described(model: AnyModel) -> dict[str, Any]:
    """Return a model's shape as plain values; of a module only its name and its sizes."""
    if not isinstance(model, ModuleModel):
        return dataclasses.asdict(model)
    sizes = {"features": model.features, "outputs": model.outputs, "task": model.task}
    return {"module": model.name, **sizes}


def _shape(told: Mapping[str, Any], make: Make | None, path: str) -> AnyModel:
    """Return what `described` told.

    Raises:
        DataError: it is a module, and the class was not given.
    """
    if "module" not in told:
        return TypeAdapter(Model).validate_python(told)
    if make is None:
        raise DataError(
            f"expected the class of the model in {path}, got none: it is a torch.nn.Module, "
            f"{told['module']}, and files are not trusted to name code; use "
            "sg.load_model(PATH, model=...)"
        )
    task: LabelForm = TypeAdapter(LabelForm).validate_python(told["task"])
    return ModuleModel(told["module"], make, int(told["features"]), int(told["outputs"]), task)


def load_model(path: str | os.PathLike[str], *, model: Make | None = None) -> TrainedModel:
    """Return the model of a file that `TrainedModel.save` wrote.

    Args:
        path: the file.
        model: the class of the model, if it was a torch.nn.Module of yours.

    Raises:
        DataError: the file is missing, damaged, or holds something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"expected a model file at {os.fspath(path)}, got: {error}") from None
    if FORMAT not in about:
        raise DataError(f"expected a {FORMAT!r} in {os.fspath(path)}, got keys {sorted(about)}")
    try:
        told = json.loads(about[FORMAT])
        shape = _shape(told["shape"], model, os.fspath(path))
        names = TypeAdapter(tuple[str, ...]).validate_python(told["class_names"])
        normalize = TypeAdapter(Literal["none", "row"]).validate_python(told["normalize"])
        made: FeatureSource = TypeAdapter(FeatureSource).validate_python(
            told.get("features", "given")
        )
    except DataError:
        raise
    except (KeyError, TypeError, ValueError):  # pydantic's ValidationError is a ValueError
        raise DataError(f"expected a model's shape in {os.fspath(path)}, got none") from None
    found = {name: tuple(w.shape) for name, w in weights.items()}
    if found != weight_shapes(shape):
        raise DataError(
            f"expected weights {weight_shapes(shape)} in {os.fspath(path)}, got {found}"
        )
    return TrainedModel(shape, weights, names, normalize, made)
