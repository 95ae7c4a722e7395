"""FedGNN: rows of items and weights travel with noise, rows of drawn items among them.

Wu, Wu, Cao, Huang and Xie, "FedGNN: Federated graph neural network for privacy-preserving
recommendation", 2021 (arXiv:2102.04925), section 3.3. Its model is `rating_gat` with `items`.

Clients train as in FedMF, and send changes of weights and of rows of items. Before these leave:

- rows of `pseudo` items that the client does not have join them, with changes drawn from the normal
  distribution of the changes of its own rows, column by column; always the same rows;
- every entry is clipped to +-`clip`, and gets Laplace noise of scale `noise`, which is differential
  privacy of 2 clip / noise for an entry in a round.

What we changed: a client is a silo with many users, so the paper's extension of a user's graph by a
third party is not needed; what is clipped is the change of a round, which is a gradient for one
step only; rows do not tell how many ratings they rest on.

In simulation only: draws come from the run's key, which a server knows, so it could take the noise
off. B: rows of items. C: clients.
"""

from collections.abc import Callable
from dataclasses import field, replace
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Stacked, dense, stack
from silograph.core.setting_values import log
from silograph.federation.messages import Empty
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import Caution, OnlySimulated
from silograph.methods.fedmf import LocalChange, SharedModel, item_changes, row_averaging
from silograph.methods.ops import Clients, op
from silograph.nn.shared_items import ITEMS

SIMULATED = OnlySimulated("not to know the run's key, from which clients draw noise")


@dataclass(frozen=True, config=STRICT)
class ProtectionOptions:
    """The help texts are the documentation of the fields; the defaults are those of the paper."""

    pseudo: Annotated[int, Field(ge=0)] = field(
        default=1000, metadata={"help": "items that a client does not have and sends rows of"}
    )
    clip: Annotated[float, Field(gt=0)] = field(
        default=0.1, metadata={"help": "largest change of an entry in a round"}
    )
    noise: Annotated[float, Field(ge=0)] = field(
        default=0.2,
        metadata={"help": "scale of the Laplace noise on every entry", "tune": log(1e-4, 1.0)},
    )


@op(Kind.WEIGHTS)
def train_protected(
    clients: Clients[ProtectionOptions], state: Empty, request: SharedModel
) -> tuple[Empty, LocalChange]:
    """Train, and send a protected reply, as `train_items`; `share` is 1 or 0."""
    block, reply = clients.block, item_changes(clients, request)

    def draw_changes(rows: SentItemRows, key: Key) -> Tensor:
        own_changes, unknown = rows.change[rows.own], rows.change[rows.pseudo]
        if not len(own_changes):
            return unknown
        draws = normal(key.fold("pseudo", *block.ids), unknown)
        return own_changes.mean(dim=0) + own_changes.std(dim=0, unbiased=False) * draws

    return state, protect_reply(clients, request, reply, draw_changes)


class SentItemRows(NamedTuple):
    """Item rows of one client: changes (B, D) of all, its own rows, and drawn ones."""

    change: Tensor
    own: Tensor
    pseudo: Tensor


class Protection(Protocol):
    """The options that protect a client's reply."""

    pseudo: int
    clip: float
    noise: float


def protect_reply(
    clients: Clients[Any],
    request: SharedModel,
    reply: LocalChange,
    draw_changes: Callable[[SentItemRows, Key], Tensor],
    size: Callable[[Tensor, str], Tensor] | None = None,
) -> LocalChange:
    """Return the reply of `train_items` with drawn rows, and clipped changes with noise.

    Args:
        clients: one client, of a method whose options are a `Protection`.
        request: what it was sent.
        reply: what it would send.
        draw_changes: draws the changes of the pseudo rows.
        size: by which noise on a clipped change of a weight of this name is multiplied; None: by 1.
    """
    options: Protection = clients.options
    key, ids = clients.key.fold("protection"), clients.block.ids

    def clip_and_add_noise(change: Tensor, client: str, name: str) -> Tensor:
        change = change.clamp(-options.clip, options.clip)
        scale = options.noise if size is None else options.noise * size(change, name)
        # The draw is the same whatever else is sent: by the name on the wire.
        return change + scale * laplace(key.fold(client, f"weights/{name}"), change)

    weights = {name: dense(w) for name, w in reply.weights.items()}
    share = None if reply.share is None else reply.share.t
    if share is not None:
        rows = item_rows_of(clients.block, weights[ITEMS][0], share[0], options.pseudo)
        rows.change[rows.pseudo] = draw_changes(rows, key)
        share = torch.zeros_like(share)
        share[:, torch.cat([rows.own, rows.pseudo])] = 1
        weights[ITEMS] = rows.change[None]
    for name, sent in request.weights.items():
        base = torch.zeros_like(sent) if name == ITEMS else sent
        parts = zip(weights[name] - base, ids, strict=True)  # of each client, whatever its block
        t = base + torch.stack([clip_and_add_noise(part, client, name) for part, client in parts])
        weights[name] = t if share is None or name != ITEMS else t * share[..., None]
    return replace(reply, weights=stack(weights), share=None if share is None else Stacked(share))


def item_rows_of(block: ClientBlock, changes: Tensor, share: Tensor, pseudo: int) -> SentItemRows:
    """Return the item rows of a client's reply, its own ones and the pseudo rows it draws."""
    change = changes / share.where(share > 0, 1.0)[:, None]
    other = (share == 0).nonzero()[:, 0]
    draws = Key.of(0).fold("pseudo items", *block.ids).uniform(other)[:, 0]
    return SentItemRows(change, share.nonzero()[:, 0], other[draws.argsort()[:pseudo]])


def laplace(key: Key, like: Tensor) -> Tensor:
    """Return draws of the Laplace distribution of scale 1, in the shape of a tensor."""
    u = key.matrix(like.numel(), 1).view(like.shape).to(like.device) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs())).clamp(-50, 50).to(like.dtype)


def normal(key: Key, like: Tensor) -> Tensor:
    """Return draws of the normal distribution of variance 1, in the shape of a tensor."""
    u = key.matrix(2, like.numel()).to(like.device)
    return ((-2 * (1 - u[0]).log()).sqrt() * (2 * torch.pi * u[1]).cos()).view(like.shape).to(like)


FEDGNN = replace(
    row_averaging(train_protected),
    name="fedgnn",
    title="average of clipped changes with noise, and of rows of items with drawn ones among them",
    reference="Wu et al., FedGNN: Federated graph neural network for privacy-preserving "
    "recommendation, 2021",
    options=ProtectionOptions,
    setting=SIMULATED,
    cautions=(
        Caution("in simulation only; the paper's noise is twice as large as the largest change"),
    ),
)
