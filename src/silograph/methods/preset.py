"""Presets: a method under another name, with other defaults of its options."""

from dataclasses import field, fields, replace
from typing import Any

from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT
from silograph.methods.base import AnyMethod


def preset(base: AnyMethod, name: str, title: str, **defaults: object) -> AnyMethod:
    """Return a method under another name.

    Args:
        base: the method.
        name: what users call it.
        title: one line for listings.
        defaults: of its options that differ.
    """
    given = base.options
    own = {
        f.name: field(default=defaults.get(f.name, f.default), metadata=f.metadata)
        for f in fields(given)
    }
    space = {"__module__": given.__module__, "__doc__": given.__doc__}
    types = {"__annotations__": {f.name: f.type for f in fields(given)}}
    options: type[Any] = type(f"{name.capitalize()}Options", (), {**own, **space, **types})
    made = dataclass(options, config=STRICT, frozen=True)
    return replace(base, name=name, title=title, options=made)
