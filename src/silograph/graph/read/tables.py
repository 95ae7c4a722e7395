"""Tables from files: CSV, .npz and Parquet alike as rows of words that know where they stand."""

import csv
import io
import logging
import math
import os
import threading
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import DataError, nearest
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
)

Arrays = dict[str, np.ndarray]
MOST_LISTED = 12  # names of columns in an error
FORMATS = (".csv", ".npz", ".parquet")
# What other files are, by their ending, and how to use them.
OTHER_FORMATS = {
    ".graphml": "a GraphML file: sg.from_networkx(networkx.read_graphml(PATH), x=[...], y=...)",
    ".gexf": "a GEXF file: sg.from_networkx(networkx.read_gexf(PATH), x=[...], y=...)",
    ".gml": "a GML file: sg.from_networkx(networkx.read_gml(PATH), x=[...], y=...)",
    ".gz": "a compressed file: unpack it first (gunzip)",
    ".zip": "a compressed file: unpack it first (unzip)",
    ".pt": "a file of PyTorch, which may run code when it is read: if you trust it, "
    "load it by torch with weights_only=False, and give the object to sg.from_pyg",
    ".dat": "a table such as MovieLens has, with :: between columns: write ratings.csv by "
    "pandas.read_csv(PATH, sep='::', engine='python', names=['user', 'item', 'rating', "
    "'time']).to_csv('ratings.csv', index=False) and give its folder",
    ".tsv": "a table with tabs: write it with commas by pandas.read_csv(PATH, sep='\\t')"
    ".to_csv('nodes.csv', index=False)",
    ".txt": "a text file such as a SNAP list of edges, which has no labels: give the nodes of "
    "networkx.read_edgelist(PATH) an attribute y and use sg.from_networkx(...)",
    ".mtx": "a MatrixMarket file, which has no labels: sg.from_arrays(edge_index=numpy.stack("
    "scipy.io.mmread(PATH).nonzero()), x=..., y=...)",
    ".mat": "a MATLAB file: read it by scipy.io.loadmat(PATH), then sg.from_arrays(...)",
    ".npy": "a single array: sg.from_arrays(edge_index=..., x=..., y=...)",
    ".parquet": "a Parquet file: give the folder of ratings.parquet or of silos, or write "
    "nodes.csv and edges.csv by pandas.read_parquet(PATH).to_csv(..., index=False)",
    ".xlsx": "a workbook: save its sheets as nodes.csv and edges.csv",
    ".json": "a JSON file: sg.from_networkx(networkx.node_link_graph(json.load(open(PATH))), ...)",
    ".pkl": "a pickle, which may run code when it is read: if you trust it, load it and use "
    "sg.from_networkx, sg.from_pyg or sg.from_arrays",
}
OTHER_FORMATS |= {
    **dict.fromkeys((".pth", ".ckpt"), OTHER_FORMATS[".pt"]),
    **dict.fromkeys((".pickle", ".gpickle"), OTHER_FORMATS[".pkl"]),
    **dict.fromkeys((".edges", ".edgelist"), OTHER_FORMATS[".txt"]),
    ".tab": OTHER_FORMATS[".tsv"],
    ".xls": OTHER_FORMATS[".xlsx"],
}
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars", "::": "double colons"}
# numpy parses headers with `ast`, which fails in threads before Python 3.11.8 (cpython#106905).
ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Table:
    """Cells as text, row by row.

    Attributes:
        path: the file.
        header: names of the columns.
        rows: the cells; of a CSV file stripped.
        lines: the line on which every row ends; of other files the row, from 0.
        unit: `line` or `row`.
        called: the file's own names of columns, by their names in `header`, where they differ.
        missing: the cells that count as missing in columns of labels and numbers.
    """

    path: Path
    header: list[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[int]
    unit: str = "line"
    called: Mapping[str, str] = field(default_factory=dict)
    missing: MissingValues = USUAL

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

    def check_named(self, names: Iterable[str]) -> None:
        """Raise `DataError` for a name that no column has; it says which one is near."""
        for name in names:
            suggestion = None if name in self.header else nearest(name, self.header)
            if suggestion:
                raise self._no_column(name, f"did you mean {printable(suggestion)!r}?")
            self.column(name)

    def _no_column(self, name: str, remedy: str) -> DataError:
        return DataError(
            f"{self.head}: expected a column {name!r}, got columns {self._list_columns()}: {remedy}"
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
            cells = self.column(column)
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
        cells = self.column(column)
        numbers = [math.nan if cell in self.missing else to_number(cell) for cell in cells]
        if None in numbers:
            row = numbers.index(None)
            raise self.wrong(row, column, expected, cells[row], self._how_to_write(cells, row))
        return np.array(numbers, dtype=np.float64)

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
            f"got {got!r}{hint}"
        )


def other_format(path: Path) -> str | None:
    """Return the format of a file that cannot be read here, and how to use it; else None."""
    advice = OTHER_FORMATS.get(path.suffix.lower())
    return None if advice is None else advice.replace("PATH", repr(str(path)))


def read_table(path: Path, missing: MissingValues = USUAL) -> Table:
    """Return the table in a file of one of `FORMATS`, by its ending.

    Raises:
        DataError: the file is absent, damaged, or no table; or pyarrow is missing.
    """
    reader = {".csv": read_csv, ".npz": _read_npz, ".parquet": _read_parquet}
    return replace(reader[path.suffix](path), missing=missing)


def read_csv(path: Path) -> Table:
    """Return the table of a CSV file: comma separated, UTF-8, with a header line.

    Raises:
        DataError: names the line.
    """
    text = _text(path)
    _check_separator(path, text)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[tuple[str, ...]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if row:  # a blank line holds nothing
                rows.append(tuple(cell.strip() for cell in row))
                lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: expected comma separated text, got {error}"
        ) from None
    if not rows:
        raise DataError(f"{path}: expected a header line, got an empty file")
    header = list(rows[0])
    nonempty = [name for name in header if name]  # spreadsheets write empty columns at the end
    if len(set(nonempty)) < len(nonempty):
        raise DataError(f"{path}, line 1: expected distinct columns, got {', '.join(header)}")
    for cells, line in zip(rows, lines, strict=True):
        if len(cells) != len(header):
            raise DataError(
                f"{path}, line {line}: expected {len(header)} cells, as in the header, "
                f"got {len(cells)}"
            )
    return Table(path, header, rows[1:], lines[1:])


def _check_separator(path: Path, text: str) -> None:
    """Raise `DataError` where the first line is none of a table with commas."""
    header = text.lstrip("\n").partition("\n")[0]
    if "," in header:
        return
    if header.startswith("#"):
        raise DataError(
            f"{path}, line 1: expected a header of columns with commas, got a remark as SNAP lists "
            "of edges have: write a table that begins with the line source,target, as by pandas."
            f"read_csv({str(path)!r}, sep='\\t', comment='#', names=['source', 'target'])"
            ".to_csv('edges.csv', index=False)"
        )
    separator = next((mark for mark in SEPARATORS if mark in header), None)
    if separator is not None:
        decimal = ", decimal=','" if separator == ";" else ""
        engine = ", engine='python'" if len(separator) > 1 else ""
        raise DataError(
            f"{path}, line 1: expected commas between columns, got {SEPARATORS[separator]}: write "
            f"it with commas, as by pandas.read_csv({str(path)!r}, sep={separator!r}{decimal}"
            f"{engine}).to_csv({path.name!r}, index=False)"
        )


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: expected a CSV file, got {error.strerror}") from None
    if raw[:2] == b"\x1f\x8b":
        raise DataError(f"{path}: expected a CSV file, got a compressed one: unpack it (gunzip)")
    if raw[:4] in (b"PAR1", b"PK\x03\x04"):
        kind = (
            "a Parquet file" if raw[:1] == b"P" and raw[1:2] == b"A" else "an archive or workbook"
        )
        raise DataError(f"{path}: expected a CSV file, got {kind}: save it as CSV")
    try:
        return raw.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}, line {line}: expected text in UTF-8, got byte {raw[error.start]:#x}: "
            "save the file as UTF-8"
        ) from None


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
        raise DataError(f"{path}: expected an .npz file, got no such file")
    with path.open("rb") as file:  # numpy leaves a file open that is no archive
        try:
            archive = np.load(file, allow_pickle=False)
            keys = set(archive.files)
        # Foreign bytes surface as errors of numpy, zipfile, zlib, struct, ast and more.
        except Exception:
            raise DataError(
                f"{path}: expected an .npz file with {expected}, got none that can be read: "
                "empty, cut short, or another format"
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
            f"{size:,} once unpacked: use a machine with more memory, or smaller data"
        )


def memory_left() -> int:
    """Return the bytes of memory that are free, or all where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = next(line.split() for line in lines if line.startswith("MemAvailable:"))
        return int(fields[1]) << 10
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _array(path: Path, archive: Any, key: str) -> np.ndarray:
    try:
        with ONE_AT_A_TIME:
            part: np.ndarray = archive[key]
        if part.dtype.kind == "U":
            "".join(part.ravel().tolist()).encode()  # damaged words are no text
    except Exception as error:  # see `read_arrays`
        raise DataError(
            f"{path}: expected {key!r} to be an array of numbers or words, got one that cannot be "
            f"read ({type(error).__name__}): damaged, or Python objects; write it with np.savez"
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
        table = parquet.read_table(path)
    except (OSError, arrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: expected a Parquet file, got: {reason}") from None
    return _of_columns(path, {name: table[name].to_pylist() for name in table.column_names})


def pyarrow(path: Path) -> tuple[Any, Any]:
    """Return the modules pyarrow and pyarrow.parquet.

    Raises:
        DataError: they are missing; names the file that they are wanted for.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path}: expected pyarrow for Parquet, got no such package: pip install "
            "'silograph[parquet]', or use CSV or .npz files"
        ) from None
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
        name for name, v in edge_values.items() if name != weight_name and _differ(v)
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


def weights_of(adj: CSR, edges: np.ndarray, weight: np.ndarray, source: object) -> Tensor | None:
    """Return the weight of every stored edge, (nnz,) float64; None where all are 1.

    Edges have no direction, so one that is listed several times, as in both directions, has the
    mean of what is listed for it; where that differs, a line is logged.

    Args:
        adj: (n, n) the edges, both directions.
        edges: (2, E) as listed, perhaps with self loops, whose weights are lost as they are.
        weight: (E,) float64.
        source: where they were found.
    """
    low, high = edges.min(axis=0), edges.max(axis=0)
    is_first = low < high
    pair, weight = (low * adj.num_rows + high)[is_first], weight[is_first]
    order = np.lexsort((weight, pair))  # by weight, too, so that no order of listing matters
    pair, weight = pair[order], weight[order]
    if (weight == 1).all():
        return None
    first = np.flatnonzero(np.diff(pair, prepend=-1))
    last = np.append(first[1:], len(pair)) - 1
    mean = np.add.reduceat(weight, first) / (last - first + 1)
    differs = weight[first] != weight[last]
    if differs.any():
        LOG.warning(
            "%s: %s listed with several weights, as in both directions: the mean counts",
            source,
            count_of(int(differs.sum()), "edge"),
        )
    mean = np.where(differs, mean, weight[first])
    row, column = adj.row.numpy(), adj.indices.long().numpy()
    place = np.minimum(row, column) * adj.num_rows + np.maximum(row, column)
    return torch.from_numpy(mean[np.searchsorted(pair[first], place)])


def _could_weigh(values: np.ndarray) -> bool:
    """Whether values are one floating point number an edge, each of which could be a weight."""
    single = values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)
    return single and values.dtype.kind == "f" and bool(usable(values).all())


def _differ(rows: np.ndarray) -> bool:
    return rows.ndim > 0 and len(rows) > 0 and bool((rows != rows[:1]).any())
