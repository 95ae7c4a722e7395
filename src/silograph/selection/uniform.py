"""All clients, or a share of them that is drawn uniformly."""

from collections.abc import Sequence

from silograph.core.key import Key
from silograph.selection.base import Selector, SelectorState
from silograph.selection.options import AllOptions, UniformOptions
from silograph.selection.ranking import drawn


def select_uniform(ids: Sequence[str], share: float, key: Key) -> list[str]:
    """Return max(1, round(share * C)) distinct clients, in the order of `ids`.

    The draw of a client depends on its name and not on its position.
    """
    return drawn(ids, max(1, round(share * len(ids))), key)


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
ALL = Selector("all", "all clients", AllOptions, draw_all)
