"""Graphs from files: two tables here, one .npz archive in `npz`.

n: nodes. E: edges as stored. F: features a node. T: label bits of a multi-label task.
"""

import logging
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silograph.core.errors import ConfigError, DataError, mistake, reword_error, unknown
from silograph.core.numeric_state import standard_numerics
from silograph.core.text import count_of, printable, short_repr
from silograph.graph.graph import MISSING, Graph
from silograph.graph.read.arrays import PARTS, split_of
from silograph.graph.read.columns import NaValues, missing_values, to_number
from silograph.graph.read.contents import ending_of, stem_of
from silograph.graph.read.npz import checked, load_npz
from silograph.graph.read.tables import (
    FORMATS,
    IN_RANGE,
    WEIGHTS,
    RepeatedEdges,
    Table,
    read_csv,
    read_table,
    report_unused,
    usable,
)

__all__ = ["from_csv", "load_npz"]

# That a table may call otherwise, and those that are features.
COLUMNS = ("id", "label", "silo", "source", "target", "weight", "features")
SEVERAL = ("label", "features")  # may be several columns
LOG = logging.getLogger("silograph")
ENDS = ("source", "target")  # names of the columns of an edge's ends by default
VALUE, VALUE_ = "value", "value_"  # columns of numbers to predict


@standard_numerics()
def from_csv(
    *,
    nodes: str | os.PathLike[str],
    edges: str | os.PathLike[str] | None,
    id: str = "id",
    label: str | Sequence[str] = "label",
    silo: str | None = None,
    source: str = "source",
    target: str = "target",
    weight: str | None = None,
    features: Sequence[str] | None = None,
    time: str | None = None,
    repeated_edges: RepeatedEdges = "mean",
    na_values: NaValues = (),
    class_names: Sequence[str] = (),
    with_labels: bool = True,
    name: str | None = None,
) -> Graph:
    """Return the graph of two tables: CSV files or others, each with a header line.

    Text is UTF-8, perhaps packed by gzip, with commas, semicolons, tabs or bars between columns
    (see `silograph.graph.read.delimited`). Names that end with .npz or .parquet are such files.

    Args:
        nodes: one line a node. Every column that is not named below is a numeric feature; with
            none, the nodes have no features.
        edges: one line an edge, end points by node id. With exactly two columns, their names are
            free. Columns that are not named below are not used; that is reported. Or a list of
            edges without a header (.txt, .edges, .edgelist), or a sparse matrix (.mtx), whose rows
            are the nodes in their order. None: there are no edges.
        id: column of the public key; keys are integers where all are, else strings.
        label: column of the class: numbers from 0, words, or a missing value. Several columns of 0,
            1 or missing values make a multi-label task, their names the class names. A table
            without a column "label" that has one named "value", or several "value_NAME", has
            numbers to predict there.
        silo: column that says who holds the node; by default "silo" where there is such a column.
        source: column of the end that an edge comes from.
        target: column of the end that it goes to.
        weight: column of the edges' weights, numbers >= 0; an empty cell counts 1. By default
            "edge_weight", "edge_weights" or "weight", where there is one.
        features: the columns that are features, if not all others are; an empty list: none. What
            is not used then is reported.
        time: column of times, numbers or dates and times in ISO 8601, by which `split=
            "time:COLUMN:SHARES"` may go. It is no feature, unless `features` names it.
        repeated_edges: what an edge weighs that is listed several times, see `from_arrays`.
        na_values: words or numbers that count as missing besides the usual ones, which
            `silograph.graph.read.columns` lists.
        class_names: the words in the column of the class, in the order of their numbers; by default
            sorted. A word among them is never missing.
        with_labels: False for nodes to predict on. Columns of labels and times are then left out
            and may be absent, and every label is missing.
        name: name of the graph; by default that of the nodes file without its ending.

    A column named "split" holds train, val, test or nothing. Columns that only number the rows are
    left out, which is reported.

    Raises:
        DataError: names file, line (the header is line 1) and column.
    """
    path = Path(nodes)
    return graph_of_tables(
        read_table(path) if ending_of(path) in FORMATS else read_csv(path),
        Table(path, [source, target], [], []) if edges is None else read_table(Path(edges)),
        TableColumns(id, label, silo, source, target, weight, features, time),
        repeated_edges=repeated_edges,
        na_values=na_values,
        class_names=class_names,
        with_labels=with_labels,
        name=name,
    )


@dataclass(frozen=True)
class TableColumns:
    """Names of the columns of two tables, as the arguments of `from_csv` give them."""

    id: str = "id"
    label: str | Sequence[str] = "label"
    silo: str | None = None
    source: str = "source"
    target: str = "target"
    weight: str | None = None
    features: Sequence[str] | None = None
    time: str | None = None


def graph_of_tables(
    nodes: Table,
    edges: Table,
    columns: TableColumns,
    *,
    repeated_edges: RepeatedEdges = "mean",
    na_values: NaValues = (),
    class_names: Sequence[str] = (),
    with_labels: bool = True,
    name: str | None = None,
) -> Graph:
    """Return the graph of two tables; arguments and errors are those of `from_csv`."""
    missing = missing_values(na_values)
    id, label, silo, features = columns.id, columns.label, columns.silo, columns.features
    table = replace(nodes, missing=missing)
    labels = [label] if isinstance(label, str) else list(label)
    time = columns.time if with_labels or columns.time in table.header else None
    others = [name for name in (silo, time) if name is not None]
    table = table.without_row_numbers([id, *labels, *others, *(features or ())])
    values = value_columns(table.header) if label == "label" else []
    labels = values or labels
    silo = "silo" if silo is None and "silo" in table.header else silo
    table.check_named([id, *(labels if with_labels else []), *others, *(features or ())])
    special = {id, *labels, silo, "split"}
    if features is None:
        features = [name for name in table.header if name not in special and name != time]
    else:
        _check_features(table, features, special, time)
    if time is not None and time in special:
        raise DataError(
            f"{table.head}: expected a column of times that means nothing else, got {time!r}: name "
            "another one"
        )
    place = _places(table, id)
    if edges.matrix_rows is not None:
        place = _places_in_matrix(place, edges.path, edges.matrix_rows, table)
    links, ends, weight = _edge_table(
        replace(edges, missing=missing), (columns.source, columns.target), columns.weight, place
    )
    arrays: dict[str, Any] = {
        "x": _numbers(table, list(features)),
        "feature_names": features,
        "y": np.full(len(place), MISSING),
        "num_classes": 1,
        **(_read_labels(table, labels, class_names, values=bool(values)) if with_labels else {}),
        "node_id": table.ids(id),
        "split": table.words("split", PARTS, empty=True) if "split" in table.header else None,
        "silo": None if silo is None else table.words(silo),
        "na_values": na_values,
        "repeated_edges": repeated_edges,
        **_read_edges(links, ends, weight, place, table),
    }
    if arrays["split"] is not None:
        arrays["split"] = split_of(arrays["split"]) if any(arrays["split"]) else None
    graph = checked(table.path, arrays, name or stem_of(table.path))
    graph = replace(graph, directed_weight=None) if edges.undirected else graph
    if time is None or not with_labels:
        return graph
    return replace(graph, columns={time: torch.from_numpy(table.times(time))})


def graph_of_edges(
    path: Path, columns: Mapping[str, str], repeated_edges: RepeatedEdges = "mean"
) -> Graph:
    """Return the graph of a list of edges alone: nodes without labels and features, to predict on.

    They are in the order in which the list first names them, where a node without an edge is not;
    or the rows of a matrix from 1.

    Args:
        path: the list.
        columns: the column of weights, if it is named.
        repeated_edges: as in `from_csv`.

    Raises:
        DataError: as by `from_csv`.
    """
    edges = read_table(path)
    if edges.matrix_rows is None:
        keys = list(dict.fromkeys(key for row in edges.rows for key in row[:2]))
    else:
        keys = [str(row + 1) for row in range(edges.matrix_rows)]
    nodes = Table(path, ["id"], [(key,) for key in keys], keys, "node")
    return graph_of_tables(
        nodes,
        edges,
        TableColumns(weight=columns.get("weight")),
        repeated_edges=repeated_edges,
        with_labels=False,
        name=stem_of(path),
    )


def _check_features(
    table: Table, features: Sequence[str], special: Container[str | None], time: str | None
) -> None:
    """Raise `DataError` for features that mean something else, or that are listed twice.

    Columns that are not used are reported.
    """
    wrong = next((name for name in features if name in special), None)
    if wrong is not None or len(set(features)) < len(features):
        got = ", ".join(features)
        raise DataError(
            f"{table.head}: expected features that are distinct columns without another meaning, "
            f"got {got if wrong is None else repr(wrong)}"
        )
    used = {*features, time}
    unused = [name for name in table.header if name not in special and name not in used]
    if unused:
        LOG.warning("%s: columns are not used: %s", table.path, ", ".join(map(printable, unused)))


ColumnNames = str | Mapping[str, str | Sequence[str]]


def parse_columns(
    columns: ColumnNames, valid_names: Sequence[str] = COLUMNS
) -> dict[str, str | list[str]]:
    """Return the names of columns that a text or a mapping gives, as `from_csv` takes them.

    >>> parse_columns("id=key,label=red+blue") == parse_columns(
    ...     {"id": "key", "label": ["red", "blue"]}
    ... )
    True

    Args:
        columns: `NAME=COLUMN,...`, or a column (or several labels) by name.
        valid_names: the columns that the tables may call otherwise.

    Raises:
        ConfigError: another form, or a column that tables do not have (names the nearest).
    """
    parsed: dict[str, str | list[str]] = {}
    if isinstance(columns, str):
        for part in columns.split(","):
            name, equals, column = (word.strip() for word in part.partition("="))
            if not equals or not column or name in parsed:
                raise ConfigError(
                    f"columns: expected NAME=COLUMN,..., each once, got {short_repr(columns)}",
                    **mistake("option-value", "columns", short_repr(columns)),
                )
            names = [word.strip() for word in column.split("+")]
            is_list = name == "features" or (name == "label" and len(names) > 1)
            parsed[name] = names if is_list else column
    else:
        if not isinstance(columns, Mapping):
            raise ConfigError(
                'columns: expected a text such as "id=key,label=kind" or a dict such as '
                f'{{"id": "key"}}, got {short_repr(columns)}',
                **mistake("option-value", "columns", short_repr(columns)),
            )
        for name, column_name in columns.items():
            several = (
                name in SEVERAL and isinstance(column_name, list | tuple) and len(column_name) > 0
            )
            if not isinstance(column_name, str) and not (
                several and all(isinstance(column, str) for column in column_name)
            ):
                raise ConfigError(
                    f"columns: expected a column for {name}, got {short_repr(column_name)}",
                    **mistake("option-value", "columns", short_repr(column_name)),
                )
            columns_named = [column_name] if isinstance(column_name, str) else [*column_name]
            is_list = name == "features" or not isinstance(column_name, str)
            parsed[name] = columns_named if is_list else columns_named[0]
    for name in parsed:
        if name not in valid_names:
            error = unknown("column", str(name), valid_names)
            raise reword_error(error, f"columns: {error}", ConfigError)
    return parsed


def value_columns(header: Sequence[str]) -> list[str]:
    """Return the columns of numbers to predict; none where there is a column of classes."""
    if "label" in header:
        return []
    return [name for name in header if name == VALUE or name.startswith(VALUE_)]


def _read_labels(
    table: Table, columns: list[str], class_names: Sequence[str], *, values: bool
) -> dict[str, Any]:
    """Return labels (n,) or (n, T), or targets (n, T) float64, as `from_arrays` takes them."""
    one = len(columns) == 1
    if values or not one:
        if class_names:
            raise DataError(
                f"class_names: expected none for {table.path}, whose columns name what is "
                f"predicted ({', '.join(columns)}), got {short_repr(list(class_names))}"
            )
        class_names = () if one else [name.removeprefix(VALUE_) for name in columns]
    if values:
        targets = [table.optional_numbers(column, "a number or nothing") for column in columns]
        y = np.stack(targets, axis=1)
    else:
        y = _classes(table, columns[0], class_names) if one else _bits(table, columns)
    task = "node_value" if values else None
    return {"y": y, "num_classes": None, "task": task, "class_names": class_names}


def _places(table: Table, column: str) -> dict[str, int]:
    """Return the row of every node id."""
    place: dict[str, int] = {}
    for row, key in enumerate(table.column(column)):
        if not key:
            raise table.wrong(row, column, "a node id", key)
        if key in place:
            first = table.lines[place[key]]
            raise table.wrong(row, column, f"an id not yet on line {first}", key)
        place[key] = row
    if not place:
        raise DataError(f"{table.path}: expected at least one node below the header, got none")
    return place


def _places_in_matrix(place: dict[str, int], path: Path, rows: int, nodes: Table) -> dict[str, int]:
    """Return the row of the node that each row of a matrix means, by its number from 1.

    A matrix has no ids, so its rows are those of the table of nodes.

    Raises:
        DataError: there are not as many nodes as rows, or ids number the rows in another order.
    """
    if len(place) != rows:
        raise DataError(
            f"{path}: expected as many rows as {nodes.path.name} has nodes, {len(place)}, got "
            f"{rows}: row 1 of the matrix is the first node of the table"
        )
    ids = list(place)
    for first in (0, 1):
        numbers = [str(first + row) for row in range(rows)]
        if ids != numbers and {*ids} == {*numbers}:
            raise DataError(
                f"{nodes.path}: expected nodes in the order of the rows of {path.name}, got ids "
                f"from {first} in another order: sort the table by them"
            )
    return {str(row + 1): row for row in range(rows)}


def _numbers(table: Table, columns: list[str]) -> np.ndarray | None:
    """Return the feature columns, (n, F) float32; None where there are none."""
    return table.numbers(columns) if columns else None


def _classes(table: Table, column: str, class_names: Sequence[str]) -> np.ndarray:
    """Return class numbers (n,) float64 with NaN where missing, or words where one is no number."""
    missing = replace(table.missing, words=table.missing.words - {*class_names})
    labels = replace(table, missing=missing).labels(column)
    if labels.dtype.kind != "f":
        return np.array(
            table.column(column), dtype=np.object_
        )  # `from_arrays` reports missing ones
    wrong = ~np.isnan(labels) & ((labels < MISSING) | (labels != np.floor(labels)))
    for row in np.flatnonzero(wrong).tolist():
        expected = "a class number from 0, a word or nothing"
        raise table.wrong(row, column, expected, table.column(column)[row])
    return labels


def _bits(table: Table, columns: list[str]) -> np.ndarray:
    """Return label bits (n, T) float64 with NaN where missing."""
    bits = []
    for column in columns:
        labels = table.optional_numbers(column, "0, 1 or nothing")
        wrong = np.flatnonzero(~np.isnan(labels) & ~np.isin(labels, (MISSING, 0, 1)))
        if len(wrong):
            row = int(wrong[0])
            raise table.wrong(row, column, "0, 1 or nothing", table.column(column)[row])
        bits.append(labels)
    return np.stack(bits, axis=1)


def _edge_table(
    table: Table, ends: tuple[str, str], weight: str | None, place: dict[str, int]
) -> tuple[Table, tuple[str, str], str | None]:
    """Return the table without row numbers, and its columns of both ends and of weights.

    Raises:
        DataError: there is no such column, or no header.
    """
    table = table.without_row_numbers([*ends, *([] if weight is None else [weight])])
    renamed = [column for column in ends if column not in ENDS]
    if not {*ends} <= {*table.header} and len(table.header) == 2:
        first, second = ends = (table.header[0], table.header[1])
        if first in place and second in place:
            raise DataError(
                f"{table.path}, line 1: expected a header, got an edge between nodes {first!r} "
                f"and {second!r}: begin with the line source,target"
            )
    if weight is None:
        weight = next((column for column in WEIGHTS if column in table.header), None)
    table.check_named([*renamed, *ends, *([] if weight is None else [weight])])
    others = [column for column in table.header if column not in (*ends, weight)]
    report_unused(table.path, others)
    return table, ends, weight


def _read_edges(
    table: Table, columns: tuple[str, str], weight: str | None, place: dict[str, int], nodes: Table
) -> dict[str, np.ndarray | None]:
    """Return edges (2, E) int64 as rows of the nodes file, and their weights (E,), or None."""
    ends = []
    for column in columns:
        rows = [place.get(key) for key in table.column(column)]
        if None in rows:
            raise _edge_without_node(table, columns, column, place, nodes)
        ends.append(rows)
    weights = None if weight is None else weight_column(table, weight)
    return {"edge_index": np.array(ends, dtype=np.int64), "edge_weight": weights}


def _edge_without_node(
    table: Table, columns: tuple[str, str], column: str, place: dict[str, int], nodes: Table
) -> DataError:
    """Return the error for the first end in `column` that is no node, with the number of edges."""
    pairs = zip(*(table.column(end) for end in columns), strict=True)
    count = sum(not {*pair} <= place.keys() for pair in pairs)
    row, key = next((r, k) for r, k in enumerate(table.column(column)) if k not in place)
    remedy = (
        f"drop the {count_of(count, 'row')} with such an end, or list them in cross_edges of a "
        "silo (docs/reference/silo_folder.md)"
    )
    return table.wrong(row, column, f"an id of {nodes.path.name}", key, remedy)


def weight_column(table: Table, column: str) -> np.ndarray:
    """Return the weights of the edges of a table, (E,) float64; an empty cell counts 1.

    Raises:
        DataError: names the first cell that holds no finite number >= 0.
    """
    cells = table.column(column)
    numbers = [to_number(cell or "1") for cell in table.number_cells(column)]
    weights = np.array([np.nan if number is None else number for number in numbers])
    wrong = np.flatnonzero(~usable(weights))
    if len(wrong):
        row = int(wrong[0])
        raise table.wrong(
            row,
            column,
            f"a weight {IN_RANGE} or nothing",
            cells[row],
            "change it, or drop the column",
        )
    return weights
