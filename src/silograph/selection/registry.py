"""The selectors, by the name that users give: `--selector NAME`."""

from silograph.selection.base import Selector
from silograph.selection.round_robin import ROUND_ROBIN
from silograph.selection.uniform import ALL, UNIFORM

SELECTORS: dict[str, Selector] = {s.name: s for s in (ALL, UNIFORM, ROUND_ROBIN)}
