"""Whole local training of a range of clients, and predictions for them."""

from typing import Any, NamedTuple

import numpy as np

from silograph.core.key import hash_text
from silograph.core.numba_extensions import pointer_to
from silograph.nn.kernels.arrays import (
    PREDICTING,
    TRAINING,
    ZERO,
    Array,
    CalledArrays,
    Filled,
    InputArrays,
    Masking,
    ModelShape,
    ParamArrays,
    RowArrays,
    Scratch,
    Spare,
    StepRule,
    TrainedWeights,
    Weights,
    compiled,
    copy,
    copy_rows,
    kernel,
)
from silograph.nn.kernels.draws import (
    after_dropout,
    drop_features,
    fold,
    sample,
    shuffled,
    whole,
)
from silograph.nn.kernels.layers import backward_step, forward
from silograph.nn.kernels.masks import apply_masks

# --- Losses and their gradients, in the place of the logits --------------------------------------


@compiled
def softmax_gradient(o: Array, i: int, y: int, weight: Any) -> float:
    """Replace logits o[i] (K,) by the gradient of `weight` times the cross-entropy; return that."""
    top = o[i, 0]
    for c in range(1, o.shape[1]):
        top = o[i, c] if o[i, c] > top else top
    truth, total = o[i, y] - top, o.dtype.type(0)
    for c in range(o.shape[1]):
        o[i, c] = np.exp(o[i, c] - top)
        total += o[i, c]
    for c in range(o.shape[1]):
        o[i, c] = o[i, c] / total * weight
    o[i, y] -= weight
    return float(np.log(total) - truth)


@compiled
def bits_gradient(o: Array, i: int, y: Array, weight: Any) -> float:
    """The same for the mean binary cross-entropy over known bits (K,); -1 is not known."""
    known, loss = 0, 0.0
    for c in range(o.shape[1]):
        known += y[c] >= 0
    for c in range(o.shape[1]):
        v = o[i, c]
        if y[c] < 0:
            o[i, c] = 0
        else:
            loss += (0.0 if v < 0 else float(v)) - v * y[c] + np.log1p(np.exp(-abs(v)))
            o[i, c] = (1 / (1 + np.exp(-v)) - y[c]) * weight / known
    return float(loss / known) if known > 0 else 0.0


@compiled
def weighted_bits_gradient(o: Array, i: int, y: Array, weight: Any, of_ones: Array) -> float:
    """Do the same with weights (K,) of the loss of bits that are 1."""
    known, loss = 0, 0.0
    for c in range(o.shape[1]):
        known += y[c] >= 0
    for c in range(o.shape[1]):
        v = o[i, c]
        if y[c] < 0:
            o[i, c] = 0
        elif y[c] == 0:
            loss += (0.0 if v < 0 else float(v)) + np.log1p(np.exp(-abs(v)))
            o[i, c] = 1 / (1 + np.exp(-v)) * weight / known
        else:
            loss += of_ones[c] * ((0.0 if v > 0 else float(-v)) + np.log1p(np.exp(-abs(v))))
            factor = o.dtype.type(of_ones[c])
            o[i, c] = (1 / (1 + np.exp(-v)) - 1) * factor * weight / known
    return float(loss / known) if known > 0 else 0.0


@compiled
def weighted_loss_gradient(
    rows: RowArrays, shape: ModelShape, k: int, train: Array, s: Scratch
) -> float:
    """Do what `loss_gradient` does where classes have weights; see `nn.fit.label_losses`."""
    a, count, total, at = rows.off[k], train.shape[0], 0.0, 0
    drawn, out, y, nodes = shape.fanout is not None, s.out, rows.y, s.nodes
    of_class, all_weights = rows.class_weight, 0.0
    if shape.multilabel:
        all_weights = float(count)
    else:
        for j in range(count):
            all_weights += of_class[y[a + train[j], 0]]
    for i in range(s.m[shape.layers]):
        row = nodes[i]
        if not drawn and (at == count or train[at] != row):
            for c in range(out.shape[1]):
                out[i, c] = 0
            continue
        at += 1
        if shape.multilabel:
            weight = out.dtype.type(1.0 / all_weights)
            total += weighted_bits_gradient(out, i, y[a + row], weight, of_class) / all_weights
        else:
            share = of_class[y[a + row, 0]] / all_weights
            total += share * softmax_gradient(out, i, y[a + row, 0], out.dtype.type(share))
    return float(total)


@compiled
def loss_gradient(rows: RowArrays, shape: ModelShape, k: int, train: Array, s: Scratch) -> float:
    """Replace logits by the gradient of the mean loss of the step's training rows; return it."""
    if rows.class_weight.shape[0] > 0:
        return weighted_loss_gradient(rows, shape, k, train, s)
    a, count, total, at = rows.off[k], train.shape[0], 0.0, 0
    drawn, out, y, nodes = shape.fanout is not None, s.out, rows.y, s.nodes
    weight = out.dtype.type(1.0 / count)
    for i in range(s.m[shape.layers]):
        row = nodes[i]
        if not drawn and (at == count or train[at] != row):
            for c in range(out.shape[1]):
                out[i, c] = 0
            continue
        at += 1
        if shape.multilabel:
            total += bits_gradient(out, i, y[a + row], weight)
        else:
            total += softmax_gradient(out, i, y[a + row, 0], weight)
    return float(total / count)


_EPOCH, _BATCH = np.uint64(hash_text("epoch")), np.uint64(hash_text("batch"))


class StepArrays(NamedTuple):
    """What the steps of all clients of a call have in common."""

    rows: RowArrays
    x: InputArrays
    shape: ModelShape
    steps: StepRule


@compiled
def count(x: InputArrays, shape: ModelShape, s: Scratch, work: Array) -> None:
    """Add to `work`: rows of each layer (L + 1), edges (L), feature entries (2), one step.

    Steps that draw neighbors are counted here. Others are alike: Python counts them.
    """
    layers = shape.layers
    for layer in range(layers + 1):
        work[layer] += s.m[layer]
    for layer in range(layers):
        work[layers + 1 + layer] += s.ptr[layer, s.m[layer + 1]] - s.ptr[layer, 0]
    if x.dense.shape[0] == 0:
        starts, ends, own = s.x_start, s.x_end, s.m[1]
        for i in range(s.m[0]):
            entries = ends[i] - starts[i]
            work[2 * layers + 1] += entries
            work[2 * layers + 2] += entries if i < own else 0
    work[2 * layers + 3] += 1


@compiled
def take_step(
    of: StepArrays,
    k: int,
    seeds: Array,
    own: TrainedWeights,
    num_steps: int,
    key: Any,
    s: Scratch,
    work: Array,
) -> float:
    """Take step number `num_steps` of client k on the rows that take part; return its mean loss."""
    rows, x, shape = of.rows, of.x, of.shape
    seen = x
    if shape.x_threshold > 0:
        seen = pointer_to(after_dropout(x, s))
        drop_features(rows, x, shape, k, key, s)
    forward(rows, seen, shape, k, x.col, own.weights, key, TRAINING, s)
    loss = loss_gradient(rows, shape, k, seeds, s)
    if shape.fanout is not None:
        count(x, shape, s, work)
    backward_step(rows, seen, shape, k, own, of.steps, num_steps, s)
    return loss


@compiled
def train_client(
    of: StepArrays,
    k: int,
    own: TrainedWeights,
    num_steps: int,
    key: Any,
    s: Scratch,
    work: Array,
) -> tuple[float, int]:
    """Train client k in place; return its mean loss in the last epoch, and steps taken in all."""
    rows, shape = of.rows, of.shape
    train = rows.train[rows.train_off[k] : rows.train_off[k + 1]]
    keys, size = rows.row_key[rows.off[k] : rows.off[k + 1]], train.shape[0]
    batch = size if shape.batch == 0 or shape.batch > size else shape.batch
    loss = 0.0
    for epoch in range(shape.epochs):
        epoch_key = fold(fold(key, _EPOCH), epoch)
        order = train
        if shape.fanout is not None and batch < size:
            shuffled(train, keys, epoch_key, s.order)
            order = s.order[:size]
        loss = 0.0
        for b in range((size + batch - 1) // batch):
            step_key = fold(fold(epoch_key, _BATCH), b)
            end = (b + 1) * batch
            seeds = order[b * batch : end if end < size else size]
            if shape.fanout is None:
                whole(rows, k, s)
            else:
                sample(rows, k, shape, seeds, step_key, s)
            num_steps += 1
            step_loss = take_step(of, k, seeds, own, num_steps, step_key, s, work)
            loss += seeds.shape[0] / size * step_loss
    return loss, num_steps


@compiled
def start_matrix(w: Array, base: Array, used: Array) -> None:
    """Fill a first matrix w (u, D) with the used rows (u,) of a base (F, D)."""
    for i in range(w.shape[0]):
        copy(base[used[i]], w[i])


@compiled
def fill_in(begun: Array, rows: Array, lo: int, hi: int) -> None:
    """Fill the rows of one client with what they start as, which leaves them in the cache."""
    for i in range(begun.shape[0]):
        copy_rows(begun[i, lo:hi], rows[i, lo:hi])


@compiled
def part(matrices: Array, flat: Array, lo: int, hi: int) -> Weights:
    """Return rows `lo` to `hi` of first matrices (M, U, D), and the other weights `flat` (P,)."""
    return Weights(matrices[0, lo:hi], matrices[matrices.shape[0] - 1, lo:hi], flat)


@compiled
def weights_of(
    called: CalledArrays, x: InputArrays, params: ParamArrays, k: int, memory: Spare
) -> TrainedWeights:
    """Return the weights of the called client k as they start, and its moments."""
    lo, hi, last = called.used_off[k], called.used_off[k + 1], params.rows.shape[0] - 1
    count, first = hi - lo, x.used_off[called.position[k]]
    used = x.used[first : first + count]
    w = part(params.rows, params.flat[k], lo, hi)
    fill_in(params.begun.rows, params.rows, lo, hi)
    fill_in(params.begun.first_rows, params.first_rows, lo, hi)
    fill_in(params.begun.second_rows, params.second_rows, lo, hi)
    if params.start.shape[0] > 0:
        start_matrix(w.first, params.start[params.which[0, k]], used)
        if last > 0:
            start_matrix(w.second, params.start[params.which[last, k]], used)
    begun = part(memory.start, memory.start_flat, ZERO, count)
    if begun.flat.shape[0] > 0:  # something pulls
        copy_rows(w.first, begun.first)
        copy_rows(w.second, begun.second)
        copy(w.flat, begun.flat)
    if params.first_flat.shape[0] > 0:
        m1 = part(params.first_rows, params.first_flat[k], lo, hi)
        m2 = part(params.second_rows, params.second_flat[k], lo, hi)
    else:
        m1 = part(memory.moments[0], memory.moments_flat[0], ZERO, count)
        m2 = part(memory.moments[1], memory.moments_flat[1], ZERO, count)
    if params.masks is None:
        return TrainedWeights(w, begun, m1, m2, None)
    product = part(memory.product, memory.product_flat, ZERO, count)
    mask_state = masking(params, k, lo, hi, w, memory)
    own = TrainedWeights(product, begun, m1, m2, mask_state)
    apply_masks(pointer_to(own), last + 1, 0.0)
    return own


@compiled
def masking(params: ParamArrays, k: int, lo: int, hi: int, raw: Weights, memory: Spare) -> Masking:
    """Return what the weights of client k are products of."""
    of = params.masks
    fill_in(of.begun.rows, of.rows, lo, hi)
    fill_in(of.begun.first_rows, of.first_rows, lo, hi)
    fill_in(of.begun.second_rows, of.second_rows, lo, hi)
    mask = part(of.rows, of.flat[k], lo, hi)
    if of.first_flat.shape[0] > 0:
        m1 = part(of.first_rows, of.first_flat[k], lo, hi)
        m2 = part(of.second_rows, of.second_flat[k], lo, hi)
    else:
        m1 = part(memory.mask_moments[0], memory.mask_moments_flat[0], ZERO, hi - lo)
        m2 = part(memory.mask_moments[1], memory.mask_moments_flat[1], ZERO, hi - lo)
    return Masking(raw, mask, m1, m2, memory.other, of.near, of.l1, of.least)


@compiled
def say(
    called: CalledArrays,
    of: StepArrays,
    k: int,
    rows: RowArrays,
    own: TrainedWeights,
    matrices: int,
    s: Scratch,
    logits: Array,
) -> None:
    """Fill in the logits of the called client k: what its trained model says of all its `rows`."""
    x, shape, g = of.x, of.shape, called.position[k]
    if own.mask_state is not None:
        apply_masks(own, matrices, own.mask_state.least)
    whole(rows, g, s)
    forward(rows, x, shape, g, x.col, own.weights, np.uint64(0), PREDICTING, s)
    copy_rows(s.out, logits[called.off[k] : called.off[k + 1]])


@kernel
def train(
    k0: int,
    k1: int,
    called: CalledArrays,
    of: StepArrays,
    params: ParamArrays,
    key: Any,
    filled: Filled,
    s: Scratch,
    memory: Spare,
) -> None:
    """Train the called clients k0 to k1, then fill the logits with what their models say.

    C, n and U are those of the called clients.

    Args:
        k0: first of the called clients.
        k1: end.
        called: where `of` has them, which may have more; a position for each.
        of: rows and features of a block, model, schedule and optimizer.
        params: weights and moments, changed in place.
        key: key of the call, uint64.
        filled: what comes of it.
        s: memory that this thread alone uses, see `memory.scratch`.
        memory: the same, see `memory.spare`.
    """
    train_range(
        k0,
        k1,
        pointer_to(called),
        pointer_to(of),
        pointer_to(params),
        key,
        pointer_to(filled),
        pointer_to(s),
        pointer_to(memory),
    )


@compiled
def train_range(
    k0: int,
    k1: int,
    called: CalledArrays,
    of: StepArrays,
    params: ParamArrays,
    key: Any,
    filled: Filled,
    s: Scratch,
    memory: Spare,
) -> None:
    """Do what `train` does."""
    rows, x = of.rows, of.x
    for k in range(k0, k1):
        g, own = called.position[k], pointer_to(weights_of(called, x, params, k, memory))
        if rows.train_off[g + 1] > rows.train_off[g]:
            filled.loss[k], params.steps[k] = train_client(
                of, g, own, params.steps[k], key, s, filled.work[k]
            )
        say(called, of, k, rows, own, params.rows.shape[0], s, filled.logits)


@kernel
def predict(
    k0: int,
    k1: int,
    called: CalledArrays,
    rows: RowArrays,
    x: InputArrays,
    x_col: Array,
    shape: ModelShape,
    w: Weights,
    logits: Array,
    s: Scratch,
) -> None:
    """Fill `logits` (n, K) for the called clients k0 to k1 with what one model says.

    Its first matrices are (F, D). `x_col` is the feature of every sparse entry.
    """
    predict_range(
        k0,
        k1,
        pointer_to(called),
        pointer_to(rows),
        pointer_to(x),
        x_col,
        pointer_to(shape),
        pointer_to(w),
        logits,
        pointer_to(s),
    )


@compiled
def predict_range(
    k0: int,
    k1: int,
    called: CalledArrays,
    rows: RowArrays,
    x: InputArrays,
    x_col: Array,
    shape: ModelShape,
    w: Weights,
    logits: Array,
    s: Scratch,
) -> None:
    """Do what `predict` does."""
    for k in range(k0, k1):
        g = called.position[k]
        whole(rows, g, s)
        forward(rows, x, shape, g, x_col, w, np.uint64(0), PREDICTING, s)
        lo, hi = called.off[k], called.off[k + 1]
        copy_rows(s.out, logits[lo:hi])
