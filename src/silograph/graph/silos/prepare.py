"""Raw tables as they come, made into folders of silos by a schema that all silos share.

A silo reads its own tables and the schema. Where an edge between two silos is only in the table of
its source's silo (`listed_by = "source"`), it also needs the lists that other silos hand over: each
silo writes `edges_for/OWN_to_OTHER.csv` for the others. What is fitted to a silo's columns stays in
its folder, in `prepared.json`, and prepares further tables alike (`like`).

n: rows of a table.
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from silograph.core.errors import ConfigError, DataError, mistake, nearest
from silograph.core.numeric_state import standard_numerics
from silograph.core.run_file import toml_value
from silograph.core.text import count_of, printable
from silograph.graph.partition.split import TIME
from silograph.graph.read.delimited import DecimalMark, read_delimited
from silograph.graph.read.tables import Table, read_table, usable
from silograph.graph.silos.data import DIRECTIONS, one_sided_edges
from silograph.graph.silos.export import (
    PLAIN,
    Columns,
    check_target,
    csv_text,
    write_tables,
    write_text,
)
from silograph.graph.silos.read import (
    CROSS,
    EDGES,
    FEATURES,
    FEDERATION,
    NODES,
    RATINGS,
    SPEC,
)
from silograph.graph.silos.schema import (
    COUNTED,
    BadCellError,
    Category,
    EdgeTable,
    Names,
    NodeTable,
    RatingTable,
    Reading,
    Schema,
    names_of,
    number_of,
    parse_schema,
    read_schema,
    time_of,
)

PREPARED, EDGES_FOR = "prepared.json", "edges_for"
ONE_SIDED = (
    "training refuses edges that only one silo lists: add them there, or with a schema write "
    'listed_by = "source"'
)
NO_LABELS = "no column of labels in its tables"
ENDINGS = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".parquet")
HANDED_OVER = ("table", "row", "source", "target", "weight")


# --- Tables as they come --------------------------------------------------------------------------


@dataclass(frozen=True)
class RawTable:
    """A table of text.

    Attributes:
        path: the file.
        columns: cells (n,) without spaces at their ends, by the name of the column.
        places: says where a row stands, such as `line 7`.
        decimal: the decimal mark of numbers; `unclear` where a comma may be one or may group
            thousands.
    """

    path: Path
    columns: Mapping[str, Sequence[str]]
    places: Sequence[str]
    decimal: DecimalMark

    def __len__(self) -> int:
        """Return n."""
        return len(self.places)

    def name_of(self, names: Names, purpose: str = "") -> str:
        """Return the first of the names that the table has as a column.

        Raises:
            DataError: it has none of them.
        """
        candidates = names_of(names)
        for name in candidates:
            if name in self.columns:
                return name
        listed = ", ".join(printable(name) for name in self.columns)
        near = nearest(candidates[0], list(self.columns))
        hint = f"did you mean {printable(near)!r}?" if near else "name it in the schema"
        raise DataError(
            f"{self.path}: expected a column {' or '.join(map(repr, candidates))}{purpose}, got "
            f"columns {listed}: {hint}",
            **mistake("missing-column", self.path, candidates[0]),
        )

    def cells(self, names: Names) -> Sequence[str]:
        """Return the cells of a column by one of its names."""
        return self.columns[self.name_of(names)]

    def wrong(self, row: int, column: str, reason: object) -> DataError:
        """Return the error for a cell."""
        place = f"{self.path}, {self.places[row]}, column {column!r}"
        line = int(self.places[row].rpartition(" ")[2])
        return DataError(
            f"{place}: got {self.columns[column][row]!r}, {reason}",
            **mistake("bad-cell", self.path, line, column, self.columns[column][row]),
        )


def read_raw(path: Path, reading: Reading) -> RawTable:
    """Read a table of text or a Parquet file; `reading` says how text is written.

    Raises:
        DataError: the file cannot be read, or is no table; or pyarrow is missing.
    """
    if path.suffix == ".parquet":
        table = read_table(path)
    else:
        cells = read_delimited(path, reading.separator, reading.encoding)
        table = Table(path, **vars(cells))
    table = table.without_row_numbers(())
    columns = {name: table.column(name) for name in table.header}
    return RawTable(path, columns, [f"{table.unit} {n}" for n in table.lines], table.decimal)


def find_table(folder: Path, names: Names) -> Path | None:
    """Return the file of a table in a folder by one of its names, if it is there."""
    candidates = (folder / f"{name}{ending}" for name in names_of(names) for ending in ENDINGS)
    return next((path for path in candidates if path.is_file()), None)


# --- One silo -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListedEdge:
    """An edge as a row of a table lists it.

    Attributes:
        lister: silo whose table it is.
        table: name of the table in the schema.
        row: in that table, from 0.
        source: key of one end.
        target: key of the other end.
        weight: number from 0.
    """

    lister: str
    table: str
    row: int
    source: str
    target: str
    weight: float


@dataclass(frozen=True)
class RawSilo:
    """A silo's tables, read.

    Attributes:
        name: of the silo.
        keys: (n,) of its nodes, in the order of the table.
        tables: columns of the tables of nodes and features, or of ratings, as folders have them.
        feature_names: in their order.
        listed: the edges that its own tables list.
        fitted: what was fitted, by feature.
        missing: number of cells without a value, by feature.
        notes: what was left out.
    """

    name: str
    keys: tuple[str, ...]
    tables: Mapping[str, Columns]
    feature_names: tuple[str, ...] = ()
    listed: tuple[ListedEdge, ...] = ()
    fitted: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreparedSilo:
    """What became of a silo's tables.

    Attributes:
        name: of the silo.
        folder: where they are.
        counts: in words: nodes, labels, features, edges.
        notes: what was left out, and what is to be handed over.
    """

    name: str
    folder: Path
    counts: str
    notes: tuple[str, ...]


def read_graph_silo(
    name: str, folder: Path, schema: Schema, fitted: Mapping[str, Any] | None
) -> RawSilo:
    """Read the tables of one silo of a graph.

    Args:
        name: of the silo.
        folder: its tables.
        schema: what they mean.
        fitted: what was fitted to other tables of the silo; None fits to these.

    Raises:
        DataError: names file, row and column, and how to mend it.
    """
    section = schema.nodes
    assert section is not None  # the schema is of a graph
    path = find_table(folder, section.table)
    assert path is not None  # by it the folder is known as a silo's
    table = read_raw(path, schema.reading)
    keys = _keys(table, section)
    columns: dict[str, np.ndarray] = {}
    fits: dict[str, Mapping[str, Any]] = {}
    missing: dict[str, int] = {}
    for feature_name, feature in schema.features.items():
        column = table.name_of(feature.column or feature_name, f" for feature {feature_name}")
        cells = cells_of(table, column, schema, getattr(feature, "words", ()))
        try:
            values = feature.read(cells, table.decimal)
        except BadCellError:
            for row, cell in enumerate(cells):
                try:
                    feature.read([cell], table.decimal)
                except BadCellError as error:
                    raise table.wrong(row, column, error) from None
            raise
        if fitted is not None and feature_name not in fitted:
            raise DataError(f"expected what was fitted to {feature_name}, got nothing: fit anew")
        fits[feature_name] = feature.fit(values) if fitted is None else fitted[feature_name]
        columns |= feature.columns(feature_name, values, fits[feature_name])
        missing[feature_name] = cells.count(None)
    x = np.stack([*columns.values()], axis=1) if columns else np.zeros((len(keys), 0))
    labels = _labels(table, schema, may_be_absent=fitted is not None)
    notes = (NO_LABELS,) if labels is None else ()
    labels = np.full(len(keys), "") if labels is None else labels
    nodes: dict[str, np.ndarray] = {"id": np.array(keys), "label": labels}
    if section.time is not None:
        nodes[TIME] = np.array(_times(table, section.time, section.format))
    tables: dict[str, Columns] = {NODES: nodes}
    if columns:
        tables[FEATURES] = {"id": np.array(keys), "x": x}
    listed: list[ListedEdge] = []
    for edge_name, edges in schema.edges.items():
        listed += _listed_edges(name, folder, edge_name, edges, schema)
    return RawSilo(name, tuple(keys), tables, tuple(columns), tuple(listed), fits, missing, notes)


def cells_of(
    table: RawTable, column: str, schema: Schema, words: Sequence[str] = ()
) -> list[str | None]:
    """Return the cells (n,) of a column, None where one counts as missing.

    One of `words`, which the schema lists, is a value, even if it otherwise means a missing one.
    """
    listed = {word.casefold() for word in words}
    return [
        cell if cell not in schema.missing or cell.casefold() in listed else None
        for cell in table.columns[column]
    ]


def named_by_keys(silo: RawSilo, schema: Schema) -> RawSilo:
    """Return a silo with the name that `[silos]` gives to the pattern of its keys.

    Raises:
        DataError: no pattern fits all keys, or the name is that of another pattern.
    """
    if not schema.silos:
        return silo
    fitting = [
        name
        for name, pattern in schema.silos.items()
        if all(fnmatchcase(key, pattern) for key in silo.keys)
    ]
    if silo.name in fitting:
        return silo
    if silo.name in schema.silos or len(fitting) != 1:
        known = ", ".join(f"{name} ({pattern})" for name, pattern in schema.silos.items())
        raise DataError(
            f"expected the keys of {silo.name} to fit the pattern of one silo in the schema, of "
            f"{known}, got keys such as {printable(silo.keys[0])!r}: correct the patterns, or give "
            "the silo's name"
        )
    listed = tuple(replace(edge, lister=fitting[0]) for edge in silo.listed)
    return replace(silo, name=fitting[0], listed=listed)


def _keys(table: RawTable, section: NodeTable) -> list[str]:
    column = table.name_of(section.key)
    first_row: dict[str, int] = {}
    for row, key in enumerate(table.columns[column]):
        if not key:
            raise table.wrong(row, column, "expected a key: every node needs one")
        if key in first_row:
            raise table.wrong(
                row,
                column,
                f"which {table.places[first_row[key]]} has, too: every node has one row",
            )
        first_row[key] = row
    if not first_row:
        raise DataError(f"{table.path}: expected at least one node, got none")
    return list(first_row)


def _labels(table: RawTable, schema: Schema, *, may_be_absent: bool) -> np.ndarray | None:
    """Return the names of the nodes' classes (n,), empty where not known.

    None: further tables, whose nodes are to be predicted, have no column of labels.
    """
    section = schema.nodes
    assert section is not None
    labels = np.full(len(table), "", dtype=np.object_)
    if section.label is None:
        return labels.astype(np.str_)
    if may_be_absent and not any(name in table.columns for name in names_of(section.label)):
        return None
    column = table.name_of(section.label)
    class_by_word = {name.casefold(): name for name in section.classes}
    for row, cell in enumerate(table.columns[column]):
        word = cell.casefold()
        # A column of numbers with missing cells is written as 0.0 and 1.0 by many programs.
        label = class_by_word.get(word) or class_by_word.get(word.removesuffix(".0"))
        if label is None and cell in schema.missing:
            continue
        if label is None:
            raise table.wrong(
                row, column, f"expected a class of {', '.join(section.classes)}, or nothing"
            )
        labels[row] = label
    return labels.astype(np.str_)


def _listed_edges(
    silo: str, folder: Path, name: str, edges: EdgeTable, schema: Schema
) -> Iterator[ListedEdge]:
    path = find_table(folder, edges.table or name)
    if path is None:
        raise DataError(
            f"expected the table {edges.table or name} of edges in {folder}, got none: add a file "
            f"such as {name}.csv, with a header alone if there are no edges",
            **mistake("missing-file", folder),
        )
    table = read_raw(path, schema.reading)
    sources, targets = table.cells(edges.source), table.cells(edges.target)
    weights = [1.0] * len(table)
    if edges.weight is not None:
        column = table.name_of(edges.weight)
        for row, cell in enumerate(table.columns[column]):
            try:
                weights[row] = number_of(cell, edges.decimal or table.decimal)
            except BadCellError as error:
                raise table.wrong(row, column, error) from None
            if not usable(np.array([weights[row]]))[0]:
                raise table.wrong(row, column, "expected a number from 0")
    for row, ends in enumerate(zip(sources, targets, strict=True)):
        yield ListedEdge(silo, name, row, *ends, weights[row])


def read_rating_silo(name: str, path: Path, schema: Schema) -> RawSilo:
    """Read the ratings of one silo.

    Raises:
        DataError: names file, row and column, and how to mend it.
    """
    section = schema.ratings
    assert section is not None  # the schema is of ratings
    table = read_raw(path, schema.reading)
    column = table.name_of(section.rating)
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    users, items = table.cells(section.user), table.cells(section.item)
    has_times = any(name in table.columns for name in names_of(section.time or ()))
    times = [0.0] * len(table)
    if section.time is not None and has_times:
        times = _times(table, section.time, section.format)
    for row in range(len(table)):
        value = _rating(table, row, column, section)
        if not users[row] or not items[row]:
            raise table.wrong(row, column, "expected a user and an item beside it")
        pairs.setdefault((users[row], items[row]), []).append((times[row], value))
    # Of one pair the earlier comes first; the table's order where there are no times.
    ordered = {pair: sorted(rated, key=lambda r: r[0]) for pair, rated in pairs.items()}
    columns = {
        "user": np.array([user for user, _ in pairs]),
        "item": np.array([item for _, item in pairs]),
        "rating": np.array([_chosen(rated, section.repeated) for rated in ordered.values()]),
    }
    if has_times:
        columns[TIME] = np.array([rated[-1][0] for rated in ordered.values()])
    repeated = len(table) - len(pairs)
    notes = (f"{count_of(repeated, 'repeated rating')}: {section.repeated}",) if repeated else ()
    return RawSilo(name, (), {RATINGS: columns}, notes=notes)


def _chosen(rated: Sequence[tuple[float, float]], repeated: str) -> float:
    """Return the rating of a pair that is rated several times, by the order of (time, rating)."""
    if repeated == "mean":
        return math.fsum(value for _, value in rated) / len(rated)
    return rated[-1 if repeated == "last" else 0][1]


def _times(table: RawTable, names: Names, format: str | None) -> list[float]:
    """Return the times of rows in seconds since 1970."""
    column = table.name_of(names)
    times = []
    for row, cell in enumerate(table.columns[column]):
        is_unix = cell.isdecimal() and format is None
        try:
            time = time_of(cell, "unix" if is_unix else format)
        except BadCellError as error:
            raise table.wrong(row, column, error) from None
        times.append(time.timestamp())
    return times


def _rating(table: RawTable, row: int, column: str, section: RatingTable) -> float:
    """Return the rating in a row; 4/5 is 4 where 5 is the largest."""
    low, high = section.scale
    cell, slash, most = table.columns[column][row].partition("/")
    try:
        value = number_of(cell.strip(), section.decimal or table.decimal)
        if slash and number_of(most.strip(), section.decimal or table.decimal) != high:
            raise BadCellError(f"expected a rating of at most {high:g}: correct scale")
    except BadCellError as error:
        raise table.wrong(row, column, error) from None
    if not low <= value <= high:
        raise table.wrong(row, column, f"expected {low:g} to {high:g}, as scale in the schema says")
    return value


# --- Edges of one silo, and those between silos ---------------------------------------------------


def connect_silo(
    silo: RawSilo,
    schema: Schema,
    owner_by_key: Mapping[str, str],
    received: Mapping[str, Sequence[ListedEdge]],
) -> tuple[dict[str, Columns], list[str]]:
    """Return the tables of edges of a silo, and notes on what was left out.

    Args:
        silo: its tables.
        schema: what they mean.
        owner_by_key: silos of keys, where they are known besides the patterns of the schema.
        received: edges to this silo's nodes by the silo that has handed them over.
    """
    own = set(silo.keys)
    owner_of = _owner_of(silo, schema, owner_by_key)
    left_out: Counter[str] = Counter()
    is_directed = any(table.directed for table in schema.edges.values())
    rows: dict[tuple[str, str, str, str], dict[str, list[ListedEdge]]] = {}
    for edge in chain(silo.listed, *received.values()):
        ends = sorted((edge.source, edge.target), key=lambda key: key not in own)
        near, far = ends
        if near not in own:
            left_out["between nodes that are not the silo's"] += 1
            continue
        if near == far:
            left_out["from a node to itself"] += 1
            continue
        owner = silo.name if far in own else owner_of(far)
        by_source = schema.edges[edge.table].listed_by == "source"
        if owner is None:
            left_out["to nodes of no table and no silo that the schema names"] += 1
        elif owner != silo.name and by_source and owner not in received:
            left_out[f"to {owner}, whose list is missing"] += 1
        else:
            pairs = [(edge.source, edge.target)]
            if is_directed and not schema.edges[edge.table].directed:  # it goes both ways
                pairs.append((edge.target, edge.source))
            for source, target in pairs:
                # Between silos each side has its own node first; inside one the source comes first,
                # or without directions the lesser key.
                first, second, way = source, target, ""
                if owner != silo.name:
                    first, second = near, far
                    way = DIRECTIONS[source != near] if is_directed else ""
                elif not is_directed:
                    first, second = sorted(ends)
                tables_of_edge = rows.setdefault((owner, first, second, way), {})
                tables_of_edge.setdefault(edge.table, []).append(edge)
    weighted = any(e.weight is not None or e.repeated == "count" for e in schema.edges.values())
    tables: dict[str, Columns] = {}
    for kind, names in ((EDGES, ("source", "target")), (CROSS, ("own", "silo", "remote"))):
        chosen = [pair for pair in rows if (pair[0] == silo.name) == (kind == EDGES)]
        columns = [
            [pair[1] for pair in chosen],
            *([[pair[0] for pair in chosen]] if kind == CROSS else []),
            [pair[2] for pair in chosen],
        ]
        if is_directed and kind == CROSS:
            names, columns = (*names, "direction"), [*columns, [pair[3] for pair in chosen]]
        tables[kind] = {n: np.array(c, dtype=np.str_) for n, c in zip(names, columns, strict=True)}
        if weighted:
            sums = [math.fsum(_weights(rows[pair], schema)) for pair in chosen]
            tables[kind]["weight"] = np.array(sums, dtype=np.float64)  # type: ignore[index]
    return tables, [f"left out: {count_of(n, 'edge')} {why}" for why, n in left_out.items()]


def _owner_of(silo: RawSilo, schema: Schema, owner_by_key: Mapping[str, str]) -> Any:
    """Return a function that names the silo of a key, None for none."""
    patterns = {name: pattern for name, pattern in schema.silos.items() if name != silo.name}
    owners: dict[str, str | None] = {}

    def owner_of(key: str) -> str | None:
        if key not in owners:
            by_pattern = (n for n, pattern in patterns.items() if fnmatchcase(key, pattern))
            owners[key] = owner_by_key.get(key) or next(by_pattern, None)
        return owners[key]

    return owner_of


def _weights(listed: Mapping[str, list[ListedEdge]], schema: Schema) -> Iterator[float]:
    """Yield the weight of an edge by each table; both owners get the same."""
    for name, edges in listed.items():
        table = schema.edges[name]
        ordered = sorted(edges, key=lambda edge: (edge.lister, edge.row))
        weights = [edge.weight for edge in ordered]
        if table.repeated == "count":
            yield float(len(weights))
        elif table.weight is None:
            yield 1.0
        elif table.repeated in ("sum", "mean"):
            total = math.fsum(weights)  # no order of rows changes it
            yield total / len(weights) if table.repeated == "mean" else total
        else:
            yield weights[-1 if table.repeated == "last" else 0]


def edges_for_others(
    silo: RawSilo, schema: Schema, owner_by_key: Mapping[str, str]
) -> dict[str, list[ListedEdge]]:
    """Return the listed edges that lead to nodes of each other silo, which it does not list."""
    own, owner_of = set(silo.keys), _owner_of(silo, schema, owner_by_key)
    edges_by_silo: dict[str, list[ListedEdge]] = {
        name: [] for name in schema.silos if name != silo.name
    }
    for edge in silo.listed:
        far = {edge.source, edge.target} - own
        if len(far) == 1 and schema.edges[edge.table].listed_by == "source":
            owner = owner_of(far.pop())
            if owner is not None:
                edges_by_silo.setdefault(owner, []).append(edge)
    return edges_by_silo


def read_received(path: Path, silo: RawSilo, schema: Schema) -> Iterator[ListedEdge]:
    """Yield the edges of a file that another silo has handed over.

    Raises:
        DataError: no such file, or an edge that its lister cannot know: to another silo's node, or
            from a node that the schema gives to somebody else.
    """
    table = read_raw(path, Reading())
    if tuple(table.columns) != HANDED_OVER:
        raise DataError(
            f"{path}: expected a list of edges with columns {', '.join(HANDED_OVER)}, as silograph "
            f"prepare writes them into {EDGES_FOR}, got {', '.join(table.columns)}"
        )
    lister = path.name.partition("_to_")[0]
    if lister not in schema.silos or lister == silo.name:
        raise DataError(
            f"expected a file SILO_to_{silo.name}.csv of another silo that the schema names, got "
            f"{path}: give it the name that it was written by"
        )
    own, owner_of = set(silo.keys), _owner_of(silo, schema, {})
    for number in range(len(table)):
        cells = {name: table.columns[name][number] for name in HANDED_OVER}
        far = {cells["source"], cells["target"]} - own
        if cells["table"] not in schema.edges:
            raise table.wrong(number, "table", "expected a table of edges in the schema")
        if len(far) != 1 or owner_of(next(iter(far))) != lister:
            reason = f"expected an edge between a node of {silo.name} and one of {lister}"
            raise table.wrong(number, "source", reason)
        try:
            weight, row = number_of(cells["weight"], "."), int(cells["row"])
        except (BadCellError, ValueError):
            raise table.wrong(number, "weight", "expected numbers of a row and a weight") from None
        if not usable(np.array([weight]))[0]:
            raise table.wrong(number, "weight", "expected a number from 0")
        yield ListedEdge(lister, cells["table"], row, cells["source"], cells["target"], weight)


# --- From tables to folders -----------------------------------------------------------------------


def find_silos(tables: Path, schema: Schema, name: str | None) -> dict[str, Path]:
    """Return the raw tables of each silo: a folder, or with ratings a file.

    Args:
        tables: of one silo, or a folder with those of each.
        schema: what they mean.
        name: of the silo, where there is one; None: that of the folder or file.

    Raises:
        DataError: there is no table that the schema names.
    """
    is_ratings = schema.ratings is not None
    section = schema.ratings or schema.nodes
    assert section is not None
    if is_ratings and tables.is_file():
        return {name or tables.name.partition(".")[0]: tables}
    if section.table is None:
        files = sorted(p for p in tables.glob("*") if p.name.endswith(ENDINGS))
        paths_by_silo = {path.name.partition(".")[0]: path for path in files}
    else:
        own = find_table(tables, section.table)
        if own is not None:
            return {name or tables.resolve().name: own if is_ratings else tables}
        folders = sorted(p for p in tables.glob("*") if p.is_dir())
        paths = {folder.name: find_table(folder, section.table) for folder in folders}
        paths_by_silo = {
            silo: (path if is_ratings else tables / silo) for silo, path in paths.items() if path
        }
    if not tables.exists():
        raise DataError(
            f"expected a folder of tables, got {tables}: no such folder",
            **mistake("missing-file", tables),
        )
    if not paths_by_silo:
        wanted = "tables" if section.table is None else " or ".join(names_of(section.table))
        raise DataError(
            f"expected {wanted} in {tables} or in its folders, as {', '.join(ENDINGS[:3])}, .gz or "
            "Parquet, got none: correct the path, or table in the schema",
            **mistake("missing-file", tables),
        )
    if name is not None and len(paths_by_silo) > 1:
        raise ConfigError(
            f"expected no name for {count_of(len(paths_by_silo), 'silo')}, got {name!r}"
        )
    return paths_by_silo if name is None else {name: next(iter(paths_by_silo.values()))}


@standard_numerics()
def prepare(
    tables: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    schema: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    name: str | None = None,
    received: Sequence[str | os.PathLike[str]] = (),
    format: str = "csv",
) -> tuple[PreparedSilo, ...]:
    """Make folders of silos from raw tables, by a schema that all silos share.

    Args:
        tables: folder of a silo's raw tables, or a folder with one such folder for each silo; of
            ratings also a file, or a folder with a file for each silo.
        out: folder to make: of the silo, or with a folder for each. It is there whole or not at
            all.
        schema: file of the schema; see `silograph.graph.silos.schema`.
        like: folder that was prepared before; its schema and what was fitted then count.
        name: of the silo; None: that of the folder or file.
        received: files of edges to this silo's nodes that other silos have handed over.
        format: of the tables: csv, npz or parquet.

    Returns:
        What was made, silo by silo.

    Raises:
        ConfigError: both or neither of `schema` and `like`, or something is at `out`.
        DataError: a table or schema cannot be used; names file, row and column.
    """
    if (schema is None) == (like is None):
        got = "both" if schema is not None else "neither"
        raise ConfigError(f"expected a schema, or a prepared folder to be like, got {got}")
    check_target(Path(out), format)
    rules, fitted, earlier_name = _rules(schema, like)
    _check_counted(rules, schema)
    name = name or earlier_name
    paths_by_silo = find_silos(Path(tables), rules, name)
    together = len(paths_by_silo) > 1
    if (received or like is not None) and together:
        raise ConfigError(
            "expected one silo with received edges or like, got "
            f"{count_of(len(paths_by_silo), 'silo')}"
        )
    silos = [
        named_by_keys(read_graph_silo(silo, path, rules, fitted), rules)
        if rules.nodes is not None
        else read_rating_silo(silo, path, rules)
        for silo, path in paths_by_silo.items()
    ]
    owner_by_key = {k: silo.name for silo in silos for k in silo.keys} if together else {}
    handed = {silo.name: edges_for_others(silo, rules, owner_by_key) for silo in silos}
    prepared, cross = [], dict[str, Columns]()
    target = Path(os.path.abspath(out))
    making = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        making.mkdir(mode=0o700, parents=True)
        try:
            for silo in silos:
                lists: dict[str, list[ListedEdge]] = {}
                for path in map(Path, received):
                    lister = path.name.partition("_to_")[0]
                    if lister in lists:  # its edges would count twice
                        raise ConfigError(f"expected one list of {lister}, got another in {path}")
                    lists[lister] = list(read_received(path, silo, rules))
                others = handed.items() if together else ()
                lists |= {o: edges.get(silo.name, []) for o, edges in others if o != silo.name}
                to_hand = {} if together else handed[silo.name]
                folder = _folder_name(silo.name) if together else ""
                edges = connect_silo(silo, rules, owner_by_key, lists)
                cross[silo.name] = edges[0][CROSS]
                made = _write_silo(making / folder, silo, rules, edges, to_hand, format)
                prepared.append(replace(made, folder=Path(out) / folder))
            if together:
                folders = ", ".join(toml_value(_folder_name(silo.name)) for silo in silos)
                text = f"name = {toml_value(Path(tables).resolve().name)}\nsilos = [{folders}]\n"
                write_text(making / FEDERATION, text)
            making.rename(target)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"expected to make the folder {out}, got: {error.strerror}",
            **mistake("unwritable-path", out),
        ) from None
    return tuple(_with_one_sided(prepared, cross))


def _with_one_sided(
    prepared: Sequence[PreparedSilo], cross: Mapping[str, Columns]
) -> Iterator[PreparedSilo]:
    """Yield silos with notes on edges to others that these do not list, by tables of such edges."""
    edges = {
        silo: zip(
            *(columns[name].tolist() for name in ("own", "silo", "remote")),
            columns.get("direction", np.full(len(columns["own"]), "")).tolist(),
            strict=True,
        )
        for silo, columns in cross.items()
    }
    counts = one_sided_edges(edges)
    for silo in prepared:
        notes = tuple(
            f"{count_of(number, 'edge')} to {other} that its table does not list: {ONE_SIDED}"
            for (lister, other), number in sorted(counts.items())
            if lister == silo.name
        )
        yield replace(silo, notes=(*silo.notes, *notes))


def _rules(
    schema: str | os.PathLike[str] | None, like: str | os.PathLike[str] | None
) -> tuple[Schema, Mapping[str, Any] | None, str | None]:
    """Return the schema, and what was fitted to the tables of an earlier folder and its silo."""
    if schema is not None:
        return read_schema(Path(schema)), None, None
    path = Path(str(like)) / PREPARED
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        text, fitted, silo = saved["schema"], saved["fitted"], saved["silo"]
        if not (isinstance(text, str) and isinstance(fitted, Mapping) and isinstance(silo, str)):
            raise ValueError("a schema as text and fitted values are expected")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: expected what silograph prepare has written, got: {error}",
            **mistake("damaged-file", path),
        ) from None
    return parse_schema(text, str(path)), fitted, silo


def _check_counted(rules: Schema, schema: str | os.PathLike[str] | None) -> None:
    """Raise `DataError` for a category whose values are still to be counted."""
    for name, feature in rules.features.items():
        if isinstance(feature, Category) and feature.values == COUNTED:
            raise DataError(
                f"{schema}: expected the words of {name}, got values that are still to be counted: "
                f"run silograph prepare TABLES --schema {schema} --count-categories FILE at each "
                f"silo, then silograph prepare --schema {schema} --categories FILE of each silo > "
                "shared.toml"
            )


def _folder_name(silo: str) -> str:
    if not PLAIN.fullmatch(silo) or silo == FEDERATION:
        raise DataError(f"expected letters, digits, _, - and . as the name of a silo, got {silo!r}")
    return silo


def _write_silo(
    folder: Path,
    silo: RawSilo,
    schema: Schema,
    edges: tuple[Mapping[str, Columns], Sequence[str]],
    to_hand: Mapping[str, Sequence[ListedEdge]],
    format: str,
) -> PreparedSilo:
    """Write the folder of a silo."""
    folder.mkdir(mode=0o700, exist_ok=True)
    tables, notes = edges
    is_graph = schema.nodes is not None
    write_tables(
        folder, {**silo.tables, **(tables if is_graph else {})}, format, silo.feature_names
    )
    write_text(folder / SPEC, _spec(silo, schema))
    saved = {"silo": silo.name, "schema": schema.text, "fitted": silo.fitted}
    write_text(folder / PREPARED, json.dumps(saved, indent=1) + "\n")
    gaps = {feature: number for feature, number in silo.missing.items() if number}
    notes = [
        *(f"{feature}: {count_of(number, 'missing value')}" for feature, number in gaps.items()),
        *silo.notes,
        *notes,
    ]
    for other, listed in to_hand.items():
        (folder / EDGES_FOR).mkdir(mode=0o700, exist_ok=True)
        name = f"{_folder_name(silo.name)}_to_{_folder_name(other)}.csv"
        handed = {n: np.array([getattr(edge, n) for edge in listed]) for n in HANDED_OVER}
        write_text(folder / EDGES_FOR / name, csv_text(handed))
        notes.append(f"{count_of(len(listed), 'edge')} for {other} in {EDGES_FOR}/{name}")
    if not is_graph:
        ratings = silo.tables[RATINGS]
        counts = (
            f"{count_of(len(ratings['rating']), 'rating')} of "
            f"{count_of(len(set(ratings['user'])), 'user')} and "
            f"{count_of(len(set(ratings['item'])), 'item')}"
        )
        return PreparedSilo(silo.name, folder, counts, tuple(notes))
    labeled = int((silo.tables[NODES]["label"] != "").sum())
    counts = (
        f"{count_of(len(silo.keys), 'node')}, {labeled} labeled, "
        f"{count_of(len(silo.feature_names), 'feature')}, "
        f"{count_of(len(tables[EDGES]['source']), 'edge')}, "
        f"{len(tables[CROSS]['own'])} to other silos"
    )
    return PreparedSilo(silo.name, folder, counts, tuple(notes))


def _spec(silo: RawSilo, schema: Schema) -> str:
    """Return the text of a silo.toml."""
    name = f"name = {toml_value(silo.name)}\n"
    if schema.ratings is not None:
        low, high = schema.ratings.scale
        return f'{name}task = "rating"\nscale = [{low!r}, {high!r}]\n'
    assert schema.nodes is not None
    classes = ", ".join(toml_value(word) for word in schema.nodes.classes)
    is_directed = any(table.directed for table in schema.edges.values())
    text = f"{name}features = {len(silo.feature_names)}\nclasses = [{classes}]\n"
    text += "directed = true\n" * is_directed
    numbers = [f"{toml_value(feature)} = {n}\n" for feature, n in silo.missing.items()]
    return text + "".join(["\n[missing]  # cells without a value\n", *numbers] if numbers else [])
