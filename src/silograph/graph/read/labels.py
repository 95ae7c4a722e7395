"""Labels as users write them (numbers, words, holes) turned into the numbers a graph holds.

n: nodes. T: label bits of a multi-label task.
"""

import logging
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.text import counted
from silograph.graph.graph import MISSING, LabelForm, label_form
from silograph.graph.read.columns import LEAST_ROWS, USUAL, MissingValues, read_column

LOG = logging.getLogger("silograph")


def numbered_labels(
    y: np.ndarray,
    n: int,
    num_classes: int | None,
    names: tuple[str, ...],
    missing: MissingValues = USUAL,
) -> tuple[Tensor, int, tuple[str, ...]]:
    """Return labels (n,) or (n, T) int64, the number of classes and their names.

    >>> numbered_labels(np.array(["dog", "", "cat"]), 3, None, ())
    (tensor([ 1, -1,  0]), 2, ('cat', 'dog'))

    Args:
        y: (n,), (n, 1) or (n, T) numbers; or (n,) words, numbered in the order of `names`, else
            sorted. Numbers of which none is 0 are numbered in their order where neither count nor
            names are given, and name the classes.
        n: number of nodes.
        num_classes: number of classes, or None to count them.
        names: names of the classes, or empty. A word among them is never missing.
        missing: what counts as missing, beside -1.

    Raises:
        DataError: a shape, a label or a count that does not fit.
    """
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim not in (1, 2) or len(y) != n or y.size == 0:
        raise DataError(
            f"expected y of shape ({n},) or ({n}, T), got {y.shape}: "
            "one label (or one row of label bits) a node, in the order of x"
        )
    numbers, names = _numbers(y, names, missing)
    if num_classes is None and not names and numbers.ndim == 1:
        numbers, names = _from_zero(numbers)
    count = _count(numbers, num_classes, names)
    high = 1 if numbers.ndim == 2 else count - 1
    bad = np.argwhere((numbers < MISSING) | (numbers > high))
    if len(bad):
        raise DataError(
            f"expected labels 0..{high}, or -1 where missing, got {numbers[tuple(bad[0])]} at node "
            f"{bad[0][0]} ({len(bad)} such labels): number classes from 0 or raise num_classes"
        )
    several = numbers.ndim == 2 and numbers.shape[1] > 1 and len(numbers) >= LEAST_ROWS
    if several and bool((numbers >= 0).all()) and bool((numbers.sum(axis=1) == 1).all()):
        LOG.warning(
            "labels: y has one 1 in each row and is read as label bits: for classes pass "
            "y.argmax(1)"
        )
    return torch.from_numpy(numbers), count, names


def is_regression(y: np.ndarray, task: LabelForm | None) -> bool:
    """Whether labels are numbers to predict: by the task, or as one of them has a fraction.

    Raises:
        DataError: a task that does not exist, or integers for regression.
    """
    known_forms = [form for form in get_args(LabelForm) if form != "rating"]  # see sg.ratings
    if task is not None and task not in known_forms:
        known = ", ".join(known_forms)
        raise DataError(f"expected task {known}, or None to find out by y, got {task!r}")
    if task == "node_value" and y.dtype.kind in "biu":
        raise DataError(
            f"expected floating point targets in y for node_value, got {y.dtype}: use "
            "y.astype(float), with NaN where a target is missing"
        )
    if task is not None or y.dtype.kind not in "fO":
        return task == "node_value"
    cells = [cell for cell in y.ravel().tolist() if isinstance(cell, float)]
    return any(np.isfinite(cell) and not cell.is_integer() for cell in cells)


def targets(
    y: np.ndarray,
    n: int,
    num_classes: int | None,
    names: tuple[str, ...],
    missing: MissingValues = USUAL,
) -> tuple[Tensor, int, tuple[str, ...]]:
    """Return targets of a regression (n, T) float64, T and their names.

    >>> targets(np.array([0.5, np.nan]), 2, None, ())
    (tensor([[0.5000],
            [   nan]], dtype=torch.float64), 1, ())

    Args:
        y: (n,) or (n, T) numbers; None and NaN are missing.
        n: number of nodes.
        num_classes: T, or None.
        names: names of the targets, or empty.
        missing: what counts as missing.

    Raises:
        DataError: a shape or a value that does not fit.
    """
    if y.ndim not in (1, 2) or len(y) != n or y.size == 0:
        raise DataError(
            f"expected targets y of shape ({n},) or ({n}, T), got {y.shape}: one number (or one "
            "row of numbers) a node, in the order of x"
        )
    if y.dtype.kind not in "fO":
        raise DataError(f"expected numbers as targets in y, got dtype {y.dtype}")
    cells = read_column(y.ravel(), "number", missing, place=lambda _: "y")
    values = cells.reshape(n, -1)
    endless = np.argwhere(np.isinf(values))
    if len(endless):
        raise DataError(
            f"expected finite targets, or NaN where missing, got {values[tuple(endless[0])]} at "
            f"node {endless[0][0]} ({len(endless)} such targets)"
        )
    if np.isnan(values).all(axis=0).any():
        column = int(np.isnan(values).all(axis=0).argmax())
        raise DataError(
            f"expected at least one known target in each column of y, got none in column {column}"
        )
    count = _count(values, num_classes, names)
    return torch.from_numpy(values.copy()), count, names


def check_form(y: Tensor, task: LabelForm | None) -> None:
    """Raise `DataError` unless labels have the form that was asked for, if one was."""
    if task is not None and label_form(y) != task:
        raise DataError(
            f"expected labels for {task}, got y of shape {tuple(y.shape)}, which is "
            f"{label_form(y)}: leave task out, or give such labels"
        )


def _numbers(
    y: np.ndarray, names: tuple[str, ...], missing: MissingValues
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels as int64, missing ones as -1, and the class names."""
    if y.dtype.kind == "u" and y.max() > np.iinfo(np.int64).max:
        raise DataError(
            f"expected class numbers below the number of nodes, {len(y)}, got {y.max()}: "
            "pass codes as words, such as y.astype(str)"
        )
    if y.dtype.kind in "biu" and not missing.numbers:
        return y.astype(np.int64), names
    if y.dtype.kind not in "biufOU":
        raise DataError(f"expected class numbers or words in y, got dtype {y.dtype}")
    other_missing = MissingValues(missing.words - set(names), missing.numbers)
    read = read_column(y.ravel(), "label", other_missing)
    if read.dtype.kind == "O":
        cells = read.tolist()
        words = {cell for cell in cells if isinstance(cell, str)}
        if not words:
            kinds = ", ".join(sorted({type(cell).__name__ for cell in y.ravel().tolist()}))
            raise DataError(f"expected class numbers or words in y, got {kinds}")
        _report_missing_words(y.ravel().tolist(), cells)
        names = names or tuple(sorted(words))
        return _numbered_words(cells, y.ndim, names), names
    filled = np.where(np.isnan(read), MISSING, read).reshape(y.shape)
    whole = (filled == np.floor(filled)) & (np.abs(filled) < 2**53)
    if not whole.all():
        first = np.argwhere(~whole)[0]
        raise DataError(
            f"expected whole class numbers in y, got {filled[tuple(first)]} at node {first[0]}: "
            "targets of a regression need task='node_value'"
        )
    return filled.astype(np.int64), names


def _report_missing_words(given: list[Any], cells: list[Any]) -> None:
    """Report words that a user may have meant as classes and that count as missing."""
    pairs = zip(given, cells, strict=True)
    lost = [word for word, cell in pairs if cell is None and isinstance(word, str)]
    lost = [word for word in lost if word not in ("", "nan", "NaN", "-1")]
    words = sorted(set(lost))
    if words:
        LOG.warning(
            "labels: %s counts as missing (%s), as in pandas: rename it if it is a class, or "
            "name all classes in class_names",
            " or ".join(map(repr, words)),
            counted(len(lost), "node"),
        )


def _numbered_words(cells: list[Any], ndim: int, names: tuple[str, ...]) -> np.ndarray:
    if ndim > 1:
        raise DataError("expected numbers 0 and 1 in rows of label bits, got words in y")
    number = {name: i for i, name in enumerate(names)}
    for row, cell in enumerate(cells):
        if cell is not None and cell not in number:
            raise DataError(
                f"expected labels among the words {', '.join(names)}, got {cell!r} at node {row}: "
                "use words only, and name each in class_names where that is given"
            )
    return np.array([number.get(cell, MISSING) for cell in cells], dtype=np.int64)


def _from_zero(numbers: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels that begin at 0: of 1, 2 and 3 there are three classes, not four."""
    values = np.unique(numbers[numbers != MISSING])
    if not len(values) or values[0] <= 0 or values[-1] > len(numbers):
        return numbers, ()
    places = np.searchsorted(values, numbers)
    return np.where(numbers == MISSING, MISSING, places), tuple(str(value) for value in values)


def _count(y: np.ndarray, num_classes: int | None, names: tuple[str, ...]) -> int:
    """Return the number of classes, or of label bits."""
    if y.ndim == 2:
        if num_classes not in (None, y.shape[1]):
            raise DataError(
                f"expected num_classes {y.shape[1]}, the columns of y, got {num_classes}: "
                "leave it out"
            )
        num_classes = y.shape[1]
    if num_classes is None:
        num_classes = len(names) or _highest(y) + 1
    if num_classes < 1 or (names and len(names) != num_classes):
        raise DataError(
            f"expected num_classes >= 1 and as many class_names, or none, got {num_classes} and "
            f"{len(names)} names"
        )
    return num_classes


def _highest(y: np.ndarray) -> int:
    highest = int(y.max())
    if highest <= MISSING:
        raise DataError("expected at least one known label in y, got none: give num_classes")
    # A label such as a postal code would make a model with a million outputs.
    if highest >= len(y):
        raise DataError(
            f"expected class numbers below the number of nodes, {len(y)}, got {highest}: "
            "number classes from 0, or give num_classes"
        )
    return highest
