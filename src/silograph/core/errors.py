"""The library's errors: one tree, one line each, always with what was expected and what came.

SilographError
 ├── ConfigError       an option, a key or a name that is not known or out of range
 ├── DataError         a graph, a file or a folder that cannot be used
 ├── PartitionError    a cut that leaves a client unusable
 ├── OpError           code of a method that failed, and where
 ├── ProtocolError     a client op or a method that breaks the rules of the federation
 │    ├── StateError   a silo without the state that a run is to go on from
 │    └── FrameError   bytes that are not a frame, or a payload that no frame can carry
 ├── PolicyError       what a silo's own rules do not let leave: its part in the run ends
 ├── TrainingError     a run that diverged
 └── CheckpointError   a checkpoint that is damaged, foreign or of another run
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


class SilographError(Exception):
    """Root of every error that silograph raises on purpose."""


class ConfigError(SilographError, ValueError):
    """An option, key or name is unknown or out of range."""


class DataError(SilographError, ValueError):
    """A graph, file or folder cannot be used as given."""


class PartitionError(SilographError, ValueError):
    """A partition cannot be made, or leaves a client that cannot take part."""


class OpError(SilographError, RuntimeError):
    """A client op, or code of a user at the server, failed; `__cause__` is what it raised."""


class ProtocolError(SilographError, RuntimeError):
    """A client op or a method broke a rule of the federation."""


class FrameError(ProtocolError):
    """Bytes are not a frame, or a payload cannot be put into one."""


class PolicyError(SilographError, RuntimeError):
    """A silo's own rules do not let something leave, and its part in the run ends."""


class TrainingError(SilographError, ArithmeticError):
    """Training diverged."""


class CheckpointError(SilographError, RuntimeError):
    """A checkpoint is damaged, foreign, or belongs to another run."""


class StateError(ProtocolError):
    """A silo is there, but has not the state that a run is to go on from."""


class AbsentError(CheckpointError):
    """There is no checkpoint of that round, which is no damage."""


def unknown(what: str, got: str, choices: Iterable[str]) -> ConfigError:
    """Return the error for a name that no table holds: the nearest one, or all where none is near.

    >>> str(unknown("method", "fedavgg", ["fedavg", "local"]))
    "unknown method 'fedavgg': did you mean 'fedavg'?"
    """
    known = sorted(choices)
    near = nearest(str(got), known)
    hint = f": did you mean {near!r}?" if near else f"; choices: {', '.join(known)}"
    return ConfigError(f"unknown {what} {got!r}{hint}")


def nearest(got: str, known: Sequence[str]) -> str | None:
    """Return the name that was meant most likely: swapped letters, a beginning, or other slips."""
    got = got.lower()
    as_told = got.replace("+", "plus").replace("-", "")  # papers write GCFL+ and FED-PUB
    if as_told in known:
        return as_told
    same_numbers = [name for name in known if _unpadded(name) == _unpadded(got)]
    if same_numbers:
        return same_numbers[0]
    swapped = [name for name in known if sorted(name) == sorted(got)]
    longer = sorted((name for name in known if name.startswith(got)), key=len)
    if len(got) < 3 or not all(name.startswith(longer[0]) for name in longer):
        longer = []  # it may be the beginning of several
    near = swapped or longer or difflib.get_close_matches(got, known, n=1, cutoff=0.5)
    return near[0] if near else None


def _unpadded(name: str) -> str:
    """Return a name whose numbers have no zeros in front: client_01 as client_1."""
    return re.sub(r"0*(\d+)", r"\1", name.lower())


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """Return `table[name]`, or raise `ConfigError` naming the nearest entry."""
    try:
        return table[name]
    except KeyError:
        raise unknown(what, name, table) from None
