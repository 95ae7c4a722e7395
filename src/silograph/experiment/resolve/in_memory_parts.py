"""Parts of a run that are given as values: a method, or a class or function that makes a module.

In a config they stand by a name. A study runs them in its own process, and knows their lines again
by their source.
"""

import dataclasses
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from silograph.core.errors import ConfigError
from silograph.experiment.resolve.user_code import CALLABLE, MODULES, spec_of
from silograph.methods import METHODS
from silograph.methods.base import Method
from silograph.nn.own_module import Make

OURS = Path(__file__).parents[2]


@dataclass(frozen=True)
class Own:
    """Parts that were given as values, by their names in configs."""

    methods: Mapping[str, Method] = field(default_factory=dict)
    models: Mapping[str, Make] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Return the names of all."""
        return [*self.methods, *self.models]


def name_of(part: Any) -> Any:
    """Return the name of a method or of what makes a module; anything else as it is.

    Raises:
        ConfigError: a module that is made already, or another callable without a name.
    """
    if isinstance(part, Method):
        return part.name
    if not callable(part):
        return part
    if not hasattr(part, "__qualname__"):
        raise ConfigError(
            f"expected a class or function that makes a module as model, got {type(part).__name__} "
            "itself: give the class, for every client has a module of its own"
        )
    return spec_of(part)


def check_names(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a part that is given as a value, and can be given by name alone."""
    for kind in ("selector", "neighbors", "aggregator"):
        part = options.get(kind)
        if not isinstance(part, str | None):
            raise ConfigError(
                f"expected the name of a part as {kind}, got a {type(part).__name__} itself: put "
                f"it into a file and give {kind}='FILE.py:NAME'"
            )
    model = options.get("model")
    if not (isinstance(model, str | None) or callable(model)):
        raise ConfigError(
            f"expected a {CALLABLE} that makes a module as model, got {type(model).__name__}: "
            f"{MODULES}"
        )


def own_of(parts: Iterable[Any]) -> Own:
    """Return those of some parts that are values; a method of the library needs only its name."""
    values = [part for part in parts if callable(part) or isinstance(part, Method)]
    methods = {part.name: part for part in values if isinstance(part, Method)}
    return Own(
        methods={name: m for name, m in methods.items() if METHODS.get(name) is not m},
        models={name_of(part): part for part in values if not isinstance(part, Method)},
    )


def check_known_again(own: Own) -> None:
    """Raise `ConfigError` where lines of a part could not be told from those of another."""
    parts: list[Method | Make] = [*own.methods.values(), *own.models.values()]
    for part in parts:
        if source_hash(part) is None:
            raise ConfigError(
                f"expected {name_of(part)} from a file, enclosing plain values alone, so that its "
                "lines are known again, got another: name it as FILE.py:NAME, or leave out=DIR out"
            )


def source_hash(part: Method | Make) -> str | None:
    """Return a hash of a part: its values, and the files that its functions stand in.

    None where that would not say all: source that is in no file, or functions that enclose
    something else than plain values and functions.
    """
    try:
        said = b"".join(_said(vars(part) if isinstance(part, Method) else part))
    except (OSError, TypeError):
        return None
    return hashlib.blake2b(said, digest_size=16).hexdigest()


def _said(value: Any) -> Iterator[bytes]:
    """Yield what decides what a value does.

    Raises:
        OSError: a file cannot be read.
        TypeError: source that is in no file, or a value whose text does not say what it is.
    """
    yield type(value).__name__.encode()
    if isinstance(value, Mapping):
        yield from _said(tuple(value.items()))
    elif isinstance(value, tuple):
        for each in value:
            yield from _said(each)
    elif inspect.isclass(value) or inspect.isfunction(value):
        path = Path(inspect.getsourcefile(value) or "")
        yield f"{value.__module__}:{value.__qualname__}".encode()
        yield b"" if OURS in path.parents else path.read_bytes()
        functions = vars(value).values() if inspect.isclass(value) else [value]
        for each in functions:
            if inspect.isfunction(each) and each.__code__.co_filename == str(path):
                yield from _said(_enclosed(each))
    elif dataclasses.is_dataclass(value):
        yield from _said(vars(value))
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value).encode()
    else:
        raise TypeError(f"expected a plain value, got {type(value).__name__}")


def _enclosed(function: FunctionType) -> tuple[Any, ...]:
    """Return the defaults of a function and what it encloses, its class for `super` left out."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = (cell.cell_contents for name, cell in cells if name != "__class__")
    return function.__defaults__, function.__kwdefaults__, *values
