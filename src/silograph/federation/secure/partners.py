"""Which silos mask with each other: all pairs, or with 50 silos or more those of a sparse graph.

Bell, Bonawitz, Gascon, Lepoint and Raykova, "Secure single-server aggregation with
(poly)logarithmic overhead", CCS 2020 (SecAgg+). Silos stand on a ring in a pseudorandom order, and
each has the k nearest ones as partners: a Harary graph. The order is a hash of the silos' names and
a seed. With a secret of the silos the seed is a keyed hash of the sum's name (round, step and op)
and of all names, which are fixed before the server learns the seed (`Prover.order_seed`). So a
server can neither compute the order in advance nor leave silos out to change it. Without a secret
the seed is the sum's name, and everybody can compute the order in advance.

k is the smallest number for which a threshold holds both with probability 1 - 2^-30 (by a union
bound over all silos): if a third of all silos vanish, enough holders of every silo's shares are
left; and if a tenth of all silos work together with the server, nowhere are there enough of them.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping
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
    """Return the least number that is more than two thirds of the holders, and 2 at least.

    Of up to three silos all are needed. Bonawitz et al. 2017 ask for more than two thirds against a
    server that lies (section 6.2): then two thresholds overlap in more than a third of the silos.
    """
    return max(2, 2 * holders // 3 + 1)


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


def is_sparse(silos: int) -> bool:
    """Whether so many silos mask with some partners only."""
    return topology_of(silos).partners < silos - 1


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


def ring_of(names: tuple[str, ...], seed: bytes) -> list[str]:
    """Return the silos in the order in which they stand on the ring."""
    return sorted(names, key=lambda name: blake2b(name.encode(), key=seed[:64]).digest())


def holders_are_present(names: tuple[str, ...], seed: bytes, present: Collection[str]) -> bool:
    """Whether the threshold is met among each present silo and its partners.

    Else a server could cut the graph into parts, by silos on the ring that it calls lost, and
    unmask the sum of one part.
    """
    topology = topology_of(len(names))
    if not is_sparse(len(names)):
        return len(set(present)) >= topology.threshold
    ring, there = ring_of(names, seed), frozenset(present)
    half, size = topology.partners // 2, len(ring)
    near = sum(ring[i % size] in there for i in range(-half, half + 1))
    for i, name in enumerate(ring):
        if name in there and near < topology.threshold:
            return False
        near += (ring[(i + half + 1) % size] in there) - (ring[i - half] in there)
    return True


@lru_cache(maxsize=8)  # both ends ask several times in a sum
def partners_of(names: tuple[str, ...], seed: bytes) -> Mapping[str, tuple[str, ...]]:
    """Return the partners of each silo, in the order of `names`.

    Args:
        names: of all silos of the sum.
        seed: of their order; see `Prover.order_seed`.
    """
    topology = topology_of(len(names))
    if not is_sparse(len(names)):
        return MappingProxyType({name: tuple(n for n in names if n != name) for name in names})
    ring = ring_of(names, seed)
    half, size = topology.partners // 2, len(ring)
    place = {name: i for i, name in enumerate(names)}
    partners = {}
    for i, name in enumerate(ring):
        near = {ring[(i + step) % size] for step in (*range(-half, 0), *range(1, half + 1))}
        partners[name] = tuple(sorted(near, key=place.__getitem__))
    return MappingProxyType({name: partners[name] for name in names})
