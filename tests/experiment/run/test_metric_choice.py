"""Laws of the run's metric: in its direction it picks, stops, is tuned and compared, everywhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score

import silograph as sg
from mistakes import raises_code
from remote_runs import finish, lines, remote, setup_of
from runs import FAST, MakeGraph, go, same_bits, weights_of
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.experiment.run.clock import reason_to_stop
from silograph.experiment.run.round_scores import JudgedRound, is_better
from silograph.experiment.run.setup import prepare
from silograph.methods import METHODS
from silograph.study.tune import Trial, Tuned, best_of, propose
from silograph.task.metric_table import METRICS, Metric, metric_of
from silograph.task.registry import TASKS
from silograph.task.scores import Scores

EVERY = pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: str(metric.name))
PICKING = pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: str(metric.name))
GOOD_AND_BAD = {True: (0.75, 0.25), False: (0.25, 0.75)}  # by whether higher is better
OWN = "0.6/0.2/0.2"


def at(t: int, metric: Metric, value: float | None, loss: float = 1.0) -> JudgedRound:
    """A round with a score."""
    scores = Scores({"loss": loss, metric.name: value})
    views = {"server": scores, "personalized": scores}
    return JudgedRound(t, None, {}, None, views, views, ())


# --- the table ------------------------------------------------------------------------------------


@EVERY
def test_the_better_of_two_values_is_that_of_the_direction(metric: Metric) -> None:
    good, bad = GOOD_AND_BAD[metric.higher]
    assert metric.goodness(good) > metric.goodness(bad) > metric.goodness(None)
    assert metric.best([bad, None, good]) == good
    assert metric.best([None]) is None
    assert metric.reaches(good, bad)
    assert metric.reaches(bad, bad)
    assert not metric.reaches(bad, good)
    assert not metric.reaches(None, bad)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: str(task.name))
def test_a_task_names_metrics_of_the_table(task: Any) -> None:
    assert set(task.metrics) <= METRICS.keys()
    assert task.metrics[-1] == "loss"
    assert METRICS[task.primary].validation
    assert {task.primary, "loss"} <= set(task.columns) <= set(task.metrics)
    assert set(task.by_client) <= set(task.metrics)


def test_an_unknown_metric_names_the_nearest() -> None:
    with raises_code(ConfigError, "unknown-name", what="metric", got="rsme", suggestion="rmse"):
        metric_of("rsme")


# --- picking and stopping ------------------------------------------------------------------------


@PICKING
def test_the_better_round_is_picked_and_ties_go_by_loss(
    make_graph: MakeGraph, metric: Metric
) -> None:
    setup = prepare(RunConfig(**FAST), make_graph(40))
    setup = replace(setup, config=replace(setup.config, metric=metric.name))
    good, bad = GOOD_AND_BAD[metric.higher]
    assert is_better(setup, at(1, metric, bad), None)
    assert is_better(setup, at(2, metric, good, 0.5), at(1, metric, bad, 0.5)) or (
        metric.name == "loss"
    )
    assert not is_better(setup, at(2, metric, bad), at(1, metric, good, 0.25))
    assert not is_better(setup, at(2, metric, good), at(1, metric, good))
    assert not is_better(setup, at(2, metric, None), at(1, metric, good))
    if metric.name != "loss":
        assert is_better(setup, at(2, metric, good, 0.5), at(1, metric, good, 0.75))


@PICKING
def test_a_target_is_reached_in_the_direction(metric: Metric) -> None:
    good, bad = GOOD_AND_BAD[metric.higher]

    def reason(target: str, value: float, default: str | None = None) -> str | None:
        stop = reason_to_stop(
            RunConfig(target=target, metric=default),
            t=1,
            best_round=1,
            validation=Scores({metric.name: value}),
            total_bytes=0,
            seconds=0.0,
        )
        return None if stop is None else str(stop)

    sign = ">=" if metric.higher else "<="
    told = f"target reached: validation {metric.name} {good:.4f} {sign} 0.5"
    assert reason(f"{metric.name}=0.5", good) == told
    assert reason(f"{metric.name}=0.5", bad) is None
    assert reason("0.5", good, metric.name) == told
    assert reason("0.5", bad, metric.name) is None


# --- tuning and comparing ------------------------------------------------------------------------


@PICKING
def test_a_search_takes_the_better_trial(metric: Metric) -> None:
    good, bad = GOOD_AND_BAD[metric.higher]
    values = ((bad,), (good,), (None,), (bad,))
    trials = [
        Trial(n, {"lr": 0.1 * (n + 1)}, value, None, True, metric) for n, value in enumerate(values)
    ]
    assert best_of(trials) == trials[1]
    config = RunConfig()
    found = Tuned({}, (0,), "server", tuple(trials), trials[1], config, "fedavg", ())
    order = [line.split()[0] for line in found.summary().splitlines() if line[:2].strip()]
    assert "1*" in order
    assert order.index("1*") < order.index("0")
    assert json.loads(found.to_json())["metric"] == metric.name


@pytest.mark.parametrize("higher", [True, False])
def test_proposals_go_where_scores_are_better(higher: bool) -> None:
    pytest.importorskip("optuna")
    from silograph.core.setting_values import lin

    metric = METRICS["accuracy" if higher else "rmse"]
    ranges = {"dropout": lin(0.0, 1.0)}
    before = []
    for number in range(40):
        value = abs(number / 40 - 0.2)  # best at .2 where lower is better, at 1 otherwise
        before.append(Trial(number, {"dropout": number / 40}, (value,), None, True, metric))
    before.append(Trial(40, {"dropout": 0.5}, (None,), None, True, metric))  # diverged
    drawn = [float(propose(41, ranges, before, seed)["dropout"]) for seed in range(9)]
    near = sorted(drawn)[4]
    assert (near > 0.7) if higher else (near < 0.4)


@pytest.mark.parametrize("name", ["f1_macro", "loss"])
def test_compare_picks_and_marks_by_the_metric(make_graph: MakeGraph, name: str) -> None:
    small: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 3, "hidden": 4}
    table = sg.compare(
        make_graph(), methods=["local", "fedavg"], seeds=1, processes=0, metric=name, **small
    )
    means = {row["method"]: row["server_mean"] for row in table.rows if row["server_mean"]}
    assert table.to_dict()["metric"] == name
    for line in table.lines:
        assert line is not None
        assert line["metric"] == name
        assert line["config"]["metric"] == name
    for row in table.rows:
        if "server" in row["best"]:
            assert row["server_mean"] == METRICS[name].best(means.values())
    best = {row["personalized_mean"] for row in table.rows if "personalized" in row["best"]}
    assert best == {METRICS[name].best(row["personalized_mean"] for row in table.rows)}
    told = f"{name} on test nodes, {'higher' if METRICS[name].higher else 'lower'} is better"
    assert told in table.notes[0]


# --- runs -----------------------------------------------------------------------------------------


def test_the_default_is_written_out(make_graph: MakeGraph) -> None:
    for multilabel, name in ((False, "accuracy"), (True, "f1_micro")):
        graph = make_graph(multilabel=multilabel)
        result, named = go(graph), go(graph, metric=name)
        assert result.config.metric == name == result.to_dict()["metric"]
        assert result.best_round == named.best_round
        assert same_bits(weights_of(result), weights_of(named))
        assert result.rounds[0].keys() == named.rounds[0].keys()


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", ["f1_macro", "f1_micro", "loss", "accuracy_client_mean"])
def test_the_best_round_is_that_of_the_metric(make_graph: MakeGraph, name: str) -> None:
    metric = METRICS[name]
    for multilabel in (False, True):
        result = go(make_graph(multilabel=multilabel), metric=name, rounds=12, split=OWN)
        column = f"val_server_{name}"
        ranks = [
            (metric.goodness(row[column]), -(row["val_server_loss"] or 0)) for row in result.rounds
        ]
        assert result.best_round == ranks.index(max(ranks)) + 1
        assert result.val.server is not None
        assert result.val.server[name] == result.rounds[result.best_round - 1][column]
        assert f"val {metric.title}" not in result.summary()
        header = result.summary(200).splitlines()[1].split("  ")
        if name != "loss":
            assert [cell.strip() for cell in header if cell][1] == METRICS[name].title


def test_patience_waits_for_the_metric(make_graph: MakeGraph) -> None:
    result = go(make_graph(), rounds=200, metric="loss", patience=3, lr=0.2)
    losses = [row["val_server_loss"] for row in result.rounds]
    assert losses.index(min(v for v in losses if v is not None)) + 1 == result.best_round
    assert result.rounds[-1]["round"] == result.best_round + 4  # scored when the next has trained


def test_a_value_alone_is_a_target_of_the_metric(make_graph: MakeGraph) -> None:
    result = go(make_graph(), rounds=200, metric="loss", target="1.0")
    losses = [row["val_server_loss"] or 9 for row in result.rounds]
    assert losses[-2] <= 1.0  # the score of a round is known when the next one has trained
    assert min(losses[:-2], default=9) > 1.0
    assert result.stopped.startswith("target reached: validation loss ")
    assert result.stopped.endswith(" <= 1")


def test_a_resumed_run_has_the_metric(make_graph: MakeGraph, tmp_path: Path) -> None:
    out = str(tmp_path / "x")
    graph = make_graph(multilabel=True)
    result = go(graph, metric="f1_macro", out=out)
    again = sg.resume(out, graph=graph)
    assert again.best_round == result.best_round
    assert again.val == result.val
    assert "f1_macro" in (tmp_path / "x" / "config.toml").read_text(encoding="utf-8")
    page = (tmp_path / "x" / "report.html").read_text(encoding="utf-8")
    assert "test F1 macro, server" in page
    assert "chosen by validation F1 macro of the server view" in page


def test_clients_have_the_metric_where_it_is_one_of_theirs(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    result = go(make_graph(multilabel=True), out=str(tmp_path / "x"))
    header = (tmp_path / "x" / "clients.csv").read_text(encoding="utf-8").splitlines()[0]
    assert "test_server_accuracy" in header
    assert "test_server_f1_micro" in header
    by_client = result.client_scores["f1_micro"]["server"]
    assert len(by_client) == 4
    assert all(value is not None and 0 <= value <= 1 for value in by_client)
    page = (tmp_path / "x" / "report.html").read_text(encoding="utf-8")
    assert "Test F1 micro of each client" in page


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"metric": "acuracy"}, "unknown metric 'acuracy': did you mean 'accuracy'"),
        ({"metric": "acc"}, "unknown metric 'acc': did you mean 'accuracy'?"),
        ({"metric": "rmse"}, "unknown metric of node_class 'rmse'; choices: accuracy, "),
        ({"target": "rmse=0.5"}, "target: unknown metric 'rmse'; choices: accuracy, "),
        ({"target": "f1_marco=0.5"}, "target: unknown metric 'f1_marco': did you mean 'f1_m"),
        ({"target": "80"}, "target: expected a value of accuracy from 0 to 1, got '80'"),
        ({"target": "loss=-1"}, "target: expected a value of loss of 0 or more, got 'l"),
        ({"target": "nan"}, "target: expected METRIC=VALUE, or a VALUE of the run's metric alone"),
    ],
)
def test_metrics_that_cannot_be(make_graph: MakeGraph, options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        go(make_graph(), **options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "rmse, " not in str(caught.value)  # of another task


def test_choices_of_a_folder_of_ratings_are_those_of_ratings(tmp_path: Path) -> None:
    """Its task is known once it is read."""
    (tmp_path / "ratings.csv").write_text("user,item,rating\na,b,3\na,c,4\nb,b,2\nb,c,5\n")
    mistakes: list[dict[str, Any]] = [{"metric": "ndcg"}, {"target": "ndcg=0.5"}]
    for asked in mistakes:
        with pytest.raises(ConfigError) as caught:
            sg.run(str(tmp_path), model="rating_profiles", clients=1, rounds=1, **asked)
        told = str(caught.value).removeprefix("target: ")
        assert told == "unknown metric 'ndcg': did you mean 'ndcg@10'?"


@pytest.mark.parametrize("multilabel", [False, True])
def test_the_baseline_is_the_best_constant(make_graph: MakeGraph, multilabel: bool) -> None:
    graph = make_graph(90, multilabel=multilabel)
    result = go(graph, rounds=1)
    assert result.cut is not None
    assert result.baseline is not None
    split, y = result.cut.split, result.cut.graph.y
    if multilabel:
        common = (y[split.train].double().mean(dim=0) > 0.5).long()
        assert result.constant == "commonest bits"
    else:
        common = torch.bincount(y[split.train]).argmax()
        assert result.constant == "largest class"
    assert result.baseline.accuracy == float((y[split.test] == common).double().mean())
    assert result.baseline.auc in (None, 0.5)
    shown = result.to_dict()["baseline"]
    assert shown["name"] == result.constant
    assert shown["scores"]["accuracy"] == result.baseline.accuracy
    assert go(graph, rounds=1, split="0.5/0.5/0").baseline is None


@pytest.mark.parametrize("multilabel", [False, True])
def test_validation_auc_picks_the_round_and_is_that_of_scikit_learn(
    make_graph: MakeGraph, multilabel: bool
) -> None:
    """With one client the server's view is the uncut one, so the model's logits say all of it."""
    graph = make_graph(120, multilabel=multilabel)
    options: dict[str, Any] = {"clients": 1, "partition": "random", "split": "0.4/0.6/0"}
    result = go(graph, metric="auc", rounds=6, **options)
    column = [float(row["val_server_auc"] or 0) for row in result.rounds]
    assert column[result.best_round - 1] == max(column)  # ties: by the loss
    assert result.cut is not None
    assert result.model is not None
    assert result.val.server is not None
    assert result.val.uncut is not None
    val = result.cut.split.val
    odds, y = result.model.logits(graph)[val].double(), graph.y[val]
    p = odds if multilabel else odds.softmax(dim=1)
    truth = y == 1 if multilabel else y[:, None] == torch.arange(p.shape[1])
    known = y >= 0 if multilabel else torch.ones_like(truth)
    aucs = [roc_auc_score(truth[k, c], p[k, c]) for c, k in enumerate(known.T)]
    expected = sum(aucs) / len(aucs)
    assert result.val.server["auc"] == pytest.approx(expected, abs=0.02)  # 256 bins
    assert result.val.uncut["auc"] == pytest.approx(result.val.server["auc"], abs=1e-9)
    plain = go(graph, rounds=6, **options)
    assert "val_server_auc" not in plain.rounds[0]
    assert [row["test_server_auc"] for row in plain.rounds] == [
        row["test_server_auc"] for row in result.rounds
    ]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_silos_are_asked_for_the_auc_of_validation_nodes_as_the_program_says(
    make_graph: MakeGraph, method: str
) -> None:
    setup = setup_of(make_graph(60), METHODS[method], metric="auc", split=OWN, checkpoint_every=0)
    whole = finish(setup)
    silos = finish(remote(setup)[0])
    view = "personalized" if method == "local" else "server"
    columns = [[row[f"val_{view}_auc"] for row in r.rounds] for r in (whole, silos)]
    assert columns[0] == columns[1]
    assert None not in columns[0]
    assert lines(whole.ledger.records) == lines(silos.ledger.records)


def test_a_target_of_another_metric_is_scored_too(make_graph: MakeGraph) -> None:
    result = go(make_graph(60), target="auc=0.01", rounds=5)
    assert len(result.rounds) == 2  # the score of a round is known when the next one has trained
    assert "target" in result.stopped or "auc" in result.stopped


def test_auc_is_compared_and_picks(make_graph: MakeGraph) -> None:
    small: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 2, "hidden": 4}
    table = sg.compare(
        make_graph(), methods=["fedavg"], seeds=1, metric="auc", processes=0, **small
    )
    (line,) = table.lines
    assert line is not None
    assert line["metric"] == "auc"
    assert table.rows[0]["server_mean"] == line["test"]["server"]["auc"]
