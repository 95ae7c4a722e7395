"""Copies and sums of arrays of one shape, as loops.

An assignment of an array to a slice, `to[:] = of`, would compare the shapes: numba compiles what
builds its message, strings and all, for several seconds.
"""

from silograph.nn.kernels.arrays import Array, compiled


@compiled
def copy(of: Array, to: Array) -> None:
    """Fill `to` (n,) with the first n entries of `of`."""
    for i in range(to.shape[0]):
        to[i] = of[i]


@compiled
def copy_rows(of: Array, to: Array) -> None:
    """Fill `to` (n, d) with the first n rows of `of`."""
    for i in range(to.shape[0]):
        for j in range(to.shape[1]):
            to[i, j] = of[i, j]


@compiled
def add_rows(of: Array, to: Array) -> None:
    """Add `of` (n, d) to the first n rows of `to`."""
    for i in range(of.shape[0]):
        for j in range(of.shape[1]):
            to[i, j] += of[i, j]
