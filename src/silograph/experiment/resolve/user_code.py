"""Parts of a run that users wrote: `FILE.py:NAME` or `package.module:NAME`.

The file or module is imported as Python does it, so its code runs: name only what you trust.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from silograph.core.config import RunConfig
from silograph.core.errors import CheckpointError, ConfigError, install_command, mistake, unknown
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.user_module import run_module_file
from silograph.graph.partition.partition import names_clients

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
    "ray": "ray",
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
        raise ConfigError(
            f"expected FILE.py:NAME or package.module:NAME, got {spec!r}",
            **mistake("failed-import", spec),
        )
    names = vars(module_of(source))
    if name not in names:
        choices = [choice for choice, value in names.items() if isinstance(value, kind)]
        if not choices:
            raise ConfigError(
                f"expected a {_type_name(kind)} named {name} in {source}, got none: the file has "
                f"no {_type_name(kind)}",
                **mistake("failed-import", spec),
            )
        raise unknown(f"{_type_name(kind)} in {source}", name, choices)
    part = names[name]
    if not isinstance(part, kind):
        remedy = MODULES if _type_name(kind) == CALLABLE else "name a value of that type"
        raise ConfigError(
            f"expected a {_type_name(kind)} in {spec}, got {type(part).__name__}: {remedy}",
            **mistake("failed-import", spec),
        )
    return part


def module_of(source: str) -> ModuleType:
    """Return the module that `FILE.py` or `package.module` names; a file is run anew.

    Raises:
        ConfigError: there is no such file or module, or importing it fails.
    """
    try:
        if _is_file(source):
            return run_module_file(Path(source).expanduser())
        if not all(part.isidentifier() for part in source.split(".")):
            raise ModuleNotFoundError(
                f"{source!r} is no name of a module, nor a file that ends in .py"
            )
        with _working_folder_last():
            return importlib.import_module(source)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"expected to import {source}, got {_describe_error(error)}",
            **mistake("failed-import", source),
        ) from error


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
        if not _is_file(source) and Path(path).name == "__init__.py":
            folder = Path(path).parent
            for module_path in sorted(part for part in folder.rglob("*.py") if part != Path(path)):
                code = module_path.read_bytes()
                name = module_path.relative_to(folder).as_posix()
                hasher.update(f"\0{name}\0{len(code)}\0".encode() + code)
    except OSError as error:
        raise ConfigError(
            f"expected to import {source}, got: {error.strerror}",
            **mistake("failed-import", source),
        ) from None
    return hasher.hexdigest()


def _module_file(name: str) -> str | None:
    """Return the file of a module, None if it has none; nothing is imported."""
    try:
        with _working_folder_last():
            spec = _find_module_spec(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"expected to import {name}, got {_describe_error(error)}",
            **mistake("failed-import", name),
        ) from error
    if spec is None:
        raise ConfigError(
            f"expected to import {name}, got ModuleNotFoundError: No module named {name!r}",
            **mistake("failed-import", name),
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
    description += f": {install_command(extra)}" if extra else ""
    return description if has_location else description + location


# --- Which code a config names, and whether it may be imported -----------------------------------
#
# Users trust what they name themselves in a call or on the command line. A result folder, a run
# file or the plan of a study may come from anybody, and importing the code that it names runs it.


KINDS = ("method", "partition", "model", "neighbors", "selector", "aggregator", "server_optimizer")
Trust = bool | Collection[str]


def own_code(config: RunConfig | ResolvedConfig) -> dict[str, str]:
    """Return what is imported for a config: `FILE.py:NAME` or `package.module:NAME` by kind."""
    part_names = {kind: getattr(config, kind) for kind in KINDS}
    return {
        kind: spec
        for kind, spec in part_names.items()
        if spec is not None and is_spec(spec) and not (kind == "partition" and names_clients(spec))
    }


def check_trusted(specs_by_kind: Mapping[str, str], trust: Trust, origin: object) -> None:
    """Raise `ConfigError` for code that was not named by the user; nothing is imported.

    Args:
        specs_by_kind: `FILE.py:NAME` or `package.module:NAME` by what it is for.
        trust: whether all of it may be imported, or which.
        origin: the file or folder that names it.
    """
    if trust is True:
        return
    trusted_specs = {absolute(spec) for spec in trust or ()}
    for kind, spec in specs_by_kind.items():
        if absolute(spec) not in trusted_specs:
            raise ConfigError(
                f"{origin} names code of its own, which runs only if you allow it: the {kind} is "
                f"{spec}; read it, then add --trust (in Python trust=True)",
                **mistake("untrusted-code", spec),
            )


def code_digests(config: RunConfig | ResolvedConfig) -> dict[str, str]:
    """Return hashes of the files or packages of users' parts, by kind; nothing is imported.

    A model passed as a value may be in no file; then it is left out.
    """
    digests = {}
    for kind, spec in own_code(config).items():
        try:
            digests[kind] = digest(spec)
        except ConfigError:
            if kind != "model":
                raise
    return digests


def check_code(
    run_digests: Mapping[str, str], config: RunConfig, value_kinds: Collection[str] = ()
) -> None:
    """Raise `CheckpointError` where a user's code has changed since a run began.

    The rest of the run's identity may not be known yet; see `check_identity`.

    Args:
        run_digests: digests of the run.
        config: of the run.
        value_kinds: kinds of parts that the caller passes as values.
    """
    for kind, current_digest in code_digests(config).items():
        if kind not in value_kinds and run_digests.get(kind) != current_digest:
            raise differs(kind, current_digest, run_digests.get(kind))


def differs(name: str, current: object, original: object) -> CheckpointError:
    """Return the error for a run that would be resumed with another value than it began with."""
    return CheckpointError(
        f"expected a run with {name} {current}, got one with {original}: going on would not give "
        "the numbers of an uninterrupted run; start a new run",
        **mistake("foreign-checkpoint", name, current, original),
    )
