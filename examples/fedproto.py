"""FedProto: clients keep their models, and exchange the mean embedding of each class.

Shows: a method without a server model, whose messages fill a term of the local loss.
Tan et al., "FedProto: Federated prototype learning across heterogeneous clients", AAAI 2022, eq. 5
to 7; here all training nodes count alike, and clients predict by their last layer.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import silograph as sg
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

    def of(self, clients: Tensor) -> "Pull":  # noqa: ARG002
        """Return the same term: all clients have the same prototypes."""
        return self

    def flops(self, width: int) -> float:
        """Return the operations of a mean square, and as many on the way back."""
        return 6.0 * width

    def __call__(self, nodes: m.StepNodes) -> Tensor:
        """Return how far each node is from the prototype of its class."""
        away = nodes.embeddings - self.mean[nodes.y, :-1]
        return self.weight * self.mean[nodes.y, -1] * away.square().mean(dim=1)


def train_proto(cfg: Any, block: m.ClientBlock, state: m.State, inbox: Any, key: m.Key) -> Any:
    """Train the own weights; tell sums of embeddings and of nodes by class, over all nodes."""
    known = m.under("proto", inbox).values()  # none in the first round
    cfg = replace(cfg, losses=tuple(Pull(cfg.options.pull, mean) for mean in known))
    fitted, new = m.train_from(cfg, block, state, m.under("weights", state), key)
    rows, train = m.embeddings(cfg, block, state, fitted.tensors), block.split.train.nonzero()[:, 0]
    client = block.client[train]
    z = rows.t[train + (rows.off - block.off)[client]]  # clients may have fetched further rows
    z = torch.cat([z, torch.ones_like(z[:, :1])], dim=1) / block.num_train[client, None]
    sums = z.new_zeros(block.num_clients, cfg.model.outputs, z.shape[1])
    sums.index_put_((client, block.y[train]), z, accumulate=True)
    new = {**new, **m.stacked("weights", fitted.tensors)}
    return new, {**m.reply_fields(fitted, block), "proto/mean": m.Stacked(sums)}


def fit_round(fed: m.Federation, cfg: Any, state: Any, t: int, key: m.Key) -> Any:
    """Send prototypes, train, and take the means of the classes that somebody has trained on."""
    inbox, what = m.shared("proto", state.memory), m.Kind.EMBEDDINGS
    reply, report = m.local_round(fed, cfg, train_proto, inbox, what, t, key)
    if reply is None:
        return state, report
    sums = reply["proto/mean"].t
    mean = torch.where(sums[:, -1:] > 0, sums / sums[:, -1:], state.memory.get("mean", sums))
    return replace(state, memory={"mean": mean}), report


LOCAL: Any = m.LOCAL
NEEDS = replace(LOCAL.needs, losses=lambda options: (Pull(options.pull, torch.empty(0)),))
METHOD = replace(LOCAL, name="fedproto", title="local models drawn to common class means")
METHOD = replace(METHOD, options=ProtoOptions, round=fit_round, needs=NEEDS, calls=None)

if __name__ == "__main__":
    print(graph := sg.load("digits"))
    print(sg.run(graph, method=METHOD, clients=4, rounds=5, local_epochs=3, hidden=32))
