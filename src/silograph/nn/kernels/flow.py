"""FedGrAINS' sampler: a flow network chooses the nodes of a step, and learns from its loss.

What `silograph.sampling.fedgrains` does with torch, one client after the other. The union of a hop
are the rows chosen so far and all their neighbors. Its rows are numbered in the order in which
they are found, so that those of a hop are the first ones of the next.

C: clients. n: rows. E: edges. U: used rows of the network's first matrix; u: of one client. H: its
width. Q: its other weights: rows of the indicator, bias, last matrix,
last bias, and z, if it is learned. L: layers of the model.
"""

from typing import Any, NamedTuple

import numpy as np

from silograph.core.key import GOLDEN, hash_text
from silograph.core.numba_extensions import pointer_to
from silograph.nn.kernels.arrays import (
    LINEAR,
    SUM,
    ZERO,
    Array,
    CalledArrays,
    Filled,
    InputArrays,
    ModelShape,
    ParamArrays,
    RowArrays,
    Scratch,
    Spare,
    StepRule,
    TrainedWeights,
    Weights,
    clear,
    compiled,
    kernel,
)
from silograph.nn.kernels.draws import fold, mix, shuffled
from silograph.nn.kernels.layers import (
    add_sum,
    gather,
    map_first,
    product,
    rectify,
    step_first,
    table,
)
from silograph.nn.kernels.masks import matrix
from silograph.nn.kernels.optim import step
from silograph.nn.kernels.training import (
    StepArrays,
    say,
    take_step,
    weights_of,
)

_GUMBEL, _GOLDEN, _11 = (np.uint64(number) for number in (hash_text("gumbel"), GOLDEN, 11))


class FlowShape(NamedTuple):
    """The sampler."""

    memory: ModelShape  # a model whose memory has room for the hops of the network
    hop: Array  # (L,) of each layer of the model; nothing is drawn for linear ones
    hops: int  # that a step draws
    layers: int  # that the indicator has a row for, and one more
    width: int  # H
    k: int
    scores: bool  # whether a network scores candidates; else all are alike
    learns: bool
    learns_z: bool
    gated: bool  # whether it learns from the gates of messages; else from the balance
    odds: bool  # whether logits are drawn by; else log p
    alpha: float
    steps: StepRule
    z_steps: StepRule


class LinkArrays(NamedTuple):
    """What convolutions scale by in what was chosen; `weight` is empty: by the client's degrees."""

    weight: Array  # (E,) of edges
    before: Array  # (d,) the sender's scale, by degree
    after: Array  # the receiver's
    own: Array  # weight of a row's own z


class FlowArrays(NamedTuple):
    """The networks of the called clients, changed in place."""

    rows: Array  # (U, H)
    first_rows: Array  # moments
    second_rows: Array
    flat: Array  # (C, Q)
    first_flat: Array
    second_flat: Array
    used_off: Array  # (C + 1,)
    steps: Array  # (C,) taken so far
    work: Array  # (C, 4) rows, edges, features and candidates of unions, counted


class Flow(NamedTuple):
    """Memory of one thread. Of `s`, m[1 + h] are the rows of the union of hop h."""

    s: Scratch
    hop: Array  # (n,) hop after which a row of the union was chosen, -1: it was not
    degree: Array  # (n,) in the union, or in what was chosen
    at: Array  # (n,)
    logit: Array  # (hops, n), then what log P_F gains by them
    score: Array  # (n,) float64, the best first
    best: Array  # (n,) whose they are
    spare: Array  # (n,) scales, then sums
    row: Array  # (n,) place in the union of each row of the model's layers that was chosen


def flow_memory(s: Scratch, hops: int) -> Flow:
    """Return the memory of a thread around that of its network."""
    n = len(s.nodes)
    return Flow(
        s=s,
        hop=np.empty(n, np.int64),
        degree=np.empty(n, np.int64),
        at=np.empty(n, np.int64),
        logit=np.empty((hops, n), s.z.dtype),
        score=np.empty(n, np.float64),
        best=np.empty(n, np.int64),
        spare=np.empty(n, s.z.dtype),
        row=np.empty(n, np.int64),
    )


@compiled
def own_flow(of: FlowArrays, k: int) -> TrainedWeights:
    """Return the network of client k with its moments."""
    lo, hi = of.used_off[k], of.used_off[k + 1]
    w = Weights(of.rows[lo:hi], of.rows[lo:hi], of.flat[k])
    one = Weights(of.first_rows[lo:hi], of.first_rows[lo:hi], of.first_flat[k])
    two = Weights(of.second_rows[lo:hi], of.second_rows[lo:hi], of.second_flat[k])
    start = Weights(w.first[:0], w.first[:0], w.flat[:0])
    return TrainedWeights(w, start, one, two, None)


@compiled
def begin_union(seeds: Array, f: Flow) -> None:
    """Let a union begin with the training rows of a step."""
    for i in range(seeds.shape[0]):
        f.s.nodes[i], f.s.place[seeds[i]], f.hop[i] = seeds[i], i, 0
    f.s.m[0] = seeds.shape[0]


@compiled
def end_union(f: Flow) -> None:
    """Leave no row marked."""
    for i in range(f.s.m[0]):
        f.s.place[f.s.nodes[i]] = -1


@compiled
def add_neighbors(rows: RowArrays, a: int, f: Flow) -> None:
    """Add all neighbors of chosen rows to the union, and count edges at chosen rows and loops."""
    nodes, place, known, m = f.s.nodes, f.s.place, f.s.m[0], f.s.m[0]
    degree, chosen, ptr, col = f.degree, f.hop, rows.ptr, rows.col
    for i in range(known):
        degree[i] = 1
    for i in range(known):
        if chosen[i] < 0:
            continue
        row = a + nodes[i]
        degree[i] += ptr[row + 1] - ptr[row]
        for e in range(ptr[row], ptr[row + 1]):
            c = col[e]
            if place[c] < 0:
                place[c], nodes[m], chosen[m], degree[m] = m, c, -1, 1
                m += 1
            if chosen[place[c]] < 0:
                degree[place[c]] += 1
    f.s.m[0] = m


@compiled
def fill_operator(rows: RowArrays, a: int, hop: int, f: Flow) -> None:
    """Fill the edges of a hop with D^-1/2 (A + I) D^-1/2 of its union, which is symmetric."""
    s, m, one = f.s, f.s.m[0], f.s.value.dtype.type(1)
    at, degree, scale, chosen = f.at, f.degree, f.spare, f.hop
    ptr, col, values, place = s.ptr, s.col, s.value, s.place
    end = ptr[hop - 1, s.m[hop]] if hop > 0 else 0
    ptr[hop, 0] = end
    for i in range(m):
        at[i] = end
        end += degree[i]
        ptr[hop, i + 1] = end
        scale[i] = one / np.sqrt(values.dtype.type(degree[i]))
    for i in range(m):
        col[at[i]], values[at[i]] = i, scale[i] * scale[i]
        at[i] += 1
    for i in range(m):
        if chosen[i] < 0:
            continue
        row = a + s.nodes[i]
        for e in range(rows.ptr[row], rows.ptr[row + 1]):
            j = place[rows.col[e]]
            value = scale[i] * scale[j]
            col[at[i]], values[at[i]] = j, value
            at[i] += 1
            if chosen[j] < 0:  # edges between rows that are not chosen are left out
                col[at[j]], values[at[j]] = i, value
                at[j] += 1


@compiled
def hidden(hop: int, width: int, m: int, f: Flow) -> tuple[Array]:
    """Return the memory of the hidden rows of a hop's union, (m, H); see `compiled`."""
    return table(f.s.act, hop * f.s.nodes.shape[0] * width, m, width)


@compiled
def indicated(hop: int, i: int, f: Flow) -> int:
    """Return the layer in which row i of a hop's union was chosen, or would be."""
    return hop + 1 if f.hop[i] < 0 else min(f.hop[i], hop + 1)


@compiled
def score(
    rows: RowArrays, x: InputArrays, k: int, shape: FlowShape, hop: int, w: Weights, f: Flow
) -> None:
    """Fill the logits of a hop's union: a graph convolution of two layers."""
    s, m, width, n = f.s, f.s.m[0], shape.width, f.s.nodes.shape[0]
    bias = (shape.layers + 1) * width
    last, z, h = bias + width, table(s.z, ZERO, m, width)[0], hidden(hop, width, m, f)[0]
    drawn = shape.memory.fanout is not None  # it is; a literal would be compiled anew
    gather(rows, x, k, drawn, s)
    map_first(rows, x, k, drawn, x.col, w.first, z, s)
    for i in range(m):
        row = indicated(hop, i, f) * width
        for j in range(width):
            z[i, j] += w.flat[row + j]
            h[i, j] = w.flat[bias + j]
    starts, ends = s.ptr[hop][:m], s.ptr[hop][1 : m + 1]
    add_sum(starts, ends, s.col, s.value, z, h)
    rectify(h)
    y, logit = table(f.spare, ZERO, m, 1)[0], table(f.logit.reshape(-1), hop * n, m, 1)[0]
    product(h, table(w.flat, last, width, 1)[0], y)
    for i in range(m):
        logit[i, 0] = w.flat[last + width]
    add_sum(starts, ends, s.col, s.value, y, logit)


@compiled
def log_sigmoid(v: Any, zero: Any) -> Any:
    """Return log(1 / (1 + exp(-v))); `zero` is 0 in the type of v."""
    return min(v, zero) - np.log1p(np.exp(-abs(v)))


@compiled
def choose(rows: RowArrays, a: int, shape: FlowShape, hop: int, key: Any, f: Flow) -> int:
    """Note the candidates of a hop with the k highest scores in `f.best`; return how many."""
    s, held, most, gumbel = f.s, 0, min(shape.k, f.best.shape[0]), fold(key, _GUMBEL)
    zero = f.logit.dtype.type(0)
    score, best, logit, chosen, nodes = f.score, f.best, f.logit, f.hop, s.nodes
    for i in range(s.m[0]):
        if chosen[i] >= 0:
            continue
        word = mix(mix(rows.row_key[a + nodes[i]] ^ gumbel) + _GOLDEN)
        noise = -np.log(-np.log(float(word >> _11) * 2.0**-53))
        drawn_by = logit[hop, i] if shape.odds else log_sigmoid(logit[hop, i], zero)
        value = float(drawn_by) + noise
        if held == most and not value > score[held - 1]:
            continue
        at = min(held, most - 1)
        while at > 0 and score[at - 1] < value:
            score[at], best[at] = score[at - 1], best[at - 1]
            at -= 1
        score[at], best[at] = value, i
        held = min(held + 1, most)
    return held


@compiled
def enter_chosen(layer: int, hop: int, count: int, s: Scratch, f: Flow) -> None:
    """Let chosen candidates of a hop enter a layer of the model besides the rows that leave it."""
    m = s.m[layer + 1]
    for b in range(count):
        i = f.best[b]
        f.hop[i], f.row[m] = hop + 1, i
        s.nodes[m], s.place[f.s.nodes[i]] = f.s.nodes[i], m
        m += 1
    s.m[layer] = m


@compiled
def log_forward(hop: int, f: Flow) -> float:
    """Return log P_F of the choice of a hop; its gradient takes the place of the logits."""
    logit, total, chosen = f.logit[hop], 0.0, f.hop
    zero, one = logit.dtype.type(0), logit.dtype.type(1)
    for i in range(f.s.m[0]):
        if 0 <= chosen[i] <= hop:
            logit[i] = zero
        else:
            sign = one if chosen[i] > 0 else -one
            v = sign * logit[i]
            total += log_sigmoid(v, zero)
            logit[i] = sign / (one + np.exp(v))
    return total


@compiled
def credit_chosen(shape: ModelShape, flow: FlowShape, s: Scratch, f: Flow) -> None:
    """Let the gradients of the scores of chosen nodes, their credits, take the place of logits.

    The mean credit of a hop is subtracted: only what is better than others is chosen more often.
    """
    credit, one = s.credit, s.credit.dtype.type(1)
    for layer in range(shape.layers):
        first, end = s.m[layer + 1], s.m[layer]
        if shape.form[layer] == LINEAR:
            continue
        hop, total = flow.hop[layer], 0.0
        logit = f.logit[hop]
        for j in range(first, end):
            total += credit[j]
        mean = credit.dtype.type(total / max(end - first, 1))
        for j in range(first, end):
            slope = one if flow.odds else one / (one + np.exp(logit[f.row[j]]))
            credit[j] = (credit[j] - mean) * slope
        for i in range(f.s.m[1 + hop]):
            logit[i] = 0
        for j in range(first, end):
            logit[f.row[j]] = credit[j]


@compiled
def link(
    rows: RowArrays, a: int, shape: ModelShape, layer: int, links: LinkArrays, s: Scratch
) -> None:
    """Fill the edges of a layer: all between rows that enter it and those that leave it.

    A row's own z is an edge, too, where it is summed.
    """
    sampled, form, left = links.weight.shape[0] > 0, shape.form[layer], s.m[layer + 1]
    at = s.ptr[layer + 1, s.m[layer + 2]] if layer + 1 < shape.layers else 0
    ptr, col, value, place, neighbor = s.ptr, s.col, s.value, s.place, rows.col
    weight = links.weight if sampled else rows.value
    ptr[layer, 0] = at
    for i in range(left):
        row = a + s.nodes[i]
        end = rows.ptr[row] if form == LINEAR else rows.ptr[row + 1]
        for e in range(rows.ptr[row], end):
            p = place[neighbor[e]]
            if p >= 0:
                col[at], value[at] = p, weight[e]
                at += 1
        if form == SUM:
            col[at], value[at] = i, rows.own[row]
            at += 1
        ptr[layer, i + 1] = at


@compiled
def scale_links(layer: int, looped: bool, links: LinkArrays, degree: Array, s: Scratch) -> None:
    """Scale the edges of a layer by the degrees in what was chosen."""
    left, ptr, col, value = s.m[layer + 1], s.ptr[layer], s.col, s.value
    before, after, own = links.before, links.after, links.own
    for i in range(s.m[layer]):
        degree[i] = ptr[i + 1] - ptr[i] - looped if i < left else 0
    for e in range(ptr[0], ptr[left]):
        degree[col[e]] += col[e] >= left
    for i in range(left):
        for e in range(ptr[i], ptr[i + 1]):
            value[e] *= after[degree[i]] * before[degree[col[e]]]
        if looped:
            value[ptr[i + 1] - 1] = own[degree[i]]


@compiled
def hidden_gradient(hop: int, width: int, m: int, w: Weights, last: int, f: Flow) -> tuple[Array]:
    """Add the gradients of the last matrix and both biases; return that of X W, (m, H).

    The gradients of the logits are in `f.logit`.
    """
    s, g, bias = f.s, f.s.flat, last - width
    starts, ends = s.ptr[hop][:m], s.ptr[hop][1 : m + 1]
    logit = table(f.logit.reshape(-1), hop * s.nodes.shape[0], m, 1)[0]
    y, h, z = (
        table(f.spare, ZERO, m, 1)[0],
        hidden(hop, width, m, f)[0],
        table(s.z, ZERO, m, width)[0],
    )
    input_gradient, zero = table(s.grad[1], ZERO, m, width)[0], h.dtype.type(0)
    clear(y)
    clear(z)
    add_sum(starts, ends, s.col, s.value, logit, y)
    for i in range(m):
        g[last + width] += logit[i, 0]
        for j in range(width):
            g[last + j] += y[i, 0] * h[i, j]
            input_gradient[i, j] = y[i, 0] * w.flat[last + j] if h[i, j] > 0 else zero
            g[bias + j] += input_gradient[i, j]
    add_sum(starts, ends, s.col, s.value, input_gradient, z)
    return (z,)


@compiled
def balanced(shape: FlowShape, w: Weights, log_p: float, loss: float, num_steps: int) -> float:
    """Return what is squared in the trajectory balance; z starts where it is 0."""
    balance, z = log_p + shape.alpha * loss, w.flat.shape[0] - 1
    if not shape.learns_z:
        return balance
    if num_steps == 0:
        w.flat[z] = -balance / shape.alpha
        return 0.0
    return balance + shape.alpha * float(w.flat[z])


@compiled
def learn(
    rows: RowArrays,
    x: InputArrays,
    k: int,
    shape: FlowShape,
    own: TrainedWeights,
    balance: float,
    t: int,
    f: Flow,
) -> None:
    """Take step t of Adam on the trajectory balance of what the hops' logits hold."""
    s, m, width, w, grad = f.s, f.s.m[0], shape.width, own.weights, f.s.flat
    last = (shape.layers + 2) * width
    total, size = table(s.grad[0], ZERO, m, width)[0], last + width + 1
    clear(total)
    for i in range(grad.shape[0]):
        grad[i] = 0
    factor = grad.dtype.type(2 * balance)
    for hop in range(shape.hops):
        many = s.m[1 + hop]
        for i in range(many):
            f.logit[hop, i] *= factor
        z = hidden_gradient(hop, width, many, w, last, f)[0]
        for i in range(many):
            row = indicated(hop, i, f) * width
            for j in range(width):
                grad[row + j] += z[i, j]
                total[i, j] += z[i, j]
    if shape.gated and shape.odds:  # a shift of logits changes no draw: only rounding is left
        grad[last + width] = 0
    step_first(rows, x, shape.memory, k, total, pointer_to(matrix(own, False)), shape.steps, t, s)
    p, one, two = w.flat, own.first.flat, own.second.flat
    step(p[:size], grad[:size], p[:0], one[:size], two[:size], shape.steps, t)
    if shape.learns_z:
        grad[size] = factor * grad.dtype.type(shape.alpha)
        step(p[size:], grad[size:], p[:0], one[size:], two[size:], shape.z_steps, t)


# --- flow training -------------------------------------------------------------------------------
# Whole local training of a range of clients whose flow networks choose the nodes of a step.


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


@compiled
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


@compiled
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
                if not by.shape.gated:
                    total += log_forward(hop, f)
                own.work[3] += f.s.m[0] - s.m[layer + 1]
        link(rows, a, shape, layer, by.links, s)
        if by.links.weight.shape[0] > 0:
            scale_links(layer, shape.form[layer] == SUM, by.links, f.degree, s)
    for i in range(s.m[0]):
        s.place[s.nodes[i]] = -1
    end_union(f)
    return total


@compiled
def train_client(
    rows: RowArrays,
    of: StepArrays,
    k: int,
    own: TrainedWeights,
    num_steps: tuple[int, int],
    by: FlowSampling,
    network: OwnFlow,
    key: Any,
    s: Scratch,
    work: Array,
) -> tuple[float, int, int]:
    """Train client k and its network in place; see `training.train_client`.

    Return its mean loss in the last epoch, and steps taken in all, of the model and of the network;
    `num_steps` has those of before. `of.rows` are rows without weights of their own z.
    """
    shape, f, (steps, learned) = of.shape, network.f, num_steps
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
            step_loss = take_step(of, k, seeds, own, steps, step_key, s, work)
            for layer in range(shape.layers):  # a row itself is no edge
                if shape.form[layer] == SUM:
                    work[shape.layers + 1 + layer] -= s.m[layer + 1]
            if by.shape.learns:
                mine, balance = network.weights, 0.5  # which `learn` doubles
                if by.shape.gated:
                    credit_chosen(shape, by.shape, s, f)
                else:
                    balance = balanced(by.shape, mine.weights, log_p, step_loss, learned)
                learned += 1
                learn(rows, by.inputs, k, by.shape, mine, balance, learned, f)
            loss += seeds.shape[0] / size * step_loss
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
    buffers: Buffers,
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
        buffers: memory that this thread alone uses.
    """
    train_range(
        k0,
        k1,
        pointer_to(called),
        pointer_to(rows),
        pointer_to(of),
        pointer_to(params),
        pointer_to(by),
        key,
        pointer_to(filled),
        pointer_to(buffers),
    )


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
    """Do what `train_flow` does."""
    x, flows, s, memory = of.x, by.flows, buffers.s, buffers.memory
    for k in range(k0, k1):
        g, own = called.position[k], pointer_to(weights_of(called, x, params, k, memory))
        network = pointer_to(OwnFlow(pointer_to(own_flow(flows, k)), buffers.f, flows.work[k]))
        if rows.train_off[g + 1] > rows.train_off[g]:
            num_steps = params.steps[k], flows.steps[k]
            filled.loss[k], params.steps[k], flows.steps[k] = train_client(
                rows, of, g, own, num_steps, by, network, key, s, filled.work[k]
            )
        say(called, of, k, rows, own, params.rows.shape[0], s, filled.logits)
