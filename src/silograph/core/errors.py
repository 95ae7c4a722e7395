"""The library's errors: one tree; each message is one line with the expected and the actual value.

SilographError
 ├── ConfigError       an option, a key or a name that is not known or out of range
 ├── DataError         a graph, a file or a folder that cannot be used
 ├── PartitionError    a cut that leaves a client unusable
 ├── OpError           code of a method that failed
 ├── ProtocolError     a client op or a method that breaks the rules of the federation
 │    ├── StateError   a silo without the state from which a run continues
 │    └── FrameError   bytes that are not a frame, or a payload that no frame can carry
 ├── PolicyError       data that a silo's policy does not let leave; it leaves the run
 ├── TrainingError     a run that diverged
 └── CheckpointError   a checkpoint that is damaged, foreign or of another run
"""

import difflib
import importlib.metadata
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

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
    """A silo's policy does not let data leave, and the silo leaves the run."""


class TrainingError(SilographError, ArithmeticError):
    """Training diverged."""


class CheckpointError(SilographError, RuntimeError):
    """A checkpoint is damaged, foreign, or belongs to another run."""


class StateError(ProtocolError):
    """A silo is attached, but lacks the state from which the run continues."""


class AbsentError(CheckpointError):
    """There is no checkpoint of a round; the existing ones may be undamaged."""


def canonical_name(name: str, table: Iterable[str], what: str) -> str:
    """Return the entry of a table that a name means, or the name where there is none.

    Case, spaces, hyphens and underscores do not count, and `+` is `plus`: papers write FED-PUB
    and GCFL+.

    >>> canonical_name("GCFL+", ["gcfl", "gcflplus"], "method")
    'gcflplus'
    >>> canonical_name("mine.py:METHOD", ["gcfl"], "method")
    'mine.py:METHOD'

    Args:
        name: as a user writes it.
        table: the names that there are.
        what: they are, for the error.

    Raises:
        ConfigError: it means several of them, and is none of them exactly.
    """
    names = list(table)
    if name in names:
        return name
    matches = [entry for entry in names if _letters(entry) == _letters(name)]
    if len(matches) > 1:
        raise ConfigError(f"{what} {name!r} can be {' or '.join(matches)}: write which")
    return matches[0] if matches else name


def _letters(name: str) -> str:
    """Return what of a name counts."""
    return re.sub(r"[-_\s]", "", name.lower().replace("+", "plus"))


def unknown(what: str, got: str, choices: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name, with the nearest known name, or all if none is near.

    >>> str(unknown("method", "fedavgg", ["fedavg", "local"]))
    "unknown method 'fedavgg': did you mean 'fedavg'?"
    """
    names = sorted(choices)
    suggestion = nearest(str(got), names)
    hint = f": did you mean {suggestion!r}?" if suggestion else f"; choices: {', '.join(names)}"
    return ConfigError(f"unknown {what} {got!r}{hint}")


def nearest(got: str, names: Sequence[str]) -> str | None:
    """Return the most likely name: with swapped letters, a beginning of it, or a typing error."""
    got = got.lower()
    same_letters = [name for name in names if _letters(name) == _letters(got)]
    if same_letters:
        return same_letters[0]
    same_numbers = [name for name in names if _unpadded(name) == _unpadded(got)]
    if same_numbers:
        return same_numbers[0]
    anagrams = [name for name in names if sorted(name) == sorted(got)]
    longer = sorted((name for name in names if name.startswith(got)), key=len)
    if len(got) < 3 or not all(name.startswith(longer[0]) for name in longer):
        longer = []  # it may be the beginning of several
    similar = anagrams or longer or difflib.get_close_matches(got, names, n=1, cutoff=0.5)
    return similar[0] if similar else None


def _unpadded(name: str) -> str:
    """Return a name whose numbers have no zeros in front: client_01 as client_1."""
    return re.sub(r"0*(\d+)", r"\1", name.lower())


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """Return `table[name]`, or raise `ConfigError` naming the nearest entry."""
    try:
        return table[name]
    except KeyError:
        raise unknown(what, name, table) from None


# --- How an optional package is installed --------------------------------------------------------


def install_command(extra: str) -> str:
    """Return the command that adds the packages of an extra, such as `fast`, to this installation.

    It names the checkout or the wheel that silograph was installed from, if pip has written down
    which: the package index may have no silograph, or another one.
    """
    try:
        record = importlib.metadata.distribution("silograph").read_text("direct_url.json")
        source = json.loads(record or "{}")
        url = str(source.get("url", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        source, url = {}, ""
    if url.startswith("file://"):
        target = url2pathname(urlsplit(url).path)
        edits = "-e " if source.get("dir_info", {}).get("editable") else ""
        return f"pip install {edits}{shlex.quote(f'{target}[{extra}]')}"
    if version_control := source.get("vcs_info"):
        url = f"{version_control['vcs']}+{url}@{version_control['commit_id']}"
    return f"pip install {shlex.quote(f'silograph[{extra}]' + (f' @ {url}' if url else ''))}"
