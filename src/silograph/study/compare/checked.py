"""What is asked of a comparison, looked at before anything runs."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, unknown
from silograph.core.text import shown
from silograph.experiment.resolve.parts import named_parts, owners_of, place_of
from silograph.experiment.resolve.without_data import resolved_without_data
from silograph.methods.base import Method
from silograph.study.cells import APART, Cell, words_of
from silograph.study.compare.asked import Asked
from silograph.study.compare.comparison import VIEW_CHOICES
from silograph.study.compare.paired_statistics import TESTS
from silograph.task.metric_table import metric_of

FIELDS = [f.name for f in dataclasses.fields(RunConfig)]
SHARED = ("partition", "model", "neighbors", "selector", "aggregator")  # parts of all methods
VARIABLE = [name for name in FIELDS if name not in APART]


def check(asked: Asked) -> None:
    """Raise `ConfigError` for names that do not exist."""
    for name in asked.options:
        if name not in (*asked.methods, *SHARED):
            raise unknown("method or part with options", name, [*asked.methods, *SHARED])
    if asked.baseline is not None and asked.baseline not in asked.methods:
        raise unknown("baseline", asked.baseline, asked.methods)
    if asked.metric is not None:
        metric_of(asked.metric)
    if asked.view not in VIEW_CHOICES:
        raise unknown("view", asked.view, VIEW_CHOICES)
    if asked.test not in TESTS:
        raise unknown("test", asked.test, TESTS)
    for key in asked.over:
        if isinstance(key, str) and key.startswith("options."):
            raise ConfigError(f"expected NAME or PART.NAME of an option to vary, got {key!r}")
        if not isinstance(key, str) or (key in FIELDS and key not in VARIABLE):
            raise unknown("key to vary", key, VARIABLE)


def check_key(key: str, config: RunConfig, method: Method | None) -> None:
    """Raise `ConfigError` for a key to vary that is neither a field nor an option of these parts.

    Args:
        key: to vary.
        config: of a run.
        method: its method, where that is a value.
    """
    if owners_of(key.rpartition(".")[2]):
        kind, name = place_of(key, named_parts(config, method))
        raise ConfigError(
            f"expected a key that one of these runs reads, got {key}: other options of {kind} say "
            f"that nothing reads {name}: leave it out, or change those"
        )
    raise unknown("key to vary", key, VARIABLE)


def check_cells(cells: Iterable[Cell]) -> None:
    """Raise `ConfigError` for runs that no data would make possible; it names them."""
    for cell in cells:
        try:
            resolved_without_data(cell.config, cell.method)
        except ConfigError as error:
            name = words_of({key: value for key, value in cell.labels.items() if key != "seed"})
            raise ConfigError(f"{error} (runs of {name})") from None


def checked_list(what: str, values: object) -> tuple[Any, ...]:
    """Return a list as a tuple.

    Raises:
        ConfigError: not a list, empty, or with an entry twice.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ConfigError(f"expected a list of {what}, got {shown(values)}")
    found = tuple(values)
    if not found:
        raise ConfigError(f"expected at least one of {what}, got none")
    for number, value in enumerate(found):
        if value in found[:number]:
            raise ConfigError(f"expected {what} that differ, got {shown(value)} twice")
    return found


def checked_over(over: object) -> dict[str, tuple[Any, ...]]:
    """Return what varies, with the values of every key.

    Raises:
        ConfigError: not a dict of lists.
    """
    given = checked_mapping("over", over)
    cuts = given.get("partition", ())
    if not isinstance(cuts, str) and isinstance(cuts, Sequence):
        for cut in cuts:
            if not isinstance(cut, str):
                raise ConfigError(
                    f"expected partitions to vary by name or as FILE.csv, got {type(cut).__name__}"
                )
    return {key: checked_list(f"values of {key}", values) for key, values in given.items()}


def checked_options(options: object) -> dict[str, Mapping[str, Any]]:
    """Return the options of methods; raise `ConfigError` for anything but a dict of dicts."""
    given = checked_mapping("options", options)
    return {name: checked_mapping(f"options of {name}", own) for name, own in given.items()}


def checked_mapping(what: str, values: object) -> Mapping[str, Any]:
    """Return a mapping, an empty one for None; raise `ConfigError` for anything else."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"expected {what} as a dict, got {values!r}")
    return values


def check_no_seed(run_options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a seed of one run."""
    if "seed" in run_options:
        seed = run_options["seed"]
        raise ConfigError(f"expected seeds for several runs, got seed={seed!r}: give seeds=[...]")


def checked_seeds(seeds: object) -> tuple[int, ...]:
    """Return seeds: those of a list, or 0, 1, ... for a number.

    Raises:
        ConfigError: below 1, empty, or no whole numbers.
    """
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if seeds < 1:
            raise ConfigError(f"seeds: expected at least one, got {seeds}")
        return tuple(range(seeds))
    found = checked_list("seeds", seeds)
    for seed in found:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"expected seeds that are whole numbers from 0, got {seed!r}")
    return found
