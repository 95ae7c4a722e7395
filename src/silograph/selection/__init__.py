"""Which clients take part in a round: the selectors, by the name users give."""

from silograph.selection.base import NoSelectorOptions, RoundFacts, Selector, SelectorState
from silograph.selection.round_robin import ROUND_ROBIN
from silograph.selection.uniform import ALL, UNIFORM

SELECTORS: dict[str, Selector] = {s.name: s for s in (ALL, UNIFORM, ROUND_ROBIN)}

__all__ = [
    "ALL",
    "ROUND_ROBIN",
    "SELECTORS",
    "UNIFORM",
    "NoSelectorOptions",
    "RoundFacts",
    "Selector",
    "SelectorState",
]
