"""Counts that leave a client have a least number of nodes behind them, and totals stay exact."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from silograph.evaluation.evaluate import sum_histograms
from silograph.graph.graph import LabelForm
from silograph.task.counts import ALL_COUNTS, BINS, CountRules, EvaluationLevel, JudgedRows
from silograph.task.least_count import (
    count_problem,
    counts_to_send,
    limited_sums,
    merge_bins,
    merged_fields,
    specs_to_send,
    spread_bins,
)
from silograph.task.registry import task_of
from silograph.task.scores import PARTS, constant_scores

CLASSES, CLIENTS = 4, 3
FORMS: tuple[LabelForm, ...] = ("multiclass", "multilabel", "node_value", "rating")
FIVE = CountRules(5, val_histogram=True)


def full_counts(form: LabelForm, seed: int, rows: int) -> dict[str, Tensor]:
    """Counts of random predictions at clients of unlike size, classes of unlike frequency."""
    draw = np.random.default_rng(seed)
    outputs = 1 if form == "rating" else CLASSES
    y = torch.from_numpy(draw.choice(CLASSES, rows, p=[0.6, 0.25, 0.1, 0.05]))
    if form == "multilabel":
        y = torch.from_numpy(draw.choice([-1, 0, 1], (rows, CLASSES), p=[0.1, 0.6, 0.3]))
    elif form == "node_value":
        y = torch.from_numpy(draw.normal(size=(rows, CLASSES)))
        y[torch.from_numpy(draw.random((rows, CLASSES)) < 0.5)] = torch.nan
    elif form == "rating":
        y = torch.from_numpy(draw.normal(size=rows))
    logits = torch.from_numpy(3 * draw.normal(size=(rows, outputs)))
    group = torch.from_numpy(draw.choice(CLIENTS, rows, p=[0.7, 0.2, 0.1]))
    val = torch.from_numpy(draw.random(rows) < 0.4)
    seen = torch.from_numpy(draw.random(rows) < 0.8) if form == "rating" else None
    judged = JudgedRows(logits, y, val, group, CLIENTS, form, seen=seen)
    return task_of(form).tally(judged, val_histogram=True)


def numbers_of_nodes(form: LabelForm, sent: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    """Every number of nodes that a part tells, of classes and of the merged ones together."""
    found = {"nodes": sent[f"{part}.nodes"]}
    if form == "rating":
        seen, unseen = (sent[f"{part}.{kind}.nodes"] for kind in ("seen", "unseen"))
        return {**found, "seen": seen, "unseen": unseen}
    for begins in (f"{part}.", f"{part}.merged."):
        known = sent[f"{begins}known"]
        found[f"{begins}known"] = known
        if form == "node_value":
            continue
        tp, fp, fn = (sent[f"{begins}{name}"] for name in ("tp", "fp", "fn"))
        found[f"{begins}true"], found[f"{begins}false"] = tp + fn, known - tp - fn
        found[f"{begins}predicted"], found[f"{begins}others"] = tp + fp, known - tp - fp
    if form in ("multiclass", "multilabel"):
        found["bins"] = sent[f"{part}.histogram"]
        found["scores"] = sent[f"{part}.histogram"].sum(dim=-1)
    return found


@settings(max_examples=25)
@given(
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 9999),
    rows=st.integers(0, 150),
    least=st.integers(2, 12),
)
def test_every_number_of_nodes_is_none_or_enough(
    form: LabelForm, seed: int, rows: int, least: int
) -> None:
    full, rules = full_counts(form, seed, rows), CountRules(least, val_histogram=True)
    before = {name: t.clone() for name, t in full.items()}
    sent = counts_to_send(full, form, rules)
    assert all(torch.equal(full[name], t) for name, t in before.items())
    specs = specs_to_send(task_of(form), 1 if form == "rating" else CLASSES, rules)
    assert {n: (tuple(t.shape), t.dtype) for n, t in sent.items()} == {
        n: ((CLIENTS, *spec.shape), spec.dtype) for n, spec in specs.items()
    }
    assert count_problem(form, sent, least) is None
    for part in PARTS:
        for name, numbers in numbers_of_nodes(form, sent, part).items():
            assert bool(((numbers == 0) | (numbers >= least)).all()), (part, name, numbers)
        gone = sent[f"{part}.nodes"] == 0
        assert bool((gone | (sent[f"{part}.nodes"] == full[f"{part}.nodes"])).all())
        for name in ("loss", *merged_fields(form), *(["square"] if form == "rating" else [])):
            own, all_of = sent[f"{part}.{name}"], full[f"{part}.{name}"]
            total, expected = own.reshape(CLIENTS, -1).sum(1), all_of.reshape(CLIENTS, -1).sum(1)
            total = total + sent.get(f"{part}.merged.{name}", torch.zeros_like(total))
            expected = torch.where(gone, torch.zeros_like(expected), expected)
            torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("least", [0, 1])
def test_without_a_least_count_all_of_it_leaves(form: LabelForm, least: int) -> None:
    full = full_counts(form, 1, 60)
    sent = counts_to_send(full, form, CountRules(least, val_histogram=True))
    assert sent.keys() == full.keys()
    assert all(torch.equal(sent[name], t) for name, t in full.items())


@pytest.mark.parametrize("form", FORMS)
def test_totals_are_those_of_all_nodes_where_clients_have_enough(form: LabelForm) -> None:
    full = full_counts(form, 3, 4000)
    sent = counts_to_send(full, form, FIVE)
    exact = {"multiclass": ("accuracy", "f1_micro"), "multilabel": ("accuracy", "f1_micro")}
    for part in PARTS:
        ours, theirs = (
            task_of(form).scores(sum_histograms(counts, rules), part)
            for counts, rules in ((sent, FIVE), (full, ALL_COUNTS))
        )
        assert ours is not None
        assert theirs is not None
        for name in (*exact.get(form, ("rmse", "mae", "rmse_client_mean")), "loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-12), name
        if "auc" in theirs:
            assert ours["auc"] == pytest.approx(theirs["auc"], abs=0.02)


def one_client(true: list[int], predicted: list[int]) -> dict[str, Tensor]:
    """Full counts of one client's test nodes with these classes and predictions."""
    y, guess = torch.tensor(true), torch.tensor(predicted)
    logits = 10 * torch.nn.functional.one_hot(guess, CLASSES).double()
    nobody = torch.zeros(len(y), dtype=torch.bool)
    rows = JudgedRows(logits, y, nobody, torch.zeros(len(y)).long(), 1, "multiclass")
    return task_of("multiclass").tally(rows)


def test_classes_of_few_nodes_are_one_cell() -> None:
    """Classes 2 and 3 have 2 and 3 nodes: together 5. Class 0 has 8, class 1 has 6."""
    true = [0] * 8 + [1] * 6 + [2] * 2 + [3] * 3
    predicted = [0] * 7 + [1] + [1] * 5 + [2] + [2] * 2 + [3] * 2 + [2]
    sent = counts_to_send(one_client(true, predicted), "multiclass", CountRules(5))
    assert sent["test.nodes"].tolist() == [19]
    assert sent["test.known"].tolist() == [[19, 19, 0, 0]]
    assert sent["test.tp"].tolist() == [[7, 5, 0, 0]]
    assert sent["test.fp"].tolist() == [[0, 1, 0, 0]]
    assert sent["test.fn"].tolist() == [[1, 1, 0, 0]]
    merged = [int(sent[f"test.merged.{name}"]) for name in ("known", "tp", "fp", "fn")]
    assert merged == [38, 4, 2, 1]
    assert sent["test.histogram"].sum(dim=-1).tolist() == [[[11, 8], [13, 6], [0, 0], [0, 0]]]
    scores = task_of("multiclass").scores(sum_histograms(sent, FIVE), "test")
    assert scores is not None
    assert scores.accuracy == scores.f1_micro == 16 / 19
    # Of the two classes that are told alone: 14 / (14 + 1) and 10 / (10 + 2).
    assert scores.f1_macro == pytest.approx((14 / 15 + 10 / 12) / 2)
    assert constant_scores({**sent, **val_of(sent)}, "multiclass") is None


def test_figures_of_few_labels_are_not_shown() -> None:
    """Of six and four nodes of four classes more than half of the labels are in the merged cell."""
    true = [0] * 6 + [1] * 2 + [2, 3]
    full = one_client(true, true)
    scores, all_of = (
        task_of("multiclass").scores(sum_histograms(counts, rules), "test")
        for counts, rules in (
            (counts_to_send(full, "multiclass", FIVE), FIVE),
            (full, ALL_COUNTS),
        )
    )
    assert scores is not None
    assert all_of is not None
    assert (scores.accuracy, scores.f1_macro, scores.auc) == (1.0, None, None)
    assert (all_of.accuracy, all_of.f1_macro, all_of.auc) == (1.0, 1.0, 1.0)


def val_of(sent: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("test.", "val."): t for name, t in sent.items() if "test." in name}


def test_a_class_of_few_nodes_is_not_told_by_what_is_left() -> None:
    """One class alone would be its own merged cell, so the next smallest joins it."""
    true = [0] * 10 + [1] * 6 + [2] * 2
    sent = counts_to_send(one_client(true, true), "multiclass", CountRules(5))
    assert sent["test.tp"].tolist() == [[10, 0, 0, 0]]
    assert int(sent["test.merged.tp"]) == 8


def test_one_prediction_apart_is_not_told() -> None:
    """All nodes are of two classes with enough nodes, and one of them is taken for class 3."""
    true = [0] * 10 + [1] * 10
    sent = counts_to_send(one_client(true, [*true[:-1], 3]), "multiclass", CountRules(5))
    assert sent["test.fp"].tolist() == [[0, 0, 0, 0]]
    assert int(sent["test.merged.fp"]) == 1  # among ten or more predictions
    assert int(sent["test.merged.tp"]) + int(sent["test.tp"].sum()) == 19


def test_a_client_of_few_nodes_sends_none() -> None:
    for form in FORMS:
        full = full_counts(form, 2, 4)
        sent = counts_to_send(full, form, FIVE)
        assert all(not bool(t.any()) for t in sent.values())
        assert task_of(form).scores(sum_histograms(sent, FIVE), "test") is None


@pytest.mark.parametrize(
    ("bins", "merged"),
    [
        ([0, 5, 0, 6, 0], [0, 5, 0, 6, 0]),
        ([1, 0, 4, 0, 6], [0, 0, 5, 0, 6]),  # the third of five is in the first place
        ([2, 2, 2, 2, 2], [0, 0, 10, 0, 0]),  # six, and four that are too few alone
        ([9, 0, 0, 0, 1], [0, 0, 10, 0, 0]),  # a node alone joins the others, and tells no bin
        ([0, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 7], [0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 7]),
        ([3, 0, 1, 0, 0], [0, 0, 0, 0, 0]),
    ],
)
def test_occupied_bins_are_merged_until_they_hold_enough(
    bins: list[int], merged: list[int]
) -> None:
    assert merge_bins(np.array(bins, np.int32), 5).tolist() == merged


def test_merged_bins_are_spread_between_their_neighbors() -> None:
    bins = torch.zeros(2, 1, 2, BINS, dtype=torch.int32)
    bins[0, 0, 0, 10], bins[0, 0, 0, 14], bins[0, 0, 0, 100] = 5, 7, 50
    bins[1, 0, 1, 20] = 6  # one group: nothing says how wide it is
    found = spread_bins(bins, 5)
    assert found.sum(dim=-1).tolist() == [[pytest.approx(62), pytest.approx(6)]]
    assert found[0, 0, 8:12].tolist() == pytest.approx([0.625, 1.25, 1.25, 1.25])
    assert float(found[0, 0, 100]) == 50  # more than a group has
    assert float(found[0, 1, 20]) == 6


def spread_one_by_one(table: np.ndarray, least: int) -> np.ndarray:
    """Spread the bins of one group after the other, in client order."""
    total: np.ndarray = table.sum(axis=0).astype(np.float64)
    edges = np.arange(BINS + 1) - 0.5
    for client, k, truth in np.ndindex(table.shape[:3]):
        row = table[client, k, truth]
        occupied = np.nonzero(row)[0].astype(np.float64)
        if len(occupied) < 2:
            continue
        between = (occupied[1:] + occupied[:-1]) / 2
        low = [2 * occupied[0] - between[0], *between]
        high = [*between, 2 * occupied[-1] - between[-1]]
        for place, a, b in zip(occupied.astype(int), low, high, strict=True):
            if row[place] < 2 * least:
                shares = np.diff(np.clip((edges - a) / (b - a), 0, 1))
                total[k, truth, place] -= row[place]
                total[k, truth] += row[place] * shares / shares.sum()
    return total


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 9999), clients=st.integers(1, 12), least=st.integers(0, 12))
def test_groups_are_spread_as_one_after_the_other(seed: int, clients: int, least: int) -> None:
    draw = np.random.default_rng(seed)
    table = np.zeros((clients, 2, 2, BINS), np.int32)
    for row in table.reshape(-1, BINS):
        size = int(draw.integers(0, 40))
        row[draw.integers(0, BINS, size)] = draw.integers(1, 20, size)
    found = spread_bins(torch.from_numpy(table), least)
    assert found.numpy().tobytes() == spread_one_by_one(table, least).tobytes()


def test_one_client_does_not_decide_how_others_are_spread() -> None:
    """A client that sends single scores, which no honest one does."""
    bins = torch.zeros(2, 1, 2, BINS, dtype=torch.int32)
    bins[0, 0, 0, 10], bins[0, 0, 0, 14] = 5, 7
    alone = spread_bins(bins[:1], 5)
    bins[1, 0, 1, 200] = 1
    assert torch.equal(spread_bins(bins, 5)[0, 0], alone[0, 0])
    counts = {"test.merged.known": torch.zeros(2), "test.histogram": bins}
    assert torch.equal(sum_histograms(counts, FIVE)["test.histogram"][0, 0], alone[0, 0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("least", [0, 5])
def test_a_policy_keeps_histograms_or_all_of_it_back(form: LabelForm, least: int) -> None:
    full = full_counts(form, 5, 300)
    levels: tuple[EvaluationLevel, ...] = ("none", "counts", "histograms")
    sent = {
        level: counts_to_send(full, form, replace(FIVE, min_count=least, level=level))
        for level in levels
    }
    assert len({tuple(s) for s in sent.values()}) == 1
    for name, t in sent["histograms"].items():
        assert not bool(sent["none"][name].any())
        told = torch.zeros_like(t) if name.endswith("histogram") else t
        assert torch.equal(sent["counts"][name], told)
    assert all(count_problem(form, s, least) is None for s in sent.values())
    if form == "multiclass":
        assert (
            sum_histograms(sent["counts"], replace(FIVE, min_count=least))[
                "test.has_histogram"
            ].tolist()
            == [False] * CLIENTS
        )


def test_rankings_of_few_users_are_not_told() -> None:
    counts = {
        f"{part}.{name}": torch.tensor([4.0, 5.0], dtype=torch.float64)
        for part in PARTS
        for name in ("ranked", "recall", "ndcg")
    }
    sent = counts_to_send(counts, "rating", CountRules(5))
    assert all(t.tolist() == [0.0, 5.0] for t in sent.values())
    none = counts_to_send(counts, "rating", CountRules(level="none"))
    assert all(t.tolist() == [0.0, 0.0] for t in none.values())


@pytest.mark.parametrize("form", ["multiclass", "multilabel", "rating"])
def test_sums_of_losses_have_steps_and_stay_near(form: LabelForm) -> None:
    draw = np.random.default_rng(3)
    rows, outputs = 300, 1 if form == "rating" else CLASSES
    y = torch.from_numpy(draw.integers(0, CLASSES, rows))
    if form == "multilabel":
        y = torch.from_numpy(draw.integers(0, 2, (rows, CLASSES)))
    elif form == "rating":
        y = torch.from_numpy(draw.integers(1, 6, rows)).double()
    logits = torch.from_numpy(draw.normal(size=(rows, outputs)))
    if form == "rating":
        logits = 3 + logits / 10
    group = torch.from_numpy(draw.integers(0, CLIENTS, rows))
    val = torch.from_numpy(draw.random(rows) < 0.4)
    seen = torch.from_numpy(draw.random(rows) < 0.8) if form == "rating" else None
    judged = JudgedRows(logits, y, val, group, CLIENTS, form, seen=seen)
    exact, sums = task_of(form).tally(judged), limited_sums(judged)
    assert sums.keys() <= exact.keys()
    assert {"val.loss", "test.loss"} <= sums.keys()
    span = 4.0  # of ratings from 1 to 5, by which errors here stay below
    for name, limited in sums.items():
        step = 1.0 if form != "rating" else span / 8 if name.endswith("absolute") else span**2 / 8
        assert torch.equal((limited / step).round() * step, limited)
        assert (limited - exact[name]).abs().max() <= step / 2 + 1e-9
    one_far = logits.clone()
    one_far[0] = torch.tensor([-1e6] * outputs, dtype=torch.float64)
    one_far[0, int(y[0]) if form == "multiclass" else 0] -= 1e6
    far = limited_sums(replace(judged, logits=one_far, prepared=None))
    for name, limited in far.items():  # one node moves a sum by what one loss may be, and a step
        most, step = (8.0, 1.0) if form != "rating" else (span**2, span**2 / 8)
        assert (limited - sums[name]).abs().max() <= most + step


@pytest.mark.parametrize("form", ["multiclass", "rating"])
def test_a_client_without_rows_has_no_losses(form: LabelForm) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    judged = JudgedRows(
        torch.zeros(0, 1 if form == "rating" else 2),
        none.float() if form == "rating" else none,
        none.bool(),
        none,
        2,
        form,
    )
    for total in limited_sums(judged).values():
        assert total.tolist() == [0.0, 0.0]
