"""`resolve`: from what is asked of a run to all that it does, every default written out."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from silograph.core.client_speeds import DEFAULT_LINKS, EQUAL
from silograph.core.config import RunConfig, make_config
from silograph.core.errors import ConfigError
from silograph.core.rate_schedule import parse_rate_schedule
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.row_minimum import RowMinimum
from silograph.core.sent_weights import SentWeights
from silograph.core.widths import num_layers, shortest
from silograph.evaluation.scoring import OwnGraph
from silograph.experiment.resolve.client_data import check_uncut
from silograph.experiment.resolve.cutting import (
    DEFAULT_CLIENTS,
    check_standard,
    clients_of_graph,
    seed_of,
)
from silograph.experiment.resolve.edge_weights import edge_weights_in, has_weights
from silograph.experiment.resolve.exclusions import (
    check_decay,
    check_neighbors,
    check_ratings,
    check_silos_behind,
    check_together,
    is_limited,
)
from silograph.experiment.resolve.model_options import (
    check_model,
    depth_of,
    make_model,
    own_module,
)
from silograph.experiment.resolve.own_partition import CutGraph, names_clients
from silograph.experiment.resolve.parts import Chosen, Parts, choose_parts, with_default_model
from silograph.experiment.resolve.plan import choose_backend, explain_torch_kernels
from silograph.experiment.resolve.run_metric import (
    check_metric_of,
    check_relevant,
    metric_of_run,
    relevant_of_run,
    scores_extra,
)
from silograph.federation.op_failure import in_function
from silograph.graph.features import with_width
from silograph.graph.graph import Graph, Schema, schema_of
from silograph.graph.silos.data import Silos
from silograph.methods.base import Method, MethodConfig
from silograph.methods.fedavg import fit_round
from silograph.methods.scaffold import fit_round as corrected_round
from silograph.nn.any_model import AnyModel
from silograph.nn.fit import Schedule, Training
from silograph.nn.neighbors import Neighbors
from silograph.nn.optim import SGD, Adam, Optimizer
from silograph.nn.own_module import Make
from silograph.nn.schedule import TrainableModel
from silograph.selection.uniform import UNIFORM
from silograph.task.counts import CountRules
from silograph.task.metric_table import RANKINGS

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
