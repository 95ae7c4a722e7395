"""A trained model by itself: saved, loaded, and used on a graph.

The file is safetensors; its metadata holds the model's shape, the names of the classes and how
features were prepared, so nothing else is needed to use it.
"""

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
from silograph.graph.graph import Graph, LabelForm, Split, row_normalize
from silograph.nn.any_model import AnyModel
from silograph.nn.conv import Params
from silograph.nn.model import Model
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
    """

    shape: AnyModel
    weights: Params
    class_names: tuple[str, ...] = ()
    normalize: str = "none"

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
            return self.shape.forward(self.weights, block.to(weight.device, weight.dtype))

    def predict(self, graph: Graph) -> np.ndarray:
        """Return the predicted labels: (n,) int64 classes, or (n, K) int64 bits for multi-label."""
        return task_of(self.shape.task).decide(self.logits(graph).cpu()).numpy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a safetensors file, whole or not at all."""
        about = {
            "shape": self.shape.described(),
            "class_names": self.class_names,
            "normalize": self.normalize,
        }
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        weights = {name: w.detach().cpu().contiguous() for name, w in self.weights.items()}
        partial.write_bytes(safetensors.torch.save(weights, {FORMAT: json.dumps(about)}))
        partial.replace(target)


def _shape(told: Mapping[str, Any], make: Make | None, path: str, most: int) -> AnyModel:
    """Return the model that was described.

    Args:
        told: the description.
        make: the class of a user's module.
        path: of the file.
        most: number of layers that the file can have weights for.

    Raises:
        DataError: it is a module, and the class was not given; or there are more layers.
    """
    if "module" not in told:
        model = TypeAdapter(Model).validate_python(told)
        if model.layers > most:
            raise DataError(
                f"expected weights of {model.layers} layers in {path}, got {most} weights in all"
            )
        return model
    if make is None:
        raise DataError(
            f"expected the class of the model in {path}, got none: it is a torch.nn.Module, "
            f"{told['module']}, and files are not trusted to name code; use "
            "sg.load_model(PATH, model=...)"
        )
    task: LabelForm = TypeAdapter(LabelForm).validate_python(told["task"])
    return ModuleModel(told["module"], make, int(told["features"]), int(told["outputs"]), task)


def _check_shapes(shape: AnyModel, weights: Params, path: str) -> None:
    """Raise `DataError` unless weights are those of the model that a file describes."""
    found = {name: tuple(w.shape) for name, w in weights.items()}
    try:
        expected = dict(shape.weight_shapes)
    except (ArithmeticError, RuntimeError):  # widths of 0, or beyond all numbers
        raise DataError(f"expected the shape of a model in {path}, got {shape}") from None
    if found != expected:
        raise DataError(f"expected weights {expected} in {path}, got {found}")


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
        shape = _shape(told["shape"], model, os.fspath(path), len(weights))
        names = TypeAdapter(tuple[str, ...]).validate_python(told["class_names"])
        normalize = TypeAdapter(Literal["none", "row"]).validate_python(told["normalize"])
    except DataError:
        raise
    except (KeyError, TypeError, ValueError):  # pydantic's ValidationError is a ValueError
        raise DataError(f"expected a model's shape in {os.fspath(path)}, got none") from None
    _check_shapes(shape, weights, os.fspath(path))
    return TrainedModel(shape, weights, names, normalize)
