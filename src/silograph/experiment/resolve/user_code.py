"""Parts of a run that users wrote: `FILE.py:NAME` or `package.module:NAME`.

The file or module is imported as Python does it, so its code runs: name only what you trust.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from silograph.core.errors import ConfigError, unknown

T = TypeVar("T")


def is_spec(text: str) -> bool:
    """Return whether a name stands for something to import: those of silograph have no colon.

    A file without `:NAME` counts, so that its error says what is missing.
    """
    return ":" in text or _is_file(text)


def imported(spec: str, kind: type[T]) -> T:
    """Return what `FILE.py:NAME` or `package.module:NAME` names.

    A file is run anew by every call; it need not be on Python's path.

    Raises:
        ConfigError: there is no such file, module or name, importing it fails, or the value is
            not a `kind`.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"expected FILE.py:NAME or package.module:NAME, got {spec!r}")
    try:
        module = _run_file(Path(source).expanduser()) if _is_file(source) else _module(source)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"expected to import {source}, got {_what(error)}") from error
    names = vars(module)
    if name not in names:
        choices = (each for each, value in names.items() if isinstance(value, kind))
        raise unknown(f"{_word(kind)} in {source}", name, choices)
    found = names[name]
    if not isinstance(found, kind):
        raise ConfigError(
            f"expected a {_word(kind)} in {spec}, got {type(found).__name__}: name a value of "
            "that type"
        )
    return found


def spec_of(value: type | Callable[..., object]) -> str:
    """Return how a class or function of this process is named; it may be local, or in a script."""
    return f"{value.__module__}:{value.__qualname__}"


def absolute(spec: str) -> str:
    """Return the spec with the path of its file made absolute, so that it holds anywhere."""
    source, colon, name = spec.rpartition(":")
    if not _is_file(source):
        return spec
    return f"{os.path.abspath(os.path.expanduser(source))}{colon}{name}"


def digest(spec: str) -> str:
    """Return a hash of the file or module of a spec; its name, of a module without a file.

    Raises:
        ConfigError: there is no such module, or the file cannot be read.
    """
    source, _, _ = spec.rpartition(":")
    path = source if _is_file(source) else _module_file(source)
    if path is None:
        return source
    try:
        code = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"expected to import {source}, got: {error.strerror}") from None
    return hashlib.blake2b(code, digest_size=16).hexdigest()


def _module_file(name: str) -> str | None:
    """Return the file of a module, None if it has none; its packages are imported."""
    try:
        with _working_folder_last():
            found = importlib.util.find_spec(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"expected to import {name}, got {_what(error)}") from error
    if found is None:
        raise ConfigError(
            f"expected to import {name}, got ModuleNotFoundError: No module named {name!r}"
        )
    return found.origin if found.has_location else None


@contextmanager
def _working_folder_last() -> Iterator[None]:
    """Have modules of the working folder found too, as `python -m` finds them."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _word(kind: type) -> str:
    return "class or function" if kind.__name__ == "Callable" else kind.__name__


def _is_file(source: str) -> bool:
    return source.endswith(".py")


def _module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ModuleNotFoundError(f"{name!r} is no name of a module, nor a file that ends in .py")
    with _working_folder_last():
        return importlib.import_module(name)


def _run_file(path: Path) -> ModuleType:
    path = path.absolute()
    # No name of a module that could be imported. Dataclasses look up where they were made.
    name = f"{path}:"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the path ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _what(error: BaseException) -> str:
    """Return an error and where it happened, in one line."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})"
    known = isinstance(error, OSError | ImportError | SyntaxError)  # they say where themselves
    about = type(error).__name__ + (f": {text}" if text else "")
    return about if known else about + where
