"""What silos keep of a run: the model, their own scores, a page; and what they predict with it."""

import csv
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
from pages import read_page
from silograph.cli import run_app
from silograph.core import files
from silograph.core.errors import ConfigError
from silograph.deploy import silo_result
from silograph.deploy.server_settings import ServerSettings
from silograph.deploy.silo import Attendance, take_part_in_run
from silograph.deploy.silo_result import check_result_folder
from silograph.experiment.report.page import FIELDS, UNUSED
from silograph.experiment.resolve.data import client_block
from silograph.experiment.run.predictions import predict_to
from silograph.experiment.run.result import Result
from silograph.federation.session.silo_data import run_name
from silograph.graph.graph import Graph
from silograph.graph.silos.read import read_silo
from silograph.methods import METHODS
from silos import config_of, federate, folders

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BASE: dict[str, Any] = {
    "partition": "random",
    "rounds": 5,
    "hidden": 8,
    "lr": 1.0,
}  # the best round is the second or fourth
MakeGraph = Callable[..., Graph]


class Federated:
    """A federation of two silos that has trained, and the same in one process."""

    def __init__(
        self, graph: Graph, path: Path, venue: ServerSettings = PLAIN, **options: Any
    ) -> None:
        self.config = config_of(2, **BASE | options)
        self.silos = folders(graph, self.config, path / "silos")
        self.said: list[str] = []
        self.result = federate(self.silos, self.config, venue, silo_lines=self.said, keep=True)
        self.simulated: Result = sg.run(graph, config=self.config, block_size=1)
        self.folders = [
            Path(line.partition(" are in ")[2]) for line in self.said if " are in " in line
        ]

    def about(self, silo: Path) -> dict[str, Any]:
        return next(a for a in map(about_of, self.folders) if a["silo"] == silo.name)


def about_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_weights_of_edges_are_used_as_in_a_simulation(
    make_graph: MakeGraph, tmp_path: Path, model: str
) -> None:
    graph = make_graph(60)
    low, high = graph.edge_index.min(dim=0).values, graph.edge_index.max(dim=0).values
    weighed = replace(graph, edge_weight=((low * 7 + high * 3) % 9).double() / 4)
    found = Federated(weighed, tmp_path, method="fedavg", model=model)
    ours, theirs = (result.model for result in (found.result, found.simulated))
    assert ours is not None
    assert theirs is not None
    assert all(torch.equal(w, theirs.weights[name]) for name, w in ours.weights.items())
    bare = sg.run(graph, config=found.config, block_size=1).model
    assert bare is not None
    same = all(torch.equal(w, bare.weights[name]) for name, w in ours.weights.items())
    assert same is (model == "sage")
    lines = {
        "gcn": "edge weights are used by gcn",
        "sage": "edge weights are not used: SAGE has no place for them; every edge counts 1",
    }
    assert sum(lines[model] in line for line in found.said) == 2  # each silo reads it
    own = sg.load_model(found.folders[0] / "model.safetensors")
    assert own.preprocessing.edge_weights == ("log" if model == "gcn" else "ignore")


def test_a_silo_refuses_methods_that_would_lose_its_weights(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    graph = make_graph(60)
    weighed = replace(graph, edge_weight=torch.full((graph.adj.nnz,), 0.5, dtype=torch.float64))
    with pytest.raises(Exception, match="edges without weights for method label_guided, which ex"):
        Federated(weighed, tmp_path, method="label_guided")


OWN = ("local", "fedper", "gcflplus", "fedpub")  # methods whose clients have models of their own


@pytest.mark.law(sample=12)
@pytest.mark.parametrize("method", ["fedavg", *OWN, "label_guided"])
def test_what_silos_keep(make_graph: MakeGraph, tmp_path: Path, method: str) -> None:
    found = Federated(make_graph(60), tmp_path, method=method)
    view = "personalized" if method in OWN else "server"
    assert found.result.best_round == found.simulated.best_round
    assert found.result.handed_over_bytes == found.simulated.handed_over_bytes
    assert found.result.ledger.records == found.simulated.ledger.records
    by_client = found.simulated.client_scores["accuracy"][view]
    for number, silo in enumerate(found.silos):
        about = found.about(silo)
        assert about["best_round"] == found.simulated.best_round
        assert about["test"][view]["accuracy"] == by_client[number]
        assert about["model_of"] == ("own" if method in OWN else "server")
    for folder in found.folders:
        assert sorted(path.name for path in folder.iterdir()) == [
            "checksums.json",
            "model.safetensors",
            "report.html",
            "result.json",
        ]
        assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("features", ["given", "degree"])
def test_the_model_names_the_features_that_silos_name(
    make_graph: MakeGraph, tmp_path: Path, features: str
) -> None:
    graph = make_graph(60)
    named = tuple(f"column {n}" for n in range(graph.num_features))
    config = config_of(2, **BASE | {"rounds": 1, "method": "fedavg", "features": features})
    silos = folders(replace(graph, feature_names=named), config, tmp_path / "silos", "csv")
    model = federate(silos, config, PLAIN).model
    assert model is not None
    assert model.feature_names == (named if features == "given" else ())


def test_the_model_of_all_is_that_of_the_server(make_graph: MakeGraph, tmp_path: Path) -> None:
    found = Federated(make_graph(60), tmp_path, method="fedavg")
    assert found.result.best_round < 5  # else the last round's would do
    theirs = found.simulated.model
    assert theirs is not None
    for folder in found.folders:
        model = sg.load_model(folder / "model.safetensors")
        assert model.shape == theirs.shape
        assert all(torch.equal(w, theirs.weights[name]) for name, w in model.weights.items())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["fedavg", *OWN])
def test_predictions_are_those_that_were_scored(
    make_graph: MakeGraph, tmp_path: Path, method: str
) -> None:
    """The share of right ones among a silo's test nodes is its own score."""
    graph = replace(make_graph(60), class_names=("a", "b ü", "c,d"))
    found = Federated(graph, tmp_path, method=method, normalize="row")
    view = "personalized" if method in OWN else "server"
    for folder in found.folders:
        about, out = about_of(folder), folder.parent / f"{folder.name}.csv"
        data = next(silo for silo in found.silos if silo.name == about["silo"])
        assert run_app(["predict", str(folder), "--data", str(data), "--out", str(out)]) == 0
        header, *rows = csv.reader(out.read_text(encoding="utf-8").splitlines())
        assert header == ["id", "predicted", "p_a", "p_b ü", "p_c,d"]
        silo = read_silo(data)
        assert [row[0] for row in rows] == silo.keys
        for row in rows:
            shares = [float(p) for p in row[2:]]
            assert sum(shares) == pytest.approx(1, abs=1e-5)
            assert graph.class_names[int(np.argmax(shares))] == row[1]
        right = torch.tensor([graph.class_names.index(row[1]) for row in rows]) == silo.y
        test = client_block(silo, found.result.config, torch.float32).split.test
        assert float(right[test].double().mean()) == about["test"][view]["accuracy"]
        labels = [graph.class_names.index(row[1]) for row in rows]
        taken = list(zip(silo.y[test].tolist(), torch.tensor(labels)[test].tolist(), strict=True))
        matrix = [[taken.count((true, said)) for said in range(3)] for true in range(3)]
        assert about["confusion"] == matrix
        assert [row["class"] for row in about["by_class"]] == list(graph.class_names)
        assert [row["nodes"] for row in about["by_class"]] == [sum(row) for row in matrix]
        common = silo.y[client_block(silo, found.result.config, torch.float32).split.val]
        share = float((silo.y[test] == common.bincount().argmax()).double().mean())
        assert about["baseline"]["scores"]["accuracy"] == pytest.approx(share)
        page = read_page(folder / "report.html")
        cells = ["".join(row) for table in page.tables for row in table]
        assert any(cell.startswith(f"largest class{share:.4f}") for cell in cells)
        (table,) = [t for t in page.tables if t[0][0] == "true class"]
        assert [row[1:] for row in table[1:]] == [[str(n) for n in row] for row in matrix]
        agreed = {row["key"] for row in page.table("key", "value", "meaning")}
        assert {"method", "rounds", "lr"} <= agreed <= {*FIELDS} - {*UNUSED}
        assert {*UNUSED} <= {*FIELDS}
        assert about["config"].keys() <= {*FIELDS} - {*UNUSED}
        assert out.stat().st_mode & 0o077 == 0


def test_a_server_that_keeps_its_model(make_graph: MakeGraph, tmp_path: Path) -> None:
    venue = replace(PLAIN, hand_over=False)
    found = Federated(make_graph(60), tmp_path, venue, method="fedavg")
    assert found.result.handed_over_bytes < 100  # frames without weights
    assert sum(line.endswith("; the server keeps its model") for line in found.said) == 2
    for folder in found.folders:
        assert sorted(path.name for path in folder.iterdir()) == [
            *("checksums.json", "report.html", "result.json")
        ]
        assert about_of(folder)["model_of"] is None
        assert "The server keeps its model." in (folder / "report.html").read_text()
    with raises_code(sg.DataError, "missing-file"):
        predict_to(found.folders[0], found.silos[0], tmp_path / "p.csv")


def test_a_method_that_leaves_no_model(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fedper", replace(METHODS["fedper"], own_weights=None))
    found = Federated(make_graph(60), tmp_path, method="fedper")
    assert found.result.handed_over_bytes == found.simulated.handed_over_bytes
    for folder in found.folders:
        about = about_of(folder)
        assert about["model_of"] is None
        assert list(about["test"]) == ["personalized"]
        assert "The method leaves no model to keep." in (folder / "report.html").read_text()


def test_a_page_tells_nothing_of_other_silos(make_graph: MakeGraph, tmp_path: Path) -> None:
    found = Federated(make_graph(60), tmp_path, method="fedavg")
    theirs = found.result.test.server
    assert theirs is not None
    for folder in found.folders:
        about, page = about_of(folder), (folder / "report.html").read_text()
        (other,) = {silo.name for silo in found.silos} - {about["silo"]}
        score = about["test"]["server"]["accuracy"]
        assert f"<h1>fedavg at {about['silo']}</h1>" in page
        assert f"{score:.4f}" in page
        for text in (page, json.dumps(about)):
            assert other not in text
            assert f"{theirs.accuracy:.4f}" not in text


def test_nothing_is_overwritten(make_graph: MakeGraph, tmp_path: Path) -> None:
    check_result_folder(tmp_path / "new")
    (tmp_path / "begun").mkdir()
    check_result_folder(tmp_path / "begun")
    (tmp_path / "begun" / "model.safetensors").touch()  # by a silo that was killed then
    check_result_folder(tmp_path / "begun")
    for path in (tmp_path, tmp_path / "file"):
        (tmp_path / "file").touch()
        with raises_code(ConfigError, "existing-output"):
            check_result_folder(path)
    graph = make_graph(60)
    config = config_of(2, **BASE)
    silos = folders(graph, config, tmp_path / "silos")
    said: list[str] = []
    federate(silos[:1], config, PLAIN, run=lambda *_, **__: None, silo_lines=said, out=tmp_path)  # type: ignore[arg-type]
    assert said == []


def test_a_result_of_a_run_that_is_not_over_may_be_there(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    """A silo that was killed after RESULT, before END: its states are still of that run."""
    silo = folders(make_graph(60), config_of(2, **BASE), tmp_path / "silos")[0]
    data, secret, key = read_silo(silo), tmp_path / "secret", tmp_path / "key"
    secret.write_bytes(bytes(32))
    out, state, token = tmp_path / "out", tmp_path / "state", bytes(range(16))
    out.mkdir()
    (out / "result.json").write_text(json.dumps({"run": run_name(token), "best_round": 2}))
    how = Attendance("localhost:1", key, secret, None, True, state, patience=0, out=out)
    with raises_code(ConfigError, "existing-output"):
        take_part_in_run(data, how)
    (state / bytes(16).hex()).mkdir(parents=True)  # of another run
    with raises_code(ConfigError, "existing-output"):
        take_part_in_run(data, how)
    (state / token.hex()).mkdir()
    with pytest.raises(ConfigError, match="expected a server at localhost:1 within 0 s"):
        take_part_in_run(data, how)


def test_a_disk_that_is_full_costs_the_silo_its_result_only(
    make_graph: MakeGraph, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph, config = make_graph(60), config_of(2, **BASE)
    silos = folders(graph, config, tmp_path / "silos")
    for silo in silos:
        (silo / "results").touch()  # no folder can be made there
    said: list[str] = []
    federate(silos, config, PLAIN, silo_lines=said, keep=True)
    assert sum(line.startswith("refused: expected to write ") for line in said) == 2
    assert caplog.text.count("has not taken the result of the run: expected to write ") == 2
    assert said.count("the run is over") == 2


def test_a_folder_that_was_there_is_for_its_owner_only(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all that the silo keeps is on the disk before it says so, for states are dropped then."""
    synced: list[Path] = []
    real = files.sync_folder

    def sync(folder: Path) -> None:
        synced.append(folder)
        real(folder)

    for module in (files, silo_result):
        monkeypatch.setattr(module, "sync_folder", sync)
    out = tmp_path / "out"
    out.mkdir(mode=0o755)
    graph, config = make_graph(60), config_of(1, **BASE)
    silos = folders(graph, config, tmp_path / "silos")
    federate(silos, config, PLAIN, out=out)
    assert out.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o600}
    assert synced.count(out) == len(list(out.iterdir())) == 4
    assert out.parent in synced
