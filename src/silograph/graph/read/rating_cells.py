"""Cells of ratings and of trust: ids, categories and numbers, from arrays and tables.

R: rows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from silograph.core.errors import DataError
from silograph.core.text import shown
from silograph.graph.read.arrays import array_of
from silograph.graph.read.columns import to_number
from silograph.graph.read.tables import Table, word_of

LONGEST = 256  # characters of a cell


def cells_of(given: Any, what: str) -> np.ndarray:
    """Return an array; cells of a list stay what they are where numpy would change them.

    It makes words of NaN beside words, and rounds whole numbers of 64 bits beside fractions.
    """
    array = array_of(given, what)
    if not isinstance(given, list | tuple) or array.dtype.kind not in "fU":
        return array
    large = array.dtype.kind == "f" and array.ndim == 2 and bool((np.abs(array) >= 2**53).any())
    return np.array(given, dtype=object) if large or array.dtype.kind == "U" else array


def beside(value: Any, what: str, count: int, kinds: str) -> np.ndarray:
    """Return what is given beside ratings, (R,); raise `DataError` for another shape or kind."""
    found = cells_of(value, what)
    if found.shape != (count,):
        raise DataError(
            f"expected {what} ({count},), one for each rating, got {found.dtype} of shape "
            f"{found.shape}"
        )
    if found.dtype.kind not in kinds:
        which = "numbers" if "f" in kinds else "words or whole numbers, none missing"
        raise DataError(f"expected {what} that are {which}, got {found.dtype}")
    return found


def categories_of(found: np.ndarray) -> np.ndarray:
    """Return categories as words or whole numbers; raise `DataError` where one is missing."""
    words = _as_words(found) if found.dtype.kind == "O" else found
    if words.dtype.kind == "U" and bool(is_missing(words).any()):
        row = int(np.flatnonzero(is_missing(words))[0])
        raise DataError(
            f"expected a category of every rating, got none at rating {row}: name it, or leave the "
            "rating out"
        )
    return words


def is_missing(words: np.ndarray) -> np.ndarray:
    """Return which words (R,) stand for nothing: empty ones, and NaN as tables have it."""
    return np.isin(words, ["", "nan", "NaN"])


def _as_words(cells: np.ndarray) -> np.ndarray:
    """Return cells (R,) of any kinds as words, as tables have them; "" for what is missing."""
    return np.array([word_of(cell) for cell in cells.tolist()], dtype=np.str_)


def rating_of(cell: object, row: int) -> float:
    """Return a rating as a number; raise `DataError` for what is none."""
    number = to_number(cell) if isinstance(cell, str) else cell
    if not isinstance(number, int | float | np.integer | np.floating):
        raise DataError(f"expected a number as rating {row}, got {shown(cell)}")
    return float(number)


def ids_of(cells: np.ndarray, what: str, of: str = "rating") -> np.ndarray:
    """Return ids as words; whole numbers lose their decimals.

    Args:
        cells: (R,).
        what: they are ids of, for errors.
        of: what rows are called there.

    Raises:
        DataError: an id is missing, or cannot be one.
    """
    if cells.dtype.kind == "f":
        _check_floats(cells, what, of)
        cells = cells.astype(np.int64)
    if cells.dtype.kind == "O":
        floats = [isinstance(cell, float | np.floating) and cell == cell for cell in cells]
        _check_floats(np.where(floats, cells, 0).astype(np.float64), what, of)
    words = _as_words(cells) if cells.dtype.kind == "O" else cells.astype(np.str_)
    _check_ids(words, what, lambda row: f"at {of} {row}")
    return words


def _check_floats(cells: np.ndarray, what: str, of: str) -> None:
    """Raise `DataError` for an id that is no whole number, or so large that it may be another."""
    whole = np.isfinite(cells) & (cells == np.floor(cells)) & (np.abs(cells) < 2**53)
    if not whole.all():
        row = int(np.flatnonzero(~whole)[0])
        raise DataError(
            f"expected the id of {_one(what)} at {of} {row}, got {cells[row]}: give a whole "
            "number below 2^53, or a word"
        )


def _one(what: str) -> str:
    return f"an {what}" if what == "item" else f"a {what}"


def _check_ids(words: np.ndarray, what: str, told: Callable[[int], str]) -> None:
    """Raise `DataError` for an empty id, or one with a tab, which stands between a pair's ids."""
    bad = is_missing(words) | (np.char.find(words, "\t") >= 0)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        without = " without tabs" * ("\t" in words[row])
        got = repr(str(words[row])) if words[row] else "none"
        raise DataError(
            f"expected the id of {_one(what)}{without} {told(row)}, got {got}: name it, or leave "
            "the row out"
        )


def ids_in(table: Table, what: str, cells: list[str]) -> np.ndarray:
    """Return the ids in a column of a table; raise `DataError` for one that cannot be."""
    words = np.array(cells, dtype=np.str_)
    _check_ids(words, what, lambda row: f"in {table.where(row)}")
    return words


def check_lengths(table: Table, name: str) -> None:
    """Raise `DataError` for a long cell: in memory every row is as wide as the longest one."""
    for row, cell in enumerate(table.column(name)):
        if len(str(cell)) > LONGEST:
            raise table.wrong(row, name, f"at most {LONGEST} characters", f"{str(cell)[:20]}...")
