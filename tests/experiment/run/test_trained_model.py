"""Trained models: saved and loaded without loss, and used on a graph."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import silograph as sg
from mistakes import raises_code
from silo_folders import NORTH, folder
from silograph.core.errors import DataError
from silograph.core.key import Key
from silograph.core.resolved_config import to_run_config
from silograph.experiment.resolve.data import cut_graph
from silograph.experiment.resolve.parts import choose_parts
from silograph.experiment.run.trained_model import Preprocessing, TrainedModel, check_names
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import make_partition
from silograph.graph.partition.split import draw_split
from silograph.graph.silos.export import write_silos
from silograph.nn.consisrec import ConsisRec
from silograph.nn.forward import AnyModel
from silograph.nn.model import Model
from silograph.nn.rating_factors import RatingBiases, RatingFactors
from silograph.nn.rating_model import RatingModel
from silograph.nn.rating_profiles import RatingProfiles


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
    assert (back.shape, back.class_names, back.preprocessing.normalize) == (
        model.shape,
        ("a", "b ü", "c"),
        normalize,
    )
    assert all(torch.equal(w, back.weights[k]) for k, w in model.weights.items())
    assert np.array_equal(back.predict(graph), model.predict(graph))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


RATING_SHAPES: tuple[AnyModel, ...] = (
    RatingBiases(5.0),
    ConsisRec(3),
    RatingFactors("sorec", 3),
    RatingModel("rating_gcn", 4, 2, 3, 0.5),
    RatingProfiles(4, 2, 0.5, 5.0, 3),
)


@pytest.mark.parametrize("shape", RATING_SHAPES, ids=lambda shape: str(shape.described()["kind"]))
def test_files_say_the_kind_of_a_model_of_ratings_and_older_ones_did_not(
    tmp_path: Path, shape: AnyModel
) -> None:
    weights, path = shape.init_weights(Key.of(0), torch.float32), tmp_path / "model.safetensors"
    TrainedModel(shape, weights).save(path)
    assert sg.load_model(path).shape == shape
    told = {name: value for name, value in shape.described().items() if name != "kind"}
    for kind in ({}, {"kind": "none"}):
        about = {"shape": told | kind, "class_names": [], "normalize": "none"}
        safetensors.torch.save_file(weights, path, {"silograph model 1": json.dumps(about)})
        if not kind:
            assert sg.load_model(path).shape == shape
    with pytest.raises(DataError, match="expected a model's shape"):
        sg.load_model(path)


def test_a_model_of_csv_tables_keeps_the_names_of_their_features(tmp_path: Path) -> None:
    rows = [f"{i},{i % 2},{i},{-i}" for i in range(8)]
    (tmp_path / "nodes.csv").write_text("\n".join(["id,label,size,age", *rows]))
    edges = [f"{i},{(i + 1) % 8}" for i in range(8)]
    (tmp_path / "edges.csv").write_text("\n".join(["source,target", *edges]))
    graph = sg.from_csv(nodes=tmp_path / "nodes.csv", edges=tmp_path / "edges.csv")
    assert graph.feature_names == ("size", "age")
    trained(graph, clients=2).save(tmp_path / "model.safetensors")
    back = sg.load_model(tmp_path / "model.safetensors")
    assert back.feature_names == ("size", "age")
    turned = replace(graph, feature_names=("age", "size"))
    with raises_code(
        DataError, "model-mismatch", what="features", expected=["size", "age"], got=["age", "size"]
    ):
        back.predict(turned)
    assert trained(graph, clients=2, features="degree").feature_names == ()
    cut = make_partition(graph, "random", clients=2, key=Key.of(0))
    split = draw_split(graph, cut, ratios=(0.2, 0.4, 0.4), key=Key.of(0))
    silo = sg.read_silo(write_silos(tmp_path / "silos", graph, cut, split, format="csv")[0])
    assert silo.feature_names == ("size", "age")
    assert back.predict(silo).shape == (4,)


def test_predictions_are_those_of_the_uncut_view(make_graph: Callable[..., Graph]) -> None:
    graph = make_graph(200)
    result = sg.run(graph, clients=3, partition="random", rounds=5, hidden=8, split="0.3/0.3/0.4")
    assert result.model is not None
    right = torch.from_numpy(result.model.predict(graph)) == graph.y
    # The split is drawn from the seed alone, so it can be drawn again.
    partition = choose_parts(to_run_config(result.config)).partition
    test = cut_graph(result.config, graph, partition).split.test
    assert result.test.uncut is not None
    assert result.test.uncut.accuracy == float(right[test].double().mean())


def test_other_features_are_refused(make_graph: Callable[..., Graph]) -> None:
    model = trained(make_graph())
    with raises_code(DataError, "model-mismatch", what="features", expected=7, got=9):
        model.predict(make_graph(features=9))


def test_local_training_has_no_model_to_save(make_graph: Callable[..., Graph]) -> None:
    assert sg.run(make_graph(), clients=3, rounds=1, method="local").model is None


def test_a_result_folder_stands_for_its_model(
    make_graph: Callable[..., Graph], tmp_path: Path
) -> None:
    graph, out = make_graph(), tmp_path / "out"
    sg.run(graph, clients=3, rounds=1, partition="random", out=str(out))
    model, same = sg.load_model(out), sg.load_model(out / "model.safetensors")
    assert np.array_equal(model.predict(graph), same.predict(graph))
    (out / "model.safetensors").write_bytes(b"changed")
    with pytest.raises(DataError, match=r"model\.safetensors as the run has written it"):
        sg.load_model(out)


def test_files_that_are_no_models(make_graph: Callable[..., Graph], tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with raises_code(DataError, "missing-file"):
        sg.load_model(path)
    path.write_bytes(b"not a model at all, but long enough")
    with pytest.raises(DataError, match=r"m\.safetensors, got one that cannot be read or is no"):
        sg.load_model(path)
    with pytest.raises(DataError, match=r"got the folder .*: give a file in it, such as .*safe"):
        sg.load_model(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"got the folder .*/empty: there is no model in it"):
        sg.load_model(tmp_path / "empty")
    safetensors.torch.save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(DataError, match=r"expected a 'silograph model 1' in .*, got keys"):
        sg.load_model(path)
    model = trained(make_graph())
    replace(model, weights={"0.weight": torch.zeros(2, 2)}).save(path)
    with pytest.raises(DataError, match=r"expected weights .* got"):
        sg.load_model(path)
    for text in ("{}", "[" * 100_000):  # the latter is more than Python's stack holds
        about = {"silograph model 1": text}
        safetensors.torch.save_file({"w": torch.zeros(2)}, path, about)
        with pytest.raises(DataError, match=r"expected a model's shape in .*, got none"):
            sg.load_model(path)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"hidden": 10**9}, "expected weights of Model"),
        ({"layers": 10**9}, "expected weights of Model"),
        ({"features": -1}, "expected weights of Model"),
        ({"hops": 10**9}, "expected weights of Model"),
        ({"conv": "exec"}, "expected weights of Model"),
        ({"hidden": (8, 10**9), "layers": 3}, "expected weights of Model"),
        ({"hidden": (8, 0), "layers": 3}, "expected weights of Model"),
        ({"conv": "gin", "layers": 1, "hidden": 0}, "expected weights of Model"),
        ({"residual": True, "hidden": (8, 7), "layers": 3}, "expected weights of Model"),
        ({"layers": 1}, r"expected weights \{'0.weight': \(7, 3\), '0.bias': \(3,\)\} in "),
    ],
)
def test_sizes_of_a_hostile_file_are_refused_before_memory_is_taken(
    make_graph: Callable[..., Graph], tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    model, path = trained(make_graph()), tmp_path / "m.safetensors"
    assert isinstance(model.shape, Model)
    replace(model, shape=replace(model.shape, **change)).save(path)
    with pytest.raises(DataError, match=line):
        sg.load_model(path)


def test_values_and_names_of_a_hostile_file_are_refused(
    make_graph: Callable[..., Graph], tmp_path: Path
) -> None:
    model, path = trained(make_graph()), tmp_path / "m.safetensors"
    name, one_name = next(iter(model.weights)), Preprocessing(feature_names=("a",))
    for change, line in (
        ({"weights": {**model.weights, name: model.weights[name] * torch.nan}}, "finite weights"),
        ({"weights": {n: w.half() for n, w in model.weights.items()}}, "float32 or float64"),
        ({"class_names": ("a",)}, "names of 3 classes in .*, got 1"),
        ({"preprocessing": one_name}, "names of 7 features in .*, got 1"),
    ):
        replace(model, **change).save(path)
        with pytest.raises(DataError, match=line):
            sg.load_model(path)


def test_features_and_classes_of_a_silo_must_mean_the_same(
    make_graph: Callable[..., Graph], tmp_path: Path
) -> None:
    """As many of other names are refused; a model that knows no names takes them as they are."""
    north = sg.read_silo(folder(tmp_path / "north", NORTH))
    shape = trained(make_graph()).shape
    assert isinstance(shape, Model)
    shape = replace(shape, features=2, outputs=2)
    weights = shape.init_weights(Key.of(0), torch.float32)
    named = Preprocessing(feature_names=("size", "age"))
    model = TrainedModel(shape, weights, ("cat", "dog"), named)
    assert model.predict(north).shape == (3,)
    bare = replace(model, class_names=(), preprocessing=Preprocessing())
    assert bare.predict(north).shape == (3,)
    model.save(tmp_path / "m.safetensors")
    assert sg.load_model(tmp_path / "m.safetensors").feature_names == ("size", "age")
    turned = Preprocessing(feature_names=("age", "size"))
    with raises_code(
        DataError, "model-mismatch", what="features", expected=["age", "size"], got=["size", "age"]
    ):
        replace(model, preprocessing=turned).predict(north)
    with raises_code(
        DataError, "model-mismatch", what="classes", expected=["dog", "cat"], got=["cat", "dog"]
    ):
        replace(model, class_names=("dog", "cat")).predict(north)


def test_classes_that_mean_something_else_are_refused(make_graph: Callable[..., Graph]) -> None:
    graph = replace(make_graph(), class_names=("a", "b", "c"))
    model = trained(graph)
    model.predict(graph)
    model.predict(replace(graph, class_names=()))  # nobody says what they mean
    with raises_code(
        DataError, "model-mismatch", what="classes", expected=["a", "b", "c"], got=["b", "a", "c"]
    ):
        model.predict(replace(graph, class_names=("b", "a", "c")))


def test_the_name_that_differs_is_told() -> None:
    ours, theirs = ("a", "b", "c", "income", "e"), ("a", "b", "c", "salary", "e")
    with raises_code(
        DataError,
        "model-mismatch",
        what="features",
        expected=["a", "b", "c", "income", "e"],
        got=["a", "b", "c", "salary", "e"],
    ):
        check_names("features", ours, theirs, "w")
    check_names("features", ours, ours, "w")
    check_names("features", ours, (), "w")
