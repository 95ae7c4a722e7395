"""Passes through a model whose sums over neighbors reach other silos.

First the messages, then the ops of the clients, then the server's part:

    offer_keys, agree_on_keys keys for masks, where partial sums are masked (`masked_sums`)
    begin                     weights come, stages without a sum are done
    send_partial_sums ->      for every stage with a sum, forward: partial sums cross (`SumRelay`),
      -> add_remote_sums      the stage is finished, and those without a sum that follow
    compute_loss              loss and its gradient, of the clients' own training rows
    send_cotangents ->        the same stages backward: cotangents cross,
      -> add_remote_cotangents   gradients of the stage, and of those without a sum before it
    send_gradients            gradients of the weights, to be summed

Every client sends sums over its own rows, which it has scaled and, in most layers, multiplied by
weights; no edge or label leaves. A sum may rest on one row, unless `min_nodes_per_row` asks for
more. What a sum reveals is in docs/explanation/privacy.md. With secure aggregation partial sums
are fixed-point numbers, which silos of a session mask.

Zhang, Luo, Feng, Liu, Zhou and Zheng, "Tackling the local bias in federated graph learning", 2021,
eq. 2 and 4. What we changed: the square roots of the degrees are inverse, as the normalized
Laplacian wants; the gradient of W^l is (Z^{l-1})^T L dH^l, where eq. 4 is misprinted; convolutions
other than GCN; rows cross only where a sampled row is touched.

C: clients. r: rows that take part. S: halo slots. B: boundary rows. I, O: width of what enters a
stage, and of its sum.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated

import torch
from torch import Tensor

from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Patched,
    Ragged,
    Shared,
    Stacked,
    State,
    offsets,
    tensors_under,
)
from silograph.core.setting_values import NO_MINIMUM, RowMinimum
from silograph.core.work import report_rows
from silograph.exchange.masked_sums import KEY_EXCHANGE, KeyExchange
from silograph.exchange.pass_state import InPass, PassState, reach_of
from silograph.exchange.rows import Relayed, SumRelay
from silograph.federation.base import Federation, Sum
from silograph.federation.field_specs import (
    BOUNDARY,
    COUNT,
    LOSS,
    SLOTS,
    FieldSpec,
    FieldSpecs,
    exactly,
    places,
)
from silograph.federation.messages import Empty
from silograph.federation.ops import (
    CallContext,
    ClientOp,
    Clients,
    Exchange,
    Part,
    for_each,
    op,
    when,
)
from silograph.federation.program import Steps
from silograph.federation.secure.fixed_point import FixedPoint
from silograph.federation.secure.row_form import GRADIENTS, ROWS, decode_rows, encode_rows
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Params
from silograph.nn.fit import LOSS_FLOPS, check_like, check_weights
from silograph.nn.forward import AnyModel, Staged
from silograph.nn.model import (
    Gradients,
    Half,
    Inputs,
    after,
    after_back,
    before,
    before_back,
    entering,
    scales_of,
    stage_weights,
)
from silograph.nn.reach import (
    Incoming,
    Reach,
    RemoteParts,
    count_contributors,
    messages_back,
    messages_out,
    placed,
    slots_in_client,
    sum_for_other_silos,
    summed,
    summed_back,
    used_features,
    with_own_degrees,
)
from silograph.nn.segment import segment_sum
from silograph.task.registry import task_of

# --- Messages ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassForm:
    """What messages of a pass depend on; annotations read it in place of the method's config.

    Attributes:
        model: the shape.
        train: whether gradients are wanted.
        is_named: whether clients name the slots of what they send, as not all rows take part.
        row_minimum: how many nodes and silos must contribute to a row.
        stage: number of the stage at hand, which has a sum.
    """

    model: Staged
    train: bool = False
    is_named: bool = False
    row_minimum: RowMinimum = NO_MINIMUM
    stage: int = -1

    @property
    def width(self) -> int:
        """Width O of the sum of the stage at hand."""
        stage = self.model.stages[self.stage]
        maps = stage.conv.maps  # what the rows are mapped by before they are summed
        if not maps:
            return stage.inputs
        return self.model.weight_shapes[f"{self.stage}.{maps[0]}"][-1]

    @property
    def names_slots(self) -> bool:
        """Whether partial sums come with slots."""
        return self.is_named or self.row_minimum.names_slots

    @property
    def names_rows(self) -> bool:
        """Whether sums come with the places of their rows."""
        return self.names_slots or self.row_minimum.silos > 1 or self.row_minimum.rows_are_masked


def stages_with_sums(model: Staged) -> list[int]:
    """Return the numbers of the stages that sum over neighbors."""
    return [number for number, stage in enumerate(model.stages) if stage.conv.sums]


@lru_cache(maxsize=64)  # programs ask for specs in every round
def weight_specs(
    model: AnyModel | Staged, form: type[Shared] | type[Stacked], prefix: str = "weights"
) -> FieldSpecs:
    """Return the specs of the weights of a model, or of what has their shapes."""
    shapes = model.weight_shapes.items()
    return MappingProxyType({f"{prefix}/{name}": FieldSpec(form, shape) for name, shape in shapes})


def partial_sums_spec(form: PassForm) -> FieldSpec:
    """Return the spec of partial sums (k, O): for every slot, or for those that are named."""
    rows = "own/slot" if form.names_slots else SLOTS
    if form.row_minimum.rows_are_masked:
        return FieldSpec(Ragged, (form.width,), torch.int64, rows=rows, masking="part")
    return FieldSpec(Ragged, (form.width,), rows=rows)


def sums_spec(form: PassForm) -> FieldSpec:
    """Return the spec of sums (k, O): of every boundary row, or of those that are named."""
    if form.row_minimum.rows_are_masked:
        return FieldSpec(Ragged, (form.width,), torch.int64, rows="own/row", masking="sum")
    return FieldSpec(Ragged, (form.width,), rows="own/row" if form.names_rows else BOUNDARY)


@dataclass(frozen=True)
class StartOfPass:
    """The server's weights, and whether gradients are wanted."""

    weights: Annotated[Mapping[str, Tensor], lambda form: weight_specs(form.model, Shared)]
    train: Annotated[Tensor, lambda form: exactly(form.train, torch.bool)]


@dataclass(frozen=True)
class TrainingRows:
    """Number of training rows that take part, and of all (C,)."""

    part: Annotated[Stacked, COUNT]
    all: Annotated[Stacked, COUNT]


@dataclass(frozen=True)
class AtStage:
    """The number of the stage at hand."""

    stage: Annotated[Tensor, lambda form: exactly(form.stage)]


@dataclass(frozen=True)
class PartialSums:
    """Sums over a client's own messages.

    Attributes:
        rows: (k, O) one for each slot that is named, or for all slots in their order; int64 in
            fixed point where they are masked.
        slot: (k,) int32, where not all slots have one.
        left_out: (C,) slots without one because too few nodes contribute, where some may be, and
            of masked rows because too few silos do.
    """

    rows: Annotated[Ragged, partial_sums_spec]
    slot: Annotated[Ragged | None, lambda form: {"slot": places(SLOTS)} if form.names_slots else {}]
    left_out: Annotated[
        Stacked | None, lambda form: {"left_out": COUNT} if form.row_minimum.counts_left_out else {}
    ]


@dataclass(frozen=True)
class RemoteSums(AtStage):
    """Sums over neighbors in other silos.

    Attributes:
        sum: (k, O).
        row: (k,) int32 their boundary rows, where not all have one.
    """

    sum: Annotated[Ragged, sums_spec]
    row: Annotated[Ragged | None, lambda form: {"row": places(BOUNDARY)} if form.names_rows else {}]


@dataclass(frozen=True)
class LossCount:
    """By how many training rows the loss is divided."""

    count: Annotated[Tensor, FieldSpec(Shared, (), torch.int64, low=1)]


@dataclass(frozen=True)
class LossSum:
    """Loss of a client's training rows, (C,), a part of the sum over all clients."""

    loss: Annotated[Stacked, LOSS]


@dataclass(frozen=True)
class WeightGradients:
    """Gradients of the weights, (C, ...), to be summed."""

    gradient: Annotated[
        Mapping[str, Stacked | Patched], lambda form: weight_specs(form.model, Stacked, "gradient")
    ]


# --- The clients' part ---------------------------------------------------------------------------


@op(Kind.WEIGHTS)
def begin(
    clients: Clients, state: PassState, request: StartOfPass
) -> tuple[PassState, TrainingRows]:
    """Start a pass."""
    return start_pass(clients, state, request)


def start_pass(
    clients: Clients, rows: PassState, request: StartOfPass
) -> tuple[PassState, TrainingRows]:
    """Return the pass with its weights, and what the stages up to the first sum give."""
    block, num_clients, weights = clients.block, clients.block.num_clients, request.weights
    check_weights(clients.cfg.model, weights, block, shared=True)
    views = {name: Stacked(w.expand(num_clients, *w.shape)) for name, w in weights.items()}
    started = replace(rows, weights=views, train=Stacked(request.train.expand(num_clients)))
    reach = reach_of(clients, started)
    part = block.num_train  # where all rows take part
    if len(reach.rows) < len(block.row_key):
        part = segment_sum(block.split.train[reach.rows].long(), reach.off)
    counts = TrainingRows(Stacked(part), Stacked(block.num_train))
    return _forward_without_sums(clients, started, 0), counts


@op(Kind.EVALUATION)
def begin_inside(
    clients: Clients, state: PassState, request: StartOfPass
) -> tuple[PassState, TrainingRows]:
    """As `begin`, and do the first stage with a sum over each client's own edges and degrees."""
    started, counts = start_pass(clients, state, request)
    at, params = inputs_of(clients, started, stages_with_sums(clients.cfg.model.staged)[0])
    z = before(params, at)
    started = with_product(started, at, z)
    at = replace(at, reach=with_own_degrees(clients.block, at.reach))
    return finish(clients, started, at, params, None), counts


@op(Kind.PARTIAL_SUMS)
def send_partial_sums(
    clients: Clients, state: PassState, request: AtStage
) -> tuple[PassState, PartialSums]:
    """Compute partial sums for other silos; those of too few own nodes are not sent."""
    at, params = inputs_at(clients, state, request, "before")
    z = before(params, at)
    messages = messages_out(scales_of(at.stage.conv), z, at.reach, at.reach.sending_rows)
    return with_product(state, at, z), _partial_sums(clients, state, messages, at.reach, ROWS)


@op(Kind.PARTIAL_SUMS)
def add_remote_sums(
    clients: Clients, state: PassState, request: RemoteSums
) -> tuple[PassState, Empty]:
    """Finish the stage and those without a sum that follow."""
    at, params = inputs_at(clients, state, request, "after")
    own = state.z[str(at.number)].t
    remote_sums = _sums_from_others(clients, at.reach, request, own, ROWS)
    return finish(clients, state, at, params, remote_sums), Empty()


def inputs_at(
    clients: Clients, state: PassState, request: AtStage, half: Half | None = None
) -> tuple[Inputs, Params]:
    """Return what the stage of a request reads, and its weights, or only those of a half."""
    number = check_stage(clients.cfg.model.staged, int(request.stage))
    return inputs_of(clients, state, number, half)


def check_stage(model: Staged, number: int) -> int:
    """Return the number of a stage.

    Raises:
        ProtocolError: the model has no such stage, or it has no sum over neighbors.
    """
    of = stages_with_sums(model)
    if number not in of:
        raise ProtocolError(f"expected the number of a stage with a sum, one of {of}, got {number}")
    return number


def with_product(state: InPass, at: Inputs, z: Tensor) -> InPass:
    """Return the pass with what the first half of a stage gives, (r, O)."""
    return replace(state, z={**state.z, str(at.number): Ragged(z, at.reach.off)})


def finish(
    clients: Clients, state: InPass, at: Inputs, params: Params, remote_sums: Incoming
) -> InPass:
    """Finish a stage, and do those without a sum that follow.

    Args:
        clients: of the pass.
        state: holds z of the stage.
        at: what the stage reads.
        params: its weights.
        remote_sums: (r, O) sums over neighbors in other silos, scaled by those.
    """
    number, z = str(at.number), dict(state.z)
    s = summed(scales_of(at.stage.conv), z.pop(number).t, remote_sums, at.reach)
    output = after(params, at, s)
    finished = _with_stage(replace(state, z=z), at, s, output)
    return _forward_without_sums(clients, finished, at.number + 1)


def _with_stage(state: InPass, at: Inputs, s: Tensor, output: Tensor) -> InPass:
    """Return the pass with the sum of a stage, and what enters the next one."""
    off = at.reach.off
    sums = {**state.s, str(at.number): Ragged(s, off)}
    return replace(state, s=sums, x={**state.x, str(at.number + 1): Ragged(output, off)})


@op(Kind.CONTROL)
def compute_loss(
    clients: Clients, state: PassState, request: LossCount
) -> tuple[PassState, LossSum]:
    """Compute the loss of the own training rows, and its gradient."""
    block, model, started = clients.block, clients.cfg.model.staged, state
    reach, last = reach_of(clients, started), len(model.stages)
    train = block.split.train[reach.rows]
    logits = started.x[str(last)].t.detach().requires_grad_()
    with torch.enable_grad():
        losses = task_of(model.task).loss(logits[train], block.y[reach.rows][train])
        if started.loss is not None:
            losses = losses * started.loss.t[train]
        losses = losses / request.count
        (grad,) = torch.autograd.grad(losses.sum(), logits)
    off = offsets(segment_sum(train.long(), reach.off))
    report_rows(off, LOSS_FLOPS * model.outputs)
    restarts = any(stage.teleport for stage in model.stages)
    origin = Ragged(torch.zeros_like(grad), reach.off) if restarts else None
    started = replace(started, grad=Ragged(grad, reach.off), origin=origin)
    lost = _backward_without_sums(clients, started, last - 1)
    return lost, LossSum(Stacked(segment_sum(losses.detach(), off)))


@op(Kind.COTANGENTS)
def send_cotangents(
    clients: Clients, state: PassState, request: AtStage
) -> tuple[PassState, PartialSums]:
    """Backpropagate to the sum; compute cotangents for others."""
    at, params = inputs_at(clients, state, request, "after")
    new, s = back_to_sum(clients, state, at, params)
    messages = messages_back(scales_of(at.stage.conv), s, at.reach, at.reach.sending_rows)
    return new, _partial_sums(clients, state, messages, at.reach, GRADIENTS)


def back_to_sum(
    clients: Clients, state: PassState, at: Inputs, params: Params
) -> tuple[PassState, Tensor]:
    """Backpropagate to the sum of a stage; return the pass, and dLoss/ds (r, O)."""
    new, s = _through_second_half(clients, state, at, params)
    return replace(new, sum=Ragged(s, at.reach.off)), s


def _through_second_half(
    clients: Clients, state: InPass, at: Inputs, params: Params
) -> tuple[InPass, Tensor]:
    """Backpropagate from what leaves a stage to its sum; return dLoss/ds (r, O)."""
    assert state.grad is not None  # from the loss, or the stage after
    s, outputs = state.s[str(at.number)].t, state.x[str(at.number + 1)].t
    gradients = after_back(params, at, s, outputs, state.grad.t, clients.block.num_clients)
    assert gradients.s is not None  # what leaves a stage depends on it
    return _add_gradients(clients.block, state, at, gradients), gradients.s


@op(Kind.COTANGENTS)
def add_remote_cotangents(
    clients: Clients, state: PassState, request: RemoteSums
) -> tuple[PassState, Empty]:
    """Backpropagate through the stage, and those without a sum before it."""
    at, params = inputs_at(clients, state, request, "before")
    own = gradient_of_sum(state)
    remote_sums = _sums_from_others(clients, at.reach, request, own, GRADIENTS)
    return finish_back(clients, state, at, params, remote_sums), Empty()


def gradient_of_sum(state: PassState) -> Tensor:
    """Return dLoss/ds (r, O) of the own sums of the stage at hand.

    Raises:
        ProtocolError: they were not computed.
    """
    if state.sum is None:
        raise ProtocolError("expected the gradient of a sum before those of others, got none")
    return state.sum.t


def finish_back(
    clients: Clients, state: InPass, at: Inputs, params: Params, remote_sums: Incoming
) -> InPass:
    """Backpropagate from the sum of a stage; `remote_sums` (r, O) as in `finish`, of gradients."""
    s = gradient_of_sum(state)
    z = summed_back(scales_of(at.stage.conv), s, remote_sums, at.reach)
    gradients = before_back(params, at, z, clients.block.num_clients)
    new = _add_gradients(clients.block, replace(state, sum=None), at, gradients)
    return _backward_without_sums(clients, _pass_gradient_down(at, new), at.number - 1)


@op(Kind.GRADIENTS)
def send_gradients(clients: Clients, state: PassState, _: Empty) -> tuple[Empty, WeightGradients]:
    """Send the gradients of the weights and end the pass."""
    block, gradients = clients.block, dict[str, Stacked | Patched]()
    for name, part in state.gradient.items():
        if isinstance(part, Stacked):
            gradients[name] = part
        else:  # features that no row has give their weights no gradient
            assert isinstance(block.x, SparseRows)
            shape = block.num_features, *part.t.shape[1:]
            which = torch.zeros(block.num_clients, dtype=torch.int64, device=part.t.device)
            base = part.t.new_zeros(1, *shape)
            feature = used_features(block.x, reach_of(clients, state)).feature
            gradients[name] = Patched(base, which, part.t, feature, part.off)
    return Empty(), WeightGradients(gradients)


def end(state: State) -> State:
    """Return the state without what belongs to a pass."""
    return {name: part for name, part in state.items() if not name.startswith("pass/")}


def logits_of(model: Staged, state: State) -> Tensor:
    """Return the logits (n, K) that a pass of all rows has left."""
    return state[f"pass/x/{len(model.stages)}"].t


def inputs_of(
    clients: Clients, state: PassState, number: int, half: Half | None = None
) -> tuple[Inputs, Params]:
    """Return what a stage reads, and its weights, or only those of a half.

    Raises:
        ProtocolError: the pass has not begun.
    """
    if state.train is None:
        raise ProtocolError("expected a pass that has begun, got none")
    model: Staged = clients.cfg.model.staged
    block, key, reach = clients.block, clients.key, reach_of(clients, state)
    stage = model.stages[number]
    x = entering(block, reach) if number == 0 else state.x[str(number)].t
    origin = None
    if stage.teleport:
        first = next(i for i, step in enumerate(model.stages) if step.teleport)
        origin = state.x[str(first)].t
    drop_key = key if bool(state.train.t[0]) else None
    at = Inputs(model, number, x, origin, drop_key, reach)
    params = stage_weights(number, {name: w.t for name, w in state.weights.items()}, half)
    return at, {name: w[0] for name, w in params.items()}


def _forward_without_sums(clients: Clients, state: InPass, number: int) -> InPass:
    """Run the stages from `number` on up to the next one with a sum."""
    stages = clients.cfg.model.staged.stages
    while number < len(stages) and not stages[number].conv.sums:
        at, params = inputs_of(clients, state, number)
        s = before(params, at)
        state = _with_stage(state, at, s, after(params, at, s))
        number += 1
    return state


def _backward_without_sums(clients: Clients, state: InPass, number: int) -> InPass:
    """Backpropagate through the stages from `number` down to the next one with a sum."""
    block, stages = clients.block, clients.cfg.model.staged.stages
    while number >= 0 and not stages[number].conv.sums:
        at, params = inputs_of(clients, state, number)
        state, s = _through_second_half(clients, state, at, params)
        gradients = before_back(params, at, s, block.num_clients)
        state = _pass_gradient_down(at, _add_gradients(block, state, at, gradients))
        number -= 1
    return state


def _add_gradients(block: ClientBlock, state: InPass, at: Inputs, gradients: Gradients) -> InPass:
    """Add gradients of half a stage to those of weights, of the restart and of its input."""
    totals, off = dict(state.gradient), at.reach.off
    for name, g in gradients.weights.items():
        full_name = f"{at.number}.{name}"
        total = totals[full_name].t + g if full_name in totals else g
        if isinstance(at.x, SparseRows) and name in at.stage.conv.maps:
            assert isinstance(block.x, SparseRows)  # as are the inputs
            totals[full_name] = Ragged(total, used_features(block.x, at.reach).off)
        else:
            totals[full_name] = Stacked(total)
    origin, enter = state.origin, state.enter
    if gradients.origin is not None:
        assert origin is not None  # from `compute_loss`
        origin = Ragged(origin.t + gradients.origin, off)
    if gradients.x is not None:
        enter = Ragged(gradients.x if enter is None else enter.t + gradients.x, off)
    return replace(state, gradient=totals, origin=origin, enter=enter)


def _pass_gradient_down(at: Inputs, state: InPass) -> InPass:
    """Use the gradient of the stage's input as that of the output of the stage before."""
    gradient = state.enter
    if gradient is None:
        return state
    first = next((i for i, step in enumerate(at.model.stages) if step.teleport), None)
    if at.number == first:  # the restart adds it again in every stage
        assert state.origin is not None  # from `compute_loss`
        gradient = Ragged(gradient.t + state.origin.t, at.reach.off)
    return replace(state, enter=None, grad=gradient)


def _partial_sums(
    clients: Clients, state: PassState, messages: Tensor, reach: Reach, form: FixedPoint
) -> PartialSums:
    """Return sums over own messages (k, D), for every slot to which enough of them contribute."""
    minimum = clients.cfg.row_minimum
    rows, slots, off = sum_for_other_silos(messages, reach), reach.slots, reach.slot_off
    is_sent = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    left_out = ~is_sent
    if minimum.nodes > 1:
        count = count_contributors(messages, reach)
        is_sent = count >= minimum.nodes
        left_out = (count > 0) & ~is_sent
    if minimum.rows_are_masked:
        rows = encode_rows(rows * is_sent[:, None], form)
        is_sent = _has_enough_silos(state, len(rows), minimum.silos).to(rows.device)
        left_out = left_out | ~is_sent
    num_left_out = None
    if minimum.counts_left_out:
        num_left_out = Stacked(segment_sum(left_out.long(), off))
    if minimum.names_slots:
        if slots is None:
            slots = slots_in_client(clients.block, torch.arange(len(rows), device=rows.device))
        rows, slots = rows[is_sent], slots[is_sent]
        off = offsets(segment_sum(is_sent.long(), off))
    return PartialSums(
        Ragged(rows, off), None if slots is None else Ragged(slots, off), num_left_out
    )


def _has_enough_silos(state: PassState, slots: int, least: int) -> Tensor:
    """Return to which slots' rows at least so many silos contribute, (slots,) bool.

    Raises:
        ProtocolError: nobody has said how many silos contribute.
    """
    if least == 1:
        return torch.ones(slots, dtype=torch.bool)
    if state.contributors is None or len(state.contributors.t) != slots:
        raise ProtocolError("expected the contributors of masked rows before these, got none")
    return state.contributors.t >= least


def _sums_from_others(
    clients: Clients, reach: Reach, request: RemoteSums, own: Tensor, form: FixedPoint
) -> RemoteParts:
    """Return sums over neighbors in other silos, in the form of the own rows (r, D)."""
    total = request.sum
    if clients.cfg.row_minimum.rows_are_masked:
        total = replace(total, t=decode_rows(total.t, form, own))
    check_like(total.t, own)
    return placed(clients.block, reach, total, request.row)


# --- The server's part ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Crossing:
    """How the sums of a stage include neighbors in other silos.

    Attributes:
        forward: completes the sums of a stage; its ops get `AtStage` besides rows.
        backward: the same for the gradients.
        keys: keys for masks, where rows that cross are masked.
    """

    forward: Exchange
    backward: Exchange
    keys: KeyExchange = KEY_EXCHANGE


SUMS, COTANGENTS = (
    SumRelay(send_partial_sums, add_remote_sums),
    SumRelay(send_cotangents, add_remote_cotangents),
)
BY_SUMS = Crossing(SUMS, COTANGENTS)


def at_sums(context: CallContext) -> list[CallContext]:
    """Return the context of each stage with a sum, from that of a pass."""
    form = context.cfg
    return [replace(context, cfg=replace(form, stage=n)) for n in stages_with_sums(form.model)]


def back_at_sums(context: CallContext) -> Iterable[CallContext]:
    """Return the same backward."""
    return reversed(at_sums(context))


def pass_calls(crossing: Crossing = BY_SUMS) -> tuple[Part, ...]:
    """Return the calls of `gradients`, in the context of a pass (`PassForm`)."""
    forward, backward = (
        for_each(at_sums, crossing.forward),
        for_each(back_at_sums, crossing.backward),
    )
    keys = when(masks_rows, crossing.keys)
    return keys, begin, forward, compute_loss, backward, send_gradients


def masks_rows(form: PassForm) -> bool:
    """Return whether partial sums are masked."""
    return form.row_minimum.rows_are_masked


def exchange_keys(fed: Federation, context: CallContext, keys: KeyExchange = KEY_EXCHANGE) -> None:
    """Let silos agree on keys for a pass whose partial sums are masked."""
    if masks_rows(context.cfg):
        keys.carry(fed, Empty(), context)


def cross(
    fed: Federation, exchange: Exchange, at: CallContext, relayed: list[Relayed] | None = None
) -> None:
    """Let rows of a stage cross; append the counts of sums to a list."""
    counts = exchange.carry(fed, _at_stage(at.cfg.stage), at)
    if relayed is not None and counts is not None:
        relayed.append(counts)


@lru_cache(maxsize=64)  # more than the stages of a model
def _at_stage(number: int) -> AtStage:
    return AtStage(torch.tensor(number, dtype=torch.int32))


def divisible(model: AnyModel) -> Staged:
    """Return the model; raise `ConfigError` unless silos can share the sums of every stage."""
    if model.staged is None:
        raise ConfigError(
            f"expected one of silograph's own models for sums over all silos, got {model.noun}, "
            "whose sums silograph cannot split: use model=gcn, graphconv, gin, sage or appnp"
        )
    for stage in model.staged.stages:
        if stage.conv.sums:
            scales_of(stage.conv)
    return model.staged


def predict(
    fed: Federation,
    model: Staged,
    weights: Mapping[str, Tensor],
    key: Key,
    first: ClientOp[Empty, Empty] | None = None,
    row_minimum: RowMinimum = NO_MINIMUM,
) -> None:
    """Compute the model's logits at the clients, with sums over the neighbors in all silos.

    Nothing is dropped, and all is counted as evaluation.

    Args:
        fed: the federation.
        model: the shape.
        weights: the server's.
        key: of the pass.
        first: finishes the stage that features enter without other silos, and the pass then goes on
            without silos that are away; None: it is as others.
        row_minimum: how many nodes and silos must contribute to a row.
    """
    context = prediction(model, key, row_minimum)
    exchange_keys(fed, replace(context, allow_missing=first is not None))
    context.call(fed, begin, StartOfPass(weights, torch.tensor(False)), Sum())
    for stage in at_sums(context):
        if first is not None and stage.cfg.stage == 0:
            stage.call(fed, first, Empty())
        else:
            cross(fed, SUMS, replace(stage, allow_missing=first is not None))


def prediction(model: Staged, key: Key, row_minimum: RowMinimum = NO_MINIMUM) -> CallContext:
    """Return the context of a pass that is counted as evaluation."""
    return CallContext(PassForm(model, row_minimum=row_minimum), key, kind=Kind.EVALUATION)


def predict_steps(
    model: Staged,
    key: Key,
    first: ClientOp[Empty, Empty] | None = None,
    row_minimum: RowMinimum = NO_MINIMUM,
) -> Steps:
    """Return the calls of `predict`."""
    context = prediction(model, key, row_minimum)
    steps: list[Steps] = list(KEY_EXCHANGE.steps(context)) if row_minimum.rows_are_masked else []
    steps.append(context.declare(begin))
    for stage in at_sums(context):
        if first is not None and stage.cfg.stage == 0:
            steps.append(stage.declare(first))
        else:
            steps.extend(SUMS.steps(stage))
    return tuple(steps)


def forward(
    fed: Federation,
    model: Staged,
    weights: Mapping[str, Tensor],
    key: Key,
    crossing: Crossing = BY_SUMS,
    row_minimum: RowMinimum = NO_MINIMUM,
    relayed: list[Relayed] | None = None,
) -> dict[str, Tensor]:
    """Compute the model's logits at the clients, with dropout, and store what backward needs.

    Returns:
        `part` and `all`, the number of training rows that take part and of all.
    """
    context = CallContext(PassForm(model, train=True, row_minimum=row_minimum), key)
    exchange_keys(fed, context, crossing.keys)
    counts = context.call(fed, begin, StartOfPass(weights, torch.tensor(True)), Sum())
    for stage in at_sums(context):
        cross(fed, crossing.forward, stage, relayed)
    return {name: part.t for name, part in counts.items()}


def gradients(
    fed: Federation,
    model: Staged,
    weights: Mapping[str, Tensor],
    key: Key,
    *,
    weighed: bool = False,
    crossing: Crossing = BY_SUMS,
    row_minimum: RowMinimum = NO_MINIMUM,
    relayed: list[Relayed] | None = None,
) -> tuple[Params, float | None]:
    """Return the gradient of the loss of all silos' training rows, and the loss.

    Args:
        fed: the federation.
        model: the shape.
        weights: the server's.
        key: key of the step.
        weighed: whether rows' losses have weights whose mean over the training rows of all silos
            is 1; the loss is divided by their number then, else by that of those that take part.
        crossing: how sums reach other silos.
        row_minimum: how many nodes and silos must contribute to a row.
        relayed: gets counts of what sums carried.

    Returns:
        Gradients by name, without those that are 0 for want of rows; None for the loss if no
        training row takes part.
    """
    counts = forward(fed, model, weights, key, crossing, row_minimum, relayed)
    count = counts["all" if weighed else "part"]
    context = CallContext(PassForm(model, train=True, row_minimum=row_minimum), key)
    loss = context.call(fed, compute_loss, LossCount(count.clamp(min=1)), Sum())["loss"]
    for stage in back_at_sums(context):
        cross(fed, crossing.backward, stage, relayed)
    reply = context.call(fed, send_gradients, Empty(), Sum())
    return tensors_under("gradient", reply), float(loss.t) if int(counts["part"]) else None
