"""Federated means and deviations: a session has the bits of a simulation, predictions too."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mistakes import raises_code

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

import silograph as sg
from silograph.core.errors import ConfigError, DataError
from silograph.deploy.policy import SiloPolicy
from silograph.deploy.server_settings import ServerSettings
from silograph.experiment.run.predictions import predict_to
from silograph.experiment.run.result import Result
from silograph.graph.graph import Graph
from silos import config_of, federate, folders

MakeGraph = Callable[..., Graph]
PLAIN = ServerSettings("127.0.0.1:0", seconds=60, insecure=True)
OPTIONS: dict[str, Any] = {
    "partition": "random",
    "split": "0.4/0.3/0.3",
    "dtype": "float32",
    "rounds": 2,
    "hidden": 8,
    "model": "mlp",
}


def with_times(graph: Graph) -> Graph:
    """Return a graph whose first feature is a Unix time, which differs beyond float32 only."""
    assert isinstance(graph.x, torch.Tensor)
    x = graph.x.double() * torch.logspace(-2, 2, graph.x.shape[1], dtype=torch.float64)
    x[:, 0] = 1.7e9 + torch.arange(graph.num_nodes) % 40
    return replace(graph, x=x)


def trained(
    graph: Graph, path: Path, said: list[str] | None = None, **options: Any
) -> tuple[Result, Result, tuple[Path, ...]]:
    """Return a federation of three silos, the same in one process, and the silos' folders."""
    config = config_of(3, **OPTIONS | options)
    silos = folders(graph, config, path / "silos")
    venue = replace(PLAIN, silos=tuple(silo.name for silo in silos))
    result = federate(
        silos, replace(config, out=str(path / "run")), venue, silo_lines=said, keep=True
    )
    return result, sg.run(graph, config=config, block_size=1), silos


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("normalize", ["standard", "standard_client"])
def test_a_session_has_the_bits_of_a_simulation(
    make_graph: MakeGraph, tmp_path: Path, normalize: str
) -> None:
    graph, said = with_times(make_graph(90)), list[str]()
    ours, theirs, silos = trained(graph, tmp_path, said, normalize=normalize)
    assert ours.model is not None
    assert theirs.model is not None
    assert ours.test.server == theirs.test.server
    assert all(torch.equal(w, theirs.model.weights[name]) for name, w in ours.model.weights.items())
    lines = [[r.to_line() for r in result.ledger.since(0)] for result in (ours, theirs)]
    assert lines[0] == lines[1]
    federated = normalize == "standard"
    assert ("statistics" in ours.ledger.bytes_by_kind) is federated
    if federated:
        ours_fitted, theirs_fitted = (
            model.preprocessing.statistics for model in (ours.model, theirs.model)
        )
        assert ours_fitted is not None
        assert theirs_fitted is not None
        assert torch.equal(ours_fitted.mean, theirs_fitted.mean)
        assert torch.equal(ours_fitted.deviation, theirs_fitted.deviation)
        assert theirs.cut is not None
        assert theirs.cut.statistics is not None
        assert torch.equal(theirs.cut.statistics.mean, theirs_fitted.mean)
        assert torch.equal(theirs.cut.statistics.deviation, theirs_fitted.deviation)
    kept = [Path(line.partition(" are in ")[2]) for line in said if " are in " in line]
    for folder in kept:
        name = json.loads((folder / "result.json").read_text())["silo"]
        own = sg.load_model(folder / "model.safetensors")
        silo = sg.read_silo(next(path for path in silos if path.name == name))
        expected = theirs.model_of(name).logits(silo)
        assert torch.equal(own.logits(silo), expected)
        one = sg.load_model(folder / "model.safetensors").predict(silo)
        assert np.array_equal(one, theirs.model_of(name).predict(silo))
    server = tmp_path / "run"
    if federated:
        assert predict_to(server, silos[0], tmp_path / "p.csv") == len(sg.read_silo(silos[0]).y)
        return
    assert ours.model.preprocessing.needs_client
    with raises_code(DataError, "missing-file"):
        predict_to(server, silos[0], tmp_path / "p.csv")
    with raises_code(DataError, "missing-option", option="client"):
        ours.model.predict(graph)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("use", [None, "scale"])
def test_weights_of_edges_are_the_same_over_a_session(
    make_graph: MakeGraph, tmp_path: Path, use: str | None
) -> None:
    """The mean weight comes from sums over silos, also where the weights of one silo are all 1.

    Without edge_weights the rule is `log`, which needs no sums.
    """
    graph = make_graph(90)
    low, high = graph.edge_index.min(dim=0).values, graph.edge_index.max(dim=0).values
    weight = torch.where(low < 20, 1.0, ((low * 7 + high * 13) % 10).double() * 37 + 0.1)
    graph = replace(graph, edge_weight=weight.double())
    said = list[str]()
    given = {"model": "gcn", "edge_weights": use, "normalize": "standard"}
    ours, theirs, silos = trained(graph, tmp_path, said, **given)
    assert ours.model is not None
    assert theirs.model is not None
    assert ours.test.server == theirs.test.server
    assert all(torch.equal(w, theirs.model.weights[name]) for name, w in ours.model.weights.items())
    lines = [[r.to_line() for r in result.ledger.since(0)] for result in (ours, theirs)]
    assert lines[0] == lines[1]
    means = [m.preprocessing.mean_edge_weight for m in (ours.model, theirs.model)]
    assert means[0] == means[1]
    assert (means[0] is not None) is (use == "scale")
    assert theirs.config.edge_weights == (use or "log")
    kept = [Path(line.partition(" are in ")[2]) for line in said if " are in " in line]
    assert len(kept) == len(silos)
    for folder in kept:
        own = sg.load_model(folder / "model.safetensors")
        assert own.preprocessing.mean_edge_weight == means[0]
        assert torch.equal(own.logits(graph), theirs.model.logits(graph))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "options",
    [
        {"class_weight": "balanced", "model": "gcn"},
        {"class_weight": "balanced", "normalize": "standard", "evaluation_min_count": 2},
        {"class_weight": "balanced", "normalize": "standard_client"},
        {"class_weight": {"0": 5, "2": 0.5}},
    ],
)
def test_weights_of_classes_are_the_same_over_a_session(
    make_graph: MakeGraph, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Counts of labels travel as statistics; weights that are given travel with the config."""
    ours, theirs, _ = trained(make_graph(90), tmp_path, **options)
    assert ours.model is not None
    assert theirs.model is not None
    assert ours.test.server == theirs.test.server
    assert all(torch.equal(w, theirs.model.weights[name]) for name, w in ours.model.weights.items())
    lines = [[r.to_line() for r in result.ledger.since(0)] for result in (ours, theirs)]
    assert lines[0] == lines[1]
    assert ("statistics" in ours.ledger.bytes_by_kind) is (options["class_weight"] == "balanced")


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("use", [None, "scale"])
def test_without_weights_of_edges_there_are_no_sums(
    make_graph: MakeGraph, tmp_path: Path, use: str | None
) -> None:
    ours, theirs, _ = trained(make_graph(60), tmp_path, model="gcn", edge_weights=use)
    assert "statistics" not in ours.ledger.bytes_by_kind
    assert ours.config.edge_weights == theirs.config.edge_weights == "use"
    lines = [[r.to_line() for r in result.ledger.since(0)] for result in (ours, theirs)]
    assert lines[0] == lines[1]


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("normalize", ["none", "standard", "standard_client"])
def test_histograms_of_features_are_the_same_over_a_session(
    make_graph: MakeGraph, tmp_path: Path, normalize: str
) -> None:
    drift: dict[str, Any] = {
        "feature_drift": True,
        "evaluation_min_count": 3,
        "normalize": normalize,
    }
    graph = make_graph(90) if normalize == "none" else with_times(make_graph(90))
    ours, theirs, _ = trained(graph, tmp_path, **drift)
    assert ours.feature_drift.keys() == theirs.feature_drift.keys() != set()
    for name, distances in ours.feature_drift.items():
        assert torch.equal(distances, theirs.feature_drift[name])
    lines = [[r.to_line() for r in result.ledger.since(0)] for result in (ours, theirs)]
    assert lines[0] == lines[1]
    assert (tmp_path / "run/feature_drift.csv").read_text().count("\n") == 1 + 3 * len(
        ours.feature_drift
    )


@pytest.mark.parametrize("asks", [{"normalize": "standard"}, {"feature_drift": True}])
def test_a_policy_decides_whether_sums_may_leave(
    make_graph: MakeGraph, tmp_path: Path, asks: dict[str, Any]
) -> None:
    graph = make_graph(60)
    config = config_of(2, **OPTIONS, **asks)
    silos = folders(graph, config, tmp_path / "silos")
    policy = SiloPolicy(kinds=("control", "evaluation", "weights"))
    with pytest.raises(ConfigError, match=r"write kinds = .*, \"statistics\", \"weights\"\] there"):
        federate(silos, config, PLAIN, policy=policy)
    policy = SiloPolicy(kinds=("control", "evaluation", "statistics", "weights"))
    config = replace(config, clients=1)
    silos = folders(graph, config, tmp_path / "one")
    audit = tmp_path / "audit.jsonl"
    result = federate(silos, config, PLAIN, policy=policy, audit=audit)
    entries = [json.loads(line) for line in audit.read_text().splitlines()]
    sent = [entry for entry in entries if entry.get("kind") == "statistics"]
    assert len(sent) == 3 + ("feature_drift" in asks)
    assert result.ledger.bytes_by_kind["statistics"] > 0
