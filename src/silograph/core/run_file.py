"""Run files: a config as TOML and back, and values as `--option NAME=VALUE` has them."""

import dataclasses
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from silograph.core.config import SCORED_ON_RECEIPT, RunConfig
from silograph.core.errors import ConfigError
from silograph.core.files import check_regular
from silograph.core.setting_values import Scalar

DEFAULTS = "defaults"  # table of a run file


def read_toml(path: str | Path, *, anew: bool = False) -> dict[str, Any]:
    """Return the keys of a run file.

    Args:
        path: the file.
        anew: leave out what stands under `[defaults]`, which was not given but chosen for the run
            as the file has it: a run that differs from it chooses its own.

    Raises:
        ConfigError: the file is missing or is not TOML, or has no tables where they should be.
    """
    try:
        check_regular(path, "a run file", ConfigError)
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"expected a run file at {path}, got: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected TOML in {path}, got: {error}") from None
    if DEFAULTS not in values:
        return values
    chosen, given = values.pop(DEFAULTS), values.pop("options", {})
    if isinstance(chosen, dict):
        chosen = {name: value for name, value in chosen.items() if name != SCORED_ON_RECEIPT}
    own = chosen.pop("options", {}) if isinstance(chosen, dict) else None
    if not isinstance(own, dict) or not isinstance(given, dict):
        raise ConfigError(
            f"expected tables [options], [{DEFAULTS}] and [{DEFAULTS}.options] in {path}"
        )
    names = {f.name for f in dataclasses.fields(RunConfig)}
    if foreign := sorted({*chosen} - names):
        raise ConfigError(f"expected keys of a run under [{DEFAULTS}] in {path}, got {foreign[0]}")
    return {**values, "options": given} if anew else {**chosen, **values, "options": own | given}


def write_toml(config: RunConfig, left_open: Collection[str] = ()) -> str:
    """Return the run file that reads back as this config; keys left to their default stand too.

    Args:
        config: the run.
        left_open: keys and options whose values were not given: they stand under `[defaults]`.
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


def parse_options(texts: Iterable[str]) -> dict[str, Scalar]:
    """Return the values of `NAME=VALUE`, by name.

    Raises:
        ConfigError: there is no `=`, or a name twice.
    """
    found: dict[str, Scalar] = {}
    for text in texts:
        name, value = parse_option(text)
        if name in found:
            raise ConfigError(f"expected --option {name} once, got it twice: leave one of them out")
        found[name] = value
    return found
