"""Counts of `silograph.task.counts`, compiled: one pass over the judged rows.

j: judged rows. C: clients. K: classes or label bits. B: bins.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from silograph.core.compiling import kept_on_disk
from silograph.core.numba_extensions import Function, SelfContained, copied

NDArray = np.ndarray
OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}
LARGEST = float(np.finfo(np.float64).max)
KNOWN, TRUE_POSITIVE, FALSE_POSITIVE, FALSE_NEGATIVE = range(4)  # places in `Sums.hits`


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
def within(value: float, limit: float) -> float:
    """Return a number within +-limit; NaN stays."""
    if value < -limit:
        return -limit
    return limit if value > limit else value


@_compiled
def bounded(odds: float, clip: float) -> float:
    """Return log-odds within +-clip; NaN, of a model that diverged, ranks lowest."""
    return -clip if np.isnan(odds) else within(odds, clip)


@_compiled
def odds_of_bits(logits: NDArray, i: int, clip: float, odds: NDArray) -> None:
    """Fill `odds` (K,) with the log-odds of the label bits of row i."""
    for c in range(logits.shape[1]):
        odds[c] = bounded(np.float64(logits[i, c]), clip)


@_compiled
def odds_of_classes(
    logits: NDArray, i: int, top: float, log_total: float, clip: float, odds: NDArray
) -> None:
    """Fill `odds` (K,) with the log-odds of the classes of row i.

    `top` is its largest logit, `log_total` the logarithm of the sum of exp(logit - top).
    """
    classes = logits.shape[1]
    if np.isfinite(log_total):
        for c in range(classes):
            odds[c] = logits[i, c] - top
    else:
        top, total = -np.inf, 0.0
        for c in range(classes):  # an infinite logit is certain; a finite one keeps NaN away
            odds[c] = within(np.float64(logits[i, c]), LARGEST)
            if odds[c] > top or np.isnan(odds[c]):
                top = odds[c]
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
def log_sum(logits: NDArray, i: int, top: float) -> float:
    """Return log sum exp(logit - top) of row i; NaN where a logit is NaN or infinite."""
    total = 0.0
    for c in range(logits.shape[1]):
        total += np.exp(logits[i, c] - top)
    return float(np.log(total))


@_compiled
def bits_entropy(logits: NDArray, y: NDArray, i: int) -> float:
    """Return the loss of row i: the mean over its known bits; 0 if there are none."""
    known, bits = 0, 0.0
    for c in range(logits.shape[1]):
        if y[i, c] >= 0:
            known += 1
            v = np.float64(logits[i, c])
            bits += (v if v > 0 else 0.0) - v * (y[i, c] == 1) + np.log1p(np.exp(-abs(v)))
    return float(bits / known) if known > 0 else 0.0


@_compiled
def count_bits(logits: NDArray, y: NDArray, i: int, hits: NDArray, part: int, g: int) -> None:
    """Count the known bits of row i at client g."""
    for c in range(logits.shape[1]):
        if y[i, c] >= 0:
            hits[part, KNOWN, g, c] += 1
            if y[i, c] == 1:
                hits[part, TRUE_POSITIVE if logits[i, c] > 0 else FALSE_NEGATIVE, g, c] += 1
            elif logits[i, c] > 0:
                hits[part, FALSE_POSITIVE, g, c] += 1


@_compiled
def count_class(best: int, y: int, hits: NDArray, part: int, g: int) -> None:
    """Count a row of class y at client g, where class `best` was predicted."""
    for c in range(hits.shape[3]):
        hits[part, KNOWN, g, c] += 1
    if y == best:
        hits[part, TRUE_POSITIVE, g, y] += 1
    else:
        hits[part, FALSE_POSITIVE, g, best] += 1
        hits[part, FALSE_NEGATIVE, g, y] += 1


@_compiled
def bin_of(odds: float, middle: float, steepness: float, bins: int) -> int:
    """Return the bin of log-odds; see `counts.bins_of`."""
    z = steepness * (odds + middle)
    place = np.int64((1 + z / (1 + abs(z))) / 2 * bins)
    if place < 0:
        return 0
    return int(place) if place < bins else bins - 1


@_compiled
def score_bits(odds: NDArray, y: NDArray, middle: float, steepness: float, bins: NDArray) -> None:
    """Count the scores (K,) of the known bits y (K,) of a row in `bins` (K, 2, B)."""
    for c in range(odds.shape[0]):
        if y[c] >= 0:
            bins[c, 1 if y[c] == 1 else 0, bin_of(odds[c], middle, steepness, bins.shape[2])] += 1


@_compiled
def score_classes(odds: NDArray, y: int, middle: float, steepness: float, bins: NDArray) -> None:
    """Count the scores (K,) of a row of class y in `bins` (K, 2, B)."""
    for c in range(odds.shape[0]):
        bins[c, 1 if y == c else 0, bin_of(odds[c], middle, steepness, bins.shape[2])] += 1


@kept_on_disk
@njit(  # type: ignore[untyped-decorator]
    **OPTIONS, cache=True, pipeline_class=SelfContained
)
def tally(
    logits: NDArray,
    classes: NDArray | None,
    bits: NDArray | None,
    val: NDArray,
    group: NDArray,
    clip: float,
    middle: float,
    steepness: float,
    odds: NDArray,
    sums: Sums,
) -> None:
    """Add up what judged rows tell of each client.

    Args:
        logits: (j, K).
        classes: (j,) labels; None, and no code is compiled for them, where rows have bits.
        bits: (j, K) labels; None where rows have classes.
        val: (j,) bool.
        group: (j,) client.
        clip: largest log-odds.
        middle: negative log-odds in the middle of the bins.
        steepness: of the scale there.
        odds: memory, (K,) float64.
        sums: the outputs; the first of `sums.bins` is of test nodes, the second, if there is one,
            of validation nodes.
    """
    nodes, loss, hits, bins = sums.nodes, sums.loss, sums.hits, sums.bins
    for i in range(logits.shape[0]):
        part, g = 0 if val[i] else 1, group[i]
        table = 1 - part
        nodes[part, g] += 1
        if bits is not None:
            count_bits(logits, bits, i, hits, part, g)
            loss[part, g] += bits_entropy(logits, bits, i)
            if table < bins.shape[0]:
                odds_of_bits(logits, i, clip, odds)
                score_bits(odds, bits[i], middle, steepness, bins[table, g])
        if classes is not None:
            best = largest_of(logits, i)
            count_class(best, classes[i], hits, part, g)
            # The loss is NaN where a logit is NaN or infinite, as in torch.
            top = np.float64(logits[i, best])
            log_total = log_sum(logits, i, top)
            loss[part, g] += top - logits[i, classes[i]] + log_total
            if table < bins.shape[0]:
                odds_of_classes(logits, i, top, log_total, clip, odds)
                score_classes(odds, classes[i], middle, steepness, bins[table, g])
