"""Run files: a config as TOML and back, and values as `--option NAME=VALUE` has them."""

import dataclasses
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.ranges import Scalar

DEFAULTS = "defaults"  # table of a run file
BY_METHOD = ("optimizer", "lr", "keep_optimizer")  # keys whose default is the method's


def read_toml(path: str | Path, *, method: str | None = None) -> dict[str, Any]:
    """Return the keys of a run file.

    Args:
        path: the file.
        method: that goes over the file's. Keys under `[defaults]` are those that the file's method
            chose; another one chooses its own.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"expected a run file at {path}, got: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected TOML in {path}, got: {error}") from None
    chosen = values.pop(DEFAULTS, {})
    if not isinstance(chosen, dict) or not set(chosen) <= set(BY_METHOD):
        raise ConfigError(f"expected {', '.join(BY_METHOD)} under [{DEFAULTS}] in {path}")
    return values if method not in (None, values.get("method")) else {**values, **chosen}


def write_toml(config: RunConfig, defaults: Collection[str] = ()) -> str:
    """Return the run file that reads back as this config; keys left to their default stand too.

    Args:
        config: the run.
        defaults: keys that the method chose.
    """
    tables: dict[str, list[str]] = {"": [], "options": [], DEFAULTS: []}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name != "options" and value is not None:
            table = tables[DEFAULTS if f.name in defaults else ""]
            table.append(f"{f.name} = {toml_value(value)}")
    for name, value in config.options.items():
        tables["options"].append(f"{toml_value(name)} = {toml_value(value)}")
    lines = [*tables.pop(""), "", "[options]", *tables.pop("options")]
    lines += ["", f"[{DEFAULTS}]", *tables[DEFAULTS]] if defaults else []
    return "\n".join(lines) + "\n"


def toml_value(value: Scalar) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def parse_option(text: str) -> tuple[str, Scalar]:
    """Return name and value of `NAME=VALUE`; the value is read as TOML, else as a string.

    >>> parse_option("server_lr=0.5"), parse_option("server_optimizer=adam")
    (('server_lr', 0.5), ('server_optimizer', 'adam'))

    Raises:
        ConfigError: there is no `=`.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"expected --option NAME=VALUE, got {text!r}")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return name.strip().replace("-", "_"), parsed if isinstance(parsed, Scalar) else value
