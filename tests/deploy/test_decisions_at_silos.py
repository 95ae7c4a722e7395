"""A silo's model decides as that of the simulation, on the silo's nodes and on new ones."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

import silograph as sg
from conftest import planted_graph
from silograph.deploy.server_settings import ServerSettings
from silograph.experiment.run.predictions import predict_to
from silograph.graph.graph import Graph
from silos import config_of, federate, folders

MakeGraph = Callable[..., Graph]
PLAIN = ServerSettings("127.0.0.1:0", seconds=60, insecure=True)
OPTIONS: dict[str, Any] = {
    "partition": "random",
    "split": "0.4/0.3/0.3",
    "rounds": 2,
    "hidden": 8,
    "threshold": "cost=1:5",
    "class_weight": "balanced",
    "kernels": "torch",  # weights of classes in float32 would be two kernels to compile
}


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("method", ["fedavg", "local"])
@pytest.mark.parametrize("normalize", ["none", "standard_client", "standard"])
def test_silos_get_the_threshold_with_their_model(
    tmp_path: Path, method: str, normalize: str
) -> None:
    graph = planted_graph(240)
    graph = replace(graph, y=(graph.y == 2).long(), num_classes=2, class_names=("ok", "fraud"))
    assert isinstance(graph.x, Tensor)
    graph = replace(graph, x=graph.x * 30 + 100)  # so that unprepared features would show
    config = config_of(3, **OPTIONS | {"method": method, "normalize": normalize})
    silos, lines = folders(graph, config, tmp_path / "silos"), list[str]()
    settings = replace(PLAIN, silos=tuple(silo.name for silo in silos))
    ours = federate(
        silos, replace(config, out=str(tmp_path / "run")), settings, silo_lines=lines, keep=True
    )
    simulated = replace(config, out=str(tmp_path / "simulated"))
    theirs = sg.run(graph, config=simulated, block_size=1)
    assert theirs.threshold is not None
    assert ours.threshold == theirs.threshold
    results = [Path(line.partition(" are in ")[2]) for line in lines if " are in " in line]
    assert len(results) == 3
    for folder in results:
        about = json.loads((folder / "result.json").read_text())
        silo = next(path for path in silos if path.name == about["silo"])
        model = sg.load_model(folder / "model.safetensors")
        assert model.threshold == theirs.threshold.threshold
        assert about["threshold"]["positive"] == "fraud"
        assert "Threshold" in (folder / "report.html").read_text()
        # Its own nodes, from its own result and from the simulation.
        tables = []
        for number, run in enumerate((folder, tmp_path / "simulated")):
            out = tmp_path / f"{folder.name}-{silo.name}-{number}.csv"
            assert predict_to(run, silo, out) == len(sg.read_silo(silo).y)
            tables.append(list(csv.DictReader(out.read_text().splitlines())))
        assert tables[0] == tables[1]
        # Its own scores are those of these predictions.
        own = sg.read_silo(silo)
        assert own.split is not None
        likelihood = [
            float(row[f"p_{own.class_names[y]}"]) for row, y in zip(tables[0], own.y, strict=True)
        ]
        view = "server" if method == "fedavg" else "personalized"
        loss = -np.log(np.array(likelihood)[own.split.test.numpy()]).mean()
        assert about["test"][view]["loss"] == pytest.approx(loss, rel=1e-4)
        # New nodes, with edges and without any.
        for edges in ([[0, 1], [1, 2]], np.zeros((2, 0), dtype=np.int64)):
            new = sg.from_arrays(
                x=np.asarray(graph.x)[:5],
                edge_index=np.asarray(edges),
                y=np.full(5, -1),
                num_classes=2,
            )
            decided = model.decisions(new)
            p = model.probabilities(new)
            assert p is not None
            assert decided.tolist() == (p[:, 1] >= model.threshold.probability).tolist()
