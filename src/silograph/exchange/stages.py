"""Passes through a model whose sums over neighbors reach other silos: what clients do.

The server's side is `silograph.exchange.passes`.

    begin            weights come, stages without a sum are done
    contribute ->    for every stage with a sum, forward: partial sums cross (`relay_sum`),
      -> absorb      the stage is finished, and those without a sum that follow
    lose             loss and its gradient, of the clients' own training rows
    return_sums ->   the same stages backward: cotangents cross,
      -> walk_back   gradients of the stage, and of those without a sum before it
    hand_in          gradients of the weights, to be summed

Every client sends sums over its own rows, scaled on its side; a raw row, an edge or a label never
leaves. What a sum still tells is worked out in docs/exchange.md.

Zhang, Luo, Feng, Liu, Zhou and Zheng, "Tackling the local bias in federated graph learning", 2021,
eq. 2 and 4. What we changed: the square roots of the degrees are inverse, as the normalized
Laplacian wants; the gradient of W^l is (Z^{l-1})^T L dH^l, where eq. 4 is misprinted; convolutions
other than GCN; rows cross only where a sampled row is touched.

State while a pass is under way, all under `pass/`: `weights/*` (C, ...) views of one tensor; `x/i`
(r, I) what enters stage i; `s/i` (r, O) its sum; `grad` (r, O) of what leaves the stage at hand;
`origin` (r, O) gradient of the restart; `gradient/*` of the weights. Before `begin` an op may put
there which rows take part: `rows` (r,) as each client counts, with weights `own`, `cross` (r, 1),
`loss` (r,), `inner` (e,) and `heard` (S,) (see `silograph.nn.reach.partial_reach`); or, where all
rows do, `slot` (S,) weights of messages to and from other silos (see `boundary_reach`).

C: clients. r: rows that take part.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Patched, Payload, Ragged, Stacked, State, offsets, under
from silograph.core.work import report_rows
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Params
from silograph.nn.doors import check_like, check_places, check_weights
from silograph.nn.forward import Staged
from silograph.nn.reach import (
    Reach,
    boundary_reach,
    full_reach,
    messages_back,
    messages_out,
    outward,
    partial_reach,
    placed,
    slots_in_client,
    standing_behind,
    summed,
    summed_back,
)
from silograph.nn.segment import segment_sum
from silograph.nn.stage_halves import (
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
from silograph.nn.steps import LOSS_FLOPS
from silograph.task.registry import task_of

NewState = dict[str, Stacked | Ragged]


def begin(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the weights. In: `weights/*`, `train`. Out: `part`, `all` (C,) training rows."""
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
    return _onward(cfg, block, new, key, 0), counts


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
    nothing = z.new_zeros(len(inner.rows), z.shape[1])
    started = {**new, f"pass/z/{number}": Ragged(z, inner.off)}
    return finish(cfg, block, started, key, at, params, nothing), counts


def contribute(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Work out what other silos are owed. In: `stage`. Out: `rows`, and `slot` if not all.

    Rows with fewer than `cfg.behind.nodes` own nodes behind them stay here; if there can be such,
    `left_out` (C,) counts them.
    """
    number = stage_of(cfg, inbox)
    at, params = inputs_of(cfg, block, state, key, number)
    z = before(params, at)
    messages = messages_out(scales_of(at.stage.conv), z, at.reach)
    reply = _out(cfg, block, messages, at.reach)
    return {**state, f"pass/z/{number}": Ragged(z, at.reach.off)}, reply


def absorb(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Finish the stage and those without a sum that follow. In: `stage`, `sum`, `row`."""
    number = stage_of(cfg, inbox)
    at, params = inputs_of(cfg, block, state, key, number)
    arrived = _arrived(block, at.reach, inbox, state[f"pass/z/{number}"].t)
    return finish(cfg, block, state, key, at, params, arrived), {}


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
    arrived: Tensor,
) -> State:
    """Finish a stage, and do those without a sum that follow.

    Args:
        cfg: has `model`.
        block: C clients.
        state: holds z of the stage.
        key: of the pass.
        at: what the stage reads.
        params: its weights.
        arrived: (r, O) sums over neighbors in other silos, scaled by those.
    """
    new = dict(state)
    z = new.pop(f"pass/z/{at.number}").t
    s = summed(scales_of(at.stage.conv), z, arrived, at.reach)
    new[f"pass/s/{at.number}"] = Ragged(s, at.reach.off)
    new[f"pass/x/{at.number + 1}"] = Ragged(after(params, at, s), at.reach.off)
    return _onward(cfg, block, new, key, at.number + 1)


def lose(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Take the loss. In: `count` of training rows in all silos. Out: `loss` (C,), to be summed."""
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
    new = _backward(cfg, block, new, key, last - 1)
    return new, {"loss": Stacked(segment_sum(losses.detach(), off))}


def return_sums(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Walk back to the sum; work out what others are owed. In: `stage`. Out: as `contribute`."""
    at, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    new, s = back_to_sum(block, state, at, params)
    return new, _out(cfg, block, messages_back(scales_of(at.stage.conv), s, at.reach), at.reach)


def back_to_sum(
    block: ClientBlock, state: State, at: Inputs, params: Params
) -> tuple[NewState, Tensor]:
    """Walk back to the sum of a stage; return the state, and dLoss/ds (r, O)."""
    s, grad = state[f"pass/s/{at.number}"].t, state["pass/grad"].t
    found = after_back(params, at, s, grad, block.num_clients)
    new = _with_gradients(block, state, at, found)
    assert found.s is not None  # a stage with a sum depends on it
    return new | {"pass/sum": Ragged(found.s, at.reach.off)}, found.s


def walk_back(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Walk back through the stage, and those without a sum before it. In: as `absorb`."""
    at, params = inputs_of(cfg, block, state, key, stage_of(cfg, inbox))
    arrived = _arrived(block, at.reach, inbox, state["pass/sum"].t)
    return finish_back(cfg, block, state, key, at, params, arrived), {}


def finish_back(
    cfg: Any,
    block: ClientBlock,
    state: State,
    key: Key,
    at: Inputs,
    params: Params,
    arrived: Tensor,
) -> State:
    """Walk back from the sum of a stage; `arrived` (r, O) as in `finish`, of gradients."""
    new = dict(state)
    s = new.pop("pass/sum").t
    z = summed_back(scales_of(at.stage.conv), s, arrived, at.reach)
    found = before_back(params, at, z, block.num_clients)
    new = _with_gradients(block, new, at, found)
    return _backward(cfg, block, _entered(at, new), key, at.number - 1)


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
    """Return who hears whom in this pass: all rows, unless the state names some."""
    if "pass/rows" not in state and "pass/slot" not in state:
        return full_reach(block)
    found = block.memo.get("reach")
    if isinstance(found, tuple) and found[0] == key:
        known: Reach = found[1]
        return known
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
    block.memo["reach"] = (key, reach)  # the other ops of the pass want it, too
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


def _onward(cfg: Any, block: ClientBlock, state: NewState, key: Key, number: int) -> NewState:
    """Do the stages from `number` on that have no sum."""
    steps = cfg.model.staged.stages
    while number < len(steps) and not steps[number].conv.sums:
        at, params = inputs_of(cfg, block, state, key, number)
        s = before(params, at)
        new = {f"pass/s/{number}": s, f"pass/x/{number + 1}": after(params, at, s)}
        state = state | {name: Ragged(t, at.reach.off) for name, t in new.items()}
        number += 1
    return state


def _backward(cfg: Any, block: ClientBlock, state: NewState, key: Key, number: int) -> NewState:
    """Walk back through the stages from `number` down that have no sum."""
    steps = cfg.model.staged.stages
    while number >= 0 and not steps[number].conv.sums:
        at, params = inputs_of(cfg, block, state, key, number)
        s, grad = state[f"pass/s/{number}"].t, state["pass/grad"].t
        late = after_back(params, at, s, grad, block.num_clients)
        state = _with_gradients(block, state, at, late)
        assert late.s is not None  # a stage depends on what its first half gives
        early = before_back(params, at, late.s, block.num_clients)
        state = _entered(at, _with_gradients(block, state, at, early))
        number -= 1
    return state


def _with_gradients(block: ClientBlock, state: State, at: Inputs, found: Gradients) -> NewState:
    """Add what a half gives to the gradients of weights, of the restart, and of what entered."""
    new: NewState = dict(state)
    for name, g in found.weights.items():
        field = f"pass/gradient/{at.number}.{name}"
        total = new[field].t + g if field in new else g
        if isinstance(at.x, SparseRows) and name in at.stage.conv.maps:
            assert isinstance(block.x, SparseRows)  # as what enters
            new[field] = Ragged(total, block.x.used.off)
        else:
            new[field] = Stacked(total)
    if found.origin is not None:
        new["pass/origin"] = Ragged(new["pass/origin"].t + found.origin, at.reach.off)
    if found.x is not None:
        so_far = new["pass/enter"].t if "pass/enter" in new else 0
        new["pass/enter"] = Ragged(so_far + found.x, at.reach.off)
    return new


def _entered(at: Inputs, state: NewState) -> NewState:
    """Make the gradient of what entered the stage that of what left the one before."""
    new = dict(state)
    entered = new.pop("pass/enter", None)
    if entered is None:
        return new
    steps = at.model.stages
    first = next((i for i, step in enumerate(steps) if step.teleport), None)
    if at.number == first:  # what is added again at every restart
        entered = Ragged(entered.t + new["pass/origin"].t, at.reach.off)
    return new | {"pass/grad": entered}


def _out(
    cfg: Any, block: ClientBlock, messages: Tensor, reach: Reach
) -> dict[str, Ragged | Stacked]:
    """Return sums over own messages (r, D), for every slot with enough of them behind it."""
    rows, slots, off = outward(messages, reach), reach.slots, reach.slot_off
    if cfg.behind.nodes == 1:
        reply: dict[str, Ragged | Stacked] = {"rows": Ragged(rows, off)}
        return reply if slots is None else {**reply, "slot": Ragged(slots, off)}
    count = standing_behind(messages, reach)
    kept = count >= cfg.behind.nodes
    left_out = segment_sum(((count > 0) & ~kept).long(), off)
    if slots is None:
        slots = slots_in_client(block, torch.arange(len(rows), device=rows.device))
    off = offsets(segment_sum(kept.long(), off))
    return {
        "rows": Ragged(rows[kept], off),
        "slot": Ragged(slots[kept], off),
        "left_out": Stacked(left_out),
    }


def _arrived(block: ClientBlock, reach: Reach, inbox: Payload, own: Tensor) -> Tensor:
    """Return sums over neighbors in other silos (r, D), in the form of the own rows (r, D)."""
    total, row = inbox["sum"], inbox.get("row")
    assert isinstance(total, Ragged)  # from `relay_sum`
    assert row is None or isinstance(row, Ragged)
    check_like(total.t, own)
    return placed(block, reach, total, row)


def _fields(prefix: str, state: State) -> dict[str, Stacked | Ragged]:
    return {k.removeprefix(prefix): f for k, f in state.items() if k.startswith(prefix)}
