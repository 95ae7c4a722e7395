"""Tables for the terminal."""

from collections.abc import Sequence
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table


def console_to(file: IO[str], width: int | None = None) -> Console:
    """Return what prints to a file; names of files and clients are text, whatever signs they hold.

    Args:
        file: where it prints.
        width: in columns; None: that of the terminal, 80 where there is none.
    """
    return Console(file=file, width=width, markup=False, emoji=False, highlight=False)


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
