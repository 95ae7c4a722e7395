"""FedProto: clients keep their models, and exchange the mean embedding of each class.

Shows: a method without a server model, whose messages fill a term of the local loss.
Tan et al., "FedProto: Federated prototype learning across heterogeneous clients", AAAI 2022, eq. 5
to 7; here all training nodes count alike, and clients predict by their last layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from silograph import methods as m


@dataclass(frozen=True)
class ProtoOptions:
    """The method's option."""

    pull: float = field(default=1.0, metadata={"help": "weight of the distance to prototypes"})


@dataclass(frozen=True, eq=False)
class Pull:
    """The term; `mean` (K, D + 1) has the prototypes, then 1, or 0 for classes without one."""

    weight: float
    mean: Tensor

    def of(self, clients: Tensor) -> "Pull":
        """Return the same term: all clients have the same prototypes."""
        return self

    def flops(self, width: int) -> float:
        """Return the operations of a mean square, and as many on the way back."""
        return 6.0 * width

    def __call__(self, nodes: m.StepNodes) -> Tensor:
        """Return how far each node is from the prototype of its class."""
        away = nodes.embeddings - self.mean[nodes.y, :-1]
        return self.weight * self.mean[nodes.y, -1] * away.square().mean(dim=1)


def class_rows(form: Any) -> Callable[[Any], m.FieldSpec]:
    """Return the spec of an embedding and one more number for each class."""
    return lambda cfg: m.FieldSpec(form, (cfg.model.outputs, cfg.model.stages[-1].inputs + 1))


@dataclass(frozen=True)
class Prototypes:
    """Mean embedding of each class, then 1, or 0 for classes without one; (K, D + 1)."""

    mean: Annotated[Tensor, class_rows(m.Shared)]


@dataclass(frozen=True)
class ClassSums:
    """Sums of embeddings and of nodes by class over all nodes, (C, K, D + 1); else as FedAvg."""

    sums: Annotated[m.Stacked, class_rows(m.Stacked)]
    nodes: Annotated[m.Stacked, m.TRAINED]
    loss: Annotated[m.Stacked, m.LOSS]


@dataclass(frozen=True)
class MeanSums:
    """The mean of the clients' sums."""

    sums: Tensor


@m.op(m.Kind.EMBEDDINGS)
def train_proto(
    clients: m.Clients[ProtoOptions], state: m.OwnModel, request: Prototypes
) -> tuple[m.OwnModel, ClassSums]:
    """Train the own weights; send sums of embeddings and of nodes by class."""
    cfg, block = clients.cfg, clients.block
    cfg = replace(cfg, losses=(Pull(cfg.options.pull, request.mean),))
    fitted = clients.fit({name: w.t for name, w in state.weights.items()}, cfg)
    rows, train = clients.embeddings(fitted.tensors), block.split.train.nonzero()[:, 0]
    client = block.client[train]
    z = rows.t[train + (rows.off - block.off)[client]]  # clients may have fetched further rows
    z = torch.cat([z, torch.ones_like(z[:, :1])], dim=1) / block.num_train[client, None]
    sums = z.new_zeros(block.num_clients, cfg.model.outputs, z.shape[1])
    sums.index_put_((client, block.y[train]), z, accumulate=True)
    reply = ClassSums(m.Stacked(sums), m.Stacked(block.num_train), m.Stacked(fitted.loss))
    return m.OwnModel(m.stack(fitted.tensors)), reply


@m.calls(m.begin_own)
def setup(server: m.Server[ProtoOptions], weights: m.Params) -> m.ServerState:
    """Send the initial model; no class has a prototype."""
    server.call(m.begin_own, m.InitialModel(weights))
    shape: Any = class_rows(m.Shared)(server.cfg).shape
    return m.ServerState(None, {"mean": next(iter(weights.values())).new_zeros(shape)})


@m.calls(train_proto)
def train_round(
    server: m.Server[ProtoOptions], state: m.ServerState
) -> tuple[m.ServerState, m.RoundReport]:
    """Send prototypes, train, and take the means of the classes that somebody has trained on."""
    known = state.memory["mean"]
    new, report = server.average(train_proto, Prototypes(known), MeanSums)
    if new is None:
        return state, report
    mean = torch.where(new.sums[:, -1:] > 0, new.sums / new.sums[:, -1:], known)
    return m.ServerState(None, {"mean": mean}), report


LOCAL: Any = m.LOCAL
NEEDS = replace(LOCAL.needs, losses=lambda options: (Pull(options.pull, torch.empty(0)),))
METHOD = replace(LOCAL, name="fedproto", title="local models drawn to common class means")
METHOD = replace(METHOD, options=ProtoOptions, needs=NEEDS)
METHOD = replace(
    METHOD, **m.program(train_round, setup=setup, state=m.OwnModel, server_model=False)
)
