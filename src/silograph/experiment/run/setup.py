"""Set-up of a run: from a config and a graph to a federation, a method and its first state."""

import contextlib
import hashlib
import importlib.metadata
import platform
from dataclasses import dataclass, replace

import torch

from silograph.core.config import RunConfig, checked
from silograph.core.errors import ConfigError, lookup
from silograph.core.key import Key
from silograph.core.memory import keep_freed_memory
from silograph.experiment.resolve.client_data import clients_of
from silograph.experiment.resolve.cutting import Cut, check_features, held_block
from silograph.experiment.resolve.model_options import make_model, own_module, with_model_options
from silograph.experiment.resolve.neighbor_options import (
    check_neighbors,
    neighbors_of,
    of_method,
)
from silograph.experiment.resolve.own_partition import CutGraph
from silograph.experiment.resolve.plan import plan
from silograph.experiment.resolve.selector_options import selector_of, without_selector
from silograph.experiment.resolve.user_code import imported, is_spec
from silograph.experiment.run.stopping import check_metric, with_metric
from silograph.federation.base import Engine, Federation
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.graph.graph import Graph, Schema, schema_of
from silograph.graph.partition.partition import OVERLAPPING
from silograph.graph.silos.data import Silos
from silograph.methods import METHODS
from silograph.methods.base import Method, MethodConfig
from silograph.nn.fit import Schedule, Training
from silograph.nn.optim import SGD, Adam, Optimizer
from silograph.nn.own_module import Make, ModuleModel

LEARNING_RATES = {"sgd": 0.1, "adam": 0.01}  # for SGD: benchmarks/defaults/sweep.md
PACKAGES = ("silograph", "torch", "torch-geometric", "numpy", "scipy", "scikit-learn", "pymetis")
EXTRAS = ("numba",)
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide numbers."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    for name in EXTRAS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {"python": platform.python_version(), **found}


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that a run needs before its first round.

    Attributes:
        config: with every seed and default written out.
        schema: features and classes.
        method: the method.
        method_config: what its ops read.
        federation: the engine.
        device: where it computes.
        simulated: the graph and how it was cut; None where silos hold it.
    """

    config: RunConfig
    schema: Schema
    method: Method
    method_config: MethodConfig
    federation: Engine
    device: torch.device
    simulated: Cut | None = None

    @property
    def cut(self) -> Cut:
        """The cut of a simulation."""
        assert self.simulated is not None  # nobody asks where silos hold the graph
        return self.simulated

    @property
    def partition_hash(self) -> str:
        """What names the cut, or the silos and which of their nodes are neighbors."""
        return route_hash(self.federation) if self.simulated is None else self.cut.partition.hash


def route_hash(fed: Federation) -> str:
    """Return a hash of the silos' names and of who answers for each halo slot."""
    digest = hashlib.blake2b(repr(fed.ids).encode(), digest_size=16)
    for places in (fed.route.target, fed.route.slot_off, fed.route.boundary_off):
        digest.update(places.numpy().tobytes())
    return digest.hexdigest()


def uncut_block(setup: Setup) -> ClientBlock:
    """Return the uncut graph as one client; it belongs to the experiment, not to the server."""
    cut = setup.cut
    block, _ = make_block(cut.graph, whole(cut.graph), cut.split)
    return block.to(setup.device, DTYPES[setup.config.dtype])


def find_method(config: RunConfig, given: Method | None) -> Method:
    """Return the method that a config names, or the value that was given for it.

    Raises:
        ConfigError: unknown method (names the nearest), one that cannot be imported, or a value
            that does not have the name, or has that of another method.
    """
    if given is None:
        if is_spec(config.method):
            return imported(config.method, Method)
        return lookup(METHODS, config.method, "method")
    if given.name != config.method:
        raise ConfigError(f"expected method {config.method!r}, got one named {given.name!r}")
    if METHODS.get(given.name, given) is not given or is_spec(given.name):
        raise ConfigError(
            f"expected a name of its own, without a colon, for a method that is given as a value, "
            f"got {given.name!r}: use dataclasses.replace(METHOD, name=...)"
        )
    return given


def choose_method(config: RunConfig, given: Method | None = None) -> tuple[Method, object]:
    """Return the method and its checked options.

    Args:
        config: of the run.
        given: a method as a value; `config` has its name.

    Raises:
        ConfigError: see `find_method`; or an unknown option, or a value out of range.
    """
    method = find_method(config, given)
    return method, _options(config, method)


def _options(config: RunConfig, method: Method) -> object:
    """Return the checked options of a method, once the rest of the config goes with it."""
    own = of_method(without_selector(config.options))
    options: object = checked(method.options, own, f"options of {method.name}")
    neighbors_of(with_model_options(config))
    optimizer = config.optimizer or method.needs.optimizer
    if method.needs.plain_sgd and (optimizer != "sgd" or config.momentum != 0):
        raise ConfigError(
            f"expected optimizer sgd with momentum 0 for method {method.name}, got {optimizer} "
            f"with momentum {config.momentum}: other steps do not tell the clients' gradients"
        )
    return options


def with_optimizer(config: RunConfig, method: Method) -> RunConfig:
    """Return the config with the clients' optimizer and its rate written out."""
    optimizer = config.optimizer or method.needs.optimizer
    lr = LEARNING_RATES[optimizer] if config.lr is None else config.lr
    keep = method.needs.keep_optimizer if config.keep_optimizer is None else config.keep_optimizer
    return replace(config, optimizer=optimizer, lr=lr, keep_optimizer=keep)


def _optimizer(config: RunConfig) -> Optimizer:
    assert config.lr is not None  # written out
    if config.optimizer == "sgd":
        return SGD(config.lr, config.weight_decay, config.momentum)
    if config.momentum != 0:
        raise ConfigError(f"expected momentum 0 with optimizer adam, got {config.momentum}")
    return Adam(config.lr, config.weight_decay)


def device_of(name: str) -> torch.device:
    """Return a torch device; raise `ConfigError` where this machine does not have it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"expected a torch device of this machine, got {name!r}: {reason}"
        ) from None
    return device


@dataclass(frozen=True)
class WrittenOut:
    """A config with its defaults written out, and what it says before any data is known."""

    config: RunConfig
    method: Method
    options: object
    optimizer: Optimizer
    schedule: Schedule
    device: torch.device


def write_out(config: RunConfig, method: Method) -> WrittenOut:
    """Write out the defaults of a config.

    Raises:
        ConfigError: something about it cannot be used.
    """
    options = _options(config, method)
    setting, all_silos = method.setting, method.evaluate.all_silos
    if config.collect and (all_silos or setting.uncut):
        raise ConfigError(
            f"expected a method that trains on each client's own graph for collect, got "
            f"{method.name}, which has all neighbors already: leave collect out"
        )
    if config.partition in OVERLAPPING and all_silos and not setting.uncut:
        raise ConfigError(
            f"expected a cut in which each node has one client for {method.name}, which trains all "
            f"clients as one graph, got {config.partition}: use another partition, such as metis"
        )
    selector_of(config, method)
    check_features(config)
    if config.local_bias and method.evaluate.view != "server":
        raise ConfigError(
            f"expected a method whose server has a model for local_bias, got {method.name}: leave "
            "local_bias out"
        )
    config = with_model_options(with_optimizer(config, method))
    check_metric(config)
    schedule = Schedule(config.local_epochs, config.batch_size, neighbors_of(config))
    device = device_of(config.device)
    return WrittenOut(config, method, options, _optimizer(config), schedule, device)


def configure(
    given: WrittenOut, schema: Schema, make: Make | None, block: ClientBlock | None = None
) -> tuple[RunConfig, MethodConfig]:
    """Return the config with its plan written out, and what ops read of it.

    Whoever is given the config that comes out gets the same again.

    Args:
        given: the config; seeds must be resolved.
        schema: features and classes.
        make: the module that `config.model` names, if it is one; None: it is imported.
        block: all clients of a simulation; None where every silo is a block of its own.

    Raises:
        ConfigError: the model or the plan cannot be used.
    """
    config, method = with_metric(given.config, schema), given.method
    dtype = DTYPES[config.dtype]
    model = make_model(config, schema, make or own_module(config), dtype, given.device)
    check_neighbors(config, given.schedule.neighbors, model)
    corrections = method.needs.corrections(given.options)
    training = Training(model, given.optimizer, given.schedule, corrections)
    config = plan(config, training, block, given.device)
    assert config.keep_optimizer is not None  # written out
    assert config.kernels != "auto"  # planned
    method_config = MethodConfig(
        model=model,
        optimizer=given.optimizer,
        schedule=given.schedule,
        keep_optimizer=config.keep_optimizer,
        participation=config.participation,
        selector=config.selector,
        options=given.options,
        kernels=config.kernels,
        corrections=corrections,
    )
    return config, method_config


def prepare(
    config: RunConfig,
    graph: Graph | CutGraph | Silos,
    make: Make | None = None,
    method: Method | None = None,
) -> Setup:
    """Build everything a simulation needs; nothing is written anywhere.

    Args:
        config: of the run; seeds must be resolved.
        graph: the graph, perhaps cut already, or the silos that hold it.
        make: the module that `config.model` names, if it is one; None: it is imported.
        method: the method if it was found already; None: the one that the config names.

    Raises:
        SilographError: something about config or graph cannot be used.
    """
    if method is None:
        method = find_method(config, None)
    given = write_out(config, method)
    dtype = DTYPES[config.dtype]
    cut, block, route = clients_of(given.config, graph, dtype, uncut=method.setting.uncut)
    schema = schema_of(cut.graph)
    clients = len(cut.partition.ids)
    given = replace(given, config=replace(given.config, clients=clients))
    config, method_config = configure(given, schema, make, block)
    assert config.block_size is not None  # planned
    keep_freed_memory()
    federation = InProcess(
        method_config,
        block.to(given.device, DTYPES[config.dtype]),
        route,
        block_size=config.block_size,
        strict=config.strict,
        compiled=config.kernels == "compiled",
        one_by_one=isinstance(method_config.model, ModuleModel),
    )
    part = method.setting.held(given.options)
    if part is not None:
        held = held_block(cut, part, Key.of(config.seed).fold("server's nodes"))
        held = held.to(given.device, DTYPES[config.dtype])
        method_config = replace(method_config, held=held)
    return Setup(config, schema, method, method_config, federation, given.device, cut)
