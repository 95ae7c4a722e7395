"""Arms of a comparison: settings under a name, whose runs are paired seed by seed.

A method by its name is the shortest arm. Values of a setting that changes neither the data nor the
cut make arms, too: `--over selector=uniform,harmony` compares two selectors.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from silograph.core.config import RunConfig
from silograph.core.errors import (
    ConfigError,
    canonical_name,
    mistake,
    nearest,
    reword_error,
    unknown,
)
from silograph.core.run_file import read_toml
from silograph.core.setting_values import Scalar
from silograph.core.text import short_repr
from silograph.experiment.resolve.parts import (
    FLAT,
    TABLES,
    NamedPart,
    named_parts,
    options_of,
    owners_of,
    unknown_option_error,
    with_canonical_names,
)
from silograph.experiment.resolve.user_code import own_code
from silograph.methods.base import Method
from silograph.study.cells import MACHINE, Cell
from silograph.study.study_request import FIELDS, checked_mapping

# What has one value for all runs that are paired: their nodes, cut, split and score.
SAME = (
    *("dataset", "data_dir", "columns", "na_values", "scale", "rating_scale", "largest_component"),
    *("split", "partition", "clients", "drop_edges", "partition_seed", "split_seed"),
    *("metric", "relevant", "evaluate_clients", "evaluation_min_count"),
)
NAMES = ("arm", "method")  # labels that name an arm; the others say what is varied
Labels = Mapping[str, Scalar]


# --- Settings of named arms ----------------------------------------------------------------------


@dataclass(frozen=True)
class ArmSettings:
    """What an arm sets.

    Attributes:
        label: its first label: a named arm's name, or a method.
        fields: fields of the config.
        options: options of parts, as NAME or PART.NAME.
    """

    label: tuple[str, str]
    fields: Mapping[str, Any]
    options: Mapping[str, Scalar]

    @classmethod
    def of(cls, label: tuple[str, str], settings: Mapping[str, Any]) -> "ArmSettings":
        """Return settings by whether they are fields of a config."""
        fields = {key: value for key, value in settings.items() if key in FIELDS}
        options = {key: value for key, value in settings.items() if key not in FIELDS}
        return cls(label, fields, options)


def read_arms(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the arms of a TOML file, which has a table for each below `[arms]`.

    Raises:
        ConfigError: the file is missing or is not TOML, or has something else.
    """
    try:
        tables = read_toml(Path(path))
    except ConfigError as error:
        # TOML reads neighbors.k as an entry of a table, and neighbors is a text.
        hint = ': write "PART.NAME" in quotes' if "Cannot overwrite a value" in str(error) else ""
        raise reword_error(error, f"{error}{hint}", ConfigError) from None
    others = [key for key in tables if key != "arms"]
    if others or not isinstance(tables.get("arms"), dict):
        raise ConfigError(
            f'expected tables such as [arms."FedAvg, 2 layers"] alone in {os.fspath(path)}, got '
            f"{others[0] if others else 'none'}"
        )
    arms: dict[str, Any] = tables["arms"]
    return arms


def checked_arms(arms: object) -> dict[str, dict[str, Any]]:
    """Return the settings of each arm, options of parts beside fields of the config.

    Args:
        arms: settings by arm; an option stands as NAME or PART.NAME beside the others, in a table
            of its part, or under `options`.

    Raises:
        ConfigError: another form, a key twice, or a key that no arm can have.
    """
    return {
        _checked_name(name): _checked_settings(name, checked_mapping(f"arm {name}", settings))
        for name, settings in checked_mapping("arms", arms).items()
    }


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ConfigError(f"expected the name of an arm as text of one line, got {name!r}")
    return name


def _checked_settings(arm: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    entries: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if not isinstance(value, Mapping):
            entries.append((str(key), value))
        elif key == "options" or key in TABLES:
            prefix = "" if key == "options" else f"{key}."
            entries += [(f"{prefix}{name}", entry) for name, entry in value.items()]
        else:
            raise ConfigError(f"arm {arm}: expected one value of {key}, got {short_repr(value)}")
    flat: dict[str, Any] = {}
    for key, value in entries:
        key = key.replace("-", "_")
        if key in flat:
            raise ConfigError(
                f"arm {arm}: expected {key} once, got it twice: leave one out",
                **mistake("repeated-option", key),
            )
        if key == "seed" or key in MACHINE:
            remedy = "give seeds" if key == "seed" else f"give {key}"
            raise ConfigError(f"arm {arm}: expected no {key}, got one: {remedy} for all arms")
        flat[key] = value
    return with_canonical_names(flat)


def check_own_options(arm: ArmSettings, parts: Mapping[str, NamedPart]) -> None:
    """Raise `ConfigError` for a field of an arm that is an option of a part which it does not have.

    A study drops such a field where it is given to all of its runs.
    """
    for name in arm.fields:
        kind = FLAT.get(name)
        if kind is not None and name not in options_of(parts[kind]):
            raise unknown_option_error(name, {kind: parts[kind]}, name)


def error_in_arm(arm: ArmSettings, error: ConfigError) -> ConfigError:
    """Return an error about the runs of a named arm, which says of which."""
    if arm.label[0] != "arm":
        return error
    for key in arm.options:
        if not owners_of(key.rpartition(".")[2]) and nearest(key, [*FIELDS]):
            return unknown(f"key of arm {arm.label[1]}", key, FIELDS)
    return reword_error(error, f"arm {arm.label[1]}: {error}", ConfigError)


def code_of_arms(arms: Mapping[str, Mapping[str, Any]], config: RunConfig) -> dict[str, str]:
    """Return the code of users that arms name, by arm and kind of part.

    Args:
        arms: settings by arm, as `checked_arms` returns them.
        config: of all runs.
    """
    code: dict[str, str] = {}
    for arm, settings in arms.items():
        parts = {kind: settings[kind] for kind in TABLES if isinstance(settings.get(kind), str)}
        own = own_code(replace(config, **parts))
        code |= {f"{kind} of {arm}": spec for kind, spec in own.items() if kind in parts}
    return code


# --- Which values make arms, and which make tables of their own ----------------------------------


def keys_of_points(
    over: Mapping[str, Sequence[Any]], config: RunConfig, method: Method | None
) -> tuple[str, ...]:
    """Return the varied keys whose values make tables of their own: no test pairs their runs.

    They change the data, the cut, the split, or the score. Values of the others are arms.

    Args:
        over: values by key.
        config: of all runs.
        method: its method, where that is a value.
    """
    partitions = [
        named_parts(replace(config, partition=name), method)["partition"]
        for name in over.get("partition", (config.partition,))
    ]

    def is_of_cut(key: str) -> bool:
        kind, _, name = key.rpartition(".")
        if kind or name in FIELDS:
            return (kind or FLAT.get(name)) == "partition"
        return any(name in options_of(partition) for partition in partitions)

    return tuple(key for key in over if key in SAME or is_of_cut(key))


def check_same(cells: Iterable[Cell], names: Sequence[str]) -> None:
    """Raise `ConfigError` where arms have different data, cuts, splits or scores.

    Args:
        cells: of one seed and one table.
        names: of their arms.
    """
    settings = [
        {
            key: value
            for key, value in (cell.start["config"] | cell.start["config"]["options"]).items()
            if key in SAME or key.startswith("partition.")
        }
        for cell in cells
    ]
    for key in dict.fromkeys(key for values in settings for key in values):
        for values, name in zip(settings, names, strict=True):
            first, value = settings[0].get(key), values.get(key)
            if value != first:
                raise ConfigError(
                    f"{key}: expected one value for all arms, whose runs are paired by cut and "
                    f"split, got {first} ({names[0]}) and {value} ({name}): give it to all, or "
                    "vary it by over"
                )


# --- Names of arms, and the one that others are tested against -----------------------------------


def names_of_arms(arms: Sequence[Labels]) -> list[str]:
    """Return what arms are called: by their first label if these differ, and by what is varied.

    >>> names_of_arms([{"method": "fedavg", "lr": 0.1}, {"method": "fedavg", "lr": 0.2}])
    ['lr=0.1', 'lr=0.2']
    >>> names_of_arms([{"method": "local"}, {"method": "fedavg", "lr": 0.2}])
    ['local', 'fedavg, lr=0.2']
    """
    are_alike = len({_first(labels) for labels in arms}) == 1
    texts = []
    for labels in arms:
        varied = _varied_words(labels)
        first = [] if are_alike and varied else [str(_first(labels)[1])]
        texts.append(", ".join([*first, *varied]))
    return texts


def _first(labels: Labels) -> tuple[str, Scalar]:
    return next((key, labels[key]) for key in NAMES if key in labels)


def _varied_words(labels: Labels) -> list[str]:
    """Return what of the varied values an arm has, as users write it."""
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in labels.items()
        if key not in NAMES
    ]


def labels_of_baseline(baseline: str, arms: Mapping[str, Labels]) -> Labels:
    """Return the labels that a baseline names: all of one arm, or one that several have.

    Args:
        baseline: the name of an arm, a method of several arms, or KEY=VALUE of what is varied.
        arms: labels by name.

    Raises:
        ConfigError: there is no such arm (names the nearest).
    """
    choices: dict[str, Labels] = {}
    for labels in arms.values():
        key, value = _first(labels)
        choices[str(value)] = {key: value}
        words = _varied_words(labels)
        varied = [(k, v) for k, v in labels.items() if k not in NAMES]
        choices |= {word: {k: v} for word, (k, v) in zip(words, varied, strict=True)}
    choices |= arms
    name = canonical_name(str(baseline), choices, "baseline")
    if not isinstance(baseline, str) or name not in choices:
        raise unknown("baseline", baseline, choices)
    return choices[name]


def reference_of(arm: str, baseline: Labels, arms: Mapping[str, Labels]) -> str | None:
    """Return the arm that another is tested against: the one like it with the baseline's labels.

    >>> arms = {"a": {"method": "a", "lr": 1}, "b": {"method": "a", "lr": 2}}
    >>> reference_of("c", {"method": "a"}, arms | {"c": {"method": "c", "lr": 2, "mu": 3}})
    'b'

    Args:
        arm: its name.
        baseline: see `labels_of_baseline`.
        arms: labels by name, of one table.

    Returns:
        None where several have the baseline's labels, and none of them is like it.
    """
    wanted = {**arms[arm], **baseline}
    with_baseline = [n for n, labels in arms.items() if baseline.items() <= labels.items()]
    # It may lack an option that the other has, but has no other value.
    alike = [name for name in with_baseline if arms[name].items() <= wanted.items()]
    candidates = alike or with_baseline
    return candidates[0] if len(candidates) == 1 else None
