"""The draws of `silograph.core.key`, and a sampler of neighbors on top of them."""

from typing import Any

import numpy as np

from silograph.core.key import DROPOUT_LEVELS, GOLDEN, MULTIPLIER_1, MULTIPLIER_2, hash_text
from silograph.nn.kernels.arrays import (
    LINEAR,
    Array,
    InputArrays,
    ModelShape,
    RowArrays,
    Scratch,
    allocating,
    compiled,
    copy,
)

# Constants must be uint64: numba makes a float of a sum of int64 and uint64.
_30, _27, _31, _1 = (np.uint64(number) for number in (30, 27, 31, 1))
_GOLDEN, _M1, _M2 = np.uint64(GOLDEN), np.uint64(MULTIPLIER_1), np.uint64(MULTIPLIER_2)
_DROPOUT, _LEVELS = np.uint64(hash_text("dropout")), np.uint64(DROPOUT_LEVELS - 1)
_ORDER, _NEIGHBORS = np.uint64(hash_text("order")), np.uint64(hash_text("neighbors"))


@compiled
def mix(word: Any) -> Any:
    """Return `silograph.core.key.mix` of a uint64."""
    word = (word ^ (word >> _30)) * _M1
    word = (word ^ (word >> _27)) * _M2
    return word ^ (word >> _31)


@compiled
def fold(key: Any, number: Any) -> Any:
    """Return `Key.fold` of one part, as uint64."""
    return mix(key * _GOLDEN + np.uint64(number) + _1)


@compiled
def drop(h: Array, i: int, row_key: Any, key: Any, threshold: int, scale: float, s: Any) -> None:
    """Drop entries of row i of h (m, D) by `Key.keep`, and scale the others; words are in s."""
    factor, zero = h.dtype.type(scale), h.dtype.type(0)
    base, words, levels = mix(row_key ^ key), s.words, s.levels
    for j in range((h.shape[1] + 3) // 4):
        words[j] = mix(base + np.uint64(j + 1) * _GOLDEN)
    for j in range(h.shape[1]):
        h[i, j] = h[i, j] * factor if levels[j] >= threshold else zero


@compiled
def is_entry_kept(row: Any, feature: int, threshold: int) -> bool:
    """Return `Key.keep_entries` of one entry; `row` is the mix of its row's key and the draw's."""
    word = mix(row + np.uint64(feature // 4 + 1) * _GOLDEN)
    level = (word >> np.uint64(16 * (feature % 4))) & _LEVELS
    return bool(level >= np.uint64(threshold))


@compiled
def drop_features(
    rows: RowArrays, x: InputArrays, shape: ModelShape, k: int, key: Any, s: Scratch
) -> None:
    """Drop features of the rows of client k that take part; fill `s.x`, or values of entries."""
    a, layer_key, row_key = rows.off[k], fold(fold(key, _DROPOUT), 0), rows.row_key
    threshold = shape.x_threshold
    if x.dense.shape[0] > 0:
        for i in range(s.m[0]):
            row = a + s.nodes[i]
            copy(x.dense[row], s.x[i])
            drop(s.x, i, row_key[row], layer_key, threshold, shape.x_scale, s)
        return
    factor, zero = x.value.dtype.type(shape.x_scale), x.value.dtype.type(0)
    first, used, ptr, col, value, out = x.used_off[k], x.used, x.ptr, x.col, x.value, s.x_value
    for i in range(s.m[0]):
        row = a + s.nodes[i]
        base = mix(row_key[row] ^ layer_key)
        for e in range(ptr[row], ptr[row + 1]):
            keep = is_entry_kept(base, used[first + col[e]], threshold)
            out[e] = value[e] * factor if keep else zero
    if shape.fanout is None:
        t_ptr, t_row, t_value, t_out = x.t_ptr, x.t_row, x.t_value, s.t_value
        for u in range(first, x.used_off[k + 1]):
            for e in range(t_ptr[u], t_ptr[u + 1]):
                base = mix(row_key[a + t_row[e]] ^ layer_key)
                keep = is_entry_kept(base, used[u], threshold)
                t_out[e] = t_value[e] * factor if keep else zero


@compiled
def after_dropout(x: InputArrays, s: Scratch) -> InputArrays:
    """Return features with the values that `drop_features` fills; dense ones are in `s.x`."""
    return InputArrays(
        x.dense, x.ptr, x.col, s.x_value, x.t_ptr, x.t_row, s.t_value, x.used_off, x.used
    )


@allocating
def shuffled(train: Array, row_key: Array, key: Any, order: Array) -> None:
    """Fill `order` with training rows in an order drawn from their keys (n,)."""
    words = np.empty(train.shape[0], np.int64)
    order_key = fold(key, _ORDER)
    for i in range(train.shape[0]):
        words[i] = np.int64(mix(mix(row_key[train[i]] ^ order_key) + _GOLDEN))
    places = np.argsort(words)
    for i in range(train.shape[0]):
        order[i] = train[places[i]]


@compiled
def whole(rows: RowArrays, k: int, s: Scratch) -> None:
    """Let all rows of client k take part in every layer."""
    n, nodes, m = rows.off[k + 1] - rows.off[k], s.nodes, s.m
    for i in range(n):
        nodes[i] = i
    for layer in range(m.shape[0]):
        m[layer] = n


@compiled
def smallest(
    scores: Array, edges: Array, start: int, end: int, row: Any, keys: Array, col: Array, count: int
) -> None:
    """Fill `edges` with the `count` edges of least score among start to end, at least as many.

    The score of an edge is a hash of both rows' keys, so a draw depends on no numbering.
    """
    held = 0
    for e in range(start, end):
        score = np.int64(mix(row ^ keys[col[e]]))
        if held == count and score >= scores[count - 1]:
            continue
        at = min(held, count - 1)
        while at > 0 and scores[at - 1] > score:
            scores[at], edges[at] = scores[at - 1], edges[at - 1]
            at -= 1
        scores[at], edges[at] = score, e
        held = min(held + 1, count)


@compiled
def sample(rows: RowArrays, k: int, shape: ModelShape, seeds: Array, key: Any, s: Scratch) -> None:
    """Draw neighbors, from the last layer's rows (the seeds) down to the inputs.

    Rows that enter a layer begin with those that leave it. A drawn edge counts degree / drawn
    times, for those that were not drawn, so sums over neighbors stay unbiased.
    """
    a, n = rows.off[k], rows.off[k + 1] - rows.off[k]
    keys = rows.row_key[a : a + n]
    scores, edges, nodes, place = s.scores, s.edges, s.nodes, s.place
    ptr, col, value, ends, neighbor, scale = s.ptr, s.col, s.value, rows.ptr, rows.col, rows.value
    count = seeds.shape[0]
    for i in range(count):
        nodes[i] = seeds[i]
        place[seeds[i]] = i
    s.m[shape.layers] = count
    at = 0
    for layer in range(shape.layers - 1, -1, -1):
        drawn, fanout = fold(fold(key, _NEIGHBORS), layer), shape.fanout[layer]
        ptr[layer, 0] = at
        for i in range(s.m[layer + 1]):
            r = nodes[i]
            start, end = ends[a + r], ends[a + r + 1]
            if shape.form[layer] == LINEAR:
                end = start
            every = fanout == 0 or end - start <= fanout
            factor = scale.dtype.type(1.0 if every else (end - start) / fanout)
            if not every:
                smallest(scores, edges, start, end, mix(keys[r] ^ drawn), keys, neighbor, fanout)
            for j in range(end - start if every else fanout):
                e = start + j if every else edges[j]
                c = neighbor[e]
                if place[c] < 0:
                    place[c] = count
                    nodes[count] = c
                    count += 1
                col[at], value[at] = place[c], scale[e] * factor
                at += 1
            ptr[layer, i + 1] = at
        s.m[layer] = count
    for i in range(count):
        place[nodes[i]] = -1
