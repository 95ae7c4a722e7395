"""Choosing clients by scores; ties are broken by a draw that belongs to the client's name.

Everything here is NumPy: a step on a thousand numbers takes torch ten times as long, most of it
before the first number.

C: clients.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from silograph.core.errors import ProtocolError
from silograph.core.key import Key, hash_texts


@lru_cache(maxsize=4)  # of a federation in every round
def name_keys(ids: tuple[str, ...]) -> np.ndarray:
    """Return what clients' draws are made by, (C,) int64; not to be changed."""
    return hash_texts(ids).numpy()


def draws_of(ids: Sequence[str], key: Key) -> np.ndarray:
    """Return a draw from [0, 1) for each client, (C,) float64, that depends on its name only."""
    return key.draws(name_keys(tuple(ids)))


def drawn(ids: Sequence[str], number: int, key: Key) -> list[str]:
    """Return `number` distinct clients drawn uniformly, in the order of `ids`."""
    if number >= len(ids):
        return list(ids)
    return at(ids, top(-draws_of(ids, key), number))


def highest(ids: Sequence[str], scores: np.ndarray, number: int, key: Key) -> list[str]:
    """Return the `number` clients of the highest scores (C,), none NaN, in the order of `ids`."""
    return at(ids, highest_mask(ids, scores, number, key))


def highest_mask(ids: Sequence[str], scores: np.ndarray, number: int, key: Key) -> np.ndarray:
    """Return who the `number` clients of the highest scores (C,) are, (C,) bool.

    Raises:
        ProtocolError: a score is NaN, or there are fewer clients.
    """
    scores = np.asarray(scores)
    if number > len(scores) or bool(np.isnan(scores).any()):
        raise ProtocolError(
            f"expected scores of at least {number} clients, none of them NaN, got {len(scores)}, "
            f"{int(np.isnan(scores).sum())} of them NaN"
        )
    chosen, equal = _split(scores, number)
    wanted = number - int(chosen.sum())
    if wanted < len(equal):
        equal = equal[top(-draws_of(ids, key)[equal], wanted)]
    chosen[equal] = True
    return chosen


def top(scores: np.ndarray, number: int) -> np.ndarray:
    """Return where the `number` highest of scores (n,) are, (n,) bool; the first of equals."""
    chosen, equal = _split(scores, number)
    chosen[equal[: number - int(chosen.sum())]] = True
    return chosen


def _split(scores: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return who is above the `number`-th highest score, (n,) bool, and positions of its equals."""
    if not number:
        return np.zeros(len(scores), dtype=bool), np.empty(0, dtype=np.int64)
    least = np.partition(scores, -number)[-number]
    return scores > least, (scores == least).nonzero()[0]


def race(ids: Sequence[str], weights: np.ndarray, key: Key) -> np.ndarray:
    """Return scores (C,) whose `number` highest are a draw in proportion to weights (C,).

    Without replacement, one client after the other; clients of weight 0 come last. Efraimidis and
    Spirakis, "Weighted random sampling with a reservoir", 2006.
    """
    waiting = torch.from_numpy(np.maximum(draws_of(ids, key), 2.0**-54)).log().numpy()
    found: np.ndarray = waiting / np.maximum(weights, 1e-300)
    return found


def at(ids: Sequence[str], chosen: np.ndarray) -> list[str]:
    """Return the chosen clients (C,) bool, in the order of `ids`."""
    return [ids[p] for p in chosen.nonzero()[0].tolist()]
