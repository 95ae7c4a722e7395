"""`resolve`: from the config of a user to a complete run, with all defaults filled in."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import torch

from silograph.core.config import RunConfig, make_config
from silograph.core.errors import CheckpointError, ConfigError, mistake, reword_error
from silograph.core.key import Key
from silograph.core.numeric_state import torch_threads
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import (
    BALANCED,
    DEFAULT_LINKS,
    EQUAL,
    SentWeights,
    num_layers,
    parse_rate_schedule,
    shortest,
)
from silograph.evaluation.scoring import OwnGraph
from silograph.exchange.collect import SumSpecs
from silograph.experiment.resolve.data import (
    DEFAULT_CLIENTS,
    Cut,
    check_edge_weights,
    class_weights,
    clients_of,
    clients_of_graph,
    describe_weight_scale,
    edge_weights_in,
    has_weights,
    make_server_block,
    scale_line,
    seed_of,
    sum_specs,
    uneven_line,
)
from silograph.experiment.resolve.exclusions import (
    check_exclusions,
    check_metric_of,
    check_parts,
    check_selected,
    check_threshold,
    depth_of,
    exclusions_of_clients,
    exclusions_of_labels,
    exclusions_of_model,
    exclusions_of_model_kind,
    exclusions_of_optimizer,
    exclusions_of_shards,
    exclusions_of_silos,
    has_selection_limits,
    make_model,
    metric_of_run,
    needs_validation_histogram,
    own_module,
    parse_target,
    positive_class,
    relevant_of_run,
)
from silograph.experiment.resolve.parts import (
    ChosenPart,
    Parts,
    choose_parts,
    row_minimum_of,
    with_default_model,
    with_model_for,
)
from silograph.experiment.resolve.privacy import privacy_defaults, privacy_of
from silograph.experiment.resolve.run_request import (
    PENDING,
    CutGraph,
    apply_partition,
    merge_config,
    name_of,
    own_of,
    parse_call_arguments,
    with_absolute_paths,
    with_own_partition,
)
from silograph.experiment.resolve.user_code import is_spec
from silograph.federation.base import in_function
from silograph.graph.block.block import ClientBlock, Route, SparseRows
from silograph.graph.datasets import (
    Source,
    check_columns,
    check_na_values,
    check_rating_scale,
    check_scale,
    source_of,
)
from silograph.graph.generated import ProgressCallback
from silograph.graph.graph import Graph, Schema, schema_of, with_width
from silograph.graph.partition.partition import GIVEN, names_clients
from silograph.graph.silos.data import Silos
from silograph.graph.silos.shards import ShardedClients, Shards, read_shards
from silograph.methods import METHODS
from silograph.methods.base import Method, MethodConfig
from silograph.methods.ops import scores_start
from silograph.nn.backends import BACKENDS, COMPILED, TORCH, Backend, why_not_compiled
from silograph.nn.fit import Schedule, Training
from silograph.nn.mini_batches import Neighbors
from silograph.nn.model_options import RATING_MODELS
from silograph.nn.optim import SGD, Adam
from silograph.nn.own_module import Make
from silograph.selection.base import UNIFORM
from silograph.task.counts import CountRules
from silograph.task.metric_table import is_metric_among
from silograph.task.registry import TASKS, task_of

# --- How a run is computed: which kernels, and how many clients at once --------------------------
#
# Results do not depend on it beyond rounding. The choice is written into the result's config; a
# run that is resumed where another choice would be made is refused.


# Bytes of the weights of a block's clients, with gradients and moments where torch holds them.
# Measured: smaller blocks pay for Python, larger ones leave the cache (decision 04).
BLOCKS_OF_WORKERS = 16  # least blocks where workers share them
BLOCK_BYTES = 2**26
# On other devices every block starts all operations once more, and caches matter less.
DEVICE_BLOCK_BYTES = 2**30
SHARD_BLOCK_BYTES = 2**26  # of the files of a block's clients, where these are in shards


def choose_backend(config: RunConfig, training: Training, device: torch.device) -> Backend:
    """Return the backend of a run: the fastest that can do it, or the one that is named.

    Raises:
        ConfigError: compiled kernels are required and cannot be used, or no backend can train.
    """
    if (reason := TORCH.why_not(training, device)) is not None:
        raise ConfigError(f"expected a model that the method can train, got: {reason}")
    if config.kernels != "auto":
        backend = BACKENDS[config.kernels]
        reason = backend.why_not(training, device)
        if reason is not None:
            raise ConfigError(
                f"expected a run for {backend.name} kernels, got: {reason}; use kernels=torch"
            )
        return backend
    return next(b for b in BACKENDS.values() if b.why_not(training, device) is None)


def explain_torch_kernels(
    config: RunConfig, training: Training, device: torch.device
) -> str | None:
    """Return why torch computes where compiled kernels would be faster, and what to do about it.

    None where kernels are compiled, where the config names torch, and on other devices than a CPU.
    """
    if config.kernels != "auto" or device.type != "cpu":
        return None
    reason = COMPILED.why_not(training, device)
    if reason is None:
        return None
    warning = f"torch kernels, which are slower than compiled ones: {' '.join(reason.split())}"
    if why_not_compiled(training) is None:
        return warning  # what this machine lacks; the reason says how to mend it
    return (
        f"{warning}; docs/explanation/performance.md lists what is compiled, and kernels=torch "
        "drops this line"
    )


def client_bytes(
    training: Training,
    clients: ClientBlock | Shards,
    backend: Backend,
    itemsize: int,
    *,
    compact: bool,
) -> int:
    """Return the bytes of one client's weights in training, on the mean over clients."""
    model = training.model
    first_maps, num_weights = model.first_maps, 0
    for name, shape in model.weight_shapes.items():
        num_values = torch.Size(shape).numel()
        if name in first_maps and compact:
            columns = used_columns(clients)
            num_values = num_values if columns is None else int(columns * shape[1])
        num_weights += num_values
    return num_weights * itemsize * backend.copies(training)


def used_columns(clients: ClientBlock | Shards) -> Fraction | None:
    """Return how many features occur at a client, on the mean; None of dense features."""
    if isinstance(clients, Shards):
        columns = clients.columns
        return None if columns is None else Fraction(int(columns.sum()), len(columns))
    if not isinstance(clients.x, SparseRows):
        return None
    return Fraction(len(clients.x.used.feature), clients.num_clients)


def choose_block_size(
    training: Training,
    clients: ClientBlock | Shards,
    backend: Backend,
    device: torch.device,
    *,
    keep_optimizer: bool,
) -> int:
    """Return how many clients are computed at once.

    Args:
        training: how they train.
        clients: all clients.
        backend: what computes.
        device: that computes.
        keep_optimizer: whether optimizers are kept; then torch leaves no weight out.
    """
    if training.model.single_client_only:
        return 1  # clients are computed one after the other
    if isinstance(clients, Shards):
        itemsize = DTYPES[clients.settings["dtype"]].itemsize
    else:
        assert clients.adj.values is not None  # blocks carry values of the run's dtype
        itemsize = clients.adj.values.element_size()
    number = clients.num_clients
    compact = training.alike and (backend.compiled or not keep_optimizer)
    bytes_per_client = client_bytes(training, clients, backend, itemsize, compact=compact)
    byte_limit = BLOCK_BYTES if device.type == "cpu" else DEVICE_BLOCK_BYTES
    max_clients = max(1, byte_limit // max(bytes_per_client, 1))
    if isinstance(clients, Shards):
        max_clients = min(max_clients, SHARD_BLOCK_BYTES * number // clients.clients.num_bytes or 1)
    num_blocks = -(-number // max_clients)
    return -(-number // num_blocks)  # blocks of one size


def with_block_size(
    config: ResolvedConfig, training: Training, clients: ClientBlock | Shards
) -> ResolvedConfig:
    """Return the config with the number of clients that are computed at once."""
    if config.block_size is not None:
        return config
    backend = BACKENDS[config.kernels]
    device, keep = torch.device(config.device), config.keep_optimizer
    size = choose_block_size(training, clients, backend, device, keep_optimizer=keep)
    if (workers := num_workers(config)) != 1:
        # The same for any few workers: their number is not to change the bits of a result.
        size = min(size, -(-clients.num_clients // max(BLOCKS_OF_WORKERS, workers or 0)))
    return replace(config, block_size=size)


def num_workers(config: RunConfig | ResolvedConfig) -> int | None:
    """Return how many workers share the clients, 1 for none; None: as many as a cluster has cores.

    Raises:
        ConfigError: options that do not go with the engine.
    """
    is_ray, workers = config.engine == "ray", config.workers
    if config.address is not None and not is_ray:
        raise ConfigError(
            f"expected engine=ray for address {config.address}, got engine={config.engine}: add "
            "engine=ray, or leave address out",
            **mistake("conflicting-options", ["address", "engine"]),
        )
    if (is_ray or workers not in (None, 1)) and torch.device(config.device).type != "cpu":
        raise ConfigError(
            f"expected device=cpu with workers, got {config.device}: leave engine and workers out, "
            "or use device=cpu",
            **mistake("conflicting-options", ["device", "workers"]),
        )
    if (is_ray or workers not in (None, 1)) and config.secure_aggregation:
        raise ConfigError(
            "expected a run without workers for secure_aggregation, as masked replies are summed "
            "in one process: leave engine and workers out, or secure_aggregation",
            **mistake("conflicting-options", ["secure_aggregation", "workers"]),
        )
    if (is_ray or workers not in (None, 1)) and config.dp_epsilon is not None:
        raise ConfigError(
            "expected a run without workers for dp_epsilon, as noise is added in one process: "
            "leave engine and workers out, or dp_epsilon",
            **mistake("conflicting-options", ["dp_epsilon", "workers"]),
        )
    if isinstance(workers, int):
        return workers
    if is_ray:
        return None
    return 1 if workers is None else max(1, num_cores() // config.threads)


def cores_of_run(config: RunConfig) -> int:
    """Return how many cores of this machine a run takes; all of them for one on Ray."""
    if config.engine == "ray":
        return num_cores()
    return config.threads * (num_workers(config) or 1)


def num_cores() -> int:
    """Return how many cores this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()) or 1


DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, eq=False)
class Resolved:
    """A run before its data are cut.

    Attributes:
        config: every default written out, but for the size of blocks.
        parts: the parts that it names, with their options.
        method_config: what the method's ops and server program read.
        schema: features and classes.
        device: where it computes.
        why_torch: why torch computes where compiled kernels would be faster; None: it does not, or
            the config names torch.
    """

    config: ResolvedConfig
    parts: Parts
    method_config: MethodConfig
    schema: Schema
    device: torch.device
    why_torch: str | None = None


def choose(config: RunConfig, method: Method | None = None) -> Parts:
    """Return the parts of a run, once they go with the rest of its config; see `choose_parts`.

    Raises:
        ConfigError: see `choose_parts`; or parts that do not go together.
    """
    parts = choose_parts(config, method)
    check_exclusions(exclusions_of_model_kind(config, parts.model.part, parts.model.options))
    make_neighbors(config, parts)
    check_exclusions(exclusions_of_optimizer(config, parts.method.part))
    return parts


@dataclass(frozen=True)
class DataFacts:
    """What a config is resolved by, of its data.

    Attributes:
        schema: features and classes.
        clients: their number.
        overlapping: whether several clients may hold a node, whatever the cut.
        weighted: whether any client has weights of edges.
        scale: least and largest rating; None where none is known.
    """

    schema: Schema
    clients: int
    overlapping: bool = False
    weighted: bool = False
    scale: tuple[float, float] | None = None


def facts_of(config: RunConfig, data: Graph | CutGraph | Silos | Shards | Schema) -> DataFacts:
    """Return what a config is resolved by; that silos agree on it is checked later.

    Raises:
        DataError: `features` is "given", and the data have none.
    """
    if isinstance(data, Schema):
        clients = DEFAULT_CLIENTS if config.clients is None else config.clients
        return DataFacts(with_width(data, config.features, "the federation"), clients)
    if isinstance(data, Shards):
        return DataFacts(data.schema, data.num_clients, data.overlapping, data.weighted, data.scale)
    graph: Graph
    if isinstance(data, Silos):
        graph, clients, overlapping = data.members[0].graph, len(data.ids), False
        scales = [silo.scale for silo in data.members if silo.scale is not None]
        scale = max(scales, key=lambda scale: scale[1], default=None)
    elif isinstance(data, CutGraph):
        graph, clients, overlapping = data.graph, len(data.partition.ids), data.overlapping
        scale = graph.scale
    else:
        graph, clients, overlapping = data, clients_of_graph(config, data), False
        scale = graph.scale
    schema = with_width(schema_of(graph), config.features, graph.name)
    return DataFacts(schema, clients, overlapping, has_weights(data), scale)


def resolve(
    user_config: RunConfig,
    data: Graph | CutGraph | Silos | Shards | Schema,
    parts: Parts | None = None,
    make: Make | None = None,
    device: str | None = None,
    *,
    weighted: bool = False,
) -> Resolved:
    """Resolve a config: fill in every default; resolving the result again gives the same.

    Args:
        user_config: the config.
        data: the graph, perhaps cut already, the silos, or what is known of data that others hold.
        parts: of the config, if they were chosen already; of one that names no model, those of
            `with_default_model`.
        make: the module that `user_config.model` names, if it is one; None: it is imported.
        device: where it computes, if not where the config says.
        weighted: whether any client has weights of edges, where others hold the data.

    Raises:
        ConfigError: something about the config cannot be used, or not with these data.
    """
    # The task decides on the default model, and the model on what else is valid.
    facts = facts_of(user_config, data)
    schema, task = facts.schema, facts.schema.task
    value = None if parts is None else parts.method.part
    user_config = with_default_model(user_config, ratings=task == "rating", method=value)
    parts = choose(user_config) if parts is None else parts
    method, needs, selector = parts.method.part, parts.method.part.needs, parts.selector
    check_metric_of(user_config, task)
    check_exclusions(exclusions_of_labels(user_config, parts, task))
    overlapping = parts.partition.part.overlapping or task == "rating" or facts.overlapping
    check_parts(user_config, parts, overlapping=overlapping)
    if isinstance(data, Silos):
        check_exclusions(exclusions_of_silos(user_config, facts.clients))
    if isinstance(data, Shards):
        check_exclusions(exclusions_of_shards(user_config, parts))
    torch_device = device_of(device or user_config.device)
    # Options of the cut that depend on the classes are written out.
    partition = parts.partition
    partition_options = partition.part.complete(partition.options, schema.num_classes)
    parts = replace(parts, partition=ChosenPart(partition.part, partition_options))
    # Fill in the defaults that need no data, and build what trains.
    settings = fill_defaults(user_config, parts)
    metric = metric_of_run(user_config, schema)
    positive_class(user_config.positive, schema)
    check_threshold(user_config.threshold, schema)
    if user_config.class_weight not in (None, BALANCED):
        class_weights(str(user_config.class_weight), schema)
    lr, decay, decay_layers = settings["lr"], settings["weight_decay"], user_config.decay_layers
    optimizer = (
        SGD(lr, decay, user_config.momentum, decay_layers)
        if settings["optimizer"] == "sgd"
        else Adam(lr, decay, decay_layers=decay_layers)
    )
    model = make_model(
        user_config,
        parts.model.options,
        schema,
        make or own_module(user_config),
        DTYPES[user_config.dtype],
        torch_device,
    )
    relevant = relevant_of_run(user_config, schema, model)
    neighbors, own_options = make_neighbors(user_config, parts), parts.method.options
    check_exclusions(
        exclusions_of_model(user_config, parts, model, neighbors, relevant, facts.scale)
    )
    training = Training(
        model,
        optimizer,
        Schedule(settings["local_epochs"], user_config.batch_size, neighbors),
        needs.corrections(own_options),
        needs.losses(own_options),
    )
    backend = choose_backend(user_config, training, torch_device)
    # Settings that depend on the data.
    check_exclusions(exclusions_of_clients(user_config, facts.clients))
    data_settings = {
        "clients": facts.clients,
        "metric": metric,
        "relevant": relevant,
        "kernels": backend.name,
        "edge_weights": edge_weights_in(user_config, model, weighted=weighted or facts.weighted),
    }
    config = ResolvedConfig(**settings | data_settings)
    # What the method's ops and its server program read.
    score_on_receipt: Literal["", "val", "all"] = "val" if selector.part.on_receipt else ""
    method_config = MethodConfig(
        model=model,
        optimizer=optimizer,
        schedule=training.schedule,
        keep_optimizer=config.keep_optimizer,
        participation=selector.options.participation if selector.part is UNIFORM else 1.0,
        selector=config.selector,
        selector_has_budget=has_selection_limits(selector.options),
        score_on_receipt="all" if scores_on_receipt(user_config, parts) else score_on_receipt,
        scored_every=0 if selector.part.on_receipt else user_config.eval_every,
        count_rules=CountRules(
            config.evaluation_min_count,
            val_histogram=needs_validation_histogram(config, task_of(task)),
            summed=config.secure_aggregation,
        ),
        aggregator=parts.aggregator.part,
        aggregator_options=parts.aggregator.options,
        server_optimizer=parts.server_optimizer.part.name,
        server_step=parts.server_optimizer.part.step(parts.server_optimizer.options),
        row_minimum=row_minimum_of(config),
        relevant=relevant,
        options=own_options,
        backend=backend,
        corrections=training.corrections,
        losses=training.losses,
        sent=SentWeights(config.weights_as, config.weight_rows),
        rates=parse_rate_schedule(
            user_config.lr_schedule, user_config.rounds, user_config.warmup_rounds
        ),
        privacy=privacy_of(config),
    )
    with in_function(method.check, f"check of method {method.name}"):
        method.check(method_config)
    check_evaluate_clients(user_config, parts, method_config)
    why_torch = explain_torch_kernels(user_config, training, torch_device)
    return Resolved(config, parts, method_config, schema, torch_device, why_torch)


def fill_defaults(config: RunConfig, parts: Parts) -> dict[str, Any]:
    """Return the fields of a resolved config; those that need data stay as the user gave them."""
    needs = parts.method.part.needs
    if config.dp_unit == "node":  # a round is one step
        needs = replace(needs, optimizer="sgd", local_epochs=1)
    optimizer = config.optimizer or needs.optimizer
    keep_optimizer = (
        needs.keep_optimizer if config.keep_optimizer is None else config.keep_optimizer
    )
    clients = config.clients
    if clients is None and not names_clients(config.partition):
        clients = DEFAULT_CLIENTS
    # Speeds and links are those of the virtual clock; None where nothing asks for one.
    clock = (config.speeds, config.links, config.max_virtual_seconds)
    has_clock = any(value is not None for value in clock)
    return {f.name: getattr(config, f.name) for f in fields(ResolvedConfig)} | {
        "options": parts.options,
        "clients": clients,
        "evaluate_clients": config.evaluate_clients or "all",
        "hidden": shortest(config.hidden),
        "layers": num_layers(config.hidden, config.layers),
        "neighbors": config.neighbors or parts.neighbors.part.name,
        "selector": config.selector or needs.selector,
        "server_optimizer": config.server_optimizer or needs.server_optimizer,
        "optimizer": optimizer,
        "lr": needs.learning_rate(optimizer) if config.lr is None else config.lr,
        "weight_decay": needs.weight_decay if config.weight_decay is None else config.weight_decay,
        "local_epochs": config.local_epochs or needs.local_epochs,
        "keep_optimizer": keep_optimizer,
        "evaluation_min_count": config.evaluation_min_count or 0,
        **privacy_defaults(config),
        "speeds": (config.speeds or EQUAL) if has_clock else None,
        "links": (config.links or DEFAULT_LINKS) if has_clock else None,
        **{name: seed_of(config, name) for name in ("partition_seed", "split_seed", "init_seed")},
    }


def scores_on_receipt(config: RunConfig, parts: Parts) -> bool:
    """Whether the server's model of a round is scored by who receives it to train in the next.

    Not where something needs the scores before that: a controller, or a selector that reads them.
    And not where sums are masked: a mean of weights and a sum of counts are two sums. With
    differential privacy no count leaves with an update.
    """
    method, selector = parts.method.part, parts.selector.part
    needs_scores = selector.observe is not None and selector.uses_scores
    declared = method.scores_on_receipt
    if declared is None:  # a method of a user may have FedAvg's values, and another round
        declared = scores_start(method.round)
    return (
        declared
        and not config.secure_aggregation
        and config.dp_epsilon is None
        and isinstance(method.evaluate, OwnGraph)
        and method.evaluate.view == "server"
        and method.own_weights is None
        and not method.setting.uncut
        and not method.needs.score_first
        and not needs_scores
    )


def can_score_participants(config: RunConfig, parts: Parts) -> bool:
    """Whether a round's model can be scored by those alone who train from it in the next round."""
    calls = parts.method.part.calls
    return scores_on_receipt(config, parts) or (calls is not None and calls.server_model is False)


def check_evaluate_clients(config: RunConfig, parts: Parts, method_config: MethodConfig) -> None:
    """Raise `ConfigError` where participants cannot score a model that only some train from."""
    if config.evaluate_clients != "participants" or method_config.everyone_trains:
        return
    if not can_score_participants(config, parts):
        raise ConfigError(
            f"expected evaluate_clients=all for {parts.method.part.name} where only some clients "
            "train in a round, got participants: its models are scored before it is known who "
            "trains next; leave evaluate_clients out, or let all clients train",
            **mistake("conflicting-options", ["evaluate_clients", "method"]),
        )


def with_defaults(config: RunConfig, parts: Parts) -> RunConfig:
    """Return the config with every default that needs no data filled in."""
    values = {name: v for name, v in fill_defaults(config, parts).items() if v is not None}
    options = {name: v for name, v in parts.options.items() if v is not None}
    return make_config(values | {"options": options})


def make_neighbors(config: RunConfig, parts: Parts) -> Neighbors:
    """Return what draws neighbors; raise `ConfigError` where it does not fit the model's hops."""
    depth = depth_of(config, parts.model.options)
    return parts.neighbors.part.make(parts.neighbors.options, depth)


def device_of(name: str) -> torch.device:
    """Return a torch device; raise `ConfigError` where this machine does not have it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:  # each kind of device has errors of its own, of imports among them
        reason = (str(error).splitlines() or [""])[0].partition(". ")[0]
        # torch's list of all kinds, or words about its own code, say nothing to a user.
        unhelpful_beginnings = ("Expected one of", "Could not run", "Tensor.item()")
        is_unhelpful = reason.startswith(unhelpful_beginnings) or "INTERNAL ASSERT" in reason
        explanation = "" if is_unhelpful or not reason else f": {reason}"
        raise ConfigError(
            f"device: expected a torch device of this machine, such as cpu or cuda:0, got {name!r}"
            f"{explanation}",
            **mistake("option-value", "device", name),
        ) from None
    return device


# --- simulated -----------------------------------------------------------------------------------
# A run in one process, completely resolved: config, parts, and the data cut for the clients.


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """A run in one process, completely resolved, before anything is computed.

    Attributes:
        user_config: the config as the user gave it, as a result folder keeps it.
        resolved: what it does, with the number of clients that are computed at once.
        simulated: the graph and how it was cut; None where it is in shards.
        clients: all clients.
        route: who answers for each halo slot.
        server_block: nodes that the server holds itself; None is no node.
        edge_weights: a line on how edge weights are used; None where there are none.
        sums: federated sums of the run, by name.
        warnings: lines on what of the data is not used, or may keep the model from learning.
        workers: how many share the clients, see `num_workers`.
        shards: the graph and how it was cut, in files; None where it is in memory.
    """

    user_config: RunConfig
    resolved: Resolved
    simulated: Cut | None
    clients: ClientBlock | ShardedClients
    route: Route
    server_block: ClientBlock | None
    edge_weights: str | None
    warnings: tuple[str, ...]
    sums: SumSpecs
    workers: int | None
    shards: Shards | None = None


def resolve_simulation(
    user_config: RunConfig,
    data: Graph | CutGraph | Silos | Shards,
    parts: Parts | None = None,
    make: Make | None = None,
) -> SimulatedRun:
    """Resolve a run on data that are there, and cut them; arguments as for `prepare`."""
    if isinstance(data, Shards):
        return _resolve_on_shards(user_config, data, parts, make)
    if not isinstance(data, Silos):
        data = with_own_partition(user_config, data)
    resolved = resolve(user_config, data, parts, make)
    dtype, method = DTYPES[resolved.config.dtype], resolved.parts.method
    weights_line = check_edge_weights(
        user_config, resolved.config, method.part, resolved.method_config.model, data
    )
    cut, block, route = clients_of(resolved.config, resolved.parts, data, dtype)
    config = with_block_size(resolved.config, resolved.method_config.training, block)
    share, server_block = method.part.setting.held(method.options), None
    if share is not None:
        key = Key.of(config.seed).fold("server's nodes")
        server_block = make_server_block(cut, share, key)
        server_block = replace(server_block, class_weight=block.class_weight)
        server_block = server_block.to(resolved.device, dtype)
    block = block.to(resolved.device, dtype)
    unused_warning = weights_line if config.edge_weights == "ignore" else None
    scale_warning = describe_weight_scale(config.edge_weights, cut.graph.edge_weight)
    all_warnings = (
        unused_warning,
        scale_warning,
        scale_line(config, cut.graph),
        cut.narrowing,
        uneven_line(config, block.num_train),
    )
    warnings = tuple(line for line in all_warnings if line)
    resolved = replace(resolved, config=config)
    sums = sum_specs(config, schema_of(cut.graph), method.part)
    return SimulatedRun(
        user_config,
        resolved,
        cut,
        block,
        route,
        server_block,
        weights_line,
        warnings,
        sums,
        num_workers(resolved.config),
    )


def _resolve_on_shards(
    user_config: RunConfig, shards: Shards, parts: Parts | None, make: Make | None
) -> SimulatedRun:
    """Resolve a run whose clients are in files; no client is read."""
    resolved = resolve(user_config, shards, parts, make)
    config, method_config = resolved.config, resolved.method_config
    method, model = resolved.parts.method.part, method_config.model
    weights_line = check_edge_weights(user_config, config, method, model, shards)
    in_shards = shards.settings["edge_weights"]
    if shards.weighted and config.edge_weights != in_shards:
        raise ConfigError(
            f"expected a model that takes edge weights, as they are in the shards, got "
            f"{config.model}: give edge_weights=ignore to silograph shard",
            **mistake("conflicting-options", ["model", "edge_weights"]),
        )
    config = with_block_size(config, method_config.training, shards)
    uneven = uneven_line(config, shards.num_train)
    return SimulatedRun(
        user_config,
        replace(resolved, config=config),
        None,
        shards.clients,
        shards.route,
        None,
        weights_line,
        (*shards.warnings, *([] if uneven is None else [uneven])),
        sum_specs(config, shards.schema, method),
        num_workers(config),
        shards,
    )


# --- Checks of a config before its data are known ------------------------------------------------


MANY = 10**6  # number of clients where only the data determine it


def resolve_without_data(
    config: RunConfig, method: Method | None = None, device: str | None = None
) -> Resolved | None:
    """Return what a run does on data with two features and two classes.

    It fails only where no kind of labels goes with the config. What depends on the data's own
    numbers is looked at by `resolve`, once they are known.

    Args:
        config: the config.
        method: the method, where it is a value.
        device: where it computes, if not where the config says.

    Returns:
        None for a module of the user's, which may take certain features only.

    Raises:
        ConfigError: the config cannot be used with any data.
    """
    parts = choose(config, method)
    # Names of classes are those of the data.
    class_weight = None if config.class_weight is None else BALANCED
    config = replace(config, positive=None, class_weight=class_weight)
    if config.clients is None and names_clients(config.partition):
        config = replace(config, clients=MANY)
    if config.model is not None and is_spec(config.model):
        check_parts(config, parts, overlapping=parts.partition.part.overlapping)
        return None
    # Kinds of labels that the model may predict: those that have the metrics, if any.
    tasks = [
        task
        for task in TASKS.values()
        if config.model is None or (task.labels == "rating") == (config.model in RATING_MODELS)
    ]
    target = parse_target(config.target)
    names = [name for name in (config.metric, target and target.metric) if name]
    errors = []
    tasks_with_metrics = [t for t in tasks if all(is_metric_among(n, t.metrics) for n in names)]
    for task in tasks_with_metrics or tasks:
        is_rating = task.labels == "rating"
        config_with_model = with_default_model(config, ratings=is_rating, method=method)
        try:
            parts = choose(config_with_model, method)
            return resolve(config_with_model, Schema(2, 2, task.labels), parts, device=device)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


# --- From a call to a resolved run ---------------------------------------------------------------


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
            CheckpointError: the partition differs from that of the run that is resumed.
        """
        config, uncut_data = self.config, self.data
        if self.source.kind == "shards":
            if config.out is not None:
                config = with_absolute_paths(config, in_memory=False)
            shards = read_shards(self.config.dataset)
            return resolve_simulation(config, shards, self.parts, self.make)
        if uncut_data is None:
            uncut_data = self.source.read(config.scale, report)
        data: Graph | CutGraph | Silos = uncut_data
        if self.partition is not None:
            data, config = apply_partition(uncut_data, self.partition, config)
            if self.config.partition not in (PENDING, config.partition):  # of a resumed run
                raise CheckpointError(
                    f"expected the partition of the run, {self.config.partition}, got "
                    f"{config.partition}: going on would not give the numbers of an uninterrupted "
                    "run",
                    **mistake(
                        "foreign-checkpoint", "partition", config.partition, self.config.partition
                    ),
                )
        if config.out is not None:  # after loading, whose errors name the path as the user wrote it
            config = with_absolute_paths(config, in_memory=self.source.kind == "memory")
        with torch_threads(config.threads):
            return resolve_simulation(config, data, self.parts, self.make)


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
    call = parse_call_arguments(graph, options, getattr(config, "repeated_edges", None))
    all_options = dict(call.options)
    if method is not None:
        all_options["method"] = method.name if isinstance(method, Method) else method
    own = own_of([method, all_options.get("model")])
    if "model" in all_options:
        all_options["model"] = name_of(all_options["model"])
    merged_config, source = merge_config(call.graph, config, all_options)
    data = call.graph if isinstance(call.graph, Graph | Silos) else None
    if isinstance(data, Graph):
        check_metric_of(merged_config, data.task)
    if data is not None:
        check_scale("a graph in memory", merged_config.scale)
        check_columns("in memory", merged_config.columns)
        check_rating_scale("in memory", merged_config.rating_scale)
        check_na_values("in memory", merged_config.na_values)
    value = method if isinstance(method, Method) else None
    parts = choose(with_model_for(merged_config, data, value), value)
    check_selected(parts)
    make = own.models.get(merged_config.model or "") or own_module(merged_config)
    return RunRequest(merged_config, source, parts, make, data, call.partition)


def parse_resume_request(
    folder: Path,
    config: RunConfig,
    run_source: Mapping[str, str | None] | None,
    graph: Any,
    partition: Any,
    method: Method | None,
    model: Make | None,
) -> RunRequest:
    """Parse the arguments of `resume`, which has the config from the run's folder.

    Args:
        folder: of the run, for errors.
        config: of the run.
        run_source: where its data are, as run.json says; None: they were in memory.
        graph: the graph or silos, where they were in memory.
        partition: the partition, where it was a value.
        method: the method, where it was a value.
        model: the class of the model, where it cannot be imported.

    Raises:
        SilographError: something that was in memory is missing, or there is too much.
    """
    if method is None and config.method not in METHODS and not is_spec(config.method):
        raise ConfigError(
            f"expected the method {config.method!r} of the run, got none: it was given as a value; "
            "use sg.resume(DIR, method=...)",
            **mistake("part-not-saved", "method", folder),
        )
    parts = choose(config, method)
    try:
        make = own_module(config) if model is None else model
    except ConfigError as error:
        raise reword_error(
            error, f"{error}; or give the class: sg.resume(DIR, model=...)", ConfigError
        ) from error
    if partition is None and graph is None and config.partition.startswith(GIVEN):
        raise ConfigError(
            f"expected the partition of the run in {folder}, got none: it was made in memory; use "
            "sg.resume(DIR, partition=...)",
            **mistake("part-not-saved", "partition", folder),
        )
    if partition is not None and not config.partition.startswith(GIVEN):
        raise ConfigError(
            f"expected no partition, for that of the run is {config.partition}, got one: leave it "
            "out",
            **mistake("unread-option", "partition", config.partition),
        )
    partition_option = {} if partition is None else {"partition": partition}
    call = parse_call_arguments(graph, partition_option, config.repeated_edges)
    if isinstance(call.graph, Graph | Silos):
        source = source_of(config, data=call.graph)
        return RunRequest(config, source, parts, make, call.graph, call.partition)
    dataset = None if run_source is None else run_source["dataset"]
    if run_source is None or dataset is None:
        raise ConfigError(
            f"expected the graph of the run in {folder}, got none: it was made in memory; "
            "use sg.resume(DIR, graph=...)",
            **mistake("part-not-saved", "graph", folder),
        )
    source = source_of(replace(config, dataset=dataset, data_dir=run_source["data_dir"]))
    return RunRequest(config, source, parts, make, None, call.partition)
