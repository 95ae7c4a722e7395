"""Laws of thresholds: the best of all edges of bins, kept with the model, the same at silos."""

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

import silograph as sg
from conftest import planted_graph
from mistakes import raises_code
from pages import read_page
from remote_runs import finish, lines, remote, setup_of
from runs import FAST
from silograph.core.errors import ConfigError, DataError
from silograph.experiment.run.predictions import predict_to
from silograph.graph.graph import Graph
from silograph.methods import METHODS
from silograph.task.counts import BINS
from silograph.task.decision_scores import edges_of_bins, sigmoid
from silograph.task.threshold import (
    DecisionCounts,
    Threshold,
    best_bin,
    parse_threshold,
    probability_of,
    read_threshold,
)

RULES = ("f1", "recall@fpr=0.1", "cost=1:7")


def binary_graph(n: int = 160) -> Graph:
    """Return a graph of two classes, of which the second is rare."""
    graph = planted_graph(n)
    y = (graph.y == 2).long()
    return replace(graph, y=y, num_classes=2, class_names=("ok", "fraud"))


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return truth and bin of nodes, and their table (2, B)."""
    generator = np.random.default_rng(seed)
    truth = generator.random(60) < 0.3
    truth[:2] = [True, False]
    bins = np.clip(generator.normal(120 + 20 * truth, 25), 0, BINS - 1).astype(int)
    table = [np.bincount(bins[truth == t], minlength=BINS) for t in (False, True)]
    return truth, bins, np.stack(table).astype(float)


def value(rule: str, truth: np.ndarray, decided_positive: np.ndarray) -> float:
    """Return how good decisions are, by scikit-learn or counting."""
    false = (decided_positive & ~truth).sum()
    if rule == "f1":
        return float(f1_score(truth, decided_positive, zero_division=0))
    if rule.startswith("cost"):
        return float(-(false + 7 * (~decided_positive & truth).sum()))
    return float((decided_positive & truth).sum()) if false <= 0.1 * (~truth).sum() else -np.inf


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(5))
def test_a_threshold_is_the_best_of_all_edges(rule: str, seed: int) -> None:
    truth, bins, table = drawn(seed)
    place = best_bin(table, parse_threshold(rule))
    assert place is not None
    values = [value(rule, truth, bins >= b) for b in range(BINS + 1)]
    assert values[place] == pytest.approx(max(values))
    assert all(v < max(values) - 1e-12 for v in values[place + 1 :])  # the highest of the best
    counts = DecisionCounts.of(table, probability_of(place))
    decided_positive = bins >= place
    assert counts.true_positives == (decided_positive & truth).sum()
    assert counts.false_positives == (decided_positive & ~truth).sum()
    assert counts.false_negatives == (~decided_positive & truth).sum()
    assert counts.true_negatives == (~decided_positive & ~truth).sum()
    assert counts.f1 == pytest.approx(f1_score(truth, decided_positive, zero_division=0))


def test_all_or_nothing_can_be_best() -> None:
    _, _, table = drawn(0)
    assert best_bin(table, parse_threshold("cost=1:1000000")) == np.nonzero(table[1])[0][0]
    assert best_bin(table, parse_threshold("cost=1000000:1")) is not None
    worst = np.stack([table[1], table[0]])[:, ::-1]  # positives rank last
    place = best_bin(worst, parse_threshold("cost=1000000:1"))
    assert place is not None
    probability = probability_of(BINS)
    assert probability == 1
    nobody = Threshold("f1", 1, probability).decide(np.array([[0.0, 1.0]]))
    assert not nobody.any()
    assert Threshold("f1", 1, probability_of(0)).decide(np.array([[1.0, 0.0]])).all()
    assert best_bin(table * [[1], [0]], parse_threshold("f1")) is None
    assert all(a < b for a, b in pairwise(sigmoid(edges_of_bins(2))))


@pytest.mark.parametrize(
    "text", ["", "f2", "recall@fpr=0", "recall@fpr=1", "cost=1", "cost=0:1", "cost=a:b", "cost"]
)
def test_other_rules_are_refused_in_one_line(text: str) -> None:
    with raises_code(ConfigError, "option-value", option="threshold") as caught:
        sg.run("digits", threshold=text)
    assert "\n" not in str(caught.value)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("rule", RULES)
def test_a_model_decides_as_its_run_has_counted(rule: str, kernels: Any, tmp_path: Path) -> None:
    graph = binary_graph()
    options = FAST | {"method": "centralized", "kernels": kernels, "out": str(tmp_path / "run")}
    result = sg.run(graph, **options, threshold=rule)
    scores = result.threshold
    assert scores is not None
    assert scores.positive == "fraud"
    assert result.cut is not None
    for model in (result.model, sg.load_model(tmp_path / "run")):
        assert model is not None
        assert model.threshold == scores.threshold
        decided = model.decisions(graph)
        for part, counts in (("val", scores.val), ("test", scores.test)):
            mask = getattr(result.cut.split, part).numpy()
            truth, decided_positive = graph.y.numpy()[mask] == 1, decided[mask]
            assert counts.true_positives == (decided_positive & truth).sum()
            assert counts.false_positives == (decided_positive & ~truth).sum()
    written = json.loads((tmp_path / "run" / "result.json").read_text())["threshold"]
    assert written == scores.to_dict()
    assert f"threshold {rule}: class fraud from a probability of" in result.summary(200)
    text = read_page(tmp_path / "run" / "report.html").text
    assert "A node is taken for fraud from a probability of" in text
    sg.resume(tmp_path / "run", graph=graph)


def test_predictions_have_the_decision(tmp_path: Path) -> None:
    graph, run = binary_graph(), tmp_path / "run"
    result = sg.run(graph, **FAST, threshold="cost=1:9", positive="ok", out=str(run))
    assert result.threshold is not None
    assert result.model is not None
    assert result.threshold.positive == "ok"
    out = tmp_path / "p.csv"
    np.savez(
        tmp_path / "g.npz",
        x=np.asarray(graph.x),
        edge_index=graph.edge_index.numpy(),
        y=graph.y.numpy(),
    )
    predict_to(run, tmp_path / "g.npz", out)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert list(rows[0]) == ["id", "decision", "predicted", "p_ok", "p_fraud"]
    expected = result.model.decisions(graph)
    assert [row["decision"] == "ok" for row in rows] == expected.tolist()
    limit = result.threshold.threshold.probability
    for row in rows:
        assert (row["decision"] == "ok") == (float(row["p_ok"]) >= limit) or (
            abs(float(row["p_ok"]) - limit) < 1e-5
        )


def test_without_a_rule_there_is_no_threshold(tmp_path: Path) -> None:
    result = sg.run(binary_graph(), **FAST)
    assert result.threshold is None
    assert result.model is not None
    assert result.model.threshold is None
    with pytest.raises(DataError, match="expected a model with a threshold"):
        result.model.decisions(binary_graph())
    with raises_code(ConfigError, "unread-option", option="threshold", part="3 classes"):
        sg.run(planted_graph(40), **FAST, threshold="f1")
    result = sg.run(binary_graph(), **FAST | {"split": "0.5/0/0.5"}, threshold="f1")
    assert result.threshold is None
    assert "threshold f1: none, as no client has sent scores" in " ".join(result.summary().split())


def test_damaged_thresholds_are_refused() -> None:
    good = Threshold("f1", 1, 0.25)
    assert read_threshold(good.to_dict(), 2) == good
    for wrong in ({"positive": 2}, {"probability": 1.5}, {"probability": "x"}, {"positive": 0.5}):
        with pytest.raises((TypeError, ValueError)):
            read_threshold(good.to_dict() | wrong, 2)


@pytest.mark.parametrize("method", ["fedavg", "local"])
@pytest.mark.parametrize("min_count", [0, 2])
def test_a_session_chooses_the_threshold_of_the_simulation(method: str, min_count: int) -> None:
    setup = setup_of(
        binary_graph(320), METHODS[method], threshold="f1", evaluation_min_count=min_count
    )
    whole, silos = finish(setup), finish(remote(setup)[0])
    assert whole.threshold is not None
    assert silos.threshold == whole.threshold
    assert lines(whole.ledger.records) == lines(silos.ledger.records)
    assert whole.handed_over_bytes == silos.handed_over_bytes


def test_a_single_bit_has_a_threshold() -> None:
    graph = binary_graph()
    graph = replace(graph, y=graph.y[:, None], num_classes=1, class_names=("fraud",))
    result = sg.run(graph, **FAST, threshold="f1")
    assert result.threshold is not None
    assert result.threshold.threshold.positive == 0
    assert result.model is not None
    probabilities = result.model.probabilities(graph)
    assert probabilities is not None
    expected = probabilities[:, 0] >= result.threshold.threshold.probability
    assert torch.equal(torch.from_numpy(result.model.decisions(graph)), torch.from_numpy(expected))


def test_new_nodes_need_no_edges(tmp_path: Path) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    sg.run(binary_graph(), **FAST, threshold="f1", out=str(run))
    new.mkdir()
    names = [f"x{k}" for k in range(7)]
    lines_of_nodes = [",".join(["id", *names]), *(f"n{i},{i},0,1,0,0,1,2" for i in range(3))]
    (new / "nodes.csv").write_text("\n".join(lines_of_nodes) + "\n")
    without, empty, joined = (tmp_path / f"{name}.csv" for name in ("without", "empty", "joined"))
    assert predict_to(run, new, without) == 3
    (new / "edges.csv").write_text("source,target\n")
    predict_to(run, new, empty)
    assert without.read_text() == empty.read_text()
    (new / "edges.csv").write_text("source,target\nn0,n2\n")
    predict_to(run, new, joined)
    rows = [list(csv.DictReader(path.read_text().splitlines())) for path in (empty, joined)]
    assert rows[0][1] == rows[1][1]  # n1 has no edge
    assert rows[0][0] != rows[1][0]
    (new / "edges.csv").unlink()
    with pytest.raises(DataError, match=r"expected a folder with nodes.csv and edges.csv"):
        sg.load(new)


def test_a_parquet_file_has_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    graph = binary_graph()
    run = tmp_path / "run"
    result = sg.run(graph, **FAST, threshold="f1", out=str(run))
    edges, y = graph.edge_index.numpy(), graph.y.numpy()
    np.savez(tmp_path / "g.npz", x=np.asarray(graph.x), edge_index=edges, y=y)
    out = tmp_path / "p.parquet"
    assert predict_to(run, tmp_path / "g.npz", out) == graph.num_nodes
    table = parquet.read_table(out)
    assert table.column_names == ["id", "decision", "predicted", "p_ok", "p_fraud"]
    assert result.model is not None
    p = result.model.probabilities(graph)
    assert p is not None
    assert table["p_fraud"].to_pylist() == p[:, 1].tolist()
    decided = result.model.decisions(graph)
    assert [name == "fraud" for name in table["decision"].to_pylist()] == decided.tolist()
