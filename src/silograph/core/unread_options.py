"""Options that nothing reads because of what another option of the same part says.

The metadata of a field declares it: `"read_if": {"nodes": ("random", "importance")}` is an option
that is read where `nodes` has one of these values, and for several others where all do.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from silograph.core.errors import ConfigError


def unread(options: type, given: Mapping[str, Any]) -> set[str]:
    """Return the names of options that nothing reads.

    Args:
        options: dataclass of a part's options.
        given: values of some of them; the others have their defaults.
    """
    values = {f.name: given.get(f.name, f.default) for f in dataclasses.fields(options)}
    return {f.name for f in dataclasses.fields(options) if _because_of(f, values) is not None}


def check_read(options: Any, kind: str, what: str) -> None:
    """Raise `ConfigError` for a value that nothing reads, unless it is the default.

    Args:
        options: of a part, checked.
        kind: of the part, such as method.
        what: its name.
    """
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    for f in dataclasses.fields(options):
        other = _because_of(f, values)
        if other is not None and values[f.name] != f.default:
            *more, last = map(_text, f.metadata["read_if"][other])
            wanted = f"{', '.join(more)} or {last}" if more else last
            raise ConfigError(
                f"option {kind}.{f.name}: {what} does not read it with "
                f"{other}={_text(values[other])}, got {values[f.name]}: leave it out, "
                f"or give {other}={wanted}"
            )


def _because_of(field: "dataclasses.Field[Any]", values: Mapping[str, Any]) -> str | None:
    """Return the other option because of which a field is not read; None: it is read.

    Values may be texts, as users write them.
    """
    needed: Mapping[str, tuple[object, ...]] = field.metadata.get("read_if", {})
    said = {other: {_text(value) for value in wanted} for other, wanted in needed.items()}
    return next((other for other, texts in said.items() if _text(values[other]) not in texts), None)


def _text(value: object) -> str:
    """Return a value as users write it."""
    return str(value).lower()
