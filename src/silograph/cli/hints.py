"""What a command says when it is stopped, or was given an option of a method as a flag."""

import dataclasses
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
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


def flag_error(error: click.NoSuchOption) -> str:
    """Return what is wrong with a flag that does not exist: it may be an option of a method."""
    from silograph.methods import METHODS

    name = error.option_name.lstrip("-").replace("-", "_")
    for method in METHODS.values():
        if name in (f.name for f in dataclasses.fields(method.options)):
            several = error.ctx is not None and error.ctx.info_name == "compare"
            flag = f"--options {method.name}.{name}" if several else f"--option {name}"
            return f"expected an option of {method.name} as {flag}=VALUE, got {error.option_name}"
    return error.format_message()
