"""Columns of text or numbers turned into typed columns; every reader uses these rules.

n: nodes. F: features a node.
"""

import numpy as np


def compact_features(values: np.ndarray) -> np.ndarray:
    """Return numbers as float32 where that holds every one of them exactly, else as float64.

    Unix times, amounts in cents and 0.1 stay exactly what they are; words, counts, pixels and
    whatever came in float32 take half the memory. The rule looks at each number by itself, so that
    a row has the same values whichever other rows are read beside it.

    >>> compact_features(np.array([0.5, 3.0])).dtype, compact_features(np.array([1.7e9 + 1])).dtype
    (dtype('float32'), dtype('float64'))

    Args:
        values: numbers of any shape and dtype.

    Returns:
        A copy; what float32 cannot hold at all is infinite.
    """
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if values.dtype.kind == "b" or (values.dtype.kind == "f" and values.dtype.itemsize <= 4):
        return narrow
    wide = values.astype(np.float64)
    # Readers refuse what is not finite in float32, whatever the other values are.
    return narrow if bool((narrow == wide).all()) or not np.isfinite(narrow).all() else wide
