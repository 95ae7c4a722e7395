"""FedAIS: a batch reads stored embeddings, and trains on the nodes that matter.

Li, Chen, Ren, Wang, Hu, Li, Yu and Chen, "Federated graph learning with adaptive importance-based
sampling", AAAI 2025, algorithm 1.

Every client keeps, for each hidden layer, the last embeddings of its own nodes and of its halo
(eq. 6). A round is `batches` steps on drawn training nodes; a batch needs one hop of neighbors,
whose embeddings are stored. Before every tau-th batch a client fetches the embeddings of those halo
nodes that the batch has drawn. Nodes are drawn by how much their loss has changed since the client
last took part (eq. 8), and tau shrinks as the validation loss falls (eq. 11); with `policy=ddpg`
an agent sets tau, and the share of its nodes that each client draws.

`nodes`, `interval` and `halo` are options, and the paper's baselines are presets of this program:

    fedall      all nodes; each batch fetches what it has drawn     tau = 1
    fedrandom   the same on drawn nodes
    fedlocal    all nodes, without the halo
    fedpns      all nodes; neighbors of other silos are drawn anew every 2 batches
    fedais1     drawn by importance, but fetched in every batch
    fedais2     all nodes, adaptive interval
    stale       all nodes; all slots are fetched every tau-th batch (VR-GCN, PipeGCN)

How we read the paper where it is silent: losses are computed once a round, by one pass over all own
nodes with the received weights, which also refreshes their stored rows. Owners that take part in a
round compute requested rows anew, with their current weights and from stored rows; the others send
their stored rows. F is the validation loss. Features do not leave: without `share_features` the
first layer sums over the client's own graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from pydantic import Field as Bounds
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from silograph.control import (
    BOUND_INTERVAL,
    FIXED,
    LOSS_INTERVAL,
    Controller,
    Knob,
    by_policy,
    knob_fields,
    knob_specs,
    knobs_of,
)
from silograph.control.base import BATCHES, EXCHANGES, PREFIX, ROW_BYTES
from silograph.control.bound_interval import MOVED, RATE
from silograph.control.policy import AGENT, AGENT_SEED, EXPLORE, TARGET, TIME
from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, ProtocolError
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
from silograph.core.setting_values import lin
from silograph.core.work import report_rows, work_for, work_of
from silograph.evaluation.evaluate import remembered
from silograph.evaluation.scoring import HaloSums
from silograph.exchange.passes import divisible
from silograph.exchange.pull import (
    ASKED,
    HALO,
    OWN,
    PASSES,
    SEEN,
    SENT,
    VERSION,
    PullForm,
    answer,
    blank_history,
    blank_moved,
    history_specs,
    moved_only,
    moved_specs,
    pull,
    pull_steps,
    put_own_,
    rows_form,
    share_features,
    share_features_steps,
    stored_in,
    wanted_rows,
    with_arrived,
    with_own,
)
from silograph.exchange.sent_weights import (
    decode_weights,
    encode_reply,
    encode_weights,
    learn_form,
    learn_steps,
    mean_of,
    state_spec,
)
from silograph.exchange.sent_weights import inbox_spec as weights_down
from silograph.exchange.sent_weights import reply_spec as weights_up
from silograph.federation.base import Federation, WeightedMean, overwrites, positions_of, reads
from silograph.federation.field_specs import LOSS, NODES, TRAINED, FieldSpec, FieldSpecs, exactly
from silograph.federation.program import Call, Calls, Either, Maybe, Repeat, Steps
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.methods.base import (
    Caution,
    Method,
    MethodConfig,
    Needs,
    RoundReport,
    ServerState,
    Share,
    keep_previous_if_not_finite,
    preset,
)
from silograph.methods.local_training import (
    begin,
    prefix_fields,
    stacked,
    state_specs,
)
from silograph.nn.conv import Params
from silograph.nn.fit import (
    LOSS_FLOPS,
    TrainingFields,
    TrainingInputs,
    check_fit,
    check_places,
    dtype_of,
    features_for,
)
from silograph.nn.mini_batches import FULL, Fanout, Full, Neighbors
from silograph.nn.optim import SGD, Adam, Optimizer
from silograph.nn.segment import segment_sum
from silograph.nn.stored_rows import (
    STEPS,
    StoredRows,
    Surroundings,
    TrainingRows,
    batch_of_edges,
    batch_pass,
    drawn_around,
    drawn_batch,
    finish_training,
    groups_by_steps,
    is_compact,
    memory_of,
    put_clients,
    rows_entering,
    start_training,
    step_,
    stored_stages,
    surroundings,
    take_clients,
    weights_of,
    whole_batch,
)
from silograph.selection.base import select_uniform
from silograph.task.registry import task_of

# --- Options of FedAIS (`silograph.methods.fedais`), and what follows from them for a round ------


READ_WITH_ROWS = {"read_if": {"halo": ("drawn", "held", "all")}}
DRAWS = {"read_if": {"nodes": ("random", "importance")}}
WEIGHS = {"read_if": {"nodes": ("importance",)}}
MOST_COUNT = 2**31  # of what ops count in whole numbers of 32 bits
MOST_BATCHES = 100  # batches between two exchanges
TAU, RATIO = "tau", "ratio"  # knobs


@checked_dataclass(frozen=True, config=STRICT)
class FedAISOptions:
    """The help texts are the documentation of the fields."""

    nodes: Literal["all", "random", "importance"] = field(
        default="importance",
        metadata={
            "help": "training nodes of a round: all, or a share, drawn at random or by importance"
        },
    )
    interval: Literal["fixed", "adaptive", "bound"] = field(
        default="adaptive",
        metadata={
            "read_if": READ_WITH_ROWS["read_if"] | {"policy": ("rule",)},
            "help": "batches between two exchanges: always tau (fixed), fewer as the loss falls "
            "(adaptive), or of the least error bound by estimated constants (bound)",
        },
    )
    halo: Literal["none", "drawn", "held", "all"] = field(
        default="drawn",
        metadata={
            "help": "what an exchange fetches: nothing (none), what the next batch has drawn "
            "(drawn), what all batches until the next exchange have, which read no other slots "
            "(held), or all slots (all)"
        },
    )
    tau: Annotated[int, Bounds(ge=1, le=MOST_BATCHES)] = field(
        default=2,
        metadata=READ_WITH_ROWS
        | {"help": "batches between two exchanges at first", "knob": lin(1, MOST_BATCHES)},
    )
    ratio: Share = field(
        default=0.7,
        metadata=DRAWS
        | {
            "help": "share of its training nodes that a client draws",
            "knob": lin(0.05, 1.0),
            "by_client": True,
        },
    )
    batches: Annotated[int, Bounds(ge=1, le=1000)] = field(
        default=10, metadata={"help": "batches of a round, in each of its local epochs"}
    )
    drawn: Annotated[int, Bounds(ge=0, lt=MOST_COUNT)] = field(
        default=10,
        metadata={"help": "neighbors drawn for a node of a batch, halo included; 0: all"},
    )
    warmup: Annotated[int, Bounds(ge=1, lt=MOST_COUNT)] = field(
        default=1,
        metadata=WEIGHS | {"help": "rounds of a client in which its nodes are drawn evenly"},
    )
    floor: Annotated[float, Bounds(ge=0, le=1)] = field(
        default=0.1,
        metadata=WEIGHS | {"help": "share of the probability that all nodes have alike"},
    )
    unbiased: bool = field(
        default=False,
        metadata={"help": "draw systematically, and weigh losses so that steps are unbiased"},
    )
    owners: Literal["recompute", "stored"] = field(
        default="recompute",
        metadata=READ_WITH_ROWS
        | {"help": "rows that are asked for: worked out anew (recompute), or as they were stored"},
    )
    sent: Literal["exact", "int8"] = field(
        default="exact",
        metadata=READ_WITH_ROWS
        | {"help": "rows that are sent: exact, or as bytes with a scale for each row (int8)"},
    )
    moved: Annotated[float, Bounds(ge=0)] | None = field(
        default=None,
        metadata=READ_WITH_ROWS
        | {
            "help": "send only rows that moved by more than this share of their length since they "
            "were last sent (none: all that are asked for)"
        },
    )
    share_features: bool = field(
        default=False, metadata={"help": "features leave, too: the first layer sees the halo"}
    )
    average: Literal["clients", "nodes"] = field(
        default="clients",
        metadata={"help": "mean of the models: plain (clients), or weighted by training nodes"},
    )
    policy: Literal["rule", "ddpg", "drawn"] = field(
        default="rule",
        metadata={
            "help": "what sets tau, and the ratio of each client: rule (tau by interval; ratio "
            "stays), ddpg (an agent) or drawn (by chance)"
        },
    )
    target: Share = field(default=0.9, metadata=TARGET)
    time: Literal["virtual", "measured", "none"] = field(default="virtual", metadata=TIME)
    explore: bool = field(default=True, metadata=EXPLORE)
    agent: str | None = field(default=None, metadata=AGENT)
    agent_seed: int = field(default=0, metadata=AGENT_SEED)


Config = MethodConfig[FedAISOptions]


@dataclass(frozen=True)
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
    return Plan(total, int(cfg.knobs[TAU]) if TAU in cfg.knobs else cfg.options.tau)


def knobs_of_run(options: FedAISOptions) -> tuple[Knob, ...]:
    """Return the knobs of a run: tau alone with `policy=rule`, else all that have an effect."""
    if options.policy == "rule":
        return knobs_of(options, (TAU,))
    is_used = {TAU: options.halo != "none", RATIO: options.nodes != "all"}
    return knobs_of(options, [name for name, used in is_used.items() if used])


def controller_of(options: FedAISOptions) -> Controller:
    """Return the controller that sets the knobs."""
    rules = {"adaptive": LOSS_INTERVAL, "bound": BOUND_INTERVAL}
    rule = FIXED if options.halo == "none" else rules.get(options.interval, FIXED)
    return by_policy(options, rule)


def moving_knobs(options: FedAISOptions) -> frozenset[str]:
    """Return the names of the knobs that may change during a run."""
    if controller_of(options) is FIXED:
        return frozenset()
    return frozenset(knob.name for knob in knobs_of_run(options))


# --- Names of fields in a client's state, and helpers that read them -----------------------------
#
# C: clients.


LOSSES = "importance/loss"


IN_TRAINING, BASE = "round/model/", "round/base/"


ROWS, SHARE = "round/rows", "round/share"


DONE = "round/done"  # (C,) int32 batches of this round so far


TALLY = "round/tally"  # (C, 4): loss, rows, ages, and slots, summed over the batches so far


FIXED_IN_ROUND = (ROWS, SHARE, ASKED, SEEN)


def neighbors_of(cfg: Config) -> Neighbors:
    """Return the neighbor sampler of a batch."""
    return Fanout((cfg.options.drawn,)) if cfg.options.drawn else FULL


def stored_of(cfg: Config, state: State) -> StoredRows:
    """Return the stored rows that the clients read."""
    return stored_in(state, halo=cfg.options.halo != "none")


def fields_under(prefix: str, state: State) -> TrainingFields:
    """Return the fields whose names begin with a prefix, named without it."""
    return {k.removeprefix(prefix): f for k, f in state.items() if k.startswith(prefix)}


def is_compiled(cfg: Config) -> bool:
    """Return whether batches are trained by the compiled kernels.

    They read slots' rows from the second stage on; with shared features torch trains.
    """
    # Kernels of stored rows do not drop features of a batch's senders.
    drops = cfg.backend.compiled and divisible(cfg.model).stages[0].drop > 0
    return cfg.backend.compiled and not cfg.options.share_features and not drops


def clients_in_training(cfg: Config, state: State) -> TrainingFields:
    """Return the models in training, weights by name; empty between rounds."""
    fields = fields_under(IN_TRAINING, state)
    if not fields or not is_compiled(cfg):
        return fields
    from silograph.nn import stored_compiled  # numba takes a while to import

    return stored_compiled.unpack_weights(divisible(cfg.model), fields)


def pack_for_training(cfg: Config, fields: TrainingFields) -> TrainingFields:
    """Return the fields of clients before their first step in the form that training uses."""
    if not is_compiled(cfg):
        return fields
    from silograph.nn import stored_compiled

    return stored_compiled.pack_weights(divisible(cfg.model), fields)


def sends_bytes(cfg: Config) -> bool:
    """Return whether exchanged rows are bytes with a scale for each row."""
    return cfg.options.sent == "int8"


def pull_form_of(cfg: Config) -> PullForm:
    """Return the fields that an exchange carries."""
    sends_changes = cfg.options.moved is not None
    return rows_form(divisible(cfg.model), small=sends_bytes(cfg), since=sends_changes)


def reports_moves(cfg: Config) -> bool:
    """Return whether clients report how far their models have moved; `interval=bound` needs it."""
    return controller_of(cfg.options) is BOUND_INTERVAL


def squared_move(block: ClientBlock, fields: TrainingFields, start: Mapping[str, Tensor]) -> Tensor:
    """Return the squared length of each client's move from shared weights, (C,) float64.

    Rows of features that a client does not have are left out: they only decay.
    """
    total = torch.zeros(block.num_clients, dtype=torch.float64, device=block.off.device)
    for name, value in ((k.removeprefix("weights/"), f) for k, f in fields.items()):
        if name not in start:  # moments
            continue
        if isinstance(value, Ragged):
            assert isinstance(block.x, SparseRows)  # only then are there used rows
            change = value.t - start[name][block.x.used.feature]
            total += segment_sum(change.double().square().sum(1), value.off)
        else:
            change = (value.t - start[name]).double().flatten(1)
            total += change.square().sum(1)
    return total


def untouched_rows_after(cfg: Config, weights: Mapping[str, Tensor], steps: int) -> Params:
    """Return first weights after `steps` steps without data: what rows of unused features become.

    The server's mean needs them for the rows that a client does not send. Empty where rows follow
    no such path: with a kept optimizer, or with features of other clients.
    """
    if cfg.keep_optimizer or cfg.options.share_features:
        return {}
    rows = {n: cfg.backend.rest(cfg.training, weights[n], steps) for n in cfg.model.first_maps}
    return {f"weights/{name}": w for name, w in rows.items()}


def surroundings_of(cfg: Config, block: ClientBlock) -> Surroundings:
    """Return the graph that the clients sum over."""
    return surroundings(block, halo=cfg.options.halo != "none")


# --- Which training nodes a client trains on: importance by the change of a node's loss ----------
#
# Li, Chen, Ren, Wang, Hu, Li, Yu and Chen, "Federated graph learning with adaptive importance-
# based sampling", AAAI 2025, eq. 8: p_v = |Delta_v| / sum |Delta|, where Delta_v is the change of
# v's loss between two consecutive local models.
#
# What we changed: a share of the probability is spread evenly (`floor`), so that no node is never
# drawn; nodes whose losses all stayed are alike. Nodes are drawn without replacement. The mean of
# a batch's losses is then biased towards important nodes, as in the paper; the functions
# `inclusion_probabilities` and `draw_systematically` are the unbiased way.
#
# Everything is done for all clients at once; draws depend on keys of nodes, not on their order.
#
# C: clients. t: nodes of all clients, by client, `off` (C + 1,) of each.


LARGEST_CHANGE = 1e200  # of a change of a loss, so that sums are finite
LEAST = 2.0**-54  # below every positive draw


def probabilities(change: Tensor, off: Tensor, floor: float) -> Tensor:
    """Return the probability of each node, (t,) float64, which sums to 1 for each client.

    Args:
        change: (t,) of each node's loss.
        off: (C + 1,).
        floor: share of the probability that all nodes have alike.
    """
    # What is infinite or NaN counts as no change: with it a client would draw nothing, and where
    # lengths are added up along all clients, nor would those after it.
    size = change.double().abs()
    size = size.where(size.isfinite(), 0).clamp(max=LARGEST_CHANGE)
    total = segment_sum(size, off)
    client, count = owners(off), off.diff().double()
    uniform = 1 / count[client]
    by_change = torch.where(total[client] > 0, size / total.clamp(min=LEAST**2)[client], uniform)
    return (1 - floor) * by_change + floor * uniform


def draw_order(p: Tensor, off: Tensor, row_key: Tensor, key: Key) -> Tensor:
    """Return all nodes (t,) int64, each client's in the order in which they are drawn.

    Without replacement, each next one with a probability in proportion to p among those left:
    exponential clocks of rate p ring in that order (Efraimidis and Spirakis, "Weighted random
    sampling with a reservoir", 2006).

    Args:
        p: (t,) float64, 0 or more.
        off: (C + 1,).
        row_key: (t,) int64.
        key: of the draw.
    """
    clock = -torch.log(key.uniform(row_key)[:, 0].clamp(min=LEAST)) / p
    return by_client(clock.argsort(stable=True), off)


def by_client(order: Tensor, off: Tensor) -> Tensor:
    """Group an order of all nodes (t,) by client, clients ascending, the order kept inside each."""
    return order[owners(off)[order].argsort(stable=True)]


def first_nodes(order: Tensor, off: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first `count` (C,) of each client's nodes, and offsets (C + 1,)."""
    rank = torch.arange(len(order), device=order.device) - off[owners(off)]
    return order[rank < count[owners(off)]], offsets(count)


def inclusion_probabilities(p: Tensor, off: Tensor, count: Tensor) -> Tensor:
    """Return the probability that each node is drawn, pi = min(1, c p), (t,) float64.

    c is such that a client's sum to `count` (C,), at most its number of nodes; with fewer nodes of
    p > 0 than that these are certain.
    """
    client, certain = owners(off), torch.zeros_like(p, dtype=torch.bool)
    while True:
        # Sums of those left alone: a difference of running sums would lose small ones.
        remaining = segment_sum(torch.where(certain, 0, p), off)
        open_places = count - segment_sum(certain.long(), off)
        factor = torch.where(remaining > 0, open_places / remaining.clamp(min=LEAST**2), 0)[client]
        newly_certain = ~certain & (factor * p >= 1 - 1e-12)
        if not bool(newly_certain.any()):
            return torch.where(certain, 1, factor * p)
        certain |= newly_certain


def draw_systematically(
    pi: Tensor, off: Tensor, row_key: Tensor, key: Key, client_key: Tensor
) -> Tensor:
    """Draw nodes systematically, (t,) bool: each with probability pi, almost a fixed number.

    Nodes stand on a line, in an order drawn by key, each with a piece of its length pi; those are
    drawn whose piece meets a grid of unit steps with a random start (Madow, 1949).

    Args:
        pi: (t,) float64, at most 1.
        off: (C + 1,).
        row_key: (t,) int64.
        key: of the draw.
        client_key: (C,) int64, of the starts.
    """
    client = owners(off)
    order = by_client(key.fold("order").words(row_key, 1)[:, 0].argsort(stable=True), off)
    length = pi[order]
    end = length.cumsum(0)
    begin = end - length
    first = begin[off[:-1].clamp(max=max(len(pi) - 1, 0))][client]
    start = key.fold("start").uniform(client_key)[:, 0][client]
    is_hit = torch.floor(end - first - start) > torch.floor(begin - first - start)
    is_drawn = torch.empty_like(is_hit)
    is_drawn[order] = is_hit
    return is_drawn


# --- fedais clients ------------------------------------------------------------------------------
# What clients do in a round on stored rows: the ops of FedAIS (`silograph.methods.fedais`).
#
# State between rounds: see `silograph.exchange.pull`; `importance/loss` (n,) of training nodes
# when last computed; `optimizer/*` if kept. Within a round `round/*`: the model in training, and
# the nodes drawn. C: clients. n: rows. S: halo slots. m: nodes drawn in a round.


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
    start = inbox if cfg.sent.plain else decode_weights(cfg, block, state, inbox)
    weights, model = under("weights", start), divisible(cfg.model)
    memory = under("optimizer", state) if cfg.keep_optimizer else None
    check_fit(cfg.training, TrainingInputs(block, weights, memory, key))
    is_compact_run = not cfg.options.share_features
    fields = start_training(model, cfg.training, block, weights, memory, compact=is_compact_run)
    logits, entered = whole_pass(cfg, block, state, weights, block.x)
    losses = train_losses(cfg, block, logits)
    passes = state[PASSES].t
    ratio_field = inbox.get(f"{PREFIX}{RATIO}")
    ratio = cfg.options.ratio if ratio_field is None else ratio_field.t
    drawn_fields = draw_nodes(
        cfg, block, losses - state[LOSSES].t, passes, key.fold("nodes"), ratio
    )
    new = with_own(state, block, entered)
    new |= {PASSES: Stacked(passes + 1), LOSSES: Ragged(losses, block.off), **drawn_fields}
    new |= {f"{IN_TRAINING}{name}": f for name, f in pack_for_training(cfg, fields).items()}
    needs_base = reports_moves(cfg) or not cfg.sent.plain
    if is_compact(fields) or needs_base:  # what the other rows of the first weights were
        for name in weights if needs_base else model.first_maps:
            w = weights[name]
            new[f"{BASE}{name}"] = Stacked(w.expand(block.num_clients, *w.shape))
    zeros = torch.zeros(block.num_clients, 4, dtype=torch.float64, device=block.off.device)
    return new | {TALLY: Stacked(zeros), DONE: Stacked(torch.zeros_like(passes))}, {}


def whole_pass(
    cfg: Config, block: ClientBlock, state: State, weights: Mapping[str, Tensor], x: Rows
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return logits (n, K) of all own rows, and what enters stages; slots' rows are as stored."""
    stored, around = stored_of(cfg, state), surroundings_of(cfg, block)
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
    is_uniform = warm | torch.tensor(options.nodes != "importance", device=warm.device)
    used_change = torch.where(is_uniform[block.client[train]], 0, change[train])
    p = probabilities(used_change, off, options.floor)
    if options.unbiased:
        pi = inclusion_probabilities(p, off, count)
        is_drawn = draw_systematically(pi, off, keys, key, segment_sum(keys, off))
        share = 1 / (block.num_train[owners(off)] * pi)
    else:
        order, _ = first_nodes(draw_order(p, off, keys, key), off, count)
        is_drawn = torch.zeros(len(train), dtype=torch.bool, device=train.device)
        is_drawn[order] = True
    # The order of drawing would put the most important nodes into the first batch.
    shuffled = by_client(key.fold("order").words(keys, 1)[:, 0].argsort(stable=True), off)
    shuffled = shuffled[is_drawn[shuffled]]
    rows, row_off = train[shuffled], offsets(segment_sum(is_drawn.long(), off))
    local_rows = (rows - block.off[block.client[rows]]).int()
    fields = {ROWS: Ragged(local_rows, row_off)}
    if options.unbiased:
        fields[SHARE] = Ragged(share[shuffled].to(dtype_of(block)), row_off)
    return fields


def batch_rows(
    cfg: Config, block: ClientBlock, state: State, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows (b,) of every client's batch, offsets (C + 1,), and places among `ROWS`."""
    rows = state[ROWS]
    assert isinstance(rows, Ragged)  # as `draw_nodes` left it
    size, batches = rows.off.diff(), cfg.options.batches
    batch_size, remainder, batch = size // batches, size % batches, number % batches
    first = rows.off[:-1] + batch * batch_size + remainder.clamp(max=batch)
    count = batch_size + (batch < remainder).long()
    places, off = ranges(first, count), offsets(count)
    return rows.t[places].long() + block.off[:-1][owners(off)], off, places


def drawn_slots(cfg: Config, block: ClientBlock, state: State, number: int, key: Key) -> Tensor:
    """Return the slots (k,) of the block that batch `number` of a round draws, with repetitions."""
    rows, off, _ = batch_rows(cfg, block, state, number)
    around = surroundings_of(cfg, block)
    drawn_edges = drawn_around(around, rows, off, neighbors_of(cfg), key.fold("batch", number))
    slot = around.slot[drawn_edges.neighbor]
    return slot[slot >= 0]


@reads(ROWS, VERSION)
def ask(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Request the slots to fetch. In: `start`, `round`, `knobs/tau`. Out: `slot` (k,).

    `halo=drawn` requests the slots that the next batch has drawn, `halo=held` those of all batches
    until the next exchange, `halo=all` every slot. Where only rows that moved are sent, the reply
    also has `version` (k,), the version that the client has of each.
    """
    start, tau = int(inbox["start"].t), int(inbox["knobs/tau"].t)
    if cfg.options.halo == "all":
        slots = torch.arange(len(block.halo.key), device=block.off.device)
    else:
        next_batches = range(start, min(start + tau, plan_of(cfg).batches))
        numbers = next_batches if cfg.options.halo == "held" else next_batches[:1]
        slots = torch.cat([drawn_slots(cfg, block, state, n, key) for n in numbers]).unique()
    slot_off = torch.searchsorted(slots, block.halo.off)
    first = block.halo.off[:-1][owners(slot_off)]
    requested_slots = Ragged((slots - first).int(), slot_off)
    reply = {"slot": requested_slots}
    if cfg.options.moved is not None:
        reply["version"] = Ragged(state[VERSION].t[slots], slot_off)
    return {**state, ASKED: requested_slots}, reply


@reads("history/", SENT, f"{IN_TRAINING}weights/")
@overwrites(OWN)
def serve(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send the requested rows. In: `row` (k,) int32. Out: see `history.answer`.

    Where only rows that moved are sent: see `moved_rows.moved_only`.
    """
    del key
    row, model = inbox["row"], divisible(cfg.model)
    assert isinstance(row, Ragged)  # from `pull`
    trained_fields = clients_in_training(cfg, state)
    if trained_fields and cfg.options.owners == "recompute":
        rows, stored = wanted_rows(block, row), stored_of(cfg, state)
        around, later = surroundings_of(cfg, block), len(stored_stages(model)) > 1
        batch = batch_of_edges(block, around, stored, rows, row.off, later=later)
        x, weights = features_for(block, is_compact(trained_fields)), weights_of(trained_fields)
        with torch.no_grad():
            entered = rows_entering(model, weights, block, x, batch, stored)
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
    """Store the received rows. In: see `history.with_arrived`. Out: nothing."""
    del key
    model, batch_number = divisible(cfg.model), number_of(cfg, inbox)
    return with_arrived(model, block, state, inbox, batch_number, small=sends_bytes(cfg)), {}


def number_of(cfg: Config, inbox: Payload) -> int:
    """Return the number of the next batch among those of all rounds."""
    return (int(inbox["round"].t) - 1) * plan_of(cfg).batches + int(inbox["start"].t)


# --- How a client trains on stored rows between two exchanges: ops of FedAIS ---------------------
#
# State: see `silograph.methods.fedais`. C: clients. n: rows. m: nodes drawn in a round.


@reads("history/", IN_TRAINING, *FIXED_IN_ROUND, TALLY, DONE)
@overwrites(IN_TRAINING, OWN, TALLY)
def advance(
    cfg: Config, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Train on the batches up to the next exchange. In: `start`, `round`, `knobs/tau`.

    Raises:
        ProtocolError: `start` is not the next batch, or no rows were asked for where it needs some.
    """
    check_next_batch(state, int(inbox["start"].t))
    if cfg.options.halo == "held" and ASKED not in state:
        raise ProtocolError(
            "expected an exchange of rows before the first batch of a round with halo=held, got "
            "none: the slots that a batch may read are those that it has asked for"
        )
    start, tau, total = int(inbox["start"].t), int(inbox["knobs/tau"].t), plan_of(cfg).batches
    end = total if cfg.options.halo == "none" else min(start + tau, total)
    live = {name: f for name, f in state.items() if name.startswith((IN_TRAINING, OWN, TALLY))}
    fixed = {name: f for name, f in state.items() if name.startswith((*FIXED_IN_ROUND, HALO))}
    first_of_round = number_of(cfg, inbox) - start
    if is_compiled(cfg):
        train_batches_(cfg, block, fixed, live, range(start, end), first_of_round, key)
        return {**state, **live, DONE: Stacked(torch.full_like(state[DONE].t, end))}, {}
    for number in range(start, end):
        batch_key = key.fold("batch", number)
        active = batch_rows(cfg, block, state, number)[1].diff() > 0
        for clients in groups_by_steps(fields_under(IN_TRAINING, live), active):
            if len(clients) == block.num_clients:
                train_batch_(cfg, block, fixed, live, number, first_of_round + number, batch_key)
                continue
            with work_of(clients):
                live_part, fixed_part = (
                    take_clients(live, clients),
                    fields_of(take_all(fixed, clients)),
                )
                train_batch_(
                    cfg,
                    block.called(clients),
                    fixed_part,
                    live_part,
                    number,
                    first_of_round + number,
                    batch_key,
                )
            live = put_clients(live, live_part, clients)
    return {**state, **live, DONE: Stacked(torch.full_like(state[DONE].t, end))}, {}


def check_next_batch(state: State, number: int) -> None:
    """Raise `ProtocolError` unless all batches before a number are done, and no others.

    Without this a server could have one batch trained on again and again, or one alone.
    """
    batches_done = state[DONE].t
    if not bool((batches_done == number).all()):
        raise ProtocolError(
            f"expected batch {int(batches_done.min())} of the round next, got {number}: batches "
            "are trained on in their order, each once"
        )


def train_batches_(
    cfg: Config,
    block: ClientBlock,
    fixed: State,
    live: TrainingFields,
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

    stored, keys = readable_rows(cfg, block, fixed, live), [key.fold("batch", n) for n in numbers]
    pairs = zip(numbers, keys, strict=True)
    training_rows = [
        draw_training_rows(cfg, block, fixed, stored, number, batch_key)
        for number, batch_key in pairs
    ]
    model, fields = divisible(cfg.model), fields_under(IN_TRAINING, live)
    losses = stored_compiled.train_(model, cfg.training, block, fields, training_rows, stored, keys)
    for number, rows, loss in zip(numbers, training_rows, losses, strict=True):
        tally_(fixed, live, rows, loss, first + number)


def readable_rows(
    cfg: Config, block: ClientBlock, fixed: State, live: TrainingFields
) -> StoredRows:
    """Return the stored rows that batches may read up to the next exchange."""
    stored = stored_of(cfg, {**fixed, **live})
    if cfg.options.halo != "held":
        return stored
    requested_slots = fixed[ASKED]
    assert isinstance(requested_slots, Ragged)  # as `ask` left it
    is_requested = torch.zeros_like(stored.known)
    is_requested[check_places(requested_slots, block.halo.off, "halo slots")] = True
    return replace(stored, known=stored.known & is_requested)


def draw_training_rows(
    cfg: Config, block: ClientBlock, fixed: State, stored: StoredRows, number: int, key: Key
) -> TrainingRows:
    """Return the rows of batch `number` of a round, with neighbors drawn by key."""
    rows, off, places = batch_rows(cfg, block, fixed, number)
    around = surroundings_of(cfg, block)
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
    drawn_rows, share = fixed[ROWS], fixed[SHARE].t[places]
    assert isinstance(drawn_rows, Ragged)  # as `draw_nodes` left it
    factor = drawn_rows.off.diff().to(share.dtype) / off.diff().clamp(min=1)
    return share * factor[owners(off)]


def tally_(
    fixed: State,
    live: TrainingFields,
    training_rows: TrainingRows,
    losses: Tensor,
    batch_number: int,
) -> None:
    """Add a batch, its rows' losses (b,) and its number among those of all rounds to the tally."""
    batch = training_rows.batch
    ages = (batch_number - fixed[SEEN].t[batch.later.slots]).double()
    sums = segment_sum(losses.double(), batch.off), batch.off.diff()
    age_counts = segment_sum(ages, batch.later.slot_off), batch.later.slot_off.diff()
    live[TALLY].t.add_(torch.stack([t.double() for t in (*sums, *age_counts)], dim=1))


def train_batch_(
    cfg: Config,
    block: ClientBlock,
    fixed: State,
    live: TrainingFields,
    number: int,
    batch_number: int,
    key: Key,
) -> None:
    """Take a step with every client; changes `live` in place, with the rows of its batch.

    Args:
        cfg: of the method.
        block: clients that all have a batch of this number.
        fixed: nodes drawn and rows of the halo.
        live: models in training and own rows.
        number: of the batch in its round.
        batch_number: of the batch among those of all rounds.
        key: of the batch.
    """
    stored = readable_rows(cfg, block, fixed, live)
    training_rows, model = (
        draw_training_rows(cfg, block, fixed, stored, number, key),
        divisible(cfg.model),
    )
    fields = fields_under(IN_TRAINING, live)
    losses, stage_inputs = step_(model, cfg.training, block, fields, training_rows, stored, key)
    for stage, x in stage_inputs.items():
        live[f"{OWN}{stage}"].t.index_copy_(0, training_rows.batch.rows, x)
    tally_(fixed, live, training_rows, losses, batch_number)


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
    check_next_batch(state, plan_of(cfg).batches)
    fields = clients_in_training(cfg, state)
    with work_for(Kind.EVALUATION):
        x = features_for(block, is_compact(fields))
        logits, _ = whole_pass(cfg, block, state, weights_of(fields), x)
    base = {k.removeprefix(BASE): f.t[0] for k, f in state.items() if k.startswith(BASE)}
    squared_moves = {"moved": squared_move(block, fields, base)} if reports_moves(cfg) else {}
    reply = dict(prefix_fields("weights", finish_training(cfg.training, block, fields, base)))
    loss, count, age, age_count = state[TALLY].t.unbind(1)
    figures = {"loss": loss / count.clamp(min=1), "row_age": age / age_count.clamp(min=1)}
    figures = {
        name: t.to(dtype_of(block))
        for name, t in (figures | {"rows_trained": count} | squared_moves).items()
    }
    equal_weights = cfg.options.average == "clients"
    figures["share"] = (count > 0) * (
        torch.ones_like(block.num_train) if equal_weights else block.num_train
    )
    new = {name: f for name, f in state.items() if not name.startswith("round/")}
    if cfg.keep_optimizer:
        new |= keep_previous_if_not_finite(
            stacked("optimizer", memory_of(cfg.training, fields)), state
        )
    new |= remembered(logits, block)
    fields_to_send: dict[str, Field] = {**reply, **{k: Stacked(t) for k, t in figures.items()}}
    if cfg.sent.plain:
        return new, fields_to_send
    if cfg.sent.rows == "used":
        fields_to_send["steps"] = fields[STEPS]
    start = {f"weights/{name}": Shared(w) for name, w in base.items()}
    return encode_reply(
        cfg, new, start, fields_to_send, untouched_rows_after(cfg, base, plan_of(cfg).batches)
    )


# --- Server --------------------------------------------------------------------------------------


def init(fed: Federation, cfg: Config, weights: Params, key: Key) -> ServerState:
    """Set up the clients, which share features if they may."""
    fed.call(begin_stored, {}, what=Kind.CONTROL, key=key)
    memory = learn_form(fed, cfg, key)
    if cfg.options.share_features:
        share_features(fed, key)
    return ServerState(weights=weights, memory=memory)


def check(cfg: Config) -> None:
    """Raise `ConfigError` for a model or a config without such steps."""
    if cfg.options.halo != "none" and not stored_stages(divisible(cfg.model)):
        raise ConfigError(
            "expected a model with a layer after the first that sums over neighbors, which reads "
            f"the rows that are exchanged, got none in {cfg.model.noun}: use model=sage, gcn, "
            "graphconv, gin or appnp with layers=2 or more, or halo=none"
        )
    if cfg.schedule.batch_size is not None or not isinstance(cfg.schedule.neighbors, Full):
        name = "fanout" if isinstance(cfg.schedule.neighbors, Fanout) else "neighbors"
        name = name if cfg.schedule.batch_size is None else "batch_size"
        raise ConfigError(
            f"fedais draws batches and neighbors itself: leave {name} out; its options batches and "
            "drawn say how many batches a round has, and how many neighbors a node draws"
        )
    if cfg.options.share_features and cfg.options.halo == "none":
        raise ConfigError("expected a halo for share_features, got halo=none: leave one out")
    if cfg.options.share_features and not cfg.sent.plain:
        raise ConfigError(
            "expected weights_as=exact and weight_rows=all with share_features, whose clients "
            "train on features of others, too: leave one out"
        )
    if not knobs_of_run(cfg.options):
        raise ConfigError(
            f"expected an option that policy={cfg.options.policy} can set, got none: leave out "
            "nodes=all, for the ratio, or halo=none, for tau"
        )


def fit_round(
    fed: Federation, cfg: Config, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients, with exchanges in between, and average."""
    assert state.weights is not None  # set by init
    round_key, plan, client_ids = key.fold("train", t), plan_of(cfg), cfg.selected
    if client_ids is None:
        client_ids = tuple(select_uniform(fed.ids, cfg.participation, key.fold("select", t)))
    inbox = encode_weights(cfg, state.weights, state.memory, positions_of(fed.ids, client_ids))
    inbox |= knob_fields({n: t for n, t in cfg.knobs.items() if n == RATIO}, fed.ids, client_ids)
    fed.call(open_round, inbox, what=Kind.WEIGHTS, key=round_key, to=client_ids, lacking=True)
    row_bytes = 0
    for start in plan.starts:
        request = exchange_request(cfg, t, start)
        row_bytes += exchange(fed, cfg, request, client_ids, round_key)
        fed.call(advance, request, what=Kind.CONTROL, key=round_key, to=client_ids, lacking=True)
    reduce = mean_of_models(cfg, state, plan)
    reply = fed.call(
        close_round, {}, what=Kind.WEIGHTS, key=round_key, to=client_ids, reduce=reduce
    )
    facts = facts_of(fed, cfg, client_ids, plan, state.weights) | {ROW_BYTES: float(row_bytes)}
    names = ("row_age", "rows_trained", *((MOVED,) if reports_moves(cfg) else ()))
    if "loss" not in reply:  # no selected client has a training node
        return state, RoundReport(client_ids, None, facts | dict.fromkeys(names, 0.0))
    facts |= {name: float(reply[name].t) for name in names}
    return ServerState(under("weights", reply), state.memory), RoundReport(
        client_ids, float(reply["loss"].t), facts
    )


def mean_of_models(cfg: Config, state: ServerState, plan: Plan) -> WeightedMean:
    """Return the mean of the trained models."""
    weights = state.weights
    assert weights is not None  # set by init

    def after(name: str, steps: int) -> Tensor:
        """Return the rows that a client does not use after `steps` steps."""
        return untouched_rows_after(cfg, weights, steps)[name]

    untouched_rows = untouched_rows_after(cfg, weights, plan.batches)
    return mean_of(cfg, "share", weights, state.memory, untouched_rows, steps="steps", after=after)


def exchange(
    fed: Federation, cfg: Config, request: Mapping[str, Shared], client_ids: Sequence[str], key: Key
) -> int:
    """Fetch rows for the clients `client_ids` from all clients; return the bytes sent."""
    if cfg.options.halo == "none":
        return 0
    bytes_before = fed.ledger.bytes
    form, what = pull_form_of(cfg), Kind.EMBEDDINGS
    pull(fed, ask, serve, store, what=what, key=key, inbox=request, to=client_ids, form=form)
    return fed.ledger.bytes - bytes_before


def exchange_request(cfg: Config, t: int, start: int) -> dict[str, Shared]:
    """Return the request that starts an exchange and the batches that follow it."""
    tau = cfg.knobs.get(TAU, torch.tensor(cfg.options.tau))
    batch_numbers = {"round": t, "start": start}
    fields = {k: Shared(torch.tensor(n, dtype=torch.int32)) for k, n in batch_numbers.items()}
    return {"knobs/tau": Shared(tau), **fields}


def facts_of(
    fed: Federation,
    cfg: Config,
    client_ids: Sequence[str],
    plan: Plan,
    weights: Mapping[str, Tensor],
) -> dict[str, float]:
    """Return the facts of a round; `paper_row_bytes`: every slot in every batch, rows alone."""
    model, halo = divisible(cfg.model), cfg.options.halo != "none"
    slots = int(fed.route.slot_off.diff()[positions_of(fed.ids, client_ids)].sum())
    width = sum(spec.shape[0] or 0 for spec in rows_form(model).fields.values())
    size = width * next(iter(weights.values())).element_size()
    return {
        EXCHANGES: float(len(plan.starts) * halo),
        BATCHES: float(plan.batches),
        **({RATE: rate_of(cfg.optimizer)} if reports_moves(cfg) else {}),
        "paper_row_bytes": float(slots * size * plan.batches * halo),
    }


def rate_of(optimizer: Optimizer) -> float:
    """Return an optimizer's learning rate; 0, which sets no interval, of one that has none."""
    return optimizer.lr if isinstance(optimizer, SGD | Adam) else 0.0


# --- Message specs, which silos check ------------------------------------------------------------


def exchange_request_specs(cfg: Config, t: int) -> FieldSpecs:
    """Return the specs of `exchange_request`."""
    start = FieldSpec(Shared, (), torch.int32, low=0, high=plan_of(cfg).batches - 1)
    tau = knob_specs(cfg.options, moved=TAU in moving_knobs(cfg.options), names=(TAU,))
    return {**tau, "round": exactly(t), "start": start}


def setup_steps(cfg: Config, key: Key) -> Steps:
    """Return the calls of `init`."""
    features = share_features_steps(cfg.model.features, key) if cfg.options.share_features else ()
    return Call(begin_stored, Kind.CONTROL, key), learn_steps(cfg, key), features


def round_steps(cfg: Config, t: int, key: Key) -> Steps:
    """Return the calls of `fit_round`: a client trains, and answers, or only answers."""
    round_key, request_specs = key.fold("train", t), exchange_request_specs(cfg, t)
    # Weights came in another call: rows are counted by `Decoder.known`, silo by silo.
    reply_specs = {name: replace(spec, rows="") for name, spec in weights_up(cfg).items()}
    share = replace(TRAINED, high=1) if cfg.options.average == "clients" else TRAINED
    reply_specs |= {"share": share, "loss": LOSS, "row_age": LOSS, "rows_trained": LOSS}
    reply_specs |= {MOVED: FieldSpec(Stacked, low=0)} if reports_moves(cfg) else {}
    if cfg.sent.rows == "used":
        reply_specs["steps"] = FieldSpec(Stacked, (), torch.int64, low=0, high=plan_of(cfg).batches)
    ratio = knob_specs(cfg.options, names=moving_knobs(cfg.options) - {TAU})
    open_call = Call(open_round, Kind.WEIGHTS, round_key, {**weights_down(cfg), **ratio})
    advance_call = Call(advance, Kind.CONTROL, round_key, request_specs)
    close_call = Call(close_round, Kind.WEIGHTS, round_key, {}, reply_specs)
    if cfg.options.halo == "none":
        training: Steps = (open_call, advance_call, close_call)
        return training if cfg.everyone_trains else Maybe(training)
    what, form = Kind.EMBEDDINGS, pull_form_of(cfg)
    pulled = pull_steps(ask, serve, store, what=what, key=round_key, inbox=request_specs, form=form)
    assert isinstance(pulled, Either)  # clients that do not ask may answer
    max_exchanges = plan_of(cfg).batches
    training = (open_call, Repeat((pulled, advance_call), max_exchanges), close_call)
    return (
        training if cfg.everyone_trains else Either(training, Repeat(pulled.ways[1], max_exchanges))
    )


def client_state_specs(cfg: Config) -> FieldSpecs:
    """Return the specs of a client's state between rounds."""
    model, features = divisible(cfg.model), cfg.options.share_features
    losses = {LOSSES: FieldSpec(Ragged, (), rows=NODES)}
    sent_versions = {} if cfg.options.moved is None else moved_specs(pull_form_of(cfg))
    history = history_specs(model, features=features)
    return {**state_specs(cfg), **state_spec(cfg), **history, **losses, **sent_versions}


FEDAIS: Method[FedAISOptions] = Method(
    name="fedais",
    title="stored embeddings, important nodes, and exchanges as the loss falls (FedAIS)",
    reference="Li et al., Federated graph learning with adaptive importance-based sampling, "
    "AAAI 2025",
    options=FedAISOptions,
    init=init,
    round=fit_round,
    check=check,
    evaluate=HaloSums(),
    needs=Needs(weight_decay=0.0, score_first=True, knobs=knobs_of_run, controller=controller_of),
    calls=Calls(setup=setup_steps, round=round_steps, state=client_state_specs),
    rows="single",
    small_weights=True,
    cautions=(
        Caution(
            "fedais was far behind local on Photo, and on Cora with 100 clients, in 100 rounds"
        ),
    ),
)


# The cautions of FedAIS were not measured for its presets.
PLAIN = replace(FEDAIS, cautions=())
FEDALL = preset(
    PLAIN,
    "fedall",
    "stored embeddings, fetched in every batch, on all nodes",
    nodes="all",
    interval="fixed",
    tau=1,
)
FEDRANDOM = preset(
    PLAIN,
    "fedrandom",
    "stored embeddings, fetched in every batch, on random nodes",
    nodes="random",
    interval="fixed",
    tau=1,
)
FEDLOCAL = preset(
    PLAIN, "fedlocal", "FedAIS on all nodes, without the halo", nodes="all", halo="none"
)
FEDPNS = preset(
    PLAIN,
    "fedpns",
    "stored embeddings of neighbors that are drawn every 2 batches (FedPNS)",
    nodes="all",
    interval="fixed",
    halo="held",
)
FEDAIS1 = preset(PLAIN, "fedais1", "FedAIS that exchanges in every batch", interval="fixed", tau=1)
FEDAIS2 = preset(PLAIN, "fedais2", "FedAIS on all nodes", nodes="all")
STALE = preset(
    PLAIN,
    "stale",
    "stored embeddings of all halo nodes, fetched every tau-th batch (VR-GCN, PipeGCN)",
    nodes="all",
    interval="fixed",
    halo="all",
)
PRESETS = (FEDALL, FEDRANDOM, FEDLOCAL, FEDPNS, FEDAIS1, FEDAIS2, STALE)
