"""FedAIS: a batch reads stored embeddings, and trains on the nodes that matter.

Li, Chen, Ren, Wang, Hu, Li, Yu and Chen, "Federated graph learning with adaptive importance-based
sampling", AAAI 2025, algorithm 1.

Every client keeps, for each hidden layer, the last embeddings of its own nodes and of its halo
(eq. 6). A round is `batches` steps on drawn training nodes; a batch needs one hop of neighbors,
whose embeddings are stored. Before every tau-th batch a client fetches the embeddings of those halo
nodes that the batch has drawn. Nodes are drawn by how much their loss has changed since the client
last took part (eq. 8), and tau shrinks as the validation loss falls (eq. 11).

`nodes`, `interval` and `halo` are options, and the paper's baselines are presets of this program:

    fedall      all nodes; each batch fetches what it has drawn     tau = 1
    fedrandom   the same on drawn nodes
    fedlocal    all nodes, without the halo
    fedpns      all nodes; neighbors of other silos are drawn anew every 2 batches
    fedais1     drawn by importance, but fetched in every batch
    fedais2     all nodes, adaptive interval
    stale       all nodes; all slots are fetched every tau-th batch (VR-GCN, PipeGCN)

How we read the paper where it is silent: losses are worked out once a round, by one pass over all
own nodes with the weights received, which also refreshes what is stored of them; owners work asked
rows out anew with their own current weights, from stored rows, if they take part, and send
what is stored if they do not. F is the validation loss. Features do not leave: without
`share_features` the first layer sums over the client's own graph.

State of a client: see `silograph.exchange.history`; `importance/loss` (n,) of training nodes when
last worked out; `optimizer/*` if kept. Within a round `round/*`: the model in training, and the
nodes drawn. C: clients. n: rows. S: halo slots. m: nodes drawn in a round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain
from dataclasses import field, fields, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.control import FIXED, LOSS_INTERVAL, Controller, knob_specs
from silograph.control.loss_interval import BATCHES, EXCHANGES, ROW_BYTES
from silograph.core.config import STRICT
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
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
from silograph.core.ranges import lin
from silograph.core.work import report_rows, work_for, work_of
from silograph.evaluation.evaluate import remembered
from silograph.evaluation.scoring import HaloSums
from silograph.exchange.history import (
    ASKED,
    HALO,
    OWN,
    PASSES,
    SEEN,
    answer,
    blank_history,
    history_specs,
    rows_form,
    share_features,
    share_features_steps,
    stored_in,
    wanted_rows,
    with_arrived,
    with_own,
)
from silograph.exchange.passes import divisible, weight_specs
from silograph.exchange.pull import pull, pull_steps
from silograph.federation.base import Federation, WeightedMean, positions_of
from silograph.federation.field_specs import COUNT, LOSS, NODES, FieldSpec, FieldSpecs, exactly
from silograph.federation.program import Call, Calls, Either, Maybe, Steps
from silograph.graph.block.block import ClientBlock, Rows
from silograph.methods.base import Method, MethodConfig, Needs, RoundReport, ServerState
from silograph.methods.local_training import (
    begin,
    named_fields,
    shared,
    stacked,
    state_specs,
)
from silograph.nn.conv import Params
from silograph.nn.doors import check_fit, check_places, dtype_of
from silograph.nn.neighbors import FULL, Fanout, Full, Neighbors
from silograph.nn.schedule import TrainingInputs
from silograph.nn.segment import segment_sum
from silograph.nn.steps import LOSS_FLOPS, Held, features_for
from silograph.nn.stored_rows import (
    StoredRows,
    Surroundings,
    batch_of_edges,
    batch_pass,
    drawn_around,
    drawn_batch,
    rows_entering,
    surroundings,
    whole_batch,
)
from silograph.nn.stored_training import (
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
from silograph.selection.uniform import select_uniform
from silograph.task.registry import task_of

MOST = 100  # batches between two exchanges
LOSSES = "importance/loss"
TRAINED, BASE = "round/model/", "round/base/"
ROWS, SHARE = "round/rows", "round/share"
TALLY = "round/tally"  # (C, 4): loss, rows, ages, and slots, summed over the batches so far
FIXED_IN_ROUND = (ROWS, SHARE, ASKED, SEEN)


@dataclass(frozen=True, config=STRICT)
class FedAISOptions:
    """The help texts are the documentation of the fields."""

    nodes: Literal["all", "random", "importance"] = field(
        default="importance",
        metadata={"help": "training nodes of a round: all, a random share, or by importance"},
    )
    interval: Literal["fixed", "adaptive"] = field(
        default="adaptive",
        metadata={"help": "batches between two exchanges: always tau, or fewer as the loss falls"},
    )
    halo: Literal["none", "drawn", "held", "all"] = field(
        default="drawn",
        metadata={
            "help": "what an exchange fetches: nothing, what its batch has drawn, the same and no "
            "others are read until the next one, or all slots"
        },
    )
    tau: Annotated[int, Field(ge=1, le=MOST)] = field(
        default=2,
        metadata={"help": "batches between two exchanges at first", "knob": lin(1, MOST)},
    )
    ratio: Annotated[float, Field(gt=0, le=1)] = field(
        default=0.7, metadata={"help": "share of its training nodes that a client draws"}
    )
    batches: Annotated[int, Field(ge=1, le=1000)] = field(
        default=10, metadata={"help": "batches of a round, in each of its local epochs"}
    )
    drawn: Annotated[int, Field(ge=0)] = field(
        default=10,
        metadata={"help": "neighbors drawn for a node of a batch, halo included; 0: all"},
    )
    warmup: Annotated[int, Field(ge=0)] = field(
        default=1, metadata={"help": "rounds of a client in which its nodes are drawn evenly"}
    )
    floor: Annotated[float, Field(ge=0, le=1)] = field(
        default=0.1, metadata={"help": "share of the probability that all nodes have alike"}
    )
    unbiased: bool = field(
        default=False,
        metadata={"help": "draw systematically, and weigh losses so that steps are unbiased"},
    )
    owners: Literal["recompute", "stored"] = field(
        default="recompute",
        metadata={"help": "rows that are asked for: worked out anew, or as they were stored"},
    )
    share_features: bool = field(
        default=False, metadata={"help": "features leave, too: the first layer sees the halo"}
    )
    average: Literal["clients", "nodes"] = field(
        default="clients",
        metadata={"help": "mean of the models: plain, or weighted by training nodes"},
    )


Config = MethodConfig[FedAISOptions]


@plain(frozen=True)
class Plan:
    """How many batches a round has, and how many exchanges.

    Attributes:
        batches: of all local epochs.
        tau: batches between two exchanges.
    """

    batches: int
    tau: int

    @property
    def starts(self) -> range:
        """Number of the first batch after each exchange."""
        return range(0, self.batches, self.tau)


def plan_of(cfg: Config) -> Plan:
    """Return the plan of a round; without a halo nothing is exchanged."""
    total = cfg.options.batches * cfg.schedule.epochs
    if cfg.options.halo == "none":
        return Plan(total, total)
    return Plan(total, int(cfg.knobs["tau"]) if "tau" in cfg.knobs else cfg.options.tau)


def neighbors_of(cfg: Config) -> Neighbors:
    """Return what draws the neighbors of a batch."""
    return Fanout((cfg.options.drawn,)) if cfg.options.drawn else FULL


def stored_of(cfg: Config, state: State) -> StoredRows:
    """Return the stored rows that the clients read."""
    return stored_in(state, halo=cfg.options.halo != "none")


def fields_under(prefix: str, state: State) -> Held:
    """Return the fields whose names begin so, without it."""
    return {k.removeprefix(prefix): f for k, f in state.items() if k.startswith(prefix)}


def around_of(cfg: Config, block: ClientBlock) -> Surroundings:
    """Return the graph that the clients sum over."""
    return surroundings(block, halo=cfg.options.halo != "none")


# What the server does.


def init(fed: Federation, cfg: Config, weights: Params, key: Key) -> ServerState:
    """Set up the clients, which share features if they may.

    Raises:
        ConfigError: a model or a config without such steps.
    """
    divisible(cfg.model)
    if cfg.schedule.batch_size is not None or not isinstance(cfg.schedule.neighbors, Full):
        raise ConfigError(
            "expected neither batch_size nor fanout or neighbors with fedais, which draws both "
            f"itself: leave them out, and set batches={cfg.options.batches} or "
            f"drawn={cfg.options.drawn}"
        )
    if cfg.options.share_features and cfg.options.halo == "none":
        raise ConfigError("expected a halo for share_features, got halo=none: leave one out")
    fed.call(begin_stored, {}, what=Kind.CONTROL, key=key)
    if cfg.options.share_features:
        share_features(fed, key)
    return ServerState(weights=weights, memory={})


def fit_round(
    fed: Federation, cfg: Config, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients, with exchanges in between, and average."""
    assert state.weights is not None  # set by init
    own, plan, chosen = key.fold("train", t), plan_of(cfg), cfg.selected
    if chosen is None:
        chosen = tuple(select_uniform(fed.ids, cfg.participation, key.fold("select", t)))
    inbox = shared("weights", state.weights)
    fed.call(open_round, inbox, what=Kind.WEIGHTS, key=own, to=chosen)
    row_bytes = 0
    for start in plan.starts:
        told = told_of(cfg, t, start)
        row_bytes += exchange(fed, cfg, told, chosen, own)
        fed.call(advance, told, what=Kind.CONTROL, key=own, to=chosen)
    reduce = WeightedMean("share", untouched(cfg, state.weights, plan.batches))
    reply = fed.call(close_round, {}, what=Kind.WEIGHTS, key=own, to=chosen, reduce=reduce)
    facts = facts_of(fed, cfg, chosen, plan, state.weights) | {ROW_BYTES: float(row_bytes)}
    names = "row_age", "rows_trained"
    if "loss" not in reply:  # no selected client has a training node
        return state, RoundReport(chosen, None, facts | dict.fromkeys(names, 0.0))
    facts |= {name: float(reply[name].t) for name in names}
    return ServerState(under("weights", reply), {}), RoundReport(
        chosen, float(reply["loss"].t), facts
    )


def exchange(
    fed: Federation, cfg: Config, told: Mapping[str, Shared], chosen: Sequence[str], key: Key
) -> int:
    """Fetch rows for the clients `chosen`, from all; return the bytes that it took."""
    if cfg.options.halo == "none":
        return 0
    before, form = fed.ledger.bytes, rows_form(divisible(cfg.model))
    pull(fed, ask, serve, store, what=Kind.EMBEDDINGS, key=key, inbox=told, to=chosen, form=form)
    return fed.ledger.bytes - before


def told_of(cfg: Config, t: int, start: int) -> dict[str, Shared]:
    """Return what clients are told of an exchange, and of the batches that follow."""
    tau = cfg.knobs.get("tau", torch.tensor(cfg.options.tau))
    numbers = {"round": t, "start": start}
    fields = {k: Shared(torch.tensor(n, dtype=torch.int32)) for k, n in numbers.items()}
    return {"knobs/tau": Shared(tau), **fields}


def untouched(cfg: Config, weights: Mapping[str, Tensor], steps: int) -> Params:
    """Return what most rows of clients' first weights are after a round, to take a mean around."""
    if cfg.keep_optimizer or cfg.options.share_features:
        return {}
    found = {n: cfg.backend.rest(cfg.training, weights[n], steps) for n in cfg.model.first_maps}
    return {f"weights/{name}": w for name, w in found.items()}


def facts_of(
    fed: Federation, cfg: Config, chosen: Sequence[str], plan: Plan, weights: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the facts of a round; `paper_row_bytes`: every slot in every batch, rows alone."""
    model, halo = divisible(cfg.model), cfg.options.halo != "none"
    slots = int(fed.route.slot_off.diff()[positions_of(fed.ids, chosen)].sum())
    width = sum(spec.shape[0] or 0 for spec in rows_form(model).fields.values())
    size = width * next(iter(weights.values())).element_size()
    return {
        EXCHANGES: float(len(plan.starts) * halo),
        BATCHES: float(plan.batches),
        "paper_row_bytes": float(slots * size * plan.batches * halo),
    }


# What clients do.


def begin_stored(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Set up the state of every client. In: nothing. Out: nothing."""
    new, reply = begin(cfg, block, state, inbox, key)
    history = blank_history(divisible(cfg.model), block)
    losses = torch.zeros(len(block.row_key), dtype=dtype_of(block), device=block.off.device)
    return {**new, **history, LOSSES: Ragged(losses, block.off)}, reply


def open_round(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the weights, work out losses and rows with them, draw nodes. In: `weights/*`."""
    weights, model = under("weights", inbox), divisible(cfg.model)
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
    new |= {f"{TRAINED}{name}": f for name, f in held.items()}
    if is_compact(held):  # what the other rows of the first weights were
        for name in model.first_maps:
            w = weights[name]
            new[f"{BASE}{name}"] = Stacked(w.expand(block.num_clients, *w.shape))
    zeros = torch.zeros(block.num_clients, 4, dtype=torch.float64, device=block.off.device)
    return new | {TALLY: Stacked(zeros)}, {}


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


def ask(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Name the slots that the next batch has drawn. In: `start`, `round`. Out: `slot` (k,)."""
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
    return {**state, ASKED: named}, {"slot": named}


def serve(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send rows that others want. In: `row` (k,) int32. Out: see `history.answer`."""
    del key
    row, model = inbox["row"], divisible(cfg.model)
    assert isinstance(row, Ragged)  # from `pull`
    held = fields_under(TRAINED, state)
    if held and cfg.options.owners == "recompute":
        rows, stored = wanted_rows(block, row), stored_of(cfg, state)
        batch = batch_of_edges(block, around_of(cfg, block), stored, rows, row.off)
        x, own = features_for(block, is_compact(held)), weights_of(held)
        with torch.no_grad():
            entered = rows_entering(model, own, block, x, batch, stored)
        state = with_own(state, block, rows, entered)
    return state, answer(model, block, state, row)


def store(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep the rows that came. In: see `history.with_arrived`. Out: nothing."""
    del key
    return with_arrived(divisible(cfg.model), block, state, inbox, number_of(cfg, inbox)), {}


def number_of(cfg: Config, inbox: Payload) -> int:
    """Return the number of the next batch among those of all rounds."""
    return (int(inbox["round"].t) - 1) * plan_of(cfg).batches + int(inbox["start"].t)


def advance(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Train on the batches up to the next exchange. In: `start`, `round`, `knobs/tau`."""
    start, tau, total = int(inbox["start"].t), int(inbox["knobs/tau"].t), plan_of(cfg).batches
    end = total if cfg.options.halo == "none" else min(start + tau, total)
    live = copied({name: f for name, f in state.items() if name.startswith((TRAINED, OWN, TALLY))})
    fixed = {name: f for name, f in state.items() if name.startswith((*FIXED_IN_ROUND, HALO))}
    now = number_of(cfg, inbox) - start
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
    return {**state, **live}, {}


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
    stored = stored_of(cfg, {**fixed, **live})
    if cfg.options.halo == "held":
        asked = fixed[ASKED]
        assert isinstance(asked, Ragged)  # as `ask` left it
        mine = torch.zeros_like(stored.known)
        mine[check_places(asked, block.halo.off, "halo slots")] = True
        stored = replace(stored, known=stored.known & mine)
    rows, off, places = batch_rows(cfg, block, fixed, number)
    around = around_of(cfg, block)
    batch = drawn_batch(block, around, stored, rows, off, neighbors_of(cfg), key)
    share = fixed[SHARE].t[places] if SHARE in fixed else None
    held = fields_under(TRAINED, live)
    model, chosen = divisible(cfg.model), TrainingRows(batch, share)
    losses, entered = step_(model, cfg.training, block, held, chosen, stored, key)
    for stage, x in entered.items():
        live[f"{OWN}{stage}"].t.index_copy_(0, rows, x)
    slots, slot_off = batch.later.slots, batch.later.slot_off
    ages = (now - fixed[SEEN].t[slots]).double()
    sums = segment_sum(losses.double(), off), off.diff(), segment_sum(ages, slot_off)
    live[TALLY].t.add_(torch.stack([*(t.double() for t in sums), slot_off.diff().double()], dim=1))


def close_round(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send the trained model, and end the round.

    In: nothing. Out: `weights/*` (C, ...), `share` (C,) weight of the model, `loss`, `row_age` in
    batches and `rows_trained` (C,).
    """
    del inbox, key
    held = fields_under(TRAINED, state)
    with work_for(Kind.EVALUATION):
        x = features_for(block, is_compact(held))
        logits, _ = whole_pass(cfg, block, state, weights_of(held), x)
    base = {k.removeprefix(BASE): f.t[0] for k, f in state.items() if k.startswith(BASE)}
    reply = dict(named_fields("weights", finished(cfg.training, block, held, base)))
    loss, count, age, aged = state[TALLY].t.unbind(1)
    told = {"loss": loss / count.clamp(min=1), "row_age": age / aged.clamp(min=1)}
    told = {name: t.to(dtype_of(block)) for name, t in (told | {"rows_trained": count}).items()}
    alike_all = cfg.options.average == "clients"
    told["share"] = (count > 0) * (
        torch.ones_like(block.num_train) if alike_all else block.num_train
    )
    new = {name: f for name, f in state.items() if not name.startswith("round/")}
    if cfg.keep_optimizer:
        new |= stacked("optimizer", memory_of(cfg.training, held))
    return {**new, **remembered(logits, block)}, reply | {k: Stacked(t) for k, t in told.items()}


# What silos hold the server to.


def told_specs(cfg: Config, t: int) -> FieldSpecs:
    """Return the specs of what clients are told of an exchange."""
    start = FieldSpec(Shared, (), torch.int32, low=0, high=plan_of(cfg).batches - 1)
    return {**knob_specs(cfg.options), "round": exactly(t), "start": start}


def setup_steps(cfg: Config, key: Key) -> Steps:
    """Return the calls of `init`."""
    features = share_features_steps(cfg.model.features, key) if cfg.options.share_features else ()
    return Call(begin_stored, Kind.CONTROL, key), features


def round_steps(cfg: Config, t: int, key: Key) -> Steps:
    """Return the calls of `fit_round`: a client trains, and answers, or only answers."""
    own, told = key.fold("train", t), told_specs(cfg, t)
    gives = dict(weight_specs(cfg.model, Stacked))
    gives |= {"share": COUNT, "loss": LOSS, "row_age": LOSS, "rows_trained": LOSS}
    opens = Call(open_round, Kind.WEIGHTS, own, weight_specs(cfg.model, Shared))
    steps = Call(advance, Kind.CONTROL, own, told)
    closes = Call(close_round, Kind.WEIGHTS, own, {}, gives)
    if cfg.options.halo == "none":
        trains: Steps = (opens, steps, closes)
        return trains if cfg.everyone_trains else Maybe(trains)
    what, form = Kind.EMBEDDINGS, rows_form(divisible(cfg.model))
    pulled = pull_steps(ask, serve, store, what=what, key=own, inbox=told, form=form)
    assert isinstance(pulled, Either)  # clients that do not ask may answer
    most = plan_of(cfg).batches
    trains = (opens, *((Maybe((pulled, steps)),) * most), closes)
    return trains if cfg.everyone_trains else Either(trains, (pulled.ways[1],) * most)


def kept_specs(cfg: Config) -> FieldSpecs:
    """Return what a client's state holds between rounds."""
    model, features = divisible(cfg.model), cfg.options.share_features
    losses = {LOSSES: FieldSpec(Ragged, (), rows=NODES)}
    return {**state_specs(cfg), **history_specs(model, features=features), **losses}


def controller_of(options: FedAISOptions) -> Controller:
    """Return what sets tau."""
    return LOSS_INTERVAL if options.interval == "adaptive" and options.halo != "none" else FIXED


FEDAIS: Method[FedAISOptions] = Method(
    name="fedais",
    title="stored embeddings, important nodes, and exchanges as the loss falls (FedAIS)",
    reference="Li et al., Federated graph learning with adaptive importance-based sampling, "
    "AAAI 2025",
    options=FedAISOptions,
    init=init,
    round=fit_round,
    evaluate=HaloSums(),
    needs=Needs(lr=1e-3, score_first=True, controller=controller_of),
    calls=Calls(setup=setup_steps, round=round_steps, state=kept_specs),
)


def preset(name: str, title: str, **defaults: object) -> Method[Any]:
    """Return FedAIS under another name, with other defaults of its options."""
    own = {
        f.name: field(default=defaults.get(f.name, f.default), metadata=f.metadata)
        for f in fields(FedAISOptions)
    }
    space = {"__module__": __name__, "__doc__": FedAISOptions.__doc__}
    types = {"__annotations__": {f.name: f.type for f in fields(FedAISOptions)}}
    options = type(f"{name.capitalize()}Options", (), {**own, **space, **types})
    made = dataclass(options, config=STRICT, frozen=True)
    base: Method[Any] = FEDAIS
    return replace(base, name=name, title=title, options=made)


FEDALL = preset(
    "fedall",
    "stored embeddings, fetched in every batch, on all nodes",
    nodes="all",
    interval="fixed",
    tau=1,
)
FEDRANDOM = preset(
    "fedrandom",
    "stored embeddings, fetched in every batch, on random nodes",
    nodes="random",
    interval="fixed",
    tau=1,
)
FEDLOCAL = preset("fedlocal", "FedAIS on all nodes, without the halo", nodes="all", halo="none")
FEDPNS = preset(
    "fedpns",
    "stored embeddings of neighbors that are drawn every 2 batches (FedPNS)",
    nodes="all",
    interval="fixed",
    halo="held",
)
FEDAIS1 = preset("fedais1", "FedAIS that exchanges in every batch", interval="fixed", tau=1)
FEDAIS2 = preset("fedais2", "FedAIS on all nodes", nodes="all")
STALE = preset(
    "stale",
    "stored embeddings of all halo nodes, fetched every tau-th batch (VR-GCN, PipeGCN)",
    nodes="all",
    interval="fixed",
    halo="all",
)
PRESETS = (FEDALL, FEDRANDOM, FEDLOCAL, FEDPNS, FEDAIS1, FEDAIS2, STALE)
