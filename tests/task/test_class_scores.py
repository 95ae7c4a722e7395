"""Scores of each class, against scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.metrics import precision_recall_fscore_support

from silograph.task.counts import JudgedRows
from silograph.task.node_labels import NODE_CLASS
from silograph.task.node_value import NODE_VALUE


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


def test_numbers_have_no_classes() -> None:
    assert NODE_VALUE.class_scores({}, "test") == ()
