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

import dataclasses
from typing import Any

import torch

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Patched, Payload, Shared, Stacked, State, under
from silograph.exchange.passes import weight_specs
from silograph.federation.base import Federation, Op, WeightedMean
from silograph.federation.decoder import Decoder
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.federation.program import Steps
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import AnyMethod, Caution, MethodConfig, RoundReport, ServerState
from silograph.methods.fedavg import FEDAVG
from silograph.methods.local_training import (
    TRAIN_CALLS,
    local_round,
    local_steps,
    shared,
    start_from,
    train_from,
    trained,
    untouched_rows_after_round,
)
from silograph.nn.shared_items import ITEMS, item_counts

SHARE = "share"  # w of every row
ITEM_WEIGHT = f"weights/{ITEMS}"


def train_items(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Train, and send the changes of item rows.

    In: `weights/*` shared. Out: `weights/*` (C, ...), of items their change times `share` (C, B),
    `nodes` (C,) training ratings, `loss` (C,).
    """
    fitted, new = train_from(cfg, block, state, start_from("weights", inbox), key)
    reply: dict[str, Field] = {**trained(fitted, block)}
    if ITEM_WEIGHT not in inbox:
        return new, reply
    base = inbox[ITEM_WEIGHT].t
    change = fitted.tensors[ITEMS] - base
    count = item_counts(block, len(base))[None].to(base.dtype)
    share = count / block.num_train.clamp(min=1)[:, None]
    item_fields = {ITEM_WEIGHT: Stacked(change * share[..., None]), SHARE: Stacked(share)}
    return new, {**reply, **item_fields}


def fit_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key, op: Op = train_items
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients; take means, of rows over who has them."""
    assert state.weights is not None  # set by init
    inbox = shared("weights", state.weights)
    shares = {ITEM_WEIGHT: SHARE} if ITEMS in state.weights else {}
    mean = WeightedMean(
        "nodes", untouched_rows_after_round(cfg, state.weights), Decoder(shares=shares)
    )
    reply, report = local_round(fed, cfg, op, inbox, Kind.WEIGHTS, t, key, mean)
    if reply is None:
        return state, report
    weights = under("weights", reply)
    if ITEMS in weights:
        share = reply[SHARE].t[:, None]
        change = torch.where(share > 0, weights[ITEMS] / share, 0.0)
        weights[ITEMS] = state.weights[ITEMS] + change
    return ServerState(weights, {}), report


def row_averaging(op: Op) -> AnyMethod:
    """Return FedMF whose clients train by another op with the messages of `train_items`."""

    def round_of(
        fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
    ) -> tuple[ServerState, RoundReport]:
        return fit_round(fed, cfg, state, t, key, op)

    def steps(cfg: MethodConfig, t: int, key: Key) -> Steps:
        inbox_specs, reply_specs = (weight_specs(cfg.model, form) for form in (Shared, Stacked))
        reply_specs = {**reply_specs, **share_specs(cfg)}
        return local_steps(cfg, op, inbox_specs, reply_specs, Kind.WEIGHTS, t, key, share_problem)

    calls = dataclasses.replace(TRAIN_CALLS, round=steps)
    return dataclasses.replace(
        FEDAVG,
        round=round_of,
        calls=calls,
        small_weights=False,
        aggregates=False,
        scores_on_receipt=True,
    )


def share_problem(_: Payload, reply: Payload) -> str | None:
    """Return why the shares of a reply are impossible, or None.

    The server divides by the sum of shares. A share that is no number of ratings would let its
    sender make a row as large as it likes.
    """
    if SHARE not in reply:
        return None
    share, ratings, change_field = reply[SHARE].t, reply["nodes"].t[:, None], reply[ITEM_WEIGHT]
    num_ratings = (share * ratings)[share != 0]  # ratings that meet the row
    if not bool((num_ratings > 0.5).all()):  # 1 but for rounding; NaN is none
        return f"shares of 0 or from 1 in {int(ratings.max())} training ratings, got others"
    change = change_field.stacked().t if isinstance(change_field, Patched) else change_field.t
    if bool((change[share == 0].nan_to_num(0.0) != 0).any()):
        return "no change of rows whose share is 0, got some"
    return None


def share_specs(cfg: Any) -> FieldSpecs:
    """Return the spec of the shares, where the model has rows of items."""
    shape = cfg.model.weight_shapes.get(ITEMS)
    return {SHARE: FieldSpec(Stacked, shape[:1], low=0.0, high=1.0)} if shape else {}


FEDMF = dataclasses.replace(
    row_averaging(train_items),
    name="fedmf",
    title="average of models; rows of items (--option items) by who has rated them",
    reference="Chai et al., Secure federated matrix factorization, IEEE Intelligent Systems 2021",
    cautions=(
        Caution("for --model rating_mf --option items=ROWS; other models train as by fedavg"),
    ),
)
