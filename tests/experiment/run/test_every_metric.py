"""Every metric of every task works in runs, reports, comparisons, searches and trackers."""

import json
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from conftest import planted_graph
from pages import read_page
from rating_graphs import rating_graph
from remote_runs import finish, lines, remote, setup_of
from runs import FAST, MakeGraph, with_values
from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.report import comparison_runs, write_comparison
from silograph.experiment.result_files import Row
from silograph.experiment.run.progress import RunFacts, final_values
from silograph.experiment.run.result import Result
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silograph.task.metric_table import METRICS
from silograph.task.registry import TASKS

QUICK: dict[str, Any] = {**FAST, "rounds": 2, "clients": 2, "kernels": "torch"}
RATING: dict[str, Any] = {"model": "rating_profiles", "lr": 0.01}
PAIRS = [(task.labels, metric) for task in TASKS.values() for metric in task.metrics]


def graph_and_options(labels: str) -> tuple[Graph, dict[str, Any]]:
    """Return a small graph of a task, and the options of a short run on it."""
    if labels == "rating":
        return rating_graph(), QUICK | RATING
    graph = planted_graph(40, multilabel=labels == "multilabel")
    return with_values(graph) if labels == "node_value" else graph, dict(QUICK)


class FinalValues:
    """Collects what a tracker writes down of a result."""

    values: dict[str, float]

    def begin(self, config: ResolvedConfig, facts: RunFacts) -> None:
        del config, facts

    def round(self, row: Row) -> None:
        del row

    def end(self, result: Result) -> None:
        self.values = final_values(result)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize(("labels", "metric"), PAIRS)
def test_a_run_shows_its_metric_everywhere(labels: str, metric: str, tmp_path: Path) -> None:
    graph, options = graph_and_options(labels)
    tracker = FinalValues()
    out = tmp_path / "run"
    result = sg.run(graph, **options, metric=metric, out=str(out), trackers=[tracker])
    assert result.metric is METRICS[metric]
    assert result.reported[0] == metric
    assert result.test.server is not None
    value = result.test.server[metric]
    written = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert written["test"]["server"][metric] == value
    assert METRICS[metric].text(value) in result.summary(200)
    assert METRICS[metric].title in result.summary(200)
    if value is not None:
        assert tracker.values[f"test_server_{metric}"] == value
    page = result.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"test {METRICS[metric].title}, server" in page
    assert METRICS[metric].text(value) in read_page(tmp_path / "page.html").text
    sg.resume(out, graph=graph)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("metric", METRICS)
def test_a_comparison_and_a_search_go_by_the_metric(metric: str, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    labels = METRICS[metric].labels[0]
    graph, options = graph_and_options(labels)
    del options["method"]
    out = tmp_path / "compared"
    table = sg.compare(
        graph, methods=["local", "fedavg"], seeds=2, processes=0, metric=metric, out=out, **options
    )
    assert not table.failed
    for line in table.lines:
        assert line is not None
        assert metric in line["test"]["personalized"]
    assert table.to_dict()["metric"] == metric
    assert metric in table.summary()
    write_comparison(comparison_runs(out), tmp_path / "page.html", comparison=out)
    del options["lr"]
    options |= {"metric": metric, "method": "fedavg"}
    search = sg.tune(graph, trials=2, keys=["lr"], processes=0, **options)
    assert search.metric.name == metric
    assert METRICS[metric].title in search.summary()


def test_a_session_has_the_loss_of_the_simulation(make_graph: MakeGraph) -> None:
    setup = setup_of(make_graph(40), METHODS["fedavg"], metric="loss", rounds=2)
    whole, silos = finish(setup), finish(remote(setup)[0])
    of_uncut = {"uncut": None}  # of a simulation only
    assert whole.to_dict()["test"] | of_uncut == silos.to_dict()["test"]
    assert whole.reported_scores(whole.test.server) == dict(whole.test.server or {})
    assert lines(whole.ledger.records) == lines(silos.ledger.records)
