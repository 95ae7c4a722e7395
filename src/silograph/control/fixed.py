"""Knobs that stay what the options say."""

from collections.abc import Mapping

from torch import Tensor

from silograph.control.base import Controller, ControllerState, Knobs, RunStanding
from silograph.core.key import Key


def propose(
    options: object, knobs: Knobs, state: ControllerState, standing: RunStanding, key: Key
) -> Mapping[str, Tensor]:
    """Return the first values."""
    del options, state, key
    return {knob.name: knob.constant(knob.start, standing.clients) for knob in knobs}


FIXED = Controller("fixed", "knobs stay what the options say", propose)
