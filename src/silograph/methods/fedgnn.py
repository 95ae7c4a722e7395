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

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.core.payload import Patched, Payload, Stacked, State
from silograph.core.setting_values import log
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import Caution, MethodConfig, OnlySimulated
from silograph.methods.fedmf import ITEM_WEIGHT, SHARE, row_averaging, train_items

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


def train_protected(
    cfg: MethodConfig[ProtectionOptions], block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Train, and send what is protected. In and out: as `train_items`; `share` is 1 or 0."""
    new, reply = train_items(cfg, block, state, inbox, key)

    def drawn(rows: SentItemRows, key: Key) -> Tensor:
        own, unknown = rows.change[rows.own], rows.change[rows.pseudo]
        if not len(own):
            return unknown
        draws = normal(key.fold("pseudo", *block.ids), unknown)
        return own.mean(dim=0) + own.std(dim=0, unbiased=False) * draws

    return new, protected(cfg, block, inbox, reply, key, drawn)


class SentItemRows(NamedTuple):
    """SentItemRows of items of one client: changes (B, D) of all, its own rows, and drawn ones."""

    change: Tensor
    own: Tensor
    pseudo: Tensor


class Protection(Protocol):
    """What protects a client's reply, as options."""

    pseudo: int
    clip: float
    noise: float


def protected(
    cfg: MethodConfig[Any],
    block: ClientBlock,
    inbox: Payload,
    reply: Payload,
    key: Key,
    drawn: Callable[[SentItemRows, Key], Tensor],
    size: Callable[[Tensor, str], Tensor] | None = None,
) -> dict[str, Stacked]:
    """Return the reply of `train_items` with drawn rows, and clipped changes with noise.

    Args:
        cfg: of a method whose options are a `Protection`.
        block: one client.
        inbox: what it was sent.
        reply: what it would send.
        key: of the op.
        drawn: changes of the drawn rows.
        size: by which noise on a clipped change of a weight of this name is multiplied; None: by 1.
    """
    o: Protection = cfg.options
    key = key.fold("protection")

    def noised(change: Tensor, client: str, name: str) -> Tensor:
        change = change.clamp(-o.clip, o.clip)
        scale = o.noise if size is None else o.noise * size(change, name)
        return change + scale * laplace(key.fold(client, name), change)

    if ITEM_WEIGHT in inbox:
        rows = rows_of(block, reply, o.pseudo)
        rows.change[rows.pseudo] = drawn(rows, key)
        reply = with_rows(reply, rows)
    fields = whole(reply)
    for name, sent in inbox.items():
        base = torch.zeros_like(sent.t) if name == ITEM_WEIGHT else sent.t
        change = fields[name].t - base
        each = zip(change, block.ids, strict=True)  # draws are a client's, whatever its block
        t = base + torch.stack([noised(part, client, name) for part, client in each])
        if name == ITEM_WEIGHT:
            t = t * fields[SHARE].t[..., None]
        fields[name] = Stacked(t)
    return fields


def whole(reply: Payload) -> dict[str, Stacked]:
    """Return a reply with all rows of its weights."""
    found = (part.stacked() if isinstance(part, Patched) else part for part in reply.values())
    return dict(zip(reply, (Stacked(part.t) for part in found), strict=True))


def rows_of(block: ClientBlock, reply: Payload, pseudo: int) -> SentItemRows:
    """Return what a client's reply says of rows of items, and which rows it draws."""
    share = reply[SHARE].t[0]
    change = reply[ITEM_WEIGHT].t[0] / share.where(share > 0, 1.0)[:, None]
    other = (share == 0).nonzero()[:, 0]
    draws = Key.of(0).fold("pseudo items", *block.ids).uniform(other)[:, 0]
    return SentItemRows(change, share.nonzero()[:, 0], other[draws.argsort()[:pseudo]])


def with_rows(reply: Payload, rows: SentItemRows) -> dict[str, Stacked]:
    """Return a reply with changes of a client's own and drawn rows, all of which count alike."""
    share = rows.change.new_zeros(1, len(rows.change))
    share[:, torch.cat([rows.own, rows.pseudo])] = 1
    return {**whole(reply), ITEM_WEIGHT: Stacked(rows.change[None]), SHARE: Stacked(share)}


def laplace(key: Key, like: Tensor) -> Tensor:
    """Return draws of the Laplace distribution of scale 1, in the shape of a tensor."""
    u = key.matrix(like.numel(), 1).view(like.shape).to(like.device) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs())).clamp(-50, 50).to(like.dtype)


def normal(key: Key, like: Tensor) -> Tensor:
    """Return draws of the normal distribution of variance 1, in the shape of a tensor."""
    u = key.matrix(2, like.numel()).to(like.device)
    return ((-2 * (1 - u[0]).log()).sqrt() * (2 * torch.pi * u[1]).cos()).view(like.shape).to(like)


FEDGNN = dataclasses.replace(
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
