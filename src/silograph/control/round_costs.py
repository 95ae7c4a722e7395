"""What exchanges and all else cost in a round, and the interval that a limit of bytes allows.

If a run has a limit of bytes, an interval is the least from the controller's own on with which what
is left lasts to the last round. The estimate takes the cost of an exchange from the last round, and
what else a round costs from the mean of all, since only some are scored. By how much the dearest
round exceeds that mean is set aside, since the last round is scored. Before a round has been scored
that is not known, so a limit can be exceeded by what scoring costs.

State between rounds, each a () float64, all but the last in bytes:

    bytes      the ledger's total
    fixed      mean of a round without exchanges
    dear       largest of a round without exchanges
    exchange   one exchange of the last round, at all clients
    batches    how many the last round had
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from silograph.control.base import ControllerState, Knob, RunStanding

ROW_BYTES, EXCHANGES, BATCHES = "row_bytes", "exchanges", "batches"  # facts of a round


def no_costs(standing: RunStanding) -> ControllerState:
    """Return the costs before the first round, which has nothing to do with those of set-up."""
    return _tensors({"bytes": standing.bytes, "fixed": 0, "dear": 0, "exchange": 0, "batches": 0})


def costs_after(
    state: ControllerState, standing: RunStanding, facts: Mapping[str, float]
) -> ControllerState:
    """Return the costs with one more round's."""
    rows, times = facts.get(ROW_BYTES, 0.0), facts.get(EXCHANGES, 0.0)
    mean, now = float(state["fixed"]), standing.bytes - float(state["bytes"]) - rows
    return _tensors(
        {
            "bytes": standing.bytes,
            "fixed": mean + (now - mean) / max(standing.round, 1),
            "dear": max(float(state["dear"]), now),
            "exchange": rows / max(times, 1),
            "batches": facts.get(BATCHES, 0.0),
        }
    )


def affordable(knob: Knob, wanted: float, state: ControllerState, standing: RunStanding) -> Tensor:
    """Return the least interval from `wanted` on that the bytes left allow, as the knob has it.

    It is the largest of the knob where no interval suffices. `wanted` may be 0: silos may report a
    loss of 0.
    """
    least = max(1, math.ceil(min(wanted, knob.high)))
    return knob.constant(_interval(least, int(knob.high), state, standing), standing.clients)


def _interval(tau: int, most: int, state: ControllerState, standing: RunStanding) -> int:
    """Return the least interval from `tau` on that the bytes left allow; `most` if none does."""
    batches, each = float(state["batches"]), float(state["exchange"])
    left, rounds = standing.bytes_left, standing.rounds_left
    if left is None or not rounds or not batches or not each:
        return tau
    fixed = float(state["fixed"])
    times = ((left - (float(state["dear"]) - fixed)) / rounds - fixed) / each
    if times >= math.ceil(batches / tau):
        return tau
    return max(tau, math.ceil(batches / math.floor(times))) if times >= 1 else most


def _tensors(numbers: Mapping[str, float]) -> ControllerState:
    return {name: torch.tensor(float(n), dtype=torch.float64) for name, n in numbers.items()}
