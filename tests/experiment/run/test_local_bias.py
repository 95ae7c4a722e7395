"""Local bias is 0 for what is centralized training, and else a distance that anyone can check."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from mistakes import raises_code
from runs import files_of, run_until
from silograph.core.errors import ConfigError
from silograph.experiment.run.result import Result
from silograph.graph.block.block import make_block, whole
from silograph.graph.graph import Graph
from silograph.nn.model import Model

MakeGraph = Callable[..., Graph]
RUN: dict[str, Any] = {
    "clients": 4,
    "partition": "random",
    "rounds": 5,
    "hidden": 8,
    "dtype": "float64",
    "local_bias": True,
}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("method", "options"),
    [("label_guided", {}), ("cagnet", {}), ("bns", {"rate": 1.0}), ("centralized", {})],
)
@pytest.mark.parametrize("epochs", [1, 2])
def test_centralized_training_has_none(
    make_graph: MakeGraph, method: str, options: dict[str, Any], epochs: int
) -> None:
    own = RUN | {"method": method, "options": options, "local_epochs": epochs}
    result = sg.run(make_graph(60), **own)
    assert result.local_bias is not None
    assert result.local_bias < 1e-9


def logits(result: Result, *, cut: bool) -> torch.Tensor:
    """Return the logits of a run's model on the nodes in client order, in its view."""
    assert result.cut is not None
    graph, partition = result.cut.graph, result.cut.partition
    held = partition if cut else whole(graph)
    block, _ = make_block(graph, held, result.cut.split, torch.float64)
    assert result.model is not None
    shape = result.model.shape
    assert isinstance(shape, Model)
    found = shape.forward(result.model.weights, block)
    return found if cut else found[partition.copies]


def test_the_distance_is_that_of_the_models(make_graph: MakeGraph) -> None:
    """After one round the best model is the last one, and without dropout draws do not matter."""
    own: dict[str, Any] = RUN | {"rounds": 1, "dropout": 0.0, "keep_optimizer": False}
    federated = sg.run(make_graph(60), **own, method="fedavg")
    central = sg.run(make_graph(60), **own | {"local_bias": False}, method="centralized")
    assert central.local_bias is None
    assert federated.local_bias is not None
    apart = logits(federated, cut=True) - logits(central, cut=False)
    assert federated.local_bias == pytest.approx(float(apart.norm(dim=1).mean()), abs=1e-12)
    assert federated.local_bias > 0.01
    assert federated.to_dict()["local_bias"] == federated.local_bias


def test_what_was_fetched_is_seen(make_graph: MakeGraph) -> None:
    """GraphConv does not scale by degrees: with all neighbors one layer sees what is there."""
    own: dict[str, Any] = RUN | {"rounds": 1, "dropout": 0.0, "keep_optimizer": False}
    own |= {"model": "graphconv", "layers": 1, "collect": 1.0, "method": "fedavg"}
    federated = sg.run(make_graph(60), **own)
    bare = {**own, "collect": 0.0, "local_bias": False, "method": "centralized"}
    central = sg.run(make_graph(60), **bare)
    apart = logits(federated, cut=False) - logits(central, cut=False)
    assert federated.local_bias == pytest.approx(float(apart.norm(dim=1).mean()), abs=1e-12)


def test_it_changes_nothing_and_resumes(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RUN | {"method": "fedavg", "collect": 0.5}
    with_bias = sg.run(make_graph(60), **run, out=str(tmp_path / "whole"))
    without = sg.run(make_graph(60), **run | {"local_bias": False})
    assert with_bias.test == without.test
    assert with_bias.bytes == without.bytes
    run_until(monkeypatch, make_graph(60), 2, tmp_path / "cut", **run)
    resumed = sg.resume(tmp_path / "cut", graph=make_graph(60))
    assert resumed.local_bias == with_bias.local_bias
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_it_is_told_wherever_results_are(
    make_graph: MakeGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = sg.run(
        make_graph(60), **RUN, method="fedavg", out=str(tmp_path / "r"), progress="plain"
    )
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "centralized" in line] == [
        f"round 5/5  0 s left  centralized model for local bias, round {t}/5" for t in range(1, 6)
    ]
    assert f"local bias: {result.local_bias:.4g}, mean distance" in result.summary()
    page = (tmp_path / "r" / "report.html").read_text()
    assert f"<dt>local bias</dt><dd>{result.local_bias:.3g}</dd>" in page
    several = {**RUN, "methods": ["fedavg", "label_guided"], "seeds": [0], "processes": 0}
    table = sg.compare(make_graph(60), **several)
    found = [row["local_bias"] for row in table.rows]
    assert found[0] == result.local_bias
    assert found[1] < 1e-9
    assert f"{result.local_bias:.4g}" in table.summary(width=80)
    without = sg.compare(make_graph(60), **several | {"local_bias": False})
    assert "local bias" not in without.summary()


def test_methods_without_a_model_at_the_server(make_graph: MakeGraph) -> None:
    with raises_code(ConfigError, "conflicting-options", options=["method", "local_bias"]):
        sg.run(make_graph(40), **RUN, method="local")
