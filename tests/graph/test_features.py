"""Laws of features that are made: closed forms, and the same at silos as in the whole graph."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import silograph as sg
from mistakes import raises_code
from runs import FAST, go, of, rows_of, same_bits
from silograph.experiment.run.predictions import predict_to
from silograph.graph.csr import CSR
from silograph.graph.graph import WIDTHS, FeatureSource, Graph, made_features, with_features
from silograph.graph.silos.data import featured

MakeGraph = Callable[..., Graph]


def dense(x: torch.Tensor | CSR) -> np.ndarray:
    return x.scipy().toarray() if isinstance(x, CSR) else x.numpy()


def test_features_are_made_of_degrees() -> None:
    degree = torch.tensor([0, 3, 62, 63, 900])
    assert made_features("degree", degree).tolist() == [[0], [3], [62], [63], [900]]  # type: ignore[union-attr]
    assert dense(made_features("constant", degree)).tolist() == [[1]] * 5
    one_hot = dense(made_features("onehot-degree", degree))
    assert one_hot.shape == (5, WIDTHS["onehot-degree"])
    assert one_hot.argmax(axis=1).tolist() == [0, 3, 62, 63, 63]
    assert (one_hot.sum(axis=1) == 1).all()


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("source", WIDTHS)
def test_silos_make_the_features_of_the_whole_graph(
    make_graph: MakeGraph, tmp_path: Path, source: FeatureSource
) -> None:
    graph = replace(make_graph(), x=torch.zeros(60, 0))
    whole = go(graph, features=source, rounds=2)
    assert whole.cut is not None
    cut = whole.cut
    sg.write_silos(tmp_path / "silos", graph, cut.partition, cut.split)
    silos = sg.read_silos(tmp_path / "silos")
    for silo, nodes in zip(silos.members, cut.partition.nodes, strict=True):
        assert silo.graph.num_features == 0
        made = with_features(graph, source).x
        assert (dense(featured(silo, source).x) == dense(made)[nodes.numpy()]).all()
    ours = go(tmp_path / "silos", features=source, rounds=2, clients=None, partition="silo")  # type: ignore[arg-type]
    assert same_bits(of(ours), of(whole))
    assert rows_of(ours) == rows_of(whole)


def test_a_trained_model_makes_them_again(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph()
    result = go(graph, features="onehot-degree", rounds=2)
    assert result.model is not None
    assert result.model.shape.features == 64
    result.model.save(tmp_path / "model")
    back = sg.load_model(tmp_path / "model")
    assert back.preprocessing.features == "onehot-degree"
    bare = replace(graph, x=torch.zeros(60, 0))
    assert (back.predict(bare) == result.model.predict(graph)).all()


def test_predictions_at_silos_are_of_made_features(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = replace(make_graph(), x=torch.zeros(60, 0))
    whole = go(graph, features="degree", rounds=1, method="local")
    cut = whole.cut
    assert cut is not None
    assert whole.models["client_00"].preprocessing.features == "degree"
    folder = sg.write_silos(tmp_path / "silos", graph, cut.partition, cut.split)[0]
    own: dict[str, Any] = {"clients": None, "partition": "silo", "out": str(tmp_path / "run")}
    sg.run(tmp_path / "silos", **(FAST | own | {"features": "degree", "rounds": 1}))
    silo = sg.read_silo(folder)
    model = sg.load_model(tmp_path / "run" / "model.safetensors")
    given = replace(model, preprocessing=replace(model.preprocessing, features="given"))
    assert torch.equal(model.logits(silo), given.logits(featured(silo, "degree").graph))
    assert not torch.equal(model.logits(silo), model.logits(silo.graph))  # edges to other silos
    assert predict_to(tmp_path / "run", folder, tmp_path / "p.csv") == len(silo.node_id)
    with raises_code(sg.ConfigError, "unread-option", option="columns"):
        predict_to(tmp_path / "run", folder, tmp_path / "q.csv", columns="id=key")
    with pytest.raises(sg.DataError, match="got 'client_00' without: choose features degree"):
        given.predict(silo)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "with features, got 'bare' without: choose features degree, constant or onehot-degree, s"),
    ({"features": "degre"}, "features: input should be 'given', 'degree', 'constant' or 'onehot-d"),
    ({"features": "degree", "normalize": "row"}, "normalize none with features degree, got row"),
    ({"features": "degree", "drop_edges": 0.5}, "no drop_edges with features degree, got 0.5"),
    ({"features": "onehot-degree", "drop_edges": 0.5}, "no drop_edges with features onehot-degree"),
    (
        {"features": "degree", "partition": "metis_overlapping", "clients": 5},
        r"every node at a client with features degree, got \d+ at none",
    ),
]


@pytest.mark.parametrize(("options", "match"), WRONG)
def test_features_that_cannot_be_are_one_line(
    make_graph: MakeGraph, options: dict[str, Any], match: str
) -> None:
    bare = replace(make_graph(), x=torch.zeros(60, 0), name="bare")
    with pytest.raises(sg.SilographError, match=match) as caught:
        go(bare, **options)
    assert "\n" not in str(caught.value)


def test_silos_say_whether_they_have_features(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = replace(make_graph(), x=torch.zeros(60, 0))
    cut = go(graph, features="constant", rounds=1).cut
    assert cut is not None
    folders = sg.write_silos(tmp_path / "silos", graph, cut.partition, cut.split)
    with pytest.raises(sg.DataError, match="got 'client_00' without: choose features degree"):
        sg.run(tmp_path / "silos")
    (folders[0] / "features.csv").write_text("id,a\n")
    with pytest.raises(sg.DataError, match=r"no table of features with features = 0, got features"):
        sg.read_silo(folders[0])
    (folders[0] / "features.csv").unlink()
    spec = folders[0] / "silo.toml"
    spec.write_text(spec.read_text().replace("sparse = false", "sparse = true"))
    with pytest.raises(sg.DataError, match="with features = 0, got sparse = true: drop it"):
        sg.read_silo(folders[0])
