"""Choosing clients by scores; ties are broken by a draw that belongs to the client's name.

C: clients.
"""

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from silograph.core.key import Key, hash_texts


@lru_cache(maxsize=4)  # of a federation in every round
def name_keys(ids: tuple[str, ...]) -> Tensor:
    """Return what clients' draws are made by, (C,) int64; not to be changed."""
    return hash_texts(ids)


def draws_of(ids: Sequence[str], key: Key) -> Tensor:
    """Return a draw from [0, 1) for each client, (C,) float64, that depends on its name only."""
    return key.uniform(name_keys(tuple(ids)))[:, 0]


def drawn(ids: Sequence[str], number: int, key: Key) -> list[str]:
    """Return `number` distinct clients drawn uniformly, in the order of `ids`."""
    if number >= len(ids):
        return list(ids)
    order = draws_of(ids, key).argsort(stable=True)
    return in_order(ids, order[:number])


def highest(ids: Sequence[str], scores: Tensor, number: int, key: Key) -> list[str]:
    """Return the `number` clients of the highest scores (C,), in the order of `ids`."""
    order = draws_of(ids, key).argsort(stable=True)
    order = order[scores[order].argsort(descending=True, stable=True)]
    return in_order(ids, order[:number])


def race(ids: Sequence[str], weights: Tensor, key: Key) -> Tensor:
    """Return scores (C,) whose `number` highest are a draw in proportion to weights (C,).

    Without replacement, one client after the other; clients of weight 0 come last. Efraimidis and
    Spirakis, "Weighted random sampling with a reservoir", 2006.
    """
    waiting = -draws_of(ids, key).clamp(min=2.0**-54).log()
    return -(waiting / weights.clamp(min=1e-300))


def in_order(ids: Sequence[str], positions: Tensor) -> list[str]:
    """Return the clients at positions (k,), in the order of `ids`."""
    return [ids[p] for p in positions.sort().values.tolist()]
