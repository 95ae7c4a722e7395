"""A schema: what the columns of raw tables mean, in words that all silos share.

```toml
[nodes]
table = "accounts"        # the file without its ending; a list: the first that is there
key = "account_id"
label = "fraud"
classes = ["0", "1"]      # in their order, the same at all silos

[features.balance]
type = "number"           # or category, flag, time, text
log = true
[features.kind]
type = "category"
values = ["basic", "gold"]

[edges.transfers]         # the name of the table
source = "from_account"
target = "to_account"
weight = "amount"
repeated = "sum"

[silos]                   # whose node a key is that no own row has
south = "S-*"
```

or, for ratings, one section `[ratings]` with `user`, `item`, `rating`, perhaps `time` and `scale`.

A feature becomes one column or several, which depend on the schema alone: their number, names and
order are the same at all silos. What is fitted (means, deviations, ranks) is each silo's own, from
all of its nodes, unless the schema gives `mean` and `deviation`. For values that are standardized
over all silos leave `scale` at none and train with `--normalize standard`, which declares the sums
that leave.

n: rows of a table.
"""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT, checked
from silograph.core.errors import ConfigError, DataError, mistake, reword_error, unknown
from silograph.core.text import short_repr
from silograph.graph.read.columns import MissingValues, missing_values

Name = Annotated[str, Field(min_length=1)]
Names = Name | Annotated[tuple[Name, ...], Field(min_length=1)]
Fitted = Mapping[str, Any]
Cells = Sequence[str | None]  # of a column, None where missing
T = TypeVar("T")
YEAR = 365.25 * 24 * 3600  # seconds
CYCLES = {"hour": 24, "weekday": 7, "month": 12}
DIGITS = 6  # of sines: months of two years are equal in float32, too
RANKS = 101  # quantiles that are kept of a column
COUNTED = "counted"  # values of a category that silos list
# A number with a decimal comma, perhaps with points between thousands.
WITH_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?([eE][+-]?\d+)?")
DOTTED_DATE = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d{4})( (\d{1,2}):(\d{2})(:(\d{2}))?)?")


def names_of(names: Names) -> tuple[str, ...]:
    """Return names, of which the first that a table has counts, as a tuple."""
    return (names,) if isinstance(names, str) else names


# --- Cells as values ------------------------------------------------------------------------------


class BadCellError(ValueError):
    """A cell that cannot be read; the text says what was expected and how to mend it."""


def number_of(cell: str, decimal: str) -> float:
    """Return the number in a cell.

    >>> number_of("1.234,5", ","), number_of("1.23e+04", ".")
    (1234.5, 12300.0)

    Args:
        cell: without spaces at its ends.
        decimal: the decimal mark, a point or a comma; `unclear`: a cell with a comma is refused.

    Raises:
        BadCellError: no finite number.
    """
    if decimal == "unclear" and "," in cell:
        raise BadCellError(
            'which may be a fraction or thousands: give decimal in the schema, "," or "."'
        )
    if decimal == ",":
        text = cell.replace(".", "").replace(",", ".") if WITH_COMMA.fullmatch(cell) else "nan"
    else:
        text = cell
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        mark = "comma" if decimal == "," else "point"
        raise BadCellError(
            f"expected a finite number with a decimal {mark}: correct it, give decimal in the "
            "schema, or add the word to na_values"
        )
    return value


def time_of(cell: str, format: str | None) -> datetime:
    """Return the time in a cell, in UTC; one without a zone counts as UTC.

    >>> time_of("31.12.2024", None).isoformat(), time_of("2020-12-21T00:00:00Z", None).year
    ('2024-12-31T00:00:00+00:00', 2020)

    Args:
        cell: without spaces at its ends.
        format: `unix` for seconds since 1970, or that of `datetime.strptime`; None: ISO 8601, or
            day, month and year with points.

    Raises:
        BadCellError: another form.
    """
    try:
        if format == "unix":
            return datetime.fromtimestamp(float(cell), UTC)
        if format is not None:
            time = datetime.strptime(cell, format)
        elif dotted := DOTTED_DATE.fullmatch(cell):
            day, month, year, _, hour, minute, _, second = dotted.groups()
            time = datetime(int(year), int(month), int(day))
            time = time.replace(hour=int(hour or 0), minute=int(minute or 0))
            time = time.replace(second=int(second or 0))
        else:
            time = datetime.fromisoformat(cell)
    except (ValueError, OverflowError, OSError):
        expected = format or "2024-12-31, 2024-12-31T10:00:00Z or 31.12.2024"
        raise BadCellError(
            f"expected a time such as {expected}: give format in the schema, such as "
            '"%d/%m/%Y" or "unix"'
        ) from None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


# --- Features: columns of a table as columns of numbers ------------------------------------------
#
# Each kind says how it reads cells, what it fits, and the columns that come of it. The decimal mark
# is that of the table.


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Scaled:
    """What numbers and times have in common.

    Attributes:
        scale: `none`; `standard`, less the mean and divided by the deviation; or `rank`, the share
            of the silo's values that are smaller, in 0 to 1.
        mean: of `standard`, and for missing values; None: the silo's own.
        deviation: of `standard`; None: the silo's own.
        fill_value: for missing values; None: the mean.
        indicator: whether a column `NAME missing` says where a value was missing.
    """

    scale: Literal["none", "standard", "rank"] = "none"
    mean: float | None = None
    deviation: Annotated[float, Field(gt=0)] | None = None
    fill_value: float | None = None
    indicator: bool = False

    def fit_scale(self, values: np.ndarray) -> Fitted:
        """Return mean, deviation and quantiles of values (n,) float64, NaN where missing."""
        known = values[~np.isnan(values)]
        fitted: dict[str, Any] = {
            "mean": float(known.mean()) if len(known) else 0.0,
            "deviation": float(known.std()) if len(known) else 0.0,
        }
        if self.scale == "rank":
            shares = np.linspace(0, 1, RANKS)
            fitted["quantiles"] = np.quantile(known, shares).tolist() if len(known) else [0.0]
        return fitted

    def scaled(self, name: str, values: np.ndarray, fitted: Fitted) -> dict[str, np.ndarray]:
        """Return the columns of values (n,) float64, NaN where missing, by name."""
        mean = fitted["mean"] if self.mean is None else self.mean
        missing = np.isnan(values)
        filled = np.where(missing, mean if self.fill_value is None else self.fill_value, values)
        if self.scale == "standard":
            deviation = fitted["deviation"] if self.deviation is None else self.deviation
            filled = (filled - mean) / deviation if deviation else np.zeros(len(filled))
        elif self.scale == "rank":
            quantiles = np.array(fitted["quantiles"])
            filled = np.searchsorted(quantiles, filled, side="right") / len(quantiles)
        extra = {f"{name} missing": missing.astype(np.float64)} if self.indicator else {}
        return {name: filled, **extra}


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Number(Scaled):
    """A number.

    Attributes:
        type: the kind of feature.
        column: its name in tables; None: that of the feature.
        log: whether to take sign(x) log(1 + |x|) first.
        decimal: the decimal mark; None: the table's (a comma where commas do not separate columns
            and a cell has one).
    """

    type: Literal["number"] = "number"
    column: Names | None = None
    log: bool = False
    decimal: Literal[".", ","] | None = None

    def read(self, cells: Cells, decimal: str) -> np.ndarray:
        """Return values (n,) float64, NaN where missing."""
        decimal = self.decimal or decimal
        read = (math.nan if cell is None else number_of(cell, decimal) for cell in cells)
        values = np.fromiter(read, dtype=np.float64, count=len(cells))
        return np.sign(values) * np.log1p(np.abs(values)) if self.log else values

    def fit(self, values: np.ndarray) -> Fitted:
        """Return what is fitted to values."""
        return self.fit_scale(values)

    def columns(self, name: str, values: np.ndarray, fitted: Fitted) -> dict[str, np.ndarray]:
        """Return the columns (n,) float64 by name."""
        return self.scaled(name, values, fitted)


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Time(Scaled):
    """A date or time, as years since a day.

    Attributes:
        type: the kind of feature.
        column: its name in tables; None: that of the feature.
        format: as that of `time_of`.
        since: the day from which years count.
        cyclic: cycles, each of which adds a column of its sine and one of its cosine.
    """

    type: Literal["time"] = "time"
    column: Names | None = None
    format: str | None = None
    since: str = "2000-01-01"
    cyclic: tuple[Literal["hour", "weekday", "month"], ...] = ()

    def read(self, cells: Cells, decimal: str) -> np.ndarray:
        """Return years and, for each cycle, the place in it, (n, 1 + cycles) float64."""
        del decimal
        start = time_of(self.since, None).timestamp()
        values = np.full((len(cells), 1 + len(self.cyclic)), math.nan)
        for row, cell in enumerate(cells):
            if cell is None:
                continue
            time = time_of(cell, self.format)
            place = {
                "hour": time.hour + time.minute / 60,
                "weekday": time.weekday(),
                "month": time.month - 1,
            }
            places = (place[cycle] / CYCLES[cycle] for cycle in self.cyclic)
            values[row] = [(time.timestamp() - start) / YEAR, *places]
        return values

    def fit(self, values: np.ndarray) -> Fitted:
        """Return what is fitted to values."""
        return self.fit_scale(values[:, 0])

    def columns(self, name: str, values: np.ndarray, fitted: Fitted) -> dict[str, np.ndarray]:
        """Return the columns (n,) float64 by name; cycles of missing times are 0."""
        columns = self.scaled(name, values[:, 0], fitted)
        for number, cycle in enumerate(self.cyclic, start=1):
            angle = 2 * math.pi * values[:, number]
            columns[f"{name} {cycle} sin"] = np.nan_to_num(np.sin(angle).round(DIGITS))
            columns[f"{name} {cycle} cos"] = np.nan_to_num(np.cos(angle).round(DIGITS))
        return columns


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Category:
    """One of several words: a column of 0 and 1 for each.

    Attributes:
        values: the words; upper and lower case count alike. `counted`: they are not known yet, and
            silos list theirs (`silograph.graph.silos.categories`).
        type: the kind of feature.
        column: its name in tables; None: that of the feature.
        other: whether other words have a column of their own; else they are an error.
        indicator: whether a column `NAME missing` says where a value was missing.
        min_count: of counted values: nodes of a silo that have a word which it lists.
        min_silos: of counted values: silos that list a word which the schema takes.
    """

    values: Literal["counted"] | Annotated[tuple[Name, ...], Field(min_length=1)]
    type: Literal["category"] = "category"
    column: Names | None = None
    other: bool = False
    indicator: bool = False
    min_count: Annotated[int, Field(ge=1)] = 5
    min_silos: Annotated[int, Field(ge=1)] = 1

    @property
    def words(self) -> tuple[str, ...]:
        """The values; none where they are still to be counted."""
        return self.values if isinstance(self.values, tuple) else ()

    def read(self, cells: Cells, decimal: str) -> np.ndarray:
        """Return the number of each word, (n,) int64, -1 where missing, and last for others."""
        del decimal
        number_by_word = {word.casefold(): number for number, word in enumerate(self.words)}
        numbers = np.full(len(cells), -1)
        for row, cell in enumerate(cells):
            if cell is None:
                continue
            number = number_by_word.get(cell.casefold())
            if number is None and not self.other:
                raise BadCellError(
                    f"expected one of {', '.join(self.words)}: add it to values in the schema "
                    "of all silos, or say other = true"
                )
            numbers[row] = len(self.words) if number is None else number
        return numbers

    def fit(self, values: np.ndarray) -> Fitted:
        """Return nothing: the words are in the schema."""
        del values
        return {}

    @property
    def extra_names(self) -> tuple[str, ...]:
        """Names of columns besides those of the words."""
        return *(["other"] if self.other else []), *(["missing"] if self.indicator else [])

    def columns(self, name: str, values: np.ndarray, fitted: Fitted) -> dict[str, np.ndarray]:
        """Return the columns (n,) float64 by name."""
        del fitted
        words = [*self.words, *(["other"] if self.other else [])]
        columns = {f"{name} {word}": values == number for number, word in enumerate(words)}
        columns |= {f"{name} missing": values < 0} if self.indicator else {}
        return {column: hits.astype(np.float64) for column, hits in columns.items()}


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Flag:
    """Yes or no, as 1 or 0.

    Attributes:
        type: the kind of feature.
        column: its name in tables; None: that of the feature.
        true: words for yes; upper and lower case count alike.
        false: words for no.
        fill_value: for missing values.
        indicator: whether a column `NAME missing` says where a value was missing.
    """

    type: Literal["flag"] = "flag"
    column: Names | None = None
    true: tuple[Name, ...] = ("1", "1.0", "true", "t", "yes", "y")
    false: tuple[Name, ...] = ("0", "0.0", "false", "f", "no", "n")
    fill_value: float = 0.0
    indicator: bool = False

    def read(self, cells: Cells, decimal: str) -> np.ndarray:
        """Return values (n,) float64, NaN where missing."""
        del decimal
        words = dict.fromkeys(map(str.casefold, self.false), 0.0)
        words |= dict.fromkeys(map(str.casefold, self.true), 1.0)
        values = np.full(len(cells), math.nan)
        for row, cell in enumerate(cells):
            if cell is None:
                continue
            if cell.casefold() not in words:
                raise BadCellError("expected yes or no: name the words by true and false")
            values[row] = words[cell.casefold()]
        return values

    def fit(self, values: np.ndarray) -> Fitted:
        """Return nothing: the words are in the schema."""
        del values
        return {}

    def columns(self, name: str, values: np.ndarray, fitted: Fitted) -> dict[str, np.ndarray]:
        """Return the columns (n,) float64 by name."""
        del fitted
        missing = np.isnan(values)
        extra = {f"{name} missing": missing.astype(np.float64)} if self.indicator else {}
        return {name: np.where(missing, self.fill_value, values), **extra}


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Text:
    """Free text.

    Attributes:
        type: the kind of feature.
        column: its name in tables; None: that of the feature.
        treat: `length`, its number of letters as log(1 + x); or `hash`, its words hashed into
            `size` columns (scikit-learn's `HashingVectorizer`: a row has length 1).
        size: columns of `hash`.
    """

    type: Literal["text"] = "text"
    column: Names | None = None
    treat: Literal["length", "hash"] = "length"
    size: Annotated[int, Field(ge=1, le=4096)] = 32

    def read(self, cells: Cells, decimal: str) -> np.ndarray:
        """Return the texts (n,) as they are, empty where missing."""
        del decimal
        return np.array([cell or "" for cell in cells], dtype=np.object_)

    def fit(self, values: np.ndarray) -> Fitted:
        """Return nothing: hashing needs no list of words."""
        del values
        return {}

    def columns(self, name: str, values: np.ndarray, fitted: Fitted) -> dict[str, np.ndarray]:
        """Return the columns (n,) float64 by name."""
        del fitted
        if self.treat == "length":
            return {name: np.log1p(np.array([len(text) for text in values], dtype=np.float64))}
        from sklearn.feature_extraction.text import HashingVectorizer

        hashed = HashingVectorizer(n_features=self.size).transform(values).toarray()
        return {f"{name} {number}": hashed[:, number] for number in range(self.size)}


Feature = Number | Category | Flag | Time | Text
KINDS: Mapping[str, type[Feature]] = {
    "number": Number,
    "category": Category,
    "flag": Flag,
    "time": Time,
    "text": Text,
}


# --- The schema -----------------------------------------------------------------------------------


@dataclass(frozen=True, config=STRICT, kw_only=True)
class NodeTable:
    """The section `[nodes]`.

    Attributes:
        table: name of the file without its ending.
        key: column of the nodes' keys.
        label: column of the labels; None: nothing is known.
        classes: names of the classes in their order; upper and lower case count alike.
        time: column of times, by which `--split time:time:SHARES` splits nodes.
        format: of that time, as that of `time_of`.
    """

    table: Names
    key: Names
    classes: Annotated[tuple[Name, ...], Field(min_length=1)]
    label: Names | None = None
    time: Names | None = None
    format: str | None = None


@dataclass(frozen=True, config=STRICT, kw_only=True)
class EdgeTable:
    """A section `[edges.NAME]`; NAME is the file without its ending.

    Attributes:
        source: column of keys at one end.
        target: column of keys at the other end.
        table: another name of the file.
        weight: column of weights, numbers from 0; None: every edge counts 1.
        decimal: their decimal mark; None: the table's.
        repeated: what becomes of an edge that is listed several times, in either direction: the
            `sum`, `mean`, `last` or `first` of its weights (the tables' order), or their `count`.
        listed_by: `both` if each silo's table has all edges of its nodes; `source` if an edge
            between silos is in the table of its source's silo only, as transfers are that a bank
            sends. Then the other silo has to receive the list (`received`).
        directed: whether folders say which end is the source, for runs with `directed`. An edge
            that is listed several times is then combined in each direction apart. If only some
            tables are directed, edges of the others go both ways.
    """

    source: Names
    target: Names
    table: Names | None = None
    weight: Names | None = None
    decimal: Literal[".", ","] | None = None
    repeated: Literal["sum", "mean", "count", "last", "first"] = "sum"
    listed_by: Literal["both", "source"] = "both"
    directed: bool = False


@dataclass(frozen=True, config=STRICT, kw_only=True)
class RatingTable:
    """The section `[ratings]`.

    Attributes:
        user: column of users.
        item: column of items.
        rating: column of ratings: numbers, or such as 4/5.
        table: name of the file without its ending; None: a silo is one file.
        time: column of times.
        format: of the time, as that of `time_of`.
        scale: least and largest rating.
        decimal: the decimal mark; None: the table's.
        repeated: what becomes of a pair that is rated several times.
    """

    user: Names
    item: Names
    rating: Names
    table: Names | None = None
    time: Names | None = None
    format: str | None = None
    scale: tuple[float, float] = (1.0, 5.0)
    decimal: Literal[".", ","] | None = None
    repeated: Literal["mean", "last", "first"] = "last"


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Reading:
    """The section `[reading]`, how files are written; all of it may be left out.

    Attributes:
        separator: between columns; None: the one of comma, semicolon, tab and bar that the first
            line has most often.
        encoding: of text.
        na_values: words or numbers that count as missing besides the usual ones.
    """

    separator: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    encoding: Name = "utf-8-sig"
    na_values: tuple[str | int | float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Schema:
    """What the tables of all silos mean.

    Attributes:
        text: the schema as it was written.
        nodes: of a graph; None for ratings.
        features: by name, in their order.
        edges: tables of edges, by name.
        ratings: None for a graph.
        silos: pattern of the keys of each silo's nodes (`fnmatch`), by the silo's name.
        reading: how files are written.
    """

    text: str
    nodes: NodeTable | None = None
    features: Mapping[str, Feature] = field(default_factory=dict)
    edges: Mapping[str, EdgeTable] = field(default_factory=dict)
    ratings: RatingTable | None = None
    silos: Mapping[str, str] = field(default_factory=dict)
    reading: Reading = Reading()

    @property
    def missing(self) -> MissingValues:
        """The cells that count as missing."""
        return missing_values(self.reading.na_values)


SECTIONS = ("nodes", "features", "edges", "ratings", "silos", "reading")


def read_schema(path: Path) -> Schema:
    """Read a schema from a file.

    Raises:
        DataError: the file cannot be read, or is no schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "other text than UTF-8"
        raise DataError(
            f"{path}: expected a schema, got {reason}", **mistake("unreadable-file", path)
        ) from None
    return parse_schema(text, str(path))


def parse_schema(text: str, source: str) -> Schema:
    """Return the schema that a text says.

    Args:
        text: TOML.
        source: where it is from, for errors.

    Raises:
        DataError: no TOML, an unknown section or key, or a value that cannot be used; names it.
    """
    try:
        sections = tomllib.loads(text)
        for name, section in sections.items():
            if name not in SECTIONS:
                raise unknown("section", name, SECTIONS)
            if not isinstance(section, Mapping):
                raise ConfigError(f"expected [{name}] as a section, got {short_repr(section)}")
        both = "nodes" in sections and "ratings" in sections
        if both or not {"nodes", "ratings"} & sections.keys():
            got = "both" if both else "neither"
            raise ConfigError(f"expected a section [nodes] or [ratings], got {got}")
        names = [*sections] if "ratings" in sections else []
        if extra := {"features", "edges", "silos"} & {*names}:
            raise ConfigError(f"expected no [{min(extra)}] beside [ratings]: drop it")
        for name, words in _lists_of_words(sections):
            if len({str(word).casefold() for word in words}) < len(words):
                raise ConfigError(f"{name}: expected words that differ without case, got {words}")
        for name, pattern in sections.get("silos", {}).items():
            if not isinstance(pattern, str):
                raise ConfigError(f"expected a pattern of keys for silo {name}, got {pattern!r}")
        return Schema(
            text=text,
            nodes=_section(NodeTable, sections, "nodes"),
            features={n: _feature(n, f) for n, f in sections.get("features", {}).items()},
            edges={
                name: checked(EdgeTable, _mapping(f"edges.{name}", edges), f"[edges.{name}]")
                for name, edges in sections.get("edges", {}).items()
            },
            ratings=_section(RatingTable, sections, "ratings"),
            silos=sections.get("silos", {}),
            reading=_section(Reading, sections, "reading") or Reading(),
        )
    except tomllib.TOMLDecodeError as error:
        raise DataError(
            f"{source}: expected TOML, got: {error}", **mistake("wrong-format", source)
        ) from None
    except ConfigError as error:
        raise reword_error(error, f"{source}: {error}", DataError) from None


def _lists_of_words(sections: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the lists of words that cells are compared with, whatever their case."""
    lists = {"classes": sections.get("nodes", {}).get("classes")}
    for name, feature in sections.get("features", {}).items():
        if isinstance(feature, Mapping):
            lists[f"values of {name}"] = feature.get("values")
    yield from ((name, words) for name, words in lists.items() if isinstance(words, list))


def _section(kind: type[T], sections: Mapping[str, Any], name: str) -> T | None:
    return checked(kind, sections[name], f"[{name}]") if name in sections else None


def _mapping(name: str, section: object) -> Mapping[str, Any]:
    if not isinstance(section, Mapping):
        raise ConfigError(f"expected [{name}] as a section, got {short_repr(section)}")
    return section


def _feature(name: str, section: object) -> Feature:
    """Return the feature that a section `[features.NAME]` says."""
    values = _mapping(f"features.{name}", section)
    kind = values.get("type")
    if kind is None:
        keys = ", ".join(values) or "none"
        raise ConfigError(
            f"expected a type of feature {name}, got keys {keys}: add one of {', '.join(KINDS)}"
        )
    if kind not in KINDS:
        raise unknown(f"type of feature {name}", str(kind), KINDS)
    feature = checked(KINDS[str(kind)], values, f"[features.{name}]")
    if isinstance(feature, Category):
        own_names = [word for word in feature.words if word.casefold() in feature.extra_names]
        if own_names:
            raise ConfigError(
                f"expected values of {name} that are no names of its other columns, got "
                f"{own_names[0]!r}: rename it in the tables and in the schema"
            )
    if isinstance(feature, Category) and feature.values == COUNTED and not feature.other:
        raise ConfigError(
            f'expected other = true beside values = "{COUNTED}" of {name}, for words that too few '
            "nodes have, got none: add it"
        )
    return feature
