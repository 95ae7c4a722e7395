"""Steps on stored rows: each client through all of its batches between two exchanges.

What `silograph.nn.stored_rows.step_` does with torch: a batch's rows are worked out, all other
senders are read as they are stored, and no gradient flows into them. Batches are drawn before; what
they store of their rows is read by the client's later ones.

J: batches. C: clients. b: rows of batches, batch after batch, each by client. o: own rows that only
send. h: slots that send. W: widths of all stored stages together.
"""

from typing import Any, NamedTuple

import numpy as np

from silograph.core.key import hash_text
from silograph.core.numba_extensions import keep_until_here, pointer_to
from silograph.nn.kernels.arrays import (
    LINEAR,
    ROOTED,
    SUM,
    ZERO,
    Array,
    CalledArrays,
    InputArrays,
    ModelShape,
    RowArrays,
    StepRule,
    TrainedWeights,
    Weights,
    add_rows,
    allocating,
    clear,
    clear_row,
    compiled,
    copy,
    kernel,
)
from silograph.nn.kernels.draws import drop, fold
from silograph.nn.kernels.layers import (
    add_back,
    add_columns,
    add_sum,
    product,
    rectify,
    step_later,
    table,
)
from silograph.nn.kernels.optim import adam_factors, adam_step, sgd, step
from silograph.nn.kernels.training import bits_gradient, softmax_gradient

_DROPOUT = np.uint64(hash_text("dropout"))


class SenderArrays(NamedTuple):
    """Who sends in a stage besides the batch's rows. Batch j of client k is number j C + k."""

    rows: Array  # (o,) row of the client
    off: Array  # (J C + 1,)
    slot: Array  # (h,) where `BatchArrays.halo` has what is stored of slots
    slot_key: Array  # (h,) uint64
    slot_off: Array  # (J C + 1,)
    ptr: Array  # (b + 1,) edges of every row
    col: Array  # sender: the batch's rows first, then `rows`, then slots
    value: Array  # both scales, times how many edges it stands for
    own: Array  # (b,) weight of the row's own z (GCN)


class BatchArrays(NamedTuple):
    """Batches of all clients, of which some are trained on."""

    key: Array  # (J,) uint64
    clients: int  # C
    begin: int  # number of the first batch that is trained on
    end: int
    rows: Array  # (b,) row of the client
    off: Array  # (J C + 1,)
    share: Array  # (b,) weight of the row's loss
    first: SenderArrays
    later: SenderArrays
    own: Array  # (n, W) stored rows, changed in place
    halo: Array  # (s, W) stored rows of slots
    place: Array  # (L,) where in them is what enters a layer; -1: it is not stored
    loss: Array  # (b,) float64, filled


class Trained(NamedTuple):
    """Weights, or moments of them, of all clients: U used rows, or C F."""

    first: Array  # (U, D)
    second: Array  # (U, D), the first again where there is only one
    flat: Array  # (C, P)


class TrainingArrays(NamedTuple):
    """Clients in training, changed in place."""

    weights: Trained
    first: Trained  # moments, which Adam does not read before its first step; or velocities
    second: Trained
    moves: Array  # (U,) bool, rows with moments; those of other rows are uninitialized memory
    root_moves: Array  # (U,) bool, the same for the second matrix
    steps: Array  # (C,) taken so far


class FirstMatrix(NamedTuple):
    """A matrix of a client in training that features are multiplied with.

    A row with moments moves in every step, also where its gradient is 0. Such steps are put off
    until a batch reads the row, or until the last batch: then the row takes all of them while it is
    in the processor's cache.
    """

    weights: Array  # (u, D)
    first: Array  # (u, D) moments, or velocities
    second: Array
    moves: Array  # (u,) bool, rows with moments
    done: Array  # (u,) number of the last step that each row has taken, whether it moved or not


class Memory(NamedTuple):
    """Memory of one thread, for its largest batch (m rows that send)."""

    h: Array  # what enters each layer, layer after layer
    z: Array  # (m * widest,)
    root: Array  # (m * widest,)
    out: Array  # (m, K)
    grad: Array  # (2, m * widest)
    flat: Array  # (P,)
    rows: Array  # (u, D)
    done: Array  # (2, u) for `FirstMatrix.done` of the two first matrices
    zeros: Array  # (D,) a gradient of 0
    factors: Array  # (2, N) float64, `adam_factors` of N steps: those of step t at t modulo N
    start: Array  # (m,) entries of sparse features
    end: Array
    words: Array  # random words of dropout
    levels: Array


@compiled
def senders_of(batch: BatchArrays, shape: ModelShape, layer: int, i: int) -> tuple[int, int]:
    """Return how many own rows and slots send in a layer of a batch besides its own rows."""
    if shape.form[layer] == LINEAR:
        return 0, 0
    side = batch.later if layer > 0 else batch.first
    return side.off[i + 1] - side.off[i], side.slot_off[i + 1] - side.slot_off[i]


@allocating
def memory(
    batch: BatchArrays, x: InputArrays, shape: ModelShape, k0: int, k1: int, used: int, w: Trained
) -> Memory:
    """Return memory for the batches of clients k0 to k1."""
    m = 1
    for i in range(batch.begin * batch.clients, batch.end * batch.clients):
        if k0 <= i % batch.clients < k1:
            for layer in range(min(shape.layers, 2)):
                others, slots = senders_of(batch, shape, layer, i)
                m = max(m, batch.off[i + 1] - batch.off[i] + others + slots)
    inputs = shape.act[shape.layers - 1] + (shape.width[0] if x.dense.shape[0] > 0 else 0)
    dtype, widest = w.flat.dtype, shape.widest
    words = np.empty((max(widest, shape.width[0]) + 3) // 4, np.uint64)
    return Memory(
        h=np.empty(m * inputs, dtype),
        z=np.empty(m * widest, dtype),
        root=np.empty(m * widest, dtype),
        out=np.empty((m, shape.outputs), dtype),
        grad=np.empty((2, m * widest), dtype),
        flat=np.empty(w.flat.shape[1], dtype),
        rows=np.empty((used, w.first.shape[1]), dtype),
        done=np.empty((2, used), np.int64),
        zeros=np.zeros(w.first.shape[1], dtype),
        factors=np.empty((2, batch.end - batch.begin)),
        start=np.empty(m, np.int64),
        end=np.empty(m, np.int64),
        words=words,
        levels=words.view(np.uint16),
    )


@compiled
def entering(shape: ModelShape, layer: int, m: int, most: int, s: Memory) -> tuple[Array]:
    """Return the memory of what enters a layer, (m, I); of features, where they are dense.

    It is in a tuple, see `compiled`.
    """
    start = shape.act[layer - 1] * most if layer > 0 else shape.act[shape.layers - 1] * most
    return table(s.h, start, m, shape.width[layer])


@compiled
def gather_features(
    x: InputArrays,
    shape: ModelShape,
    a: int,
    batch: BatchArrays,
    i: int,
    s: Memory,
) -> None:
    """Look up the features of the batch's rows and of those that send to them."""
    lo, size = batch.off[i], batch.off[i + 1] - batch.off[i]
    others, _ = senders_of(batch, shape, 0, i)
    at, own, other = batch.first.off[i], batch.rows, batch.first.rows
    starts, ends, ptr = s.start, s.end, x.ptr
    for j in range(size + others):
        row = a + (own[lo + j] if j < size else other[at + j - size])
        if x.dense.shape[0] == 0:
            starts[j], ends[j] = ptr[row], ptr[row + 1]
        else:
            h = entering(shape, 0, size + others, s.out.shape[0], s)[0]
            copy(x.dense[row], h[j])


@compiled
def gather_stored(
    rows: RowArrays,
    shape: ModelShape,
    a: int,
    first_row: int,
    layer: int,
    batch: BatchArrays,
    i: int,
    key: Any,
    s: Memory,
) -> None:
    """Store what enters a layer of the batch's rows, add what is stored of senders; drop."""
    lo, size = batch.off[i], batch.off[i + 1] - batch.off[i]
    others, slots = senders_of(batch, shape, layer, i)
    width, at = shape.width[layer], batch.place[layer]
    h = entering(shape, layer, size + others + slots, s.out.shape[0], s)[0]
    side, layer_key = batch.later, fold(fold(key, _DROPOUT), layer)
    dropping = shape.threshold > 0
    for j in range(size + others + slots):
        if j < size:
            row = batch.rows[lo + j]
            row_key = rows.row_key[a + row]
            if at >= 0:
                copy(h[j], batch.own[first_row + row, at : at + width])
        elif j < size + others:
            row = side.rows[side.off[i] + j - size]
            row_key = rows.row_key[a + row]
            copy(batch.own[first_row + row, at : at + width], h[j])
        else:
            slot = side.slot_off[i] + j - size - others
            row_key = side.slot_key[slot]
            copy(batch.halo[side.slot[slot], at : at + width], h[j])
        if dropping:
            drop(h, j, row_key, layer_key, shape.threshold, shape.scale, s)


@compiled
def forward(
    rows: RowArrays,
    x: InputArrays,
    shape: ModelShape,
    g: int,
    first_row: int,
    batch: BatchArrays,
    i: int,
    w: Weights,
    key: Any,
    s: Memory,
) -> None:
    """Fill `s.out` with the logits of a batch, and `s.h` with the inputs of all layers.

    `gather_features` has filled in the features.
    """
    a, lo, hi = rows.off[g], batch.off[i], batch.off[i + 1]
    size, most, last = hi - lo, s.out.shape[0], shape.layers - 1
    for layer in range(shape.layers):
        form, inputs, width = shape.form[layer], shape.width[layer], shape.width[layer + 1]
        others, slots = senders_of(batch, shape, layer, i)
        m = size + others + slots
        if layer > 0:
            gather_stored(rows, shape, a, first_row, layer, batch, i, key, s)
        z, root = table(s.z, ZERO, m, width)[0], table(s.root, ZERO, size, width)[0]
        has_rows = layer > 0 or x.dense.shape[0] > 0
        h = entering(shape, layer, m, most, s)[0] if has_rows else s.out
        if layer > 0:
            product(h, table(w.flat, shape.place[layer, 0], inputs, width)[0], z)
            if form == ROOTED:
                own_weights = table(w.flat, shape.place[layer, 1], inputs, width)[0]
                product(h[:size], own_weights, root)
        elif x.dense.shape[0] > 0:
            product(h, w.first, z)
            if form == ROOTED:
                product(h[:size], w.second, root)
        else:
            clear(z)
            add_sum(s.start[:m], s.end[:m], x.col, x.value, w.first, z)
            if form == ROOTED:
                clear(root)
                add_sum(s.start[:size], s.end[:size], x.col, x.value, w.second, root)
        out = s.out[:size] if layer == last else entering(shape, layer + 1, size, most, s)[0]
        side = batch.later if layer > 0 else batch.first
        bias = w.flat[shape.place[layer, 2] : shape.place[layer, 2] + width]
        own, scale = root if form == ROOTED else z, side.own
        for j in range(size):
            weight = scale[lo + j] if form == SUM else z.dtype.type(1)
            for c in range(width):
                out[j, c] = bias[c] + weight * own[j, c]
        if form != LINEAR:
            add_sum(side.ptr[lo:hi], side.ptr[lo + 1 : hi + 1], side.col, side.value, z, out)
        if layer < last:
            rectify(out)


@compiled
def loss_gradient(
    rows: RowArrays, shape: ModelShape, a: int, batch: BatchArrays, i: int, s: Memory
) -> None:
    """Replace logits by the gradient of the weighted losses of the batch; note the losses."""
    lo = batch.off[i]
    for j in range(batch.off[i + 1] - lo):
        y, weight = rows.y[a + batch.rows[lo + j]], batch.share[lo + j]
        if shape.multilabel:
            batch.loss[lo + j] = bits_gradient(s.out, j, y, weight)
        else:
            batch.loss[lo + j] = softmax_gradient(s.out, j, y[0], weight)


@compiled
def stay_without_data(steps: StepRule) -> bool:
    """Whether rows with neither a gradient nor moments stay where they are."""
    return steps.decay == 0 and steps.mu == 0


@compiled
def step_row(
    matrix: FirstMatrix, row: int, g: Array, steps: StepRule, t: int, factors: Array
) -> None:
    """Take step number t of a row along its gradient g (D,)."""
    p, m = matrix.weights[row], matrix.first[row]
    if steps.adam:
        number = t % factors.shape[1]
        adam_step(p, g, m, matrix.second[row], steps, t, factors[0, number], factors[1, number])
    else:
        sgd(p, g, m, steps, t)


@compiled
def catch_up(matrix: FirstMatrix, row: int, steps: StepRule, t: int, s: Memory) -> None:
    """Take the steps of a row up to number t that it has not taken; its gradient was 0 in them."""
    if matrix.moves[row]:
        for number in range(matrix.done[row], t):
            step_row(matrix, row, s.zeros, steps, number + 1, s.factors)
    matrix.done[row] = t


@compiled
def catch_up_read(
    x: InputArrays, matrix: FirstMatrix, m: int, steps: StepRule, t: int, s: Memory
) -> None:
    """Take the steps up to number t of the weights' rows that m rows of features read."""
    for j in range(m):
        for e in range(s.start[j], s.end[j]):
            if matrix.done[x.col[e]] < t:
                catch_up(matrix, x.col[e], steps, t, s)


@compiled
def catch_up_all(matrix: FirstMatrix, steps: StepRule, t: int, s: Memory) -> None:
    """Take the steps up to number t of all rows."""
    for row in range(matrix.moves.shape[0]):
        if matrix.moves[row]:
            catch_up(matrix, row, steps, t, s)


@compiled
def step_first(
    x: InputArrays,
    shape: ModelShape,
    gz: Array,
    matrix: FirstMatrix,
    steps: StepRule,
    t: int,
    s: Memory,
) -> None:
    """Take step number t of a first matrix along its gradient, the transposed features times gz."""
    grad, m = s.rows[: matrix.weights.shape[0]], gz.shape[0]
    if x.dense.shape[0] > 0:
        product(entering(shape, 0, m, s.out.shape[0], s)[0].T, gz, grad)
    elif stay_without_data(steps):
        # Only rows that the batch reads have a gradient; `done` marks them. Moments begin with 0 at
        # the first gradient of a row.
        has_moments, done = steps.adam or steps.beta1 > 0, matrix.done
        starts, ends, col = s.start, s.end, x.col
        for j in range(m):
            for e in range(starts[j], ends[j]):
                done[col[e]] = t
        for row in range(done.shape[0]):
            if done[row] == t:
                clear_row(grad[row])
                if has_moments and not matrix.moves[row]:
                    matrix.moves[row] = True
                    clear_row(matrix.first[row])
                    if steps.adam:
                        clear_row(matrix.second[row])
        add_back(starts[:m], ends[:m], col, x.value, gz, grad)
        for row in range(done.shape[0]):
            if done[row] == t:
                step_row(matrix, row, grad[row], steps, t, s.factors)
        return
    else:
        clear(grad)
        add_back(s.start[:m], s.end[:m], x.col, x.value, gz, grad)
    p, m1 = matrix.weights.reshape(-1), matrix.first.reshape(-1)
    m2 = matrix.second.reshape(-1)
    step(p, grad.reshape(-1), p, m1, m2, steps, t)


@compiled
def backward_step(
    x: InputArrays,
    shape: ModelShape,
    batch: BatchArrays,
    i: int,
    trained: TrainedWeights,
    matrix: FirstMatrix,
    root: FirstMatrix,
    steps: StepRule,
    t: int,
    s: Memory,
) -> None:
    """Walk from the gradient of the logits in `s.out` to all weights, and step them."""
    w = trained.weights
    lo, hi = batch.off[i], batch.off[i + 1]
    size, most, turn = hi - lo, s.out.shape[0], 0
    for layer in range(shape.layers - 1, -1, -1):
        form, inputs, width = shape.form[layer], shape.width[layer], shape.width[layer + 1]
        at, at_self, at_bias = shape.place[layer, 0], shape.place[layer, 1], shape.place[layer, 2]
        others, slots = senders_of(batch, shape, layer, i)
        m = size + others + slots
        last = layer == shape.layers - 1
        g = s.out[:size] if last else table(s.grad[turn], ZERO, size, width)[0]
        gz = table(s.z, ZERO, m, width)[0]
        add_columns(g, s.flat[at_bias : at_bias + width])
        clear(gz)
        side = batch.later if layer > 0 else batch.first
        if form != ROOTED:
            own = side.own
            for j in range(size):
                weight = own[lo + j] if form == SUM else g.dtype.type(1)
                for c in range(width):
                    gz[j, c] = weight * g[j, c]
        if form != LINEAR:
            add_back(side.ptr[lo:hi], side.ptr[lo + 1 : hi + 1], side.col, side.value, g, gz)
        if layer == 0:
            step_first(x, shape, gz, matrix, steps, t, s)
            if form == ROOTED:
                step_first(x, shape, g, root, steps, t, s)
            continue
        h = entering(shape, layer, m, most, s)[0]
        input_gradient = table(s.grad[1 - turn], ZERO, size, inputs)[0]
        product(h.T, gz, table(s.flat, at, inputs, width)[0])
        product(gz[:size], table(w.flat, at, inputs, width)[0].T, input_gradient)
        if form == ROOTED:
            product(h[:size].T, g, table(s.flat, at_self, inputs, width)[0])
            more = table(s.root, ZERO, size, inputs)[0]
            product(g, table(w.flat, at_self, inputs, width)[0].T, more)
            add_rows(more, input_gradient)
        zero, factor = h.dtype.type(0), h.dtype.type(shape.scale if shape.threshold > 0 else 1.0)
        for j in range(size):
            for c in range(inputs):  # above 0 where neither ReLU nor dropout cut it
                input_gradient[j, c] = input_gradient[j, c] * factor if h[j, c] > 0 else zero
        turn = 1 - turn
    step_later(shape, trained, s.flat, steps, t)


@compiled
def part(of: Trained, k: int, lo: int, hi: int) -> Weights:
    """Return the weights of client k, which has used rows lo to hi."""
    return Weights(of.first[lo:hi], of.second[lo:hi], of.flat[k])


@kernel
def train_stored(
    k0: int,
    k1: int,
    called: CalledArrays,
    rows: RowArrays,
    x: InputArrays,
    shape: ModelShape,
    steps: StepRule,
    batch: BatchArrays,
    clients: TrainingArrays,
) -> None:
    """Train the called clients k0 to k1 on their batches, in order.

    Args:
        k0: first of the called clients.
        k1: end.
        called: where `rows` and `x` have them, which may have more.
        rows: rows of a block.
        x: its features.
        shape: the model.
        steps: optimizer.
        batch: the batches.
        clients: weights, moments and steps.
    """
    used, w = 1, clients.weights
    for k in range(k0, k1):
        used = max(used, called.used_off[k + 1] - called.used_off[k])
    batches, at, form = pointer_to(batch), pointer_to(x), pointer_to(shape)
    s = memory(batches, at, form, k0, k1, used, pointer_to(w))
    all_rows, rule, held = pointer_to(rows), pointer_to(steps), pointer_to(clients)
    to, own_memory = pointer_to(called), pointer_to(s)
    train_range(k0, k1, to, all_rows, at, form, rule, batches, held, own_memory)
    keep_until_here(s)


@compiled
def train_range(
    k0: int,
    k1: int,
    called: CalledArrays,
    rows: RowArrays,
    x: InputArrays,
    shape: ModelShape,
    steps: StepRule,
    batch: BatchArrays,
    clients: TrainingArrays,
    s: Memory,
) -> None:
    """Do what `train_stored` does, in memory that is there."""
    counts, stay = clients.steps, stay_without_data(steps)
    # Velocities are filled in already. `sgd` would clear them in step 1, so its count begins at 2.
    later = 0 if steps.adam else 1
    for k in range(k0, k1):
        g, lo, hi = called.position[k], called.used_off[k], called.used_off[k + 1]
        own, first = part(clients.weights, k, lo, hi), part(clients.first, k, lo, hi)
        second, moves, root_moves = (
            part(clients.second, k, lo, hi),
            clients.moves[lo:hi],
            clients.root_moves[lo:hi],
        )
        done, root_done = s.done[0, : hi - lo], s.done[1, : hi - lo]
        matrix = pointer_to(FirstMatrix(own.first, first.first, second.first, moves, done))
        root = pointer_to(
            FirstMatrix(own.second, first.second, second.second, root_moves, root_done)
        )
        trained = pointer_to(TrainedWeights(own, own, first, second, None))
        begin = counts[k] + later
        for row in range(hi - lo):
            done[row], root_done[row] = begin, begin
        for j in range(batch.begin, batch.end):
            i, t = j * batch.clients + k, counts[k] + later + 1
            if batch.off[i + 1] == batch.off[i]:
                continue
            if steps.adam:
                number = t % s.factors.shape[1]
                s.factors[0, number], s.factors[1, number] = adam_factors(steps, t)
            others, _ = senders_of(batch, shape, 0, i)
            gather_features(x, shape, rows.off[g], batch, i, s)
            if stay and x.dense.shape[0] == 0:
                size = batch.off[i + 1] - batch.off[i]
                catch_up_read(x, matrix, size + others, steps, t - 1, s)
                if shape.form[0] == ROOTED:
                    catch_up_read(x, root, size, steps, t - 1, s)
            forward(rows, x, shape, g, called.off[k], batch, i, trained.weights, batch.key[j], s)
            loss_gradient(rows, shape, rows.off[g], batch, i, s)
            counts[k] += 1
            backward_step(x, shape, batch, i, trained, matrix, root, steps, t, s)
        if stay and x.dense.shape[0] == 0:
            catch_up_all(matrix, steps, counts[k] + later, s)
            if shape.form[0] == ROOTED:
                catch_up_all(root, steps, counts[k] + later, s)
