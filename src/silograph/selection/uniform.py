"""All clients, or a share of them that is drawn uniformly."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from silograph.core.key import Key, hash_text, signed
from silograph.selection.base import NoSelectorOptions, Selector, SelectorState
from silograph.selection.options import UniformOptions


def select_uniform(ids: Sequence[str], share: float, key: Key) -> list[str]:
    """Return max(1, round(share * C)) distinct clients, in the order of `ids`.

    The draw of a client depends on its name and not on its position.
    """
    number = max(1, round(share * len(ids)))
    if number == len(ids):
        return list(ids)
    draws = key.uniform(name_keys(tuple(ids)))[:, 0]
    return [ids[p] for p in draws.argsort(stable=True)[:number].sort().values.tolist()]


@lru_cache(maxsize=4)  # of a federation in every round
def name_keys(ids: tuple[str, ...]) -> Tensor:
    """Return what clients' draws are made by, (C,) int64; not to be changed."""
    return torch.tensor([signed(hash_text(name)) for name in ids])


def draw_uniform(
    ids: Sequence[str], options: UniformOptions, state: SelectorState, t: int, key: Key
) -> list[str]:
    """Return a share of the clients; see `select_uniform`."""
    del state, t
    return select_uniform(ids, options.participation, key)


def draw_all(
    ids: Sequence[str], options: object, state: SelectorState, t: int, key: Key
) -> list[str]:
    """Return all clients."""
    del options, state, t, key
    return list(ids)


UNIFORM = Selector("uniform", "a share of the clients, drawn anew", UniformOptions, draw_uniform)
ALL = Selector("all", "all clients", NoSelectorOptions, draw_all)
