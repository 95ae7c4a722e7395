"""Values as whole numbers modulo 2^64, which add up to the same sum in any order.

A value x of a field is round(x * 2^bits). `bits` follows from a bound that is declared for the
field and from the number of silos C, so that no sum can overflow:

    C * bound * weight * 2^bits < 2^63

Both ends derive it from the same facts, so it is not sent. A value beyond its bound is refused when
it is encoded. It is not clipped, because a clipped sum would be wrong without a sign of it.

Bounds are chosen so that rounding stays below that of float32 for the weights of a model. With 10
silos a weighted value is exact to 2^-24, and the mean is that divided by the number of nodes.

Statistics of columns have no bound that is known before: a column may hold Unix times or shares of
a millionth. Their sums are split into limbs, whole numbers of `LIMB_BITS` binary digits each, as in
a superaccumulator (Kulisch, "Computer arithmetic and validity", 2008). The sum is exact for values
from 2^-200 to 2^119, and rounded once.
"""

import math
from dataclasses import dataclass

import numpy as np

from silograph.core.errors import ProtocolError, mistake
from silograph.core.kinds import Kind

RING_BITS = 64
MOST_WEIGHT = 2.0**24  # training nodes of a silo, by which its values are weighted
MOST_WEIGHTED = 2.0**12  # a value of which a mean is taken, such as a weight of a model
MOST_SUMMED = 2.0**14  # a value of a sum, such as a gradient
MOST_COUNTED = 2.0**32  # a sum over the nodes of a silo, such as that of their losses
MOST_INTEGER = 2.0**40  # an integer; those of counts are below 2^31
LIMBS, LIMB_BITS = 8, 40  # of a statistic; the lowest limb counts 2^-LOWEST
LOWEST = 200
MOST_STATISTIC = 2.0 ** (LIMBS * LIMB_BITS - LOWEST - 1)


@dataclass(frozen=True)
class FixedPoint:
    """How the values of one field are encoded.

    Attributes:
        bits: digits after the binary point; 0 for integers.
        bound: the largest absolute value before it is weighted.
        is_weighted: whether each value is multiplied by the silo's weight.
        limbs: how many numbers stand for each value, the lowest first.
    """

    bits: int
    bound: float
    is_weighted: bool = False
    limbs: int = 1


STATISTIC = FixedPoint(LOWEST, MOST_STATISTIC, limbs=LIMBS)


def fixed_point_of(kind: Kind, *, is_float: bool, is_weighted: bool, clients: int) -> FixedPoint:
    """Return how a field is encoded.

    Args:
        kind: of the reply.
        is_float: whether it has floating point values; integers and booleans stay exact.
        is_weighted: whether a weighted mean is taken of it.
        clients: C, all clients of the federation.
    """
    if not is_float and not is_weighted:
        return FixedPoint(0, MOST_INTEGER)
    if kind is Kind.STATISTICS and not is_weighted:
        return STATISTIC
    bound = MOST_COUNTED if kind is Kind.EVALUATION else MOST_SUMMED
    if is_weighted:
        bound = MOST_WEIGHTED
    most = bound * (MOST_WEIGHT if is_weighted else 1.0) * clients
    return FixedPoint(RING_BITS - 1 - math.ceil(math.log2(most + 1)), bound, is_weighted)


def encode(values: np.ndarray, form: FixedPoint, weight: float = 1.0, name: str = "") -> np.ndarray:
    """Return one silo's values as uint64, of the same shape, or with a last dimension of limbs.

    Args:
        values: floats, integers or booleans.
        form: of the field.
        weight: of the silo; with weight 0 it adds nothing, even where a value is NaN.
        name: of the field, for the error.

    Raises:
        ProtocolError: a value beyond its bound, or a weight beyond `MOST_WEIGHT`.
    """
    if form.is_weighted and weight == 0:
        return np.zeros(values.shape, np.uint64)
    _check(_largest(values), form.bound, name)
    if values.dtype.kind != "f" and not form.is_weighted:
        return values.astype(np.int64).view(np.uint64)
    if form.limbs > 1:
        return _split(values.astype(np.float64))
    factor = 2.0**form.bits
    if form.is_weighted:
        _check(weight, MOST_WEIGHT, f"weight of {name}")
        factor *= weight
    # One product in float64, with the rounding of value * weight: the other factor is a power of 2.
    scaled = np.empty(values.shape)  # of a single number, too, the product must be an array
    np.multiply(values, factor, out=scaled, dtype=np.float64)
    return np.rint(scaled, out=scaled).astype(np.int64).view(np.uint64)


def _largest(values: np.ndarray) -> float:
    """Return the largest absolute value, NaN if there is one."""
    if not values.size:
        return 0.0
    return max(float(values.max()), -float(values.min()), key=lambda v: (v != v, v))


def _check(largest: float, bound: float, name: str) -> None:
    """Raise `ProtocolError` for a value beyond a bound, NaN included."""
    if not largest <= bound:
        raise ProtocolError(
            f"expected values of {name!r} within {bound:g} for secure aggregation, got "
            "others: lower the learning rate if training diverges, scale columns of huge numbers, "
            "else leave secure_aggregation out",
            **mistake("field-out-of-bounds", name, "secure aggregation"),
        )


def _split(values: np.ndarray) -> np.ndarray:
    """Return the limbs of float64 values, (..., LIMBS) uint64; they all have the value's sign."""
    limbs = np.empty((*values.shape, LIMBS))
    remainder = values.copy()
    for place in range(LIMBS - 1, -1, -1):
        unit = 2.0 ** (LIMB_BITS * place - LOWEST)
        # Exact but in the lowest limb: of a float64 both parts are float64, too.
        limbs[..., place] = np.trunc(remainder / unit) if place else np.rint(remainder / unit)
        remainder -= limbs[..., place] * unit
    return limbs.astype(np.int64).view(np.uint64)


def _join(limbs: np.ndarray) -> np.ndarray:
    """Return the sums (...) float64 of limbs (..., LIMBS) int64."""
    rows = limbs.reshape(-1, LIMBS).tolist()
    sums = [sum(part << LIMB_BITS * k for k, part in enumerate(row)) for row in rows]
    # Dividing integers rounds once, to the nearest float64.
    joined = [number / (1 << LOWEST) for number in sums]
    return np.array(joined, np.float64).reshape(limbs.shape[:-1])


def sum_exactly(values: np.ndarray) -> np.ndarray:
    """Return the sum of statistics (C, ...) over clients as secure sums have it, float64."""
    parts = encode(values, STATISTIC)
    return decode(np.add.reduce(parts, axis=0, dtype=np.uint64), STATISTIC)


def decode(total: np.ndarray, form: FixedPoint) -> np.ndarray:
    """Return sums: int64 of fields with `bits` 0, else float64."""
    signed = total.view(np.int64)
    if form.limbs > 1:
        return _join(signed)
    return signed if form.bits == 0 else signed.astype(np.float64) * 2.0**-form.bits
