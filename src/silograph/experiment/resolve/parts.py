"""The parts of a run that a config names, each with its checked options.

A part declares its options in a frozen dataclass: type, bounds, default, help and, in `tune`, the
range that tuning tries. A user gives one as NAME, if one chosen part alone has it, or as PART.NAME.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from silograph.aggregation.aggregators import AGGREGATORS, Aggregator
from silograph.core.config import RunConfig, check_read, checked
from silograph.core.errors import ConfigError, lookup, unknown
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import RowMinimum, Scalar
from silograph.evaluation.scoring import AllSilos
from silograph.experiment.resolve.own_partition import names_clients
from silograph.experiment.resolve.user_code import imported, is_spec
from silograph.graph.partition.own import check_no_path
from silograph.graph.partition.partition import PARTITIONERS, Partitioner
from silograph.methods import METHODS
from silograph.methods.base import NODE_MODEL, Method
from silograph.nn.model import MODELS
from silograph.nn.model_options import MODEL_KINDS, MODULE, ModelKind
from silograph.sampling.neighbors import NEIGHBORS, NeighborSampler
from silograph.selection.base import Selector
from silograph.selection.registry import SELECTORS

P = TypeVar("P")
OWN = ("FILE.py:NAME",)  # what another process has put into a table is not in this one's


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
}
# Options that have a key of their own in a config, with their part.
FLAT = {f.name: f.metadata["part"] for f in dataclasses.fields(RunConfig) if "part" in f.metadata}


SETTINGS = {f.name for f in dataclasses.fields(RunConfig)} - FLAT.keys()  # of the run itself


@dataclass(frozen=True, eq=False)
class Chosen(Generic[P]):
    """A part and its checked options."""

    part: P
    options: Any


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a run."""

    method: Chosen[Method]
    partition: Chosen[Partitioner]
    model: Chosen[ModelKind]
    neighbors: Chosen[NeighborSampler]
    selector: Chosen[Selector]
    aggregator: Chosen[Aggregator]

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
    values = placed(config, parts)
    made = {
        kind: Chosen(part, checked(part.options, values[kind], f"options of {part.name}"))
        for kind, part in parts.items()
    }
    for kind, chosen in made.items():
        check_read(chosen.options, kind, chosen.part.name)
    part, options = made["method"].part, made["method"].options
    if part.evaluate_by is not None:
        part = dataclasses.replace(part, evaluate=part.evaluate_by(options))
    behind = RowMinimum(config.min_nodes_per_row, config.min_silos_per_row)
    if behind.limits and isinstance(part.evaluate, AllSilos):
        part = dataclasses.replace(part, evaluate=dataclasses.replace(part.evaluate, behind=behind))
    return Parts(**made | {"method": Chosen(part, options)})


def named_parts(config: RunConfig, method: Method | None = None) -> dict[str, Any]:
    """Return the parts that a config names, by kind; see `choose_parts`."""
    neighbors = config.neighbors
    if neighbors is None:
        neighbors = "full" if config.fanout is None else "fanout"
    # A partition of the user's own goes with the data, as that of silos does.
    partition = "silo" if names_clients(config.partition) else config.partition
    if partition not in PARTITIONERS and not is_spec(partition):
        check_no_path(partition)
    chosen = find_method(config, method)
    parts: dict[str, Any] = {
        "method": chosen,
        "partition": _named(partition, PARTITIONERS, Partitioner, "partition", ("FILE.csv",)),
        "model": MODEL_KINDS[NODE_MODEL.name],
        "neighbors": _named(neighbors, NEIGHBORS, NeighborSampler, "neighbor sampler", OWN),
        "selector": _named(
            config.selector or chosen.needs.selector, SELECTORS, Selector, "selector", OWN
        ),
        "aggregator": _named(config.aggregator, AGGREGATORS, Aggregator, "aggregator", OWN),
    }
    if config.model is not None:
        model = MODULE if is_spec(config.model) else _model_kind(config.model)
        return parts | {"model": model}
    # The task is not known here. An option that only the default for ratings has decides.
    of_ratings = parts | {"model": MODEL_KINDS[chosen.needs.rating_model.name]}
    if chosen.trains_ratings and not _have_all(config, parts) and _have_all(config, of_ratings):
        return of_ratings
    return parts


def _have_all(config: RunConfig, parts: Mapping[str, NamedPart]) -> bool:
    """Whether some parts have all options that a config gives."""
    try:
        placed(config, parts)
    except ConfigError:
        return False
    return True


def with_default_model(
    config: RunConfig, *, ratings: bool, method: Method | None = None
) -> RunConfig:
    """Return a config that names its model: where it does not, the default for its data.

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
    # A list of hidden widths says the number of layers by itself.
    layers = model.layers if not isinstance(hidden, str) else None
    layers = layers if config.layers is None else config.layers
    return dataclasses.replace(config, model=model.name, layers=layers, hidden=hidden)


def _model_kind(name: str) -> ModelKind:
    """Return the kind of a model of silograph's, or of one that was added."""
    if name in MODELS and name not in MODEL_KINDS:
        raise ConfigError(
            f"expected model {name!r} with title and options, got its layers alone in MODELS: add "
            "it by silograph.nn.model.add_model(kind, stages)"
        )
    return lookup(MODEL_KINDS, name, "model")


def _named(
    name: str, table: Mapping[str, P], kind: type[P], what: str, besides: Sequence[str] = ()
) -> P:
    """Return a part by name; `besides` is what else the config can say there."""
    if is_spec(name):
        return imported(name, kind)
    if name not in table:
        other = next((key for key, names in TABLES.items() if name in names), None)
        if other is not None:
            raise ConfigError(f"unknown {what} {name!r}: did you mean {other}={name}?")
        raise unknown(what, name, [*table, *besides])
    return table[name]


def own_code(config: RunConfig | ResolvedConfig) -> dict[str, str]:
    """Return what is imported for a config: `FILE.py:NAME` or `package.module:NAME` by kind."""
    named = {kind: getattr(config, kind) for kind in TABLES}
    return {
        kind: spec
        for kind, spec in named.items()
        if spec is not None and is_spec(spec) and not (kind == "partition" and names_clients(spec))
    }


def find_method(config: RunConfig, given: Method | None = None) -> Method:
    """Return the method that a config names, or the value that was given for it.

    Raises:
        ConfigError: unknown method (names the nearest), one that cannot be imported, or a value
            that does not have the name, or has that of another method.
    """
    if given is None:
        return _named(config.method, METHODS, Method, "method")
    if is_spec(config.method) and given.name != config.method:
        return given  # a silo has it from its table of allowed code
    if given.name != config.method:
        raise ConfigError(f"expected method {config.method!r}, got one named {given.name!r}")
    if METHODS.get(given.name, given) is not given or is_spec(given.name):
        raise ConfigError(
            f"expected a name of its own, without a colon, for a method that is given as a value, "
            f"got {given.name!r}: use dataclasses.replace(METHOD, name=...)"
        )
    return given


def options_of(part: NamedPart) -> "dict[str, dataclasses.Field[Any]]":
    """Return the declared options of a part by name."""
    return {f.name: f for f in dataclasses.fields(part.options)}


def placed(config: RunConfig, parts: Mapping[str, NamedPart]) -> dict[str, dict[str, Scalar]]:
    """Return the options that a config gives, by kind of part and name.

    Raises:
        ConfigError: see `place_of`; or one option twice.
    """
    if names_clients(config.partition) and config.partition != "silo":
        own = dataclasses.replace(PARTITIONERS["silo"], name="of your own")
        parts = {**parts, "partition": own}
    values: dict[str, dict[str, Scalar]] = {kind: {} for kind in parts}
    said: dict[tuple[str, str], str] = {}
    for shown, name, value in _asked(config):
        place = place_of(name, parts, shown)
        if place in said:
            both = f"{said[place]} and {shown}" if said[place] != shown else f"option {shown}, too"
            raise ConfigError(f"expected {place[1]} once, got {both}: leave one of them out")
        said[place] = shown
        if not _is_none(value, options_of(parts[place[0]])[place[1]]):
            values[place[0]][place[1]] = value
    return values


def _is_none(value: Scalar, field: "dataclasses.Field[Any]") -> bool:
    """Whether a text says none of an option that is None by default, which listings show so."""
    return field.default is None and isinstance(value, str) and value.lower() == "none"


def _asked(config: RunConfig) -> Iterator[tuple[str, str, Scalar]]:
    """Yield what each option of a part is called by the user and in full, and its value."""
    for name, kind in FLAT.items():
        if getattr(config, name) is not None:
            yield name, f"{kind}.{name}", getattr(config, name)
    for name, value in config.options.items():
        yield name, name, value


def place_of(
    name: str, parts: Mapping[str, NamedPart], shown: str | None = None
) -> tuple[str, str]:
    """Return the kind of part that has an option, and the option's own name.

    Args:
        name: NAME or PART.NAME.
        parts: the chosen parts by kind.
        shown: what the user wrote; None: the name.

    Raises:
        ConfigError: no chosen part has the option, or two have it and the name does not say whose.
    """
    kind, dot, own = name.partition(".")
    if dot and kind in parts:
        if own in options_of(parts[kind]):
            return kind, own
        raise undeclared(own, {kind: parts[kind]}, shown or name)
    method = parts.get("method")
    unused = {"selector"} if isinstance(method, Method) and not method.selects else set()
    having = [each for each, part in parts.items() if name in options_of(part)]
    having = [each for each in having if each not in unused] or having
    if len(having) > 1:
        full = " or ".join(f"{each}.{name}" for each in having)
        raise ConfigError(
            f"expected {full}, got {name}: "
            f"{' and '.join(f'{each} {parts[each].name}' for each in having)} both have it"
        )
    if not having:
        raise undeclared(name, parts, shown or name)
    return having[0], name


def undeclared(own: str, parts: Mapping[str, NamedPart], shown: str) -> ConfigError:
    """Return the error for an option that none of some parts has; names the nearest."""
    said = shown if shown in FLAT else f"option {shown}"
    if len(parts) > 1 and own in SETTINGS:
        return ConfigError(f"{said}: this is a setting of the run: give {own} itself")
    if owners := owners_of(own, parts):
        kinds = {owner.partition(" ")[0] for owner in owners}
        one = len(owners) == 1
        way = f"set {owners[0].replace(' ', '=')}" if one else "choose one of them"
        return ConfigError(
            f"{said}: {_lacking({kind: parts[kind] for kind in parts if kind in kinds})}, but "
            f"{listed(owners)} {'has' if one else 'have'} it: leave it out, or {way}"
        )
    line = f"{said}: {_lacking(parts)}"
    known = [f"{kind}.{name}" for kind, part in parts.items() for name in options_of(part)]
    if not known:
        return ConfigError(f"{line}, nor any other: leave it out")
    short = {name.partition(".")[2]: name for name in reversed(known)}
    names = {n for kind in parts for part in TABLES[kind].values() for n in options_of(part)}
    near = [tail for tail in [own.rpartition(".")[2]] if tail in short]  # of fedpub.scale
    # A part that was not chosen is worth a word only if it has very nearly that name.
    every = sorted(names | {*short})
    near = near or difflib.get_close_matches(own.lower(), every, n=1, cutoff=0.8)
    near = near or difflib.get_close_matches(own.lower(), sorted(short), n=1, cutoff=0.6)
    if not near:
        return ConfigError(f"{line}; choices: {', '.join(known)}")
    if near[0] not in short:
        of = listed(owners_of(near[0], parts))
        return ConfigError(f"{line}: did you mean {near[0]!r} of {of}?")
    alone = sum(name.partition(".")[2] == near[0] for name in known) == 1
    part_was_said = shown.partition(".")[0] in TABLES
    hint = near[0] if alone and not part_was_said else short[near[0]]
    return ConfigError(f"{line}: did you mean {hint!r}?")


def _lacking(parts: Mapping[str, NamedPart]) -> str:
    """Return in words that parts have not an option; those that have none at all go unsaid."""
    having = {kind: part for kind, part in parts.items() if options_of(part)} or parts
    names = [f"{kind} {part.name}" for kind, part in having.items()]
    return f"{listed(names)} {'has' if len(names) == 1 else 'have'} no such option"


def owners_of(name: str, kinds: Iterable[str] = TABLES) -> list[str]:
    """Return which of silograph's parts of these kinds have an option, each with its kind."""
    return [
        f"{kind} {part.name}"
        for kind in kinds
        for part in TABLES[kind].values()
        if name in options_of(part)
    ]


def listed(words: Sequence[str]) -> str:
    """Return words as a list for people.

    >>> listed(["model gcn", "model sage", "model gin"])
    'model gcn, model sage and model gin'
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def given_options(config: RunConfig, parts: Parts) -> dict[str, Scalar]:
    """Return the options that a config gives, as PART.NAME."""
    named = {kind: getattr(parts, kind).part for kind in TABLES}
    return {f"{k}.{n}": v for k, own in placed(config, named).items() for n, v in own.items()}


def left_open(config: RunConfig, parts: Parts) -> set[str]:
    """Return what a config leaves to silograph: its keys, and options as PART.NAME.

    The neighbor sampler that an option has chosen is not left open.
    """
    given = given_options(config, parts)
    keys = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) is None}
    keys |= {"kernels"} if config.kernels == "auto" else set()
    return (keys - {name.partition(".")[0] for name in given}) | (parts.options.keys() - given)


def given_values(config: RunConfig, parts: Parts) -> dict[str, Any]:
    """Return what of a config was given and is not the default; options as PART.NAME."""
    values = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name not in (*FLAT, "options") and getattr(config, f.name) not in (None, f.default)
    }
    return values | {"options": given_options(config, parts)}


def option_help(parts: Parts) -> dict[str, str]:
    """Return the help of all options of some parts, as PART.NAME."""
    return {
        f"{kind}.{name}": f.metadata.get("help", "")
        for kind in TABLES
        for name, f in options_of(getattr(parts, kind).part).items()
    }
