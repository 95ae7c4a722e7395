"""Changes of a config, as a flag over a run file makes them."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from silograph.core.config import RunConfig
from silograph.core.ranges import Scalar as Scalar


def changed_values(config: RunConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config with changes over them.

    Options of a part that is replaced by another one go with it, and so does an option under
    another name than in the changes.
    """
    gone = {kind for kind in changes if changes[kind] != getattr(config, kind, None)}
    kept = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.metadata.get("part") not in gone and getattr(config, f.name) is not None
    }
    options = {n: v for n, v in config.options.items() if n.partition(".")[0] not in gone}
    return kept | {"options": not_said_again(options, in_full(changes))} | dict(changes)


def in_full(keys: Collection[str]) -> list[str]:
    """Return the PART.NAME of those keys of a config that are options of a part."""
    own = (f for f in dataclasses.fields(RunConfig) if f.name in keys and "part" in f.metadata)
    return [f"{f.metadata['part']}.{f.name}" for f in own]


def not_said_again(options: Mapping[str, Scalar], names: Collection[str]) -> dict[str, Scalar]:
    """Return the options that are not among names, each NAME or PART.NAME."""
    return {
        own: value
        for own, value in options.items()
        if not any(_is_same_option(own, name) for name in names)
    }


def _is_same_option(one: str, other: str) -> bool:
    """Whether two names, each with a part or without, can be of one option."""
    (kind, _, name), (kind2, _, name2) = one.rpartition("."), other.rpartition(".")
    return name == name2 and (kind == kind2 or not kind or not kind2)
