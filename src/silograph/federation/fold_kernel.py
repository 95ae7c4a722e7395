"""The inner loops of `silograph.federation.fold`, compiled."""

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
    """total[h] += (slices[i, h] - around[h]) * factors[i], one chosen i after the other."""
    for i in range(slices.shape[0]):
        if chosen[i]:
            factor = factors[i]
            for h in range(slices.shape[1]):
                total[h] += (slices[i, h] - around[h]) * factor
