"""The config of a call, merged from its arguments."""

import dataclasses
import hashlib
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FunctionType
from typing import Any

from silograph.core.config import RunConfig, changed_values, make_config
from silograph.core.errors import ConfigError
from silograph.core.numeric_state import torch_threads
from silograph.core.resolved_config import ResolvedConfig, to_run_config
from silograph.experiment.resolve.cutting import with_silo_partition
from silograph.experiment.resolve.exclusions import check_metric_of, check_selected, own_module
from silograph.experiment.resolve.own_partition import (
    CutGraph,
    apply_partition,
    parse_call_arguments,
)
from silograph.experiment.resolve.parts import Parts, own_code, with_default_model
from silograph.experiment.resolve.resolve import SimulatedRun, choose, resolve_simulation
from silograph.experiment.resolve.user_code import CALLABLE, MODULES, absolute, spec_of
from silograph.graph.datasets import (
    Source,
    absolute_path,
    check_columns,
    check_na_values,
    check_rating_scale,
    check_scale,
    has_ratings,
    is_path,
    source_of,
)
from silograph.graph.generated.generate import ProgressCallback
from silograph.graph.graph import Graph
from silograph.graph.partition.own import is_partition_file
from silograph.graph.silos.data import Silos
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
    for kind in ("selector", "neighbors", "aggregator"):
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
            _iter_identifying_bytes(vars(part) if isinstance(part, Method) else part)
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
    elif dataclasses.is_dataclass(value):
        yield from _iter_identifying_bytes(vars(value))
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield repr(value).encode()
    else:
        raise TypeError(f"expected a plain value, got {type(value).__name__}")


def _closure_values(function: FunctionType) -> tuple[Any, ...]:
    """Return the defaults of a function and what it encloses, its class for `super` left out."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = (cell.cell_contents for name, cell in cells if name != "__class__")
    return function.__defaults__, function.__kwdefaults__, *values


@dataclass(frozen=True, eq=False)
class RunRequest:
    """The request of a call, checked as far as possible without any data.

    Attributes:
        config: the config.
        source: where its data are.
        parts: what it names.
        make: the module that `config.model` names, if it is one.
        data: the graph or silos, where they are in memory.
        partition: the partition, where it is a value.
    """

    config: RunConfig
    source: Source
    parts: Parts
    make: Make | None
    data: Graph | Silos | None = None
    partition: Any = None

    def read_and_resolve(self, report: ProgressCallback | None = None) -> SimulatedRun:
        """Read the data and cut them, with all that the run does worked out.

        Args:
            report: called with the progress of generating data.

        Raises:
            SilographError: the data cannot be read, or not be used or cut as the call says.
        """
        config, data = self._read(report)
        with torch_threads(config.threads):
            return resolve_simulation(config, data, self.parts, self.make)

    def _read(self, report: ProgressCallback | None) -> tuple[RunConfig, Graph | CutGraph | Silos]:
        """Return the data, and the config as a result folder keeps it."""
        config, uncut_data = self.config, self.data
        if uncut_data is None:
            uncut_data = self.source.read(config.scale, report)
        else:
            check_scale("a graph in memory", config.scale)
            check_columns("in memory", config.columns)
            check_rating_scale("in memory", config.rating_scale)
            check_na_values("in memory", config.na_values)
        data: Graph | CutGraph | Silos = uncut_data
        if self.partition is not None:
            data, config = apply_partition(uncut_data, self.partition, config)
        if config.out is not None:  # after loading, whose errors name the path as the user wrote it
            config = with_absolute_paths(config, in_memory=self.source.kind == "memory")
        return config, data


def parse_request(
    graph: Any,
    config: RunConfig | ResolvedConfig | None,
    method: Method | str | None,
    options: Mapping[str, Any],
) -> RunRequest:
    """Parse the arguments of `run`. No data are read, so mistakes are reported at once.

    Raises:
        SilographError: something about them cannot be used.
    """
    call = parse_call_arguments(graph, options)
    all_options = {**call.options, **_method_option(method)}
    own = own_of([method, all_options.get("model")])
    if "model" in all_options:
        all_options["model"] = name_of(all_options["model"])
    config_with_options, source = merge_config(call.graph, config, all_options)
    data = call.graph if isinstance(call.graph, Graph | Silos) else None
    if isinstance(data, Graph):
        check_metric_of(config_with_options, data.task)
    value = method if isinstance(method, Method) else None
    parts = choose(with_model_for(config_with_options, data, value), value)
    check_selected(parts)
    make = own.models.get(config_with_options.model or "") or own_module(config_with_options)
    return RunRequest(config_with_options, source, parts, make, data, call.partition)


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


def _method_option(method: Method | str | None) -> dict[str, Any]:
    """Return the option of a run's config that a method makes."""
    if method is None:
        return {}
    return {"method": method.name if isinstance(method, Method) else method}


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
                "expected a graph, or the name or path of one, got None: sg.load('digits') is one"
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
    check_names(options)
    _check_own_options(options, str(options.get("method", base_config.method)))
    merged_config = make_config(changed_values(base_config, {**options, **dataset_option}))
    data = graph if isinstance(graph, Graph | Silos) else None
    source = source_of(merged_config, data=data)
    on_silos = source.kind == "silos" or isinstance(graph, Silos)
    return (with_silo_partition(merged_config) if on_silos else merged_config), source


def _check_own_options(options: Mapping[str, Any], name: str) -> None:
    """Raise `ConfigError` for an option of the method among those of the run."""
    if name not in METHODS:
        return
    run_option_names = {f.name for f in fields(RunConfig)}
    for option in fields(METHODS[name].options):
        if option.name in options and option.name not in run_option_names:
            raise ConfigError(
                f"expected {option.name}, an option of {name}, under options: give "
                f"options={{{option.name!r}: {options[option.name]!r}}}"
            )


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
