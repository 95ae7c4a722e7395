"""FedPer: the first layers are averaged, every client keeps its own last ones.

Arivazhagan, Aggarwal, Singh and Choudhary, "Federated learning with personalization layers", 2019
(arXiv:1912.00818), algorithms 1 and 2.

The server sends the base, which is all but the last `private` layers. A selected client trains base
and private layers together and returns the base; the server takes the mean, weighted by training
nodes, or a step of its optimizer towards it. Private layers stay in the client's state from round
to round and never leave it.

What we changed: all clients start from the same private layers, those of the run's initial model,
which the server sends once before round 1; and clients may be selected at random. As in the paper
clients use SGD; by default the server takes a step of Adam along the mean change, as FedOpt does,
where the paper takes the mean (benchmarks/defaults/beside_fedopt.md). With `private=0` nothing is
private, and this is FedOpt, bit for bit; without the server's step FedAvg.

Views: `personalized` scores what a client's training left, its steps on the base and its private
layers, and picks the round. There is no `server` view: a base without private layers is no model.

State of a client: `private/*` (C, ...), `base/*` (C, ...) that its training left, 0 before that,
and what local training keeps. Both are its own model. C: clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass as options_class
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, mistake
from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Shared, Stacked, dense, fields_under, stack
from silograph.evaluation.scoring import personal, received_specs
from silograph.federation.base import WeightedMean
from silograph.federation.field_specs import LOSS, TRAINED, FieldSpec, FieldSpecs
from silograph.federation.messages import Empty, SpecsByConfig
from silograph.methods.base import (
    Caution,
    Method,
    MethodConfig,
    RoundReport,
    ServerState,
    keep_previous_if_not_finite,
)
from silograph.methods.fedavg import FEDOPT
from silograph.methods.local_training import (
    AveragedModel,
    LocalModel,
    sampler_specs,
    untouched_rows_after_round,
    zero_weights,
)
from silograph.methods.ops import Clients, Server, calls, op, program
from silograph.nn.conv import Params
from silograph.nn.fit import stacked_copies

Value = TypeVar("Value")


@options_class(frozen=True, config=STRICT)
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
            f"{private}: nothing would be shared; use method local for clients that train alone",
            **mistake("option-value", "private", private),
        )
    private_layers = layers[len(layers) - private :]
    private_weights = {name: w for name, w in weights.items() if layer_of(name) in private_layers}
    return {name: w for name, w in weights.items() if name not in private_weights}, private_weights


def layer_of(name: str) -> str:
    """Return the layer that a weight belongs to."""
    return name.partition(".")[0]


# --- messages and state --------------------------------------------------------------------------


def weights_of(part: Literal["base", "private"], field: str, form: Any) -> SpecsByConfig:
    """Return specs for annotations: the weights of the base, or of the private layers.

    Args:
        part: which of them.
        field: name of the field that is annotated.
        form: `Shared` or `Stacked`.
    """

    def specs(cfg: MethodConfig[FedPerOptions]) -> FieldSpecs:
        base, private = split(cfg.model.weight_shapes, cfg.options.private)
        shapes = private if part == "private" else base
        return {f"{field}/{name}": FieldSpec(form, shape) for name, shape in shapes.items()}

    return specs


def own_base(cfg: MethodConfig[FedPerOptions]) -> FieldSpecs:
    """Return the specs of the base that a client keeps; none where nothing is private."""
    return weights_of("base", "base", Stacked)(cfg) if cfg.options.private else {}


@dataclass(frozen=True)
class ClientState:
    """A client's own model.

    Attributes:
        private: (C, ...) its private layers.
        base: (C, ...) the base that its training left, 0 before that.
    """

    private: Annotated[Mapping[str, Stacked], weights_of("private", "private", Stacked)]
    base: Annotated[Mapping[str, Stacked], own_base]


@dataclass(frozen=True)
class PrivateLayers:
    """The private layers of the run's initial model."""

    private: Annotated[Mapping[str, Tensor], weights_of("private", "private", Shared)]


@dataclass(frozen=True)
class Base:
    """The server's base."""

    weights: Annotated[Mapping[str, Tensor], weights_of("base", "weights", Shared)]


@dataclass(frozen=True)
class LocalBase:
    """The clients' bases after training; else as `LocalModel`."""

    weights: Annotated[Mapping[str, Stacked | Patched], weights_of("base", "weights", Stacked)]
    nodes: Annotated[Stacked, TRAINED]
    loss: Annotated[Stacked, LOSS]
    received: Annotated[Mapping[str, Stacked], received_specs]
    sampler: Annotated[Mapping[str, Stacked], sampler_specs]


# --- clients -------------------------------------------------------------------------------------


@op(Kind.WEIGHTS)
def begin_private(
    clients: Clients[FedPerOptions], _state: Empty, request: PrivateLayers
) -> tuple[ClientState, Empty]:
    """Set up the clients and keep the first private layers.

    A client that has not trained has a base of zeros, so it is scored as an untrained model.
    """
    clients.begin()
    private = stacked_copies(request.private, clients.block.num_clients)
    zeros = zero_weights(clients.cfg.model, clients.block) if private else {}
    base = {name: w for name, w in zeros.items() if name not in private}
    return ClientState(stack(private), stack(base)), Empty()


@op(Kind.WEIGHTS)
def train_private(
    clients: Clients[FedPerOptions], state: ClientState, request: Base
) -> tuple[ClientState, LocalBase]:
    """Train base and private layers together, and keep the latter."""
    fitted = clients.fit({**request.weights, **state.private})
    trained = LocalModel.of(fitted, clients.block)
    base = {n: w for n, w in trained.weights.items() if n not in state.private}
    private = stack({n: dense(w) for n, w in trained.weights.items() if n in state.private})
    own = {n: w for n, w in fitted.tensors.items() if state.private and n not in state.private}
    new = ClientState(keep_previous_if_not_finite(private, state.private), stack(own))
    return new, LocalBase(base, trained.nodes, trained.loss, trained.received, trained.sampler)


def own_weights(
    cfg: MethodConfig[FedPerOptions], server: Params, state: Mapping[str, Tensor]
) -> Params:
    """Return each client's trained weights, (C, ...); the server's if nothing is private."""
    if not cfg.options.private:
        return server
    weights = fields_under("base", state) | fields_under("private", state)
    return {name: weights[name] for name in cfg.model.weight_shapes}


# --- server --------------------------------------------------------------------------------------


def check(cfg: MethodConfig[FedPerOptions]) -> None:
    """Raise `ConfigError` where no layer would be shared."""
    split(cfg.model.weight_shapes, cfg.options.private)


@calls(begin_private)
def setup(server: Server[FedPerOptions], weights: Params) -> ServerState:
    """Send the first private layers once; the server keeps the base."""
    base, private = split(weights, server.options.private)
    server.call(begin_private, PrivateLayers(private))
    return server_state(server.options, ServerState(base, {}))


def server_state(options: FedPerOptions, of_base: ServerState) -> ServerState:
    """Return the server's state from that of the base, which is a model if nothing is private."""
    assert of_base.weights is not None
    return ServerState(None, {**of_base.weights, **of_base.memory}) if options.private else of_base


def split_state(server: Server[FedPerOptions], state: ServerState) -> tuple[Params, Params]:
    """Return the base, and what the server remembers of its optimizer."""
    if state.weights is not None:
        return state.weights, state.memory
    base, _ = split(dict.fromkeys(server.cfg.model.weight_shapes, ""), server.options.private)
    return {name: state.memory[name] for name in base}, {
        name: t for name, t in state.memory.items() if name not in base
    }


@calls(train_private)
def train_round(
    server: Server[FedPerOptions], state: ServerState
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients, take the mean of their bases."""
    base, memory = split_state(server, state)
    mean = WeightedMean("nodes", untouched_rows_after_round(server.cfg, base))
    average, report = server.average(train_private, Base(base), AveragedModel, mean=mean)
    if average is None:  # no selected client has a training node
        return state, report
    new, report = server.step(ServerState(base, memory), average.weights, report)
    return server_state(server.options, new), report


FEDPER = Method(
    name="fedper",
    title="average of the first layers; every client keeps its own last ones",
    reference="Arivazhagan et al., Federated learning with personalization layers, 2019",
    options=FedPerOptions,
    **program(
        train_round,
        setup=setup,
        state=ClientState,
        server_model=lambda cfg: cfg.options.private == 0,
    ),
    check=check,
    evaluate=personal(),
    aggregates=True,
    server_step=True,
    weighs_classes=True,
    needs=FEDOPT.needs,
    cautions=(
        Caution(
            "behind fedopt where the graph says little about a client's own classes: 2 to 5 points "
            "of validation accuracy on Cora (benchmarks/defaults/beside_fedopt.md)",
            of="labels of nodes",
        ),
    ),
    own_weights=own_weights,
    only_sums=True,
)
