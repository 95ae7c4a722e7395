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
docs/exchange.md.

How we read the paper: the node's own message is never dropped. A layer that is not shared scales by
degrees within the client, and counts neighbors there in eq. 7. A row that another silo requests has
the same neighbors as in its owner's batch, those in other silos included where the layer is shared.
So with all labeled nodes, all neighbors and equal weights a pass equals one of live exchange. A
round has one iteration by default (`local_steps`), as the paper names no number.

The agent (`policy=ddpg`) is `silograph.control.ddpg`; by default rates stay at the options' values.

State in a round, all under `round/`: `weights/*`, `optimizer/*` (C, ...); `kappa`, `keep` (C, 3);
`nodes`, `loss` (C,); and the fields of an iteration, see below. Between rounds `optimizer/*` if
`keep_optimizer` is set, and the logits of evaluation.

C: clients. k: halo slots, boundary rows. O: width of a stage's sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from silograph.control import FIXED, Controller, by_policy, knob_fields, knob_specs
from silograph.control.policy import AGENT, AGENT_SEED, EXPLORE, TARGET, TIME
from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key, mix_words, signed
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State, offsets, owners, under
from silograph.core.setting_values import lin
from silograph.core.work import report_entries, report_rows, report_steps
from silograph.evaluation.evaluate import remembered
from silograph.evaluation.scoring import Evaluation, HaloFrom, OwnGraph
from silograph.exchange.passes import divisible, stage_of, sum_specs, weight_specs
from silograph.exchange.pull import PullForm, announce, announce_steps, pull, pull_steps
from silograph.exchange.rows import relay_steps, relay_sum
from silograph.federation.base import Federation
from silograph.federation.field_specs import FieldSpec, FieldSpecs, exactly
from silograph.federation.program import Call, Calls, Steps
from silograph.graph.block.block import ClientBlock
from silograph.graph.csr import CSR
from silograph.methods.base import (
    Caution,
    Method,
    MethodConfig,
    Needs,
    RoundReport,
    ServerState,
    Share,
)
from silograph.methods.local_training import (
    begin,
    local_round,
    local_steps,
    shared,
    stacked,
    state_specs,
)
from silograph.nn.conv import Messages, Params
from silograph.nn.fit import LOSS_FLOPS, check_places, check_weights, stacked_copies
from silograph.nn.forward import Pass, forward_pass, rows_of_stage
from silograph.nn.mini_batches import (
    Drawn,
    Reached,
    edge_words,
    edges_of,
    features_of,
    one_stage,
    uniform_of,
)
from silograph.nn.model import scales_of
from silograph.nn.segment import segment_sum, sparse_product
from silograph.task.registry import task_of

# --- sampled passes ------------------------------------------------------------------------------
# What clients do in a pass over drawn neighbors in all silos, each with weights of its own.
#
# Their stages and the method that drives them are below.
#
#     ask, listen      silos request the slots that a stage needs, owners store the rows' numbers
#     ask, serve,      owners send the rows, multiplied by their weights
#       store
#     send_back,       with `return_gradients`, the gradients of the rows go to their owners
#       take_back
#
# State between calls is tensors only. Draws follow from the key and the state, and a pass is
# computed again where its values are needed. State: `round/weights/*` (C, ...),
# `round/kappa` (C,), `round/keep` (C, 3); in an iteration `round/asked/i`, `round/wanted/i`,
# `round/received/i` and `round/returned/i` of stage i.
#
# C: clients. k: halo slots, boundary rows. O: width of a stage's sum.


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
    """

    sums: bool
    keep: Tensor
    shared: bool
    by_degree: bool


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
    """

    output_rows: Reached
    input_rows: Reached
    requested_rows: Tensor
    messages: Messages
    slots: Ragged
    halo_weights: CSR
    degree: Tensor
    own_neighbors: Drawn


def draw_batch_rows(block: ClientBlock, batch_sizes: Tensor, key: Key) -> Reached:
    """Draw at most `most` (C,) training rows of each client, without replacement."""
    train = block.split.train.nonzero()[:, 0]
    words = key.words(block.row_key[train], 1)[:, 0]
    order = words.argsort()
    order = order[block.client[train][order].argsort(stable=True)]
    client = block.client[train][order]
    rank = torch.arange(len(order), device=order.device) - offsets(block.num_train)[client]
    rows = train[order[rank < batch_sizes[client]]].sort().values
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
    """Draw the neighbors of the rows that a stage computes.

    Args:
        block: C clients.
        output_rows: the rows.
        hop: 0 in the last stage.
        draw: how neighbors are drawn.
        requested_rows: (m,) int64 rows that the stage must read as well, for other silos.
        key: of the stage.
    """
    degree = block.adj.degree + block.halo.adj.degree if draw.shared else block.adj.degree
    own_neighbors, halo_neighbors = _draw_neighbors(block, output_rows.rows, draw, degree, key)
    input_rows, messages = one_stage(block, output_rows, own_neighbors, hop, requested_rows)
    slots, column = torch.unique(halo_neighbors.neighbor, return_inverse=True)
    first = block.halo.off[:-1][owners(block.halo.off)]
    requested_slots = Ragged(
        (slots - first[slots]).int(), torch.searchsorted(slots, block.halo.off)
    )
    order = (halo_neighbors.position * len(slots) + column).argsort()
    starts = offsets(torch.bincount(halo_neighbors.position, minlength=len(output_rows.rows)))
    halo_weights = CSR(starts, column[order], halo_neighbors.share[order], len(slots))
    degree_column = degree.to(own_neighbors.share.dtype)[:, None]
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


def _draw_neighbors(
    block: ClientBlock, rows: Tensor, draw: StageDraw, degree: Tensor, key: Key
) -> tuple[Drawn, Drawn]:
    """Draw the neighbors of rows (r,): those in the same client, and halo slots of other silos."""
    all_edges = edges_of(block, rows)
    no_neighbors = Drawn(rows[:0], rows[:0], all_edges.share[:0])
    if not draw.sums:
        return replace(no_neighbors, degree=degree), no_neighbors
    keep_probability = draw.keep[block.client[rows]]
    is_kept = (
        uniform_of(edge_words(block, rows, key, all_edges)) <= keep_probability[all_edges.position]
    )
    position, neighbor = all_edges.position[is_kept], all_edges.neighbor[is_kept]
    halo_position, slot = position[:0], neighbor[:0]
    if draw.shared:
        edges = block.halo.adj.select_rows(rows)
        row_hashes = mix_words(block.row_key[rows] ^ signed(key.value))
        edge_hashes = mix_words(row_hashes[edges.row] ^ block.halo.key[edges.indices.long()])
        is_kept = uniform_of(edge_hashes) <= keep_probability[edges.row]
        halo_position, slot = edges.row[is_kept], edges.indices.long()[is_kept]
    if draw.by_degree:
        count = torch.bincount(torch.cat([position, halo_position]), minlength=len(rows))
        weight = degree[rows].double() / count.clamp(min=1)
    else:
        weight = 1 / keep_probability
    weight = weight.to(all_edges.share.dtype)
    return Drawn(position, neighbor, weight[position], degree), Drawn(
        halo_position, slot, weight[halo_position]
    )


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
        stage_messages = stage.messages
        if number in received:
            rows = received[number]
            report_entries(stage.halo_weights.indptr, stage_messages.off, 2 * rows.shape[1])
            stage_messages = replace(
                stage_messages, beside=sparse_product(stage.halo_weights, rows)
            )
        messages.append(stage_messages)
    keys = tuple(block.row_key[stage.input_rows.rows] for stage in stages)
    return Pass(features_of(block.x, stages[0].input_rows), tuple(messages), keys)


SHARED_FROM = {"all": 0, "hidden": 1}  # the first layer that hears other silos
LAYERS = 3  # that have a probability of their own; later ones have the last one's


def shared_stages(cfg: Any) -> list[int]:
    """Return the numbers of the stages that hear other silos."""
    summing_stages = [n for n, stage in enumerate(divisible(cfg.model).stages) if stage.conv.sums]
    return summing_stages[SHARED_FROM.get(cfg.options.share, len(summing_stages)) :]


def ask(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Draw neighbors and name the slots among them. In: `stage`. Out: `slot` (k,) int32."""
    number = _shared_stage(cfg, inbox)
    slots = stages_of(cfg, block, state, key, number)[0].slots
    return {**state, f"round/asked/{number}": slots}, {"slot": slots}


def listen(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Store which rows others will request. In: `stage`, `row` (k,) int32. Out: nothing."""
    del block, key
    number, row = _shared_stage(cfg, inbox), inbox["row"]
    assert isinstance(row, Ragged)  # from `announce`
    return {**state, f"round/wanted/{number}": row}, {}


def serve(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send rows times the client's weights. In: `stage`, `row` (k,). Out: `rows` (k, O)."""
    number, row = _shared_stage(cfg, inbox), inbox["row"]
    name = f"round/wanted/{number}"
    assert isinstance(row, Ragged)  # from `pull`
    if name in state and not torch.equal(state[name].t, row.t):
        raise ProtocolError(
            f"expected the rows of stage {number} that were announced, got a call for others"
        )
    new = {**state, name: row}
    stages, weights = stages_of(cfg, block, new, key, 0), under("round/weights", new)
    inputs = sampled_inputs(block, stages, received_rows(new))
    rows = _requested_messages(cfg, weights, inputs, stages[number], key, number)
    return new, {"rows": Ragged(rows, row.off)}


def store(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Store the rows of the requested slots. In: `stage`, `rows` (k, O). Out: nothing."""
    del key
    number, rows = _shared_stage(cfg, inbox), inbox["rows"]
    expected_shape = len(state[f"round/asked/{number}"].t), width_of(cfg, number)
    assert isinstance(rows, Ragged)  # from `pull`
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    if rows.t.shape != expected_shape or rows.t.dtype is not block.adj.values.dtype:
        raise ProtocolError(
            f"expected rows of shape {expected_shape} in {block.adj.values.dtype}, got "
            f"{tuple(rows.t.shape)} in {rows.t.dtype}"
        )
    return {**state, f"round/received/{number}": rows}, {}


def _shared_stage(cfg: Any, inbox: Payload) -> int:
    """Return the number of the stage that an inbox names, if it hears other silos."""
    number = stage_of(cfg, inbox)
    if number not in shared_stages(cfg):
        raise ProtocolError(f"expected a stage that hears other silos, got stage {number}")
    return number


def width_of(cfg: Any, number: int) -> int:
    """Return the width O of a stage's sum."""
    width_of_stage = {
        int(request["stage"].low or 0): width for request, width in sum_specs(divisible(cfg.model))
    }
    return width_of_stage[number]


def _stage_draws(cfg: Any, state: State) -> list[StageDraw]:
    """Return the settings of the neighbor draws of every stage."""
    keep, shared_numbers, draws = state["round/keep"].t, shared_stages(cfg), list[StageDraw]()
    layer = 0
    for number, stage in enumerate(divisible(cfg.model).stages):
        keep_probability = keep[:, min(layer, LAYERS - 1)]
        layer += stage.conv.sums
        by_degree = cfg.options.rescale == "degree"
        draws.append(
            StageDraw(stage.conv.sums, keep_probability, number in shared_numbers, by_degree)
        )
    return draws


def stages_of(
    cfg: Any, block: ClientBlock, state: State, key: Key, first: int
) -> list[SampledStage]:
    """Return the stages from `first` on as drawn in this iteration, with the rows others request.

    They follow from the key and the state alone; those of the current iteration are cached.
    """
    batch_sizes, draws = state["round/kappa"].t, _stage_draws(cfg, state)
    cached = block.memo.get("fedgraph")
    cached_stages: dict[int, SampledStage] = {}
    rates = torch.cat([batch_sizes[:, None].double(), state["round/keep"].t], dim=1)
    if isinstance(cached, tuple) and cached[0] == key and torch.equal(cached[1], rates):
        cached_stages = cached[2]
    last = len(draws) - 1
    output_rows = (
        cached_stages[last].output_rows
        if last in cached_stages
        else draw_batch_rows(block, batch_sizes, key.fold("batch"))
    )
    stages: list[SampledStage] = []
    for number in range(last, first - 1, -1):
        requested_rows = _requested_rows(block, state, number)
        stage = cached_stages.get(number)
        if stage is None or stage.output_rows is not output_rows:
            stage_key = key.fold("neighbors", number)
            stage = sampled_stage(
                block, output_rows, last - number, draws[number], requested_rows, stage_key
            )
        elif not torch.equal(stage.requested_rows, requested_rows):
            # The requests of other silos arrive after the stage was drawn for `ask`.
            stage = with_requested_rows(block, stage, last - number, requested_rows)
        cached_stages[number], output_rows = stage, stage.input_rows
        stages.insert(0, stage)
    block.memo["fedgraph"] = (key, rates, cached_stages)
    return stages


def _requested_rows(block: ClientBlock, state: State, number: int) -> Tensor:
    """Return the rows whose messages of a stage other silos have requested, (m,) int64."""
    positions = state.get(f"round/wanted/{number}")
    if not isinstance(positions, Ragged):
        return block.halo.boundary[:0]
    boundary_positions = check_places(
        positions, block.halo.boundary_off, "boundary rows that are wanted"
    )
    return block.halo.boundary[boundary_positions]


def _requested_messages(
    cfg: Any,
    weights: Mapping[str, Tensor],
    inputs: Pass,
    stage: SampledStage,
    key: Key,
    number: int,
) -> Tensor:
    """Return the messages of the requested rows in a stage, scaled by their degrees, (k, O)."""
    model, entering = divisible(cfg.model), stage.input_rows
    conv, prefix = model.stages[number].conv, f"{number}."
    params = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
    z = conv.map(params, rows_of_stage(model, weights, inputs, key, number), entering.off)
    row_position = stage.degree.new_full((len(stage.degree),), -1, dtype=torch.int64)
    row_position[entering.rows] = torch.arange(len(entering.rows), device=row_position.device)
    scale = scales_of(conv).sender_scale(stage.degree[stage.requested_rows])
    rows = z[row_position[stage.requested_rows]]
    if scale is None:
        return rows
    report_rows(entering.off, z.shape[1])
    return scale * rows


def objective(
    cfg: Any,
    block: ClientBlock,
    state: State,
    key: Key,
    weights: Mapping[str, Tensor],
    received: Mapping[int, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the mean loss of every client's batch (C,), and the objective of its step, ().

    The objective is the sum of the losses, plus the inner products of sent rows with the gradients
    that came back for them. These are gradients of summed losses, so they are divided by the sizes
    of the batches.

    Args:
        cfg: of the method.
        block: C clients.
        state: of an iteration.
        key: of it.
        weights: (C, ...).
        received: rows of other silos, by stage.
    """
    stages = stages_of(cfg, block, state, key, 0)
    inputs, batch = sampled_inputs(block, stages, received), stages[-1].output_rows
    logits = forward_pass(divisible(cfg.model), weights, inputs, key)
    losses = task_of(cfg.model.task).loss(logits, block.y[batch.rows])
    nodes = batch.off.diff()
    loss = segment_sum(losses, batch.off) / nodes.clamp(min=1)
    total = loss.sum()
    for name, gradient in under("round/returned", state).items():
        stage = stages[int(name)]
        rows = _requested_messages(cfg, weights, inputs, stage, key, int(name))
        batch_size = nodes[block.client[stage.requested_rows]].clamp(min=1)[:, None]
        total = total + (rows * gradient / batch_size).sum()
    return loss, total


def received_rows(state: State) -> dict[int, Tensor]:
    """Return the rows received from other silos, by stage."""
    return {int(number): t for number, t in under("round/received", state).items()}


def send_back(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Return the gradients of the batch's summed loss for the rows received in a stage.

    In: `stage`. Out: `rows` (k, O), `slot` (k,) int32.
    """
    number = _shared_stage(cfg, inbox)
    received = received_rows(state)
    rows_leaf = received[number] = received[number].detach().requires_grad_()
    weights, requested_slots = under("round/weights", state), state[f"round/asked/{number}"]
    assert isinstance(requested_slots, Ragged)  # from `ask`
    with torch.enable_grad():
        _, total = objective(cfg, block, state, key, weights, received)
        (gradient,) = torch.autograd.grad(total, rows_leaf)
    batch = stages_of(cfg, block, state, key, 0)[-1].output_rows
    client = owners(requested_slots.off)
    rows = gradient * batch.off.diff()[client].to(gradient.dtype)[:, None]
    return state, {"rows": Ragged(rows, requested_slots.off), "slot": requested_slots}


def take_back(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Store the gradients of the sent rows. In: `stage`, `sum` (k, O), `row` (k,)."""
    del block, key
    number, total, row = _shared_stage(cfg, inbox), inbox["sum"], inbox["row"]
    sent_rows, width = state[f"round/wanted/{number}"], width_of(cfg, number)
    assert isinstance(total, Ragged)  # from `relay_sum`
    if not torch.equal(sent_rows.t, row.t) or total.t.shape != (len(sent_rows.t), width):
        raise ProtocolError(
            f"expected a gradient of {width} values for each row that was sent, got others"
        )
    return {**state, f"round/returned/{number}": total}, {}


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
    agent_seed: int = field(default=0, metadata=AGENT_SEED)


def controller_of(options: FedGraphOptions) -> Controller:
    """Return the controller that sets the rates."""
    return by_policy(options, FIXED)


def evaluation_of(options: FedGraphOptions) -> Evaluation:
    """Return how the server's model is scored: through the same edges as in training."""
    first = SHARED_FROM.get(options.share)
    return OwnGraph() if first is None else HaloFrom(1 if first else 0)


def init(
    fed: Federation, cfg: MethodConfig[FedGraphOptions], weights: Params, key: Key
) -> ServerState:
    """Set up the clients."""
    del cfg
    fed.call(begin, {}, what=Kind.CONTROL, key=key)
    return ServerState(weights=weights, memory={})


def check(cfg: MethodConfig[FedGraphOptions]) -> None:
    """Raise `ConfigError` where sums cannot be shared, or the config asks for other steps."""
    if not any(stage.conv.sums for stage in divisible(cfg.model).stages):
        raise ConfigError(
            "expected a model that sums over neighbors for fedgraph, which draws them, got "
            f"{cfg.model.noun}: use model=gcn, graphconv, gin, sage or appnp, or another method, "
            "such as fedopt"
        )
    schedule = cfg.schedule
    if not cfg.everyone_trains or not schedule.whole or schedule.epochs != 1:
        raise ConfigError(
            "expected participation=1, local_epochs=1 and neither batch_size nor neighbors with "
            "fedgraph, whose clients take their steps together: use --option kappa=, keep_1=, "
            "keep_2= and local_steps="
        )


def fit_round(
    fed: Federation, cfg: MethodConfig[FedGraphOptions], state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    """Take the iterations at all clients, and the mean of their weights (eq. 8)."""
    assert state.weights is not None  # set by init
    inbox = {**shared("weights", state.weights), **knob_fields(cfg.knobs, fed.ids)}
    fed.call(begin_round, inbox, what=Kind.WEIGHTS, key=key.fold("begin", t))
    for step_key in _step_keys(cfg, t, key):
        _exchange_rows(fed, cfg, step_key)
        if step_key != key.fold("train", t):
            fed.call(step, {}, what=Kind.CONTROL, key=step_key)
    reply, report = local_round(fed, cfg, submit, {}, Kind.WEIGHTS, t, key)
    if reply is None:
        return state, report
    return ServerState(under("weights", reply), state.memory), report


def _step_keys(cfg: MethodConfig[FedGraphOptions], t: int, key: Key) -> list[Key]:
    """Return the key of every iteration of a round; in the last one clients send their weights."""
    last = key.fold("train", t)
    return [*(last.fold("step", n) for n in range(cfg.options.local_steps - 1)), last]


def _exchange_rows(fed: Federation, cfg: MethodConfig[FedGraphOptions], key: Key) -> None:
    """Exchange the rows of an iteration. Requests for later layers are announced before any pull.

    So the rows that owners send include their own neighbors in other silos. Rows of the first
    shared layer need nothing from other silos, so the request of `pull` itself is early enough.
    """
    requests = [{"stage": Shared(torch.tensor(n, dtype=torch.int32))} for n in shared_stages(cfg)]
    for request in reversed(requests[1:]):
        announce(fed, ask, listen, key=key, inbox=request)
    for request in requests:
        pull(fed, ask, serve, store, what=Kind.EMBEDDINGS, key=key, inbox=request)
    for request in reversed(requests) if cfg.options.return_gradients else ():
        relay_sum(fed, send_back, take_back, what=Kind.COTANGENTS, key=key, inbox=request)


def begin_round(
    cfg: MethodConfig[FedGraphOptions], block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the server's weights and the rates. In: `weights/*`, `knobs/*`. Out: nothing."""
    del key
    server_weights, clients = under("weights", inbox), block.num_clients
    check_weights(cfg.model, server_weights, block, shared=True)
    weights = stacked_copies(server_weights, clients)
    memory = under("optimizer", state) if cfg.keep_optimizer else cfg.optimizer.init(weights)
    keep_rates = [inbox["knobs/keep_1"].t]
    for name in KEEPS[1:]:
        rate = inbox.get(f"knobs/{name}")
        keep_rates.append(keep_rates[-1] if rate is None else rate.t)
    no_loss = next(iter(weights.values())).new_zeros(clients)
    return {
        **state,
        **stacked("round/weights", weights),
        **stacked("round/optimizer", memory),
        "round/kappa": Stacked(inbox["knobs/kappa"].t),
        "round/keep": Stacked(torch.stack(keep_rates, dim=1)),
        "round/nodes": Stacked(torch.zeros_like(block.num_train)),
        "round/loss": Stacked(no_loss),
    }, {}


def step(
    cfg: MethodConfig[FedGraphOptions], block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take a step on the batch (eq. 5, 6); rows of others are constants. In, out: nothing."""
    del inbox
    weights = under("round/weights", state)
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    with torch.enable_grad():
        loss, total = objective(cfg, block, state, key, leaves, received_rows(state))
        gradients = torch.autograd.grad(total, list(leaves.values()))
    batch = stages_of(cfg, block, state, key, 0)[-1].output_rows
    nodes = batch.off.diff()
    report_rows(batch.off, LOSS_FLOPS * cfg.model.outputs)
    report_steps(cfg.training.step_flops)
    memory = under("round/optimizer", state)
    new_weights, new_memory = ({n: t.clone() for n, t in old.items()} for old in (weights, memory))
    cfg.optimizer.step_(new_weights, dict(zip(leaves, gradients, strict=True)), new_memory)
    new = {n: f for n, f in state.items() if not n.startswith(EXCHANGED)}
    return {
        **new,
        **stacked("round/weights", _step_active_clients(nodes > 0, new_weights, weights)),
        **stacked("round/optimizer", _step_active_clients(nodes > 0, new_memory, memory)),
        "round/nodes": Stacked(nodes),
        "round/loss": Stacked(loss.detach()),
    }, {}


EXCHANGED = ("round/asked/", "round/wanted/", "round/received/", "round/returned/")


def submit(
    cfg: MethodConfig[FedGraphOptions], block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the last step, send the weights and end the round.

    In: nothing. Out: `weights/*` (C, ...), `nodes` (C,) of the last batch, `loss` (C,).
    """
    state, _ = step(cfg, block, state, inbox, key)
    weights = under("round/weights", state)
    new = {name: f for name, f in state.items() if not name.startswith("round/")}
    new |= remembered(cfg.backend.predict(cfg.model, weights, block), block)
    if cfg.keep_optimizer:
        new |= stacked("optimizer", under("round/optimizer", state))
    reply = {name: state[f"round/{name}"] for name in ("nodes", "loss")}
    return new, {**stacked("weights", weights), **reply}


def _step_active_clients(
    active: Tensor, new: Mapping[str, Tensor], old: Mapping[str, Tensor]
) -> Params:
    """Return the tensors (C, ...) after a step of the clients that took one."""
    return {
        n: torch.where(active.view(-1, *[1] * (t.dim() - 1)), t, old[n]) for n, t in new.items()
    }


def setup_steps(cfg: MethodConfig[FedGraphOptions], key: Key) -> Steps:
    """Return the call of `init`."""
    del cfg
    return Call(begin, Kind.CONTROL, key)


def round_steps(cfg: MethodConfig[FedGraphOptions], t: int, key: Key) -> Steps:
    """Return the calls of `fit_round`."""
    has_moving_knobs = controller_of(cfg.options) is not FIXED
    inbox_specs = {
        **weight_specs(cfg.model, Shared),
        **knob_specs(cfg.options, moved=has_moving_knobs),
    }
    reply_weights = weight_specs(cfg.model, Stacked)
    return (
        Call(begin_round, Kind.WEIGHTS, key.fold("begin", t), inbox_specs),
        *(
            (_exchange_steps(cfg, step_key), Call(step, Kind.CONTROL, step_key))
            for step_key in _step_keys(cfg, t, key)[:-1]
        ),
        _exchange_steps(cfg, key.fold("train", t)),
        local_steps(cfg, submit, {}, reply_weights, Kind.WEIGHTS, t, key),
    )


def _exchange_steps(cfg: MethodConfig[FedGraphOptions], key: Key) -> Steps:
    """Return the calls of `_exchange_rows`."""
    numbers = shared_stages(cfg)
    requests: dict[int, FieldSpecs] = {n: {"stage": exactly(n)} for n in numbers}
    return (
        *(announce_steps(ask, listen, key=key, inbox=requests[n]) for n in reversed(numbers[1:])),
        *(
            pull_steps(
                ask,
                serve,
                store,
                what=Kind.EMBEDDINGS,
                key=key,
                inbox=requests[n],
                form=_pull_form(cfg, n),
            )
            for n in numbers
        ),
        *(
            relay_steps(
                send_back,
                take_back,
                what=Kind.COTANGENTS,
                key=key,
                width=width_of(cfg, n),
                named=True,
                inbox=requests[n],
            )
            for n in (reversed(numbers) if cfg.options.return_gradients else ())
        ),
    )


def _pull_form(cfg: MethodConfig[FedGraphOptions], number: int) -> PullForm:
    rows = FieldSpec(Ragged, (width_of(cfg, number),))
    return PullForm(fields={"rows": rows}, asked=f"round/asked/{number}")


FEDGRAPH: Method[FedGraphOptions] = Method(
    name="fedgraph",
    title="average of models trained on drawn neighbors, in other silos from the second layer on",
    reference="Chen et al., FedGraph: Federated graph learning with intelligent sampling, IEEE "
    "TPDS 2022",
    options=FedGraphOptions,
    init=init,
    round=fit_round,
    check=check,
    evaluate=HaloFrom(1),
    evaluate_by=evaluation_of,
    needs=Needs(keep_optimizer=True, score_first=True, controller=controller_of),
    calls=Calls(setup=setup_steps, round=round_steps, state=state_specs),
    cautions=(
        Caution(
            "far behind local where nodes have many neighbors (Photo) and with 100 clients, in 100 "
            "rounds"
        ),
    ),
    rows="single",
    ratings=False,
)
