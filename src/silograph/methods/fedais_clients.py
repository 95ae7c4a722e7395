"""What clients do in a round on stored rows: the ops of FedAIS (`silograph.methods.fedais`).

State between rounds: see `silograph.exchange.history`; `importance/loss` (n,) of training nodes
when last worked out; `optimizer/*` if kept. Within a round `round/*`: the model in training, and
the nodes drawn. C: clients. n: rows. S: halo slots. m: nodes drawn in a round.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from silograph.control.knob_messages import PREFIX
from silograph.core.key import Key
from silograph.core.payload import (
    Payload,
    Ragged,
    Stacked,
    State,
    offsets,
    owners,
    ranges,
    under,
)
from silograph.core.work import report_rows
from silograph.exchange.history import (
    ASKED,
    HALO,
    OWN,
    PASSES,
    SEEN,
    answer,
    blank_history,
    put_own_,
    wanted_rows,
    with_arrived,
    with_own,
)
from silograph.exchange.moved_rows import SENT, VERSION, blank_moved, moved_only
from silograph.exchange.passes import divisible
from silograph.exchange.sent_weights import arrived
from silograph.federation.base import overwrites, reads
from silograph.graph.block.block import ClientBlock, Rows
from silograph.methods.fedais_options import RATIO, Config, plan_of
from silograph.methods.fedais_state import (
    BASE,
    DONE,
    IN_TRAINING,
    LOSSES,
    ROWS,
    SHARE,
    TALLY,
    around_of,
    as_trained,
    neighbors_of,
    pull_form_of,
    sends_bytes,
    stored_of,
    tells_moves,
    trained_of,
)
from silograph.methods.local_training import (
    begin,
)
from silograph.nn.doors import check_fit, dtype_of
from silograph.nn.schedule import TrainingInputs
from silograph.nn.segment import segment_sum
from silograph.nn.steps import LOSS_FLOPS, features_for
from silograph.nn.stored_batches import (
    batch_of_edges,
    drawn_around,
    whole_batch,
)
from silograph.nn.stored_rows import batch_pass, rows_entering, stored_stages
from silograph.nn.stored_training import (
    is_compact,
    started,
    weights_of,
)
from silograph.sampling.importance import (
    by_client,
    draw_order,
    first_of,
    inclusions,
    probabilities,
    systematic,
)
from silograph.task.registry import task_of


@overwrites("history/")
def begin_stored(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Set up the state of every client. In: nothing. Out: nothing."""
    new, reply = begin(cfg, block, state, inbox, key)
    history = blank_history(divisible(cfg.model), block)
    if cfg.options.moved is not None:
        history |= blank_moved(pull_form_of(cfg), block)
    losses = torch.zeros(len(block.row_key), dtype=dtype_of(block), device=block.off.device)
    return {**new, **history, LOSSES: Ragged(losses, block.off)}, reply


@overwrites(IN_TRAINING, OWN)
def open_round(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the weights, work out losses and rows with them, draw nodes.

    In: `weights/*`, and `knobs/ratio` (C,) float64 where it is set. Out: nothing.
    """
    came = inbox if cfg.sent.plain else arrived(cfg, block, state, inbox)
    weights, model = under("weights", came), divisible(cfg.model)
    memory = under("optimizer", state) if cfg.keep_optimizer else None
    check_fit(cfg.training, TrainingInputs(block, weights, memory, key))
    small = not cfg.options.share_features
    held = started(model, cfg.training, block, weights, memory, compact=small)
    logits, entered = whole_pass(cfg, block, state, weights, block.x)
    losses = train_losses(cfg, block, logits)
    passes = state[PASSES].t
    told = inbox.get(f"{PREFIX}{RATIO}")
    ratio = cfg.options.ratio if told is None else told.t
    drawn = draw_nodes(cfg, block, losses - state[LOSSES].t, passes, key.fold("nodes"), ratio)
    new = with_own(state, block, entered)
    new |= {PASSES: Stacked(passes + 1), LOSSES: Ragged(losses, block.off), **drawn}
    new |= {f"{IN_TRAINING}{name}": f for name, f in as_trained(cfg, held).items()}
    changes = tells_moves(cfg) or not cfg.sent.plain
    if is_compact(held) or changes:  # what the other rows of the first weights were
        for name in weights if changes else model.first_maps:
            w = weights[name]
            new[f"{BASE}{name}"] = Stacked(w.expand(block.num_clients, *w.shape))
    zeros = torch.zeros(block.num_clients, 4, dtype=torch.float64, device=block.off.device)
    return new | {TALLY: Stacked(zeros), DONE: Stacked(torch.zeros_like(passes))}, {}


def whole_pass(
    cfg: Config, block: ClientBlock, state: State, weights: Mapping[str, Tensor], x: Rows
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return logits (n, K) of all own rows, and what enters stages; slots' rows are as stored."""
    stored, around = stored_of(cfg, state), around_of(cfg, block)
    batch = whole_batch(block, around, stored)
    with torch.no_grad():
        return batch_pass(divisible(cfg.model), weights, block, x, batch, stored, None)


def train_losses(cfg: Config, block: ClientBlock, logits: Tensor) -> Tensor:
    """Return the loss of each training node, (n,); 0 of other rows."""
    train = block.split.train
    losses = logits.new_zeros(len(train))
    losses[train] = task_of(cfg.model.task).loss(logits[train], block.y[train])
    report_rows(offsets(block.num_train), LOSS_FLOPS * cfg.model.outputs)
    return losses


def draw_nodes(
    cfg: Config,
    block: ClientBlock,
    change: Tensor,
    passes: Tensor,
    key: Key,
    ratio: float | Tensor,
) -> dict[str, Ragged]:
    """Return the rows that a round trains on, (m,) int32 as clients count.

    If steps are to be unbiased, also 1 / (nodes of the client x probability of the draw) of each.

    Args:
        cfg: of the method.
        block: the clients.
        change: (n,) of rows' losses since the client last took part.
        passes: (C,) int32 how often it did.
        key: of the draw.
        ratio: share of its training nodes that each client draws, one or (C,) float64.
    """
    options, off = cfg.options, offsets(block.num_train)
    train = block.split.train.nonzero()[:, 0]
    if not len(train):
        return {ROWS: Ragged(train.int(), off)}
    keys, count = block.row_key[train], block.num_train
    if options.nodes != "all":
        count = torch.floor(ratio * count.double() + 0.5).long().clamp(min=1)
        count = torch.minimum(count, block.num_train)
    warm = passes < options.warmup
    even = warm | torch.tensor(options.nodes != "importance", device=warm.device)
    moved = torch.where(even[block.client[train]], 0, change[train])
    p = probabilities(moved, off, options.floor)
    if options.unbiased:
        pi = inclusions(p, off, count)
        kept = systematic(pi, off, keys, key, segment_sum(keys, off))
        share = 1 / (block.num_train[owners(off)] * pi)
    else:
        order, _ = first_of(draw_order(p, off, keys, key), off, count)
        kept = torch.zeros(len(train), dtype=torch.bool, device=train.device)
        kept[order] = True
    # The order of drawing would put the most important nodes into the first batch.
    mixed = by_client(key.fold("order").words(keys, 1)[:, 0].argsort(stable=True), off)
    mixed = mixed[kept[mixed]]
    rows, mine = train[mixed], offsets(segment_sum(kept.long(), off))
    local = (rows - block.off[block.client[rows]]).int()
    found = {ROWS: Ragged(local, mine)}
    if options.unbiased:
        found[SHARE] = Ragged(share[mixed].to(dtype_of(block)), mine)
    return found


def batch_rows(
    cfg: Config, block: ClientBlock, state: State, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows (b,) of every client's batch, offsets (C + 1,), and places among `ROWS`."""
    rows = state[ROWS]
    assert isinstance(rows, Ragged)  # as `draw_nodes` left it
    size, batches = rows.off.diff(), cfg.options.batches
    each, more, at = size // batches, size % batches, number % batches
    first = rows.off[:-1] + at * each + more.clamp(max=at)
    count = each + (at < more).long()
    places, off = ranges(first, count), offsets(count)
    return rows.t[places].long() + block.off[:-1][owners(off)], off, places


def drawn_slots(cfg: Config, block: ClientBlock, state: State, number: int, key: Key) -> Tensor:
    """Return the slots (k,) of the block that batch `number` of a round has drawn, some twice."""
    rows, off, _ = batch_rows(cfg, block, state, number)
    around = around_of(cfg, block)
    drawn = drawn_around(around, rows, off, neighbors_of(cfg), key.fold("batch", number))
    slot = around.slot[drawn.neighbor]
    return slot[slot >= 0]


@reads(ROWS, VERSION)
def ask(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Name the slots that are fetched. In: `start`, `round`, `knobs/tau`. Out: `slot` (k,).

    Those that the next batch has drawn; where batches read no others, those of all batches until
    the next exchange. Where only rows that moved are sent: and `version` (k,) that the client has
    of each.
    """
    start, tau = int(inbox["start"].t), int(inbox["knobs/tau"].t)
    if cfg.options.halo == "all":
        slots = torch.arange(len(block.halo.key), device=block.off.device)
    else:
        read = range(start, min(start + tau, plan_of(cfg).batches))
        numbers = read if cfg.options.halo == "held" else read[:1]
        slots = torch.cat([drawn_slots(cfg, block, state, n, key) for n in numbers]).unique()
    slot_off = torch.searchsorted(slots, block.halo.off)
    first = block.halo.off[:-1][owners(slot_off)]
    named = Ragged((slots - first).int(), slot_off)
    reply = {"slot": named}
    if cfg.options.moved is not None:
        reply["version"] = Ragged(state[VERSION].t[slots], slot_off)
    return {**state, ASKED: named}, reply


@reads("history/", SENT, f"{IN_TRAINING}weights/")
@overwrites(OWN)
def serve(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send rows that others want. In: `row` (k,) int32. Out: see `history.answer`.

    Where only rows that moved are sent: see `moved_rows.moved_only`.
    """
    del key
    row, model = inbox["row"], divisible(cfg.model)
    assert isinstance(row, Ragged)  # from `pull`
    held = trained_of(cfg, state)
    if held and cfg.options.owners == "recompute":
        rows, stored = wanted_rows(block, row), stored_of(cfg, state)
        around, later = around_of(cfg, block), len(stored_stages(model)) > 1
        batch = batch_of_edges(block, around, stored, rows, row.off, later=later)
        x, own = features_for(block, is_compact(held)), weights_of(held)
        with torch.no_grad():
            entered = rows_entering(model, own, block, x, batch, stored)
        put_own_(state, rows, entered)
    reply, bound = answer(model, block, state, row, small=sends_bytes(cfg)), cfg.options.moved
    if bound is None:
        return state, reply
    return moved_only(block, state, inbox, reply, bound, number_of(cfg, inbox))


@reads(ASKED, HALO, SEEN, VERSION)
@overwrites(HALO, SEEN)
def store(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep the rows that came. In: see `history.with_arrived`. Out: nothing."""
    del key
    model, now = divisible(cfg.model), number_of(cfg, inbox)
    return with_arrived(model, block, state, inbox, now, small=sends_bytes(cfg)), {}


def number_of(cfg: Config, inbox: Payload) -> int:
    """Return the number of the next batch among those of all rounds."""
    return (int(inbox["round"].t) - 1) * plan_of(cfg).batches + int(inbox["start"].t)
