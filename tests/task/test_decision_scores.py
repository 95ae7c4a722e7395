"""Laws of scores of decisions: scikit-learn's over all orders in bins, and bounds for exact ones.

B: bins. T: nodes.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import average_precision_score, brier_score_loss, roc_curve

import silograph as sg
from conftest import planted_graph
from mistakes import raises_code
from remote_runs import finish, lines, remote, setup_of
from runs import FAST, MakeGraph
from silograph.core.errors import ConfigError
from silograph.graph.graph import LabelForm
from silograph.methods import METHODS
from silograph.task.counts import BINS, JudgedRows, bins_of, log_odds, tally
from silograph.task.decision_scores import (
    ScoreTables,
    average_precision,
    edges_of_bins,
    first_nodes,
    probabilities_of_bins,
    recall_at_false_positive_rate,
    sigmoid,
)
from silograph.task.metric_table import METRICS, metric_of
from silograph.task.scores import ScoreRequest, score

N = 3000
CLOSE = 1e-10
TENTHS = np.linspace(0, 1, 11)[1:-1]
NAMES = ("average_precision", "precision@100", "recall@100", "recall@fpr=0.01", "brier", "ece")


def judged(
    classes: int, task: LabelForm = "multiclass", *, seed: int = 0, rare: float = 0.05
) -> JudgedRows:
    """Return test nodes of three clients, whose logits know something of rare classes."""
    generator = torch.Generator().manual_seed(seed)
    if task == "multilabel":
        y = (torch.rand(N, classes, generator=generator) < rare).long()
        y[torch.rand(N, classes, generator=generator) < 0.1] = -1
        hint = (y == 1).double()
    else:
        shares = torch.tensor([1.0, *[rare] * (classes - 1)])
        y = torch.multinomial(shares, N, replacement=True, generator=generator)
        hint = torch.nn.functional.one_hot(y, classes).double()
    noise = torch.randn(N, classes, generator=generator, dtype=torch.float64)
    logits = 1.5 * noise + 2 * hint - 2 * (task == "multilabel")
    val = torch.zeros(N, dtype=torch.bool)
    group = torch.randint(0, 3, (N,), generator=generator)
    return JudgedRows(logits, y, val, group, 3, task)


def scored(rows: JudgedRows, *, positive: int = 1) -> dict[str, float]:
    counts = {n: t.sum(0) if n.endswith("histogram") else t for n, t in tally(rows).items()}
    scores = score(counts, "test", rows.task, ScoreRequest(NAMES, positive))
    assert scores is not None
    computed = {name: scores[name] for name in NAMES}
    assert all(value is not None for value in computed.values())
    return {name: float(value or 0) for name, value in computed.items()}


def truths(rows: JudgedRows, *, positive: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return truth (T,) and log-odds (T,) of each class that scores are of, known labels only."""
    odds, y = log_odds(rows.logits, rows.task).numpy(), rows.y.numpy()
    if rows.task == "multilabel":
        known = [y[:, k] >= 0 for k in range(y.shape[1])]
        return [(y[m, k] == 1, odds[m, k]) for k, m in enumerate(known)]
    classes = [positive] if odds.shape[1] == 2 else range(odds.shape[1])
    return [(y == k, odds[:, k]) for k in classes]


def in_bins(odds: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bin and the probability in its middle of log-odds (T,)."""
    bins = bins_of(torch.from_numpy(odds), classes).numpy()
    return bins, probabilities_of_bins(classes)[bins]


CASES = pytest.mark.parametrize(
    ("classes", "task", "positive"),
    [
        (2, "multiclass", 1),
        (2, "multiclass", 0),
        (5, "multiclass", 1),
        (1, "multilabel", 1),
        (3, "multilabel", 1),
    ],
)


@pytest.mark.parametrize("classes", [2, 3, 7, 40])
def test_edges_are_where_bins_change(classes: int) -> None:
    edges = edges_of_bins(classes)
    assert len(edges) == BINS + 1
    assert all(a < b for a, b in pairwise(edges))
    step = 1e-9 * np.maximum(1, np.abs(edges[1:-1]))
    below, above = (
        bins_of(torch.from_numpy(edges[1:-1] + d), classes).tolist() for d in (-step, step)
    )
    assert below == list(range(BINS - 1))
    assert above == list(range(1, BINS))


def orders_of(bins: np.ndarray) -> Iterator[np.ndarray]:
    """Yield ranks of nodes (T,) for every order of the nodes in each bin."""
    groups = [np.nonzero(bins == b)[0] for b in np.unique(bins)]
    for order in product(*(permutations(group) for group in groups)):
        ranks = np.empty(len(bins))
        ranks[np.concatenate(order)] = np.arange(len(bins))
        yield ranks


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("seed", range(12))
def test_scores_of_ranks_are_scikit_learns_mean_over_the_orders_in_bins(seed: int) -> None:
    generator = np.random.default_rng(seed)
    size = int(generator.integers(4, 9))
    bins = np.sort(generator.integers(0, 4, size))[::-1]
    bins[bins == np.bincount(bins).argmax()][3:] += 5
    truth = generator.random(size) < 0.5
    truth[:2] = generator.permutation([True, False])
    table = np.stack([np.bincount(bins[truth == t], minlength=BINS) for t in (False, True)]).astype(
        float
    )
    rate, k = float(generator.random()) * 0.9, int(generator.integers(1, size))
    expected = []
    for ranks in orders_of(bins):
        rates, recalls, _ = roc_curve(truth, ranks, drop_intermediate=False)
        hits = truth[np.argsort(-ranks)[:k]].sum()
        expected.append(
            (
                average_precision_score(truth, ranks),
                recalls[rates <= rate].max(),
                hits / k,
                hits / truth.sum(),
            )
        )
    computed = (
        average_precision(table),
        recall_at_false_positive_rate(table, rate),
        *first_nodes(table, k),
    )
    assert computed == pytest.approx(np.mean(expected, axis=0), abs=CLOSE)


@CASES
def test_scores_are_means_over_the_classes(classes: int, task: LabelForm, positive: int) -> None:
    rows = judged(classes, task)
    computed, chosen_from = scored(rows, positive=positive), 2 if task == "multilabel" else classes
    pairs = truths(rows, positive=positive)
    values: list[tuple[float, ...]] = []
    for truth, odds in pairs:
        bins, p = in_bins(odds, chosen_from)
        table = np.stack([np.bincount(bins[truth == t], minlength=BINS) for t in (False, True)])
        share, predicted = calibration_curve(truth, p, n_bins=10)
        parts = np.bincount(np.searchsorted(TENTHS, p), minlength=10)
        error = np.sum(parts[parts > 0] * np.abs(share - predicted)) / parts.sum()
        values.append(
            (
                average_precision(table.astype(float)),
                *first_nodes(table.astype(float), 100),
                recall_at_false_positive_rate(table.astype(float), 0.01),
                float(brier_score_loss(truth, p)),
                float(error),
            )
        )
    expected = dict(zip(NAMES, np.mean(values, axis=0), strict=True))
    if task == "multilabel":  # over all known bits
        weights = [len(truth) for truth, _ in pairs]
        expected["brier"] = np.average([v[4] for v in values], weights=weights)
    elif classes > 2:  # the sum over classes
        expected["brier"] *= classes
    assert computed == pytest.approx(expected, abs=CLOSE)


def test_the_brier_score_of_several_classes_is_scikit_learns() -> None:
    rows = judged(5)
    p = np.stack([in_bins(odds, 5)[1] for _, odds in truths(rows)], axis=1)
    one_hot = np.stack([truth for truth, _ in truths(rows)], axis=1)
    assert scored(rows)["brier"] == pytest.approx(((p - one_hot) ** 2).sum(1).mean(), abs=CLOSE)
    exact = rows.logits.softmax(1).numpy()
    expected = brier_score_loss(rows.y.numpy(), exact, labels=list(range(5)))
    assert scored(rows)["brier"] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rare", [0.02, 0.2, 1.0])
def test_binned_scores_are_near_exact_ones(seed: int, rare: float) -> None:
    rows = judged(2, seed=seed, rare=rare)
    ((truth, odds),) = truths(rows)
    computed, p = scored(rows), sigmoid(odds)
    assert computed["average_precision"] == pytest.approx(
        average_precision_score(truth, p), abs=0.02
    )
    rates, recalls, _ = roc_curve(truth, p, drop_intermediate=False)
    assert computed["recall@fpr=0.01"] == pytest.approx(recalls[rates <= 0.01].max(), abs=0.02)
    first = truth[np.argsort(-p)[:100]].mean()
    assert computed["precision@100"] == pytest.approx(first, abs=0.02)
    # A probability is at most half a bin from the middle of its bin.
    bins, middle = in_bins(odds, 2)
    half = np.diff(sigmoid(edges_of_bins(2)))[bins] / 2
    assert (np.abs(p - middle) <= half + CLOSE).all()
    assert half.max() < 0.0085
    assert abs(computed["brier"] - brier_score_loss(truth, p)) <= 2 * half.mean()
    parts = np.searchsorted(TENTHS, middle)
    sums = [np.bincount(parts, weights=values, minlength=10) for values in (p, truth)]
    exact_error = np.abs(sums[0] - sums[1]).sum() / len(p)
    assert abs(computed["ece"] - exact_error) <= half.mean()


def test_a_reliability_curve_has_all_nodes_once() -> None:
    rows = judged(2)
    bins = tally(rows)["test.histogram"].sum(0).numpy()
    tables = ScoreTables.of(bins, "multiclass", 1)
    curve = tables.reliability()
    ((truth, odds),) = truths(rows)
    assert sum(part.nodes for part in curve) == N
    assert sum(part.nodes * part.share for part in curve) == pytest.approx(truth.sum())
    middle = in_bins(odds, 2)[1]
    assert sum(part.nodes * part.predicted for part in curve) == pytest.approx(middle.sum())
    error = sum(part.nodes * abs(part.share - part.predicted) for part in curve) / N
    assert error == pytest.approx(tables.calibration_error())


def test_scores_of_no_or_one_sided_labels_are_none() -> None:
    rows = judged(2)
    bins = tally(rows)["test.histogram"].sum(0).numpy()
    bins[:, 1] = 0
    one_sided = ScoreTables.of(bins, "multiclass", 1)
    assert one_sided.score("average_precision") is None
    assert one_sided.score("recall@fpr=0.01") is None
    assert one_sided.score("precision@5") == 0
    assert one_sided.score("brier") is not None
    empty = ScoreTables.of(0 * bins, "multiclass", 1)
    assert {empty.score(name) for name in NAMES} == {None}
    counts = {n: t for n, t in tally(rows).items() if not n.endswith("histogram")}
    scores = score(counts, "test", "multiclass", ScoreRequest(NAMES))
    assert scores is not None
    assert {scores[name] for name in NAMES} == {None}


def test_names_with_numbers_are_brought_into_one_form() -> None:
    assert metric_of("recall@fpr=.01") == METRICS["recall@fpr=0.01"]
    assert metric_of("precision@0050").name == "precision@50"
    assert metric_of("recall@10").labels == ("rating",)
    for name in ("precision@0", "precision@1.5", "recall@fpr=1", "recall@fpr@.1", "recall=5", "@"):
        with raises_code(ConfigError, "unknown-name", what="metric"):
            metric_of(name)
    result = sg.run(planted_graph(40), **FAST, metric="recall@fpr=.1")
    assert result.config.metric == "recall@fpr=0.1"
    with raises_code(
        ConfigError, "unknown-name", what="metric", got="precision@0", suggestion="precision@100"
    ):
        sg.run("digits", metric="precision@0")


def test_a_metric_of_decisions_is_computed_only_where_it_is_asked_for() -> None:
    graph = planted_graph(40)
    plain, asked = sg.run(graph, **FAST), sg.run(graph, **FAST, metric="average_precision")
    assert "average_precision" not in plain.metrics
    assert plain.test.server is not None
    assert "average_precision" not in plain.test.server
    assert asked.rounds[0]["val_server_average_precision"] is not None
    assert asked.reported[0] == "average_precision"
    by_target = sg.run(graph, **FAST, target="average_precision=1")
    assert "average_precision" in by_target.metrics


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("min_count", [0, 2])
def test_a_session_has_the_scores_of_the_simulation(make_graph: MakeGraph, min_count: int) -> None:
    options: dict[str, Any] = {"metric": "ece", "rounds": 2, "evaluation_min_count": min_count}
    setup = setup_of(make_graph(160), METHODS["fedavg"], **options)
    whole, silos = finish(setup), finish(remote(setup)[0])
    assert whole.to_dict()["test"] | {"uncut": None} == silos.to_dict()["test"]
    assert whole.test.server is not None
    assert whole.test.server["ece"] is not None
    assert lines(whole.ledger.records) == lines(silos.ledger.records)


def test_a_positive_class_is_one_of_two() -> None:
    graph = planted_graph(40)
    with raises_code(ConfigError, "unread-option", option="positive", part="3 classes"):
        sg.run(graph, **FAST, positive="1")


@pytest.mark.parametrize("metric", ["auc", "ece"])
def test_a_selector_that_learns_from_scores_gets_those_of_histograms(metric: str) -> None:
    options: dict[str, Any] = FAST | {"selector": "ucb", "metric": metric, "rounds": 2}
    result = sg.run(planted_graph(160), **options)
    assert result.rounds[-1][f"val_server_{metric}"] is not None


def test_a_result_says_why_scores_of_a_rare_class_are_missing() -> None:
    graph = planted_graph(120)
    y = torch.zeros_like(graph.y)
    y[:6] = 1  # fewer at each client than a count may have
    graph = replace(graph, y=y, num_classes=2)
    small: dict[str, Any] = {"clients": 3, "rounds": 1, "hidden": "4", "partition": "random"}
    for least in (0, 5):
        result = sg.run(graph, **small, evaluation_min_count=least)
        assert result.test.server is not None
        assert (result.test.server["auc"] is None) == (least == 5)
        text = " ".join(result.summary().split())
        assert ("report no count of fewer than 5 nodes" in text) == (least == 5)
