"""FedAIS: a batch reads stored embeddings, and trains on the nodes that matter.

Li, Chen, Ren, Wang, Hu, Li, Yu and Chen, "Federated graph learning with adaptive importance-based
sampling", AAAI 2025. Equations and lines are those of the paper and of its algorithm 1.

Every client keeps, for each hidden layer, the last embeddings of its own nodes and of its halo, the
neighbors in other clients. A batch needs one hop of neighbors, whose embeddings are read from
there (eq. 6). In round t

- the server sends theta_t and tau_t to the selected clients M_t (lines 4 to 6);
- a client computes by how much the loss of each training node has changed since it last took part,
  and draws nodes in proportion to that (eq. 8, lines 11, 12 and 14);
- it trains on them in `batches` steps (lines 13 and 18). Before every tau-th it fetches the
  embeddings of those halo nodes that the batch has drawn (lines 15 to 17);
- the server takes the mean of the models (line 7), and a smaller tau as the validation loss falls
  (eq. 11, line 8; `silograph.control.loss_interval`). With `policy=ddpg` an agent sets tau, and the
  share of its nodes that each client draws.

`nodes`, `interval` and `halo` are options, and the paper's baselines are presets of this program:

    fedall      all nodes; each batch fetches what it has drawn     tau = 1
    fedrandom   the same on drawn nodes
    fedlocal    all nodes, without the halo
    fedpns      all nodes; neighbors of other silos are drawn anew every 2 batches
    fedais1     drawn by importance, but fetched in every batch
    fedais2     all nodes, adaptive interval
    stale       all nodes; all slots are fetched every tau-th batch (VR-GCN, PipeGCN)

Where the lines of algorithm 1 are:

    4          `Server.select`                   the clients M_t, chosen by the run's selector
    5, 6       `train_round`, `open_round`       theta_t and tau_t go to the selected clients
    7          `mean_of_models`                  the mean of the models
    8          `controller_of`                   tau of the next round, eq. 11; its `propose` is
                                                 called by experiment/run/selecting.py
    11         `begin_training`                  change of each node's loss
    12, 14     `draw_nodes`, `probabilities`     nodes drawn by importance, eq. 8
    15         `first_batches`, `slots_to_fetch` when, and what, a client fetches
    16         `serve`, `rows_entering`          rows are computed, at their owners;
                                                 compiled `kernels.first_stage`
    17         `store_and_train`, `take_step_`   rows of others and own rows are stored
    13, 18     `take_steps`                      steps on batches that read stored rows;
                                                 eq. 6 itself: `stored_rows.batch_pass`,
                                                 compiled `kernels.stored.forward`
    19         `finish_training`                 the model goes to the server

Eqs. 3 to 5, 7, 9, 12 and 13 are theory; nothing computes them.

How we read the paper where it is silent: losses are computed once a round, by one pass over all own
nodes with the received weights, which also refreshes their stored rows. Owners that take part in a
round compute requested rows anew, with their current weights and from stored rows; the others send
their stored rows. F is the validation loss. Features do not leave: without `share_features` the
first layer sums over the client's own graph.

What we changed: nodes are drawn once a round and cut into `batches` parts, which every local epoch
goes through (line 14 draws a batch in every epoch). The first batch of a round fetches, and then
every tau-th one (line 15 counts from 1). By default clients take steps of SGD and the server one of
Adam along their mean change, where line 7 takes the mean (`server_optimizer=none`): local Adam that
is built anew in every round fails where clients are small (benchmarks/fedais/server_step.md). By
default nodes are drawn systematically, each with a probability in proportion to eq. 8 up to 1, and
their losses are weighted, so that steps are unbiased. `unbiased=false` is the paper's plain mean,
which leans towards important nodes (benchmarks/fedais/unbiased.md).

C: clients of a block. n: own nodes. S: halo slots. m: nodes drawn in a round. b: nodes of a batch.
t: training nodes of all clients. off: (C + 1,) first row of each client. `owners(off)`: client of
each row (PyG's `batch`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, cast

import numpy as np
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
    knob_specs,
    knobs_of,
)
from silograph.control.base import BATCHES, EXCHANGES, PREFIX, ROW_BYTES
from silograph.control.bound_interval import MOVED, RATE
from silograph.control.policy import AGENT, AGENT_SEED, AGENT_STATE, EXPLORE, TARGET, TIME
from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, ProtocolError, mistake
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Patched,
    Ragged,
    Shared,
    Stacked,
    fields_under,
    offsets,
    owners,
    ranges,
    stack,
    tensors_under,
)
from silograph.core.setting_values import lin
from silograph.core.work import report_rows, work_for, work_of
from silograph.evaluation.scoring import HaloSums
from silograph.exchange import pull
from silograph.exchange.passes import divisible
from silograph.exchange.sent_weights import later_reply_spec, mean_of
from silograph.federation.base import WeightedMean, positions_of
from silograph.federation.field_specs import LOSS, NODES, TRAINED, FieldSpec, FieldSpecs
from silograph.federation.messages import Empty, from_payload, round_number, to_payload
from silograph.graph.block.block import ClientBlock, Rows, SparseRows, dense_rows
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
from silograph.methods.local_training import GlobalModel, stacked
from silograph.methods.ops import (
    Clients,
    Fetch,
    Server,
    anyone,
    calls,
    op,
    program,
    repeat,
    when,
)
from silograph.nn import stored_rows
from silograph.nn.conv import Params
from silograph.nn.fit import (
    LOSS_FLOPS,
    TrainingFields,
    TrainingInputs,
    check_fit,
    check_labels,
    check_places,
    dtype_of,
    features_for,
)
from silograph.nn.mini_batches import FULL, Fanout, Full, Neighbors
from silograph.nn.optim import SGD, Adam, Optimizer
from silograph.nn.segment import segment_sum
from silograph.nn.stored_batches import BatchRows, DrawnBatches, draw_batches
from silograph.task.counts import judges_of
from silograph.task.registry import task_of

# --- Options, and what follows from them for a round ---------------------------------------------

MOST_COUNT = 2**31  # of what ops count in whole numbers of 32 bits
MOST_BATCHES = 100  # batches between two exchanges
TAU, RATIO = "tau", "ratio"  # knobs


def option(default: Any, text: str, *, read_if: Any = None, **metadata: Any) -> Any:
    """Return an option with its help text, and which options of others it depends on."""
    needs = {} if read_if is None else {"read_if": read_if}
    return field(default=default, metadata={"help": text, **needs, **metadata})


EXCHANGES_ROWS = {"halo": ("drawn", "held", "all")}
DRAWS = {"nodes": ("random", "importance")}
WEIGHS = {"nodes": ("importance",)}


@checked_dataclass(frozen=True, config=STRICT)
class FedAISOptions:
    """The help texts are the documentation of the fields."""

    nodes: Literal["all", "random", "importance"] = option(
        "importance",
        "training nodes of a round: all, or a share, drawn at random or by importance",
    )
    interval: Literal["fixed", "adaptive", "bound"] = option(
        "adaptive",
        "batches between two exchanges: always tau (fixed), fewer as the loss falls (adaptive), or "
        "of the least error bound by estimated constants (bound)",
        read_if=EXCHANGES_ROWS | {"policy": ("rule",)},
    )
    halo: Literal["none", "drawn", "held", "all"] = option(
        "drawn",
        "what an exchange fetches: nothing (none), what the next batch has drawn (drawn), what all "
        "batches until the next exchange have, which read no other slots (held), or all slots "
        "(all)",
    )
    tau: Annotated[int, Bounds(ge=1, le=MOST_BATCHES)] = option(
        2,
        "batches between two exchanges at first",
        read_if=EXCHANGES_ROWS,
        knob=lin(1, MOST_BATCHES),
    )
    ratio: Share = option(
        0.7,
        "share of its training nodes that a client draws",
        read_if=DRAWS,
        knob=lin(0.05, 1.0),
        by_client=True,
    )
    batches: Annotated[int, Bounds(ge=1, le=1000)] = option(
        10, "batches of a round, in each of its local epochs"
    )
    drawn: Annotated[int, Bounds(ge=0, lt=MOST_COUNT)] = option(
        10, "neighbors drawn for a node of a batch, halo included; 0: all"
    )
    warmup: Annotated[int, Bounds(ge=1, lt=MOST_COUNT)] = option(
        1, "rounds of a client in which its nodes are drawn evenly", read_if=WEIGHS
    )
    floor: Annotated[float, Bounds(ge=0, le=1)] = option(
        0.1, "share of the probability that all nodes have alike", read_if=WEIGHS
    )
    unbiased: bool = option(
        True,
        "draw systematically, and weigh losses so that steps are unbiased (false: the plain mean "
        "of the paper)",
    )
    owners: Literal["recompute", "stored"] = option(
        "recompute",
        "rows that are asked for: worked out anew (recompute), or as they were stored",
        read_if=EXCHANGES_ROWS,
    )
    sent: Literal["exact", "int8"] = option(
        "exact",
        "rows that are sent: exact, or as bytes with a scale for each row (int8)",
        read_if=EXCHANGES_ROWS,
    )
    moved: Annotated[float, Bounds(ge=0)] | None = option(
        None,
        "send only rows that moved by more than this share of their length since they were last "
        "sent (none: all that are asked for)",
        read_if=EXCHANGES_ROWS,
    )
    share_features: bool = option(False, "features leave, too: the first layer sees the halo")
    average: Literal["clients", "nodes"] = option(
        "clients", "mean of the models: plain (clients), or weighted by training nodes"
    )
    policy: Literal["rule", "ddpg", "drawn"] = option(
        "rule",
        "what sets tau, and the ratio of each client: rule (tau by interval; ratio stays), ddpg "
        "(an agent) or drawn (by chance)",
    )
    target: Share = field(default=0.9, metadata=TARGET)
    time: Literal["virtual", "measured", "none"] = field(default="virtual", metadata=TIME)
    explore: bool = field(default=True, metadata=EXPLORE)
    agent: str | None = field(default=None, metadata=AGENT)
    agent_state: Literal["summary", "pca"] = field(default="summary", metadata=AGENT_STATE)
    agent_seed: int = field(default=0, metadata=AGENT_SEED)


Config = MethodConfig[FedAISOptions]
FedAISClients = Clients[FedAISOptions]


def num_batches(cfg: Config) -> int:
    """Return the batches of a round, in all its local epochs."""
    return cfg.options.batches * cfg.schedule.epochs


def first_batches(cfg: Config) -> range:
    """Return the number of the first batch after each exchange; without a halo there is none."""
    if not reads_halo(cfg):
        return range(0)
    return range(0, num_batches(cfg), int(cfg.knobs.get(TAU, cfg.options.tau)))


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


def check(cfg: Config) -> None:
    """Raise `ConfigError` for a model or a config without such steps."""
    stages = stored_rows.stored_stages(divisible(cfg.model))
    if cfg.options.halo != "none" and not stages:
        raise ConfigError(
            "expected a model with a layer after the first that sums over neighbors, which reads "
            f"the rows that are exchanged, got none in {cfg.model.noun}: use model=sage, gcn, "
            "graphconv, gin or appnp with layers=2 or more, or halo=none",
            **mistake("conflicting-options", ["method", "model"]),
        )
    if cfg.schedule.batch_size is not None or not isinstance(cfg.schedule.neighbors, Full):
        name = "fanout" if isinstance(cfg.schedule.neighbors, Fanout) else "neighbors"
        name = name if cfg.schedule.batch_size is None else "batch_size"
        raise ConfigError(
            f"fedais draws batches and neighbors itself: leave {name} out; its options batches and "
            "drawn say how many batches a round has, and how many neighbors a node draws",
            **mistake("conflicting-options", ["method", name]),
        )
    if cfg.options.share_features and cfg.options.halo == "none":
        raise ConfigError(
            "expected a halo for share_features, got halo=none: leave one out",
            **mistake("conflicting-options", ["halo", "share_features"]),
        )
    if cfg.options.share_features and not cfg.sent.plain:
        raise ConfigError(
            "expected weights_as=exact and weight_rows=all with share_features, whose clients "
            "train on features of others, too: leave one out",
            **mistake("conflicting-options", ["weights_as", "weight_rows", "share_features"]),
        )
    if not knobs_of_run(cfg.options):
        raise ConfigError(
            f"expected an option that policy={cfg.options.policy} can set, got none: leave out "
            "nodes=all, for the ratio, or halo=none, for tau",
            **mistake("conflicting-options", ["policy", "nodes", "halo"]),
        )


def reads_halo(cfg: Config) -> bool:
    """Return whether rows of other clients are read."""
    return cfg.options.halo != "none"


def trains_alone(cfg: Config) -> bool:
    """Return whether nothing is exchanged, so that a round is one call."""
    return not reads_halo(cfg)


def shares_features(cfg: Config) -> bool:
    """Return whether the first layer sees the halo, too."""
    return cfg.options.share_features


def reports_moves(cfg: Config) -> bool:
    """Return whether clients report how far their models have moved; `interval=bound` needs it."""
    return controller_of(cfg.options) is BOUND_INTERVAL


def neighbors_of(cfg: Config) -> Neighbors:
    """Return the neighbor sampler of a batch."""
    return Fanout((cfg.options.drawn,)) if cfg.options.drawn else FULL


# --- State of a client ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientState(pull.History, pull.LastSent):
    """Between rounds: stored embeddings, and what eq. 8 compares.

    Attributes:
        losses: (n,) of training nodes when they were last computed, 0 of others.
    """

    losses: Annotated[Ragged, FieldSpec(Ragged, (), rows=NODES)]


@dataclass(frozen=True)
class DrawnNodes:
    """The nodes that a round trains on.

    Attributes:
        sample: (m,) int32 rows of the client, in the order of the batches.
        loss_weights: (m,) 1 / (training nodes x probability of the draw), if steps are unbiased.
    """

    sample: Ragged
    loss_weights: Ragged | None


@dataclass(frozen=True)
class BatchState(pull.History, DrawnNodes):
    """What batches read and write.

    Attributes:
        requested_slots: (k,) int32 slots that the client has asked for last.
        training: models in training, with optimizer and counts of steps, as
            `silograph.nn.stored_rows` or the compiled kernels have them.
        batches_done: (C,) int32 of this round.
        sums: (C, 4) over the batches that are done: of losses, nodes, ages in batches of the rows
            of slots that were read, and of these slots.
    """

    requested_slots: Ragged
    training: Mapping[str, Stacked | Ragged]
    batches_done: Stacked
    sums: Stacked


@dataclass(frozen=True)
class RoundState(BatchState, ClientState):
    """Within a round.

    Attributes:
        start_weights: (C, ...) weights of theta_t that the end of the round needs.
    """

    start_weights: Mapping[str, Stacked]

    def batch_part(self) -> BatchState:
        """Return what batches read and write."""
        return BatchState(**{f.name: getattr(self, f.name) for f in fields(BatchState)})

    def after_round(self) -> ClientState:
        """Return what stays."""
        return ClientState(**{f.name: getattr(self, f.name) for f in fields(ClientState)})


@dataclass(frozen=True)
class OwnerState(pull.History, pull.LastSent):
    """What an owner of rows reads and writes: within a round, or between rounds."""

    training: Mapping[str, Stacked | Ragged] | None


@op(Kind.CONTROL, writes=("own_rows/", "halo_rows/", "received_at", "passes", "versions"))
def begin_stored(clients: FedAISClients, _state: Empty, _: Empty) -> tuple[ClientState, Empty]:
    """Set up the clients, which have stored nothing, and what their rounds read of the graph."""
    clients.begin()
    cfg, block = clients.cfg, clients.block
    check_labels(cfg.training, block)
    surroundings_of(clients)
    if is_compiled(cfg):
        from silograph.nn import stored_compiled  # numba takes a while to import

        is_compact = cfg.training.alike and not cfg.keep_optimizer
        stored_compiled.prepare(divisible(cfg.model), block, compact=is_compact)
    return pull.blank(ClientState, clients.cfg, clients.block), Empty()


def readable_rows(clients: FedAISClients, state: BatchState) -> stored_rows.StoredRows:
    """Return the stored rows that batches may read up to the next exchange (eq. 6)."""
    stored = state.readable(halo=reads_halo(clients.cfg))
    if clients.options.halo != "held":
        return stored
    is_requested = torch.zeros_like(stored.known)
    slots = check_places(state.requested_slots, clients.block.halo.off, "halo slots")
    is_requested[slots] = True
    return replace(stored, known=stored.known & is_requested)


def surroundings_of(clients: FedAISClients) -> stored_rows.Surroundings:
    """Return the graph that the clients sum over."""
    return stored_rows.surroundings(clients.block, halo=reads_halo(clients.cfg))


# --- Models in training: as fields, which the compiled kernels have side by side -----------------


def is_compiled(cfg: Config) -> bool:
    """Return whether batches are trained by the compiled kernels.

    They read slots' rows from the second stage on; with shared features torch trains.
    """
    # Kernels of stored rows do not drop features of a batch's senders.
    drops = cfg.backend.compiled and divisible(cfg.model).stages[0].drop > 0
    return cfg.backend.compiled and not cfg.options.share_features and not drops


def models_in(cfg: Config, training: Mapping[str, Stacked | Ragged]) -> TrainingFields:
    """Return the models in training, weights by name."""
    if not is_compiled(cfg):
        return dict(training)
    from silograph.nn import stored_compiled  # numba takes a while to import

    return stored_compiled.unpack_weights(divisible(cfg.model), dict(training))


def pack_for_training(cfg: Config, models: TrainingFields, *, fresh: bool) -> TrainingFields:
    """Return models before their first step in the form of training.

    `fresh`: whether their optimizers have taken no step either.
    """
    if not is_compiled(cfg):
        return models
    from silograph.nn import stored_compiled

    return stored_compiled.pack_weights(divisible(cfg.model), models, fresh=fresh)


# --- The round begins: losses, and the nodes that clients draw (lines 11, 12 and 14) -------------


def ratio_specs(cfg: Config) -> FieldSpecs:
    """Return the spec of the share of its nodes that each client draws, where that changes."""
    return knob_specs(cfg.options, names=moving_knobs(cfg.options) - {TAU})


@dataclass(frozen=True)
class RoundStart(GlobalModel):
    """theta_t, and `knobs/ratio` (C,) float64 where a policy sets it."""

    knobs: Annotated[Mapping[str, Stacked], ratio_specs]


def begin_training(clients: FedAISClients, state: ClientState, request: RoundStart) -> RoundState:
    """Compute losses and own embeddings with theta_t, and draw the nodes of the round."""
    cfg, block, key, weights = clients.cfg, clients.block, clients.key, request.weights
    model = divisible(cfg.model)
    memory = tensors_under("optimizer", clients.state) if cfg.keep_optimizer else None
    check_fit(cfg.training, TrainingInputs(block, weights, memory, key))
    is_compact = not cfg.options.share_features
    models = stored_rows.start_training(
        model,
        cfg.training,
        block,
        weights,
        memory,
        compact=is_compact,
        # The kernels of Adam write the moments of a row in its first step, and read them later.
        skip_zeros=is_compiled(cfg) and isinstance(cfg.optimizer, Adam),
    )
    logits, entered = whole_pass(clients, state, weights, block.x)
    losses = train_losses(clients, logits)
    ratio = request.knobs[RATIO].t if RATIO in request.knobs else cfg.options.ratio
    change = losses - state.losses.t  # Delta of line 11
    drawn = draw_nodes(cfg, block, change, state.passes.t, key.fold("nodes"), ratio)
    # Start weights that the end of the round needs: of rows whose features a client does not have,
    # and, for the lengths of moves or for encoded changes, of all.
    needs_all = reports_moves(cfg) or not cfg.sent.plain
    first = model.first_maps if stored_rows.is_compact(models) else ()
    start = {
        n: weights[n].expand(block.num_clients, *weights[n].shape)
        for n in (weights if needs_all else first)
    }
    zeros = torch.zeros(block.num_clients, 4, dtype=torch.float64, device=block.off.device)
    new = {
        "own_rows": {str(number): Ragged(x, block.off) for number, x in entered.items()},
        "passes": Stacked(state.passes.t + 1),
        "losses": Ragged(losses, block.off),
    }
    return RoundState(
        **{**vars(state), **vars(drawn), **new},
        requested_slots=Ragged(block.off.new_zeros(0).int(), torch.zeros_like(block.off)),
        training=pack_for_training(cfg, models, fresh=memory is None),
        batches_done=Stacked(torch.zeros_like(state.passes.t)),
        sums=Stacked(zeros),
        start_weights=stack(start),
    )


def whole_pass(
    clients: FedAISClients,
    state: pull.History,
    weights: Mapping[str, Tensor],
    x: Rows,
    first_outputs: Tensor | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return logits (n, K) of all own rows, and what enters stages; slots' rows are as stored.

    `first_outputs` (n, O): those of the first stage, if they are computed already.
    """
    block, model = clients.block, divisible(clients.cfg.model)
    stored = state.readable(halo=reads_halo(clients.cfg))
    batch = stored_rows.whole_batch(block, surroundings_of(clients), stored)
    with torch.no_grad():
        return stored_rows.batch_pass(model, weights, block, x, batch, stored, None, first_outputs)


def train_losses(clients: FedAISClients, logits: Tensor) -> Tensor:
    """Return the loss of each training node, (n,); 0 of other rows."""
    block, model = clients.block, clients.cfg.model
    train, losses = block.split.train, logits.new_zeros(len(logits))
    losses[train] = task_of(model.task).loss(logits[train], block.y[train])
    report_rows(offsets(block.num_train), LOSS_FLOPS * model.outputs)
    return losses


def draw_nodes(
    cfg: Config,
    block: ClientBlock,
    change: Tensor,
    passes: Tensor,
    key: Key,
    ratio: float | Tensor,
) -> DrawnNodes:
    """Return the nodes that a round trains on.

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
        return DrawnNodes(Ragged(train.int(), off), None)
    keys, count = block.row_key[train], block.num_train
    if options.nodes != "all":
        count = torch.floor(ratio * count.double() + 0.5).long().clamp(min=1)
        count = torch.minimum(count, block.num_train)
    warm = passes < options.warmup
    is_uniform = warm | torch.tensor(options.nodes != "importance", device=warm.device)
    used_change = torch.where(is_uniform[block.client[train]], 0, change[train])
    p = probabilities(used_change, off, options.floor)
    is_weighted = options.unbiased and options.nodes != "all"
    if is_weighted:
        pi = inclusion_probabilities(p, off, count)
        is_drawn = draw_systematically(pi, off, keys, key, segment_sum(keys, off))
    else:
        order, _ = first_nodes(draw_order(p, off, keys, key), off, count)
        is_drawn = torch.zeros(len(train), dtype=torch.bool, device=train.device)
        is_drawn[order] = True
    # The order of drawing would put the most important nodes into the first batch.
    shuffled = by_client(key.fold("order").words(keys, 1)[:, 0].argsort(stable=True), off)
    shuffled = shuffled[is_drawn[shuffled]]
    rows, row_off = train[shuffled], offsets(segment_sum(is_drawn.long(), off))
    sample = Ragged((rows - block.off[block.client[rows]]).int(), row_off)
    if not is_weighted:
        return DrawnNodes(sample, None)
    loss_weight = 1 / (block.num_train[owners(off)] * pi)
    return DrawnNodes(sample, Ragged(loss_weight[shuffled].to(dtype_of(block)), row_off))


# Importance: p_v = |Delta_v| / sum |Delta|, where Delta_v is the change of v's loss since the
# client last took part; the paper: between two consecutive local models (eq. 8).
#
# What we changed: a share of the probability is spread evenly (`floor`), so that no node is never
# drawn; nodes whose losses all stayed are alike. Nodes are drawn without replacement. With
# `unbiased=false` a batch's loss is the mean of its nodes, biased towards important ones, as in the
# paper; the functions `inclusion_probabilities` and `draw_systematically` are the unbiased way.
#
# Everything is done for all clients at once; draws depend on keys of nodes, not on their order.
# `off` (C + 1,): training nodes of each client.


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


def batch_rows(
    cfg: Config, block: ClientBlock, nodes: DrawnNodes, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows (b,) of every client's batch, offsets (C + 1,), and places in the sample."""
    return rows_of_batches(cfg, block, nodes, [number])


def rows_of_batches(
    cfg: Config, block: ClientBlock, nodes: DrawnNodes, numbers: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same of J batches, one after the other, with offsets (J C + 1,)."""
    off, batches = nodes.sample.off, cfg.options.batches
    size, batch = off.diff(), torch.tensor(numbers, device=off.device)[:, None] % batches
    batch_size, remainder = size // batches, size % batches
    first = (off[:-1] + batch * batch_size + torch.minimum(remainder, batch)).flatten()
    count = (batch_size + (batch < remainder).long()).flatten()
    places, batch_off = ranges(first, count), offsets(count)
    starts = torch.repeat_interleave(block.off[:-1].repeat(len(numbers)), count)
    return nodes.sample.t[places].long() + starts, batch_off, places


# --- Before every tau-th batch: embeddings of neighbors in other clients (lines 15 to 17) --------


def tau_specs(cfg: Config) -> FieldSpecs:
    """Return the spec of tau; a server cannot send another than the option's if nothing sets it."""
    return knob_specs(cfg.options, varies=TAU in moving_knobs(cfg.options), names=(TAU,))


def batch_number_spec(cfg: Config) -> FieldSpec:
    """Return the spec of the number of a batch in its round."""
    return FieldSpec(Shared, (), torch.int32, low=0, high=num_batches(cfg) - 1)


def first_tau_spec(cfg: Config) -> FieldSpec:
    """Return the spec of tau_t in the first message of a round."""
    return tau_specs(cfg)[f"{PREFIX}{TAU}"]


@dataclass(frozen=True)
class RoundStartWithTau(RoundStart):
    """theta_t and the ratio, with tau_t: the batches up to the second exchange."""

    tau: Annotated[Tensor, first_tau_spec]


@dataclass(frozen=True)
class NextBatches:
    """The batches up to the next exchange.

    Attributes:
        knobs: `knobs/tau`, the batches between two exchanges.
        round: number of the round.
        start: number of the first of these batches in the round.
    """

    knobs: Annotated[Mapping[str, Tensor], tau_specs]
    round: Annotated[Tensor, round_number]
    start: Annotated[Tensor, batch_number_spec]

    @staticmethod
    def of(cfg: Config, number: int, start: int) -> "NextBatches":
        """Return the batches from `start` on in round `number`."""
        tau = cfg.knobs.get(TAU, torch.tensor(cfg.options.tau))
        counts = (torch.tensor(n, dtype=torch.int32) for n in (number, start))
        return NextBatches({TAU: tau}, *counts)

    def numbers(self, cfg: Config) -> range:
        """Return the numbers of the batches in the round."""
        start = int(self.start)
        return range(start, min(start + int(self.knobs[TAU]), num_batches(cfg)))

    def batches_before(self, cfg: Config) -> int:
        """Return how many batches earlier rounds had."""
        return (int(self.round) - 1) * num_batches(cfg)


@dataclass(frozen=True)
class RowsForBatches(NextBatches, pull.RequestedRows):
    """Boundary rows that others want for these batches."""


@dataclass(frozen=True)
class RowsThatCame(NextBatches, pull.ReceivedRows):
    """Rows that came for these batches."""


def slots_to_fetch(
    clients: FedAISClients, state: BatchState, numbers: range
) -> pull.RequestedSlots:
    """Return the slots to fetch before the batches `numbers` of the round (line 15).

    `halo=drawn` requests the slots that the first of them has drawn, `halo=held` those of all of
    them, `halo=all` every slot. Where only rows that moved are sent, the reply also has the version
    that the client has of each.
    """
    cfg, block = clients.cfg, clients.block
    if cfg.options.halo == "all":
        slots = torch.arange(len(block.halo.key), device=block.off.device)
    elif is_compiled(cfg):
        drawn, batch_range = compiled_batches(clients, state, numbers)
        batch_range = batch_range if cfg.options.halo == "held" else batch_range[:1]
        slots = torch.from_numpy(np.unique(drawn.slots(batch_range)))
    else:
        numbers = numbers if cfg.options.halo == "held" else numbers[:1]
        slots = torch.cat([drawn_slots(clients, state, n) for n in numbers]).unique()
    off = torch.searchsorted(slots, block.halo.off)
    slot = Ragged((slots - block.halo.off[:-1][owners(off)]).int(), off)
    versions = None if state.versions is None else Ragged(state.versions.t[slots], off)
    return pull.RequestedSlots(slot, versions)


def drawn_slots(clients: FedAISClients, nodes: DrawnNodes, number: int) -> Tensor:
    """Return the slots (k,) of the block that batch `number` of a round draws, with repetitions."""
    cfg, block = clients.cfg, clients.block
    rows, off, _ = batch_rows(cfg, block, nodes, number)
    around, key = surroundings_of(clients), clients.key.fold("batch", number)
    slot = around.slot[stored_rows.drawn_around(around, rows, off, neighbors_of(cfg), key).neighbor]
    return slot[slot >= 0]


@op(Kind.WEIGHTS, replies=Kind.HALO_KEYS, writes=("training/", "own_rows/"))
def open_round(
    clients: FedAISClients, state: ClientState, request: RoundStartWithTau
) -> tuple[RoundState, pull.RequestedSlots]:
    """Begin the round, and request the rows of the first exchange."""
    new = begin_training(clients, state, request)
    first = range(min(int(request.tau), num_batches(clients.cfg)))
    slots = slots_to_fetch(clients, new, first)
    return replace(new, requested_slots=slots.slot), slots


@op(
    Kind.EMBEDDINGS,
    reads_only=(*(f.name for f in fields(OwnerState) if f.name != "training"), "training/weights/"),
    writes=("own_rows/",),
    idle_without_rows=True,
)
def serve(
    clients: FedAISClients, state: OwnerState, request: RowsForBatches
) -> tuple[OwnerState, pull.SentRows]:
    """Send the requested rows, computed anew by owners in training (line 16)."""
    cfg, block, model = clients.cfg, clients.block, divisible(clients.cfg.model)
    rows = request.rows(block)
    if state.training is not None and cfg.options.owners == "recompute":
        entered = rows_entering(clients, state, state.training, rows, request.row.off)
        state.write_(rows, entered)
    reply = pull.answer(model, block, state, request.row, rows, small=cfg.options.sent == "int8")
    if cfg.options.moved is None:
        return state, reply
    now = request.batches_before(cfg) + int(request.start)
    last, reply = pull.moved_only(block, state, request, reply, cfg.options.moved, now)
    return replace(state, **vars(last)), reply


def compute_first_outputs(
    clients: FedAISClients, training: Mapping[str, Stacked | Ragged], rows: Tensor, off: Tensor
) -> Tensor | None:
    """Compute the first stage's outputs (b, O) for rows (b,) by the kernel; None: it cannot."""
    if not is_compiled(clients.cfg):
        return None
    from silograph.nn import stored_compiled  # numba takes a while to import

    model = divisible(clients.cfg.model)
    return stored_compiled.compute_first_outputs(model, clients.block, dict(training), rows, off)


def rows_entering(
    clients: FedAISClients,
    state: pull.History,
    training: Mapping[str, Stacked | Ragged],
    rows: Tensor,
    off: Tensor,
) -> dict[int, Tensor]:
    """Return what enters each stored stage of rows (b,), with the weights in training."""
    cfg, block, model = clients.cfg, clients.block, divisible(clients.cfg.model)
    if stored_rows.stored_stages(model) == (1,):
        first_outputs = compute_first_outputs(clients, training, rows, off)
        if first_outputs is not None:
            return {1: first_outputs}
    models = models_in(cfg, training)
    stored, around = state.readable(halo=reads_halo(cfg)), surroundings_of(clients)
    later = len(stored_rows.stored_stages(model)) > 1
    batch = stored_rows.batch_of_edges(block, around, stored, rows, off, later=later)
    x, weights = features_for(block, stored_rows.is_compact(models)), stored_rows.weights_of(models)
    with torch.no_grad():
        return stored_rows.rows_entering(model, weights, block, x, batch, stored)


# Features of the halo: with `share_features` every client fetches them once.


@op(Kind.FEATURES)
def send_features(
    clients: FedAISClients, state: Empty, _: Empty
) -> tuple[Empty, pull.SentFeatures]:
    """Send features of all boundary rows."""
    block, off = clients.block, clients.block.halo.boundary_off
    rows, model = block.halo.boundary, divisible(clients.cfg.model)
    x = stored_rows.to_send(
        model, 0, stored_rows.surroundings(block), rows, dense_rows(block, rows), off
    )
    return state, pull.SentFeatures(Ragged(x, off))


@op(Kind.FEATURES)
def keep_features(
    clients: FedAISClients, state: pull.HaloRows, request: pull.ReceivedFeatures
) -> tuple[pull.HaloRows, Empty]:
    """Keep the features of all slots."""
    features = Ragged(request.rows.t, clients.block.halo.off)
    return replace(state, halo_rows={**state.halo_rows, "0": features}), Empty()


FETCH_FEATURES = Fetch[Empty](None, send_features, keep_features)


# --- Batches up to the next exchange (lines 13, 17 and 18) ---------------------------------------


WRITTEN_BY_BATCHES = "training/", "own_rows/", "sums"


@op(
    Kind.EMBEDDINGS,
    replies=Kind.HALO_KEYS,
    reads_library=False,
    writes=(*WRITTEN_BY_BATCHES, "halo_rows/", "received_at"),
)
def train_batches(
    clients: FedAISClients, state: BatchState, request: RowsThatCame
) -> tuple[BatchState, pull.RequestedSlots]:
    """Store the rows that came, train up to the next exchange, and request its rows.

    Raises:
        ProtocolError: `start` is not the next batch, or no exchange follows.
    """
    cfg, numbers = clients.cfg, request.numbers(clients.cfg)
    if numbers.stop >= num_batches(cfg):
        raise ProtocolError("expected close_round for the last batches of a round, got another")
    state = store_and_train(clients, state, request)
    following = replace(request, start=torch.tensor(numbers.stop)).numbers(cfg)
    slots = slots_to_fetch(clients, state, following)
    return replace(state, requested_slots=slots.slot), slots


def store_and_train(clients: FedAISClients, state: BatchState, request: RowsThatCame) -> BatchState:
    """Store the received rows (line 17), and train up to the next exchange."""
    batches_before = request.batches_before(clients.cfg)
    now = batches_before + int(request.start)
    versions = request.write_(clients.block, state, state.requested_slots, now)
    state = replace(state, versions=versions)
    return take_steps(clients, state, request.numbers(clients.cfg), batches_before)


def take_steps(
    clients: FedAISClients, state: BatchState, numbers: range, batches_before: int
) -> BatchState:
    """Take the steps of some batches of a round; `batches_before`: see `take_step_by_groups`.

    Raises:
        ProtocolError: they are not the next ones.
    """
    check_next_batch(state, numbers.start)
    if is_compiled(clients.cfg):
        take_steps_compiled_(clients, state, numbers, batches_before)
    else:
        for number in numbers:
            state = take_step_by_groups(clients, state, number, batches_before)
    done = torch.full_like(state.batches_done.t, numbers.stop)
    return replace(state, batches_done=Stacked(done))


def check_next_batch(state: BatchState, number: int) -> None:
    """Raise `ProtocolError` unless all batches before a number are done, and no others.

    Without this a server could have one batch trained on again and again, or one alone.
    """
    batches_done = state.batches_done.t
    if not bool((batches_done == number).all()):
        raise ProtocolError(
            f"expected batch {int(batches_done.min())} of the round next, got {number}: batches "
            "are trained on in their order, each once"
        )


def take_step_by_groups(
    clients: FedAISClients, state: BatchState, number: int, batches_before: int
) -> BatchState:
    """Take a step with every client that has rows in a batch; return their state.

    Args:
        clients: of a block.
        state: theirs; it may be written to.
        number: of the batch in its round.
        batches_before: how many batches earlier rounds had.
    """
    active = batch_rows(clients.cfg, clients.block, state, number)[1].diff() > 0
    # Optimizers count the steps of all their clients alike, so those of other counts wait.
    for positions in stored_rows.groups_by_steps(dict(state.training), active):
        if len(positions) == clients.block.num_clients:
            take_step_(clients, state, number, batches_before)
            continue
        whole = to_payload(state)
        with work_of(positions):
            part = from_payload(BatchState, stored_rows.take_clients(whole, positions))
            part_clients = replace(clients, block=clients.block.called(positions))
            take_step_(part_clients, part, number, batches_before)
        new = {n: f for n, f in to_payload(part).items() if n.startswith(WRITTEN_BY_BATCHES)}
        whole |= stored_rows.put_clients(whole, new, positions)
        state = from_payload(BatchState, whole)
    return state


def take_step_(clients: FedAISClients, state: BatchState, number: int, batches_before: int) -> None:
    """Take a step with clients that all have rows in a batch, and equally many steps so far.

    theta <- theta - eta / |B| sum over v in B of grad f(h_v, y_v), line 18. Models, the rows of the
    batch and sums are changed in place; arguments are those of `take_step_by_groups`. Computed by
    `stored_rows.step_`, or compiled: see `take_steps_compiled_`.
    """
    cfg, block, key = clients.cfg, clients.block, clients.key.fold("batch", number)
    model, models, stored = (
        divisible(cfg.model),
        dict(state.training),
        readable_rows(clients, state),
    )
    rows = draw_training_rows(clients, state, stored, number)
    losses, entered = stored_rows.step_(model, cfg.training, block, models, rows, stored, key)
    state.write_(rows.batch.rows, entered)
    add_to_sums_(state, rows, losses, batches_before + number)


def take_steps_compiled_(
    clients: FedAISClients, state: BatchState, numbers: range, batches_before: int
) -> None:
    """Do the same for several batches and all clients by one call of the kernels, in place."""
    from silograph.nn import stored_compiled  # numba takes a while to import

    cfg, block = clients.cfg, clients.block
    model, stored = divisible(cfg.model), readable_rows(clients, state)
    drawn, batch_range = compiled_batches(clients, state, numbers)
    known = stored.known.numpy()
    # 1. The batches with their senders. Slots without a received row do not send. Mostly there are
    # none: then senders do not change in the round, and are worked out once for all its batches.
    if known[drawn.slots(batch_range)].all():
        known = np.ones_like(known)
    else:
        drawn, batch_range = drawn.select(batch_range), range(len(numbers))
    # A round that is done again may draw the same nodes with other probabilities, and so weights.
    share = loss_shares(state, drawn.rows, dtype_of(block))
    cached = block.memo.get("batches with senders")
    batches = cached[1] if isinstance(cached, tuple) and cached[0] is drawn else None
    if not isinstance(batches, stored_compiled.TrainingBatches) or not np.array_equal(
        batches.arrays.share, share.numpy()
    ):
        batches = stored_compiled.training_batches(model, block, known, drawn, share)
        block.memo["batches with senders"] = drawn, batches
    # 2. The steps.
    losses = stored_compiled.train_(
        model, cfg.training, block, dict(state.training), batches, batch_range, stored
    )
    # 3. What `add_to_sums_` does, batch after batch.
    first, end = batch_range.start * block.num_clients, batch_range.stop * block.num_clients
    off = batches.arrays.off[first : end + 1]
    slot_off = batches.arrays.later.slot_off[first : end + 1]
    slots = batches.slots[slot_off[0] : slot_off[-1]]
    number = np.repeat(batches_before + np.array(numbers), block.num_clients)
    counts, slot_counts = np.diff(off), np.diff(slot_off)
    ages = np.repeat(number, slot_counts) - state.received_at.t.numpy()[slots]
    parts = _sum_runs(losses, counts), counts, _sum_runs(ages, slot_counts), slot_counts
    sums = state.sums.t.numpy()
    for batch in np.stack(parts, axis=1).astype(np.float64).reshape(len(numbers), *sums.shape):
        sums += batch


def loss_shares(nodes: DrawnNodes, rows: BatchRows, dtype: torch.dtype) -> Tensor:
    """Return the weight of the loss of each row of several batches, (b,)."""
    off = torch.from_numpy(rows.off)
    weights = batch_loss_weights(nodes, off, rows.places)
    if weights is not None:
        return weights
    counts = off.diff()
    return torch.repeat_interleave(1 / counts.to(dtype), counts)


def _sum_runs(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the sums of runs of values, as long as counts (k,), added in order, (k,) float64."""
    return np.bincount(np.repeat(np.arange(len(counts)), counts), values, len(counts))


EDGES_AT_ONCE = 2**17  # the most edges of batches that are drawn together, to limit memory


def compiled_batches(
    clients: FedAISClients, nodes: DrawnNodes, numbers: range
) -> tuple[DrawnBatches, range]:
    """Return batches with their edges, and which of them have these numbers in the round.

    All batches of a round are drawn together if they have few edges, and are cached.
    """
    cfg, block, sample = clients.cfg, clients.block, nodes.sample.t
    cached = block.memo.get("drawn batches")
    if isinstance(cached, DrawnBatches):
        first_key = clients.key.fold("batch", numbers.start)
        batch_range = cached.find_range(first_key, len(numbers), sample)
        if batch_range is not None:
            return cached, batch_range
    edges = len(sample) * cfg.schedule.epochs * cfg.options.drawn
    together = range(num_batches(cfg)) if 0 < edges <= EDGES_AT_ONCE else numbers
    keys = tuple(clients.key.fold("batch", number) for number in together)
    graphs = stored_rows.surroundings(block, halo=False), surroundings_of(clients)
    rows, off, places_in_sample = rows_of_batches(cfg, block, nodes, together)
    batches = BatchRows.of(rows, off, places_in_sample, sample, len(together))
    drawn = draw_batches(graphs, batches, cfg.options.drawn, keys)
    block.memo["drawn batches"] = drawn
    return drawn, range(numbers.start - together.start, numbers.stop - together.start)


def draw_training_rows(
    clients: FedAISClients, nodes: DrawnNodes, stored: stored_rows.StoredRows, number: int
) -> stored_rows.TrainingRows:
    """Return the rows of batch `number` of a round, with neighbors drawn by key."""
    cfg, block, key = clients.cfg, clients.block, clients.key.fold("batch", number)
    rows, off, places = batch_rows(cfg, block, nodes, number)
    around, neighbors = surroundings_of(clients), neighbors_of(cfg)
    batch = stored_rows.drawn_batch(block, around, stored, rows, off, neighbors, key)
    return stored_rows.TrainingRows(batch, batch_loss_weights(nodes, off, places))


def batch_loss_weights(nodes: DrawnNodes, off: Tensor, places: Tensor) -> Tensor | None:
    """Return the weight of the loss of each row of a batch, (b,), by which its step is unbiased.

    A batch of b of a round's m nodes has each of them with probability b / m, so the weight that
    a node's draw gives counts m / b times. None: all rows count alike.

    Args:
        nodes: that a round has drawn.
        off: (C + 1,) of the batch, or (J C + 1,) of several.
        places: (b,) of its rows among the drawn nodes.
    """
    if nodes.loss_weights is None:
        return None
    weights = nodes.loss_weights.t[places]
    counts = off.diff()
    sizes = nodes.sample.off.diff().to(weights.dtype)
    factor = sizes.repeat(len(counts) // len(sizes)) / counts.clamp(min=1)
    return weights * factor[owners(off)]


def add_to_sums_(
    state: BatchState, training_rows: stored_rows.TrainingRows, losses: Tensor, batch_number: int
) -> None:
    """Add a batch, its rows' losses (b,) and its number among those of all rounds to the sums."""
    batch = training_rows.batch
    ages = (batch_number - state.received_at.t[batch.later.slots]).double()
    sums = segment_sum(losses.double(), batch.off), batch.off.diff()
    age_counts = segment_sum(ages, batch.later.slot_off), batch.later.slot_off.diff()
    state.sums.t.add_(torch.stack([t.double() for t in (*sums, *age_counts)], dim=1))


# --- The round ends: clients send their models (line 19) -----------------------------------------


def share_spec(cfg: Config) -> FieldSpec:
    """Return the spec of a client's weight in the mean."""
    return replace(TRAINED, high=1) if cfg.options.average == "clients" else TRAINED


def move_specs(cfg: Config) -> FieldSpecs:
    """Return the spec of how far models have moved, where the interval needs that."""
    return {MOVED: FieldSpec(Stacked, low=0)} if reports_moves(cfg) else {}


def steps_specs(cfg: Config) -> FieldSpecs:
    """Return the spec of counts of steps, where only used rows of weights are sent."""
    spec = FieldSpec(Stacked, (), torch.int64, low=0, high=num_batches(cfg))
    return {"steps": spec} if cfg.sent.rows == "used" else {}


@dataclass(frozen=True)
class TrainedModel:
    """What clients send after their batches.

    Attributes:
        weights: theta of each client, in the form that the run sends weights in.
        loss: (C,) mean over the nodes of all batches.
        row_age: (C,) mean age of the slots' rows that batches read, in batches.
        rows_trained: (C,) nodes of all batches.
        moved: (C,) |theta - theta_t|^2.
        share: (C,) int64 weight of the model in the mean.
        steps: (C,) int64, by which the server knows the rows that are not sent.
    """

    weights: Annotated[Mapping[str, Stacked | Patched], later_reply_spec]
    loss: Annotated[Stacked, LOSS]
    row_age: Annotated[Stacked, LOSS]
    rows_trained: Annotated[Stacked, LOSS]
    moved: Annotated[Stacked | None, move_specs]
    share: Annotated[Stacked, share_spec]
    steps: Annotated[Stacked | None, steps_specs]


@op(
    Kind.EMBEDDINGS,
    replies=Kind.WEIGHTS,
    writes=(*WRITTEN_BY_BATCHES, "halo_rows/", "received_at"),
)
def close_round(
    clients: FedAISClients, state: RoundState, request: RowsThatCame
) -> tuple[ClientState, TrainedModel]:
    """Store the rows that came, train on the last batches, and end the round."""
    trained = store_and_train(clients, state.batch_part(), request)
    return finish_training(clients, replace(state, **vars(trained)))


@op(Kind.WEIGHTS)
def train_alone(
    clients: FedAISClients, state: ClientState, request: RoundStart
) -> tuple[ClientState, TrainedModel]:
    """Do a whole round without rows of other clients."""
    begun, batches = begin_training(clients, state, request), range(num_batches(clients.cfg))
    trained = take_steps(clients, begun.batch_part(), batches, batches_before=0)  # no slots or ages
    return finish_training(clients, replace(begun, **vars(trained)))


def finish_training(clients: FedAISClients, state: RoundState) -> tuple[ClientState, TrainedModel]:
    """Return the trained model, and what stays after the round.

    Raises:
        ProtocolError: batches are left; an update of few batches would show more of single nodes.
    """
    cfg, block = clients.cfg, clients.block
    total, models = num_batches(cfg), models_in(cfg, state.training)
    check_next_batch(state, total)
    with work_for(Kind.EVALUATION):
        x = features_for(block, stored_rows.is_compact(models))
        rows = torch.arange(len(block.row_key), device=block.off.device)
        first_outputs = compute_first_outputs(clients, state.training, rows, block.off)
        weights = stored_rows.weights_of(models)
        logits, _entered = whole_pass(clients, state, weights, x, first_outputs)
    start = {name: w.t[0] for name, w in state.start_weights.items()}
    squared_moves = squared_move(block, models, start) if reports_moves(cfg) else None
    trained = stored_rows.finish_training(cfg.training, block, models, start)
    if cfg.keep_optimizer:
        memory = stacked("optimizer", stored_rows.memory_of(cfg.training, models))
        finite = keep_previous_if_not_finite(memory, clients.state)
        clients.state = {**clients.state, **finite}
    clients.state = {**clients.state, "own/logits": judges_of(block).select(logits)}
    if not cfg.sent.plain:
        shared = {f"weights/{name}": Shared(w) for name, w in start.items()}
        clients.start = shared, untouched_rows_after(cfg, start, total)
    loss, count, age, age_count = state.sums.t.unbind(1)
    nodes, dtype = block.num_train, dtype_of(block)
    if cfg.options.average == "clients":
        nodes = torch.ones_like(nodes)
    return state.after_round(), TrainedModel(
        weights=trained,
        loss=Stacked((loss / count.clamp(min=1)).to(dtype)),
        row_age=Stacked((age / age_count.clamp(min=1)).to(dtype)),
        rows_trained=Stacked(count.to(dtype)),
        moved=None if squared_moves is None else Stacked(squared_moves.to(dtype)),
        share=Stacked((count > 0) * nodes),
        steps=cast("Stacked", models[stored_rows.STEPS]) if cfg.sent.rows == "used" else None,
    )


def squared_move(block: ClientBlock, fields: TrainingFields, start: Mapping[str, Tensor]) -> Tensor:
    """Return the squared length of each client's move from shared weights, (C,) float64.

    Rows of features that a client does not have are left out: they only decay.
    """
    total = torch.zeros(block.num_clients, dtype=torch.float64, device=block.off.device)
    for name, value in fields_under("weights", fields).items():
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
    rows = {
        n: cfg.backend.untouched_rows_after(cfg.training, weights[n], steps)
        for n in cfg.model.first_maps
    }
    return {f"weights/{name}": w for name, w in rows.items()}


# --- Server (lines 3 to 8) -----------------------------------------------------------------------


@calls(begin_stored, when(shares_features, FETCH_FEATURES))
def setup(server: Server[FedAISOptions], weights: Params) -> ServerState:
    """Set up the clients, which share features if they may."""
    server.call(begin_stored, Empty())
    if shares_features(server.cfg):
        server.exchange(FETCH_FEATURES, Empty())
    return ServerState(weights, {})


@calls(
    when(
        reads_halo,
        open_round,
        anyone(serve),
        repeat(train_batches, anyone(serve), at_most=lambda cfg: num_batches(cfg) - 1),
        close_round,
    ),
    when(trains_alone, train_alone),
)
def train_round(
    server: Server[FedAISOptions], state: ServerState
) -> tuple[ServerState, RoundReport]:
    """Train at the selected clients M_t, with exchanges in between, and average."""
    assert state.weights is not None  # set by setup
    cfg, weights, client_ids = server.cfg, state.weights, server.select()
    positions = positions_of(server.fed.ids, client_ids)
    ratio = stack({name: t[positions] for name, t in cfg.knobs.items() if name == RATIO})
    mean = mean_of_models(server, weights)
    bytes_before = bytes_of_rows(server)
    if reads_halo(cfg):
        starts = list(first_batches(cfg))
        tau = NextBatches.of(cfg, server.round, 0).knobs[TAU]
        start = RoundStartWithTau(weights, ratio, tau)
        slots = server.call(open_round, start, to=client_ids, allow_missing=True)
        for number in starts:
            rows = server.fetch_rows(
                slots,
                serve,
                NextBatches.of(cfg, server.round, number),
                RowsThatCame,
                to=client_ids,
                of_anyone=True,
                dtype=next(iter(weights.values())).dtype,
            )
            if number != starts[-1]:
                slots = server.call(train_batches, rows, to=client_ids, allow_missing=True)
        # The rows of the last exchange come with the last batches, and the model returns.
        reply = server.call(close_round, rows, to=client_ids, reduce=mean)
    else:
        reply = server.call(train_alone, RoundStart(weights, ratio), to=client_ids, reduce=mean)
    row_bytes = float(bytes_of_rows(server) - bytes_before)
    facts = facts_of(server, client_ids, weights) | {ROW_BYTES: row_bytes}
    names = ("row_age", "rows_trained", *((MOVED,) if reports_moves(cfg) else ()))
    if "loss" not in reply:  # no selected client has a training node
        return state, RoundReport(client_ids, None, facts | dict.fromkeys(names, 0.0))
    facts |= {name: float(reply[name].t) for name in names}
    report = RoundReport(client_ids, float(reply["loss"].t), facts)
    return server.step(state, tensors_under("weights", reply), report)


def bytes_of_rows(server: Server[FedAISOptions]) -> int:
    """Return the bytes of all rows, and of the places that they were requested by, so far."""
    sizes = server.fed.ledger.bytes_by_kind
    return sizes.get(Kind.EMBEDDINGS, 0) + sizes.get(Kind.HALO_KEYS, 0)


def mean_of_models(server: Server[FedAISOptions], weights: Params) -> WeightedMean:
    """Return the mean of the trained models (line 7).

    Rows of features that a client does not have follow from the number of its steps.
    """
    cfg = server.cfg

    def after(name: str, steps: int) -> Tensor:
        """Return the rows that a client does not use after `steps` steps."""
        return untouched_rows_after(cfg, weights, steps)[name]

    untouched_rows = untouched_rows_after(cfg, weights, num_batches(cfg))
    return mean_of(
        cfg, "share", weights, server.used_rows, untouched_rows, steps="steps", after=after
    )


def facts_of(
    server: Server[FedAISOptions], client_ids: Sequence[str], weights: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the facts of a round; `paper_row_bytes`: every slot in every batch, rows alone."""
    cfg, halo, total = server.cfg, reads_halo(server.cfg), num_batches(server.cfg)
    positions = positions_of(server.fed.ids, client_ids)
    slots = int(server.fed.route.slot_off.diff()[positions].sum())
    size = sum(pull.stored_widths(cfg.model).values()) * next(iter(weights.values())).element_size()
    return {
        EXCHANGES: float(len(first_batches(cfg))),
        BATCHES: float(total),
        **({RATE: rate_of(cfg.optimizer)} if reports_moves(cfg) else {}),
        "paper_row_bytes": float(slots * size * total * halo),
    }


def rate_of(optimizer: Optimizer) -> float:
    """Return an optimizer's learning rate; 0, which sets no interval, of one that has none."""
    return optimizer.lr if isinstance(optimizer, SGD | Adam) else 0.0


FEDAIS: Method[FedAISOptions] = Method(
    name="fedais",
    title="stored embeddings, important nodes, and exchanges as the loss falls (FedAIS)",
    reference="Li et al., Federated graph learning with adaptive importance-based sampling, "
    "AAAI 2025",
    options=FedAISOptions,
    **program(train_round, setup=setup, state=ClientState),
    check=check,
    server_step=True,
    evaluate=HaloSums(),
    needs=Needs(
        optimizer="sgd",
        lr=0.01,
        weight_decay=0.0,
        local_epochs=2,
        server_optimizer="adam",
        score_first=True,
        knobs=knobs_of_run,
        controller=controller_of,
    ),
    rows="single",
    small_weights=True,
    facts={
        EXCHANGES: "How often clients fetched rows of their halo.",
        BATCHES: "Batches at each client, in all local epochs.",
        RATE: "Learning rate of the clients, by which eq. 10 sets the interval.",
        MOVED: "Mean squared length of the clients' moves, of which eq. 10's constants are "
        "estimated.",
        ROW_BYTES: "Bytes of the round's exchanges at all clients, slot numbers included.",
        "paper_row_bytes": "Bytes of rows if every slot were fetched for every batch, as the "
        "paper counts.",
        "row_age": "Age in batches of the halo rows that were read, mean over clients.",
        "rows_trained": "Training nodes in a client's batches, mean over clients.",
    },
    cautions=(
        Caution(
            "where few edges are cut, fedopt is as good, with fewer bytes and less work "
            "(benchmarks/fedais/server_step.md)"
        ),
    ),
    only_sums=True,
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
