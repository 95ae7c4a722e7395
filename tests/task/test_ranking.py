"""Recall and NDCG: scikit-learn's, enumeration, a case by hand, and runs that rank."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

import silograph as sg
from mistakes import raises_code
from rating_graphs import rating_graph
from remote_runs import finish, lines, remote, setup_of
from runs import files_of, rows_of, run_until, same_bits, weights_of
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Stacked
from silograph.evaluation.evaluate import rank_own, rank_server
from silograph.federation.base import Op
from silograph.graph.block.block import ClientBlock, kinds, make_block, pairs_of, whole
from silograph.graph.partition.partition import make_partition
from silograph.graph.partition.split import draw_split
from silograph.methods import METHODS
from silograph.task import rating_value as ranking
from silograph.task.metric_table import RANKINGS
from silograph.task.rating_value import FIELDS, Factors, ranking_counts, ranking_scores

OPTIONS: dict[str, Any] = {
    "method": "fedavg",
    "model": "rating_gcn",
    "clients": 3,
    "partition": "category",
    "split": "0.6/0.2/0.2",
    "rounds": 3,
    "hidden": 4,
    "layers": 2,
    "dropout": 0.0,
    "lr": 0.02,
    "local_epochs": 2,
    "dtype": "float64",
    "options": {"embedding": 6},
}


def block_of(*sizes: int) -> ClientBlock:
    """One client with all ratings of a small graph."""
    graph = rating_graph(*sizes)
    partition = whole(graph)
    split = draw_split(graph, partition, ratios=(0.5, 0.2, 0.3), key=Key.of(1))
    return make_block(graph, partition, split, torch.float64)[0]


def factors_of(block: ClientBlock, levels: int) -> Factors:
    """Scores with few levels, so that many are equal."""
    generator = torch.Generator().manual_seed(3)
    n = len(block.y)
    whole_numbers = torch.randint(0, levels, (2, n, 2), generator=generator).double()
    return Factors(whole_numbers[0], whole_numbers[1], whole_numbers[0, :, 0], torch.zeros(n))


def cases(block: ClientBlock, factors: Factors, part: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores and relevance of every ranked user's candidates, by plain loops."""
    pairs, items = pairs_of(block), kinds(block.x)[:, 1].nonzero()[:, 0].tolist()
    mask = block.split.val if part == "val" else block.split.test
    taken: dict[int, set[int]] = {}
    good: dict[int, set[int]] = {}
    for row, user, item in zip(
        pairs.row.tolist(), pairs.user.tolist(), pairs.item.tolist(), strict=True
    ):
        if block.split.train[row]:
            taken.setdefault(user, set()).add(item)
        elif mask[row] and block.y[row] >= 4:
            good.setdefault(user, set()).add(item)
    found = []
    for user, relevant in good.items():
        rest = [item for item in items if item not in taken.get(user, set())]
        scores = [float(factors.user[user] @ factors.item[i] + factors.bias[i]) for i in rest]
        found.append((np.array(scores), np.array([i in relevant for i in rest])))
    return found


def expected_recall(scores: np.ndarray, relevant: np.ndarray, k: int) -> float:
    """Mean over orders of equals: a tied group gives its places in the first k evenly."""
    found = 0.0
    for level in np.unique(scores):
        group = scores == level
        above = int((scores > level).sum())
        places = min(max(k - above, 0), int(group.sum()))
        found += places * int((group & relevant).sum()) / int(group.sum())
    return found / int(relevant.sum())


@pytest.mark.parametrize("levels", [2, 4, 1000])
def test_ndcg_is_that_of_scikit_learn_and_recall_the_mean_over_orders_of_equals(
    levels: int,
) -> None:
    block = block_of(20, 30, 300)
    factors = factors_of(block, levels)
    counts = dict(zip(FIELDS, ranking_counts(block, factors, 4.0)[0], strict=True))
    for part in ("val", "test"):
        found = cases(block, factors, part)
        scores = ranking_scores(counts, part)
        assert int(counts[f"{part}.ranked"]) == len(found) > 5
        ndcg = [ndcg_score([good.astype(float)], [said], k=10) for said, good in found]
        assert scores["ndcg@10"] == pytest.approx(np.mean(ndcg), abs=1e-12)
        recall = [expected_recall(said, good, 10) for said, good in found]
        assert scores["recall@10"] == pytest.approx(np.mean(recall), abs=1e-12)


def test_a_case_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """User 0 rates items 1 to 5: item 1 trains, 2 (rated 5) and 3 (rated 2) test; k = 2.

    Scores: item 1 9 (no candidate), 4 and 2 and 5 equal at 1, 3 at 0. Item 2 has one of the places
    1 to 3, each in a third of the orders: recall 2/3, NDCG (1 + 1 / log2(3)) / 3.
    """
    monkeypatch.setattr(ranking, "FIRST", 2)
    table = np.array([[0, 1, 5], [0, 2, 5], [0, 3, 2], [6, 4, 3], [6, 5, 3]])
    graph = sg.ratings(ratings=table)
    split = draw_split(graph, whole(graph), ratios=(0.5, 0.2, 0.3), key=Key.of(1))
    block = make_block(graph, whole(graph), split, torch.float64)[0]
    pairs, none = pairs_of(block), torch.zeros(len(block.y), dtype=torch.bool)
    assert block.y[pairs.row].tolist() == table[:, 2].tolist()
    train, test = none.clone(), none.clone()
    train[pairs.row[[0, 3, 4]]] = True
    test[pairs.row[[1, 2]]] = True
    block = dataclasses.replace(block, split=type(split)(train, none, test))
    bias = torch.zeros(len(block.y), dtype=torch.float64)
    bias[pairs.item] = torch.tensor([9.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    flat = torch.zeros(len(block.y), 0, dtype=torch.float64)
    found = dict(
        zip(FIELDS, ranking_counts(block, Factors(flat, flat, bias, bias), 4.0)[0], strict=True)
    )
    assert [float(found[f"val.{name}"]) for name in ("ranked", "recall", "ndcg")] == [0, 0, 0]
    assert float(found["test.ranked"]) == 1
    assert float(found["test.recall"]) == pytest.approx(2 / 3)
    assert float(found["test.ndcg"]) == pytest.approx((1 + 1 / np.log2(3)) / 3)


def test_enumeration_of_orders_agrees_with_the_closed_form() -> None:
    scores, relevant = np.array([3.0, 1.0, 1.0, 1.0, 0.0]), np.array([0, 1, 1, 0, 1], dtype=bool)
    found = []
    for order in itertools.permutations(range(5)):
        ranks = sorted(range(5), key=lambda i: (-scores[i], order[i]))
        found.append(relevant[ranks[:2]].sum() / relevant.sum())
    assert np.mean(found) == pytest.approx(expected_recall(scores, relevant, 2))


def test_users_are_drawn_and_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of(20, 30, 300)
    factors = factors_of(block, 4)
    all_users = ranking_counts(block, factors, 4.0)
    monkeypatch.setattr(ranking, "AT_ONCE", 1)
    torch.testing.assert_close(ranking_counts(block, factors, 4.0), all_users, rtol=0, atol=1e-12)
    monkeypatch.setattr(ranking, "MOST_USERS", 4)
    some = ranking_counts(block, factors, 4.0)
    assert some[0, FIELDS.index("test.ranked")] == 4
    assert torch.equal(some, ranking_counts(block, factors, 4.0))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("model", ["rating_gcn", "rating_gat", "rating_biases", "rating_profiles"])
def test_factors_order_items_as_predictions_do(model: str) -> None:
    """A rating's prediction is the score of its pair and the level of its user."""
    own = OPTIONS["options"] if model in ("rating_gcn", "rating_gat") else {}
    setup = setup_of(
        rating_graph(),
        METHODS["fedavg"],
        **{k: v for k, v in OPTIONS.items() if k not in ("method", "options")}
        | {"model": model, "clients": 1, "partition": "random", "options": own, "fanout": None}
        | {"neighbors": None},
    )
    result = finish(setup)
    assert result.model is not None
    (block,) = (each.all for each in setup.federation._host.blocks)  # type: ignore[attr-defined]
    (state,) = setup.federation.states()
    tables = {n.removeprefix("tables/"): f for n, f in state.items() if n.startswith("tables/")}
    shape, weights = setup.method_config.model, result.model.weights
    said = shape.forward(weights, block, tables=tables)[:, 0]
    found = shape.factors(weights, block, tables=tables)  # type: ignore[attr-defined]
    pairs = pairs_of(block)
    scores = (found.user[pairs.user] * found.item[pairs.item]).sum(1) + found.bias[pairs.item]
    predicted = scores + found.level[pairs.user]
    torch.testing.assert_close(said[pairs.row], predicted, rtol=0, atol=1e-10)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["fedavg", "local", "scaffold", "fedper"])
def test_runs_rank_in_both_views_and_pick_their_round_by_it(method: str) -> None:
    own = {"optimizer": "sgd"} if method == "scaffold" else {}
    graph = rating_graph(20, 90, 300)
    result = sg.run(graph, **OPTIONS | own | {"method": method, "metric": "recall@10"})
    assert result.config.relevant == 4
    view = METHODS[method].evaluate.view
    values = [row[f"val_{view}_recall@10"] for row in rows_of(result)]
    assert values[result.best_round - 1] == max(values)
    last = rows_of(result)[-1]
    assert all(0 < last[f"test_personalized_{name}"] < 1 for name in RANKINGS)
    best = result.test.server if view == "server" else result.test.personalized
    assert best is not None
    assert best["ndcg@10"] == rows_of(result)[result.best_round - 1][f"test_{view}_ndcg@10"]
    assert "NDCG@10" in str(result)


def test_rankings_change_nothing_else_and_only_counts_travel() -> None:
    plain = sg.run(rating_graph(), **OPTIONS)
    ranks = sg.run(rating_graph(), **OPTIONS, relevant=4.0)
    assert same_bits(weights_of(plain), weights_of(ranks))
    for a, b in zip(rows_of(plain), rows_of(ranks), strict=True):
        assert a.items() - b.items() <= {(n, a[n]) for n in ("bytes", "bytes_evaluation", "flops")}
    assert not any("recall" in name for name in rows_of(plain)[0])
    more = ranks.ledger.bytes_by_kind["evaluation"] - plain.ledger.bytes_by_kind["evaluation"]
    assert 0 < more < 3 * 3 * 2 * 600  # rounds, clients, views: six numbers and their names
    assert ranks.test.uncut is None or ranks.test.uncut["recall@10"] is None


def test_a_session_ranks_as_the_simulation_does_and_a_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {k: v for k, v in OPTIONS.items() if k != "method"} | {"metric": "ndcg@10"}
    here = setup_of(rating_graph(), METHODS["fedavg"], fanout=None, neighbors=None, **given)
    there, _ = remote(here)
    ours, theirs = finish(here), finish(there)
    assert [row["test_server_ndcg@10"] for row in rows_of(ours)] == [
        row["test_server_ndcg@10"] for row in rows_of(theirs)
    ]
    assert lines(ours.ledger.records) == lines(theirs.ledger.records)
    graph, out = rating_graph(), tmp_path / "cut"
    sg.run(graph, **OPTIONS, relevant=3.0, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 1, out, **OPTIONS, relevant=3.0)
    sg.resume(out, graph=graph)
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"metric": "ndcg@10", "selector": "ucb"}, "expected another metric than ndcg@10 for sel"),
        ({"relevant": float("nan")}, "relevant"),
        (
            {"relevant": 5.5},
            r"^relevant: expected at most 5, the largest rating .*, got 5\.5: no item would be",
        ),
    ],
)
def test_what_cannot_be_ranked_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sg.run(rating_graph(), **OPTIONS | changed)


def test_the_largest_rating_may_be_relevant_alone_and_the_default_is_on_the_scale() -> None:
    assert sg.run(rating_graph(), **OPTIONS, relevant=5.0).config.relevant == 5
    low = dataclasses.replace(rating_graph(), scale=(1.0, 3.0))
    with raises_code(ConfigError, "conflicting-options", options=["dataset", "relevant"]):
        sg.run(low, **OPTIONS, metric="ndcg@10")


def test_graphs_without_ratings_are_not_ranked() -> None:
    with raises_code(ConfigError, "unread-option", option="relevant", part="multiclass"):
        sg.run("digits", relevant=4.0)
    with raises_code(ConfigError, "unknown-name", what="metric of node_class", got="ndcg@10"):
        sg.run("digits", metric="ndcg@10")


@pytest.mark.parametrize("op", [rank_server, rank_own])
def test_a_state_of_another_silo_is_refused(op: Op) -> None:
    block, whose = block_of(), "server" if op is rank_server else "own"
    for shape in ((1, 5), (2, 6), (6,)):
        state = {f"{whose}/ranking": Stacked(torch.zeros(shape, dtype=torch.float64))}
        with pytest.raises(ProtocolError, match=r"expected (server|own)/ranking of 1 clients, got"):
            op(None, block, state, {}, Key.of(0))


def test_several_clients_at_once_are_refused() -> None:
    graph = rating_graph()
    parts = make_partition(graph, "random", clients=2, key=Key.of(0))
    split = draw_split(graph, parts, ratios=(0.5, 0.2, 0.3), key=Key.of(1))
    two = make_block(graph, parts, split, torch.float64)[0]
    with pytest.raises(ProtocolError, match="expected a block of one client to rank, got 2"):
        ranking_counts(two, factors_of(two, 2), 4.0)
