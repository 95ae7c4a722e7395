"""`resolve`: from what is asked of a run to all that it does, every default written out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from silograph.core.config import RunConfig, make_config
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.setting_values import (
    DEFAULT_LINKS,
    EQUAL,
    RowMinimum,
    SentWeights,
    num_layers,
    parse_rate_schedule,
    shortest,
)
from silograph.evaluation.scoring import OwnGraph
from silograph.exchange.collect import SumSpecs
from silograph.experiment.resolve.cutting import (
    DEFAULT_CLIENTS,
    Cut,
    check_standard,
    check_uncut,
    clients_of,
    clients_of_graph,
    held_block,
    scale_line,
    seed_of,
)
from silograph.experiment.resolve.exclusions import (
    check_decay,
    check_metric_of,
    check_model,
    check_neighbors,
    check_ratings,
    check_relevant,
    check_silos_behind,
    check_together,
    depth_of,
    is_limited,
    make_model,
    metric_of_run,
    own_module,
    parse_target,
    relevant_of_run,
    scores_extra,
)
from silograph.experiment.resolve.fitting import (
    check_edge_weights,
    describe_weight_scale,
    edge_weights_in,
    has_weights,
    sum_specs,
)
from silograph.experiment.resolve.own_partition import CutGraph, names_clients, with_own_partition
from silograph.experiment.resolve.parts import Chosen, Parts, choose_parts, with_default_model
from silograph.experiment.resolve.user_code import is_spec
from silograph.federation.base import in_function
from silograph.graph.block.block import ClientBlock, Route, SparseRows
from silograph.graph.graph import Graph, LabelForm, Schema, schema_of, with_width
from silograph.graph.silos.data import Silos
from silograph.methods.base import Method, MethodConfig
from silograph.methods.fedavg import fit_round
from silograph.methods.scaffold import fit_round as corrected_round
from silograph.nn.any_model import AnyModel
from silograph.nn.backends import BACKENDS, COMPILED, TORCH, Backend, why_not_compiled
from silograph.nn.fit import Schedule, TrainableModel, Training
from silograph.nn.mini_batches import Neighbors
from silograph.nn.model_options import RATING_MODELS
from silograph.nn.optim import SGD, Adam, Optimizer
from silograph.nn.own_module import Make
from silograph.selection.base import UNIFORM
from silograph.task.counts import CountRules
from silograph.task.metric_table import RANKINGS
from silograph.task.registry import TASKS

# --- How a run is computed: which kernels, and how many clients at once --------------------------
#
# Results do not depend on it beyond rounding. The choice is written into the result's config; a
# run that is resumed where another choice would be made is refused.


# Bytes of the weights of a block's clients, with gradients and moments where torch holds them.
# Measured in decision 006: smaller blocks pay for Python, larger ones leave the cache.
BLOCK_BYTES = 2**26
# On other devices every block starts all operations once more, and caches matter less.
DEVICE_BLOCK_BYTES = 2**30


def choose_backend(config: RunConfig, training: Training, device: torch.device) -> Backend:
    """Return the backend of a run: the fastest that can do it, or the one that is named.

    Raises:
        ConfigError: compiled ones were asked for and cannot be used, or none can train.
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

    None where kernels are compiled, where torch was asked for, and on other devices than a CPU.
    """
    if config.kernels != "auto" or device.type != "cpu":
        return None
    reason = COMPILED.why_not(training, device)
    if reason is None:
        return None
    line = f"torch kernels, which are slower than compiled ones: {' '.join(reason.split())}"
    if why_not_compiled(training) is None:
        return line  # what this machine lacks; the reason says how to mend it
    return f"{line}; docs/speed.md lists what is compiled, and kernels=torch drops this line"


def client_bytes(
    training: Training, block: ClientBlock, backend: Backend, itemsize: int, *, compact: bool
) -> int:
    """Return the bytes of one client's weights in training, on the mean over clients."""
    model = training.model
    maps, total = model.first_maps, 0
    for name, shape in model.weight_shapes.items():
        size = torch.Size(shape).numel()
        if name in maps and compact and isinstance(block.x, SparseRows):
            size = len(block.x.used.feature) * shape[1] // block.num_clients
        total += size
    return total * itemsize * backend.copies(training)


def choose_block_size(
    training: Training, block: ClientBlock, backend: Backend, device: torch.device, *, keep: bool
) -> int:
    """Return how many clients are computed at once.

    Args:
        training: how they train.
        block: all clients.
        backend: what computes.
        device: that computes.
        keep: whether optimizers are kept; then no weight is left out.
    """
    if training.model.one_by_one:
        return 1  # clients are computed one after the other
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    itemsize = block.adj.values.element_size()
    needed = client_bytes(training, block, backend, itemsize, compact=training.alike and not keep)
    room = BLOCK_BYTES if device.type == "cpu" else DEVICE_BLOCK_BYTES
    most = max(1, room // max(needed, 1))
    blocks = -(-block.num_clients // most)
    return -(-block.num_clients // blocks)  # blocks of one size


def with_block_size(
    config: ResolvedConfig, training: Training, block: ClientBlock
) -> ResolvedConfig:
    """Return the config with the number of clients that are computed at once."""
    if config.block_size is not None:
        return config
    backend = BACKENDS[config.kernels]
    device, keep = torch.device(config.device), config.keep_optimizer
    size = choose_block_size(training, block, backend, device, keep=keep)
    return replace(config, block_size=size)


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
            was asked for.
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
    check_model(config, parts.model.part, parts.model.options)
    neighbors_of(config, parts)
    needs, name = parts.method.part.needs, parts.method.part.name
    optimizer = config.optimizer or needs.optimizer
    if needs.plain_sgd and (optimizer != "sgd" or config.momentum != 0):
        raise ConfigError(
            f"expected optimizer=sgd without momentum for method {name}, got optimizer={optimizer} "
            f"with momentum={config.momentum}: other steps do not tell the clients' gradients"
        )
    return parts


def resolve(
    asked: RunConfig,
    data: Graph | CutGraph | Silos | Schema,
    parts: Parts | None = None,
    make: Make | None = None,
    device: str | None = None,
    *,
    weighted: bool = False,
) -> Resolved:
    """Return all that a run does; what comes out, asked for again, gives the same.

    Args:
        asked: the config.
        data: the graph, perhaps cut already, the silos, or what is known of data that others hold.
        parts: of the config, if they were chosen already; of one that names no model, those of
            `with_default_model`.
        make: the module that `asked.model` names, if it is one; None: it is imported.
        device: where it computes, if not where the config says.
        weighted: whether any client has weights of edges, where others hold the data.

    Raises:
        ConfigError: something about the config cannot be used, or not with these data.
    """
    ratings = schema_in(asked, data).task == "rating"
    given = None if parts is None else parts.method.part
    asked = with_default_model(asked, ratings=ratings, method=given)
    parts = choose(asked) if parts is None else parts
    schema = usable_schema(asked, data, parts)
    where = device_of(device or asked.device)
    parts = completed(parts, schema)
    known = known_values(asked, parts)
    metric = metric_of_run(asked, schema)
    optimizer = make_optimizer(asked, known)
    model = make_model(
        asked, parts.model.options, schema, make or own_module(asked), DTYPES[asked.dtype], where
    )
    check_decay(asked, model)
    relevant = ranked_in(asked, parts, schema, model)
    check_relevant(relevant, scale_in(data))
    training = training_of(asked, known, parts, model, optimizer)
    backend = choose_backend(asked, training, where)
    check_silos_behind(asked, clients := clients_in(asked, data))
    found = {"clients": clients, "metric": metric, "relevant": relevant, "kernels": backend.name}
    weighted |= not isinstance(data, Schema) and has_weights(data)
    found["edge_weights"] = edge_weights_in(asked, model, weighted=weighted)
    config = ResolvedConfig(**known | found)
    selector = parts.selector
    method_config = MethodConfig(
        model=model,
        optimizer=optimizer,
        schedule=training.schedule,
        keep_optimizer=config.keep_optimizer,
        participation=selector.options.participation if selector.part is UNIFORM else 1.0,
        selector=config.selector,
        limited=is_limited(selector.options),
        received=received_in(parts),
        scored_every=0 if selector.part.on_receipt else asked.eval_every,
        count_rules=CountRules(config.evaluation_min_count, val_histogram=scores_extra(config)),
        aggregator=parts.aggregator.part,
        aggregator_options=parts.aggregator.options,
        behind=RowMinimum(config.min_nodes_per_row, config.min_silos_per_row),
        relevant=relevant,
        options=parts.method.options,
        backend=backend,
        corrections=training.corrections,
        losses=training.losses,
        sent=SentWeights(config.weights_as, config.weight_rows),
        rates=parse_rate_schedule(asked.lr_schedule, asked.rounds, asked.warmup_rounds),
    )
    check_method(parts.method.part, method_config)
    check_evaluate_clients(asked, parts, method_config)
    why_torch = explain_torch_kernels(asked, training, where)
    return Resolved(config, parts, method_config, schema, where, why_torch)


def check_method(method: Method, method_config: MethodConfig) -> None:
    """Raise `ConfigError` for a config that the method cannot train with."""
    with in_function(method.check, f"check of method {method.name}"):
        method.check(method_config)


def usable_schema(
    asked: RunConfig, data: Graph | CutGraph | Silos | Schema, parts: Parts
) -> Schema:
    """Return features and classes of a run, once config and parts go with them."""
    schema = schema_in(asked, data)
    overlapping = parts.partition.part.overlapping or schema.task == "rating"
    overlapping |= isinstance(data, CutGraph) and data.overlapping
    check_metric_of(asked, schema.task)
    check_ratings(parts.method.part, schema.task)
    check_standard(asked, schema.task)
    check_together(asked, parts, overlapping=overlapping)
    if isinstance(data, Silos):
        check_uncut(asked, data)
    return schema


def training_of(
    asked: RunConfig,
    known: Mapping[str, Any],
    parts: Parts,
    model: TrainableModel,
    optimizer: Optimizer,
) -> Training:
    """Return how clients train; raise `ConfigError` where neighbors cannot be drawn so."""
    schedule = Schedule(known["local_epochs"], asked.batch_size, neighbors_of(asked, parts))
    check_neighbors(known["neighbors"], known["model"], schedule.neighbors, model)
    needs, own = parts.method.part.needs, parts.method.options
    return Training(model, optimizer, schedule, needs.corrections(own), needs.losses(own))


def known_values(asked: RunConfig, parts: Parts) -> dict[str, Any]:
    """Return the fields of a resolved config; those that need data are as they were asked for."""
    needs = parts.method.part.needs
    optimizer = asked.optimizer or needs.optimizer
    keep = needs.keep_optimizer if asked.keep_optimizer is None else asked.keep_optimizer
    clients = asked.clients
    if clients is None and not names_clients(asked.partition):
        clients = DEFAULT_CLIENTS
    return {f.name: getattr(asked, f.name) for f in fields(ResolvedConfig)} | {
        "options": parts.options,
        "clients": clients,
        "evaluate_clients": asked.evaluate_clients or "all",
        "hidden": shortest(asked.hidden),
        "layers": num_layers(asked.hidden, asked.layers),
        "neighbors": asked.neighbors or parts.neighbors.part.name,
        "selector": asked.selector or needs.selector,
        "optimizer": optimizer,
        "lr": needs.learning_rate(optimizer) if asked.lr is None else asked.lr,
        "weight_decay": needs.weight_decay if asked.weight_decay is None else asked.weight_decay,
        "local_epochs": asked.local_epochs or needs.local_epochs,
        "keep_optimizer": keep,
        "evaluation_min_count": asked.evaluation_min_count or 0,
        **clock_values(asked),
        **{name: seed_of(asked, name) for name in ("partition_seed", "split_seed", "init_seed")},
    }


def received_in(parts: Parts) -> Literal["", "val", "all"]:
    """Return which nodes clients score the model on that they receive; see `MethodConfig`."""
    if scores_on_receipt(parts):
        return "all"
    return "val" if parts.selector.part.on_receipt else ""


def scores_on_receipt(parts: Parts) -> bool:
    """Whether the server's model of a round is scored by who receives it to train in the next.

    Not where something needs the scores before that: a controller, or a selector that reads them.
    """
    method, selector = parts.method.part, parts.selector.part
    needs_scores = selector.observe is not None and selector.uses_scores
    declared = method.scores_on_receipt
    if declared is None:  # a method of a user may have FedAvg's values, and another round
        declared = method.round in (fit_round, corrected_round)
    return (
        declared
        and isinstance(method.evaluate, OwnGraph)
        and method.evaluate.view == "server"
        and method.own_weights is None
        and not method.setting.uncut
        and not method.needs.score_first
        and not needs_scores
    )


def can_score_participants(parts: Parts) -> bool:
    """Whether a round's model can be scored by those alone who train from it in the next round."""
    calls = parts.method.part.calls
    return scores_on_receipt(parts) or (calls is not None and calls.server_model is False)


def check_evaluate_clients(asked: RunConfig, parts: Parts, method_config: MethodConfig) -> None:
    """Raise `ConfigError` where participants cannot score a model that only some train from."""
    if asked.evaluate_clients != "participants" or method_config.everyone_trains:
        return
    if not can_score_participants(parts):
        raise ConfigError(
            f"expected evaluate_clients=all for {parts.method.part.name} where only some clients "
            "train in a round, got participants: its models are scored before it is known who "
            "trains next; leave evaluate_clients out, or let all clients train"
        )


def ranked_in(asked: RunConfig, parts: Parts, schema: Schema, model: AnyModel) -> float | None:
    """Return the least rating that rankings should have first, None where nothing is ranked."""
    relevant, selector = relevant_of_run(asked, schema, model), parts.selector.part
    if asked.metric in RANKINGS and selector.on_receipt:
        raise ConfigError(
            f"expected another metric than {asked.metric} for selector {selector.name}, whose "
            "clients score what they receive but rank nothing by it: use rmse and relevant="
            f"{relevant:g}, which ranks as well"
        )
    return relevant


def clock_values(asked: RunConfig) -> dict[str, str | None]:
    """Return speeds and links of the virtual clock; None where nothing asks for one."""
    if asked.speeds is None and asked.links is None and asked.max_virtual_seconds is None:
        return {"speeds": None, "links": None}
    return {"speeds": asked.speeds or EQUAL, "links": asked.links or DEFAULT_LINKS}


def spelled_out(asked: RunConfig, parts: Parts) -> RunConfig:
    """Return the config that says all that needs no data, whatever the defaults are later."""
    values = {name: v for name, v in known_values(asked, parts).items() if v is not None}
    options = {name: v for name, v in parts.options.items() if v is not None}
    return make_config(values | {"options": options})


def completed(parts: Parts, schema: Schema) -> Parts:
    """Return the parts with the options of the cut that depend on the classes written out."""
    part, options = parts.partition.part, parts.partition.options
    options = part.complete(options, schema.num_classes)
    return replace(parts, partition=Chosen(part, options))


def schema_in(asked: RunConfig, data: Graph | CutGraph | Silos | Schema) -> Schema:
    """Return features and classes of a run; silos are held to agree on them later.

    Raises:
        DataError: the given features are asked for, and there are none.
    """
    if isinstance(data, Schema):
        return with_width(data, asked.features, "the federation")
    if isinstance(data, Silos):
        data = data.members[0].graph
    graph = data.graph if isinstance(data, CutGraph) else data
    return with_width(schema_of(graph), asked.features, graph.name)


def scale_in(data: Graph | CutGraph | Silos | Schema) -> tuple[float, float] | None:
    """Return the least and largest rating of the data; None where none is known."""
    if isinstance(data, Silos):
        scales = [silo.scale for silo in data.members if silo.scale is not None]
        return max(scales, key=lambda scale: scale[1], default=None)
    if isinstance(data, Schema):
        return None
    return data.graph.scale if isinstance(data, CutGraph) else data.scale


def clients_in(asked: RunConfig, data: Graph | CutGraph | Silos | Schema) -> int:
    """Return the number of clients."""
    if isinstance(data, CutGraph):
        return len(data.partition.ids)
    if isinstance(data, Silos):
        return len(data.ids)
    if isinstance(data, Graph):
        return clients_of_graph(asked, data)
    return DEFAULT_CLIENTS if asked.clients is None else asked.clients


def neighbors_of(config: RunConfig, parts: Parts) -> Neighbors:
    """Return what draws neighbors; raise `ConfigError` where it does not fit the model's hops."""
    depth = depth_of(config, parts.model.options)
    return parts.neighbors.part.make(parts.neighbors.options, depth)


def make_optimizer(config: RunConfig, known: Mapping[str, Any]) -> Optimizer:
    """Return the clients' optimizer; raise `ConfigError` where it cannot have the momentum."""
    lr, decay = known["lr"], known["weight_decay"]
    if known["optimizer"] == "sgd":
        return SGD(lr, decay, config.momentum, config.decay_layers)
    if config.momentum != 0:
        raise ConfigError(
            f"expected no momentum with optimizer=adam, got momentum={config.momentum}: use "
            "optimizer=sgd"
        )
    return Adam(lr, decay, decay_layers=config.decay_layers)


def device_of(name: str) -> torch.device:
    """Return a torch device; raise `ConfigError` where this machine does not have it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except Exception as error:  # each kind of device has errors of its own, of imports among them
        reason = (str(error).splitlines() or [""])[0].partition(". ")[0]
        # torch's list of all kinds, or words about its own code, say nothing to a user.
        obscure = ("Expected one of", "Could not run", "Tensor.item()")
        hidden = reason.startswith(obscure) or "INTERNAL ASSERT" in reason
        why = "" if hidden or not reason else f": {reason}"
        raise ConfigError(
            f"device: expected a torch device of this machine, such as cpu or cuda:0, got {name!r}"
            f"{why}"
        ) from None
    return device


# --- simulated -----------------------------------------------------------------------------------
# A run in one process, resolved whole: its config and parts, and its data cut for the clients.


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """All that a run in one process is, before anything is computed.

    Attributes:
        asked: what was asked for, as a result folder keeps it.
        resolved: what it does, with the number of clients that are computed at once.
        cut: the graph and how it was cut.
        block: all clients.
        route: who answers for each halo slot.
        held: nodes that the server holds itself; None is no node.
        edge_weights: what becomes of the weights of edges; None where there are none.
        sums: federated sums of the run, by name.
        warnings: lines on what of the data is not used, or may keep the model from learning.
    """

    asked: RunConfig
    resolved: Resolved
    cut: Cut
    block: ClientBlock
    route: Route
    held: ClientBlock | None
    edge_weights: str | None
    warnings: tuple[str, ...]
    sums: SumSpecs


def simulated(
    asked: RunConfig,
    data: Graph | CutGraph | Silos,
    parts: Parts | None = None,
    make: Make | None = None,
) -> SimulatedRun:
    """Resolve a run on data that are there, and cut them; arguments as for `prepare`."""
    if not isinstance(data, Silos):
        data = with_own_partition(asked, data)
    found = resolve(asked, data, parts, make)
    dtype, method = DTYPES[found.config.dtype], found.parts.method
    weights = check_edge_weights(asked, found.config, method.part, found.method_config.model, data)
    cut, block, route = clients_of(found.config, found.parts, data, dtype)
    config = with_block_size(found.config, found.method_config.training, block)
    share, held = method.part.setting.held(method.options), None
    if share is not None:
        key = Key.of(config.seed).fold("server's nodes")
        held = held_block(cut, share, key).to(found.device, dtype)
    block = block.to(found.device, dtype)
    unused = weights if config.edge_weights == "ignore" else None
    scale = describe_weight_scale(config.edge_weights, cut.graph.edge_weight)
    lines = (unused, scale, scale_line(config, cut.graph), cut.narrowing)
    warnings = tuple(line for line in lines if line)
    found = replace(found, config=config)
    sums = sum_specs(config, cut.graph.num_features, method.part)
    return SimulatedRun(asked, found, cut, block, route, held, weights, warnings, sums)


# --- What of a config can be checked before its data are known -----------------------------------


MANY = 10**6  # clients, where the data will say how many


def resolved_without_data(
    asked: RunConfig, method: Method | None = None, device: str | None = None
) -> Resolved | None:
    """Return what a run does on data with two features and two classes.

    It fails only where no kind of labels goes with the config. What depends on the data's own
    numbers is looked at by `resolve`, once they are known.

    Args:
        asked: the config.
        method: the method, where it is a value.
        device: where it computes, if not where the config says.

    Returns:
        None for a module of the user's, which may take certain features only.

    Raises:
        ConfigError: the config cannot be used with any data.
    """
    parts = choose(asked, method)
    if asked.clients is None and names_clients(asked.partition):
        asked = replace(asked, clients=MANY)
    if asked.model is not None and is_spec(asked.model):
        check_together(asked, parts, overlapping=parts.partition.part.overlapping)
        return None
    return _first_that_fits(asked, method, device)


def _first_that_fits(asked: RunConfig, method: Method | None, device: str | None) -> Resolved:
    """Return what a run does with the first kind of labels that it can be done with."""
    errors = []
    for labels in _label_forms(asked):
        named = with_default_model(asked, ratings=labels == "rating", method=method)
        try:
            return resolve(named, Schema(2, 2, labels), choose(named, method), device=device)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _label_forms(asked: RunConfig) -> Sequence[LabelForm]:
    """Return the kinds of labels that a model may predict: those that have the metrics, if any."""
    tasks = [
        task
        for task in TASKS.values()
        if asked.model is None or (task.labels == "rating") == (asked.model in RATING_MODELS)
    ]
    target = parse_target(asked.target)
    named = {asked.metric, target and target.metric} - {None, ""}
    fitting = [task for task in tasks if named.issubset(task.metrics)]
    return [task.labels for task in fitting or tasks]
