"""A metric of a user's own: one call, and runs pick by it, stop at it and show it everywhere."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import silograph as sg
from mistakes import raises_code
from runs import go
from silograph.cli import run_app
from silograph.core.errors import ConfigError
from silograph.graph.graph import Graph
from silograph.task.metric_table import LOSS, METRICS, Metric, add_metric, own_scores
from silograph.task.registry import TASKS


def wrong_share(counts: Mapping[str, Tensor]) -> float:
    return 1 - int(counts["tp"].sum()) / int(counts["nodes"].sum())


ERROR = Metric(
    "error",
    "error rate",
    "Share of wrong labels.",
    higher=False,
    share=True,
    labels=("multiclass",),
    of=wrong_share,
)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "error", ERROR)
    monkeypatch.delitem(METRICS, "error")
    add_metric(ERROR)


@pytest.mark.usefixtures("added")
def test_a_run_has_it_wherever_it_has_others(
    make_graph: Callable[..., Graph], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One minus the accuracy, so every number of it is known."""
    result = go(make_graph(), metric="error", out=str(tmp_path / "o"))
    plain = go(make_graph(), metric="accuracy")
    assert result.best_round == plain.best_round  # lower is better, and ties are broken alike
    for row in result.rounds:
        for view in ("server", "personalized"):
            for part in ("val", "test"):
                told = row[f"{part}_{view}_error"]
                assert told == pytest.approx(1 - float(row[f"{part}_{view}_accuracy"] or 0))
    assert "error rate" in result.summary()
    found = json.loads((tmp_path / "o" / "result.json").read_text())
    assert found["test"]["server"]["error"] == pytest.approx(
        1 - found["test"]["server"]["accuracy"]
    )
    assert result.report(tmp_path / "page.html").read_text().count("error rate") >= 1
    stopped = go(make_graph(), target="error=1", metric="error")
    assert len(stopped.rounds) < len(plain.rounds)
    METRICS.pop("error")  # as in a process that does not know it
    again: list[Callable[[], object]] = [
        lambda: go(make_graph(), metric="error"),
        lambda: sg.resume(tmp_path / "o", graph=make_graph()),
    ]
    for call in again:
        with raises_code(ConfigError, "unknown-name", what="metric", got="error"):
            call()
    assert run_app(["report", str(tmp_path / "o")]) != 0
    assert "unknown metric 'error'" in capsys.readouterr().err


@pytest.mark.usefixtures("added")
def test_comparisons_by_it_stay_in_this_process(make_graph: Callable[..., Graph]) -> None:
    small: dict[str, Any] = {"methods": ["fedavg"], "seeds": [0], "rounds": 1, "clients": 2}
    table = sg.compare(make_graph(), metric="error", progress="none", **small)
    assert {line["metric"] for line in table.lines if line} == {"error"}
    with raises_code(ConfigError, "conflicting-options", options=["processes", "error"]):
        sg.compare(make_graph(), metric="error", processes=2, progress="none", **small)


@pytest.mark.usefixtures("added")
def test_added_again_it_is_another_and_pages_outlive_it(
    make_graph: Callable[..., Graph], tmp_path: Path
) -> None:
    add_metric(replace(ERROR, title="share of mistakes"))
    assert METRICS["error"].title == "share of mistakes"
    go(make_graph(), metric="accuracy", out=str(tmp_path / "o"))
    METRICS.pop("error")
    assert run_app(["report", str(tmp_path / "o")]) == 0


@pytest.mark.usefixtures("added")
def test_tasks_have_the_metrics_of_their_labels() -> None:
    assert [name for name, task in TASKS.items() if "error" in task.metrics] == ["node_class"]
    assert all(task.metrics[-1] == LOSS for task in TASKS.values())
    assert all(set(task.columns) <= set(task.metrics) for task in TASKS.values())
    counts = {"val.nodes": torch.tensor([4]), "test.nodes": torch.tensor([5])}
    own: Any = own_scores(
        "multiclass",
        {**counts, "val.tp": torch.tensor([[1, 2]]), "val.loss": torch.tensor([2.0])},
        "val",
    )
    assert own == {"error": 0.25, LOSS: 0.5}


def test_what_is_no_new_metric() -> None:
    with pytest.raises(ConfigError, match=r"^expected a new name of a metric, got 'accuracy': ch"):
        add_metric(replace(ERROR, name="accuracy"))
    with pytest.raises(ConfigError, match=r"^expected a function `of` in metric error, got none"):
        add_metric(replace(ERROR, of=None))
    for name in ("", "Error", "error rate", "a,b", "../error", "x=1", "2nd", "error\n"):
        with pytest.raises(ConfigError, match=r"^expected small letters, digits, _ or @ as the na"):
            add_metric(replace(ERROR, name=name))
        assert name not in METRICS
    for labels in ((), ("classes",), ("multiclass", "links")):
        with pytest.raises(ConfigError, match=r"^expected labels of metric error among multiclas"):
            add_metric(replace(ERROR, labels=labels))
    assert "error" not in METRICS


def failing(counts: Mapping[str, Tensor]) -> float:
    return float(counts["no such count"].sum())


def not_a_number(_: Mapping[str, Tensor]) -> float:
    return float("nan")


def tensor(_: Mapping[str, Tensor]) -> Any:
    return torch.tensor(0.5)


@pytest.mark.parametrize(
    ("of", "says"),
    [
        (failing, r"metric bad cannot be worked out \(KeyError: 'no such count'\): change it"),
        (not_a_number, "expected a finite number or None from metric bad, got nan: change it"),
        (tensor, r"expected a finite number or None from metric bad, got tensor\(0.5000\): chan"),
    ],
)
def test_one_that_gives_no_number_ends_the_run_in_one_line(
    make_graph: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch, of: Any, says: str
) -> None:
    """Such values would break JSON and CSV files, and orders of rounds."""
    monkeypatch.setitem(METRICS, "bad", ERROR)
    monkeypatch.delitem(METRICS, "bad")
    add_metric(replace(ERROR, name="bad", of=of))
    with pytest.raises(ConfigError, match=f"^{says}"):
        go(make_graph())


def test_numbers_of_any_kind_become_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "own", ERROR)
    monkeypatch.delitem(METRICS, "own")
    given: list[Any] = [True, 1, np.float32(1), None]
    add_metric(replace(ERROR, name="own", of=lambda _: given.pop(0)))
    counts = {"val.loss": torch.tensor([2.0]), "val.nodes": torch.tensor([4])}
    found = [own_scores("multiclass", counts, "val")["own"] for _ in range(4)]
    assert found == [1.0, 1.0, 1.0, None]
    assert [type(each) for each in found] == [float, float, float, type(None)]
