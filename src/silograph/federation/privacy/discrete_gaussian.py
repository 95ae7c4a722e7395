"""Integers of the discrete Gaussian distribution, drawn from a keyed stream.

Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020: integer
noise whose probability at y is proportional to exp(-y^2 / (2 sigma^2)). It has the guarantee of the
continuous Gaussian (their theorem 4), and no floating-point noise whose digits reveal the value it
hides (Mironov, "On significance of the least significant bits for differential privacy", CCS 2012).

As in their algorithm 3 proposals are rejected, but all proposals of an array at once. A proposal is
y = +-(t v + u) from random bits alone: u uniform below t, a power of two near sigma, and v with
probability 2^-(v + 1). It is accepted with probability 2^v exp(-y^2 / (2 sigma^2) - c), at most 1.
A decision in float64 that rounding could change is made again with 50 digits, so the distribution
is exact to 2^-63 for each proposal.

The stream is SHAKE256 (FIPS 202) of a key, so the same key gives the same noise everywhere.
"""

import math
from decimal import Decimal, localcontext
from hashlib import shake_256

import numpy as np

MOST_SIGMA = 2**36
MOST_WORDS = 2**16  # proposals at once
CLOSE = 2.0**-46  # above the rounding error of a probability in float64
DIGITS = 50


def draw_discrete_gaussian(seed: bytes, sigma: int, count: int) -> np.ndarray:
    """Return `count` values (count,) int64 of the discrete Gaussian distribution around 0.

    Args:
        seed: of the stream; whoever knows it knows the values.
        sigma: scale, from 1 to `MOST_SIGMA`. The standard deviation is slightly less.
        count: number of values.

    Raises:
        ValueError: a scale out of range.
    """
    if not 1 <= sigma <= MOST_SIGMA:
        raise ValueError(f"expected a scale from 1 to 2^36, got {sigma}")
    bits_of_u = round(math.log2(sigma))
    # 2^v <= 2^(|y| / t), whose product with the density is largest at |y| = sigma^2 ln 2 / t.
    log_bound = (sigma * math.log(2) / 2**bits_of_u) ** 2 / 2 + 2.0**-40
    parts, missing, block = list[np.ndarray](), count, 0
    num_proposals = min(MOST_WORDS, 2 * count + 64)  # two for each value are mostly enough
    while missing > 0:
        words = _words(seed, block, num_proposals)
        values = _accepted(words[0::2], words[1::2], sigma, bits_of_u, log_bound)[:missing]
        parts.append(values)
        missing -= len(values)
        block += 1
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _words(seed: bytes, block: int, proposals: int) -> np.ndarray:
    """Return the words (2 proposals,) uint64 of a block of the stream."""
    stream = shake_256(b"silograph noise 1\0" + block.to_bytes(8, "little") + seed)
    return np.frombuffer(stream.digest(16 * proposals), "<u8")


def _accepted(
    proposals: np.ndarray, uniform: np.ndarray, sigma: int, bits_of_u: int, log_bound: float
) -> np.ndarray:
    """Return the accepted values of random words, two (n,) uint64, in their order."""
    is_negative = (proposals & np.uint64(1)).astype(bool)
    u = ((proposals >> np.uint64(1)) & np.uint64(2**bits_of_u - 1)).astype(np.int64)
    high_bits = proposals >> np.uint64(1 + bits_of_u)
    lowest_zero = ~high_bits & (high_bits + np.uint64(1))  # 2^v, where v ones end the word
    v = np.log2(lowest_zero.astype(np.float64)).astype(np.int64)
    size = (v << bits_of_u) + u
    y = size.astype(np.float64)
    chance = np.exp2(v.astype(np.float64)) * np.exp(-y * y / (2.0 * sigma * sigma) - log_bound)
    draw = uniform.astype(np.float64) * 2.0**-64
    accepted = draw < chance
    for place in np.flatnonzero(np.abs(draw - chance) < CLOSE).tolist():
        exact = _exact_chance(int(size[place]), int(v[place]), sigma, log_bound)
        accepted[place] = int(uniform[place]) < exact
    accepted &= ~(is_negative & (size == 0))  # 0 has one sign only
    return np.where(is_negative, -size, size)[accepted]


def _exact_chance(size: int, v: int, sigma: int, log_bound: float) -> int:
    """Return the probability of acceptance times 2^64, rounded down."""
    with localcontext() as context:
        context.prec = DIGITS
        exponent = Decimal(size * size) / Decimal(2 * sigma * sigma) + Decimal(log_bound)
        return int(Decimal(2) ** (64 + v) * (-exponent).exp())
