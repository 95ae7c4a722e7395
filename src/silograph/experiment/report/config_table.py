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
OPTIONS = "Options of the parts"
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


def used_values(run: RunRecord) -> dict[str, Any]:
    """Return every key of a run with the value that was used; options of parts as PART.NAME."""
    used, options = run.about["config"], run.about["config"]["options"]
    return {**{k: v for k, v in used.items() if k in FIELDS and k != "options"}, **options}


def given_of(run: RunRecord) -> dict[str, Any]:
    """Return the keys that were given and are not the default, likewise."""
    return {**{k: v for k, v in run.given.items() if k != "options"}, **run.given["options"]}


def help_of(run: RunRecord, name: str) -> str:
    """Return what a key means."""
    text: str = FIELDS[name].metadata["help"] if name in FIELDS else run.about["help"].get(name, "")
    return text


def settings(run: RunRecord) -> dict[str, list[ConfigRow]]:
    """Return the rows of the config's table by group, groups in their first order."""
    changed = given_of(run)
    table: dict[str, list[ConfigRow]] = {}
    for name, value in used_values(run).items():
        if not applies(run, name, value) and name not in changed:
            continue
        field = FIELDS.get(name)
        row = ConfigRow(
            name=name,
            value=text_of(value),
            help=help_of(run, name),
            changed=name in changed,
            filled=field is not None and name not in changed and value != default_of(name),
        )
        table.setdefault(OPTIONS if field is None else field.metadata["group"], []).append(row)
    return table


def applies(run: RunRecord, name: str, value: Any) -> bool:
    """Whether a key has a say in a run: nothing is chosen by one without a value."""
    used = run.about["config"]
    says = {
        "momentum": used.get("optimizer") == "sgd",
        "scale": value != 1.0,
        "edge_weights": "edge_weights" in run.about["dataset"],
        "evaluation_min_count": bool(value),
        "min_nodes_per_row": value != 1,
        "min_silos_per_row": value != 1,
        "weights_as": value != "exact",
        "weight_rows": value != "all",
        "largest_component": run.cut is not None,
        "drop_edges": run.cut is not None,
        "local_bias": run.cut is not None,
        "strict": run.cut is not None,
        "block_size": run.cut is not None,
        "layers": "module" not in run.about["model"],
        "hidden": "module" not in run.about["model"] and used.get("layers") != 1,
    }
    return value is not None and says.get(name, True)


def flags(changed: Mapping[str, Any]) -> list[str]:
    """Return the command-line flags that say these values."""
    words: list[str] = []
    for name, value in changed.items():
        key = short_of(name)
        flag = "--" + key.replace("_", "-")
        if key not in FIELDS:
            plain = value if isinstance(value, str) else json.dumps(value)
            words += ["--option", f"{name}={plain}"]
        elif isinstance(value, bool):
            words.append(flag if value else FIELDS[key].metadata["off"] or f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return words


def short_of(name: str) -> str:
    """Return the key of `RunConfig` that says an option, if there is one; else the whole name."""
    kind, _, own = name.partition(".")
    return own if own in FIELDS and FIELDS[own].metadata.get("part") == kind else name


def keywords(changed: Mapping[str, Any]) -> str:
    """Return the keywords in Python that say these values, each behind a comma."""
    short = {short_of(name): value for name, value in changed.items()}
    plain = {name: value for name, value in short.items() if name in FIELDS}
    options = {name: value for name, value in short.items() if name not in FIELDS}
    plain |= {"options": options} if options else {}
    return "".join(f", {name}={value!r}" for name, value in plain.items())


def commands(run: RunRecord) -> dict[str, str]:
    """Return how to run it again and how to go on, by what it is for."""
    changed, code = given_of(run), bool(run.about.get("code"))
    if run.about.get("source") is None:  # a graph in memory: only Python has it
        changed.pop("dataset", None)
        return {
            "again": f"sg.run(graph{keywords(changed)})",
            "resume": f"sg.resume({run.path!r}, graph=graph{', trust=True' * code})",
        }
    dataset = changed.pop("dataset", default_of("dataset"))
    trust = ["--trust"] * code
    return {
        "again": shlex.join(["silograph", "run", dataset, *flags(changed)]),
        "from its file": shlex.join(
            ["silograph", "run", "--config", str(Path(run.path, CONFIG)), *trust]
        ),
        "resume": shlex.join(["silograph", "resume", run.path, *trust]),
    }


def differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which configs differ; method and model come first."""
    names = dict.fromkeys(name for config in configs for name in config)
    found = [name for name in names if len({text_of(c.get(name)) for c in configs}) > 1]
    return sorted(found, key=lambda name: name not in FIRST)
