"""The config of a call, merged from its arguments."""

import dataclasses
import hashlib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from silograph.core.config import RunConfig, changed_values, make_config
from silograph.core.errors import ConfigError, PartitionError, mistake
from silograph.core.resolved_config import ResolvedConfig, to_run_config
from silograph.core.text import state_of_fields
from silograph.experiment.resolve.parts import with_canonical_names
from silograph.experiment.resolve.user_code import CALLABLE, MODULES, absolute, own_code, spec_of
from silograph.federation.base import in_function
from silograph.graph.datasets import Source, absolute_path, is_path, source_of
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import (
    GIVEN,
    Partition,
    assigned,
    is_partition_file,
    of_silos,
    owner_of_each,
    read_partition,
)
from silograph.graph.read.in_memory import graph_of, is_clients
from silograph.graph.read.tables import RepeatedEdges
from silograph.graph.silos.data import Silos
from silograph.graph.silos.shards import Shards, read_shards
from silograph.methods import METHODS
from silograph.methods.base import Method
from silograph.nn.own_module import Make

# --- in memory parts -----------------------------------------------------------------------------
# Parts of a run that are passed as values: a method, or a class or function that makes a module.
#
# A config contains their names. A study runs them in its own process, and identifies their lines by
# a hash of their source.


OURS = Path(__file__).parents[2]


@dataclass(frozen=True)
class Own:
    """Parts that were passed as values, by their names in configs."""

    methods: Mapping[str, Method] = field(default_factory=dict)
    models: Mapping[str, Make] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Return the names of all."""
        return [*self.methods, *self.models]


def name_of(part: Any) -> Any:
    """Return the name of a method or of what makes a module; anything else as it is.

    Raises:
        ConfigError: a module that is made already, or another callable without a name.
    """
    if isinstance(part, Method):
        return part.name
    if not callable(part):
        return part
    if not hasattr(part, "__qualname__"):
        raise ConfigError(
            f"expected a class or function that makes a module as model, got {type(part).__name__} "
            "itself: give the class, for every client has a module of its own"
        )
    return spec_of(part)


def check_names(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a part that is given as a value, and can be given by name alone."""
    for kind in ("selector", "neighbors", "aggregator", "server_optimizer"):
        part = options.get(kind)
        if not isinstance(part, str | None):
            raise ConfigError(
                f"expected the name of a part as {kind}, got a {type(part).__name__} itself: put "
                f"it into a file and give {kind}='FILE.py:NAME'"
            )
    model = options.get("model")
    if not (isinstance(model, str | None) or callable(model)):
        raise ConfigError(
            f"expected a {CALLABLE} that makes a module as model, got {type(model).__name__}: "
            f"{MODULES}"
        )


def own_of(parts: Iterable[Any]) -> Own:
    """Return the parts that are values; a method of the library needs only its name."""
    values = [part for part in parts if callable(part) or isinstance(part, Method)]
    methods = {part.name: part for part in values if isinstance(part, Method)}
    return Own(
        methods={name: m for name, m in methods.items() if METHODS.get(name) is not m},
        models={name_of(part): part for part in values if not isinstance(part, Method)},
    )


def check_identifiable(own_parts: Own) -> None:
    """Raise `ConfigError` for a part whose lines in a study could not be identified."""
    parts: list[Method | Make] = [*own_parts.methods.values(), *own_parts.models.values()]
    for part in parts:
        if source_hash(part) is None:
            raise ConfigError(
                f"expected {name_of(part)} from a file, enclosing plain values alone, so that its "
                "lines are known again, got another: name it as FILE.py:NAME, or leave out=DIR out"
            )


def source_hash(part: Method | Make) -> str | None:
    """Return a hash of a part: its values, and the files that define its functions.

    None where these do not determine the part: source that is in no file, or closures over
    something else than plain values and functions.
    """
    try:
        identifying_bytes = b"".join(
            _iter_identifying_bytes(state_of_fields(part) if isinstance(part, Method) else part)
        )
    except (OSError, TypeError):
        return None
    return hashlib.blake2b(identifying_bytes, digest_size=16).hexdigest()


def _iter_identifying_bytes(value: Any) -> Iterator[bytes]:
    """Yield the bytes that determine the behavior of a value.

    Raises:
        OSError: a file cannot be read.
        TypeError: source that is in no file, or a value whose text does not say what it is.
    """
    yield type(value).__name__.encode()
    if isinstance(value, Mapping):
        yield from _iter_identifying_bytes(tuple(value.items()))
    elif isinstance(value, tuple):
        for item in value:
            yield from _iter_identifying_bytes(item)
    elif inspect.isclass(value) or inspect.isfunction(value):
        path = Path(inspect.getsourcefile(value) or "")
        yield f"{value.__module__}:{value.__qualname__}".encode()
        yield b"" if OURS in path.parents else path.read_bytes()
        functions = vars(value).values() if inspect.isclass(value) else [value]
        for item in functions:
            if inspect.isfunction(item) and item.__code__.co_filename == str(path):
                yield from _iter_identifying_bytes(_closure_values(item))
    elif inspect.ismethod(value):
        yield from _iter_identifying_bytes((value.__func__, value.__self__))
    elif isinstance(value, partial):
        yield from _iter_identifying_bytes((value.func, value.args, value.keywords))
    elif dataclasses.is_dataclass(value):
        yield from _iter_identifying_bytes(state_of_fields(value))
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value).encode()
    else:
        raise TypeError(f"expected a plain value, got {type(value).__name__}")


def _closure_values(function: FunctionType) -> tuple[Any, ...]:
    """Return the defaults of a function and what it encloses, its class for `super` left out."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = (cell.cell_contents for name, cell in cells if name != "__class__")
    return function.__defaults__, function.__kwdefaults__, *values


def merge_config(
    graph: Graph | Silos | str | os.PathLike[str] | None,
    config: RunConfig | ResolvedConfig | None,
    options: Mapping[str, Any],
) -> tuple[RunConfig, Source]:
    """Merge the arguments of `run` into one config; return it and where its data are.

    Raises:
        ConfigError: a key or value that a config cannot have, or no graph.
        DataError: no folder where one was named.
    """
    if isinstance(config, ResolvedConfig):
        config = to_run_config(config)
    if config is not None and not isinstance(config, RunConfig):
        raise ConfigError(
            f"expected a RunConfig as config, got {type(config).__name__}: give options as "
            "keywords, or a run file to `silograph run --config`"
        )
    match graph:
        case None if config is None and "dataset" not in options:
            raise ConfigError(
                "expected a graph, or the name or path of one, got None: sg.load('digits') is one",
                **mistake("missing-option", "graph"),
            )
        case None:
            dataset_option = {}
        case Graph() | Silos():
            dataset_option = {"dataset": graph.name}
        case str():
            dataset_option = {"dataset": graph}
        case _:  # a path is never a name, even where there is a dataset of that name
            dataset_option = {"dataset": absolute_path(os.fspath(graph))}
    base_config = RunConfig() if config is None else config
    base_config = make_config(with_canonical_names(vars(base_config)))
    check_names(options)
    options = with_canonical_names(options)
    name = str(options.get("method", base_config.method))
    for option in fields(METHODS[name].options) if name in METHODS else ():
        if option.name in options and option.name not in vars(base_config):
            raise ConfigError(
                f"expected {option.name}, an option of {name}, under options: give "
                f"options={{{option.name!r}: {options[option.name]!r}}}"
            )
    merged_config = make_config(changed_values(base_config, {**options, **dataset_option}))
    data = graph if isinstance(graph, Graph | Silos) else None
    source = source_of(merged_config, data=data)
    if source.kind == "shards":
        return with_shard_settings(merged_config, read_shards(merged_config.dataset)), source
    on_silos = source.kind == "silos" or isinstance(graph, Silos)
    return (with_silo_partition(merged_config) if on_silos else merged_config), source


def with_absolute_paths(config: RunConfig, *, in_memory: bool) -> RunConfig:
    """Return the config with its paths made absolute, so that its file works from anywhere.

    Args:
        config: of the run.
        in_memory: whether `dataset` is only the name of a graph in memory.
    """
    data_dir = None if config.data_dir is None else absolute_path(config.data_dir)
    is_file = not in_memory and is_path(config.dataset)
    dataset = absolute_path(config.dataset) if is_file else config.dataset
    tracker, (name, _, location) = config.tracker, (config.tracker or "").partition("=")
    if name == "tensorboard" and location:
        tracker = f"{name}={absolute_path(location)}"
    files = {name: absolute(spec) for name, spec in own_code(config).items()}
    if is_partition_file(config.partition):
        files["partition"] = absolute_path(config.partition)
    return make_config(
        vars(config) | {"data_dir": data_dir, "dataset": dataset, "tracker": tracker} | files
    )


# --- Partitions passed as values -----------------------------------------------------------------
#
# A config contains `given:` and the hash of such a partition, so that a run or a line of a study
# can be identified. Where every node has one client, the clients are stored in the graph, as its
# silos.


PENDING = f"{GIVEN}in memory"  # until the graph is loaded and the hash is known


@dataclass(frozen=True, eq=False)
class CutGraph:
    """A graph with a partition in which a node may be at several clients, or at none."""

    graph: Graph
    partition: Partition

    @property
    def overlapping(self) -> bool:
        """Whether several clients hold a node."""
        return len(torch.unique(self.partition.copies)) < len(self.partition.copies)


@dataclass(frozen=True, eq=False)
class CallArguments:
    """Graph and options of a call, in the form that a config can contain.

    Attributes:
        graph: the graph in memory, the silos, or the name or path of either.
        options: of the run; `partition` is text.
        partition: the partition where it is a value.
    """

    graph: Graph | Silos | str | os.PathLike[str] | None
    options: dict[str, Any]
    partition: Any = None


def parse_call_arguments(
    graph: Any, options: Mapping[str, Any], repeated_edges: RepeatedEdges | None = None
) -> CallArguments:
    """Parse graph and options of a call.

    Args:
        graph: the graph, what can be made one, or a name or path.
        options: of the run.
        repeated_edges: the rule of the config that options are added to.

    Raises:
        ConfigError: a partition of another type, one beside a list of clients, a seed of a cut
            that is there, or a rule for repeated edges of a graph that has none.
        DataError: a graph of another type, or one that cannot be used.
    """
    options = dict(options)
    partition = options.get("partition")
    if isinstance(partition, os.PathLike):
        options["partition"] = os.path.abspath(os.path.expanduser(os.fspath(partition)))
    elif partition is not None and not isinstance(partition, str):
        is_array = isinstance(partition, list | tuple) or hasattr(partition, "__array__")
        if not (is_array or isinstance(partition, Partition) or callable(partition)):
            raise ConfigError(
                "expected a partition by name, FILE.csv, an array with the client of every node, a "
                f"Partition or a function of the graph, got {type(partition).__name__}",
                **mistake("option-value", "partition", type(partition).__name__),
            )
        if isinstance(partition, Partition) and options.get("partition_seed") is not None:
            raise ConfigError(
                "partition_seed: expected none with a Partition, which is cut already, got "
                f"{options['partition_seed']}: leave partition_seed out",
                **mistake("conflicting-options", ["partition", "partition_seed"]),
            )
        options["partition"] = PENDING
    if is_clients(graph) and options.setdefault("partition", "silo") != "silo":
        raise ConfigError(
            "expected no partition with a list of clients, got one: they are cut already; leave "
            "it out",
            **mistake("unread-option", "partition", "list of clients"),
        )
    if isinstance(graph, Graph | Silos):
        if options.get("repeated_edges") is not None:
            raise ConfigError(
                "repeated_edges: expected none with a graph in memory, whose edges are combined "
                f"already, got {options['repeated_edges']!r}: give it to the reader, such as "
                "sg.from_csv(..., repeated_edges=...)",
                **mistake("unread-option", "repeated_edges", "graph in memory"),
            )
    elif graph is not None and not isinstance(graph, str | os.PathLike):
        graph = graph_of(graph, options.get("repeated_edges") or repeated_edges or "mean")
    is_value = options.get("partition") == PENDING
    return CallArguments(graph, options, partition if is_value else None)


def apply_partition(
    data: Graph | Silos, partition: Any, config: RunConfig
) -> tuple[Graph | CutGraph, RunConfig]:
    """Return a graph with its partition, and the config that says its hash.

    Args:
        data: the graph.
        partition: the value.
        config: of the run.

    Raises:
        ConfigError: silos, which are cut already.
        OpError: a function failed: one line, which names it and the place in its file.
        PartitionError: the partition does not fit the graph, or a function returned nothing.
    """
    if isinstance(data, Silos):
        raise ConfigError(
            "partition: expected none with silos, got one in memory: they are cut already",
            **mistake("unread-option", "partition", "silos"),
        )
    if callable(partition) and not isinstance(partition, Partition):
        name = getattr(partition, "__name__", type(partition).__name__)
        with in_function(partition, f"partition function {name}"):
            partition = partition(data)
        if partition is None:
            raise PartitionError(
                "expected the client of every node, or a Partition, from partition function "
                f"{name}, got None: return one"
            )
    if isinstance(partition, Partition):
        if partition.num_nodes != data.num_nodes:
            raise PartitionError(
                f"expected a partition of the {data.num_nodes} nodes of {data.name!r}, got one of "
                f"{partition.num_nodes}: cut this graph itself"
            )
        cut_data: Graph | CutGraph = CutGraph(data, partition)
        owner = owner_of_each(partition)
        if owner is not None:
            cut_data = replace(data, silo=owner, silo_names=partition.ids)
    else:
        cut_data = assigned(data, partition)
        partition = of_silos(cut_data)
    return cut_data, replace(config, partition=f"{GIVEN}{partition.hash}")


def with_own_partition(config: RunConfig, data: Graph | CutGraph) -> Graph | CutGraph:
    """Return a graph whose nodes have the clients that a partition of the user's gives them.

    The graph of another config, which is cut later, is returned as it is.

    Raises:
        ConfigError: the partition is not in memory, or does not go with the other options.
        DataError: the file of a partition cannot be used.
    """
    if isinstance(data, CutGraph):
        if config.partition != f"{GIVEN}{data.partition.hash}":
            raise ConfigError(f"expected the partition {config.partition}, got another in memory")
        for name in ("largest_component", "drop_edges"):
            if getattr(config, name):
                raise ConfigError(
                    f"expected a partition that is used as it is, got {name}="
                    f"{getattr(config, name)}: leave it out, or cut the graph that is meant",
                    **mistake("conflicting-options", ["partition", name]),
                )
        num_clients = len(data.partition.ids)
    elif config.partition.startswith(GIVEN):
        if data.silo is None or f"{GIVEN}{of_silos(data).hash}" != config.partition:
            raise ConfigError(
                f"expected the partition {config.partition} of the run, got none: it was made in "
                "memory; use sg.run(..., partition=...), or sg.resume(DIR, partition=...) to go on",
                **mistake("part-not-saved", "partition", None),
            )
        num_clients = len(data.silo_names)
    elif is_partition_file(config.partition):
        data = read_partition(data, Path(config.partition).expanduser())
        num_clients = len(data.silo_names)
    else:
        return data
    if config.clients not in (None, num_clients):
        raise ConfigError(
            f"clients: expected {num_clients}, as the partition has, got {config.clients}: leave "
            "clients out",
            **mistake("conflicting-options", ["clients", "partition"]),
        )
    return data


CUT = "silo"  # value of `partition` for data that are in silos already


def with_silo_partition(config: RunConfig) -> RunConfig:
    """Return the config of a run on silos, which says that they are the cut.

    Raises:
        ConfigError: it names another cut.
    """
    if config.partition not in (RunConfig().partition, CUT):
        got = "one in memory" if config.partition.startswith(GIVEN) else config.partition
        raise ConfigError(
            f"partition: expected none with silos, got {got}: they are cut already; "
            "leave partition out",
            **mistake("unread-option", "partition", "silos"),
        )
    return replace(config, partition=CUT)


# Options that decide what is in shards.
IN_SHARDS = (
    *("data_dir", "columns", "na_values", "scale", "rating_scale", "repeated_edges"),
    *("largest_component", "drop_edges", "features", "normalize", "edge_weights", "directed"),
    *("split", "split_seed", "partition_seed", "dtype"),
)
# Of these, those that shards leave to nothing else: a run has them from the shards.
OF_DATA = IN_SHARDS[IN_SHARDS.index("features") :]


def with_shard_settings(config: RunConfig, shards: Shards) -> RunConfig:
    """Return the config of a run on shards, with the options that they were written with.

    Raises:
        ConfigError: it has another value of one of them.
    """
    defaults, in_shards = RunConfig(), {name: shards.settings[name] for name in OF_DATA}
    in_shards["clients"] = shards.num_clients
    expected = {"partition": shards.settings["partition"]}
    expected |= {**dict.fromkeys(IN_SHARDS), **in_shards}
    for name, value in expected.items():
        given = getattr(config, name)
        # A run's own config, as its result folder has it, says that the data are cut already.
        if given not in (getattr(defaults, name), value) and (name, given) != ("partition", CUT):
            known = "none" if value is None else repr(value)
            raise ConfigError(
                f"{name}: expected {known} with shards, got {given!r}: they were written so; leave "
                f"{name} out, or give it to silograph shard",
                **mistake("unread-option", name, "shards"),
            )
    return replace(config, partition=CUT, **in_shards)
