"""Counting refuses rows that are none, and no score is counted beside the bins."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from doors import K
from silograph.core.errors import ProtocolError
from silograph.graph.graph import LabelForm
from silograph.task.counts import JudgedRows, tally

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
    with pytest.raises(ProtocolError, match=f"^{text}"):
        tally(tier(rows, kernels))


@TIERS
@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_every_score_has_a_bin(kernels: str, task: LabelForm) -> None:
    rows = judged(task, logits=torch.tensor([[0.0, NAN, 1.0]] * 4).double())
    rows.logits[2] = torch.tensor([-90.0, 1e300, 90.0])
    rows.logits[3] = torch.tensor([INF, -INF, 1e-320])
    counts = tally(tier(rows, kernels), val_histogram=True)
    assert int(counts["test.histogram"].sum()) == 9  # three rows for testing, three classes each
    assert int(counts["val.histogram"].sum()) == 3


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


def test_a_model_with_fewer_outputs_is_refused_for_labels_that_are_known() -> None:
    rows = prepared(judged())
    assert tally(rows)["test.nodes"].tolist() == [1, 2]
    with pytest.raises(ProtocolError, match=r"^expected labels of judged rows in 0 to 1, got 0"):
        tally(replace(rows, logits=torch.zeros(4, 2)))
