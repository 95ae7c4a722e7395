"""silo.toml: what the tables of a silo's folder mean."""

import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT, checked
from silograph.core.errors import ConfigError, DataError, unknown
from silograph.core.text import shown
from silograph.graph.read.columns import missing_values
from silograph.graph.read.rating_columns import RATING_COLUMNS
from silograph.graph.read.tables import Table, read_table

SPEC, SECRET = "silo.toml", "secret"  # files of a silo's folder besides its tables
NODES, FEATURES, EDGES, CROSS = "nodes", "features", "edges", "cross_edges"
COLUMNS = (
    *("id", "label", "split", "feature", "value"),
    *("source", "target", "own", "silo", "remote", "weight"),
)
RATINGS, TRUST = "ratings", "trust"  # tables of a silo with ratings
OF_RATINGS = {"features": 2, "classes": 1}  # whether a node is a user or an item; one number
TASKS = ("multiclass", "multilabel", "rating")
IN_TOML = f"say so under [columns] of {SPEC}"


@dataclass(frozen=True, config=STRICT, kw_only=True)
class SiloSpec:
    """What silo.toml says.

    Attributes:
        name: of the silo in the federation; others name it so in their cross-silo edges.
        features: number of features of a node; 0: there is no table of features.
        classes: the label set: names in their order, or how many numbers from 0.
        task: `multiclass`, or `multilabel` with a column of 0 and 1 for each of the classes:
            label_0, label_1, ...; or `rating`, with tables of ratings and trust in place of nodes
            and edges.
        keys: `text`, or `integer` for keys that count as numbers in random draws.
        sparse: whether features are given, and held, as the entries that are not 0.
        columns: what a table calls a column that has another name here.
        na_values: words or numbers that count as missing besides the usual ones.
        scale: least and largest rating.
        partition_hash: of the cut that the folder was written from, as result folders have it; None
            where the silo's data are its own.
    """

    name: Annotated[str, Field(min_length=1)]
    features: Annotated[int, Field(ge=0, lt=2**31)]
    classes: Annotated[int, Field(ge=1)] | Annotated[tuple[str, ...], Field(min_length=1)]
    task: Literal["multiclass", "multilabel", "rating"] = "multiclass"
    keys: Literal["text", "integer"] = "text"
    sparse: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    na_values: tuple[str | int | float, ...] = ()
    scale: tuple[float, float] = (1.0, 5.0)
    partition_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, empty where they are numbers."""
        return () if isinstance(self.classes, int) else self.classes

    @property
    def num_classes(self) -> int:
        """How many classes, or label bits."""
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    def called(self, *names: str) -> list[str]:
        """Return what the columns are called in this silo's tables."""
        return [self.columns.get(name, name) for name in names]

    def read_table(self, path: Path, *meant: str) -> Table:
        """Return a table without columns that only number its rows.

        Args:
            path: the file.
            meant: columns of the table, by their names here.
        """
        table = read_table(path, missing_values(self.na_values))
        return table.without_row_numbers(self.called(*meant))


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file says.

    Raises:
        DataError: it is missing or no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{path}: expected what the tables mean, got {error.strerror}: see docs/silos.md"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected TOML, got: {error}") from None


def read_spec(path: Path) -> SiloSpec:
    """Return what a silo.toml says, checked.

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
        raise DataError(f"{path}: {error}") from None
    told = {name: getattr(spec, name) for name in OF_RATINGS}
    if spec.task == "rating" and (told != OF_RATINGS or spec.sparse or spec.na_values):
        raise DataError(
            f"{path}: expected name, task and perhaps scale and [columns] of a silo with ratings, "
            "got more: drop it"
        )
    low, high = spec.scale
    if not -math.inf < low < high < math.inf:
        raise DataError(f"{path}: expected scale = [least, largest], got [{low:g}, {high:g}]")
    known = RATING_COLUMNS if spec.task == "rating" else COLUMNS
    for name in spec.columns:
        if name not in known and (spec.task == "rating" or not name.startswith("label_")):
            raise DataError(f"{path}: {unknown('column under [columns]', name, known)}")
    if len(set(spec.class_names)) < len(spec.class_names) or "" in spec.class_names:
        raise DataError(f"{path}: expected distinct names as classes, got {list(spec.class_names)}")
    return spec


def _check_task(path: Path, values: Mapping[str, Any]) -> None:
    """Raise `DataError` for a task that there is none of, or that tables of ratings lack."""
    task, scale = values.get("task", TASKS[0]), values.get("scale", [1, 5])
    if task not in TASKS:
        raise DataError(f"{path}: {unknown('task', str(task), TASKS)}")
    if "task" not in values and any(path.parent.glob(f"{RATINGS}.*")):
        raise DataError(
            f'{path}: expected task = "rating" beside a table of ratings, got none: add this line'
        )
    numbers = isinstance(scale, list) and len(scale) == 2
    if not numbers or not all(type(end) in (int, float) for end in scale):
        raise DataError(
            f"{path}: expected scale = [least, largest], such as [0.5, 5], got {shown(scale)}"
        )


def only(table: Table, columns: Collection[str]) -> None:
    """Refuse columns that mean nothing: one of them may be a misspelt label."""
    for name in table.header:
        if name not in columns:
            raise DataError(
                f"{table.head}: {unknown('column', name, columns)} (rename it, {IN_TOML}, or "
                "drop it)"
            )
