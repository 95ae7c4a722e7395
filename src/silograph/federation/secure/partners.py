"""Which silos mask with each other: all pairs, or with 50 silos or more those of a sparse graph.

Bell, Bonawitz, Gascon, Lepoint and Raykova, "Secure single-server aggregation with
(poly)logarithmic overhead", CCS 2020 (SecAgg+). Silos stand on a ring in a pseudorandom order, and
each has the k nearest ones as partners: a Harary graph. The order is a hash of the silos' names and
the sum's name (round, step and op). The server cannot choose it for a sum, but everybody can
compute it in advance.

k is the smallest number for which a threshold holds both with probability 1 - 2^-30 (by a union
bound over all silos): if a third of all silos vanish, enough holders of every silo's shares are
left; and if a tenth of all silos work together with the server, nowhere are there enough of them.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from types import MappingProxyType

SPARSE_FROM = 50  # silos, from which the graph is sparse
VANISHING, COLLUDING = 1 / 3, 1 / 10  # shares of all silos
LEAST_CERTAIN = 2.0**-30


@dataclass(frozen=True)
class Topology:
    """Degree and threshold.

    Attributes:
        partners: k, the number of others with which a silo masks.
        threshold: how many of the k + 1 holders of a silo's shares, itself included, must reveal
            them.
    """

    partners: int
    threshold: int


def threshold_for(holders: int) -> int:
    """Return two thirds of the holders, rounded up: a third may vanish, at least 2 must agree."""
    return max(2, -(-2 * holders // 3))


@lru_cache(maxsize=64)
def topology_of(silos: int) -> Topology:
    """Return degree and threshold for a number of silos."""
    complete = Topology(silos - 1, threshold_for(silos))
    if silos < SPARSE_FROM:
        return complete
    # More partners never make a graph less safe, so bisection finds the least number.
    degrees = range(2, silos - 1, 2)
    place = bisect_left(degrees, True, key=lambda k: _threshold_with(silos, k) is not None)
    if place == len(degrees):
        return complete
    threshold = _threshold_with(silos, degrees[place])
    return complete if threshold is None else Topology(degrees[place], threshold)


def _threshold_with(silos: int, partners: int) -> int | None:
    """Return the largest threshold that is robust, None where that is not safe."""
    thresholds = range(partners, 0, -1)
    place = bisect_left(thresholds, True, key=lambda t: _is_robust(silos, partners, t))
    if place == len(thresholds) or not _is_safe(silos, partners, thresholds[place]):
        return None
    return thresholds[place]


def _is_robust(silos: int, partners: int, threshold: int) -> bool:
    """Whether all shares can be recovered where a third of the silos vanish."""
    vanished = math.floor(silos * VANISHING)
    # A silo that vanishes holds none of its own; so count partners only.
    most = partners - threshold
    return silos * _upper_tail(silos - 1, vanished, partners, most + 1) <= LEAST_CERTAIN


def _is_safe(silos: int, partners: int, threshold: int) -> bool:
    """Whether no silo's colluding partners reach half of what both kinds of shares need.

    A server that told different silos different things would need the threshold twice among the
    k + 1 holders, so colluding ones, which answer twice, must be fewer than 2 threshold - (k + 1).
    """
    colluding = math.floor(silos * COLLUDING)
    needed = 2 * threshold - (partners + 1)
    if needed < 1:
        return False
    return silos * _upper_tail(silos - 1, colluding, partners, needed) <= LEAST_CERTAIN


def _upper_tail(population: int, marked: int, drawn: int, least: int) -> float:
    """Return the probability of at least `least` marked ones among those drawn (hypergeometric)."""
    ways = sum(
        math.comb(marked, k) * math.comb(population - marked, drawn - k)
        for k in range(max(least, 0), min(marked, drawn) + 1)
    )
    return ways / math.comb(population, drawn)


@lru_cache(maxsize=8)  # both ends ask several times in a sum
def partners_of(names: tuple[str, ...], about: bytes) -> Mapping[str, tuple[str, ...]]:
    """Return the partners of each silo, in the order of `names`.

    Args:
        names: of all silos that take part.
        about: the name of the sum.
    """
    topology = topology_of(len(names))
    if topology.partners >= len(names) - 1:
        return MappingProxyType({name: tuple(n for n in names if n != name) for name in names})
    ring = sorted(names, key=lambda name: blake2b(name.encode(), key=about[:64]).digest())
    half, size = topology.partners // 2, len(ring)
    place = {name: i for i, name in enumerate(names)}
    partners = {}
    for i, name in enumerate(ring):
        near = {ring[(i + step) % size] for step in (*range(-half, 0), *range(1, half + 1))}
        partners[name] = tuple(sorted(near, key=place.__getitem__))
    return MappingProxyType({name: partners[name] for name in names})
