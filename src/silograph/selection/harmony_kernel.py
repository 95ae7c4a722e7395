"""The loop of `silograph.selection.harmony`, compiled."""

import numpy as np
from numba import njit


# These flags let the smallest be looked for in any order, which has the same result.
@njit(error_model="numpy", cache=True, nogil=True, fastmath={"nnan", "nsz"})
def smallest(values: np.ndarray) -> float:
    """Return the smallest of values (n,), none of them NaN."""
    found = np.inf
    for i in range(len(values)):
        found = min(found, values[i])
    return found


# No contraction: a product is rounded before it is added, as NumPy does it.
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
    square, to_aim, total = both[0], both[1], both[2]
    far = np.empty_like(square)
    for place in range(len(picks)):
        best = 0
        if place or not first:
            for i in range(len(far)):
                inverse = 1 / max(total[i], 1e-12)
                far[i] = (square[i] * inverse - to_aim[i]) * inverse
            limit = smallest(far) + tie
            while best < len(far) - 1 and not far[best] <= limit:
                best += 1
        change, further, size = each[0, best], each[1, best], each[2, best]
        for k in range(len(labels)):
            last = 2 * labels[k, best]
            change += last * joined[k]
            joined[k] += labels[k, best]
            if last:  # most clients have few of the classes
                for i in range(len(far)):
                    square[i] += last * labels[k, i]
        for i in range(len(far)):
            square[i] += change
            to_aim[i] += further
            total[i] += size
        square[best] = np.inf  # taken
        picks[place] = best
