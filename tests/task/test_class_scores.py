"""Scores of each class, against scikit-learn's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from silograph.evaluation.evaluate import counts_of
from silograph.graph.graph import LabelForm
from silograph.task.counts import MOST_CONFUSED, JudgedRows, confusion
from silograph.task.node_labels import NODE_CLASS, NODE_VALUE
from silograph.task.scores import PARTS, constant_scores, score


def test_scores_of_classes_are_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(3)
    logits, y = generator.normal(size=(60, 5)), generator.integers(0, 4, size=60)
    logits[:, 3] = -9.0  # a class that is never predicted; 4 is one that no node has
    rows = JudgedRows(
        torch.from_numpy(logits),
        torch.from_numpy(y),
        torch.zeros(60, dtype=torch.bool),
        torch.from_numpy(generator.integers(0, 3, size=60)),
        3,
        "multiclass",
    )
    found = NODE_CLASS.class_scores(NODE_CLASS.tally(rows), "test")
    predicted = logits.argmax(1)
    expected = precision_recall_fscore_support(y, predicted, labels=range(5), zero_division=np.nan)
    for k, scores in enumerate(found):
        assert scores.nodes == expected[3][k]
        for value, theirs in zip(
            (scores.precision, scores.recall, scores.f1), expected[:3], strict=True
        ):
            if value is None:
                assert np.isnan(theirs[k])
            else:
                assert value == pytest.approx(theirs[k])


def test_the_confusion_matrix_is_that_of_scikit_learn() -> None:
    generator = np.random.default_rng(4)
    logits, y = generator.normal(size=(60, 4)), generator.integers(0, 3, size=60)
    val = generator.integers(0, 2, size=60).astype(bool)
    logit, label, is_val = (torch.from_numpy(part) for part in (logits, y, val))
    rows = JudgedRows(logit, label, is_val, torch.zeros_like(label), 1, "multiclass")
    found = confusion(rows)
    assert found is not None
    predicted = logits.argmax(1)
    np.testing.assert_array_equal(
        found, confusion_matrix(y[~val], predicted[~val], labels=range(4))
    )
    bits = replace(rows, y=torch.zeros(60, 4, dtype=torch.int64), task="multilabel")
    assert confusion(bits) is None


def test_a_matrix_of_many_classes_is_left_out() -> None:
    for classes, there in ((MOST_CONFUSED, True), (MOST_CONFUSED + 1, False)):
        nobody = torch.zeros(3, dtype=torch.bool)
        logits, y = torch.zeros(3, classes), torch.tensor([0, 1, classes - 1])
        rows = JudgedRows(logits, y, nobody, torch.zeros(3, dtype=torch.int64), 1, "multiclass")
        assert (confusion(rows) is not None) == there


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_a_constant_is_scored_by_the_counts_of_any_model(task: LabelForm) -> None:
    """As if the constant itself were judged: the counts hold what it needs."""
    generator, several = np.random.default_rng(5), task == "multilabel"
    y = generator.random((80, 4)) < (0.9, 0.2, 0.6, 0.4) if several else generator.choice(4, 80)
    logits, val = generator.normal(size=(80, 4)), generator.random(80) < 0.5
    of_val = np.asarray(y)[val]
    common = 2.0 * of_val.mean(0) - 1 if several else np.bincount(of_val, minlength=4) * 1.0
    group = generator.integers(0, 3, size=80)
    found = {}
    for name, said in (("model", logits), ("constant", np.broadcast_to(common, (80, 4)).copy())):
        logit, label, is_val, at = map(torch.from_numpy, (said, np.asarray(y) * 1, val, group))
        found[name] = counts_of(JudgedRows(logit, label, is_val, at, 3, task))
    right, got = score(found["constant"], "test", task), constant_scores(found["model"], task)
    assert right is not None
    assert got is not None
    for name, value in got.items():
        assert value == (None if name in ("auc", "loss") else pytest.approx(right[name]))
    for part in PARTS:
        nothing = {n: 0 * t if n.startswith(f"{part}.") else t for n, t in found["model"].items()}
        assert constant_scores(nothing, task) is None


def test_numbers_have_no_classes() -> None:
    assert NODE_VALUE.class_scores({}, "test") == ()
