"""Graphs from arrays in memory, all checked on the way in.

n: nodes. E: edges as given. F: features a node. T: label bits of a multi-label task. S: silos.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.numeric_state import standard_numerics
from silograph.core.text import count_of
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Features, Graph, LabelForm, Split, label_form
from silograph.graph.read.columns import (
    INDEX_NAMES,
    LEAST_ROWS,
    UNNAMED,
    USUAL,
    MissingValues,
    NaValues,
    compact_features,
    missing_values,
    read_column,
    report_counting_features,
    report_row_numbers,
    row_number_columns,
)
from silograph.graph.read.tables import (
    RepeatedEdges,
    checked_weights,
    weights_by_direction,
)

# --- labels --------------------------------------------------------------------------------------
# Labels as users write them (numbers, words, holes) turned into the numbers a graph holds.
#
# n: nodes. T: label bits of a multi-label task.


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
    numbers, names = _numbers_labels(y, names, missing)
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
        forms_text = ", ".join(known_forms)
        raise DataError(f"expected task {forms_text}, or None to find out by y, got {task!r}")
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


def _numbers_labels(
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


def _report_missing_words(words_given: list[Any], cells: list[Any]) -> None:
    """Report words that a user may have meant as classes and that count as missing."""
    pairs = zip(words_given, cells, strict=True)
    missing_words = [word for word, cell in pairs if cell is None and isinstance(word, str)]
    missing_words = [word for word in missing_words if word not in ("", "nan", "NaN", "-1")]
    words = sorted(set(missing_words))
    if words:
        LOG.warning(
            "labels: %s counts as missing (%s), as in pandas: rename it if it is a class, or "
            "name all classes in class_names",
            " or ".join(map(repr, words)),
            count_of(len(missing_words), "node"),
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


LOG = logging.getLogger("silograph")
ArrayInput = npt.ArrayLike | Tensor
Sparse = sp.spmatrix | sp.sparray
PARTS = ("train", "val", "test")


@standard_numerics()
def from_arrays(
    *,
    edge_index: "ArrayInput",
    edge_weight: "ArrayInput | None" = None,
    repeated_edges: RepeatedEdges = "mean",
    x: "ArrayInput | Sparse | CSR | None" = None,
    y: "ArrayInput",
    num_classes: int | None = None,
    node_id: "ArrayInput | None" = None,
    split: "Split | Sequence[ArrayInput] | None" = None,
    silo: "ArrayInput | None" = None,
    silo_names: Sequence[str] = (),
    class_names: Sequence[str] = (),
    feature_names: Sequence[str] = (),
    task: LabelForm | None = None,
    na_values: NaValues = (),
    name: str = "graph",
) -> Graph:
    """Return a checked graph; nothing of it shares memory with the arguments.

    >>> graph = from_arrays(edge_index=[[0, 1], [1, 2]], x=np.eye(3), y=["cat", "dog", None])
    >>> graph.num_edges, graph.y.tolist(), graph.class_names
    (2, [0, 1, -1], ('cat', 'dog'))

    Args:
        edge_index: (2, E) integers, rows of `x`, from the source of each edge to its target. Runs
            read edges in both directions unless they have `directed`; self loops and repeated edges
            are dropped.
        edge_weight: (E,) finite numbers >= 0; None: every edge counts 1.
        repeated_edges: what an edge weighs that is listed several times, as in both directions:
            the `mean` of its weights, their `sum`, how often it is listed (`count`), or the `last`
            or `first` weight.
        x: (n, F) numbers, dense (NumPy, torch, lists) or sparse (SciPy, torch, `CSR`). None: the
            nodes have no features, and `features` of a run says what to make in their place.
        y: (n,) or (n, 1) class numbers from 0, or words, which are numbered in sorted order (in
            that of `class_names` where given); or (n, T) of 0 and 1 for a multi-label task.
            Numbers of which none is 0, such as 1 to 3, are as many classes as occur, unless
            `num_classes` or `class_names` is given.
            None, NaN and -1 mark what is not known; among words also the empty word, "NA" and
            others (see `silograph.graph.read.columns`). Or, for regression, (n,) or (n, T)
            floating point numbers, of which one has a fraction or with `task="node_value"`; None
            and NaN are missing.
        num_classes: number of classes; by default the number of `class_names`, else the highest
            label + 1. T for a multi-label task and for regression.
        node_id: (n,) unique public keys, integers or strings; by default 0..n-1. Integers beyond
            64 bits become strings.
        split: a `Split` or its three masks (train, val, test), each (n,) bool, disjoint.
        silo: (n,) who holds the node: numbers or words; with `silo_names`, indices into them.
        silo_names: (S,) names of the silos; by default the sorted values of `silo`.
        class_names: names of the classes (or of the T label bits or targets).
        feature_names: (F,) names of the features, which a model keeps. A feature whose name says
            that it is a column of row numbers ("Unnamed: 0") is left out, which is reported.
        task: multiclass, multilabel or node_value; None finds out by `y`.
        na_values: words or numbers in `x` and `y` that count as missing, too. Missing labels are
            not known; missing features are refused.
        name: what tables and result folders call this graph.

    Raises:
        DataError: an argument cannot be used; the line says what was expected and what came.
    """
    _check_names(class_names=class_names, silo_names=silo_names, feature_names=feature_names)
    missing = missing_values(na_values)
    # Features; labels come first, as without features they say how many nodes there are.
    labels_array = array_of(y, "y")
    features = _no_features(labels_array) if x is None else features_of(x, missing)
    features, feature_names = _without_row_numbers(features, tuple(feature_names), name)
    if isinstance(features, CSR):
        n, columns = features.num_rows, features.num_cols
    else:
        n, columns = features.shape
    if feature_names and len(feature_names) != columns:
        raise DataError(f"expected {columns} feature_names, one a column, got {len(feature_names)}")
    # Labels or targets.
    read = targets if is_regression(labels_array, task) else numbered_labels
    labels, count, names = read(labels_array, n, num_classes, tuple(class_names), missing)
    check_form(labels, task)
    home, homes = _silos(silo, n, tuple(silo_names))
    # Edges and their weights.
    edges = _edges(edge_index, n)
    adj, values = CSR.directions(edges, n), None
    if edge_weight is not None:
        values = checked_weights(array_of(edge_weight, "edge_weight"), edges.shape[1])
    weight, directed_weight = weights_by_direction(adj, edges, values, name, repeated_edges)
    return Graph(
        adj=replace(adj, values=None),
        x=features,
        y=labels,
        num_classes=count,
        node_id=_node_ids(node_id, n),
        name=name,
        split=None if split is None else _split(split, n),
        silo=home,
        silo_names=homes,
        class_names=names,
        feature_names=feature_names,
        edge_weight=weight,
        directed_weight=directed_weight,
    )


def split_of(parts: Sequence[object]) -> Split:
    """Return the split of n words "train", "val", "test" or "" (in no part)."""
    for row, part in enumerate(parts):
        if part not in (*PARTS, ""):
            raise DataError(
                f"expected the split of node {row} to be train, val, test or empty, got {part!r}"
            )
    return Split(*(torch.tensor([part == which for part in parts]) for which in PARTS))


def array_of(value: Any, what: str) -> np.ndarray:
    """Return what numpy makes of a value; raise `DataError` where that is no array."""
    try:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            value = value.float() if value.dtype == torch.bfloat16 else value
        if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            cells = np.asarray(value.data, dtype=np.object_).copy()
            cells[np.ma.getmaskarray(value)] = None  # masked cells are missing
            return cells
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"expected {what} to be one array of numbers or words, got {type(value).__name__} "
            "that numpy cannot read as one: rows must have one length"
        ) from None


def _check_names(**names_by_kind: Sequence[str]) -> None:
    for what, names in names_by_kind.items():
        if isinstance(names, str) or len(set(names)) < len(names):
            raise DataError(f"expected {what} to be distinct names, got {names!r}")


def _codes(value: ArrayInput, what: str) -> np.ndarray:
    """Return keys (n,) as integers or words, exactly; other arrays as they are."""
    codes = array_of(value, what)
    if codes.ndim != 1 or codes.dtype.kind not in "iuUOf":
        return codes
    if isinstance(value, list | tuple):  # numpy makes floats of integers below and above 2^63
        mixed = {isinstance(code, str) for code in value}
        cells = list(value) if len(mixed) == 1 else codes
        exact = codes.dtype.kind != "f" or all(isinstance(c, int | np.integer) for c in value)
        return read_column(cells, "id", place=lambda row: f"{what}, node {row}") if exact else codes
    if codes.dtype.kind == "f":
        return codes
    return read_column(codes, "id", place=lambda row: f"{what}, node {row}")


def _scipy(x: Tensor) -> Any:
    parts = x.to_sparse(layout=torch.sparse_coo).coalesce()
    if parts.sparse_dim() != 2 or parts.dense_dim():
        return parts.to_dense()
    row, col = parts.indices().numpy()
    return sp.coo_matrix((array_of(parts.values(), "x"), (row, col)), shape=parts.shape)


def features_of(x: Any, missing: MissingValues = USUAL) -> Features:
    """Return checked features, dense or CSR, of the dtype that `compact_features` chooses.

    Args:
        x: (n, F); see `from_arrays`.
        missing: what counts as missing.

    Raises:
        DataError: not (n, F) of finite numbers, none of them missing.
    """
    if isinstance(x, Tensor) and x.layout != torch.strided:
        x = _scipy(x.detach().cpu())
    elif isinstance(x, CSR):
        x = x.scipy()
    sparse = sp.issparse(x)
    values: Any = x if sparse else array_of(x, "x")
    if len(values.shape) != 2 or not 1 <= values.shape[1] < 2**31:
        raise DataError(
            f"expected x of shape (n, F) with 1 <= F < 2^31, got {values.shape}: "
            "one row of features a node"
        )
    if values.shape[0] == 0:
        raise DataError(
            f"expected at least one node, got x of shape {values.shape}: the graph is empty"
        )
    if values.dtype.kind == "O" and not sparse:
        values = _numbers(values, missing)
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"expected numbers in x, got dtype {values.dtype}: code words as numbers first"
        )
    entries = values.data if sparse else values  # parts of a sparse matrix may not be sound
    if values.dtype.kind in "iu" and entries.size and int(entries.max()) > 2**53:
        LOG.warning(
            "x has whole numbers above 2^53, which float64 rounds: keys are no features; leave "
            "them out"
        )
    if not sparse:
        if missing.numbers:
            values = np.where(np.isin(values, list(missing.numbers)), np.nan, values)
        return _finite(torch.from_numpy(compact_features(values)))
    # Entries that are listed twice are added, which whole numbers of few bits cannot hold.
    short = values.dtype.kind == "f" and values.dtype.itemsize <= 4
    rows = _merged(sp.csr_matrix(values, dtype=np.float32 if short else np.float64, copy=True))
    rows.data = compact_features(rows.data)
    return _finite(CSR.from_scipy(rows))


def _numbers(cells: np.ndarray, missing: MissingValues) -> np.ndarray:
    """Return cells (n, F) of several kinds as float64, NaN where missing."""
    rows, columns = cells.shape
    values = np.empty((rows, columns), dtype=np.float64)
    for column in range(columns):

        def place(row: int, column: int = column) -> str:
            return f"x, node {row}, feature {column}"

        values[:, column] = read_column(cells[:, column], "number", missing, place=place)
    return values


def _without_row_numbers(
    x: Features, names: tuple[str, ...], source: str
) -> tuple[Features, tuple[str, ...]]:
    """Return features without columns that number the rows by their names."""
    candidates = [
        c for c, name in enumerate(names) if name in INDEX_NAMES or UNNAMED.fullmatch(name)
    ]
    if candidates and len(names) == (x.num_cols if isinstance(x, CSR) else x.shape[1]):
        table = x.scipy(np.float64).tocsc() if isinstance(x, CSR) else x.double().numpy()
        part = table[:, candidates]
        cells = (part.toarray() if sp.issparse(part) else part).T.tolist()
        row_numbers = row_number_columns({names[c]: cells[i] for i, c in enumerate(candidates)}, ())
        keep = [c for c, name in enumerate(names) if name not in row_numbers]
        if row_numbers and keep:
            report_row_numbers(source, row_numbers)
            names = tuple(names[c] for c in keep)
            x = CSR.from_scipy(table[:, keep]) if isinstance(x, CSR) else x[:, keep]
    if isinstance(x, Tensor) and x.shape[1]:
        report_counting_features(source, x.numpy(), names)
    return x, names


def _no_features(y: np.ndarray) -> Tensor:
    """Return the features (n, 0) of as many nodes as there are labels."""
    if y.ndim == 0 or len(y) == 0:
        raise DataError(
            f"expected at least one node, got y of shape {y.shape} and no x: the graph is empty"
        )
    return torch.zeros(len(y), 0)


def _merged(rows: "sp.csr_matrix[Any]") -> "sp.csr_matrix[Any]":
    try:
        rows.check_format(full_check=True)
    except ValueError as error:
        raise DataError(f"expected a sound sparse matrix in x, got one where {error}") from None
    rows.sum_duplicates()
    return rows


def _finite(x: Features) -> Features:
    values = x.values if isinstance(x, CSR) else x
    assert values is not None  # made with values above
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        first = bad[0]
        if isinstance(x, CSR):
            first = torch.stack([x.row[first[0]], x.indices[first[0]].long()])
        raise DataError(
            f"expected finite features, got {len(bad)} NaN or infinite in x as float32, the first "
            f"at node {int(first[0])}, feature {int(first[1])}: replace them or drop the feature"
        )
    return x


def _edges(edge_index: ArrayInput, n: int) -> np.ndarray:
    """Return checked edges as given, (2, E) int64."""
    edges = array_of(edge_index, "edge_index")
    if edges.ndim != 2 or len(edges) != 2:
        hint = "transpose it" if edges.ndim == 2 and edges.shape[1] == 2 else "one column an edge"
        raise DataError(f"expected edge_index of shape (2, E), got {edges.shape}: {hint}")
    if edges.dtype.kind not in "iu" and edges.size:  # an empty list has no dtype of its own
        raise DataError(
            f"expected integers in edge_index, got dtype {edges.dtype}: edges name rows of x"
        )
    # Before the cast, in which unsigned numbers above 2^63 would become negative.
    outside_edges = np.flatnonzero(((edges < 0) | (edges >= n)).any(axis=0))
    if len(outside_edges):
        a, b = edges[:, outside_edges[0]].tolist()
        raise DataError(
            f"expected edges between nodes 0..{n - 1}, got edge {outside_edges[0]} from {a} to {b} "
            f"({count_of(len(outside_edges), 'such edge')}): "
            "number nodes by their row of x, or add the node"
        )
    return edges.astype(np.int64, copy=False)


def _node_ids(node_id: ArrayInput | None, n: int) -> np.ndarray:
    if node_id is None:
        return np.arange(n, dtype=np.int64)
    keys = _codes(node_id, "node_id")
    if keys.shape != (n,):
        raise DataError(f"expected node_id of shape ({n},), got {keys.shape}: one key a node")
    if keys.dtype.kind not in "iuU":
        raise DataError(f"expected integers or strings in node_id, got dtype {keys.dtype}")
    values, counts = np.unique(keys, return_counts=True)
    if len(values) < n:
        raise DataError(
            f"expected unique node ids, got {values[counts > 1][0].item()!r} "
            f"{counts[counts > 1][0]} times: a public key names one node"
        )
    return keys


def _split(split: Split | Sequence[ArrayInput], n: int) -> Split:
    masks_given = [split.train, split.val, split.test] if isinstance(split, Split) else list(split)
    if len(masks_given) != len(PARTS):
        raise DataError(f"expected three masks (train, val, test) as split, got {len(masks_given)}")
    masks = [
        array_of(mask, f"the {part} mask") for part, mask in zip(PARTS, masks_given, strict=True)
    ]
    for part, mask in zip(PARTS, masks, strict=True):
        if mask.shape != (n,) or mask.dtype.kind != "b":
            raise DataError(
                f"expected a {part} mask of shape ({n},) and dtype bool, got {mask.shape} and "
                f"{mask.dtype}: one True or False a node"
            )
    shared = np.flatnonzero(np.sum(masks, axis=0) > 1)
    if len(shared):
        raise DataError(
            f"expected disjoint masks, got node {shared[0]} in two of train, val and test "
            f"({count_of(len(shared), 'such node')}): a node that trains must not judge"
        )
    return Split(*(torch.from_numpy(mask.copy()) for mask in masks))


def _silos(
    silo: ArrayInput | None, n: int, names: tuple[str, ...]
) -> tuple[Tensor | None, tuple[str, ...]]:
    if silo is None:
        if names:
            raise DataError("expected silo beside silo_names, got None: say who holds each node")
        return None, ()
    homes = _codes(silo, "silo")
    if homes.shape != (n,) or homes.dtype.kind not in "iuU" or (homes == "").any():
        raise DataError(
            f"expected silo of shape ({n},), all integers or all words, got {homes.shape} "
            f"of dtype {homes.dtype} or an empty word: say of each node who holds it"
        )
    if not names:
        values, index = np.unique(homes, return_inverse=True)
        return torch.from_numpy(index.astype(np.int64)), tuple(str(v) for v in values)
    if homes.dtype.kind == "U":
        number = {name: i for i, name in enumerate(names)}
        homes = np.array([number.get(home, MISSING) for home in homes.tolist()])
    outside_nodes = np.flatnonzero((homes < 0) | (homes >= len(names)))
    if len(outside_nodes):
        raise DataError(
            f"expected silo 0..{len(names) - 1} (silo_names has {len(names)}), got a silo outside "
            f"of them at node {outside_nodes[0]}: name every silo"
        )
    return torch.from_numpy(homes.astype(np.int64)), names
