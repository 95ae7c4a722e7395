"""Small tables for notebooks; all text comes from data and is escaped."""

from collections.abc import Iterable, Sequence
from html import escape


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
