"""Uniform selection of a share of the clients."""

from collections.abc import Sequence

import torch

from silograph.core.key import Key, hash_text, signed


def select_uniform(ids: Sequence[str], share: float, key: Key) -> list[str]:
    """Return max(1, round(share * C)) distinct clients, in the order of `ids`.

    The draw of a client depends on its name and not on its position.
    """
    number = max(1, round(share * len(ids)))
    if number == len(ids):
        return list(ids)
    draws = key.uniform(torch.tensor([signed(hash_text(name)) for name in ids]))[:, 0]
    return [ids[p] for p in draws.argsort(stable=True)[:number].sort().values.tolist()]
