"""FeSoG: as FedGNN, with labels for drawn items, and noise by the size of what is sent.

Liu, Yang, Fan, Peng and Yu, "Federated social recommendation with graph neural network", ACM TIST
2022, section 4.4. Its model is attention over ratings and trust; the one here is `rating_gat` with
`items`, whose attention sees the transition probabilities of edges, where the paper has vectors of
relations.

What differs from FedGNN (`silograph.methods.fedgnn`):

- a drawn item of the client's `pseudo` ones gets a rating by one of its users: what is predicted,
  rounded. Its row changes as by a step of the run's rate on the squared error of that rating;
- the noise on the entries of a tensor has the scale `noise` times the mean size of its entries.

What we changed, besides what FedGNN changes: predictions of drawn items come from embeddings and
biases, without convolutions. In simulation only, for FedGNN's reason. B: rows of items.
"""

from dataclasses import field, replace
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import State
from silograph.core.setting_values import log
from silograph.federation.messages import Empty
from silograph.graph.block.block import UNSEEN, ClientBlock
from silograph.methods.base import Caution
from silograph.methods.fedgnn import SIMULATED, SentItemRows, protect_reply
from silograph.methods.fedmf import LocalChange, SharedModel, item_changes, row_averaging
from silograph.methods.ops import Clients, op
from silograph.nn.fit import dtype_of
from silograph.nn.optim import SGD, Adam
from silograph.nn.rating_steps import rating_graph
from silograph.nn.shared_items import BIAS, EMBEDDING, ITEMS


@dataclass(frozen=True, config=STRICT)
class FeSoGOptions:
    """The help texts are the documentation of the fields."""

    pseudo: Annotated[int, Field(ge=0)] = field(
        default=1000, metadata={"help": "items that a client does not have and sends rows of"}
    )
    clip: Annotated[float, Field(gt=0)] = field(
        default=0.1, metadata={"help": "largest change of an entry in a round"}
    )
    noise: Annotated[float, Field(ge=0)] = field(
        default=0.1,
        metadata={
            "help": "scale of the Laplace noise, relative to the mean size of a tensor's changes",
            "tune": log(1e-4, 1.0),
        },
    )


@op(Kind.WEIGHTS)
def train_labeled(
    clients: Clients[FeSoGOptions], state: Empty, request: SharedModel
) -> tuple[Empty, LocalChange]:
    """Train, and send a protected reply, as `train_items`; `share` is 1 or 0."""
    reply, block, optimizer = item_changes(clients, request), clients.block, clients.cfg.optimizer

    def draw_changes(rows: SentItemRows, key: Key) -> Tensor:
        base = request.weights[ITEMS][rows.pseudo]
        assert isinstance(optimizer, SGD | Adam)  # all that a run can name
        own_key = key.fold(*block.ids)
        return -optimizer.lr * labeled_gradients(block, clients.state, base, own_key)

    return state, protect_reply(clients, request, reply, draw_changes, mean_size)


def mean_size(change: Tensor, name: str) -> Tensor:
    """Return the mean size of a tensor's entries, of items in the rows that are sent."""
    if name != ITEMS:
        return change.abs().mean()
    is_sent = (change != 0).any(dim=-1, keepdim=True)
    return change.abs().sum() / (is_sent.sum() * change.shape[-1]).clamp(min=1)


def labeled_gradients(block: ClientBlock, state: State, rows: Tensor, key: Key) -> Tensor:
    """Return gradients of squared errors of rounded predictions, of rows (k, D + 1)."""
    graph = rating_graph(block, dtype_of(block))
    slots = graph.slot[~graph.is_item & (graph.slot >= UNSEEN)]
    if not len(slots):
        return torch.zeros_like(rows)
    draw = key.fold("users").matrix(len(rows), 1)[:, 0].to(rows.device)
    slot = slots[(draw * len(slots)).long()]
    x, bias = (state[f"tables/{name}"].t[slot] for name in (EMBEDDING, BIAS))
    predictions = graph.mean + bias[:, 0] + (x * rows[:, :-1]).sum(dim=1) + rows[:, -1]
    return (
        2
        * (predictions - predictions.round())[:, None]
        * torch.cat([x, torch.ones_like(bias)], dim=1)
    )


FESOG = replace(
    row_averaging(train_labeled),
    name="fesog",
    title="as fedgnn, with ratings for drawn items, and noise by the size of changes",
    reference="Liu et al., Federated social recommendation with graph neural network, ACM TIST "
    "2022",
    options=FeSoGOptions,
    setting=SIMULATED,
    cautions=(Caution("in simulation only"),),
)
