"""Knobs that change during a run, and what changes them, by the name users give."""

from silograph.control.base import (
    FIXED,
    Controller,
    ControllerState,
    Knob,
    RunStanding,
    knob_fields,
    knob_specs,
    knobs_of,
)
from silograph.control.bound_interval import BOUND_INTERVAL
from silograph.control.ddpg import DDPG, AgentOptions
from silograph.control.loss_interval import LOSS_INTERVAL
from silograph.control.policy import DRAWN, by_policy

CONTROLLERS: dict[str, Controller] = {
    c.name: c for c in (FIXED, DRAWN, DDPG, LOSS_INTERVAL, BOUND_INTERVAL)
}

__all__ = [
    "BOUND_INTERVAL",
    "CONTROLLERS",
    "DDPG",
    "DRAWN",
    "FIXED",
    "LOSS_INTERVAL",
    "AgentOptions",
    "Controller",
    "ControllerState",
    "Knob",
    "RunStanding",
    "by_policy",
    "knob_fields",
    "knob_specs",
    "knobs_of",
]
