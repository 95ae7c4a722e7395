"""A silo's folder: one description and four tables.

silo.toml       name, features (how many), classes (their names, or how many), and if need be
                task, keys, sparse, repeated_edges, directed, [columns]
nodes           id, label, split, time; the order of its rows is that of the client's rows
features        id and one column a feature; sparse: id, feature, value; absent for features = 0
edges           source, target: internal edges; perhaps weight, a number >= 0
cross_edges     own, silo, remote: an own node's edge to a node of another silo, by its key there;
                perhaps weight, of which both silos say the same; with directed = true also
                direction: out where the edge leads to the remote node, in where it leads here

A silo with `task = "rating"` has two tables in place of these:

ratings         user, item, rating; perhaps split and time, and others that are not used
trust           truster, trustee: users of the silo; may be absent

A table is a .csv, .tsv, .npz or .parquet file; text may be packed by gzip (.csv.gz).
"""

import math
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import scipy.sparse as sp
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT, checked
from silograph.core.errors import (
    ConfigError,
    DataError,
    mistake,
    read_mistake,
    reword_error,
    unknown,
)
from silograph.core.numeric_state import standard_numerics
from silograph.core.text import short_repr
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Features, Split
from silograph.graph.partition.split import TIME
from silograph.graph.read.arrays import PARTS, features_of, split_of
from silograph.graph.read.columns import (
    integer_ids,
    is_whole,
    missing_values,
    report_counting_features,
)
from silograph.graph.read.contents import ending_of
from silograph.graph.read.csv import weight_column
from silograph.graph.read.npz import sparse
from silograph.graph.read.ratings import OF_TRUST, RATING_COLUMNS, ratings
from silograph.graph.read.tables import (
    FORMATS,
    RepeatedEdges,
    Table,
    combine_repeated,
    read_arrays,
    read_table,
    weights_by_direction,
    weights_of,
)
from silograph.graph.silos.data import DIRECTIONS, CrossEdges, Silo, Silos

# --- silo.toml: what the tables of a silo's folder mean ------------------------------------------


SPEC, SECRET = "silo.toml", "secret"  # files of a silo's folder besides its tables
NODES, FEATURES, EDGES, CROSS = "nodes", "features", "edges", "cross_edges"
COLUMNS = (
    *("id", "label", "split", TIME, "feature", "value"),
    *("source", "target", "own", "silo", "remote", "weight", "direction"),
)
RATINGS, TRUST = "ratings", "trust"  # tables of a silo with ratings
OF_RATINGS = {"features": 2, "classes": 1}  # whether a node is a user or an item; one number
TASKS = ("multiclass", "multilabel", "rating")
IN_TOML = f"say so under [columns] of {SPEC}"


@dataclass(frozen=True, config=STRICT, kw_only=True)
class SiloSpec:
    """The contents of silo.toml.

    Attributes:
        name: of the silo in the federation; other silos use it in their cross-silo edges.
        features: number of features of a node; 0: there is no table of features.
        classes: the label set: names in their order, or how many numbers from 0.
        task: `multiclass`, or `multilabel` with a column of 0 and 1 for each of the classes:
            label_0, label_1, ...; or `rating`, with tables of ratings and trust in place of nodes
            and edges.
        keys: `text`, or `integer` for keys that count as numbers in random draws.
        sparse: whether features are given, and held, as the entries that are not 0.
        columns: what a table calls a column that has another name here.
        na_values: words or numbers that count as missing besides the usual ones.
        repeated_edges: what an edge weighs that the tables of edges list several times, as
            `from_arrays` takes it; None: no edge is, but an internal one may be in both directions,
            which means its mean.
        directed: whether edges lead from source to target, which runs with `directed` read.
        scale: least and largest rating.
        partition_hash: of the cut that the folder was written from, as result folders have it; None
            where the silo's data are its own.
        missing: number of cells without a value by feature, in the raw tables that `silograph
            prepare` made the folder of.
    """

    name: Annotated[str, Field(min_length=1)]
    features: Annotated[int, Field(ge=0, lt=2**31)]
    classes: Annotated[int, Field(ge=1)] | Annotated[tuple[str, ...], Field(min_length=1)]
    task: Literal["multiclass", "multilabel", "rating"] = "multiclass"
    keys: Literal["text", "integer"] = "text"
    sparse: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    na_values: tuple[str | int | float, ...] = ()
    repeated_edges: RepeatedEdges | None = None
    directed: bool = False
    scale: tuple[float, float] = (1.0, 5.0)
    partition_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    missing: Mapping[str, Annotated[int, Field(ge=0)]] = field(default_factory=dict)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, empty where they are numbers."""
        return () if isinstance(self.classes, int) else self.classes

    @property
    def num_classes(self) -> int:
        """Number of classes, or of label bits."""
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    def column_names(self, *names: str) -> list[str]:
        """Return the names that the columns have in this silo's tables."""
        return [self.columns.get(name, name) for name in names]

    def read_table(self, path: Path, *column_names: str) -> Table:
        """Return a table without columns that only number its rows.

        Args:
            path: the file.
            column_names: columns of the table, by their names here.
        """
        table = read_table(path, missing_values(self.na_values))
        return table.without_row_numbers(self.column_names(*column_names))


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        DataError: it is missing or no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{path}: expected what the tables mean, got {error.strerror}: see "
            "docs/reference/silo_folder.md",
            **read_mistake(error, path),
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: expected TOML, got: {error}", **mistake("wrong-format", path)
        ) from None


def read_spec(path: Path) -> SiloSpec:
    """Read and check a silo.toml.

    Raises:
        DataError: names the file, and the key.
    """
    values = read_toml(path)
    _check_task(path, values)
    if values.get("task") == "rating":
        values = {**OF_RATINGS, **values}
    for name in ("name", "features", "classes"):
        if name not in values:
            raise DataError(
                f"{path}: expected name, features and classes, got no {name}: add a line such as "
                + {"name": 'name = "north"', "features": "features = 12"}.get(name, "classes = 2")
            )
    try:
        spec = checked(SiloSpec, values, SPEC)
    except ConfigError as error:
        raise reword_error(error, f"{path}: {error}", DataError) from None
    fixed_values = {name: getattr(spec, name) for name in OF_RATINGS}
    further = spec.sparse or spec.na_values or spec.repeated_edges or spec.directed
    if spec.task == "rating" and (fixed_values != OF_RATINGS or further):
        raise DataError(
            f"{path}: expected name, task and perhaps scale and [columns] of a silo with ratings, "
            "got more: drop it"
        )
    low, high = spec.scale
    if not -math.inf < low < high < math.inf:
        raise DataError(f"{path}: expected scale = [least, largest], got [{low:g}, {high:g}]")
    valid_names = RATING_COLUMNS if spec.task == "rating" else COLUMNS
    for name in spec.columns:
        if name not in valid_names and (spec.task == "rating" or not name.startswith("label_")):
            unknown_name = unknown("column under [columns]", name, valid_names)
            raise reword_error(unknown_name, f"{path}: {unknown_name}", DataError)
    if len(set(spec.class_names)) < len(spec.class_names) or "" in spec.class_names:
        raise DataError(f"{path}: expected distinct names as classes, got {list(spec.class_names)}")
    return spec


def _check_task(path: Path, values: Mapping[str, Any]) -> None:
    """Raise `DataError` for an unknown task or scale, or for tables of ratings without a task."""
    task, scale = values.get("task", TASKS[0]), values.get("scale", [1, 5])
    if task not in TASKS:
        error = unknown("task", str(task), TASKS)
        raise reword_error(error, f"{path}: {error}", DataError)
    if "task" not in values and any(path.parent.glob(f"{RATINGS}.*")):
        raise DataError(
            f'{path}: expected task = "rating" beside a table of ratings, got none: add this line'
        )
    numbers = isinstance(scale, list) and len(scale) == 2
    if not numbers or not all(type(end) in (int, float) for end in scale):
        raise DataError(
            f"{path}: expected scale = [least, largest], such as [0.5, 5], got {short_repr(scale)}"
        )


def only(table: Table, columns: Collection[str]) -> None:
    """Raise `DataError` for unknown columns: one of them may be a misspelt label."""
    for name in table.header:
        if name not in columns:
            error = unknown("column", name, columns)
            line = f"{table.head}: {error} (rename it, {IN_TOML}, or drop it)"
            raise reword_error(error, line, DataError)


# --- The features of a silo's nodes, from its table of features ----------------------------------
#
# n: nodes. F: features.


_DENSE = ("x",)
_SPARSE = ("x_data", "x_indices", "x_indptr", "x_shape")
_NAMES = "names"


def read_features(
    path: Path, spec: SiloSpec, place: Mapping[str, int]
) -> tuple[Features, tuple[str, ...]]:
    """Return the features (n, F) of a silo's nodes, and their names where they have some.

    Args:
        path: the table. An .npz file holds no keys: x (n, F), or x_data, x_indices, x_indptr and
            x_shape, with a row for each node in the order of the table of nodes.
        spec: what it means.
        place: the row of every key.

    Raises:
        DataError: names file, line and how to mend it.
    """
    if ending_of(path) == ".npz":
        return _features_from_arrays(path, spec, len(place))
    table = spec.read_table(path, "id", *(("feature", "value") if spec.sparse else ()))
    if spec.sparse:
        return _features_from_entries(table, spec, place), ()
    (id,) = spec.column_names("id")
    rows = _feature_rows(table, id, place)
    names = [name for name in table.header if name != id]
    if len(names) != spec.features:
        raise DataError(
            f"{table.head}: expected {spec.features} columns of features besides {id!r}, as "
            f"{SPEC} says, got {len(names)}: add or drop columns, or correct {SPEC}"
        )
    values = table.numbers(names)
    x = np.empty_like(values)
    x[rows] = values
    report_counting_features(path, values, names)
    return torch.from_numpy(x), tuple(names)


def _feature_rows(table: Table, column: str, place: Mapping[str, int]) -> list[int]:
    """Return the row of each key; the keys must be those of all nodes, each once."""
    row_by_key: dict[str, int] = {}
    for row, key in enumerate(table.column(column, IN_TOML)):
        if key not in place:
            raise table.wrong(
                row, column, f"a key of {NODES}", key, "add the node, or drop the row"
            )
        if key in row_by_key:
            first = f"{table.unit} {table.lines[row_by_key[key]]}"
            raise table.wrong(row, column, f"a key not yet on {first}", key, "drop one of them")
        row_by_key[key] = row
    missing_key = next((key for key in place if key not in row_by_key), None)
    if missing_key is not None:
        raise DataError(
            f"{table.path}: expected features of every node, got none of {missing_key!r}: add a row"
        )
    return [place[key] for key in row_by_key]


def _features_from_entries(table: Table, spec: SiloSpec, place: Mapping[str, int]) -> CSR:
    """Return the features of rows of node, feature, value; all others are 0."""
    id, feature, value = spec.column_names("id", "feature", "value")
    only(table, (id, feature, value))
    row_by_entry: dict[tuple[int, int], int] = {}
    cells = zip(table.column(id, IN_TOML), table.column(feature, IN_TOML), strict=True)
    for row, (key, cell) in enumerate(cells):
        if key not in place:
            raise table.wrong(row, id, f"a key of {NODES}", key, "add the node, or drop the row")
        if not (cell.isascii() and cell.isdigit() and int(cell) < spec.features):
            remedy = f"correct it, or features in {SPEC}"
            expected = f"a feature 0..{spec.features - 1}"
            raise table.wrong(row, feature, expected, cell, remedy)
        entry = (place[key], int(cell))
        if entry in row_by_entry:
            first = f"{table.unit} {table.lines[row_by_entry[entry]]}"
            expected = f"a feature of {key!r} not yet on {first}"
            raise table.wrong(row, feature, expected, cell, "drop one of them")
        row_by_entry[entry] = row
    table.column(value, IN_TOML)
    pairs = np.array(list(row_by_entry), dtype=np.int64).reshape(-1, 2).T
    values = table.numbers([value])[:, 0]
    return CSR.from_scipy(sp.coo_matrix((values, tuple(pairs)), (len(place), spec.features)))


def _features_from_arrays(path: Path, spec: SiloSpec, n: int) -> tuple[Features, tuple[str, ...]]:
    """Return the features in an .npz file, and their names where it has some."""
    expected_keys = _SPARSE if spec.sparse else _DENSE
    expected = f"{', '.join(expected_keys)}, as sparse = {str(spec.sparse).lower()} in {SPEC} says"

    def choose(keys: set[str]) -> tuple[str, ...]:
        if keys - {_NAMES} != set(expected_keys):
            got = ", ".join(sorted(keys)) or "none"
            raise DataError(f"{path}: expected {expected}, got {got}: write these, or correct it")
        return (*expected_keys, *(keys & {_NAMES}))

    parts = read_arrays(path, expected, choose)
    names = np.atleast_1d(parts.get(_NAMES, np.empty(0, np.str_)))
    if names.dtype.kind != "U" or names.ndim > 1 or len(names) not in (0, spec.features):
        raise DataError(
            f"{path}: expected {spec.features} names of features as text, got {short_repr(names)}: "
            f"correct {_NAMES}, or leave it out"
        )
    try:
        x = features_of(
            sparse(path, [parts[key] for key in _SPARSE]) if spec.sparse else parts["x"],
            missing_values(spec.na_values),
        )
    except DataError as error:
        raise DataError(
            f"{path}: {str(error).removeprefix(f'{path}: ')}", **mistake("wrong-format", path)
        ) from None
    shape = (x.num_rows, x.num_cols) if isinstance(x, CSR) else tuple(x.shape)
    if shape != (n, spec.features):
        raise DataError(
            f"{path}: expected features of shape {(n, spec.features)}, by {NODES} and {SPEC}, got "
            f"{shape}: one row a node, or correct {SPEC}"
        )
    if not isinstance(x, CSR):
        report_counting_features(path, x.numpy(), names.tolist())
    return x, tuple(names.tolist())


FEDERATION = "federation.toml"


def is_silo(path: Path) -> bool:
    """Whether a path is the folder of one silo."""
    return (path / SPEC).is_file()


def is_silos(path: Path) -> bool:
    """Whether a path is a folder with the folders of silos."""
    return (path / FEDERATION).is_file() or any(path.glob(f"*/{SPEC}"))


def silos_have_ratings(path: Path) -> bool:
    """Whether the silos of a folder hold ratings, as the first silo.toml says."""
    first = min(path.glob(f"*/{SPEC}"), default=None)
    try:
        return first is not None and read_toml(first).get("task") == "rating"
    except DataError:  # `read_silos` says what is wrong with it
        return False


def silos_files(path: Path) -> list[Path]:
    """Return the files that `read_silos` may read, ascending; silos may keep others there."""
    names = [
        SPEC,
        *(f"{s}{e}" for s in (NODES, FEATURES, EDGES, CROSS, RATINGS, TRUST) for e in FORMATS),
    ]
    candidates = [path / FEDERATION, *(file for name in names for file in path.glob(f"*/{name}"))]
    return sorted(file for file in candidates if file.is_file())


@standard_numerics()
def read_silos(path: str | os.PathLike[str]) -> Silos:
    """Return all silos of a folder that holds a folder for each.

    Their order is that of `silos` in federation.toml, which lists folders; without that file it
    is that of their names.

    Raises:
        DataError: names file, line and how to mend it.
    """
    path = Path(path)
    order, about = path / FEDERATION, {}
    folders = sorted(file.parent for file in path.glob(f"*/{SPEC}"))
    if order.is_file():
        about = read_toml(order)
        folders = _listed_folders(order, about)
    else:
        _check_undescribed_folders(path)
    if not folders:
        raise DataError(
            f"expected a folder with a folder for each silo, each with a {SPEC}, got {path}",
            **mistake("missing-file", path),
        )
    members = [read_silo(folder) for folder in folders]
    names = [silo.name for silo in members]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise DataError(
                f"{folders[place] / SPEC}: expected a name of its own, got {name!r}, as in "
                f"{folders[names.index(name)] / SPEC}: rename one of them"
            )
    if not order.is_file():
        members.sort(key=lambda silo: silo.name)
    return Silos(str(about.get("name", path.resolve().name)), tuple(members))


def _check_undescribed_folders(path: Path) -> None:
    """Raise `DataError` for a folder with a silo's tables but without a silo.toml."""
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir()):
        if not is_silo(folder) and (_files(folder, NODES) or _files(folder, RATINGS)):
            raise DataError(
                f"{folder}: expected {SPEC} beside the tables of a silo, got none: write it (see "
                f"docs/reference/silo_folder.md), or list the folders of the silos in "
                f"{path / FEDERATION}",
                **mistake("missing-file", folder / SPEC),
            )


def _listed_folders(order: Path, about: Mapping[str, Any]) -> list[Path]:
    """Return the folders that federation.toml lists."""
    for key in about:
        if key not in ("name", "silos"):
            error = unknown("key", key, ("name", "silos"))
            raise reword_error(error, f"{order}: {error}", DataError)
    names = about.get("silos")
    is_list_of_names = isinstance(names, list) and all(
        isinstance(name, str) and name for name in names
    )
    if not is_list_of_names or not names or not isinstance(about.get("name", ""), str):
        raise DataError(
            f'{order}: expected silos = ["FOLDER", ...] and a text as name, got '
            f"{dict(about)!r}: list each silo's folder"
        )
    return [order.parent / name for name in names]


@standard_numerics()
def read_silo(path: str | os.PathLike[str]) -> Silo:
    """Return the data of one silo from its folder; see the head of this module.

    Raises:
        DataError: names file, line (of other files than CSV the row, from 0) and how to mend it.
    """
    path = Path(path)
    if not path.is_dir():
        raise DataError(
            f"expected the folder of a silo, got {path}: no such folder",
            **mistake("missing-file", path),
        )
    subfolders = sorted(file.parent.name for file in path.glob(f"*/{SPEC}"))
    if subfolders and not is_silo(path):
        some = ", ".join([*subfolders[:3], *["..."] * (len(subfolders) > 3)])
        raise DataError(
            f"expected the folder of a silo, got {path}, which holds folders of silos: name one of "
            f"them ({some})",
            **mistake("wrong-format", path),
        )
    spec = read_spec(path / SPEC)
    if spec.task == "rating":
        return _rating_silo(path, spec)
    # Nodes: keys, labels and split.
    label = ["label"]
    if spec.task == "multilabel":
        label = [f"label_{bit}" for bit in range(spec.num_classes)]
    nodes = spec.read_table(_file(path, NODES), "id", *label, "split", TIME)
    id, split, time = spec.column_names("id", "split", TIME)
    labels = spec.column_names(*label)
    only(nodes, (id, *labels, split, time))
    times = torch.from_numpy(nodes.times(time)) if time in nodes.header else None
    place = _places(nodes, id, spec)
    y, masks = _labels(nodes, labels, spec), _split(nodes, split)
    # Features and edges name nodes by their keys.
    x, names = _features(path, spec, place)
    adj, weight, directed_weight = _internal(_file(path, EDGES), spec, place)
    return Silo(
        name=spec.name,
        node_id=_as_key_array(list(place), spec),
        x=x,
        y=y,
        num_classes=spec.num_classes,
        class_names=spec.class_names,
        feature_names=names,
        split=masks,
        adj=adj,
        cross=_cross(_file(path, CROSS), spec, place),
        edge_weight=weight,
        directed_weight=directed_weight,
        time=times,
        time_name=time,
        missing=spec.missing,
    )


def _rating_silo(path: Path, spec: SiloSpec) -> Silo:
    """Return a silo of its tables of ratings and, if it has one, of trust."""
    trust = _file(path, TRUST) if _files(path, TRUST) else None
    of_nothing = [name for name in OF_TRUST if trust is None and name in spec.columns]
    if of_nothing:
        raise DataError(
            f"{path / SPEC}: expected a table trust for column {of_nothing[0]} under [columns], "
            "got none: leave it out"
        )
    graph = ratings(
        _file(path, RATINGS),
        trust=trust,
        scale=spec.scale,
        repeated="refuse",
        unrated="drop",
        columns=spec.columns,
    )
    nothing = torch.zeros(0, dtype=torch.int64)
    return Silo(
        name=spec.name,
        node_id=graph.node_id,
        x=graph.x,
        y=graph.y,
        num_classes=1,
        class_names=(),
        feature_names=(),
        split=graph.split,
        adj=graph.adj,
        cross=CrossEdges(nothing, nothing, (), np.array([], dtype=np.str_)),
        scale=spec.scale,
        time=graph.columns.get(TIME),
    )


def _features(
    path: Path, spec: SiloSpec, place: Mapping[str, int]
) -> tuple[Features, tuple[str, ...]]:
    """Return the features (n, F) and their names; (n, 0) if silo.toml says that there are none."""
    if spec.features:
        return read_features(_file(path, FEATURES), spec, place)
    files = _files(path, FEATURES)
    if files or spec.sparse:
        got = files[0].name if files else "sparse = true"
        raise DataError(
            f"{path / SPEC}: expected no table of features with features = 0, got {got}: drop it, "
            "or say how many features a node has"
        )
    return torch.zeros(len(place), 0), ()


def _files(path: Path, stem: str) -> list[Path]:
    """Return the files of a table."""
    candidates = [path / f"{stem}{ending}" for ending in FORMATS]
    return [file for file in candidates if file.is_file()]


def _file(path: Path, stem: str) -> Path:
    """Return the one file of a table."""
    files = _files(path, stem)
    if len(files) == 1:
        return files[0]
    got = " and ".join(file.name for file in files)
    remedy = "keep one of them" if files else "one with the header line alone will do for no rows"
    raise DataError(
        f"expected one of {', '.join(stem + ending for ending in FORMATS)} in {path}, "
        f"got {got or 'none'}: {remedy}",
        **mistake("missing-file", path),
    )


def _places(table: Table, column: str, spec: SiloSpec) -> dict[str, int]:
    """Return the row of every key."""
    place: dict[str, int] = {}
    for row, key in enumerate(table.column(column, IN_TOML)):
        if not key:
            raise table.wrong(row, column, "a key", key, "every node needs one")
        if key in place:
            first = f"{table.unit} {table.lines[place[key]]}"
            raise table.wrong(row, column, f"a key not yet on {first}", key, "drop one of them")
        if spec.keys == "integer" and not _is_integer(key):
            raise table.wrong(
                row, column, "a key written as a 64-bit integer", key, f'or keys = "text" in {SPEC}'
            )
        place[key] = row
    if not place:
        raise DataError(f"{table.path}: expected at least one node, got none")
    return place


def _is_integer(key: str) -> bool:
    """Whether a key reads the same written as a 64-bit integer, signed or unsigned."""
    return is_whole(key) and -(2**63) <= int(key) < 2**64


def _labels(table: Table, columns: Sequence[str], spec: SiloSpec) -> Tensor:
    """Return labels (n,) or (n, T) int64; all are missing without a column."""
    if not set(columns) & set(table.header):
        shape = (len(table.rows),) if spec.task == "multiclass" else (len(table.rows), len(columns))
        return torch.full(shape, MISSING)
    words = [str(number) for number in range(spec.num_classes)]
    words = list(spec.class_names) or words
    if spec.task == "multilabel":
        words = ["0", "1"]
    number = {word: i for i, word in enumerate(words)}
    number[""] = MISSING
    if not (spec.class_names and spec.task == "multiclass"):
        number[str(MISSING)] = MISSING
    values = []
    for column in columns:
        cells = table.column(column, IN_TOML)
        for row, cell in enumerate(cells):
            if cell not in number and cell in table.missing:
                number[cell] = MISSING
            if cell not in number:
                examples = ", ".join(words[:9]) + ", ..." * (len(words) > 9)
                remedy = "" if spec.task == "multilabel" else f"name it in classes of {SPEC}, too"
                raise table.wrong(row, column, f"a label of {examples} or nothing", cell, remedy)
        values.append([number[cell] for cell in cells])
    y = torch.tensor(values, dtype=torch.int64)
    return y[0] if spec.task == "multiclass" else y.T.contiguous()


def _split(table: Table, column: str) -> Split | None:
    if column not in table.header:
        return None
    return split_of(table.words(column, PARTS, empty=True))


def _rows(table: Table, column: str, place: Mapping[str, int]) -> list[int]:
    """Return the rows of own keys."""
    rows = []
    for row, key in enumerate(table.column(column, IN_TOML)):
        if key not in place:
            remedy = "add the node, or drop the edge"
            raise table.wrong(row, column, f"a key of {NODES}", key, remedy)
        rows.append(place[key])
    return rows


def _internal(
    path: Path, spec: SiloSpec, place: Mapping[str, int]
) -> tuple[CSR, Tensor | None, Tensor | None]:
    """Return internal edges, both directions, their weights, and those by direction.

    They are listed once or both ways, or as often as `repeated_edges` combines them.
    """
    table = spec.read_table(path, "source", "target", "weight")
    source, target, weight = spec.column_names("source", "target", "weight")
    only(table, (source, target, weight))
    ends = [_rows(table, column, place) for column in (source, target)]
    row_by_edge: dict[tuple[int, int], int] = {}
    for row, edge in enumerate(zip(*ends, strict=True)):
        if edge[0] == edge[1]:
            key = table.column(source)[row]
            raise table.wrong(row, target, "another node", key, "drop the edge to itself")
        if spec.repeated_edges is None:
            _add_edge_once(table, target, row_by_edge, edge, row)
    pairs = np.array(ends, dtype=np.int64)
    adj = CSR.directions(pairs, len(place))
    weights = weight_column(table, weight) if weight in table.header else None
    listed = (adj, pairs, weights, table.path, spec.repeated_edges or "mean")
    both = weights_by_direction(*listed) if spec.directed else (weights_of(*listed), None)
    return replace(adj, values=None), *both


def _add_edge_once(
    table: Table, column: str, row_by_edge: dict[Any, int], edge: Any, row: int
) -> None:
    if edge in row_by_edge:
        first = f"{table.unit} {table.lines[row_by_edge[edge]]}"
        got = table.rows[row][table.header.index(column)]
        raise table.wrong(row, column, f"an edge not yet on {first}", got, "drop one of them")
    row_by_edge[edge] = row


def _cross(path: Path, spec: SiloSpec, place: Mapping[str, int]) -> CrossEdges:
    names = ["own", "silo", "remote", "weight", *(["direction"] if spec.directed else [])]
    table = spec.read_table(path, *names)
    own, silo, remote, weight, *direction = spec.column_names(*names)
    only(table, (own, silo, remote, weight, *direction))
    ways = [""] * len(table.rows)
    if spec.directed and table.rows:
        table.column(direction[0], f"expected with directed = true of {SPEC}, or {IN_TOML}")
        ways = table.words(direction[0], DIRECTIONS)
    rows = _rows(table, own, place)
    slot_of: dict[tuple[str, str], int] = {}
    slots, row_by_edge = [], dict[tuple[int, int, str], int]()
    others, keys = (table.column(column, IN_TOML) for column in (silo, remote))
    for row, other in enumerate(zip(others, keys, strict=True)):
        for column, cell in zip((silo, remote), other, strict=True):
            if not cell:
                raise table.wrong(row, column, "a silo and a key there", cell, "fill the cell")
        if other[0] == spec.name:
            remedy = f"list the edge in {EDGES}"
            raise table.wrong(row, silo, "the name of another silo", other[0], remedy)
        slots.append(slot_of.setdefault(other, len(slot_of)))
        edge = (rows[row], slots[row], ways[row])
        if spec.repeated_edges is None or edge not in row_by_edge:
            _add_edge_once(table, remote, row_by_edge, edge, row)
        elif spec.repeated_edges in ("first", "last"):
            raise DataError(
                f"{table.where(row)}: expected each edge between silos once with repeated_edges = "
                f"{spec.repeated_edges!r}, as each silo lists them in its own order, got another: "
                "drop one of them, or use mean, sum or count"
            )
    weights = weight_column(table, weight) if weight in table.header else np.ones(len(rows))
    directed_weight = None
    if spec.repeated_edges is not None or spec.directed:
        listed = np.array([rows, slots], dtype=np.int64).reshape(2, -1)
        once = np.array(list(dict.fromkeys(edge[:2] for edge in row_by_edge)), dtype=np.int64)
        once = once.reshape(-1, 2).T
        numbers = [ends[0] * len(slot_of) + ends[1] for ends in (listed, once)]
        rule = spec.repeated_edges or "mean"
        if spec.directed:
            directed_weight = _weights_by_direction(numbers, ways, weights, rule, table.path)
            # Each silo lists the two directions in its own order.
            rule = "mean" if rule in ("first", "last") else rule
        pairs, combined = combine_repeated(numbers[0], weights, rule, table.path)
        weights = combined[np.searchsorted(pairs, numbers[1])]
        rows, slots = once.tolist()
    all_weigh_1 = (weights == 1).all()
    if directed_weight is not None:
        all_weigh_1 = all_weigh_1 and (directed_weight.nan_to_num(1) == 1).all()
    return CrossEdges(
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(slots, dtype=torch.int64),
        tuple(name for name, _ in slot_of),
        _as_key_array([key for _, key in slot_of], spec),
        None if all_weigh_1 else torch.from_numpy(weights),
        directed_weight,
    )


def _weights_by_direction(
    numbers: Sequence[np.ndarray],
    ways: Sequence[str],
    weights: np.ndarray,
    rule: RepeatedEdges,
    path: Path,
) -> Tensor:
    """Return the weight of cross-silo edges to the remote node and from it, (X, 2), NaN for none.

    Args:
        numbers: (E,) of each edge as listed, and (X,) of each once.
        ways: (E,) of `DIRECTIONS`.
        weights: (E,).
        rule: for edges that are listed several times in a direction.
        path: of the table.
    """
    directed_weight = np.full((len(numbers[1]), len(DIRECTIONS)), np.nan)
    for column, direction in enumerate(DIRECTIONS):
        is_listed = np.array([way == direction for way in ways], dtype=np.bool_)
        pairs, combined = combine_repeated(
            numbers[0][is_listed], weights[is_listed], rule, path, warn=False
        )
        directed_weight[np.isin(numbers[1], pairs), column] = combined[
            np.searchsorted(pairs, numbers[1][np.isin(numbers[1], pairs)])
        ]
    return torch.from_numpy(directed_weight)


def _as_key_array(keys: list[str], spec: SiloSpec) -> np.ndarray:
    """Return keys in the type that draws use: integers, or text where one is no integer."""
    if spec.keys != "integer" or not all(_is_integer(key) for key in keys):
        return np.array(keys, dtype=np.str_)
    typed = integer_ids([int(key) for key in keys])
    if typed.dtype.kind == "U":
        raise DataError(
            f"silo {spec.name!r}: expected integer keys that are all below 2^63 or all 0 and more, "
            f'got others: write keys = "text" in {SPEC}'
        )
    return typed
