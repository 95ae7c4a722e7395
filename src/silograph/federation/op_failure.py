"""What is said of an op that failed: which one, when, at whom, where in its code, and on what.

And of functions of users that the server runs: those of a method, a selector or an aggregator.

C: clients of the block.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import silograph
from silograph.core.errors import OpError, SilographError
from silograph.core.payload import Field, Payload, State
from silograph.federation.base import Op
from silograph.graph.block.block import ClientBlock

LIBRARY = str(Path(silograph.__file__).parent)
INSTALLED = ("site-packages", "dist-packages")
MOST_CLIENTS, MOST_FIELDS, MOST_TEXT = 3, 8, 300


def failure(
    op: Op, number: int, block: ClientBlock, state: State, inbox: Payload, error: Exception
) -> OpError:
    """Return the error for an op that raised another: one line, whatever it says itself.

    Args:
        op: the op.
        number: of the round.
        block: the clients that were called.
        state: theirs.
        inbox: theirs.
        error: what the op raised.
    """
    return OpError(f"{op.__name__} failed with {_what(error)}{_place(error)}; "
                   f"{_scene(number, block)}; "
                   f"inbox: {_fields(inbox)}; state: {_fields(state)}")  # fmt: skip


@contextmanager
def at_server(function: Callable[..., Any], owner: str, number: int) -> Iterator[None]:
    """Raise `OpError`, of one line, where a function of a user's own fails at the server.

    Args:
        function: the function; errors of silograph's own keep their tracebacks.
        owner: what it belongs to, such as `method median`.
        number: of the round.
    """
    try:
        yield
    except Exception as error:
        if says_all(error) or function.__module__.startswith("silograph."):
            raise
        line = f"{function.__name__} of {owner} failed with {_what(error)}{_place(error)}"
        raise OpError(f"{line}; round {number}, at the server") from error


@contextmanager
def in_function(function: Callable[..., Any], called: str) -> Iterator[None]:
    """Raise `OpError`, of one line, where a function of a user's own fails before a run.

    Args:
        function: the function; errors of silograph's own keep their tracebacks.
        called: what it is called in the error.
    """
    try:
        yield
    except Exception as error:
        if says_all(error) or getattr(function, "__module__", "").startswith("silograph."):
            raise
        raise OpError(f"in {called}: {_what(error)}{_place(error)}") from error


def context(op: Op, number: int, block: ClientBlock, state: State, inbox: Payload) -> str:
    """Return where an op failed that says itself what is wrong."""
    return (
        f"in {op.__name__}, {_scene(number, block)}; inbox: {_fields(inbox)}; state: "
        f"{_fields(state)}"
    )


def says_all(error: Exception) -> bool:
    """Whether an error needs no other around it: silograph's own, or memory that is exhausted."""
    exhausted = isinstance(error, RuntimeError) and "memory" in str(error)
    return isinstance(error, SilographError | MemoryError) or exhausted


def _scene(number: int, block: ClientBlock) -> str:
    """Return round and clients in words."""
    names, count = block.ids[:MOST_CLIENTS], block.num_clients
    more = f" and {count - len(names)} more" if count > len(names) else ""
    size = "a block of one client" if count == 1 else f"a block of {count} clients"
    return f"round {number}, {size}: {', '.join(names)}{more}"


def _fields(fields: Mapping[str, Field]) -> str:
    """Return names, forms, shapes and dtypes of fields; values may be private."""
    shown = [
        f"{name} {type(f).__name__} {tuple(f.t.shape)} {str(f.t.dtype).removeprefix('torch.')}"
        for name, f in list(fields.items())[:MOST_FIELDS]
    ]
    more = len(fields) - len(shown)
    return ", ".join(shown + [f"{more} more"] * (more > 0)) or "none"


def _place(error: Exception) -> str:
    """Return the last line of code outside silograph and other packages, if there is one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        inside = frame.filename.startswith(LIBRARY) or frame.filename.startswith("<")
        if not inside and not set(INSTALLED) & set(Path(frame.filename).parts):
            return f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return ""


def _what(error: Exception) -> str:
    """Return type and text of an error in one line."""
    text = " ".join(str(error).split())
    return type(error).__name__ + (f": {_short(text)}" if text else "")


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."
