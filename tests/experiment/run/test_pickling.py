"""Public results leave a process pool: pickled or deep-copied, they are equal after the trip."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import silograph as sg
from conftest import planted_graph
from rating_graphs import rating_graph
from runs import FAST, MakeGraph, outcome, same_bits
from silo_folders import NORTH, SOUTH, drawn_split, folder, same
from silograph.core import errors
from silograph.core.config import make_config
from silograph.core.key import Key
from silograph.experiment.run.result import Result
from silograph.federation.base import AwayError
from silograph.graph.graph import fingerprint
from silograph.methods import METHODS

TRIPS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
}
TRIP = pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS)
QUICK: dict[str, Any] = {**FAST, "rounds": 2, "clients": 2, "kernels": "torch"}
METHOD_FILE = """
from dataclasses import replace
from silograph.graph.graph import fingerprint
from silograph.methods import METHODS
def note(options, facts): return "from a file"
METHOD = replace(METHODS["scaffold"], name="mine", note=note)
"""
MODEL_FILE = """
from torch import nn
class Net(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.line = nn.Linear(features, outputs)
    def forward(self, x, edge_index): return self.line(x)
"""


def check_equal(ours: Result, theirs: Result, graph: sg.Graph | None = None) -> None:
    """Assert that a result and its copy say the same, and that their models predict the same."""
    assert outcome(ours) == outcome(theirs)
    assert ours.rounds == theirs.rounds
    assert ours.config == theirs.config
    assert ours.summary(100) == theirs.summary(100)
    assert ours.method.name == theirs.method.name
    lines = [[record.to_line() for record in r.ledger.records] for r in (ours, theirs)]
    assert lines[0] == lines[1]
    assert ours.models.keys() == theirs.models.keys()
    pairs = [(ours.models[client], theirs.models[client]) for client in ours.models]
    if ours.model is not None:
        assert theirs.model is not None
        pairs.append((ours.model, theirs.model))
    for mine, other in pairs:
        assert same_bits(mine.weights, other.weights)
        if graph is not None:
            assert torch.equal(mine.logits(graph), other.logits(graph))
    if ours.cut is not None:
        assert theirs.cut is not None
        same(ours.cut.split, theirs.cut.split)


@TRIP
@pytest.mark.parametrize("method", METHODS)
def test_methods_of_the_library_are_pickled_by_their_name(
    method: str, trip: Callable[[Any], Any]
) -> None:
    assert trip(METHODS[method]) is METHODS[method]
    changed = trip(replace(METHODS[method], title="mine"))
    assert changed == replace(METHODS[method], title="mine")


@pytest.mark.law(sample=24)
@TRIP
@pytest.mark.parametrize(
    "options",
    [
        {"method": "fedavg"},
        {"method": "fedper"},  # models of clients
        {"method": "fedpub"},  # masks
        {"method": "local", "model": "gat"},  # no model at the server
        {"method": "fedall", "model": "sage"},  # options that a preset makes
    ],
    ids=str,
)
def test_results(
    make_graph: MakeGraph, options: dict[str, Any], trip: Callable[[Any], Any]
) -> None:
    graph = make_graph(40)
    result = sg.run(graph, **QUICK | options)
    check_equal(trip(result), result, graph)


@pytest.mark.law(sample=24)
@TRIP
@pytest.mark.parametrize(
    "model", ["rating_profiles", "rating_gcn", "rating_biases", "consisrec", "rating_mf"]
)
def test_results_of_ratings(model: str, trip: Callable[[Any], Any]) -> None:
    result = sg.run(rating_graph(), **QUICK | {"model": model, "lr": 0.01})
    check_equal(trip(result), result)


@TRIP
def test_results_of_code_in_files(
    make_graph: MakeGraph,
    trip: Callable[[Any], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "mine.py").write_text(METHOD_FILE + MODEL_FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    graph, options = make_graph(40), {k: v for k, v in QUICK.items() if k != "hidden"}
    result = sg.run(graph, **options | {"method": "mine.py:METHOD", "model": "mine.py:Net"})
    copied = trip(result)
    check_equal(copied, result, graph)
    assert copied.method.note is not None
    assert copied.method.note(None, {}) == "from a file"


class Line(nn.Module):
    """A module of a user's own, given as a value."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.line = nn.Linear(features, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        del edge_index
        out: Tensor = self.line(x)
        return out


@TRIP
def test_results_of_a_module_given_as_a_value(
    make_graph: MakeGraph, trip: Callable[[Any], Any]
) -> None:
    graph, options = make_graph(40), {k: v for k, v in QUICK.items() if k != "hidden"}
    result = sg.run(graph, **options, model=Line)
    check_equal(trip(result), result, graph)


@pytest.mark.law(sample=6)
@TRIP
def test_comparisons_and_searches(make_graph: MakeGraph, trip: Callable[[Any], Any]) -> None:
    pytest.importorskip("optuna")
    options = {k: v for k, v in QUICK.items() if k not in ("method", "lr")}
    table = sg.compare(make_graph(40), methods=["local", "fedavg"], seeds=2, processes=0, **options)
    copied = trip(table)
    assert copied.to_json() == table.to_json()
    assert copied.summary() == table.summary()
    search = sg.tune(make_graph(40), method="fedavg", keys=["lr"], trials=2, processes=0, **options)
    copied = trip(search)
    assert copied.to_json() == search.to_json()
    assert copied.summary() == search.summary()


@TRIP
def test_graphs_and_what_they_are_cut_into(trip: Callable[[Any], Any], tmp_path: Path) -> None:
    graphs = [planted_graph(), planted_graph(sparse=True), rating_graph()]
    for graph in graphs:
        copied = trip(graph)
        assert fingerprint(copied) == fingerprint(graph)
        assert copied.class_names == graph.class_names
    partition = sg.make_partition(graphs[0], "random", clients=3, key=Key.of(0))
    assert trip(partition).hash == partition.hash
    split = drawn_split(graphs[0])
    same(trip(split), split)
    folder(tmp_path / "north", dict(NORTH))
    folder(tmp_path / "south", dict(SOUTH))
    silo = sg.read_silo(tmp_path / "north")
    same(trip(silo), silo)
    silos = sg.read_silos(tmp_path)
    same(trip(silos), silos)
    config = make_config({"method": "fedavg", "rounds": 3})
    assert trip(config) == config


@TRIP
def test_errors(trip: Callable[[Any], Any]) -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, errors.SilographError):
            found = trip(kind("expected a, got b"))
            assert type(found) is kind
            assert str(found) == "expected a, got b"
    away = trip(AwayError("two are away", ["a", "b"], 2))
    assert (str(away), away.names, away.needed) == ("two are away", ("a", "b"), 2)
