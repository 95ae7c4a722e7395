"""Models that clients have of their own, in a simulation: kept, saved, and used again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import silograph as sg
from mistakes import raises_code
from runs import files_of, go, same_bits
from silograph.core.config import make_config
from silograph.core.errors import CheckpointError, ConfigError, DataError
from silograph.core.resolved_config import to_run_config
from silograph.experiment.resolve.data import Cut, cut_graph
from silograph.experiment.resolve.parts import choose_parts
from silograph.experiment.result_files import read_sums, write_sums
from silograph.experiment.run.predictions import predict_to, table
from silograph.experiment.run.result import Result
from silograph.graph.graph import Graph, subgraph
from silos import config_of, folders

MakeGraph = Callable[..., Graph]
OPTIONS = {"method": "local", "clients": 3, "rounds": 5, "lr": 1.0}


def cut_of(graph: Graph, result: Result) -> Cut:
    partition = choose_parts(to_run_config(result.config)).partition
    return cut_graph(result.config, graph, partition)


@pytest.mark.parametrize("method", ["local", "fedper", "gcflplus", "fedpub"])
def test_they_predict_what_was_scored(make_graph: MakeGraph, method: str) -> None:
    """The share of right ones among a client's test nodes is its score at the best round."""
    graph = make_graph(90)
    result = go(graph, **OPTIONS | {"method": method})
    assert result.best_round < 5  # so that the last round's would do for no client
    cut = cut_of(graph, result)
    scores = result.client_scores["accuracy"]["personalized"]
    for number, (client, nodes) in enumerate(
        zip(cut.partition.ids, cut.partition.nodes, strict=True)
    ):
        predicted = result.models[client].predict(subgraph(graph, nodes))
        right = torch.from_numpy(predicted) == graph.y[nodes]
        assert scores[number] == float(right[cut.split.test[nodes]].double().mean())


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_of_any_size_keep_the_same(make_graph: MakeGraph, size: int) -> None:
    whole, parts = (go(make_graph(90), **OPTIONS, block_size=b).models for b in (3, size))
    assert whole.keys() == parts.keys()
    for client, model in whole.items():
        for name, w in model.weights.items():
            torch.testing.assert_close(w, parts[client].weights[name], rtol=0, atol=1e-12)


def test_clients_that_predict_with_the_servers_have_none(make_graph: MakeGraph) -> None:
    assert go(make_graph(), method="fedavg").models == {}


def test_a_result_folder_has_one_file_a_client(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph(90)
    config = config_of(3, method="local", partition="random", rounds=5, hidden=8, lr=1.0)
    silos = folders(graph, config, tmp_path / "silos")
    result = sg.run(graph, config=config, out=str(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out" / "models").iterdir()) == [
        f"{number}-client_0{number}.safetensors" for number in range(3)
    ]
    for number, silo in enumerate(silos):
        back = sg.load_model(tmp_path / "out" / "models" / f"{number}-{silo.name}.safetensors")
        model = result.models[silo.name]
        assert same_bits(back.weights, model.weights)
        out = tmp_path / f"{silo.name}.csv"
        assert predict_to(tmp_path / "out", silo, out) == 30
        said = [line.split(",")[1] for line in out.read_text().splitlines()[1:]]
        assert said == [str(k) for k in model.predict(sg.read_silo(silo))]
    with raises_code(ConfigError, "existing-output"):
        predict_to(tmp_path / "out", silos[0], out)
    with raises_code(ConfigError, "unwritable-path"):
        predict_to(tmp_path / "out", silos[0], tmp_path / "no" / "new.csv")
    with pytest.raises(
        ConfigError, match=r"expected the folder of one silo, got .* holds client_00,"
    ):
        predict_to(tmp_path / "out", tmp_path / "silos", tmp_path / "new.csv")
    np.savez(
        tmp_path / "g.npz", x=np.ones((90, 7)), y=graph.y, edge_index=np.array([[0, 1], [1, 0]])
    )
    with raises_code(DataError, "missing-option", option="client"):
        predict_to(tmp_path / "out", tmp_path / "g.npz", tmp_path / "new.csv")
    for got, meant in (("client_1", "client_01"), ("client_0", "client_00")):
        with raises_code(ConfigError, "unknown-name", what="client", got=got, suggestion=meant):
            predict_to(tmp_path / "out", tmp_path / "g.npz", tmp_path / "new.csv", client=got)
    with pytest.raises(
        DataError,
        match=r"a folder of models: give one .*/models/0-client_00\.saf",
    ):
        predict_to(tmp_path / "out" / "models", silos[0], tmp_path / "new.csv")
    (tmp_path / "out" / "models" / ".hidden").touch()  # a file of the system is no model
    assert predict_to(tmp_path / "out", silos[0], tmp_path / "again.csv") == 30
    for file in (tmp_path / "out" / "models").glob("*.safetensors"):
        file.unlink()
    with raises_code(DataError, "missing-file"):
        predict_to(tmp_path / "out", silos[0], tmp_path / "new.csv")


def damage(path: Path) -> None:
    """Overwrite three bytes of the weights, which stay finite."""
    data = bytearray(path.read_bytes())
    data[-24:-21] = bytes(255 - byte for byte in data[-24:-21])
    path.write_bytes(data)


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_damaged_model_of_a_result_folder_is_refused(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    go(make_graph(90), **OPTIONS | {"method": method}, out=str(tmp_path / "out"))
    name = "model.safetensors" if method == "fedavg" else "models/1-client_01.safetensors"
    file = tmp_path / "out" / name
    damage(file)
    with pytest.raises(DataError, match=rf"{file} as the run has written it \(.*has changed") as e:
        sg.load_model(file)
    assert "\n" not in str(e.value)
    monkeypatch.chdir(file.parent)
    with pytest.raises(DataError, match="got one that has changed"):
        sg.load_model(file.name)
    sums = read_sums(tmp_path / "out")
    del sums[name]
    write_sums(tmp_path / "out", sums)
    assert sg.load_model(file).shape  # as of a folder that an older version wrote
    (tmp_path / "out" / "checksums.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"checksums\.json, got none that can be read"):
        sg.load_model(file)
    file.rename(tmp_path / "elsewhere")
    assert sg.load_model(tmp_path / "elsewhere").shape


def test_a_run_that_was_stopped_before_its_end_writes_its_models_anew(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    graph, out = make_graph(90), tmp_path / "out"
    go(graph, **OPTIONS, out=str(out))
    before, sums = files_of(out), read_sums(out)
    (out / "result.json").unlink()
    damage(out / "models" / "1-client_01.safetensors")
    sg.resume(out, graph=graph)
    assert files_of(out) == before
    written_anew = ("result.json", "rounds.csv")  # they hold seconds and memory
    for name in written_anew:
        del sums[name]
    assert {n: known for n, known in read_sums(out).items() if n not in written_anew} == sums


def test_of_many_clients_a_few_are_named(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, config = make_graph(90), config_of(5, partition="random")
    folders(graph, config, tmp_path / "silos")
    go(graph, **OPTIONS | {"clients": 5}, out=str(tmp_path / "out"))
    with raises_code(DataError, "missing-option", option="client"):
        predict_to(tmp_path / "out", "digits", tmp_path / "new.csv")
    with pytest.raises(ConfigError, match=r"holds client_00, .*_02, \.\.\. \(5\): name"):
        predict_to(tmp_path / "out", tmp_path / "silos", tmp_path / "new.csv")


@pytest.mark.parametrize("other", [{"seed": 1}, {"clients": 4}])
def test_clients_of_another_cut_are_refused(
    make_graph: MakeGraph, tmp_path: Path, other: dict[str, int]
) -> None:
    """They have the same names and other nodes."""
    graph, out = make_graph(90), tmp_path / "new.csv"
    options: dict[str, Any] = {"partition": "random", "method": "local", "rounds": 1, "hidden": 8}
    sg.run(graph, config=config_of(3, **options), out=str(tmp_path / "out"))
    (silo, *_) = folders(graph, make_config({"clients": 3, **options, **other}), tmp_path / "silos")
    with raises_code(DataError, "model-mismatch", what="partition"):
        predict_to(tmp_path / "out", silo, out)
    spec = silo / "silo.toml"
    *lines, cut = spec.read_text().splitlines(keepends=True)
    assert cut.startswith("partition_hash = ")
    spec.write_text("".join(lines))  # as of an older version, or of data of the silo's own
    assert predict_to(tmp_path / "out", silo, out) > 20


def test_a_run_on_folders_of_silos_takes_these(make_graph: MakeGraph, tmp_path: Path) -> None:
    """Also where their nodes stand in another order than in the graph that was cut."""
    graph = make_graph(90)
    graph = replace(graph, node_id=np.array([f"n{k % 7}-{k}" for k in range(90)]))
    (silo, *_) = folders(graph, config_of(3, partition="random"), tmp_path / "silos")
    sg.run(tmp_path / "silos", method="local", rounds=1, hidden=8, out=str(tmp_path / "out"))
    assert predict_to(tmp_path / "out", silo, tmp_path / "new.csv") == 30


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("labels", ["multiclass", "multilabel", "node_value"])
def test_the_table_of_predictions(make_graph: MakeGraph, labels: str) -> None:
    """A row for each node of a graph: key, label or bits or numbers, and what is likely."""
    graph = make_graph(multilabel=labels == "multilabel")
    if labels == "node_value":
        graph = replace(graph, y=graph.y.double()[:, None], num_classes=1)
    result = go(graph, clients=2)
    model = result.model
    assert model is not None
    header, *rows = table(model, graph)
    bits = [f"predicted_{k}" for k in range(3)] if labels == "multilabel" else ["predicted"]
    likely = [] if labels == "node_value" else [f"p_{k}" for k in range(3)]
    assert header == ["id", *bits, *likely]
    assert [row[0] for row in rows] == graph.node_id.tolist()
    said = np.array([row[1 : 1 + len(bits)] for row in rows], dtype=float).squeeze()
    np.testing.assert_allclose(said, model.predict(graph), rtol=1e-12)
    shares = model.probabilities(graph)
    if shares is None:
        assert labels == "node_value"
    elif labels == "multilabel":
        assert np.array_equal(shares > 0.5, model.predict(graph) == 1)
    else:
        np.testing.assert_allclose(shares.sum(1), 1)
        assert np.array_equal(shares.argmax(1), model.predict(graph))
