"""Compiled functions read tuples through pointers, and leave out code for members that are None."""

from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("numba")

import numba

from silograph.core.numba_extensions import SelfContained, copied, keep_until_here, pointer_to


class Inner(NamedTuple):
    left: np.ndarray
    right: np.ndarray


class Outer(NamedTuple):
    inner: Inner
    scale: float
    extra: np.ndarray | None


def add_up(of: Any) -> float:
    total = of.scale * (of.inner.left[0] + of.inner.right[0])
    if of.extra is not None:
        total += of.extra[0] + of.extra.shape[0]
    return float(total)


add_copied = copied(add_up, {})


@numba.njit(pipeline_class=SelfContained)
def sum_of(of: Any) -> float:
    return add_copied(pointer_to(of))


@numba.njit(pipeline_class=SelfContained)
def sum_of_new(size: int) -> float:
    inner = Inner(np.ones(size), np.full(size, 2.0))
    total = 0.0
    for _ in range(3):
        total += add_copied(pointer_to(Outer(inner, 0.5, inner.left)))
    keep_until_here(inner)
    return total


def test_members_are_read_through_a_pointer() -> None:
    inner = Inner(np.array([3.0]), np.array([4.0]))
    assert sum_of(Outer(inner, 2.0, np.array([1.0, 5.0]))) == 2 * 7 + 1 + 2
    assert sum_of_new(1000) == 3 * (1.5 + 1 + 1000)


def test_code_for_a_member_that_is_none_is_left_out() -> None:
    """It would not compile: None has no elements."""
    inner = Inner(np.array([3.0]), np.array([4.0]))
    assert sum_of(Outer(inner, 2.0, None)) == 14


def test_a_misspelled_member_is_an_error() -> None:
    @numba.njit(pipeline_class=SelfContained)
    def misspelled(of: Any) -> float:
        return float(pointer_to(of).scales)

    with pytest.raises(numba.TypingError, match="Unknown attribute 'scales'"):
        misspelled(Outer(Inner(np.ones(1), np.ones(1)), 2.0, None))
