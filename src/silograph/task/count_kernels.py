"""Counts of `silograph.task.counts`, compiled: one pass over the judged rows.

j: judged rows. C: clients. K: classes or label bits. B: bins.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from silograph.core.compiling import kept_on_disk
from silograph.core.self_contained import Function, SelfContained, copied

NDArray = np.ndarray
OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}


class Sums(NamedTuple):
    """The arrays that `tally` adds to; zeros at first."""

    nodes: NDArray  # (2, C) int32, for validation and test
    loss: NDArray  # (2, C) float64
    hits: NDArray  # (2, 4, C, K) int32: known, true and false positives, false negatives
    bins: NDArray  # (1 or 2, C, K, 2, B) int32: scores by class, truth and bin; see `tally`


def _compiled(function: Function) -> Function:
    """Compile a function that `tally` calls."""
    return copied(function, OPTIONS)


@_compiled
def bounded(odds: float, clip: float) -> float:
    """Return log-odds within +-clip; NaN, of a model that diverged, ranks lowest."""
    if np.isnan(odds):
        return -clip
    return float(min(max(odds, -clip), clip))


@_compiled
def odds_of(logits: NDArray, i: int, multilabel: bool, clip: float, odds: NDArray) -> None:
    """Fill `odds` (K,) with the log-odds of row i."""
    classes = logits.shape[1]
    if multilabel:
        for c in range(classes):
            odds[c] = bounded(logits[i, c], clip)
        return
    largest, top = np.finfo(np.float64).max, -np.inf
    for c in range(classes):  # an infinite logit is certain; a finite one keeps NaN away
        odds[c] = min(max(np.float64(logits[i, c]), -largest), largest)
        if odds[c] > top or np.isnan(odds[c]):
            top = odds[c]
    total = 0.0
    for c in range(classes):
        odds[c] -= top
        total += np.exp(odds[c])
    log_total = np.log(total)
    for c in range(classes):
        log_p = odds[c] - log_total  # after the difference from the top: it is small
        odds[c] = bounded(log_p - np.log1p(-np.exp(log_p)), clip)


@_compiled
def largest_of(logits: NDArray, i: int) -> int:
    """Return the first class of the largest logit of row i; NaN is the largest, as in torch."""
    best = 0
    for c in range(1, logits.shape[1]):
        if not np.isnan(logits[i, best]) and not logits[i, c] <= logits[i, best]:
            best = c
    return best


@_compiled
def cross_entropy(logits: NDArray, i: int, best: int, y: int) -> float:
    """Return the loss of row i; NaN where a logit is NaN or infinite, as in torch."""
    top, total = np.float64(logits[i, best]), 0.0
    for c in range(logits.shape[1]):
        total += np.exp(logits[i, c] - top)
    return float(top - logits[i, y] + np.log(total))


@_compiled
def bits_entropy(logits: NDArray, y: NDArray, i: int) -> float:
    """Return the loss of row i: the mean over its known bits; 0 if there are none."""
    known, bits = 0, 0.0
    for c in range(logits.shape[1]):
        if y[i, c] >= 0:
            known += 1
            v = np.float64(logits[i, c])
            bits += max(v, 0.0) - v * (y[i, c] == 1) + np.log1p(np.exp(-abs(v)))
    return float(bits / max(known, 1))


@_compiled
def add_hit(true: bool, positive: bool, hits: NDArray, part: int, g: int, c: int) -> None:
    """Count a known label of class or bit c at client g; see `tally`."""
    hits[part, 0, g, c] += 1
    hits[part, 1, g, c] += positive and true
    hits[part, 2, g, c] += positive and not true
    hits[part, 3, g, c] += true and not positive


@_compiled
def count_bits(logits: NDArray, y: NDArray, i: int, hits: NDArray, part: int, g: int) -> None:
    """Count the known bits of row i."""
    for c in range(logits.shape[1]):
        if y[i, c] >= 0:
            add_hit(y[i, c] == 1, logits[i, c] > 0, hits, part, g, c)


@_compiled
def count_class(best: int, y: int, hits: NDArray, part: int, g: int) -> None:
    """Count a row of class y, where class `best` was predicted, for every class."""
    for c in range(hits.shape[3]):
        add_hit(y == c, best == c, hits, part, g, c)


@_compiled
def count_scores(
    odds: NDArray, y: NDArray, multilabel: bool, middle: float, steepness: float, bins: NDArray
) -> None:
    """Count the scores (K,) of a row with labels y in `bins` (K, 2, B); see `counts.bins_of`."""
    last = bins.shape[2] - 1
    for c in range(odds.shape[0]):
        if multilabel and y[c] < 0:
            continue
        true = y[c] == 1 if multilabel else y[0] == c
        z = steepness * (odds[c] + middle)
        place = (1 + z / (1 + abs(z))) / 2 * bins.shape[2]
        bins[c, int(true), min(max(int(place), 0), last)] += 1


@kept_on_disk
@njit(  # type: ignore[untyped-decorator]
    **OPTIONS, cache=True, pipeline_class=SelfContained
)
def tally(
    logits: NDArray,
    y: NDArray,
    val: NDArray,
    group: NDArray,
    multilabel: bool,
    clip: float,
    middle: float,
    steepness: float,
    sums: Sums,
) -> None:
    """Add up what judged rows tell of each client.

    Args:
        logits: (j, K).
        y: (j, 1) classes or (j, K) bits.
        val: (j,) bool.
        group: (j,) client.
        multilabel: what `y` is.
        clip: largest log-odds.
        middle: negative log-odds in the middle of the bins.
        steepness: of the scale there.
        sums: the outputs; the first of `sums.bins` is of test nodes, the second, if there is one,
            of validation nodes.
    """
    nodes, loss, hits, bins = sums.nodes, sums.loss, sums.hits, sums.bins
    odds = np.empty(logits.shape[1])
    for i in range(logits.shape[0]):
        part, g = 0 if val[i] else 1, group[i]
        nodes[part, g] += 1
        if multilabel:
            count_bits(logits, y, i, hits, part, g)
            loss[part, g] += bits_entropy(logits, y, i)
        else:
            best = largest_of(logits, i)
            count_class(best, y[i, 0], hits, part, g)
            loss[part, g] += cross_entropy(logits, i, best, y[i, 0])
        table = 1 - part
        if table < bins.shape[0]:
            odds_of(logits, i, multilabel, clip, odds)
            count_scores(odds, y[i], multilabel, middle, steepness, bins[table, g])
