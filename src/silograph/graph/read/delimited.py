"""Rows of text files: tables with commas, semicolons, tabs or bars, lists of edges, MovieLens.

Nothing here knows what columns mean.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from silograph.core.errors import DataError, mistake
from silograph.graph.read.columns import USUAL, to_number
from silograph.graph.read.contents import ending_of, read_text

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
REMARKS = ("#", "%")  # begin lines of SNAP's lists and of the Network Repository's
DecimalMark = Literal[".", ",", "unclear"]
COMMA_NUMBER = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")
GROUPED = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")  # 1,234 may be 1.234 or 1234


@dataclass(frozen=True)
class Cells:
    """What a file holds, before anything is known of its columns.

    Attributes:
        header: names of the columns.
        rows: the cells, stripped, as many in each row as columns.
        lines: the line on which every row ends.
        decimal: what stands before the fractions of numbers; `unclear` where a comma may do so or
            may group thousands.
    """

    header: list[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[int]
    decimal: DecimalMark = "."


def read_delimited(path: Path, separator: str | None = None, encoding: str = "utf-8-sig") -> Cells:
    """Read a table of text with a header line, perhaps packed by gzip.

    Between columns stand commas, semicolons, tabs or bars: the only ones of the header, or the only
    ones with which all rows have one length. The ending `.tsv` means tabs. Decimal commas are
    recognized where columns are not separated by commas.

    Args:
        path: the file.
        separator: what stands between columns, where that is known.
        encoding: of the text.

    Raises:
        DataError: names the line.
    """
    text = read_text(path, "a CSV file", encoding=encoding)
    _check_kind(path, text)
    separator = separator or _separator(path, text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows: list[tuple[str, ...]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if row:  # a blank line holds nothing
                rows.append(tuple(cell.strip() for cell in row))
                lines.append(reader.line_num)
    except csv.Error as error:
        kind = {",": "comma", "\t": "tab"}.get(separator, repr(separator))
        raise DataError(
            f"{path}, line {reader.line_num}: expected {kind} separated text, got {error}",
            **mistake("wrong-format", path),
        ) from None
    if not rows:
        raise DataError(
            f"{path}: expected a header line, got an empty file", **mistake("wrong-format", path)
        )
    header = list(rows[0])
    nonempty = [name for name in header if name]  # spreadsheets write empty columns at the end
    if len(set(nonempty)) < len(nonempty):
        raise DataError(
            f"{path}, line 1: expected distinct columns, got {', '.join(header)}",
            **mistake("wrong-format", path),
        )
    _check_width(path, rows, lines, "as in the header")
    decimal = _decimal_mark(rows[1:]) if separator != "," and "," in text else "."
    return Cells(header, rows[1:], lines[1:], decimal)


def _check_width(
    path: Path, rows: Sequence[Sequence[str]], lines: Sequence[int], reason: str
) -> None:
    """Raise `DataError` for a row that is longer or shorter than the first one."""
    for cells, line in zip(rows, lines, strict=True):
        if len(cells) != len(rows[0]):
            raise DataError(
                f"{path}, line {line}: expected {len(rows[0])} cells, {reason}, got {len(cells)}",
                **mistake("wrong-format", path),
            )


def _check_kind(path: Path, text: str) -> None:
    """Raise `DataError` where the first line is none of a table with a header."""
    header = text.lstrip("\n").partition("\n")[0]
    if header.startswith("#") and "," not in header:
        raise DataError(
            f"{path}, line 1: expected a header of columns, got a remark as SNAP lists of edges "
            "have: name the file edges.txt, beside a table nodes.csv",
            **mistake("wrong-format", path),
        )
    if "::" in header and "," not in header:
        raise DataError(
            f"{path}, line 1: expected a header of columns, got double colons as MovieLens has: "
            "name the file ratings.dat",
            **mistake("wrong-format", path),
        )


def _separator(path: Path, text: str) -> str:
    """Return what stands between columns."""
    if ending_of(path).startswith(".tsv"):
        return "\t"
    header, _, data_rows = text.lstrip("\r\n").partition("\n")
    candidates = [mark for mark in SEPARATORS if mark in header]
    if len(candidates) > 1 and data_rows.strip():
        fitting = [mark for mark in candidates if _fits(text, mark)]
        if len(fitting) > 1:
            kinds = " and ".join(SEPARATORS[mark] for mark in fitting)
            raise DataError(
                f"{path}, line 1: expected one separator between columns, got {kinds}, each of "
                "which gives all rows one length: put cells that contain one in double quotes, or "
                "rename the columns",
                **mistake("wrong-format", path),
            )
        candidates = fitting or candidates
    return candidates[0] if candidates else ","


def _fits(text: str, separator: str) -> bool:
    """Whether a separator gives all rows one length, of two cells or more."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        widths = {len(row) for row in reader if row}
    except csv.Error:
        return False
    return len(widths) == 1 and widths.pop() > 1


def _decimal_mark(rows: Sequence[Sequence[str]]) -> DecimalMark:
    """Return the decimal mark, by the columns of numbers that have commas.

    >>> _decimal_mark([["7", "0,5"], ["8", "1"]]), _decimal_mark([["1,234"]])
    (',', 'unclear')
    """
    decimal: DecimalMark = "."
    for column in zip(*rows, strict=True):
        with_comma = [cell for cell in column if "," in cell]
        if with_comma and all(
            COMMA_NUMBER.fullmatch(cell) if "," in cell else cell in USUAL or _is_number(cell)
            for cell in column
        ):
            if not all(GROUPED.fullmatch(cell) for cell in with_comma):
                return ","
            decimal = "unclear"
    return decimal


def _is_number(cell: str) -> bool:
    return to_number(cell) is not None


def is_edge_list(text: str) -> bool:
    """Whether text is a list of edges and no table: tabs or spaces alone stand between cells."""
    first = next((line for line in text.splitlines() if _has_cells(line)), "")
    return not {",", ";", "|"} & {*first}


def _has_cells(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(REMARKS)


def read_edge_list(path: Path, text: str) -> Cells:
    """Return the cells of a list of edges as SNAP has them.

    Each line has two node ids, with tabs or spaces between them. Lines that begin with # or % are
    remarks. Further columns are called column_3 and so on; the `{}` that networkx writes for an
    edge without attributes is none.

    Args:
        path: the file, for errors.
        text: what it holds.

    Raises:
        DataError: names the line.
    """
    rows, lines = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if not _has_cells(line):
            continue
        cells = line.split()
        cells = cells[:-1] if cells[-1] == "{}" else cells
        if len(cells) < 2 or any(cell.startswith("{") for cell in cells[2:]):
            raise DataError(
                f"{path}, line {number}: expected two node ids and perhaps numbers, with tabs or "
                f"spaces between them, got {line.strip()[:40]!r}",
                **mistake("wrong-format", path),
            )
        rows.append(cells)
        lines.append(number)
    if not rows:
        raise DataError(
            f"{path}: expected a list of edges, got none", **mistake("wrong-format", path)
        )
    _check_width(path, rows, lines, "as on the first line")
    further = [f"column_{number}" for number in range(3, len(rows[0]) + 1)]
    return Cells(["source", "target", *further], rows, lines)


def read_movielens(path: Path) -> Cells:
    """Read ratings as MovieLens has them: user::item::rating::time, without a header.

    The time may be absent.

    Raises:
        DataError: names the line.
    """
    expected = "ratings user::item::rating::time"
    rows, lines = [], []
    for number, line in enumerate(read_text(path, expected).splitlines(), start=1):
        if not line.strip():
            continue
        rows.append([cell.strip() for cell in line.split("::")])
        lines.append(number)
        if len(rows[-1]) not in (3, 4):
            raise DataError(
                f"{path}, line {number}: expected {expected}, got {line.strip()[:40]!r}: of the "
                "files of MovieLens ratings.dat is read",
                **mistake("wrong-format", path),
            )
    if not rows:
        raise DataError(f"{path}: expected {expected}, got none", **mistake("wrong-format", path))
    _check_width(path, rows, lines, "as on the first line")
    return Cells(["user", "item", "rating", "time"][: len(rows[0])], rows, lines)
