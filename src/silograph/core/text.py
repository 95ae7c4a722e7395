"""Text and values from outside, made safe to show."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

MOST_SHOWN = 120  # characters of a value


def printable(text: str) -> str:
    r"""Return a text as one line that cannot steer a terminal or look like another line.

    >>> printable("a\nb\x1b[2J")
    'a?b?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def short_repr(value: object) -> str:
    """Return a value as one short line for an error; it may be an array.

    >>> short_repr("metis"), len(short_repr([0] * 1000))
    ("'metis'", 123)
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def count_of(number: int, noun: str) -> str:
    """Return a number of things in words; the noun's plural has an s more.

    >>> count_of(1, "edge"), count_of(2000, "such node")
    ('1 edge', '2,000 such nodes')
    """
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"


def decimals(value: float, digits: int) -> str:
    """Return a number with so many decimals; with more where it would have one digit or none.

    >>> decimals(1234.567, 1), decimals(0.004321, 1), decimals(0.0, 1)
    ('1,234.6', '0.0043', '0.0')
    """
    if digits and 0 < abs(value) < 10**-digits:
        digits = 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{digits}f}"


def in_path(text: str) -> str:
    """Return a name as a part of a path: other than letters, digits and "._-", signs are "-".

    >>> in_path("../a b")
    'a-b'
    """
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "unnamed"


# --- Small tables for notebooks; all text comes from data and is escaped -------------------------


def html_table(title: str, columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; a row's first cell is its name.

    >>> html_table("a & b", ["test", "accuracy"], [["server", 0.5]])
    '<table><caption>a &amp; b</caption><thead><tr><th>test</th><th>accuracy</th></tr></thead>\
<tbody><tr><th>server</th><td>0.5</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{escape(str(name))}</th>" for name in columns)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    caption = f"<caption>{escape(title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_lines(lines: Iterable[str]) -> str:
    """Return lines of text as one paragraph."""
    return f"<p>{'<br>'.join(escape(line) for line in lines)}</p>"


def _cells(row: Sequence[object]) -> str:
    first, *others = (escape(str(cell)) for cell in row)
    return f"<th>{first}</th>" + "".join(f"<td>{text}</td>" for text in others)


# --- Pickles and copies of frozen values, such as results that leave a user's process pool -------
#
# The library itself reads no pickle, neither from files nor from the network.


def state_of_fields(self: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, as its `__getstate__`.

    What a `cached_property` has derived from them is left out: it is derived again on demand, and
    some of it, such as a read-only mapping, cannot be pickled.
    """
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
