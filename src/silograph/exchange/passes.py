"""Passes through a model whose sums over neighbors reach other silos.

First the ops of the clients, then the server's part.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Patched,
    Payload,
    Ragged,
    Shared,
    Stacked,
    State,
    named,
    offsets,
    under,
)
from silograph.core.setting_values import NO_MINIMUM, RowMinimum
from silograph.core.work import report_rows
from silograph.exchange.rows import Relayed, relay_steps, relay_sum
from silograph.federation.base import Federation, Op, Sum
from silograph.federation.field_specs import COUNT, LOSS, FieldSpec, FieldSpecs, exactly
from silograph.federation.program import Call, Steps
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.any_model import AnyModel
from silograph.nn.conv import Params
from silograph.nn.fit import LOSS_FLOPS, check_like, check_places, check_weights
from silograph.nn.forward import Staged
from silograph.nn.model import (
    Gradients,
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
    Reach,
    boundary_reach,
    count_contributors,
    full_reach,
    messages_back,
    messages_out,
    outward,
    partial_reach,
    placed,
    slots_in_client,
    summed,
    summed_back,
)
from silograph.nn.segment import segment_sum
from silograph.task.registry import task_of

# --- The clients' part ---------------------------------------------------------------------------
#
#     begin            weights come, stages without a sum are done
#     contribute ->    for every stage with a sum, forward: partial sums cross (`relay_sum`),
#       -> absorb      the stage is finished, and those without a sum that follow
#     lose             loss and its gradient, of the clients' own training rows
#     return_sums ->   the same stages backward: cotangents cross,
#       -> walk_back   gradients of the stage, and of those without a sum before it
#     hand_in          gradients of the weights, to be summed
#
# Every client sends sums over its own rows, scaled on its side; a raw row, an edge or a label
# never leaves. What a sum still tells is worked out in docs/exchange.md.
#
# Zhang, Luo, Feng, Liu, Zhou and Zheng, "Tackling the local bias in federated graph learning",
# 2021, eq. 2 and 4. What we changed: the square roots of the degrees are inverse, as the
# normalized Laplacian wants; the gradient of W^l is (Z^{l-1})^T L dH^l, where eq. 4 is
# misprinted; convolutions other than GCN; rows cross only where a sampled row is touched.
#
# State while a pass is under way, all under `pass/`: `weights/*` (C, ...) views of one tensor;
# `x/i` (r, I) what enters stage i; `s/i` (r, O) its sum; `grad` (r, O) of what leaves the stage
# at hand; `origin` (r, O) gradient of the restart; `gradient/*` of the weights. Before `begin` an
# op may put there which rows take part: `rows` (r,) as each client counts, with weights `own`,
# `cross` (r, 1), `loss` (r,), `inner` (e,) and `heard` (S,) (see
# `silograph.nn.reach.partial_reach`); or, where all rows do, `slot` (S,) weights of messages to
# and from other silos (see `boundary_reach`).
#
# C: clients. r: rows that take part.


NewState = dict[str, Stacked | Ragged]


def begin(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Start a pass.

    In: `weights/*`, `train`. Out: `part`, `all` (C,) training rows.
    """
    clients = block.num_clients
    new: NewState = dict(state)
    weights = under("weights", inbox)
    check_weights(cfg.model, weights, block, shared=True)
    for name, w in weights.items():  # one tensor, seen by every client
        new[f"pass/weights/{name}"] = Stacked(w.expand(clients, *w.shape))
    new["pass/train"] = Stacked(inbox["train"].t.expand(clients))
    reach = reach_of(block, new, key)
    part = segment_sum(block.split.train[reach.rows].long(), reach.off)
    counts = {"part": Stacked(part), "all": Stacked(block.num_train)}
    return _forward_without_sums(cfg, block, new, key, 0), counts


def begin_inside(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """As `begin`, and do the first stage with a sum over each client's own edges and degrees."""
    new, counts = begin(cfg, block, state, inbox, key)
    number = next(n for n, stage in enumerate(cfg.model.staged.stages) if stage.conv.sums)
    at, params = inputs_of(cfg, block, new, key, number)
    z = before(params, at)
    inner = replace(at.reach, degree=block.adj.degree.to(z.dtype)[:, None], operators={})
    at = replace(at, reach=inner)
    no_remote_sums = z.new_zeros(len(inner.rows), z.shape[1])
    started = {**new, f"pass/z/{number}": Ragged(z, inner.off)}
    return finish(cfg, block, started, key, at, params, no_remote_sums), counts


def contribute(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Compute partial sums for other silos. In: `stage`. Out: `rows`, and `slot` if not all.

    Sums over fewer than `cfg.row_minimum.nodes` own nodes are not sent; if there can be such,
    `left_out` (C,) counts them.
    """
    number = stage_of(cfg, inbox)
    at, params = inputs_of(cfg, block, state, key, number)
    z = before(params, at)
    messages = messages_out(scales_of(at.stage.conv), z, at.reach)
    reply = _reply_with_sums(cfg, block, messages, at.reach)
    return {**state, f"pass/z/{number}": Ragged(z, at.reach.off)}, reply


def absorb(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Finish the stage and those without a sum that follow. In: `stage`, `sum`, `row`."""
    number = stage_of(cfg, inbox)
    at, params = inputs_of(cfg, block, state, key, number)
    remote_sums = _sums_from_others(block, at.reach, inbox, state[f"pass/z/{number}"].t)
    return finish(cfg, block, state, key, at, params, remote_sums), {}


def stage_of(cfg: Any, inbox: Payload) -> int:
    """Return the number of the stage that an inbox names.

    Raises:
        ProtocolError: the model has no such stage, or it has no sum over neighbors.
    """
    number, steps = int(inbox["stage"].t), cfg.model.staged.stages
    if not 0 <= number < len(steps) or not steps[number].conv.sums:
        of = [i for i, stage in enumerate(steps) if stage.conv.sums]
        raise ProtocolError(f"expected the number of a stage with a sum, one of {of}, got {number}")
    return number


def finish(
    cfg: Any,
    block: ClientBlock,
    state: State,
    key: Key,
    at: Inputs,
    params: Params,
    remote_sums: Tensor,
) -> State:
    """Finish a stage, and do those without a sum that follow.

    Args:
        cfg: has `model`.
        block: C clients.
        state: holds z of the stage.
        key: of the pass.
        at: what the stage reads.
        params: its weights.
        remote_sums: (r, O) sums over neighbors in other silos, scaled by those.
    """
    new = dict(state)
    z = new.pop(f"pass/z/{at.number}").t
    s = summed(scales_of(at.stage.conv), z, remote_sums, at.reach)
    new[f"pass/s/{at.number}"] = Ragged(s, at.reach.off)
    new[f"pass/x/{at.number + 1}"] = Ragged(after(params, at, s), at.reach.off)
    return _forward_without_sums(cfg, block, new, key, at.number + 1)


def lose(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Compute the loss.

    In: `count` of training rows in all silos. Out: `loss` (C,), to be summed.
    """
    model, reach = cfg.model.staged, reach_of(block, state, key)
    last = len(model.stages)
    train = block.split.train[reach.rows]
    logits = state[f"pass/x/{last}"].t.detach().requires_grad_()
    with torch.enable_grad():
        losses = task_of(model.task).loss(logits[train], block.y[reach.rows][train])
        if "pass/loss" in state:
            losses = losses * state["pass/loss"].t[train]
        losses = losses / inbox["count"].t
        (grad,) = torch.autograd.grad(losses.sum(), logits)
    counts = segment_sum(train.long(), reach.off)
    off = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    report_rows(off, LOSS_FLOPS * model.outputs)
    new: NewState = {**state, "pass/grad": Ragged(grad, reach.off)}
    if any(stage.teleport for stage in model.stages):
        new["pass/origin"] = Ragged(torch.zeros_like(grad), reach.off)
    new = _backward_without_sums(cfg, block, new, key, last - 1)
    return new, {"loss": Stacked(segment_sum(losses.detach(), off))}


def return_sums(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Backpropagate to the sum; compute cotangents for others.

    In: `stage`. Out: as `contribute`.
    """
    at, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    new, s = back_to_sum(block, state, at, params)
    return new, _reply_with_sums(
        cfg, block, messages_back(scales_of(at.stage.conv), s, at.reach), at.reach
    )


def back_to_sum(
    block: ClientBlock, state: State, at: Inputs, params: Params
) -> tuple[NewState, Tensor]:
    """Backpropagate to the sum of a stage; return the state, and dLoss/ds (r, O)."""
    s, grad = state[f"pass/s/{at.number}"].t, state["pass/grad"].t
    gradients = after_back(params, at, s, grad, block.num_clients)
    new = _add_gradients(block, state, at, gradients)
    assert gradients.s is not None  # a stage with a sum depends on it
    return new | {"pass/sum": Ragged(gradients.s, at.reach.off)}, gradients.s


def walk_back(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Backpropagate through the stage, and those without a sum before it. In: as `absorb`."""
    at, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    remote_sums = _sums_from_others(block, at.reach, inbox, state["pass/sum"].t)
    return finish_back(cfg, block, state, key, at, params, remote_sums), {}


def finish_back(
    cfg: Any,
    block: ClientBlock,
    state: State,
    key: Key,
    at: Inputs,
    params: Params,
    remote_sums: Tensor,
) -> State:
    """Backpropagate from the sum of a stage; `remote_sums` (r, O) as in `finish`, of gradients."""
    new = dict(state)
    s = new.pop("pass/sum").t
    z = summed_back(scales_of(at.stage.conv), s, remote_sums, at.reach)
    gradients = before_back(params, at, z, block.num_clients)
    new = _add_gradients(block, new, at, gradients)
    return _backward_without_sums(cfg, block, _pass_gradient_down(at, new), key, at.number - 1)


def hand_in(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send the gradients of the weights and end the pass. In: nothing. Out: `gradient/*`."""
    del cfg, inbox, key
    reply: dict[str, Stacked | Patched] = {}
    for name, field in _fields("pass/gradient/", state).items():
        if isinstance(field, Stacked):
            reply[f"gradient/{name}"] = field
        else:  # features that no row has give their weights no gradient
            assert isinstance(block.x, SparseRows)
            shape = block.num_features, *field.t.shape[1:]
            which = torch.zeros(block.num_clients, dtype=torch.int64, device=field.t.device)
            base = field.t.new_zeros(1, *shape)
            patch = Patched(base, which, field.t, block.x.used.feature, field.off)
            reply[f"gradient/{name}"] = patch
    return end(state), reply


def end(state: State) -> State:
    """Return the state without what belongs to a pass."""
    return {name: field for name, field in state.items() if not name.startswith("pass/")}


def logits_of(model: Staged, state: State) -> Tensor:
    """Return the logits (n, K) that a pass of all rows has left."""
    return state[f"pass/x/{len(model.stages)}"].t


def reach_of(block: ClientBlock, state: State, key: Key) -> Reach:
    """Return which rows send messages to which in this pass: all, unless the state names some."""
    if "pass/rows" not in state and "pass/slot" not in state:
        return full_reach(block)
    cached = block.memo.get("reach")
    if isinstance(cached, tuple) and cached[0] == key:
        cached_reach: Reach = cached[1]
        return cached_reach
    if "pass/slot" in state:
        reach = boundary_reach(block, state["pass/slot"].t)
    else:
        local = state["pass/rows"]
        assert isinstance(local, Ragged)  # a run of rows a client
        rows = check_places(local, block.off, "rows that take part")
        weights = {
            name: state[f"pass/{name}"].t if f"pass/{name}" in state else None
            for name in ("own", "cross", "inner", "heard")
        }
        reach = partial_reach(block, rows, **weights)
    block.memo["reach"] = (key, reach)  # for the other ops of the pass
    return reach


def inputs_of(
    cfg: Any, block: ClientBlock, state: State, key: Key, number: int
) -> tuple[Inputs, Params]:
    """Return what a stage reads, and its weights."""
    model: Staged = cfg.model.staged
    reach = reach_of(block, state, key)
    steps = model.stages
    stage = steps[number]
    x = entering(block, reach) if number == 0 else state[f"pass/x/{number}"].t
    origin = None
    if stage.teleport:
        first = next(i for i, step in enumerate(steps) if step.teleport)
        origin = state[f"pass/x/{first}"].t
    weights = {name: w[0] for name, w in under("pass/weights", state).items()}
    train = bool(state["pass/train"].t[0])
    at = Inputs(model, number, x, origin, block.row_key[reach.rows], key if train else None, reach)
    return at, stage_weights(block, number, stage, weights)


def _forward_without_sums(
    cfg: Any, block: ClientBlock, state: NewState, key: Key, number: int
) -> NewState:
    """Run the stages from `number` on up to the next one with a sum."""
    steps = cfg.model.staged.stages
    while number < len(steps) and not steps[number].conv.sums:
        at, params = inputs_of(cfg, block, state, key, number)
        s = before(params, at)
        new = {f"pass/s/{number}": s, f"pass/x/{number + 1}": after(params, at, s)}
        state = state | {name: Ragged(t, at.reach.off) for name, t in new.items()}
        number += 1
    return state


def _backward_without_sums(
    cfg: Any, block: ClientBlock, state: NewState, key: Key, number: int
) -> NewState:
    """Backpropagate through the stages from `number` down to the next one with a sum."""
    steps = cfg.model.staged.stages
    while number >= 0 and not steps[number].conv.sums:
        at, params = inputs_of(cfg, block, state, key, number)
        s, grad = state[f"pass/s/{number}"].t, state["pass/grad"].t
        after_sum = after_back(params, at, s, grad, block.num_clients)
        state = _add_gradients(block, state, at, after_sum)
        assert after_sum.s is not None  # a stage depends on what its first half gives
        before_sum = before_back(params, at, after_sum.s, block.num_clients)
        state = _pass_gradient_down(at, _add_gradients(block, state, at, before_sum))
        number -= 1
    return state


def _add_gradients(block: ClientBlock, state: State, at: Inputs, gradients: Gradients) -> NewState:
    """Add gradients of half a stage to those of weights, of the restart and of its input."""
    new: NewState = dict(state)
    for name, g in gradients.weights.items():
        field = f"pass/gradient/{at.number}.{name}"
        total = new[field].t + g if field in new else g
        if isinstance(at.x, SparseRows) and name in at.stage.conv.maps:
            assert isinstance(block.x, SparseRows)  # as are the inputs
            new[field] = Ragged(total, block.x.used.off)
        else:
            new[field] = Stacked(total)
    if gradients.origin is not None:
        new["pass/origin"] = Ragged(new["pass/origin"].t + gradients.origin, at.reach.off)
    if gradients.x is not None:
        entering_grad = new["pass/enter"].t if "pass/enter" in new else 0
        new["pass/enter"] = Ragged(entering_grad + gradients.x, at.reach.off)
    return new


def _pass_gradient_down(at: Inputs, state: NewState) -> NewState:
    """Use the gradient of the stage's input as that of the output of the stage before."""
    new = dict(state)
    gradient = new.pop("pass/enter", None)
    if gradient is None:
        return new
    steps = at.model.stages
    first = next((i for i, step in enumerate(steps) if step.teleport), None)
    if at.number == first:  # the restart adds it again in every stage
        gradient = Ragged(gradient.t + new["pass/origin"].t, at.reach.off)
    return new | {"pass/grad": gradient}


def _reply_with_sums(
    cfg: Any, block: ClientBlock, messages: Tensor, reach: Reach
) -> dict[str, Ragged | Stacked]:
    """Return sums over own messages (r, D), for every slot to which enough of them contribute."""
    rows, slots, off = outward(messages, reach), reach.slots, reach.slot_off
    if cfg.row_minimum.nodes == 1:
        reply: dict[str, Ragged | Stacked] = {"rows": Ragged(rows, off)}
        return reply if slots is None else {**reply, "slot": Ragged(slots, off)}
    count = count_contributors(messages, reach)
    is_sent = count >= cfg.row_minimum.nodes
    left_out = segment_sum(((count > 0) & ~is_sent).long(), off)
    if slots is None:
        slots = slots_in_client(block, torch.arange(len(rows), device=rows.device))
    off = offsets(segment_sum(is_sent.long(), off))
    return {
        "rows": Ragged(rows[is_sent], off),
        "slot": Ragged(slots[is_sent], off),
        "left_out": Stacked(left_out),
    }


def _sums_from_others(block: ClientBlock, reach: Reach, inbox: Payload, own: Tensor) -> Tensor:
    """Return sums over neighbors in other silos (r, D), in the form of the own rows (r, D)."""
    total, row = inbox["sum"], inbox.get("row")
    assert isinstance(total, Ragged)  # from `relay_sum`
    assert row is None or isinstance(row, Ragged)
    check_like(total.t, own)
    return placed(block, reach, total, row)


def _fields(prefix: str, state: State) -> dict[str, Stacked | Ragged]:
    return {k.removeprefix(prefix): f for k, f in state.items() if k.startswith(prefix)}


Carry = Callable[[Federation, Mapping[str, Shared], Key], Relayed | None]
CarrySteps = Callable[[FieldSpecs, int, Key], Steps]


@dataclass(frozen=True)
class Crossing:
    """The way in which the sums of a stage include neighbors in other silos.

    Attributes:
        forward: completes the sums of a stage; gets the inbox of its ops, `stage`, and the step's
            key; returns counts of what it carried, if these are sums.
        backward: the same for the gradients.
        forward_steps: the calls of `forward`, from specs of the ops' inbox, the width of the
            stage's sum, and the key.
        backward_steps: those of `backward`.
    """

    forward: Carry
    backward: Carry
    forward_steps: CarrySteps
    backward_steps: CarrySteps


def share_sums(
    fed: Federation,
    stage_inbox: Mapping[str, Shared],
    key: Key,
    *,
    what: Kind = Kind.PARTIAL_SUMS,
    silos: int = 1,
    lacking: bool = False,
) -> Relayed:
    """Add up partial sums at the rows' owners, of rows to which at least `silos` contribute."""
    return relay_sum(
        fed, contribute, absorb, what=what, key=key, inbox=stage_inbox, silos=silos, lacking=lacking
    )


def share_cotangents(
    fed: Federation, stage_inbox: Mapping[str, Shared], key: Key, *, silos: int = 1
) -> Relayed:
    """Add up partial sums of the gradients at the rows' owners; see `share_sums`."""
    what = Kind.COTANGENTS
    return relay_sum(
        fed, return_sums, walk_back, what=what, key=key, inbox=stage_inbox, silos=silos
    )


def sums_steps(
    stage_specs: FieldSpecs,
    width: int,
    key: Key,
    *,
    what: Kind = Kind.PARTIAL_SUMS,
    named: bool = False,
    row_minimum: RowMinimum = NO_MINIMUM,
) -> Steps:
    """Return the calls of `share_sums`; `named`: whether not all rows take part."""
    return relay_steps(
        contribute,
        absorb,
        what=what,
        key=key,
        width=width,
        named=named,
        row_minimum=row_minimum,
        inbox=stage_specs,
    )


def cotangents_steps(
    stage_specs: FieldSpecs,
    width: int,
    key: Key,
    *,
    named: bool = False,
    row_minimum: RowMinimum = NO_MINIMUM,
) -> Steps:
    """Return the calls of `share_cotangents`."""
    return relay_steps(
        return_sums,
        walk_back,
        what=Kind.COTANGENTS,
        key=key,
        width=width,
        named=named,
        row_minimum=row_minimum,
        inbox=stage_specs,
    )


def by_sums(*, named: bool = False, row_minimum: RowMinimum = NO_MINIMUM) -> Crossing:
    """Return the crossing of partial sums; `named`: whether not all rows take part."""
    return Crossing(
        partial(share_sums, silos=row_minimum.silos),
        partial(share_cotangents, silos=row_minimum.silos),
        partial(sums_steps, named=named, row_minimum=row_minimum),
        partial(cotangents_steps, named=named, row_minimum=row_minimum),
    )


def noted(crossing: Crossing, carried: list[Relayed]) -> Crossing:
    """Return the same crossing, which appends counts of what its sums carried to a list."""

    def noting(carry: Carry) -> Carry:
        def carry_on(fed: Federation, stage_inbox: Mapping[str, Shared], key: Key) -> None:
            relayed = carry(fed, stage_inbox, key)
            carried.extend([] if relayed is None else [relayed])

        return carry_on

    return replace(crossing, forward=noting(crossing.forward), backward=noting(crossing.backward))


BY_SUMS = by_sums()


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
    first: Op | None = None,
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
    _begin(fed, weights, key, train=False)
    for stage_inbox in stage_inboxes(model):
        if first is not None and int(stage_inbox["stage"].t) == 0:
            fed.call(first, {}, what=Kind.EVALUATION, key=key)
        else:
            what, lacking = Kind.EVALUATION, first is not None
            share_sums(fed, stage_inbox, key, what=what, silos=row_minimum.silos, lacking=lacking)


@lru_cache(maxsize=64)  # programs ask for specs in every round
def weight_specs(
    model: AnyModel | Staged, form: type[Shared] | type[Stacked], prefix: str = "weights"
) -> FieldSpecs:
    """Return the specs of the weights of a model, or of what has their shapes."""
    shapes = model.weight_shapes.items()
    return MappingProxyType({f"{prefix}/{name}": FieldSpec(form, shape) for name, shape in shapes})


def predict_steps(
    model: Staged, key: Key, first: Op | None = None, row_minimum: RowMinimum = NO_MINIMUM
) -> Steps:
    """Return the calls of `predict`."""
    what = Kind.EVALUATION
    steps: tuple[Steps, ...] = (begin_step(model, key, train=False),)
    for stage_specs, width in sum_specs(model):
        if first is not None and stage_specs["stage"].low == 0:
            steps = (*steps, Call(first, what, key))
        else:
            steps = (
                *steps,
                sums_steps(stage_specs, width, key, what=what, row_minimum=row_minimum),
            )
    return steps


def begin_step(model: Staged, key: Key, *, train: bool, op: Op = begin) -> Call:
    """Return the call that starts a pass, by default that of all stages."""
    inbox_specs = {**weight_specs(model, Shared), "train": exactly(train, torch.bool)}
    what = Kind.WEIGHTS if train else Kind.EVALUATION
    return Call(op, what, key, inbox_specs, {"part": COUNT, "all": COUNT})


def _begin(
    fed: Federation, weights: Mapping[str, Tensor], key: Key, *, train: bool
) -> dict[str, Tensor]:
    """Start a pass; return `part` and `all`, training rows that take part and all there are."""
    inbox: Payload = {
        **{name: Shared(w) for name, w in named("weights", weights).items()},
        "train": Shared(torch.tensor(train)),
    }
    what = Kind.WEIGHTS if train else Kind.EVALUATION
    counts = fed.call(begin, inbox, what=what, key=key, reduce=Sum())
    return {name: field.t for name, field in counts.items()}


def forward(
    fed: Federation,
    model: Staged,
    weights: Mapping[str, Tensor],
    key: Key,
    crossing: Crossing = BY_SUMS,
) -> dict[str, Tensor]:
    """Compute the model's logits at the clients, with dropout, and store what backward needs.

    Returns:
        `part` and `all`, the number of training rows that take part and of all.
    """
    counts = _begin(fed, weights, key, train=True)
    for stage_inbox in stage_inboxes(model):
        crossing.forward(fed, stage_inbox, key)
    return counts


def gradients(
    fed: Federation,
    model: Staged,
    weights: Mapping[str, Tensor],
    key: Key,
    *,
    weighed: bool = False,
    crossing: Crossing = BY_SUMS,
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

    Returns:
        Gradients by name, without those that are 0 for want of rows; None for the loss if no
        training row takes part.
    """
    counts = forward(fed, model, weights, key, crossing)
    count = counts["all" if weighed else "part"]
    total = {"count": Shared(count.clamp(min=1))}
    loss = fed.call(lose, total, what=Kind.CONTROL, key=key, reduce=Sum())["loss"]
    for stage_inbox in reversed(stage_inboxes(model)):
        crossing.backward(fed, stage_inbox, key)
    reply = fed.call(hand_in, {}, what=Kind.GRADIENTS, key=key, reduce=Sum())
    return under("gradient", reply), float(loss.t) if int(counts["part"]) else None


def gradient_steps(model: Staged, key: Key, crossing: Crossing = BY_SUMS) -> Steps:
    """Return the calls of `gradients`."""
    sums = sum_specs(model)
    count = {"count": FieldSpec(Shared, (), torch.int64, low=1)}
    gradient_specs = weight_specs(model, Stacked, "gradient")
    return (
        begin_step(model, key, train=True),
        *(crossing.forward_steps(stage_specs, width, key) for stage_specs, width in sums),
        Call(lose, Kind.CONTROL, key, count, {"loss": LOSS}),
        *(
            crossing.backward_steps(stage_specs, width, key)
            for stage_specs, width in reversed(sums)
        ),
        Call(hand_in, Kind.GRADIENTS, key, {}, gradient_specs),
    )


def sum_specs(model: Staged) -> list[tuple[FieldSpecs, int]]:
    """Return, for every stage that has a sum, specs of the inbox of its ops, and its width."""
    shapes = model.weight_shapes
    specs: list[tuple[FieldSpecs, int]] = []
    for number, stage in enumerate(model.stages):
        if stage.conv.sums:
            maps = stage.conv.maps  # what the rows are mapped by before they are summed
            width = shapes[f"{number}.{maps[0]}"][-1] if maps else stage.inputs
            specs.append(({"stage": exactly(number)}, width))
    return specs


def stage_inboxes(model: Staged) -> list[dict[str, Shared]]:
    """Return the inbox of the ops of every stage that has a sum."""
    numbers = [number for number, stage in enumerate(model.stages) if stage.conv.sums]
    return [{"stage": Shared(torch.tensor(number, dtype=torch.int32))} for number in numbers]
