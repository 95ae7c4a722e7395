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
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from silograph.core.errors import ConfigError, unknown

T = TypeVar("T")
CALLABLE = "class or function"
EXTRAS = {  # of silograph, by the packages that they bring
    "numba": "fast",
    "pyarrow": "parquet",
    "matplotlib": "plots",
    "optuna": "tune",
    "grpc": "federation",
    "cryptography": "federation",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
}
MODULES = (
    "name what makes a torch.nn.Module; a convolution becomes a model by "
    "silograph.nn.model.add_model"
)


def is_spec(text: str | None) -> bool:
    """Return whether a name stands for something to import: those of silograph have no colon.

    None is a part that nobody has named.

    A file without `:NAME` counts, so that its error says what is missing.
    """
    return text is not None and (":" in text or _is_file(text))


def names_file(spec: str) -> bool:
    """Return whether a name stands for something in a file, FILE.py:NAME.

    Its module cannot be imported by name, so other processes run the file.
    """
    return _is_file(spec.rpartition(":")[0])


def import_spec(spec: str, kind: type[T]) -> T:
    """Return what `FILE.py:NAME` or `package.module:NAME` names.

    A file is run anew by every call; it need not be on Python's path.

    Raises:
        ConfigError: there is no such file, module or name, importing it fails, or the value is
            not a `kind`.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"expected FILE.py:NAME or package.module:NAME, got {spec!r}")
    names = vars(module_of(source))
    if name not in names:
        choices = [choice for choice, value in names.items() if isinstance(value, kind)]
        if not choices:
            raise ConfigError(
                f"expected a {_type_name(kind)} named {name} in {source}, got none: the file has "
                f"no {_type_name(kind)}"
            )
        raise unknown(f"{_type_name(kind)} in {source}", name, choices)
    part = names[name]
    if not isinstance(part, kind):
        remedy = MODULES if _type_name(kind) == CALLABLE else "name a value of that type"
        raise ConfigError(
            f"expected a {_type_name(kind)} in {spec}, got {type(part).__name__}: {remedy}"
        )
    return part


def module_of(source: str) -> ModuleType:
    """Return the module that `FILE.py` or `package.module` names; a file is run anew.

    Raises:
        ConfigError: there is no such file or module, or importing it fails.
    """
    try:
        return _run_file(Path(source).expanduser()) if _is_file(source) else _import_module(source)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"expected to import {source}, got {_describe_error(error)}") from error


def source_name(source: str) -> str:
    """Return what a file or module is called on every machine: a file without its folder."""
    return Path(source).name if _is_file(source) else source


def spec_of(value: type | Callable[..., object]) -> str:
    """Return how a class or function of this process is named; it may be local, or in a script."""
    return f"{value.__module__}:{value.__qualname__}"


def absolute(spec: str) -> str:
    """Return the spec with the path of its file made absolute, so that it holds anywhere."""
    source, colon, name = spec.rpartition(":")
    return f"{absolute_source(source)}{colon}{name}"


def absolute_source(source: str) -> str:
    """Return the path of a file made absolute; the name of a module as it is."""
    return os.path.abspath(os.path.expanduser(source)) if _is_file(source) else source


def digest(spec: str) -> str:
    """Return the hash of the file or module of a spec; see `digest_of_source`."""
    return digest_of_source(spec.rpartition(":")[0])


def digest_of_source(source: str) -> str:
    """Return a hash of a file or module, and of all modules of a package.

    That of a module without a file is its name.

    Raises:
        ConfigError: there is no such module, or a file cannot be read.
    """
    path = source if _is_file(source) else _module_file(source)
    if path is None:
        return source
    hasher = hashlib.blake2b(digest_size=16)
    try:
        hasher.update(Path(path).expanduser().read_bytes())
        for module_path in _other_modules(Path(path)) if not _is_file(source) else ():
            code = module_path.read_bytes()
            name = module_path.relative_to(Path(path).parent).as_posix()
            hasher.update(f"\0{name}\0{len(code)}\0".encode() + code)
    except OSError as error:
        raise ConfigError(f"expected to import {source}, got: {error.strerror}") from None
    return hasher.hexdigest()


def _other_modules(path: Path) -> list[Path]:
    """Return the other modules of the package whose first file is at a path, sorted."""
    if path.name != "__init__.py":
        return []
    return sorted(part for part in path.parent.rglob("*.py") if part != path)


def _module_file(name: str) -> str | None:
    """Return the file of a module, None if it has none; nothing is imported."""
    try:
        with _working_folder_last():
            spec = _find_module_spec(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"expected to import {name}, got {_describe_error(error)}") from error
    if spec is None:
        raise ConfigError(
            f"expected to import {name}, got ModuleNotFoundError: No module named {name!r}"
        )
    return spec.origin if spec.has_location else None


def _find_module_spec(name: str) -> ModuleSpec | None:
    """Return where a module is; `importlib.util.find_spec` would import its packages."""
    top_level, *others = name.split(".")
    spec, module_name = importlib.util.find_spec(top_level), top_level
    for part in others:
        module_name = f"{module_name}.{part}"
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(module_name, spec.submodule_search_locations)
    return spec


@contextmanager
def _working_folder_last() -> Iterator[None]:
    """Have modules of the working folder found too, as `python -m` finds them."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _type_name(kind: type) -> str:
    return CALLABLE if kind.__name__ == "Callable" else kind.__name__


def _is_file(source: str) -> bool:
    return source.endswith(".py")


def _import_module(name: str) -> ModuleType:
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
    previous_module = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if previous_module is not None:
            sys.modules[name] = previous_module
        raise
    return module


def _describe_error(error: BaseException) -> str:
    """Return an error and where it happened, in one line."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}, line {frames[-1].lineno})"
    # The text of these errors names the place.
    has_location = isinstance(error, OSError | ImportError | SyntaxError)
    description = type(error).__name__ + (f": {text}" if text else "")
    missing_module = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    extra = EXTRAS.get(missing_module.partition(".")[0])
    description += f": pip install 'silograph[{extra}]'" if extra else ""
    return description if has_location else description + location
