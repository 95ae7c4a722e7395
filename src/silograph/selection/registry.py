"""The selectors, by the name that users give: `--selector NAME`."""

from silograph.selection.base import ALL, UNIFORM, Selector
from silograph.selection.harmony import HARMONY
from silograph.selection.oort import OORT
from silograph.selection.power_of_choice import POWER_OF_CHOICE
from silograph.selection.round_robin import ROUND_ROBIN
from silograph.selection.ucb import UCB

SELECTORS: dict[str, Selector] = {
    s.name: s for s in (ALL, UNIFORM, ROUND_ROBIN, POWER_OF_CHOICE, OORT, HARMONY, UCB)
}
