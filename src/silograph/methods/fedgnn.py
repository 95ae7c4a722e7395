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
    """Train, and send a protected reply. In and out: as `train_items`; `share` is 1 or 0."""
    new, reply = train_items(cfg, block, state, inbox, key)

    def draw_changes(rows: SentItemRows, key: Key) -> Tensor:
        own_changes, unknown = rows.change[rows.own], rows.change[rows.pseudo]
        if not len(own_changes):
            return unknown
        draws = normal(key.fold("pseudo", *block.ids), unknown)
        return own_changes.mean(dim=0) + own_changes.std(dim=0, unbiased=False) * draws

    return new, protect_reply(cfg, block, inbox, reply, key, draw_changes)


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
    cfg: MethodConfig[Any],
    block: ClientBlock,
    inbox: Payload,
    reply: Payload,
    key: Key,
    draw_changes: Callable[[SentItemRows, Key], Tensor],
    size: Callable[[Tensor, str], Tensor] | None = None,
) -> dict[str, Stacked]:
    """Return the reply of `train_items` with drawn rows, and clipped changes with noise.

    Args:
        cfg: of a method whose options are a `Protection`.
        block: one client.
        inbox: what it was sent.
        reply: what it would send.
        key: of the op.
        draw_changes: draws the changes of the pseudo rows.
        size: by which noise on a clipped change of a weight of this name is multiplied; None: by 1.
    """
    options: Protection = cfg.options
    key = key.fold("protection")

    def clip_and_add_noise(change: Tensor, client: str, name: str) -> Tensor:
        change = change.clamp(-options.clip, options.clip)
        scale = options.noise if size is None else options.noise * size(change, name)
        return change + scale * laplace(key.fold(client, name), change)

    if ITEM_WEIGHT in inbox:
        rows = item_rows_of(block, reply, options.pseudo)
        rows.change[rows.pseudo] = draw_changes(rows, key)
        reply = replace_item_rows(reply, rows)
    fields = with_all_rows(reply)
    for name, sent_field in inbox.items():
        base = torch.zeros_like(sent_field.t) if name == ITEM_WEIGHT else sent_field.t
        change = fields[name].t - base
        parts = zip(change, block.ids, strict=True)  # draws are a client's, whatever its block
        t = base + torch.stack([clip_and_add_noise(part, client, name) for part, client in parts])
        if name == ITEM_WEIGHT:
            t = t * fields[SHARE].t[..., None]
        fields[name] = Stacked(t)
    return fields


def with_all_rows(reply: Payload) -> dict[str, Stacked]:
    """Return a reply with all rows of its weights."""
    fields = (part.stacked() if isinstance(part, Patched) else part for part in reply.values())
    return dict(zip(reply, (Stacked(part.t) for part in fields), strict=True))


def item_rows_of(block: ClientBlock, reply: Payload, pseudo: int) -> SentItemRows:
    """Return the item rows of a client's reply, its own ones and the pseudo rows it draws."""
    share = reply[SHARE].t[0]
    change = reply[ITEM_WEIGHT].t[0] / share.where(share > 0, 1.0)[:, None]
    other = (share == 0).nonzero()[:, 0]
    draws = Key.of(0).fold("pseudo items", *block.ids).uniform(other)[:, 0]
    return SentItemRows(change, share.nonzero()[:, 0], other[draws.argsort()[:pseudo]])


def replace_item_rows(reply: Payload, rows: SentItemRows) -> dict[str, Stacked]:
    """Return a reply with changes of a client's own and drawn rows, all with a share of 1."""
    share = rows.change.new_zeros(1, len(rows.change))
    share[:, torch.cat([rows.own, rows.pseudo])] = 1
    return {**with_all_rows(reply), ITEM_WEIGHT: Stacked(rows.change[None]), SHARE: Stacked(share)}


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
