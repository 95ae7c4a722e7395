"""What clients do in a round on stored rows: the ops of FedAIS (`silograph.methods.fedais`).

State between rounds: see `silograph.exchange.history`; `importance/loss` (n,) of training nodes
when last worked out; `optimizer/*` if kept. Within a round `round/*`: the model in training, and
the nodes drawn. C: clients. n: rows. S: halo slots. m: nodes drawn in a round.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Field,
    Payload,
    Ragged,
    Shared,
    Stacked,
    State,
    offsets,
    owners,
    ranges,
    take_all,
    under,
)
from silograph.core.payload import state_of as fields_of
from silograph.core.work import report_rows, work_for, work_of
from silograph.evaluation.evaluate import remembered
from silograph.exchange.history import (
    ASKED,
    HALO,
    OWN,
    PASSES,
    SEEN,
    answer,
    blank_history,
    rows_form,
    stored_in,
    wanted_rows,
    with_arrived,
    with_own,
)
from silograph.exchange.moved_rows import SENT, VERSION, blank_moved, moved_only
from silograph.exchange.passes import divisible
from silograph.exchange.pull import PullForm
from silograph.exchange.sent_weights import arrived, leaving
from silograph.federation.base import reads
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.methods.fedais_options import Config, plan_of
from silograph.methods.local_training import (
    begin,
    named_fields,
    stacked,
)
from silograph.nn.conv import Params
from silograph.nn.doors import check_fit, check_places, dtype_of
from silograph.nn.neighbors import FULL, Fanout, Neighbors
from silograph.nn.schedule import TrainingInputs
from silograph.nn.segment import segment_sum
from silograph.nn.steps import LOSS_FLOPS, Held, features_for
from silograph.nn.stored_batches import (
    batch_of_edges,
    drawn_around,
    drawn_batch,
    surroundings,
    whole_batch,
)
from silograph.nn.stored_rows import StoredRows, Surroundings, batch_pass, rows_entering
from silograph.nn.stored_training import (
    STEPS,
    TrainingRows,
    alike,
    copied,
    finished,
    is_compact,
    memory_of,
    part_of,
    put_back,
    started,
    step_,
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

LOSSES = "importance/loss"
TRAINED, BASE = "round/model/", "round/base/"
ROWS, SHARE = "round/rows", "round/share"
DONE = "round/done"  # (C,) int32 batches of this round so far
TALLY = "round/tally"  # (C, 4): loss, rows, ages, and slots, summed over the batches so far
FIXED_IN_ROUND = (ROWS, SHARE, ASKED, SEEN)


def neighbors_of(cfg: Config) -> Neighbors:
    """Return what draws the neighbors of a batch."""
    return Fanout((cfg.options.drawn,)) if cfg.options.drawn else FULL


def stored_of(cfg: Config, state: State) -> StoredRows:
    """Return the stored rows that the clients read."""
    return stored_in(state, halo=cfg.options.halo != "none")


def fields_under(prefix: str, state: State) -> Held:
    """Return the fields whose names begin so, without it."""
    return {k.removeprefix(prefix): f for k, f in state.items() if k.startswith(prefix)}


def is_compiled(cfg: Config) -> bool:
    """Return whether batches are trained by the compiled kernels.

    They read slots' rows from the second stage on; with shared features torch trains.
    """
    # Kernels of stored rows do not drop features of a batch's senders.
    drops = cfg.backend.compiled and divisible(cfg.model).stages[0].drop > 0
    return cfg.backend.compiled and not cfg.options.share_features and not drops


def trained_of(cfg: Config, state: State) -> Held:
    """Return the clients in training, weights by name; empty between rounds."""
    held = fields_under(TRAINED, state)
    if not held or not is_compiled(cfg):
        return held
    from silograph.nn import stored_compiled  # numba takes a while to import

    return stored_compiled.unpacked(divisible(cfg.model), held)


def as_trained(cfg: Config, held: Held) -> Held:
    """Return clients before their first step in the form in which they are trained."""
    if not is_compiled(cfg):
        return held
    from silograph.nn import stored_compiled

    return stored_compiled.packed(divisible(cfg.model), held)


def sends_bytes(cfg: Config) -> bool:
    """Return whether rows of others come as bytes with a scale for each row."""
    return cfg.options.sent == "int8"


def form_of(cfg: Config) -> PullForm:
    """Return what an exchange carries."""
    since = cfg.options.moved is not None
    return rows_form(divisible(cfg.model), small=sends_bytes(cfg), since=since)


def tells_moves(cfg: Config) -> bool:
    """Return whether clients tell how far their models have moved, which sets the interval."""
    return cfg.options.interval == "bound" and cfg.options.halo != "none"


def squared_move(block: ClientBlock, held: Held, start: Mapping[str, Tensor]) -> Tensor:
    """Return the squared length of each client's move from shared weights, (C,) float64.

    Rows of features that a client does not have are left out: they only decay.
    """
    total = torch.zeros(block.num_clients, dtype=torch.float64, device=block.off.device)
    for name, field in ((k.removeprefix("weights/"), f) for k, f in held.items()):
        if name not in start:  # moments
            continue
        if isinstance(field, Ragged):
            assert isinstance(block.x, SparseRows)  # only then are there used rows
            change = field.t - start[name][block.x.used.feature]
            total += segment_sum(change.double().square().sum(1), field.off)
        else:
            change = (field.t - start[name]).double().flatten(1)
            total += change.square().sum(1)
    return total


def untouched(cfg: Config, weights: Mapping[str, Tensor], steps: int) -> Params:
    """Return what most rows of clients' first weights are after a round, to take a mean around."""
    if cfg.keep_optimizer or cfg.options.share_features:
        return {}
    found = {n: cfg.backend.rest(cfg.training, weights[n], steps) for n in cfg.model.first_maps}
    return {f"weights/{name}": w for name, w in found.items()}


def around_of(cfg: Config, block: ClientBlock) -> Surroundings:
    """Return the graph that the clients sum over."""
    return surroundings(block, halo=cfg.options.halo != "none")


def begin_stored(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Set up the state of every client. In: nothing. Out: nothing."""
    new, reply = begin(cfg, block, state, inbox, key)
    history = blank_history(divisible(cfg.model), block)
    if cfg.options.moved is not None:
        history |= blank_moved(form_of(cfg), block)
    losses = torch.zeros(len(block.row_key), dtype=dtype_of(block), device=block.off.device)
    return {**new, **history, LOSSES: Ragged(losses, block.off)}, reply


def open_round(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the weights, work out losses and rows with them, draw nodes. In: `weights/*`."""
    came = inbox if cfg.sent.plain else arrived(cfg, block, state, inbox)
    weights, model = under("weights", came), divisible(cfg.model)
    memory = under("optimizer", state) if cfg.keep_optimizer else None
    check_fit(cfg.training, TrainingInputs(block, weights, memory, key))
    small = not cfg.options.share_features
    held = started(model, cfg.training, block, weights, memory, compact=small)
    logits, entered = whole_pass(cfg, block, state, weights, block.x)
    losses = train_losses(cfg, block, logits)
    passes = state[PASSES].t
    drawn = draw_nodes(cfg, block, losses - state[LOSSES].t, passes, key.fold("nodes"))
    new = with_own(state, block, None, entered)
    new |= {PASSES: Stacked(passes + 1), LOSSES: Ragged(losses, block.off), **drawn}
    new |= {f"{TRAINED}{name}": f for name, f in as_trained(cfg, held).items()}
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
    cfg: Config, block: ClientBlock, change: Tensor, passes: Tensor, key: Key
) -> dict[str, Ragged]:
    """Return the rows that a round trains on, (m,) int32 as clients count, and their weights.

    Args:
        cfg: of the method.
        block: the clients.
        change: (n,) of rows' losses since the client last took part.
        passes: (C,) int32 how often it did.
        key: of the draw.
    """
    options, off = cfg.options, offsets(block.num_train)
    train = block.split.train.nonzero()[:, 0]
    if not len(train):
        return {ROWS: Ragged(train.int(), off)}
    keys, count = block.row_key[train], block.num_train
    if options.nodes != "all":
        count = torch.floor(options.ratio * count.double() + 0.5).long().clamp(min=1)
        count = torch.minimum(count, block.num_train)
    warm = passes < max(options.warmup, 1)
    even = warm | torch.tensor(options.nodes != "importance", device=warm.device)
    moved = torch.where(even[block.client[train]], 0, change[train])
    p = probabilities(moved, off, options.floor)
    if options.unbiased:
        pi = inclusions(p, off, count)
        kept = systematic(pi, off, keys, key, segment_sum(keys, off))
        share = options.batches / (block.num_train[owners(off)] * pi)
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


@reads(ROWS, VERSION)
def ask(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Name the slots that the next batch has drawn. In: `start`, `round`. Out: `slot` (k,).

    Where only rows that moved are sent: and `version` (k,) that the client has of each.
    """
    start = int(inbox["start"].t)
    if cfg.options.halo == "all":
        slots = torch.arange(len(block.halo.key), device=block.off.device)
    else:
        rows, off, _ = batch_rows(cfg, block, state, start)
        around, own = around_of(cfg, block), key.fold("batch", start)
        drawn = drawn_around(around, rows, off, neighbors_of(cfg), own)
        slot = around.slot[drawn.neighbor]
        slots = torch.unique(slot[slot >= 0])
    slot_off = torch.searchsorted(slots, block.halo.off)
    first = block.halo.off[:-1][owners(slot_off)]
    named = Ragged((slots - first).int(), slot_off)
    reply = {"slot": named}
    if cfg.options.moved is not None:
        reply["version"] = Ragged(state[VERSION].t[slots], slot_off)
    return {**state, ASKED: named}, reply


@reads("history/", SENT, f"{TRAINED}weights/")
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
        batch = batch_of_edges(block, around_of(cfg, block), stored, rows, row.off)
        x, own = features_for(block, is_compact(held)), weights_of(held)
        with torch.no_grad():
            entered = rows_entering(model, own, block, x, batch, stored)
        state = with_own(state, block, rows, entered)
    reply, bound = answer(model, block, state, row, small=sends_bytes(cfg)), cfg.options.moved
    if bound is None:
        return state, reply
    return moved_only(block, state, inbox, reply, bound, number_of(cfg, inbox))


@reads(ASKED, HALO, SEEN, VERSION)
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


@reads("history/", TRAINED, *FIXED_IN_ROUND, TALLY, DONE)
def advance(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Train on the batches up to the next exchange. In: `start`, `round`, `knobs/tau`.

    Raises:
        ProtocolError: `start` is not the next batch, or no rows were asked for where it needs some.
    """
    check_next(state, int(inbox["start"].t))
    if cfg.options.halo == "held" and ASKED not in state:
        raise ProtocolError(
            "expected an exchange of rows before the first batch of a round with halo=held, got "
            "none: the slots that a batch may read are those that it has asked for"
        )
    start, tau, total = int(inbox["start"].t), int(inbox["knobs/tau"].t), plan_of(cfg).batches
    end = total if cfg.options.halo == "none" else min(start + tau, total)
    live = copied({name: f for name, f in state.items() if name.startswith((TRAINED, OWN, TALLY))})
    fixed = {name: f for name, f in state.items() if name.startswith((*FIXED_IN_ROUND, HALO))}
    now = number_of(cfg, inbox) - start
    if is_compiled(cfg):
        train_batches_(cfg, block, fixed, live, range(start, end), now, key)
        return {**state, **live, DONE: Stacked(torch.full_like(state[DONE].t, end))}, {}
    for number in range(start, end):
        own = key.fold("batch", number)
        active = batch_rows(cfg, block, state, number)[1].diff() > 0
        for who in alike(fields_under(TRAINED, live), active):
            if len(who) == block.num_clients:
                train_batch_(cfg, block, fixed, live, number, now + number, own)
                continue
            with work_of(who):
                part, some = part_of(live, who), fields_of(take_all(fixed, who))
                train_batch_(cfg, block.called(who), some, part, number, now + number, own)
            live = put_back(live, part, who)
    return {**state, **live, DONE: Stacked(torch.full_like(state[DONE].t, end))}, {}


def check_next(state: State, number: int) -> None:
    """Raise `ProtocolError` unless all batches before a number are done, and no others.

    Without this a server could have one batch trained on again and again, or one alone.
    """
    done = state[DONE].t
    if not bool((done == number).all()):
        raise ProtocolError(
            f"expected batch {int(done.min())} of the round next, got {number}: batches are "
            "trained on in their order, each once"
        )


def train_batches_(
    cfg: Config,
    block: ClientBlock,
    fixed: State,
    live: Held,
    numbers: range,
    first: int,
    key: Key,
) -> None:
    """Do what `train_batch_` does for all batches and clients, by one call of the kernels.

    Args:
        cfg: of the method.
        block: clients, with or without rows in each batch.
        fixed: see `train_batch_`.
        live: likewise.
        numbers: of the batches in the round.
        first: number of the round's first batch among those of all rounds.
        key: of the round.
    """
    from silograph.nn import stored_compiled  # numba takes a while to import

    stored, keys = readable(cfg, block, fixed, live), [key.fold("batch", n) for n in numbers]
    pairs = zip(numbers, keys, strict=True)
    chosen = [chosen_rows(cfg, block, fixed, stored, number, own) for number, own in pairs]
    model, held = divisible(cfg.model), fields_under(TRAINED, live)
    losses = stored_compiled.train_(model, cfg.training, block, held, chosen, stored, keys)
    for number, rows, loss in zip(numbers, chosen, losses, strict=True):
        tally_(fixed, live, rows, loss, first + number)


def readable(cfg: Config, block: ClientBlock, fixed: State, live: Held) -> StoredRows:
    """Return the stored rows that batches may read up to the next exchange."""
    stored = stored_of(cfg, {**fixed, **live})
    if cfg.options.halo != "held":
        return stored
    asked = fixed[ASKED]
    assert isinstance(asked, Ragged)  # as `ask` left it
    mine = torch.zeros_like(stored.known)
    mine[check_places(asked, block.halo.off, "halo slots")] = True
    return replace(stored, known=stored.known & mine)


def chosen_rows(
    cfg: Config, block: ClientBlock, fixed: State, stored: StoredRows, number: int, key: Key
) -> TrainingRows:
    """Return what batch `number` of a round trains on, with neighbors drawn by key."""
    rows, off, places = batch_rows(cfg, block, fixed, number)
    around = around_of(cfg, block)
    batch = drawn_batch(block, around, stored, rows, off, neighbors_of(cfg), key)
    return TrainingRows(batch, fixed[SHARE].t[places] if SHARE in fixed else None)


def tally_(fixed: State, live: Held, chosen: TrainingRows, losses: Tensor, now: int) -> None:
    """Add a batch, its rows' losses (b,) and its number among those of all rounds to the tally."""
    batch = chosen.batch
    ages = (now - fixed[SEEN].t[batch.later.slots]).double()
    sums = segment_sum(losses.double(), batch.off), batch.off.diff()
    aged = segment_sum(ages, batch.later.slot_off), batch.later.slot_off.diff()
    live[TALLY].t.add_(torch.stack([t.double() for t in (*sums, *aged)], dim=1))


def train_batch_(
    cfg: Config,
    block: ClientBlock,
    fixed: State,
    live: Held,
    number: int,
    now: int,
    key: Key,
) -> None:
    """Take a step with every client; changes `live` in place, with the rows of its batch.

    Args:
        cfg: of the method.
        block: clients that all have a batch of this number.
        fixed: nodes drawn and rows of the halo.
        live: models in training and own rows.
        number: of the batch in its round.
        now: of the batch among those of all rounds.
        key: of the batch.
    """
    stored = readable(cfg, block, fixed, live)
    chosen, model = chosen_rows(cfg, block, fixed, stored, number, key), divisible(cfg.model)
    held = fields_under(TRAINED, live)
    losses, entered = step_(model, cfg.training, block, held, chosen, stored, key)
    for stage, x in entered.items():
        live[f"{OWN}{stage}"].t.index_copy_(0, chosen.batch.rows, x)
    tally_(fixed, live, chosen, losses, now)


def close_round(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send the trained model, and end the round.

    In: nothing. Out: `weights/*` (C, ...), `share` (C,) weight of the model, `loss`, `row_age` in
    batches, `rows_trained` (C,), `moved` (C,) where the interval needs it, and `steps` (C,) where
    only used rows of weights come.

    Raises:
        ProtocolError: batches are left.
    """
    del inbox, key
    check_next(state, plan_of(cfg).batches)
    held = trained_of(cfg, state)
    with work_for(Kind.EVALUATION):
        x = features_for(block, is_compact(held))
        logits, _ = whole_pass(cfg, block, state, weights_of(held), x)
    base = {k.removeprefix(BASE): f.t[0] for k, f in state.items() if k.startswith(BASE)}
    moved = {"moved": squared_move(block, held, base)} if tells_moves(cfg) else {}
    reply = dict(named_fields("weights", finished(cfg.training, block, held, base)))
    loss, count, age, aged = state[TALLY].t.unbind(1)
    told = {"loss": loss / count.clamp(min=1), "row_age": age / aged.clamp(min=1)}
    told = {
        name: t.to(dtype_of(block)) for name, t in (told | {"rows_trained": count} | moved).items()
    }
    alike_all = cfg.options.average == "clients"
    told["share"] = (count > 0) * (
        torch.ones_like(block.num_train) if alike_all else block.num_train
    )
    new = {name: f for name, f in state.items() if not name.startswith("round/")}
    if cfg.keep_optimizer:
        new |= stacked("optimizer", memory_of(cfg.training, held))
    new |= remembered(logits, block)
    said: dict[str, Field] = {**reply, **{k: Stacked(t) for k, t in told.items()}}
    if cfg.sent.plain:
        return new, said
    if cfg.sent.rows == "used":
        said["steps"] = held[STEPS]
    start = {f"weights/{name}": Shared(w) for name, w in base.items()}
    return leaving(cfg, new, start, said, untouched(cfg, base, plan_of(cfg).batches))
