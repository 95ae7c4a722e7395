"""Rating graphs: users, items, ratings and trust, from arrays or tables.

A rating is a node of its own, between its user and its item. So what a method predicts are nodes
with labels as everywhere else: clients hold ratings, ratings have roles, and a client that holds a
rating holds its user and its item, which several clients may do.

R: ratings. T: statements of trust. n: nodes, which are users, then items, then ratings.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import DataError, mistake, reword_error, unknown
from silograph.core.numeric_state import standard_numerics
from silograph.core.text import count_of, short_repr
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Graph
from silograph.graph.read.arrays import PARTS, array_of, split_of
from silograph.graph.read.columns import how_to_write, to_number
from silograph.graph.read.contents import ending_of
from silograph.graph.read.tables import RATING_FORMATS, Table, other_format, read_table, word_of

# --- Cells of ratings and of trust: ids, categories and numbers, from arrays and tables ----------
#
# R: rows.


LONGEST = 256  # characters of a cell


def cells_of(values: Any, what: str) -> np.ndarray:
    """Return an array; cells of a list stay what they are where numpy would change them.

    It makes words of NaN beside words, and rounds whole numbers of 64 bits beside fractions.
    """
    array = array_of(values, what)
    if not isinstance(values, list | tuple) or array.dtype.kind not in "fU":
        return array
    large = array.dtype.kind == "f" and array.ndim == 2 and bool((np.abs(array) >= 2**53).any())
    return np.array(values, dtype=object) if large or array.dtype.kind == "U" else array


def beside(value: Any, what: str, count: int, kinds: str) -> np.ndarray:
    """Return a further column of ratings, (R,); raise `DataError` for another shape or kind."""
    cells = cells_of(value, what)
    if cells.shape != (count,):
        raise DataError(
            f"expected {what} ({count},), one for each rating, got {cells.dtype} of shape "
            f"{cells.shape}"
        )
    if cells.dtype.kind not in kinds:
        which = "numbers" if "f" in kinds else "words or whole numbers, none missing"
        raise DataError(f"expected {what} that are {which}, got {cells.dtype}")
    return cells


def categories_of(values: np.ndarray) -> np.ndarray:
    """Return categories as words or whole numbers; raise `DataError` where one is missing."""
    words = _as_words(values) if values.dtype.kind == "O" else values
    if words.dtype.kind == "U" and bool(is_missing(words).any()):
        row = int(np.flatnonzero(is_missing(words))[0])
        raise DataError(
            f"expected a category of every rating, got none at rating {row}: name it, or leave the "
            "rating out"
        )
    return words


def is_missing(words: np.ndarray) -> np.ndarray:
    """Return which words (R,) mean a missing value: empty ones, and NaN as tables write it."""
    return np.isin(words, ["", "nan", "NaN"])


def _as_words(cells: np.ndarray) -> np.ndarray:
    """Return cells (R,) of any kinds as words, as tables have them; "" for what is missing."""
    return np.array([word_of(cell) for cell in cells.tolist()], dtype=np.str_)


def rating_of(cell: object, row: int) -> float:
    """Return a rating as a number; raise `DataError` if it is none."""
    number = to_number(cell) if isinstance(cell, str) else cell
    if not isinstance(number, int | float | np.integer | np.floating):
        raise DataError(f"expected a number as rating {row}, got {short_repr(cell)}")
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


def _check_ids(words: np.ndarray, what: str, describe_row: Callable[[int], str]) -> None:
    """Raise `DataError` for an empty id, or one with a tab, which stands between a pair's ids."""
    bad = is_missing(words) | (np.char.find(words, "\t") >= 0)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        without = " without tabs" * ("\t" in words[row])
        got = repr(str(words[row])) if words[row] else "none"
        raise DataError(
            f"expected the id of {_one(what)}{without} {describe_row(row)}, got {got}: name it, "
            "or leave the row out"
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


# --- Names of the columns of tables of ratings and trust, and what a table may call them ---------


USER, ITEM, RATING, TIME, CATEGORY = "user", "item", "rating", "time", "category"
SPLIT = "split"
TRUSTER, TRUSTEE = "truster", "trustee"
OF_RATINGS, OF_TRUST = (USER, ITEM, RATING, TIME, SPLIT, CATEGORY), (TRUSTER, TRUSTEE)
RATING_COLUMNS = (*OF_RATINGS, *OF_TRUST)  # that a table may call otherwise


def check_columns(columns: Any, ratings: Any, trust: Any) -> None:
    """Raise for names of columns that ratings do not have, or of what is no table."""
    if not isinstance(columns, Mapping) or not all(isinstance(n, str) for n in columns.values()):
        raise DataError(
            f'columns: expected a mapping such as {{"user": "userId"}}, got {short_repr(columns)}'
        )
    tables = {OF_RATINGS: ratings, OF_TRUST: trust}
    for column in columns:
        if column not in RATING_COLUMNS:
            error = unknown("column", column, RATING_COLUMNS)
            raise reword_error(error, f"columns: {error}", DataError)
        for column_set, table in tables.items():
            if column in column_set and not isinstance(table, str | os.PathLike):
                what = "trust" if column_set is OF_TRUST else "ratings"
                raise DataError(
                    f"columns: expected a table of {what} for its column {column}, got "
                    f"{'none' if table is None else 'an array'}: leave {column} out"
                )


def only(columns: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the entries of some of the columns."""
    return {name: column for name, column in columns.items() if name in names}


def how_named(name: str) -> str:
    """Describe how a user names a column of a table."""
    return (
        f"name yours: --columns {name}=NAME, in sg.ratings columns={{{name!r}: NAME}}, in a "
        "silo.toml under [columns]"
    )


KINDS = (USER, ITEM)  # the features of a node: which of them it is; a rating is neither
SCALE = (1.0, 5.0)
RatingColumns = dict[str, np.ndarray]
Repeated = Literal["last", "refuse"]
Unrated = Literal["refuse", "drop"]


@dataclass(frozen=True, eq=False)
class _Ratings:
    """Ratings before they are numbered.

    Attributes:
        user: (R,) words.
        item: (R,) words.
        value: (R,) float64.
        columns: further columns, (R,).
        where: describes a row of the table that they were read from; None without one.
    """

    user: np.ndarray
    item: np.ndarray
    value: np.ndarray
    columns: RatingColumns
    where: Table | None = None

    def describe_row(self, row: int) -> str:
        """Describe the place of a rating in its table, for an error."""
        return f"at rating {row}" if self.where is None else f"in {self.where.where(row)}"

    def take(self, rows: np.ndarray) -> "_Ratings":
        """Return some of the ratings, without their places in the table."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return _Ratings(self.user[rows], self.item[rows], self.value[rows], columns)


@standard_numerics()
def ratings(
    ratings: Any,
    *,
    trust: Any = None,
    categories: Any = None,
    times: Any = None,
    scale: tuple[float, float] = SCALE,
    repeated: Repeated = "last",
    unrated: Unrated = "refuse",
    columns: Mapping[str, str] | None = None,
    name: str = "ratings",
) -> Graph:
    """Return the graph of ratings that users gave items, and of trust between users.

    >>> graph = ratings([[7, 1, 4.0], [7, 2, 3.0], [8, 1, 5.0]], trust=[[7, 8]])
    >>> graph.task, graph.num_nodes, graph.num_edges
    ('rating', 7, 7)

    Args:
        ratings: (R, 3) of user, item and rating; or the path of a table (CSV and its relatives,
            .npz, Parquet, or ratings.dat of MovieLens) with columns `user`, `item` and `rating`,
            perhaps `time`, a number, `split` (train, val, test or nothing), and any others, such as
            `category`, which cuts can go by.
        trust: (T, 2) of truster and trustee; or the path of a table with these columns. Who trusts
            whom is used without its direction; statements about oneself say nothing.
        categories: (R,) words or whole numbers, one for each rating, where `ratings` is an array.
        times: (R,) numbers, likewise.
        scale: least and largest rating.
        repeated: of several ratings of one item by one user, whether the `last` one counts (by
            time, then by order), or all are refused: `refuse`.
        unrated: what happens to trust of users without a rating, which no client would hold:
            `refuse` or `drop`.
        columns: what tables call a column that has another name here, by that name: `{"user":
            "userId"}`. Columns that only number the rows are left out, which is reported.
        name: what tables and result folders call this graph.

    Returns:
        Nodes `u:USER`, `i:ITEM` and `u:USER<tab>i:ITEM`, with labels at the last; two features,
        whether a node is a user or an item; and the other columns in `Graph.columns`.

    Raises:
        DataError: names what cannot be used.
    """
    column_names = columns or {}
    check_columns(column_names, ratings, trust)
    table = _read(ratings, categories, times, only(column_names, OF_RATINGS))
    low, high = _bounds(scale)
    _check_values(table, low, high)
    table = _distinct(table, repeated)
    users = np.unique(table.user)
    pairs = _trust(trust, users, unrated, only(column_names, OF_TRUST))
    return _graph_of(table, pairs, (low, high), name)


def _graph_of(table: _Ratings, pairs: np.ndarray, scale: tuple[float, float], name: str) -> Graph:
    """Return the graph of distinct ratings and of trust between users by number, (2, T)."""
    users, user = np.unique(table.user, return_inverse=True)
    items, item = np.unique(table.item, return_inverse=True)
    first, count = len(users), len(users) + len(items)
    n = count + len(user)
    rating = np.arange(count, n)
    ends = [np.stack([rating, user]), np.stack([rating, first + item]), pairs]
    kinds = torch.zeros(n, len(KINDS))
    kinds[:first, 0] = 1
    kinds[first:count, 1] = 1
    y = torch.full((n,), torch.nan, dtype=torch.float64)
    y[count:] = torch.from_numpy(table.value)
    role = table.columns.pop(SPLIT, None)
    return Graph(
        adj=CSR.undirected(np.concatenate(ends, axis=1), n),
        x=kinds,
        y=y,
        num_classes=1,
        node_id=_keys(users, items, table),
        name=name,
        split=None if role is None else split_of([*[""] * count, *role.tolist()]),
        columns={name: _column(values, count) for name, values in table.columns.items()},
        scale=scale,
    )


def _keys(users: np.ndarray, items: np.ndarray, table: _Ratings) -> np.ndarray:
    """Return the public keys of all nodes."""
    user, item = np.char.add("u:", users), np.char.add("i:", items)
    one, other = np.char.add("u:", table.user), np.char.add("\ti:", table.item)
    keys = np.concatenate([user, item, np.char.add(one, other)])
    return keys.astype(f"<U{int(np.char.str_len(keys).max())}")  # as wide as the longest


def _column(values: np.ndarray, before: int) -> Tensor:
    """Return codes or numbers of all nodes, of which the first `before` are no ratings."""
    if values.dtype.kind == "f":
        return torch.cat([torch.full((before,), torch.nan).double(), torch.from_numpy(values)])
    _, codes = np.unique(values, return_inverse=True)
    return torch.cat([torch.full((before,), MISSING), torch.from_numpy(codes.astype(np.int64))])


def _read(source: Any, categories: Any, times: Any, column_names: Mapping[str, str]) -> _Ratings:
    if isinstance(source, str | os.PathLike):
        if categories is not None or times is not None:
            raise DataError(
                "expected categories and times as columns of the table of ratings, got arrays "
                f"beside {os.fspath(source)}: name the columns {CATEGORY} and {TIME}"
            )
        return _of_table(_table(source, column_names, OF_RATINGS))
    table = cells_of(source, "ratings")
    if table.ndim != 2 or table.shape[1] != 3 or table.dtype.kind not in "biufUO" or not len(table):
        raise DataError(
            f"expected ratings (R, 3) of user, item and rating, got {table.dtype} of shape "
            f"{table.shape}"
        )
    columns: RatingColumns = {}
    if categories is not None:
        columns[CATEGORY] = categories_of(beside(categories, "categories", len(table), "iuUO"))
    if times is not None:
        columns[TIME] = beside(times, "times", len(table), "iuf").astype(np.float64)
    value = np.array([rating_of(cell, row) for row, cell in enumerate(table[:, 2].tolist())])
    user, item = (ids_of(table[:, end], what) for end, what in enumerate((USER, ITEM)))
    return _Ratings(user, item, value, columns)


def _table(
    path: str | os.PathLike[str],
    columns: Mapping[str, str],
    used_names: Sequence[str],
    *,
    least: int = 1,
) -> Table:
    path = Path(path)
    if path.is_dir():
        raise DataError(
            f"expected a table in one of {', '.join(RATING_FORMATS)}, got the folder {path}: "
            "sg.load reads the folder of ratings.csv and trust.csv",
            **mistake("wrong-format", path),
        )
    if ending_of(path) not in RATING_FORMATS:
        what = other_format(path)
        raise DataError(
            f"expected a table in one of {', '.join(RATING_FORMATS)}, got {path}"
            + (f", {what}" if what else ""),
            **mistake("wrong-format", path),
        )
    table = read_table(path).without_row_numbers({*used_names, *columns.values()}).renamed(columns)
    if len(table.rows) < least:
        raise DataError(f"{path}: expected at least one row, got none")
    for name in table.header:
        check_lengths(table, name)
    return table


def _of_table(table: Table) -> _Ratings:
    user, item, value = (table.column(n, how_named(n)) for n in (USER, ITEM, RATING))
    numbers = [to_number(cell) for cell in table.number_cells(RATING)]
    for row, number in enumerate(numbers):
        if number is None:
            raise table.wrong(row, RATING, "a number", value[row], how_to_write([value[row]]))
    columns: RatingColumns = {}
    for name in table.header:
        if name == TIME:
            columns[name] = _times(table)
        elif name == SPLIT:
            columns[name] = np.array(table.words(name, PARTS, empty=True))
        elif name not in (USER, ITEM, RATING):
            columns[name] = _words(table, name)
    users, items = ids_in(table, USER, user), ids_in(table, ITEM, item)
    return _Ratings(users, items, np.array(numbers, dtype=np.float64), columns, table)


def _words(table: Table, name: str) -> np.ndarray:
    """Return a column to cut by; raise `DataError` for NaN, which no value is."""
    words = np.array(table.words(name))
    for row in np.flatnonzero(is_missing(words)).tolist():
        raise table.wrong(row, name, "a value", str(words[row]), "name it, or leave the row out")
    return words


def _times(table: Table) -> np.ndarray:
    cells = table.column(TIME)
    times = [to_number(cell) for cell in table.number_cells(TIME)]
    for row, time in enumerate(times):
        if time is None or not np.isfinite(time):
            remedy = "dates may be seconds since 1970"
            raise table.wrong(row, TIME, "a number", cells[row], remedy)
    return np.array(times, dtype=np.float64)


def _bounds(scale: Any) -> tuple[float, float]:
    """Return the least and largest rating; raise `DataError` for what is no scale."""
    ends = array_of(scale, "scale")
    if ends.shape == (2,) and ends.dtype.kind in "iuf":
        low, high = (float(end) for end in ends)
        if -np.inf < low < high < np.inf:
            return low, high
    raise DataError(
        f"expected a scale (least, largest) of ratings, got {short_repr(scale)}",
        **mistake("option-value", "scale", short_repr(scale)),
    )


def _check_values(table: _Ratings, low: float, high: float) -> None:
    """Raise `DataError` unless all ratings are numbers on the scale."""
    outside_rows = np.flatnonzero(~((table.value >= low) & (table.value <= high)))  # NaN is outside
    if len(outside_rows):
        row = int(outside_rows[0])
        other = (
            ", or say their scale: --rating-scale LEAST,LARGEST, in Python sg.ratings(..., "
            "scale=(least, largest)), for a silo scale = [least, largest] in its silo.toml"
        )
        raise DataError(
            f"expected ratings from {low:g} to {high:g}, got {table.value[row]:g} "
            f"{table.describe_row(row)} ({count_of(len(outside_rows), 'such rating')}): "
            "leave them out" + other * bool(np.isfinite(table.value[outside_rows]).all())
        )
    times = table.columns.get(TIME)
    if times is not None and not np.isfinite(times).all():
        row = int(np.flatnonzero(~np.isfinite(times))[0])
        raise DataError(f"expected finite times, got {times[row]} {table.describe_row(row)}")


def _distinct(table: _Ratings, repeated: Repeated) -> _Ratings:
    """Return one rating for each pair, in the order of pairs."""
    if repeated not in ("last", "refuse"):
        raise DataError(
            f"expected repeated='last' or 'refuse', got {repeated!r}",
            **mistake("option-value", "repeated", repeated),
        )
    _, user = np.unique(table.user, return_inverse=True)
    items, item = np.unique(table.item, return_inverse=True)
    pair = user.astype(np.int64) * len(items) + item
    time = table.columns.get(TIME, np.zeros(len(pair)))
    order = np.lexsort((time, pair))  # stable, so that the order of rows decides last
    last = np.append(pair[order][1:] != pair[order][:-1], True)
    if repeated == "refuse" and not last.all():
        row = int(order[np.flatnonzero(~last)[0] + 1])
        raise DataError(
            f"expected one rating for each pair, got another of item {table.item[row]} by user "
            f"{table.user[row]} {table.describe_row(row)} "
            f"({count_of(int((~last).sum()), 'such rating')}): leave one of them out, or read "
            "them by sg.ratings(..., repeated='last')"
        )
    return table.take(order[last])


def _trust(
    source: Any, users: np.ndarray, unrated: Unrated, columns: Mapping[str, str]
) -> np.ndarray:
    """Return both ends of each statement as numbers of users, (2, T) int64."""
    if unrated not in ("refuse", "drop"):
        raise DataError(
            f"expected unrated='refuse' or 'drop', got {unrated!r}",
            **mistake("option-value", "unrated", unrated),
        )
    if source is None:
        return np.zeros((2, 0), dtype=np.int64)
    ends = _ends(source, columns)
    place = np.searchsorted(users, ends).clip(max=len(users) - 1)
    is_known = users[place] == ends
    if unrated == "refuse" and not is_known.all():
        user = ends[~is_known][0]
        raise DataError(
            f"expected trust between users with ratings, got user {user!s} without any "
            f"({count_of(len(np.unique(ends[~is_known])), 'such user')}): "
            "leave them out, or in Python use unrated='drop'"
        )
    return place[:, is_known.all(axis=0)]


def _ends(source: Any, columns: Mapping[str, str]) -> np.ndarray:
    """Return truster and trustee of each statement as words, (2, T)."""
    if isinstance(source, str | os.PathLike):
        table = _table(source, columns, OF_TRUST, least=0)  # nobody trusts anybody there
        ends = (TRUSTER, TRUSTEE)
        return np.stack([ids_in(table, end, table.column(end, how_named(end))) for end in ends])
    pairs = cells_of(source, "trust")
    if pairs.shape == (0,):
        pairs = pairs.reshape(0, 2)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iufUO":
        raise DataError(
            f"expected trust (T, 2) of truster and trustee, got {pairs.dtype} of shape "
            f"{pairs.shape}"
        )
    return np.stack([ids_of(pairs[:, 0], TRUSTER, "row"), ids_of(pairs[:, 1], TRUSTEE, "row")])


def of_archive(path: Path, parts: Mapping[str, np.ndarray], name: str) -> Graph:
    """Return the rating graph of an .npz archive, with the papers' filter of Ciao and Epinions.

    Users that occur in no statement of trust are left out, with their ratings. So are ratings below
    1 or above 5: Ciao has 34 zeros, which its scale does not have. Of repeated pairs the last one
    counts.

    Args:
        path: the file, for errors.
        parts: `ratings` (R, 3), `trust` (T, 2); perhaps `rating_category`, `rating_time` (R,).
        name: of the graph.

    Raises:
        DataError: the arrays are no such data.
    """
    table, pairs = parts["ratings"], parts["trust"]
    if table.ndim != 2 or table.shape[1] != 3 or table.dtype.kind not in "iuf":
        raise DataError(
            f"{path}: expected ratings (R, 3) of numbers, got {table.dtype} {table.shape}"
        )
    alike = table.dtype == pairs.dtype
    # numpy compares signed with unsigned numbers as floats, in which near ids are the same.
    trusting = np.isin(table[:, 0] if alike else table[:, 0].astype(object), pairs)
    usable = trusting & (table[:, 2] >= SCALE[0]) & (table[:, 2] <= SCALE[1])
    key_of = {"categories": "rating_category", "times": "rating_time"}
    further: dict[str, Any] = {what: parts[key] for what, key in key_of.items() if key in parts}
    if any(value.shape != (len(table),) for value in further.values()):
        raise DataError(f"{path}: expected one category and time for each of {len(table)} ratings")
    try:
        return ratings(
            table[usable],
            trust=pairs,
            unrated="drop",
            name=name,
            **{what: value[usable] for what, value in further.items()},
        )
    except DataError as error:
        raise reword_error(error, f"{path}: {error}", DataError) from None
