"""The library's errors: one tree; each message is one line with the expected and the actual value.

A class says what is wrong in general. `code` says which kind of mistake it is, and `fields` has its
values, so that a program need not read the message. A kind is something that a caller can act on:
many `raise` statements share one, and a statement without a kind has the code of its class.

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
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

T = TypeVar("T")
E = TypeVar("E", bound="SilographError")
# The fields of each code; docs/reference/errors.md says what they are and how to mend the mistake.
CODES: Mapping[str, tuple[str, ...]] = {
    # Options, names and code.
    "unknown-name": ("what", "got", "suggestion", "choices"),
    "option-value": ("option", "got"),
    "unread-option": ("option", "part"),
    "conflicting-options": ("options",),
    "repeated-option": ("option",),
    "missing-option": ("option",),
    "missing-package": ("package", "extra"),
    "failed-import": ("source",),
    "untrusted-code": ("source",),
    # Files and folders.
    "missing-file": ("path",),
    "unreadable-file": ("path",),
    "wrong-format": ("path",),
    "damaged-file": ("path",),
    "too-large": ("path",),
    "other-version": ("expected", "got"),
    "unwritable-path": ("path",),
    "existing-output": ("path",),
    "folder-in-use": ("path",),
    # Data.
    "bad-cell": ("path", "row", "column", "got"),
    "missing-column": ("path", "column"),
    "no-training-nodes": (),
    "empty-client": ("client",),
    "model-mismatch": ("what", "expected", "got"),
    "silos-disagree": ("what", "silo", "other"),
    # Runs.
    "diverged": ("loss", "round", "got"),
    "completed-run": ("path",),
    "part-not-saved": ("part", "path"),
    "foreign-checkpoint": ("what", "expected", "got"),
    "missing-checkpoint": ("path",),
    # Federations of silos.
    "too-few-silos": ("expected", "got", "missing"),
    "field-out-of-bounds": ("field", "where"),
    "call-not-agreed": ("round",),
    "refused-by-policy": ("rule",),
    "secure-sum": ("silo",),
    # The classes' own.
    "silograph": (),
    "system": (),
    "config": (),
    "data": (),
    "partition": (),
    "op": ("function", "round"),
    "protocol": (),
    "frame": (),
    "policy": (),
    "training": (),
    "checkpoint": (),
}


class SilographError(Exception):
    """Root of every error that silograph raises on purpose.

    >>> error = SilographError("expected ...", code="missing-file", path="graph.npz")
    >>> error.code, error.fields
    ('missing-file', {'path': 'graph.npz'})

    Args:
        message: one line for people: what is wrong, and how to mend it.
        code: the kind of mistake, of `CODES`; None is the code of the class.
        fields: values of the kind, such as `path`; numbers, texts, lists of these, or None. Paths
            become texts.

    Attributes:
        code: the kind of mistake.
        fields: its values by name.
    """

    code = "silograph"
    fields: Mapping[str, Any]

    def __init__(self, message: str = "", *, code: str | None = None, **fields: Any) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        self.fields = {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in fields.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the attributes, whatever the constructor of a subclass expects."""
        return _restore_error, (type(self), self.args, vars(self))


def _restore_error(kind: type[E], args: tuple[Any, ...], attributes: Mapping[str, Any]) -> E:
    """Return an error as it was pickled."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


class ConfigError(SilographError, ValueError):
    """An option, key or name is unknown or out of range."""

    code = "config"


class DataError(SilographError, ValueError):
    """A graph, file or folder cannot be used as given."""

    code = "data"


class PartitionError(SilographError, ValueError):
    """A partition cannot be made, or leaves a client that cannot take part."""

    code = "partition"


class OpError(SilographError, RuntimeError):
    """A client op, or code of a user at the server, failed; `__cause__` is what it raised."""

    code = "op"


class ProtocolError(SilographError, RuntimeError):
    """A client op or a method broke a rule of the federation."""

    code = "protocol"


class FrameError(ProtocolError):
    """Bytes are not a frame, or a payload cannot be put into one."""

    code = "frame"


class PolicyError(SilographError, RuntimeError):
    """A silo's policy does not let data leave, and the silo leaves the run."""

    code = "policy"


class TrainingError(SilographError, ArithmeticError):
    """Training diverged."""

    code = "training"


class CheckpointError(SilographError, RuntimeError):
    """A checkpoint is damaged, foreign, or belongs to another run."""

    code = "checkpoint"


class StateError(ProtocolError):
    """A silo is attached, but lacks the state from which the run continues."""


class AbsentError(CheckpointError):
    """There is no checkpoint of a round; the existing ones may be undamaged."""


def mistake(code: str, *values: object) -> dict[str, Any]:
    """Return the keywords `code` and fields of an error, from the values in the order of `CODES`.

    >>> mistake("bad-cell", "nodes.csv", 3, "label", "?")
    {'code': 'bad-cell', 'path': 'nodes.csv', 'row': 3, 'column': 'label', 'got': '?'}
    """
    return {"code": code, **dict(zip(CODES[code], values, strict=True))}


def read_mistake(error: OSError, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the keywords of an error for a file that cannot be read."""
    is_missing = isinstance(error, FileNotFoundError)
    return mistake("missing-file" if is_missing else "unreadable-file", path)


def reword_error(error: BaseException, message: str, kind: type[E]) -> E:
    """Return an error of a class with a message, and with the code and fields of another error.

    >>> error = unknown("key", "lx", ["lr"])
    >>> reword_error(error, f"run.toml: {error}", DataError).code
    'unknown-name'

    Args:
        error: what happened; without a kind of its own, the new error has the code of its class.
        message: of the new error, such as the old one after the name of a file.
        kind: class of the new error.
    """
    if isinstance(error, SilographError):
        return kind(message, code=vars(error).get("code"), **error.fields)
    return kind(message)


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
    return ConfigError(
        f"unknown {what} {got!r}{hint}", **mistake("unknown-name", what, got, suggestion, names)
    )


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


def missing_package(
    package: str, purpose: str, extra: str, kind: type[E], *, otherwise: str = ""
) -> E:
    """Return the error for an optional package that is not installed.

    Args:
        package: that is missing.
        purpose: what needs it, for the message.
        extra: of silograph, which has the package.
        kind: class of the error.
        otherwise: what can be used in its place.
    """
    hint = f", or use {otherwise}" if otherwise else ""
    return kind(
        f"expected {package} for {purpose}, got no such package: {install_command(extra)}{hint}",
        **mistake("missing-package", package, extra),
    )
