"""FedGraph: convolutions across clients on drawn neighbors, with rates that an agent may learn.

Chen, Li, Miyazaki and Wu, "FedGraph: Federated graph learning with intelligent sampling", IEEE
TPDS 2022, algorithms 1 to 3, eq. 2-8. In every iteration each client draws `kappa` labeled nodes
and keeps each neighbor with a probability of the layer (`silograph.methods.fedgraph`). From
the second layer on neighbors in other silos are summed over, too: their owners send rows that they
have multiplied by their own current weights, and that rest on neighbors drawn under their own
rates. These rows are constants for the gradient, or with `return_gradients` their gradients go back
to the owners, as those of summed losses: then with all of everything and one step of SGD a round is
one of centralized training. The server takes the mean of the clients' weights
in proportion to the sizes of their batches (eq. 8).

`share` says which layers hear other silos: those from the second on (`hidden`), all (`all`,
FedGraph_allShare) or none (`none`, FedGraph_nonShare). What is shared is not private for that: see
docs/explanation/privacy.md.

How we read the paper: the node's own message is never dropped. A layer that is not shared scales by
degrees within the client, and counts neighbors there in eq. 7. A row that another silo requests has
the same neighbors as in its owner's batch, those in other silos included where the layer is shared.
So with all labeled nodes, all neighbors and equal weights a pass equals one of live exchange. A
round has one iteration by default (`local_steps`), as the paper names no number.

With another sampler (`neighbors=fanout` as GraphSAGE, `fastgcn`, ...) that sampler draws the
neighbors in place of the rates: what the paper compares with, in the same exchange. In a stage that
is shared it sees the halo as further nodes of the client, whose degrees are the numbers of their
edges to it, as it knows no others. Only rows that it has drawn are requested.

What we changed: by default the iteration is one of SGD, and the server takes a step of Adam along
the mean change, where eq. 8 takes the mean (`server_optimizer=none`).

The agent (`policy=ddpg`) is `silograph.control.ddpg`; by default rates stay at the options' values.

A round with one shared stage and one iteration is three calls:

    open_round    weights, rates       ->  halo slots whose rows the stage needs
    serve         rows that are wanted ->  these rows, times their owner's weights
    submit        rows                 ->  weights after the step

With several iterations `step` takes the place of `submit` in all but the last. With several shared
stages, `name_slots` passes requests on from the last stage to the first, and `forward` rows from
the first to the last. With `return_gradients` the rows of the last stage come by `take_rows`, and
`send_back` and `take_back` carry gradients before the step.

C: clients. k: halo slots, boundary rows. O: width of a stage's sum.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import is_
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from silograph.control import FIXED, Controller, by_policy, knob_specs
from silograph.control.policy import AGENT, AGENT_SEED, AGENT_STATE, EXPLORE, TARGET, TIME
from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, ProtocolError, mistake
from silograph.core.key import Key, mix_words, signed
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Payload,
    Ragged,
    Shared,
    Stacked,
    offsets,
    owners,
    stable_order,
    stack,
    tensors_under,
)
from silograph.core.setting_values import lin
from silograph.core.work import (
    Meter,
    metered,
    report_each,
    report_entries,
    report_meter,
    report_rows,
    work_for,
)
from silograph.evaluation.scoring import Evaluation, HaloFrom, OwnGraph
from silograph.exchange.passes import (
    AtStage,
    PartialSums,
    PassForm,
    RemoteSums,
    check_stage,
    divisible,
    stages_with_sums,
)
from silograph.exchange.pull import (
    BoundaryRows,
    Slots,
    WantedRows,
    rows_for_slots,
    wanted_rows,
)
from silograph.exchange.rows import SumRelay
from silograph.federation.field_specs import (
    BOUNDARY,
    LOSS,
    TRAINED,
    FieldSpec,
    FieldSpecs,
)
from silograph.federation.messages import Empty
from silograph.federation.ops import CallContext, for_each
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.graph.csr import CSR
from silograph.methods.base import (
    Method,
    MethodConfig,
    Needs,
    RoundReport,
    ServerState,
    Share,
)
from silograph.methods.local_training import AveragedModel, exact_weights
from silograph.methods.ops import Clients, Server, calls, op, program, repeat, when
from silograph.nn.conv import Messages, Params
from silograph.nn.fit import LOSS_FLOPS, check_places, check_weights, dtype_of, stacked_copies
from silograph.nn.forward import Pass, forward_pass, rows_of_stage
from silograph.nn.mini_batches import (
    Drawn,
    Full,
    Neighbors,
    Reached,
    features_of,
    one_stage,
)
from silograph.nn.model import known_product, scales_of, stage_weights
from silograph.nn.plain_pass import MappedRows, is_plain, map_rows, pass_gradients, sum_rows
from silograph.nn.reach import full_reach
from silograph.nn.segment import segment_sum, sparse_product
from silograph.nn.stored_rows import surroundings
from silograph.task.counts import judges_of
from silograph.task.registry import task_of

# --- Stages of a pass whose neighbors are drawn one by one, in all silos -------------------------
#
# A client keeps every neighbor of a row with a probability of its own for each stage (Chen, Li,
# Miyazaki and Wu, "FedGraph: Federated graph learning with intelligent sampling", IEEE TPDS 2022,
# algorithm 2). Neighbors in other silos are kept alike, where a stage is shared; their rows come
# from their owners. A kept neighbor stands for d / k where k of d were kept (eq. 7), whose
# expectation is 1 - (1 - p)^d of the sum, or for 1 / p, which is unbiased.
#
# Draws are hashes of the key and of both rows' keys, so a row that other silos request has the same
# neighbors as in its own client's batch.
#
# C: clients. n: rows of the block. r: output rows of a stage. s: input rows. k: halo slots whose
# rows a stage needs.


@dataclass(frozen=True, eq=False)
class StageDraw:
    """How a stage's neighbors are drawn.

    Attributes:
        sums: whether it sums over neighbors at all.
        keep: (C,) float64 probability with which each client keeps a neighbor.
        shared: whether neighbors in other silos count: in the draw, and in the degrees that
            convolutions scale by.
        by_degree: whether a kept neighbor stands for d / k; else for 1 / p.
        sampler: draws in place of these probabilities; None: they do.
        hop: of the sampler, 0 in the last stage that sums.
    """

    sums: bool
    keep: Tensor
    shared: bool
    by_degree: bool
    sampler: Neighbors | None = None
    hop: int = 0


@dataclass(frozen=True, eq=False)
class SampledStage:
    """A stage of a pass with its drawn neighbors.

    Attributes:
        output_rows: the rows that the stage computes.
        input_rows: the rows that it reads: the output rows, their kept neighbors, and
            `requested_rows`.
        requested_rows: (m,) int64 rows whose messages other silos have requested.
        messages: what the convolution needs to sum over own rows.
        slots: (k,) int32 halo slots whose rows it needs, numbered per client, ascending.
        halo_weights: (r, k) weight of each of these slots in the sum of a row.
        degree: (n, 1) in the run's dtype, the degrees that the convolution uses.
        own_neighbors: the kept neighbors that are rows of the same client.
        cached_features: features of the input rows, filled at the first use; a stage belongs to one
            block; released when the next iteration is drawn.
    """

    output_rows: Reached
    input_rows: Reached
    requested_rows: Tensor
    messages: Messages
    slots: Ragged
    halo_weights: CSR
    degree: Tensor
    own_neighbors: Drawn
    cached_features: list[Rows] = field(default_factory=list, init=False, repr=False)

    def features(self, block: ClientBlock) -> Rows:
        """Return the features of the input rows; every pass of an iteration reads them."""
        if not self.cached_features:
            self.cached_features.append(features_of(block.x, self.input_rows))
        return self.cached_features[0]


def draw_batch_rows(block: ClientBlock, batch_sizes: Tensor, key: Key) -> Reached:
    """Draw at most `batch_sizes` (C,) training rows of each client, without replacement.

    Algorithm 2, line 1; `batch_sizes` is kappa.
    """
    rows = block.split.train.nonzero()[:, 0]
    if bool((batch_sizes < block.num_train).any()):
        drawn_words = key.words(block.row_key[rows], 1)[:, 0]
        arrays = block.client[rows], drawn_words, batch_sizes
        client, words, most = (t.cpu().numpy() for t in arrays)
        order = np.lexsort((words, client))
        rank = np.arange(len(order)) - np.searchsorted(client, client)
        drawn = order[rank < most[client]]
        drawn.sort()
        rows = rows[torch.from_numpy(drawn).to(rows.device)]
    clients = torch.arange(block.num_clients, device=rows.device)
    return Reached(rows, torch.zeros_like(rows), clients, offsets(_count_by_client(block, rows)))


def _count_by_client(block: ClientBlock, rows: Tensor) -> Tensor:
    return torch.bincount(block.client[rows], minlength=block.num_clients)


def sampled_stage(
    block: ClientBlock,
    output_rows: Reached,
    hop: int,
    draw: StageDraw,
    requested_rows: Tensor,
    key: Key,
) -> SampledStage:
    """Draw the neighbors of the rows that a stage computes (algorithm 2).

    Args:
        block: C clients.
        output_rows: the rows.
        hop: 0 in the last stage.
        draw: how neighbors are drawn.
        requested_rows: (m,) int64 rows that the stage must read as well, for other silos.
        key: of the stage.
    """
    if draw.sampler is None or not draw.sums:
        own_neighbors, halo_neighbors = _draw_by_rates(block, output_rows.rows, draw, key)
    else:
        own_neighbors, halo_neighbors = _draw_by_sampler(
            block, output_rows, draw, draw.sampler, key
        )
    assert own_neighbors.degree is not None  # both draws set it
    input_rows, messages = one_stage(block, output_rows, own_neighbors, hop, requested_rows)
    slots, column = torch.unique(halo_neighbors.neighbor, return_inverse=True)
    slot_off = torch.searchsorted(slots, block.halo.off)
    client_slots = slots - torch.repeat_interleave(block.halo.off[:-1], slot_off.diff())
    requested_slots = Ragged(client_slots.int(), slot_off)
    order = stable_order(halo_neighbors.position * len(slots) + column)
    starts = offsets(torch.bincount(halo_neighbors.position, minlength=len(output_rows.rows)))
    halo_weights = CSR(starts, column[order], halo_neighbors.share[order], len(slots))
    degree_column = own_neighbors.degree.to(own_neighbors.share.dtype)[:, None]
    return SampledStage(
        output_rows,
        input_rows,
        requested_rows,
        messages,
        requested_slots,
        halo_weights,
        degree_column,
        own_neighbors,
    )


def with_requested_rows(
    block: ClientBlock, stage: SampledStage, hop: int, requested_rows: Tensor
) -> SampledStage:
    """Return a stage with the same drawn neighbors and other requested rows.

    Args:
        block: C clients.
        stage: a drawn stage.
        hop: 0 in the last stage.
        requested_rows: (m,) int64 rows that replace those of the stage.
    """
    input_rows, messages = one_stage(
        block, stage.output_rows, stage.own_neighbors, hop, requested_rows
    )
    return replace(stage, input_rows=input_rows, requested_rows=requested_rows, messages=messages)


def _degree_of(block: ClientBlock, draw: StageDraw) -> Tensor:
    """Return the degrees of all rows that a stage counts, (n,)."""
    return block.adj.degree + block.halo.adj.degree if draw.shared else block.adj.degree


def _draw_by_sampler(
    block: ClientBlock, rows: Reached, draw: StageDraw, sampler: Neighbors, key: Key
) -> tuple[Drawn, Drawn]:
    """Let a sampler draw: neighbors in the same client, and halo slots of other silos."""
    around = surroundings(block, halo=draw.shared)
    placed = replace(rows, rows=around.place[rows.rows])
    drawn = sampler.draw(around.graph, placed, draw.hop, key, {})
    degree = _degree_of(block, draw) if drawn.degree is None else drawn.degree[around.place]
    row, slot = around.row[drawn.neighbor], around.slot[drawn.neighbor]
    is_own, is_slot = row >= 0, slot >= 0
    return (
        Drawn(drawn.position[is_own], row[is_own], drawn.share[is_own], degree),
        Drawn(drawn.position[is_slot], slot[is_slot], drawn.share[is_slot]),
    )


def _draw_by_rates(
    block: ClientBlock, rows: Tensor, draw: StageDraw, key: Key
) -> tuple[Drawn, Drawn]:
    """Keep each neighbor of rows (r,) by chance: those in the same client, and halo slots."""
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    degree, dtype = _degree_of(block, draw), block.adj.values.dtype
    no_neighbors = Drawn(rows[:0], rows[:0], block.adj.values.new_zeros(0))
    if not draw.sums:
        return replace(no_neighbors, degree=degree), no_neighbors
    # In NumPy, which takes a quarter of the time of torch for few edges.
    row, client_keep = rows.cpu().numpy(), draw.keep.cpu().numpy()
    row_key, keep = block.row_key.cpu().numpy(), client_keep[block.client[rows].cpu().numpy()]
    hashes = mix_words(row_key[row] ^ signed(key.value))
    position, neighbor = _keep_edges(block.adj, row, hashes, row_key, keep)
    halo_position, slot = position[:0], neighbor[:0]
    if draw.shared:
        slot_key = block.halo.key.cpu().numpy()
        halo_position, slot = _keep_edges(block.halo.adj, row, hashes, slot_key, keep)
    if draw.by_degree:  # eq. 7
        count = np.bincount(np.concatenate([position, halo_position]), minlength=len(row))
        weight = degree[rows].cpu().numpy() / np.maximum(count, 1)
    else:
        weight = 1 / keep

    def drawn(position: np.ndarray, neighbor: np.ndarray, degree: Tensor | None = None) -> Drawn:
        arrays = position, neighbor, weight[position]
        place, node, share = (torch.from_numpy(array).to(rows.device) for array in arrays)
        return Drawn(place, node, share.to(dtype), degree)

    return drawn(position, neighbor, degree), drawn(halo_position, slot)


def _keep_edges(
    adj: CSR, rows: np.ndarray, hashes: np.ndarray, sender_key: np.ndarray, keep: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Keep edges to rows by chance; return the places of their rows, and their columns, (e,) int64.

    Args:
        adj: (n, s) edges, receiver by sender.
        rows: (r,) int64 that receive.
        hashes: (r,) int64 of their keys and the key of the draw.
        sender_key: (s,) int64 keys of the senders.
        keep: (r,) float64 probability with which each edge of a row is kept.
    """
    indptr = adj.indptr.cpu().numpy()
    first, lengths = indptr[rows], adj.degree.cpu().numpy()[rows]
    ends = lengths.cumsum()
    place = np.repeat(np.arange(len(rows)), lengths)
    entry = np.arange(len(place)) + np.repeat(first - (ends - lengths), lengths)
    column = adj.indices.cpu().numpy()[entry].astype(np.int64)
    words = mix_words(hashes[place] ^ sender_key[column])
    uniform = words * 2.0**-64 + 0.5  # as `uniform_of`
    chosen = (uniform <= keep[place]).nonzero()[0]
    return place[chosen], column[chosen]


def sampled_inputs(
    block: ClientBlock, stages: Sequence[SampledStage], received: Mapping[int, Tensor]
) -> Pass:
    """Return the pass through drawn stages, the first one first.

    Args:
        block: C clients.
        stages: of the pass.
        received: by number of a stage, rows (k, O) of its slots, scaled by their owners.
    """
    messages = []
    for number, stage in enumerate(stages):
        rows = received.get(number)
        if rows is not None:
            _report_received(stage, rows)
        messages.append(_add_received(stage, rows))
    keys = tuple(block.row_key[stage.input_rows.rows] for stage in stages)
    return Pass(stages[0].features(block), tuple(messages), keys)


def _add_received(stage: SampledStage, received: Tensor | None) -> Messages:
    """Return the messages of a stage, and those of rows (k, O) of other silos, if there are any."""
    if received is None:
        return stage.messages
    return replace(stage.messages, beside=sparse_product(stage.halo_weights, received))


def _report_received(stage: SampledStage, received: Tensor) -> None:
    """Report the work of summing rows (k, O) of other silos."""
    report_entries(stage.halo_weights.indptr, stage.messages.off, 2 * received.shape[1])


SHARED_FROM = {"all": 0, "hidden": 1}  # the first layer that hears other silos
LAYERS = 3  # that have a probability of their own; later ones have the last one's


# --- Options -------------------------------------------------------------------------------------


KEEPS = ("keep_1", "keep_2", "keep_3")


def _knob_metadata(text: str) -> dict[str, object]:
    return {"help": text, "knob": lin(0.05, 1.0), "by_client": True, "tune": lin(0.05, 1.0)}


@checked_dataclass(frozen=True, config=STRICT)
class FedGraphOptions:
    """Options of draws, exchange and rates; the help texts document the fields."""

    kappa: Annotated[int, Field(ge=1, le=1024)] = field(
        default=256,
        metadata={
            "help": "labeled nodes in a client's batch",
            "knob": lin(1, 1024),
            "by_client": True,
            "tune": lin(1, 1024),
        },
    )
    keep_1: Share = field(
        default=0.5, metadata=_knob_metadata("probability with which a neighbor is kept in layer 1")
    )
    keep_2: Share = field(default=0.5, metadata=_knob_metadata("in layer 2"))
    keep_3: Share | None = field(
        default=None, metadata=_knob_metadata("in layers from the third on; none: as in layer 2")
    )
    rescale: Literal["degree", "inverse"] = field(
        default="degree",
        metadata={
            "help": "what a kept neighbor counts: degree (neighbors / kept ones, as the paper) or "
            "inverse (1 / probability, unbiased)"
        },
    )
    share: Literal["hidden", "all", "none"] = field(
        default="hidden",
        metadata={"help": "layers that hear other silos: from the second on, all, or none"},
    )
    return_gradients: bool = field(
        default=False,
        metadata={"help": "send gradients of rows back to their owners, unlike the paper"},
    )
    local_steps: Annotated[int, Field(ge=1, le=1000)] = field(
        default=1, metadata={"help": "iterations of a client in a round"}
    )
    policy: Literal["fixed", "ddpg", "drawn"] = field(
        default="fixed",
        metadata={
            "help": "what sets kappa and the probabilities: fixed, ddpg (an agent) or drawn (by "
            "chance)"
        },
    )
    target: Share = field(default=0.9, metadata=TARGET)
    time: Literal["virtual", "measured", "none"] = field(default="virtual", metadata=TIME)
    explore: bool = field(default=True, metadata=EXPLORE)
    agent: str | None = field(default=None, metadata=AGENT)
    agent_state: Literal["summary", "pca"] = field(default="summary", metadata=AGENT_STATE)
    agent_seed: int = field(default=0, metadata=AGENT_SEED)


def controller_of(options: FedGraphOptions) -> Controller:
    """Return the controller that sets the rates."""
    return by_policy(options, FIXED)


def deviation_of(options: FedGraphOptions) -> str | None:
    """Return that rates without an agent are not the policy that the paper learns."""
    if options.policy == "ddpg":
        return None
    rates = "fixed" if options.policy == "fixed" else "drawn by chance"
    return (
        f"rates are {rates}: this is not the paper's learned policy, which --option policy=ddpg "
        "has (with --option agent=FILE one that silograph train-agent has trained)"
    )


def evaluation_of(options: FedGraphOptions) -> Evaluation:
    """Return how the server's model is scored: through the same edges as in training."""
    first = SHARED_FROM.get(options.share)
    return OwnGraph() if first is None else HaloFrom(1 if first else 0)


def check(cfg: MethodConfig[FedGraphOptions]) -> None:
    """Raise `ConfigError` where sums cannot be shared, or the config asks for other steps."""
    if not any(stage.conv.sums for stage in divisible(cfg.model).stages):
        raise ConfigError(
            "expected a model that sums over neighbors for fedgraph, which draws them, got "
            f"{cfg.model.noun}: use model=gcn, graphconv, gin, sage or appnp, or another method, "
            "such as fedopt",
            **mistake("conflicting-options", ["method", "model"]),
        )
    schedule = cfg.schedule
    if not cfg.everyone_trains or schedule.batch_size is not None or schedule.epochs != 1:
        raise ConfigError(
            "expected participation=1, local_epochs=1 and no batch_size with fedgraph, whose "
            "clients take their steps together: use --option kappa= and local_steps=",
            **mistake(
                "conflicting-options", ["method", "participation", "local_epochs", "batch_size"]
            ),
        )
    if not isinstance(schedule.neighbors, Full):
        _check_sampler(cfg)


def _check_sampler(cfg: MethodConfig[FedGraphOptions]) -> None:
    """Raise `ConfigError` unless a sampler can draw in place of the rates."""
    if cfg.schedule.neighbors.specs(cfg.model):
        raise ConfigError(
            "expected a neighbor sampler that remembers nothing with fedgraph, got one that "
            "learns: use neighbors=fanout, fastgcn or ladies",
            **mistake("conflicting-options", ["method", "neighbors"]),
        )
    if cfg.options.policy != "fixed":
        raise ConfigError(
            f"expected policy=fixed where neighbors draws in place of keep_1 and keep_2, got "
            f"policy={cfg.options.policy}: leave one of them out",
            **mistake("conflicting-options", ["neighbors", "policy"]),
        )
    for option in fields(FedGraphOptions):
        if option.name in (*KEEPS, "rescale"):
            value = getattr(cfg.options, option.name)
            if value != option.default:
                raise ConfigError(
                    f"expected no {option.name} where neighbors draws in its place, got "
                    f"{option.name}={value}: leave one of them out",
                    **mistake("conflicting-options", ["neighbors", option.name]),
                )


# --- Stages that hear other silos, and the contexts of their calls -------------------------------


def shared_stages(cfg: MethodConfig[FedGraphOptions]) -> list[int]:
    """Return the numbers of the stages that hear other silos."""
    summing_stages = stages_with_sums(divisible(cfg.model))
    return summing_stages[SHARED_FROM.get(cfg.options.share, len(summing_stages)) :]


def hears_others(cfg: MethodConfig[FedGraphOptions]) -> bool:
    """Return whether any stage does."""
    return bool(shared_stages(cfg))


def trains_alone(cfg: MethodConfig[FedGraphOptions]) -> bool:
    """Return whether no stage does, so that a round is one call."""
    return not shared_stages(cfg)


def returns_gradients(cfg: MethodConfig[FedGraphOptions]) -> bool:
    """Return whether gradients of rows go back to their owners."""
    return cfg.options.return_gradients


def form_of(cfg: MethodConfig[FedGraphOptions], number: int) -> PassForm:
    """Return what the messages of a stage depend on."""
    return PassForm(divisible(cfg.model), is_named=True, stage=number)


def at_stages(context: CallContext, numbers: Iterable[int]) -> list[CallContext]:
    """Return the contexts of calls for some stages, one after the other."""
    return [replace(context, cfg=form_of(context.cfg, number)) for number in numbers]


def first_shared(context: CallContext) -> list[CallContext]:
    """Return the context of the first shared stage."""
    return at_stages(context, shared_stages(context.cfg)[:1])


def later_shared_backward(context: CallContext) -> list[CallContext]:
    """Return the contexts of all shared stages but the first, the last one first."""
    return at_stages(context, reversed(shared_stages(context.cfg)[1:]))


def earlier_shared(context: CallContext) -> list[CallContext]:
    """Return the contexts of all shared stages but the last, in order."""
    return at_stages(context, shared_stages(context.cfg)[:-1])


def last_shared(context: CallContext) -> list[CallContext]:
    """Return the context of the last shared stage."""
    return at_stages(context, shared_stages(context.cfg)[-1:])


def all_shared_backward(context: CallContext) -> list[CallContext]:
    """Return the contexts of all shared stages, the last one first."""
    return at_stages(context, reversed(shared_stages(context.cfg)))


# --- State of a client ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundState:
    """Within a round; between rounds a client keeps nothing but what the library keeps.

    Draws follow from the key and the state, and so does a pass: what an op has computed of it is
    cached, and is computed again where the cache is gone. Mappings of the last four fields are by
    stages, and of the iteration at hand.

    Attributes:
        weights: (C, ...).
        moments: (C, ...) optimizer state.
        kappa: (C,) most nodes of a batch.
        keep: (C, 3) probabilities by layer.
        nodes: (C,) of the last batch.
        loss: (C,) mean of it.
        steps: (C,) int32 taken in this round.
        requested_slots: (k,) int32 halo slots whose rows the client needs.
        requested_rows: (k,) int32 boundary rows that others need.
        received: (k, O) rows of the requested slots.
        returned: (k, O) gradients of the requested rows.
    """

    weights: Mapping[str, Stacked]
    moments: Mapping[str, Stacked]
    kappa: Stacked
    keep: Stacked
    nodes: Stacked
    loss: Stacked
    steps: Stacked
    requested_slots: Mapping[str, Ragged] = field(default_factory=dict)
    requested_rows: Mapping[str, Ragged] = field(default_factory=dict)
    received: Mapping[str, Ragged] = field(default_factory=dict)
    returned: Mapping[str, Ragged] = field(default_factory=dict)


FedGraphClients = Clients[FedGraphOptions]


def step_key(clients: FedGraphClients, state: RoundState) -> Key:
    """Return the key of the draws of the iteration at hand."""
    # All clients take as many steps. A round of one step has the key of a round of FedAvg, so that
    # without sharing and draws both are the same; earlier steps fold their number into it.
    done = int(state.steps.t[0])
    is_last = done == clients.options.local_steps - 1
    return clients.key if is_last else clients.key.fold("step", done)


def stages_of(clients: FedGraphClients, state: RoundState, first: int) -> list[SampledStage]:
    """Return the stages from `first` on as drawn in this iteration, with the rows others request.

    They follow from the key and the state alone; those of the current iteration are cached.
    """
    block, key, batch_sizes = clients.block, step_key(clients, state), state.kappa.t
    cached = block.memo.pop("fedgraph", None)
    cached_stages: dict[int, tuple[SampledStage, Ragged | None]] = {}
    rates = torch.cat([batch_sizes[:, None].double(), state.keep.t], dim=1)
    if isinstance(cached, tuple) and cached[0] == key and torch.equal(cached[1], rates):
        cached_stages = cached[2]
    del cached  # those of another iteration are released before this one is drawn
    last = len(divisible(clients.cfg.model).stages) - 1
    output_rows = (
        cached_stages[last][0].output_rows
        if last in cached_stages
        else draw_batch_rows(block, batch_sizes, key.fold("batch"))
    )
    stages: list[SampledStage] = []
    for number in range(last, first - 1, -1):
        request = state.requested_rows.get(str(number))
        stage, latest_request = cached_stages.get(number, (None, None))
        if stage is None or stage.output_rows is not output_rows:
            stage_key, rows = key.fold("neighbors", number), _requested_rows(block, request)
            draw = _stage_draws(clients.cfg, state)[number]
            stage = sampled_stage(block, output_rows, last - number, draw, rows, stage_key)
        elif request is not latest_request:
            # The requests of other silos arrive after the stage was drawn for the own ones.
            rows = _requested_rows(block, request)
            if not torch.equal(stage.requested_rows, rows):
                stage = with_requested_rows(block, stage, last - number, rows)
        cached_stages[number], output_rows = (stage, request), stage.input_rows
        stages.insert(0, stage)
    block.memo["fedgraph"] = (key, rates, cached_stages)
    return stages


def _stage_draws(cfg: MethodConfig[FedGraphOptions], state: RoundState) -> list[StageDraw]:
    """Return the settings of the neighbor draws of every stage."""
    shared_numbers, draws, layer = shared_stages(cfg), list[StageDraw](), 0
    sampler = None if isinstance(cfg.schedule.neighbors, Full) else cfg.schedule.neighbors
    last_layer = len(stages_with_sums(divisible(cfg.model))) - 1
    for number, stage in enumerate(divisible(cfg.model).stages):
        # Rates go by layers that sum: `layer` is how many came before this stage.
        keep_probability, hop = state.keep.t[:, min(layer, LAYERS - 1)], last_layer - layer
        layer += stage.conv.sums
        by_degree, is_shared = cfg.options.rescale == "degree", number in shared_numbers
        draws.append(
            StageDraw(stage.conv.sums, keep_probability, is_shared, by_degree, sampler, hop)
        )
    return draws


def _requested_rows(block: ClientBlock, positions: Ragged | None) -> Tensor:
    """Return the rows whose messages other silos have requested, (m,) int64, by their positions."""
    if positions is None:
        return block.halo.boundary[:0]
    boundary_positions = check_places(
        positions, block.halo.boundary_off, "boundary rows that are wanted"
    )
    return block.halo.boundary[boundary_positions]


# --- The round begins: weights and rates come, and clients name the slots of the last stage ------


def rate_specs(cfg: MethodConfig[FedGraphOptions]) -> FieldSpecs:
    """Return the specs of the rates, which a server cannot change if no controller moves them."""
    return knob_specs(cfg.options, varies=controller_of(cfg.options) is not FIXED)


@dataclass(frozen=True)
class RoundStart:
    """The server's weights, and the rates of each client: kappa, keep_1, keep_2 and keep_3."""

    weights: Annotated[Mapping[str, Tensor], exact_weights(Shared)]
    knobs: Annotated[Mapping[str, Stacked], rate_specs]


# Prefixes of state fields that a step changes in place.
STEPPED = ("weights/", "moments/", "optimizer/")


@op(Kind.WEIGHTS, replies=Kind.HALO_KEYS, writes=STEPPED)
def open_round(
    clients: FedGraphClients, _state: Empty, request: RoundStart
) -> tuple[RoundState, Slots]:
    """Take the server's weights and the rates, and name the slots of the last shared stage."""
    return name_slots_of(clients, begin_round(clients, request), shared_stages(clients.cfg)[-1])


def begin_round(clients: FedGraphClients, request: RoundStart) -> RoundState:
    """Return the state of clients that have the server's weights and their rates."""
    cfg, block = clients.cfg, clients.block
    check_weights(cfg.model, request.weights, block, shared=True)
    weights = stacked_copies(request.weights, block.num_clients)
    memory = tensors_under("optimizer", clients.state) if cfg.keep_optimizer else None
    # Within a round moments are state of the round, so that steps change them in place.
    others = {n: f for n, f in clients.state.items() if not n.startswith("optimizer/")}
    clients.state = others if cfg.keep_optimizer else clients.state
    keep_rates = [request.knobs[KEEPS[0]].t]
    for name in KEEPS[1:]:
        keep_rates.append(request.knobs[name].t if name in request.knobs else keep_rates[-1])
    return RoundState(
        weights=stack(weights),
        moments=stack(cfg.optimizer.init(weights) if memory is None else memory),
        kappa=request.knobs["kappa"],
        keep=Stacked(torch.stack(keep_rates, dim=1)),
        nodes=Stacked(torch.zeros_like(block.num_train)),
        loss=Stacked(next(iter(weights.values())).new_zeros(block.num_clients)),
        steps=Stacked(torch.zeros_like(block.num_train, dtype=torch.int32)),
    )


def name_slots_of(
    clients: FedGraphClients, state: RoundState, number: int
) -> tuple[RoundState, Slots]:
    """Draw the neighbors of a stage, and name the slots among them."""
    slots = stages_of(clients, state, number)[0].slots
    requested_slots = {**state.requested_slots, str(number): slots}
    return replace(state, requested_slots=requested_slots), Slots(slots)


# --- Rows: requests go from the last shared stage to the first, rows from the first to the last --


@dataclass(frozen=True)
class RequestedRows(BoundaryRows, AtStage):
    """The boundary rows that others need of a stage."""


@dataclass(frozen=True)
class SentRows:
    """Rows (k, O) times their owner's weights, scaled by their degrees."""

    rows: Annotated[Ragged, lambda form: FieldSpec(Ragged, (form.width,), rows="inbox/row")]


@dataclass(frozen=True)
class ReceivedRows(AtStage):
    """The same for the slots that a client has named."""

    rows: Annotated[
        Ragged,
        lambda form: FieldSpec(Ragged, (form.width,), rows=f"state/requested_slots/{form.stage}"),
    ]


def next_rows_spec(form: PassForm) -> FieldSpec:
    """Return the spec of rows of the next stage with a sum."""
    following = min(number for number in stages_with_sums(form.model) if number > form.stage)
    return FieldSpec(Ragged, (replace(form, stage=following).width,), rows=BOUNDARY, fewer=True)


@dataclass(frozen=True)
class NextRows:
    """Rows (k, O) of the next shared stage, those that others have requested."""

    rows: Annotated[Ragged, next_rows_spec]


@op(Kind.HALO_KEYS)
def name_slots(
    clients: FedGraphClients, state: RoundState, request: RequestedRows
) -> tuple[RoundState, Slots]:
    """Store which rows others will need of a stage, and name the slots of the one before.

    So the rows that owners send include what they hear of other silos themselves.
    """
    numbers = shared_stages(clients.cfg)
    number = _check_shared(clients, request.stage)
    state = _with_requested(clients, state, number, request.row)
    if number == numbers[0]:
        raise ProtocolError(f"expected a call for the rows of stage {number}, got one for slots")
    return name_slots_of(clients, state, numbers[numbers.index(number) - 1])


@op(Kind.HALO_KEYS, replies=Kind.EMBEDDINGS)
def serve(
    clients: FedGraphClients, state: RoundState, request: RequestedRows
) -> tuple[RoundState, SentRows]:
    """Send the requested rows of the first shared stage."""
    number = _check_shared(clients, request.stage)
    state = _with_requested(clients, state, number, request.row)
    return state, SentRows(_rows_to_send(clients, state, number))


@op(Kind.EMBEDDINGS)
def forward(
    clients: FedGraphClients, state: RoundState, request: ReceivedRows
) -> tuple[RoundState, NextRows]:
    """Store the rows of a stage, and send those of the next one that others have requested."""
    number = _check_shared(clients, request.stage)
    state = _with_received(clients, state, number, request.rows)
    following = min(n for n in shared_stages(clients.cfg) if n > number)
    return state, NextRows(_rows_to_send(clients, state, following))


def _check_shared(clients: FedGraphClients, stage: Tensor) -> int:
    """Return the number of a stage; raise `ProtocolError` if it does not hear other silos."""
    number = check_stage(divisible(clients.cfg.model), int(stage))
    if number not in shared_stages(clients.cfg):
        raise ProtocolError(f"expected a stage that hears other silos, got stage {number}")
    return number


def _with_requested(
    clients: FedGraphClients, state: RoundState, number: int, rows: Ragged
) -> RoundState:
    """Return the state with the rows that others need of a stage."""
    check_places(rows, clients.block.halo.boundary_off, "boundary rows that are wanted")
    return replace(state, requested_rows={**state.requested_rows, str(number): rows})


def _with_received(
    clients: FedGraphClients, state: RoundState, number: int, rows: Ragged
) -> RoundState:
    """Return the state with the rows of the requested slots of a stage."""
    requested = state.requested_slots.get(str(number))
    if requested is None:
        raise ProtocolError(f"expected rows of a stage whose slots were named, got stage {number}")
    expected_shape = len(requested.t), form_of(clients.cfg, number).width
    dtype = dtype_of(clients.block)
    if rows.t.shape != expected_shape or rows.t.dtype is not dtype:
        raise ProtocolError(
            f"expected rows of shape {expected_shape} in {dtype}, got {tuple(rows.t.shape)} in "
            f"{rows.t.dtype}"
        )
    return replace(state, received={**state.received, str(number): rows})


def _rows_to_send(clients: FedGraphClients, state: RoundState, number: int) -> Ragged:
    """Return the requested rows of a stage, which rest on what was received before it."""
    requested = state.requested_rows.get(str(number))
    if requested is None:
        raise ProtocolError(f"expected to know which rows of stage {number} others need, got none")
    stages = stages_of(clients, state, 0)
    if passes_by_halves(clients.cfg):
        mapped = compute_halves(clients, state, stages, 2 * number + 1)[-1]
        assert isinstance(mapped, MappedRows)  # the last half
        z = mapped.z
    else:
        inputs = sampled_inputs(clients.block, stages, received_rows(state))
        key = step_key(clients, state)
        z = _map_stage(clients.cfg, weights_for_pass(state), inputs, stages[number], key, number)
    return Ragged(_messages_of(clients.cfg, z, stages[number], number), requested.off)


def weights_for_pass(state: RoundState) -> dict[str, Tensor]:
    """Return the weights (C, ...).

    Before the first step all clients have the server's weights, so one copy is expanded, and sparse
    features are multiplied once instead of C times.
    """
    weights = {name: w.t for name, w in state.weights.items()}
    if int(state.steps.t[0]) > 0:
        return weights
    return {name: w[0].expand_as(w) for name, w in weights.items()}


def received_rows(state: RoundState) -> dict[int, Tensor]:
    """Return the rows received from other silos, by stage."""
    return {int(number): rows.t for number, rows in state.received.items()}


def _map_stage(
    cfg: MethodConfig[FedGraphOptions],
    weights: Mapping[str, Tensor],
    inputs: Pass,
    stage: SampledStage,
    key: Key,
    number: int,
) -> Tensor:
    """Return the rows that enter a stage times its weights, (s, O)."""
    model = divisible(cfg.model)
    x = rows_of_stage(model, weights, inputs, key, number)
    return model.stages[number].conv.map(stage_weights(number, weights), x, stage.input_rows.off)


def _messages_of(
    cfg: MethodConfig[FedGraphOptions], z: Tensor, stage: SampledStage, number: int
) -> Tensor:
    """Return the messages of the requested rows in a stage, scaled by their degrees, (k, O).

    What a silo adds for others in eq. 3: h_j(u) W_j of the owner j. `z`: (s, O) of the rows that
    enter the stage.
    """
    entering = stage.input_rows
    row_position = stage.degree.new_full((len(stage.degree),), -1, dtype=torch.int64)
    row_position[entering.rows] = torch.arange(len(entering.rows), device=row_position.device)
    conv = divisible(cfg.model).stages[number].conv
    scale = scales_of(conv).sender_scale(stage.degree[stage.requested_rows])
    rows = z.index_select(0, row_position[stage.requested_rows])
    if scale is None:
        return rows
    report_rows(entering.off, z.shape[1])
    return scale * rows


# --- Passes of plain models, whose halves of stages are computed once in an iteration -------------


def passes_by_halves(cfg: MethodConfig[FedGraphOptions]) -> bool:
    """Return whether ops share the halves of a pass (`silograph.nn.plain_pass`)."""
    return not returns_gradients(cfg) and is_plain(divisible(cfg.model))


@dataclass(frozen=True, eq=False)
class CachedHalf:
    """The result of half a stage in the pass of an iteration.

    Attributes:
        stage: as drawn.
        received: (k, O) rows of other silos that it has read; None: it has read none.
        value: of the first half, rows times the stage's weight; of the second, outputs (r, O).
        work: of the forward pass.
    """

    stage: SampledStage
    received: Tensor | None
    value: MappedRows | Tensor
    work: Meter


def _cached_halves(clients: FedGraphClients, state: RoundState) -> list[CachedHalf]:
    """Return the halves that ops of the iteration have computed, in a list that can be extended.

    Weights are compared by identity: halves are dropped before a step changes weights in place.
    """
    key, weights = step_key(clients, state), [w.t for w in state.weights.values()]
    cached = clients.block.memo.get("fedgraph halves")
    if not isinstance(cached, tuple) or cached[0] != key or not all(map(is_, cached[1], weights)):
        cached = clients.block.memo["fedgraph halves"] = key, weights, list[CachedHalf]()
    halves: list[CachedHalf] = cached[2]
    return halves


def compute_halves(
    clients: FedGraphClients,
    state: RoundState,
    stages: Sequence[SampledStage],
    count: int,
    times: int = 1,
) -> list[MappedRows | Tensor]:
    """Return the results of the first `count` halves of stages in the pass of the iteration.

    Every stage has two. Those that an earlier op has computed are cached.

    Args:
        clients: of a block.
        state: theirs, in an iteration.
        stages: all, as drawn in the iteration.
        count: how many halves.
        times: how often the work of a half is reported; that of received rows is reported once.
    """
    cached, received = _cached_halves(clients, state), received_rows(state)
    for place in range(count):
        number, sums = divmod(place, 2)
        stage, rows = stages[number], received.get(number) if sums else None
        if place < len(cached):
            if cached[place].stage is stage and cached[place].received is rows:
                continue
            del cached[place:]
        with metered(clients.block.num_clients) as meter:
            previous = cached[-1].value if cached else None
            value = _compute_half(clients, state, stage, number, previous, rows)
        cached.append(CachedHalf(stage, rows, value, meter))
    for half in cached[:count]:
        report_meter(half.work, times)
        if half.received is not None:
            _report_received(half.stage, half.received)
    return [half.value for half in cached[:count]]


def _compute_half(
    clients: FedGraphClients,
    state: RoundState,
    stage: SampledStage,
    number: int,
    previous: MappedRows | Tensor | None,
    received: Tensor | None,
) -> MappedRows | Tensor:
    """Compute half a stage of a pass from the half before it; arguments as in `CachedHalf`."""
    block, model = clients.block, divisible(clients.cfg.model)
    weights, entering = weights_for_pass(state), stage.input_rows
    if isinstance(previous, MappedRows):
        return sum_rows(model, number, weights, previous, _add_received(stage, received))
    x = stage.features(block) if previous is None else previous
    product = None
    if isinstance(x, SparseRows) and hears_others(clients.cfg) and int(state.steps.t[0]) == 0:
        # Before the first step all clients have the server's weights. Where clients hear others,
        # the latest scores may have multiplied all features with these weights already.
        product = known_product(full_reach(block), weights["0.weight"][0])
        product = None if product is None else product.index_select(0, entering.rows)
    row_key = block.row_key[entering.rows]
    return map_rows(
        model, number, weights, x, row_key, entering.off, step_key(clients, state), product
    )


# --- The step on a batch (eq. 5, 6) --------------------------------------------------------------


def objective(
    clients: FedGraphClients,
    state: RoundState,
    weights: Mapping[str, Tensor],
    received: Mapping[int, Tensor],
    stages: Sequence[SampledStage],
) -> tuple[Tensor, Tensor]:
    """Return the mean loss of every client's batch (C,), and the objective of its step, ().

    The objective is the sum of the losses, plus the inner products of sent rows with the gradients
    that came back for them. These are gradients of summed losses, so they are divided by the sizes
    of the batches.

    Args:
        clients: of a block.
        state: theirs, in an iteration.
        weights: (C, ...).
        received: rows of other silos, by stage.
        stages: all, as drawn in the iteration.
    """
    cfg, block, key = clients.cfg, clients.block, step_key(clients, state)
    inputs, batch = sampled_inputs(block, stages, received), stages[-1].output_rows
    losses = _batch_losses(clients, batch, forward_pass(divisible(cfg.model), weights, inputs, key))
    nodes = batch.off.diff()
    loss = segment_sum(losses, batch.off) / nodes.clamp(min=1)
    total = loss.sum()
    for name, gradient in state.returned.items():
        stage = stages[int(name)]
        z = _map_stage(cfg, weights, inputs, stage, key, int(name))
        rows = _messages_of(cfg, z, stage, int(name))
        batch_size = nodes[block.client[stage.requested_rows]].clamp(min=1)[:, None]
        total = total + (rows * gradient.t / batch_size).sum()
    return loss, total


def _batch_losses(clients: FedGraphClients, batch: Reached, logits: Tensor) -> Tensor:
    """Return the loss of every row of the batches (r,), from their logits."""
    return task_of(clients.cfg.model.task).loss(logits, clients.block.y[batch.rows])


def _loss_and_gradients(
    clients: FedGraphClients, state: RoundState, stages: Sequence[SampledStage]
) -> tuple[Tensor, Params]:
    """Return the mean loss of every client's batch (C,), and the step's gradients (C, ...)."""
    weights = weights_for_pass(state)
    if not passes_by_halves(clients.cfg):
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        with torch.enable_grad():
            loss, total = objective(clients, state, leaves, received_rows(state), stages)
            gradients = torch.autograd.grad(total, list(leaves.values()))
        return loss.detach(), dict(zip(leaves, gradients, strict=True))
    halves = compute_halves(clients, state, stages, 2 * len(stages), times=2)
    del clients.block.memo["fedgraph halves"]  # the step changes the weights in place
    mapped = [half for half in halves if isinstance(half, MappedRows)]
    outputs = [half for half in halves if isinstance(half, Tensor)]
    logits, batch = outputs[-1].detach().requires_grad_(), stages[-1].output_rows
    nodes = batch.off.diff()
    with torch.enable_grad():
        losses = _batch_losses(clients, batch, logits)
    share = (losses.new_ones(len(nodes)) / nodes.clamp(min=1)).repeat_interleave(nodes)
    (grad,) = torch.autograd.grad(losses, logits, share)
    loss = segment_sum(losses.detach(), batch.off) / nodes.clamp(min=1)
    messages = [stage.messages for stage in stages]
    model = divisible(clients.cfg.model)
    return loss, pass_gradients(model, weights, mapped, outputs, messages, grad)


def take_step(clients: FedGraphClients, state: RoundState) -> RoundState:
    """Take a step on the batch; rows of others are constants (algorithm 1, one iteration).

    Weights and moments are changed in place.
    """
    cfg, stages = clients.cfg, stages_of(clients, state, 0)
    weights, memory = ({n: f.t for n, f in m.items()} for m in (state.weights, state.moments))
    loss, gradients = _loss_and_gradients(clients, state, stages)
    batch = stages[-1].output_rows
    nodes = batch.off.diff()
    report_rows(batch.off, LOSS_FLOPS * cfg.model.outputs)
    report_each(cfg.training.step_flops, Kind.OPTIMIZER)
    idle = (nodes == 0).nonzero()[:, 0]  # clients without a batch, which take no step
    before = {n: t[idle] for n, t in (*weights.items(), *memory.items())} if len(idle) else {}
    cfg.optimizer.step_(weights, gradients, memory)
    for name, t in (*weights.items(), *memory.items()) if len(idle) else ():
        t[idle] = before[name]
    return RoundState(
        weights=state.weights,
        moments=state.moments,
        kappa=state.kappa,
        keep=state.keep,
        nodes=Stacked(nodes),
        loss=Stacked(loss),
        steps=Stacked(state.steps.t + 1),
    )


def last_rows_spec(cfg: MethodConfig[FedGraphOptions]) -> FieldSpecs:
    """Return the spec of the rows of the last shared stage, where they come with the step."""
    if returns_gradients(cfg):
        return {}
    number = shared_stages(cfg)[-1]
    width, count = form_of(cfg, number).width, f"state/requested_slots/{number}"
    return {"rows": FieldSpec(Ragged, (width,), rows=count)}


@dataclass(frozen=True)
class LastRows:
    """Rows (k, O) of the last shared stage; None where they came before."""

    rows: Annotated[Ragged | None, last_rows_spec]


@dataclass(frozen=True)
class TrainedModel:
    """The clients' weights, training nodes of the last batch (C,) int64, and its loss (C,)."""

    weights: Annotated[Mapping[str, Stacked], exact_weights(Stacked)]
    nodes: Annotated[Stacked, TRAINED]
    loss: Annotated[Stacked, LOSS]


@op(Kind.EMBEDDINGS, replies=Kind.HALO_KEYS, writes=STEPPED)
def step(
    clients: FedGraphClients, state: RoundState, request: LastRows
) -> tuple[RoundState, Slots]:
    """Take a step, and name the slots of the last shared stage in the next one."""
    new = take_step(clients, _with_last_rows(clients, state, request))
    return name_slots_of(clients, new, shared_stages(clients.cfg)[-1])


@op(Kind.EMBEDDINGS, replies=Kind.WEIGHTS, writes=STEPPED)
def submit(
    clients: FedGraphClients, state: RoundState, request: LastRows
) -> tuple[Empty, TrainedModel]:
    """Take the last step, send the weights and end the round.

    Raises:
        ProtocolError: more steps are left.
    """
    done, steps = int(state.steps.t[0]), clients.options.local_steps
    if done != steps - 1:
        raise ProtocolError(f"expected {steps - 1} steps before the last one, got {done}")
    return finish_round(clients, take_step(clients, _with_last_rows(clients, state, request)))


@op(Kind.WEIGHTS, writes=STEPPED)
def train_alone(
    clients: FedGraphClients, _state: Empty, request: RoundStart
) -> tuple[Empty, TrainedModel]:
    """Do a whole round in which no stage hears other silos."""
    state = begin_round(clients, request)
    for _ in range(clients.options.local_steps):
        state = take_step(clients, state)
    return finish_round(clients, state)


def _with_last_rows(clients: FedGraphClients, state: RoundState, request: LastRows) -> RoundState:
    if request.rows is None:
        return state
    return _with_received(clients, state, shared_stages(clients.cfg)[-1], request.rows)


def finish_round(clients: FedGraphClients, state: RoundState) -> tuple[Empty, TrainedModel]:
    """Return the trained model; the library keeps logits, and the optimizer's state if asked."""
    cfg, block = clients.cfg, clients.block
    weights = {name: w.t for name, w in state.weights.items()}
    with work_for(Kind.EVALUATION):  # for the clients' own view: no time of the virtual clock
        logits = cfg.backend.predict(cfg.model, weights, block)
    clients.state = {**clients.state, "own/logits": judges_of(block).select(logits)}
    if cfg.keep_optimizer:
        moments = {f"optimizer/{name}": m for name, m in state.moments.items()}
        clients.state = {**clients.state, **moments}
    return Empty(), TrainedModel(state.weights, state.nodes, state.loss)


# --- With `return_gradients`, gradients of the rows go to their owners ----------------------------


@op(Kind.EMBEDDINGS)
def take_rows(
    clients: FedGraphClients, state: RoundState, request: ReceivedRows
) -> tuple[RoundState, Empty]:
    """Store the rows of the last shared stage, whose gradients go back before the step."""
    number = _check_shared(clients, request.stage)
    return _with_received(clients, state, number, request.rows), Empty()


@op(Kind.COTANGENTS)
def send_back(
    clients: FedGraphClients, state: RoundState, request: AtStage
) -> tuple[RoundState, PartialSums]:
    """Return the gradients of the batch's summed loss for the rows received in a stage."""
    number = _check_shared(clients, request.stage)
    received = received_rows(state)
    rows_leaf = received[number] = received[number].detach().requires_grad_()
    stages = stages_of(clients, state, 0)
    with torch.enable_grad():
        _, total = objective(clients, state, weights_for_pass(state), received, stages)
        (gradient,) = torch.autograd.grad(total, rows_leaf)
    batch, slots = stages[-1].output_rows, state.requested_slots[str(number)]
    batch_size = batch.off.diff()[owners(slots.off)].to(gradient.dtype)[:, None]
    return state, PartialSums(Ragged(gradient * batch_size, slots.off), slots, None)


@op(Kind.COTANGENTS)
def take_back(
    clients: FedGraphClients, state: RoundState, request: RemoteSums
) -> tuple[RoundState, Empty]:
    """Store the sums over silos of the gradients of the sent rows."""
    number = _check_shared(clients, request.stage)
    sent_rows, width = state.requested_rows[str(number)], form_of(clients.cfg, number).width
    assert request.row is not None  # senders name slots
    is_expected = request.sum.t.shape == (len(sent_rows.t), width)
    if not is_expected or not torch.equal(sent_rows.t, request.row.t):
        raise ProtocolError(
            f"expected a gradient of {width} values for each row that was sent, got others"
        )
    returned = {**state.returned, str(number): request.sum}
    return replace(state, returned=returned), Empty()


RETURN_GRADIENTS = SumRelay(send_back, take_back)


# --- Server --------------------------------------------------------------------------------------


EXCHANGE = (
    for_each(later_shared_backward, name_slots),
    for_each(first_shared, serve),
    for_each(earlier_shared, forward),
    when(
        returns_gradients,
        for_each(last_shared, take_rows),
        for_each(all_shared_backward, RETURN_GRADIENTS),
    ),
)


@calls(
    when(
        hears_others,
        open_round,
        *EXCHANGE,
        repeat(step, *EXCHANGE, at_most=lambda cfg: cfg.options.local_steps - 1),
        submit,
    ),
    when(trains_alone, train_alone),
)
def train_round(
    server: Server[FedGraphOptions], state: ServerState
) -> tuple[ServerState, RoundReport]:
    """Take the iterations at all clients, and the mean of their weights (eq. 8, algorithm 3).

    `nodes` of a reply are those of the last batch, so the mean is in proportion to batch sizes.
    """
    assert state.weights is not None  # set by init
    start = RoundStart(state.weights, stack(server.cfg.knobs))
    if trains_alone(server.cfg):
        mean, report = server.average(train_alone, start, AveragedModel)
    else:
        slots = server.call(open_round, start)
        for _ in range(server.options.local_steps - 1):
            slots = server.call(step, exchange_rows(server, slots))
        mean, report = server.average(submit, exchange_rows(server, slots), AveragedModel)
    return (state, report) if mean is None else server.step(state, mean.weights, report)


def exchange_rows(server: Server[FedGraphOptions], slots: Payload) -> LastRows:
    """Exchange the rows of an iteration, and return what the step needs of them.

    It makes the calls that `EXCHANGE` declares. Requests go from the last shared stage to the
    first, rows from the first to the last.

    Args:
        server: in a round.
        slots: of the last shared stage, as clients have named them.
    """
    numbers, wanted = shared_stages(server.cfg), dict[int, WantedRows]()
    first, last = numbers[0], numbers[-1]
    stage = {number: torch.tensor(number, dtype=torch.int32) for number in numbers}
    wanted[last] = wanted_rows(server.fed, slots, open_round)
    for before, number in pairwise(reversed(numbers)):
        request = RequestedRows(stage[before], wanted[before].by_owner)
        wanted[number] = wanted_rows(server.fed, server.call(name_slots, request), name_slots)
    sent = server.call(serve, RequestedRows(stage[first], wanted[first].by_owner))
    for number in numbers[:-1]:
        rows = rows_for_slots(server.fed, wanted[number], sent, serve)
        sent = server.call(forward, ReceivedRows(stage[number], rows))
    rows = rows_for_slots(server.fed, wanted[last], sent, serve)
    if not returns_gradients(server.cfg):
        return LastRows(rows)
    server.call(take_rows, ReceivedRows(stage[last], rows))
    for number in reversed(numbers):
        context = replace(server.context, cfg=form_of(server.cfg, number))
        RETURN_GRADIENTS.carry(server.fed, AtStage(stage[number]), context)
    return LastRows(None)


FEDGRAPH: Method[FedGraphOptions] = Method(
    name="fedgraph",
    title="average of models trained on drawn neighbors, in other silos from the second layer on",
    reference="Chen et al., FedGraph: Federated graph learning with intelligent sampling, IEEE "
    "TPDS 2022",
    options=FedGraphOptions,
    **program(train_round),
    check=check,
    server_step=True,
    evaluate=HaloFrom(1),
    evaluate_by=evaluation_of,
    needs=Needs(
        optimizer="sgd", server_optimizer="adam", score_first=True, controller=controller_of
    ),
    rows="single",
    ratings=False,
    deviation=deviation_of,
    only_sums=True,
)
