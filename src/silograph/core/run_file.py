"""Run files: a config as TOML and back, and values of `--option NAME=VALUE`."""

import dataclasses
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from silograph.core.config import SCORED_ON_RECEIPT, RunConfig
from silograph.core.errors import ConfigError, mistake, read_mistake
from silograph.core.files import check_regular
from silograph.core.setting_values import Scalar

DEFAULTS = "defaults"  # table of a run file


def read_toml(path: str | Path, *, anew: bool = False) -> dict[str, Any]:
    """Return the keys of a run file.

    Args:
        path: the file.
        anew: leave out values under `[defaults]`. The user did not give them; they were chosen for
            the run in this file, and a different run chooses its own.

    Raises:
        ConfigError: the file is missing or is not TOML, or has no tables where they should be.
    """
    try:
        check_regular(path, "a run file", ConfigError)
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"expected a run file at {path}, got: {error.strerror}", **read_mistake(error, path)
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"expected TOML in {path}, got: {error}", **mistake("wrong-format", path)
        ) from None
    if DEFAULTS not in values:
        return values
    defaults, options = values.pop(DEFAULTS), values.pop("options", {})
    if isinstance(defaults, dict):
        defaults = {name: value for name, value in defaults.items() if name != SCORED_ON_RECEIPT}
    default_options = defaults.pop("options", {}) if isinstance(defaults, dict) else None
    if not isinstance(default_options, dict) or not isinstance(options, dict):
        raise ConfigError(
            f"expected tables [options], [{DEFAULTS}] and [{DEFAULTS}.options] in {path}",
            **mistake("wrong-format", path),
        )
    names = {f.name for f in dataclasses.fields(RunConfig)}
    if unknown_keys := sorted({*defaults} - names):
        raise ConfigError(
            f"expected keys of a run under [{DEFAULTS}] in {path}, got {unknown_keys[0]}",
            **mistake("unknown-name", "key", unknown_keys[0], None, sorted(names)),
        )
    if anew:
        return {**values, "options": options}
    return {**defaults, **values, "options": default_options | options}


def write_toml(config: RunConfig, left_open: Collection[str] = ()) -> str:
    """Return the run file that reads back as this config; defaults are written, too.

    Args:
        config: the run.
        left_open: keys and options that the user did not set: they are written under `[defaults]`.
    """
    tables: dict[str, list[str]] = {
        name: [] for name in ("", "options", DEFAULTS, f"{DEFAULTS}.options")
    }
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name != "options" and value is not None:
            table = tables[DEFAULTS if f.name in left_open else ""]
            table.append(f"{f.name} = {toml_value(value)}")
    for name, value in config.options.items():
        table = tables[f"{DEFAULTS}.options" if name in left_open else "options"]
        table.append(f"{toml_value(name)} = {toml_value(value)}")
    lines = tables.pop("")
    for name, own in tables.items():
        lines += ["", f"[{name}]", *own] if own or name == "options" else []
    return "\n".join(lines) + "\n"


def toml_value(value: Scalar) -> str:
    """Return a value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def parse_option(text: str) -> tuple[str, Scalar]:
    """Return name and value of `NAME=VALUE`; the value is read as TOML, else as a string.

    >>> parse_option("server_lr=0.5"), parse_option("score=odds")
    (('server_lr', 0.5), ('score', 'odds'))

    Raises:
        ConfigError: there is no `=`.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(
            f"expected --option NAME=VALUE, got {text!r}", **mistake("option-value", "option", text)
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    return name.strip().replace("-", "_"), parsed if isinstance(parsed, Scalar) else value


def parse_options(texts: Iterable[str]) -> dict[str, Scalar]:
    """Return the values of `NAME=VALUE`, by name.

    Raises:
        ConfigError: there is no `=`, or a name twice.
    """
    options: dict[str, Scalar] = {}
    for text in texts:
        name, value = parse_option(text)
        if name in options:
            raise ConfigError(
                f"expected --option {name} once, got it twice: leave one of them out",
                **mistake("repeated-option", name),
            )
        options[name] = value
    return options
