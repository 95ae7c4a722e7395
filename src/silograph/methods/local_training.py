"""Local training: the client's side of FedAvg and most other methods.

Each client starts from the received weights and takes steps on its own training nodes, along its
internal edges. The methods of this folder share the ops and the round here.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-efficient learning of deep
networks from decentralized data", AISTATS 2017, algorithm 1 (ClientUpdate).

State of a client: `optimizer/*` if kept between rounds, `neighbors/*` of the neighbor sampler,
`tables/*` of models that have tables, which never leave, and the logits of evaluation (see
`silograph.evaluation.evaluate`). C: clients.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from silograph.aggregation.aggregators import combine_weights
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Patched,
    Payload,
    Ragged,
    Shared,
    Stacked,
    State,
    below,
    from_bases,
    named,
    stack,
    under,
)
from silograph.core.work import work_for
from silograph.evaluation.evaluate import (
    TABLES,
    logits_specs,
    no_logits,
    no_ranking,
    ranked,
    rankings_specs,
    remembered,
    tallies,
)
from silograph.evaluation.scoring import RECEIVED, received_specs, score_received
from silograph.exchange.collect import local_graph
from silograph.exchange.passes import weight_specs
from silograph.exchange.sent_weights import (
    inbox_spec,
    reply_spec,
)
from silograph.federation.base import (
    BY_CLIENT,
    Federation,
    Gather,
    Op,
    WeightedMean,
    at_server,
)
from silograph.federation.field_specs import LOSS, TABLE, TRAINED, FieldSpec, FieldSpecs
from silograph.federation.program import Call, Maybe, Steps
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import MethodConfig, RoundReport, keep_previous_if_not_finite
from silograph.nn.any_model import AnyModel
from silograph.nn.conv import Params
from silograph.nn.fit import Fitted, Start, TrainingInputs
from silograph.nn.forward import embedded_pass, whole_pass
from silograph.selection.base import select_uniform

STEPS = "steps"  # of Adam, one number for all weights
NEIGHBORS = "neighbors"  # prefix of the neighbor sampler's fields in the state


# --- messages ------------------------------------------------------------------------------------


def exact_weights(
    form: Any, name: str = "weights", *, optional: bool = False
) -> Callable[[MethodConfig], FieldSpecs]:
    """Return specs for annotations of messages: tensors in the shapes of the run's weights.

    Args:
        form: `Shared` or `Stacked`.
        name: of the field that is annotated.
        optional: of a state: whether clients may lack it, as those that never trained.
    """

    def specs(cfg: MethodConfig) -> FieldSpecs:
        own = weight_specs(cfg.model, form, name)
        return (
            {n: dataclasses.replace(s, optional=True) for n, s in own.items()} if optional else own
        )

    return specs


@dataclass(frozen=True)
class GlobalModel:
    """The server's weights w_t, in the form that the run sends weights in."""

    weights: Annotated[Mapping[str, Tensor], inbox_spec]


@dataclass(frozen=True)
class LocalModel:
    """The clients' models after local training.

    Attributes:
        weights: w_k of each client, in the form that the run sends weights in.
        nodes: (C,) int64 n_k, training nodes.
        loss: (C,) mean training loss.
        received: counts of the model that clients began with, where the run scores it.
    """

    weights: Annotated[Mapping[str, Stacked | Patched], reply_spec]
    nodes: Annotated[Stacked, TRAINED]
    loss: Annotated[Stacked, LOSS]
    received: Annotated[Mapping[str, Stacked], received_specs]

    @staticmethod
    def of(fitted: Fitted, block: ClientBlock) -> "LocalModel":
        """Return the reply of clients after training."""
        counts = stack(fitted.received)
        return LocalModel(fitted.weights, Stacked(block.num_train), Stacked(fitted.loss), counts)


@dataclass(frozen=True)
class AveragedModel:
    """Means over clients, weighted by their training nodes.

    Attributes:
        weights: mean of w_k.
        nodes: () sum of n_k.
        loss: () mean of the losses.
    """

    weights: Mapping[str, Tensor]
    nodes: Tensor
    loss: Tensor


def stacked(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Stacked]:
    """Return client tensors (C, ...) as fields `prefix/name`."""
    return {name: Stacked(t) for name, t in named(prefix, tensors).items()}


def prefix_fields(
    prefix: str, fields: Mapping[str, Stacked | Patched]
) -> dict[str, Stacked | Patched]:
    """Return the fields under names `prefix/name`."""
    return {f"{prefix}/{name}": field for name, field in fields.items()}


def shared(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Shared]:
    """Return the server's tensors, such as weights, as fields `prefix/name`."""
    return {name: Shared(t) for name, t in named(prefix, tensors).items()}


def start_from(prefix: str, inbox: Payload) -> dict[str, Tensor | Patched | Stacked]:
    """Return the initial weights of each client: a shared model, or one of several bases."""
    fields = below(prefix, inbox)
    shared = {name: field.t for name, field in fields.items() if isinstance(field, Shared)}
    parts = {n: f for n, f in fields.items() if isinstance(f, Stacked | Patched)}
    return {**shared, **each_as_base(parts)}


def each_as_base(weights: Mapping[str, Stacked | Patched]) -> dict[str, Stacked | Patched]:
    """Return weights in which a slice for each client counts as a base model of its own.

    Rows of features that a client does not have follow their base.
    """
    return {
        name: from_bases(w.t, torch.arange(len(w.t), device=w.t.device))
        if isinstance(w, Stacked)
        else w
        for name, w in weights.items()
    }


def zero_weights(model: AnyModel, block: ClientBlock) -> Params:
    """Return zeros in the shape of every weight of every client, (C, ...)."""
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    clients, like = block.num_clients, block.adj.values
    return {k: like.new_zeros(clients, *shape) for k, shape in model.weight_shapes.items()}


def begin(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Set up the state of every client. In: nothing. Out: nothing."""
    del inbox
    new: dict[str, Stacked | Ragged] = {**state, **no_logits(cfg.model, block)}
    new |= no_ranking(cfg, block)
    sampler_state = cfg.schedule.neighbors.init(
        local_graph(block, state), cfg.model, key.fold(NEIGHBORS)
    )
    new |= {f"{NEIGHBORS}/{name}": f for name, f in sampler_state.items()}
    tables = cfg.model.first_tables(block, key.fold(TABLES))
    new |= {f"{TABLES}/{name}": f for name, f in tables.items()}
    if cfg.keep_optimizer:
        new |= _table_moments(cfg, tables)
        new |= stacked("optimizer", cfg.optimizer.init(zero_weights(cfg.model, block)))
    return new, {}


def _table_moments(cfg: MethodConfig, tables: State) -> dict[str, Ragged]:
    """Return the optimizer state of tables before its first step."""
    ragged = {name: f for name, f in tables.items() if isinstance(f, Ragged)}
    if not ragged:
        return {}
    off = next(iter(ragged.values())).off
    moments = cfg.optimizer.init({name: f.t[None] for name, f in ragged.items()})
    return {f"{TABLES}/{name}": Ragged(t[0], off) for name, t in moments.items() if name != STEPS}


def trained(fitted: Fitted, block: ClientBlock) -> dict[str, Stacked | Patched]:
    """Return a client's reply after training: `weights/*`, and the fields of `told`."""
    return {
        **prefix_fields("weights", fitted.weights),
        "nodes": Stacked(block.num_train),
        "loss": Stacked(fitted.loss),
        **stacked(RECEIVED, fitted.received),
    }


def train_from(
    cfg: MethodConfig, block: ClientBlock, state: State, start: Start, key: Key
) -> tuple[Fitted, State]:
    """Train from weights (see `silograph.nn.fit`); return the result and the new state.

    Logits of the trained model for the scored rows stay in the state, as the client's own view.
    If the run scores models on receipt, the initial weights are scored first (`Fitted.received`).
    """
    memory = under("optimizer", state) if cfg.keep_optimizer else None
    graph = local_graph(block, state)
    sampler_state, tables = below(NEIGHBORS, state), below(TABLES, state)
    score_fields, counts = score_received(cfg, graph, start, tables)
    inputs = TrainingInputs(graph, start, memory, key, sampler_state, tables)
    fitted = cfg.backend.fit(cfg.training, inputs)
    fitted = dataclasses.replace(fitted, received=counts)
    new = {**state, **score_fields, **remembered(fitted.logits, graph)}
    if cfg.relevant is not None:
        with work_for(Kind.EVALUATION):
            new |= ranked(cfg, "own", fitted.tensors, graph, fitted.tables)
    private_fields: dict[str, Stacked | Ragged] = {}
    private_fields |= {f"{NEIGHBORS}/{name}": f for name, f in fitted.neighbors.items()}
    if cfg.keep_optimizer:
        private_fields |= stacked("optimizer", fitted.memory)
    private_fields |= {f"{TABLES}/{name}": f for name, f in fitted.tables.items()}
    return fitted, {**new, **keep_previous_if_not_finite(private_fields, state)}


def embeddings(
    cfg: MethodConfig, block: ClientBlock, state: State, weights: Mapping[str, Tensor]
) -> Ragged:
    """Return the embeddings (n, D) of all rows that clients train on: what enters the last layer.

    Nothing is dropped, and gradients do not go through it. The rows are those that `StepNodes.row`
    counts.

    Args:
        cfg: of the method, whose `Needs.losses` says that it needs embeddings.
        block: the clients.
        state: theirs.
        weights: shared by all clients, or (C, ...).
    """
    graph, model = local_graph(block, state), cfg.model.staged
    assert model is not None  # see `why_no_embeddings`
    inputs = whole_pass(model, graph, next(iter(weights.values())).dtype)
    with torch.no_grad():
        return Ragged(embedded_pass(model, weights, inputs, None)[1], graph.off)


def untouched_rows_after_round(cfg: MethodConfig, weights: Mapping[str, Tensor]) -> Params:
    """Return first weights after a round without data: what rows of unused features become.

    The server's mean needs them for rows that no client has trained.
    """
    if cfg.keep_optimizer:
        return {}
    steps = cfg.schedule.epochs
    return {
        f"weights/{name}": cfg.backend.rest(cfg.training, weights[name], steps)
        for name in cfg.model.first_maps
    }


def local_round(
    fed: Federation,
    cfg: MethodConfig,
    op: Op,
    inbox: Payload,
    what: Kind,
    t: int,
    key: Key,
    mean: WeightedMean | None = None,
) -> tuple[Payload | None, RoundReport]:
    """Let the selected clients run a training op once; `mean`: by `nodes`, of all fields.

    The op must send `nodes` (C,) and `loss` (C,), and may send more; where the run scores what
    clients receive it must send `received/*` (see `told`). Where the run has another aggregator
    than the mean, the inbox and the replies must have the same `weights/*`, and these it combines.

    Returns:
        The means of all fields of the replies weighted by `nodes`, which is the sum of them, or
        None if nobody could train; and the report.
    """
    client_ids = selected(fed, cfg, t, key)
    mean = mean or WeightedMean("nodes")
    score_names, combine = tuple(received_specs(cfg)), cfg.aggregator.combine
    weights = [n for n in inbox if combine is not None and n.startswith("weights/")]
    gathered_names = ("nodes", "loss", *score_names, *weights)
    mean = dataclasses.replace(mean, without=tuple(weights))
    reduce = (
        Gather(*gathered_names, fold=mean)
        if cfg.selector_uses_feedback or score_names or weights
        else mean
    )
    reply = fed.call(op, inbox, what=what, key=key.fold("train", t), to=client_ids, reduce=reduce)
    by_client = under("by_client", reply)
    trained = (
        {n: t for n, t in by_client.items() if n not in weights}
        if cfg.selector_uses_feedback or score_names
        else {}
    )
    reply = {name: field for name, field in reply.items() if not name.startswith(BY_CLIENT)}
    aggregator_name = (
        cfg.aggregator.name if weights or combine is None else ""
    )  # "": there was nothing to it
    report = RoundReport(client_ids, None, trained=trained, aggregator=aggregator_name)
    if "loss" not in reply:  # no selected client has a training node
        return None, report
    if weights:
        is_trained = by_client["answered"] & (by_client["nodes"] > 0)
        client_weights = {name.partition("/")[2]: by_client[name][is_trained] for name in weights}
        with at_server(combine or combine_weights, f"aggregator {cfg.aggregator.name}", t):
            new = combine_weights(
                cfg.aggregator,
                cfg.aggregator_options,
                by_client["nodes"][is_trained],
                client_weights,
            )
        reply |= shared("weights", new)
    return reply, dataclasses.replace(report, train_loss=float(reply["loss"].t))


def selected(fed: Federation, cfg: MethodConfig, t: int, key: Key) -> tuple[str, ...]:
    """Return the ids of the clients that train in a round."""
    if cfg.selected is not None:
        return cfg.selected
    return tuple(select_uniform(fed.ids, cfg.participation, key.fold("select", t)))


def state_specs(cfg: MethodConfig) -> dict[str, FieldSpec]:
    """Return the specs of the fields that local training keeps in a client's state."""
    specs = {**logits_specs(cfg.model), **rankings_specs(cfg)}
    sampler_specs = cfg.schedule.neighbors.specs(cfg.model)
    specs |= {f"{NEIGHBORS}/{name}": spec for name, spec in sampler_specs.items()}
    specs |= _table_specs(cfg)
    if cfg.keep_optimizer:
        like = {name: torch.zeros(1, *shape) for name, shape in cfg.model.weight_shapes.items()}
        for name, t in cfg.optimizer.init(like).items():
            # Adam counts its steps in float32 whatever the weights are.
            dtype = torch.float32 if name == STEPS else None
            specs[f"optimizer/{name}"] = FieldSpec(Stacked, tuple(t.shape[1:]), dtype)
    return specs


def _table_specs(cfg: MethodConfig) -> dict[str, FieldSpec]:
    """Return the tables of a model, with what the optimizer keeps of them if it keeps anything."""
    widths = dict(cfg.model.table_widths)
    if cfg.keep_optimizer and widths:
        like = {name: torch.zeros(1, 1, width) for name, width in widths.items()}
        moments = cfg.optimizer.init(like)
        widths |= {name: t.shape[-1] for name, t in moments.items() if name != STEPS}
    return {
        f"{TABLES}/{name}": FieldSpec(Ragged, (width,), rows=TABLE)
        for name, width in widths.items()
    }


def local_steps(
    cfg: MethodConfig,
    op: Op,
    takes: FieldSpecs,
    gives: FieldSpecs,
    what: Kind,
    t: int,
    key: Key,
    problem: Callable[[Payload, Payload], str | None] | None = None,
) -> Steps:
    """Return the call of `local_round`.

    `gives` specifies the fields that the op sends besides `nodes`, `loss` and `received/*`;
    `problem` describes what is wrong with these fields in a reply (see `Call`).
    """
    reply_specs = {**gives, "nodes": TRAINED, "loss": LOSS, **received_specs(cfg)}
    count_problem = tallies(cfg.model, cfg.count_rules, f"{RECEIVED}/") if cfg.received else None

    def first_problem(inbox: Payload, reply: Payload) -> str | None:
        checks = (check for check in (problem, count_problem) if check is not None)
        texts = (check(inbox, reply) for check in checks)
        return next((text for text in texts if text is not None), None)

    call = Call(op, what, key.fold("train", t), takes, reply_specs, first_problem)
    return call if cfg.everyone_trains else Maybe(call)
