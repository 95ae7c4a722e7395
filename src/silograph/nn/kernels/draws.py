"""The draws of `silograph.core.key`, and a sampler of neighbors on top of them."""

from typing import Any

import numpy as np

from silograph.core.key import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, hash_text
from silograph.nn.kernels.arrays import LINEAR, Array, ModelShape, RowArrays, Scratch, compiled

# Constants must be uint64: numba makes a float of a sum of int64 and uint64.
_30, _27, _31, _1 = (np.uint64(number) for number in (30, 27, 31, 1))
_GOLDEN, _M1, _M2 = np.uint64(GOLDEN), np.uint64(MULTIPLIER_1), np.uint64(MULTIPLIER_2)
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
def drop(h: Array, i: int, row_key: Any, key: Any, shape: ModelShape, s: Any) -> None:
    """Drop entries of row i of h (m, D) by `Key.keep`, and scale the others; words are in s."""
    factor, zero = h.dtype.type(shape.scale), h.dtype.type(0)
    base = mix(row_key ^ key)
    for j in range((h.shape[1] + 3) // 4):
        s.words[j] = mix(base + np.uint64(j + 1) * _GOLDEN)
    for j in range(h.shape[1]):
        h[i, j] = h[i, j] * factor if s.levels[j] >= shape.threshold else zero


@compiled
def shuffled(train: Array, row_key: Array, key: Any) -> Array:
    """Return training rows in an order drawn from their keys (n,)."""
    words = np.empty(train.shape[0], np.int64)
    order_key = fold(key, _ORDER)
    for i in range(train.shape[0]):
        words[i] = np.int64(mix(mix(row_key[train[i]] ^ order_key) + _GOLDEN))
    return train[np.argsort(words)]


@compiled
def whole(rows: RowArrays, k: int, s: Scratch) -> None:
    """Let all rows of client k take part in every layer."""
    n = rows.off[k + 1] - rows.off[k]
    for i in range(n):
        s.nodes[i] = i
    s.m[:] = n


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
    widest = max(shape.fanout.max(), 1)
    scores, edges = np.empty(widest, np.int64), np.empty(widest, np.int64)
    count = seeds.shape[0]
    for i in range(count):
        s.nodes[i] = seeds[i]
        s.place[seeds[i]] = i
    s.m[shape.layers] = count
    at = 0
    for layer in range(shape.layers - 1, -1, -1):
        drawn, fanout = fold(fold(key, _NEIGHBORS), layer), shape.fanout[layer]
        s.ptr[layer, 0] = at
        for i in range(s.m[layer + 1]):
            r = s.nodes[i]
            start, end = rows.ptr[a + r], rows.ptr[a + r + 1]
            if shape.form[layer] == LINEAR:
                end = start
            every = fanout == 0 or end - start <= fanout
            factor = rows.value.dtype.type(1.0 if every else (end - start) / fanout)
            if not every:
                smallest(scores, edges, start, end, mix(keys[r] ^ drawn), keys, rows.col, fanout)
            for j in range(end - start if every else fanout):
                e = start + j if every else edges[j]
                c = rows.col[e]
                if s.place[c] < 0:
                    s.place[c] = count
                    s.nodes[count] = c
                    count += 1
                s.col[at], s.value[at] = s.place[c], rows.value[e] * factor
                at += 1
            s.ptr[layer, i + 1] = at
        s.m[layer] = count
    for i in range(count):
        s.place[s.nodes[i]] = -1
