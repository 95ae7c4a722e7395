"""How a client trains on stored rows between two exchanges: ops of FedAIS.

State: see `silograph.methods.fedais_clients`. C: clients. n: rows. m: nodes drawn in a round.
"""

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
    owners,
    take_all,
)
from silograph.core.payload import state_of as fields_of
from silograph.core.work import work_for, work_of
from silograph.evaluation.evaluate import remembered
from silograph.exchange.history import (
    ASKED,
    HALO,
    OWN,
    SEEN,
)
from silograph.exchange.passes import divisible
from silograph.exchange.sent_weights import leaving
from silograph.federation.base import overwrites, reads
from silograph.graph.block.block import ClientBlock
from silograph.methods.fedais_clients import batch_rows, number_of, whole_pass
from silograph.methods.fedais_options import Config, plan_of
from silograph.methods.fedais_state import (
    BASE,
    DONE,
    FIXED_IN_ROUND,
    IN_TRAINING,
    ROWS,
    SHARE,
    TALLY,
    around_of,
    fields_under,
    is_compiled,
    neighbors_of,
    squared_move,
    stored_of,
    tells_moves,
    trained_of,
    untouched,
)
from silograph.methods.local_training import (
    named_fields,
    stacked,
)
from silograph.methods.private_parts import finite_or_old
from silograph.nn.doors import check_places, dtype_of
from silograph.nn.segment import segment_sum
from silograph.nn.steps import Held, features_for
from silograph.nn.stored_batches import (
    drawn_batch,
)
from silograph.nn.stored_rows import StoredRows
from silograph.nn.stored_training import (
    STEPS,
    TrainingRows,
    alike,
    finished,
    is_compact,
    memory_of,
    part_of,
    put_back,
    step_,
    weights_of,
)


@reads("history/", IN_TRAINING, *FIXED_IN_ROUND, TALLY, DONE)
@overwrites(IN_TRAINING, OWN, TALLY)
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
    live = {name: f for name, f in state.items() if name.startswith((IN_TRAINING, OWN, TALLY))}
    fixed = {name: f for name, f in state.items() if name.startswith((*FIXED_IN_ROUND, HALO))}
    now = number_of(cfg, inbox) - start
    if is_compiled(cfg):
        train_batches_(cfg, block, fixed, live, range(start, end), now, key)
        return {**state, **live, DONE: Stacked(torch.full_like(state[DONE].t, end))}, {}
    for number in range(start, end):
        own = key.fold("batch", number)
        active = batch_rows(cfg, block, state, number)[1].diff() > 0
        for who in alike(fields_under(IN_TRAINING, live), active):
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
    model, held = divisible(cfg.model), fields_under(IN_TRAINING, live)
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
    return TrainingRows(batch, batch_share(fixed, off, places) if SHARE in fixed else None)


def batch_share(fixed: State, off: Tensor, places: Tensor) -> Tensor:
    """Return the weight of the loss of each row of a batch, (b,), by which its step is unbiased.

    A batch of b of a round's m nodes has each of them with probability b / m, so the weight that
    a node's draw gives counts m / b times.

    Args:
        fixed: the nodes that a round has drawn, and the weights that their draws give.
        off: (C + 1,) of the batch.
        places: (b,) of its rows among the drawn nodes.
    """
    drawn, share = fixed[ROWS], fixed[SHARE].t[places]
    assert isinstance(drawn, Ragged)  # as `draw_nodes` left it
    times = drawn.off.diff().to(share.dtype) / off.diff().clamp(min=1)
    return share * times[owners(off)]


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
    held = fields_under(IN_TRAINING, live)
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
        new |= finite_or_old(stacked("optimizer", memory_of(cfg.training, held)), state)
    new |= remembered(logits, block)
    said: dict[str, Field] = {**reply, **{k: Stacked(t) for k, t in told.items()}}
    if cfg.sent.plain:
        return new, said
    if cfg.sent.rows == "used":
        said["steps"] = held[STEPS]
    start = {f"weights/{name}": Shared(w) for name, w in base.items()}
    return leaving(cfg, new, start, said, untouched(cfg, base, plan_of(cfg).batches))
