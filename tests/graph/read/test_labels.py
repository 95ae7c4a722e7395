"""Laws of labels: numbers, words and holes become the class numbers that a graph holds."""

from typing import Any

import numpy as np
import pytest
import torch

from silograph.core.errors import DataError
from silograph.graph.graph import Graph
from silograph.graph.read.arrays import from_arrays

N = 4


def build(**changes: Any) -> Graph:
    """Return four nodes without an edge, with changed arguments."""
    given: dict[str, Any] = {"edge_index": [[], []], "x": np.eye(N), "y": [0, 1, 1, 0]}
    return from_arrays(**(given | changes))


@pytest.mark.parametrize(
    "y",
    [
        [1, -1, 0, 2],
        [1, None, 0, 2],
        [1.0, float("nan"), 0.0, 2.0],
        np.array([[1], [-1], [0], [2]], dtype=np.int8),
        torch.tensor([[1.0], [float("nan")], [0.0], [2.0]]),
        np.array([1, None, np.float32(0), 2], dtype=object),
    ],
)
def test_class_numbers_in_every_form(y: Any) -> None:
    graph = build(y=y)
    assert graph.y.dtype == torch.int64
    assert graph.y.tolist() == [1, -1, 0, 2]
    assert (graph.num_classes, graph.task, graph.class_names) == (3, "multiclass", ())
    assert graph.labeled.tolist() == [True, False, True, True]


@pytest.mark.parametrize("hole", [None, float("nan"), ""])
def test_words_are_numbered_in_sorted_order(hole: Any) -> None:
    for y in (["dog", hole, "cat", "dog"], np.array(["dog", hole, "cat", "dog"], dtype=object)):
        graph = build(y=y)
        assert graph.y.tolist() == [1, -1, 0, 1]
        assert (graph.num_classes, graph.class_names) == (2, ("cat", "dog"))


def test_class_names_give_the_order_of_words_and_the_number_of_classes() -> None:
    graph = build(y=["dog", "cat", "", "dog"], class_names=["dog", "cow", "cat"])
    assert graph.y.tolist() == [0, 2, -1, 0]
    assert (graph.num_classes, graph.class_names) == (3, ("dog", "cow", "cat"))
    assert build(class_names=["a", "b", "c"]).num_classes == 3


def test_num_classes_may_exceed_the_labels() -> None:
    assert build().num_classes == 2
    assert build(num_classes=9).num_classes == 9
    assert build(y=[-1] * N, num_classes=2).labeled.sum() == 0


@pytest.mark.parametrize(
    "y",
    [
        [[1, 0], [0, -1], [-1, -1], [1, 1]],
        [[1, 0], [0, None], [None, None], [1, 1]],
        torch.tensor([[1, 0], [0, torch.nan], [torch.nan, torch.nan], [1, 1]]),
    ],
)
def test_rows_of_bits_are_a_multilabel_task(y: Any) -> None:
    graph = build(y=y)
    assert graph.y.tolist() == [[1, 0], [0, -1], [-1, -1], [1, 1]]
    assert (graph.num_classes, graph.task) == (2, "multilabel")
    assert graph.labeled.tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("y", "classes", "names"),
    [
        ([1, 3, 2, 1], [0, 2, 1, 0], ("1", "2", "3")),  # three classes, not four
        ([2, -1, 4, 2], [0, -1, 1, 0], ("2", "4")),
        ([1.0, None, 2.0, 2.0], [0, -1, 1, 1], ("1", "2")),
        ([3, 3, 3, 3], [0, 0, 0, 0], ("3",)),
        ([0, 2, 2, 0], [0, 2, 2, 0], ()),  # 0 occurs: class 1 is one that nobody has here
    ],
)
def test_numbers_of_which_none_is_0_are_as_many_classes_as_occur(
    y: Any, classes: list[int], names: tuple[str, ...]
) -> None:
    graph = build(y=y)
    assert (graph.y.tolist(), graph.class_names) == (classes, names)
    assert graph.num_classes == (len(names) or 3)
    assert build(y=y, num_classes=5).class_names == ()
    assert build(y=y, num_classes=5).y.max() == max(value or 0 for value in y)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"y": [0, 1, 1]}, r"expected y of shape \(4,\) or \(4, T\), got \(3,\)"),
    ({"y": np.zeros((4, 0))}, r"expected y of shape \(4,\) or \(4, T\), got \(4, 0\)"),
    ({"y": np.zeros((4, 2, 1))}, r"expected y of shape"),
    ({"y": [0, -2, 1, -3]}, r"labels 0\.\.1, or -1 .* got -2 at node 1 \(2 such labels\)"),
    ({"num_classes": 1}, r"labels 0\.\.0, or -1 where missing, got 1 at node 1 .* num_classes"),
    ({"y": [0, 1, 2, 90210]}, r"below the number of nodes, 4, got 90210"),
    ({"y": [0.5, 1, 1, 0], "task": "multiclass"}, r"whole class numbers in y, got 0\.5 at node 0"),
    ({"y": [0, 1, np.inf, 0]}, r"whole class numbers in y, got inf at node 2"),
    ({"y": [0, 1j, 0, 0]}, r"expected class numbers or words in y, got dtype complex128"),
    ({"y": [{}, None, 0, 1]}, r"class numbers or words in y, got NoneType, dict, int"),
    ({"y": ["a", 1, None, "b"]}, r"among the words a, b, got 1 at node 1: use words only"),
    ({"y": ["a", "b", "c", ""], "class_names": ["a", "b"]}, r"words a, b, got 'c' at node 2"),
    ({"y": [["a", "b"]] * 4}, r"0 and 1 in rows of label bits, got words"),
    ({"y": [[0, 2], [0, 0], [0, 0], [0, 0]]}, r"labels 0\.\.1, .* got 2 at node 0"),
    ({"y": [[0, 1]] * 4, "num_classes": 3}, r"num_classes 2, the columns of y, got 3"),
    ({"y": [None] * 4}, r"at least one known label in y, got none: give num_classes"),
    ({"num_classes": 2, "class_names": ["a"]}, r"as many class_names, or none, got 2 and 1"),
    ({"y": [-1] * 4, "num_classes": 0}, r"expected num_classes >= 1"),
]


@pytest.mark.parametrize(("changes", "match"), WRONG)
def test_labels_that_cannot_be_used_are_one_line(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        build(**changes)
    assert "\n" not in str(caught.value)
