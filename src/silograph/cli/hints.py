"""What a command says when it is stopped."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


@contextmanager
def resume_hint(folder: str | None) -> Iterator[None]:
    """On Ctrl-C or a full disk, say how to go on."""
    try:
        yield
    except (KeyboardInterrupt, OSError):
        if folder is not None and Path(folder).is_dir():
            typer.echo(f"to go on: silograph resume {shlex.quote(folder)}", err=True)
        raise
