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
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.key import Key
from silograph.core.payload import Patched, Payload, Stacked, State
from silograph.core.ranges import log
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import MethodConfig, OnlySimulated
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
    key, o = key.fold("protection"), cfg.options

    def noised(change: Tensor, client: str, name: str) -> Tensor:
        return change.clamp(-o.clip, o.clip) + o.noise * laplace(key.fold(client, name), change)

    if ITEM_WEIGHT in inbox:
        change, own, pseudo = rows_of(block, reply, o.pseudo)
        if len(own):
            drawn = normal(key.fold("pseudo", *block.ids), change[pseudo])
            spread = change[own].std(dim=0, unbiased=False)
            change[pseudo] = change[own].mean(dim=0) + spread * drawn
        reply = with_rows(reply, change, own, pseudo)
    return new, protected(block, inbox, reply, noised)


def protected(
    block: ClientBlock,
    inbox: Payload,
    reply: Payload,
    noised: Callable[[Tensor, str, str], Tensor],
) -> dict[str, Stacked]:
    """Return a reply whose changes of weights went through a function."""
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


def rows_of(block: ClientBlock, reply: Payload, pseudo: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return changes of all rows (B, D), rows that a client has, and rows that it pretends to."""
    share = reply[SHARE].t[0]
    change = reply[ITEM_WEIGHT].t[0] / share.where(share > 0, 1.0)[:, None]
    other = (share == 0).nonzero()[:, 0]
    draws = Key.of(0).fold("pseudo items", *block.ids).uniform(other)[:, 0]
    return change, share.nonzero()[:, 0], other[draws.argsort()[:pseudo]]


def with_rows(reply: Payload, change: Tensor, *rows: Tensor) -> dict[str, Stacked]:
    """Return a reply with changes (B, D) of some rows, all of which count alike."""
    share = change.new_zeros(1, len(change))
    share[:, torch.cat(rows)] = 1
    return {**whole(reply), ITEM_WEIGHT: Stacked(change[None]), SHARE: Stacked(share)}


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
    caution="in simulation only; the paper's noise is twice as large as the largest change",
)
