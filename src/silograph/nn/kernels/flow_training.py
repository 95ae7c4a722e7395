"""Whole local training of a range of clients whose flow networks choose the nodes of a step."""

from typing import Any, NamedTuple

import numpy as np

from silograph.core.key import hash_text
from silograph.nn.kernels.arrays import (
    LINEAR,
    SUM,
    Array,
    CalledArrays,
    Filled,
    InputArrays,
    ModelShape,
    ParamArrays,
    RowArrays,
    Scratch,
    Spare,
    TrainedWeights,
    compiled,
    inlined,
    kernel,
)
from silograph.nn.kernels.draws import fold, shuffled
from silograph.nn.kernels.flow import (
    Flow,
    FlowArrays,
    FlowShape,
    LinkArrays,
    add_neighbors,
    balanced,
    begin_union,
    choose,
    end_union,
    enter_chosen,
    fill_operator,
    flow_memory,
    learn,
    link,
    log_forward,
    own_flow,
    scale_links,
    score,
)
from silograph.nn.kernels.training import (
    StepArrays,
    say,
    scratch,
    spare,
    take_step,
    weights_of,
)

_EPOCH, _BATCH = np.uint64(hash_text("epoch")), np.uint64(hash_text("batch"))
_NEIGHBORS = np.uint64(hash_text("neighbors"))


class FlowSampling(NamedTuple):
    """The sampler of a call."""

    shape: FlowShape
    links: LinkArrays
    inputs: InputArrays  # columns: rows of the network's first matrix
    flows: FlowArrays


class OwnFlow(NamedTuple):
    """A client's own network, and memory to use it."""

    weights: TrainedWeights
    f: Flow
    work: Array


class Buffers(NamedTuple):
    """Memory that one thread reuses for all its clients."""

    s: Scratch
    memory: Spare
    f: Flow


@inlined
def score_hop(
    rows: RowArrays,
    k: int,
    hop: int,
    by: FlowSampling,
    own: OwnFlow,
) -> None:
    """Find the union of a hop and score its candidates."""
    f, work, shape, x = own.f, own.work, by.shape, by.inputs
    s = f.s
    add_neighbors(rows, rows.off[k], f)
    m = s.m[0]
    s.m[1 + hop] = m
    if not shape.scores:
        for i in range(m):
            f.logit[hop, i] = 0
        return
    fill_operator(rows, rows.off[k], hop, f)
    score(rows, x, k, shape, hop, own.weights.weights, f)
    work[0] += m
    work[1] += s.ptr[hop, m] - s.ptr[hop, 0]
    if x.dense.shape[0] == 0:
        for i in range(m):
            work[2] += s.x_end[i] - s.x_start[i]


@inlined
def sample_flow(
    rows: RowArrays,
    k: int,
    shape: ModelShape,
    seeds: Array,
    by: FlowSampling,
    own: OwnFlow,
    key: Any,
    s: Scratch,
) -> float:
    """Choose what takes part in a step, from the last layer's rows (the seeds) down to the inputs.

    Fills what `draws.sample` fills. Returns log P_F of all hops.
    """
    a, f, total = rows.off[k], own.f, 0.0
    for i in range(seeds.shape[0]):
        s.nodes[i], s.place[seeds[i]] = seeds[i], i
    s.m[shape.layers] = seeds.shape[0]
    begin_union(seeds, f)
    for layer in range(shape.layers - 1, -1, -1):
        s.m[layer] = s.m[layer + 1]
        if shape.form[layer] != LINEAR:
            hop = by.shape.hop[layer]
            score_hop(rows, k, hop, by, own)
            count = choose(rows, a, by.shape, hop, fold(fold(key, _NEIGHBORS), layer), f)
            enter_chosen(layer, hop, count, s, f)
            if by.shape.learns:
                total += log_forward(hop, f)
                own.work[3] += f.s.m[0] - s.m[layer + 1]
        link(rows, a, shape, layer, by.links, s)
        if by.links.weight.shape[0] > 0:
            scale_links(layer, shape.form[layer] == SUM, by.links, f.degree, s)
    for i in range(s.m[0]):
        s.place[s.nodes[i]] = -1
    end_union(f)
    return total


@inlined
def train_client(
    rows: RowArrays,
    of: StepArrays,
    k: int,
    own: TrainedWeights,
    taken: tuple[int, int],
    by: FlowSampling,
    network: OwnFlow,
    key: Any,
    s: Scratch,
    work: Array,
) -> tuple[float, int, int]:
    """Train client k and its network in place; see `training.train_client`.

    Return its mean loss in the last epoch, and steps taken in all, of the model and of the network;
    `taken` has those of before. `of.rows` are rows without weights of their own z.
    """
    shape, f, (steps, learned) = of.shape, network.f, taken
    train = rows.train[rows.train_off[k] : rows.train_off[k + 1]]
    keys, size = rows.row_key[rows.off[k] : rows.off[k + 1]], train.shape[0]
    batch = size if shape.batch == 0 else min(shape.batch, size)
    loss = 0.0
    for epoch in range(shape.epochs):
        epoch_key = fold(fold(key, _EPOCH), epoch)
        order = train
        if batch < size:
            shuffled(train, keys, epoch_key, s.order)
            order = s.order[:size]
        loss = 0.0
        for b in range((size + batch - 1) // batch):
            step_key = fold(fold(epoch_key, _BATCH), b)
            seeds = order[b * batch : min((b + 1) * batch, size)]
            log_p = sample_flow(rows, k, shape, seeds, by, network, step_key, s)
            steps += 1
            found = take_step(of, k, seeds, own, steps, step_key, s, work)
            for layer in range(shape.layers):  # a row itself is no edge
                if shape.form[layer] == SUM:
                    work[shape.layers + 1 + layer] -= s.m[layer + 1]
            if by.shape.learns:
                mine = network.weights
                balance = balanced(by.shape, mine.weights, log_p, found, learned)
                learned += 1
                learn(rows, by.inputs, k, by.shape, mine, balance, learned, f)
            loss += seeds.shape[0] / size * found
    return loss, steps, learned


@kernel
def train_flow(
    k0: int,
    k1: int,
    called: CalledArrays,
    rows: RowArrays,
    of: StepArrays,
    params: ParamArrays,
    by: FlowSampling,
    key: Any,
    filled: Filled,
) -> None:
    """Do what `training.train` does, on nodes that flow networks choose.

    Args:
        k0: first of the called clients.
        k1: end.
        called: where `rows` and `of` have them, which may have more.
        rows: rows of a block.
        of: what training is of; its rows are without weights of rows' own z, which are edges in
            what is chosen.
        params: weights and moments, changed in place.
        by: the sampler; its networks are changed in place.
        key: key of the call, uint64.
        filled: what comes of it.
    """
    x, shape, clients, flows = of.x, of.shape, called.position[k0:k1], by.flows
    first = params.rows.shape[2]
    s = scratch(rows, x, shape, clients, params.flat, params.flat.shape[1], first)
    inner = scratch(
        rows, by.inputs, by.shape.memory, clients, flows.flat, flows.flat.shape[1], by.shape.width
    )
    memory, f = spare(params, of.steps, s.rows.shape[0]), flow_memory(inner, by.shape.hops)
    buffers = Buffers(s, memory, f)
    train_range(k0, k1, called, rows, of, params, by, key, filled, buffers)


@compiled
def train_range(
    k0: int,
    k1: int,
    called: CalledArrays,
    rows: RowArrays,
    of: StepArrays,
    params: ParamArrays,
    by: FlowSampling,
    key: Any,
    filled: Filled,
    buffers: Buffers,
) -> None:
    """Do what `train_flow` does, in memory that is there."""
    x, flows = of.x, by.flows
    s, memory, f = buffers
    for k in range(k0, k1):
        g, own = called.position[k], weights_of(called, x, params, k, memory)
        network = OwnFlow(own_flow(flows, k), f, flows.work[k])
        if rows.train_off[g + 1] > rows.train_off[g]:
            taken = params.steps[k], flows.steps[k]
            filled.loss[k], params.steps[k], flows.steps[k] = train_client(
                rows, of, g, own, taken, by, network, key, s, filled.work[k]
            )
        say(called, of, k, rows, own, params.rows.shape[0], s, filled.logits)
