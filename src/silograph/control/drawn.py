"""Knobs that are drawn anew for every round, alike over their ranges: what an agent has to beat."""

from collections.abc import Mapping

from torch import Tensor

from silograph.control.base import Controller, ControllerState, Knobs, RunStanding
from silograph.control.ddpg import action_size, to_knobs
from silograph.core.key import Key


def propose(
    options: object, knobs: Knobs, state: ControllerState, standing: RunStanding, key: Key
) -> Mapping[str, Tensor]:
    """Return values by chance."""
    del options, state
    action = key.fold("drawn").matrix(1, action_size(knobs, standing.clients))[0]
    return to_knobs(knobs, action, standing.clients)


DRAWN = Controller("drawn", "knobs are drawn anew for every round", propose)
