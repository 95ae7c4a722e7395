"""Tables for the terminal."""

from collections.abc import Sequence

from rich import box
from rich.table import Table


def table_of(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> Table:
    """Return a table for the terminal: words to the left in the first column, numbers right."""
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table
