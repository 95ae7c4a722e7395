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
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import (
    Patched,
    Payload,
    Ragged,
    Shared,
    Stacked,
    State,
    StateField,
    fields_under,
    from_bases,
    stack,
    with_prefix,
)
from silograph.evaluation.evaluate import (
    NEIGHBORS,
    TABLES,
    logits_specs,
    no_logits,
    no_ranking,
    rankings_specs,
)
from silograph.evaluation.scoring import received_specs
from silograph.exchange.collect import local_graph
from silograph.exchange.passes import weight_specs
from silograph.exchange.sent_weights import (
    inbox_spec,
    reply_spec,
)
from silograph.federation.base import (
    Federation,
)
from silograph.federation.field_specs import LOSS, TABLE, TRAINED, FieldSpec, FieldSpecs
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import MethodConfig
from silograph.nn.conv import Params
from silograph.nn.fit import Fitted, Memory, first_memory
from silograph.nn.forward import AnyModel
from silograph.selection.base import select_uniform

STEPS = "steps"  # of Adam, one number for all weights
SAMPLER_FACTS = "sampler"  # begins the names of the neighbor sampler's figures in a reply


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


def sampler_specs(cfg: MethodConfig) -> FieldSpecs:
    """Return the specs of the neighbor sampler's figures in a reply, none for most samplers."""
    own = cfg.schedule.neighbors.fact_specs
    return {f"{SAMPLER_FACTS}/{name}": spec for name, spec in own.items()}


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
        sampler: (C,) figures of the neighbor sampler, where it has any.
    """

    weights: Annotated[Mapping[str, Stacked | Patched], reply_spec]
    nodes: Annotated[Stacked, TRAINED]
    loss: Annotated[Stacked, LOSS]
    received: Annotated[Mapping[str, Stacked], received_specs]
    sampler: Annotated[Mapping[str, Stacked], sampler_specs] = field(default_factory=dict)

    @staticmethod
    def of(fitted: Fitted, block: ClientBlock) -> "LocalModel":
        """Return the reply of clients after training."""
        counts, facts = stack(fitted.received), stack(fitted.sampler_facts)
        nodes, loss = Stacked(block.num_train), Stacked(fitted.loss)
        return LocalModel(fitted.weights, nodes, loss, counts, facts)


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
    return {name: Stacked(t) for name, t in with_prefix(prefix, tensors).items()}


def shared(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Shared]:
    """Return the server's tensors, such as weights, as fields `prefix/name`."""
    return {name: Shared(t) for name, t in with_prefix(prefix, tensors).items()}


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
    """Set up the state of every client, and what its rounds read. In: nothing. Out: nothing."""
    del inbox
    graph = local_graph(block, state)
    cfg.trainer.prepare(cfg.training, graph, cfg.keep_optimizer)
    return with_first_state(cfg, block, state, key), {}


def with_first_state(
    cfg: MethodConfig, block: ClientBlock, state: State, key: Key
) -> dict[str, StateField]:
    """Return the state of every client with what the library keeps of it."""
    new: dict[str, StateField] = {**state, **no_logits(cfg.model, block)}
    new |= no_ranking(cfg, block)
    graph = local_graph(block, state)
    sampler_state = cfg.schedule.neighbors.init(graph, cfg.model, key.fold(NEIGHBORS))
    new |= {f"{NEIGHBORS}/{name}": f for name, f in sampler_state.items()}
    tables = cfg.model.first_tables(block, key.fold(TABLES))
    new |= {f"{TABLES}/{name}": f for name, f in tables.items()}
    if cfg.keep_optimizer:
        new |= _table_moments(cfg, tables)
        new |= memory_fields(first_memory(cfg.training, graph, apart=cfg.backend.compiled))
    return new


def memory_fields(memory: Memory) -> dict[str, StateField]:
    """Return optimizer state as fields `optimizer/NAME` of the clients' state."""
    return {
        f"optimizer/{name}": m if isinstance(m, Patched) else Stacked(m)
        for name, m in memory.items()
    }


def memory_in(state: State) -> Memory:
    """Return the optimizer state in the clients' state."""
    return {
        name: field if isinstance(field, Patched) else field.t
        for name, field in fields_under("optimizer", state).items()
    }


def _table_moments(cfg: MethodConfig, tables: State) -> dict[str, Ragged]:
    """Return the optimizer state of tables before its first step."""
    ragged = {name: f for name, f in tables.items() if isinstance(f, Ragged)}
    if not ragged:
        return {}
    off = next(iter(ragged.values())).off
    moments = cfg.optimizer.init({name: f.t[None] for name, f in ragged.items()})
    return {f"{TABLES}/{name}": Ragged(t[0], off) for name, t in moments.items() if name != STEPS}


def untouched_rows_after_round(cfg: MethodConfig, weights: Mapping[str, Tensor]) -> Params:
    """Return first weights after a round without data: what rows of unused features become.

    The server's mean needs them for rows that no client has trained.
    """
    if cfg.keep_optimizer:
        return {}
    steps = cfg.schedule.epochs
    return {
        f"weights/{name}": cfg.backend.untouched_rows_after(cfg.training, weights[name], steps)
        for name in cfg.model.first_maps
    }


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
