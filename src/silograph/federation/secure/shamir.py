"""Shares of a secret: any `threshold` of them reveal it, and fewer reveal nothing.

Shamir, "How to share a secret", Communications of the ACM 1979. A secret is the value at 0 of a
random polynomial of degree threshold - 1 over the integers modulo a prime; a share is its value at
the point of the silo that holds it.

Coefficients to recover a secret depend on the points only. They are computed once for all secrets
that the same silos hold shares of, so a hundred silos' secrets take milliseconds.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence

PRIME = 2**255 - 19
BYTES = 32  # of a secret and of a share


def new_secret() -> int:
    """Return a uniformly random secret."""
    return secrets.randbelow(PRIME)


def split_secret(
    secret: int,
    threshold: int,
    points: Sequence[int],
    random_below: Callable[[int], int] = secrets.randbelow,
) -> dict[int, int]:
    """Return the share of each point.

    Args:
        secret: from 0 to PRIME - 1.
        threshold: number of shares that reveal the secret.
        points: different numbers from 1.
        random_below: draws from 0 to its argument - 1.

    Raises:
        ValueError: fewer points than the threshold, or points that are not valid.
    """
    if not 1 <= threshold <= len(set(points)) == len(points) or min(points) < 1:
        raise ValueError(f"threshold {threshold} for points {list(points)}")
    coefficients = [secret, *(random_below(PRIME) for _ in range(threshold - 1))]
    shares = {}
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):  # Horner
            value = (value * point + coefficient) % PRIME
        shares[point] = value
    return shares


def lagrange_coefficients(points: Sequence[int]) -> dict[int, int]:
    """Return the factor of each share in the sum that gives the secret."""
    coefficients = {}
    for own in points:
        numerator, denominator = 1, 1
        for other in points:
            if other != own:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - own) % PRIME
        coefficients[own] = numerator * pow(denominator, -1, PRIME) % PRIME
    return coefficients


def recover_secret(shares: Mapping[int, int], coefficients: Mapping[int, int]) -> int:
    """Return the secret of shares by their points; `coefficients` are of some of these points."""
    return sum(shares[point] * c for point, c in coefficients.items()) % PRIME


def to_bytes(value: int) -> bytes:
    """Return a secret or a share as bytes."""
    return value.to_bytes(BYTES, "little")


def from_bytes(data: bytes) -> int:
    """Return the secret or the share of bytes; raise `ValueError` where they are none."""
    value = int.from_bytes(data, "little")
    if len(data) != BYTES or value >= PRIME:
        raise ValueError("no element of the field")
    return value
