"""Tables from files: CSV, .npz and Parquet alike as rows of words that know where they stand."""

import io
import logging
import math
import threading
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import DataError, missing_package, mistake, nearest, reword_error
from silograph.core.text import count_of, printable
from silograph.graph.csr import CSR
from silograph.graph.read.columns import (
    INDEX_NAMES,
    UNNAMED,
    USUAL,
    MissingValues,
    compact_features,
    how_to_write,
    is_null,
    read_column,
    report_row_numbers,
    row_number_columns,
    to_number,
    to_time,
)
from silograph.graph.read.contents import (
    PER_BYTE,
    ending_of,
    memory_left,
    read_contents,
    read_text,
)
from silograph.graph.read.delimited import (
    DecimalMark,
    is_edge_list,
    read_delimited,
    read_edge_list,
    read_movielens,
)

Arrays = dict[str, np.ndarray]
CELL = 60  # bytes of memory that a cell takes as text, at least
NODE = 500  # and a node of a graph
GRAPH_FILES = tuple(e + gz for gz in ("", ".gz") for e in (".graphml", ".gexf", ".gml"))
MOST_LISTED = 12  # names of columns in an error
FORMATS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".npz", ".parquet")  # of tables of any kind
RATING_FORMATS = (*FORMATS, ".dat", ".dat.gz")
EDGE_LISTS = tuple(e + gz for gz in ("", ".gz") for e in (".txt", ".edges", ".edgelist", ".mtx"))
EDGE_FORMATS = (*FORMATS, *EDGE_LISTS)
# What other files are, by their ending, and how to use them.
OTHER_FORMATS = {
    ".gz": "a file packed by gzip, whose name does not say what it is: keep the ending of what was "
    "packed, as in nodes.csv.gz",
    ".zip": "a compressed file: unpack it first (unzip)",
    ".tab": "a table with tabs: let its name end with .tsv",
    ".pt": "a file of PyTorch, which may run code when it is read: if you trust it, "
    "load it by torch with weights_only=False, and give the object to sg.from_pyg",
    ".mat": "a MATLAB file: read it by scipy.io.loadmat(PATH), then sg.from_arrays(...)",
    ".npy": "a single array: sg.from_arrays(edge_index=..., x=..., y=...)",
    ".xlsx": "a workbook: save its sheets as nodes.csv and edges.csv",
    ".json": "a JSON file: sg.from_networkx(networkx.node_link_graph(json.load(open(PATH))), ...)",
    ".pkl": "a pickle, which may run code when it is read: if you trust it, load it and use "
    "sg.from_networkx, sg.from_pyg or sg.from_arrays",
}
OTHER_FORMATS |= {
    **dict.fromkeys((".pth", ".ckpt"), OTHER_FORMATS[".pt"]),
    **dict.fromkeys((".pickle", ".gpickle"), OTHER_FORMATS[".pkl"]),
    ".xls": OTHER_FORMATS[".xlsx"],
}
# numpy parses headers with `ast`, which fails in threads before Python 3.11.8 (cpython#106905).
ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Table:
    """Cells as text, row by row.

    Attributes:
        path: the file.
        header: names of the columns.
        rows: the cells; of a CSV file stripped.
        lines: the line on which every row ends; of other files the row, from 0, or the name of
            what it is about.
        unit: what `lines` number or name: `line`, `row`, `entry`, `node` or `edge`.
        called: the file's own names of columns, by their names in `header`, where they differ.
        missing: the cells that count as missing in columns of labels and numbers.
        decimal: what stands before the fractions of numbers.
        matrix_rows: of the entries of a matrix, how many rows that has; else None.
        undirected: of edges, whether the file says that they have no directions.
    """

    path: Path
    header: list[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[object]
    unit: str = "line"
    called: Mapping[str, str] = field(default_factory=dict)
    missing: MissingValues = USUAL
    decimal: DecimalMark = "."
    matrix_rows: int | None = None
    undirected: bool = False

    @property
    def head(self) -> str:
        """The place of the column names, for an error."""
        return f"{self.path}, line 1" if self.unit == "line" else f"{self.path}"

    def where(self, row: int) -> str:
        """Describe the place of a row, for an error."""
        return f"{self.path}, {self.unit} {self.lines[row]}"

    def column(
        self, name: str, advice: str = "name yours in the call or by --columns"
    ) -> list[str]:
        """Return the cells of a column.

        Raises:
            DataError: there is none of that name.
        """
        if name not in self.header:
            raise self._no_column(name, f"rename one, or {advice}")
        place = self.header.index(name)
        return [row[place] for row in self.rows]

    def number_cells(self, name: str) -> list[str]:
        """Return the cells of a column of numbers with a point before fractions.

        Raises:
            DataError: there is no such column, or a comma or point of a cell may mean two things.
        """
        cells = self.column(name)
        if self.decimal == ".":
            return cells
        for row, cell in enumerate(cells):
            if self.decimal == "unclear" and "," in cell:
                expected, remedy = (
                    "a number whose comma can mean one thing",
                    "it may stand before the fraction or between thousands: write 1234 or 1.234",
                )
            elif self.decimal == "," and "." in cell and to_number(cell) is not None:
                expected, remedy = (
                    "a decimal comma, as other columns have",
                    "write commas before all fractions, and nothing between thousands",
                )
            else:
                continue
            raise self.wrong(row, name, expected, cell, remedy)
        return [cell.replace(",", ".") for cell in cells]

    def check_named(self, names: Iterable[str]) -> None:
        """Raise `DataError` for a name that no column has; it says which one is near."""
        for name in names:
            suggestion = None if name in self.header else nearest(name, self.header)
            if suggestion:
                raise self._no_column(name, f"did you mean {printable(suggestion)!r}?")
            self.column(name)

    def _no_column(self, name: str, remedy: str) -> DataError:
        return DataError(
            f"{self.head}: expected a column {name!r}, got columns {self._list_columns()}: "
            f"{remedy}",
            **mistake("missing-column", self.path, name),
        )

    def _list_columns(self) -> str:
        """Return the first names of columns, as the file has them."""
        names = [printable(self.called.get(name, name)) for name in self.header[:MOST_LISTED]]
        return ", ".join([*names, "..."] if len(self.header) > MOST_LISTED else names)

    def renamed(self, columns: Mapping[str, str]) -> "Table":
        """Return the table with other names of columns.

        Args:
            columns: what the table calls each column, by the column's new name.

        Raises:
            DataError: there is no such column, it is to be two columns, or another one has the new
                name.
        """
        for name, column_name in columns.items():
            self.column(column_name, f"correct the name given for {name}")
        new = {column_name: name for name, column_name in columns.items()}
        if len(new) < len(columns):
            column_name = next(g for g in columns.values() if list(columns.values()).count(g) > 1)
            names = " and ".join(name for name, column in columns.items() if column == column_name)
            raise DataError(
                f"{self.head}: expected one name for column {column_name!r}, got {names}"
            )
        header = [new.get(name, name) for name in self.header]
        twice = next((name for name in header if header.count(name) > 1), None)
        if twice is not None:
            raise DataError(
                f"{self.head}: expected {columns[twice]!r} to be column {twice!r}, got another "
                f"column {twice!r} beside it: rename or drop that one"
            )
        return replace(self, header=header, called=columns)

    def numbers(self, columns: Sequence[str]) -> np.ndarray:
        """Return numeric columns, (n, F), of the dtype that `compact_features` chooses.

        Raises:
            DataError: a cell that is no finite number in float32.
        """
        wide = np.empty((len(self.rows), len(columns)), dtype=np.float64)
        for number, column in enumerate(columns):
            cells = self.number_cells(column)
            parsed = [None if cell in self.missing else to_number(cell) for cell in cells]
            wide[:, number] = [np.nan if value is None else value for value in parsed]
        x = compact_features(wide)
        bad = np.argwhere(~np.isfinite(x))
        if len(bad):
            row, number = (int(place) for place in bad[0])
            column = columns[number]
            cells = self.column(column)
            if cells[row] in self.missing:
                several = sum(cell in self.missing for cell in cells)
                remedy = f"missing in {count_of(several, 'row')}: fill it, or take the column out"
            else:
                remedy = self._how_to_write(cells, row) or (
                    "columns without another meaning are features; take this one out, or write a "
                    "column of 0 and 1 for each of its words"
                )
            raise self.wrong(row, column, "a finite number (float32)", cells[row], remedy)
        return x

    def optional_numbers(self, column: str, expected: str) -> np.ndarray:
        """Return a column of numbers (n,) float64 with NaN where missing.

        Raises:
            DataError: a cell that is neither a number nor missing; says what was `expected`.
        """
        cells = self.number_cells(column)
        numbers = [math.nan if cell in self.missing else to_number(cell) for cell in cells]
        if None in numbers:
            row = numbers.index(None)
            raise self.wrong(row, column, expected, cells[row], self._how_to_write(cells, row))
        return np.array(numbers, dtype=np.float64)

    def times(self, column: str) -> np.ndarray:
        """Return a column of times (n,) float64, in seconds since 1970 or as it counts them.

        NaN is a missing time.

        Raises:
            DataError: a cell that is neither missing nor like the others a finite number, or a date
                or time in ISO 8601.
        """
        cells, number_cells = self.column(column), self.number_cells(column)
        known = [row for row, cell in enumerate(cells) if cell not in self.missing]
        numbers = [to_number(number_cells[row]) for row in known]
        times = [to_time(cells[row]) for row in known]
        read, expected = (
            (times, "a date or time such as 2024-02-11 or 2024-02-11T09:30")
            if numbers.count(None) >= times.count(None) and None in numbers
            else (numbers, "a finite number")
        )
        values = np.full(len(cells), np.nan)
        for row, value in zip(known, read, strict=True):
            if value is None or not math.isfinite(value):
                remedy = "write all times of the column as numbers, or all in ISO 8601"
                raise self.wrong(row, column, expected, cells[row], remedy)
            values[row] = value
        return values

    def _how_to_write(self, cells: Sequence[str], row: int) -> str:
        """Return how to write the words of a column as numbers; empty if `row` has none."""
        words = [cell for cell in cells if cell not in self.missing and to_number(cell) is None]
        return how_to_write(words) if cells[row] in words else ""

    def labels(self, column: str) -> np.ndarray:
        """Return a column of labels (n,): float64 with NaN where missing, or words and None."""
        return read_column(self.column(column), "label", self.missing, from_text=True)

    def ids(self, column: str) -> np.ndarray:
        """Return a column of keys (n,): int64, uint64 or text."""
        return read_column(self.column(column), "id", from_text=True)

    def without_row_numbers(self, used_names: Iterable[str]) -> "Table":
        """Return the table without columns that number its rows, which is reported.

        Args:
            used_names: names of columns that have a meaning; they stay.
        """
        candidates = [
            name for name in self.header if name in INDEX_NAMES or UNNAMED.fullmatch(name)
        ]
        row_numbers = row_number_columns(
            {name: self.column(name) for name in candidates}, used_names
        )
        if not row_numbers:
            return self
        report_row_numbers(self.path, row_numbers)
        keep = [place for place, name in enumerate(self.header) if name not in row_numbers]
        rows = [[row[place] for place in keep] for row in self.rows]
        return replace(self, header=[self.header[place] for place in keep], rows=rows)

    def words(self, column: str, choices: Sequence[str] = (), *, empty: bool = False) -> list[str]:
        """Return a column of words: of `choices` where given, empty cells only where allowed.

        Among `choices` a missing value is an empty cell; elsewhere any word is a name.

        Raises:
            DataError: another word.
        """
        cells = self.column(column)
        if choices:
            cells = ["" if cell in self.missing else cell for cell in cells]
        expected = " or ".join(choices) or "a name"
        for row, cell in enumerate(cells):
            if (not cell and not empty) or (cell and choices and cell not in choices):
                raise self.wrong(row, column, expected + " or nothing" * empty, cell)
        return cells

    def wrong(
        self, row: int, column: str, expected: str, got: object, remedy: str = ""
    ) -> DataError:
        """Return the error for a cell."""
        hint = f": {remedy}" if remedy else ""
        return DataError(
            f"{self.where(row)}, column {self.called.get(column, column)!r}: expected {expected}, "
            f"got {got!r}{hint}",
            **mistake(
                "bad-cell", self.path, self.lines[row], self.called.get(column, column), str(got)
            ),
        )


def other_format(path: Path) -> str | None:
    """Return the format of a file that cannot be read here, and how to use it; else None."""
    if ending_of(path) in EDGE_FORMATS + RATING_FORMATS + GRAPH_FILES:
        return None
    advice = OTHER_FORMATS.get(path.suffix.lower())
    return None if advice is None else advice.replace("PATH", repr(str(path)))


def read_table(path: Path, missing: MissingValues = USUAL) -> Table:
    """Return the table in a file of one of `EDGE_FORMATS` or `RATING_FORMATS`, by its ending.

    Other files are read as `read_csv` does.

    Raises:
        DataError: the file is absent, damaged, or no table; or pyarrow is missing.
    """
    ending = ending_of(path).removesuffix(".gz")
    if ending == ".npz":
        table = _read_npz(path)
    elif ending == ".parquet":
        table = _read_parquet(path)
    elif ending == ".mtx":
        table = _read_matrix_market(path)
    elif ending == ".dat":
        table = Table(path, **vars(read_movielens(path)))
    elif ending in EDGE_LISTS and is_edge_list(text := read_text(path, "a list of edges")):
        table = Table(path, **vars(read_edge_list(path, text)))
    else:
        table = read_csv(path)
    return replace(table, missing=missing)


def read_csv(path: Path) -> Table:
    """Return the table of a text file with a header line, see `read_delimited`.

    Raises:
        DataError: names the line.
    """
    return Table(path, **vars(read_delimited(path)))


def read_arrays(path: Path, expected: str, choose: Callable[[set[str]], Collection[str]]) -> Arrays:
    """Return arrays of an .npz archive; nothing in it is ever unpickled.

    Args:
        path: the file.
        expected: what should be in it, for errors.
        choose: which of the keys to read; raises where one is missing.

    Raises:
        DataError: the file is absent, damaged, or holds Python objects.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: expected an .npz file, got no such file", **mistake("missing-file", path)
        )
    with path.open("rb") as file:  # numpy leaves a file open that is no archive
        try:
            archive = np.load(file, allow_pickle=False)
            keys = set(archive.files)
        # Foreign bytes surface as errors of numpy, zipfile, zlib, struct, ast and more.
        except Exception:
            raise DataError(
                f"{path}: expected an .npz file with {expected}, got none that can be read: "
                "empty, cut short, or another format",
                **mistake("wrong-format", path),
            ) from None
        keys_to_read = sorted(choose(keys))
        check_unpacked(path, keys_to_read)
        return {key: _array(path, archive, key) for key in keys_to_read}


def check_unpacked(path: Path, keys: Collection[str]) -> None:
    """Raise `DataError` where arrays of an archive say that they do not fit into memory.

    A few megabytes can hold gigabytes of zeros. The sizes that an archive declares are looked at
    before anything is unpacked; no more than that is read.
    """
    names = {name for key in keys for name in (key, f"{key}.npy")}
    with zipfile.ZipFile(path) as archive:
        size = sum(part.file_size for part in archive.infolist() if part.filename in names)
    if size > (most := memory_left()):
        raise DataError(
            f"{path}: expected arrays of at most {most:,} bytes, the memory that is free, got "
            f"{size:,} once unpacked: use a machine with more memory, or smaller data",
            **mistake("too-large", path),
        )


def _array(path: Path, archive: Any, key: str) -> np.ndarray:
    try:
        with ONE_AT_A_TIME:
            part: np.ndarray = archive[key]
        if part.dtype.kind == "U":
            "".join(part.ravel().tolist()).encode()  # damaged words are no text
    except Exception as error:  # see `read_arrays`
        raise DataError(
            f"{path}: expected {key!r} to be an array of numbers or words, got one that cannot be "
            f"read ({type(error).__name__}): damaged, or Python objects; write it with np.savez",
            **mistake("wrong-format", path),
        ) from None
    return part


def _read_npz(path: Path) -> Table:
    """Return the table of arrays (n,), one a column."""
    arrays = read_arrays(path, "a column an array", lambda keys: keys)
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "biufU":
            raise DataError(
                f"{path}: expected {name!r} of shape (n,), numbers or words, got {array.shape} of "
                f"{array.dtype}: one array a column"
            )
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"{path}: expected columns of one length, got {text}")
    return _of_columns(path, {name: array.tolist() for name, array in arrays.items()})


def _read_parquet(path: Path) -> Table:
    arrow, parquet = pyarrow(path)
    try:
        about = parquet.read_metadata(path)
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        size = sum(group.total_byte_size for group in groups)
        # A column of one value takes a few bytes, however many rows it has.
        needed = max(PER_BYTE * size, CELL * about.num_rows * about.num_columns)
        if needed > (most := memory_left()):
            raise DataError(
                f"{path}: expected a table that takes at most {most:,} bytes, the memory that is "
                f"free, got {about.num_rows:,} rows of {count_of(about.num_columns, 'column')}, "
                f"about {needed:,} bytes: use a machine with more memory, or smaller data",
                **mistake("too-large", path),
            )
        table = parquet.read_table(path)
    except (OSError, arrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path}: expected a Parquet file, got: {reason}", **mistake("wrong-format", path)
        ) from None
    return _of_columns(path, {name: table[name].to_pylist() for name in table.column_names})


def _read_matrix_market(path: Path) -> Table:
    """Return the entries of a square sparse matrix as edges between rows, which count from 1.

    Its values are weights, unless it is a pattern. Of a symmetric matrix each entry is one edge.
    """
    import scipy.io

    expected = "a square sparse matrix in the Matrix Market format"
    raw = read_contents(path, expected)
    try:
        rows, columns, entries, form, field, symmetry = scipy.io.mminfo(io.BytesIO(raw))
        fits = form == "coordinate" and rows == columns and field != "complex"
        # An entry takes 4 bytes or more; what the head declares is allocated before they are read.
        if fits and 4 * entries > len(raw):
            raise ValueError(f"{len(raw):,} bytes that cannot hold {entries:,} entries")
        if fits and NODE * rows > memory_left():
            raise ValueError(f"{rows:,} rows, for which there is too little free memory")
        matrix: Any = scipy.io.mmread(io.BytesIO(raw)) if fits else None
    except (ValueError, OverflowError, MemoryError, TypeError) as error:
        place, _, reason = str(error).rpartition(": ")
        line = place.lower().replace("line", ", line") if place.startswith("Line ") else ""
        raise DataError(
            f"{path}{line}: expected {expected}, got {reason or place}",
            **mistake("wrong-format", path),
        ) from None
    if matrix is None:
        got = f"{field} values" if field == "complex" else f"{rows} rows and {columns} columns"
        got = "a dense one" if form != "coordinate" else got
        raise DataError(
            f"{path}: expected {expected} of numbers, got {got}", **mistake("wrong-format", path)
        )
    stored = matrix.row >= matrix.col if symmetry != "general" else np.ones(matrix.nnz, np.bool_)
    arrays = {"source": matrix.row[stored] + 1, "target": matrix.col[stored] + 1}
    if field != "pattern":
        arrays["weight"] = matrix.data[stored]
    table = _of_columns(path, {name: values.tolist() for name, values in arrays.items()})
    undirected = symmetry != "general"
    return replace(table, unit="entry", matrix_rows=int(rows), undirected=undirected)


def pyarrow(path: Path) -> tuple[Any, Any]:
    """Return the modules pyarrow and pyarrow.parquet.

    Raises:
        DataError: they are missing; names the file that they are wanted for.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        error = missing_package(
            "pyarrow", "Parquet", "parquet", DataError, otherwise="CSV or .npz files"
        )
        raise reword_error(error, f"{path}: {error}", DataError) from None
    return pyarrow, pyarrow.parquet


def _of_columns(path: Path, columns: dict[str, list[Any]]) -> Table:
    words = [[word_of(cell) for cell in cells] for cells in columns.values()]
    rows = list(zip(*words, strict=True))
    return Table(path, list(columns), rows, range(len(rows)), "row")


def word_of(cell: object) -> str:
    """Return a cell as text: empty if missing, whole numbers without decimals."""
    if is_null(cell):
        return ""
    if isinstance(cell, float | np.floating) and cell.is_integer() and abs(float(cell)) < 2**53:
        return str(int(cell))  # a column of integers with holes is one of floats
    return str(cell)


# --- edge values ---------------------------------------------------------------------------------
# Weights of edges, and what else is known of edges and not used, which is reported in one line.


LOG = logging.getLogger("silograph")
RepeatedEdges = Literal["mean", "sum", "count", "last", "first"]
IN_RANGE = "from 0 to 3.4e38 (float32)"  # what weights are
WEIGHTS = ("edge_weight", "edge_weights", "weight")  # names that others use
# A single column of it is a weight, too, if all its numbers could be one and are floating point:
# whole numbers there are mostly kinds of edges.
FEATURES = "edge_attr"
NAMES = (*WEIGHTS, FEATURES)


def chosen_weight(attributes: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """Return the name of the weights (E,) among values of edges, and the names of the others.

    Others that are alike for all edges say nothing, and are not named.

    >>> chosen_weight({"edge_weight": [1.0, 2.0], "edge_attr": [[0, 1], [0, 2]]})
    ('edge_weight', ['edge_attr'])
    """
    edge_values = {name: np.asarray(attributes[name]) for name in NAMES if name in attributes}
    able = [name for name, values in edge_values.items() if name in WEIGHTS or _could_weigh(values)]
    weight_name = able[0] if able else None
    return weight_name, [
        name
        for name, v in edge_values.items()
        if name != weight_name and v.ndim > 0 and bool((v != v[:1]).any())
    ]


def report_unused(source: object, names: Iterable[str]) -> None:
    """Report values of edges that are not used, if there are any.

    Args:
        source: where it was found.
        names: of the values.
    """
    words = ", ".join(names)
    if words:
        LOG.warning("%s: values of edges (%s) are not used", source, words)


def checked_weights(values: Any, edges: int) -> np.ndarray:
    """Return weights of edges (E,) or (E, 1) as (E,) float64.

    Raises:
        DataError: they are not `edges` finite numbers >= 0; of another shape than (E,), other kinds
            of values, or too large for float32.
    """
    weight = np.asarray(values)
    if weight.ndim == 2 and weight.shape[1] == 1:
        weight = weight[:, 0]
    if weight.shape != (edges,) or (weight.dtype.kind not in "biuf" and edges):
        raise DataError(
            f"expected edge_weight of shape ({edges},), one number an edge, got {weight.shape} of "
            f"dtype {weight.dtype}"
        )
    weight = weight.astype(np.float64)
    wrong = np.flatnonzero(~usable(weight))
    if len(wrong):
        raise DataError(
            f"expected edge weights {IN_RANGE}, got {weight[wrong[0]]} at edge {wrong[0]} "
            f"({count_of(len(wrong), 'such edge')}): drop these edges or change their weights"
        )
    return weight


def usable(weight: np.ndarray) -> np.ndarray:
    """Return which numbers can be weights: not negative, and finite in float32, too."""
    with np.errstate(invalid="ignore"):
        is_usable: np.ndarray = (weight >= 0) & (weight <= np.finfo(np.float32).max)
    return is_usable


def weights_of(
    adj: CSR,
    edges: np.ndarray,
    weight: np.ndarray | None,
    source: object,
    repeated_edges: RepeatedEdges = "mean",
) -> Tensor | None:
    """Return the weight of every stored edge, (nnz,) float64; None where all are 1.

    Edges have no direction, so one that is listed in both directions is listed twice. What is
    listed for it is combined as `repeated_edges` says, see `combine_repeated`.

    Args:
        adj: (n, n) the edges, both directions.
        edges: (2, E) as listed, perhaps with self loops, whose weights are lost as they are.
        weight: (E,) float64; None: each counts 1.
        source: where they were found.
        repeated_edges: the rule.

    Raises:
        DataError: no such rule, or a sum is too large for float32.
    """
    check_rule(repeated_edges)
    if weight is None:
        if repeated_edges not in ("sum", "count"):
            return None
        weight = np.ones(edges.shape[1])
    low, high = edges.min(axis=0), edges.max(axis=0)
    is_no_loop = low < high
    pair, weight = (low * adj.num_rows + high)[is_no_loop], weight[is_no_loop]
    if repeated_edges == "mean" and (weight == 1).all():
        return None
    pairs, combined = combine_repeated(pair, weight, repeated_edges, source)
    if repeated_edges != "mean" and (combined == 1).all():
        return None
    if repeated_edges in ("sum", "count"):
        is_forward = (edges[0] < edges[1])[is_no_loop]
        if len(pair) and np.array_equal(np.sort(pair[is_forward]), np.sort(pair[~is_forward])):
            LOG.warning(
                "%s: every edge is listed in both directions, and repeated_edges=%s counts both",
                source,
                repeated_edges,
            )
    row, column = adj.row.numpy(), adj.indices.long().numpy()
    place = np.minimum(row, column) * adj.num_rows + np.maximum(row, column)
    return torch.from_numpy(combined[np.searchsorted(pairs, place)])


def weights_by_direction(
    adj: CSR,
    edges: np.ndarray,
    weight: np.ndarray | None,
    source: object,
    repeated_edges: RepeatedEdges = "mean",
) -> tuple[Tensor | None, Tensor]:
    """Return what `weights_of` returns, and the weight of every edge from its row to its column.

    The latter is `Graph.directed_weight`, (nnz,): -1 where that direction is not listed; int8 where
    each listed direction has the weight of the edge, else float64.

    Args:
        adj: (n, n) as `CSR.directions` returns it.
        edges: as for `weights_of`; so are the other arguments and errors.
        weight: (E,) float64; None: each counts 1.
        source: where they were read.
        repeated_edges: the rule, here for edges that are listed several times in one direction.
    """
    edge_weight = weights_of(adj, edges, weight, source, repeated_edges)
    assert adj.values is not None  # see `CSR.directions`
    is_listed = (adj.values & 1).bool()
    directed_weight = is_listed.to(torch.int8) * 2 - 1
    if weight is None and edge_weight is not None:  # edges are counted
        weight = np.ones(edges.shape[1])
    if weight is not None:
        is_no_loop = edges[0] != edges[1]
        source_node, target = edges[:, is_no_loop]
        pairs, combined = combine_repeated(
            source_node * adj.num_rows + target,
            weight[is_no_loop],
            repeated_edges,
            source,
            warn=False,  # `weights_of` has logged it
        )
        if edge_weight is None and not (combined == 1).all():
            # The first or last weights of all edges are 1, but not those of a direction.
            edge_weight = torch.ones(adj.nnz, dtype=torch.float64)
        if edge_weight is not None:
            place = (adj.row * adj.num_rows + adj.indices)[is_listed].numpy()
            weights = torch.from_numpy(combined[np.searchsorted(pairs, place)])
            if not torch.equal(weights, edge_weight[is_listed]):
                directed_weight = directed_weight.double()
                directed_weight[is_listed] = weights
    return edge_weight, directed_weight


def check_rule(repeated_edges: object) -> None:
    """Raise `DataError` for what is no rule for repeated edges."""
    if repeated_edges not in get_args(RepeatedEdges):
        raise DataError(
            f"repeated_edges: expected {', '.join(get_args(RepeatedEdges)[:-1])} or "
            f"{get_args(RepeatedEdges)[-1]}, got {repeated_edges!r}",
            **mistake("option-value", "repeated_edges", str(repeated_edges)),
        )


def combine_repeated(
    pair: np.ndarray,
    weight: np.ndarray,
    repeated_edges: RepeatedEdges,
    source: object,
    *,
    warn: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Return each edge once, (e,) ascending, and its weight (e,) float64.

    `sum` and `mean` do not depend on the order of the list, to the bit. Where the mean is of
    weights that differ, a line is logged.

    >>> combine_repeated(np.array([7, 3, 7]), np.array([1.0, 2.0, 4.0]), "sum", "edges.csv")
    (array([3, 7]), array([2., 5.]))

    Args:
        pair: (E,) a number for each edge as listed, the same for the same edge.
        weight: (E,) float64.
        repeated_edges: `mean`, `sum`, the `count` of what is listed, or the `last` or `first` in
            the order of the list.
        source: of the list.
        warn: whether that line is logged.

    Raises:
        DataError: a sum is too large for float32.
    """
    in_order = repeated_edges in ("last", "first")
    # Otherwise by weight, too, so that no order of listing matters.
    order = np.argsort(pair, kind="stable") if in_order else np.lexsort((weight, pair))
    pair, weight = pair[order], weight[order]
    first = np.flatnonzero(np.diff(pair, prepend=-1))
    last = np.append(first[1:], len(pair)) - 1
    count = last - first + 1
    if not len(first) or repeated_edges == "first":
        return pair[first], weight[first]
    if repeated_edges == "last":
        return pair[first], weight[last]
    if repeated_edges == "count":
        return pair[first], count.astype(np.float64)
    sums = np.add.reduceat(weight, first)
    if repeated_edges == "sum":
        if not usable(sums).all():
            raise DataError(
                f"{source}: expected sums of edge weights {IN_RANGE}, got {sums.max():g}: use "
                "another rule than repeated_edges=sum, or smaller weights"
            )
        return pair[first], sums
    differs = weight[first] != weight[last]
    if warn and differs.any():
        LOG.warning(
            "%s: %s listed with several weights, as in both directions: the mean counts (in runs "
            "with directed each direction has its own)",
            source,
            count_of(int(differs.sum()), "edge"),
        )
    return pair[first], np.where(differs, sums / count, weight[first])


def _could_weigh(values: np.ndarray) -> bool:
    """Whether values are one floating point number an edge, each of which could be a weight."""
    single = values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)
    return single and values.dtype.kind == "f" and bool(usable(values).all())
