"""What predicts ratings without training: runs of the same models, and pages that begin with it."""

import json
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from pages import read_page
from rating_graphs import rating_graph

OPTIONS: dict[str, Any] = {
    "clients": 3,
    "partition": "category",
    "split": "0.6/0.2/0.2",
    "rounds": 1,
    "dtype": "float64",
    "model": "rating_biases",
}
NAMES = ["silo mean", "silo biases", "all biases"]
SCORES = ("rmse", "rmse_seen", "rmse_unseen", "mae")


def test_they_are_runs_of_the_models_that_need_no_training() -> None:
    graph = rating_graph(30, 40, 500)
    biases = sg.run(graph, **OPTIONS, method="fedavg")
    mean = sg.run(graph, **OPTIONS, method="local", options={"terms": "mean"})
    assert list(biases.untrained) == NAMES
    views = [mean.test.personalized, biases.test.server, biases.test.uncut]
    for name, view in zip(NAMES, views, strict=True):
        assert view is not None
        for score in SCORES:
            assert biases.untrained[name][score] == pytest.approx(view[score], abs=1e-6), name
    assert mean.untrained == biases.untrained


def test_summary_page_and_comparison_begin_with_them(tmp_path: Path) -> None:
    result = sg.run(rating_graph(), **OPTIONS, method="fedavg", out=str(tmp_path / "run"))
    first = ["global mean", *NAMES]
    lines = result.summary().splitlines()[3:7]
    assert [line[: len(name)] for line, name in zip(lines, first, strict=True)] == first
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    sizes = rating_graph().rating_sizes
    said = "{ratings} ratings of {items} items by {users} users: ".format(**sizes)
    assert said in " ".join(page.split())
    assert "Mean loss of a rating; training" in page
    assert (
        json.loads((tmp_path / "run" / "run.json").read_text())["dataset"].items() >= sizes.items()
    )
    table = read_page(tmp_path / "run" / "report.html").tables[0]
    assert [row[0] for row in table[1:6]] == [*first, "server"]
    values = [f"{result.untrained[name].rmse:.4f}" for name in NAMES]
    assert [row[1] for row in table[2:5]] == values
    assert list(result.to_dict()["untrained"]) == NAMES
    comparison = sg.compare(rating_graph(), methods=["fedavg"], seeds=[0], processes=0, **OPTIONS)
    note = next(note for note in comparison.notes if note.startswith("without training"))
    assert note.startswith(f"without training, test RMSE: {first[0]} ")
    assert note.endswith(f"{NAMES[0]} {values[0]}, {NAMES[1]} {values[1]}, {NAMES[2]} {values[2]}")


def test_a_model_that_is_worse_than_no_model_says_so(tmp_path: Path) -> None:
    """In summary, page, result and comparison; a model that is better says nothing."""
    poor = OPTIONS | {"model": "rating_mf", "lr": 3.0}
    result = sg.run(rating_graph(), **poor, method="fedavg", out=str(tmp_path / "run"))
    scores = result.test.server
    assert result.baseline is not None
    assert scores is not None
    values = {name: s["rmse"] for name, s in result.untrained.items() if name != "all biases"}
    silo_values = {
        n: v for n, v in ({"global mean": result.baseline["rmse"]} | values).items() if v
    }
    rmse = scores["rmse"]
    assert rmse is not None
    assert rmse > 1.2 * min(silo_values.values())
    better = [name for name, value in silo_values.items() if value < rmse]
    assert result.better_untrained == result.to_dict()["better_untrained"] == better
    texts = ", ".join(f"{name} {silo_values[name]:.4f}" for name in better)
    line = f"test RMSE of the server view, {rmse:.4f}, is worse than without training: {texts}"
    assert f"note: {line}" in result.summary(300).splitlines()
    assert line in read_page(tmp_path / "run" / "report.html").text
    comparison = sg.compare(
        rating_graph(), methods=["fedavg", "local"], seeds=[0], processes=0, **poor
    )
    assert any(
        n.startswith("worse than without training in some run: fedavg") for n in comparison.notes
    )
    good = sg.run(rating_graph(30, 40, 500), **OPTIONS, method="fedavg")
    assert good.better_untrained == []
    assert "worse than without training" not in good.summary()
