"""Laws of fixed point: sums have no order, are exact to rounding, and never leave the ring."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mistakes import raises_code
from silograph.core.errors import ProtocolError
from silograph.core.kinds import Kind
from silograph.federation.secure.fixed_point import (
    LOWEST,
    MOST_STATISTIC,
    MOST_WEIGHT,
    STATISTIC,
    FixedPoint,
    decode,
    encode,
    fixed_point_of,
    sum_exactly,
)

NAN = float("nan")


def form(kind: Kind = Kind.WEIGHTS, *, clients: int = 10, weighted: bool = True) -> FixedPoint:
    return fixed_point_of(kind, is_float=True, is_weighted=weighted, clients=clients)


@given(
    arrays(np.float32, (4, 6), elements=st.floats(-4096, 4096, width=32)),
    st.lists(st.integers(0, 2**24), min_size=4, max_size=4),
)
def test_a_weighted_sum_is_the_oracles_to_rounding(values: np.ndarray, weights: list[int]) -> None:
    own = form(clients=4)
    parts = [encode(v, own, n) for v, n in zip(values, weights, strict=True)]
    total = decode(np.add.reduce(parts, axis=0, dtype=np.uint64), own)
    exact = (values.astype(np.longdouble) * np.array(weights)[:, None]).sum(0)
    assert np.abs(total - exact).max() <= len(parts) * 2.0 ** -(own.bits + 1) + 1e-15 * np.abs(
        exact
    ).max(initial=0)
    backwards = np.add.reduce(parts[::-1], axis=0, dtype=np.uint64)
    np.testing.assert_array_equal(decode(backwards, own), total)


@pytest.mark.parametrize("clients", [1, 2, 3, 10, 100, 10_000])
@pytest.mark.parametrize("kind", [Kind.WEIGHTS, Kind.GRADIENTS, Kind.EVALUATION])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_largest_sum_fits(clients: int, kind: Kind, weighted: bool) -> None:
    own = form(kind, clients=clients, weighted=weighted)
    weight = MOST_WEIGHT if weighted else 1.0
    for sign in (1, -1):
        part = int(encode(np.array([sign * own.bound]), own, weight).view(np.int64)[0])
        assert abs(part * clients) < 2**63
    assert own.bits >= 8


def test_integers_and_booleans_are_exact() -> None:
    own = fixed_point_of(Kind.WEIGHTS, is_float=False, is_weighted=False, clients=3)
    parts = [np.array([2**31 - 1, -5]), np.array([7, -(2**31)]), np.array([True, False])]
    total = decode(np.add.reduce([encode(p, own) for p in parts], axis=0, dtype=np.uint64), own)
    assert total.tolist() == [2**31 + 7, -5 - 2**31]
    assert total.dtype == np.int64


def test_values_beyond_their_bound_are_refused_and_those_without_weight_are_out() -> None:
    own = form()
    for bad in (own.bound * 1.01, -own.bound * 1.01, NAN, float("inf")):
        with raises_code(ProtocolError, "field-out-of-bounds", field="weights/w"):
            encode(np.array([0.0, bad]), own, 3.0, "weights/w")
        assert not encode(np.array([0.0, bad]), own, 0.0, "weights/w").any()
    with raises_code(ProtocolError, "field-out-of-bounds", field="weight of n"):
        encode(np.zeros(1), own, MOST_WEIGHT + 1, "n")


@given(
    arrays(
        np.float64,
        (5, 3),
        elements=st.floats(-1e35, 1e35, allow_subnormal=False)
        | st.floats(-1, 1)
        | st.sampled_from([0.0, 1e-30, 1.7e9, 2.0**118, -(2.0**118)]),
    )
)
def test_sums_of_statistics_are_exact_and_rounded_once(values: np.ndarray) -> None:
    """Also of columns of Unix times and of tiny shares; the oracle adds fractions."""
    got = sum_exactly(values)
    for column in range(values.shape[1]):
        exact = sum((Fraction(v) for v in values[:, column].tolist()), Fraction(0))
        assert abs(got[column] - float(exact)) <= 5 * 2.0 ** -(LOWEST + 1)
    np.testing.assert_array_equal(sum_exactly(values[::-1]), got)
    one = sum_exactly(values[:1])
    np.testing.assert_array_equal(np.where(np.abs(one) < 2.0**-140, values[0], one), values[0])


def test_statistics_beyond_their_bound_are_refused() -> None:
    own = fixed_point_of(Kind.STATISTICS, is_float=True, is_weighted=False, clients=3)
    assert own is STATISTIC
    for bad in (MOST_STATISTIC * 1.01, NAN, float("inf")):
        with raises_code(ProtocolError, "field-out-of-bounds", field="total/features"):
            encode(np.array([0.0, bad]), own, name="total/features")


def test_a_single_number_is_encoded_as_others_are() -> None:
    own = form()
    for value in (np.float32(0.7), np.float64(-3.25)):
        whole = encode(np.array([value]), own, 7.0)
        assert encode(np.array(value), own, 7.0).item() == whole.item()
        assert decode(whole, own).item() == pytest.approx(7 * float(value), abs=2.0**-own.bits)
