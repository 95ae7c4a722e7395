"""What a search tries: keys with their ranges, over a run."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from silograph.core.config import RunConfig, make_config
from silograph.core.config_changes import in_full, not_said_again
from silograph.core.errors import ConfigError, unknown
from silograph.core.ranges import Range, declared, parse_range
from silograph.experiment.resolve.asked_run import with_absolute_paths, with_model_for
from silograph.experiment.resolve.in_memory_parts import Own
from silograph.experiment.resolve.parts import (
    TABLES,
    find_method,
    named_parts,
    options_of,
    place_of,
)
from silograph.experiment.resolve.resolve import choose
from silograph.experiment.resolve.varied_parts import check_some_have, fitting, without_unread
from silograph.graph.graph import Graph
from silograph.methods.base import Method
from silograph.study.cells import APART, Cell
from silograph.study.compare.checked import checked_list
from silograph.study.tune.proposals import TrialParams

FIELDS = {f.name: f for f in dataclasses.fields(RunConfig)}
NO_FIELDS: Mapping[str, "dataclasses.Field[Any]"] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Space:
    """What is searched.

    Attributes:
        base: the run; tuned keys go over it.
        ranges: of the tuned keys: fields of `RunConfig`, or options of the method.
        seeds: every trial runs with all of them.
        view: whose validation scores count.
        seed: of the search.
        graph: the graph, where it is in memory.
        own: parts that are values.
    """

    base: RunConfig
    ranges: Mapping[str, Range]
    seeds: tuple[int, ...]
    view: str
    seed: int
    graph: Graph | None
    own: Own

    def config(self, params: TrialParams) -> RunConfig:
        """Return the run with these values."""
        fields = {key: value for key, value in params.items() if key in FIELDS}
        options = {key: value for key, value in params.items() if key not in FIELDS}
        values = {k: v for k, v in vars(self.base).items() if v is not None}
        kept = not_said_again(self.base.options, [*in_full(fields), *options])
        config = make_config(values | fields | {"options": kept | options})
        method = self.own.methods.get(config.method)
        config = with_model_for(config, self.graph, method)
        read = without_unread(config.options, options, named_parts(config, method))
        return fitting(dataclasses.replace(config, options=read), method)

    def cells(self, number: int, params: TrialParams) -> list[Cell]:
        """Return the cells of a trial, one for each seed."""
        config = self.config(params)
        own = self.own.methods.get(config.method), self.own.models.get(config.model or "")
        return [
            Cell({"trial": number, "seed": seed}, replace(config, seed=seed), self.graph, *own)
            for seed in self.seeds
        ]

    @property
    def method(self) -> Method:
        """Return the method."""
        return find_method(self.base, self.own.methods.get(self.base.method))

    def plan(self) -> dict[str, Any]:
        """Return what must be the same for a search to go on, as plain values."""
        base = with_absolute_paths(self.base, in_memory=self.graph is not None)
        config = {k: v for k, v in dataclasses.asdict(base).items() if v is not None}
        return {
            "in_memory": self.graph is not None,
            "values": self.own.names,
            "config": config,
            "ranges": {key: str(values) for key, values in self.ranges.items()},
            "seeds": list(self.seeds),
            "view": self.view,
            "search_seed": self.seed,
        }


def given_keys(run_options: Mapping[str, Any], base: RunConfig, own: Own) -> set[str]:
    """Return the keys of a run and the options of its parts that have a value already."""
    return {*run_options, *(key_of(key, base, own) for key in run_options.get("options", {}))}


def key_of(key: Any, base: RunConfig, own: Own) -> Any:
    """Return the one name of a key: NAME of a field or the method's option, else PART.NAME."""
    if not isinstance(key, str) or key in FIELDS:  # `chosen_ranges` refuses what is no text
        return key
    try:
        kind, name = place_of(key, named_parts(base, own.methods.get(base.method)))
    except ConfigError:  # it is no key; `chosen_ranges` says so
        return key
    return name if kind == "method" else f"{kind}.{name}"


def part_options(base: RunConfig, own: Own) -> "dict[str, dataclasses.Field[Any]]":
    """Return the options of all parts but the method, as PART.NAME."""
    parts = named_parts(base, own.methods.get(base.method))
    return {
        f"{kind}.{name}": f
        for kind, part in parts.items()
        if kind != "method"
        for name, f in options_of(part).items()
    }


def chosen_ranges(
    method: Method,
    keys: Sequence[str] | None,
    given: Mapping[str, Range | str],
    fixed: Collection[str] = (),
    others: Mapping[str, "dataclasses.Field[Any]"] = NO_FIELDS,
) -> dict[str, Range]:
    """Return the ranges of the keys that are tuned.

    Args:
        method: whose options may be tuned.
        keys: those asked for; None for all that declare a range and have no value yet.
        given: ranges in place of those declared.
        fixed: keys that have a value already.
        others: options of the other parts, as PART.NAME.

    Raises:
        ConfigError: a key does not exist (names the nearest), has no range or a value already, or
            a range is wrong.
    """
    options = {f.name: f for f in dataclasses.fields(method.options)} | dict(others)
    own = {key: checked_range(key, value) for key, value in given.items()}
    known = declared(FIELDS | options) | own
    asked = [*([] if keys is None else checked_list("keys", keys)), *given]
    for key in asked:
        if key in APART or (key not in FIELDS and key not in options):
            raise unknown("key to tune", key, declared(FIELDS | options))
        if key not in known:
            raise ConfigError(f"expected a range for {key}, got none: give --range {key}=LOW:HIGH")
        if key in fixed:
            raise ConfigError(
                f"expected {key} either with a value or searched, got both: leave one of them out"
            )
    wanted = [key for key in known if key not in fixed] if keys is None else asked
    if not wanted:
        raise ConfigError("expected at least one key to tune, got a value for each: leave one out")
    return {key: known[key] for key in wanted}


def checked_range(key: str, value: object) -> Range:
    """Return a range that may be given as text; raise `ConfigError` for anything else."""
    if not isinstance(value, str | Range):
        raise ConfigError(
            f"expected a range of {key} as text, such as '0.001:0.3:log', '1:5' or '16,64', got "
            f"{value!r}"
        )
    try:
        return parse_range(str(value))  # what the plan of a search says
    except ConfigError as error:
        raise ConfigError(f"range of {key}: {error}") from None


def check_ends(space: Space, run_options: Collection[str]) -> None:
    """Raise `ConfigError` where a config cannot have the ends or choices of a range."""
    over = {kind: space.ranges[kind].ends for kind in TABLES if kind in space.ranges}
    check_some_have({*run_options, *space.ranges}, space.base, over)
    for key, values in space.ranges.items():
        for value in values.ends:
            config = space.config({key: value})
            choose(config, space.own.methods.get(config.method))
