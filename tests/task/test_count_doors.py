"""Counting refuses rows and scales that are none, and no score is binned beside the bins."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from doors import K
from silograph.core.errors import ProtocolError
from silograph.graph.graph import LabelForm
from silograph.task.counts import BINS, JudgedRows, histogram, tally

pytest.importorskip("numba")

TIERS = pytest.mark.parametrize("kernels", ["torch", "compiled"])
NAN, INF = float("nan"), float("inf")


def judged(task: LabelForm = "multiclass", **other: Tensor) -> JudgedRows:
    y = torch.tensor([0, 1, 2, 1])
    plain: dict[str, Any] = {
        "logits": torch.zeros(4, K, dtype=torch.float64),
        "y": y if task == "multiclass" else (y[:, None] == torch.arange(K)).long(),
        "val": torch.tensor([True, False, False, False]),
        "group": torch.tensor([0, 0, 1, 1]),
    }
    return JudgedRows(**(plain | other), groups=2, task=task)


def prepared(rows: JudgedRows) -> JudgedRows:
    return replace(rows, prepared=rows.truth)


def tier(rows: JudgedRows, kernels: str) -> JudgedRows:
    return replace(rows, compiled=kernels == "compiled")


SCALE = torch.zeros(K, dtype=torch.float64), torch.ones(K, dtype=torch.float64)


@TIERS
@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (judged(logits=torch.zeros(1, 65536)), "expected logits of 4 judged rows, got torch.float"),
        (judged(logits=torch.zeros(4)), "expected logits of 4 judged rows, got torch.float"),
        (judged(logits=torch.zeros(4, K).int()), "expected logits of 4 judged rows, got torch.int"),
        (judged(y=torch.zeros(3).long()), r"expected labels of shape \(3,\) and as many masks"),
        (judged(val=torch.ones(3).bool()), r"expected labels of shape \(4,\) and as many masks"),
        (judged("multilabel", y=torch.ones(4, 2)), r"expected labels of shape \(4, 2\) and as"),
        (judged(y=torch.tensor([0, 1, 2, 3])), "expected labels of judged rows in 0 to 2, got 0"),
        (judged(y=torch.tensor([0, 1, 2, -1])), "expected labels of judged rows in 0 to 2, got -1"),
        (judged(group=torch.tensor([0, 1, 2, 3])), "expected clients in 0 to 1, got 0 to 3"),
        (judged(group=torch.tensor([0, 1, -9, 0])), "expected clients in 0 to 1, got -9 to 1"),
    ],
)
def test_rows_that_cannot_be_judged_are_refused(kernels: str, rows: JudgedRows, text: str) -> None:
    for count in (tally, lambda r: histogram(r, *SCALE)):
        with pytest.raises(ProtocolError, match=f"^{text}"):
            count(tier(rows, kernels))


@TIERS
@pytest.mark.parametrize(
    ("mean", "deviation", "text"),
    [
        ([0.0, NAN, 0.0], [1.0] * 3, "expected finite means and finite deviations above 0, got"),
        ([0.0, INF, 0.0], [1.0] * 3, "expected finite means and finite deviations above 0, got"),
        ([0.0] * 3, [1.0, 0.0, 1.0], "expected finite means and finite deviations above 0, got"),
        ([0.0] * 3, [1.0, -1.0, 1.0], "expected finite means and finite deviations above 0, got"),
        ([0.0] * 3, [1.0, NAN, 1.0], "expected finite means and finite deviations above 0, got"),
        ([0.0] * 3, [1.0, INF, 1.0], "expected finite means and finite deviations above 0, got"),
        ([0.0] * 2, [1.0] * 3, r"expected a mean of shape \(3,\), floating point, got \(2,\) in"),
        ([0.0] * 3, [1.0], r"expected a deviation of shape \(3,\), floating point, got \(1,\) in"),
        ([0, 0, 0], [1.0] * 3, r"expected a mean of shape \(3,\), floating point, got \(3,\) in"),
    ],
)
def test_scales_that_are_none_are_refused(
    kernels: str, mean: list[float], deviation: list[float], text: str
) -> None:
    given = [torch.tensor(t) for t in (mean, deviation)]
    with pytest.raises(ProtocolError, match=f"^{text}"):
        histogram(tier(judged(), kernels), given[0], given[1].double())


@TIERS
@pytest.mark.parametrize("deviation", [5e-324, 1e-300, 1e-9, 1.0, 1e300])
@pytest.mark.parametrize("mean", [0.0, -1e308, 1e308, 1e-320])
def test_every_score_has_a_bin_on_every_scale(kernels: str, mean: float, deviation: float) -> None:
    rows = judged("multilabel", logits=torch.tensor([[0.0, NAN, 1.0]] * 4).double())
    rows.logits[3] = torch.tensor([INF, -INF, 1e-320])
    scale = (torch.full((K,), t, dtype=torch.float64) for t in (mean, deviation))
    counts = histogram(tier(rows, kernels), *scale)
    assert int(counts.sum()) == 9  # three rows for testing, three bits each


def by_kernel(rows: JudgedRows, mean: Tensor, deviation: Tensor) -> Tensor:
    """The compiled histogram without a look at the scale."""
    from silograph.task import count_kernels
    from silograph.task.counts import CLIP

    counts = torch.zeros(rows.groups, K, 2, BINS, dtype=torch.int32)
    given = rows.logits, rows.y[:, None], rows.val, rows.group
    logits, y, val, group = (t.numpy() for t in given)
    scale = mean.numpy(), deviation.numpy()
    count_kernels.histogram(logits, y, val, group, False, CLIP, *scale, counts.numpy())
    return counts


@pytest.mark.parametrize("deviation", [NAN, INF, -INF, 0.0, -0.0, -1.0, 5e-324, 1e300, 1.0])
@pytest.mark.parametrize("mean", [NAN, INF, -INF, 0.0, 1e308])
def test_binning_itself_stays_in_its_bins(
    monkeypatch: pytest.MonkeyPatch, mean: float, deviation: float
) -> None:
    """Whatever the scale, both tiers put what is no number into the first bin."""
    monkeypatch.setattr("silograph.task.counts.check_scale", lambda *_: None)
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 0.0, 0.0], [0.0, NAN, 0.0], [-90.0, 0.0, 90.0]])
    rows = judged(logits=logits.double())
    scale = [torch.full((K,), t, dtype=torch.float64) for t in (mean, deviation)]
    ours, theirs = by_kernel(rows, *scale), histogram(rows, *scale)
    assert torch.equal(ours, theirs)
    assert int(ours.sum()) == 9
    if mean != mean or deviation != deviation:
        assert int(ours[..., 0].sum()) == 9


@TIERS
@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"y": torch.tensor([0, 1, 2, 3])}, "expected labels of judged rows in 0 to 2, got 0 to 3"),
        ({"group": torch.tensor([0, 1, 2, 3])}, "expected clients in 0 to 1, got 0 to 3"),
    ],
)
def test_what_was_known_of_other_rows_is_not_believed(
    kernels: str, other: dict[str, Any], text: str
) -> None:
    rows = prepared(tier(judged(), kernels))
    assert rows.truth is rows.prepared
    with pytest.raises(ProtocolError, match=f"^{text}"):
        tally(replace(rows, **other))


@TIERS
def test_rows_with_other_labels_masks_or_clients_are_counted_anew(kernels: str) -> None:
    """What was worked out of a block's rows is for these: flipped masks, say, are others."""
    rows = prepared(tier(judged(), kernels))
    others: tuple[dict[str, Any], ...] = (
        {},
        {"val": ~rows.val},
        {"y": rows.y.flip(0)},
        {"group": 1 - rows.group},
    )
    for other in others:
        plain = tally(replace(tier(judged(), kernels), **other))
        found = tally(replace(rows, **other))
        assert all(torch.equal(found[name], t) for name, t in plain.items())
        bins = histogram(replace(rows, **other), *SCALE)
        assert torch.equal(bins, histogram(replace(tier(judged(), kernels), **other), *SCALE))


def test_a_model_with_fewer_outputs_is_refused_for_labels_that_are_known() -> None:
    rows = prepared(judged())
    assert tally(rows)["test.nodes"].tolist() == [1, 2]
    with pytest.raises(ProtocolError, match=r"^expected labels of judged rows in 0 to 1, got 0"):
        tally(replace(rows, logits=torch.zeros(4, 2)))
