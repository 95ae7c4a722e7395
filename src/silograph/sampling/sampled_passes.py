"""What clients do in a pass over drawn neighbors in all silos, each with weights of its own.

The stages are `silograph.sampling.sampled_stages`; the method that drives them is FedGraph.

    ask, listen      silos name the slots that a stage needs, owners note which rows that makes
    ask, serve,      the rows come, multiplied by their owners' weights
      store
    send_back,       the gradients of the rows go to their owners, where the option asks for it
      take_back

Nothing but tensors is kept between calls: what was drawn follows from the key and the state, and a
pass is run anew where its values are needed. State: `round/weights/*` (C, ...), `round/kappa` (C,),
`round/keep` (C, 3); in an iteration `round/asked/i`, `round/wanted/i`, `round/received/i` and
`round/returned/i` of stage i.

C: clients. k: halo slots, boundary rows. O: width of a stage's sum.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Payload, Ragged, State, owners, under
from silograph.core.work import report_rows
from silograph.exchange.passes import divisible, sum_specs
from silograph.exchange.stages import stage_of
from silograph.graph.block.block import ClientBlock
from silograph.nn.doors import check_places
from silograph.nn.forward import Pass, forward_pass, rows_of_stage
from silograph.nn.segment import segment_sum
from silograph.nn.stage_halves import scales_of
from silograph.sampling.sampled_stages import (
    SampledStage,
    StageDraw,
    sampled_inputs,
    sampled_stage,
    seeds,
    with_wanted,
)
from silograph.task.registry import task_of

SHARED_FROM = {"all": 0, "hidden": 1}  # the first layer that hears other silos
LAYERS = 3  # that have a probability of their own; later ones have the last one's


def shared_stages(cfg: Any) -> list[int]:
    """Return the numbers of the stages that hear other silos."""
    sums = [n for n, stage in enumerate(divisible(cfg.model).stages) if stage.conv.sums]
    return sums[SHARED_FROM.get(cfg.options.share, len(sums)) :]


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
    """Note which rows will be wanted. In: `stage`, `row` (k,) int32. Out: nothing."""
    del block, key
    number, row = _shared_stage(cfg, inbox), inbox["row"]
    assert isinstance(row, Ragged)  # from `announce`
    return {**state, f"round/wanted/{number}": row}, {}


def serve(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Answer with rows times the own weights. In: `stage`, `row` (k,). Out: `rows` (k, O)."""
    number, row = _shared_stage(cfg, inbox), inbox["row"]
    name = f"round/wanted/{number}"
    assert isinstance(row, Ragged)  # from `pull`
    if name in state and not torch.equal(state[name].t, row.t):
        raise ProtocolError(
            f"expected the rows of stage {number} that were announced, got a call for others"
        )
    new = {**state, name: row}
    stages, weights = stages_of(cfg, block, new, key, 0), under("round/weights", new)
    inputs = sampled_inputs(block, stages, received_in(new))
    rows = _messages(cfg, weights, inputs, stages[number], key, number)
    return new, {"rows": Ragged(rows, row.off)}


def store(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep rows for the slots that were asked for. In: `stage`, `rows` (k, O). Out: nothing."""
    del key
    number, rows = _shared_stage(cfg, inbox), inbox["rows"]
    wanted = len(state[f"round/asked/{number}"].t), width_of(cfg, number)
    assert isinstance(rows, Ragged)  # from `pull`
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    if rows.t.shape != wanted or rows.t.dtype is not block.adj.values.dtype:
        raise ProtocolError(
            f"expected rows of shape {wanted} in {block.adj.values.dtype}, got "
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
    sums = {int(told["stage"].low or 0): width for told, width in sum_specs(divisible(cfg.model))}
    return sums[number]


def _draws(cfg: Any, state: State) -> list[StageDraw]:
    """Return how the neighbors of every stage are drawn."""
    keep, across, found = state["round/keep"].t, shared_stages(cfg), list[StageDraw]()
    layer = 0
    for number, stage in enumerate(divisible(cfg.model).stages):
        chance = keep[:, min(layer, LAYERS - 1)]
        layer += stage.conv.sums
        by_degree = cfg.options.rescale == "degree"
        found.append(StageDraw(stage.conv.sums, chance, number in across, by_degree))
    return found


def stages_of(
    cfg: Any, block: ClientBlock, state: State, key: Key, first: int
) -> list[SampledStage]:
    """Return the stages from `first` on as drawn in this iteration, with what others want of them.

    They follow from the key and the state alone; those of the iteration at hand are kept.
    """
    most, draws = state["round/kappa"].t, _draws(cfg, state)
    known = block.memo.get("fedgraph")
    kept: dict[int, SampledStage] = {}
    rates = torch.cat([most[:, None].double(), state["round/keep"].t], dim=1)
    if isinstance(known, tuple) and known[0] == key and torch.equal(known[1], rates):
        kept = known[2]
    last = len(draws) - 1
    leaving = kept[last].leaving if last in kept else seeds(block, most, key.fold("batch"))
    found: list[SampledStage] = []
    for number in range(last, first - 1, -1):
        wanted = _wanted(block, state, number)
        stage = kept.get(number)
        if stage is None or stage.leaving is not leaving:
            own = key.fold("neighbors", number)
            stage = sampled_stage(block, leaving, last - number, draws[number], wanted, own)
        elif not torch.equal(stage.wanted, wanted):  # which comes after an announced draw
            stage = with_wanted(block, stage, last - number, wanted)
        kept[number], leaving = stage, stage.entering
        found.insert(0, stage)
    block.memo["fedgraph"] = (key, rates, kept)
    return found


def _wanted(block: ClientBlock, state: State, number: int) -> Tensor:
    """Return the rows whose messages of a stage other silos want, (m,) int64."""
    named = state.get(f"round/wanted/{number}")
    if not isinstance(named, Ragged):
        return block.halo.boundary[:0]
    places = check_places(named, block.halo.boundary_off, "boundary rows that are wanted")
    return block.halo.boundary[places]


def _messages(
    cfg: Any,
    weights: Mapping[str, Tensor],
    inputs: Pass,
    stage: SampledStage,
    key: Key,
    number: int,
) -> Tensor:
    """Return what the wanted rows have to say in a stage, scaled by themselves, (k, O)."""
    model, entering = divisible(cfg.model), stage.entering
    conv, prefix = model.stages[number].conv, f"{number}."
    params = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
    z = conv.map(params, rows_of_stage(model, weights, inputs, key, number), entering.off)
    place = stage.degree.new_full((len(stage.degree),), -1, dtype=torch.int64)
    place[entering.rows] = torch.arange(len(entering.rows), device=place.device)
    scale = scales_of(conv).before(stage.degree[stage.wanted])
    rows = z[place[stage.wanted]]
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
    """Return the mean loss of every client's batch (C,), and what its gradient steps go down, ().

    The latter is the sum of the losses, and of the inner products of what clients have sent with
    the gradients that came back, over the sizes of their batches: these are of summed losses.

    Args:
        cfg: of the method.
        block: C clients.
        state: of an iteration.
        key: of it.
        weights: (C, ...).
        received: rows of other silos, by stage.
    """
    stages = stages_of(cfg, block, state, key, 0)
    inputs, batch = sampled_inputs(block, stages, received), stages[-1].leaving
    logits = forward_pass(divisible(cfg.model), weights, inputs, key)
    losses = task_of(cfg.model.task).loss(logits, block.y[batch.rows])
    nodes = batch.off.diff()
    loss = segment_sum(losses, batch.off) / nodes.clamp(min=1)
    total = loss.sum()
    for name, gradient in under("round/returned", state).items():
        stage = stages[int(name)]
        rows = _messages(cfg, weights, inputs, stage, key, int(name))
        share = nodes[block.client[stage.wanted]].clamp(min=1)[:, None]
        total = total + (rows * gradient / share).sum()
    return loss, total


def received_in(state: State) -> dict[int, Tensor]:
    """Return the rows that have come, by stage."""
    return {int(number): t for number, t in under("round/received", state).items()}


def send_back(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Return the gradients of the rows that came to a stage, of the batch's summed loss.

    In: `stage`. Out: `rows` (k, O), `slot` (k,) int32.
    """
    number = _shared_stage(cfg, inbox)
    received = received_in(state)
    leaf = received[number] = received[number].detach().requires_grad_()
    weights, asked = under("round/weights", state), state[f"round/asked/{number}"]
    assert isinstance(asked, Ragged)  # from `ask`
    with torch.enable_grad():
        _, total = objective(cfg, block, state, key, weights, received)
        (grad,) = torch.autograd.grad(total, leaf)
    batch = stages_of(cfg, block, state, key, 0)[-1].leaving
    client = owners(asked.off)
    rows = grad * batch.off.diff()[client].to(grad.dtype)[:, None]
    return state, {"rows": Ragged(rows, asked.off), "slot": asked}


def take_back(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep the gradients of the rows that were sent. In: `stage`, `sum` (k, O), `row` (k,)."""
    del block, key
    number, total, row = _shared_stage(cfg, inbox), inbox["sum"], inbox["row"]
    sent, width = state[f"round/wanted/{number}"], width_of(cfg, number)
    assert isinstance(total, Ragged)  # from `relay_sum`
    if not torch.equal(sent.t, row.t) or total.t.shape != (len(sent.t), width):
        raise ProtocolError(
            f"expected a gradient of {width} values for each row that was sent, got others"
        )
    return {**state, f"round/returned/{number}": total}, {}
