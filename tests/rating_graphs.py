"""Small generated rating graphs that tests share."""

from pathlib import Path
from typing import Any

import numpy as np

from silograph.graph.graph import Graph
from silograph.graph.read.ratings import ratings


def drawn(
    users: int = 20, items: int = 30, count: int = 200, categories: int = 6, *, seed: int = 0
) -> dict[str, Any]:
    """Return distinct pairs with ratings of users and items that differ, categories and times."""
    rng = np.random.default_rng(seed)
    pair = rng.permutation(users * items)[:count]
    user, item = pair // items, pair % items
    taste, worth = rng.normal(size=users), rng.normal(size=items)
    value = 3 + 0.7 * taste[user] + 0.7 * worth[item] + 0.2 * rng.normal(size=count)
    table = np.stack([user + 100, item + 500, value.round().clip(1, 5)], axis=1)
    rated = np.unique(user) + 100
    trust = rng.choice(rated, size=(3 * users, 2))
    return {
        "ratings": table,
        "trust": trust,
        "categories": np.array([f"kind {code}" for code in item % categories]),
        "times": rng.integers(0, 50, count),
    }


def rating_graph(*args: int, **options: int) -> Graph:
    """Return the graph of `drawn`."""
    return ratings(**drawn(*args, **options))


def write_ratings(folder: Path, *args: int, **options: int) -> None:
    """Write the ratings and the trust of `drawn` as the tables of a folder."""
    folder.mkdir()
    made = drawn(*args, **options)
    for name, header in (("ratings", "user,item,rating"), ("trust", "truster,trustee")):
        rows = "".join(",".join(f"{cell:g}" for cell in row) + "\n" for row in made[name])
        (folder / f"{name}.csv").write_text(f"{header}\n{rows}", encoding="utf-8")
