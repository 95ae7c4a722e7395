"""Options of runs that vary their parts: which of them a run takes."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from silograph.core.config import RunConfig, Scalar, unread
from silograph.experiment.resolve.parts import (
    FLAT,
    TABLES,
    NamedPart,
    find_option,
    named_parts,
    options_of,
    unknown_option_error,
)
from silograph.methods.base import Method


def has_option(name: str, parts: Mapping[str, NamedPart]) -> bool:
    """Whether one of some parts by kind has an option, NAME or PART.NAME."""
    kind, dot, option_name = str(name).partition(".")  # `make_config` refuses what is no text
    if dot and kind in parts:
        return option_name in options_of(parts[kind])
    return any(name in options_of(part) for part in parts.values())


def is_unread(name: str, parts: Mapping[str, NamedPart], values: Mapping[str, Scalar]) -> bool:
    """Whether a part has an option that nothing reads because of what other options say.

    Args:
        name: of the option, NAME or PART.NAME.
        parts: by kind.
        values: values of options, by NAME or PART.NAME; of one that stands there twice, the last.
    """
    if not has_option(name, parts):
        return False
    kind, option_name = find_option(name, parts)
    value_by_place = {find_option(n, parts): v for n, v in values.items() if has_option(n, parts)}
    return option_name in unread(
        parts[kind].options, {n: v for (k, n), v in value_by_place.items() if k == kind}
    )


def without_unread(
    options: Mapping[str, Scalar],
    varied: Mapping[str, Scalar],
    parts: Mapping[str, NamedPart],
) -> dict[str, Scalar]:
    """Return options of one of several runs, without those that what is varied makes unread.

    One that is not read in any case stays, to be refused.

    Args:
        options: of the run, those that are varied last.
        varied: those that differ between the runs.
        parts: of the run.
    """
    fixed_options = {name: value for name, value in options.items() if name not in varied}
    return {
        name: value
        for name, value in options.items()
        if not is_unread(name, parts, options)
        or (name not in varied and is_unread(name, parts, fixed_options))
    }


def without_foreign_options(config: RunConfig, method: Method | None = None) -> RunConfig:
    """Return a config without the keys of options that its own partition or model does not have.

    A study that varies parts gives such a key to all of its runs.
    """
    parts = named_parts(config, method)
    foreign = {
        name: None
        for name, kind in FLAT.items()
        if getattr(config, name) is not None and name not in options_of(parts[kind])
    }
    return dataclasses.replace(config, **foreign)  # type: ignore[arg-type]


def check_some_have(
    keys: Iterable[str], config: RunConfig, varied_values: Mapping[str, Iterable[object]]
) -> None:
    """Raise `ConfigError` for the key of an option that no part of some runs has.

    Args:
        keys: keys of configs.
        config: of all runs.
        varied_values: parts, among other keys, that runs have in place of the config's.
    """
    parts = named_parts(config) if set(keys) & FLAT.keys() else {}
    for name in keys:
        if name not in FLAT:
            continue
        kind = FLAT[name]
        table, names = TABLES[kind], varied_values.get(kind, ())
        varied_parts = [table[str(part_name)] for part_name in names if part_name in table] or [
            parts[kind]
        ]
        if not any(name in options_of(part) for part in varied_parts):
            raise unknown_option_error(name, {kind: varied_parts[0]}, name)


def without_part(config: RunConfig, kind: str) -> RunConfig:
    """Return a config without what it says of the options of one kind of part."""
    parts = named_parts(config)
    options = {n: v for n, v in config.options.items() if find_option(n, parts)[0] != kind}
    own: dict[str, Any] = {name: None for name, owner in FLAT.items() if owner == kind}
    return dataclasses.replace(config, options=options, **own)


def without_method(config: RunConfig, method: Method) -> dict[str, Scalar]:
    """Return the options of a config that are not those of its method."""
    parts = named_parts(config, method)
    return {n: v for n, v in config.options.items() if find_option(n, parts)[0] != "method"}
