"""The loop of `silograph.selection.harmony`, compiled."""

import numpy as np
from numba import njit

from silograph.core.interruptible import interruptible

BLOCK = 64  # clients whose smallest value is kept, so that a search looks into one block only


# These flags let the smallest be looked for in any order, which has the same result.
@njit(error_model="numpy", cache=True, nogil=True, fastmath={"nnan", "nsz"})
def smallest(values: np.ndarray) -> float:
    """Return the smallest of values (n,), none of them NaN."""
    found = np.inf
    for i in range(len(values)):
        found = min(found, values[i])
    return found


@njit(error_model="numpy", cache=True, nogil=True)
def first_smallest(values: np.ndarray, lows: np.ndarray, tie: float) -> int:
    """Return where the first of values (n,) is that is within `tie` of the smallest.

    Args:
        values: none of them NaN.
        lows: (n / BLOCK, rounded up), is filled.
        tie: a difference.
    """
    for block in range(len(lows)):
        lows[block] = smallest(values[block * BLOCK : (block + 1) * BLOCK])
    limit, block = smallest(lows) + tie, 0
    while block < len(lows) - 1 and not lows[block] <= limit:
        block += 1
    place = block * BLOCK
    while place < len(values) - 1 and not values[place] <= limit:
        place += 1
    return place


# No contraction, here and below: a product is rounded before it is added, as NumPy does it.
@njit(error_model="numpy", cache=True, nogil=True)
def move(both: np.ndarray, far: np.ndarray, change: float, further: float, size: float) -> None:
    """Add to the rows of `both` (3, n), and fill `far` (n,) with the distances."""
    square, to_aim, total = both[0], both[1], both[2]
    for i in range(len(far)):
        square[i] += change
        to_aim[i] += further
        total[i] += size
        inverse = 1 / max(total[i], 1e-12)
        far[i] = (square[i] * inverse - to_aim[i]) * inverse


@interruptible
@njit(error_model="numpy", cache=True, nogil=True)
def compiled_loop(
    labels: np.ndarray,
    each: np.ndarray,
    both: np.ndarray,
    joined: np.ndarray,
    picks: np.ndarray,
    first: bool,
    tie: float,
) -> None:
    """Do what `numpy_loop` of harmony.py does; to the same bits, as labels are whole numbers."""
    square, far = both[0], np.empty_like(both[0])
    lows = np.empty(-(-len(far) // BLOCK))
    move(both, far, 0.0, 0.0, 0.0)
    for place in range(len(picks)):
        best = 0 if first and not place else first_smallest(far, lows, tie)
        change = each[0, best]
        for k in range(len(labels)):
            last = 2 * labels[k, best]
            change += last * joined[k]
            joined[k] += labels[k, best]
            if last:  # most clients have few of the classes
                for i in range(len(far)):
                    square[i] += last * labels[k, i]
        square[best] = np.inf  # taken
        picks[place] = best
        move(both, far, change, each[1, best], each[2, best])
