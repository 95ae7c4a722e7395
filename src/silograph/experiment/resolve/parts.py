"""The parts of a run that a config names, each with its checked options.

A part declares its options in a frozen dataclass: type, bounds, default, help and, in `tune`, the
range that tuning tries. A user gives one as NAME, if one chosen part alone has it, or as PART.NAME.
"""

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from silograph.aggregation.aggregators import AGGREGATORS, Aggregator
from silograph.aggregation.server_optimizers import SERVER_OPTIMIZERS, ServerOptimizer
from silograph.core.config import RunConfig, check_read, checked, unread
from silograph.core.errors import ConfigError, canonical_name, lookup, mistake, unknown
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import RowMinimum, Scalar
from silograph.evaluation.scoring import AllSilos, HaloFrom
from silograph.experiment.resolve.user_code import import_spec, is_spec
from silograph.graph.datasets import has_ratings, source_of
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import (
    PARTITIONERS,
    Partitioner,
    check_no_path,
    names_clients,
)
from silograph.graph.silos.data import Silos
from silograph.methods import METHODS
from silograph.methods.base import NODE_MODEL, Method
from silograph.nn.model import MODELS
from silograph.nn.model_options import MODEL_KINDS, MODULE, ModelKind
from silograph.sampling.neighbors import NEIGHBORS, NeighborSampler
from silograph.selection.base import Selector
from silograph.selection.registry import SELECTORS

P = TypeVar("P")
OWN = ("FILE.py:NAME",)  # names added to a table in another process are unknown in this one


class NamedPart(Protocol):
    """What all parts that users name have."""

    @property
    def name(self) -> str:
        """What they call it."""

    @property
    def title(self) -> str:
        """One line for listings."""

    @property
    def options(self) -> type:
        """Frozen dataclass of its own options."""


TABLES: dict[str, Mapping[str, NamedPart]] = {
    "method": METHODS,
    "partition": PARTITIONERS,
    "model": MODEL_KINDS,
    "neighbors": NEIGHBORS,
    "selector": SELECTORS,
    "aggregator": AGGREGATORS,
    "server_optimizer": SERVER_OPTIMIZERS,
}
# Options that have a key of their own in a config, with their part.
FLAT = {f.name: f.metadata["part"] for f in dataclasses.fields(RunConfig) if "part" in f.metadata}


SETTINGS = {f.name for f in dataclasses.fields(RunConfig)} - FLAT.keys()  # of the run itself


def with_canonical_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of a config with parts by their names in silograph: `FedAvg` is `fedavg`.

    Args:
        values: by key; parts that are values, or names of no part, stay as they are.

    Raises:
        ConfigError: a name that can be of several parts.
    """
    names = {
        kind: canonical_name(values[kind], table, kind.replace("_", " "))
        for kind, table in TABLES.items()
        if isinstance(values.get(kind), str)
    }
    return {**values, **names}


@dataclass(frozen=True, eq=False)
class ChosenPart(Generic[P]):
    """A part and its checked options."""

    part: P
    options: Any


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a run."""

    method: ChosenPart[Method]
    partition: ChosenPart[Partitioner]
    model: ChosenPart[ModelKind]
    neighbors: ChosenPart[NeighborSampler]
    selector: ChosenPart[Selector]
    aggregator: ChosenPart[Aggregator]
    server_optimizer: ChosenPart[ServerOptimizer]

    @property
    def options(self) -> dict[str, Scalar | None]:
        """Options of all parts as PART.NAME, defaults written out."""
        return {
            f"{kind}.{f.name}": getattr(getattr(self, kind).options, f.name)
            for kind in TABLES
            for f in dataclasses.fields(getattr(self, kind).part.options)
        }


def choose_parts(config: RunConfig, method: Method | None = None) -> Parts:
    """Return the parts that a config names, with their options; a file that it names is imported.

    Args:
        config: of the run.
        method: the method as a value; `config` has its name.

    Raises:
        ConfigError: an unknown part or option (names the nearest), an option that no chosen part
            has, that two have or that nothing reads, or a value out of range.
    """
    parts = named_parts(config, method)
    values = group_options(config, parts)
    chosen_parts = {
        kind: ChosenPart(part, checked(part.options, values[kind], f"options of {part.name}"))
        for kind, part in parts.items()
    }
    for kind, choice in chosen_parts.items():
        check_read(choice.options, kind, choice.part.name)
    part, options = chosen_parts["method"].part, chosen_parts["method"].options
    if part.evaluate_by is not None:
        part = dataclasses.replace(part, evaluate=part.evaluate_by(options))
    if isinstance(part.evaluate, AllSilos | HaloFrom):
        evaluate = dataclasses.replace(part.evaluate, row_minimum=row_minimum_of(config))
        part = dataclasses.replace(part, evaluate=evaluate)
    return Parts(**chosen_parts | {"method": ChosenPart(part, options)})


def row_minimum_of(config: RunConfig | ResolvedConfig) -> RowMinimum:
    """Return what protects exchanged rows; partial sums are masked wherever other sums are."""
    return RowMinimum(
        config.min_nodes_per_row,
        config.min_silos_per_row,
        rows_are_masked=config.secure_aggregation,
    )


def named_parts(config: RunConfig, method: Method | None = None) -> dict[str, Any]:
    """Return the parts that a config names, by kind; see `choose_parts`."""
    neighbors = config.neighbors
    if neighbors is None:
        neighbors = "full" if config.fanout is None else "fanout"
    # A partition of the user's own goes with the data, as that of silos does.
    partition = "silo" if names_clients(config.partition) else config.partition
    if partition not in PARTITIONERS and not is_spec(partition):
        check_no_path(partition)
    method_part = find_method(config, method)
    parts: dict[str, Any] = {
        "method": method_part,
        "partition": _find_part(partition, PARTITIONERS, Partitioner, "partition", ("FILE.csv",)),
        "model": MODEL_KINDS[NODE_MODEL.name],
        "neighbors": _find_part(neighbors, NEIGHBORS, NeighborSampler, "neighbor sampler", OWN),
        "selector": _find_part(
            config.selector or method_part.needs.selector, SELECTORS, Selector, "selector", OWN
        ),
        "aggregator": _find_part(config.aggregator, AGGREGATORS, Aggregator, "aggregator", OWN),
        "server_optimizer": _find_part(
            config.server_optimizer or method_part.needs.server_optimizer,
            SERVER_OPTIMIZERS,
            ServerOptimizer,
            "server optimizer",
            OWN,
        ),
    }
    if config.model is not None:
        if config.model in MODELS and config.model not in MODEL_KINDS:
            raise ConfigError(
                f"expected model {config.model!r} with title and options, got its layers alone in "
                "MODELS: add it by silograph.nn.model.add_model(kind, stages)"
            )
        is_module = is_spec(config.model)
        model = MODULE if is_module else lookup(MODEL_KINDS, config.model, "model")
        return parts | {"model": model}
    # The task is not known here. An option that only the default for ratings has decides.
    rating_parts = parts | {"model": MODEL_KINDS[method_part.needs.rating_model.name]}
    if (
        method_part.trains_ratings
        and not _have_all_options(config, parts)
        and _have_all_options(config, rating_parts)
    ):
        return rating_parts
    return parts


def _have_all_options(config: RunConfig, parts: Mapping[str, NamedPart]) -> bool:
    """Whether the parts have all options that a config sets."""
    try:
        group_options(config, parts)
    except ConfigError:
        return False
    return True


def with_default_model(
    config: RunConfig, *, ratings: bool, method: Method | None = None
) -> RunConfig:
    """Return the config with its model; the default depends on the data.

    Args:
        config: of a run.
        ratings: whether its data are ratings of users and items.
        method: the method, where it is a value.

    Raises:
        ConfigError: unknown method (names the nearest), or one that cannot be imported.
    """
    if config.model is not None:
        return config
    model = find_method(config, method).needs.rating_model if ratings else NODE_MODEL
    hidden = model.hidden if config.hidden is None else config.hidden
    # A list of hidden widths determines the number of layers.
    layers = model.layers if not isinstance(hidden, str) else None
    layers = layers if config.layers is None else config.layers
    return dataclasses.replace(config, model=model.name, layers=layers, hidden=hidden)


def _find_part(
    name: str,
    table: Mapping[str, P],
    kind: type[P],
    description: str,
    other_choices: Sequence[str] = (),
) -> P:
    """Return a part by name; `besides` is what else the config can say there."""
    if is_spec(name):
        return import_spec(name, kind)
    name = canonical_name(name, table, description)
    if name not in table:
        other_kind = next((key for key, names in TABLES.items() if name in names), None)
        if other_kind is not None:
            raise ConfigError(
                f"unknown {description} {name!r}: did you mean {other_kind}={name}?",
                **mistake("unknown-name", description, name, f"{other_kind}={name}", sorted(table)),
            )
        raise unknown(description, name, [*table, *other_choices])
    return table[name]


def find_method(config: RunConfig, method: Method | None = None) -> Method:
    """Return the method that a config names, or the method that was passed as a value.

    Raises:
        ConfigError: unknown method (names the nearest), one that cannot be imported, or a value
            that does not have the name, or has that of another method.
    """
    if method is None:
        return _find_part(config.method, METHODS, Method, "method")
    if is_spec(config.method) and method.name != config.method:
        return method  # a silo has it from its table of allowed code
    if method.name != config.method:
        raise ConfigError(f"expected method {config.method!r}, got one named {method.name!r}")
    if METHODS.get(method.name, method) is not method or is_spec(method.name):
        raise ConfigError(
            f"expected a name of its own, without a colon, for a method that is given as a value, "
            f"got {method.name!r}: use dataclasses.replace(METHOD, name=...)"
        )
    return method


def options_of(part: NamedPart) -> "dict[str, dataclasses.Field[Any]]":
    """Return the declared options of a part by name."""
    return {f.name: f for f in dataclasses.fields(part.options)}


def group_options(
    config: RunConfig, parts: Mapping[str, NamedPart]
) -> dict[str, dict[str, Scalar]]:
    """Group the options that a config gives by kind of part and name.

    Raises:
        ConfigError: see `find_option`; or one option twice.
    """
    if names_clients(config.partition) and config.partition != "silo":
        own_partition = dataclasses.replace(PARTITIONERS["silo"], name="of your own")
        parts = {**parts, "partition": own_partition}
    values: dict[str, dict[str, Scalar]] = {kind: {} for kind in parts}
    name_used: dict[tuple[str, str], str] = {}
    flat_values = [(n, f"{kind}.{n}", getattr(config, n)) for n, kind in FLAT.items()]
    user_values = [each for each in flat_values if each[2] is not None]
    user_values += [(name, name, value) for name, value in config.options.items()]
    for user_name, name, value in user_values:
        kind, option = place = find_option(name, parts, user_name)
        if place in name_used:
            both = (
                f"{name_used[place]} and {user_name}"
                if name_used[place] != user_name
                else f"option {user_name}, too"
            )
            raise ConfigError(
                f"expected {option} once, got {both}: leave one of them out",
                **mistake("repeated-option", option),
            )
        name_used[place] = user_name
        # Listings show "none" for an option that is None by default.
        is_none = isinstance(value, str) and value.lower() == "none"
        if not (is_none and options_of(parts[kind])[option].default is None):
            values[kind][option] = value
    return values


def find_option(
    name: str, parts: Mapping[str, NamedPart], user_name: str | None = None
) -> tuple[str, str]:
    """Return the kind of part that has an option, and the option's own name.

    Args:
        name: NAME or PART.NAME.
        parts: the chosen parts by kind.
        user_name: what the user wrote; None: the name.

    Raises:
        ConfigError: no chosen part has the option, or two have it and the name does not say whose.
    """
    kind, dot, option_name = name.partition(".")
    if dot and kind in parts:
        if option_name in options_of(parts[kind]):
            return kind, option_name
        raise unknown_option_error(option_name, {kind: parts[kind]}, user_name or name)
    method = parts.get("method")
    unused = {"selector"} if isinstance(method, Method) and not method.selects else set()
    kinds_with_option = [part_kind for part_kind, part in parts.items() if name in options_of(part)]
    kinds_with_option = [
        part_kind for part_kind in kinds_with_option if part_kind not in unused
    ] or kinds_with_option
    if len(kinds_with_option) > 1:
        full_names = " or ".join(f"{part_kind}.{name}" for part_kind in kinds_with_option)
        owners = " and ".join(f"{kind} {parts[kind].name}" for kind in kinds_with_option)
        raise ConfigError(f"expected {full_names}, got {name}: {owners} both have it")
    if not kinds_with_option:
        raise unknown_option_error(name, parts, user_name or name)
    return kinds_with_option[0], name


def unknown_option_error(
    option_name: str, parts: Mapping[str, NamedPart], user_name: str
) -> ConfigError:
    """Return the error for an option that none of some parts has; names the nearest."""
    subject = user_name if user_name in FLAT else f"option {user_name}"
    if len(parts) > 1 and option_name in SETTINGS:
        return ConfigError(
            f"{subject}: this is a setting of the run: give {option_name} itself",
            **mistake("unknown-name", "option", user_name, option_name, []),
        )
    if owners := owners_of(option_name, parts):
        kinds = {owner.partition(" ")[0] for owner in owners}
        has_one_owner = len(owners) == 1
        remedy = f"set {owners[0].replace(' ', '=')}" if has_one_owner else "choose one of them"
        searched_parts = {kind: part for kind, part in parts.items() if kind in kinds}
        return ConfigError(
            f"{subject}: {_describe_missing_option(searched_parts)}, but {join_words(owners)} "
            f"{'has' if has_one_owner else 'have'} it: leave it out, or {remedy}",
            **mistake(
                "unread-option",
                user_name,
                " and ".join(part.name for part in searched_parts.values()),
            ),
        )
    message = f"{subject}: {_describe_missing_option(parts)}"
    full_names = [f"{kind}.{name}" for kind, part in parts.items() for name in options_of(part)]

    def error(end: str, suggestion: str | None = None) -> ConfigError:
        fields = mistake("unknown-name", "option", user_name, suggestion, full_names)
        return ConfigError(f"{message}{end}", **fields)

    if not full_names:
        return error(", nor any other: leave it out")
    short = {name.partition(".")[2]: name for name in reversed(full_names)}
    names = {n for kind in parts for part in TABLES[kind].values() for n in options_of(part)}
    tail = option_name.rpartition(".")[2]  # `scale` of `fedpub.scale`
    nearest = [tail] if tail in short else []
    # A part that was not chosen is worth a word only if it has very nearly that name.
    all_names = sorted(names | {*short})
    nearest = nearest or difflib.get_close_matches(option_name.lower(), all_names, n=1, cutoff=0.8)
    nearest = nearest or difflib.get_close_matches(
        option_name.lower(), sorted(short), n=1, cutoff=0.6
    )
    if not nearest:
        return error(f"; choices: {', '.join(full_names)}")
    if nearest[0] not in short:
        of = join_words(owners_of(nearest[0], parts))
        return error(f": did you mean {nearest[0]!r} of {of}?", nearest[0])
    is_unambiguous = sum(name.partition(".")[2] == nearest[0] for name in full_names) == 1
    names_part = user_name.partition(".")[0] in TABLES
    hint = nearest[0] if is_unambiguous and not names_part else short[nearest[0]]
    return error(f": did you mean {hint!r}?", hint)


def _describe_missing_option(parts: Mapping[str, NamedPart]) -> str:
    """Say which parts lack an option; parts without any options are not mentioned."""
    parts_with_options = {kind: part for kind, part in parts.items() if options_of(part)} or parts
    names = [f"{kind} {part.name}" for kind, part in parts_with_options.items()]
    return f"{join_words(names)} {'has' if len(names) == 1 else 'have'} no such option"


def owners_of(name: str, kinds: Iterable[str] = TABLES) -> list[str]:
    """Return which of silograph's parts of these kinds have an option, each with its kind."""
    return [
        f"{kind} {part.name}"
        for kind in kinds
        for part in TABLES[kind].values()
        if name in options_of(part)
    ]


def join_words(words: Sequence[str]) -> str:
    """Return words as a list for people.

    >>> join_words(["model gcn", "model sage", "model gin"])
    'model gcn, model sage and model gin'
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def options_in_config(config: RunConfig, parts: Parts) -> dict[str, Scalar]:
    """Return the options that a config gives, as PART.NAME."""
    parts_by_kind = {kind: getattr(parts, kind).part for kind in TABLES}
    return {
        f"{k}.{n}": v
        for k, options in group_options(config, parts_by_kind).items()
        for n, v in options.items()
    }


def unset_options(config: RunConfig, parts: Parts) -> set[str]:
    """Return what a config does not set: its keys, and options as PART.NAME.

    A neighbor sampler that an option implies counts as set.
    """
    option_values = options_in_config(config, parts)
    keys = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) is None}
    keys |= {"kernels"} if config.kernels == "auto" else set()
    parts_with_options = {name.partition(".")[0] for name in option_values}
    return (keys - parts_with_options) | (parts.options.keys() - option_values)


def non_default_values(config: RunConfig, parts: Parts) -> dict[str, Any]:
    """Return the values of a config that are not the default; options as PART.NAME."""
    values = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name not in (*FLAT, "options") and getattr(config, f.name) not in (None, f.default)
    }
    return values | {"options": options_in_config(config, parts)}


def option_help(parts: Parts) -> dict[str, str]:
    """Return the help of all options of some parts, as PART.NAME."""
    return {
        f"{kind}.{name}": f.metadata.get("help", "")
        for kind in TABLES
        for name, f in options_of(getattr(parts, kind).part).items()
    }


def with_model_for(
    config: RunConfig, data: Graph | Silos | None = None, method: Method | None = None
) -> RunConfig:
    """Return the config with its model; the default depends on the data.

    Args:
        config: of a run.
        data: the graph or silos, where they are in memory and not what `dataset` names.
        method: the method, where it is a value.

    Raises:
        SilographError: unknown method (names the nearest), or no folder where one was named.
    """
    if config.model is not None:
        return config
    ratings = source_of(config).has_ratings() if data is None else has_ratings(data)
    return with_default_model(config, ratings=ratings, method=method)


# --- Options of runs that vary their parts: which of them a run takes ----------------------------


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


def without_parts(
    config: RunConfig, kinds: Collection[str], method: Method | None = None
) -> dict[str, Scalar]:
    """Return the options of a config that are not those of its parts of some kinds."""
    parts = named_parts(config, method)
    return {n: v for n, v in config.options.items() if find_option(n, parts)[0] not in kinds}
