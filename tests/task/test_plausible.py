"""Counts that predictions can have pass, and those that none can have do not."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from silograph.graph.graph import LabelForm
from silograph.task.counts import JudgedRows
from silograph.task.least_count import count_problem
from silograph.task.registry import task_of

CLASSES = 3
FORMS: tuple[LabelForm, ...] = ("multiclass", "multilabel", "node_value", "rating")


def tallied(form: LabelForm, seed: int, rows: int = 40) -> dict[str, Tensor]:
    """Counts of random predictions at two clients, some of whose labels are missing."""
    draw = torch.Generator().manual_seed(seed)
    outputs = 1 if form == "rating" else CLASSES
    logits = 20 * torch.randn(rows, outputs, generator=draw)
    y = torch.randint(0, CLASSES, (rows,), generator=draw)
    if form == "multilabel":
        y = torch.randint(-1, 2, (rows, CLASSES), generator=draw)
    elif form == "node_value":
        y = torch.randn(rows, CLASSES, generator=draw)
    elif form == "rating":
        y = torch.randn(rows, generator=draw)
    val, group = torch.rand(rows, generator=draw) < 0.5, torch.arange(rows) % 2
    seen = torch.rand(rows, generator=draw) < 0.5 if form == "rating" else None
    judged = JudgedRows(logits, y, val, group, 2, form, seen=seen)
    return task_of(form).tally(judged, val_histogram=True)


@pytest.mark.parametrize("form", FORMS)
def test_what_predictions_give_passes(form: LabelForm) -> None:
    for seed in range(20):
        counts = tallied(form, seed, rows=40 if seed else 0)
        assert count_problem(form, counts) is None
        part = {name: t for name, t in counts.items() if name.startswith("val.")}
        assert count_problem(form, part) is None
    assert count_problem(form, {}) is None


def changed(counts: Mapping[str, Tensor], name: str, value: float) -> dict[str, Tensor]:
    new = counts[name].clone()
    new.view(-1)[0] = value
    return {**counts, name: new}


@pytest.mark.parametrize(
    ("form", "name", "value", "says"),
    [
        ("multiclass", "val.tp", 2**31 - 1, "at most as many hits and misses as known labels"),
        ("multiclass", "test.fp", 2**31 - 1, "at most as many hits and misses"),
        ("multiclass", "test.fn", 0, "one label and one prediction of each of"),
        ("multiclass", "val.known", 2**31 - 1, "at most as many known labels as val nodes"),
        ("multiclass", "test.histogram", 1000, "a histogram of as many test nodes by class as"),
        ("multiclass", "val.nodes", 1000, "one label and one prediction of each of"),
        ("multilabel", "val.fn", 100, "at most as many hits and misses"),
        ("multilabel", "test.known", 100, "at most as many known labels"),
        ("multilabel", "val.histogram", 1000, "a histogram of as many val nodes by class as"),
        ("node_value", "test.known", 100, "at most as many known labels"),
        ("rating", "val.seen.nodes", 2**31 - 1, "at most as many seen and unseen ratings"),
    ],
)
def test_what_none_can_give_is_named(form: LabelForm, name: str, value: float, says: str) -> None:
    problem = count_problem(form, changed(tallied(form, 1), name, value))
    assert problem is not None
    assert problem.startswith(says)


def test_an_accuracy_is_at_most_one_whatever_passes() -> None:
    """Counts of 2^31 of each class made one of 6.99999."""
    counts = tallied("multiclass", 3)
    for name in ("val.tp", "val.known"):
        counts = {**counts, name: torch.full_like(counts[name], 2**31 - 1)}
    assert count_problem("multiclass", counts) is not None
