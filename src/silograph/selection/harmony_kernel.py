"""The loop of `silograph.selection.harmony`, compiled."""

import numpy as np
from numba import njit

from silograph.core.compiling import kept_on_disk

BLOCK = 64  # clients whose smallest value is kept, so that a search looks into one block only


# These flags let the smallest be looked for in any order, which has the same result.
@njit(error_model="numpy", nogil=True, fastmath={"nnan", "nsz"})
def smallest(values: np.ndarray) -> float:
    """Return the smallest of values (n,), none of them NaN."""
    least = np.inf
    for i in range(len(values)):
        least = min(least, values[i])
    return least


@njit(error_model="numpy", nogil=True)
def first_smallest(values: np.ndarray, lows: np.ndarray, tie: float) -> int:
    """Return the position of the first value (n,) within `tie` of the smallest.

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
    position = block * BLOCK
    while position < len(values) - 1 and not values[position] <= limit:
        position += 1
    return position


# No contraction, here and below: a product is rounded before it is added, as NumPy does it.
@njit(error_model="numpy", nogil=True)
def move(
    joint_terms: np.ndarray,
    distance: np.ndarray,
    change: float,
    to_aim_change: float,
    total_change: float,
) -> None:
    """Add to the rows of `both` (3, n), and fill `far` (n,) with the distances."""
    square, to_aim, total = joint_terms[0], joint_terms[1], joint_terms[2]
    for i in range(len(distance)):
        square[i] += change
        to_aim[i] += to_aim_change
        total[i] += total_change
        inverse = 1 / max(total[i], 1e-12)
        distance[i] = (square[i] * inverse - to_aim[i]) * inverse


@kept_on_disk
@njit(error_model="numpy", cache=True, nogil=True)
def compiled_loop(
    labels: np.ndarray,
    own_terms: np.ndarray,
    joint_terms: np.ndarray,
    joined: np.ndarray,
    picks: np.ndarray,
    first: bool,
    tie: float,
) -> None:
    """Do what `numpy_loop` of harmony.py does; to the same bits, as labels are whole numbers."""
    square, distance = joint_terms[0], np.empty_like(joint_terms[0])
    lows = np.empty(-(-len(distance) // BLOCK))
    move(joint_terms, distance, 0.0, 0.0, 0.0)
    for position in range(len(picks)):
        best = 0 if first and not position else first_smallest(distance, lows, tie)
        change = own_terms[0, best]
        for k in range(len(labels)):
            last = 2 * labels[k, best]
            change += last * joined[k]
            joined[k] += labels[k, best]
            if last:  # most clients have few of the classes
                for i in range(len(distance)):
                    square[i] += last * labels[k, i]
        square[best] = np.inf  # taken
        picks[position] = best
        move(joint_terms, distance, change, own_terms[1, best], own_terms[2, best])
