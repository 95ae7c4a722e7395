"""What was fitted to training data belongs to a model: predictions depend on no other rows."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import silograph as sg
from mistakes import raises_code
from silograph.cli import run_app
from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.experiment.run.predictions import predict_to
from silograph.experiment.run.trained_model import FORMAT, Preprocessing, TrainedModel
from silograph.graph.column_statistics import ColumnStatistics
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, subgraph
from silograph.nn.forward import AnyModel
from silograph.nn.model import MODELS, Model
from silograph.nn.own_module import ModuleModel

MakeGraph = Callable[..., Graph]
NORMALIZE = ("none", "row", "standard", "standard_client")
ROWS = (1, 2, 5, 63, 64, 150)


class TwoLayers(nn.Module):
    """A module of a user."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Linear(features, 16)
        self.outer = nn.Linear(16, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        del edge_index
        out: Tensor = self.outer(self.inner(x).relu())
        return out


def without_edges(graph: Graph) -> Graph:
    n = graph.num_nodes
    empty = torch.zeros(0, dtype=torch.int64)
    return replace(graph, adj=CSR.from_pairs(empty, empty, (n, n)))


def prepared(normalize: str, features: int) -> Preprocessing:
    """Return a preprocessing as if it had been fitted."""
    how: Any = normalize
    if not normalize.startswith("standard"):
        return Preprocessing(normalize=how)
    draws = torch.Generator().manual_seed(3)
    mean = torch.randn(features, generator=draws, dtype=torch.float64)
    deviation = torch.rand(features, generator=draws, dtype=torch.float64) + 0.1
    deviation[0] = 0
    return Preprocessing(normalize=how, statistics=ColumnStatistics(mean, deviation))


def shapes(features: int) -> dict[str, AnyModel]:
    """Return one model of each kind that predicts for nodes."""
    sizes: dict[str, Any] = {"outputs": 3, "task": "multiclass", "layers": 2, "hops": 2}
    found: dict[str, AnyModel] = {
        conv: Model(conv, features, 16, teleport=0.1, dropout=0.5, **sizes) for conv in MODELS
    }
    found["own module"] = ModuleModel("TwoLayers", TwoLayers, features, 3, "multiclass")
    return found


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("name", shapes(1))
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_without_edges_a_row_is_predicted_alike_alone_and_among_others(
    make_graph: MakeGraph, name: str, normalize: str
) -> None:
    graph = without_edges(make_graph(200))
    features = graph.num_features
    for dtype in (torch.float32, torch.float64):
        shape = shapes(features)[name]
        weights = shape.init_weights(Key.of(1), dtype)
        model = TrainedModel(shape, weights, preprocessing=prepared(normalize, features))
        whole, likely = model.logits(graph), model.probabilities(graph)
        assert likely is not None
        for count in ROWS:
            chosen = torch.randperm(200, generator=torch.Generator().manual_seed(count))[:count]
            part = subgraph(graph, chosen)
            assert torch.equal(model.logits(part), whole[chosen])
            some = model.probabilities(part)
            assert some is not None
            assert np.array_equal(some, likely[chosen.numpy()])


def write_npz(path: Path, graph: Graph) -> None:
    x, edges = graph.x, graph.edge_index.numpy()
    assert isinstance(x, torch.Tensor)
    np.savez(path, x=x.numpy(), y=graph.y.numpy(), edge_index=edges, node_id=graph.node_id)


def rows_of(path: Path) -> dict[str, list[str]]:
    """Return the cells of a table of predictions by the key of the node."""
    with path.open(newline="") as file:
        return {row[0]: row[1:] for row in list(csv.reader(file))[1:]}


@pytest.mark.parametrize("normalize", ["row", "standard", "standard_client"])
def test_files_and_results_predict_alike(
    make_graph: MakeGraph, tmp_path: Path, normalize: str
) -> None:
    graph = without_edges(make_graph(90))
    run = tmp_path / "run"
    options: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 2, "hidden": 8}
    options |= {"normalize": normalize, "model": "mlp", "out": str(run)}
    result = sg.run(graph, **options)
    by_client = normalize == "standard_client"
    client = "client_01" if by_client else None
    mine = result.model_of("client_01")
    likely = mine.probabilities(graph)
    assert likely is not None
    row_of = {str(key): row for row, key in enumerate(graph.node_id.tolist())}
    seen: dict[str, list[str]] = {}
    for number, nodes in enumerate(([7], [80, 7, 3, 60], list(range(90)))):
        part = subgraph(graph, torch.tensor(nodes))
        write_npz(tmp_path / f"{number}.npz", part)
        out = tmp_path / f"{number}.csv"
        assert predict_to(run, tmp_path / f"{number}.npz", out, client=client) == len(nodes)
        found = rows_of(out)
        assert all(seen.setdefault(key, cells) == cells for key, cells in found.items())
        for key, cells in found.items():
            assert cells[1:] == [f"{p:.6g}" for p in likely[row_of[key]]]
    back = sg.load_model(run / "model.safetensors")
    assert back.preprocessing.needs_client is by_client
    if not by_client:
        assert torch.equal(back.logits(graph), mine.logits(graph))
        with raises_code(ConfigError, "unread-option", option="client"):
            predict_to(run, tmp_path / "0.npz", tmp_path / "no.csv", client="client_01")


def test_whose_statistics_hold_is_asked_for(
    make_graph: MakeGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, run = make_graph(90), tmp_path / "run"
    options: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 1, "hidden": 8}
    result = sg.run(graph, normalize="standard_client", out=str(run), **options)
    write_npz(tmp_path / "g.npz", graph)
    data, out = str(tmp_path / "g.npz"), tmp_path / "p.csv"
    given = ["predict", str(run), "--data", data, "--out", str(out)]
    assert run_app(given) == 2
    assert "choose one by --client, of client_00, client_01, client_02" in capsys.readouterr().err
    assert run_app([*given, "--client", "client_07"]) == 2
    assert "'client_07'" in capsys.readouterr().err
    assert run_app([*given, "--client", "client_02"]) == 0
    assert result.model is not None
    assert result.client_statistics.keys() == {"client_00", "client_01", "client_02"}
    with raises_code(DataError, "missing-option", option="client"):
        result.model.predict(graph)
    expected = result.model.for_client(result.client_statistics["client_02"])
    assert np.array_equal(result.model_of("client_02").predict(graph), expected.predict(graph))
    cells = rows_of(out)
    decided = expected.predict(graph)
    assert [int(cells[str(key)][0]) for key in graph.node_id.tolist()] == decided.tolist()
    # A client's own folder names it, if it is of the same cut.
    assert result.cut is not None
    folders = sg.write_silos(tmp_path / "silos", graph, result.cut.partition, result.cut.split)
    assert predict_to(run, folders[1], tmp_path / "silo.csv") == len(result.cut.partition.nodes[1])
    with raises_code(
        ConfigError, "unknown-name", what="client", got="client_09", suggestion="client_02"
    ):
        result.model_of("client_09")
    (run / "client_statistics.safetensors").write_bytes(b"changed")
    with pytest.raises(DataError, match="as the run has written it"):
        predict_to(run, data, tmp_path / "q.csv", client="client_02")
    (run / "client_statistics.safetensors").unlink()
    with raises_code(DataError, "missing-file"):
        predict_to(run, data, tmp_path / "q.csv", client="client_02")


def test_clients_models_of_their_own_have_their_own_statistics(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    graph, run = make_graph(60), tmp_path / "run"
    options: dict[str, Any] = {"clients": 2, "partition": "random", "rounds": 1, "hidden": 8}
    for how in ("standard", "standard_client"):
        result = sg.run(graph, method="local", normalize=how, out=str(run / how), **options)
        assert result.cut is not None
        assert result.cut.statistics is not None
        for number, (name, model) in enumerate(result.models.items()):
            own = model.preprocessing.statistics
            assert own is not None
            mean = result.cut.statistics.mean
            assert torch.equal(own.mean, mean[number] if how == "standard_client" else mean)
            assert result.model_of(name) is model
        write_npz(tmp_path / f"{how}.npz", graph)
        out = tmp_path / f"{how}.csv"
        predict_to(run / how, tmp_path / f"{how}.npz", out, client="client_01")
        decided = result.models["client_01"].predict(graph)
        assert [int(cells[0]) for cells in rows_of(out).values()] == decided.tolist()


def saved(tmp_path: Path, about: dict[str, Any], features: int = 2) -> Path:
    """Write a file of a model by hand."""
    shape = Model("mlp", features, 4, outputs=2, task="multiclass", layers=2, dropout=0.0)
    whole = {"shape": shape.described(), "class_names": [], **about}
    path = tmp_path / "model.safetensors"
    weights = shape.init_weights(Key.of(0), torch.float32)
    safetensors.torch.save_file(weights, path, {FORMAT: json.dumps(whole)})
    return path


@pytest.mark.parametrize("normalize", ["none", "row"])
def test_files_of_older_versions_are_read_as_before(tmp_path: Path, normalize: str) -> None:
    about = {"normalize": normalize, "feature_names": ["size", "age"], "edge_weights": "use"}
    model = sg.load_model(saved(tmp_path, about))
    expected = Preprocessing(feature_names=("size", "age"), edge_weights="use")
    assert model.preprocessing.to_dict() == {**expected.to_dict(), "normalize": normalize}


def test_older_files_without_the_statistics_they_need_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"did not save means and deviations: train it again$"):
        sg.load_model(saved(tmp_path, {"normalize": "standard"}))


GOOD: dict[str, Any] = {
    **Preprocessing(normalize="standard").to_dict(),
    "mean": [1.0, 2],
    "deviation": [0.0, 3.5],
}


def test_numbers_of_a_file_come_back_to_the_bit(tmp_path: Path) -> None:
    mean = torch.tensor([1.7e9 + 1 / 3, -1e-300], dtype=torch.float64)
    statistics = ColumnStatistics(mean, mean.abs())
    about = Preprocessing(normalize="standard", statistics=statistics).to_dict()
    found = sg.load_model(saved(tmp_path, {"preprocessing": about})).preprocessing.statistics
    assert found is not None
    assert torch.equal(found.mean, mean)
    assert torch.equal(found.deviation, mean.abs())
    assert sg.load_model(saved(tmp_path, {"preprocessing": GOOD})).preprocessing.statistics


@pytest.mark.parametrize(
    "change",
    [
        {"mean": [1.0]},
        {"mean": [1.0, float("nan")]},
        {"mean": [1.0, float("inf")]},
        {"mean": [1.0, True]},
        {"mean": [1.0, "2"]},
        {"mean": {"0": 1.0}},
        {"mean": [10**400, 1.0]},
        {"deviation": [1.0, -1.0]},
        {"deviation": [[1.0], [2.0]]},
        {"normalize": "other"},
        {"normalize": "none"},
        {"normalize": None},
        {"features": 3},
        {"feature_names": 3},
        {"feature_names": [1, 2]},
        {"version": 0},
        {"version": True},
        {"version": "1"},
        {"surprise": 1},
        {"mean": None},
    ],
    ids=str,
)
def test_hostile_files_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"^expected a model's shape in"):
        sg.load_model(saved(tmp_path, {"preprocessing": GOOD | change}))


def test_files_that_lack_what_they_need_are_refused(tmp_path: Path) -> None:
    for name in GOOD:
        about = {key: value for key, value in GOOD.items() if key != name}
        with pytest.raises(DataError, match=r"^expected a model's shape in"):
            sg.load_model(saved(tmp_path, {"preprocessing": about}))
    others: tuple[Any, ...] = ([], "standard", 3)
    for other in others:
        with pytest.raises(DataError, match=r"^expected a model's shape in"):
            sg.load_model(saved(tmp_path, {"preprocessing": other}))
    with raises_code(DataError, "other-version", got=4):
        sg.load_model(saved(tmp_path, {"preprocessing": GOOD | {"version": 4}}))


def write_rows(folder: Path, rows: list[int], label: Callable[[int], str] | None) -> None:
    """Write a folder of tables of some accounts; `label` None: there is no such column."""
    folder.mkdir()
    header = ["id", *(["label"] if label is not None else []), "a", "b"]
    lines = [",".join(header)]
    for row in rows:
        given = [label(row)] if label is not None else []
        lines.append(",".join([str(row), *given, str(row % 7 + 0.25), str(row % 5)]))
    (folder / "nodes.csv").write_text("\n".join(lines) + "\n")
    (folder / "edges.csv").write_text("source,target\n")


LABELS: dict[str, Callable[[int], str]] = {
    "words": lambda row: "fraud" if row % 7 > 3 else "valid",
    "numbers": lambda row: str(int(row % 7 > 3)),
    "numbers from 5": lambda row: str(5 + int(row % 7 > 3)),
    "fractions": lambda row: str(row % 7 / 2),
}


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("kind", LABELS)
def test_labels_play_no_part_in_predictions(work: Path, kind: str) -> None:
    """Some rows may have labels of one class only, none, or no column of labels."""
    label = LABELS[kind]
    write_rows(Path("all"), list(range(120)), label)
    columns = []
    if kind == "fractions":
        text = Path("all/nodes.csv").read_text().replace("label", "value")
        Path("all/nodes.csv").write_text(text)
        columns = ["--metric", "loss"]
    asked = ["run", "all", "--model", "mlp", "--clients", "2", "--rounds", "2", "--quiet"]
    assert run_app([*asked, *columns, "--normalize", "standard", "--out", "run"]) == 0
    assert predict_to("run", "all", "all.csv") == 120
    expected = rows_of(Path("all.csv"))
    some = [4, 11, 18]  # all of one class
    given: dict[str, Callable[[int], str] | None] = {"one": label, "empty": lambda _: ""}
    for name, labels in (given | {"none": None}).items():
        write_rows(Path(name), some, labels)
        assert predict_to("run", name, f"{name}.csv") == 3
        assert rows_of(Path(f"{name}.csv")) == {str(row): expected[str(row)] for row in some}
    graph = sg.load("none", with_labels=False)
    assert bool((graph.y == -1).all())
    if kind == "words":
        model = sg.load_model("run/model.safetensors")
        with raises_code(
            DataError, "model-mismatch", what="classes", expected=["fraud", "valid"], got=["fraud"]
        ):
            model.predict(sg.load("one"))
