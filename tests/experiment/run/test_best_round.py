"""Laws of the choice of the round: validation makes it, test labels never do."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from runs import FAST, MakeGraph, blind, go, little_work, same_bits, weights_of
from silograph.core.config import RunConfig
from silograph.evaluation.evaluate import sum_histograms
from silograph.experiment.run.result import Result
from silograph.experiment.run.round_scores import is_better, judged_from_counts, task_in
from silograph.experiment.run.run import first_snapshot
from silograph.experiment.run.setup import prepare
from silograph.experiment.run.snapshot import from_checkpoint, to_checkpoint
from silograph.methods import METHODS

NO_VALIDATION = "0.5/0/0.5"


def config_of(**options: Any) -> RunConfig:
    return RunConfig(**(FAST | options))


def rows_of(result: Result) -> list[dict[str, Any]]:
    """The rows without what they cost."""
    costs = ("seconds", "bytes", "bytes_evaluation", "flops")
    return [{k: v for k, v in row.items() if k not in costs} for row in result.rounds]


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("method", METHODS)
def test_test_labels_decide_nothing(make_graph: MakeGraph, method: str) -> None:
    graph = make_graph(80)
    options: dict[str, Any] = {"method": method, "rounds": 12, "lr": 0.1, **little_work(method)}
    test = prepare(config_of(**options), graph).cut.split.test
    wrong = torch.where(test, (graph.y + 1) % graph.num_classes, graph.y)
    first, second = go(graph, **options), go(replace(graph, y=wrong), **options)
    assert first.best_round == second.best_round
    assert same_bits(weights_of(first), weights_of(second))
    assert first.val == second.val

    def without_test(result: Result) -> list[dict[str, Any]]:
        return [{k: v for k, v in r.items() if not k.startswith("test")} for r in rows_of(result)]

    assert without_test(first) == without_test(second)
    assert first.test != second.test


def best_row(result: Result, view: str) -> dict[str, Any]:
    """The row of the highest validation accuracy; then of the lowest loss; then the first."""
    accuracy, loss = f"val_{view}_accuracy", f"val_{view}_loss"
    return max(rows_of(result), key=lambda row: (row[accuracy], -row[loss]))


@pytest.mark.law(sample=3)
@pytest.mark.parametrize(
    ("method", "view"),
    [("fedavg", "server"), ("centralized", "server"), ("local", "personalized")],
)
def test_the_best_round_is_read_off_the_table(
    make_graph: MakeGraph, method: str, view: str
) -> None:
    ties = 0
    for seed in range(4):
        options = {"method": method, "rounds": 20, "seed": seed, "split": "0.4/0.1/0.5"}
        result = go(make_graph(), **options)
        best = best_row(result, view)
        accuracy = f"val_{view}_accuracy"
        ties += sum(row[accuracy] == best[accuracy] for row in rows_of(result)) > 1
        assert result.best_round == best["round"]
        for part, views in (("val", result.val), ("test", result.test)):
            scores = getattr(views, view)
            for name in ("accuracy", "accuracy_client_mean", "f1_macro", "loss"):
                assert getattr(scores, name) == best[f"{part}_{view}_{name}"]
        assert getattr(result.test, view).auc == best[f"test_{view}_auc"]
    assert ties, "this test wants a tie in accuracy, which the loss decides"


def test_the_first_of_equal_rounds_is_best(make_graph: MakeGraph) -> None:
    result = go(make_graph(), clients=1, lr=1e-30, dtype="float32")  # too small to change a score
    losses = {row["val_server_loss"] for row in rows_of(result)}
    assert len(losses) == 1
    assert result.best_round == 1


def test_the_weights_are_those_of_the_best_round(make_graph: MakeGraph) -> None:
    options = {"lr": 0.2, "split": "0.4/0.15/0.45", "seed": 1}
    result = go(make_graph(), rounds=16, **options)
    assert result.best_round < 16
    short = go(make_graph(), rounds=result.best_round, **options)
    assert short.best_round == result.best_round
    assert same_bits(weights_of(short), weights_of(result))
    assert rows_of(short) == rows_of(result)[: result.best_round]


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_evaluating_less_often_trains_the_same(make_graph: MakeGraph, method: str) -> None:
    always = go(make_graph(), rounds=8, method=method)
    seldom = go(make_graph(), rounds=8, method=method, eval_every=3)
    assert [row["round"] for row in always.rounds] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rows_of(seldom) == [row for row in rows_of(always) if row["round"] in (3, 6, 8)]
    view = METHODS[method].evaluate.view
    assert seldom.best_round == best_row(seldom, view)["round"]
    once = go(make_graph(), rounds=8, method=method, eval_every=100)
    assert rows_of(once) == rows_of(always)[-1:]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", METHODS)
def test_without_validation_nodes_the_last_round_counts(make_graph: MakeGraph, method: str) -> None:
    result = go(make_graph(), method=method, split=NO_VALIDATION, options=blind(method))
    assert result.best_round == 4
    assert (result.val.server, result.val.uncut, result.val.personalized) == (None, None, None)
    for row in result.rounds:
        assert {v for k, v in row.items() if k.startswith("val_")} == {None}
    view = METHODS[method].evaluate.view
    assert getattr(result.test, view).accuracy == rows_of(result)[-1][f"test_{view}_accuracy"]


def test_without_test_nodes_there_are_no_test_scores(make_graph: MakeGraph) -> None:
    result = go(make_graph(), split="0.5/0.5/0")
    assert result.to_dict()["test"] == {"server": None, "uncut": None, "personalized": None}
    assert result.val.server is not None


def counted(right: list[int], nodes: list[int]) -> dict[str, torch.Tensor]:
    """Counts of clients of whose nodes so many are of class 0 and found, of two classes."""
    hits, every = torch.tensor(right), torch.tensor(nodes)
    found = {"histogram": torch.zeros(2, 2, 4)}
    for part in ("val", "test"):
        found |= {
            f"{part}.nodes": every,
            f"{part}.known": every,
            f"{part}.loss": (every - hits).double(),
            f"{part}.tp": torch.stack([hits, 0 * hits], 1),
            f"{part}.fp": torch.stack([0 * hits, every - hits], 1),
            f"{part}.fn": torch.stack([every - hits, 0 * hits], 1),
        }
    return {("test." + n if n == "histogram" else n): t for n, t in found.items()}


@pytest.mark.parametrize(
    ("right", "nodes", "away", "better"),
    [
        ([9, 0], [10, 0], ("b",), True),  # .9 of a's nodes, where it had .8 of them before
        ([8, 0], [10, 0], ("b",), False),  # as many as before, though the pooled share is higher
        ([0, 9], [0, 10], ("a",), True),
        ([0, 0], [0, 0], ("a", "b"), True),  # nothing to compare: the later one
        ([8, 3], [10, 10], (), True),
        ([8, 2], [10, 10], (), False),
    ],
)
def test_rounds_that_other_clients_judged_compare_on_the_nodes_of_both(
    make_graph: MakeGraph,
    right: list[int],
    nodes: list[int],
    away: tuple[str, ...],
    better: bool,
) -> None:
    setup = prepare(config_of(clients=2), make_graph(40))
    before = judged_from_counts(
        setup, 1, counted([8, 2], [10, 10]), counted([0, 0], [1, 1]), None, ()
    )
    now = judged_from_counts(setup, 2, counted(right, nodes), counted([0, 0], [1, 1]), None, away)
    assert is_better(setup, now, before) == better
    assert not (better and any(nodes) and is_better(setup, before, now))


def test_a_checkpoint_knows_who_was_away(make_graph: MakeGraph) -> None:
    setup = prepare(config_of(clients=2), make_graph(40))
    specs = task_in(setup).counts(setup.method_config.model.outputs)
    counts = sum_histograms(
        {name: torch.ones(2, *s.shape, dtype=s.dtype) for name, s in specs.items()}
    )
    last = setup.federation.ids[1]
    best = judged_from_counts(setup, 3, counts, counts, {}, (last,))
    before = replace(first_snapshot(setup), round=3, best=best)
    checkpoint = to_checkpoint(setup, before, "run", {})
    after, _ = from_checkpoint(setup, checkpoint, None)
    assert after.best is not None
    assert after.best.away == (last,)
    old = replace(checkpoint, facts={k: v for k, v in checkpoint.facts.items() if k != "best_away"})
    after, _ = from_checkpoint(setup, old, None)  # of a run from before this was written down
    assert after.best is not None
    assert after.best.away == ()
