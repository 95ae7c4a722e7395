"""Tables as CSV, whose names may come from anybody: from silos, or from data of others.

A spreadsheet runs a cell that begins with `=`, `+`, `-` or `@`, also behind a tab or a return. Such
a name is written behind an apostrophe, as spreadsheets write text; numbers stay as they are.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence

_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def to_cell(value: object) -> object:
    """Return a value as a cell has it.

    >>> to_cell("=1+1"), to_cell(-1), to_cell("-1.5"), to_cell("client_0")
    ("'=1+1", -1, '-1.5', 'client_0')
    """
    if isinstance(value, str) and _FORMULA.match(value) and not _is_number(value):
        return f"'{value}"
    return value


def from_cell(cell: str) -> str:
    """Return the name that a cell stands for; `to_cell` undone.

    >>> from_cell("'=1+1"), from_cell("'quoted'")
    ('=1+1', "'quoted'")
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def to_text(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV, names written so that no spreadsheet runs them."""
    text = io.StringIO(newline="")
    plain = csv.writer(text, lineterminator="\n")
    quoted = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:
        cells = [to_cell(value) for value in row]
        # Python 3.11 leaves a lone return unquoted, where readers see the end of a line.
        (quoted if any("\r" in str(cell) for cell in cells) else plain).writerow(cells)
    return text.getvalue()
