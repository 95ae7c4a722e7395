"""Trained models: saved and loaded without loss, and used on a graph."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import silograph as sg
from silograph.core.errors import DataError
from silograph.core.resolved_config import asked_again
from silograph.experiment.resolve.cutting import cut_graph
from silograph.experiment.resolve.parts import choose_parts
from silograph.experiment.run.trained_model import TrainedModel
from silograph.graph.graph import Graph


def trained(graph: Graph, **options: object) -> TrainedModel:
    defaults: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 3, "hidden": 8}
    model = sg.run(graph, **defaults | options).model
    assert model is not None
    return model


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("normalize", ["none", "row"])
def test_save_and_load(
    make_graph: Callable[..., Graph], tmp_path: Path, normalize: str, multilabel: bool
) -> None:
    graph = replace(make_graph(multilabel=multilabel), class_names=("a", "b ü", "c"))
    model = trained(graph, normalize=normalize)
    model.save(tmp_path / "model.safetensors")
    back = sg.load_model(tmp_path / "model.safetensors")
    assert (back.shape, back.class_names, back.normalize) == (
        model.shape,
        ("a", "b ü", "c"),
        normalize,
    )
    assert all(torch.equal(w, back.weights[k]) for k, w in model.weights.items())
    assert np.array_equal(back.predict(graph), model.predict(graph))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_predictions_are_those_of_the_uncut_view(make_graph: Callable[..., Graph]) -> None:
    graph = make_graph(200)
    result = sg.run(graph, clients=3, partition="random", rounds=5, hidden=8, split="0.3/0.3/0.4")
    assert result.model is not None
    right = torch.from_numpy(result.model.predict(graph)) == graph.y
    # The split is drawn from the seed alone, so it can be drawn again.
    partition = choose_parts(asked_again(result.config)).partition
    test = cut_graph(result.config, graph, partition).split.test
    assert result.test.uncut is not None
    assert result.test.uncut.accuracy == float(right[test].double().mean())


def test_other_features_are_refused(make_graph: Callable[..., Graph]) -> None:
    model = trained(make_graph())
    with pytest.raises(DataError, match="expected a graph with the model's 7 features, got 9"):
        model.predict(make_graph(features=9))


def test_local_training_has_no_model_to_save(make_graph: Callable[..., Graph]) -> None:
    assert sg.run(make_graph(), clients=3, rounds=1, method="local").model is None


def test_files_that_are_no_models(make_graph: Callable[..., Graph], tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(DataError, match=r"expected a model file at .*, got"):
        sg.load_model(path)
    path.write_bytes(b"not a model at all, but long enough")
    with pytest.raises(DataError, match=r"expected a model file at .*, got"):
        sg.load_model(path)
    safetensors.torch.save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(DataError, match=r"expected a 'silograph model 1' in .*, got keys"):
        sg.load_model(path)
    model = trained(make_graph())
    replace(model, weights={"0.weight": torch.zeros(2, 2)}).save(path)
    with pytest.raises(DataError, match=r"expected weights .* got"):
        sg.load_model(path)
    about = {"silograph model 1": "{}"}
    safetensors.torch.save_file({"w": torch.zeros(2)}, path, about)
    with pytest.raises(DataError, match=r"expected a model's shape in .*, got none"):
        sg.load_model(path)
