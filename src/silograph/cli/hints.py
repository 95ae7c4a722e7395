"""What a command says when it is stopped, or was given an option of a method as a flag."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from silograph.cli.flags import AT_SILOS
from silograph.cli.spelling import as_flags
from silograph.core.stop_signals import INTERRUPTED
from silograph.core.text import counted
from silograph.experiment.result_files import CHECKPOINTS

EXTRA = "Got unexpected extra argument"  # click's words
MISTAKE = 2  # exit code


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
    except BrokenPipeError:  # nobody reads what is printed
        raise
    except stops as error:
        if folder is not None and not Path(folder).is_dir():
            if before is None or not isinstance(error, KeyboardInterrupt):
                raise
            how = before
        if isinstance(error, KeyboardInterrupt):
            raise StoppedError("interrupted", how, INTERRUPTED) from None
        raise StoppedError(f"error: {as_flags(str(error))}", how, MISTAKE) from error


@contextmanager
def resume_hint(folder: str, *, trust: bool, run: bool = False) -> Iterator[None]:
    """On Ctrl-C or a full disk, say how the run or study of a folder goes on.

    Args:
        folder: of the run or study.
        trust: whether it has code of the user's.
        run: whether it is of a run, which goes on from a checkpoint.
    """
    how = f"silograph resume {shlex.quote(folder)}{' --trust' * trust}"
    try:
        with going_on(how, folder):
            yield
    except StoppedError as stopped:
        if run and not any(Path(folder, CHECKPOINTS).glob("round-*.checkpoint")):
            first = f"to go on from the first round, for no checkpoint was written: {how}"
            stopped.lines = (stopped.lines[0], first)
        raise


def usage_error(error: click.ClickException) -> str:
    """Return what is wrong with a command line, and how to mend it where that is known."""
    if isinstance(error, click.NoSuchOption):
        return flag_error(error)
    # typer names similar commands in the message; click 8.4 appends them a second time.
    has_suggestions = error.message.startswith("No such command")
    message = error.message if has_suggestions else error.format_message()
    if message.startswith(EXTRA) and isinstance(error, click.UsageError) and error.ctx is not None:
        return _too_many(error.ctx, message.partition("(")[2].removesuffix(")"))
    if not isinstance(error, click.MissingParameter) or error.param is None:
        return message
    param = error.param
    name = (
        f"{param.opts[0]} VALUE" if isinstance(param, click.Option) else param.human_readable_name
    )
    help = getattr(param, "help", None)
    return f"{message} Give {name}: {help}" if help else message


def _too_many(context: click.Context, extra: str) -> str:
    """Return what a command takes that was given more arguments."""
    taken = [p.human_readable_name for p in context.command.params if isinstance(p, click.Argument)]
    what = f"{' and '.join(taken)} alone" if taken else "no argument"
    also = ", too" if taken else ""
    return f"silograph {context.info_name}: expected {what}, got {extra}{also}"


def flag_error(error: click.NoSuchOption) -> str:
    """Return what is wrong with a flag that does not exist: it may be an option of a part."""
    from silograph.experiment.resolve.parts import listed, owners_of
    from silograph.methods import METHODS

    name = error.option_name.lstrip("-").replace("-", "_")
    own = [] if error.ctx is None else [opt for p in error.ctx.command.params for opt in p.opts]
    part, _, short = name.rpartition(".")  # such as selector.budget
    owners = owners_of(short) if {"--option", "--options"} & {*own} else []
    owners = [owner for owner in owners if part in ("", owner.partition(" ")[0])]
    if not owners:
        return _elsewhere(error)
    kind, _, method = owners[0].partition(" ")
    flag = f"--option {name}"
    if error.ctx is not None and error.ctx.info_name == "compare":
        of_method = kind == "method" and method in METHODS
        flag = f"--options {method if of_method else kind}.{short}"
    return f"expected an option of {listed(owners)} as {flag}=VALUE, got {error.option_name}"


def _unknown_flag(error: click.NoSuchOption) -> str:
    """Return that there is no such flag, and similar ones; click's own text varies by version."""
    similar = sorted(error.possibilities or ())
    line = f"No such option: {error.option_name}"
    if len(similar) == 1:
        return f"{line} Did you mean {similar[0]}?"
    return f"{line} (Possible options: {', '.join(similar)})" if similar else line


def _elsewhere(error: click.NoSuchOption) -> str:
    """Return that there is no such flag, and which other commands have it."""
    context, message = error.ctx, _unknown_flag(error)
    if context is None or context.parent is None:
        return message
    group = context.parent.command
    assert isinstance(group, click.Group)  # silograph itself
    having = [
        f"silograph {name}"
        for name, each in group.commands.items()
        if any(error.option_name in (*p.opts, *p.secondary_opts) for p in each.params)
    ]
    if not having:
        return message
    if context.info_name == "resume" and "silograph run" in having:
        return (
            f"No such option: {error.option_name}. A run's settings are fixed: silograph run "
            f"--config DIR/config.toml {error.option_name} VALUE begins another one"
        )
    if context.info_name == "compare" and error.option_name == "--option":
        return (
            "No such option: --option. It is --options METHOD.NAME=VALUE for one method, and "
            "--options PART.NAME=VALUE for all, such as partition.column=shop"
        )
    if context.info_name == "server" and error.option_name[2:].replace("-", "_") in AT_SILOS:
        return (
            f"No such option: {error.option_name}. The data are at the silos, cut already: each "
            "says in its silo.toml what its tables mean"
        )
    others = f" and {counted(len(having) - 1, 'other command')}" if len(having) > 1 else ""
    return f"No such option: {error.option_name}. It is a flag of {having[0]}{others}"
