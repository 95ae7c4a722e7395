"""Columns of text or numbers turned into typed columns; every reader uses these rules.

n: rows. F: features a node.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from silograph.core.errors import DataError, mistake
from silograph.core.setting_values import na_words
from silograph.core.text import printable, short_repr

LOG = logging.getLogger("silograph")
# The words that pandas.read_csv takes for missing.
NA_WORDS = frozenset(
    {
        *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND"),
        *("1.#QNAN", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
    }
)
# What pandas, pyarrow, R's readr and spreadsheets call a column without a name.
UNNAMED = re.compile(r"(Unnamed: \d+(\.\d+)*(_level_\d+)?|__index_level_\d+__|\.\.\.\d+)?")
# What pandas' `reset_index`, R and cleaned-up exports call row numbers.
INDEX_NAMES = ("index", "level_0", "rownames", "row.names", "row_names", "X", "unnamed: 0")
# Dates and times, as ISO 8601 or with / or . between the parts.
DATE_OR_TIME = re.compile(
    r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([T ]\d{1,2}:\d{2}.*)?"
    r"|\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?"
)
NUMPY_REPR = re.compile(r"np\.\w+(\(.*\))?")  # such as np.float64(0.5) and np.True_
LEAST_ROWS = 10  # fewer numbers may count the rows by chance
NUMBERS = (int, float, np.integer, np.floating, np.bool_)
ColumnRole = Literal["id", "label", "number"]
NaValues = str | Iterable[str | float]


@dataclass(frozen=True)
class MissingValues:
    """The cells that mean a missing value, the same for all readers.

    Attributes:
        words: as text, without spaces at the ends.
        numbers: finite numbers, however they are written.
    """

    words: frozenset[str] = NA_WORDS
    numbers: frozenset[float] = frozenset()

    def __contains__(self, cell: object) -> bool:
        """Whether a cell is missing."""
        if isinstance(cell, str):
            cell = cell.strip()
            return cell in self.words or (bool(self.numbers) and to_number(cell) in self.numbers)
        return is_null(cell) or (isinstance(cell, NUMBERS) and cell in self.numbers)


USUAL = MissingValues()


def missing_values(na_values: NaValues = ()) -> MissingValues:
    """Return the usual missing values and some more.

    >>> "NA" in missing_values(), "-999.0" in missing_values(["-999", "unknown"])
    (True, True)

    Args:
        na_values: words or numbers, as `na_values` of `pandas.read_csv`; or one text, words with
            commas between them or a JSON list.

    Raises:
        DataError: `na_values` is no list and no text, or holds other than words and numbers.
    """
    if not isinstance(na_values, Iterable):
        raise DataError(
            f"na_values: expected a list of words or numbers such as ['-999'], or a text such as "
            f"'-999,unknown', got {short_repr(na_values)}",
            **mistake("option-value", "na_values", short_repr(na_values)),
        )
    values = na_words(na_values)
    wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, str | int | float)]
    if wrong:
        raise DataError(
            f"na_values: expected words or numbers, got {short_repr(wrong[0])}",
            **mistake("option-value", "na_values", short_repr(wrong[0])),
        )
    numbers = [to_number(value) if isinstance(value, str) else float(value) for value in values]
    finite = (number for number in numbers if number is not None and math.isfinite(number))
    return MissingValues(NA_WORDS | {str(value).strip() for value in values}, frozenset(finite))


def read_column(
    cells: "np.ndarray | Sequence[Any]",
    kind: ColumnRole,
    missing: MissingValues = USUAL,
    *,
    place: Callable[[int], str] = lambda row: f"row {row}",
    from_text: bool = False,
) -> np.ndarray:
    """Return one column as a typed array. The rules are the same for all readers.

    - A cell is missing if it is None, does not equal itself (NaN, NaT, `pandas.NA`), is an empty
      text, or is one of `missing`. -1 is a missing label, too.
    - `id`: nothing is changed and nothing is missing. Whole numbers are int64 if all fit, else
      uint64 if all fit, else text; words are text.
    - `label`: float64, NaN where missing, if every cell that is not missing is a number. Otherwise
      objects: the cells as they are, and None where missing.
    - `number`: float64, NaN where missing.

    >>> read_column(["3", "NA", ""], "label", from_text=True)
    array([ 3., nan, nan])
    >>> read_column(["cat", "NA", "3"], "label", from_text=True)
    array(['cat', None, '3'], dtype=object)
    >>> read_column([7, 2**63], "id")
    array([                  7, 9223372036854775808], dtype=uint64)

    Args:
        cells: (n,) of any kind.
        kind: what the column means.
        missing: the cells that count as missing.
        place: says where a row stands, for errors.
        from_text: whether numbers may be written as text, as in a CSV file. In an array they are
            words.

    Raises:
        DataError: an id is no whole number and no text, or a number is none; names the row.
    """
    if kind == "id":
        return _ids(cells, place, from_text=from_text)
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "biuf":
        numbers = cells.astype(np.float64)
        if missing.numbers:
            numbers[np.isin(numbers, list(missing.numbers))] = np.nan
        return numbers
    values = cells.tolist() if isinstance(cells, np.ndarray) else list(cells)
    cells_or_none = [None if cell in missing else cell for cell in values]
    if kind == "label":
        cells_or_none = [None if cell == "-1" else cell for cell in cells_or_none]
    read = [
        math.nan if cell is None else _number(cell, from_text=from_text) for cell in cells_or_none
    ]
    if kind == "label" and None in read:
        objects = np.empty(len(cells_or_none), dtype=np.object_)
        objects[:] = cells_or_none
        return objects
    if None in read:
        row = read.index(None)
        raise DataError(f"{place(row)}: expected a number, got {short_repr(values[row])}")
    return np.array(read, dtype=np.float64)


def is_null(cell: Any) -> bool:
    """Whether a cell is None, or does not equal itself, as NaN and pandas' marks do not."""
    try:
        return cell is None or bool(cell != cell)
    except (TypeError, ValueError):
        return True


def to_number(cell: str) -> float | None:
    """Return the number in a cell, None if it has none."""
    try:
        return float(cell)
    except ValueError:
        return None


def to_time(cell: str) -> float | None:
    """Return a date or time in ISO 8601 as seconds since 1970; None if a cell has none.

    A time without a zone is in UTC.

    >>> to_time("1970-01-02"), to_time("1970-01-01T01:00+01:00"), to_time("11/02/2024")
    (86400.0, 0.0, None)
    """
    try:
        time = datetime.fromisoformat(cell)
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def how_to_write(cells: Iterable[str]) -> str:
    """Return how words that should be numbers are written as such; nothing if kinds are mixed.

    >>> how_to_write(["2024-02-11"])
    'write dates and times as a number, such as days since a day, or use silograph prepare'
    >>> how_to_write(["red"])
    ''
    """
    words = list(cells)
    if all(DATE_OR_TIME.fullmatch(word) for word in words):
        return (
            "write dates and times as a number, such as days since a day, or use silograph prepare"
        )
    if all(NUMPY_REPR.fullmatch(word) for word in words):
        return "written by repr of NumPy 2: save numbers, not their repr"
    return ""


def _number(cell: object, *, from_text: bool) -> float | None:
    if isinstance(cell, str):
        return to_number(cell) if from_text else None
    return float(cell) if isinstance(cell, NUMBERS) else None


def integer_ids(ids: Sequence[int]) -> np.ndarray:
    """Return whole numbers as int64 if all fit, else as uint64 if all fit, else as text."""
    low, high = min(ids, default=0), max(ids, default=0)
    for dtype in (np.int64, np.uint64):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return np.array(ids, dtype=dtype)
    return np.array([str(number) for number in ids])


def _ids(
    cells: "np.ndarray | Sequence[Any]", place: Callable[[int], str], *, from_text: bool
) -> np.ndarray:
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuU":
        fits = cells.dtype.kind != "u" or not len(cells) or cells.max() < 2**63
        return cells.astype(np.int64) if cells.dtype.kind in "iu" and fits else cells.copy()
    values = cells.tolist() if isinstance(cells, np.ndarray) else list(cells)
    if from_text or all(isinstance(cell, str) for cell in values):
        plain = from_text and all(is_whole(cell) for cell in values)
        return integer_ids([int(cell) for cell in values]) if plain else np.array(values, np.str_)
    for row, cell in enumerate(values):
        if isinstance(cell, bool) or not isinstance(cell, int | np.integer):
            raise DataError(
                f"{place(row)}: expected integers or strings, all of one kind, got "
                f"{short_repr(cell)}"
            )
    return integer_ids([int(cell) for cell in values])


def is_whole(key: str) -> bool:
    """Whether a key is a whole number that reads the same when it is written again."""
    try:
        return str(int(key)) == key
    except ValueError:  # also thousands of digits, which Python does not read
        return False


def row_number_columns(
    columns: Mapping[str, Sequence[Any]], used_names: Iterable[str]
) -> list[str]:
    """Return the columns of a table that only number its rows.

    These are columns without a name, as `DataFrame.to_csv` writes row numbers; and those with a
    name for row numbers (`INDEX_NAMES`), such as `index` or R's `rownames` and `X`,
    where they hold the numbers of the rows in any order.

    Args:
        columns: cells (n,) by name, numbers or text.
        used_names: names of columns that the user or the format gives a meaning; they stay.
    """
    used = set(used_names)
    return [
        name
        for name, cells in columns.items()
        if name not in used
        and (UNNAMED.fullmatch(name) or (name in INDEX_NAMES and _are_row_numbers(cells)))
    ]


def _are_row_numbers(cells: Sequence[Any]) -> bool:
    numbers = {str(cell).removesuffix(".0") for cell in cells}
    first = 0 if "0" in numbers else 1
    return len(cells) > 1 and numbers == {str(first + row) for row in range(len(cells))}


def report_row_numbers(source: object, names: Sequence[str]) -> None:
    """Report columns from `row_number_columns`, if there are any."""
    if names:
        names_text = ", ".join(repr(printable(name)) for name in names)
        LOG.warning(
            "%s: %s left out as row numbers: %s (pandas leaves them out by to_csv(index=False); "
            "to use one, give it a name of its own)",
            source,
            "column" if len(names) == 1 else "columns",
            names_text,
        )


def report_counting_features(source: object, x: np.ndarray, names: Sequence[str]) -> None:
    """Report dense features (n, F) that number the rows of the table from 0 or 1.

    A matrix has no header that says so, and a named column may be meant, so they stay.
    """
    n = len(x)
    if n < LEAST_ROWS:
        return
    first = x[0].astype(np.float64)
    candidates = np.flatnonzero(np.isin(first, (0, 1)) & (x[-1] == first + n - 1))
    counting_columns = [
        c for c in candidates.tolist() if bool((x[:, c] == first[c] + np.arange(n)).all())
    ]
    if counting_columns:
        LOG.warning(
            "%s: feature %s numbers the rows of the data: leave it out unless that is meant",
            source,
            ", ".join(repr(printable(names[c])) if names else str(c) for c in counting_columns),
        )


def compact_features(values: np.ndarray) -> np.ndarray:
    """Return numbers as float32 where that holds every one of them exactly, else as float64.

    Unix times, amounts in cents and 0.1 stay exactly what they are; words, counts, pixels and
    whatever came in float32 take half the memory. The rule looks at each number by itself, so that
    a row has the same values whichever other rows are read beside it.

    >>> compact_features(np.array([0.5, 3.0])).dtype, compact_features(np.array([1.7e9 + 1])).dtype
    (dtype('float32'), dtype('float64'))

    Args:
        values: numbers of any shape and dtype.

    Returns:
        A copy; what float32 cannot hold at all is infinite.
    """
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if values.dtype.kind == "b" or (values.dtype.kind == "f" and values.dtype.itemsize <= 4):
        return narrow
    wide = values.astype(np.float64)
    # Readers refuse what is not finite in float32, whatever the other values are.
    return narrow if bool((narrow == wide).all()) or not np.isfinite(narrow).all() else wide
