"""Compiled counting equals the torch form: counts exactly, sums of scores up to rounding."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silograph.graph.graph import MISSING, LabelForm
from silograph.task.counts import CLIP, JudgedRows, log_odds, tally
from silograph.task.scores import PARTS, score

pytest.importorskip("numba")

import numba

from silograph.task import count_kernels

LAW = settings(max_examples=60)
TASKS = pytest.mark.parametrize("task", ["multiclass", "multilabel"])
INF, NAN = float("inf"), float("nan")


@cache
def called(function: Any) -> Any:
    """A function that `tally` copies, as one that Python may call."""
    return numba.njit(error_model="numpy")(function.py_func)


GROUPS = 4  # of which the last has no judged rows


def drawn_rows(seed: int, task: LabelForm, classes: int, rows: int, odd: list[float]) -> JudgedRows:
    """Judged rows at random, single labels missing, with odd values among the logits."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, classes))
    logits[rng.random(logits.shape) < 0.1] = 0.25  # ties
    if odd:
        where = rng.random(logits.shape) < 0.3
        logits[where] = rng.choice(odd, where.sum())
    y = rng.integers(0, classes, rows)
    if task == "multilabel":
        y = rng.integers(0, 2, (rows, classes))
        y[rng.random(y.shape) < 0.3] = MISSING
    return JudgedRows(
        logits=torch.from_numpy(logits),
        y=torch.from_numpy(y),
        val=torch.from_numpy(rng.random(rows) < 0.4),
        group=torch.from_numpy(rng.integers(0, GROUPS - 1, rows)),
        groups=GROUPS,
        task=task,
    )


def compiled(rows: JudgedRows) -> JudgedRows:
    return JudgedRows(**{**vars(rows), "compiled": True})


def assert_equal(rows: JudgedRows, *, losses: bool = True) -> None:
    ours, theirs = (tally(r, val_histogram=True) for r in (compiled(rows), rows))
    assert list(ours) == list(theirs)
    assert all(
        torch.equal(tally(compiled(rows))[n], ours[n]) for n in tally(rows) if "loss" not in n
    )
    for name, t in theirs.items():
        assert ours[name].dtype == t.dtype
        assert ours[name].shape == t.shape
        if not t.is_floating_point():
            assert torch.equal(ours[name], t), name
        elif losses or not name.endswith("loss"):
            torch.testing.assert_close(
                ours[name], t, rtol=1e-10, atol=1e-10, equal_nan=True, msg=name
            )


@LAW
@given(
    seed=st.integers(0, 9999),
    task=st.sampled_from(["multiclass", "multilabel"]),
    classes=st.integers(1, 5),
    rows=st.integers(0, 30),
)
def test_counts_are_those_of_torch(seed: int, task: LabelForm, classes: int, rows: int) -> None:
    assert_equal(drawn_rows(seed, task, classes, rows, []))


@pytest.mark.law(sample=6)
@TASKS
@pytest.mark.parametrize("odd", [[1e4, -1e4], [1e300, -1e300], [60.0, -60.0], [1e-320, 0.0, -0.0]])
def test_extreme_logits_are_counted_as_torch_does(task: LabelForm, odd: list[float]) -> None:
    for seed in range(20):
        assert_equal(drawn_rows(seed, task, 4, 20, odd))


@TASKS
def test_scores_of_infinite_logits_are_those_of_torch(task: LabelForm) -> None:
    for seed in range(20):
        assert_equal(drawn_rows(seed, task, 4, 20, [INF, -INF]), losses=False)


@TASKS
@pytest.mark.parametrize("odd", [[INF], [-INF], [INF, -INF]])
def test_losses_of_infinite_logits_are_no_better_than_with_torch(
    task: LabelForm, odd: list[float]
) -> None:
    """What is no number counts as infinite: torch has NaN where an infinity meets another."""
    for seed in range(20):
        rows = drawn_rows(seed, task, 4, 20, odd)
        ours, theirs = tally(compiled(rows)), tally(rows)
        for part in PARTS:
            found, expected = (f[f"{part}.loss"].nan_to_num(INF, INF, -INF) for f in (ours, theirs))
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.law(sample=6)
@TASKS
@pytest.mark.parametrize("odd", [[NAN], [NAN, INF, -INF]])
def test_a_model_that_diverged_is_counted_as_torch_does(task: LabelForm, odd: list[float]) -> None:
    for seed in range(20):
        assert_equal(drawn_rows(seed, task, 4, 20, odd), losses=False)


@TASKS
def test_nothing_but_nan_is_counted_as_torch_does(task: LabelForm) -> None:
    rows = drawn_rows(0, task, 4, 20, [])
    rows.logits.fill_(NAN)
    assert_equal(rows)


@TASKS
def test_single_precision_is_counted_as_torch_does(task: LabelForm) -> None:
    """Losses and scores are sums of float64 here, of float32 there."""
    for seed in range(20):
        rows = drawn_rows(seed, task, 4, 20, [])
        rows = JudgedRows(**{**vars(rows), "logits": rows.logits.float()})
        ours, theirs = tally(compiled(rows)), tally(rows)
        for name, t in theirs.items():
            if t.is_floating_point():
                torch.testing.assert_close(ours[name], t, rtol=1e-5, atol=1e-5, msg=name)
            else:
                assert torch.equal(ours[name], t), name


@TASKS
def test_clients_without_judged_rows_count_nothing(task: LabelForm) -> None:
    for rows in (drawn_rows(0, task, 3, 20, []), drawn_rows(0, task, 3, 0, [])):
        found = tally(compiled(rows))
        for name, t in found.items():
            assert not bool(t[GROUPS - 1].any()), name
        bins = found["test.histogram"]
        assert not bool(bins[GROUPS - 1].any())
        assert int(bins.sum()) == int(found["test.known"].sum())


@TASKS
def test_scores_are_those_of_torch(task: LabelForm) -> None:
    rows = drawn_rows(3, task, 4, 60, [])
    views = []
    for judged in (rows, compiled(rows)):
        fields = tally(judged)
        views.append({**fields, "test.histogram": fields["test.histogram"].sum(0)})
    for part in PARTS:
        ours, theirs = (score(counts, part, task) for counts in views)
        assert ours is not None
        assert theirs is not None
        for name, value in theirs.items():
            assert ours[name] == (value and pytest.approx(value, rel=1e-10)), name


@LAW
@given(
    gaps=st.lists(st.floats(-30, 30), min_size=1, max_size=5),
    shift=st.sampled_from([0.0, 30.0, -1e3, 1e6]),
    task=st.sampled_from(["multiclass", "multilabel"]),
)
def test_log_odds_are_those_of_torch(gaps: list[float], shift: float, task: LabelForm) -> None:
    """1 - p of a likely class is exact to an absolute 1e-16, so its log-odds to exp(odds) as much.

    What all logits of a row have in common is no part of that.
    """
    logits = np.array([gaps]) + shift
    odds = np.empty(len(gaps))
    if task == "multiclass":
        top = logits.max()
        log_total = called(count_kernels.log_sum)(logits, 0, top)
        called(count_kernels.odds_of_classes)(logits, 0, top, log_total, CLIP, odds)
    else:
        called(count_kernels.odds_of_bits)(logits, 0, CLIP, odds)
    expected = log_odds(torch.from_numpy(logits), task)[0].numpy()
    bound = 1e-10 + 4 * np.finfo(np.float64).eps * np.exp(np.minimum(np.abs(expected), 40))
    certain = np.abs(expected) > 33  # 1 - p is a few units in the last place
    assert (np.abs(odds - expected)[~certain] <= bound[~certain]).all()


@pytest.mark.parametrize("odds", [NAN, INF, -INF, 51.0, -51.0, 0.5])
def test_bounded_ranks_nan_lowest(odds: float) -> None:
    expected = {NAN: -CLIP, INF: CLIP, -INF: -CLIP, 51.0: CLIP, -51.0: -CLIP, 0.5: 0.5}
    assert called(count_kernels.bounded)(odds, CLIP) == expected[odds]
