"""FedMF: rows of items are averaged over the clients that rate the items, users stay private.

Chai, Wang, Chen and Yang, "Secure federated matrix factorization", IEEE Intelligent Systems 2021,
section 3. Its model is `rating_mf` with `items`.

In a round every client trains factors of its users, which it keeps, and rows of items. It sends how
far each row has moved times the share w of its training ratings that meet the row, and w. The
server adds up rows over clients and divides by the sums of w, so that a row is the mean over who
rated the items; in a mean over all clients, a row that few have would hardly move. All other
weights are averaged as by FedAvg.

What we changed: clients take as many steps as the run says, where the paper sends gradients of one;
a client is a silo with many users, and nothing is encrypted (the paper: homomorphic encryption; its
section 2 shows that plain gradients give ratings away). What the server sees: which rows a silo
has, how many ratings each has, and how they moved. So silos must allow `items`.

With models that have no shared rows this is FedAvg, to the bit. B: rows of items. C: clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Shared, Stacked, dense
from silograph.evaluation.scoring import received_specs
from silograph.federation.base import WeightedMean
from silograph.federation.decoder import Decoder
from silograph.federation.field_specs import LOSS, TRAINED, FieldSpec, FieldSpecs
from silograph.federation.messages import Empty
from silograph.methods.base import AnyMethod, Caution, RoundReport, ServerState
from silograph.methods.fedavg import FEDAVG
from silograph.methods.local_training import (
    LocalModel,
    exact_weights,
    sampler_specs,
    untouched_rows_after_round,
)
from silograph.methods.ops import ClientOp, Clients, Server, calls, op, program
from silograph.nn.shared_items import ITEMS, item_counts


def share_specs(cfg: Any) -> FieldSpecs:
    """Return the spec of the shares, where the model has rows of items."""
    shape = cfg.model.weight_shapes.get(ITEMS)
    return {"share": FieldSpec(Stacked, shape[:1], low=0.0, high=1.0)} if shape else {}


@dataclass(frozen=True)
class SharedModel:
    """The server's weights; those of items have a row for each item."""

    weights: Annotated[Mapping[str, Tensor], exact_weights(Shared)]


@dataclass(frozen=True)
class LocalChange:
    """The clients' models after training; else as `LocalModel`.

    Attributes:
        weights: (C, ...); of items the change of each row times its share.
        share: (C, B) share of a client's training ratings that meet each row.
    """

    weights: Annotated[Mapping[str, Stacked | Patched], exact_weights(Stacked)]
    share: Annotated[Stacked | None, share_specs]
    nodes: Annotated[Stacked, TRAINED]
    loss: Annotated[Stacked, LOSS]
    received: Annotated[Mapping[str, Stacked], received_specs]
    sampler: Annotated[Mapping[str, Stacked], sampler_specs]

    @staticmethod
    def find_problem(reply: "LocalChange", _request: SharedModel, _cfg: Any) -> str | None:
        """Return why the shares of a reply are impossible, or None.

        The server divides by the sum of shares. A share that is no number of ratings would let its
        sender make a row as large as it likes.
        """
        if reply.share is None:
            return None
        share, ratings = reply.share.t, reply.nodes.t[:, None]
        num_ratings = (share * ratings)[share != 0]  # ratings that meet the row
        if not bool((num_ratings > 0.5).all()):  # 1 but for rounding; NaN is none
            return f"shares of 0 or from 1 in {int(ratings.max())} training ratings, got others"
        change = dense(reply.weights[ITEMS])
        if bool((change[share == 0].nan_to_num(0.0) != 0).any()):
            return "no change of rows whose share is 0, got some"
        return None


@dataclass(frozen=True)
class MeanChange:
    """Means over clients, weighted by training ratings; `share` is None without rows of items."""

    weights: Mapping[str, Tensor]
    share: Tensor | None


@op(Kind.WEIGHTS)
def train_items(
    clients: Clients[Any], state: Empty, request: SharedModel
) -> tuple[Empty, LocalChange]:
    """Train, and send the changes of item rows."""
    return state, item_changes(clients, request)


def item_changes(clients: Clients[Any], request: SharedModel) -> LocalChange:
    """Train at clients; return their reply, in which items have changes times shares."""
    block, fitted = clients.block, clients.fit(request.weights)
    reply = LocalChange(**vars(LocalModel.of(fitted, block)), share=None)
    if ITEMS not in request.weights:
        return reply
    base = request.weights[ITEMS]
    change = fitted.tensors[ITEMS] - base
    count = item_counts(block, len(base))[None].to(base.dtype)
    share = count / block.num_train.clamp(min=1)[:, None]
    weights = {**reply.weights, ITEMS: Stacked(change * share[..., None])}
    return replace(reply, weights=weights, share=Stacked(share))


def average_rows(
    server: Server[Any], state: ServerState, train: ClientOp[SharedModel, LocalChange]
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients; take means, of rows over who has them."""
    assert state.weights is not None  # set by init
    shares = {f"weights/{ITEMS}": "share"} if ITEMS in state.weights else {}
    untouched = untouched_rows_after_round(server.cfg, state.weights)
    by_rows = WeightedMean("nodes", untouched, Decoder(shares=shares))
    mean, report = server.average(train, SharedModel(state.weights), MeanChange, mean=by_rows)
    if mean is None:
        return state, report
    weights = dict(mean.weights)
    if mean.share is not None:
        share = mean.share[:, None]
        change = torch.where(share > 0, weights[ITEMS] / share, 0.0)
        weights[ITEMS] = state.weights[ITEMS] + change
    return server.step(state, weights, report)


def row_averaging(train: ClientOp[SharedModel, LocalChange]) -> AnyMethod:
    """Return FedMF whose clients train by another op with the messages of `train_items`."""
    own_round = calls(train)(partial(average_rows, train=train))  # which pickle can write
    return replace(
        FEDAVG,
        **program(own_round),
        small_weights=False,
        aggregates=False,
        weighs_classes=False,
        clips_updates=False,
    )


FEDMF = replace(
    row_averaging(train_items),
    name="fedmf",
    title="average of models; rows of items (--option items) by who has rated them",
    reference="Chai et al., Secure federated matrix factorization, IEEE Intelligent Systems 2021",
    cautions=(
        Caution("for --model rating_mf --option items=ROWS; other models train as by fedavg"),
    ),
)
