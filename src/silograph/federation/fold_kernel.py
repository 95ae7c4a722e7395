"""The inner loops of `silograph.federation.fold`, compiled."""

from typing import Any

import numpy as np
from numba import njit

from silograph.core.compiling import kept_on_disk


# No contraction: a product is rounded before it is added, as torch does it.
@kept_on_disk
@njit(error_model="numpy", cache=True, nogil=True)
def add_rows(
    total: np.ndarray, index: np.ndarray, rows: np.ndarray, around: np.ndarray, factors: np.ndarray
) -> bool:
    """total[index[i]] += (rows[i] - around[index[i]]) * factors[i], one i after the other.

    A row with the factor 0 is out, whatever it holds. False: there is no such place for a row.
    """
    for i in range(rows.shape[0]):
        j, factor = index[i], factors[i]
        if factor == 0:
            continue
        if j < 0 or j >= total.shape[0]:
            return False
        for h in range(rows.shape[1]):
            total[j, h] += (rows[i, h] - around[j, h]) * factor
    return True


@kept_on_disk
@njit(error_model="numpy", cache=True, nogil=True)
def add_patched(
    total: np.ndarray,
    bases: np.ndarray,
    which: np.ndarray,
    rows: np.ndarray,
    index: np.ndarray,
    off: np.ndarray,
    around: np.ndarray,
    factors: np.ndarray,
    together: int,
) -> bool:
    """Total += (slice - around) * factor, one client after the other.

    A client's slice is its base but for its rows, whose places ascend. Rows of the total are taken
    `together`, for all clients, as long as they are in the cache. False: places are out of order.
    """
    for c in range(which.shape[0]):
        for i in range(off[c] + 1, off[c + 1]):
            if index[i] <= index[i - 1]:
                return False
    at = off[: which.shape[0]].copy()
    for first in range(0, total.shape[0], together):
        end = min(first + together, total.shape[0])
        for c in range(which.shape[0]):
            factor, base, i = factors[c], bases[which[c]], at[c]
            for j in range(first, end):
                own = i < off[c + 1] and index[i] == j
                values = rows[i] if own else base[j]
                i += own
                if factor != 0:
                    for h in range(total.shape[1]):
                        total[j, h] += (values[h] - around[j, h]) * factor
            at[c] = i
    return True


@kept_on_disk
@njit(error_model="numpy", cache=True, nogil=True)
def compare(bases: np.ndarray, other: np.ndarray, alike: np.ndarray) -> None:
    """Fill `alike` (G,): which bases (G, n) equal another (n,)."""
    for g in range(bases.shape[0]):
        differ = 0
        for h in range(other.shape[0]):  # all of them: many at once is faster than up to the first
            differ += bases[g, h] != other[h]
        alike[g] = differ == 0


@kept_on_disk
@njit(error_model="numpy", cache=True, nogil=True)
def add_slices(
    total: np.ndarray,
    slices: np.ndarray,
    around: np.ndarray,
    factors: np.ndarray,
    chosen: np.ndarray,
) -> None:
    """total[h] += (slices[i, h] - around[h]) * factors[i], one chosen i after the other.

    An empty `around` is 0.
    """
    for i in range(slices.shape[0]):
        if chosen[i]:
            factor = factors[i]
            if around.shape[0] == 0:
                for h in range(slices.shape[1]):
                    total[h] += slices[i, h] * factor
            else:
                for h in range(slices.shape[1]):
                    total[h] += (slices[i, h] - around[h]) * factor


@kept_on_disk
@njit(error_model="numpy", cache=True, nogil=True, fastmath={"reassoc"})
def measure_change(
    new: np.ndarray, old: np.ndarray, bits: np.ndarray, mask: np.integer[Any]
) -> tuple[float, np.integer[Any]]:
    """Return the sum of squares of new - old (n,), and the bits of the largest absolute value.

    Args:
        new: (n,) floating point numbers.
        old: (n,) of the same dtype.
        bits: the memory of `new` as integers.
        mask: all bits but the sign. Without the sign, numbers farther from 0 are larger integers,
            infinity is larger than all finite numbers, and NaN is larger than infinity.
    """
    total, most = 0.0, mask & 0
    for i in range(new.shape[0]):
        change = np.float64(new[i]) - np.float64(old[i])
        total += change * change
        most = max(most, bits[i] & mask)
    return total, most
