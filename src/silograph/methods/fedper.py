"""FedPer: the first layers are averaged, every client keeps its own last ones.

Arivazhagan, Aggarwal, Singh and Choudhary, "Federated learning with personalization layers", 2019
(arXiv:1912.00818), algorithms 1 and 2.

The server sends the base, which is all but the last `private` layers. A selected client trains base
and private layers together and returns the base; the server takes the mean, weighted by training
nodes. Private layers stay in the client's state from round to round and never leave it.

What we changed: all clients start from the same private layers, those of the run's initial model,
which the server sends once before round 1; and clients may be selected at random. The optimizer is
FedAvg's (Adam of rate 0.01, built anew every round), where the paper uses SGD. With `private=0`
nothing is private, and this is FedAvg, bit for bit.

Views: `personalized` scores what a client's training left, its steps on the base and its private
layers, and picks the round. There is no `server` view: a base without private layers is no model.

State of a client: `private/*` (C, ...), `base/*` (C, ...) that its training left, 0 before that,
and what local training keeps. Both are its own model. C: clients.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, State, below, state_of, under
from silograph.evaluation.scoring import personal
from silograph.federation.base import Federation, WeightedMean
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.federation.program import Call, Calls, Steps
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import (
    Caution,
    Method,
    MethodConfig,
    RoundReport,
    ServerState,
    keep_previous_if_not_finite,
)
from silograph.methods.local_training import (
    begin,
    local_round,
    local_steps,
    prefix_fields,
    shared,
    stacked,
    start_from,
    state_specs,
    train_from,
    trained,
    untouched_rows_after_round,
    zero_weights,
)
from silograph.nn.conv import Params
from silograph.nn.fit import stacked_copies

PRIVATE, BASE = "private", "base"  # begin the names of what a client keeps
Value = TypeVar("Value")
Form = type[Shared] | type[Stacked]


@dataclass(frozen=True, config=STRICT)
class FedPerOptions:
    """The help text is the documentation of the field."""

    private: Annotated[int, Field(ge=0)] = field(
        default=1,
        metadata={
            "help": "how many of the last layers every client keeps for itself; 0 is FedAvg",
        },
    )


def split(weights: Mapping[str, Value], private: int) -> tuple[dict[str, Value], dict[str, Value]]:
    """Return the weights of the base, and those of the last `private` layers.

    A layer is what the first parts of names say: `1` in `1.weight`; of a module, a direct child.

    Raises:
        ConfigError: no layer would be shared.
    """
    layers = list(dict.fromkeys(map(layer_of, weights)))
    if private >= len(layers):
        raise ConfigError(
            f"option private: expected less than the number of layers, {len(layers)}, got "
            f"{private}: nothing would be shared; use method local for clients that train alone"
        )
    private_layers = layers[len(layers) - private :]
    private_weights = {name: w for name, w in weights.items() if layer_of(name) in private_layers}
    return {name: w for name, w in weights.items() if name not in private_weights}, private_weights


def layer_of(name: str) -> str:
    """Return the layer that a weight belongs to."""
    return name.partition(".")[0]


def begin_private(
    cfg: MethodConfig[FedPerOptions], block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Set up the state and keep the first private layers. In: `private/*` shared. Out: nothing.

    A client that has not trained has a base of zeros, so it is scored as an untrained model.
    """
    new, reply = begin(cfg, block, state, inbox, key)
    private_weights = stacked_copies(under(PRIVATE, inbox), block.num_clients)
    base = zero_weights(cfg.model, block)
    base = {name: w for name, w in base.items() if private_weights and name not in private_weights}
    return {**new, **stacked(PRIVATE, private_weights), **stacked(BASE, base)}, reply


def train_private(
    cfg: MethodConfig[FedPerOptions], block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Train base and private layers, keep the latter.

    In: `weights/*` of the base. Out: the same (C, ...), `nodes` (C,) training nodes, `loss` (C,).
    """
    private_weights = {name: Stacked(t) for name, t in under(PRIVATE, state).items()}
    start = {**start_from("weights", inbox), **private_weights}
    fitted, new = train_from(cfg, block, state, start, key)
    reply = trained(fitted, block)
    trained_private = {name: reply.pop(f"weights/{name}") for name in private_weights}
    base = {
        name: w
        for name, w in fitted.tensors.items()
        if private_weights and name not in private_weights
    }
    private = keep_previous_if_not_finite(state_of(prefix_fields(PRIVATE, trained_private)), state)
    return {**new, **private, **stacked(BASE, base)}, reply


def own_weights(
    cfg: MethodConfig[FedPerOptions], server: Params, state: Mapping[str, Tensor]
) -> Params:
    """Return each client's trained weights, (C, ...); the server's if nothing is private."""
    if not cfg.options.private:
        return server
    weights = below(BASE, state) | below(PRIVATE, state)
    return {name: weights[name] for name in cfg.model.weight_shapes}


def init(
    fed: Federation, cfg: MethodConfig[FedPerOptions], weights: Params, key: Key
) -> ServerState:
    """Send the first private layers once; the server keeps the base."""
    base, private_weights = split(weights, cfg.options.private)
    fed.call(begin_private, shared(PRIVATE, private_weights), what=Kind.WEIGHTS, key=key)
    return server_state(cfg, base)


def check(cfg: MethodConfig[FedPerOptions]) -> None:
    """Raise `ConfigError` where no layer would be shared."""
    split(cfg.model.weight_shapes, cfg.options.private)


def server_state(cfg: MethodConfig[FedPerOptions], base: Params) -> ServerState:
    """Return the state of a server that has this base, which is a model if nothing is private."""
    return ServerState(None, base) if cfg.options.private else ServerState(base, {})


def fit_round(
    fed: Federation, cfg: MethodConfig[FedPerOptions], state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients, take the mean of their bases."""
    base = state.memory if state.weights is None else state.weights
    inbox, mean = (
        shared("weights", base),
        WeightedMean("nodes", untouched_rows_after_round(cfg, base)),
    )
    reply, report = local_round(fed, cfg, train_private, inbox, Kind.WEIGHTS, t, key, mean)
    if reply is None:
        return state, report
    return server_state(cfg, under("weights", reply)), report


def specs(cfg: MethodConfig[FedPerOptions], form: Form) -> tuple[FieldSpecs, FieldSpecs]:
    """Return the specs of the base's weights, and of the private ones."""
    base, private_shapes = split(cfg.model.weight_shapes, cfg.options.private)
    return named_specs("weights", base, form), named_specs(PRIVATE, private_shapes, form)


def named_specs(prefix: str, shapes: Mapping[str, tuple[int, ...]], form: Form) -> FieldSpecs:
    """Return the specs of fields `prefix/name`."""
    return {f"{prefix}/{name}": FieldSpec(form, shape) for name, shape in shapes.items()}


def setup_steps(cfg: MethodConfig[FedPerOptions], key: Key) -> Steps:
    """Return the call of `init`."""
    return Call(begin_private, Kind.WEIGHTS, key, specs(cfg, Shared)[1])


def client_state_specs(cfg: MethodConfig[FedPerOptions]) -> FieldSpecs:
    """Return the specs of a client's state between rounds."""
    base, private_shapes = split(cfg.model.weight_shapes, cfg.options.private)
    bases = named_specs(BASE, base, Stacked) if private_shapes else {}
    return {**state_specs(cfg), **bases, **named_specs(PRIVATE, private_shapes, Stacked)}


def round_steps(cfg: MethodConfig[FedPerOptions], t: int, key: Key) -> Steps:
    """Return the call of `fit_round`."""
    inbox_specs, reply_specs = specs(cfg, Shared)[0], specs(cfg, Stacked)[0]
    return local_steps(cfg, train_private, inbox_specs, reply_specs, Kind.WEIGHTS, t, key)


CALLS = Calls(
    setup=setup_steps,
    round=round_steps,
    state=client_state_specs,
    server_model=lambda cfg: cfg.options.private == 0,
)

FEDPER = Method(
    name="fedper",
    title="average of the first layers; every client keeps its own last ones",
    reference="Arivazhagan et al., Federated learning with personalization layers, 2019",
    options=FedPerOptions,
    init=init,
    round=fit_round,
    check=check,
    evaluate=personal(),
    calls=CALLS,
    aggregates=True,
    cautions=(
        Caution(
            "clients train with adam, as for fedavg; on Photo and Coauthor-CS the result is far "
            "behind local, and on Photo --optimizer sgd --local-epochs 10 learns",
            of="labels of nodes",
        ),
    ),
    own_weights=own_weights,
)
