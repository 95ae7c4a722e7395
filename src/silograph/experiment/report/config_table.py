"""What a page says of configs: a table, what differs from the defaults, and how to run it again."""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silograph.core.config import RunConfig
from silograph.experiment.report.reading import RunRecord
from silograph.experiment.result_files import CONFIG

FIELDS = {f.name: f for f in dataclasses.fields(RunConfig) if f.name != "out"}
FIRST = ("method", "model")
SEEDS = ("seed", "partition_seed", "split_seed", "init_seed")


@dataclass(frozen=True)
class ConfigRow:
    """A row of the config's table.

    Attributes:
        name: the key.
        value: as the run used it.
        help: what it means.
        changed: whether it was given, and not as the default.
        filled: whether it was left open and the run chose.
    """

    name: str
    value: str
    help: str
    changed: bool
    filled: bool


def default_of(name: str) -> Any:
    """Return the default of a config's field."""
    field = FIELDS[name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def text_of(value: Any) -> str:
    """Return a config's value as a page shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={text_of(v)}" for k, v in value.items()) or "-"
    return str(value)


def changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given and is not the default."""
    return {
        name: given[name]
        for name in FIELDS
        if given[name] is not None and given[name] != default_of(name)
    }


def settings(run: RunRecord) -> dict[str, list[ConfigRow]]:
    """Return the rows of the config's table by group, groups in their first order."""
    used, changed = run.about["config"], changes(run.given)
    table: dict[str, list[ConfigRow]] = {}
    for name, field in FIELDS.items():
        row = ConfigRow(
            name=name,
            value=text_of(used.get(name)),
            help=field.metadata["help"],
            changed=name in changed,
            filled=name not in changed and used.get(name) != default_of(name),
        )
        table.setdefault(field.metadata["group"], []).append(row)
    return table


def flags(changed: Mapping[str, Any]) -> list[str]:
    """Return the command-line flags that say these values."""
    words: list[str] = []
    for name, value in changed.items():
        flag = "--" + name.replace("_", "-")
        if name == "options":
            for key, entry in value.items():
                plain = entry if isinstance(entry, str) else json.dumps(entry)
                words += ["--option", f"{key}={plain}"]
        elif isinstance(value, bool):
            words.append(flag if value else FIELDS[name].metadata["off"] or f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return words


def commands(run: RunRecord) -> dict[str, str]:
    """Return how to run it again and how to go on, by what it is for."""
    changed = changes(run.given)
    if run.about.get("source") is None:  # a graph in memory: only Python has it
        changed.pop("dataset", None)
        words = "".join(f", {name}={value!r}" for name, value in changed.items())
        return {
            "again": f"sg.run(graph{words})",
            "resume": f"sg.resume({run.path!r}, graph=graph)",
        }
    dataset = changed.pop("dataset", default_of("dataset"))
    return {
        "again": shlex.join(["silograph", "run", dataset, *flags(changed)]),
        "from its file": shlex.join(["silograph", "run", "--config", str(Path(run.path, CONFIG))]),
        "resume": shlex.join(["silograph", "resume", run.path]),
    }


def differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which configs differ; method and model come first."""
    found = [name for name in FIELDS if len({text_of(c.get(name)) for c in configs}) > 1]
    return sorted(found, key=lambda name: name not in FIRST)
