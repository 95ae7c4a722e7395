"""What a command says when it is stopped, or was given an option of a method as a flag."""

import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import click

from silograph.cli.spelling import as_flags

MISTAKE, INTERRUPTED = 2, 130  # exit codes; the latter is that of a program stopped by Ctrl-C


class StoppedError(Exception):
    """A command was stopped that can go on.

    Attributes:
        lines: why it stopped, and last how to go on.
        code: exit code.
    """

    def __init__(self, why: str, how: str, code: int) -> None:
        """Say why, and how to go on."""
        super().__init__(why)
        self.lines = (why, f"to go on: {how}")
        self.code = code


@contextmanager
def going_on(
    how: str,
    folder: str | None = None,
    *,
    also: tuple[type[Exception], ...] = (),
    before: str | None = None,
) -> Iterator[None]:
    """On Ctrl-C or a full disk, say with which command it goes on.

    Args:
        how: the command.
        folder: what must be there for it; None for nothing.
        also: other errors after which it goes on.
        before: the command after Ctrl-C while the folder is not there yet; None: none is said.

    Raises:
        StoppedError: it was stopped.
    """
    stops: tuple[type[BaseException], ...] = (KeyboardInterrupt, OSError, *also)
    try:
        yield
    except stops as error:
        if folder is not None and not Path(folder).is_dir():
            if before is None or not isinstance(error, KeyboardInterrupt):
                raise
            how = before
        if isinstance(error, KeyboardInterrupt):
            raise StoppedError("interrupted", how, INTERRUPTED) from None
        raise StoppedError(f"error: {as_flags(str(error))}", how, MISTAKE) from error


def resume_hint(folder: str, *, trust: bool) -> AbstractContextManager[None]:
    """On Ctrl-C or a full disk, say how the run or study of a folder goes on.

    Args:
        folder: of the run or study.
        trust: whether it has code of the user's.
    """
    return going_on(f"silograph resume {shlex.quote(folder)}{' --trust' * trust}", folder)


def flag_error(error: click.NoSuchOption) -> str:
    """Return what is wrong with a flag that does not exist: it may be an option of a part."""
    from silograph.experiment.resolve.parts import listed, owners_of
    from silograph.methods import METHODS

    name = error.option_name.lstrip("-").replace("-", "_")
    owners = owners_of(name)
    if not owners:
        return error.format_message()
    kind, _, method = owners[0].partition(" ")
    flag = f"--option {name}"
    if kind == "method" and error.ctx is not None and error.ctx.info_name == "compare":
        flag = f"--options {method}.{name}" if method in METHODS else flag
    return f"expected an option of {listed(owners)} as {flag}=VALUE, got {error.option_name}"
